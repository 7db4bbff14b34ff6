"""Which tokens share a block: permutations of the tokens of a grid. Pure tensors.

A permutation lists positions (row-major) in block order; block i is its i-th run after `attention.partition`.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.tiling import BLOCK_ORDERS, partition


def block_permutation(
    order: str,
    height: int,
    width: int,
    block_size: int,
    *,
    noise: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """Return the tokens of a grid in block order.

    Args:
        order: `sequence` and `raster` (as they are), `windows` (compact rectangles), `curve` (Hilbert curve),
            `strided` (each run of as many tokens as there are blocks gives one token to every block, in turn), or
            `spread` (a stratified random sample: each compact cell of that many tokens gives one to every block, at
            random).
        height: rows of the grid.
        width: columns of the grid.
        block_size: wanted tokens in a block.
        noise: uniform random numbers `[height * width]` on the device, used by `spread`.
        device: where the result lies.

    Returns:
        Positions `[height * width]`, int64; None where the tokens stay as they are.

    Raises:
        ElfattError: the order is not known, or `spread` got no noise of the right length.
    """
    if order not in BLOCK_ORDERS:
        raise ElfattError(f"block_order={order!r} is not known; accepted: {', '.join(BLOCK_ORDERS)}.")
    if order in ("sequence", "raster"):
        return None
    device = torch.device(device)
    if order != "spread":
        return _static_on(order, height, width, block_size, device).clone()
    if noise is None or noise.shape != (height * width,):
        given = None if noise is None else list(noise.shape)
        raise ElfattError(f"block_order='spread' got noise of shape {given}; give one of shape [{height * width}].")
    blocks, base, larger = partition(height * width, block_size)
    cells = compact_path(height, width, blocks, device)
    whole, rest = cells[: blocks * base].view(base, blocks), cells[blocks * base :]
    whole = whole.gather(1, noise[: blocks * base].view(base, blocks).argsort(dim=1))
    rest = rest[noise[blocks * base :].argsort()]
    return _deal(whole, rest, larger)


def compact_path(height: int, width: int, cell: int, device: torch.device, *, rolled: bool = False) -> Tensor:
    """Return all positions of a grid, `[height * width]`, such that runs of `cell` of them are compact; read only.

    With `rolled`, tokens that are spaced evenly along a run are far from each other in rows and columns.
    """
    return _static_on("rolled cells" if rolled else "cells", height, width, cell, device)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept may be used where gradients are wanted
def lattice_order(height: int, width: int, groups: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Order a grid so that every `groups`-th token is on a lattice of the picture, where they would form columns.

    Row y is rolled, so that token (x, y) comes to a place `n` with `n mod groups = (x + slope * y) mod groups`, for the
    slope whose lattice has the most distant neighbours: a chessboard for two groups. Where the groups do not divide the
    width, a row has a seam.

    Args:
        height: rows of the grid.
        width: columns of the grid.
        groups: number of lattices.
        device: where the result lies.

    Returns:
        Positions `[height * width]`, int64, and the place of every token in them; read only. None where the tokens stay
        as they are.
    """
    shift = (_lattice_slope(groups) - width) % groups
    if shift == 0:
        return None
    row = torch.arange(height, device=device)[:, None]
    order = (row * width + (torch.arange(width, device=device) - shift * row % groups) % width).flatten()
    return order, inverse_permutation(order)


