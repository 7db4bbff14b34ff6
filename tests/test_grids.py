"""Orders, cells, lattices and samples of grids of frames, rows and columns are what their names say."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from torch import Tensor

from elfatt_sd import ordering, sampled
from elfatt_sd.errors import ElfattError
from elfatt_sd.grids import (
    MOST_FRAMES,
    Grid,
    block_permutation,
    cell_order,
    compact_path,
    inverse_permutation,
    lattice_order,
    order_merged,
    stratified_samples,
)
from elfatt_sd.tiling import partition, sample_counts

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


@pytest.mark.parametrize("grid", FRAMES)
def test_one_frame_is_ordered_as_an_image_was(grid: Grid) -> None:
    _, height, width = grid
    draws = noise(grid.tokens)
    for size in BLOCK_SIZES:
        for name in ORDERS:
            was = ordering.block_permutation(name, height, width, size, noise=draws)
            assert was is not None
            assert torch.equal(order(name, grid, size), was)
        for rolled in (False, True):
            assert torch.equal(
                compact_path(grid, size, CPU, rolled=rolled),
                ordering.compact_path(height, width, size, CPU, rolled=rolled),
            )
        count, groups = sample_counts(grid.tokens, size, 8)
        chosen = stratified_samples(grid, count, groups, draws[:count])
        assert torch.equal(chosen, sampled.stratified_samples(height, width, count, groups, draws[:count]))
    for groups in range(1, 33):
        was, now = ordering.lattice_order(height, width, groups, CPU), lattice_order(grid, groups, CPU)
        assert (was is None) == (now is None)
        assert was is None or now is None or all(map(torch.equal, was, now))


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
    [(Grid(8, 16, 32), 64, (4, 4, 4)), (Grid(16, 32, 48), 256, (4, 8, 8)), (Grid(4, 8, 8), 8, (2, 2, 2))],
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


@pytest.mark.parametrize("grid", [Grid(4, 8, 8), Grid(6, 9, 10), Grid(7, 9, 13)])
def test_spread_takes_one_token_of_each_cell(grid: Grid) -> None:
    blocks = blocks_of(order("spread", grid, 32), 32)
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


def test_cell_order_follows_its_noise() -> None:
    first, again, other = (cell_order(Grid(2, 8, 8), 16, 2, noise(16, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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
