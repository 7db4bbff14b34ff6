"""Differences that steps share: kept on the device, on the host or in 8 bits, and refused where they are too large."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines as tiny
import torch
from checks import runner

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.residuals import GIB, Residual, check_memory, kept_bytes
from elfatt_sd.settings import KEPT

SHARED = PatchConfig("shared", (Phase(1.0, "sampled", keys=16, residual_steps=2),))


@pytest.fixture
def pipe(folder: Path) -> Iterator[Any]:
    yield tiny.sd15(folder)


@pytest.mark.parametrize("where", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_kept_comes_back(where: Any, dtype: torch.dtype) -> None:
    difference = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    difference[0, 0] = 0.0
    difference[0, 1] *= 100.0
    kept = Residual.keep(difference, where)
    back = kept.restore()
    assert (back.dtype, back.device) == (dtype, difference.device)
    if where == "fp8":
        assert kept.values.element_size() == 1
        largest = difference.abs().amax(-1, keepdim=True).float()
        assert ((back - difference).float().abs() <= largest / 16 + 1e-6).all()
    else:
        assert torch.equal(back, difference)


@pytest.mark.parametrize("where", KEPT)
def test_images_by_where_differences_are_kept(pipe: Any, where: Any) -> None:
    run = runner(pipe)
    untouched = run()
    with elfatt_sd.patched(pipe, SHARED):
        on_device = run()
    with elfatt_sd.patched(pipe, SHARED, residuals=where):
        found = run()
    assert torch.equal(found, on_device) == (where != "fp8")
    error, rounding = (on_device - untouched).norm(), (found - on_device).norm()
    assert rounding < error, "8 bits cost less than the approximation"


def test_too_much_is_refused_with_the_figure(pipe: Any) -> None:
    elfatt_sd.apply_patch(pipe, SHARED, residual_limit=1e-6)
    with pytest.raises(ElfattError, match=r"residual_steps would keep 0\.00 GiB on cpu.*residual_limit"):
        runner(pipe)()
    elfatt_sd.apply_patch(pipe, SHARED, residual_limit=1.0)
    runner(pipe)()


def test_the_limit_of_a_large_model() -> None:
    """Flux at 1024x1024 has 57 layers of 4096 tokens and 3072 channels; two rows in 16 bits."""
    needed = kept_bytes([(4096, 3072)] * 57, 2, torch.bfloat16, "device")
    assert round(needed / GIB, 2) == 2.67
    assert kept_bytes([(4096, 3072)] * 57, 2, torch.bfloat16, "fp8") < 0.51 * needed
    check_memory(needed, "device", 3.0, torch.device("cpu"))
    with pytest.raises(ElfattError, match=r"keep 2\.67 GiB on cpu, more than the 2\.00 GiB.*'host'.*'fp8'"):
        check_memory(needed, "device", 2.0, torch.device("cpu"))


def test_a_plan_says_what_is_kept(pipe: Any) -> None:
    plan = elfatt_sd.plan(pipe, SHARED)
    sizes = [layer.tokens * layer.channels for layer in plan.layers if layer.patched]
    assert plan.kept_bytes == 2 * sum(sizes)
    assert "for each image of a batch in 16 bits, kept on the device" in str(plan)
    assert "steps share" not in str(elfatt_sd.plan(pipe, "elfatt-fast"))
    assert "in 8 bits" in str(elfatt_sd.plan(pipe, SHARED, residuals="fp8"))
