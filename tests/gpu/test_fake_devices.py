"""Devices without a GPU: methods on fake tensors, where a mixture of devices or dtypes raises, and stand-ins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import FEW_KEYS, generator, recorded
from support.kernels import GPU, OTHER, STEPS, Machine, fake_machine
from torch.nn import functional

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase, devices, visualize
from elfatt_sd.attention.softmax import make_ready, softmax_attention
from elfatt_sd.config import METHODS
from elfatt_sd.drawing import doctor
from elfatt_sd.drawing.studio import peak_in_words
from elfatt_sd.families import main_denoiser
from elfatt_sd.loading import pick_device
from elfatt_sd.measure import PeakMeter, peak_memory
from elfatt_sd.runtime import autotune

needs_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is not built for CUDA")
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
JOINT = [*FEW_KEYS.values(), Phase(1.0, "cell_spread", block_size=16, cell=8, residual_steps=2)]
FAMILIES = ("Stable Diffusion 3", "Qwen-Image", "Z-Image", "Wan", "LTX-Video", "HunyuanVideo", "CogVideoX")
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


CONFIGS = {
    **{str(method): PatchConfig.preset(method) for method in METHODS if method != "sd"},
    **{str(own): PatchConfig.preset("tome", **own) for own in RUN_SETTINGS},
}


@needs_cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_presets_and_settings_of_a_run(machine: Machine, name: str) -> None:
    dtype = HALF[len(name) % 2]
    model = elfatt_sd.apply_patch(unet(machine, dtype), CONFIGS[name])
    for machine.step in range(STEPS):
        made = machine.call(model, dtype)
        assert (made.device, made.dtype, made.shape) == (GPU, dtype, (2, 4, 16, 16))


@needs_cuda
@pytest.mark.parametrize("name", PHASES)
def test_attentions_and_orders(machine: Machine, name: str) -> None:
    """On a grid that neither blocks nor cells divide."""
    dtype = HALF[len(name) % 2]
    model = elfatt_sd.apply_patch(unet(machine, dtype), PatchConfig("own", (PHASES[name],)))
    with recorded() as calls:
        made = machine.call(model, dtype, rows=1, side=18)
    assert calls
    assert (made.device, made.dtype, made.shape) == (GPU, dtype, (1, 4, 18, 18))


@needs_cuda
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


@needs_cuda
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "order"), [("merged", "compile, patch"), ("shared difference", "patch, blocks")])
def test_compiled_without_a_break(machine: Machine, name: str, order: str) -> None:
    model = unet(machine, torch.float16)
    blocks = [module for module in model.modules() if type(module).__name__ == "BasicTransformerBlock"]
    for step in order.split(", "):
        if step == "patch":
            elfatt_sd.apply_patch(model, PatchConfig("own", (COMPILED[name],)))
        for module in {"patch": [], "blocks": blocks, "compile": [model]}[step]:
            module.compile(backend="eager", fullgraph=True)
    for machine.step in range(2):
        made = machine.call(model, torch.float16, rows=1, side=8)
        assert (made.device, made.dtype) == (GPU, torch.float16)


@needs_cuda
@pytest.mark.parametrize("family", [*FAMILIES, "PixArt", "Flux.1"])
def test_transformers(machine: Machine, family: str) -> None:
    dtype = HALF[len(family) % 2]
    model = machine.move(main_denoiser(tiny_transformers.made(family)[0]), dtype)
    for phase in JOINT:
        elfatt_sd.apply_patch(model, PatchConfig("own", (phase,)))
        with recorded() as calls:
            made = machine.call(model, dtype, rows=1)
        assert calls, phase
        assert (made.device, made.dtype) == (GPU, dtype), phase


def test_logits_of_cuda_kernels_are_float32_already(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda q, *_, **__: seen.append(q.dtype) or q)
    with machine.mode:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            q = torch.zeros(1, 4, 2, 8, dtype=dtype, device=GPU)
            softmax_attention(q, q, q, fp32_logits=True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
        q = torch.zeros(1, 4, 2, 8, dtype=torch.float16, device=GPU)
        softmax_attention(q, q, q, fp32_logits=True)
    assert seen == [torch.float16, torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("backend", ["flash_hub", "sage_hub"])
def test_a_kernel_of_the_hub_is_fetched_once_by_the_patch(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    if not hasattr(dispatch, "_maybe_download_kernel_for_backend"):
        pytest.skip("this version of diffusers fetches none")
    fetched: list[str] = []
    with pytest.raises(ElfattError, match=re.escape(f"attention_backend={backend!r} needs kernels")):
        make_ready(backend)
    monkeypatch.setattr(dispatch, "_check_attention_backend_requirements", lambda name: None)
    monkeypatch.setattr(dispatch, "_maybe_download_kernel_for_backend", lambda name: fetched.append(name.value))
    elfatt_sd.apply_patch(tiny.unet(), "tome", attention_backend=backend)
    assert fetched == [backend]
    with pytest.raises(ElfattError, match="attention_backend='flex'"):  # without torch.compile it holds all logits
        elfatt_sd.PatchConfig.preset("tome", attention_backend="flex")


@needs_cuda
def test_a_capture_by_somebody_else_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would replay one phase and one sample for ever."""
    unet = elfatt_sd.apply_patch(machine.move(tiny.unet(), torch.float16), "elfatt-fast")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ElfattError, match="a CUDA graph of a patched model would replay"):
        machine.call(unet, torch.float16)


