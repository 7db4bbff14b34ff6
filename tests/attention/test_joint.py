"""Attention beside exact keys equals its formulas, written out densely in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import Work
from torch import Tensor

from elfatt_sd.attention.joint import (
    Keys,
    cell_joint_attention,
    elfatt_joint_attention,
    exact_attention,
    run_agents,
    sampled_joint_attention,
)
from elfatt_sd.attention.ordering import (
    Grid,
    cell_order,
    inverse_permutation,
    partition,
    stratified_samples,
)
from elfatt_sd.methods import CellSpread, Elfatt, Sampled, Size, Softmax

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CELLS = [(12, 4, 3), (64, 8, 8), (64, 8, 2), (64, 16, 1), (35, 8, 2), (35, 8, 4), (67, 9, 7), (67, 9, 1), (30, 1, 5)]
HALF = [torch.float16, torch.bfloat16]


def image(tokens: int, size: int = 8, heads: int = 4) -> Any:
    return torch.randn(3, 2, tokens, heads, size, generator=torch.Generator().manual_seed(tokens))


def text(size: int = 8, heads: int = 4, masked: bool = True) -> Keys:
    """Five keys; the first image's last two are padding, and the second's first one."""
    k, v = torch.randn(2, 2, 5, heads, size, generator=torch.Generator().manual_seed(99)) * 1.5
    return Keys(
        k, v, torch.tensor([[True, True, True, False, False], [False, True, True, True, True]]) if masked else None
    )


def moved(keys: Keys, *where: Any) -> Keys:
    return keys._replace(
        k=keys.k.to(*where), v=keys.v.to(*where), mask=None if keys.mask is None else keys.mask.to(*where[:1])
    )


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, context: Keys | None) -> Tensor:
    """Softmax over all image keys, with a bias `[N, K]`, and over the context's keys that count."""
    if context is not None:
        k, v = torch.cat([k, context.k], 1), torch.cat([v, context.v], 1)
        mask = torch.ones(context.k.shape[:2], dtype=torch.bool) if context.mask is None else context.mask
        more = torch.zeros(mask.shape).double().masked_fill(~mask, -math.inf)[:, None]
        bias = torch.cat([bias.expand(len(q), -1, -1), more.expand(-1, q.shape[1], -1)], 2)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[3] ** -0.5
    logits = logits + (bias[:, None] if bias.ndim == 3 else bias)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double())


def cell_bias(tokens: int, cells: int, groups: int, weighted: bool = True) -> Tensor:
    """0 in the own cell, the logarithm of what a key of the own group stands for, minus infinity for all others."""
    if 1 in (cells, groups):
        return torch.zeros(tokens, tokens, dtype=torch.float64)
    places = tokens // cells
    size = torch.tensor([places + (cell < tokens % cells) for cell in range(cells)]).double()
    keys_of_cell = places // groups
    cell = torch.arange(tokens) % cells
    group = torch.arange(tokens) // (keys_of_cell * cells)  # those left over are a group that nobody sees
    query_group = torch.where(group == groups, 0, group)
    weight = (size / keys_of_cell).log()[cell] if weighted else torch.zeros(tokens).double()
    bias = torch.where(query_group[:, None] == group, weight, -math.inf)
    return torch.where(cell[:, None] == cell, 0.0, bias)


