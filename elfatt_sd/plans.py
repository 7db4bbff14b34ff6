"""A plan as data and as text: layers, phases, and the whole call."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elfatt_sd.config import PatchConfig
from elfatt_sd.families import takes_steps
from elfatt_sd.methods import Grid
from elfatt_sd.residuals import kept_bytes, readable
from elfatt_sd.shapes import Blueprint

PAYS = 8000  # tokens of a transformer, from about which on attention is a large part of its step
_MOST_PLACES = 8  # that a plan lists one by one; a UNet has fewer blocks on a level


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
        return (
            f"whole call ({names}): {giga(self.before)} G multiply-adds before, {giga(self.after)} G after on average. "
            f"By this count it is {self.speed:.2f} times as fast, {self.limit:.2f} if the approximated layers cost "
            "nothing; measure it here with elfatt-sd bench"
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

    @property
    def height(self) -> int:
        """Rows of the denoiser's input."""
        return self.grid.rows

    @property
    def width(self) -> int:
        """Columns of the denoiser's input."""
        return self.grid.columns

    def counting(self, denoisers: Mapping[str, nn.Module]) -> Plan:
        known = tuple((name, Blueprint.of(denoiser)) for name, denoiser in denoisers.items())
        return dataclasses.replace(self, blueprints=known)

    @property
    def call(self) -> PlannedCall:
        """The whole call that the self-attention is a part of; the first time, it takes a second or a few."""
        counts = {name: blueprint.multiply_adds(self.grid) for name, blueprint in self.blueprints}
        known = [count for count in counts.values() if count is not None]
        if not known or len(known) < len(counts):
            return PlannedCall(counts)
        before = sum(known) // self.turns
        after = before - self.multiply_adds_before + self.multiply_adds_after
        least = before - round(sum(map(self._approximated, self.layers)) / self.turns)
        return PlannedCall(counts, before, after, before / after, before / max(1, least))

    @property
    def kept_bytes(self) -> float:
        """Memory of the differences that steps share (`Phase.residual_steps`), for one image in 16 bits; 0 for none."""
        sizes = [(layer.tokens, layer.channels) for layer in self.layers if self._shares(layer)]
        if not sizes:
            return 0.0
        return kept_bytes(sizes, 1, torch.float16, self.config.residuals)

    def average(self, layer: PlannedLayer) -> float:
        return sum(part * work for part, work in zip(self._parts, layer.multiply_adds_by_phase, strict=True))

    def groups(self) -> list[tuple[PlannedLayer, ...]]:
        alike: dict[PlannedLayer, list[PlannedLayer]] = {}
        for layer in self.layers:
            alike.setdefault(dataclasses.replace(layer, name=""), []).append(layer)
        return [tuple(group) for group in alike.values()]

    @property
    def heading(self) -> str:
        """The method, and how many layers it patches."""
        patched = sum(layer.patched for layer in self.layers)
        return f"{self.config.method}: patches {patched} of {len(self.layers)} self-attention layers"

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
        kept = self.kept_bytes
        if kept:
            what = "in 8 bits" if self.config.residuals == "fp8" else "in 16 bits"
            where = "host" if self.config.residuals == "host" else "device"
            rows.append(
                f"differences that steps share: {readable(kept)} for each image of a batch {what}, kept on the "
                f"{where}; twice that with a negative prompt"
            )
        rows += [str(self.call)] if self.blueprints else []
        tokens = max((layer.tokens for layer in self.layers if layer.denoiser.startswith("transformer")), default=PAYS)
        if tokens < PAYS:
            rows.append(f"little can be gained: below about {PAYS} tokens, attention is a small part of a step")
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        layers = [{**dataclasses.asdict(layer), "tokens": layer.tokens} for layer in self.layers]
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del data["blueprints"], data["grid"]
        data |= {
            "frames": self.grid.frames,
            "height": self.height,
            "width": self.width,
            "config": self.config.to_dict(),
            "layers": layers,
            "phases": list(map(dataclasses.asdict, self.phases)),
        }
        return {**data, "call": dataclasses.asdict(self.call)}

    def __str__(self) -> str:
        rows = []
        for group in self.groups():
            layer, number = group[0], len(group)
            text = f" and {layer.text} of text" * (layer.text > 0)
            rows.append(
                f"{number} layer{'s' * (number > 1)} of {layer.tokens} tokens ({layer.grid}){text}, "
                f"{layer.heads} heads, in {', '.join(places(group))}: {layer.reason}"
            )
        return "\n  ".join([self.heading, *rows, *self.summary()])

    def _shares(self, layer: PlannedLayer) -> bool:
        phases = self.config.for_layer(layer.name).phases
        return layer.patched and any(phase.residual_steps > 1 and not phase.exact for phase in phases)

    @property
    def _parts(self) -> list[float]:
        return [phase.until - phase.start for phase in self.phases]

    def _approximated(self, layer: PlannedLayer) -> float:
        return layer.multiply_adds * sum(itertools.compress(self._parts, layer.approximated))


class PlanOnDemand:
    """A plan that is made when it is first looked at, as it takes long to measure."""

    def __init__(self, make: Callable[[], Plan]) -> None:
        self._make = make

    @functools.cached_property
    def _plan(self) -> Plan:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copies and pickles, which ask before there is anything
            raise AttributeError(name)
        return getattr(self._plan, name)

    def __str__(self) -> str:
        return str(self._plan)


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
