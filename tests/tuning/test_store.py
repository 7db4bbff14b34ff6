"""What tuning keeps on the disk, also where it is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elfatt_sd import tuning
from elfatt_sd.phases import Phase
from elfatt_sd.tuning.probe import LayerFigures
from elfatt_sd.tuning.runs import Runs, Settings, Store
from elfatt_sd.tuning.search import read_figures

DAMAGED = [b"", b"{", b"null", b"[]", b"{}", b'"x"', b'{"a": 1}', b'{"a": {"bases": [{}]}}', b"\xff\xfe"]


@pytest.mark.parametrize("content", DAMAGED)
def test_what_is_damaged_is_measured_again(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path))
    store, figures = Store({"a": 1}), {"layer": LayerFigures([Phase(1.0, "sampled")], seconds=[0.5], calls=3)}
    for name in ("layers", "stretch"):
        (store.folder / f"{name}.json").write_bytes(content)
    assert store.known("layers", lambda: {"layer": figures["layer"].to_dict()}, read_figures) == figures
    assert store.known("stretch", lambda: 2.5, float) == 2.5
    assert store.known("stretch", lambda: 7.0, float) == 2.5, "it was not kept"


def test_the_folder_is_the_same_in_every_process(pipe: Any) -> None:
    """Diffusers notes which settings of a scheduler are defaults, in an order that changes with Python's hash seed."""
    runs = Runs(pipe, Settings(4))
    record = tuning._record(runs)
    kind, config = type(pipe.scheduler), pipe.scheduler.config
    pipe.scheduler = kind.from_config(config)
    noted = pipe.scheduler.config["_use_default_values"]
    pipe.scheduler.register_to_config(_use_default_values=["another", *noted])
    assert tuning._record(runs) == record
    pipe.scheduler = kind.from_config(config, beta_start=2 * config["beta_start"])
    assert tuning._record(runs) != record
