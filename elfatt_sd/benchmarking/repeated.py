"""Calls of a patched denoiser that repeat a step, and what they take over from the call before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from elfatt_sd.calls import STATE, Call
from elfatt_sd.processor import PatchedLayer


def patched_layers(unet: nn.Module) -> list[PatchedLayer]:
    return [getattr(module, STATE) for module in unet.modules() if hasattr(module, STATE)]


def _latest_calls(unet: nn.Module) -> list[Call]:
    found = {id(layer.denoiser): layer.denoiser.latest for layer in patched_layers(unet)}
    return [call for call in found.values() if call is not None]


def repeat_step(unet: nn.Module) -> None:
    """Let the call that now begins take over what an earlier one kept, though it is of the same step."""
    for call in _latest_calls(unet):
        call.memory.repeat_step()


@contextmanager
def repeated_call(unet: nn.Module) -> Iterator[None]:
    """Let `unet.forward` be a part of the latest call: nothing is drawn and no step is looked for."""
    denoisers = {id(layer.denoiser): layer.denoiser for layer in patched_layers(unet)}.values()
    for denoiser in denoisers:
        if denoiser.latest is not None:
            denoiser.latest.restart()
            denoiser.enter(denoiser.latest)
    try:
        yield
    finally:
        for denoiser in denoisers:
            denoiser.end()


def forget_residuals(unet: nn.Module) -> None:
    """Forget the differences to exact attention, so that the call that now begins measures them."""
    for call in _latest_calls(unet):
        for state in call.states.values():
            state.residuals.clear()


def forget_matchings(unet: nn.Module) -> None:
    """Forget which tokens the last call merged, so that the call that now begins matches again."""
    for call in _latest_calls(unet):
        call.matchings.clear()
