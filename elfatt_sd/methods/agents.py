"""Attention through a few agent tokens: `softmax(s2 Q A^T) softmax(s A K^T) V`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from elfatt_sd import checks
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods.base import Attention, Draws, Layer, Merge, Prepared, Size
from elfatt_sd.methods.blocks import check_order, order_tokens
from elfatt_sd.tiling import BlockOrder, Grid

if TYPE_CHECKING:
    from torch import Tensor

    from elfatt_sd.joint import Keys

AgentSource = Literal["pooled", "merged"]
AGENT_SOURCES: tuple[AgentSource, ...] = get_args(AgentSource)


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
    agent_ratio: float = 0.95
    agent_scale: float = 1.0
    value_shortcut: float = 0.0
    block_order: BlockOrder = "sequence"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range.
        """
        checks.whole("agents", self.agents, 1)
        checks.choice("agent_source", self.agent_source, AGENT_SOURCES)
        checks.real("agent_ratio", self.agent_ratio, 0.0, 1.0, open_high=True)
        checks.real("agent_scale", self.agent_scale, 0.0, 2.0)
        checks.real("value_shortcut", self.value_shortcut, 0.0, 1.0)
        check_order("block_order", self.block_order)

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Order the tokens so that those of one pool lie together."""
        size = max(1, grid.tokens // self.agents)
        return Prepared() if self.matches else order_tokens(self.block_order, grid, size, draws)

    def attend(self, layer: Layer, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Attend through agents."""
        from elfatt_sd.attention import agent_attention, pool_agents

        q, k, v = layer.project(tokens)
        if layer.context is not None:
            return self.attend_joint(q, k, v, layer.context, q.shape[2])
        agents = self.merged_agents(layer) if self.matches else pool_agents(q, self.agents)
        scale = self.query_scale(q.shape[-1])
        return agent_attention(q, k, v, agents, query_scale=scale, value_shortcut=self.value_shortcut, **layer.kernel)

    def cost(self, size: Size) -> float:
        """Every agent meets every token twice: as a query, and as a key; every token meets the context."""
        pairs = 2.0 * self.count(size.grid) + size.context
        return self.projections(size) + round(2 * size.tokens * pairs * size.channels)

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        """Pools of neighbours in the image."""
        return [cls(block_order="windows")]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """At most as many agents as tokens, and as many merged tokens as the stride allows."""
        ratio = merge.merged(grid, self.agent_ratio) / grid.tokens
        return dataclasses.replace(self, agents=min(self.agents, merge.kept(grid)), agent_ratio=ratio)

    def words(self, fitted: Sequence[Self]) -> str:
        """Say where the agents come from."""
        if self.agent_source == "merged":
            return self.said(fitted, "agent_ratio", "agents merged at #", "{:.0%}")
        return self.said(fitted, "agents", "# agents")

    def pools(self, tokens: int) -> Sequence[int]:
        """Neighbours in the order of the tokens, unless agents are merged tokens."""
        if self.matches:
            return ()
        count = min(self.agents, tokens)
        return [tokens // count + (number < tokens % count) for number in range(count)]

    @property
    def family(self) -> str:
        """What plots group it with."""
        return "agents"

    @property
    def matches(self) -> bool:
        """Agent-SD's agents are merged tokens."""
        return self.agent_source == "merged"

    @property
    def is_random(self) -> bool:
        """Pools are drawn if they are spread."""
        return self.agent_source == "pooled" and self.block_order == "spread"

    @property
    def used_settings(self) -> frozenset[str]:
        """The settings that change what it does."""
        by_source = {"agent_ratio"} if self.agent_source == "merged" else {"agents", "block_order"}
        return frozenset({"agent_source", "agent_scale", "value_shortcut"} | by_source)

    def attend_joint(self, q: Tensor, k: Tensor, v: Tensor, context: Keys, heads: int, block_size: int = 1) -> Tensor:
        """Attend with text, the first heads through agents, the others inside blocks.

        Raises:
            ElfattError: agents are merged tokens, which have no rotary position; or every head's channels are split.
        """
        from elfatt_sd.joint import elfatt_joint_attention

        if self.matches:
            raise ElfattError("agent_source='merged' is not accepted where there is text; give agent_source='pooled'.")
        return elfatt_joint_attention(
            q,
            k,
            v,
            agents=self.agents,
            block_size=block_size,
            agent_heads=heads,
            query_scale=self.query_scale(q.shape[-1]),
            value_shortcut=self.value_shortcut,
            context=context,
        )

    def merged_agents(self, layer: Layer) -> Tensor:
        """Return Agent-SD's agents, the queries of merged tokens."""
        return layer.queries(layer.merged(self.agent_ratio))

    def query_scale(self, head_dim: int) -> float | None:
        """Return the scale `s2` of the queries' softmax; None is the usual one."""
        scale: float | None = head_dim ** (-0.5 * self.agent_scale) if self.agent_scale != 1 else None
        return scale

    def count(self, grid: Grid) -> int:
        """Return the number of agents, once it is fitted to a grid."""
        merged = self.agent_source == "merged"
        return round(grid.tokens * (1 - self.agent_ratio)) if merged else self.agents

    def projections(self, size: Size) -> float:
        """Return the multiply-adds of all projections; merged agents have one of their own."""
        own = self.count(size.grid) * size.channels**2 if self.matches else 0
        return size.projections(size.tokens, size.tokens) + own
