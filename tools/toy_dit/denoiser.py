"""Train a Flux transformer on ever finer grids, while it stays a plain `FluxTransformer2DModel`.

A coarse grid shows the whole image, and its tokens carry the coordinates of the finest grid that they stand for.
Legend: n images, t text tokens, m image tokens, k keys, h heads, d channels of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.toy_dit import models

SLOTS = 32  # text tokens in training; the last one stands for all further padding
MATRIX_KEYS = 512  # up to which attention is computed as plain matrix products


class Denoiser(nn.Module):
    """The transformer with the text encoder that is trained along."""

    def __init__(self, sizes: models.Sizes) -> None:
        """Build both with random weights."""
        super().__init__()
        self.grid = sizes.grid
        self.transformer = models.build("transformer", sizes)
        self.text_encoder_2 = models.build("text_encoder_2", sizes)
        self.transformer.set_attn_processor(TrainingAttention())

    def forward(
        self,
        latents: Tensor,
        times: Tensor,
        tokens: Tensor,
        pooled: Tensor,
        padding: int = models.LENGTH - SLOTS,
        keys: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Predict velocities, as a call of `FluxPipeline` with `SLOTS + padding` text tokens does.

        Args:
            latents: noisy latents of a square grid, `[n, 4, 2 rows, 2 rows]`.
            times: from 0 (clean) to 1 (noise), `[n]`.
            tokens: prompts, `[n, SLOTS]`.
            pooled: prompts as the CLIP text encoder sums them up, `[n, width]`.
            padding: text tokens beyond `SLOTS`; all are equal, so one token with their number stands for them.
            keys: rows and columns of image keys in attention, or all.
            generator: chooses those rows and columns.

        Returns:
            velocities, `[n, 4, 2 rows, 2 rows]`.
        """
        rows = latents.shape[-1] // 2
        context = self.text_encoder_2(tokens)[0]
        settings = {"text": tokens.shape[1], "copies": 1 + padding, "keys": keys, "generator": generator}
        velocity = self.transformer(
            hidden_states=pack(latents),
            encoder_hidden_states=context,
            pooled_projections=pooled,
            timestep=times,
            img_ids=positions(rows, self.grid, latents.device),
            txt_ids=torch.zeros(tokens.shape[1], 3, device=latents.device),
            joint_attention_kwargs=settings,
            return_dict=False,
        )[0]
        return unpack(velocity)


def pack(latents: Tensor) -> Tensor:
    """Tokens `[n, m, 16]` of latents `[n, 4, 2 rows, 2 columns]`, as `FluxPipeline` packs them."""
    return functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpack(tokens: Tensor) -> Tensor:
    """The inverse of `pack`, for a square grid."""
    rows = math.isqrt(tokens.shape[1])
    return functional.pixel_shuffle(tokens.transpose(1, 2).reshape(len(tokens), -1, rows, rows), 2)


def positions(rows: int, finest: int, device: torch.device | None = None) -> Tensor:
    """Coordinates `[m, 3]` of a square grid's tokens: the centres of their cells of the finest grid."""
    stride = finest / rows
    ticks = torch.arange(rows, device=device) * stride + (stride - 1) / 2
    row, column = torch.meshgrid(ticks, ticks, indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], 2).flatten(0, 1)


