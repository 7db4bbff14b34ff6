"""Denoisers of known shapes without weights, the arguments that a denoiser's call takes, and what a call costs."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from elfatt_sd.errors import ElfattError
from elfatt_sd.families import family_of, unwrap
from elfatt_sd.families.base import Fill
from elfatt_sd.families.sizes import SHAPES, Dimensions
from elfatt_sd.families.unet import SCALE
from elfatt_sd.methods import Grid


@dataclass(frozen=True)
class Transformer:
    """The shape of a transformer."""

    kind: str  # name of its class in diffusers
    config: Mapping[str, Any]  # what differs from that class's own
    # the same, for a model with a few of its blocks, which can be timed where the whole one does not fit
    few: Mapping[str, Any]
    channels: int = 16  # of the latent
    scale: int = SCALE  # pixels to one of the latent, on each side
    frames: int = 4  # of a video, past the first one, to one of the latent


_SD35_MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "qk_norm": "rms_norm"}
_SD35_MEDIUM |= {"pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))}
_WAN_SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_COGVIDEOX_5B = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
_FEW = {"num_layers": 2}
_ONE_EACH = {"num_layers": 1, "num_single_layers": 1}
_ONE_AND_TWO = {"num_layers": 1, "num_single_layers": 2}
TRANSFORMERS: dict[str, Transformer] = {
    "pixart": Transformer("PixArtTransformer2DModel", {"caption_channels": 4096}, _FEW, channels=4),
    "sd3.5-medium": Transformer("SD3Transformer2DModel", _SD35_MEDIUM, {**_FEW, "dual_attention_layers": (0,)}),
    "flux": Transformer("FluxTransformer2DModel", {"guidance_embeds": True}, _ONE_AND_TWO),
    "chroma": Transformer("ChromaTransformer2DModel", {}, _ONE_AND_TWO),
    "flux.2": Transformer("Flux2Transformer2DModel", {}, _ONE_AND_TWO, channels=32),
    "qwen-image": Transformer("QwenImageTransformer2DModel", {}, _FEW),
    "z-image": Transformer("ZImageTransformer2DModel", {}, {"n_layers": 2, "n_refiner_layers": 1}),
    "wan-1.3b": Transformer("WanTransformer3DModel", _WAN_SMALL, _FEW),
    "wan-14b": Transformer("WanTransformer3DModel", {}, _FEW),
    "ltx-video": Transformer("LTXVideoTransformer3DModel", {}, _FEW, channels=128, scale=32, frames=8),
    "hunyuan-video": Transformer("HunyuanVideoTransformer3DModel", {}, {**_ONE_EACH, "num_refiner_layers": 1}),
    "hunyuan-video-1.5": Transformer(
        "HunyuanVideo15Transformer3DModel", {}, {**_FEW, "num_refiner_layers": 1}, channels=32, scale=16
    ),
    "cogvideox-5b": Transformer("CogVideoXTransformer3DModel", _COGVIDEOX_5B, _FEW),
}


@dataclass(frozen=True)
class Sketch:
    """What a plan needs of a pipeline: a denoiser without weights, and pixels of the image to one of the latent."""

    unet: nn.Module | None
    transformer: nn.Module | None = None
    vae_scale_factor: int = SCALE
    vae_scale_factor_temporal: int = 1


def sketch(name: str) -> Sketch:
    """Return a shape of `SHAPES` or `TRANSFORMERS` without weights: nothing is allocated."""
    if name in TRANSFORMERS:
        shape = TRANSFORMERS[name]
        return Sketch(None, empty_transformer(shape), shape.scale, shape.frames)
    return Sketch(empty_unet(SHAPES[name]))


def empty_transformer(shape: Transformer, *, few: bool = False) -> nn.Module:
    """Build a transformer on the meta device, with a few of its blocks or all of them."""
    import diffusers

    make: Any = getattr(diffusers, shape.kind, None)
    if make is None:
        raise ElfattError(
            f"the installed diffusers {diffusers.__version__} has no {shape.kind}; pip install -U diffusers."
        )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' own, of how it builds the model
        transformer: nn.Module = make(**{**shape.config, **(shape.few if few else {})})
    return transformer


def dimensions_of_transformer(name: str) -> Dimensions:
    shape = TRANSFORMERS[name]
    module: Any = empty_transformer(shape, few=True)
    latent = family_of(module).latent(module)
    own = latent.rows * shape.scale, latent.columns * shape.scale
    return Dimensions.of(module.config, {"latent_channels": shape.channels}, shape.scale, own)


def empty_unet(shape: Mapping[str, Any]) -> nn.Module:
    import diffusers

    make: Any = diffusers.UNet2DConditionModel
    with torch.device("meta"):
        unet: nn.Module = make(**shape)
    return unet


def call_arguments(denoiser: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
    module = unwrap(denoiser)
    return family_of(module).arguments(module, grid, batch, fill)


@dataclass(frozen=True)
class Blueprint:
    """A denoiser's class and configuration: as much of it as its call's multiply-adds depend on, without weights."""

    kind: type
    config: str

    @classmethod
    def of(cls, denoiser: nn.Module) -> Blueprint:
        module: Any = unwrap(denoiser)
        return cls(type(module), json.dumps(dict(getattr(module, "config", {})), default=list, sort_keys=True))

    @functools.cache  # noqa: B019 - a blueprint is small, and there are few
    def multiply_adds(self, grid: Grid) -> int | None:
        """Return the multiply-adds of an untouched call for one image; None where it cannot be run without weights."""
        try:
            with (
                warnings.catch_warnings(),
                torch.device("meta"),
                torch.no_grad(),
                FlopCounterMode(display=False) as counter,
            ):
                warnings.simplefilter("ignore")  # of building such a model once more
                module: Any = self.kind.from_config(json.loads(self.config)).eval()  # type: ignore[attr-defined]
                module(**call_arguments(module, grid, 1, torch.empty))
        except Exception:  # of a class that takes other arguments, or reads values: whatever its authors raise
            return None
        return int(counter.get_total_flops()) // 2 or None
