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
def test_round_trip_is_tomesds(height: int, width: int, ratio: float, stride: int, device: str) -> None:
    """In float64 no two similarities nearly tie, so every token gets what tomesd gives it."""
    x = tokens(height, width).double().to(device)
    merge, unmerge = tomesd(x, height, width, ratio, stride, no_rand=True)
    ours = match(x, height, width, ratio, stride)
    merged, staying = ours.merge(x), ours.positions.shape[1] - (height // stride) * (width // stride)
    assert merged.shape == merge(x).shape
    torch.testing.assert_close(merged[:, :staying], merge(x)[:, :staying], atol=1e-12, rtol=0, msg="their order")
    torch.testing.assert_close(ours.unmerge(merged), unmerge(merge(x)), atol=1e-12, rtol=0)


def test_tokens_that_lie_channels_first_are_matched_alike() -> None:
    x = tokens(16, 16)
    ours, channels_first = match(x, 16, 16), match(x.mT.contiguous().mT, 16, 16)
    assert torch.equal(ours.groups, channels_first.groups)
    assert torch.equal(ours.positions, channels_first.positions)


@pytest.mark.parametrize(("height", "width"), GRIDS)
@pytest.mark.parametrize(("ratio", "stride"), SETTINGS)
def test_order_of_the_merged_sequence_is_tomesds(height: int, width: int, ratio: float, stride: int) -> None:
    """First the sources that stay, by falling similarity, then the destinations.

    tomesd sorts the destinations with an unstable sort, whose order on a CPU is arbitrary; they are compared as a set.
    """
    x = tokens(height, width).double()
    merge, _ = tomesd(x, height, width, ratio, stride, no_rand=True)
    ours = match(x, height, width, ratio, stride)
    where = torch.arange(height * width, dtype=x.dtype)[None, :, None].expand(2, -1, 1).contiguous()
    staying = ours.positions.shape[1] - (height // stride) * (width // stride)
    assert torch.equal(ours.positions[:, :staying].double(), merge(where)[:, :staying, 0])
    grid = destinations(height, width, stride, torch.zeros((height // stride) * (width // stride), dtype=torch.int64))
    assert torch.equal(ours.positions[:, staying:], grid.expand(2, -1))


@pytest.mark.parametrize(("height", "width"), GRIDS)
@pytest.mark.parametrize(("ratio", "stride"), SETTINGS)
def test_random_destinations_are_tomesds(height: int, width: int, ratio: float, stride: int) -> None:
    """Both are given the same draws."""
    x = tokens(height, width).double()
    cells = (height // stride) * (width // stride)
    choice = torch.randint(stride**2, (cells,), generator=torch.Generator().manual_seed(5))
    merge, unmerge = tomesd(x, height, width, ratio, stride, generator=torch.Generator().manual_seed(5))
    ours = match(x, height, width, ratio, stride, choice=choice)
    assert torch.equal(ours.positions[:, -cells:], destinations(height, width, stride, choice).expand(2, -1))
    torch.testing.assert_close(ours.unmerge(ours.merge(x)), unmerge(merge(x)), atol=1e-12, rtol=0)


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


def test_every_group_has_one_destination_and_the_most_similar_source_is_merged_first() -> None:
    x = tokens(8, 8)
    matching = match(x, 8, 8, ratio=1 / 64)  # one source alone is merged
    similarity = torch.nn.functional.normalize(x, dim=2)
    similarity = similarity @ similarity.transpose(1, 2)
    corners = destinations(8, 8, 2, torch.zeros(16, dtype=torch.int64))
    sources = torch.tensor([position for position in range(64) if position not in corners])
    for b in range(2):
        pairs = similarity[b][sources][:, corners]
        best = divmod(int(pairs.argmax()), 16)
        source, destination = int(sources[best[0]]), int(corners[best[1]])
        assert matching.groups[b, source] == matching.groups[b, destination]
        assert matching.groups[b].unique().numel() == 63


@pytest.mark.parametrize(
    ("height", "width", "ratio", "stride"), [(8, 8, 0.0, 2), (8, 8, 0.01, 2), (3, 9, 0.5, 4), (1, 8, 0.5, 2)]
)
def test_nothing_to_merge(height: int, width: int, ratio: float, stride: int) -> None:
    assert match_tokens(tokens(height, width), height, width, ratio, stride) is None


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_in_bfloat16_what_is_merged_is_as_similar_as_tomesds(height: int, width: int) -> None:
    """Rounding decides near ties, so the pairs may be others; their similarity must not be less."""
    x = tokens(height, width, batch=1).bfloat16()
    unit = torch.nn.functional.normalize(x.double(), dim=-1)

    def merged_similarity(labels: Tensor) -> float:
        """The similarity of each merged token to the destination of its group, added up."""
        cells = torch.zeros(height // 2, width // 2, dtype=torch.long).flatten()
        places = destinations(height, width, 2, cells)
        keeper = dict(zip(labels[places].tolist(), places.tolist(), strict=True))
        pairs = [(token, keeper[label]) for token, label in enumerate(labels.tolist()) if label in keeper]
        return sum(float(unit[0, token] @ unit[0, place]) for token, place in pairs if token != place)

    marks = tokens(height, width, channels=1, batch=1, seed=1).double()  # tokens that share a mean share a group
    merge, unmerge = tomesd(x, height, width, 0.5, 2, no_rand=True)
    theirs = unmerge(merge(marks))[0, :, 0].unique(return_inverse=True)[1]
    ours = match(x, height, width).groups[0]
    assert len(ours.unique()) == len(theirs.unique())
    assert merged_similarity(ours) >= 0.999 * merged_similarity(theirs)


def test_at_most_all_sources_are_merged() -> None:
    x = tokens(8, 8)
    matching = match(x, 8, 8, 0.95, 2)
    assert matching.merge(x).shape == (2, 16, 24)
    assert matching.unmerge(matching.merge(x)).shape == x.shape


def test_batch_elements_do_not_see_each_other() -> None:
    x = tokens(16, 12, batch=3).double()
    together = match(x, 16, 12)
    for b in range(3):
        alone = match(x[b : b + 1], 16, 12)
        torch.testing.assert_close(
            together.unmerge(together.merge(x))[b], alone.unmerge(alone.merge(x[b : b + 1]))[0], atol=1e-12, rtol=0
        )


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_call_gives_the_same_bits(device: str) -> None:
    x = tokens(32, 24).to(device)
    first, second = (matching.unmerge(matching.merge(x)) for matching in (match(x, 32, 24), match(x, 32, 24)))
    assert torch.equal(first, second)


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


def test_strided_input() -> None:
    """A view that is not contiguous, as the transposed picture of some layers."""
    x = tokens(8, 8).transpose(1, 2).contiguous().transpose(1, 2)
    assert not x.is_contiguous()
    matching, same = match(x, 8, 8), match(x.contiguous(), 8, 8)
    assert torch.equal(matching.merge(x), same.merge(x.contiguous()))
