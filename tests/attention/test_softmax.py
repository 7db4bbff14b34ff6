"""Every attention equals its formula, written out densely in float64; parts join; backends are chosen."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.checks import DEVICES, LENGTHS, Work, approximations, close, qkv
from torch import Tensor
from torch.nn import functional

from elfatt_sd.attention import joint
from elfatt_sd.attention import softmax as attention
from elfatt_sd.attention.joint import Keys, cell_joint_attention, exact_attention, sampled_joint_attention
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.attention.softmax import agent_attention, attend, block_attention, pool_agents, softmax_attention
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import CellSpread, Elfatt, Sampled, Size, Softmax

HALF = [torch.float16, torch.bfloat16]
# tokens, keys of each query, groups
SAMPLES = [(24, 5, 4), (64, 8, 8), (35, 6, 5), (35, 4, 8), (12, 12, 1)]
CELLS = [(12, 4, 3), (64, 8, 8), (64, 8, 2), (64, 16, 1), (35, 8, 2), (35, 8, 4), (67, 9, 7), (67, 9, 1), (30, 1, 5)]


def text(size: int = 8, heads: int = 4, masked: bool = True) -> Keys:
    """Five keys; the first image's last two are padding, and the second's first one."""
    k, v = torch.randn(2, 2, 5, heads, size, generator=torch.Generator().manual_seed(99)) * 1.5
    mask = torch.tensor([[True, True, True, False, False], [False, True, True, True, True]])
    return Keys(k, v, mask if masked else None)


def dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, bias: Tensor | None = None, context: Keys | None = None
) -> Tensor:
    """Softmax in float64 with all logits; `bias` is `[queries, keys]`; the context's keys that count follow."""
    bias = torch.zeros(q.shape[1], k.shape[1]) if bias is None else bias
    bias = bias.double().expand(len(q), 1, -1, -1)
    if context is not None:
        k, v = torch.cat([k, context.k], 1), torch.cat([v, context.v], 1)
        mask = torch.ones(context.k.shape[:2], dtype=torch.bool) if context.mask is None else context.mask
        more = torch.where(mask, 0.0, -math.inf).double()[:, None, None].expand(-1, -1, q.shape[1], -1)
        bias = torch.cat([bias, more], 3)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * (q.shape[3] ** -0.5 if scale is None else scale)
    return torch.einsum("bhqk,bkhd->bqhd", (logits + bias).softmax(-1), v.double())


def alike(queries: Tensor, keys: Tensor) -> Tensor:
    """The bias by which queries see the keys of their own number."""
    return torch.where(queries[:, None] == keys, 0.0, -math.inf)


def runs(tokens: int, count: int) -> Tensor:
    """The run that each token is in: nearly equal ones, the first of them larger."""
    return torch.cat([torch.full((len(part),), i) for i, part in enumerate(torch.arange(tokens).tensor_split(count))])


def dense_blocks(q: Tensor, k: Tensor, v: Tensor, block_size: int, **given: Any) -> Tensor:
    block = runs(q.shape[1], max(1, round(q.shape[1] / block_size)))
    return dense(q, k, v, bias=alike(block, block), **given)


def pooled(q: Tensor, agents: int) -> Tensor:
    return torch.stack([part.mean(dim=1) for part in q.double().tensor_split(agents, dim=1)], dim=1)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_softmax_blocks_and_pools(tokens: int) -> None:
    """Of any length, with masks of both kinds and scales."""
    q, k, v = qkv(tokens)
    close(softmax_attention(q, k, v, scale=0.3), dense(q, k, v, 0.3))
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    bias = torch.where(allowed, 0.0, -math.inf)
    for mask in (allowed, bias):
        close(softmax_attention(q, k, v, mask=mask), dense(q, k, v, bias=bias))
    for size, device, scale in itertools.product((1, 16, 30, 227, 1000), DEVICES, (None, 0.2)):
        blocks = block_attention(*(x.to(device) for x in (q, k, v)), size, scale=scale)
        close(blocks.cpu(), dense_blocks(q, k, v, size, scale=scale))
    for agents in (1, 3, 16, 64):
        close(pool_agents(q, agents), q.double() if agents >= tokens else pooled(q, agents))


