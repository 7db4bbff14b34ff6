"""Orders, cells, lattices and samples of grids of frames, rows and columns are what their names say."""

from __future__ import annotations

import hashlib
import itertools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elfatt_sd.attention.ordering import (
    MOST_FRAMES,
    Grid,
    block_permutation,
    cell_order,
    compact_path,
    inverse_permutation,
    lattice_order,
    order_merged,
    partition,
    sample_counts,
    stratified_samples,
)
from elfatt_sd.errors import ElfattError

CPU = torch.device("cpu")
ORDERS = ["windows", "curve", "strided", "spread"]
FRAMES = [
    Grid(1, 1, 1),
    Grid(1, 1, 37),
    Grid(1, 41, 1),
    Grid(1, 5, 7),
    Grid(1, 16, 24),
    Grid(1, 33, 25),
    Grid(1, 65, 49),
]
VIDEOS = [Grid(2, 1, 1), Grid(3, 5, 7), Grid(4, 8, 8), Grid(21, 6, 10), Grid(7, 9, 13), Grid(5, 1, 8), Grid(9, 8, 1)]
BLOCK_SIZES = [1, 2, 3, 16, 37, 64, 128, 10_000]


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def order(name: str, grid: Grid, block_size: int, seed: int = 0) -> Tensor:
    permutation = block_permutation(name, grid, block_size, noise=noise(grid.tokens, seed))
    assert permutation is not None
    return permutation


def blocks_of(permutation: Tensor, block_size: int) -> list[Tensor]:
    blocks, base, larger = partition(len(permutation), block_size)
    return list(permutation.split([base + 1] * larger + [base] * (blocks - larger)))


