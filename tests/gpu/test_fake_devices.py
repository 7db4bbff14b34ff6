"""Devices and dtypes without a GPU: every method on fake tensors, where a mixture of devices or dtypes raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import recorded
from support.kernels import GPU, OTHER, STEPS, Machine, fake_machine

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.config import METHODS
from elfatt_sd.families import main_denoiser

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is not built for CUDA")
HALF = [torch.float16, torch.bfloat16]
SMALL: dict[str, Any] = {
    "block_out_channels": (16,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "mid_block_type": None,
    "up_block_types": ("CrossAttnUpBlock2D",),
    "layers_per_block": 1,
}
ORDERS = ("sequence", "raster", "windows", "curve", "strided", "spread")
PHASES = {
    "softmax": Phase(1.0, "softmax", ratio=0.5),
    "softmax, ordered destinations": Phase(1.0, "softmax", ratio=0.3, stride=4),
    "agent": Phase(1.0, "agent", agents=8),
    "agent, merged": Phase(1.0, "agent", agent_source="merged", ratio=0.5),
    **{f"block, {order}": Phase(1.0, "block", block_size=24, block_order=order) for order in ORDERS},
    "block, merged, spread": Phase(1.0, "block", block_size=24, block_order="spread", ratio=0.5),
    "block, second order": Phase(1.0, "block", block_size=24, block_order="curve", second_order="spread"),
    "elfatt, spread": Phase(1.0, "elfatt", block_size=24, agents=8, block_order="spread"),
    "elfatt, channels": Phase(1.0, "elfatt", block_size=24, agents=8, split="channels", ratio=0.5),
    "cell_spread": Phase(1.0, "cell_spread", block_size=16),
    "cell_spread, cells": Phase(1.0, "cell_spread", block_size=16, cell=8),
    "sampled": Phase(1.0, "sampled", keys=16),
    "sampled, columns": Phase(1.0, "sampled", keys=16, groups=3, lattice=False),
    "sampled, one draw": Phase(1.0, "sampled", keys=16, groups=3, redraw=False),
}
ELSEWHERE = ("softmax", "agent, merged", "elfatt, spread", "cell_spread, cells", "sampled")
COMPILED = {
    "merged": PHASES["elfatt, channels"],
    "shared difference": Phase(1.0, "sampled", keys=16, residual_steps=2),
}
JOINT = {
    "sampled": Phase(1.0, "sampled", keys=8),
    "cell_spread": Phase(1.0, "cell_spread", block_size=8),
    "cell_spread, cells": Phase(1.0, "cell_spread", block_size=16, cell=8, residual_steps=2),
    "elfatt": Phase(1.0, "elfatt", block_size=8, agents=4, block_order="curve"),
}
FAMILIES = {
    "Stable Diffusion 3": tiny_transformers.sd3,
    "Qwen-Image": tiny_transformers.qwen_image,
    "Z-Image": tiny_transformers.z_image,
    "Wan": tiny_transformers.wan,
    "LTX-Video": tiny_transformers.ltx_video,
    "HunyuanVideo": tiny_transformers.hunyuan_video,
    "CogVideoX": tiny_transformers.cogvideox,
    "PixArt": lambda: (tiny_transformers.pixart_transformer(), None),
    "Flux": lambda: (tiny_transformers.flux_transformer(), None),
}
RUN_SETTINGS: list[dict[str, Any]] = [
    {"use_rand": False},
    {"reuse_steps": 2},
    {"reuse_layers": True},
    {"fp32_logits": True},
    {"residual_steps": 3},
    {"residual_steps": 3, "residuals": "host"},
    {"residual_steps": 3, "residuals": "fp8"},
]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_machine() as machine:
        yield machine


def unet(machine: Machine, dtype: torch.dtype) -> Any:
    return machine.move(tiny.unet(**SMALL), dtype)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "sd"])
def test_presets(machine: Machine, method: Any) -> None:
    dtype = HALF[len(method) % 2]
    model = elfatt_sd.apply_patch(unet(machine, dtype), method)
    for machine.step in range(STEPS):
        made = machine.call(model, dtype)
        assert (made.device, made.dtype, made.shape) == (GPU, dtype, (2, 4, 16, 16))


@pytest.mark.parametrize("name", PHASES)
def test_attentions_and_orders(machine: Machine, name: str) -> None:
    """On a grid that neither blocks nor cells divide."""
    dtype = HALF[len(name) % 2]
    model = elfatt_sd.apply_patch(unet(machine, dtype), PatchConfig("own", (PHASES[name],)))
    with recorded() as calls:
        made = machine.call(model, dtype, rows=1, side=18)
    assert calls
    assert (made.device, made.dtype, made.shape) == (GPU, dtype, (1, 4, 18, 18))


@pytest.mark.parametrize("settings", RUN_SETTINGS, ids=str)
def test_settings_of_a_run(machine: Machine, settings: dict[str, Any]) -> None:
    model = elfatt_sd.apply_patch(unet(machine, torch.float16), "tome", **settings)
    for machine.step in range(STEPS - 1):
        made = machine.call(model, torch.float16, rows=1)
        assert (made.device, made.dtype) == (GPU, torch.float16)


@pytest.mark.parametrize(
    ("name", "given"),
    [(ELSEWHERE[0], torch.device("cpu")), *((name, given) for name in ELSEWHERE for given in (OTHER, None))],
    ids=str,
)
def test_inputs_and_levels_on_other_devices(machine: Machine, name: str, given: torch.device | None) -> None:
    """Accelerate moves an input after our hook has seen it; and with `dispatch_model` a block has another device."""
    model = unet(machine, torch.float16)
    if given is None:
        machine.move(model.up_blocks, torch.float16, OTHER)
    elfatt_sd.apply_patch(model, PatchConfig("own", (PHASES[name],)))
    add_hook_to_module(model, AlignDevicesHook(execution_device=GPU, io_same_device=True))
    if given is None:
        add_hook_to_module(model.up_blocks[0], AlignDevicesHook(execution_device=OTHER, io_same_device=True))
    for machine.step in range(2):
        moved = {} if given is None else {"device": given}
        assert machine.call(model, torch.float16, rows=1, **moved).device == (given or GPU)


@pytest.mark.parametrize(("name", "order"), [("merged", "compile, patch"), ("shared difference", "patch, blocks")])
def test_compiled_without_a_break(machine: Machine, name: str, order: str) -> None:
    torch._dynamo.reset()
    model, config = unet(machine, torch.float16), PatchConfig("own", (COMPILED[name],))

    def compile_now() -> None:
        blocks = [module for module in model.modules() if type(module).__name__ == "BasicTransformerBlock"]
        for module in blocks if "blocks" in order else [model]:
            module.compile(backend="eager", fullgraph=True)

    steps = [lambda: elfatt_sd.apply_patch(model, config), compile_now]
    for step in steps if order.startswith("patch") else reversed(steps):
        step()
    for machine.step in range(2):
        made = machine.call(model, torch.float16, rows=1, side=8)
        assert (made.device, made.dtype) == (GPU, torch.float16)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(machine: Machine, family: str) -> None:
    pipe, _ = FAMILIES[family]()
    dtype = HALF[len(family) % 2]
    model = machine.move(main_denoiser(pipe), dtype)
    for name, phase in JOINT.items():
        elfatt_sd.apply_patch(model, PatchConfig("own", (phase,)))
        with recorded() as calls:
            made = machine.call(model, dtype, rows=1)
        assert calls, name
        assert (made.device, made.dtype) == (GPU, dtype), name
