"""Attention through a few agent tokens: `softmax(s2 Q A^T) softmax(s A K^T) V`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from elfatt_sd import checks
from elfatt_sd.methods.base import Attention, Draws, Layer, Merge, Prepared, Size
from elfatt_sd.methods.blocks import check_order, order_tokens
from elfatt_sd.tiling import BlockOrder, Grid

if TYPE_CHECKING:
    from torch import Tensor

AgentSource = Literal["pooled", "merged"]
AGENT_SOURCES: tuple[AgentSource, ...] = get_args(AgentSource)


@dataclass(frozen=True)
class Agents(Attention):
    """Every query attends to agents, which attend to all keys (agent attention, arXiv:2312.08874).

    Attributes:
        agents: number of agent tokens when they are pooled.
        agent_source: `pooled` averages neighbouring queries (ELFATT's `Pooling(Q)`); `merged` projects tokens that are
            merged at `agent_ratio` (Agent-SD).
        agent_ratio: fraction of the tokens that is merged away to form the agents, for `agent_source="merged"`.
        agent_scale: the queries' softmax has scale `s2 = head_dim ** (-0.5 * agent_scale)`; 1 is the usual scale.
        value_shortcut: fraction of the values that is added to the output.
        block_order: which queries are neighbours, for `agent_source="pooled"`: see `Blocks`.
    """

    name: ClassVar[str] = "agent"

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
        check_agents(self)
        check_order("block_order", self.block_order)

    def prepare(self, grid: Grid, draws: Draws) -> Prepared:
        """Order the tokens so that those of one pool lie together."""
        size = max(1, grid.tokens // self.agents)
        return order_tokens(self.block_order, grid, size, draws) if self.agent_source == "pooled" else Prepared()

    def attend(self, layer: Layer, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Attend through agents."""
        from elfatt_sd.attention import agent_attention, pool_agents

        q, k, v = layer.project(tokens)
        agents = merged_agents(self, layer)
        agents = pool_agents(q, self.agents) if agents is None else agents
        scale = query_scale(self, q.shape[-1])
        return agent_attention(q, k, v, agents, query_scale=scale, value_shortcut=self.value_shortcut, **layer.kernel)

    def cost(self, size: Size) -> float:
        """Every agent meets every token twice: as a query, and as a key."""
        projected = size.projections(size.tokens, size.tokens) + agent_projections(self, size)
        return projected + round(2 * size.tokens * 2.0 * agent_count(self, size.grid) * size.channels)

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """At most as many agents as tokens."""
        return dataclasses.replace(self, **fitted_agents(self, grid, merge))

    def words(self, fitted: Sequence[Self]) -> str:
        """Say where the agents come from."""
        return agent_words(self, fitted)

    @property
    def family(self) -> str:
        """What plots group it with."""
        return "agents"

    @property
    def matches(self) -> bool:
        """Agent-SD's agents are merged tokens."""
        return self.agent_source == "merged"

    @property
    def used_settings(self) -> frozenset[str]:
        """The settings that change what it does."""
        return agent_settings(self)


def check_agents(attention: Any) -> None:
    """Check the fields of `Agents`, in it and in `Elfatt`."""
    checks.whole("agents", attention.agents, 1)
    checks.choice("agent_source", attention.agent_source, AGENT_SOURCES)
    checks.real("agent_ratio", attention.agent_ratio, 0.0, 1.0, open_high=True)
    checks.real("agent_scale", attention.agent_scale, 0.0, 2.0)
    checks.real("value_shortcut", attention.value_shortcut, 0.0, 1.0)


def agent_settings(attention: Any) -> frozenset[str]:
    """Return the settings of `Agents` that change anything."""
    by_source = {"pooled": {"agents", "block_order"}, "merged": {"agent_ratio"}}[attention.agent_source]
    return frozenset({"agent_source", "agent_scale", "value_shortcut"} | by_source)


def merged_agents(attention: Any, layer: Layer) -> Tensor | None:
    """Return Agent-SD's agents, the queries of merged tokens; None where queries are pooled."""
    return None if attention.agent_source == "pooled" else layer.queries(layer.merged(attention.agent_ratio))


def query_scale(attention: Any, head_dim: int) -> float | None:
    """Return the scale `s2` of the queries' softmax; None is the usual one."""
    scale: float | None = head_dim ** (-0.5 * attention.agent_scale) if attention.agent_scale != 1 else None
    return scale


def agent_count(attention: Any, grid: Grid) -> int:
    """Return the number of agents of an attention that was fitted to a grid."""
    merged = attention.agent_source == "merged"
    return round(grid.tokens * (1 - attention.agent_ratio)) if merged else int(attention.agents)


def agent_projections(attention: Any, size: Size) -> float:
    """Return the multiply-adds that the agents' own projection takes."""
    return agent_count(attention, size.grid) * size.channels**2 if attention.agent_source == "merged" else 0


def fitted_agents(attention: Any, grid: Grid, merge: Merge) -> dict[str, Any]:
    """Return the fields of `Agents` that depend on the grid."""
    merged = merge.merged(grid, attention.agent_ratio)
    return {"agents": min(attention.agents, merge.kept(grid)), "agent_ratio": merged / grid.tokens}


def agent_words(attention: Any, fitted: Sequence[Any]) -> str:
    """Say where agents come from."""
    if attention.agent_source == "merged":
        said: str = attention.said(fitted, "agent_ratio", "agents merged at #", "{:.0%}")
        return said
    said = attention.said(fitted, "agents", "# agents")
    return said
