"""Attention inside blocks of tokens, which tile the sequence; `block_order` says which tokens share one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from elfatt_sd import checks
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods.base import LEAST_KEYS, Attention, Draws, Layer, Merge, Prepared, Size
from elfatt_sd.tiling import BLOCK_ORDERS, BlockOrder, Grid, partition

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Halves(Prepared):
    """The order of the first half of the heads; of the second half, the places from the first one there, and back."""

    there: Any = None
    back: Any = None


@dataclass(frozen=True)
class Blocks(Attention):
    """Every token attends to the tokens of its block: `softmax(s Q_b K_b^T) V_b` for block b, `s = head_dim ** -0.5`.

    Attributes:
        block_size: tokens in a block, to the nearest size that tiles the sequence.
        block_order: which tokens share a block: `sequence` (as they come: after merging, by similarity), `raster`,
            `windows` (rectangles, as square as the size allows), `curve` (Hilbert curve), `strided` (every n-th token)
            or `spread` (stratified random sample of the image, drawn from seed, step and layer).
        second_order: another such order for the second half of the heads; None is the same for all heads.
        redraw: whether what is random is drawn again in every step, or once for a run.
    """

    name: ClassVar[str] = "block"
    joint: ClassVar[bool] = True

    block_size: int = 128
    block_order: BlockOrder = "sequence"
    second_order: BlockOrder | None = None
    redraw: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range.
        """
        checks.whole("block_size", self.block_size, 1)
        check_order("block_order", self.block_order)
        checks.flag("redraw", self.redraw)
        if self.second_order is not None:
            check_order("second_order", self.second_order)

    def accepts(self, merge: Merge) -> None:
        """Check what is merged before it.

        Raises:
            ElfattError: it merges, and the heads have two orders.
        """
        if self.second_order is not None and merge.ratio > 0:
            raise ElfattError(f"ratio={merge.ratio!r} is not accepted with a second_order; give ratio=0.")

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Order the tokens block by block."""
        draws = draws if self.redraw else draws.once
        first = order_tokens(self.block_order, grid, self.block_size, draws)
        if self.second_order is None:
            return first
        import torch

        from elfatt_sd.ordering import inverse_permutation

        second = order_tokens(self.second_order, grid, self.block_size, draws, "second blocks").order
        second = torch.arange(grid.tokens, device=draws.device) if second is None else second
        there = second if first.inverse is None else first.inverse[second]
        return _Halves(first.order, first.inverse, first.sorts_merged, there, inverse_permutation(there))

    def attend(self, layer: Layer, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Attend inside blocks; the second half of the heads in blocks of its own order if it has one."""
        import torch

        q, k, v = layer.project(tokens)
        if not isinstance(prepared, _Halves):
            return self._inside(q, k, v, layer, slice(None))
        cut = q.shape[2] // 2
        halves = [cut, q.shape[2] - cut]
        (q1, q2), (k1, k2), (v1, v2) = (torch.split(x, halves, dim=2) for x in (q, k, v))
        first = self._inside(q1, k1, v1, layer, slice(0, cut))
        q2, k2, v2 = (x.index_select(1, prepared.there) for x in (q2, k2, v2))
        second = self._inside(q2, k2, v2, layer, slice(cut, None))
        return torch.cat([first, second.index_select(1, prepared.back)], dim=2)

    def _inside(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, heads: slice) -> Tensor:
        """Attend inside blocks and to those heads' context."""
        from elfatt_sd.attention import block_attention
        from elfatt_sd.joint import elfatt_joint_attention

        context = layer.context
        if context is None:
            return block_attention(q, k, v, self.block_size, **layer.kernel)
        own = context._replace(k=context.k[:, :, heads], v=context.v[:, :, heads])
        return elfatt_joint_attention(q, k, v, agents=1, block_size=self.block_size, agent_heads=0, context=own)

    def cost(self, size: Size) -> float:
        """Every token meets those of its block, and the context."""
        attention = round(2 * size.tokens * float(self.block_size + size.context) * size.channels)
        return size.projections(size.tokens, size.tokens) + attention

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        """Compact blocks of an eighth of the tokens."""
        return [cls(block_size=max(tokens // 8, LEAST_KEYS), block_order="windows")]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """Take the size that tiles the sequence."""
        return dataclasses.replace(self, block_size=fitted_block_size(self.block_size, merge.kept(grid)))

    def words(self, fitted: Sequence[Self]) -> str:
        """Say which blocks."""
        orders = self.block_order + (f" and {self.second_order}" if self.second_order else "")
        return self.said(fitted, "block_size", f"{orders} blocks of #")

    @property
    def is_random(self) -> bool:
        """Blocks are drawn if they are spread."""
        return "spread" in (self.block_order, self.second_order)

    @property
    def family(self) -> str:
        """What plots group it with."""
        orders = {self.block_order, self.second_order or self.block_order}
        return "spread blocks" if orders == {"spread"} else "other blocks"


def check_order(name: str, order: object) -> None:
    """Check the name of an order."""
    checks.choice(name, order, BLOCK_ORDERS)


def order_tokens(order: BlockOrder, grid: Grid, size: int, draws: Draws, what: str = "blocks") -> Prepared:
    """Order the tokens of a grid so that those of one block lie together; see `ordering.block_permutation`.

    Args:
        order: its name.
        grid: of the tokens.
        size: wanted tokens in a block.
        draws: for `spread`.
        what: the blocks are for; other words give other draws.
    """
    from elfatt_sd.ordering import block_permutation, inverse_permutation

    noise = draws.made(what, grid.tokens, lambda drawn: drawn) if order == "spread" else None
    draws.anew = draws.anew or noise is not None  # sorted on the device, which is faster at it
    places = block_permutation(order, grid, size, noise=noise, device=draws.device)
    inverse = None if places is None else inverse_permutation(places)
    return Prepared(places, inverse, sorts_merged=order != "sequence")


def fitted_block_size(wanted: int, tokens: int) -> int:
    """Return the tokens of the largest block of a sequence."""
    _, base, larger = partition(tokens, wanted)
    return wanted if base <= wanted <= base + (larger > 0) else base + (larger > 0)