def inverse_permutation(permutation: Tensor) -> Tensor:
    """Return the place `[N]` of every token in an order `[N]`."""
    places = torch.arange(permutation.shape[0], device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


def order_merged(permutation: Tensor | None, positions: Tensor) -> Tensor:
    """Put merged tokens in block order.

    Args:
        permutation: block order `[N]` of the whole grid; None is the row-major order.
        positions: grid positions `[B, M]` of the merged tokens.

    Returns:
        Permutation `[B, M]` of the merged tokens by the place of their position in the block order.
    """
    if permutation is None:
        return positions.argsort(dim=1)
    return inverse_permutation(permutation)[positions].argsort(dim=1)


def _deal(whole: Tensor, rest: Tensor, larger: int) -> Tensor:
    """Turn cells `[base, blocks]`, whose columns are the blocks, and the tokens left over into block order."""
    first = torch.cat([whole[:, :larger].t(), rest[:, None]], dim=1)
    return torch.cat([first.flatten(), whole[:, larger:].t().flatten()])


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept may be used where gradients are wanted
def _static_on(order: str, height: int, width: int, size: int, device: torch.device) -> Tensor:
    """Return a fixed order on a device; built once, moved once."""
    return _static(order, height, width, size).to(device)


@functools.lru_cache(maxsize=256)
def _static(order: str, height: int, width: int, size: int) -> Tensor:
    """Return a fixed order on the CPU. `size` is the block size; for cells their tokens."""
    if order == "curve":
        return torch.tensor([y * width + x for x, y in _hilbert(width, height)])
    if order == "strided":
        blocks, base, larger = partition(height * width, size)
        tokens = torch.arange(height * width)
        return _deal(tokens[: blocks * base].view(base, blocks), tokens[blocks * base :], larger)
    return _bands(height, width, size, rolled=order == "rolled cells")


@functools.lru_cache
def _lattice_slope(groups: int) -> int:
    """Return the slope for which the points with `(x + slope * y) mod groups = 0` lie farthest apart."""

    def nearest(slope: int) -> int:
        rows = range(1, groups + 1)
        return min(min(slope * y % groups, -slope * y % groups) ** 2 + y * y for y in rows)

    return max(range(groups), key=nearest)


def _bands(height: int, width: int, cell: int, *, rolled: bool = False) -> Tensor:
    """Order a grid so that runs of `cell` tokens are compact, as square as possible.

    The grid is cut in bands of rows, each walked column by column, every other one backwards; where the numbers
    divide, the runs are equal rectangles. With `rolled`, the walk starts further down in every column, once around
    within a run, so that tokens spaced evenly along a run are far from each other in rows and columns.
    """
    bands = _band_count(height, width, cell)
    edges = [height * band // bands for band in range(bands + 1)]
    grid = torch.arange(height * width).view(height, width)
    walked = []
    for band in range(bands):
        columns = grid[edges[band] : edges[band + 1]].t()
        if rolled:
            rows = columns.shape[1]
            start = (torch.arange(width)[:, None] * rows * rows / cell).round().long()
            columns = columns.gather(1, (start + torch.arange(rows)) % rows)
        walked.append((columns.flip(0) if band % 2 else columns).flatten())
    return torch.cat(walked)


def _band_count(height: int, width: int, cell: int) -> int:
    """Choose the number of bands: cells that tile the grid if they are at most twice as long as wide, else squares."""

    def badness(bands: int) -> tuple[bool, float]:
        rows = height / bands
        elongation = abs(math.log(rows * rows / cell))
        tiles = height % bands == 0 and cell % (height // bands) == 0 and width % (cell * bands // height) == 0
        return not (tiles and elongation <= math.log(2) + 1e-9), elongation

    return min(range(1, height + 1), key=badness)


def _hilbert(width: int, height: int) -> list[tuple[int, int]]:
    """Walk every point of a rectangle along a Hilbert curve, generalised to any sides (after J. Cerveny).

    A region is given by its corner, its long axis `a` and its short axis `b`. A long one is cut across in two that
    are walked one after the other; others are walked up, along and down, in three parts.
    """
    points: list[tuple[int, int]] = []

    def walk(x: int, y: int, ax: int, ay: int, bx: int, by: int) -> None:
        along, across = abs(ax + ay), abs(bx + by)
        step_a, step_b = (_sign(ax), _sign(ay)), (_sign(bx), _sign(by))
        if across == 1:
            points.extend((x + i * step_a[0], y + i * step_a[1]) for i in range(along))
            return
        if along == 1:
            points.extend((x + i * step_b[0], y + i * step_b[1]) for i in range(across))
            return
        half_ax, half_ay = int(ax / 2), int(ay / 2)
        half_bx, half_by = int(bx / 2), int(by / 2)
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

    if width >= height:
        walk(0, 0, width, 0, 0, height)
    else:
        walk(0, 0, 0, height, width, 0)
    return points


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
