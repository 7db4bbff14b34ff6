"""Approximate attention of image or video tokens that are joined with exact keys, such as text. Pure tensors.

Image queries see some of the image's keys, and all keys of the context: text, several segments of it, reference images.
Queries of the context are exact. What is seen in parts is joined by log-sum-exps (`log_sum_exp`), where a sampled key
has the weight of the tokens that it stands for: unweighted, the image would count less beside the text the fewer keys
are drawn.

Shapes: B batch, N image tokens, T tokens of the context, H heads, D head size. q, k, v and every result are
`[B, N, H, D]`. In cell order (`ordering.cell_order`), N is a matrix `[places, cells]`, row by row: a column is a cell,
a run of rows is a group with a token of every cell; the tokens left over, of the first cells, follow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.errors import ElfattError
from elfatt_sd.log_sum_exp import Part, attend, excluded, key_bias


class Keys(NamedTuple):
    """Keys that are seen exactly.

    Attributes:
        k: keys `[B, T, H, D]`.
        v: values, shaped as the keys.
        mask: `[B, T]`, True where a key counts; None where all do. A mask costs a slower kernel on a GPU.
        stands_for: tokens that each key stands for, as where tokens are merged.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    stands_for: float = 1.0


def exact_attention(q: Tensor, parts: Sequence[Keys], *, scale: float | None = None) -> Tensor:
    """Attend to several segments of keys as if they were one sequence, without joining them in memory.

    Args:
        q: queries, those of the context for instance.
        parts: at least one; they have keys that count.
        scale: of the logits; None is `head_dim ** -0.5`.

    Returns:
        As the queries.
    """
    return functools.reduce(Part.joined, (_seen(q, part, scale) for part in parts)).mixed


def sampled_joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: int,
    *,
    stands_for: float = 1.0,
    context: Keys | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to a sample of the image and to the whole context: `softmax(q_n [K_g + log w; K_T]^T) [V_g; V_T]`.

    The group of query n is `g = n mod groups`; `ordering.lattice_order` spreads each over the grid. Only the sampled
    tokens' keys and values are needed (`ordering.stratified_samples`), as long as no context queries need the others.

    Args:
        q: image queries.
        k: sampled keys `[B, samples * groups, H, D]`; those of group g are at g, g + groups, ...
        v: values, shaped as the keys.
        groups: divides the keys.
        stands_for: tokens that a sampled key stands for (w), `N / samples`; 1 gives it no weight.
        context: exact keys.
        scale: of the logits; None is `head_dim ** -0.5`.

    Returns:
        As the queries.
    """
    batch, tokens, heads, size = q.shape
    missing = -tokens % groups
    padded = functional.pad(q, (0, 0, 0, 0, 0, missing)) if missing else q
    grouped = (batch, -1, groups * heads, size)  # groups are heads of their own
    sampled = attend(*(x.reshape(grouped) for x in (padded, k, v)), scale=scale).view(padded.shape)
    image = Part(sampled.mixed[:, :tokens], sampled.total[:, :tokens])
    return _with_context(q, image.weighted(math.log(stands_for)), context, scale)


def cell_joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: int,
    groups: int,
    *,
    weighted: bool = True,
    context: Keys | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to the own cell, to the own group's tokens of all other cells, and to the whole context.

    A token of another cell of n tokens, of which the group has s, gets the logarithm of `n / s` on its logit. With one
    group, and with one cell, this is exact attention.

    Args:
        q: image queries in cell order.
        k: keys, shaped as the queries.
        v: values, shaped as the queries.
        cells: number of cells.
        groups: number of groups; divides `N // cells`.
        weighted: whether sampled keys have weights.
        context: exact keys.
        scale: of the logits; None is `head_dim ** -0.5`.

    Returns:
        As the queries.

    Raises:
        ElfattError: cells and groups do not fit the tokens.
    """
    _check_cells(q.shape[1], cells, groups)
    if 1 in (cells, groups):
        image = attend(q, k, v, scale=scale)
    else:
        image = _near(q, k, v, cells, scale).joined(_far(q, k, v, cells, groups, weighted, scale))
    return _with_context(q, image, context, scale)


