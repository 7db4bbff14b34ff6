"""A dry run: which layers a method changes in which steps, and the multiply-adds before and after."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import SelfAttention, family_of, main_denoiser, takes_steps, unwrap
from elfatt_sd.families.cuts import OUTPUT
from elfatt_sd.families.shapes import Blueprint
from elfatt_sd.methods import Grid, Size
from elfatt_sd.phases import EXACT, Phase, StepReuse, reused_steps, words_of_reuse
from elfatt_sd.runtime import origin_in_words, other_than
from elfatt_sd.runtime.autotune import Decision, matching_uses
from elfatt_sd.runtime.memory import kept_bytes, readable

WORTH = 1.12  # times as fast by multiply-adds, from which on `auto` patches on a CPU; see patch.py
_ESTIMATED_SLOWER = "estimated slower than exact attention; autotune=True leaves it alone"
_STEPS = 50  # of the run that a plan shows where steps take over from earlier ones
_OF_CLIPS = ("3D", "Motion", "Temporal", "I2V")  # in the names of denoisers
_MOST_PLACES = 8  # that a plan lists one by one; a UNet has fewer blocks on a level
Decisions = Mapping[Phase, Decision]  # on the phases of a layer


@dataclass(frozen=True)
class PlannedLayer:
    """One self-attention layer in a plan."""

    denoiser: str  # `unet`, `controlnet`, `controlnet.0`, ...
    name: str  # path of the layer in it
    downsample: int  # how many times smaller than the latent its grid is
    frames: int  # of its grid; an image has one
    height: int  # rows of its grid
    width: int  # columns of its grid
    text: int  # tokens of text that it joins with those of its grid, at their usual number
    heads: int  # attention heads
    channels: int  # channels over all heads
    patched: bool  # whether the method takes it over
    reason: str  # what its grid gets in each phase that is not exact, and whether that pays; or why it is not patched
    multiply_adds: int  # of one call for one image, untouched
    multiply_adds_by_phase: tuple[int, ...]  # the same in each phase; of a matching that calls share, each has its part
    approximated: tuple[bool, ...]  # whether each phase replaces its exact attention

    @property
    def tokens(self) -> int:
        """Tokens of its grid."""
        return self.grid.tokens

    @property
    def grid(self) -> Grid:
        return Grid(self.frames, self.height, self.width)


@dataclass(frozen=True)
class PlannedPhase:
    """A phase in a plan."""

    start: float  # fraction of the run at which it begins
    until: float  # fraction of the run at which it ends
    what: str  # what the patched layers get in it, and what was asked for where their grids cannot give that
    multiply_adds: int  # of the self-attention of one call in it


@dataclass(frozen=True)
class PlannedCall:
    """One call of the UNet, and of its ControlNets, by multiply-adds for one image."""

    denoisers: Mapping[str, int | None]  # multiply-adds of each, untouched; None where they could not be counted
    before: int | None = None  # of all of them, untouched; None where one of them could not be counted
    after: int | None = None  # with the patch, averaged over the run
    # `before / after`: how many times as fast the call is if time is in proportion to multiply-adds
    speed: float | None = None
    limit: float | None = None  # the same, if what is approximated cost nothing at all

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            unknown = ", ".join(name for name, count in self.denoisers.items() if count is None)
            return f"whole call: not counted ({unknown}), so no speed-up is estimated"
        names = " and ".join("UNet" if name == "unet" else name for name in self.denoisers)
        if self.after == self.before:
            return f"whole call ({names}): {giga(self.before)} G multiply-adds, as without a patch"
        little = ", which hardly pays" * (1 < (self.speed or 0) < WORTH)
        return (
            f"whole call ({names}): {giga(self.before)} G multiply-adds before, {giga(self.after)} G after on average. "
            f"By this count it is {self.speed:.2f} times as fast{little}, {self.limit:.2f} if the approximated layers "
            "cost nothing; measure it here with elfatt-sd bench"
        )


@dataclass(frozen=True)
class Plan:
    """What a patch does to a pipeline at one image size."""

    config: PatchConfig  # the method
    grid: Grid  # of the denoiser's input: of the latent or, where that is tokens, of them
    layers: tuple[PlannedLayer, ...]  # every self-attention layer over image tokens
    phases: tuple[PlannedPhase, ...]  # in order, up to the end of the run
    multiply_adds_before: int  # of all those layers in one call for one image, untouched
    multiply_adds_after: int  # the same with the patch, averaged over the run
    blueprints: tuple[tuple[str, Blueprint], ...] = ()  # of the denoisers, for `call`; see `counting`
    turns: int = 1  # denoisers of which each step calls one; a call's multiply-adds are their mean
    steps: int | None = None  # of the run; None where what begins or ends within a step counts as a part of it
    auto: str = ""  # what `auto` stands for here, and why; empty where a method was named

    def counting(self, denoisers: Mapping[str, nn.Module]) -> Plan:
        known = tuple((name, Blueprint.of(denoiser)) for name, denoiser in denoisers.items())
        return dataclasses.replace(self, blueprints=known)

    @property
    def calls(self) -> int:
        """Steps of the run, by calls of the denoiser as far as settings know them: PLMS has one more."""
        origin = self.config.origin
        known = origin.get("calls") if self.steps in (None, origin.get("steps")) else None
        return known if isinstance(known, int) else self.steps or _STEPS

    @property
    def call(self) -> PlannedCall:
        """The whole call that the self-attention is a part of; the first time, it takes a second or a few."""
        counts = {name: blueprint.multiply_adds(self.grid) for name, blueprint in self.blueprints}
        known = [count for count in counts.values() if count is not None]
        if not known or len(known) < len(counts):
            return PlannedCall(counts)
        before = sum(known) // self.turns
        after = before - self.multiply_adds_before + self.multiply_adds_after
        plan = reused_steps(self.config.reuse, steps := self.calls)
        taken = [self._taking_over(each)[0] for each in plan if each is not None]
        after = (after * plan.count(None) + sum(taken)) // steps
        parts = [phase.until - phase.start for phase in self.phases]
        work = (layer.multiply_adds * sum(itertools.compress(parts, layer.approximated)) for layer in self.layers)
        least = ((before - round(sum(work) / self.turns)) * plan.count(None) + sum(taken)) // steps
        return PlannedCall(counts, before, after, before / after, before / max(1, least))

    def _taking_over(self, reuse: StepReuse) -> tuple[int, int]:
        """Return the multiply-adds of a call that takes over from earlier ones, and the bytes that it needs."""
        cuts = [(blueprint, reuse.cut if takes_steps(name) else OUTPUT) for name, blueprint in self.blueprints]
        costs = [blueprint.taking_over(self.grid, cut) or (0, 0) for blueprint, cut in cuts]
        work, values = (sum(column) for column in zip(*costs, strict=True))
        return work // self.turns, 2 * (reuse.order + 1) * values // self.turns  # denoisers that take turns let go

    @property
    def kept_bytes(self) -> float:
        """Memory of the differences that steps share (`Phase.residual_steps`), for one image in 16 bits; 0 for none."""
        sizes = []
        for layer in self.layers:
            phases = self.config.for_layer(layer.name).phases
            if layer.patched and any(phase.residual_steps > 1 and not phase.exact for phase in phases):
                sizes.append((layer.tokens, layer.channels))
        return kept_bytes(sizes, torch.float16, self.config.residuals)

    @property
    def slower(self) -> str:
        """What to say where the patch needs more multiply-adds than exact attention; empty otherwise."""
        before, after = self.multiply_adds_before, self.multiply_adds_after
        if after <= before:
            return ""
        return (
            f"expected to be slower than untouched: {after / before:.2f} times the multiply-adds of self-attention at "
            f"{self.grid}; take a larger image, or autotune=True, which leaves such layers alone"
        )

    def summary(self) -> list[str]:
        """Return what happens in each phase, what it adds up to, of the whole call too, and whether the size pays."""
        rows = [
            f"{phase.start:.0%} to {phase.until:.0%} of the steps: {phase.what}, "
            f"{giga(phase.multiply_adds)} G multiply-adds"
            for phase in self.phases
        ]
        fraction = self.multiply_adds_after / self.multiply_adds_before if self.multiply_adds_before else 1.0
        rows.append(
            f"self-attention of a call: {giga(self.multiply_adds_before)} G multiply-adds before, "
            f"{giga(self.multiply_adds_after)} G after on average ({fraction:.0%})"
        )
        rows += [self.slower] if self.slower else []
        if origin := self.config.origin:
            here = other_than(origin, input=str(self.grid), steps=self.steps)
            rows.append(f"tuned for {origin_in_words(origin)}: {origin.get('promised')}{here and f'; here: {here}'}")
        if kept := self.kept_bytes:
            how = {"fp8": "8 bits, kept on the device", "host": "16 bits, kept on the host"}
            rows.append(
                f"differences that steps share: {readable(kept)} for each image of a batch in "
                f"{how.get(self.config.residuals, '16 bits, kept on the device')}; twice that with a negative prompt"
            )
        rows += [str(self.call)] if self.blueprints else []
        rows += words_of_reuse(self.config.reuse, self.calls)
        by_order = sorted(self.config.reuse, key=lambda each: each.order)
        for each in {each.cut: each for each in by_order}.values() if self.blueprints else ():
            work, kept = self._taking_over(each)
            what = f"a step that takes over {each.cut}: {giga(work)} G multiply-adds"
            rows.append(f"{what}; kept for each image: {readable(kept)} in 16 bits")
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        layers = [{**dataclasses.asdict(layer), "tokens": layer.tokens} for layer in self.layers]
        data = {name: value for name, value in vars(self).items() if value or name not in ("steps", "auto")}
        del data["blueprints"], data["grid"]
        data |= {
            "frames": self.grid.frames,
            "height": self.grid.rows,
            "width": self.grid.columns,
            "config": self.config.to_dict(),
            "layers": layers,
            "phases": list(map(dataclasses.asdict, self.phases)),
        }
        if origin := dict(self.config.origin):
            data |= {"origin": origin, "differs": other_than(origin, input=str(self.grid), steps=self.steps)}
        return {**data, "call": dataclasses.asdict(self.call)}

    def __str__(self) -> str:
        patched, alike = sum(layer.patched for layer in self.layers), dict[PlannedLayer, list[PlannedLayer]]()
        rows = [f"{self.config.method}: patches {patched} of {len(self.layers)} self-attention layers"]
        for layer in self.layers:
            alike.setdefault(dataclasses.replace(layer, name=""), []).append(layer)
        for group in alike.values():
            layer, number = group[0], len(group)
            text = f" and {layer.text} of text" * (layer.text > 0)
            rows.append(
                f"{number} layer{'s' * (number > 1)} of {layer.tokens} tokens ({layer.grid}){text}, "
                f"{layer.heads} heads, in {', '.join(places(group))}: {layer.reason}"
            )
        return "\n".join([self.auto] * bool(self.auto) + ["\n  ".join([*rows, *self.summary()])])


def giga(multiply_adds: float) -> str:
    value = multiply_adds / 1e9
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def places(layers: Sequence[PlannedLayer]) -> list[str]:
    """Return the blocks that layers are in: `down_blocks.0`, `mid_block`; of a ControlNet with its name before."""

    def place(layer: PlannedLayer) -> str:
        kind, number, *_ = layer.name.split(".")
        block = f"{kind}.{number}" if number.isdigit() and kind != "mid_block" else kind
        return block if takes_steps(layer.denoiser) else f"{layer.denoiser}.{block}"

    found = list(dict.fromkeys(map(place, layers)))
    if len(found) <= _MOST_PLACES:
        return found
    kinds = [list(blocks) for _, blocks in itertools.groupby(found, lambda block: block.rpartition(".")[0])]
    return [f"{kind[0]} to {kind[-1].rpartition('.')[2]}" if len(kind) > 1 else kind[0] for kind in kinds]


def make_plan(
    config: PatchConfig,
    layers: Mapping[str, tuple[Sequence[SelfAttention], Sequence[SelfAttention]]],
    decisions: Mapping[tuple[str, str], Decisions],
    size: Grid,
    steps: int | None = None,
) -> Plan:
    parts = None if config.origin.get("steps") == steps else steps  # stretches that were tuned are of whole calls
    whole = {end if parts is None else math.ceil(end * parts - 1e-9) / parts: end for end in reversed(config.stretches)}
    shown, ends = zip(*sorted(whole.items()), strict=True)
    planned_layers, by_layer = [], []
    for name, (present, chosen) in layers.items():
        for layer in present:
            phases = [config.for_layer(layer.name).phase_until(end) for end in ends]
            uses = matching_uses(config, layer, chosen)
            known = decisions.get((name, layer.name), {})
            planned_layers.append(_plan_layer(name, layer, phases, size, layer in chosen, known, uses))
            by_layer.append(phases)
    turns, planned = sum(map(takes_steps, layers)), list[PlannedPhase]()
    for index, (start, end) in enumerate(itertools.pairwise((0.0, *shown))):
        there = [phases[index] for phases in by_layer] or [config.phase_until(ends[index])]
        grids: dict[Phase, list[Grid]] = {phase: [] for phase in there}
        for phase, known_layer in zip(there, planned_layers, strict=False):
            grids[phase] += [known_layer.grid] if known_layer.approximated[index] else []
        words = {phase: describe(phase, own) for phase, own in grids.items()}
        counts = collections.Counter(words[phase] for phase in there)
        what = "; ".join(f"{what} in {count} layer{'s' * (count > 1)}" for what, count in counts.most_common())
        work = sum(layer.multiply_adds_by_phase[index] for layer in planned_layers) // turns
        planned.append(PlannedPhase(start, end, what if len(counts) > 1 else next(iter(counts)), work))
    after = sum((phase.until - phase.start) * phase.multiply_adds for phase in planned)
    before = sum(layer.multiply_adds for layer in planned_layers) // turns
    return Plan(config, size, tuple(planned_layers), tuple(planned), before, round(after), turns=turns, steps=steps)


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
        names = taken(pipe)
        clips = "num_frames" in names if names else any(word in type(module).__name__ for word in _OF_CLIPS)
        if frames > 1 and own.frames == 1 and not clips:
            raise ElfattError(f"frames={frames!r} is not accepted; a {type(pipe).__name__} makes no clips.")
        length = (frames - 1) // time + 1
    return family.grid(module, Grid(length, *sides))


def taken(pipe: Any) -> dict[str, inspect.Parameter]:
    """Return what a pipeline is called with."""
    inputs = getattr(getattr(pipe, "blocks", None), "inputs", None)
    if inputs is None:
        called = callable(pipe) and not isinstance(pipe, nn.Module)
        return dict(inspect.signature(pipe.__call__).parameters) if called else {}
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    defaults = {each.name: none if each.required else each.default for each in inputs if each.name}
    return {name: inspect.Parameter(name, kind, default=default) for name, default in defaults.items()}


def default_of(pipe: Any, name: str) -> Any:
    """Return what a pipeline's call has for an input that is not given; None where it has nothing."""
    default = getattr(taken(pipe).get(name), "default", None)
    return None if default is inspect.Parameter.empty else default


