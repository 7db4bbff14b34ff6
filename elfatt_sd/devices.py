"""The device that computes: its name, what Linux tells of it, when it is done, and when its memory has run out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elfatt_sd.errors import ElfattError

_DEVICE_ERROR = re.compile(r"(CUDA|HIP|XPU) error: ")
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "status_alloc_failed",  # cuBLAS, and cuDNN before 9
    "device_allocation_failed",  # cuDNN
    "host_allocation_failed",
)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{os.cpu_count()} cores of {cpu_name()}"
    named = getattr(_of(device), "get_device_name", None)
    return str(named(device)) if named is not None else f"{device.type} of {platform.machine()}"


def _of(device: torch.device) -> Any:
    return getattr(torch, device.type, None)


@functools.cache
def cpu_name() -> str:
    return proc_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def proc_value(file: str, key: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def accelerators() -> dict[str, int]:
    """Return the kinds of devices that are there besides the CPU, the one to take first, and the number of each."""
    found = {}
    for kind in ("cuda", "xpu", "mps"):
        module = getattr(torch, kind, None)
        available = getattr(module, "is_available", getattr(getattr(torch.backends, kind, None), "is_available", None))
        if module is not None and available is not None and available():
            found[kind] = int(module.device_count())
    return found


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; the CPU always has."""
    wait = getattr(_of(device), "synchronize", None)
    if device.type == "cpu" or wait is None:
        return
    if "device" in inspect.signature(wait).parameters:
        wait(device)
    else:  # there is only one
        wait()


def empty_caches() -> None:
    """Give back what PyTorch keeps of freed memory, on all accelerators."""
    for kind in accelerators():
        getattr(torch, kind).empty_cache()


def standard_normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw in float32 on the CPU, whatever PyTorch's default dtype and device are."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


@contextlib.contextmanager
def plain_defaults() -> Iterator[None]:
    """Make modules in float32 on the CPU, whatever PyTorch's default dtype and device are."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@functools.cache
def has_float64(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float32, device=device).double()
    except (TypeError, RuntimeError):
        return False
    return True


def memory_counters(device: torch.device) -> Any:
    module = _of(device)
    return module if device.type != "cpu" and hasattr(module, "max_memory_allocated") else None


def in_optimized_module() -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this
    return bool(getattr(frames, "_is_in_optimized_module", bool)())


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor:
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def written(tensor: torch.Tensor) -> object:
    """Return what differs once a tensor has been written or moved, without waiting for its device.

    Inference tensors do not count how often they are written: theirs differs every time.
    """
    tensor = beneath_transforms(tensor)
    if tensor.is_inference():
        return object()
    memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _NO_MEMORY)


def is_device_error(error: BaseException) -> bool:
    kind = getattr(torch, "AcceleratorError", None)  # since PyTorch 2.8
    if kind is not None and isinstance(error, kind):
        return True
    return isinstance(error, RuntimeError) and bool(_DEVICE_ERROR.match(str(error)))


def is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_TRACED = (
    "a trace or an export of a patched model would hold one step's phase and random draws in every step; call "
    "elfatt_sd.remove_patch(pipe) first, or use torch.compile."
)


def is_exporting() -> bool:
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))  # since PyTorch 2.8


@torch.compiler.disable(reason=_TRACED)  # type: ignore[untyped-decorator, no-untyped-call]
def refuse_tracing(device: torch.device) -> None:
    """Refuse what would make a program of one call, of a patched model or of a part of it."""
    if is_captured(device):
        raise ElfattError(
            "a CUDA graph of a patched model would replay one step's phase and random draws in every step; use "
            "torch.compile(mode='reduce-overhead'), or call elfatt_sd.remove_patch(pipe) first."
        )
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # of make_fx
    if torch._C._is_tracing() or is_exporting() or proxies is not None:
        raise ElfattError(_TRACED)


def memory_of(device: torch.device) -> tuple[float, float]:
    """Return the bytes that this process could have on a device, and those that are free now."""
    kind = _of(device)
    if hasattr(kind, "mem_get_info") and device.type != "cpu":  # CUDA, ROCm, XPU
        free, whole = kind.mem_get_info(device)
        cached = kind.memory_reserved(device) - kind.memory_allocated(device)
        return float(whole - kind.memory_allocated(device)), float(free + cached)
    if hasattr(kind, "recommended_max_memory"):  # MPS, which shares the memory of the CPU
        whole = float(kind.recommended_max_memory())
        return whole, max(0.0, whole - kind.driver_allocated_memory())
    import psutil

    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    try:  # what a container may have, where there is a limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        limit = memory.total
    available = float(min(memory.total, limit) - own)
    return available, min(available, float(memory.available))
