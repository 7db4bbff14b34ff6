"""Triton kernels, `attention_backend="triton"`: sampled keys, and cells with samples. Not timed on a GPU yet.

Queries and tokens are read and written where they are. Triton is there for Linux alone: `softmax.triton_takes` tells
whether these serve.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from elfatt_sd.attention.joint import Keys, near_cells
from elfatt_sd.attention.softmax import Part, key_bias


class Arrangement(NamedTuple):
    """Query i of group g is at the place `g * group + i * step` of an order; key j at `g * key_group + j * step`."""

    groups: int  # number of groups
    queries: int  # of each group at the most; places past the tokens are left out
    keys: int  # of each group
    group: int  # from one group's first query to the next one's
    key_group: int  # likewise for keys
    step: int  # from one query or key to the next
    # number of cells, where a query has seen its own: key j is of the cell `j mod cells`, as is query i; 0 for none
    cells: int = 0
    larger: int = 0  # cells with one token more
    log_larger: float = 0.0  # added to the logits of their keys


@triton.jit  # type: ignore[untyped-decorator]
def _seen(q, most, total, mixed, k, v, k_stride, v_stride, start, end, step, first, bias, scale, log_weight, own,
          cells, larger, log_larger, HAS_BIAS: tl.constexpr, CELLS: tl.constexpr, D: tl.constexpr, BK: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    channel = tl.arange(0, BD)
    for begin in range(start, end, BK):
        index = begin + tl.arange(0, BK)
        inside = index < end
        place = (first + index * step).to(tl.int64)
        loaded = inside[:, None] & (channel[None, :] < D)
        keys = tl.load(k + place[:, None] * k_stride + channel[None, :], mask=loaded, other=0.0)
        values = tl.load(v + place[:, None] * v_stride + channel[None, :], mask=loaded, other=0.0)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale + log_weight
        if HAS_BIAS:
            logits += tl.load(bias + index, mask=inside, other=0.0).to(tl.float32)[None, :]
        if CELLS:  # the own cell was seen; a larger one has a token more for each that is drawn
            cell = index % cells
            logits = tl.where(cell[None, :] == own[:, None], -float("inf"), logits)
            logits += tl.where(cell < larger, log_larger, 0.0)[None, :]
        logits = tl.where(inside[None, :], logits, -float("inf"))
        now = tl.maximum(most, tl.max(logits, 1))
        now_finite = tl.where(now == -float("inf"), 0.0, now)
        part = tl.exp(logits - now_finite[:, None])
        shrunk = tl.exp(most - now_finite)
        total = total * shrunk + tl.sum(part, 1)
        mixed = mixed * shrunk[:, None] + tl.dot(part.to(values.dtype), values, input_precision="ieee")
        most = now
    return most, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(q, k, v, out, order, seen, seen_total, text_k, text_v, text_bias,
           q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
           tk_batch, tk_token, tk_head, tv_batch, tv_token, tv_head, bias_batch,
           queries, keys, texts, heads, q_group, q_step, k_group, k_step, tokens, cells, larger,
           scale, log_weight, log_text, log_larger,
           ORDERED: tl.constexpr, SEEN: tl.constexpr, TEXT: tl.constexpr, BIAS: tl.constexpr, CELLS: tl.constexpr,
           D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Attend from a block of a group's queries: program `(block, group, batch and head)`."""
    group, batch, head = tl.program_id(1), tl.program_id(2) // heads, tl.program_id(2) % heads
    index, channel = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, BD)
    place = group * q_group + index * q_step
    inside = (index < queries) & (place < tokens)
    token = tl.load(order + place, mask=inside, other=0).to(tl.int64) if ORDERED else place.to(tl.int64)
    whole = inside[:, None] & (channel[None, :] < D)
    at = batch.to(tl.int64) * q_batch + token[:, None] * q_token + head * q_head + channel[None, :]
    query = tl.load(q + at, mask=whole, other=0.0)
    at = batch.to(tl.int64) * out_batch + token[:, None] * out_token + head * out_head + channel[None, :]
    if SEEN:
        most = tl.load(seen_total + (batch.to(tl.int64) * tokens + token) * heads + head, mask=inside, other=0.0)
        total = tl.full([BQ], 1.0, tl.float32)
        mixed = tl.load(seen + at, mask=whole, other=0.0).to(tl.float32)
    else:
        most = tl.full([BQ], -float("inf"), tl.float32)
        total = tl.zeros([BQ], tl.float32)
        mixed = tl.zeros([BQ, BD], tl.float32)
    own = index % cells
    most, total, mixed = _seen(
        query, most, total, mixed, k + batch.to(tl.int64) * k_batch + head * k_head,
        v + batch.to(tl.int64) * v_batch + head * v_head, k_token, v_token, 0, keys, k_step, group * k_group, text_bias,
        scale, log_weight, own, cells, larger, log_larger, False, CELLS, D, BK, BD)  # fmt: skip
    if TEXT:
        most, total, mixed = _seen(
            query, most, total, mixed, text_k + batch.to(tl.int64) * tk_batch + head * tk_head,
            text_v + batch.to(tl.int64) * tv_batch + head * tv_head, tk_token, tv_token, 0, texts, 1, 0,
            text_bias + batch * bias_batch, scale, log_text, own, cells, larger, log_larger, BIAS, False, D, BK,
            BD)  # fmt: skip
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=whole)


