"""Approximate attention of image or video tokens that are joined with exact keys, such as text. Pure tensors.

Image queries see some of the image's keys, and all keys of the context: text, several segments of it, reference images.
Queries of the context are exact. What is seen in parts is joined by log-sum-exps (`softmax.Part`), where a sampled key
has the weight of the tokens that it stands for. Unweighted, the image would count less, the fewer keys are drawn.

Shapes: B batch, N image tokens, T tokens of the context, H heads, D head size. q, k, v and every result are
`[B, N, H, D]`. In cell order (`ordering.cell_order`), N is a matrix `[places, cells]`, row by row. A column is a cell,
a run of rows is a group with a token of every cell. The tokens left over, of the first cells, follow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.attention.ordering import partition
from elfatt_sd.attention.softmax import Part, attend, equal_parts, excluded, in_groups, key_bias, pool_agents


class Keys(NamedTuple):
    """Keys that are seen exactly. A mask costs a slower kernel on a GPU."""

    k: Tensor  # `[B, T, H, D]`
    v: Tensor  # values, shaped as the keys
    mask: Tensor | None = None  # `[B, T]`, True where a key counts, or what is added to its logits
    stands_for: float = 1.0  # tokens that each key stands for, as where tokens are merged


def exact_attention(q: Tensor, parts: Sequence[Keys]) -> Tensor:
    """Attend to several segments of keys as if they were one sequence, without joining them in memory."""
    return functools.reduce(Part.joined, (_seen(q, part) for part in parts)).mixed


def sampled_joint_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: int, *, stands_for: float = 1.0, context: Keys | None = None
) -> Tensor:
    """Attend to a sample of the image and to the whole context: `softmax(q_n [K_g + log w; K_T]^T) [V_g; V_T]`.

    Queries and sampled keys are as for `softmax.sampled_attention`. Only the sampled tokens' keys and values are needed
    (`ordering.stratified_samples`), as long as no context queries need the others. `stands_for` is the number of tokens
    that a sampled key stands for (w), `N / samples`; 1 gives it no weight.
    """
    own = attend(*in_groups(q, k, v, groups)).view((q.shape[0], -1, *q.shape[2:]))
    image = Part(own.mixed[:, : q.shape[1]], own.total[:, : q.shape[1]])
    return _with_context(q, image.weighted(math.log(stands_for)), context)


def cell_joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: int,
    groups: int,
    *,
    weighted: bool = True,
    context: Keys | None = None,
    fp32_logits: bool = False,
) -> Tensor:
    """Attend to the own cell, to the own group's tokens of all other cells, and to the whole context.

    Tokens are in cell order; the groups divide `N // cells`. Where `weighted`, a token of another cell of n tokens, of
    which the group has s, gets the logarithm of `n / s` on its logit. With one group, and with one cell, this is exact
    attention. With `fp32_logits`, all is computed in float32 and the result alone is rounded.
    """
    if fp32_logits:
        dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.to(wide) for x in (q, k, v))
        context = context and context._replace(k=context.k.to(wide), v=context.v.to(wide))
        with torch.autocast(q.device.type, enabled=False):
            out = cell_joint_attention(q, k, v, cells, groups, weighted=weighted, context=context)
        return out.to(dtype)
    if 1 in (cells, groups):
        image = attend(q, k, v)
    else:
        image = near_cells(q, k, v, cells).joined(_far(q, k, v, cells, groups, weighted))
    return _with_context(q, image, context)


def elfatt_joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    agents: int,
    block_size: int,
    agent_heads: int,
    query_scale: float | None = None,
    value_shortcut: float = 0.0,
    context: Keys | None = None,
) -> Tensor:
    """ELFATT-SD with exact keys: the first `agent_heads` attend through agents, the others inside blocks, all to text.

    An agent is the mean of a run of queries (`run_agents`). Agents have no logits that compare with those of the
    context, so the image's weight relative to it is that which the agent of the query's own run c measures:
    `(e^L_c O + e^l_T O_T) / (e^L_c + e^l_T)` with `O = softmax(s2 Q A^T) softmax(s A K^T) V` of the image,
    `L_c` the log-sum-exp of `s a_c K^T`, and `O_T`, `l_T` the query's exact attention to the context and its
    log-sum-exp. The other heads see block and context unweighted: a block that stood for the image would outweigh the
    context, as near keys have the largest logits.

    The tokens of a block lie next to each other (`ordering.block_permutation`); `query_scale` and `value_shortcut` are
    those of `softmax.agent_attention`, the latter in the heads with agents.
    """
    done = []
    for heads in (slice(0, agent_heads), slice(agent_heads, q.shape[2])):
        if heads.start == heads.stop:
            continue
        qh, kh, vh = (x[:, :, heads] for x in (q, k, v))
        own = None if context is None else context._replace(k=context.k[:, :, heads], v=context.v[:, :, heads])
        if heads.start == 0 and agent_heads:
            mixed = _with_context(qh, _through_agents(qh, kh, vh, agents, query_scale), own)
            done.append(torch.add(mixed, vh, alpha=value_shortcut) if value_shortcut else mixed)
        else:
            done.append(_with_context(qh, _in_blocks(qh, kh, vh, block_size), own))
    return done[0] if len(done) == 1 else torch.cat(done, dim=2)


def run_agents(q: Tensor, agents: int) -> Tensor:
    """Average the queries of each run of neighbours, after the rotary embedding, and give the mean their mean length.

    The embedding turns the queries of a run apart, which makes their mean shorter, and the softmax of an agent flatter
    than its queries' own; the length mends it, whatever the embedding's layout. Means over compact runs keep what means
    over whole rows lose.
    """
    precision = torch.promote_types(q.dtype, torch.float32)
    length = torch.linalg.vector_norm(q, dim=3, keepdim=True, dtype=precision)
    mean, lengths = (pool_agents(x, agents) for x in (q.to(precision), length))
    return (functional.normalize(mean, dim=3, eps=torch.finfo(precision).tiny) * lengths).to(q.dtype)


def _seen(q: Tensor, keys: Keys) -> Part:
    return attend(q, keys.k, keys.v, bias=key_bias(keys.mask, q.dtype)).weighted(math.log(keys.stands_for))


def _with_context(q: Tensor, image: Part, context: Keys | None) -> Tensor:
    return (image if context is None else image.joined(_seen(q, context))).mixed


def _through_agents(q: Tensor, k: Tensor, v: Tensor, count: int, query_scale: float | None) -> Part:
    """Attend through agents; the weight is what the agent of the own run measures."""
    agents = run_agents(q, count)
    summaries = attend(agents, k, v)
    mixed = attend(q, agents, summaries.mixed, scale=query_scale).mixed
    base, larger = q.shape[1] // agents.shape[1], q.shape[1] % agents.shape[1]
    own = [summaries.total[:, :larger].repeat_interleave(base + 1, 1)] if larger else []
    return Part(mixed, torch.cat([*own, summaries.total[:, larger:].repeat_interleave(base, 1)], 1))


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> Part:
    """Attend inside each block of consecutive tokens; the blocks tile the sequence (`ordering.partition`)."""
    blocks, _, _ = partition(q.shape[1], block_size)
    parts = []
    for piece, size in equal_parts(q.shape[1], blocks):
        parts.append(attend(*(x[:, piece].reshape(-1, size, *x.shape[2:]) for x in (q, k, v))).view(q[:, piece].shape))
    return functools.reduce(_concatenated, parts)


def near_cells(q: Tensor, k: Tensor, v: Tensor, cells: int) -> Part:
    """Attend inside each cell: cells are heads of their own, which needs no copy where they divide the tokens."""
    batch, tokens, heads, size = q.shape
    places, larger = tokens // cells, tokens % cells
    if not larger:
        return attend(*(x.reshape(batch, places, cells * heads, size) for x in (q, k, v))).view(q.shape)
    whole = [x[:, : places * cells].reshape(batch, places, cells * heads, size) for x in (q, k, v)]
    cut = larger * heads
    rest = [x[:, places * cells :].reshape(batch, 1, cut, size) for x in (q, k, v)]
    first = attend(*(torch.cat([x[:, :, :cut], y], 1) for x, y in zip(whole, rest, strict=True)))
    others = attend(*(x[:, :, cut:] for x in whole))
    matrix, left = ((batch, places * cells, heads, size), (batch, larger, heads, size))
    joined = [torch.cat([x[:, :places], y], 2) for x, y in zip(first, others, strict=True)]
    return _concatenated(Part(*joined).view(matrix), Part(*(x[:, places:] for x in first)).view(left))


def _far(q: Tensor, k: Tensor, v: Tensor, cells: int, groups: int, weighted: bool) -> Part:
    """Attend to the tokens of the own group in all other cells."""
    batch, tokens, heads, size = q.shape
    places, larger = tokens // cells, tokens % cells
    keys = places // groups * cells
    cell = torch.arange(keys, device=q.device) % cells
    more = (cell < (larger if weighted else 0)).to(q.dtype) * math.log1p(1 / places)  # of larger cells
    bias = more.expand(keys, -1).masked_fill(cell[:, None] == cell, excluded(q.dtype))[None, None]  # no own cell
    matrix = [x[:, : places * cells].reshape(batch * groups, keys, heads, size) for x in (q, k, v)]
    part = attend(*matrix, bias=bias).view((batch, places * cells, heads, size))
    if larger:  # the tokens left over see what the first group sees
        rest = q[:, places * cells :]
        part = _concatenated(part, attend(rest, k[:, :keys], v[:, :keys], bias=bias[:, :, :larger]))
    return part.weighted(math.log(groups)) if weighted else part


def _concatenated(first: Part, second: Part) -> Part:
    return Part(*(torch.cat(pair, 1) for pair in zip(first, second, strict=True)))
