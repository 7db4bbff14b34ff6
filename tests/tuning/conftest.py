"""What a small tuning is asked for, a cache for all tests, and a clock that counts multiply-adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elfatt_sd import measure as clock
from elfatt_sd.drawing import studio
from elfatt_sd.tuning import probe

PROMPTS = ["a cat", "a dog", "a red star", "two birds"]


class Counted(TorchDispatchMode):
    """In place of `Stopwatch`: the same work always takes the same time, whatever else the machine does."""

    seconds = 0.0
    each = 1e-9  # seconds of a multiply-add

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._work = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func.overloadpacket):
            self._work += count(*args, **(kwargs or {}), out_val=made)
        return made

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.seconds = self._work * self.each


@pytest.fixture(autouse=True)
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (clock, probe, studio):
        monkeypatch.setattr(module, "Stopwatch", Counted)
    monkeypatch.setattr(probe, "_MORE_PRECISE_FIRST", ())  # kernels of some dtypes are not counted


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has measured of the same model, the next one need not, but for those with their `own_cache`."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path_factory.getbasetemp() / "tuning"))


@pytest.fixture
def asked() -> dict[str, Any]:
    """What the smallest tuning is asked for besides its budget."""
    return {"prompts": PROMPTS, "steps": 4, "height": 32, "width": 32, "images": 8, "presets": False}
