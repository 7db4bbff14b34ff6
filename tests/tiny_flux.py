"""Pipelines of Flux's relatives with a few thousand random weights: Chroma, Flux.2, and Flux's ControlNet."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import tiny_pipelines as tiny
import tiny_pixart
import tiny_transformers as transformers
import torch

_BLOCKS: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
}


def vae() -> Any:
    """A VAE that takes images as well."""
    made = tiny.vae()
    made.register_to_config(shift_factor=0.1)
    return made


def controlnet(**changes: Any) -> Any:
    """A ControlNet of Flux with an effect."""
    from diffusers import FluxControlNetModel

    torch.manual_seed(3)
    text = {"joint_attention_dim": tiny_pixart.TEXT_WIDTH, "pooled_projection_dim": tiny.TEXT_WIDTH}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own import
        net = FluxControlNetModel(**{**_BLOCKS, **text, "axes_dims_rope": (4, 6, 6), **changes}).eval()
    with torch.no_grad():
        for layer in [*net.controlnet_blocks, *net.controlnet_single_blocks, net.controlnet_x_embedder]:
            layer.weight.normal_(0, 0.3)
    return net


def chroma_transformer() -> Any:
    from diffusers import ChromaTransformer2DModel

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own import
        return ChromaTransformer2DModel(
            **_BLOCKS,
            joint_attention_dim=tiny_pixart.TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ).eval()


def chroma(folder: Path, kind: Any = None, **parts: Any) -> Any:
    """A Chroma pipeline, or one of its kinds."""
    from diffusers import ChromaPipeline

    given = {
        "scheduler": transformers.flow_scheduler(),
        "vae": vae(),
        "text_encoder": tiny_pixart.text_encoder(),
        "tokenizer": tiny_pixart.tokenizer(folder / "tokenizer"),
        "transformer": chroma_transformer(),
    }
    return tiny.quiet((kind or ChromaPipeline)(**{**given, **parts}))


def flux2(kind: Any = None, **parts: Any) -> Any:
    """A Flux.2 pipeline, or one of its kinds, that is given its text as embeddings."""
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline, Flux2Transformer2DModel

    torch.manual_seed(0)
    transformer = Flux2Transformer2DModel(
        **_BLOCKS,
        joint_attention_dim=tiny_pixart.TEXT_WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        timestep_guidance_channels=16,
    ).eval()
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        sample_size=32,
    ).eval()
    given = {
        "scheduler": transformers.flow_scheduler(),
        "vae": vae,
        "text_encoder": None,
        "tokenizer": None,
        "transformer": transformer,
    }
    return tiny.quiet((kind or Flux2Pipeline)(**{**given, **parts}))
