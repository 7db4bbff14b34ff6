"""Whole pipelines with transformers, text encoders and decoders of a few thousand random weights, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import tiny_flux
import tiny_joint
import tiny_t5
import tiny_transformers
import torch
from transformers import T5EncoderModel

WIDTH = tiny_joint.WIDTH


def tokenizer(folder: Path) -> Any:
    """A T5 tokenizer that spells."""
    return tiny_t5.tokenizer(folder, ("▁", *(chr(code) for code in range(33, 127))), length=512)


def text_encoder() -> T5EncoderModel:
    return tiny_t5.text_encoder(100, WIDTH)


def _pipeline(folder: Path, name: str, *transformers: Any, **parts: Any) -> Any:
    parts |= {"text_encoder": text_encoder(), "tokenizer": tokenizer(folder / "words")}
    return tiny_joint.pipeline(name, *transformers, **parts)


def _save(folder: Path, name: str, transformer: Any, vae: Any) -> Path:
    _pipeline(folder, name, transformer, vae=vae).save_pretrained(folder / name)
    return folder / name


def _vae(name: str) -> Any:
    """A decoder with factor 8 on each side, and 4 in time."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return getattr(diffusers, name)(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).eval()


def write_flux(folder: Path) -> Path:
    tiny_transformers.flux(folder, vae=tiny_flux.vae()).save_pretrained(folder / "flux")
    return folder / "flux"


def write_qwen_image(folder: Path) -> Path:
    config = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16}
    config |= {"num_attention_heads": 2, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 6, 6)}
    transformer = tiny_joint.transformer("QwenImageTransformer2DModel", **config)
    return _save(folder, "QwenImagePipeline", transformer, _vae("AutoencoderKLQwenImage"))


def write_wan(folder: Path) -> Path:
    return _save(folder, "WanPipeline", tiny_joint.wan_transformer(), _vae("AutoencoderKLWan"))


def wan22(folder: Path) -> Any:
    """Two transformers, of which the second takes over at 0.8 of the noise."""
    transformers = tiny_joint.wan_transformer(), tiny_joint.wan_transformer()
    return _pipeline(folder, "WanPipeline", *transformers, boundary_ratio=0.8, vae=_vae("AutoencoderKLWan"))
