"""Merging gives what tomesd 0.1.3 gives, on tensors and through a UNet; merge and unmerge do what they say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tomesd
import torch
from support import tiny_pipelines as tiny
from support.checks import DEVICES, Work, generator
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor

import elfatt_sd
from elfatt_sd.attention import merging
from elfatt_sd.attention.merging import Matching, Split, find_candidates, match_candidates, split_grid

GRIDS = [(32, 32), (24, 16), (33, 25), (7, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tokens(height: int, width: int, channels: int = 24, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, height * width, channels, generator=torch.Generator().manual_seed(seed))


def found(
    x: Tensor, height: int, width: int, ratio: float = 0.5, stride: int = 2, choice: Tensor | None = None
) -> Matching | None:
    places = split_grid(height, width, stride, None if choice is None else choice.to(x.device), x.device)
    return match_candidates(find_candidates(x, Split.of(places, (height // stride) * (width // stride))), ratio)


def match(*given: Any, **options: Any) -> Matching:
    matching = found(*given, **options)
    assert matching is not None
    return matching


@pytest.mark.parametrize(("height", "width"), GRIDS)
@pytest.mark.parametrize("device", DEVICES)
def test_what_tomesd_merges(height: int, width: int, device: str) -> None:
    """In float64 no two similarities nearly tie, so every token gets what tomesd gives it, with the same draws."""
    x = tokens(height, width).double().to(device)
    for ratio, stride, random in itertools.product((0.1, 0.5, 0.75), (2, 4), (False, True)[: 2 - (device != "cpu")]):
        cells = (height // stride) * (width // stride)
        choice = torch.zeros(cells, dtype=torch.int64)
        options: dict[str, Any] = {"no_rand": True}
        if random:
            choice = torch.randint(stride**2, (cells,), generator=torch.Generator().manual_seed(5))
            options = {"generator": torch.Generator().manual_seed(5)}
        removed = int(x.shape[1] * ratio)
        merge, unmerge = bipartite_soft_matching_random2d(x, width, height, stride, stride, removed, **options)
        merged = merge(x)
        for given in (x, x.mT.contiguous().mT):  # also where channels come first
            ours = match(given, height, width, ratio, stride, choice if random else None)
            own, staying = ours.merge(given), ours.positions.shape[1] - cells
            assert own.shape == merged.shape
            # sources that stay, by falling similarity; then destinations, which tomesd puts in any order on a CPU
            torch.testing.assert_close(own[:, :staying], merged[:, :staying], atol=1e-12, rtol=0, msg="their order")
            torch.testing.assert_close(ours.unmerge(own), unmerge(merged), atol=1e-12, rtol=0)
            cell, (down, right) = torch.arange(cells), (choice // stride, choice % stride)
            rows, columns = cell // (width // stride) * stride + down, cell % (width // stride) * stride + right
            grid = (rows * width + columns).sort().values.to(device)
            assert torch.equal(ours.positions[:, -cells:].long(), grid.expand(2, -1))


def test_what_is_sorted_and_how_large_it_gets() -> None:
    """Only tokens that stay are put in order, groups are listed once, and no matrix of similarities is ever whole."""
    x = tokens(128, 128, channels=8, batch=1)
    with Work() as work:
        matching = match(x, 128, 128)
    assert (work.sorts, work.partitions) == ([], 1)
    assert work.largest <= 1 << 22, "a chunk, not 12,288 x 4,096"
    with Work() as work:
        for _ in range(3):
            matching.unmerge(matching.merge(x))
    assert (work.sorts, work.partitions) == ([torch.int32], 0), "the tokens of each group, once"


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_averages_and_unmerge_spreads(dtype: torch.dtype, bags: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without bags of rows, as on MPS."""
    if not bags:
        monkeypatch.setattr(merging, "BAGS", ())
        monkeypatch.setattr(torch.nn.functional, "embedding_bag", None)
    x = tokens(12, 10).to(dtype)
    assert found(x, 12, 10, ratio=0.005) is None
    assert match(x, 12, 10, 0.95).positions.shape == (2, 30), "at most all sources are merged"
    matching = match(x, 12, 10)
    merged = matching.merge(x)
    restored = matching.unmerge(merged)
    assert merged.dtype == restored.dtype == dtype
    for b, token in itertools.product(range(2), range(120)):
        group = (matching.groups[b] == matching.groups[b, token]).nonzero()[:, 0]
        assert matching.sizes[b, matching.groups[b, token]] == len(group)
        assert torch.equal(restored[b, token], restored[b, matching.positions[b, matching.groups[b, token]]])
        tolerance = 0 if len(group) == 1 else 1e-6 if dtype == torch.float32 else 2e-2
        mean = x[b, group].double().mean(dim=0)
        torch.testing.assert_close(restored[b, token].double(), mean, atol=tolerance, rtol=tolerance)


