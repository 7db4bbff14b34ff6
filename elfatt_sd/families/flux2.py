"""Flux.2, dev and klein: Flux's layout, where the attention of single blocks is fused with their feed-forward part."""

from __future__ import annotations

from typing import Any

from torch import nn

from elfatt_sd.errors import ElfattError
from elfatt_sd.families.base import Given, SelfAttention
from elfatt_sd.families.flux import Flux
from elfatt_sd.families.joint import named

_CACHING = ("Flux2KVAttnProcessor", "Flux2KVParallelSelfAttnProcessor")
_REASON = "keeps keys and values of reference images from its first step, which cannot be approximated"


class Flux2(Flux):
    """`Flux2Transformer2DModel`: text first, then the image, then reference images."""

    classes = ("Flux2Transformer2DModel",)
    processors = ("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor")
    axes = 4

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        """Return the attention of every block of both kinds."""
        layers = super().layers(module)
        caching = next((layer.processor_name for layer in layers if layer.processor_name in _CACHING), None)
        if caching is not None:
            raise ElfattError(f"{caching} {_REASON}; give a Flux2KleinPipeline with a transformer of its own.")
        return layers

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given."""
        mode = named(module, args, kwargs).get("kv_cache_mode")
        if mode is not None:
            raise ElfattError(f"kv_cache_mode={mode!r} {_REASON}; call elfatt_sd.remove_patch(pipe) first.")
        return super().call(module, args, kwargs)
