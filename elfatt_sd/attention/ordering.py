"""Orders, cells, lattices and samples of the tokens of a grid of frames, rows and columns. Pure tensors.

An image is a grid of one frame. Positions count columns first, then rows, then frames. A permutation lists positions
in block order; block i is its i-th run after `partition`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

BlockOrder = Literal["sequence", "raster", "windows", "curve", "strided", "spread"]
BLOCK_ORDERS: tuple[BlockOrder, ...] = get_args(BlockOrder)
MOST_FRAMES = 4  # in a cell: a latent frame is four frames of the video already, and things move


class Grid(NamedTuple):
    """The image tokens of a layer: columns first, then rows, then frames."""

    frames: int  # of the latent video; an image has one
    rows: int  # of a frame
    columns: int  # of a frame

    @classmethod
    def image(cls, rows: int, columns: int) -> Self:
        return cls(1, rows, columns)

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns

    def __str__(self) -> str:
        """Return rows and columns, and the frames of a video: `64x64`, `21x30x52`."""
        return "x".join(map(str, self if self.frames > 1 else self[1:]))


NO_GRID = Grid(0, 0, 0)  # where it is not known


def partition(tokens: int, block_size: int) -> tuple[int, int, int]:
    """Cut a sequence in nearly equal blocks: their number, base size, and how many (the first) have one token more."""
    blocks = max(1, round(tokens / block_size))
    base, larger = tokens // blocks, tokens % blocks  # not divmod, which torch.compile does not trace
    return blocks, base, larger


def cell_blocks(tokens: int, block_size: int) -> int:
    """Return the number of blocks that divides the tokens and comes closest to the wanted size."""
    lower = [divisor for divisor in range(1, math.isqrt(tokens) + 1) if tokens % divisor == 0]
    divisors = [*lower, *(tokens // divisor for divisor in reversed(lower))]
    return min(divisors, key=lambda blocks: abs(math.log(tokens / blocks / block_size)))


def sample_counts(tokens: int, samples: int, groups: int) -> tuple[int, int]:
    """Return how many keys each query sees, and the number of groups; together they use no token twice as a key."""
    samples = min(samples, tokens)
    return samples, min(groups, tokens // samples)


@functools.lru_cache(maxsize=256)
def cell_counts(tokens: int, cell: int, keys: int) -> tuple[int, int]:
    """Return the number of cells and of groups that come closest to the wanted tokens in a cell and in a group.

    Cells that divide the tokens are preferred, for they need no copy. A group has at least one token of every cell, so
    that `keys * cell` is at least `tokens`.
    """

    def badness(counts: tuple[int, int]) -> float:
        cells, groups = counts
        seen = tokens // cells // groups * cells
        return abs(math.log(tokens / cells / cell)) + abs(math.log(seen / keys)) + (0.1 if tokens % cells else 0.0)

    wanted = min(max(1, tokens // cell), tokens)
    choices = range(max(1, wanted // 2), min(tokens, 2 * wanted) + 1)
    divisors = ((cells, groups) for cells in choices for groups in range(1, tokens // cells + 1))
    return min(((cells, groups) for cells, groups in divisors if tokens // cells % groups == 0), key=badness)


def block_permutation(
    order: str, grid: Grid, block_size: int, *, noise: Tensor | None = None, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Return the positions `[tokens]` of a grid in block order; None where the tokens stay as they are.

    Orders are `sequence` and `raster` (as they are), `windows` (compact boxes), `curve` (Hilbert curve; several frames
    at a time), `strided` (each run of as many tokens as there are blocks gives one token to every block, in turn), and
    `spread` (a stratified random sample: each compact cell of that many tokens gives one to every block, by `noise`,
    uniform random numbers `[tokens]` on the device).
    """
    if order in ("sequence", "raster"):
        return None
    device = torch.device(device)
    if order != "spread":
        return _static(order, grid, block_size, device).clone()
    assert noise is not None
    blocks, base, larger = partition(grid.tokens, block_size)
    cells = compact_path(grid, blocks, device)
    whole, rest = cells[: blocks * base].view(base, blocks), cells[blocks * base :]
    whole = whole.gather(1, noise[: blocks * base].view(base, blocks).argsort(dim=1))
    rest = rest[noise[blocks * base :].argsort()]
    return _deal(whole, rest, larger)