def frames_to_one(pipe: Any) -> int:
    return _factor(pipe, "vae_scale_factor_temporal", "vae_temporal_compression_ratio")


def _factor(pipe: Any, *names: str) -> int:
    return next((int(getattr(pipe, name)) for name in names if hasattr(pipe, name)), 1)


def describe(phase: Phase, grids: Sequence[Grid] = ()) -> str:
    if phase.exact:
        return "exact attention"
    fitted = [phase.attention.fit(grid, phase.merge) for grid in grids] or [phase.attention]
    rows = " for one of the rows with the same latents," * phase.shares_guidance
    corrected = f", exact in 1 of {phase.residual_steps} steps{rows} and corrected in between"
    corrected *= phase.residual_steps > 1
    dtype = f" in {phase.attention_dtype}" * bool(phase.attention_dtype)
    merge, merging = phase.merge, ""
    if merge.ratio:  # how much is merged, and how much can be where that is less than asked
        most = max((merge.most(grid) / grid.tokens for grid in grids), default=1.0)
        got = [merge.merged(grid) / grid.tokens for grid in grids] or [merge.ratio]
        asked, low, high = (f"{ratio:.0%}" for ratio in (merge.ratio, min(got), max(got)))
        span = low if low == high else f"{low} to {high}"
        stride = f"stride {merge.stride}" if merge.ratio <= most else f"at most {most:.0%} with stride {merge.stride}"
        merging = f"{span} merged ({f'{asked} asked, ' * (span != asked)}{stride}), "
    return merging + phase.attention.words(fitted) + dtype + corrected


