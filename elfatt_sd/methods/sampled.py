"""Attention to keys sampled from the image: a stratified sample, near cells, and reuse over steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from elfatt_sd.attention.joint import cell_joint_attention, sampled_joint_attention
from elfatt_sd.attention.ordering import (
    Grid,
    cell_blocks,
    cell_counts,
    cell_order,
    inverse_permutation,
    lattice_order,
    sample_counts,
    stratified_samples,
)
from elfatt_sd.attention.softmax import TRITON, sampled_attention, triton_takes
from elfatt_sd.methods.base import LEAST_KEYS, Attention, Draws, Layer, Merge, Prepared, Size, span
from elfatt_sd.methods.published import order_tokens


@dataclass
class _Sample(Prepared):
    """The order of the queries, the places of the keys in it, and the number of groups that a grid allows."""

    keys: Tensor | None = None
    groups: int = 1

    def order_for(self, backend: str) -> Tensor | None:
        """Triton's kernel reads queries where they are."""
        return None if backend == TRITON else self.order


@dataclass(frozen=True)
class Sampled(Attention):
    """Every query sees the same number of keys, one of every compact cell of the image; it does not merge.

    `softmax(s Q_g K_g^T) V_g` for group g of queries, where `K_g`, `V_g` are of the sampled tokens and
    `s = head_dim ** -0.5`. A relative is ToDo (arXiv:2402.13573), where all queries share a fixed coarse grid of keys.

    Attributes:
        keys: that every query sees; as a setting also called `block_size`.
        groups: number of groups of queries that have a sample of their own.
        lattice: whether a group's queries lie on a lattice of the image, far from each other, so that what the groups
            get wrong averages out among neighbours; otherwise in columns, where it can show as streaks.
        redraw: whether the samples are drawn again in every step, or once for a run.
        weighted: whether a sampled key has the weight of the tokens that it stands for, where there is text too.
    """

    name: ClassVar[str] = "sampled"
    merges: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({"block_size": "keys"})

    keys: int = 128
    groups: int = 2
    lattice: bool = True
    redraw: bool = True
    weighted: bool = True

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Draw the keys of every group, and put the queries in the order of their groups."""
        count, groups = sample_counts(grid.tokens, self.keys, self.groups)
        draws = draws if self.redraw else draws.once
        on_host = lattice_order(grid, groups, torch.device("cpu")) if self.lattice else None

        def places(noise: Tensor) -> Tensor:
            chosen = stratified_samples(grid, count, groups, noise)
            return chosen if on_host is None else on_host[1][chosen]

        keys = draws.made("samples", count, places)
        order, inverse = (lattice_order(grid, groups, draws.device) if self.lattice else None) or (None, None)
        return _Sample(order, inverse, keys=keys, groups=groups)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        """Attend to the sample of one's group; keys and values are projected for sampled tokens alone."""
        backend, order = layer.kernel["backend"], prepared.order
        in_place = order is not None and prepared.order_for(backend) is None
        q, k, v = layer.project(tokens, order[prepared.keys] if in_place else prepared.keys)
        stands_for = tokens.shape[1] * prepared.groups / k.shape[1] if self.weighted else 1.0
        if triton_takes(backend, q, k, v):
            from elfatt_sd.attention.triton import sampled  # Triton is there for Linux alone

            return sampled(q, k, v, prepared.groups, order=order, stands_for=stands_for, context=layer.context)
        if not in_place:
            return self._attend(q, k, v, prepared.groups, stands_for, layer)
        return self._attend(q[:, order], k, v, prepared.groups, stands_for, layer).index_select(1, prepared.inverse)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, groups: int, stands_for: float, layer: Layer) -> Tensor:
        if layer.context is None:
            return sampled_attention(q, k, v, groups, **layer.kernel)
        return sampled_joint_attention(q, k, v, groups, stands_for=stands_for, context=layer.context)

    def cost(self, size: Size) -> float:
        return size.projections(size.tokens, self.keys * self.groups) + size.attention(self.keys)

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        return [cls(keys=tokens // part) for part in (64, 32, 16, 8, 4, 2) if tokens // part >= LEAST_KEYS]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """At most as many keys as tokens, and no token in two groups."""
        keys, groups = sample_counts(grid.tokens, self.keys, self.groups)
        return dataclasses.replace(self, keys=keys, groups=groups)

    def words(self, fitted: Sequence[Self]) -> str:
        groups = span(fitted, "groups")
        groups += " group" + "s" * (groups != "1") + " in columns" * (not self.lattice)
        return self.said(fitted, "keys", "# sampled keys", more=groups)


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

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        draws = draws if self.redraw else draws.once
        cells, groups = self._counts(grid)
        if self.cell is None:
            order = order_tokens("spread", grid, cells, draws)
            return _Cells(order.order, order.inverse, order.sorts_merged, cells, groups)

        def both(noise: Tensor) -> Tensor:
            places = cell_order(grid, cells, groups, noise)
            return torch.cat([places, inverse_permutation(places)], -1)

        places, inverse = draws.made("cells", cells, both).chunk(2)
        return _Cells(places, inverse, cells=cells, groups=groups)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        q, k, v = layer.project(tokens)
        given: dict[str, Any] = {"weighted": self.weighted, "context": layer.context}
        given["fp32_logits"] = layer.kernel["fp32_logits"]
        return cell_joint_attention(q, k, v, prepared.cells, prepared.groups, **given)

    def cost(self, size: Size) -> float:
        cell = self.cell or size.tokens / self.block_size
        return size.projections(size.tokens, size.tokens) + size.attention(self.block_size + cell)

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        """The sample is from 1/32 to 1/8 of the tokens, and twice as large as the cell."""
        sizes = [tokens // part for part in (32, 16, 8) if tokens // part >= LEAST_KEYS]
        return [cls(block_size=size, cell=size // 2) for size in sizes]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        cells, groups = self._counts(grid)
        tokens = grid.tokens // cells
        cell = None if self.cell is None else tokens
        return dataclasses.replace(self, block_size=cells * (tokens // groups), cell=cell)

    def words(self, fitted: Sequence[Self]) -> str:
        if self.cell is None:
            return self.said(fitted, "block_size", "own cell and spread blocks of #")
        return self.said(fitted, "cell", "own cell of #") + self.said(fitted, "block_size", " and # sampled keys")

    def _counts(self, grid: Grid) -> tuple[int, int]:
        if self.cell is None:
            groups = cell_blocks(grid.tokens, self.block_size)
            return grid.tokens // groups, groups
        return cell_counts(grid.tokens, self.cell, self.block_size)


@dataclass(frozen=True)
class Reuse(Attention):
    """The layer's output in the first of the steps of `residual_steps`, which is exact, serves the others as well.

    It approximates by nothing: what the steps share is the whole output (pyramid attention broadcast, arXiv:2408.12588,
    for self-attention alone). Layers that join image and text reuse what the image attends to.
    """

    name: ClassVar[str] = "reuse"
    merges: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    empty: ClassVar[bool] = True

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        """Return zeros; only what times or checks a single call asks for them."""
        return layer.queries(tokens).mul(0)

    def cost(self, size: Size) -> float:
        return 0

    def words(self, fitted: Sequence[Self]) -> str:
        return "no attention"
