"""CUDA graphs on a real GPU: `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import with_effect

import elfatt_sd
from elfatt_sd import ElfattError
from elfatt_sd.attention.softmax import sampled_attention
from elfatt_sd.config import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.usefixtures("fresh_compiler"),
]
STEPS = 8


def denoise(unet: Any) -> torch.Tensor:
    scheduler = tiny.ddim()
    scheduler.set_timesteps(STEPS, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    sample = torch.randn(2, 4, 16, 16, generator=generator, device="cuda")
    text = torch.randn(2, 3, tiny.TEXT_WIDTH, generator=generator, device="cuda")
    with torch.no_grad():
        return torch.stack([unet(sample, step, text).sample.clone() for step in scheduler.timesteps])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "sd"])
def test_graphs_replay_what_every_step_draws(method: Any, blocks: bool) -> None:
    """Twice over a run: the first time graphs are recorded, the second they are replayed alone."""
    settings = with_effect(method, block_size=16, agents=8)
    eager = denoise(elfatt_sd.apply_patch(tiny.unet().cuda(), method, **settings))
    unet = elfatt_sd.apply_patch(tiny.unet().cuda(), method, **settings)
    kinds = ("BasicTransformerBlock",) if blocks else ("UNet2DConditionModel",)
    for module in [module for module in unet.modules() if type(module).__name__ in kinds]:
        module.compile(mode="reduce-overhead")
    for _ in range(2):
        torch.testing.assert_close(denoise(unet), eager, atol=1e-3, rtol=1e-3)


def test_a_graph_around_a_patched_model_is_refused() -> None:
    unet = elfatt_sd.apply_patch(tiny.unet().cuda(), "elfatt-fast")
    denoise(unet)
    with pytest.raises(ElfattError, match="a CUDA graph of a patched model"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        denoise(unet)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [40, 64, 128, 160])
def test_triton_attends_as_pytorch_does(dtype: torch.dtype, size: int) -> None:
    from elfatt_sd.attention.triton import sampled as sampled_launch

    pytest.importorskip("triton")
    q = torch.randn(2, 1000, 4, size, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, 128, 4, size, device="cuda", dtype=dtype)
    own = sampled_launch.sampled(q, k, v, 2, order=None, stands_for=1.0, context=None)
    torch.testing.assert_close(own.float(), sampled_attention(q.float(), k.float(), v.float(), 2), rtol=2e-2, atol=2e-2)
