"""Stable Diffusion 3 and 3.5 and their ControlNets: joint blocks with absolute positions, the image before the text."""

from __future__ import annotations

from dataclasses import replace
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
        side = int(module.config.sample_size)  # type: ignore[union-attr, arg-type]
        return Grid.image(side, side)

    def patch_of(self, module: nn.Module) -> tuple[int, int, int]:
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
        given = named(module, args, kwargs)
        sample = given["hidden_states"]
        grid = self.grid(module, Grid.image(*map(int, sample.shape[-2:])))
        return Given(sample, given["timestep"], grid, partial=bool(given.get("skip_layers")))

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        sample = fill(batch, config.in_channels, grid.rows * config.patch_size, grid.columns * config.patch_size)
        text = config.joint_attention_dim  # none in a ControlNet of 3.5 large
        return {
            "hidden_states": sample,
            "encoder_hidden_states": None if text is None else fill(batch, self.text, text),
            "pooled_projections": fill(batch, config.pooled_projection_dim),
            "timestep": some_timestep(sample.device).expand(batch),
        }


class SD3ControlNet(StableDiffusion3):
    """`SD3ControlNetModel`: blocks of Stable Diffusion 3; that of 3.5 large has no text, and is given tokens."""

    classes = ("SD3ControlNetModel",)

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        layers = super().layers(module)
        return layers if module.context_embedder is not None else [replace(layer, text=0) for layer in layers]

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = named(module, args, kwargs)
        latent = Grid.image(*map(int, given["controlnet_cond"].shape[-2:]))
        return Given(given["hidden_states"], given["timestep"], self.grid(module, latent))

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        given = super().arguments(module, grid, batch, fill)
        size = given["hidden_states"].shape[-2:]
        given["controlnet_cond"] = fill(batch, config.in_channels + config.extra_conditioning_channels, *size)
        if module.pos_embed is None:
            given["hidden_states"] = fill(batch, grid.tokens, module.inner_dim)
        return given
