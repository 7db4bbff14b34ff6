"""Devices without a GPU: methods on fake tensors, where a mixture of devices or dtypes raises, and stand-ins."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import ACTIVE, FEW_KEYS, generator, recorded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase, devices, visualize
from elfatt_sd.attention import softmax
from elfatt_sd.attention.softmax import make_ready, softmax_attention
from elfatt_sd.families import family_of, images, main_denoiser, unwrap
from elfatt_sd.loading import pick_device
from elfatt_sd.measure import PeakMeter, peak_memory
from elfatt_sd.methods import Grid
from elfatt_sd.phases import Kept
from elfatt_sd.runtime.schedule import Position, Schedule, _Found

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
STEPS = 4
_TIMESTEPS = torch.arange(STEPS)


class Machine:
    """The fake machine: `step` of them all is the one that every call is in, as values on a device cannot be read."""

    step, grid = 0, Grid(0, 0, 0)

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def move(self, module: nn.Module, dtype: torch.dtype, device: torch.device = GPU) -> Any:
        """Give a module fake weights on a device, in place."""
        with self.mode:
            for part in module.modules():
                for kept in (part._parameters, part._buffers):
                    for name, tensor in kept.items():
                        if tensor is not None:
                            own = dtype if tensor.is_floating_point() else tensor.dtype
                            moved: Any = torch.empty(tensor.shape, dtype=own, device=device)
                            kept[name] = nn.Parameter(moved, False) if kept is part._parameters else moved
        return module

    def call(
        self, module: nn.Module, dtype: torch.dtype, *, rows: int = 2, side: int = 16, device: torch.device = GPU
    ) -> torch.Tensor:
        """Call a denoiser with inputs on a device, and return its output."""
        with self.mode, torch.no_grad():
            family = family_of(module)
            latent = Grid(family.latent(module).frames, side, side)
            inner = unwrap(module)

            def fill(*shape: int) -> torch.Tensor:
                return torch.zeros(*shape, dtype=dtype, device=device)

            self.grid = family.grid(inner, latent)
            given = family.arguments(inner, self.grid, rows, fill)
            made: torch.Tensor = tree_leaves(module(**{**given, "return_dict": False}))[0]
        return made


def _forget() -> None:
    """Empty the caches of the package: what is kept on a fake device holds no values."""
    for name, module in list(sys.modules.items()):
        if name.startswith("elfatt_sd"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == name:
                    value.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()

    def locate(schedule: Any, timestep: Any, unit: int | None = None) -> Position:
        found = _Found(Position(machine.step, STEPS), _TIMESTEPS)
        schedule._follow(found)
        return found.position

    told = {"get_device_capability": (9, 0), "mem_get_info": (2**35, 2**36), "memory_allocated": 0}
    for name, value in {**told, "memory_reserved": 0, "is_current_stream_capturing": False}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(Schedule, "locate", locate)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    monkeypatch.setattr(images, "grid_of_ids", lambda _: machine.grid)
    _forget()
    yield machine
    _forget()


needs_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is not built for CUDA")
HALF = [torch.float16, torch.bfloat16]
SMALL = {**tiny.ONE_LEVEL, "block_out_channels": (16,), "sample_size": 16}
ORDERS = ("sequence", "raster", "windows", "curve", "strided", "spread")
PHASES = {
    **FEW_KEYS,
    "softmax": Phase(1.0, "softmax", ratio=0.5),
    "softmax, ordered destinations": Phase(1.0, "softmax", ratio=0.3, stride=4),
    "agent, merged": Phase(1.0, "agent", agent_source="merged", ratio=0.5),
    **{f"block, {order}": Phase(1.0, "block", block_size=24, block_order=order) for order in ORDERS},
    "block, merged, spread": Phase(1.0, "block", block_size=24, block_order="spread", ratio=0.5),
    "block, second order": Phase(1.0, "block", block_size=24, block_order="curve", second_order="spread"),
    "elfatt, channels": Phase(1.0, "elfatt", block_size=24, agents=8, split="channels", ratio=0.5),
    "sampled, columns": Phase(1.0, "sampled", keys=16, groups=3, lattice=False),
    "sampled, one draw": Phase(1.0, "sampled", keys=16, groups=3, redraw=False),
}
ELSEWHERE = ("softmax", "agent, merged", "elfatt", "cell_spread, cells", "sampled")
JOINT = [*FEW_KEYS.values(), Phase(1.0, "cell_spread", block_size=16, cell=8, residual_steps=2)]
FAMILIES = ("Stable Diffusion 3", "Qwen-Image", "Z-Image", "Wan", "LTX-Video", "HunyuanVideo", "CogVideoX")
CONFIGS = {
    **{f"preset {method}": PatchConfig.preset(method) for method in ACTIVE},
    "use_rand": PatchConfig.preset("tome", use_rand=False),
    "reuse_steps": PatchConfig.preset("tome", reuse_steps=2),
    "reuse_layers": PatchConfig.preset("tome", reuse_layers=True),
    "fp32_logits": PatchConfig.preset("tome", fp32_logits=True),
    **{kept: PatchConfig.preset("tome", residual_steps=3, residuals=kept) for kept in get_args(Kept)},
    **{name: PatchConfig("own", (phase,)) for name, phase in PHASES.items()},
}


@needs_cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_presets_settings_attentions_and_orders(machine: Machine, name: str) -> None:
    """Presets and settings of a run in all its steps; others on a grid that neither blocks nor cells divide."""
    dtype, side = HALF[len(name) % 2], 18 if name in PHASES else 16
    model = elfatt_sd.apply_patch(machine.move(tiny.unet(**SMALL), dtype), CONFIGS[name])
    with recorded() as calls:
        for machine.step in range(1 if name in PHASES else STEPS):
            made = machine.call(model, dtype, side=side)
            assert (made.device, made.dtype, made.shape) == (GPU, dtype, (2, 4, side, side))
    assert calls


@needs_cuda
@pytest.mark.parametrize(
    ("name", "given"),
    [(ELSEWHERE[0], torch.device("cpu")), *((name, given) for name in ELSEWHERE for given in (OTHER, None))],
    ids=str,
)
def test_inputs_and_levels_on_other_devices(machine: Machine, name: str, given: torch.device | None) -> None:
    """Accelerate moves an input after our hook has seen it; and with `dispatch_model` a block has another device."""
    model = machine.move(tiny.unet(**SMALL), torch.float16)
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
def test_compiled_blocks_keep_a_difference_where_they_are(machine: Machine) -> None:
    model = machine.move(tiny.unet(**SMALL), torch.float16)
    elfatt_sd.apply_patch(model, PatchConfig("own", (Phase(1.0, "sampled", keys=16, residual_steps=2),)))
    for module in model.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.compile(backend="eager", fullgraph=True)
    for machine.step in range(2):
        assert machine.call(model, torch.float16, rows=1, side=8).device == GPU


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


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_other_accelerators(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """By what PyTorch's module for them can do."""
    done, device = list[Any](), torch.device(kind)
    told: dict[str, Any] = {"is_available": True, "device_count": 1}
    if kind == "xpu":
        told |= {"get_device_name": "Arc", "mem_get_info": (6, 10), "memory_reserved": 3, "memory_allocated": 2}
        told |= {"max_memory_allocated": 9, "reset_peak_memory_stats": None}
    else:
        told |= {"recommended_max_memory": 10, "driver_allocated_memory": 3}
    names: dict[str, Any] = {name: lambda *_, value=value: value for name, value in told.items()}
    names |= {"synchronize": lambda device=None: done.append(device), "empty_cache": lambda: done.append("emptied")}
    monkeypatch.setattr(torch, kind, SimpleNamespace(**names))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device(kind) == device
    assert devices.memory_of(device) == ((8, 7) if kind == "xpu" else (10, 7))
    assert devices.device_name(device).startswith("Arc" if kind == "xpu" else "mps of ")
    devices.synchronize(device)
    devices.empty_caches()
    assert done == [device if kind == "xpu" else None, "emptied"]
    meter = PeakMeter(device)
    found = (meter.kind, meter.read(), peak_memory(lambda: None, device))
    assert found == (("XPU allocated", 9, 7) if kind == "xpu" else (None, None, None))


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
    attend = lambda q, k, v, _: softmax_attention(q, k, v)  # noqa: E731
    visualize.weights_of(attend, q, k, None, 0)
    assert visualize.same_keys(attend, q, None)[0] is not None
    visualize.errors(q[0, 0], k[0, 0])


