"""The launch of the kernel of `sampled`: what it is given, and its sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.joint import Keys, near_cells
from elfatt_sd.kernels.arrangement import Arrangement
from elfatt_sd.kernels.sampled import kernel
from elfatt_sd.log_sum_exp import Part, key_bias

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
    log_context: float = 0.0,
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
    logits = (head_size**-0.5, log_weight, log_context, arranged.log_larger)
    blocks, options = sizes(head_size)
    flags = {"ORDERED": order is not None, "SEEN": seen is not None, "TEXT": context is not None}
    flags |= {"BIAS": bias is not None, "CELLS": arranged.cells > 0}
    grid = (-(-arranged.queries // blocks["BQ"]), arranged.groups, batch * heads)
    launch: Any = kernel[grid]
    text = (text_k, text_v, dummy if bias is None else bias)
    launch(
        *pointers,
        *text,
        *strides,
        0 if bias is None else bias.stride(0),
        *numbers,
        *logits,
        **flags,
        **blocks,
        **options,
    )
    return out


def sampled(
    q: Tensor, k: Tensor, v: Tensor, groups: int, *, order: Tensor | None, stands_for: float, context: Keys | None
) -> Tensor:
    """Do what `joint.sampled_joint_attention` does, with queries in their places."""
    arranged = Arrangement.sampled(q.shape[1], k.shape[1], groups)
    if context is None:
        return attend(q, k, v, arranged, order=order)
    log_context = math.log(context.stands_for)
    weight = math.log(stands_for)
    return attend(q, k, v, arranged, order=order, log_weight=weight, context=context, log_context=log_context)


def cells(
    q: Tensor, k: Tensor, v: Tensor, count: int, groups: int, *, weighted: bool = True, context: Keys | None = None
) -> Tensor:
    """Do what `joint.cell_joint_attention` does; the own cell is seen first, through PyTorch's kernel."""
    tokens = q.shape[1]
    arranged = Arrangement.cells_of(tokens, count, groups, weighted)
    log_weight = math.log(groups) if weighted else 0.0
    log_context = 0.0 if context is None else math.log(context.stands_for)
    near = near_cells(q, k, v, count)
    given: dict[str, Any] = {"log_weight": log_weight, "context": context, "log_context": log_context}
    matrix = tokens - arranged.larger
    parts = [slice(0, matrix)] + [slice(matrix, None)] * bool(arranged.larger)
    done = []
    for part in parts:  # the tokens left over see what the first group sees
        seen = Part(near.mixed[:, part].contiguous(), near.total[:, part].contiguous())
        own = arranged if part.start == 0 else arranged._replace(groups=1, queries=arranged.larger)
        done.append(attend(q[:, part], k, v, own, seen=seen, **given))
    return done[0] if len(done) == 1 else torch.cat(done, 1)
