"""Merging gives what tomesd's matching gives, and merge and unmerge do what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import Work
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor

from elfatt_sd.attention import merging
from elfatt_sd.attention.merging import Matching, match_tokens

GRIDS = [(32, 32), (24, 16), (33, 25), (7, 64)]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SETTINGS = [(0.1, 2), (0.5, 2), (0.75, 2), (0.1, 4), (0.5, 4), (0.75, 4)]


def tokens(height: int, width: int, channels: int = 24, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, height * width, channels, generator=torch.Generator().manual_seed(seed))


def tomesd(x: Tensor, height: int, width: int, ratio: float, stride: int, **options: Any) -> tuple[Any, Any]:
    removed = int(x.shape[1] * ratio)
    merge, unmerge = bipartite_soft_matching_random2d(x, width, height, stride, stride, removed, **options)
    return merge, unmerge


def match(x: Tensor, height: int, width: int, ratio: float = 0.5, stride: int = 2, **options: Any) -> Matching:
    matching = match_tokens(x, height, width, ratio, stride, **options)
    assert matching is not None
    return matching


def destinations(height: int, width: int, stride: int, choice: Tensor) -> Tensor:
    """The positions of the destinations, cell by cell in plain Python."""
    columns = width // stride
    found = []
    for cell, token in enumerate(choice.tolist()):
        row, column = divmod(cell, columns)
        found.append((row * stride + token // stride) * width + column * stride + token % stride)
    return torch.tensor(sorted(found))


@pytest.mark.parametrize(("height", "width"), GRIDS)
@pytest.mark.parametrize(("ratio", "stride"), SETTINGS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("random", [False, True])
def test_what_tomesd_merges(height: int, width: int, ratio: float, stride: int, device: str, random: bool) -> None:
    """In float64 no two similarities nearly tie, so every token gets what tomesd gives it, with the same draws.

    First are the sources that stay, by falling similarity, then the destinations. tomesd sorts the destinations with an
    unstable sort, whose order on a CPU is arbitrary; they are compared as a set.
    """
    x, cells = tokens(height, width).double().to(device), (height // stride) * (width // stride)
    choice = torch.zeros(cells, dtype=torch.int64)
    options: dict[str, Any] = {"no_rand": True}
    if random:
        choice = torch.randint(stride**2, (cells,), generator=torch.Generator().manual_seed(5))
        options = {"generator": torch.Generator(device).manual_seed(5)}
    if random and device != "cpu":
        pytest.skip("draws of another device")
    merge, unmerge = tomesd(x, height, width, ratio, stride, **options)
    for given in (x, x.mT.contiguous().mT):  # also where channels come first
        ours = match(given, height, width, ratio, stride, choice=choice if random else None)
        merged, staying = ours.merge(given), ours.positions.shape[1] - cells
        assert merged.shape == merge(x).shape
        torch.testing.assert_close(merged[:, :staying], merge(x)[:, :staying], atol=1e-12, rtol=0, msg="their order")
        torch.testing.assert_close(ours.unmerge(merged), unmerge(merge(x)), atol=1e-12, rtol=0)
        grid = destinations(height, width, stride, choice).to(device)
        assert torch.equal(ours.positions[:, -cells:].long(), grid.expand(2, -1))


def test_float32_differs_from_tomesd_in_near_ties_alone() -> None:
    """Rounding may flip a merge between two destinations whose similarities are equal to seven digits."""
    height, width = 64, 64
    x = tokens(height, width, channels=64, seed=2)
    merge, unmerge = tomesd(x, height, width, 0.5, 2, no_rand=True)
    ours = match(x, height, width)
    same = (ours.unmerge(ours.merge(x)) - unmerge(merge(x))).abs().amax(dim=2) < 1e-5
    assert same.float().mean() > 0.99


def test_similarities_are_partitioned_not_sorted_and_groups_are_listed_once() -> None:
    """Only the tokens that stay are put in order; several merges by one matching share the list of members."""
    x = tokens(32, 32)
    with Work() as work:
        matching = match(x, 32, 32)
    assert (work.sorts, work.partitions) == ([], 1)
    with Work() as work:
        for _ in range(3):
            matching.unmerge(matching.merge(x))
    assert (work.sorts, work.partitions) == ([torch.int32], 0), "the tokens of each group, once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge_averages_groups_and_unmerge_spreads_them(dtype: torch.dtype) -> None:
    x = tokens(12, 10).to(dtype)
    matching = match(x, 12, 10)
    merged = matching.merge(x)
    restored = matching.unmerge(merged)
    for b in range(2):
        for token in range(120):
            group = (matching.groups[b] == matching.groups[b, token]).nonzero()[:, 0]
            assert matching.sizes[b, matching.groups[b, token]] == len(group)
            if len(group) == 1:
                assert torch.equal(restored[b, token], x[b, token])
            else:
                mean = x[b, group].double().mean(dim=0)
                tolerance = 1e-6 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(restored[b, token].double(), mean, atol=tolerance, rtol=tolerance)
                destination = matching.positions[b, matching.groups[b, token]]
                assert torch.equal(restored[b, token], restored[b, destination])
    assert merged.dtype == restored.dtype == dtype


@pytest.mark.parametrize(
    ("height", "width", "ratio", "stride"), [(8, 8, 0.0, 2), (8, 8, 0.01, 2), (3, 9, 0.5, 4), (1, 8, 0.5, 2)]
)
def test_nothing_to_merge(height: int, width: int, ratio: float, stride: int) -> None:
    assert match_tokens(tokens(height, width), height, width, ratio, stride) is None
    assert match(tokens(8, 8), 8, 8, 0.95).positions.shape == (2, 16), "at most all sources are merged"


def test_tokens_are_averaged_without_bags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MPS before PyTorch 2.15."""
    x = tokens(8, 8)
    found = match(x, 8, 8)
    wanted = found.merge(x)
    monkeypatch.setattr(merging, "has_bags", lambda kind: False)
    monkeypatch.setattr(torch.nn.functional, "embedding_bag", None)
    torch.testing.assert_close(match(x, 8, 8).merge(x), wanted)


