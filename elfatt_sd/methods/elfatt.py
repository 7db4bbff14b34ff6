"""ELFATT-SD: half of the heads attends through agents, half inside blocks; eq. lepe2sd and lepe1sd of the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from elfatt_sd import checks
from elfatt_sd.methods.agents import Agents
from elfatt_sd.methods.base import Draws, Layer, Merge, Prepared, Size
from elfatt_sd.methods.blocks import fitted_block_size, order_tokens
from elfatt_sd.tiling import Grid

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["auto", "heads", "channels"]
SPLITS: tuple[Split, ...] = get_args(Split)


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

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range.
        """
        super().__post_init__()
        checks.whole("block_size", self.block_size, 1)
        checks.flag("redraw", self.redraw)
        checks.real("agent_share", self.agent_share, 0.0, 1.0)
        checks.choice("split", self.split, SPLITS)

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Order the tokens block by block; without blocks, pool by pool."""
        draws = draws if self.redraw else draws.once
        if not self._blocks:
            return super().prepare(grid, draws)
        return order_tokens(self.block_order, grid, self.block_size, draws)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Attend in both ways."""
        from elfatt_sd.attention import elfatt_attention

        q, k, v = layer.project(tokens)
        if layer.context is not None:
            heads = round(q.shape[2] * self.agent_share)
            return self.attend_joint(q, k, v, layer.context, heads, self.block_size)
        return elfatt_attention(
            q,
            k,
            v,
            agents=self.merged_agents(layer) if self.matches else self.agents,
            block_size=self.block_size,
            agent_share=self.agent_share,
            split=self.split,
            query_scale=self.query_scale(q.shape[-1]),
            value_shortcut=self.value_shortcut,
            **layer.kernel,
        )

    def cost(self, size: Size) -> float:
        """Both parts, by the fraction of the heads that each has."""
        share = self.agent_share
        pairs = share * 2 * self.count(size.grid) + (1 - share) * self.block_size + size.context
        return self.projections(size) + round(2 * size.tokens * pairs * size.channels)

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """Take the block size that tiles the sequence, and at most as many agents as tokens."""
        size = fitted_block_size(self.block_size, merge.kept(grid)) if self._blocks else self.block_size
        return dataclasses.replace(super().fit(grid, merge), block_size=size)

    def words(self, fitted: Sequence[Self]) -> str:
        """Say which agents and which blocks."""
        blocks = self.said(fitted, "block_size", f"{self.block_order} blocks of #")
        return f"{super().words(fitted)} and {blocks}"

    def pools(self, tokens: int) -> Sequence[int]:
        """Those of the agents, where heads attend through any."""
        return super().pools(tokens) if self._agents else ()

    @property
    def family(self) -> str:
        """What plots group it with; with agents in none or all of the heads, it is what is left of it."""
        if not self._agents:
            return "spread blocks" if self.block_order == "spread" else "other blocks"
        return "ELFATT" if self._blocks else "agents"

    @property
    def matches(self) -> bool:
        """Agent-SD's agents are merged tokens."""
        return self._agents and self.agent_source == "merged"  # torch.compile takes super().matches to be true

    @property
    def used_settings(self) -> frozenset[str]:
        """The settings that change what it does."""
        of_agents = super().used_settings if self._agents else frozenset()
        of_blocks = {"block_size", "block_order"} if self._blocks else set()
        return of_agents | of_blocks | {"agent_share", "split"} | ({"redraw"} if self.is_random else set())

    @property
    def is_random(self) -> bool:
        """Blocks or, without any, pools are drawn if they are spread."""
        return self.block_order == "spread" if self._blocks else super().is_random

    @property
    def _agents(self) -> bool:
        return self.agent_share > 0

    @property
    def _blocks(self) -> bool:
        return self.agent_share < 1
