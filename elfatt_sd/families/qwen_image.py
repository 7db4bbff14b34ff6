"""Qwen-Image, its editing and layered models: joint blocks, text before the image, reference images after it."""

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

    def latent(self, module: nn.Module) -> Grid:
        return Grid(5, 80, 80) if _is_layered(module) else self.default

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        return self.blocks(module, "transformer_blocks", "attn", "img_norm1")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given; of the shapes of its images, the first is that of the one to be made.

        A layered model makes all but the last: its layers are frames.
        """
        given = named(module, args, kwargs)
        shapes = given["img_shapes"][0]
        (frames, rows, columns), *others = shapes if isinstance(shapes, list) else [shapes]
        if _is_layered(module) and others:
            alike = all(tuple(shape) == (frames, rows, columns) for shape in others[:-1])
            frames = frames * len(others) if alike else 0
        text = given["encoder_hidden_states"].shape[1]
        grid = Grid(frames, rows, columns)
        return Given(given["hidden_states"], given["timestep"], grid, before=text, unit=FRACTION)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        sample = fill(batch, grid.tokens, config.in_channels)
        given = {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, self.text, config.joint_attention_dim),
            "timestep": some_timestep(sample.device, FRACTION).expand(batch),
            "img_shapes": [[tuple(grid)]] * batch,
        }
        if config.get("use_additional_t_cond"):
            given["additional_t_cond"] = fill(batch).long()
        if _is_layered(module):  # the image that is taken apart comes last
            layer = (1, grid.rows, grid.columns)
            given["img_shapes"] = [[layer] * (grid.frames + 1)] * batch
            given["hidden_states"] = fill(batch, grid.tokens + grid.rows * grid.columns, config.in_channels)
        return given


class QwenImageControlNet(QwenImage):
    """`QwenImageControlNetModel`: blocks of Qwen-Image."""

    classes = ("QwenImageControlNetModel",)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        config: Any = module.config
        channels = config.in_channels + config.extra_condition_channels
        return {**super().arguments(module, grid, batch, fill), "controlnet_cond": fill(batch, grid.tokens, channels)}


def _is_layered(module: nn.Module) -> bool:
    config: Any = module.config
    return bool(config.get("use_layer3d_rope"))
