"""A Triton kernel for sampled keys, `attention_backend="triton"`. Not timed on a GPU yet.

Queries and tokens are read and written where they are. Triton is there for Linux alone: `softmax.triton_takes` tells
whether it serves.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from elfatt_sd.attention.joint import Keys
from elfatt_sd.attention.softmax import key_bias


@triton.jit  # type: ignore[untyped-decorator]
def _seen(q, most, total, mixed, k, v, k_stride, v_stride, end, step, first, bias, scale, log_weight,
          HAS_BIAS: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    channel = tl.arange(0, BD)
    for begin in range(0, end, BK):
        index = begin + tl.arange(0, BK)
        inside = index < end
        place = (first + index * step).to(tl.int64)
        loaded = inside[:, None] & (channel[None, :] < D)
        keys = tl.load(k + place[:, None] * k_stride + channel[None, :], mask=loaded, other=0.0)
        values = tl.load(v + place[:, None] * v_stride + channel[None, :], mask=loaded, other=0.0)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale + log_weight
        if HAS_BIAS:
            logits += tl.load(bias + index, mask=inside, other=0.0).to(tl.float32)[None, :]
        logits = tl.where(inside[None, :], logits, -float("inf"))
        now = tl.maximum(most, tl.max(logits, 1))
        part = tl.exp(logits - now[:, None])
        shrunk = tl.exp(most - now)
        total = total * shrunk + tl.sum(part, 1)
        mixed = mixed * shrunk[:, None] + tl.dot(part.to(values.dtype), values, input_precision="ieee")
        most = now
    return most, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(q, k, v, out, order, text_k, text_v, text_bias,
           q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
           tk_batch, tk_token, tk_head, tv_batch, tv_token, tv_head, bias_batch,
           tokens, keys, texts, heads, groups, scale, log_weight, log_text,
           ORDERED: tl.constexpr, TEXT: tl.constexpr, BIAS: tl.constexpr,
           D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Attend from a block of a group's queries: program `(block, group, batch and head)`.

    Query and key i of group g are at `g + i * groups` of the order and of the keys.
    """
    group, batch, head = tl.program_id(1), (tl.program_id(2) // heads).to(tl.int64), tl.program_id(2) % heads
    place, channel = group + (tl.program_id(0) * BQ + tl.arange(0, BQ)) * groups, tl.arange(0, BD)
    inside = place < tokens
    token = tl.load(order + place, mask=inside, other=0).to(tl.int64) if ORDERED else place.to(tl.int64)
    whole = inside[:, None] & (channel[None, :] < D)
    at = batch * q_batch + token[:, None] * q_token + head * q_head + channel[None, :]
    query = tl.load(q + at, mask=whole, other=0.0)
    most, total = tl.full([BQ], -float("inf"), tl.float32), tl.zeros([BQ], tl.float32)
    most, total, mixed = _seen(
        query, most, total, tl.zeros([BQ, BD], tl.float32), k + batch * k_batch + head * k_head,
        v + batch * v_batch + head * v_head, k_token, v_token, keys, groups, group, text_bias, scale, log_weight, False,
        D, BK, BD)  # fmt: skip
    if TEXT:
        most, total, mixed = _seen(
            query, most, total, mixed, text_k + batch * tk_batch + head * tk_head,
            text_v + batch * tv_batch + head * tv_head, tk_token, tv_token, texts, 1, 0,
            text_bias + batch * bias_batch, scale, log_text, BIAS, D, BK, BD)  # fmt: skip
    at = batch * out_batch + token[:, None] * out_token + head * out_head + channel[None, :]
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=whole)


# By the channels that a head is padded to: keys in a block, warps and stages, such that nothing spills on sm_80, sm_89,
# sm_90 and sm_120 (`python benchmarks/kernels.py`).
_SIZES = {64: (64, 4, 3), 128: (64, 8, 1), 256: (32, 8, 2)}


def sizes(head_size: int) -> tuple[dict[str, int], dict[str, int]]:
    padded = max(16, 1 << (head_size - 1).bit_length())
    keys, warps, stages = _SIZES[min(max(padded, 64), 256)]
    return {"D": head_size, "BQ": 64, "BK": keys, "BD": padded}, {"num_warps": warps, "num_stages": stages}


def sampled(
    q: Tensor, k: Tensor, v: Tensor, groups: int, *, order: Tensor | None, stands_for: float, context: Keys | None
) -> Tensor:
    """Do what `joint.sampled_joint_attention` does, with queries in their places; they and keys are dealt to groups."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    batch, tokens, heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    text_k, text_v, bias = (k, v, None) if context is None else (context.k, context.v, key_bias(context.mask, q.dtype))
    text_k, text_v = (x if x.stride(3) == 1 else x.contiguous() for x in (text_k, text_v))
    if bias is not None:
        bias = bias.expand(batch, -1, -1, -1).reshape(batch, -1).contiguous()
    strides = [each.stride(dim) for each in (q, k, v, out, text_k, text_v) for dim in (0, 1, 2)]
    strides.append(0 if bias is None else bias.stride(0))
    numbers = (tokens, k.shape[1] // groups, 0 if context is None else text_k.shape[1], heads, groups)
    weights = (0.0, 0.0) if context is None else (math.log(stands_for), math.log(context.stands_for))
    blocks, options = sizes(head_size)
    flags = {"ORDERED": order is not None, "TEXT": context is not None, "BIAS": bias is not None}
    launch: Any = attend_kernel[-(-tokens // groups // blocks["BQ"]), groups, batch * heads]
    pointers = (q, k, v, out, q if order is None else order, text_k, text_v, q if bias is None else bias)
    with contextlib.nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(q):  # not the current one
        launch(*pointers, *strides, *numbers, head_size**-0.5, *weights, **flags, **blocks, **options)
    return out
