"""Qwen-Image and its editing models: joint blocks, text before the image, reference images after it."""

from __future__ import annotations

from typing import Any

from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, named
from elfatt_sd.methods import Grid
from elfatt_sd.timesteps import FRACTION


class QwenImage(JointFamily):
    """`QwenImageTransformer2DModel`."""

    classes = ("QwenImageTransformer2DModel",)
    processors = ("QwenDoubleStreamAttnProcessor2_0",)
    text = 256
    default = Grid.image(166, 166)

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        """Return the attention of every block."""
        return self.blocks(module, "transformer_blocks", "attn", "img_norm1")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given; of the shapes of its images, the first is that of the one to be made."""
        given = named(module, args, kwargs)
        shape = given["img_shapes"][0]
        grid = Grid(*(shape[0] if isinstance(shape, list) else shape))
        return Given(given["hidden_states"], given["timestep"], grid, given["encoder_hidden_states"].shape[1], FRACTION)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        sample = fill(batch, grid.tokens, config.in_channels)
        return {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, self.text, config.joint_attention_dim),
            "timestep": some_timestep(sample.device, fraction=True).expand(batch),
            "img_shapes": [[tuple(grid)]] * batch,
        }
