"""UNets of known shapes without weights, the arguments that a denoiser's call takes, and what a call costs."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from elfatt_sd.layers import unwrap

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
SCALE = 8  # pixels of their images to one of the latent, on each side
TEXT_TOKENS, TIME_IDS = 77, 6
STEP = 720  # of 1000: the first of those that share something, whether 2, 3, 4, 5, 6 or 8 do
Fill = Callable[..., Tensor]


@dataclass(frozen=True)
class Sketch:
    """What a plan needs of a pipeline: a UNet without weights, and pixels of the image to one of the latent."""

    unet: nn.Module
    vae_scale_factor: int = SCALE


def sketch(name: str) -> Sketch:
    """Return a shape of `SHAPES` without weights: nothing is allocated."""
    return Sketch(empty_unet(SHAPES[name]))


def empty_unet(shape: Mapping[str, Any]) -> nn.Module:
    """Build a UNet on the meta device."""
    import diffusers

    make: Any = diffusers.UNet2DConditionModel
    with torch.device("meta"):
        unet: nn.Module = make(**shape)
    return unet


def call_arguments(denoiser: nn.Module, height: int, width: int, batch: int, fill: Fill) -> dict[str, Any]:
    """Return keyword arguments that a diffusers UNet or ControlNet can be called with.

    Args:
        denoiser: the module.
        height: of the latent.
        width: of the latent.
        batch: rows.
        fill: returns a tensor of a shape, given as numbers.
    """
    config: Any = unwrap(denoiser).config
    names = inspect.signature(unwrap(denoiser).forward).parameters
    if "added_time_ids" in names:  # Stable Video Diffusion: frames before channels
        sample = fill(batch, 1, config.in_channels, height, width)
    else:
        frames = [1] * hasattr(unwrap(denoiser), "transformer_in") or [1] * ("motion_num_attention_heads" in config)
        sample = fill(batch, config.in_channels, *frames, height, width)
    timestep = torch.arange(999, -1, -1, device=sample.device)[STEP]
    arguments: dict[str, Any] = {"sample": sample, "timestep": timestep}
    if "encoder_hidden_states" in names:
        arguments["encoder_hidden_states"] = fill(batch, TEXT_TOKENS, _text_width(config))
    if "added_time_ids" in names:
        arguments["added_time_ids"] = fill(batch, 3)
    if "controlnet_cond" in names:
        pixels = 2 ** (len(config.conditioning_embedding_out_channels) - 1)
        channels = config.get("conditioning_channels", 3)
        arguments["controlnet_cond"] = fill(batch, channels, height * pixels, width * pixels)
    if getattr(unwrap(denoiser), "class_embedding", None) is not None:
        arguments["class_labels"] = _class_labels(config, batch, fill)
    if config.get("addition_embed_type") == "text_time":
        pooled = config.projection_class_embeddings_input_dim - TIME_IDS * config.addition_time_embed_dim
        sides = (height * SCALE, width * SCALE)
        sizes = torch.tensor([[*sides, 0, 0, *sides]]).to(sample).expand(batch, -1)
        arguments["added_cond_kwargs"] = {"text_embeds": fill(batch, pooled), "time_ids": sizes}
    return arguments


def _text_width(config: Any) -> int:
    width = config.get("encoder_hid_dim") or config.cross_attention_dim
    return int(max(width) if isinstance(width, list | tuple) else width)


def _class_labels(config: Any, batch: int, fill: Fill) -> Tensor:
    kind = config.get("class_embed_type")
    if kind in ("projection", "simple_projection"):
        return fill(batch, config.projection_class_embeddings_input_dim)
    return fill(batch, 4 * config.block_out_channels[0]) if kind == "identity" else fill(batch).long()


@dataclass(frozen=True)
class Blueprint:
    """A denoiser's class and configuration: as much of it as its call's multiply-adds depend on, without weights."""

    kind: type
    config: str

    @classmethod
    def of(cls, denoiser: nn.Module) -> Blueprint:
        """Take down a denoiser; adapters such as LoRA are left out."""
        module: Any = unwrap(denoiser)
        return cls(type(module), json.dumps(dict(getattr(module, "config", {})), default=list, sort_keys=True))

    @functools.cache  # noqa: B019 - a blueprint is small, and there are few
    def multiply_adds(self, height: int, width: int) -> int | None:
        """Return the multiply-adds of an untouched call for one image; None where it cannot be run without weights.

        Args:
            height: of the latent.
            width: of the latent.
        """
        try:
            with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
                module: Any = self.kind.from_config(json.loads(self.config)).eval()  # type: ignore[attr-defined]
                module(**call_arguments(module, height, width, 1, torch.empty))
        except Exception:  # of a class that takes other arguments, or reads values: whatever its authors raise
            return None
        return int(counter.get_total_flops()) // 2 or None