def compact_path(grid: Grid, cell: int, device: torch.device, *, rolled: bool = False) -> Tensor:
    """Return all positions `[tokens]` of a grid, such that runs of `cell` of them are compact; read only.

    A run is as cubic as possible, over at most about `MOST_FRAMES` frames. With `rolled`, tokens that are spaced
    evenly along a run are far from each other in frames, rows and columns.
    """
    return _static("rolled cells" if rolled else "cells", grid, cell, device)


def stratified_samples(grid: Grid, samples: int, groups: int, noise: Tensor) -> Tensor:
    """Draw the keys of all groups: one token of every compact cell for each, spaced evenly along the cell.

    The spacing makes the groups' errors differ, so that those of neighbouring queries average out. These are the only
    tokens whose keys and values sampled attention needs. Groups are at most the tokens of a cell; cells, of which there
    are `samples`, are equal but for one token. Of `noise` `[..., samples]` in [0, 1) it makes positions
    `[..., samples * groups]`; sample i of group g is at `i * groups + g`.
    """
    path = compact_path(grid, round(grid.tokens / samples), noise.device, rolled=True)
    edges = torch.arange(samples + 1, device=noise.device) * grid.tokens // samples
    place = (noise[..., None] + torch.arange(groups, dtype=noise.dtype, device=noise.device) / groups) % 1
    return path[(edges[:-1, None] + (place * edges.diff()[:, None]).long()).flatten(-2)]


