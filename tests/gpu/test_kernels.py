"""Triton's kernels in its interpreter, and with CUDA graphs on a real GPU: `pytest -m gpu`.

The interpreter is chosen before Triton is imported: `TRITON_INTERPRET=1 PYTHONPATH=.:tests python FILE` prints the
greatest difference to the pure functions for each case, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checks, tiny_transformers
from support import tiny_pipelines as tiny
from torch import Tensor

import elfatt_sd
from elfatt_sd.attention import joint
from elfatt_sd.attention.joint import Keys
from elfatt_sd.attention.ordering import Grid, lattice_order
from elfatt_sd.attention.softmax import sampled_attention, triton_takes
from elfatt_sd.config import PatchConfig
from elfatt_sd.phases import Phase

kernels: Any = None
if os.environ.get("TRITON_INTERPRET") or torch.cuda.is_available():
    from elfatt_sd.attention import triton as kernels
    from elfatt_sd.runtime.norm import group_norm


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sampled(grid: Grid, keys: int, groups: int, size: int, context: Keys | None) -> tuple[Tensor, Tensor]:
    """Queries in place beside those that were put in the order of their groups."""
    q, (k, v) = normal(2, grid.tokens, 2, size), normal(2, 2, keys * groups, 2, size, seed=1)
    order = lattice_order(grid, groups, torch.device("cpu"))
    ordered = q if order is None else q[:, order[0]]
    weight = grid.tokens / keys
    if context is None:
        wanted = sampled_attention(ordered, k, v, groups)
    else:
        wanted = joint.sampled_joint_attention(ordered, k, v, groups, stands_for=weight, context=context)
    wanted = wanted if order is None else wanted[:, order[1]]
    given: dict[str, Any] = {"order": None if order is None else order[0], "stands_for": weight, "context": context}
    return wanted, kernels.sampled(q, k, v, groups, **given)


def text(size: int, mask: Tensor | None = None, stands_for: float = 1.0) -> Keys:
    return Keys(*normal(2, 2, 11, 2, size, seed=2), mask, stands_for)


def normalised(channels: int, sides: tuple[int, int], groups: int, silu: bool) -> tuple[Tensor, Tensor]:
    """Far from zero, where a sum of squares would lose what the formula in float64 keeps."""
    x = (3 * normal(2, channels, *sides) + 20).to(memory_format=torch.channels_last)
    weight, bias = normal(2, channels, seed=1)
    wanted = torch.nn.functional.group_norm(x.double(), groups, weight.double(), bias.double(), 1e-5)
    own = group_norm(x, groups, weight, bias, 1e-5, silu)
    assert own.stride() == x.stride()
    return (torch.nn.functional.silu(wanted) if silu else wanted).float(), own


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    made = {}
    for channels, sides, groups in ((40, (9, 13), 4), (96, (17, 8), 32), (12, (50, 47), 3)):
        made |= {f"norm, {channels}, {silu}": normalised(channels, sides, groups, silu) for silu in (False, True)}
    mask = torch.arange(11)[None] < torch.tensor([[7], [11]])
    for size, (groups, rows) in itertools.product((40, 64, 160), ((1, 9), (2, 16), (3, 9))):
        made[f"sampled, head {size}, {groups} groups, {rows} rows"] = sampled(Grid(1, rows, 13), 17, groups, size, None)
    texts = {"text": text(72), "mask": text(72, mask), "bias": text(72, normal(2, 11)), "weight": text(72, None, 3.0)}
    for name, own in texts.items():
        made[f"sampled, {name}"] = sampled(Grid(1, 9, 13), 20, 2, 72, own)
    return made


def drawn(pipe: Any, config: PatchConfig, **options: int) -> tuple[Tensor, Tensor]:
    """Images of a patched pipeline with PyTorch's attention, and with the kernels."""
    calls, inner = [], kernels.sampled
    kernels.sampled = lambda *args, **given: (calls.append(0), inner(*args, **given))[1]
    run = checks.runner(pipe, num_inference_steps=2, **options)
    images = []
    for backend in ("auto", "triton"):
        with elfatt_sd.patched(pipe, config.with_settings(attention_backend=backend)):
            images.append(run())
        assert bool(calls) == (backend == "triton"), (config, backend)
    return images[0], images[1]


