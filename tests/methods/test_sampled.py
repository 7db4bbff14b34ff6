"""Sampled keys and cells equal their formulas, written out densely in float64; samples are stratified and distinct."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.checks import Work
from torch import Tensor

from elfatt_sd.attention import softmax as attention
from elfatt_sd.attention.joint import cell_joint_attention
from elfatt_sd.attention.ordering import Grid, cell_blocks, sample_counts, stratified_samples
from elfatt_sd.attention.softmax import sampled_attention

GRIDS = [(64, 64, 128, 8), (64, 64, 128, 32), (96, 64, 128, 8), (65, 49, 100, 7), (8, 8, 64, 1), (5, 7, 6, 5)]


def qkv(tokens: int, keys: int, heads: int = 3, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(2, n, heads, size, generator=generator) for n in (tokens, keys, keys))  # type: ignore[return-value]


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("tokens", "samples", "groups"), [(24, 5, 4), (64, 8, 8), (35, 6, 5), (35, 4, 8), (12, 12, 1)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"fp32_logits": True}])
def test_formula(tokens: int, samples: int, groups: int, options: dict[str, Any]) -> None:
    q, k, v = qkv(tokens, samples * groups)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * options.get("scale", 8**-0.5)
    own = torch.arange(tokens)[:, None] % groups == torch.arange(samples * groups) % groups
    weights = logits.masked_fill(~own, -torch.inf).softmax(dim=-1)
    wanted = torch.einsum("bhqk,bkhd->bqhd", weights, v.double())
    torch.testing.assert_close(sampled_attention(q, k, v, groups, **options).double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("height", "width", "samples", "groups"), GRIDS)
def test_each_group_takes_one_token_of_every_cell(height: int, width: int, samples: int, groups: int) -> None:
    tokens = height * width
    chosen = stratified_samples(Grid.image(height, width), samples, groups, noise(samples)).view(samples, groups)
    assert chosen.unique().numel() == samples * groups, "no token is a key twice"
    assert (chosen >= 0).all()
    assert (chosen < tokens).all()
    rows, columns = chosen // width, chosen % width  # the tokens of one cell lie close together
    reach = 4 * (tokens / samples) ** 0.5 + 2
    assert ((rows.amax(1) - rows.amin(1)) <= reach).all()
    assert ((columns.amax(1) - columns.amin(1)) <= reach).all()


@pytest.mark.parametrize(("height", "width", "samples", "groups"), [(8, 8, 16, 2), (5, 7, 6, 5), (6, 4, 7, 3)])
def test_every_token_of_a_cell_is_as_likely(height: int, width: int, samples: int, groups: int) -> None:
    """Over an even sweep of the noise, every token is chosen by every group; those of equal cells equally often."""
    sweep = (torch.arange(840) + 0.5) / 840
    counts = torch.zeros(groups, height * width)
    for value in sweep.tolist():
        chosen = stratified_samples(Grid.image(height, width), samples, groups, torch.full((samples,), value))
        for group in range(groups):
            counts[group, chosen[group::groups]] += 1
    sizes = height * width / samples
    expected = 840 / sizes
    assert (counts - expected).abs().max() <= expected / int(sizes) + 2


@pytest.mark.parametrize(("samples", "rows", "columns"), [(128, 8, 4), (256, 4, 4), (512, 4, 2)])
def test_two_groups_see_tokens_half_a_cell_apart(samples: int, rows: int, columns: int) -> None:
    chosen = stratified_samples(Grid.image(64, 64), samples, 2, noise(samples)).view(samples, 2)
    assert ((chosen // 64).diff().abs() == rows // 2).all()
    assert ((chosen % 64).diff().abs() == columns // 2).all()


def test_one_sample_of_every_token_is_exact_attention() -> None:
    q, k, v = qkv(35, 35)
    chosen = stratified_samples(Grid.image(5, 7), 35, 1, noise(35))
    assert torch.equal(chosen.sort().values, torch.arange(35))
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(sampled_attention(q, k[:, chosen], v[:, chosen], 1), exact)


@pytest.mark.parametrize(
    ("tokens", "samples", "groups", "counts"),
    [
        (4096, 128, 8, (128, 8)),
        (4096, 128, 64, (128, 32)),
        (3185, 128, 8, (128, 8)),
        (4757, 128, 8, (128, 8)),
        (100, 128, 8, (100, 1)),
        (256, 128, 8, (128, 2)),
        (7, 3, 8, (3, 2)),
    ],
)
def test_counts(tokens: int, samples: int, groups: int, counts: tuple[int, int]) -> None:
    assert sample_counts(tokens, samples, groups) == counts


def test_the_mean_over_samples_comes_close_to_exact_attention() -> None:
    """The error falls with the number of keys, and with the number of draws that are averaged."""
    q, k, v = qkv(1024, 1024)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def error(samples: int, draws: int) -> float:
        made = []
        for seed in range(draws):
            chosen = stratified_samples(Grid.image(32, 32), samples, 4, noise(samples, seed))
            made.append(sampled_attention(q, k[:, chosen], v[:, chosen], 4))
        return float((torch.stack(made).mean(0) - exact).norm() / exact.norm())

    few, many, averaged = error(32, 1), error(128, 1), error(32, 16)
    assert many < 0.7 * few
    assert averaged < 0.4 * few


def test_the_work_grows_with_the_tokens_alone() -> None:
    """One fused call, no dense product and no copy; four times the tokens are four times the pairs."""
    pairs = []
    for tokens in (256, 1024):
        q, k, v = qkv(tokens, 64)
        with Work() as work:
            sampled_attention(q, k, v, 4)
        assert (work.calls, work.dense, work.copies) == (1, 0, 0)
        pairs.append(work.pairs)
    assert pairs == [2 * 3 * 256 * 16, 2 * 3 * 1024 * 16]


def test_compiles_whole() -> None:
    q, k, v = qkv(64, 32)
    compiled = torch.compile(sampled_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, 4), sampled_attention(q, k, v, 4))


def cell_qkv(tokens: int, heads: int = 3, size: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(3, 2, tokens, heads, size, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def cell_spread_attention(q: Tensor, k: Tensor, v: Tensor, blocks: int, **options: Any) -> Tensor:
    """Each block has one token of every cell."""
    return cell_joint_attention(q, k, v, q.shape[1] // blocks, blocks, **options)


def dense(q: Tensor, k: Tensor, v: Tensor, blocks: int) -> Tensor:
    """Logits of the own cell as they are, of the own block plus log(blocks), of all others minus infinity."""
    q, k, v = (x.double() for x in (q, k, v))
    tokens = q.shape[1]
    cells = tokens // blocks
    block, cell = torch.arange(tokens) // cells, torch.arange(tokens) % cells
    rate = torch.full((tokens, tokens), -math.inf, dtype=torch.float64)
    rate[block[:, None] == block] = math.log(blocks)
    rate[cell[:, None] == cell] = 0.0  # the own token lies in both; it counts once
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + rate.to(q.device)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(dim=-1), v)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CASES = [(12, 3), (64, 8), (64, 2), (64, 32), (96, 4), (30, 5), (7, 1), (7, 7), (35, 7)]


@pytest.mark.parametrize(("tokens", "blocks"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_formula_of_cells(tokens: int, blocks: int, device: str) -> None:
    q, k, v = cell_qkv(tokens).to(device)
    out = cell_spread_attention(q, k, v, blocks)
    torch.testing.assert_close(out.double(), dense(q, k, v, blocks), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_own_token_that_dominates(dtype: torch.dtype, device: str) -> None:
    """The own token is left out of the block, not subtracted from it: no precision is lost where it weighs most."""
    q, _, v = cell_qkv(64, size=16, dtype=dtype).to(device)
    out = cell_spread_attention(32 * q, q, v, 8)
    torch.testing.assert_close(out.double(), dense(32 * q, q, v, 8), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [1, 8])
def test_fp32_logits_round_the_result_alone(dtype: torch.dtype, blocks: int) -> None:
    q, k, v = cell_qkv(64, dtype=dtype)
    out = cell_spread_attention(q, k, v, blocks, fp32_logits=True)
    assert torch.equal(out, cell_spread_attention(q.float(), k.float(), v.float(), blocks).to(dtype))


def test_more_blocks_than_a_cuda_grid_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch beyond the kernels' limit goes in several calls; it is tried here with a limit of three."""
    q, k, v = cell_qkv(64)
    whole = cell_spread_attention(q, k, v, 8)
    sizes: list[int] = []
    fused = attention._fused_cpu

    def spy(q: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        sizes.append(len(q))
        return fused(q, *given)

    monkeypatch.setattr(attention, "GRID_LIMIT", 3)
    monkeypatch.setattr(attention, "GRID_FREE", ())
    monkeypatch.setattr(attention, "_fused_cpu", spy)
    torch.testing.assert_close(cell_spread_attention(q, k, v, 8), whole)
    assert max(sizes) == 3
    assert len(sizes) > 2 + 2 * 8 / 3  # heads are split, too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_near_the_limit_of_the_dtype(dtype: torch.dtype) -> None:
    q, k, v = cell_qkv(64, size=64, dtype=dtype)
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).mul(700).to(dtype) for x in (q, k))
    assert cell_spread_attention(q, k, v, 8).isfinite().all()