def elfatt_joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: int,
    *,
    agent_heads: int | None = None,
    query_scale: float | None = None,
    context: Keys | None = None,
    scale: float | None = None,
) -> Tensor:
    """ELFATT beside exact keys: the first heads attend through agents, the others inside cells, all to the context.

    A cell's agent is the mean of its queries (`cell_agents`). Agents have no logits that compare with those of the
    context, so the image's weight beside it is that which the agent of the query's own cell c measures:
    `(e^L_c O + e^l_T O_T) / (e^L_c + e^l_T)` with `O = softmax(s2 Q A^T) softmax(s A K^T) V` of the image,
    `L_c` the log-sum-exp of `s a_c K^T`, and `O_T`, `l_T` the query's exact attention to the context and its
    log-sum-exp. The other heads see cell and context unweighted: a cell that stood for the image would outweigh the
    context, as near keys have the largest logits.

    Args:
        q: image queries in cell order.
        k: keys, shaped as the queries.
        v: values, shaped as the queries.
        cells: number of cells, which is the number of agents.
        agent_heads: heads that attend through agents; None is half of them.
        query_scale: scale `s2` of the queries' softmax over agents; None is the same as the first one.
        context: exact keys.
        scale: of the logits (s); None is `head_dim ** -0.5`.

    Returns:
        As the queries.

    Raises:
        ElfattError: the cells do not fit the tokens.
    """
    _check_cells(q.shape[1], cells, 1)
    first = q.shape[2] // 2 if agent_heads is None else agent_heads
    done = []
    for heads in (slice(0, first), slice(first, q.shape[2])):
        if heads.start == heads.stop:
            continue
        qh, kh, vh = (x[:, :, heads] for x in (q, k, v))
        near = heads.stop > first
        part = _near(qh, kh, vh, cells, scale) if near else _through_agents(qh, kh, vh, cells, scale, query_scale)
        own = None if context is None else context._replace(k=context.k[:, :, heads], v=context.v[:, :, heads])
        done.append(_with_context(qh, part, own, scale))
    return torch.cat(done, dim=2)


def cell_agents(q: Tensor, cells: int) -> Tensor:
    """Average the queries of each cell and give the mean their mean length.

    A rotary embedding turns the queries of a cell apart, which makes their mean shorter, and the softmax of an agent
    flatter than its queries' own; the length mends it, whatever the embedding's layout. Means over compact cells keep
    what means over runs of rows lose.

    Args:
        q: image queries in cell order, after the rotary embedding.
        cells: number of cells.

    Returns:
        Agents `[B, cells, H, D]`.
    """
    places, larger = q.shape[1] // cells, q.shape[1] % cells
    precision = torch.promote_types(q.dtype, torch.float32)
    length = torch.linalg.vector_norm(q, dim=3, keepdim=True, dtype=precision)
    total, lengths = (_cell_sums(x.to(precision), cells, places) for x in (q, length))
    count = torch.full((cells, 1, 1), float(places), dtype=precision, device=q.device)
    count[:larger] += 1
    mean = functional.normalize(total, dim=3, eps=torch.finfo(precision).tiny) * (lengths / count)
    return mean.to(q.dtype)