# By the channels that a head is padded to: keys in a block, warps and stages, such that nothing spills on sm_80, sm_89,
# sm_90 and sm_120 (`python benchmarks/kernels.py`).
_SIZES = {64: (64, 4, 3), 128: (64, 8, 1), 256: (32, 8, 2)}


def sizes(head_size: int) -> tuple[dict[str, int], dict[str, int]]:
    padded = max(16, 1 << (head_size - 1).bit_length())
    keys, warps, stages = _SIZES[min(max(padded, 64), 256)]
    return {"D": head_size, "BQ": 64, "BK": keys, "BD": padded}, {"num_warps": warps, "num_stages": stages}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arranged: Arrangement,
    *,
    order: Tensor | None = None,
    log_weight: float = 0.0,
    seen: Part | None = None,
    context: Keys | None = None,
) -> Tensor:
    """Attend from each group of queries to its own keys, to what was seen already, and to the context."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    batch, tokens, heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    text_k, text_v, bias = (k, v, None) if context is None else (context.k, context.v, key_bias(context.mask, q.dtype))
    text_k, text_v = (x if x.stride(3) == 1 else x.contiguous() for x in (text_k, text_v))
    if bias is not None:
        bias = bias.expand(batch, -1, -1, -1).reshape(batch, -1).contiguous()
    dummy = q
    pointers = (q, k, v, out, dummy if order is None else order, *((dummy, dummy) if seen is None else seen))
    strides = [each.stride(dim) for each in (q, k, v, out, text_k, text_v) for dim in (0, 1, 2)]
    texts = 0 if context is None else text_k.shape[1]
    numbers: tuple[int, ...] = (arranged.queries, arranged.keys, texts, heads, arranged.group, arranged.step)
    numbers += (arranged.key_group, arranged.step, tokens, max(arranged.cells, 1), arranged.larger)
    log_context = 0.0 if context is None else math.log(context.stands_for)
    logits = (head_size**-0.5, log_weight, log_context, arranged.log_larger)
    blocks, options = sizes(head_size)
    flags = {"ORDERED": order is not None, "SEEN": seen is not None, "TEXT": context is not None}
    flags |= {"BIAS": bias is not None, "CELLS": arranged.cells > 0}
    grid = (-(-arranged.queries // blocks["BQ"]), arranged.groups, batch * heads)
    launch: Any = attend_kernel[grid]
    text = (text_k, text_v, dummy if bias is None else bias)
    bias_stride = 0 if bias is None else bias.stride(0)
    launch(*pointers, *text, *strides, bias_stride, *numbers, *logits, **flags, **blocks, **options)
    return out


def sampled(
    q: Tensor, k: Tensor, v: Tensor, groups: int, *, order: Tensor | None, stands_for: float, context: Keys | None
) -> Tensor:
    """Do what `joint.sampled_joint_attention` does, with queries in their places; they and keys are dealt to groups."""
    arranged = Arrangement(groups, -(-q.shape[1] // groups), k.shape[1] // groups, 1, 1, groups)
    weight = 0.0 if context is None else math.log(stands_for)  # beside nothing else, all weights alike are none
    return attend(q, k, v, arranged, order=order, log_weight=weight, context=context)


def cells(
    q: Tensor, k: Tensor, v: Tensor, count: int, groups: int, *, weighted: bool = True, context: Keys | None = None
) -> Tensor:
    """Do what `joint.cell_joint_attention` does; the own cell is seen first, through PyTorch's kernel.

    Groups are runs of rows of the matrix `[places, cells]`.
    """
    places, larger = divmod(q.shape[1], count)
    keys, log_larger = places // groups * count, math.log1p(1 / places) if weighted else 0.0
    arranged = Arrangement(groups, keys, keys, keys, keys, 1, count, larger, log_larger)
    log_weight = math.log(groups) if weighted else 0.0
    near = near_cells(q, k, v, count)
    matrix = q.shape[1] - larger
    done = []
    for part in [slice(0, matrix)] + [slice(matrix, None)] * bool(larger):  # the first group's keys for those left over
        seen = Part(near.mixed[:, part].contiguous(), near.total[:, part].contiguous())
        own = arranged if part.start == 0 else arranged._replace(groups=1, queries=larger)
        done.append(attend(q[:, part], k, v, own, seen=seen, log_weight=log_weight, context=context))
    return done[0] if len(done) == 1 else torch.cat(done, 1)
