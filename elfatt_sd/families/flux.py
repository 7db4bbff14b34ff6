"""Flux.1 and Chroma: blocks that join text and image, then blocks in which they are one sequence; rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, grid_of_ids, named
from elfatt_sd.methods import Grid
from elfatt_sd.timesteps import FRACTION


class Flux(JointFamily):
    """`FluxTransformer2DModel`: text first, then the image, then reference images (Kontext)."""

    classes = ("FluxTransformer2DModel",)
    processors: ClassVar[tuple[str, ...]] = (
        "FluxAttnProcessor",
        "FluxAttnProcessor2_0",
        "FusedFluxAttnProcessor2_0",
        "FluxSingleAttnProcessor2_0",
    )
    text = 512
    axes: ClassVar[int] = 3  # columns of the position ids; the second counts rows, the third one columns

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        double = self.blocks(module, "transformer_blocks", "attn", "norm1")
        return double + self.blocks(module, "single_transformer_blocks", "attn", "norm")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = named(module, args, kwargs)
        text, grid = given["encoder_hidden_states"].shape[1], grid_of_ids(given["img_ids"])
        return Given(given["hidden_states"], given["timestep"], grid, before=text, unit=FRACTION)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        sample = fill(batch, grid.tokens, config.in_channels)
        ids = torch.zeros(grid.tokens, self.axes, device=sample.device, dtype=sample.dtype)
        place = torch.arange(grid.tokens, device=sample.device)
        ids[:, 1], ids[:, 2] = place // grid.columns, place % grid.columns
        given = {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, self.text, config.joint_attention_dim),
            "timestep": some_timestep(sample.device, FRACTION).expand(batch),
            "img_ids": ids,
            "txt_ids": torch.zeros(self.text, self.axes, device=sample.device, dtype=sample.dtype),
        }
        if "pooled_projection_dim" in config:
            given["pooled_projections"] = fill(batch, config.pooled_projection_dim)
        return {**given, "guidance": fill(batch) + 3.5} if config.get("guidance_embeds") else given


class FluxControlNet(Flux):
    """`FluxControlNetModel`: blocks of Flux; one that takes several kinds of images is told which by a text token."""

    classes = ("FluxControlNetModel",)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = super().call(module, args, kwargs)
        return replace(given, before=given.before + bool(module.union))

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        given = super().arguments(module, grid, batch, fill)
        given["controlnet_cond"] = given["hidden_states"]
        if module.input_hint_block is not None:  # three convolutions halve its image
            pixels = 8 * module.config.patch_size  # type: ignore[operator,union-attr]
            given["controlnet_cond"] = fill(batch, 3, grid.rows * pixels, grid.columns * pixels)
        return {**given, "controlnet_mode": fill(batch, 1).long()} if module.union else given


class Chroma(Flux):
    """`ChromaTransformer2DModel`: Flux without pooled text, where a mask leaves the padding of the text out."""

    classes = ("ChromaTransformer2DModel",)
    masks_text = True