def cell_order(grid: Grid, cells: int, groups: int, noise: Tensor) -> Tensor:
    """Order a grid as a matrix `[places, cells]`: a column is a compact cell, a run of rows is a group.

    Each group has equally many tokens of every cell, spaced evenly along it; the groups divide `tokens // cells`. Where
    the cells do not divide the tokens, the first ones have one token more; these follow the matrix. Of `noise`
    `[..., cells]` in [0, 1), which turns the cells, it makes positions `[..., tokens]`, the matrix row by row.
    """
    device = noise.device
    places, larger = divmod(grid.tokens, cells)
    path = compact_path(grid, round(grid.tokens / cells), device, rolled=True)
    cell = torch.arange(cells, device=device)
    size = places + (cell < larger).long()
    start = cell * places + cell.clamp(max=larger)
    row = torch.arange(places, device=device).view(-1, groups).t().reshape(-1, 1)  # evenly spaced places lie in a run
    row = torch.cat([row, row.new_full((1, 1), places)])
    return path[(start + (row + (noise[..., None, :] * size).long()) % size).flatten(-2)[..., : grid.tokens]]


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept may be used where gradients are wanted
def lattice_order(grid: Grid, groups: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Order a grid so that every `groups`-th token is on a lattice of it, where they would form columns.

    Rows are rolled, so that token (t, y, x) comes to a place `n` with `n mod groups = (x + a y + b t) mod groups`, for
    slopes whose lattice has the most distant neighbours: a chessboard for two groups. Where the groups do not divide
    the columns, a row has a seam.

    Returned are the positions `[tokens]` and the place of every token in them, read only; None where the tokens stay.
    """
    frames, rows, columns = grid
    row_slope, frame_slope = _lattice_slopes(groups)
    row_shift, frame_shift = (row_slope - columns) % groups, (frame_slope - rows * columns) % groups
    if row_shift == 0 and (frames == 1 or frame_shift == 0):
        return None
    frame = torch.arange(frames, device=device)[:, None, None]
    row = torch.arange(rows, device=device)[:, None]
    shift = (row_shift * row + frame_shift * frame) % groups
    order = ((frame * rows + row) * columns + (torch.arange(columns, device=device) - shift) % columns).flatten()
    return order, inverse_permutation(order)


def inverse_permutation(permutation: Tensor) -> Tensor:
    """Return the place `[..., N]` of every token in an order `[..., N]`."""
    places = torch.arange(permutation.shape[-1], device=permutation.device).expand_as(permutation)
    return torch.empty_like(permutation).scatter_(-1, permutation, places)


def order_merged(permutation: Tensor | None, positions: Tensor) -> Tensor:
    """Sort merged tokens, at grid `positions` `[B, M]`, by a block order `[N]` of the grid; None leaves it as it is."""
    if permutation is None:
        return positions.argsort(dim=1)
    return inverse_permutation(permutation)[positions].argsort(dim=1)


def _deal(whole: Tensor, rest: Tensor, larger: int) -> Tensor:
    """Turn cells `[base, blocks]`, whose columns are the blocks, and the tokens left over into block order."""
    first = torch.cat([whole[:, :larger].t(), rest[:, None]], dim=1)
    return torch.cat([first.flatten(), whole[:, larger:].t().flatten()])


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept may be used where gradients are wanted
def _static(order: str, grid: Grid, size: int, device: torch.device) -> Tensor:
    """Build a fixed order on the CPU and move it. `size` is the block size; for cells their tokens."""
    if order == "curve":  # up and down through the frames of a slab, every other slab backwards
        points = torch.tensor(
            [y * grid.columns + x for x, y in _hilbert(grid.columns, grid.rows)], dtype=torch.int64, device="cpu"
        )
        slabs = []
        for index, slab in enumerate(_cut(grid.frames, _slab_count(grid.frames, size))):
            frames = torch.arange(slab.start, slab.stop, device="cpu") * len(points)
            walked = (points.flip(0) if index % 2 else points)[:, None] + frames
            walked[1::2] = walked[1::2].flip(1)
            slabs.append(walked.flatten())
        return torch.cat(slabs).to(device)
    if order == "strided":
        blocks, base, larger = partition(grid.tokens, size)
        tokens = torch.arange(grid.tokens, device="cpu")
        return _deal(tokens[: blocks * base].view(base, blocks), tokens[blocks * base :], larger).to(device)
    bands = [_rolled(band, size) if order == "rolled cells" else band for band in _bands(grid, size)]
    return torch.cat([(band.flip(0) if index % 2 else band).flatten() for index, band in enumerate(bands)]).to(device)


def _bands(grid: Grid, cell: int) -> Iterator[Tensor]:
    """Cut a grid in slabs of frames and these in bands of rows, such that runs of `cell` tokens of a band are compact.

    Walked column by column, every other band backwards and the bands of every other slab from below, they make one
    path. Where the numbers divide, its runs are equal boxes. A band is `[columns, its rows, frames of the slab]`.
    """
    slabs = _slab_count(grid.frames, cell)
    flat = cell * slabs / grid.frames
    bands = _best_cut(
        grid.rows,
        lambda rows: abs(math.log(rows * rows / flat)),
        lambda rows: flat % rows == 0 and grid.columns % (flat // rows) == 0,
    )
    tokens = torch.arange(grid.tokens, device="cpu").view(grid).permute(2, 1, 0)
    for index, slab in enumerate(_cut(grid.frames, slabs)):
        rows = _cut(grid.rows, bands)
        for band in reversed(rows) if index % 2 else rows:
            yield tokens[:, band, slab]


def _cut(length: int, parts: int) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(length * part // parts for part in range(parts + 1))]


def _rolled(band: Tensor, cell: int) -> Tensor:
    """Start the walk further on in every column, once around rows and frames within a run of `cell` tokens."""
    columns, *sides = band.shape
    before = torch.arange(columns, device="cpu") * math.prod(sides)
    for dim, side in enumerate(sides, start=1):
        start = ((before * side).float() / cell).round().long()
        places = (start[:, None] + torch.arange(side, device="cpu")) % side
        band = band.gather(dim, places.unsqueeze(3 - dim).expand_as(band))
    return band


def _slab_count(frames: int, cell: int) -> int:
    """Choose the number of slabs: of the depth of a cube, but at most `MOST_FRAMES`."""
    depth = min(cell ** (1 / 3), MOST_FRAMES)
    return _best_cut(frames, lambda slab: abs(math.log(slab / depth)), lambda slab: cell % slab == 0)


def _best_cut(length: int, elongation: Callable[[float], float], tiles: Callable[[int], bool]) -> int:
    """Choose the number of parts: so that cells tile if they are at most twice as long as wide, else compact ones."""

    def badness(parts: int) -> tuple[bool, float]:
        long = elongation(length / parts)
        return not (length % parts == 0 and tiles(length // parts) and long <= math.log(2) + 1e-9), long

    return min(range(1, length + 1), key=badness)


@functools.lru_cache
def _lattice_slopes(groups: int) -> tuple[int, int]:
    """Return slopes a, b for which the points with `(x + a y + b t) mod groups = 0` lie far apart.

    First the best in a frame, then the best over frames with it.
    """
    reach = math.isqrt(2 * groups)  # no shortest vector of a lattice with one point in `groups` is longer

    def nearest(row_slope: int, frame_slope: int, frames: int) -> int:
        steps = [(y, t) for t in range(frames) for y in range(-reach, reach + 1) if y or t]
        along = [(row_slope * y + frame_slope * t) % groups for y, t in steps]
        return min(min(x, groups - x) ** 2 + y * y + t * t for x, (y, t) in zip(along, steps, strict=True))

    row_slope = max(range(groups), key=lambda slope: nearest(slope, 0, 1))
    return row_slope, max(range(groups), key=lambda slope: nearest(row_slope, slope, reach + 1))


def _hilbert(width: int, height: int) -> list[tuple[int, int]]:
    """Walk every point of a rectangle along a Hilbert curve, generalised to any sides (after J. Cerveny).

    A region is given by its corner, its long axis `a` and its short axis `b`. A long one is cut across in two that
    are walked one after the other; others are walked up, along and down, in three parts.
    """
    points: list[tuple[int, int]] = []

    def walk(x: int, y: int, ax: int, ay: int, bx: int, by: int) -> None:
        along, across = abs(ax + ay), abs(bx + by)
        step_a, step_b = ([(side > 0) - (side < 0) for side in axis] for axis in ((ax, ay), (bx, by)))
        if across == 1:
            points.extend((x + i * step_a[0], y + i * step_a[1]) for i in range(along))
            return
        if along == 1:
            points.extend((x + i * step_b[0], y + i * step_b[1]) for i in range(across))
            return
        half_ax, half_ay, half_bx, half_by = (int(side / 2) for side in (ax, ay, bx, by))  # towards zero
        if 2 * along > 3 * across:
            if abs(half_ax + half_ay) % 2 and along > 2:  # an even first half leaves no diagonal step
                half_ax, half_ay = half_ax + step_a[0], half_ay + step_a[1]
            walk(x, y, half_ax, half_ay, bx, by)
            walk(x + half_ax, y + half_ay, ax - half_ax, ay - half_ay, bx, by)
            return
        if abs(half_bx + half_by) % 2 and across > 2:
            half_bx, half_by = half_bx + step_b[0], half_by + step_b[1]
        walk(x, y, half_bx, half_by, half_ax, half_ay)
        walk(x + half_bx, y + half_by, ax, ay, bx - half_bx, by - half_by)
        end_x, end_y = x + ax - step_a[0] + half_bx - step_b[0], y + ay - step_a[1] + half_by - step_b[1]
        walk(end_x, end_y, -half_bx, -half_by, half_ax - ax, half_ay - ay)

    walk(0, 0, *((width, 0, 0, height) if width >= height else (0, height, width, 0)))
    return points
