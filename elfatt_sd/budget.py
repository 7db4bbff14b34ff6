"""Whether a run can fit into this machine: its memory and its time, estimated before it begins.

Both are rough, and meant to be: they find what is many times too large. The factors were measured on the embedded
pipeline; attention is taken as fused, whose memory grows with the tokens alone.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from elfatt_sd.devices import memory_of
from elfatt_sd.families import find_layers, main_denoiser, unwrap
from elfatt_sd.methods import Grid
from elfatt_sd.sizes import Dimensions, in_words, refuse_if_beyond

LONG = 30 * 60  # seconds that are worth a warning
_WORTH_TIMING = 1e13  # multiply-adds; fewer than that are not long on any machine
_REACHED = 0.3  # fraction of a matrix product's rate that a whole run reaches


@dataclass(frozen=True)
class Need:
    """What one image takes.

    Attributes:
        memory: bytes at the peak, weights not counted.
        multiply_adds: of all steps and the decoder, with exact attention.
    """

    memory: float
    multiply_adds: float


def check_fits(pipe: Any, height: int | None, width: int | None, *, steps: int, images: int, guided: bool) -> None:
    """Refuse an image that cannot fit into the memory of its device; warn when it is near, or takes very long.

    Args:
        pipe: a text-to-image pipeline with a UNet, loaded.
        height: in pixels; None is the model's own.
        width: in pixels; None is the model's own.
        steps: denoising steps.
        images: how many are drawn.
        guided: whether the UNet is called with two inputs for each image.

    Raises:
        ElfattError: the estimate is above all that the machine has.
    """
    need = estimate(pipe, height, width, steps=steps, guided=guided)
    device = torch.device(pipe.device)
    memory, size = memory_of(device), dimensions_of(pipe).size(height, width)
    refuse_if_beyond(size, need.memory, device.type, memory)
    if need.memory > 0.8 * memory[1]:
        warnings.warn(f"{in_words(size, need.memory, device.type, memory)}: it may fail.", stacklevel=3)
    if need.multiply_adds * images > _WORTH_TIMING:
        seconds = need.multiply_adds * images / (_REACHED * _rate(device, pipe.dtype))
        if seconds > LONG:
            warnings.warn(f"this run takes about {_duration(seconds)} on {device.type} (estimated).", stacklevel=3)


def estimate(pipe: Any, height: int | None, width: int | None, *, steps: int, guided: bool = True) -> Need:
    """Estimate what one image takes; arguments as for `check_fits`."""
    unet: Any = unwrap(main_denoiser(pipe))
    dimensions = dimensions_of(pipe)
    size = dimensions.size(height, width)
    pixels, rows, columns = size[0] * size[1], size[0] // dimensions.factor, size[1] // dimensions.factor
    vae: Any = getattr(pipe, "vae", None)
    decoded, decoder_work = 0.0, 0.0
    if dimensions.decoder_channels:
        decoded = min(pixels, vae.tile_sample_min_size**2) if getattr(vae, "use_tiling", False) else pixels
        decoded *= 4 if hasattr(pipe, "upcast_vae") else pipe.dtype.itemsize
        decoder_work = _convolved(reversed(vae.decoder.up_blocks), pixels)
    call: float = sum(_convolved(blocks, rows * columns) for blocks in (unet.down_blocks, reversed(unet.up_blocks)))
    for layer in find_layers(unet):
        tokens = layer.grid(Grid.image(rows, columns)).tokens
        call += 2 * tokens**2 * layer.channels
    memory = dimensions.memory(size, 1 + guided, pipe.dtype.itemsize, decoded)
    return Need(memory, call * (1 + guided) * steps + decoder_work)


def dimensions_of(pipe: Any) -> Dimensions:
    """Return the dimensions of a pipeline's images."""
    unet: Any = unwrap(main_denoiser(pipe))
    vae: Any = getattr(pipe, "vae", None)
    decoder = vae.config if hasattr(vae, "decoder") else None
    return Dimensions.of(unet.config, decoder, int(getattr(pipe, "vae_scale_factor", 8)))


def _convolved(blocks: Any, positions: int) -> float:
    """Return the multiply-adds of blocks whose weights act at every position, each level on a fourth of them."""
    weights = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    return float(sum(count * positions / 4**level for level, count in enumerate(weights)))


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiply-adds a second of a matrix product."""
    side, best = 512 if device.type == "cpu" else 4096, float("inf")
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    for _ in range(3):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading a number waits for it
        best = min(best, time.perf_counter() - start)
    return side**3 / best


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return (
        f"{seconds / 60:.0f} minutes"
        if hours < 2
        else f"{hours:.0f} hours"
        if hours < 48
        else f"{hours / 24:,.0f} days"
    )
