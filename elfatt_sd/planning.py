"""What a patch would do: layers, tokens, phases, and multiply-adds before and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elfatt_sd.attention import partition
from elfatt_sd.autotune import Decision, matching_uses
from elfatt_sd.cell_spread import cell_blocks
from elfatt_sd.config import EXACT, ElfattError, PatchConfig, Phase
from elfatt_sd.layers import SelfAttention, find_denoisers, unwrap
from elfatt_sd.sampled import sample_counts

_ESTIMATED_SLOWER = "estimated slower than exact attention; autotune=True leaves it alone"


@dataclass(frozen=True)
class PlannedLayer:
    """One self-attention layer in a plan.

    Attributes:
        denoiser: `unet`, `controlnet`, `controlnet.0`, ...
        name: path of the layer in it.
        downsample: how many times smaller than the latent its grid is.
        height: rows of its grid.
        width: columns of its grid.
        heads: attention heads.
        channels: channels over all heads.
        patched: whether the method takes it over.
        reason: what its grid gets in each phase that is not exact, and whether that pays; or why it is not patched.
        multiply_adds: of one call for one picture, untouched.
        multiply_adds_by_phase: the same in each phase; of a matching that calls share, each has its part.
    """

    denoiser: str
    name: str
    downsample: int
    height: int
    width: int
    heads: int
    channels: int
    patched: bool
    reason: str
    multiply_adds: int
    multiply_adds_by_phase: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of its grid."""
        return self.height * self.width


@dataclass(frozen=True)
class PlannedPhase:
    """A phase in a plan: its share of the run, and the self-attention's multiply-adds of one call in it."""

    start: float
    until: float
    what: str
    multiply_adds: int


@dataclass(frozen=True)
class Plan:
    """What a patch does to a pipeline at one picture size.

    Attributes:
        config: the method.
        height: of the latent.
        width: of the latent.
        layers: every self-attention layer over picture tokens.
        phases: in order, up to the end of the run.
        multiply_adds_before: of all those layers in one call for one picture, untouched.
        multiply_adds_after: the same with the patch, averaged over the run.
    """

    config: PatchConfig
    height: int
    width: int
    layers: tuple[PlannedLayer, ...]
    phases: tuple[PlannedPhase, ...]
    multiply_adds_before: int
    multiply_adds_after: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        layers = [{**dataclasses.asdict(layer), "tokens": layer.tokens} for layer in self.layers]
        return {**dataclasses.asdict(self), "config": self.config.to_dict(), "layers": layers}

    def __str__(self) -> str:
        """Return the plan as text."""
        rows = [f"{self.config.method}: {sum(layer.patched for layer in self.layers)} of {len(self.layers)} layers"]
        rows += [
            f"  {layer.denoiser}.{layer.name}: {layer.tokens} tokens, {layer.heads} heads: {layer.reason}"
            for layer in self.layers
        ]
        rows += [
            f"  {phase.start:.0%} to {phase.until:.0%} of the steps: {phase.what}, "
            f"{phase.multiply_adds / 1e9:.2f} G multiply-adds"
            for phase in self.phases
        ]
        share = self.multiply_adds_after / self.multiply_adds_before if self.multiply_adds_before else 1.0
        rows.append(
            f"  self-attention of a call: {self.multiply_adds_before / 1e9:.2f} G multiply-adds before, "
            f"{self.multiply_adds_after / 1e9:.2f} G after on average ({share:.0%})"
        )
        return "\n".join(rows)


def make_plan(
    config: PatchConfig,
    layers: Mapping[str, tuple[Sequence[SelfAttention], Sequence[SelfAttention]]],
    decisions: Mapping[tuple[str, str], Sequence[Decision | None]],
    height: int,
    width: int,
) -> Plan:
    """Work out a plan; see `elfatt_sd.plan`.

    Args:
        config: the method.
        layers: of each denoiser, all self-attention layers and those that the method patches.
        decisions: what was measured, by denoiser and layer, for each phase; empty if nothing was.
        height: of the latent.
        width: of the latent.
    """
    phases = [*config.phases, EXACT] if not config.phases or config.phases[-1].until < 1 else list(config.phases)
    planned_layers = []
    for name, (present, chosen) in layers.items():
        for layer in present:
            measured = [*decisions.get((name, layer.name), []), *[None] * len(phases)][: len(phases)]
            uses = matching_uses(config, layer, chosen)
            planned_layers.append(_plan_layer(name, layer, phases, height, width, layer in chosen, measured, uses))
    starts = [0.0, *(phase.until for phase in phases[:-1])]
    planned = tuple(
        PlannedPhase(
            start, phase.until, describe(phase), sum(layer.multiply_adds_by_phase[index] for layer in planned_layers)
        )
        for index, (start, phase) in enumerate(zip(starts, phases, strict=True))
    )
    after = sum((phase.until - phase.start) * phase.multiply_adds for phase in planned)
    before = sum(layer.multiply_adds for layer in planned_layers)
    return Plan(config, height, width, tuple(planned_layers), planned, before, round(after))


def latent_grid(pipe: Any, height: int | None, width: int | None) -> tuple[int, int]:
    """Return height and width of the latent for a picture size in pixels (for a bare UNet: of the latent itself).

    Raises:
        ElfattError: the size is not a positive multiple of the VAE's factor.
    """
    scale = int(getattr(pipe, "vae_scale_factor", 1))
    unet: Any = unwrap(find_denoisers(pipe)["unet"])
    own = unet.config.sample_size or 64
    sides = list(own) if isinstance(own, list | tuple) else [own, own]
    for side, (name, pixels) in enumerate((("height", height), ("width", width))):
        if pixels is not None:
            if pixels <= 0 or pixels % scale:
                raise ElfattError(f"{name}={pixels} is not accepted; give a positive multiple of {scale}.")
            sides[side] = pixels // scale
    return int(sides[0]), int(sides[1])


