"""Triton's kernels in its interpreter, and with CUDA graphs on a real GPU: `pytest -m gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import with_effect

import elfatt_sd
from elfatt_sd.attention.softmax import sampled_attention, triton_takes
from elfatt_sd.config import METHODS
from elfatt_sd.errors import ElfattError

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux")


def on_a_gpu(test: Any) -> Any:
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    return pytest.mark.gpu(skipped(pytest.mark.usefixtures("fresh_compiler")(test)))


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Triton is told of its interpreter before it is imported: a process of its own."""
    pytest.importorskip("triton")
    places = os.pathsep.join(str(HERE.parents[up]) for up in (0, 1))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    command = [sys.executable, "-W", "ignore", str(HERE / "interpreted.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


@needs_triton
def test_kernels_are_the_pure_functions(differences: dict[str, float]) -> None:
    """Also through pipelines: a UNet, merged tokens, and a transformer with text."""
    assert len(differences) > 20
    assert {name.split()[1] for name in differences if name.startswith("pipeline")} == {
        *("sampled", "cell_spread", "tome", "flux")
    }
    limits = {name: 1e-4 if name.startswith("pipeline") else 1e-5 for name in differences}  # of a layer; of a whole run
    assert {name for name, difference in differences.items() if not difference < limits[name]} == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(pipe: Any) -> None:
    with pytest.raises(ElfattError, match="attention_backend='triton' needs") as caught:
        elfatt_sd.apply_patch(pipe, "elfatt-fast", attention_backend="triton")
    assert "\n" not in str(caught.value)
    assert not elfatt_sd.is_patched(pipe)


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    assert not triton_takes("triton", x), "it is on the CPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_takes("triton", x)
    assert not triton_takes("native", x)
    assert not triton_takes("triton", x, x.double())
    assert not triton_takes("triton", x.requires_grad_())
    with torch.no_grad():
        assert triton_takes("triton", x)


def denoise(unet: Any) -> torch.Tensor:
    scheduler = tiny.ddim()
    scheduler.set_timesteps(8, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    sample = torch.randn(2, 4, 16, 16, generator=generator, device="cuda")
    text = torch.randn(2, 3, tiny.TEXT_WIDTH, generator=generator, device="cuda")
    with torch.no_grad():
        return torch.stack([unet(sample, step, text).sample.clone() for step in scheduler.timesteps])


@on_a_gpu
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


@on_a_gpu
def test_a_graph_around_a_patched_model_is_refused() -> None:
    unet = elfatt_sd.apply_patch(tiny.unet().cuda(), "elfatt-fast")
    denoise(unet)
    with pytest.raises(ElfattError, match="a CUDA graph of a patched model"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        denoise(unet)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [40, 64, 128, 160])
def test_triton_attends_as_pytorch_does(dtype: torch.dtype, size: int) -> None:
    pytest.importorskip("triton")
    from elfatt_sd.attention import triton as kernels

    q = torch.randn(2, 1000, 4, size, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, 128, 4, size, device="cuda", dtype=dtype)
    own = kernels.sampled(q, k, v, 2, order=None, stands_for=1.0, context=None)
    torch.testing.assert_close(own.float(), sampled_attention(q.float(), k.float(), v.float(), 2), rtol=2e-2, atol=2e-2)
