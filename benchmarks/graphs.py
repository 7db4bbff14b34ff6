"""A denoiser's call as a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elfatt_sd.benchmarking import unet_call
from elfatt_sd.benchmarking.variants import Variant, forget_residuals, latest_calls, patched_layers
from elfatt_sd.devices import synchronize
from elfatt_sd.measure import Call


def graphed_call(unet: Any, inputs: Mapping[str, Any], variant: Variant) -> Call:
    """Capture a UNet call in a CUDA graph at its first call; what its hooks prepare on the host, that prepares once."""
    call = unet_call(unet, inputs)
    device = next(unet.parameters()).device

    @functools.cache
    def capture() -> torch.cuda.CUDAGraph:
        with _without_generator(unet):
            call()
            call()
            synchronize(device)
            graph = torch.cuda.CUDAGraph()
            for kept in latest_calls(unet) if variant.config.reuse_steps == 1 else ():
                kept.matchings.clear()  # as the hook before a call does
            if variant.measures:
                forget_residuals(unet)
            with repeated_call(unet), torch.inference_mode(), torch.cuda.device(device), torch.cuda.graph(graph):
                unet.forward(**inputs)
        return graph

    return lambda: capture().replay()


def replayed(call: Call, device: torch.device) -> Call:
    """Return a call that replays a CUDA graph of another one, which leaves out the host's time; on a CPU that one."""
    if device.type != "cuda":
        return call

    @functools.cache
    def capture() -> torch.cuda.CUDAGraph:
        call()
        synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            call()
        return graph

    return lambda: capture().replay()


@contextmanager
def repeated_call(unet: nn.Module) -> Iterator[None]:
    """Let `unet.forward` be a part of the latest call: nothing is drawn and no step is looked for."""
    patches = {id(layer.patch): layer.patch for layer in patched_layers(unet)}.values()
    for patch in patches:
        if patch.latest is not None:
            patch.latest.restart()
            patch.enter(patch.latest)
    try:
        yield
    finally:
        for patch in patches:
            patch.end()


@contextmanager
def _without_generator(unet: Any) -> Iterator[None]:
    """Let tomesd draw nothing inside: its own generator cannot be captured."""
    settings = getattr(unet, "_tome_info", {"args": {}})["args"]
    before = dict(settings)
    settings.update(dict.fromkeys(before.keys() & {"use_rand"}, False))
    try:
        yield
    finally:
        settings.update(before)
