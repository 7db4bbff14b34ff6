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
    """The transformer with the text encoders that are trained along."""

    def __init__(self, sizes: models.Sizes) -> None:
        """Build all with random weights."""
        super().__init__()
        self.grid = sizes.grid
        self.transformer = models.build("transformer", sizes)
        self.text_encoder = models.build("text_encoder", sizes)
        self.text_encoder_2 = models.build("text_encoder_2", sizes)
        names = self.transformer.attn_processors
        self.transformer.set_attn_processor({name: TrainingAttention(layer) for layer, name in enumerate(names)})

    def compile_blocks(self) -> None:
        """Compile the transformer's blocks, which are then about a quarter faster on a CPU."""
        for block in (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks):
            block.compile(dynamic=False)

    def forward(
        self,
        latents: Tensor,
        times: Tensor,
        tokens: Tensor,
        clip_tokens: Tensor,
        padding: int = models.LENGTH - SLOTS,
        keys: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Predict velocities, as a call of `FluxPipeline` with `SLOTS + padding` text tokens does.

        Args:
            latents: noisy latents of a square grid, `[n, 4, 2 rows, 2 rows]`.
            times: from 0 (clean) to 1 (noise), `[n]`.
            tokens: prompts for the T5 text encoder, `[n, SLOTS]`.
            clip_tokens: prompts for the CLIP text encoder, `[n, TOKENS]`.
            padding: text tokens beyond `SLOTS`; all are equal, so one token with their number stands for them.
            keys: rows and columns of image keys in attention, or all.
            generator: chooses those rows and columns.

        Returns:
            velocities, `[n, 4, 2 rows, 2 rows]`.
        """
        text, rows = tokens.shape[1], latents.shape[-1] // 2
        places = coarse_grids(text, rows, keys, generator) if keys and generator and keys < rows else None
        bias = torch.zeros(text + rows * rows if places is None else places.shape[1], device=latents.device)
        bias[text - 1] = math.log1p(padding)
        bias[text:] = math.log(rows * rows / len(bias[text:]))
        velocity = self.transformer(
            hidden_states=pack(latents),
            encoder_hidden_states=self.text_encoder_2(tokens)[0],
            pooled_projections=self.text_encoder(clip_tokens).pooler_output,
            timestep=times,
            img_ids=positions(rows, self.grid, latents.device),
            txt_ids=torch.zeros(text, 3, device=latents.device),
            joint_attention_kwargs={"bias": bias, "places": places},
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
    is exact. The coarse grid is an estimate for pre-training; every layer has another one.
    """

    def __init__(self, layer: int) -> None:
        """Be the processor of a layer, counted from 0."""
        self.layer = torch.tensor(layer)  # a tensor, for which no layer is compiled again

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Any:
        """Attend.

        Args:
            attn: the layer.
            hidden_states: image tokens `[n, m, c]`, or text and image tokens in blocks with common weights.
            encoder_hidden_states: text tokens `[n, t, c]` in blocks with weights of their own.
            attention_mask: not used.
            image_rotary_emb: cosines and sines, `[t + m, d]` each.
            bias: added to the scores of all keys, `[k]`.
            places: tokens that are keys, `[grids, k]`, text first, from which each layer takes a row; None for all.

        Returns:
            the new image tokens, and the new text tokens if these were given apart.
        """
        split = (attn.heads, -1)
        query, key, value = (layer(hidden_states).unflatten(2, split) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query, key = normalize(attn.norm_q, query), normalize(attn.norm_k, key)
        text = 0
        if encoder_hidden_states is not None:
            text = encoder_hidden_states.shape[1]
            layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            added = [layer(encoder_hidden_states).unflatten(2, split) for layer in layers]
            query = torch.cat([normalize(attn.norm_added_q, added[0]), query], 1)
            key = torch.cat([normalize(attn.norm_added_k, added[1]), key], 1)
            value = torch.cat([added[2], value], 1)
        if image_rotary_emb is not None:
            query, key = rotate(query, *image_rotary_emb), rotate(key, *image_rotary_emb)
        if places is not None:
            row = places[self.layer % len(places)]
            key, value = key[:, row], value[:, row]
        mixed = attend(query, key, value, bias).flatten(2)
        if encoder_hidden_states is None:
            return mixed
        return attn.to_out[1](attn.to_out[0](mixed[:, text:])), attn.to_add_out(mixed[:, :text])


def coarse_grids(text: int, rows: int, keys: int, generator: torch.Generator) -> Tensor:
    """All text tokens and every s-th row and column of the image's: from all corners, in random order, `[s * s, k]`."""
    stride = rows // keys
    image = torch.arange(text, text + rows * rows, device=generator.device).view(keys, stride, keys, stride)
    grids = image.permute(1, 3, 0, 2).reshape(stride * stride, keys * keys)
    order = torch.randperm(len(grids), generator=generator, device=generator.device)
    return torch.cat([torch.arange(text, device=generator.device).expand(len(grids), -1), grids[order]], 1)


def normalize(norm: Any, x: Tensor) -> Tensor:
    """Apply an RMS normalisation in the type of `x`, which is much faster than in a mixture of types."""
    return functional.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings `[k, d]` to pairs of neighbouring channels of `x` `[n, k, h, d]`."""
    even, odd = x.view(*x.shape[:3], -1, 2).unbind(4)
    turned = torch.stack([-odd, even], 4).flatten(3)
    return torch.addcmul(x * cos.to(x.dtype)[:, None], turned, sin.to(x.dtype)[:, None])


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention of `[n, k, h, d]` each with a bias `[k]` of the keys' scores, by what is fastest on a CPU."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    bias = torch.zeros(key.shape[2], device=key.device) if bias is None else bias
    bias = bias.to(query.dtype)
    if key.shape[2] > MATRIX_KEYS:
        mask = bias.expand(1, 1, query.shape[2], -1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    shape = (*query.shape[:3], key.shape[2])
    query, key = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(bias, query, key, alpha=query.shape[2] ** -0.5)
    return (scores.softmax(2).to(value.dtype).view(shape) @ value).transpose(1, 2)
