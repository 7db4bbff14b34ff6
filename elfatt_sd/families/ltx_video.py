"""LTX-Video: self-attention over the tokens of a video, and cross-attention to text, which stays as it is."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.families.base import Fill, Given, SelfAttention, some_timestep
from elfatt_sd.families.joint import JointFamily, named, read_once
from elfatt_sd.methods import Grid
from elfatt_sd.tiling import NO_GRID

_TEXT_TOKENS = 128


class LTXVideo(JointFamily):
    """`LTXVideoTransformer3DModel`, which is given tokens, and their frames, rows and columns."""

    classes = ("LTXVideoTransformer3DModel",)
    processors = ("LTXVideoAttnProcessor", "LTXVideoAttentionProcessor2_0")
    default = Grid(21, 16, 22)
    patch = (1, 1, 1)

    def layers(self, module: nn.Module) -> list[SelfAttention]:
        return self.blocks(module, "transformer_blocks", "attn1", "norm1")

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what a call was given; of timesteps by token, the noisiest one."""
        given = named(module, args, kwargs)
        timestep, coordinates = given["timestep"], given.get("video_coords")
        size = [given.get(name) for name in ("num_frames", "height", "width")]
        before, grid = 0, NO_GRID if None in size else Grid(*size)  # type: ignore[arg-type]
        if coordinates is not None:
            before, grid = read_once(coordinates, lambda: _read_video(coordinates))
        noisiest = timestep.amax(1) if timestep.ndim == 2 else timestep
        return Given(given["hidden_states"], noisiest, grid, before=before)

    def arguments(self, module: nn.Module, grid: Grid, batch: int, fill: Fill) -> dict[str, Any]:
        """Return arguments of a call."""
        config: Any = module.config
        sample = fill(batch, grid.tokens, config.in_channels)
        return {
            "hidden_states": sample,
            "encoder_hidden_states": fill(batch, _TEXT_TOKENS, config.caption_channels),
            "timestep": some_timestep(sample.device).expand(batch),
            "encoder_attention_mask": torch.ones(batch, _TEXT_TOKENS, device=sample.device, dtype=sample.dtype),
            "num_frames": grid.frames,
            "height": grid.rows,
            "width": grid.columns,
        }


def _read_video(coordinates: Tensor) -> tuple[int, Grid]:
    """Read off coordinates `[batch, axes, tokens]` how many tokens of given frames come first, and the video's grid."""
    known = coordinates[0].to("cpu", torch.float64)
    before = int((known == known.amin(1, keepdim=True)).all(0).nonzero().amax())
    own = known[:, before:]
    axes = [axis.unique() for axis in own]
    whole = own.shape[1] == math.prod(map(len, axes)) and torch.equal(torch.cartesian_prod(*axes).T, own)
    return (before, Grid(*map(len, axes))) if whole else (0, NO_GRID)
