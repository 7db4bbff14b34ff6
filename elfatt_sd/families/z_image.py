"""Z-Image: one sequence of image and text, each padded to a multiple of 32 tokens; its refiners stay exact."""

from __future__ import annotations

from typing import Any

from torch import nn

from elfatt_sd.families.base import Fill, Given, SelfAttention
from elfatt_sd.families.joint import JointFamily, named
from elfatt_sd.methods import Grid
from elfatt_sd.timesteps import RISING


class ZImage(JointFamily):
    """`ZImageTransformer2DModel`, which is given a list of images; those of one call have one size."""

    classes = ("ZImageTransformer2DModel",)
    processors = ("ZSingleStreamAttnProcessor",)
    text = 128

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        """Return the attention of every main block."""
        return self.blocks(module, "layers", "attention", "attention_norm1")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given; images of several sizes, or with references between, have no grid."""
        given = named(module, args, kwargs)
        images = given["x"]
        first = images[0][-1] if isinstance(images[0], list) else images[0]
        side, time = given.get("patch_size", 2), given.get("f_patch_size", 1)
        _, frames, rows, columns = map(int, first.shape)
        alike = not isinstance(images[0], list) and all(image.shape == first.shape for image in images)
        grid = Grid(frames // time, rows // side, columns // side) if alike else Grid(0, 0, 0)
        return Given(first[None].expand(len(images), *first.shape), given["t"], grid, unit=RISING)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        image = fill(config.in_channels, grid.frames, 2 * grid.rows, 2 * grid.columns)
        return {
            "x": [image] * batch,
            "t": fill(batch) + 0.28,
            "cap_feats": [fill(self.text, config.cap_feat_dim)] * batch,
        }
