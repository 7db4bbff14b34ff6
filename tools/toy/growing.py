"""Train a UNet from its inner levels outwards, on ever larger grids, while it stays a plain `UNet2DConditionModel`.

The inner levels see the noisy latents averaged over 4x4 or 2x2 cells, as the outer levels will hand them on later.
Layout is thus learned where an image has 256 tokens, and outlines where it has 4096. Legend: n images, c channels,
h and w the grid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.toy import models

MATRIX_KEYS = 1024  # up to which attention is computed as plain matrix products in training


class Denoiser(nn.Module):
    """The UNet, the text encoder trained along, and, while training lasts, an entrance and exit to inner levels."""

    def __init__(self, sizes: models.Sizes) -> None:
        """Build all with random weights."""
        super().__init__()
        self.unet = models.build("unet", sizes)
        self.text_encoder = models.build("text_encoder", sizes)
        widths = sizes.unet
        self.entrances = nn.ModuleList([nn.Conv2d(4, widths[i - 1], 3, padding=1) for i in (1, 2)])
        self.exits = nn.ModuleList([_exit(widths[i], sizes.groups) for i in (1, 2)])

    @property
    def doors(self) -> nn.Module:
        """Entrances and exits, which are not part of the pipeline."""
        return nn.ModuleDict({"entrances": self.entrances, "exits": self.exits})

    def forward(self, noisy: Tensor, timesteps: Tensor, tokens: Tensor, level: int) -> Tensor:
        """Predict velocities.

        Args:
            noisy: noisy latents averaged to the grid of `level`, `[n, 4, h, w]`.
            timesteps: `[n]`.
            tokens: prompts `[n, TOKENS]`.
            level: the outermost level used, from 0 (all) to 2.

        Returns:
            velocities on the same grid, `[n, 4, h, w]`.
        """
        context = self.text_encoder(tokens)[0]
        if level == 0:
            return self.unet(noisy, timesteps, context).sample  # type: ignore[no-any-return]
        hidden = inner_levels(self.unet, self.entrances[level - 1](noisy), timesteps, context, level)
        return self.exits[level - 1](hidden)  # type: ignore[no-any-return]


def _exit(width: int, groups: int) -> nn.Module:
    return nn.Sequential(nn.GroupNorm(groups, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))


def inner_levels(unet: Any, hidden: Tensor, timesteps: Tensor, context: Tensor, level: int) -> Tensor:
    """Run the levels of a UNet from `level` inwards and back, as its own `forward` would.

    Args:
        unet: a `UNet2DConditionModel` of attention blocks.
        hidden: what the outer levels would hand down, `[n, c, h, w]`.
        timesteps: `[n]`.
        context: encoded prompts `[n, tokens, width]`.
        level: the outermost level used, 1 or more.

    Returns:
        what level `level` hands up before its upsampling, `[n, c, h, w]`.
    """
    time = unet.time_embedding(unet.time_proj(timesteps).to(hidden.dtype))
    kept: tuple[Tensor, ...] = (hidden,)
    for block in unet.down_blocks[level:]:
        hidden, made = block(hidden, time, encoder_hidden_states=context)
        kept += tuple(made)
    hidden = unet.mid_block(hidden, time, encoder_hidden_states=context)
    blocks = unet.up_blocks[: len(unet.up_blocks) - level]
    for block in blocks:
        count = len(block.resnets)
        upsamplers = block.upsamplers
        block.upsamplers = None if block is blocks[-1] else upsamplers
        hidden = block(hidden, kept[-count:], time, encoder_hidden_states=context)
        block.upsamplers = upsamplers
        kept = kept[:-count]
    return hidden


class TrainingAttention:
    """Softmax attention whose backward pass is fast on a CPU: plain matrix products, or fused float32 for many keys.

    Self-attention may be limited to a coarse grid of keys: every s-th row and column, from a random corner. On fine
    grids of smooth features that estimates full attention at a fraction of its cost. It is for pre-training only.
    """

    def __init__(self, side: int | None = None) -> None:
        """Keep at most `side` rows and columns of keys in self-attention, or all."""
        self.side = side

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Attend; `hidden_states` is `[n, h * w, c]` of a square grid, `encoder_hidden_states` `[n, tokens, width]`."""
        source = self._keys(hidden_states) if encoder_hidden_states is None else encoder_hidden_states
        split = (len(source), -1, attn.heads, attn.to_q.out_features // attn.heads)
        query, key, value = (
            layer(states).view(split).transpose(1, 2)
            for layer, states in ((attn.to_q, hidden_states), (attn.to_k, source), (attn.to_v, source))
        )
        if key.shape[2] > MATRIX_KEYS:
            mixed = functional.scaled_dot_product_attention(query.float(), key.float(), value.float())
        else:
            mixed = (query * attn.scale @ key.transpose(2, 3)).softmax(3).to(value.dtype) @ value
        return attn.to_out[1](attn.to_out[0](mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]

    def _keys(self, hidden: Tensor) -> Tensor:
        batch, tokens, _ = hidden.shape
        side = round(tokens**0.5)
        if self.side is None or side <= self.side:
            return hidden
        stride = side // self.side
        row, column = (int(i) for i in torch.randint(stride, (2,)))
        return hidden.view(batch, side, side, -1)[:, row::stride, column::stride].flatten(1, 2)


def train_with(unet: Any, side: int | None) -> None:
    """Install `TrainingAttention(side)` on all layers."""
    unet.set_attn_processor({name: TrainingAttention(side) for name in unet.attn_processors})