class TrainingAttention:
    """Flux attention with equal padding tokens merged, and optionally with a coarse grid of image keys.

    Both are weighted by the number of tokens they stand for: log(number) is added to their scores. For the padding that
    is exact. The coarse grid, every s-th row and column from a random corner, is an estimate for pre-training.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        text: int = 0,
        copies: int = 1,
        keys: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Attend; see `Denoiser.forward` for the settings.

        Args:
            attn: the layer.
            hidden_states: image tokens `[n, m, c]`, or text and image tokens in blocks with common weights.
            encoder_hidden_states: text tokens `[n, t, c]` in blocks with weights of their own.
            attention_mask: not used.
            image_rotary_emb: cosines and sines, `[t + m, d]` each.
            text: number of text tokens, t; the last one stands for several.
            copies: number of tokens that the last text token stands for.
            keys: rows and columns of image keys.
            generator: chooses the corner of the coarse grid.

        Returns:
            the new image tokens, and the new text tokens if these were given apart.
        """
        joint = encoder_hidden_states is not None
        tokens = hidden_states.shape[1] - (0 if joint else text)
        kept, stride = choose_keys(tokens, keys, generator, hidden_states.device)
        cos, sin = image_rotary_emb if image_rotary_emb is not None else (None, None)
        image = hidden_states if joint else hidden_states[:, text:]
        split = (attn.heads, -1)
        query = normalize(attn.norm_q, attn.to_q(hidden_states).unflatten(2, split))
        seen = image if kept is None else image[:, kept]
        if not joint:
            seen = torch.cat([hidden_states[:, :text], seen], 1)
        key = normalize(attn.norm_k, attn.to_k(seen).unflatten(2, split))
        value = attn.to_v(seen).unflatten(2, split)
        if joint:
            added = normalize(attn.norm_added_q, attn.add_q_proj(encoder_hidden_states).unflatten(2, split))
            query = torch.cat([added, query], 1)
            added = normalize(attn.norm_added_k, attn.add_k_proj(encoder_hidden_states).unflatten(2, split))
            key = torch.cat([added, key], 1)
            value = torch.cat([attn.add_v_proj(encoder_hidden_states).unflatten(2, split), value], 1)
        if cos is not None and sin is not None:
            query = rotate(query, cos, sin)
            places = None if kept is None else torch.cat([torch.arange(text, device=kept.device), text + kept])
            key = rotate(key, cos, sin) if places is None else rotate(key, cos[places], sin[places])
        bias = torch.zeros(key.shape[1], device=key.device)
        bias[text - 1] = math.log(copies)
        bias[text:] = 2 * math.log(stride)
        mixed = attend(query.to(value.dtype), key.to(value.dtype), value, bias).flatten(2)
        if not joint:
            return mixed
        context, mixed = mixed[:, :text], mixed[:, text:]
        return attn.to_out[1](attn.to_out[0](mixed)), attn.to_add_out(context)


def choose_keys(
    tokens: int, keys: int | None, generator: torch.Generator | None, device: torch.device
) -> tuple[Tensor | None, int]:
    """Image tokens of a coarse grid from a random corner, and its stride; `(None, 1)` if all are kept."""
    rows = math.isqrt(tokens)
    if keys is None or rows <= keys:
        return None, 1
    stride = rows // keys
    row, column = torch.randint(stride, (2,), generator=generator, device=device).tolist()
    places = torch.arange(tokens, device=device).view(rows, rows)
    return places[row::stride, column::stride].flatten(), stride


def normalize(norm: Any, x: Tensor) -> Tensor:
    """Apply an RMS normalisation in the type of `x`, which is much faster than in a mixture of types."""
    return functional.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings `[k, d]` to pairs of neighbouring channels of `x` `[n, k, h, d]`."""
    even, odd = x.view(*x.shape[:3], -1, 2).unbind(4)
    turned = torch.stack([-odd, even], 4).flatten(3)
    return torch.addcmul(x * cos.to(x.dtype)[:, None], turned, sin.to(x.dtype)[:, None])


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention of `[n, k, h, d]` each with a bias `[k]` of the keys' scores, by what is fastest on a CPU."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    bias = bias.to(query.dtype)
    if key.shape[2] <= MATRIX_KEYS:
        shape = (*query.shape[:2], query.shape[2], key.shape[2])
        query, key = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
        scores = torch.baddbmm(bias, query, key, alpha=query.shape[2] ** -0.5)
        mixed = scores.softmax(2).to(value.dtype).view(shape) @ value
    else:
        mask = bias.expand(1, 1, query.shape[2], -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2)
