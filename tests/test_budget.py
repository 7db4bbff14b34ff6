"""Whether an image fits into the machine: estimated first, refused or warned of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_joint
import tiny_pipelines
import torch

from elfatt_sd import budget
from elfatt_sd.config import ElfattError

GIB = 2**30
RUN: dict[str, Any] = {"steps": 20, "images": 1, "rows": 2}


def machine(monkeypatch: pytest.MonkeyPatch, total: float, free: float, rate: float = 1e12) -> None:
    monkeypatch.setattr(budget, "memory_of", lambda device: (total, free))
    monkeypatch.setattr(budget, "_rate", lambda device, dtype: rate)


def test_what_cannot_fit_is_refused_in_one_line(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2 * GIB, 1 * GIB)
    says = r"an image of 16384x8192 needs about [\d.]+ GiB of memory \(estimated\), and cpu has 2.0 GiB, of which 1"
    with pytest.raises(ElfattError, match=says) as caught:
        budget.check_fits(pipe, 16384, 8192, **RUN)
    assert "\n" not in str(caught.value) and "--force" in str(caught.value)


def test_what_is_near_is_warned_of(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    need = budget.estimate(pipe, 256, 256, steps=20).memory
    machine(monkeypatch, 10 * need, need)
    with pytest.warns(UserWarning, match="an image of 256x256 needs about .*it may fail"):
        budget.check_fits(pipe, 256, 256, **RUN)


def test_a_long_run_is_warned_of(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 1e18, 1e18, rate=1e8)
    with pytest.warns(UserWarning, match=r"this run takes about [\d,]+ (minutes|hours|days) on cpu \(estimated\)"):
        budget.check_fits(pipe, 2048, 2048, **RUN)


def test_usual_images_pass_in_silence(pipe: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget.check_fits(pipe, None, None, **RUN)


def test_the_estimate_grows_as_it_should(pipe: Any) -> None:
    small, large = (budget.estimate(pipe, side, side, steps=4) for side in (256, 512))
    assert large.memory == pytest.approx(4 * small.memory)
    assert 4 * small.multiply_adds < large.multiply_adds < 16 * small.multiply_adds
    assert budget.estimate(pipe, None, None, steps=4) == budget.estimate(pipe, 32, 32, steps=4)
    assert budget.estimate(pipe, 256, 256, steps=4, rows=1).multiply_adds < small.multiply_adds


def test_the_memory_of_this_machine() -> None:
    total, free = budget.memory_of(torch.device("cpu"))
    assert 0 < free <= total


def test_clips_are_estimated_by_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(diffusers, "WanPipeline"):
        pytest.skip("this diffusers does not have it")
    pipe, _ = tiny_joint.wan()
    pipe.vae = None
    short, long = (budget.estimate(pipe, 96, 64, steps=4, frames=frames) for frames in (41, 81))
    assert long.memory == pytest.approx(2 * short.memory, rel=0.1)
    assert 2 * short.multiply_adds < long.multiply_adds < 4 * short.multiply_adds
    assert budget.estimate(pipe, 96, 64, steps=4) == long, "81 frames are the pipeline's own"
    machine(monkeypatch, 2 * GIB, 1 * GIB)
    with pytest.raises(ElfattError, match=r"needs about .* GiB of memory"):
        budget.check_fits(pipe, 480, 832, **RUN, frames=1_000_001)


def test_clips_of_a_unet_are_estimated_by_their_frames(tmp_path: Path) -> None:
    parts = tiny_pipelines.sd15(tmp_path).components
    kept = {name: parts[name] for name in ("unet", "vae", "text_encoder", "tokenizer", "scheduler")}
    pipe = diffusers.AnimateDiffPipeline(**kept, motion_adapter=tiny_pipelines.motion_adapter())
    short, long = (budget.estimate(pipe, 64, 64, steps=4, frames=frames) for frames in (8, 16))
    assert long.memory == pytest.approx(2 * short.memory, rel=0.1)
    assert long.multiply_adds == pytest.approx(2 * short.multiply_adds)