def test_a_large_gpu_compares_more_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2048 x 2048 pixels and a batch of 16: a fraction of the memory, in place of 384 products."""
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(merging, "_whole_memory", lambda device: 80 * 2**30)
    rows = merging.rows_at_once(16, 16384, gpu)
    assert 49152 / rows < 48
    assert rows * 16 * 16384 * 2 <= 80 * 2**30 / 64
    monkeypatch.setattr(merging, "_whole_memory", lambda device: 2**30)
    assert merging.rows_at_once(16, 16384, gpu) == 128


@pytest.mark.parametrize("chunk", [(1, 1), (1, 7), (1 << 30, 1)])
def test_chunks_change_nothing(chunk: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(16, 18).double()
    whole = match(x, 16, 18)
    monkeypatch.setitem(merging._CHUNK, "cpu", chunk)
    assert torch.equal(match(x, 16, 18).groups, whole.groups)


@pytest.mark.parametrize("columns", [16, 48, 50])
def test_row_maximum_is_max(columns: int) -> None:
    scores = torch.randn(2, 9, columns, generator=torch.Generator().manual_seed(0))
    values, place = merging._row_maximum(scores)
    assert torch.equal(values, scores.max(dim=2).values)
    assert torch.equal(place, scores.max(dim=2).indices)


def test_no_similarity_matrix_is_ever_whole() -> None:
    """The largest tensor of a matching of 16,384 tokens is a chunk, not their 12,288 x 4,096 similarities."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    x = torch.randn(1, 128 * 128, 8, generator=torch.Generator().manual_seed(0))
    with Watch():
        matching = match(x, 128, 128)
        matching.unmerge(matching.merge(x))
    assert largest <= 1 << 22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["zeros", "equal", "huge"])
def test_degenerate_tokens(dtype: torch.dtype, case: str) -> None:
    """Tokens without direction, all alike, or near the dtype's limit are merged without NaN."""
    x = {"zeros": torch.zeros(2, 64, 8), "equal": torch.ones(2, 64, 8), "huge": tokens(8, 8, 8).sign() * 2e4}[case]
    x = x.to(dtype)
    matching = match(x, 8, 8)
    restored = matching.unmerge(matching.merge(x))
    assert restored.isfinite().all()
    if case != "huge":
        assert torch.equal(restored, x)


def test_reordered_is_the_same_merge_in_another_order() -> None:
    x = tokens(10, 10)
    plain = match(x, 10, 10)
    count = plain.positions.shape[1]
    permutation = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(b)) for b in range(2)])
    other = plain.reordered(permutation)
    assert torch.equal(other.positions, plain.positions.gather(1, permutation))
    expected = plain.merge(x).gather(1, permutation[:, :, None].expand(-1, -1, 24))
    torch.testing.assert_close(other.merge(x), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(other.unmerge(other.merge(x)), plain.unmerge(plain.merge(x)), atol=1e-6, rtol=0)


def test_gradients_flow_through_merge_and_unmerge() -> None:
    x = tokens(6, 6, channels=3).double().requires_grad_()
    matching = match(x, 6, 6)
    assert torch.autograd.gradcheck(lambda x: matching.unmerge(matching.merge(x)), [x])


def test_compiles_whole() -> None:
    def run(x: Tensor, choice: Tensor) -> Tensor:
        matching = match_tokens(x, 8, 8, 0.5, 2, choice)
        assert matching is not None
        matching = matching.reordered(matching.positions.argsort(dim=1))
        return matching.unmerge(matching.merge(x).sin())

    x, choice = tokens(8, 8), torch.arange(16) % 4
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, choice), run(x, choice))
