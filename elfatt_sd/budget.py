"""Whether a run can fit into this machine: its memory and its time, estimated before it begins.

Both are rough, and meant to be: they find what is many times too large. The factors were measured on the embedded
pipeline; attention is taken as fused, whose memory grows with the tokens alone.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.config import ElfattError
from elfatt_sd.families import find_layers, main_denoiser, unwrap

UNET_FACTOR = 40  # tensors of the UNet's first level that are held at once, skip connections and feed-forward included
VAE_FACTOR = 4.5  # tensors of the decoder's second level, at the size of the image
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
    total, free = memory_of(device)
    what = f"an image of {_size(pipe, height)}x{_size(pipe, width, 1)} needs about {_gib(need.memory)} of memory"
    there = f"{device.type} has {_gib(total)}, of which {_gib(free)} are free"
    if need.memory > total:
        raise ElfattError(f"{what} (estimated), and {there}; give a smaller height and width, or try with --force.")
    if need.memory > 0.8 * free:
        warnings.warn(f"{what} (estimated), and {there}: it may fail.", stacklevel=3)
    if need.multiply_adds * images > _WORTH_TIMING:
        seconds = need.multiply_adds * images / (_REACHED * _rate(device, pipe.dtype))
        if seconds > LONG:
            warnings.warn(f"this run takes about {_duration(seconds)} on {device.type} (estimated).", stacklevel=3)


def estimate(pipe: Any, height: int | None, width: int | None, *, steps: int, guided: bool = True) -> Need:
    """Estimate what one image takes; arguments as for `check_fits`."""
    unet: Any = unwrap(main_denoiser(pipe))
    pixels = _size(pipe, height) * _size(pipe, width, 1)
    rows, columns = (_size(pipe, side, axis) // _factor(pipe) for axis, side in enumerate((height, width)))
    batch, size = 1 + guided, pipe.dtype.itemsize
    denoising: float = UNET_FACTOR * batch * unet.config.block_out_channels[0] * rows * columns * size
    vae = getattr(pipe, "vae", None)
    decoding, decoder_work = 0.0, 0.0
    if vae is not None and hasattr(vae, "decoder"):
        widths = vae.config.block_out_channels
        tiled: float = min(pixels, vae.tile_sample_min_size**2) if getattr(vae, "use_tiling", False) else pixels
        decoding = VAE_FACTOR * widths[min(1, len(widths) - 1)] * tiled * (4 if hasattr(pipe, "upcast_vae") else size)
        decoder_work = _convolved(reversed(vae.decoder.up_blocks), pixels)
    call: float = sum(_convolved(blocks, rows * columns) for blocks in (unet.down_blocks, reversed(unet.up_blocks)))
    for layer in find_layers(unet):
        high, wide = layer.grid(rows, columns)
        call += 2 * (high * wide) ** 2 * layer.attention.inner_dim
    return Need(max(denoising, decoding), call * batch * steps + decoder_work)


def memory_of(device: torch.device) -> tuple[float, float]:
    """Return the bytes that this process could have on a device, and those that are free now."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(whole - torch.cuda.memory_allocated(device)), float(free + cached)
    import psutil

    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    available = float(min([memory.total, *_container_limit()]) - own)
    return available, min(available, float(memory.available))


def _container_limit() -> list[int]:
    """Return what a container may have, where there is a limit."""
    try:
        return [int(Path("/sys/fs/cgroup/memory.max").read_text())]
    except (OSError, ValueError):  # no such file, or "max"
        return []


def _factor(pipe: Any) -> int:
    return int(getattr(pipe, "vae_scale_factor", 8))


def _size(pipe: Any, given: int | None, axis: int = 0) -> int:
    """Return a side in pixels: as it was given, or the model's own."""
    if given is not None:
        return given
    denoiser: Any = unwrap(main_denoiser(pipe))
    own = denoiser.config.sample_size
    return int(own[axis] if isinstance(own, list | tuple) else own) * _factor(pipe)


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


def _gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.1f} GiB" if gib < 10 else f"{gib:,.0f} GiB"


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return (
        f"{seconds / 60:.0f} minutes"
        if hours < 2
        else f"{hours:.0f} hours"
        if hours < 48
        else f"{hours / 24:,.0f} days"
    )