# heads, their size, the split, the agents' share, and the heads or channels that then go through agents
SPLITS = [(8, 40, "auto", 0.5, 4, "heads"), (5, 64, "auto", 0.5, 32, "channels"), (5, 64, "heads", 0.5, 2, "heads")]
SPLITS += [(8, 40, "channels", 0.5, 16, "channels"), (3, 24, "channels", 0.25, 8, "channels")]
SPLITS += [(1, 5, "auto", 0.5, 2, "channels"), (4, 8, "auto", 1.0, 4, "heads"), (4, 8, "auto", 0.0, 0, "heads")]
SPLITS += [(3, 16, "channels", 0.01, 1, "channels"), (3, 16, "channels", 0.99, 15, "channels")]


@pytest.mark.parametrize("tokens", [7, 257])
@pytest.mark.parametrize(("heads", "size", "split", "share", "first", "of"), SPLITS)
def test_elfatt(tokens: int, heads: int, size: int, split: str, share: float, first: int, of: str) -> None:
    """One part attends through agents, the other in blocks (eq. lepe2sd: heads; eq. lepe1sd: channels)."""
    q, k, v = qkv(tokens, heads, size)
    agents = torch.randn(2, 6, heads, size, generator=torch.Generator().manual_seed(1))
    dim = 2 if of == "heads" else 3
    qa, ka, va = (x.narrow(dim, 0, first) for x in (q, k, v))
    blocks = dense_blocks(*(x.narrow(dim, first, x.shape[dim] - first) for x in (q, k, v)), block_size=30)
    for given, scale, shortcut in ((None, 0.4, 0.1), (agents, None, 0.0), (agents, 0.4, 0.1)):
        own = pooled(qa, min(6, tokens)) if given is None else agents.narrow(dim, 0, first)
        through = dense(qa, own, dense(own, ka, va), scale) + shortcut * va.double()
        options: dict[str, Any] = {"agent_share": share, "split": split, "query_scale": scale}
        found = attention.elfatt_attention(
            q, k, v, agents=6 if given is None else given, block_size=30, value_shortcut=shortcut, **options
        )
        close(found, torch.cat([through, blocks], dim=dim))


@pytest.mark.parametrize(("tokens", "samples", "groups"), SAMPLES)
def test_samples(tokens: int, samples: int, groups: int) -> None:
    """Query n sees the keys of group n mod groups, alone or beside text, where a key may stand for several."""
    (q, _, _), (_, k, v) = qkv(tokens), qkv(samples * groups)
    own = alike(torch.arange(tokens) % groups, torch.arange(samples * groups) % groups)
    for options in ({}, {"scale": 0.7}, {"fp32_logits": True}):
        close(attention.sampled_attention(q, k, v, groups, **options), dense(q, k, v, options.get("scale"), own))
    for context, weight in itertools.product((None, text(), text(masked=False)), (1.0, tokens / samples)):
        out = sampled_joint_attention(q, k, v, groups, stands_for=weight, context=context)
        close(out, dense(q, k, v, bias=own + math.log(weight), context=context))


