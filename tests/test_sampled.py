"""Sampled attention equals its formula, written out densely in float64; samples are stratified and distinct."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import Work
from torch import Tensor

from elfatt_sd.attention.ordering import Grid, sample_counts, stratified_samples
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


def test_samples_depend_on_the_noise_alone() -> None:
    first, again, other = (stratified_samples(Grid.image(64, 64), 128, 8, noise(128, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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
