"""What a patch would do: layers, tokens, phases, multiply-adds before and after, and the speed-up these allow."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from elfatt_sd.autotune import Decision, matching_uses
from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.families import SelfAttention, family_of, main_denoiser, takes_steps, unwrap
from elfatt_sd.methods import Grid, Size
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.plans import Plan as Plan
from elfatt_sd.plans import PlannedLayer, PlannedPhase
from elfatt_sd.plans import giga as giga
from elfatt_sd.plans import places as places

_ESTIMATED_SLOWER = "estimated slower than exact attention; autotune=True leaves it alone"


def make_plan(
    config: PatchConfig,
    layers: Mapping[str, tuple[Sequence[SelfAttention], Sequence[SelfAttention]]],
    decisions: Mapping[tuple[str, str], Mapping[Phase, Decision]],
    size: Grid,
) -> Plan:
    """Work out a plan; see `elfatt_sd.plan`."""
    ends = config.stretches
    planned_layers, by_layer = [], []
    for name, (present, chosen) in layers.items():
        for layer in present:
            own = config.for_layer(layer.name)
            phases = [own.phase_until(end) for end in ends]
            uses = matching_uses(config, layer, chosen)
            known = decisions.get((name, layer.name), {})
            planned_layers.append(_plan_layer(name, layer, phases, size, layer in chosen, known, uses))
            by_layer.append(phases)
    turns = sum(map(takes_steps, layers))
    planned = tuple(
        PlannedPhase(
            start,
            end,
            _describe_all(
                [phases[index] for phases in by_layer] or [config.phase_until(end)],
                [layer.grid if layer.approximated[index] else None for layer in planned_layers],
            ),
            sum(layer.multiply_adds_by_phase[index] for layer in planned_layers) // turns,
        )
        for index, (start, end) in enumerate(itertools.pairwise((0.0, *ends)))
    )
    after = sum((phase.until - phase.start) * phase.multiply_adds for phase in planned)
    before = sum(layer.multiply_adds for layer in planned_layers) // turns
    return Plan(config, size, tuple(planned_layers), planned, before, round(after), turns=turns)


def input_grid(pipe: Any, height: int | None = None, width: int | None = None, frames: int | None = None) -> Grid:
    """Return the grid of a denoiser's input for an image size in pixels (for a bare module: of the latent itself)."""
    module = unwrap(main_denoiser(pipe))
    family = family_of(module)
    own = family.latent(module)
    scale = _factor(pipe, "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    time = frames_to_one(pipe)
    sides = []
    for side, name, pixels in ((own.rows, "height", height), (own.columns, "width", width)):
        if pixels is not None and (not isinstance(pixels, numbers.Integral) or pixels <= 0 or pixels % scale):
            raise ElfattError(f"{name}={pixels!r} is not accepted; give a positive multiple of {scale}.")
        sides.append(side if pixels is None else pixels // scale)
    length = own.frames
    if frames is not None:
        if not isinstance(frames, numbers.Integral) or frames <= 0 or (frames - 1) % time:
            raise ElfattError(f"frames={frames!r} is not accepted; give a multiple of {time}, and 1 more.")
        if frames > 1 and own.frames == 1 and not _makes_clips(pipe):
            raise ElfattError(f"frames={frames!r} is not accepted; a {type(pipe).__name__} makes no clips.")
        length = (frames - 1) // time + 1
    return family.grid(module, Grid(length, *sides))


def _makes_clips(pipe: Any) -> bool:
    if not isinstance(pipe, nn.Module):
        return "num_frames" in inspect.signature(pipe.__call__).parameters
    return any(word in type(unwrap(pipe)).__name__ for word in ("3D", "Motion", "Temporal", "I2V"))


def frames_to_one(pipe: Any) -> int:
    return _factor(pipe, "vae_scale_factor_temporal", "vae_temporal_compression_ratio")


def _factor(pipe: Any, *names: str) -> int:
    return next((int(getattr(pipe, name)) for name in names if hasattr(pipe, name)), 1)


def describe(phase: Phase, grids: Sequence[Grid] = ()) -> str:
    """Say in a few words what happens in a phase."""
    if phase.exact:
        return "exact attention"
    fitted = [phase.attention.fit(grid, phase.merge) for grid in grids] or [phase.attention]
    rows = " for one of the rows with the same latents," * phase.shares_guidance
    corrected = f", exact in 1 of {phase.residual_steps} steps{rows} and corrected in between"
    corrected *= phase.residual_steps > 1
    dtype = f" in {phase.attention_dtype}" * bool(phase.attention_dtype)
    return _merging(phase, grids) + phase.attention.words(fitted) + dtype + corrected


def _fitted(phase: Phase, grid: Grid) -> Phase:
    merge = dataclasses.replace(phase.merge, ratio=phase.merge.merged(grid) / grid.tokens)
    return dataclasses.replace(phase, attention=phase.attention.fit(grid, phase.merge), merge=merge)


def _merging(phase: Phase, grids: Sequence[Grid]) -> str:
    """Say how much is merged, and how much can be where that is less than asked."""
    merge = phase.merge
    if not merge.ratio:
        return ""
    most = max((merge.most(grid) / grid.tokens for grid in grids), default=1.0)
    got = [merge.merged(grid) / grid.tokens for grid in grids] or [merge.ratio]
    asked, low, high = (f"{ratio:.0%}" for ratio in (merge.ratio, min(got), max(got)))
    span = low if low == high else f"{low} to {high}"
    stride = f"stride {merge.stride}" if merge.ratio <= most else f"at most {most:.0%} with stride {merge.stride}"
    return f"{span} merged ({f'{asked} asked, ' * (span != asked)}{stride}), "


def _describe_all(phases: Sequence[Phase], grids: Sequence[Grid | None]) -> str:
    """Say what happens in a stretch of the run, where layers may have phases of their own."""
    found: dict[Phase, list[Grid]] = {}
    for phase, grid in zip(phases, grids or [None], strict=True):
        found.setdefault(phase, []).extend([] if grid is None else [grid])
    words = {phase: describe(phase, own) for phase, own in found.items()}
    counts = collections.Counter(words[phase] for phase in phases)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{what} in {count} layer{'s' * (count > 1)}" for what, count in counts.most_common())


def _plan_layer(
    denoiser: str,
    layer: SelfAttention,
    phases: Sequence[Phase],
    size: Grid,
    chosen: bool,
    decisions: Mapping[Phase, Decision],
    uses: int,
) -> PlannedLayer:
    grid, channels = layer.grid(size), layer.channels
    before = multiply_adds(EXACT, grid, channels, context=layer.text)
    by_phase, approximated, reasons = [], [], []
    for phase in phases:
        decision = decisions.get(phase)
        work = multiply_adds(phase, grid, channels, uses, layer.text)
        pays = chosen and (decision is None or decision.pays)
        by_phase.append(work if pays else before)
        approximated.append(pays and not phase.exact)
        if not phase.exact:
            verdict = decision or (_ESTIMATED_SLOWER if work > before else None)
            reasons.append(describe(_fitted(phase, grid)) + (f": {verdict}" if verdict else ""))
    if not reasons:
        reason = describe(EXACT)
    elif not chosen:
        reason = f"left alone: {layer.obstacle or f'its grid is 1/{layer.downsample} of the latent'}"
    else:
        reason = ", then ".join(reason for reason, _ in itertools.groupby(reasons))
    return PlannedLayer(
        denoiser,
        layer.name,
        layer.downsample,
        *grid,
        layer.text,
        layer.heads,
        channels,
        any(approximated),
        reason,
        before,
        tuple(by_phase),
        tuple(approximated),
    )


def multiply_adds(phase: Phase, grid: Grid, channels: int, uses: int = 1, context: int = 0) -> int:
    """Multiply-adds of a self-attention layer for one image: matching, projections and attention, a mean over steps."""
    merge = phase.merge
    destinations = merge.destinations(grid)
    matching = (grid.tokens - destinations) * destinations * channels // uses if phase.matches else 0
    attention = phase.attention.fit(grid, merge).cost(Size(grid, merge.kept(grid), channels, context))
    exact = 0
    if phase.residual_steps > 1 and not phase.exact:
        exact = multiply_adds(EXACT, grid, channels, context=context) // phase.residual_steps
    return matching + round(attention) + exact