def cell_bias(tokens: int, cells: int, groups: int, weighted: bool = True) -> Tensor:
    """0 in the own cell, the logarithm of what a key of the own group stands for, minus infinity for all others."""
    if 1 in (cells, groups):
        return torch.zeros(tokens, tokens)
    places, cell = tokens // cells, torch.arange(tokens) % cells
    size = torch.tensor([places + (cell < tokens % cells) for cell in range(cells)]).double()
    group = torch.arange(tokens) // (places // groups * cells)  # those left over are a group that nobody sees
    weight = (size / (places // groups)).log()[cell] if weighted else torch.zeros(tokens).double()
    seen = torch.where(group == groups, 0, group)[:, None] == group
    return torch.where(cell[:, None] == cell, 0.0, torch.where(seen, weight, -math.inf))


@pytest.mark.parametrize(("tokens", "cells", "groups"), CELLS)
def test_cells(tokens: int, cells: int, groups: int) -> None:
    q, k, v = qkv(tokens)
    for weighted, context in itertools.product((True, False), (None, text(), text(masked=False))):
        out = cell_joint_attention(q, k, v, cells, groups, weighted=weighted, context=context)
        close(out, dense(q, k, v, bias=cell_bias(tokens, cells, groups, weighted), context=context))


@pytest.mark.parametrize(("tokens", "agents", "blocks"), [(64, 8, 4), (35, 8, 3), (67, 9, 9), (12, 12, 12), (12, 1, 1)])
def test_elfatt_beside_text(tokens: int, agents: int, blocks: int) -> None:
    """The equation of `elfatt_joint_attention`, head by head."""
    q, k, v = qkv(tokens)
    context, run, scale, size = text(), runs(tokens, agents), q.shape[3] ** -0.5, round(tokens / blocks)
    near = dense_blocks(q, k, v, size, context=context)
    means = pooled(q, agents)
    own = means / means.norm(dim=3, keepdim=True) * pooled(q.double().norm(dim=3, keepdim=True), agents)
    close(joint.run_agents(q, agents), own)
    assert torch.equal(joint.run_agents(0 * q, agents), 0 * q[:, :agents]), "no direction"
    totals = [torch.einsum("bqhd,bkhd->bhqk", x, y.double()) * scale for x, y in ((own, k), (q.double(), context.k))]
    assert context.mask is not None
    totals[1] = totals[1].masked_fill(~context.mask[:, None, None], -math.inf)
    weights = torch.stack([totals[0].logsumexp(3)[:, :, run], totals[1].logsumexp(3)]).softmax(0)
    image, words = weights.transpose(2, 3)[..., None]
    through = image * dense(q, own, dense(own, k, v), 0.2) + words * dense(q, k[:, :0], v[:, :0], context=context)
    through = through + 0.1 * v
    for first in (0, 2, 3, 4):
        options = {"agents": agents, "block_size": size, "query_scale": 0.2, "value_shortcut": 0.1}
        out = joint.elfatt_joint_attention(q, k, v, agent_heads=first, context=context, **options)
        close(out, torch.cat([through[:, :, :first], near[:, :, first:]], 2))


@pytest.mark.parametrize("masked", [True, False])
def test_segments_are_seen_as_one_sequence(masked: bool) -> None:
    """What queries of the context do: all image keys, the text's that count, and references."""
    q, k, v = qkv(30)
    words, reference = text(masked=masked), Keys(*qkv(7)[:2])
    out = exact_attention(q[:, :5], [Keys(k, v), words, reference])
    close(out, dense(q[:, :5], *(torch.cat(x, 1) for x in ((k, reference.k), (v, reference.v))), context=words))
    twice = Keys(torch.cat([k, k], 1), torch.cat([v, v], 1))
    close(exact_attention(q, [Keys(k, v, stands_for=2.0), words]), exact_attention(q, [twice, words]).double())


@pytest.mark.parametrize("size", [40, 160])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("device", DEVICES)
def test_two_parts_are_one_softmax(size: int, dtype: torch.dtype, device: str) -> None:
    """Also where a part has a bias; one without any key weighs nothing, and is no NaN."""
    (q, _, _), (k, v, _) = (qkv(n, 3, size).to(device, dtype) for n in (7, 20))
    joined = attend(q, k[:, :13], v[:, :13]).joined(attend(q, k[:, 13:], v[:, 13:]))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    logits = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) * size**-0.5
    torch.testing.assert_close(joined.mixed.double(), dense(q, k, v), atol=tolerance, rtol=0)
    torch.testing.assert_close(joined.total.double(), logits.logsumexp(-1), atol=tolerance, rtol=0)
    mask = torch.tensor([[True, False] * 10, [False] * 20], device=device)
    part = attend(q, k, v, bias=attention.key_bias(mask, dtype))
    assert part.mixed.isfinite().all() and part.total.isfinite().all()
    assert torch.equal(attend(q, k, v).joined(part).mixed[1], attend(q, k, v).mixed[1])
    for own, other in zip(part, attend(q[:1], k[:1, ::2], v[:1, ::2]), strict=True):
        torch.testing.assert_close(own[:1], other, atol=tolerance, rtol=0)
    apart = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]  # channels not side by side
    torch.testing.assert_close(attend(*apart), attend(q, k, v))


