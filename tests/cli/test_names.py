"""The names in the helps are those of the package."""

from __future__ import annotations

import pytest

from elfatt_sd import config, peers, phases
from elfatt_sd.attention import ordering
from elfatt_sd.benchmarking import variants as benchmarking
from elfatt_sd.cli import names
from elfatt_sd.drawing import studio
from elfatt_sd.families import sizes
from elfatt_sd.tuning import budget

HOMES = {
    config: ["METHODS", "DEFAULT"],
    ordering: ["BLOCK_ORDERS"],
    phases: ["BACKENDS"],
    studio: ["SCHEDULERS"],
    budget: ["METRICS"],
    sizes: ["UNET_NAMES", "SHAPE_NAMES"],
    peers: ["PEERS"],
    benchmarking: ["PEER", "ALONE"],
}


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, listed in HOMES.items() for name in listed])
def test_names_are_those_of_the_package(home: object, name: str) -> None:
    assert [*getattr(names, name)] == [*getattr(home, name)]