def test_a_gpu_compares_many_tokens_at_once() -> None:
    """At 1024 x 1024 pixels all in one product; at 2048 x 2048 and a batch of 16 in 256 MiB of half precision."""
    gpu = torch.device("cuda:0")
    assert merging.rows_at_once(2, 4096, gpu) >= 12288
    assert merging.rows_at_once(16, 16384, gpu) * 16 * 16384 * 2 == 256 * 2**20
    assert merging.rows_at_once(64, 65536, gpu) == 128


def test_chunks_and_folds_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of grids whose destinations cannot be folded."""
    for height, width in ((16, 18), (10, 10)):
        x = tokens(height, width).double()
        similarity = torch.nn.functional.normalize(x, dim=2) @ torch.nn.functional.normalize(x, dim=2).mT
        split = Split.of(split_grid(height, width, 2), height * width // 4)
        sources, others = split.places[: split.sources], split.places[split.sources :]
        wanted = similarity[:, sources][:, :, others].max(dim=2)
        for chunk in ((1 << 21, 512), (1, 1), (1, 7)):
            monkeypatch.setitem(merging._CHUNK, "cpu", chunk)
            candidates = find_candidates(x, split)
            assert torch.equal(candidates.nearest, wanted.indices)
            torch.testing.assert_close(candidates.similarity, wanted.values)


def test_degenerate_tokens() -> None:
    """Tokens without direction, all alike, or near the dtype's limit are merged without NaN."""
    cases = torch.zeros(2, 64, 8), torch.ones(2, 64, 8), tokens(8, 8, 8).sign() * 2e4
    for case, dtype in itertools.product(cases, DTYPES):
        x = case.to(dtype)
        matching = match(x, 8, 8)
        restored = matching.unmerge(matching.merge(x))
        assert restored.isfinite().all()
        assert case is cases[2] or torch.equal(restored, x)


def test_reordered_with_gradients() -> None:
    """The same merge in another order."""
    x = tokens(8, 8, channels=3)

    def run(x: Tensor) -> Tensor:
        matching = match(x.detach(), 8, 8, choice=torch.arange(16) % 4)
        matching = matching.reordered(matching.positions.argsort(dim=1))
        return matching.unmerge(matching.merge(x).sin())

    plain = match(x, 8, 8)
    order = torch.stack([row.argsort() for row in torch.rand(plain.positions.shape, generator=generator())])
    other, expected = plain.reordered(order), plain.merge(x)
    moved = expected.gather(1, order[:, :, None].expand(-1, -1, 3))
    torch.testing.assert_close(other.merge(x), moved, atol=1e-6, rtol=0)
    torch.testing.assert_close(other.unmerge(moved), plain.unmerge(expected), atol=1e-6, rtol=0)
    assert torch.autograd.gradcheck(run, [x.double().requires_grad_()])


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "ratio", "stride", "levels"),
    [((32, 32), 0.1, 2, 1), ((48, 32), 0.25, 4, 1), ((33, 25), 0.5, 2, 1), ((32, 32), 0.75, 4, 4)],
)
def test_a_whole_unet(size: tuple[int, int], ratio: float, stride: int, levels: int) -> None:
    """In float64, and with fixed destinations: the random ones are those of `test_what_tomesd_merges`."""
    unet, given = tiny.unet().double(), {"ratio": ratio, "use_rand": False, "max_downsample": levels}
    sample, text = (tokens(*size, channels=4).mT.unflatten(2, size).double(), tokens(1, 7, tiny.TEXT_WIDTH).double())

    def output() -> Tensor:
        return unet(sample, 501, text).sample

    tomesd.apply_patch(unet, sx=stride, sy=stride, **given)
    expected = output()
    tomesd.remove_patch(unet)
    with elfatt_sd.patched(unet, "tome", stride=stride, **given):
        assert (output() - expected).abs().max() <= 1e-5
    assert (expected - output()).abs().max() > 1e-4, "merging does something"
