"""The state of a layer as autotuning is given it."""

from __future__ import annotations

from typing import Any

import torch

from elfatt_sd.config import PatchConfig
from elfatt_sd.families import find_layers
from elfatt_sd.methods import Grid
from elfatt_sd.runtime.call import Call, Denoiser, LayerState
from elfatt_sd.runtime.processor import PatchedLayer

SAMPLE = torch.zeros(2, 4, 16, 16)


def state_of(pipe: Any, config: PatchConfig) -> LayerState:
    """State of the first layer on the finest grid, as a patch would make it."""
    layer = next(layer for layer in find_layers(pipe.unet) if layer.downsample == 1)
    denoiser = Denoiser(config)
    denoiser.layers = [PatchedLayer(layer, 0, layer.attention.processor, denoiser)]
    return LayerState(denoiser.layers[0], Call(config), layer.grid(Grid.image(*SAMPLE.shape[-2:])))
