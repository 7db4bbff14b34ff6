"""Attention to one's own compact cell, exactly, and to one token of every other cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from elfatt_sd import checks
from elfatt_sd.methods.base import Attention, Draws, Layer, Merge, Prepared, Size
from elfatt_sd.methods.blocks import order_tokens
from elfatt_sd.tiling import Grid, cell_blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Cells(Prepared):
    """The order, and the number of blocks, which is the number of tokens in a cell."""

    blocks: int = 1


@dataclass(frozen=True)
class CellSpread(Attention):
    """Every query sees its cell, and through a `spread` block a random token that stands for each other cell.

    Attributes:
        block_size: wanted cells, each with a token in every block; the nearest number that divides the tokens is taken.
        redraw: whether the blocks are drawn anew in every step, or once for a run.
    """

    name: ClassVar[str] = "cell_spread"
    merges: ClassVar[bool] = False
    needs_sums: ClassVar[bool] = True

    block_size: int = 128
    redraw: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range.
        """
        checks.whole("block_size", self.block_size, 1)
        checks.flag("redraw", self.redraw)

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Deal one token of every cell to each block."""
        blocks = cell_blocks(grid.tokens, self.block_size)
        draws = draws if self.redraw else draws.once
        order = order_tokens("spread", grid, grid.tokens // blocks, draws)
        return _Cells(order.order, order.inverse, order.sorts_merged, blocks)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        """Attend to cell and block, joined by their log-sum-exps."""
        from elfatt_sd.cell_spread import cell_spread_attention

        return cell_spread_attention(*layer.project(tokens), prepared.blocks, fp32_logits=layer.kernel["fp32_logits"])

    def cost(self, size: Size) -> float:
        """Every token meets those of its block and of its cell."""
        pairs = self.block_size + size.tokens / self.block_size
        return size.projections(size.tokens, size.tokens) + round(2 * size.tokens * pairs * size.channels)

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """Take the size that divides the tokens."""
        return dataclasses.replace(self, block_size=grid.tokens // cell_blocks(grid.tokens, self.block_size))

    def words(self, fitted: Sequence[Self]) -> str:
        """Say what a query sees."""
        return self.said(fitted, "block_size", "own cell and spread blocks of #")

    @property
    def family(self) -> str:
        """What plots group it with."""
        return "spread blocks"
