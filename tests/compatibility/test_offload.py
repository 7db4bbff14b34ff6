"""Weights that are elsewhere until they are needed: accelerate's hooks around the UNet and around every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import TWO_PHASES, check_patch, processors, runner

import elfatt_sd

CPU = torch.device("cpu")


@pytest.fixture
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


@pytest.fixture
def expected(folder: Path) -> torch.Tensor:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    return runner(pipe)()


def sequential(pipe: Any) -> None:
    """Every layer's weights are on the meta device but while it runs, as in sequential offload."""
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        accelerate.cpu_offload(part, execution_device=CPU)
    assert {weight.device.type for weight in pipe.unet.parameters()} == {"meta"}


def whole(pipe: Any) -> None:
    """Model offload, as the pipeline switches it on."""
    pipe.enable_model_cpu_offload(device=CPU)
    assert isinstance(pipe.unet._hf_hook, accelerate.hooks.CpuOffload)


@pytest.mark.parametrize("offload", [sequential, whole])
def test_offloaded_before_patching(pipe: Any, expected: torch.Tensor, offload: Any) -> None:
    offload(pipe)
    assert torch.equal(check_patch(pipe, runner(pipe), layers={"unet": 3}), expected)


@pytest.mark.parametrize("offload", [sequential, whole])
def test_offloaded_after_patching(pipe: Any, expected: torch.Tensor, offload: Any) -> None:
    run, before = runner(pipe), processors(pipe)
    untouched = run()
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    offload(pipe)
    assert torch.equal(run(), expected)
    elfatt_sd.remove_patch(pipe)
    assert all(processors(pipe)[name] is found for name, found in before.items())
    assert torch.equal(run(), untouched)
    accelerate.hooks.remove_hook_from_submodules(pipe.unet)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_pipeline_offload(pipe: Any, folder: Path, offload: str, patch_first: bool) -> None:
    """It makes what the same pipeline makes whose weights are all on the GPU."""
    there = tiny.sd15(folder, scheduler=tiny.ddim()).to("cuda")
    elfatt_sd.apply_patch(there, TWO_PHASES)
    if patch_first:
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
    getattr(pipe, offload)()
    if not patch_first:
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
    torch.testing.assert_close(runner(pipe)().cpu(), runner(there)().cpu(), atol=1e-3, rtol=0)
