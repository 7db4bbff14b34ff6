"""What a small tuning is asked for, a cache of its own for every test, and a clock that counts multiply-adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from elfatt_sd.measuring import clock
from elfatt_sd.tuning import probe, runs

PROMPTS = ["a cat", "a dog", "a red star", "two birds"]


class Counted:
    """In place of `Stopwatch`: the same work always takes the same time, whatever else the machine does."""

    seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        self._counter: Any = FlopCounterMode(display=False)

    def __enter__(self) -> Self:
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)
        self.seconds = self._counter.get_total_flops() / 1e9 + 1e-9


@pytest.fixture(autouse=True)
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (clock, probe, runs):
        monkeypatch.setattr(module, "Stopwatch", Counted)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fresh_cache(tmp_path: Path) -> Path:
    """For tests of what is measured when: nothing is known yet."""
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has measured of the same model, the next one need not."""
    fresh = "fresh_cache" in request.fixturenames
    folder = request.getfixturevalue("fresh_cache") if fresh else shared_cache
    monkeypatch.setenv("ELFATT_SD_CACHE", str(folder))


@pytest.fixture
def asked() -> dict[str, Any]:
    """What a small tuning is asked for besides its budget."""
    return {"prompts": PROMPTS, "steps": 8, "height": 48, "width": 48, "images": 4, "presets": False}