BESIDE: dict[str, Callable[..., Tensor]] = {
    "cells": lambda q, k, v, words: cell_joint_attention(q, k, v, 8, 4, context=words),
    "sampled": lambda q, k, v, words: sampled_joint_attention(
        q, k[:, :32], v[:, :32], 4, stands_for=8.0, context=words
    ),
    "elfatt": lambda q, k, v, words: joint.elfatt_joint_attention(
        q, k, v, agents=8, block_size=8, agent_heads=q.shape[2] // 2, context=words
    ),
    "exact": lambda q, k, v, words: exact_attention(q, [Keys(k, v), words]),
}


@pytest.mark.parametrize("call", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("tokens", [64, 67])
def test_beside_text(call: Callable[..., Tensor], tokens: int) -> None:
    """In half precision; a prompt that is all padding is no text; with gradients."""
    for size, dtype, device in itertools.product((40, 160), HALF, DEVICES):
        inputs, words = qkv(tokens, size=size), text(size)
        moved = Keys(*(x.to(device, dtype) for x in words[:2]), words.mask.to(device))  # type: ignore[union-attr]
        out = call(*inputs.to(device, dtype), moved)
        assert out.dtype == dtype
        torch.testing.assert_close(out.cpu().float(), call(*inputs, words), atol=4e-2, rtol=4e-2)
    words = text()._replace(mask=torch.tensor([[True] * 5, [False] * 5]))
    out, other = (call(*qkv(tokens), words._replace(v=words.v + more)) for more in (0.0, 100.0))
    assert [torch.equal(own, moved) for own, moved in zip(out, other, strict=True)] == [False, True]
    q, k, v = (x.double().requires_grad_() for x in qkv(tokens, 2, 4, batch=1))
    words = Keys(*(x[:1].double() for x in text(4, 2)[:2]), text().mask[:1])  # type: ignore[index]
    assert torch.autograd.gradcheck(lambda *given: call(*given, words), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("dtype", HALF)
def test_logits_in_float32(dtype: torch.dtype) -> None:
    """Logits near the limit of the dtype give no NaN; in float32 the result alone is rounded, also under autocast."""
    q, k, v = qkv(64, size=64)
    q, k = (functional.normalize(x, dim=-1).mul(700) for x in (q, k))
    assert 6e4 < float((q.half().double() ** 2).sum(dim=-1).max()) * 64**-0.5 < 65504
    for to, fp32_logits in itertools.product((torch.float32, dtype), (False, True)):
        inputs = [x.to(to) for x in (q, k, v)]
        found = approximations(*inputs, fp32_logits=fp32_logits)
        found["cells"] = cell_joint_attention(*inputs, 8, 8, fp32_logits=fp32_logits)
        for name, out in found.items():
            assert out.dtype == to and out.isfinite().all(), name
    q, k, v = qkv(100, size=64, dtype=dtype)
    exact, found = (approximations(8 * q.to(to), k.to(to), v.to(to), fp32_logits=True) for to in (torch.float64, dtype))
    whole = [x.float() for x in (8 * q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        cast = approximations(*whole, fp32_logits=True)
    for name in ("softmax", "block"):
        torch.testing.assert_close(found[name], exact[name].to(dtype), msg=name)
        assert torch.equal(cast[name], approximations(*whole)[name])
    q, _, v = qkv(64, size=16)  # the own token dominates: it is left out of the group, not subtracted from it
    inputs = [x.to(dtype) for x in (32 * q, q, v)]
    wanted = dense(*inputs, bias=cell_bias(64, 8, 8))
    torch.testing.assert_close(cell_joint_attention(*inputs, 8, 8).double(), wanted, atol=2e-2, rtol=2e-2)
    rounded = cell_joint_attention(*(x.float() for x in inputs), 8, 8).to(dtype)
    assert torch.equal(cell_joint_attention(*inputs, 8, 8, fp32_logits=True), rounded)


def test_the_work_is_fused_and_grows_with_the_tokens() -> None:
    calls: dict[tuple[int, int], Callable[..., Tensor]] = {  # of kernels, and the pairs that they see
        (1, 2048 * 32): lambda q, k, v: block_attention(q, k, v, 32),  # equal blocks are views
        (2, 5 * 228**2 + 4 * 227**2): lambda q, k, v: block_attention(q, k, v, 227),  # remainders are not padded
        (2, 2 * 2048 * 16): lambda q, k, v: agent_attention(q, k, v, pool_agents(q, 16)),
        (1, 2048 * 16): lambda q, k, v: attention.sampled_attention(q, k[:, :64], v[:, :64], 4),
    }
    for (count, pairs), call in calls.items():
        with Work() as work:
            call(*qkv(2048))
        assert (work.calls, work.dense, work.pairs) == (count, 0, 2 * 4 * pairs)
        assert work.copies == 0 or count == 2


def test_costs_are_the_pairs_that_kernels_see() -> None:
    """Two multiply-adds for each pair of query and key, and channel; the far part computes its own cell, too."""
    size = Size(Grid(1, 8, 8), 64, channels=4 * 8, context=5)
    cells, elfatt = CellSpread(cell=8, block_size=16), Elfatt(agents=8, block_size=8)
    owns: dict[str, tuple[Any, int]] = {"cells": (cells, 64), "sampled": (Sampled(keys=8, groups=4), 32)}
    for call, (own, keys) in {**owns, "elfatt": (elfatt, 64), "exact": (Softmax(), 64)}.items():
        with Work() as work:
            BESIDE[call](*qkv(64), text(masked=False))
        assert 2 * 8 * work.pairs == 2 * (own.cost(size) - size.projections(64, keys)), call  # two images
        assert work.dense == 0
        if call == "cells":  # whole cells need no copy: log-sum-exps and the bias, no tokens
            assert work.calls == 3 and work.copies <= 3 + 1


@pytest.mark.parametrize("masked", [False, True])
def test_more_rows_or_heads_than_a_cuda_grid_takes(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go in several calls; it is tried here with a limit of three."""
    q, k, v = torch.randn(3, 5, 5, 7, 4)
    mask = torch.randn(5, 7, 5, 5) if masked else None
    bias = attention.key_bias(torch.rand(5, 5) < 0.7, q.dtype) if masked else None
    whole, part = softmax_attention(q, k, v, mask=mask), attend(q, k, v, bias=bias)
    monkeypatch.setattr(attention, "GRID_LIMIT", 3)
    monkeypatch.setattr(attention, "GRID_FREE", ())
    with Work() as work:
        torch.testing.assert_close(softmax_attention(q, k, v, mask=mask), whole)
        torch.testing.assert_close(attend(q, k, v, bias=bias), part)
    assert work.calls == 2 * math.ceil(5 / 3) * math.ceil(7 / 3)


def test_backends_of_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """One agrees; errors name the remedy, but those of the device and of its memory go on as they are."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    inputs = qkv(50)
    for name, out in approximations(*inputs, backend="_native_math").items():
        torch.testing.assert_close(out, approximations(*inputs)[name], msg=name)
    monkeypatch.setitem(attention.PACKAGES, "flash", ("no_such_module", "pip install it"))
    for backend, message in {
        "flash": r"attention_backend='flash' .* not installed: pip install it",
        "_native_cudnn": r"'_native_cudnn' does not take float32 tensors with head size 8 on cpu",
    }.items():
        with pytest.raises(ElfattError, match=message):
            softmax_attention(*inputs, backend=backend)
    for of_device in ("CUDA error: an illegal memory access was encountered", "can't allocate memory: 2 TiB"):
        monkeypatch.setattr(dispatch, "dispatch_attention_fn", Mock(side_effect=RuntimeError(of_device)))
        with pytest.raises(RuntimeError, match=of_device) as raised:
            softmax_attention(*inputs, backend="_native_math")
        assert not isinstance(raised.value, ElfattError)
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)  # diffusers before 0.35 has none
    with pytest.raises(ElfattError, match=r"needs diffusers 0\.35"):
        softmax_attention(*inputs, backend="flash")
    assert torch.equal(softmax_attention(*inputs, backend="auto"), softmax_attention(*inputs))