@functools.lru_cache(maxsize=256)
def cell_counts(tokens: int, cell: int, keys: int) -> tuple[int, int]:
    """Return the number of cells and of groups that come closest to what is wanted.

    Cells that divide the tokens are preferred, for they need no copy.

    Args:
        tokens: of the grid.
        cell: wanted tokens in a cell.
        keys: wanted tokens in a group; it has at least one of every cell, so that this times `cell` is at least
            `tokens`.
    """

    def badness(counts: tuple[int, int]) -> float:
        cells, groups = counts
        seen = tokens // cells // groups * cells
        return abs(math.log(tokens / cells / cell)) + abs(math.log(seen / keys)) + (0.1 if tokens % cells else 0.0)

    wanted = min(max(1, tokens // cell), tokens)
    choices = range(max(1, wanted // 2), min(tokens, 2 * wanted) + 1)
    return min(((cells, groups) for cells in choices for groups in _divisors(tokens // cells)), key=badness)


def sampled_joint_cost(tokens: int, samples: int, context: int, channels: int) -> int:
    """Multiply-adds of `sampled_joint_attention` for one image; `channels` are those of all heads."""
    return 2 * tokens * (samples + context) * channels


def cell_joint_cost(tokens: int, cells: int, groups: int, context: int, channels: int) -> int:
    """Multiply-adds of `cell_joint_attention` for one image; `channels` are those of all heads."""
    if 1 in (cells, groups):
        return exact_cost(tokens, tokens + context, channels)
    far = tokens // cells // groups * cells
    return 2 * (_near_pairs(tokens, cells) + tokens * (far + context)) * channels


def elfatt_joint_cost(tokens: int, cells: int, context: int, channels: int, agent_share: float = 0.5) -> int:
    """Multiply-adds of `elfatt_joint_attention` for one image; `agent_share` is the fraction of the heads."""
    pairs = agent_share * 2 * tokens * cells + (1 - agent_share) * _near_pairs(tokens, cells) + tokens * context
    return round(2 * pairs * channels)


def exact_cost(queries: int, keys: int, channels: int) -> int:
    """Multiply-adds of `exact_attention` for one image; `channels` are those of all heads."""
    return 2 * queries * keys * channels


def _seen(q: Tensor, keys: Keys, scale: float | None) -> Part:
    part = attend(q, keys.k, keys.v, scale=scale, bias=key_bias(keys.mask, q.dtype))
    return part.weighted(math.log(keys.stands_for))


def _with_context(q: Tensor, image: Part, context: Keys | None, scale: float | None) -> Tensor:
    return (image if context is None else image.joined(_seen(q, context, scale))).mixed


def _check_cells(tokens: int, cells: int, groups: int) -> None:
    if not 1 <= cells <= tokens:
        raise ElfattError(f"cells={cells!r} is not accepted; give 1 to {tokens}, the number of tokens.")
    if groups < 1 or tokens // cells % groups:
        raise ElfattError(
            f"groups={groups!r} is not accepted; give a divisor of the {tokens // cells} tokens of a cell."
        )


def _through_agents(
    q: Tensor, k: Tensor, v: Tensor, cells: int, scale: float | None, query_scale: float | None
) -> Part:
    """Attend through agents; the weight is what the agent of the own cell measures."""
    tokens, agents = q.shape[1], cell_agents(q, cells)
    summaries = attend(agents, k, v, scale=scale)
    mixed = attend(q, agents, summaries.mixed, scale=scale if query_scale is None else query_scale).mixed
    return Part(mixed, summaries.total.repeat(1, -(-tokens // cells), 1)[:, :tokens])


def _near(q: Tensor, k: Tensor, v: Tensor, cells: int, scale: float | None) -> Part:
    """Attend inside each cell: cells are heads of their own, which needs no copy where they divide the tokens."""
    batch, tokens, heads, size = q.shape
    places, larger = tokens // cells, tokens % cells
    if not larger:
        as_cells = (batch, places, cells * heads, size)
        return attend(*(x.reshape(as_cells) for x in (q, k, v)), scale=scale).view(q.shape)
    whole = [x[:, : places * cells].reshape(batch, places, cells * heads, size) for x in (q, k, v)]
    cut = larger * heads
    rest = [x[:, places * cells :].reshape(batch, 1, cut, size) for x in (q, k, v)]
    first = attend(*(torch.cat([x[:, :, :cut], y], 1) for x, y in zip(whole, rest, strict=True)), scale=scale)
    others = attend(*(x[:, :, cut:] for x in whole), scale=scale)
    matrix, left = ((batch, places * cells, heads, size), (batch, larger, heads, size))
    joined = [torch.cat([x[:, :places], y], 2) for x, y in zip(first, others, strict=True)]
    return _concatenated(Part(*joined).view(matrix), Part(*(x[:, places:] for x in first)).view(left))


def _far(q: Tensor, k: Tensor, v: Tensor, cells: int, groups: int, weighted: bool, scale: float | None) -> Part:
    """Attend to the tokens of the own group in all other cells."""
    batch, tokens, heads, size = q.shape
    places, larger = tokens // cells, tokens % cells
    keys = places // groups * cells
    bias = _far_bias(keys, cells, places, larger if weighted else 0, q)
    as_groups = (batch * groups, keys, heads, size)
    matrix = [x[:, : places * cells].reshape(as_groups) for x in (q, k, v)]
    part = attend(*matrix, scale=scale, bias=bias).view((batch, places * cells, heads, size))
    if larger:  # the tokens left over see what the first group sees
        left = attend(q[:, places * cells :], k[:, :keys], v[:, :keys], scale=scale, bias=bias[:, :, :larger])
        part = _concatenated(part, left)
    return part.weighted(math.log(groups)) if weighted else part


def _far_bias(keys: int, cells: int, places: int, larger: int, like: Tensor) -> Tensor:
    """Exclude the own cell `[1, 1, keys, keys]`; each token of a larger cell stands for more."""
    cell = torch.arange(keys, device=like.device) % cells
    weight = torch.where(cell < larger, math.log1p(1 / places), 0.0).to(like.dtype)
    return weight.expand(keys, -1).masked_fill(cell[:, None] == cell, excluded(like.dtype))[None, None]


def _concatenated(first: Part, second: Part) -> Part:
    return Part(*(torch.cat(pair, 1) for pair in zip(first, second, strict=True)))


def _cell_sums(x: Tensor, cells: int, places: int) -> Tensor:
    """Sum tokens in cell order `[B, N, H, D]` over each cell."""
    total = x[:, : places * cells].reshape(x.shape[0], places, cells, *x.shape[2:]).sum(1)
    return total + functional.pad(x[:, places * cells :], (0, 0, 0, 0, 0, cells - x.shape[1] % cells))


def _near_pairs(tokens: int, cells: int) -> int:
    places, larger = divmod(tokens, cells)
    return cells * places**2 + larger * (2 * places + 1)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
