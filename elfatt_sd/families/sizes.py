"""Sizes of images that a model can draw, from its configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elfatt_sd.errors import ElfattError

_SMALL = 0.5  # fraction of the model's own side below which images are of little use

Config = Mapping[str, Any]

# UNets to time with random weights.
SHAPES: dict[str, dict[str, Any]] = {
    "sd15": {
        "sample_size": 64,
        "block_out_channels": (320, 640, 1280, 1280),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "attention_head_dim": 8,
        "cross_attention_dim": 768,
    },
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "use_linear_projection": True,
    },
}
UNET_NAMES = tuple(SHAPES)
IMAGE_NAMES = ("pixart", "sd3.5-medium", "flux", "chroma", "flux.2", "qwen-image", "z-image")
VIDEO_NAMES = ("wan-1.3b", "wan-14b", "ltx-video", "hunyuan-video", "hunyuan-video-1.5", "cogvideox-5b")
TRANSFORMER_NAMES = (*IMAGE_NAMES, *VIDEO_NAMES)  # of `shapes`
SHAPE_NAMES = (*UNET_NAMES, *TRANSFORMER_NAMES)
SHAPE_VAE = {"block_out_channels": (128, 256, 512, 512), "latent_channels": 4}


@dataclass(frozen=True)
class Dimensions:
    """What the size of an image depends on."""

    own: tuple[int, int]  # height and width that the model was trained for, in pixels
    factor: int  # pixels to one of the latent, on each side
    least: int  # pixels of the smallest side that the denoiser can take
    multiple: int  # pixels that every side is a multiple of

    @classmethod
    def of(
        cls, denoiser: Config, vae: Config | None, factor: int | None = None, own: tuple[int, int] | None = None
    ) -> Dimensions:
        """Read them off the configurations of a denoiser and of its decoder."""
        widths = decoder_widths(vae or {})
        factor = factor or (2 ** (len(widths) - 1) if widths else 8)
        if own is None:
            sides = (
                denoiser["sample_size"]
                if "sample_height" not in denoiser
                else (denoiser["sample_height"], denoiser["sample_width"])
            )
            height, width = sides if isinstance(sides, list | tuple) else (sides, sides)
            own = height * factor, width * factor
        channels = denoiser.get("block_out_channels")
        if channels:  # each level but the first halves the latent
            least = factor * 2 ** (len(channels) - 1)
            return cls(own, factor, least, factor)
        side = factor * _patch_side(denoiser, vae or {})
        return cls(own, factor, side, side)

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        return self.own[0] if height is None else height, self.own[1] if width is None else width

    def check(self, height: int | None, width: int | None) -> None:
        """Refuse a side that the denoiser cannot take: one that its levels cannot halve, or its patches cannot tile."""
        for name, pixels in (("height", height), ("width", width)):
            if pixels is not None and pixels < self.least:
                raise ElfattError(
                    f"{name}={pixels} is not accepted; this model needs at least {self.least}, and is made for "
                    f"{self.own[0]}x{self.own[1]}."
                )
            if pixels is not None and pixels % self.multiple:
                raise ElfattError(f"{name}={pixels} is not accepted; this model needs a multiple of {self.multiple}.")

    def small(self, height: int | None, width: int | None) -> str:
        size = self.size(height, width)
        if all(side >= _SMALL * own for side, own in zip(size, self.own, strict=True)):
            return ""
        return f"the model is made for images of {self.own[0]}x{self.own[1]}; expect poor ones at {size[0]}x{size[1]}."


def transformer_width(config: Config) -> int:
    """Return the channels of a transformer's tokens."""
    if "num_attention_heads" in config and "attention_head_dim" in config:
        return int(config["num_attention_heads"] * config["attention_head_dim"])
    return int(config["hidden_size"] if "hidden_size" in config else config["dim"])


def _patch_side(transformer: Config, vae: Config) -> int:
    packed = transformer.get("in_channels", 0) / (vae.get("latent_channels") or vae.get("z_dim") or math.inf)
    if packed > 1 and math.isqrt(int(packed)) ** 2 == packed:
        return math.isqrt(int(packed))
    patch = transformer.get("patch_size") or 1
    return int(patch[-1] if isinstance(patch, list | tuple) else patch)


def decoder_widths(vae: Config) -> list[int]:
    widths = vae.get("block_out_channels") or vae.get("decoder_block_out_channels")
    return list(widths or [vae["base_dim"] * times for times in vae.get("dim_mult") or ()])


def dimensions_in(folder: Path) -> Dimensions | None:
    """Read the dimensions off a pipeline directory; None where it does not tell them."""
    unet, transformer, vae = (_config(folder / part) for part in ("unet", "transformer", "vae"))
    try:
        return Dimensions.of(unet or transformer or {}, vae)
    except (LookupError, TypeError, ValueError):
        return None


def _config(part: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((part / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
