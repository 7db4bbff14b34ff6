"""Runs of which the beginning is known, and what tuning keeps on the disk, also where it is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elfatt_sd import PatchConfig, tuning
from elfatt_sd.phases import Phase
from elfatt_sd.tuning.probe import LayerFigures
from elfatt_sd.tuning.runs import Runs, Sample, Settings, Store
from elfatt_sd.tuning.search import read_figures

DAMAGED = [b"", b"{", b"null", b"[]", b"{}", b'"x"', b'{"a": 1}', b'{"a": {"bases": [{}]}}', b"\xff\xfe"]
LATE = PatchConfig("late", (Phase(0.5), Phase(1.0, "sampled", keys=16)))
SAMPLE = Sample("a red star", 3)


@pytest.fixture
def runs(pipe: Any) -> Runs:
    return Runs(pipe, Settings(6, height=48, width=48))


@pytest.fixture
def calls(pipe: Any) -> Iterator[list[None]]:
    """One for each call of the denoiser that is computed."""
    found: list[None] = []
    handle = pipe.unet.conv_in.register_forward_pre_hook(lambda *_: found.append(None))
    yield found
    handle.remove()


def test_what_is_known_is_not_computed_and_nothing_changes(runs: Runs, calls: list[None]) -> None:
    plain, late = runs.draw(SAMPLE), runs.draw(SAMPLE, LATE)
    every, _ = len(calls) // 2, calls.clear()
    assert runs._shot_from(3, SAMPLE, LATE).frames == late.frames, "it is recorded first"
    assert len(calls) == 2 * every - 3
    calls.clear()
    assert runs.draw_recorded(SAMPLE).same(plain)
    assert len(calls) == every
    calls.clear()
    assert runs._shot_from(3, SAMPLE, LATE).frames == late.frames
    assert len(calls) == every - 3
    calls.clear()
    assert runs._shot_from(0, SAMPLE, LATE).frames == late.frames
    assert len(calls) == every
    assert runs.draw(SAMPLE).same(plain), "the forward is put back"


def test_deviations_are_of_pixels_before_and_after_rounding(runs: Runs) -> None:
    plain, late = (np.asarray(runs.draw(SAMPLE, config).frames[0], dtype=float) for config in (None, LATE))
    far = runs.deviation(3, SAMPLE, LATE)
    assert far.rounded == pytest.approx(((plain - late) ** 2).mean())
    assert 0 < far.mse != far.rounded
    assert abs(far.mse - far.rounded) < 0.5
    assert runs.deviation(3, SAMPLE, PatchConfig("sd")) == (0.0, 0.0)


def test_a_denoiser_that_was_compiled_in_place_is_left_alone(pipe: Any, runs: Runs, calls: list[None]) -> None:
    pipe.unet.compile(backend="eager")
    try:
        late = runs.draw(SAMPLE, LATE)
        calls.clear()
        for _ in range(2):
            assert runs._shot_from(3, SAMPLE, LATE).frames == late.frames
        assert len(calls) == 3 * 7, "recording was tried once; all steps are computed"
        assert "forward" not in vars(pipe.unet)
    finally:
        pipe.unet._compiled_call_impl = None


def test_what_fails_leaves_the_denoiser_as_it_was(pipe: Any, runs: Runs) -> None:
    runs.draw_recorded(SAMPLE)

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    handle = pipe.vae.decoder.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="no"):
            runs._shot_from(3, SAMPLE, LATE)
    finally:
        handle.remove()
    assert "forward" not in vars(pipe.unet)


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
