"""Wan 2.1 and 2.2: self-attention over the tokens of a video, and cross-attention to text, which stays as it is."""

from __future__ import annotations

from typing import Any

from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, named
from elfatt_sd.methods import Grid


class Wan(JointFamily):
    """`WanTransformer3DModel`; 2.2 goes on with a second one in the low noise."""

    classes = ("WanTransformer3DModel",)
    processors = ("WanAttnProcessor", "WanAttnProcessor2_0")
    default = Grid(21, 60, 104)

    def patch_of(self, module: nn.Module) -> tuple[int, int, int]:
        frames, rows, columns = module.config.patch_size  # type: ignore[union-attr, misc]
        return frames, rows, columns

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        return self.blocks(module, "blocks", "attn1", "norm1")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = named(module, args, kwargs)
        sample, timestep = given["hidden_states"], given["timestep"]
        latent = Grid(*map(int, sample.shape[-3:]))
        return Given(sample, timestep.amax(1) if timestep.ndim == 2 else timestep, self.grid(module, latent))

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        size = [tokens * patch for tokens, patch in zip(grid, self.patch_of(module), strict=True)]
        sample = fill(batch, config.in_channels, *size)
        given = {
            "hidden_states": sample,
            "timestep": some_timestep(sample.device).expand(batch),
            "encoder_hidden_states": fill(batch, 512, config.text_dim),
        }
        if config.image_dim:
            given["encoder_hidden_states_image"] = fill(batch, 257, config.image_dim)
        return given
