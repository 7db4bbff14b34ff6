"""Peak memory of a call: what its tensors hold at the highest point, as PyTorch's allocators count it."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from elfatt_sd.benchmarking.timing import Call
from elfatt_sd.devices import is_out_of_memory, synchronize


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Return the bytes that tensors hold at the highest point of a call, beyond what they hold before it.

    On a CPU this is the running sum of what PyTorch's profiler sees allocated and freed. What libraries take without
    PyTorch's allocator, and the pages of the code that runs, is not in it.

    Args:
        call: what to run, once.
        device: that it runs on.

    Returns:
        None where the device does not tell, or where there is not as much memory.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    gc.collect()
    try:
        return _peak_of_cuda(call, device) if device.type == "cuda" else _peak_of_cpu(call)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _peak_of_cuda(call: Call, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_of_cpu(call: Call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiler: Any = profiled.profiler
    events = profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(itertools.accumulate((size for _, size in changes), initial=0))