def describe(phase: Phase) -> str:
    """Say in a few words what happens in a phase."""
    if phase.exact:
        return "exact attention"
    merge = f"{phase.ratio:.0%} merged (stride {phase.stride}), " if phase.ratio else ""
    second = phase.second_order if phase.attention == "block" else None
    blocks = f"{phase.block_order}{f' and {second}' if second else ''} blocks of {phase.block_size}"
    agents = f"{phase.agents} agents" if phase.agent_source == "pooled" else f"agents merged at {phase.agent_ratio:.0%}"
    how = {
        "softmax": "softmax attention",
        "agent": agents,
        "block": blocks,
        "elfatt": f"{agents} and {blocks}",
        "cell_spread": f"own cell and {blocks}",
        "sampled": f"{phase.block_size} sampled keys ({phase.groups} group{'s' * (phase.groups > 1)}"
        f"{' in columns' * (not phase.lattice)})",
    }
    corrected = f", exact in 1 of {phase.residual_steps} steps and corrected in between" * (phase.residual_steps > 1)
    return merge + how[phase.attention] + corrected


def fit(phase: Phase, height: int, width: int) -> Phase:
    """Return a phase with the numbers that a grid really gets: tokens merged, agents, largest block, samples, groups.

    Args:
        phase: with the numbers that are wanted.
        height: rows of the grid.
        width: columns of the grid.
    """
    tokens = height * width
    kept = tokens - _merged(phase.ratio, phase.stride, height, width)
    size, groups = phase.block_size, phase.groups
    if phase.attention == "sampled":
        size, groups = sample_counts(tokens, size, groups)
    elif phase.attention == "cell_spread":
        size = tokens // cell_blocks(tokens, size)
    elif phase.uses_blocks:
        _, base, larger = partition(kept, size)
        size = base + (larger > 0)
    return dataclasses.replace(
        phase,
        ratio=1 - kept / tokens,
        agents=min(phase.agents, kept),
        agent_ratio=_merged(phase.agent_ratio, phase.stride, height, width) / tokens,
        block_size=size,
        groups=groups,
    )


def _plan_layer(
    denoiser: str,
    layer: SelfAttention,
    phases: Sequence[Phase],
    height: int,
    width: int,
    chosen: bool,
    decisions: Sequence[Decision | None],
    uses: int,
) -> PlannedLayer:
    rows, columns = layer.grid(height, width)
    attention: Any = layer.attention
    channels = attention.inner_dim
    before = multiply_adds(EXACT, rows, columns, channels)
    by_phase, reasons, patched = [], [], False
    for phase, decision in zip(phases, decisions, strict=True):
        work = multiply_adds(phase, rows, columns, channels, uses)
        pays = chosen and (decision is None or decision.pays)
        by_phase.append(work if pays else before)
        if not phase.exact:
            patched = patched or pays
            verdict = decision or (_ESTIMATED_SLOWER if work > before else None)
            reasons.append(describe(fit(phase, rows, columns)) + (f": {verdict}" if verdict else ""))
    if not reasons:
        reason = describe(EXACT)
    elif not chosen:
        reason = f"left alone: {layer.obstacle or f'its grid is 1/{layer.downsample} of the latent'}"
    else:
        reason = ", then ".join(reasons)
    return PlannedLayer(
        denoiser,
        layer.name,
        layer.downsample,
        rows,
        columns,
        attention.heads,
        channels,
        patched,
        reason,
        before,
        tuple(by_phase),
    )


def _merged(ratio: float, stride: int, height: int, width: int) -> int:
    """Tokens of a grid that are merged away: at most all that are no destination."""
    destinations = (height // stride) * (width // stride)
    return min(height * width - destinations, int(height * width * ratio)) if destinations else 0


def multiply_adds(phase: Phase, height: int, width: int, channels: int, uses: int = 1) -> int:
    """Multiply-adds of a self-attention layer for one picture: matching, projections and attention, a mean over steps.

    Args:
        phase: what it does.
        height: rows of its grid.
        width: columns of its grid.
        channels: over all heads.
        uses: number of calls that share one matching.
    """
    tokens = height * width
    destinations = (height // phase.stride) * (width // phase.stride)
    kept = tokens - _merged(phase.ratio, phase.stride, height, width)
    fitted = fit(phase, height, width)
    matching = (tokens - destinations) * destinations * channels // uses if fitted.uses_matching else 0
    size, agents = fitted.block_size, fitted.agents
    keys = size * fitted.groups if phase.attention == "sampled" else kept
    projections = 2 * (kept + keys) * channels**2
    if phase.agent_source == "merged" and phase.uses_agents:
        agents = tokens - _merged(phase.agent_ratio, phase.stride, height, width)
        projections += agents * channels**2
    pairs = {
        "softmax": float(kept),
        "agent": 2.0 * agents,
        "block": float(size),
        "cell_spread": size + tokens / size,
        "sampled": float(size),
        "elfatt": phase.agent_share * 2 * agents + (1 - phase.agent_share) * size,
    }[phase.attention]
    exact = 0
    if phase.residual_steps > 1 and not phase.exact:
        exact = multiply_adds(EXACT, height, width, channels) // phase.residual_steps
    return matching + projections + round(2 * kept * pairs * channels) + exact
