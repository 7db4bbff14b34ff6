"""Pipelines with diffusion transformers of a few thousand random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_pipelines as tiny
import tiny_pixart
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel


def flux_transformer(**changes: Any) -> FluxTransformer2DModel:
    """One block of each kind, two heads of 16 channels."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": tiny_pixart.TEXT_WIDTH,
        "pooled_projection_dim": tiny.TEXT_WIDTH,
        "axes_dims_rope": (4, 6, 6),
    }
    return FluxTransformer2DModel(**{**config, **changes}).eval()


def flow_scheduler(**changes: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **changes})


def flux(folder: Path, kind: Any = FluxPipeline, **parts: Any) -> Any:
    """A Flux pipeline, or one of its kinds."""
    given = {
        "scheduler": flow_scheduler(),
        "vae": tiny.vae(),
        "text_encoder": tiny.text_encoder(),
        "tokenizer": tiny.tokenizer(folder / "tokenizer"),
        "text_encoder_2": tiny_pixart.text_encoder(),
        "tokenizer_2": tiny_pixart.tokenizer(folder / "tokenizer_2"),
        "transformer": flux_transformer(),
    }
    return tiny.quiet(kind(**{**given, **parts}))
