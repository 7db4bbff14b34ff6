"""CUDA graphs of calls that are timed."""

from __future__ import annotations

from functools import cache

import torch

from elfatt_sd.devices import synchronize
from elfatt_sd.measuring.clock import Call


def replayed(call: Call, device: torch.device) -> Call:
    """Return a call that replays a CUDA graph of another one, which leaves out the host's time; on a CPU that one."""
    if device.type != "cuda":
        return call

    @cache
    def capture() -> torch.cuda.CUDAGraph:
        call()
        synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            call()
        return graph

    return lambda: capture().replay()