def places(positions: Tensor, grid: Grid) -> Tensor:
    """Frame, row and column of positions, in a new last dimension."""
    return torch.stack(
        [positions // (grid.rows * grid.columns), positions // grid.columns % grid.rows, positions % grid.columns], -1
    )


def test_orders_of_one_frame_never_change() -> None:
    """A digest of what images drawn by earlier versions depend on."""
    digest = hashlib.sha256()
    for grid, size in itertools.product(FRAMES, BLOCK_SIZES):
        for name in ORDERS:
            digest.update(order(name, grid, size).numpy().tobytes())
        count, groups = sample_counts(grid.tokens, size, 8)
        digest.update(stratified_samples(grid, count, groups, noise(count)).numpy().tobytes())
    assert digest.hexdigest()[:16] == "536ee2162a51d330"


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("grid", [*FRAMES, *VIDEOS])
def test_every_token_once_in_blocks_of_equal_size(name: str, grid: Grid) -> None:
    for block_size in BLOCK_SIZES:
        permutation = order(name, grid, block_size)
        assert permutation.dtype == torch.int64
        assert torch.equal(permutation.sort().values, torch.arange(grid.tokens))
        sizes = [len(block) for block in blocks_of(permutation, block_size)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["sequence", "raster"])
def test_orders_that_leave_the_tokens_where_they_are(name: str) -> None:
    assert block_permutation(name, Grid(2, 8, 8), 16) is None


@pytest.mark.parametrize(
    ("grid", "size", "box"),
    [
        *((Grid(8, 16, 32), 64, (4, 4, 4)), (Grid(16, 32, 48), 256, (4, 8, 8)), (Grid(4, 8, 8), 8, (2, 2, 2))),
        *((Grid.image(64, 64), 256, (1, 16, 16)), (Grid.image(64, 64), 128, (1, 16, 8))),
        *((Grid.image(32, 48), 64, (1, 8, 8)), (Grid.image(12, 20), 30, (1, 6, 5))),
    ],
)
@pytest.mark.parametrize("name", ["windows", "cells"])
def test_cells_are_boxes_where_the_numbers_divide(grid: Grid, size: int, box: tuple[int, ...], name: str) -> None:
    path = order(name, grid, size) if name == "windows" else compact_path(grid, size, CPU, rolled=True)
    runs = places(path.view(-1, size), grid)
    assert torch.equal(runs.amax(1) - runs.amin(1) + 1, torch.tensor(box).expand(len(runs), 3))


@pytest.mark.parametrize("grid", [Grid(21, 30, 52), Grid(21, 45, 80), Grid(13, 30, 45), Grid(33, 17, 31)])
@pytest.mark.parametrize("size", [64, 181, 256])
def test_cells_of_ragged_grids_are_compact(grid: Grid, size: int) -> None:
    path = compact_path(grid, size, CPU)
    runs = places(path[: len(path) // size * size].view(-1, size), grid)
    spans = (runs.amax(1) - runs.amin(1) + 1).float()
    side = (size / MOST_FRAMES) ** 0.5
    assert spans[:, 0].mean() < MOST_FRAMES * 1.5
    assert spans[:, 1:].mean() < 1.5 * side


@pytest.mark.parametrize("grid", [Grid(4, 8, 8), Grid(9, 5, 7), Grid(6, 6, 9)])
@pytest.mark.parametrize("size", [16, 64])
def test_curve_goes_from_neighbour_to_neighbour(grid: Grid, size: int) -> None:
    """Between slabs of frames it may jump over as many frames as a slab has; where sides are odd it has a diagonal."""
    steps = places(order("curve", grid, size), grid).diff(dim=0).abs()
    assert (steps[:, 1:] <= 1).all()
    assert (steps[:, 0] <= 2 * MOST_FRAMES).all()
    assert (steps.sum(1) > 2).sum() < grid.frames


SPREAD = [(Grid(4, 8, 8), 32), (Grid(6, 9, 10), 32), (Grid(7, 9, 13), 32), (Grid.image(32, 32), 64)]
SPREAD += [(Grid.image(24, 40), 96), (Grid.image(33, 25), 128), (Grid.image(65, 49), 227)]


@pytest.mark.parametrize(("grid", "block_size"), SPREAD)
def test_spread_takes_one_token_of_each_cell(grid: Grid, block_size: int) -> None:
    """Each block has at most one token of any cell of as many tokens as there are blocks, wherever the cells lie."""
    blocks = blocks_of(order("spread", grid, block_size), block_size)
    cells = compact_path(grid, len(blocks), CPU)
    cell_of = inverse_permutation(cells) // len(blocks)
    for block in blocks:
        assert len(cell_of[block].unique()) == len(block)


@pytest.mark.parametrize("bad", [None, torch.rand(5), torch.rand(8, 8)])
def test_spread_needs_noise_for_every_token(bad: Tensor | None) -> None:
    with pytest.raises(ElfattError, match=r"noise .*\[128\]"):
        block_permutation("spread", Grid(2, 8, 8), 16, noise=bad)


def test_unknown_order() -> None:
    with pytest.raises(ElfattError, match=r"zigzag.*windows"):
        block_permutation("zigzag", Grid(2, 8, 8), 16)


@pytest.mark.parametrize("grid", [Grid(4, 16, 16), Grid(7, 9, 13), Grid(1, 32, 32)])
@pytest.mark.parametrize(("samples", "groups"), [(32, 1), (32, 8), (50, 5)])
def test_each_group_takes_one_token_of_every_cell(grid: Grid, samples: int, groups: int) -> None:
    chosen = stratified_samples(grid, samples, groups, noise(samples)).view(samples, groups)
    assert chosen.unique().numel() == samples * groups
    place = inverse_permutation(compact_path(grid, round(grid.tokens / samples), CPU, rolled=True))[chosen]
    edges = torch.arange(samples + 1) * grid.tokens // samples
    assert ((place >= edges[:-1, None]) & (place < edges[1:, None])).all()


def test_groups_see_tokens_half_a_cell_apart_also_in_frames() -> None:
    chosen = places(stratified_samples(Grid(8, 32, 32), 128, 2, noise(128)).view(128, 2), Grid(8, 32, 32))
    assert torch.equal(chosen.diff(dim=1).abs().squeeze(1), torch.tensor([2, 2, 2]).expand(128, 3))


@pytest.mark.parametrize("grid", [*FRAMES, *VIDEOS])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8])
def test_lattices_hold_every_token_once(grid: Grid, groups: int) -> None:
    lattices = lattice_order(grid, groups, CPU)
    if lattices is not None:
        assert torch.equal(lattices[0].sort().values, torch.arange(grid.tokens))
        assert torch.equal(lattices[0][lattices[1]], torch.arange(grid.tokens))


@pytest.mark.parametrize(("groups", "least"), [(2, 2), (3, 2), (4, 2), (8, 3), (16, 5)])
@pytest.mark.parametrize("grid", [Grid(9, 10, 48), Grid(9, 11, 52)])
def test_tokens_of_a_lattice_lie_far_apart(groups: int, least: int, grid: Grid) -> None:
    """No two tokens of a group are nearer, away from the seams; columns or frames would have a distance of 1."""
    lattices = lattice_order(grid, groups, CPU)
    place = torch.arange(grid.tokens) if lattices is None else lattices[1]
    group = (place % groups).view(grid)
    for dt, dy, dx in itertools.product(range(3), range(-2, 3), range(-2, 3)):
        if 0 < dt * dt + dy * dy + dx * dx < least:
            here = group[: grid.frames - dt, 2:-2, 18:-18]
            there = group[dt:, 2 + dy : grid.rows - 2 + dy, 18 + dx : grid.columns - 18 + dx]
            assert (here != there).all()


@pytest.mark.parametrize(
    ("grid", "cells", "groups"),
    [
        (Grid(1, 8, 8), 8, 2),
        (Grid(4, 8, 8), 16, 4),
        (Grid(7, 9, 13), 90, 3),
        (Grid(1, 5, 7), 6, 5),
        (Grid(1, 2, 2), 4, 1),
    ],
)
def test_cell_order_is_a_matrix_of_places_and_cells(grid: Grid, cells: int, groups: int) -> None:
    ordered = cell_order(grid, cells, groups, noise(cells))
    assert torch.equal(ordered.sort().values, torch.arange(grid.tokens))
    size, larger = divmod(grid.tokens, cells)
    sizes = torch.full((cells,), size)
    sizes[:larger] += 1
    path = compact_path(grid, round(grid.tokens / cells), CPU, rolled=True)
    cell_of = torch.empty_like(path)
    cell_of[path] = torch.arange(cells).repeat_interleave(sizes)
    assert torch.equal(cell_of[ordered], torch.arange(grid.tokens) % cells)
    along = inverse_permutation(path)[ordered[: size * cells]].view(groups, -1, cells)
    along = along - (sizes.cumsum(0) - sizes)
    gaps = (along.diff(dim=1) % sizes)[:, :, : max(larger, 1)]
    assert ((gaps >= groups) & (gaps <= groups + 1)).all(), "a group's tokens are spaced evenly along a cell"


def test_merged_tokens_follow_their_positions() -> None:
    permutation = order("curve", Grid(3, 6, 6), 9)
    positions = torch.stack([torch.randperm(108, generator=torch.Generator().manual_seed(b))[:20] for b in range(3)])
    ordered = positions.gather(1, order_merged(permutation, positions))
    place = {int(position): place for place, position in enumerate(permutation)}
    for row in ordered.tolist():
        assert row == sorted(row, key=place.__getitem__)
    assert torch.equal(positions.gather(1, order_merged(None, positions)), positions.sort(dim=1).values)


@pytest.mark.parametrize("name", ORDERS)
def test_results_may_be_changed_by_the_caller(name: str) -> None:
    before = order(name, Grid(3, 9, 9), 16).clone()
    order(name, Grid(3, 9, 9), 16).zero_()
    assert torch.equal(order(name, Grid(3, 9, 9), 16), before)


@pytest.mark.parametrize("name", ORDERS)
def test_orders_first_built_without_gradients_serve_with_them(name: str) -> None:
    with torch.inference_mode():
        order(name, Grid(2, 11, 13), 17)
    x = torch.randn(286, requires_grad=True)
    x.index_select(0, order(name, Grid(2, 11, 13), 17)).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 7), (6, 9), (16, 24), (33, 25), (1, 9)])
