"""One self-attention layer outside its pipeline, patched as `apply_patch` does it: to time it, or to see its error."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.config import PatchConfig
from elfatt_sd.families import Given, SelfAttention, copy_structure
from elfatt_sd.runtime.call import Denoiser
from elfatt_sd.runtime.processor import PatchedLayer
from elfatt_sd.runtime.schedule import Position, Run


class StandaloneLayer:
    """A copy of a layer with a method; the original stays as it is, and both have the same weights."""

    def __init__(self, layer: SelfAttention, config: PatchConfig, index: int = 0) -> None:
        attention: Any = layer.attention
        self._attention: Any = copy_structure(attention)
        self._denoiser = Denoiser(config)
        self._layer = PatchedLayer(
            dataclasses.replace(layer, attention=self._attention), index, layer.processor, self._denoiser
        )
        self._denoiser.layers = [self._layer]
        self._layer.install()

    def begin(
        self, position: Position, latent: torch.Size | tuple[int, ...], block_input: Tensor | None = None
    ) -> None:
        """Prepare for a denoising step, as at the beginning of a UNet call."""
        device = next(self._attention.parameters()).device
        sample = torch.empty(1, dtype=torch.float32, device=device).expand(latent)
        self._denoiser.begin(position, Run(), Given.latent(sample, position.step))
        state = self._layer.state
        if state is not None:
            state.block_input = block_input

    def __call__(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self._attention(hidden_states)
        return output
