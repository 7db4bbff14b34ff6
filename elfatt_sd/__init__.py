"""elfatt-sd: faster Stable Diffusion without training.

Names are loaded on first use, so that `import elfatt_sd` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elfatt_sd.config import METHODS, Method, PatchConfig, known_method
    from elfatt_sd.devices import keep_freed_memory
    from elfatt_sd.errors import ElfattError
    from elfatt_sd.loading import load_pipeline
    from elfatt_sd.methods import Attention, Merge, register
    from elfatt_sd.patch import apply_patch, is_patched, patched, plan, remove_patch
    from elfatt_sd.phases import LayerPhases, Phase, Settings, StepReuse
    from elfatt_sd.runtime.graphs import graphs, remove_graphs
    from elfatt_sd.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Attention",
    "ElfattError",
    "LayerPhases",
    "Merge",
    "Method",
    "PatchConfig",
    "Phase",
    "Settings",
    "StepReuse",
    "__version__",
    "apply_patch",
    "graphs",
    "is_patched",
    "keep_freed_memory",
    "known_method",
    "load_pipeline",
    "patched",
    "plan",
    "register",
    "remove_graphs",
    "remove_patch",
    "tune",
]

if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept every name
    _NAMES = {
        "config": ("METHODS", "Method", "PatchConfig", "known_method"),
        "devices": ("keep_freed_memory",),
        "errors": ("ElfattError",),
        "loading": ("load_pipeline",),
        "methods": ("Attention", "Merge", "register"),
        "patch": ("apply_patch", "is_patched", "patched", "plan", "remove_patch"),
        "phases": ("LayerPhases", "Phase", "Settings", "StepReuse"),
        "runtime.graphs": ("graphs", "remove_graphs"),
        "tuning": ("tune",),
    }

    def __getattr__(name: str) -> Any:
        home = next((home for home, names in _NAMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'elfatt_sd' has no attribute {name!r}")
        return getattr(importlib.import_module(f"elfatt_sd.{home}"), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
