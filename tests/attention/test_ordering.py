"""Orders, cells, lattices and samples of grids of frames, rows and columns are what their names say."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import what_a_query_sees
from elfatt_sd.attention import ordering
from elfatt_sd.attention.ordering import Grid, compact_path, inverse_permutation, lattice_order, stratified_samples

CPU = torch.device("cpu")
ORDERS = ["windows", "curve", "strided", "spread"]
FRAMES = [Grid.image(*size) for size in ((1, 1), (1, 37), (41, 1), (5, 7), (16, 24), (33, 25), (65, 49))]
VIDEOS = [Grid(2, 1, 1), Grid(3, 5, 7), Grid(4, 8, 8), Grid(21, 6, 10), Grid(7, 9, 13), Grid(5, 1, 8), Grid(9, 8, 1)]
BLOCK_SIZES = [1, 2, 3, 16, 37, 64, 128, 10_000]


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def order(name: str, grid: Grid, block_size: int, seed: int = 0) -> Tensor:
    permutation = ordering.block_permutation(name, grid, block_size, noise=noise(grid.tokens, seed))
    assert permutation is not None
    return permutation


def blocks_of(permutation: Tensor, block_size: int) -> list[Tensor]:
    blocks, base, larger = ordering.partition(len(permutation), block_size)
    return list(permutation.split([base + 1] * larger + [base] * (blocks - larger)))


def places(positions: Tensor, grid: Grid) -> Tensor:
    """Frame, row and column of positions, in a new last dimension."""
    return torch.stack(
        [positions // (grid.rows * grid.columns), positions // grid.columns % grid.rows, positions % grid.columns], -1
    )


def test_every_token_once_in_blocks_of_equal_size() -> None:
    """What a caller does to a result changes no other one; gradients flow through what was built without them."""
    digest = hashlib.sha256()
    for grid, size in itertools.product((*FRAMES, *VIDEOS), BLOCK_SIZES):
        for name in ORDERS:
            with torch.inference_mode():
                order(name, grid, size)
            permutation = order(name, grid, size)
            assert permutation.dtype == torch.int64
            assert torch.equal(permutation.sort().values, torch.arange(grid.tokens)), (name, grid, size)
            sizes = [len(block) for block in blocks_of(permutation, size)]
            assert max(sizes) - min(sizes) <= 1
            torch.ones(grid.tokens, requires_grad=True).index_select(0, permutation).sum().backward()
            before = permutation.clone()
            permutation.zero_()
            assert torch.equal(order(name, grid, size), before)
            digest.update(before.numpy().tobytes() if grid.frames == 1 else b"")
        count, groups = ordering.sample_counts(grid.tokens, size, 8)
        drawn = stratified_samples(grid, count, groups, noise(count))
        digest.update(drawn.numpy().tobytes() if grid.frames == 1 else b"")
    assert digest.hexdigest()[:16] == "536ee2162a51d330"


def test_counts() -> None:
    """As near to what is wanted as the tokens allow; and orders that leave the tokens."""
    for wanted, counts in {(4096, 128, 64): (128, 32), (100, 128, 8): (100, 1), (256, 128, 8): (128, 2)}.items():
        assert ordering.sample_counts(*wanted) == counts
    for wanted, counts in {(4096, 64, 128): (64, 32), (32760, 64, 512): (504, 65), (1, 64, 64): (1, 1)}.items():
        assert ordering.cell_counts(*wanted) == counts
    for size, blocks in {(4096, 227): 16, (3185, 128): 35, (7, 128): 1, (7, 1): 7}.items():
        assert ordering.cell_blocks(*size) == blocks
    assert ordering.partition(2048, 227) == (9, 227, 5), "the paper's blocks: no token is dropped"
    assert (
        ordering.block_permutation("sequence", Grid(2, 8, 8), 16)
        is ordering.block_permutation("raster", Grid(2, 8, 8), 16)
        is None
    )
    assert lattice_order(Grid.image(8, 8), 1, CPU) is None
    assert lattice_order(Grid.image(8, 7), 2, CPU) is None  # an odd width makes a chessboard of itself


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


def test_cells_of_ragged_grids_are_compact() -> None:
    grids = Grid(21, 30, 52), Grid(21, 45, 80), Grid(13, 30, 45), Grid(33, 17, 31)
    for grid, size in itertools.product(grids, (64, 181, 256)):
        path = compact_path(grid, size, CPU)
        runs = places(path[: len(path) // size * size].view(-1, size), grid)
        spans = (runs.amax(1) - runs.amin(1) + 1).float()
        assert spans[:, 0].mean() < ordering.MOST_FRAMES * 1.5
        assert spans[:, 1:].mean() < 1.5 * (size / ordering.MOST_FRAMES) ** 0.5


SPREAD = [(Grid(4, 8, 8), 32), (Grid(6, 9, 10), 32), (Grid(7, 9, 13), 32), (Grid.image(32, 32), 64)]
SPREAD += [(Grid.image(24, 40), 96), (Grid.image(33, 25), 128), (Grid.image(65, 49), 227)]


def test_blocks_and_groups_take_one_token_of_each_cell() -> None:
    """Spread blocks at most one of any cell of as many tokens as there are blocks; samples one of every cell."""
    for grid, block_size in SPREAD:
        blocks = blocks_of(order("spread", grid, block_size), block_size)
        cell_of = inverse_permutation(compact_path(grid, len(blocks), CPU)) // len(blocks)
        assert all(len(cell_of[block].unique()) == len(block) for block in blocks), grid
    grids, counts = (Grid(4, 16, 16), Grid(7, 9, 13), Grid(1, 32, 32)), ((32, 1), (32, 8), (50, 5))
    for grid, (samples, groups) in itertools.product(grids, counts):
        chosen = stratified_samples(grid, samples, groups, noise(samples)).view(samples, groups)
        assert chosen.unique().numel() == samples * groups
        place = inverse_permutation(compact_path(grid, round(grid.tokens / samples), CPU, rolled=True))[chosen]
        edges = torch.arange(samples + 1) * grid.tokens // samples
        assert ((place >= edges[:-1, None]) & (place < edges[1:, None])).all()


@pytest.mark.parametrize(("groups", "least"), [(2, 2), (3, 2), (4, 2), (8, 3), (16, 5)])
@pytest.mark.parametrize("grid", [Grid(9, 10, 48), Grid(9, 11, 52)])
def test_tokens_of_a_lattice_lie_far_apart(groups: int, least: int, grid: Grid) -> None:
    """No two tokens of a group are nearer, away from the seams; columns or frames would have a distance of 1."""
    for each in (*FRAMES, *VIDEOS, grid):
        lattices = lattice_order(each, groups, CPU)
        if lattices is not None:
            assert torch.equal(lattices[0].sort().values, torch.arange(each.tokens)), "every token once"
            assert torch.equal(lattices[0][lattices[1]], torch.arange(each.tokens))
    place = torch.arange(grid.tokens) if lattices is None else lattices[1]
    group = (place % groups).view(grid)
    for dt, dy, dx in itertools.product(range(3), range(-2, 3), range(-2, 3)):
        if 0 < dt * dt + dy * dy + dx * dx < least:
            here = group[: grid.frames - dt, 2:-2, 18:-18]
            assert (here != group[dt:, 2 + dy : grid.rows - 2 + dy, 18 + dx : grid.columns - 18 + dx]).all()


MATRICES = [(Grid(1, 8, 8), 8, 2), (Grid(4, 8, 8), 16, 4), (Grid(7, 9, 13), 90, 3), (Grid(1, 5, 7), 6, 5)]


@pytest.mark.parametrize(("grid", "cells", "groups"), [*MATRICES, (Grid(1, 2, 2), 4, 1)])
def test_cell_order_is_a_matrix_of_places_and_cells(grid: Grid, cells: int, groups: int) -> None:
    ordered = ordering.cell_order(grid, cells, groups, noise(cells))
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
    ordered = positions.gather(1, ordering.order_merged(permutation, positions))
    place = {int(position): place for place, position in enumerate(permutation)}
    for row in ordered.tolist():
        assert row == sorted(row, key=place.__getitem__)
    assert torch.equal(positions.gather(1, ordering.order_merged(None, positions)), positions.sort(dim=1).values)


def test_the_picture_of_what_a_query_sees_is_drawn(tmp_path: Path) -> None:
    what_a_query_sees.draw(tmp_path / "seen.png")
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")