def test_rocm_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices have that name, but not CUDA's version, nor in older versions of PyTorch a number."""
    card = SimpleNamespace(total_memory=2**34, major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "MI300X")
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.describe_machine(GPU)["cuda"]["runtime"] == "ROCm 6.3"


@needs_cuda
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_sums_come_from_the_fastest_kernel_that_takes_the_tensors(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """cuDNN from sm_90 on, and FlashAttention where cuDNN refused a head size once, or a user has turned it off."""
    tried: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(softmax, "_REFUSED_BY_CUDNN", set())

    def tries(name: str, kernel: Any, *given: Any, **options: Any) -> Any:
        tried.append(name)
        if name == "cudnn" and given[0].shape[3] == 16:
            raise RuntimeError("No execution plans support the graph.")
        return kernel(*given, **options)

    for name in ("cudnn", "flash"):
        kernel: Any = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
        stub: Any = partial(tries, name, kernel)
        stub.default = kernel.default  # which fake tensors ask for
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", stub)
    new = ["cudnn"] * (capability >= (9, 0))
    for size, wanted in ((8, new or ["flash"]), (16, [*new, "flash"]), (16, ["flash"])):
        with machine.mode, torch.no_grad():
            q, k = (torch.zeros(2, tokens, 3, size, dtype=torch.float16, device=GPU) for tokens in (5, 7))
            part = softmax.attend(q, k, k)
        assert (part.mixed.shape, part.total.shape, part.total.dtype) == (q.shape, q.shape[:3], torch.float32)
        assert tried == wanted
        tried.clear()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with machine.mode, torch.no_grad():
            softmax.attend(q[..., :8], k[..., :8], k[..., :8])
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert tried == ["flash"]
