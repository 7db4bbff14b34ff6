"""Attention to one's own compact cell, exactly, and to one token of every other cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from elfatt_sd import checks, kernels
from elfatt_sd.methods.base import LEAST_KEYS, Attention, Draws, Layer, Merge, Prepared, Size
from elfatt_sd.methods.blocks import order_tokens
from elfatt_sd.tiling import Grid, cell_blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Cells(Prepared):
    """The order, and the numbers of cells and of groups of tokens that share their keys."""

    cells: int = 1
    groups: int = 1


@dataclass(frozen=True)
class CellSpread(Attention):
    """Every query sees its own compact cell, and a sample of all other cells that its group of queries shares.

    `softmax(s Q [K_c; K_g]^T + b) [V_c; V_g]` for cell c and group g of the query, with `s = head_dim ** -0.5`. Where
    `weighted`, `b` is `log(n / m)` for a token of another cell, of whose n tokens the group has m; otherwise it is 0.

    Attributes:
        block_size: wanted keys of the sample. Without `cell`, one of every cell: the nearest number that divides the
            tokens is taken.
        cell: wanted tokens in a cell; None is as many as there are groups, each with one token of every cell.
        weighted: whether a sampled key has the weight of the tokens of its cell that it stands for.
        redraw: whether the sample is drawn again in every step, or once for a run.
    """

    name: ClassVar[str] = "cell_spread"
    merges: ClassVar[bool] = False
    needs_sums: ClassVar[bool] = True
    joint: ClassVar[bool] = True

    block_size: int = 128
    cell: int | None = None
    weighted: bool = True
    redraw: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range.
        """
        checks.whole("block_size", self.block_size, 1)
        if self.cell is not None:
            checks.whole("cell", self.cell, 1)
        checks.flag("weighted", self.weighted)
        checks.flag("redraw", self.redraw)

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Deal the tokens of every cell to the groups."""
        draws = draws if self.redraw else draws.once
        cells, groups = self._counts(grid)
        if self.cell is None:
            order = order_tokens("spread", grid, cells, draws)
            return _Cells(order.order, order.inverse, order.sorts_merged, cells, groups)
        import torch

        from elfatt_sd.ordering import cell_order, inverse_permutation

        def both(noise: Tensor) -> Tensor:
            places = cell_order(grid, cells, groups, noise)
            return torch.cat([places, inverse_permutation(places)], -1)

        places, inverse = draws.made("cells", cells, both).chunk(2)
        return _Cells(places, inverse, cells=cells, groups=groups)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        """Attend to cell and sample, joined by their log-sum-exps, and to the context."""
        from elfatt_sd.joint import cell_joint_attention

        q, k, v = layer.project(tokens)
        given: dict[str, Any] = {"weighted": self.weighted, "context": layer.context}
        if 1 not in (prepared.cells, prepared.groups) and kernels.take(layer.kernel["backend"], q, k, v):
            from elfatt_sd.kernels import sampled_launch

            return sampled_launch.cells(q, k, v, prepared.cells, prepared.groups, **given)
        given["fp32_logits"] = layer.kernel["fp32_logits"]
        return cell_joint_attention(q, k, v, prepared.cells, prepared.groups, **given)

    def cost(self, size: Size) -> float:
        """Every token meets those of its cell, its sample, and the context."""
        cell = self.cell or size.tokens / self.block_size
        pairs = self.block_size + cell + size.context
        return size.projections(size.tokens, size.tokens) + round(2 * size.tokens * pairs * size.channels)

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        """The sample is from 1/32 to 1/8 of the tokens, and twice as large as the cell."""
        sizes = [tokens // part for part in (32, 16, 8) if tokens // part >= LEAST_KEYS]
        return [cls(block_size=size, cell=size // 2) for size in sizes]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """Take the numbers that the grid allows."""
        cells, groups = self._counts(grid)
        tokens = grid.tokens // cells
        cell = None if self.cell is None else tokens
        return dataclasses.replace(self, block_size=cells * (tokens // groups), cell=cell)

    def words(self, fitted: Sequence[Self]) -> str:
        """Say what a query sees."""
        if self.cell is None:
            return self.said(fitted, "block_size", "own cell and spread blocks of #")
        return self.said(fitted, "cell", "own cell of #") + self.said(fitted, "block_size", " and # sampled keys")

    @property
    def family(self) -> str:
        """What plots group it with."""
        return "spread blocks"

    def _counts(self, grid: Grid) -> tuple[int, int]:
        """Return the number of cells, and of groups."""
        if self.cell is None:
            groups = cell_blocks(grid.tokens, self.block_size)
            return grid.tokens // groups, groups
        from elfatt_sd.tiling import cell_counts

        return cell_counts(grid.tokens, self.cell, self.block_size)
