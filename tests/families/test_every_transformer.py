"""Every transformer that the installed diffusers has is patched, or refused by name with the reason."""

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
from elfatt_sd.families.refused import REFUSED

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


@pytest.mark.parametrize("name", CLASSES)
def test_patched_or_refused(name: str) -> None:
    module = bare(CLASSES[name])
    families = [family for family in FAMILIES if family.matches(module)]
    assert len(families) == (name not in REFUSED), "a new transformer needs a family, or a line in families/refused.py"
    if not families:
        pipe = SimpleNamespace(transformer=module, components={})
        with pytest.raises(ElfattError, match=f"{name} cannot be patched: {REFUSED[name]}"):
            elfatt_sd.apply_patch(pipe)


def test_one_that_this_version_never_saw() -> None:
    class NewTransformer2DModel(nn.Module):
        pass

    with pytest.raises(ElfattError, match="NewTransformer2DModel cannot be patched: how its layers attend"):
        elfatt_sd.apply_patch(SimpleNamespace(transformer=NewTransformer2DModel(), components={}))
