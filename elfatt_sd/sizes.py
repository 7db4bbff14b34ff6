"""Sizes of images that a model can draw and a machine can hold, from a model's configuration: without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elfatt_sd.errors import ElfattError

UNET_FACTOR = 40  # tensors of the UNet's first level that are held at once, skip connections and feed-forward included
VAE_FACTOR = 4.5  # tensors of the decoder's second level, at the size of the image
_SMALL = 0.5  # fraction of the model's own side below which images are of little use


@dataclass(frozen=True)
class Dimensions:
    """What the size and the memory of an image depend on.

    Attributes:
        own: height and width that the model was trained for, in pixels.
        factor: pixels to one of the latent, on each side.
        levels: of the UNet; each but the first halves the latent.
        channels: of the UNet's first level.
        decoder_channels: of the decoder's second level; 0 without a decoder.
    """

    own: tuple[int, int]
    factor: int
    levels: int
    channels: int
    decoder_channels: int

    @classmethod
    def of(cls, unet: Mapping[str, Any], vae: Mapping[str, Any] | None, factor: int | None = None) -> Dimensions:
        """Read them off the configurations of a UNet and of its decoder.

        Args:
            unet: the UNet's configuration.
            vae: the decoder's; None without one.
            factor: as the pipeline gives it; None follows from the decoder.
        """
        widths = list(vae["block_out_channels"]) if vae else []
        factor = factor or (2 ** (len(widths) - 1) if widths else 8)
        side = unet["sample_size"]
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        channels = unet["block_out_channels"]
        second = widths[min(1, len(widths) - 1)] if widths else 0
        return cls((sides[0] * factor, sides[1] * factor), factor, len(channels), channels[0], second)

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Return height and width in pixels: as they were given, or the model's own."""
        return self.own[0] if height is None else height, self.own[1] if width is None else width

    def memory(self, size: tuple[int, int], batch: int, bytes_each: int, decoder_bytes: float | None = None) -> float:
        """Estimate the bytes at the peak of one image, weights not counted.

        Args:
            size: height and width in pixels.
            batch: rows of the UNet's batch.
            bytes_each: of a number.
            decoder_bytes: of all numbers at one channel of the decoder; None is the whole image at `bytes_each`.
        """
        pixels = size[0] * size[1]
        latents = (size[0] // self.factor) * (size[1] // self.factor)
        denoising = UNET_FACTOR * batch * self.channels * latents * bytes_each
        decoding = (
            VAE_FACTOR * self.decoder_channels * (pixels * bytes_each if decoder_bytes is None else decoder_bytes)
        )
        return max(denoising, decoding)

    def check(self, height: int | None, width: int | None) -> None:
        """Refuse a side that the UNet's levels cannot halve.

        Raises:
            ElfattError: a side is too small.
        """
        least = self.factor * 2 ** (self.levels - 1)
        for name, pixels in (("height", height), ("width", width)):
            if pixels is not None and pixels < least:
                raise ElfattError(
                    f"{name}={pixels} is not accepted; this model needs at least {least}, and is made for "
                    f"{self.own[0]}x{self.own[1]}."
                )

    def small(self, height: int | None, width: int | None) -> str:
        """Return what to say of an image that is far smaller than the model's own; empty where it is not."""
        size = self.size(height, width)
        if all(side >= _SMALL * own for side, own in zip(size, self.own, strict=True)):
            return ""
        return f"the model is made for images of {self.own[0]}x{self.own[1]}; expect poor ones at {size[0]}x{size[1]}."


def dimensions_in(folder: Path) -> Dimensions | None:
    """Read the dimensions off a pipeline directory; None where it does not tell them."""
    unet, vae = (_config(folder / part) for part in ("unet", "vae"))
    try:
        return None if unet is None else Dimensions.of(unet, vae)
    except (KeyError, TypeError, IndexError):
        return None


def _config(part: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((part / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def memory_of_cpu() -> tuple[float, float]:
    """Return the bytes of memory that this process could have, and those that are free now."""
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


def in_words(size: tuple[int, int], need: float, device: str, memory: tuple[float, float]) -> str:
    """Return what an image needs and what there is, all memory and what is free of it, as the middle of a sentence."""
    what = f"an image of {size[0]}x{size[1]} needs about {_gib(need)} of memory (estimated)"
    return f"{what}, and {device} has {_gib(memory[0])}, of which {_gib(memory[1])} are free"


def refuse_if_beyond(size: tuple[int, int], need: float, device: str, memory: tuple[float, float]) -> None:
    """Refuse an image that is estimated to need more than all the memory of a device.

    Raises:
        ElfattError: it does.
    """
    if need > memory[0]:
        raise ElfattError(
            f"{in_words(size, need, device, memory)}; give a smaller height and width, or try with --force."
        )


def _gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.1f} GiB" if gib < 10 else f"{gib:,.0f} GiB"
