"""Whether images fit into the memory of a device: a rough estimate, told before a run begins.

It is meant for what is many times too large. The factors were measured on the embedded pipeline; attention is taken as
fused, whose memory grows with the tokens alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from elfatt_sd.devices import memory_of
from elfatt_sd.families import main_denoiser, unwrap
from elfatt_sd.planning import frames_to_one
from elfatt_sd.running import dimensions_of, taken
from elfatt_sd.sizes import decoder_widths, transformer_width

_UNET, _TRANSFORMER = 40, 12  # tensors of the first level, or of a block's width, that are held at once
_DECODER = 4.5  # tensors of the decoder's second level, at the size of the image
_FRAME_BYTES = 3 * 4  # of a pixel of a clip that is decoded


def warn_if_too_large(
    pipe: Any, height: int | None, width: int | None, *, rows: int, batch: int = 1, frames: int | None = None
) -> None:
    """Warn of images or clips that are estimated to need more memory than is free on their device."""
    dimensions, each = dimensions_of(pipe), pipe.dtype.itemsize
    height, width = dimensions.size(height, width)
    own = taken(pipe)["num_frames"].default if "num_frames" in taken(pipe) else 1
    clip = frames or (own if isinstance(own, int) else 1)
    length = (clip - 1) // frames_to_one(pipe) + 1  # of the latent
    config: Any = unwrap(main_denoiser(pipe)).config
    channels = config.get("block_out_channels")
    held = _UNET * channels[0] if channels else _TRANSFORMER * transformer_width(config)
    tokens = (height // dimensions.multiple) * (width // dimensions.multiple)
    denoising = held * tokens * length * rows * batch * each
    vae: Any = getattr(pipe, "vae", None)
    decoding = 0.0
    if widths := decoder_widths(vae.config) if hasattr(vae, "decoder") else []:
        tile = getattr(vae, "tile_sample_min_size", None) or getattr(vae, "tile_sample_min_height", None)
        pixels = min(height * width, tile**2 if tile and getattr(vae, "use_tiling", False) else height * width)
        decoding = _DECODER * widths[min(1, len(widths) - 1)] * pixels * batch
        decoding *= 4 if hasattr(pipe, "upcast_vae") else each
    need, device = max(denoising, decoding, _FRAME_BYTES * height * width * clip * batch), torch.device(pipe.device)
    free = memory_of(device)[1]
    if need > free:
        what = f"a batch of {batch} at" if batch > 1 else "an image of"
        warnings.warn(
            f"{what} {width}x{height} needs about {need / 2**30:,.1f} GiB of memory (estimated), and "
            f"{free / 2**30:,.1f} are free on {device.type}: it may fail.",
            stacklevel=3,
        )
