"""The published attentions: softmax, agents, blocks, and ELFATT, which has both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from elfatt_sd.attention.joint import Keys, elfatt_joint_attention, exact_attention
from elfatt_sd.attention.ordering import BlockOrder, Grid, block_permutation, inverse_permutation, partition
from elfatt_sd.attention.softmax import block_attention, elfatt_attention, softmax_attention
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods.base import LEAST_KEYS, Attention, Draws, Layer, Merge, Prepared, Size

AgentSource = Literal["pooled", "merged"]
Split = Literal["auto", "heads", "channels"]


@dataclass(frozen=True)
class Softmax(Attention):
    """Exact attention among the tokens that merging leaves, `softmax(s Q K^T) V`: ToMe (arXiv:2303.17604)."""

    name: ClassVar[str] = "softmax"
    exact: ClassVar[bool] = True
    joint: ClassVar[bool] = True

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        q, k, v = layer.project(tokens)
        if layer.context is None:
            return softmax_attention(q, k, v, **layer.kernel)
        return exact_attention(q, [Keys(k, v), layer.context])

    def cost(self, size: Size) -> float:
        return size.projections(size.tokens, size.tokens) + size.attention(size.tokens)

    def words(self, fitted: Sequence[Self]) -> str:
        return "softmax attention"


@dataclass(frozen=True)
class Agents(Attention):
    """Every query attends to agents, which attend to all keys (agent attention, arXiv:2312.08874).

    `softmax(s2 Q A^T) softmax(s A K^T) V + value_shortcut V` with agents A and `s = head_dim ** -0.5`.

    Attributes:
        agents: number of agent tokens when they are pooled.
        agent_source: `pooled` averages neighbouring queries (the paper's `Pooling(Q)`); `merged` projects tokens
            that are merged at `agent_ratio` (Agent-SD).
        agent_ratio: fraction of the tokens that is merged away to form the agents, for `agent_source="merged"`.
        agent_scale: the queries' softmax has scale `s2 = head_dim ** (-0.5 * agent_scale)`; 1 is the usual scale.
        value_shortcut: fraction of the values that is added to the output.
        block_order: which queries are neighbours, for `agent_source="pooled"`: see `Blocks`.
    """

    name: ClassVar[str] = "agent"
    joint: ClassVar[bool] = True

    agents: int = 64
    agent_source: AgentSource = "pooled"
    agent_ratio: float = dataclasses.field(default=0.95, metadata={"open_high": True})
    agent_scale: float = dataclasses.field(default=1.0, metadata={"high": 2.0})
    value_shortcut: float = 0.0
    block_order: BlockOrder = "sequence"

    # settings of `Elfatt` alone: here, all heads attend through agents
    agent_share, block_size, redraw, split = 1.0, 1, True, "auto"

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Order the tokens block by block; without blocks, so that those of one pool lie together."""
        draws = draws if self.redraw else draws.once
        if self.matches and self.agent_share == 1:
            return Prepared()
        size = self.block_size if self.agent_share < 1 else max(1, grid.tokens // self.agents)
        return order_tokens(self.block_order, grid, size, draws)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Prepared) -> Tensor:
        q, k, v = layer.project(tokens)
        scale = q.shape[-1] ** (-0.5 * self.agent_scale) if self.agent_scale != 1 else None
        given: dict[str, Any] = {"block_size": self.block_size, "query_scale": scale}
        given["value_shortcut"] = self.value_shortcut
        if layer.context is not None:
            heads = round(q.shape[2] * self.agent_share)
            return elfatt_joint_attention(
                q, k, v, agents=self.agents, agent_heads=heads, context=layer.context, **given
            )
        agents = layer.queries(layer.merged(self.agent_ratio)) if self.matches else self.agents
        given |= {"agent_share": self.agent_share, "split": self.split, **layer.kernel}
        return elfatt_attention(q, k, v, agents=agents, **given)

    def cost(self, size: Size) -> float:
        """Every agent meets every token twice: as a query, and as a key. Merged ones have a projection of their own."""
        agents = round(size.grid.tokens * (1 - self.agent_ratio)) if self.agent_source == "merged" else self.agents
        pairs = self.agent_share * 2 * agents + (1 - self.agent_share) * self.block_size
        own = agents * size.channels**2 if self.matches else 0
        return size.projections(size.tokens, size.tokens) + own + size.attention(pairs)

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        return [cls(block_order="windows")]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """At most as many agents as tokens, as many merged tokens as the stride allows, and blocks that tile."""
        ratio, kept = merge.merged(grid, self.agent_ratio) / grid.tokens, merge.kept(grid)
        fitted: dict[str, Any] = {"agents": min(self.agents, kept), "agent_ratio": ratio}
        if self.agent_share < 1:
            fitted["block_size"] = fitted_block_size(self.block_size, kept)
        return dataclasses.replace(self, **fitted)

    def words(self, fitted: Sequence[Self]) -> str:
        if self.agent_source == "merged":
            return self.said(fitted, "agent_ratio", "agents merged at #", "{:.0%}")
        return self.said(fitted, "agents", "# agents")

    def pools(self, tokens: int) -> Sequence[int]:
        """Neighbours in the order of the tokens, unless agents are merged tokens."""
        if self.matches or self.agent_share == 0:
            return ()
        count = min(self.agents, tokens)
        return [tokens // count + (number < tokens % count) for number in range(count)]

    @property
    def matches(self) -> bool:
        return self.agent_share > 0 and self.agent_source == "merged"  # Agent-SD


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

    def accepts(self, merge: Merge) -> None:
        if self.second_order is not None and merge.ratio > 0:
            raise ElfattError(f"ratio={merge.ratio!r} is not accepted with a second_order; give ratio=0.")

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        draws = draws if self.redraw else draws.once
        first = order_tokens(self.block_order, grid, self.block_size, draws)
        if self.second_order is None:
            return first
        second = order_tokens(self.second_order, grid, self.block_size, draws, "second blocks").order
        second = torch.arange(grid.tokens, device=draws.device) if second is None else second
        there = second if first.inverse is None else first.inverse[second]
        return _Halves(first.order, first.inverse, first.sorts_merged, there, inverse_permutation(there))

    def attend(self, layer: Layer, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Attend inside blocks; the second half of the heads in blocks of its own order if it has one."""
        q, k, v = layer.project(tokens)
        if not isinstance(prepared, _Halves):
            return self._inside(q, k, v, layer, slice(None))
        cut = q.shape[2] // 2
        (q1, q2), (k1, k2), (v1, v2) = (torch.split(x, [cut, q.shape[2] - cut], dim=2) for x in (q, k, v))
        first = self._inside(q1, k1, v1, layer, slice(0, cut))
        q2, k2, v2 = (x.index_select(1, prepared.there) for x in (q2, k2, v2))
        second = self._inside(q2, k2, v2, layer, slice(cut, None))
        return torch.cat([first, second.index_select(1, prepared.back)], dim=2)

    def _inside(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, heads: slice) -> Tensor:
        context = layer.context
        if context is None:
            return block_attention(q, k, v, self.block_size, **layer.kernel)
        own = context._replace(k=context.k[:, :, heads], v=context.v[:, :, heads])
        return elfatt_joint_attention(q, k, v, agents=1, block_size=self.block_size, agent_heads=0, context=own)

    def cost(self, size: Size) -> float:
        return size.projections(size.tokens, size.tokens) + size.attention(self.block_size)

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        return [cls(block_size=max(tokens // 8, LEAST_KEYS), block_order="windows")]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        return dataclasses.replace(self, block_size=fitted_block_size(self.block_size, merge.kept(grid)))

    def words(self, fitted: Sequence[Self]) -> str:
        orders = self.block_order + (f" and {self.second_order}" if self.second_order else "")
        return self.said(fitted, "block_size", f"{orders} blocks of #")


def order_tokens(order: BlockOrder, grid: Grid, size: int, draws: Draws, what: str = "blocks") -> Prepared:
    """Order the tokens of a grid so that those of one block lie together; other words in `what` give other draws."""
    noise = draws.made(what, grid.tokens, lambda drawn: drawn) if order == "spread" else None
    draws.anew = draws.anew or noise is not None  # sorted on the device, which is faster at it
    places = block_permutation(order, grid, size, noise=noise, device=draws.device)
    return Prepared(places, None if places is None else inverse_permutation(places), sorts_merged=order != "sequence")


def fitted_block_size(wanted: int, tokens: int) -> int:
    _, base, larger = partition(tokens, wanted)
    return wanted if base <= wanted <= base + (larger > 0) else base + (larger > 0)


@dataclass(frozen=True)
class Elfatt(Agents):
    """Global attention through agents and local attention inside blocks, each in a part of the heads or channels.

    In the first part `softmax(s2 Q A^T) softmax(s A K^T) V` with agents `A = Pooling(Q)`; in the other
    `softmax(s Q_b K_b^T) V_b` inside block b (ELFATT-SD, of the appendix of doi:10.1145/3746027.3754825).
    The paper's ELFATT for vision transformers has EFFATT in the place of agents, and LePE; both need training. The
    paper does not give the number of agents, nor says whether Agent-SD's scale, shortcut and stride are kept: here
    they are 64, the usual scale, none and 2.

    Its fields are those of `Agents`, where `block_order` also says which tokens share a block (see `Blocks`), and:

    Attributes:
        block_size: tokens in a block, to the nearest size that tiles the sequence.
        redraw: whether what is random is drawn again in every step, or once for a run.
        agent_share: fraction of the heads (or channels) that attends through agents.
        split: `heads` gives each half its own heads (eq. lepe2sd), `channels` half of every head's channels
            (eq. lepe1sd), `auto` splits heads where their number allows it.
    """

    name: ClassVar[str] = "elfatt"

    block_size: int = 128
    redraw: bool = True
    agent_share: float = 0.5
    split: Split = "auto"

    def words(self, fitted: Sequence[Self]) -> str:
        return f"{super().words(fitted)} and " + self.said(fitted, "block_size", f"{self.block_order} blocks of #")