def test_curve_is_connected(height: int, width: int) -> None:
    """Neighbours on the curve are neighbours in the picture; where the sides are odd, one step is diagonal."""
    path = order("curve", Grid.image(height, width), 16)
    rows, columns = path // width, path % width
    steps = torch.maximum(rows.diff().abs(), columns.diff().abs())
    assert (steps == 1).all()
    diagonal = (rows.diff().abs() + columns.diff().abs()) == 2
    assert diagonal.sum() <= (height % 2 or width % 2)


@pytest.mark.parametrize("name", ["windows", "curve"])
def test_compact_blocks_are_compact(name: str) -> None:
    """On any grid a block spans much less than the picture."""
    height, width, block_size = 65, 49, 100
    spans = [
        max(int((block // width).max() - (block // width).min()), int((block % width).max() - (block % width).min()))
        for block in blocks_of(order(name, Grid.image(height, width), block_size), block_size)
    ]
    assert sum(spans) / len(spans) < 22


@pytest.mark.parametrize(("height", "width", "block_size"), [(16, 16, 32), (9, 13, 20), (33, 25, 128)])
def test_strided_takes_one_of_each_run(height: int, width: int, block_size: int) -> None:
    permutation = order("strided", Grid.image(height, width), block_size)
    blocks = blocks_of(permutation, block_size)
    for index, block in enumerate(blocks):
        whole = block[: partition(height * width, block_size)[1]]
        assert torch.equal(whole, torch.arange(len(whole)) * len(blocks) + index)


def test_spread_cells_are_compact() -> None:
    """The tokens of a block cover the picture evenly: every quarter has a quarter of them."""
    for block in blocks_of(order("spread", Grid.image(64, 64), 128), 128):
        quarter = (block // 64 // 32) * 2 + block % 64 // 32
        assert torch.equal(quarter.bincount(), torch.full((4,), 32))


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: order("spread", Grid.image(16, 16), 32, seed),
        lambda seed: cell_order(Grid(2, 8, 8), 16, 2, noise(16, seed)),
        lambda seed: stratified_samples(Grid.image(64, 64), 128, 8, noise(128, seed)),
    ],
)
def test_draws_follow_their_noise_alone(draw: Callable[[int], Tensor]) -> None:
    first, again, other = map(draw, (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_spread_pairs_are_drawn_evenly() -> None:
    """Any two tokens of different cells share a block in one draw out of as many as there are blocks."""
    draws, count = 600, 8
    together = torch.zeros(64, 64)
    for seed in range(draws):
        for block in blocks_of(order("spread", Grid.image(8, 8), 64 // count, seed), 64 // count):
            together[block[:, None], block] += 1
    cells = order("windows", Grid.image(8, 8), count)
    cell_of = torch.empty_like(cells)
    cell_of[cells] = torch.arange(64) // count
    apart = cell_of[:, None] != cell_of
    assert together[~apart & ~torch.eye(64, dtype=torch.bool)].max() == 0
    assert abs(float(together[apart].mean()) / draws - 1 / count) < 1e-3
    assert together[apart].max() / draws < 2 / count


def test_order_of_merged_tokens_compiles_whole() -> None:
    """The permutation of the grid is drawn before the compiled part runs; the merged tokens are ordered inside."""
    permutation, positions = order("spread", Grid.image(8, 8), 16), torch.arange(64).view(2, 32)
    compiled = torch.compile(order_merged, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(permutation, positions), order_merged(permutation, positions))


@pytest.mark.parametrize(("groups", "least"), [(2, 2), (4, 4), (5, 5), (8, 8), (16, 16)])
@pytest.mark.parametrize("width", [64, 80, 96])
def test_tokens_of_a_lattice_lie_far_apart_of_an_image(groups: int, least: int, width: int) -> None:
    """The least squared distance within a group is what the best square lattices reach; columns would have 1."""
    lattices = lattice_order(Grid.image(32, width), groups, CPU)
    places = torch.arange(32 * width) if lattices is None else lattices[1]
    group = (places % groups).view(32, width)
    edge = groups if width % groups else 0  # where a row is rolled, it has a seam
    y, x = torch.meshgrid(torch.arange(groups + 1), torch.arange(-groups, groups + 1), indexing="ij")
    for column in range(max(edge, groups), width - edge - groups):
        near = group[: groups + 1, column - groups : column + groups + 1] == group[0, column]
        assert (x**2 + y**2)[near & ((x != 0) | (y != 0))].min() >= least


def test_tokens_stay_where_columns_are_the_lattice() -> None:
    assert lattice_order(Grid.image(8, 8), 1, CPU) is None
    assert lattice_order(Grid.image(8, 7), 2, CPU) is None  # an odd width makes a chessboard of itself


def test_the_picture_of_what_a_query_sees_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["what_a_query_sees.py", str(tmp_path / "seen.png")])
    runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "what_a_query_sees.py"), run_name="__main__")
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")
