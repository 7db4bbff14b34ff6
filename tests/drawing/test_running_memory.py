"""Whether an image fits into the machine: estimated before it is drawn, and warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines, tiny_transformers

from elfatt_sd.drawing import running as budget

GIB = 2**30
Needs = Callable[..., float]


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Needs:
    """What is told that images need, in GiB, where nothing is free."""

    def need(pipe: Any, *size: int | None, rows: int = 2, **options: Any) -> float:
        monkeypatch.setattr(budget, "memory_of", lambda device: (1e9 * GIB, -1.0))
        with pytest.warns(UserWarning, match=r"needs about ([\d.,]+) GiB") as told:
            budget.warn_if_too_large(pipe, *size, rows=rows, **options)
        return float(str(told[0].message).split("about ")[1].split()[0].replace(",", ""))

    return need


def test_what_cannot_fit_is_warned_of(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "memory_of", lambda device: (2 * GIB, 1 * GIB))
    with pytest.warns(UserWarning, match=r"an image of 8192x16384 needs about [\d.]+ GiB of memory \(estimated\), and"):
        budget.warn_if_too_large(pipe, 16384, 8192, rows=2)
    with pytest.warns(UserWarning, match=r"a batch of 500 at 1024x1024 .* 1\.0 are free on cpu: it may fail"):
        budget.warn_if_too_large(pipe, 1024, 1024, rows=2, batch=500)


def test_usual_images_pass_in_silence(pipe: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget.warn_if_too_large(pipe, None, None, rows=2)


def test_the_need_grows_with_the_image_and_the_batch(pipe: Any, needs: Needs) -> None:
    small, large, many = needs(pipe, 8192, 8192), needs(pipe, 16384, 16384), needs(pipe, 8192, 8192, batch=4)
    assert large == pytest.approx(4 * small, rel=0.01)
    assert many == pytest.approx(4 * small, rel=0.01)


def test_the_memory_of_this_machine() -> None:
    total, free = budget.memory_of(torch.device("cpu"))
    assert 0 < free <= total


def test_clips_are_estimated_by_their_frames(needs: Needs) -> None:
    if not hasattr(diffusers, "WanPipeline"):
        pytest.skip("this diffusers does not have it")
    pipe, _ = tiny_transformers.wan()
    pipe.vae = None
    short, long = (needs(pipe, 9600, 6400, frames=frames) for frames in (41, 81))
    assert long == pytest.approx(2 * short, rel=0.1)
    assert needs(pipe, 9600, 6400) == long, "81 frames are the pipeline's own"


def test_clips_of_a_unet_are_estimated_by_their_frames(tmp_path: Path, needs: Needs) -> None:
    parts = tiny_pipelines.sd15(tmp_path).components
    kept = {name: parts[name] for name in ("unet", "vae", "text_encoder", "tokenizer", "scheduler")}
    pipe = diffusers.AnimateDiffPipeline(**kept, motion_adapter=tiny_pipelines.motion_adapter())
    short, long = (needs(pipe, 6400, 6400, frames=frames) for frames in (8, 16))
    assert long == pytest.approx(2 * short, rel=0.1)