@pytest.mark.parametrize(("tokens", "cells", "groups"), CELLS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("context", [None, text(), text(masked=False)])
def test_cells(tokens: int, cells: int, groups: int, weighted: bool, context: Keys | None) -> None:
    q, k, v = image(tokens)
    out = cell_joint_attention(q, k, v, cells, groups, weighted=weighted, context=context)
    wanted = dense(q, k, v, cell_bias(tokens, cells, groups, weighted), context)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tokens", "samples", "groups"), [(24, 5, 4), (64, 8, 8), (35, 6, 5), (35, 4, 8), (12, 12, 1)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("context", [None, text(), text(masked=False)])
def test_samples(tokens: int, samples: int, groups: int, weighted: bool, context: Keys | None) -> None:
    q, _, _ = image(tokens)
    _, k, v = image(samples * groups)
    stands_for = tokens / samples if weighted else 1.0
    own = torch.arange(tokens)[:, None] % groups == torch.arange(samples * groups) % groups
    bias = torch.where(own, math.log(stands_for), -math.inf).double()
    out = sampled_joint_attention(q, k, v, groups, stands_for=stands_for, context=context)
    torch.testing.assert_close(out.double(), dense(q, k, v, bias, context), atol=1e-5, rtol=0)


def runs(tokens: int, count: int) -> Tensor:
    """The run that each token is in: nearly equal ones, the first of them larger."""
    return torch.cat([torch.full((len(part),), i) for i, part in enumerate(torch.arange(tokens).tensor_split(count))])


def elfatt(q: Tensor, k: Tensor, v: Tensor, agents: int, blocks: int, first: int, query_scale: float) -> Tensor:
    """The equation of `elfatt_joint_attention`, head by head, beside `text()`."""
    context = text()
    run, block, scale = runs(q.shape[1], agents), runs(q.shape[1], blocks), q.shape[3] ** -0.5
    near = dense(q, k, v, torch.where(block[:, None] == block, 0.0, -math.inf).double(), context)
    q, k, v, k_text, v_text = (x.double() for x in (q, k, v, context.k, context.v))
    members = [q[:, run == index] for index in range(agents)]
    means = torch.stack([x.mean(1) for x in members], 1)
    lengths = torch.stack([x.norm(dim=3).mean(1) for x in members], 1)
    pooled = means / means.norm(dim=3, keepdim=True) * lengths[..., None]
    to_keys = torch.einsum("bahd,bkhd->bhak", pooled, k) * scale
    to_agents = torch.einsum("bqhd,bahd->bhqa", q, pooled) * query_scale
    to_text = torch.einsum("bqhd,bkhd->bhqk", q, k_text) * scale
    assert context.mask is not None
    to_text = to_text.masked_fill(~context.mask[:, None, None], -math.inf)
    through = to_agents.softmax(3) @ (to_keys.softmax(3) @ v.transpose(1, 2))
    weights = torch.stack([to_keys.logsumexp(3)[:, :, run], to_text.logsumexp(3)]).softmax(0)[..., None]
    mixed = weights[0] * through + weights[1] * (to_text.softmax(3) @ v_text.transpose(1, 2))
    mixed = mixed + 0.1 * v.transpose(1, 2)
    return torch.cat([mixed.transpose(1, 2)[:, :, :first], near[:, :, first:]], 2)


@pytest.mark.parametrize(("tokens", "agents", "blocks"), [(64, 8, 4), (35, 8, 3), (67, 9, 9), (12, 12, 12), (12, 1, 1)])
@pytest.mark.parametrize("first", [0, 2, 3, 4])
def test_elfatt(tokens: int, agents: int, blocks: int, first: int) -> None:
    q, k, v = image(tokens)
    size = round(tokens / blocks)
    out = elfatt_joint_attention(
        q, k, v, agents=agents, block_size=size, agent_heads=first, query_scale=0.2, value_shortcut=0.1, context=text()
    )
    wanted = elfatt(q, k, v, agents, partition(tokens, size)[0], first, 0.2)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)


def test_agents_keep_the_length_of_their_queries() -> None:
    """Rotations that cancel in the mean leave its direction; equal queries are their own agents."""
    q, _, _ = image(35)
    assert run_agents(q, 8).shape == (2, 8, 4, 8)
    torch.testing.assert_close(run_agents(q[:, :1].expand(-1, 35, -1, -1), 8), q[:, :1].expand(-1, 8, -1, -1))
    assert torch.equal(run_agents(torch.zeros_like(q), 8), torch.zeros(2, 8, 4, 8))
    for dtype in HALF:
        assert run_agents((q * 1000).to(dtype), 8).isfinite().all()


@pytest.mark.parametrize("masked", [True, False])
def test_segments_are_seen_as_one_sequence(masked: bool) -> None:
    """What queries of the context do: all image keys, the text's that count, and references."""
    q, k, v = image(30)
    words, reference = text(masked=masked), Keys(*image(7)[:2])
    out = exact_attention(q[:, :5], [Keys(k, v), words, reference])
    twice = Keys(torch.cat([k, k], 1), torch.cat([v, v], 1))
    torch.testing.assert_close(
        exact_attention(q, [Keys(k, v, stands_for=2.0), words]), exact_attention(q, [twice, words])
    )
    keys, values = torch.cat([k, reference.k], 1), torch.cat([v, reference.v], 1)
    torch.testing.assert_close(
        out.double(), dense(q[:, :5], keys, values, torch.zeros(5, 37).double(), words), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("grid", [Grid(1, 8, 8), Grid(3, 5, 7), Grid(2, 6, 6)])
def test_all_keys_are_dense_attention(grid: Grid) -> None:
    q, k, v = image(grid.tokens, size=40)
    words = text(40)
    wanted = dense(q, k, v, torch.zeros(grid.tokens, grid.tokens).double(), words)
    chosen = stratified_samples(grid, grid.tokens, 1, torch.rand(grid.tokens))
    sampled = sampled_joint_attention(q, k[:, chosen], v[:, chosen], 1, context=words)
    ordered = cell_order(grid, 8, 1, torch.rand(8))
    celled = cell_joint_attention(*(x[:, ordered] for x in (q, k, v)), 8, 1, context=words)
    for out in (sampled, celled[:, inverse_permutation(ordered)]):
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)


