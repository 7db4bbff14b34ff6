"""elfatt-sd: faster Stable Diffusion without training.

Names are loaded on first use, so that `import elfatt_sd` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elfatt_sd.allocation import keep_freed_memory
    from elfatt_sd.config import METHODS, ElfattError, PatchConfig, Phase
    from elfatt_sd.patch import apply_patch, patched, plan, remove_patch
    from elfatt_sd.pipelines import load_pipeline

__version__ = "0.1.0"

_HOMES = {
    "ElfattError": "config",
    "METHODS": "config",
    "PatchConfig": "config",
    "Phase": "config",
    "apply_patch": "patch",
    "keep_freed_memory": "allocation",
    "patched": "patch",
    "plan": "patch",
    "remove_patch": "patch",
    "load_pipeline": "pipelines",
}

__all__ = [
    "METHODS",
    "ElfattError",
    "PatchConfig",
    "Phase",
    "__version__",
    "apply_patch",
    "keep_freed_memory",
    "load_pipeline",
    "patched",
    "plan",
    "remove_patch",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'elfatt_sd' has no attribute {name!r}")
    return getattr(importlib.import_module(f"elfatt_sd.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
