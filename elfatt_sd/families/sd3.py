"""Stable Diffusion 3 and 3.5: joint blocks with absolute positions, the image before the text."""

from __future__ import annotations

from typing import Any

from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, named
from elfatt_sd.methods import Grid


class StableDiffusion3(JointFamily):
    """`SD3Transformer2DModel`; in 3.5 medium, some blocks have a second attention over the image alone."""

    classes = ("SD3Transformer2DModel",)
    processors = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0")
    text = 333
    merges = True

    def latent(self, module: nn.Module) -> Grid:
        """Return the size that the model was configured for."""
        side = int(module.config.sample_size)  # type: ignore[union-attr, arg-type]
        return Grid.image(side, side)

    def patch_of(self, module: nn.Module) -> tuple[int, int, int]:
        """Return the patch size."""
        side = int(module.config.patch_size)  # type: ignore[union-attr, arg-type]
        return 1, side, side

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        """Return the attention of every block, and the second one where there is one."""
        layers = []
        for index, block in enumerate(module.transformer_blocks):  # type: ignore[arg-type]
            name = f"transformer_blocks.{index}.attn"
            layers.append(self.layer(name, block.attn, block.norm1))
            if getattr(block, "attn2", None) is not None:
                layers.append(self.layer(f"{name}2", block.attn2, block.norm1, text=0))
        return layers

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given."""
        given = named(module, args, kwargs)
        sample = given["hidden_states"]
        return Given(sample, given["timestep"], self.grid(module, Grid.image(*map(int, sample.shape[-2:]))))

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        sample = fill(batch, config.in_channels, grid.rows * config.patch_size, grid.columns * config.patch_size)
        return {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, self.text, config.joint_attention_dim),
            "pooled_projections": fill(batch, config.pooled_projection_dim),
            "timestep": some_timestep(sample.device).expand(batch),
        }
