"""Z-Image: one sequence of image and text, each padded to a multiple of 32 tokens; its refiners stay exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, named
from elfatt_sd.methods import Grid
from elfatt_sd.tiling import NO_GRID
from elfatt_sd.timesteps import RISING

_MULTIPLE = 32  # of tokens, that texts and images are padded to


class ZImage(JointFamily):
    """`ZImageTransformer2DModel`, which is given a list of images, or of lists of images."""

    classes = ("ZImageTransformer2DModel",)
    processors = ("ZSingleStreamAttnProcessor",)
    text = 128

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        return self.blocks(module, "layers", "attention", "attention_norm1")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given; images of several sizes have no grid.

        Rows of several images (Omni) are texts, images of which the last one is to be made, and what an encoder sees in
        them. Where those before it are not equally long in all rows, it has no grid.
        """
        given = named(module, args, kwargs)
        rows, side, time = given["x"], given.get("patch_size", 2), given.get("f_patch_size", 1)
        several = isinstance(rows[0], list)
        images = [row[-1] for row in rows] if several else rows
        grids = {_grid(image, side, time) for image in images}
        texts = zip(rows, given["cap_feats"], strict=True)
        starts = {_before(row, text, side, time) for row, text in texts} if several else {0}
        grid = grids.pop() if len(grids) == len(starts) == 1 else NO_GRID
        return Given(_batch(images), given["t"], grid, before=starts.pop(), unit=RISING)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        sample = fill(module.in_channels, grid.frames, 2 * grid.rows, 2 * grid.columns)
        return {
            "x": [sample] * batch,
            "t": some_timestep(sample.device, RISING).expand(batch),
            "cap_feats": [fill(self.text, module.config.cap_feat_dim)] * batch,  # type: ignore[union-attr]
        }


class ZImageControlNet(ZImage):
    """`ZImageControlNetModel`: it shares the embeddings and refiners of its transformer."""

    classes = ("ZImageControlNetModel",)

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        return self.blocks(module, "control_layers", "attention", "attention_norm1")

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call, for a model that has its transformer's embeddings."""
        config: Any = module.config
        size = grid.frames, 2 * grid.rows, 2 * grid.columns
        embedder: Any = module.all_x_embedder
        width: Any = module.cap_embedder
        sample = fill(embedder["2-1"].in_features // 4, *size)
        return {
            "x": [sample] * batch,
            "t": some_timestep(sample.device, RISING).expand(batch),
            "cap_feats": [fill(self.text, width[0].weight.shape[0])] * batch,
            "control_context": [fill(config.control_in_dim, *size)] * batch,
        }


def _batch(images: list[Tensor]) -> Tensor:
    first = images[0]
    if torch.is_grad_enabled() or any(image.shape != first.shape for image in images):
        return first[None].expand(len(images), *first.shape)
    return torch.stack(images)


def _grid(image: Tensor, side: int, time: int) -> Grid:
    _, frames, rows, columns = map(int, image.shape)
    return Grid(frames // time, rows // side, columns // side)


def _before(row: list[Any], texts: list[Any], side: int, time: int) -> int:
    images = (_MULTIPLE if image is None else _grid(image, side, time).tokens for image in row[:-1])
    return sum(-(-length // _MULTIPLE) * _MULTIPLE for length in (*map(len, texts), *images))
