"""Attention of groups of queries to a sample of their own, to an own cell and to text, in one kernel.

Queries are read, and results written, at the places where they are: nothing is put in the order of the groups. What
was seen already, such as the own cell, and what is seen exactly, such as text, is joined in the kernel's running
softmax. Shapes are those of `elfatt_sd.joint`; the pure functions there say what is computed.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


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
def kernel(q, k, v, out, order, seen, seen_total, text_k, text_v, text_bias,
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
