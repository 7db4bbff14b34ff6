"""HunyuanVideo and 1.5: joint blocks, the video before padded text; the refiner of the text stays exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, named
from elfatt_sd.methods import Grid


class HunyuanVideo(JointFamily):
    """`HunyuanVideoTransformer3DModel`: blocks of both kinds."""

    classes = ("HunyuanVideoTransformer3DModel",)
    processors = ("HunyuanVideoAttnProcessor2_0",)
    text = 256
    masks_text = True
    default = Grid(33, 90, 160)

    def patch_of(self, module: nn.Module) -> tuple[int, int, int]:
        config: Any = module.config
        return config.patch_size_t, config.patch_size, config.patch_size

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        double = self.blocks(module, "transformer_blocks", "attn", "norm1")
        return double + self.blocks(module, "single_transformer_blocks", "attn", "norm")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = named(module, args, kwargs)
        sample = given["hidden_states"]
        return Given(sample, given["timestep"], self.grid(module, Grid(*map(int, sample.shape[-3:]))))

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        given = self._video(module, grid, batch, fill)
        given["pooled_projections"] = fill(batch, config.pooled_projection_dim)
        return {**given, "guidance": fill(batch) + 6.0} if config.guidance_embeds else given

    def _video(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        size = [tokens * patch for tokens, patch in zip(grid, self.patch_of(module), strict=True)]
        sample = fill(batch, config.in_channels, *size)
        return {
            "hidden_states": sample,
            "timestep": some_timestep(sample.device, dtype=sample.dtype).expand(batch),
            "encoder_hidden_states": fill(batch, self.text, config.text_embed_dim),
            "encoder_attention_mask": torch.ones(batch, self.text, device=sample.device, dtype=torch.long),
        }


class HunyuanVideo15(HunyuanVideo):
    """`HunyuanVideo15Transformer3DModel`: joint blocks alone, text of two encoders and of an image."""

    classes = ("HunyuanVideo15Transformer3DModel",)
    processors = ("HunyuanVideo15AttnProcessor2_0",)
    text = 1000
    default = Grid(31, 45, 80)

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        return self.blocks(module, "transformer_blocks", "attn", "norm1")

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        given = self._video(module, grid, batch, fill)
        device = given["hidden_states"].device
        return {
            **given,
            "encoder_hidden_states_2": fill(batch, 256, config.text_embed_2_dim),
            "encoder_attention_mask_2": torch.ones(batch, 256, device=device, dtype=torch.long),
            "image_embeds": fill(batch, 729, config.image_embed_dim),
        }
