"""Block orders are permutations, and their blocks are what their names say."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elfatt_sd.config import ElfattError
from elfatt_sd.ordering import block_permutation, lattice_order, order_merged
from elfatt_sd.tiling import partition

ORDERS = ["windows", "curve", "strided", "spread"]
GRIDS = [(1, 1), (1, 37), (41, 1), (2, 3), (5, 7), (8, 8), (16, 24), (33, 25), (65, 49)]
BLOCK_SIZES = [1, 2, 3, 16, 37, 128, 10_000]


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def order(name: str, height: int, width: int, block_size: int, seed: int = 0) -> Tensor:
    permutation = block_permutation(name, height, width, block_size, noise=noise(height * width, seed))
    assert permutation is not None
    return permutation


def blocks_of(permutation: Tensor, block_size: int) -> list[Tensor]:
    blocks, base, larger = partition(len(permutation), block_size)
    return list(permutation.split([base + 1] * larger + [base] * (blocks - larger)))


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_every_token_once_in_blocks_of_equal_size(name: str, height: int, width: int) -> None:
    for block_size in BLOCK_SIZES:
        permutation = order(name, height, width, block_size)
        assert permutation.dtype == torch.int64
        assert torch.equal(permutation.sort().values, torch.arange(height * width))
        sizes = [len(block) for block in blocks_of(permutation, block_size)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["sequence", "raster"])
def test_orders_that_leave_the_tokens_where_they_are(name: str) -> None:
    assert block_permutation(name, 8, 8, 16) is None


@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 7), (6, 9), (16, 24), (33, 25), (1, 9)])
def test_curve_is_connected(height: int, width: int) -> None:
    """Neighbours on the curve are neighbours in the picture; where the sides are odd, one step is diagonal."""
    path = order("curve", height, width, 16)
    rows, columns = path // width, path % width
    steps = torch.maximum(rows.diff().abs(), columns.diff().abs())
    assert (steps == 1).all()
    diagonal = (rows.diff().abs() + columns.diff().abs()) == 2
    assert diagonal.sum() <= (height % 2 or width % 2)


@pytest.mark.parametrize(
    ("height", "width", "block_size", "tile"),
    [(64, 64, 256, (16, 16)), (64, 64, 128, (8, 16)), (32, 48, 64, (8, 8)), (12, 20, 30, (6, 5))],
)
def test_windows_are_rectangles_where_the_numbers_divide(
    height: int, width: int, block_size: int, tile: tuple[int, int]
) -> None:
    for block in blocks_of(order("windows", height, width, block_size), block_size):
        rows, columns = block // width, block % width
        sides = (int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1)
        assert sorted(sides) == sorted(tile)


@pytest.mark.parametrize("name", ["windows", "curve"])
def test_compact_blocks_are_compact(name: str) -> None:
    """On any grid a block spans much less than the picture."""
    height, width, block_size = 65, 49, 100
    spans = [
        max(int((block // width).max() - (block // width).min()), int((block % width).max() - (block % width).min()))
        for block in blocks_of(order(name, height, width, block_size), block_size)
    ]
    assert sum(spans) / len(spans) < 22


@pytest.mark.parametrize(("height", "width", "block_size"), [(16, 16, 32), (9, 13, 20), (33, 25, 128)])
def test_strided_takes_one_of_each_run(height: int, width: int, block_size: int) -> None:
    permutation = order("strided", height, width, block_size)
    blocks = blocks_of(permutation, block_size)
    for index, block in enumerate(blocks):
        whole = block[: partition(height * width, block_size)[1]]
        assert torch.equal(whole, torch.arange(len(whole)) * len(blocks) + index)


@pytest.mark.parametrize(("height", "width", "block_size"), [(32, 32, 64), (24, 40, 96), (33, 25, 128), (65, 49, 227)])
def test_spread_takes_one_token_of_each_cell(height: int, width: int, block_size: int) -> None:
    """Each block has at most one token of any cell of as many tokens as there are blocks, wherever the cells lie."""
    blocks = blocks_of(order("spread", height, width, block_size), block_size)
    cells = order("windows", height, width, len(blocks))  # the same cells, by another name
    cell_of = torch.empty_like(cells)
    cell_of[cells] = torch.arange(len(cells)) // len(blocks)
    for block in blocks:
        assert len(cell_of[block].unique()) == len(block)


def test_spread_cells_are_compact() -> None:
    """The tokens of a block cover the picture evenly: every quarter has a quarter of them."""
    for block in blocks_of(order("spread", 64, 64, 128), 128):
        quarter = (block // 64 // 32) * 2 + block % 64 // 32
        assert torch.equal(quarter.bincount(), torch.full((4,), 32))


def test_spread_follows_its_noise() -> None:
    first, again, other = (order("spread", 16, 16, 32, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_spread_pairs_are_drawn_evenly() -> None:
    """Any two tokens of different cells share a block in one draw out of as many as there are blocks."""
    draws, count = 600, 8
    together = torch.zeros(64, 64)
    for seed in range(draws):
        for block in blocks_of(order("spread", 8, 8, 64 // count, seed), 64 // count):
            together[block[:, None], block] += 1
    cells = order("windows", 8, 8, count)
    cell_of = torch.empty_like(cells)
    cell_of[cells] = torch.arange(64) // count
    apart = cell_of[:, None] != cell_of
    assert together[~apart & ~torch.eye(64, dtype=torch.bool)].max() == 0
    assert abs(float(together[apart].mean()) / draws - 1 / count) < 1e-3
    assert together[apart].max() / draws < 2 / count


@pytest.mark.parametrize("bad", [None, torch.rand(5), torch.rand(8, 8)])
def test_spread_needs_noise_for_every_token(bad: Tensor | None) -> None:
    with pytest.raises(ElfattError, match=r"noise .*\[64\]"):
        block_permutation("spread", 8, 8, 16, noise=bad)


def test_unknown_order() -> None:
    with pytest.raises(ElfattError, match=r"zigzag.*windows"):
        block_permutation("zigzag", 8, 8, 16)


def test_merged_tokens_follow_their_positions() -> None:
    permutation = order("curve", 6, 6, 9)
    positions = torch.stack([torch.randperm(36, generator=torch.Generator().manual_seed(b))[:20] for b in range(3)])
    ordered = positions.gather(1, order_merged(permutation, positions))
    place = {int(position): place for place, position in enumerate(permutation)}
    for row in ordered.tolist():
        assert row == sorted(row, key=place.__getitem__)
    assert torch.equal(positions.gather(1, order_merged(None, positions)), positions.sort(dim=1).values)


def test_results_may_be_changed_by_the_caller() -> None:
    """What is cached inside is not what the caller holds."""
    for name, block_size in itertools.product(ORDERS, (16, 30)):
        before = order(name, 9, 9, block_size).clone()
        order(name, 9, 9, block_size).zero_()
        assert torch.equal(order(name, 9, 9, block_size), before)


@pytest.mark.parametrize("name", ORDERS)
def test_orders_first_built_without_gradients_serve_with_them(name: str) -> None:
    with torch.inference_mode():
        order(name, 11, 13, 17)
    x = torch.randn(143, requires_grad=True)
    x.index_select(0, order(name, 11, 13, 17)).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_order_of_merged_tokens_compiles_whole() -> None:
    """The permutation of the grid is drawn before the compiled part runs; the merged tokens are ordered inside."""
    permutation, positions = order("spread", 8, 8, 16), torch.arange(64).view(2, 32)
    compiled = torch.compile(order_merged, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(permutation, positions), order_merged(permutation, positions))


@pytest.mark.parametrize(("height", "width"), GRIDS)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8, 16])
def test_lattices_hold_every_token_once(height: int, width: int, groups: int) -> None:
    lattices = lattice_order(height, width, groups, torch.device("cpu"))
    if lattices is not None:
        order, places = lattices
        assert torch.equal(order.sort().values, torch.arange(height * width))
        assert torch.equal(order[places], torch.arange(height * width))


@pytest.mark.parametrize(("groups", "least"), [(2, 2), (4, 4), (5, 5), (8, 8), (16, 16)])
@pytest.mark.parametrize("width", [64, 80, 96])
def test_tokens_of_a_lattice_lie_far_apart(groups: int, least: int, width: int) -> None:
    """The least squared distance within a group is what the best square lattices reach; columns would have 1."""
    lattices = lattice_order(32, width, groups, torch.device("cpu"))
    places = torch.arange(32 * width) if lattices is None else lattices[1]
    group = (places % groups).view(32, width)
    edge = groups if width % groups else 0  # where a row is rolled, it has a seam
    y, x = torch.meshgrid(torch.arange(groups + 1), torch.arange(-groups, groups + 1), indexing="ij")
    for column in range(max(edge, groups), width - edge - groups):
        near = group[: groups + 1, column - groups : column + groups + 1] == group[0, column]
        assert (x**2 + y**2)[near & ((x != 0) | (y != 0))].min() >= least


def test_tokens_stay_where_columns_are_the_lattice() -> None:
    assert lattice_order(8, 8, 1, torch.device("cpu")) is None
    assert lattice_order(8, 7, 2, torch.device("cpu")) is None  # an odd width makes a chessboard of itself


def test_the_picture_of_what_a_query_sees_is_drawn(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "what_a_query_sees.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "seen.png")], check=True)
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")
