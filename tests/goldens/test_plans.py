"""Plans of every shape and preset, as data: each kind of layer is a line, then which layers are of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

import elfatt_sd
from elfatt_sd.config import METHODS
from elfatt_sd.families.shapes import SHAPE_NAMES, sketch


def lines(data: dict[str, Any]) -> Iterator[str]:
    """All of a plan's data but the layers' names, whose order is that of `kind x number`."""
    layers = [json.dumps({**layer, "name": ""}) for layer in data["layers"]]
    kinds = list(dict.fromkeys(layers))
    yield json.dumps({**data, "layers": len(layers), "phases": len(data["phases"])})
    yield from map(json.dumps, data["phases"])
    yield from kinds
    yield " ".join(f"{kinds.index(kind)}x{len([*same])}" for kind, same in itertools.groupby(layers))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_plans_are_unchanged(shape: str, snapshot: SnapshotAssertion) -> None:
    pipe, names, found = sketch(shape), set(), []
    for method in METHODS:
        found.append(f"-- {method}")
        try:
            data = elfatt_sd.plan(pipe, method).to_dict()
        except elfatt_sd.ElfattError as error:
            found.append(f"error: {error}")
            continue
        names.add(", ".join(f"{layer['denoiser']}.{layer['name']}" for layer in data["layers"]))
        found += lines(data)
    [layers] = names
    assert "\n".join([layers, *found]) == snapshot