def test_on_a_gpu_ten_calls_are_timed_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("elfatt_sd.measure.synchronize", lambda device: events.append("wait"))
    autotune._seconds(lambda: events.append("call"), GPU)
    assert events == ["wait", *["call"] * 10, "wait"]


def test_the_key_of_a_decision_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    key = autotune.decision_key

    def count(*given: Any) -> str:
        made.append(key(*given))
        return made[-1]

    monkeypatch.setattr(autotune, "decision_key", count)
    monkeypatch.setattr(autotune, "measure", lambda *_: autotune.Decision(0.5, 0.4, 0.6))
    unet = elfatt_sd.apply_patch(tiny.unet(), "tome", autotune=True)
    text = torch.zeros(1, 3, tiny.TEXT_WIDTH)
    with torch.no_grad():
        unet(torch.zeros(1, 4, 16, 16), 999, text)
        layers = len(made)
        unet(torch.zeros(1, 4, 16, 16), 500, text)
        assert len(made) == layers > 0
        unet(torch.zeros(1, 4, 24, 16), 500, text)
    assert len(made) == 2 * layers


class Hidden:
    """What CUDA is on a machine whose PyTorch has none of its names."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"torch.cuda.{name}")


def test_without_any_name_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    unet, sample, text = tiny.unet(), torch.zeros(1, 4, 16, 16), torch.zeros(1, 3, tiny.TEXT_WIDTH)
    monkeypatch.setattr(torch, "cuda", Hidden())
    assert devices.accelerators().keys() <= {"xpu", "mps"}
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ElfattError, match="is not on this machine"):
        pick_device("cuda")
    for method in ("tome", "agent", "elfatt", "elfatt-fast"):
        elfatt_sd.apply_patch(unet, method, fp32_logits=True)
        with torch.no_grad():
            assert unet(sample, 999, text).sample.isfinite().all()
    with pytest.raises(ElfattError, match=r"attention_backend=.triton. needs"):
        make_ready("triton")
    assert [finding.status for finding in doctor._self_check()] == ["ok"]
    assert "CPU" in [finding.name for finding in doctor._machine()]
    assert PeakMeter(torch.device("cpu")).restart() in (True, False)
    devices.empty_caches()


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_other_accelerators(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """By what PyTorch's module for them can do."""
    waited, emptied = list[Any](), list[str]()
    told: dict[str, Any] = {"is_available": True, "device_count": 1, "recommended_max_memory": 10}
    told["driver_allocated_memory"] = 3
    if kind == "xpu":
        told = {"is_available": True, "device_count": 1, "get_device_name": "Arc", "mem_get_info": (6, 10)}
        told |= {"memory_reserved": 3, "memory_allocated": 2, "max_memory_allocated": 9, "max_memory_reserved": 10}
        told["reset_peak_memory_stats"] = None
    names: dict[str, Any] = {name: lambda *_, value=value: value for name, value in told.items()}
    names["synchronize"] = lambda device=None: waited.append(device)
    names["empty_cache"] = lambda: emptied.append(kind)
    monkeypatch.setattr(torch, kind, SimpleNamespace(**names))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = torch.device(kind)
    assert pick_device("auto") == pick_device(kind) == device
    assert devices.memory_of(device) == ((8, 7) if kind == "xpu" else (10, 7))
    assert devices.device_name(device).startswith("Arc" if kind == "xpu" else "mps of ")
    devices.synchronize(device)
    assert waited == [device if kind == "xpu" else None]
    devices.empty_caches()
    assert emptied == [kind]
    meter = PeakMeter(device)
    found = (meter.kind, meter.read(), meter.read_reserved(), peak_memory(lambda: None, device))
    assert found == (("XPU allocated", 9, 10, 7) if kind == "xpu" else (None, None, None, None))
    assert peak_in_words(device) == "peak memory" + " allocated by PyTorch on XPU" * (kind == "xpu")


def test_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPS: what is to be exact is moved to the CPU first."""
    to_cpu, double = torch.Tensor.cpu, torch.Tensor.double

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved: Any = to_cpu(tensor).clone()
        moved.on_cpu = True
        return moved

    def convert(tensor: Any) -> torch.Tensor:
        if not getattr(tensor, "on_cpu", False):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return double(tensor)

    q, k = torch.randn(2, 1, 5, 2, 4, generator=generator())
    monkeypatch.setattr(torch.Tensor, "cpu", move)
    monkeypatch.setattr(torch.Tensor, "double", convert)
    devices.has_float64.cache_clear()
    assert not devices.has_float64(torch.device("cpu"))
    devices.has_float64.cache_clear()
    assert next(doctor._self_check()).status == "ok"
    attend = lambda q, k, v, _: softmax_attention(q, k, v)  # noqa: E731
    visualize.weights_of(attend, q, k, None, 0)
    assert visualize.same_keys(attend, q, None)[0] is not None
    visualize.errors(q[0, 0], k[0, 0])


def test_rocm_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices have that name, but not CUDA's version, nor in older versions of PyTorch a number."""
    card = SimpleNamespace(total_memory=2**34, major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices._cuda(GPU)["runtime"] == "ROCm 6.3"
    assert devices.read_clocks(GPU) == {}
