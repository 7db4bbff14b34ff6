"""The device that computes: its name, what Linux tells of it, when it is done, and when its memory has run out."""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.sizes import memory_of_cpu

_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "status_alloc_failed",  # cuBLAS, and cuDNN before 9
    "device_allocation_failed",  # cuDNN
    "host_allocation_failed",
)


def device_name(device: torch.device) -> str:
    """Return the name of the processor that a device stands for."""
    if device.type == "cpu":
        return f"{os.cpu_count()} cores of {cpu_name()}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} of {platform.machine()}"


@functools.cache
def cpu_name() -> str:
    """Return the model of the CPU, or its architecture where the system does not tell."""
    return proc_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def proc_value(file: str, key: str) -> str | None:
    """Return the first value of a key in a file of `/proc`, None where there is none."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize()


def in_optimized_module() -> bool:
    """Tell whether a call comes from what `torch.compile(module)` returned."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this
    return bool(getattr(frames, "_is_in_optimized_module", bool)())


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor within those of `torch.func`, which have no memory of their own."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _NO_MEMORY)


def memory_of(device: torch.device) -> tuple[float, float]:
    """Return the bytes that this process could have on a device, and those that are free now."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(whole - torch.cuda.memory_allocated(device)), float(free + cached)
    return memory_of_cpu()
