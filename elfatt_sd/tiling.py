"""How a sequence is cut in blocks, and a grid in cells: names and numbers, without tensors."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, Self, get_args

BlockOrder = Literal["sequence", "raster", "windows", "curve", "strided", "spread"]
BLOCK_ORDERS: tuple[BlockOrder, ...] = get_args(BlockOrder)


class Grid(NamedTuple):
    """The image tokens of a layer: columns first, then rows, then frames.

    Attributes:
        frames: of the latent video; an image has one.
        rows: of a frame.
        columns: of a frame.
    """

    frames: int
    rows: int
    columns: int

    @classmethod
    def image(cls, rows: int, columns: int) -> Self:
        """Return the grid of an image."""
        return cls(1, rows, columns)

    @property
    def tokens(self) -> int:
        """Their number."""
        return self.frames * self.rows * self.columns

    def __str__(self) -> str:
        """Return rows and columns, and the frames of a video: `64x64`, `21x30x52`."""
        return "x".join(map(str, self if self.frames > 1 else self[1:]))


NO_GRID = Grid(0, 0, 0)  # where it is not known


def partition(tokens: int, block_size: int) -> tuple[int, int, int]:
    """Cut a sequence in blocks of nearly equal size, none dropped.

    Args:
        tokens: length of the sequence.
        block_size: wanted tokens in a block.

    Returns:
        The number of blocks, their base size, and how many (the first ones) have one token more.
    """
    blocks = max(1, round(tokens / block_size))
    base, larger = tokens // blocks, tokens % blocks  # not divmod, which torch.compile does not trace
    return blocks, base, larger


def cell_blocks(tokens: int, block_size: int) -> int:
    """Return the number of blocks that divides the tokens and comes closest to the wanted size.

    Args:
        tokens: of the grid.
        block_size: wanted tokens in a block.
    """
    lower = [divisor for divisor in range(1, math.isqrt(tokens) + 1) if tokens % divisor == 0]
    divisors = [*lower, *(tokens // divisor for divisor in reversed(lower))]
    return min(divisors, key=lambda blocks: abs(math.log(tokens / blocks / block_size)))


def sample_counts(tokens: int, samples: int, groups: int) -> tuple[int, int]:
    """Return how many keys each query sees, and the number of groups.

    Args:
        tokens: of the grid.
        samples: wanted keys for each query.
        groups: wanted groups; together they use no token twice as a key.
    """
    samples = min(samples, tokens)
    return samples, min(groups, tokens // samples)


@functools.lru_cache(maxsize=256)
def cell_counts(tokens: int, cell: int, keys: int) -> tuple[int, int]:
    """Return the number of cells and of groups that come closest to what is wanted.

    Cells that divide the tokens are preferred, for they need no copy.

    Args:
        tokens: of the grid.
        cell: wanted tokens in a cell.
        keys: wanted tokens in a group; it has at least one of every cell, so that this times `cell` is at least
            `tokens`.
    """

    def badness(counts: tuple[int, int]) -> float:
        cells, groups = counts
        seen = tokens // cells // groups * cells
        return abs(math.log(tokens / cells / cell)) + abs(math.log(seen / keys)) + (0.1 if tokens % cells else 0.0)

    wanted = min(max(1, tokens // cell), tokens)
    choices = range(max(1, wanted // 2), min(tokens, 2 * wanted) + 1)
    return min(((cells, groups) for cells in choices for groups in _divisors(tokens // cells)), key=badness)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