def _plan_layer(
    denoiser: str, layer: SelfAttention, phases: Sequence[Phase], size: Grid, chosen: bool, known: Decisions, uses: int
) -> PlannedLayer:
    grid, channels = layer.grid(size), layer.channels
    before = multiply_adds(EXACT, grid, channels, context=layer.text)
    by_phase, approximated, reasons = [], [], []
    for phase in phases:
        decision = known.get(phase)
        work = multiply_adds(phase, grid, channels, uses, layer.text)
        pays = chosen and (decision is None or decision.pays)
        by_phase.append(work if pays else before)
        approximated.append(pays and not phase.exact)
        if not phase.exact:
            verdict = decision or (_ESTIMATED_SLOWER if work > before else None)
            merge = dataclasses.replace(phase.merge, ratio=phase.merge.merged(grid) / grid.tokens)
            fitted = dataclasses.replace(phase, attention=phase.attention.fit(grid, phase.merge), merge=merge)
            reasons.append(describe(fitted) + (f": {verdict}" if verdict else ""))
    if not reasons:
        reason = describe(EXACT)
    elif not chosen:
        reason = f"left alone: {layer.obstacle or f'its grid is 1/{layer.downsample} of the latent'}"
    else:
        reason = ", then ".join(reason for reason, _ in itertools.groupby(reasons))
    of_layer = denoiser, layer.name, layer.downsample, *grid, layer.text, layer.heads, channels
    return PlannedLayer(*of_layer, any(approximated), reason, before, tuple(by_phase), tuple(approximated))


def multiply_adds(phase: Phase, grid: Grid, channels: int, uses: int = 1, context: int = 0) -> int:
    """Multiply-adds of a self-attention layer for one image: matching, projections and attention, a mean over steps."""
    merge = phase.merge
    destinations = merge.destinations(grid)
    matching = (grid.tokens - destinations) * destinations * channels // uses if phase.matches else 0
    attention = phase.attention.fit(grid, merge).cost(Size(grid, merge.kept(grid), channels, context))
    exact = 0
    if phase.residual_steps > 1 and not phase.exact:
        shared = phase.residual_steps * (1 + phase.shares_guidance)  # where guidance has rows without the prompt
        exact = multiply_adds(EXACT, grid, channels, context=context) // shared
    return matching + round(attention) + exact
