"""A PixArt pipeline of a few thousand random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_pipelines as tiny
import tiny_t5
import torch
from diffusers import DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
from transformers import T5EncoderModel

TEXT_WIDTH = 8


def transformer(**changes: Any) -> PixArtTransformer2DModel:
    """Two blocks of two heads, patches of 2x2 latents."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "in_channels": 4,
        "out_channels": 8,
        "cross_attention_dim": 16,
        "caption_channels": TEXT_WIDTH,
        "sample_size": 32,
        "patch_size": 2,
        "use_additional_conditions": False,
    }
    made = PixArtTransformer2DModel(**{**config, **changes}).eval()
    torch.nn.init.normal_(made.proj_out.weight, std=0.2)
    return made


def tokenizer(folder: Path) -> Any:
    """A T5 tokenizer of a few words."""
    return tiny_t5.tokenizer(folder, ("▁a", "▁b"), length=16)


def text_encoder() -> T5EncoderModel:
    return tiny_t5.text_encoder(5, TEXT_WIDTH)


def pixart(folder: Path) -> PixArtAlphaPipeline:
    pipe = PixArtAlphaPipeline(
        tokenizer=tokenizer(folder / "tokenizer"),
        text_encoder=text_encoder(),
        vae=tiny.vae(),
        transformer=transformer(),
        scheduler=DDIMScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
    )
    return tiny.quiet(pipe)  # type: ignore[no-any-return]