def test_equal_tokens_weigh_as_in_exact_attention() -> None:
    """Where all keys are alike, every token of the picture weighs the same, sampled or not: the rate is right."""
    q, k, _ = cell_qkv(64)
    k = k[:, :1].expand_as(k)
    block = (torch.arange(64) // 8).float()  # with 8 blocks of 8 tokens, a cell holds one token of each block
    v = block[None, :, None, None].expand(2, 64, 3, 8)
    out = cell_spread_attention(q, k, v.contiguous(), 8)
    expected = (block.mean() + 7 * block) / 8  # an eighth of the weight lies in the cell, the rest in the block
    torch.testing.assert_close(out, expected[None, :, None, None].expand_as(out), atol=1e-5, rtol=0)


def test_gradients() -> None:
    inputs = tuple(x.double().requires_grad_() for x in cell_qkv(12, heads=2, size=4))
    assert torch.autograd.gradcheck(lambda q, k, v: cell_spread_attention(q, k, v, 3), inputs)
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    cell_spread_attention(q, k, v, 3).square().sum().backward()
    wanted = torch.autograd.grad(dense(*inputs, 3).square().sum(), inputs)
    for got, want in zip((q, k, v), wanted, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad.double(), want, atol=1e-4, rtol=1e-4)


def test_without_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = cell_qkv(64)
    fused = cell_spread_attention(q, k, v, 8)

    def missing(*_: Any) -> Any:
        raise AssertionError("float64 has no fused kernel")

    monkeypatch.setattr(attention, "_fused_cpu", missing)
    torch.testing.assert_close(cell_spread_attention(q.double(), k.double(), v.double(), 8).float(), fused)


def test_cells_compile_whole() -> None:
    q, k, v = cell_qkv(64)
    compiled = torch.compile(cell_spread_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, 8), cell_spread_attention(q, k, v, 8))


@pytest.mark.parametrize(
    ("tokens", "size", "blocks"),
    [(4096, 128, 32), (4096, 227, 16), (3185, 128, 35), (7, 128, 1), (7, 1, 7), (256, 37, 8)],
)
def test_the_number_of_blocks_divides_the_tokens(tokens: int, size: int, blocks: int) -> None:
    assert cell_blocks(tokens, size) == blocks