def pipelines(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    sd15 = tiny.sd15(folder, **tiny.ONE_LEVEL)
    sampled_keys = PatchConfig("sampled", (Phase(1.0, "sampled", keys=8),), levels=2)
    return {
        "pipeline sampled": drawn(sd15, sampled_keys),
        "pipeline flux": drawn(tiny_transformers.flux(folder), sampled_keys, height=32, width=32),
    }


def on_a_gpu(test: Any) -> Any:
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    return pytest.mark.gpu(skipped(pytest.mark.usefixtures("fresh_compiler")(test)))


def test_kernels_are_the_pure_functions() -> None:
    """Also through pipelines: a UNet, and a transformer with text; in a process of its own."""
    pytest.importorskip("triton")  # it is there for Linux
    here = Path(__file__)
    places = os.pathsep.join(str(here.parents[up]) for up in (1, 2))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    command = [sys.executable, "-W", "ignore", str(here)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    differences: dict[str, float] = json.loads(run.stdout)
    assert len(differences) > 20
    limits = {name: 1e-4 if name.startswith("pipeline") else 1e-5 for name in differences}  # of a layer; of a whole run
    assert {name for name, difference in differences.items() if not difference < limits[name]} == set()


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


@on_a_gpu
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("method", checks.ACTIVE)
def test_graphs_replay_what_every_step_draws(method: Any, blocks: bool) -> None:
    """Twice over a run: the first time graphs are recorded, the second they are replayed alone."""
    settings = checks.with_effect(method, block_size=16, agents=8)
    eager = checks.denoise(elfatt_sd.apply_patch(tiny.unet().cuda(), method, **settings), 8, 16, "cuda")
    unet = elfatt_sd.apply_patch(tiny.unet().cuda(), method, **settings)
    kinds = ("BasicTransformerBlock",) if blocks else ("UNet2DConditionModel",)
    for module in [module for module in unet.modules() if type(module).__name__ in kinds]:
        module.compile(mode="reduce-overhead")
    for _ in range(2):
        torch.testing.assert_close(checks.denoise(unet, 8, 16, "cuda"), eager, atol=1e-3, rtol=1e-3)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [40, 64, 128, 160])
def test_triton_attends_as_pytorch_does(dtype: torch.dtype, size: int) -> None:
    q = torch.randn(2, 1000, 4, size, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, 128, 4, size, device="cuda", dtype=dtype)
    own = kernels.sampled(q, k, v, 2, order=None, stands_for=1.0, context=None)
    torch.testing.assert_close(own.float(), sampled_attention(q.float(), k.float(), v.float(), 2), rtol=2e-2, atol=2e-2)


@on_a_gpu
@pytest.mark.parametrize("method", ["sd", *checks.ACTIVE])
def test_graphs_give_the_latents_of_the_eager_run(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run that captures and times, and in one that replays alone."""
    monkeypatch.setattr("elfatt_sd.runtime.graphs.PAYS", 0.0)
    unet = elfatt_sd.apply_patch(tiny.unet().cuda(), method, **checks.with_effect(method, block_size=16, agents=8))
    eager = checks.denoise(unet, 8, 16, "cuda")
    with elfatt_sd.graphs(unet):
        assert all(torch.equal(checks.denoise(unet, 8, 16, "cuda"), eager) for _ in range(2))


@on_a_gpu
@pytest.mark.parametrize("channels", [320, 960, 2560])
def test_the_norm_is_as_near_to_the_formula_as_pytorchs(channels: int) -> None:
    x = torch.randn(2, channels, 64, 64, device="cuda").half().to(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, channels, device="cuda").half()
    given = (32, weight, bias, 1e-5)
    wanted = torch.nn.functional.group_norm(x.double(), 32, weight.double(), bias.double(), 1e-5)
    theirs = torch.nn.functional.group_norm(x, *given)
    differences = [(made.double() - wanted).abs().max() for made in (group_norm(x, *given, False), theirs)]
    assert differences[0] <= 1.01 * differences[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = {**cases(), **pipelines(Path(folder))}
    print(json.dumps({name: (own - other).abs().max().item() for name, (own, other) in made.items()}))
