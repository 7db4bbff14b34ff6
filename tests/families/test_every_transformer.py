"""Every transformer that the installed diffusers has is patched, or refused by name."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import diffusers.models.transformers
import pytest
from torch import nn

import elfatt_sd
from elfatt_sd import ElfattError
from elfatt_sd.families import FAMILIES

CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(diffusers.models.transformers, inspect.isclass)
    if issubclass(kind, nn.Module)
}


def bare(kind: Any) -> nn.Module:
    """A module of a class without any parts."""
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


FLAT = ("Chroma", "Flux", "Flux2", "PixArt", "QwenImage", "SD3", "ZImage")
DEEP = ("CogVideoX", "HunyuanVideo", "HunyuanVideo15", "LTXVideo", "Wan")
KNOWN = {f"{name}Transformer2DModel" for name in FLAT} | {f"{name}Transformer3DModel" for name in DEEP}


@pytest.mark.parametrize("name", CLASSES)
def test_patched_or_refused(name: str) -> None:
    module = bare(CLASSES[name])
    families = [family for family in FAMILIES if family.matches(module)]
    assert len(families) == (name in KNOWN)
    if not families:
        with pytest.raises(ElfattError, match=f"^not supported: {name} cannot be patched.*, or FluxTransformer2DModel"):
            elfatt_sd.apply_patch(SimpleNamespace(transformer=module, components={}))
