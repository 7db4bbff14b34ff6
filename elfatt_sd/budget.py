"""Whether a run can fit into this machine: its memory and its time, estimated before it begins.

Both are rough, and meant to be: they find what is many times too large. The factors were measured on the embedded
pipeline; attention is taken as fused, whose memory grows with the tokens alone.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from elfatt_sd.devices import memory_of
from elfatt_sd.families import family_of, find_layers, main_denoiser, unwrap
from elfatt_sd.measuring.clock import timed
from elfatt_sd.methods import Grid
from elfatt_sd.planning import frames_to_one
from elfatt_sd.progress import duration
from elfatt_sd.running import dimensions_of, taken
from elfatt_sd.sizes import Dimensions, in_words, refuse_if_beyond

LONG = 30 * 60  # seconds that are worth a warning
_WORTH_TIMING = 1e13  # multiply-adds; fewer than that are not long on any machine
_FRAME_BYTES = 3 * 4  # of a pixel of a clip that is decoded
_REACHED = 0.3  # fraction of a matrix product's rate that a whole run reaches


@dataclass(frozen=True)
class Need:
    """What images take.

    Attributes:
        memory: bytes at the peak of a batch, weights not counted.
        multiply_adds: of all steps and the decoder for one image, with exact attention.
    """

    memory: float
    multiply_adds: float


def check_fits(
    pipe: Any,
    height: int | None,
    width: int | None,
    *,
    steps: int,
    images: int,
    rows: int,
    batch: int = 1,
    frames: int | None = None,
) -> None:
    """Refuse an image or clip that cannot fit into the memory of its device; warn when it is near, or takes very long.

    Args:
        pipe: a text-to-image or text-to-video pipeline, loaded.
        height: in pixels; None is the model's own.
        width: in pixels; None is the model's own.
        steps: denoising steps.
        images: how many are drawn, for their time.
        rows: of the denoiser's batch for one image, two with guidance.
        batch: images that are drawn at once.
        frames: of a clip; None is the model's own.

    Raises:
        ElfattError: the estimate is above all that the machine has.
    """
    need = estimate(pipe, height, width, steps=steps, rows=rows, batch=batch, frames=frames)
    device = torch.device(pipe.device)
    memory, size = memory_of(device), dimensions_of(pipe).size(height, width)
    refuse_if_beyond(size, need.memory, device.type, memory, batch)
    if need.memory > 0.8 * memory[1]:
        warnings.warn(f"{in_words(size, need.memory, device.type, memory, batch)}: it may fail.", stacklevel=3)
    if need.multiply_adds * images > _WORTH_TIMING:
        seconds = need.multiply_adds * images / (_REACHED * _rate(device, pipe.dtype))
        if seconds > LONG:
            warnings.warn(f"this run takes about {duration(seconds)} on {device.type} (estimated).", stacklevel=3)


def estimate(
    pipe: Any,
    height: int | None,
    width: int | None,
    *,
    steps: int,
    rows: int = 2,
    batch: int = 1,
    frames: int | None = None,
) -> Need:
    """Estimate what an image, or a batch at once, takes; arguments as for `check_fits`."""
    dimensions, denoiser = dimensions_of(pipe), unwrap(main_denoiser(pipe))
    size = dimensions.size(height, width)
    pixels, clip = size[0] * size[1], _frames(pipe, frames)
    vae: Any = getattr(pipe, "vae", None)
    decoded, decoder_work = 0.0, 0.0
    if dimensions.decoder_channels:
        decoded = _decoded_at_once(vae, pixels) * (4 if hasattr(pipe, "upcast_vae") else pipe.dtype.itemsize)
        decoder_work = clip * _convolved(reversed(vae.decoder.up_blocks), pixels)
    length = (clip - 1) // frames_to_one(pipe) + 1  # of the latent
    call = _call(denoiser, dimensions, size, length)
    memory = dimensions.memory(size, rows * batch * length, pipe.dtype.itemsize, decoded, batch)
    return Need(max(memory, _FRAME_BYTES * pixels * clip * batch), call * rows * steps + decoder_work)


def _frames(pipe: Any, frames: int | None) -> int:
    """Return the frames of a clip: as they were given, or the pipeline's own; 1 of a pipeline that draws images."""
    takes = taken(pipe)
    if "num_frames" not in takes:
        return 1
    own = takes["num_frames"].default
    return frames or (own if isinstance(own, int) else 1)


def _call(denoiser: Any, dimensions: Dimensions, size: tuple[int, int], frames: int) -> float:
    """Return the multiply-adds of a denoiser's call for one row; a UNet attends within each frame."""
    rows, columns = size[0] // dimensions.factor, size[1] // dimensions.factor
    of_unet = hasattr(denoiser, "down_blocks")
    given = family_of(denoiser).grid(denoiser, Grid(1 if of_unet else frames, rows, columns))
    layers = find_layers(denoiser)
    tokens = [layer.grid(given).tokens for layer in layers]
    if of_unet:
        weights = sum(_convolved(blocks, rows * columns) for blocks in (denoiser.down_blocks, denoiser.up_blocks[::-1]))
    else:  # every weight acts on every token
        weights = max(tokens) * _count(denoiser)
    attention = sum(2 * count**2 * layer.channels for count, layer in zip(tokens, layers, strict=True))
    return float(weights + attention) * (frames if of_unet else 1)


def _decoded_at_once(vae: Any, pixels: int) -> int:
    """Return the pixels that a decoder works on at once: those of a tile, where it works by tiles."""
    tile = getattr(vae, "tile_sample_min_size", None) or getattr(vae, "tile_sample_min_height", None)
    return min(pixels, tile**2) if tile and getattr(vae, "use_tiling", False) else pixels


def _convolved(blocks: Any, positions: int) -> float:
    """Return the multiply-adds of blocks whose weights act at every position, each level on a fourth of them."""
    return float(sum(_count(block) * positions / 4**level for level, block in enumerate(blocks)))


def _count(module: Any) -> int:
    """Return the number of a module's weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiply-adds a second of a matrix product."""
    side = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    return side**3 / min(timed(lambda: matrix @ matrix, device) for _ in range(3))