CALLS: list[Callable[..., Tensor]] = [
    lambda q, k, v, words: cell_joint_attention(q, k, v, 8, 4, context=words),
    lambda q, k, v, words: sampled_joint_attention(q, k[:, :32], v[:, :32], 4, stands_for=8.0, context=words),
    lambda q, k, v, words: elfatt_joint_attention(
        q, k, v, agents=8, block_size=8, agent_heads=q.shape[2] // 2, context=words
    ),
    lambda q, k, v, words: exact_attention(q, [Keys(k, v), words]),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tokens", [64, 67])
@pytest.mark.parametrize("size", [40, 160])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("device", DEVICES)
def test_half_precision(call: Callable[..., Tensor], tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = image(tokens, size)
    wanted = call(q, k, v, text(size))
    out = call(*(x.to(device, dtype) for x in (q, k, v)), moved(text(size), device, dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().float(), wanted, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tokens", [64, 67])
def test_a_prompt_that_is_all_padding_is_no_text(call: Callable[..., Tensor], tokens: int) -> None:
    q, k, v = image(tokens)
    words = text()._replace(mask=torch.tensor([[True] * 5, [False] * 5]))
    out = call(q, k, v, words)
    assert torch.equal(out[1], call(q, k, v, words._replace(v=words.v + 100.0))[1])
    assert not torch.equal(out[0], call(q, k, v, words._replace(v=words.v + 100.0))[0])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tokens", [64, 67])
def test_gradients(call: Callable[..., Tensor], tokens: int) -> None:
    q, k, v = (x[:1, :, :2, :4].double().requires_grad_() for x in image(tokens))
    words = text(4, 2)
    words = Keys(words.k[:1].double(), words.v[:1].double(), words.mask[:1] if words.mask is not None else None)
    assert torch.autograd.gradcheck(lambda *qkv: call(*qkv, words), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("call", CALLS)
def test_compiles_whole(call: Callable[..., Tensor]) -> None:
    q, k, v = image(64)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, text()), call(q, k, v, text()))


@pytest.mark.parametrize(
    ("attention", "call", "keys"),
    [
        (CellSpread(cell=8, block_size=16), CALLS[0], 64),
        (Sampled(keys=8, groups=4), CALLS[1], 32),
        (Elfatt(agents=8, block_size=8), CALLS[2], 64),
        (Softmax(), CALLS[3], 64),
    ],
)
def test_costs_are_the_pairs_that_kernels_see(attention: Any, call: Callable[..., Tensor], keys: int) -> None:
    """Two multiply-adds for each pair of query and key, and channel; the far part computes its own cell, too."""
    size = Size(Grid(1, 8, 8), 64, channels=4 * 8, context=5)
    with Work() as work:
        call(*image(64), text(masked=False))
    assert 2 * 8 * work.pairs == 2 * (attention.cost(size) - size.projections(64, keys))  # two images
    assert work.dense == 0
    if isinstance(attention, CellSpread):  # whole cells need no copy: log-sum-exps and the bias, no tokens
        assert work.calls == 3 and work.copies <= 3 + 1


def test_the_own_token_that_dominates_loses_no_precision() -> None:
    """It is left out of the group, not subtracted from it; and with logits in float32 the result alone is rounded."""
    q, _, v = image(64, 16)
    for dtype in HALF:
        inputs = [x.to(dtype) for x in (32 * q, q, v)]
        wanted = dense(*inputs, cell_bias(64, 8, 8), None)
        torch.testing.assert_close(cell_joint_attention(*inputs, 8, 8).double(), wanted, atol=2e-2, rtol=2e-2)
        rounded = cell_joint_attention(*(x.float() for x in inputs), 8, 8).to(dtype)
        assert torch.equal(cell_joint_attention(*inputs, 8, 8, fp32_logits=True), rounded)


def test_logits_near_the_limit_of_the_dtype() -> None:
    q, k, v = image(64, 64)
    q, k = (torch.nn.functional.normalize(x, dim=-1).mul(700) for x in (q, k))
    for dtype in (torch.float32, *HALF):
        assert cell_joint_attention(*(x.to(dtype) for x in (q, k, v)), 8, 8).isfinite().all()
