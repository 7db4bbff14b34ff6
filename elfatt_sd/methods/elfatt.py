"""ELFATT: half of the heads attends through agents, half inside blocks; eq. lepe2sd and lepe1sd of the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from elfatt_sd import checks
from elfatt_sd.methods import agents as by_agents
from elfatt_sd.methods.agents import AgentSource
from elfatt_sd.methods.base import Attention, Draws, Layer, Merge, Prepared, Size
from elfatt_sd.methods.blocks import check_blocks, fitted_block_size, order_tokens
from elfatt_sd.tiling import BlockOrder, Grid

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["auto", "heads", "channels"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Elfatt(Attention):
    """Global attention through agents and local attention inside blocks, each in a part of the heads or channels.

    Attributes:
        agents: number of agent tokens when they are pooled.
        agent_source: see `Agents`.
        agent_ratio: see `Agents`.
        agent_scale: see `Agents`.
        value_shortcut: see `Agents`.
        block_size: tokens in a block, to the nearest size that tiles the sequence.
        block_order: which tokens share a block, and are pooled to an agent; see `Blocks`.
        redraw: whether what is random is drawn anew in every step, or once for a run.
        agent_share: fraction of the heads (or channels) that attends through agents.
        split: `heads` gives each half its own heads (eq. lepe2sd), `channels` half of every head's channels
            (eq. lepe1sd), `auto` splits heads where their number allows it.
    """

    name: ClassVar[str] = "elfatt"

    agents: int = 64
    agent_source: AgentSource = "pooled"
    agent_ratio: float = 0.95
    agent_scale: float = 1.0
    value_shortcut: float = 0.0
    block_size: int = 128
    block_order: BlockOrder = "sequence"
    redraw: bool = True
    agent_share: float = 0.5
    split: Split = "auto"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range.
        """
        by_agents.check_agents(self)
        check_blocks(self)
        checks.real("agent_share", self.agent_share, 0.0, 1.0)
        checks.choice("split", self.split, SPLITS)

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Order the tokens block by block."""
        if not self._blocks and self.agent_source == "merged":
            return Prepared()
        size = self.block_size if self._blocks else max(1, grid.tokens // self.agents)
        return order_tokens(self.block_order, grid, size, draws if self.redraw else draws.once)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Attend in both ways."""
        from elfatt_sd.attention import elfatt_attention

        q, k, v = layer.project(tokens)
        agents = by_agents.merged_agents(self, layer) if self._agents else None
        return elfatt_attention(
            q,
            k,
            v,
            agents=self.agents if agents is None else agents,
            block_size=self.block_size,
            agent_share=self.agent_share,
            split=self.split,
            query_scale=by_agents.query_scale(self, q.shape[-1]),
            value_shortcut=self.value_shortcut,
            **layer.kernel,
        )

    def cost(self, size: Size) -> float:
        """Both parts, by the fraction of the heads that each has."""
        share = self.agent_share
        pairs = share * 2 * by_agents.agent_count(self, size.grid) + (1 - share) * self.block_size
        projected = size.projections(size.tokens, size.tokens)
        own = by_agents.agent_projections(self, size) if self._agents else 0
        return projected + own + round(2 * size.tokens * pairs * size.channels)

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """Take the block size that tiles the sequence, and at most as many agents as tokens."""
        size = fitted_block_size(self.block_size, merge.kept(grid)) if self._blocks else self.block_size
        return dataclasses.replace(self, block_size=size, **by_agents.fitted_agents(self, grid, merge))

    def words(self, fitted: Sequence[Self]) -> str:
        """Say which agents and which blocks."""
        blocks = self.said(fitted, "block_size", f"{self.block_order} blocks of #")
        return f"{by_agents.agent_words(self, fitted)} and {blocks}"

    @property
    def family(self) -> str:
        """What plots group it with; with agents in none or all of the heads, it is what is left of it."""
        if not self._agents:
            return "spread blocks" if self.block_order == "spread" else "other blocks"
        return "ELFATT" if self._blocks else "agents"

    @property
    def matches(self) -> bool:
        """Agent-SD's agents are merged tokens."""
        return self._agents and self.agent_source == "merged"

    @property
    def used_settings(self) -> frozenset[str]:
        """The settings that change what it does."""
        used = {"agent_share", "split"}
        used |= by_agents.agent_settings(self) if self._agents else set()
        return frozenset(used | ({"block_size", "block_order", "redraw"} if self._blocks else set()))

    @property
    def _agents(self) -> bool:
        return self.agent_share > 0

    @property
    def _blocks(self) -> bool:
        return self.agent_share < 1
