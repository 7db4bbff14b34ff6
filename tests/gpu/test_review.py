"""What a review found wrong on GPUs, each without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import generator
from support.kernels import GPU, Machine, fake_machine
from torch.nn import functional

import elfatt_sd
from elfatt_sd import ElfattError, devices
from elfatt_sd.attention.softmax import make_ready, softmax_attention
from elfatt_sd.drawing import doctor
from elfatt_sd.drawing.studio import peak_in_words
from elfatt_sd.families.base import PlainProjections
from elfatt_sd.loading import pick_device
from elfatt_sd.measure import PeakMeter, peak_memory
from elfatt_sd.runtime import autotune
from elfatt_sd.visualize import looks


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_machine() as machine:
        yield machine


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


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is not built for CUDA")
def test_a_capture_by_somebody_else_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would replay one phase and one sample for ever."""
    unet = elfatt_sd.apply_patch(machine.move(tiny.unet(), torch.float16), "elfatt-fast")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ElfattError, match="a CUDA graph of a patched model would replay"):
        machine.call(unet, torch.float16)


@pytest.mark.parametrize("bias", [False, True])
def test_sampled_keys_are_projected_alone_by_a_fused_weight(bias: bool) -> None:
    torch.manual_seed(0)
    unet = tiny.unet()
    layer: Any = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    if bias:
        for projection in (layer.to_q, layer.to_k, layer.to_v):
            projection.bias = torch.nn.Parameter(torch.randn(projection.out_features))
        layer.use_bias = True
    tokens, keys = torch.randn(2, 64, 16), torch.tensor([3, 9, 40])
    with torch.no_grad():
        wanted = PlainProjections(layer, tokens).project(tokens, keys)
        layer.fuse_projections()
        rows: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            linear = functional.linear
            patch.setattr(functional, "linear", lambda x, *given: rows.append(x.shape[1]) or linear(x, *given))
            found = PlainProjections(layer, tokens, fused=True).project(tokens, keys)
    assert rows == [64, 3]
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)


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
    waited: list[Any] = []
    names: dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 1}
    if kind == "xpu":
        names |= {"synchronize": lambda device=None: waited.append(device), "get_device_name": lambda device: "Arc"}
        names |= {"mem_get_info": lambda device: (6, 10), "memory_reserved": lambda device: 3}
        names |= {"memory_allocated": lambda device: 2, "max_memory_allocated": lambda device: 9}
        names |= {"max_memory_reserved": lambda device: 10, "reset_peak_memory_stats": waited.append}
    else:
        names |= {"synchronize": lambda: waited.append(None), "recommended_max_memory": lambda: 10}
        names |= {"driver_allocated_memory": lambda: 3}
    names["empty_cache"] = lambda: emptied.append(kind)
    emptied: list[str] = []
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
    told = (meter.kind, meter.read(), meter.read_reserved(), peak_memory(lambda: None, device))
    assert told == (("XPU allocated", 9, 10, 7) if kind == "xpu" else (None, None, None, None))
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
    assert doctor.attention_error("cpu") < 1e-5
    looks.exact_weights(q[0, 0], k[0])
    attend = lambda q, k, v, _: softmax_attention(q, k, v)  # noqa: E731
    looks.weights_of(attend, q, k, None, 0)
    assert looks.same_keys(attend, q.shape, None, q)[0] is not None
    looks.errors(q[0, 0], k[0, 0])


def test_rocm_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices have that name, but not CUDA's version, nor in older versions of PyTorch a number."""
    card = SimpleNamespace(total_memory=2**34, major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices._cuda(GPU)["runtime"] == "ROCm 6.3"
    assert devices.read_clocks(GPU) == {}
