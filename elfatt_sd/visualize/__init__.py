"""See inside a patched run: which tokens merge, which keys a query saw, agents, blocks, and the error of a layer.

    elfatt_sd.apply_patch(pipe, "elfatt")
    with watch(pipe) as looks:
        image = pipe("a red star").images[0]
    for look in looks:
        draw(look, image).savefig(f"step-{look.step + 1}.png")

Everything is found through `elfatt_sd.methods.Attention`, so that an attention of your own is shown as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elfatt_sd.visualize.drawing import draw
    from elfatt_sd.visualize.looks import Grouping, Heads, Look, watch

__all__ = ["Grouping", "Heads", "Look", "draw", "watch"]

if not TYPE_CHECKING:  # matplotlib and PyTorch wait until a name is used

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'elfatt_sd.visualize' has no attribute {name!r}")
        return getattr(importlib.import_module(f"elfatt_sd.visualize.{'drawing' if name == 'draw' else 'looks'}"), name)
