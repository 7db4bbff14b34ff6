"""Peak memory: what PyTorch has allocated on CUDA; on a CPU that of the process, or of the tensors of one call.

Where a system does not tell, the peak is None, which is shown as not measured.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from elfatt_sd.devices import is_out_of_memory, memory_counters, proc_value, synchronize
from elfatt_sd.measuring.clock import Call

_PROCESS_KINDS = {"linux": "VmHWM", "win32": "peak working set", "darwin": "maximum resident set"}


def process_peak() -> int | None:
    if sys.platform == "darwin":
        return _resident_on_macos()
    if value := proc_value("/proc/self/status", "VmHWM"):  # ru_maxrss would include the parent's before `exec`
        return int(value.split()[0]) * 1024
    peak: int | None = getattr(psutil.Process().memory_info(), "peak_wset", None)  # on Windows
    return peak


def _resident_on_macos() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # in bytes there


class PeakMeter:
    """Reads the highest memory use of a device: PyTorch's on CUDA, ROCm and XPU, on a CPU that of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind: str | None = None  # what is counted; None where it cannot be measured
        self._counters = memory_counters(device)
        if self._counters is not None:
            self.kind = f"{device.type.upper()} allocated"
            self.restart()
        elif device.type == "cpu" and process_peak() is not None:
            self.kind = _PROCESS_KINDS.get(sys.platform, sys.platform)

    def restart(self) -> bool:
        """Start again from the present use; tell whether that was possible."""
        if self._counters is not None:
            synchronize(self.device)
            self._counters.reset_peak_memory_stats(self.device)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def read(self) -> int | None:
        """Wait for the device, and return the highest use in bytes; None where it cannot be measured."""
        synchronize(self.device)
        if self._counters is not None:
            return int(self._counters.max_memory_allocated(self.device))
        return process_peak() if self.device.type == "cpu" else None

    def read_reserved(self) -> int | None:
        return None if self._counters is None else int(self._counters.max_memory_reserved(self.device))


@contextmanager
def little_garbage() -> Iterator[None]:
    """Look for garbage once, and pass over what is there: copies of a model take seconds at every `gc.collect`."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Return the bytes that tensors hold at the highest point of a call, beyond what they hold before it.

    On a CPU this is the running sum of what PyTorch's profiler sees allocated and freed. What libraries take without
    PyTorch's allocator, and the pages of the code that runs, is not in it.
    """
    counters = memory_counters(device)
    if counters is None and device.type != "cpu":
        return None
    gc.collect()
    try:
        return _tensors_on_cpu(call) if counters is None else _tensors_on_gpu(call, device, counters)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _tensors_on_gpu(call: Call, device: torch.device, counters: Any) -> int:
    meter, before = PeakMeter(device), int(counters.memory_allocated(device))
    call()
    return (meter.read() or 0) - before


def _tensors_on_cpu(call: Call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiler: Any = profiled.profiler
    events = profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(itertools.accumulate((size for _, size in changes), initial=0))
