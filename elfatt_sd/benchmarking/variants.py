"""What a benchmark times: methods by name and with settings, the variants that their runs are made of, and sizes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elfatt_sd import errors as checks
from elfatt_sd import families
from elfatt_sd.config import METHODS, Method, PatchConfig, is_place, method_named, method_names, warn_without_effect
from elfatt_sd.errors import ElfattError
from elfatt_sd.families.joint import with_attention
from elfatt_sd.families.unet import UNet
from elfatt_sd.patch import apply_patch
from elfatt_sd.peers import PEERS, check_settings, running
from elfatt_sd.phases import EXACT, Backend, Phase
from elfatt_sd.plans import describe
from elfatt_sd.runtime.call import Call
from elfatt_sd.runtime.joint_processor import JointProcessor
from elfatt_sd.runtime.layer import STATE, PatchedLayer, called_like, fits, fitted

UNPATCHED, PEER, FLOOR, EXACT_THROUGH = "untouched", "tomesd", "floor", "exact, "
COMPILED, AUTOTUNED, KEPT = ", compiled", ", autotuned", ", freed memory kept"  # at the end of a name
MERGING: Method = "tome"  # the preset that does what the package tomesd does
# Attentions that no preset has as they are, after exact early steps.
ALONE: dict[str, PatchConfig] = {
    "spread": PatchConfig("spread", (Phase(0.2), Phase(1.0, "block", block_order="spread"))),
    "cell_spread": PatchConfig("cell_spread", (Phase(0.2), Phase(1.0, "cell_spread", block_order="spread"))),
    "sampled": PatchConfig("sampled", (Phase(0.2), Phase(1.0, "sampled"))),
}
VARIATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tome", {"reuse_layers": True}),
    ("tome", {"reuse_steps": 2}),
    ("elfatt", {"ratio": 0}),
    ("elfatt-fast", {"levels": 1}),
    ("elfatt-fast", {"residual_steps": 8}),
    ("spread", {"block_size": 128, "levels": 1}),
    ("spread", {"block_size": 512, "levels": 2}),
)
ALL_LEVELS = 100
STEPS = 50  # of the run that the phases of a method are added up to
Size = int | str  # of an image in pixels: the side of a square, or `WIDTHxHEIGHT`
PEER_SETTINGS = ("levels", "max_downsample", "ratio", "stride", "use_rand")


def plain_name(name: str) -> str:
    return name.removesuffix(COMPILED).removesuffix(AUTOTUNED).removesuffix(KEPT)


def is_peer(name: str) -> bool:
    return name.partition(":")[0] in PEERS


def is_reference(name: str) -> bool:
    plain = plain_name(name)
    return plain == UNPATCHED or is_peer(plain) or plain.startswith((FLOOR, EXACT_THROUGH))


def differs_by_step(name: str) -> bool:
    """Tell whether a method is a peer that does other work in one step than in another."""
    return is_peer(name) and name.partition(":")[0] != PEER


def patched_layers(unet: nn.Module) -> list[PatchedLayer]:
    return [getattr(module, STATE) for module in unet.modules() if hasattr(module, STATE)]


def latest_calls(unet: nn.Module) -> list[Call]:
    found = {id(layer.patch): layer.patch.latest for layer in patched_layers(unet)}
    return [call for call in found.values() if call is not None]


def repeat_step(unet: nn.Module) -> None:
    """Let the call that now begins take over what an earlier one kept, though it is of the same step."""
    for call in latest_calls(unet):
        call.memory.step = -1  # the next call is the first of its step


def forget_residuals(unet: nn.Module) -> None:
    """Forget the differences to exact attention, so that the call that now begins measures them."""
    for call in latest_calls(unet):
        for state in call.states.values():
            state.residuals.clear()


def _leave_out(layer: families.SelfAttention) -> None:
    """Let a layer that is as it was made give zeros."""
    processor: Any = lambda attn, hidden_states, *_, **__: torch.zeros_like(hidden_states)  # noqa: E731
    if layer.joint:
        original, kind = layer.processor, type(layer.processor)
        zeros = with_attention(kind, lambda exact, query, *_, **__: torch.zeros_like(query))
        call: Any = {"__call__": lambda _, attn, *args, **kwargs: zeros(original, attn, *args, **kwargs)}
        processor = called_like(type("Zeros", (JointProcessor,), call), kind, inspect.signature(kind.__call__))(
            original
        )
    layer.attention.set_processor(processor)


@dataclass(frozen=True)
class Variant:
    kind: str  # `untouched`, a peer with its settings, `floor` (the patched layers give zeros), or `patch`
    # of the patch; for `tomesd` only what `PEER_SETTINGS` names is used, for `floor` only the layers
    config: PatchConfig = dataclasses.field(default_factory=PatchConfig)
    compiled: bool = False  # run it through `torch.compile`
    measures: bool = False  # make every call one that measures the difference that `residual_steps` calls share
    autotune: bool = False  # patch only the layers that the method makes faster; the first call at a size finds out

    def install(self, target: Any) -> Any:
        """Put the variant on a pipeline or UNet that is as it was made, and return it."""
        unet = families.main_denoiser(target)
        if self.kind == "patch":
            apply_patch(target, self.config, autotune=self.autotune)
            shares = any(phase.residual_steps > 1 for phase in self.config.all_phases)
            if self.config.reuse_steps > 1 or shares or self.measures:
                unet.register_forward_pre_hook(lambda module, _: repeat_step(module), prepend=True)
            if self.measures:
                unet.register_forward_pre_hook(lambda module, _: forget_residuals(module))
        elif is_peer(self.kind):
            peer, _, changes = self.kind.partition(":")
            pairs = (change.split("=", 1) for change in changes.split(",") if change)
            settings = {name: json.loads(value) for name, value in pairs}
            if peer == PEER:
                deepest, merge = max(layer.downsample for layer in self._layers(unet)), self.config.phases[0].merge
                settings = {"ratio": merge.ratio, "stride": merge.stride, "max_downsample": deepest}
                settings["use_rand"] = self.config.use_rand
            on = ExitStack()
            on.enter_context(running(target, peer, settings))
            target._elfatt_sd_peer = on  # for as long as the pipeline lives
        elif self.kind == FLOOR:
            for layer in itertools.chain(*map(self._layers, families.step_denoisers(target).values())):
                _leave_out(layer)
        return target

    def _layers(self, denoiser: nn.Module) -> list[families.SelfAttention]:
        layers = families.find_layers(denoiser)
        return families.select_layers(layers, self.config, families.levels_of(layers))

    def to_dict(self) -> dict[str, Any]:
        phases = list(dict.fromkeys(self.config.all_phases)) or [EXACT]
        what = "by layer: " * bool(self.config.per_layer) + ", then ".join(map(describe, phases))
        what += f", matching kept for {self.config.reuse_steps} steps" * (self.config.reuse_steps > 1)
        what += ", a step that is exact" * self.measures
        what += ", one matching for all layers" * self.config.reuse_layers
        what += f", backend {self.config.attention_backend}" * (self.config.attention_backend != "auto")
        what = {"patch": what, FLOOR: "the layers left out", PEER: f"tomesd, {what}"}.get(self.kind, self.kind)
        what += AUTOTUNED * self.autotune + COMPILED * self.compiled
        return {"kind": self.kind, "what": what, "config": self.config.to_dict()}


UNTOUCHED = Variant(UNPATCHED)


@dataclass(frozen=True)
class RunParts:
    parts: tuple[tuple[str, int], ...]  # names of variants, each with its number of steps of `STEPS`
    floor: str | None = None  # the floor of the levels that the method patches


@dataclass
class Lineup:
    """Variants by name, and for each row of a table its run."""

    variants: dict[str, Variant] = dataclasses.field(default_factory=dict)
    runs: dict[str, RunParts] = dataclasses.field(default_factory=dict)
    names: dict[Variant, str] = dataclasses.field(default_factory=dict)  # of kinds of work

    def add(self, row: str, variant: Variant, floor: str | None = None) -> None:
        """Add a row that is one variant; the same work is timed once."""
        self.runs[row] = RunParts(((self.place(row, variant), STEPS),), floor)

    def place(self, name: str, variant: Variant) -> str:
        """Add a variant, and return the name under which it, or one of the same work, is timed."""
        name = self.names.setdefault(dataclasses.replace(variant, config=work_of(variant.config)), name)
        self.variants.setdefault(name, variant)
        return name

    def add_twins(self, ending: str) -> None:
        """Add twins of variants, and of rows that have one."""
        tuned, names = ending == AUTOTUNED, dict[str, str]()
        for name, variant in [*self.variants.items()]:
            if variant.kind == "patch" if tuned else not is_peer(variant.kind):
                names[name] = name + ending
                self.variants[name + ending] = dataclasses.replace(variant, autotune=tuned, compiled=not tuned)
        for row, run in [*self.runs.items()]:
            parts = tuple((names.get(name, name), count) for name, count in run.parts)
            if parts != run.parts:
                self.runs[row + ending] = RunParts(parts, run.floor and names.get(run.floor, run.floor))

    def described(self) -> dict[str, Any]:
        return {name: variant.to_dict() for name, variant in self.variants.items()}

    def details(self, bases: Iterable[str]) -> dict[str, Any]:
        runs = {row: dataclasses.asdict(run) for row, run in self.runs.items()}
        return {"bases": [base for base in bases if base in runs], "runs": runs}


def resolve_methods(methods: Iterable[str | PatchConfig] | None, **settings: Any) -> list[PatchConfig]:
    """Return the configurations to time, each kind of work once.

    Settings change every method, but for the ratio of those that do not merge, and what a variation is about.
    """

    def changed(config: PatchConfig, own: Collection[str] = ()) -> PatchConfig:
        kept = {*own} if any(phase.merge.ratio for phase in config.all_phases) else {*own, "ratio"}
        return config.with_settings(**{name: value for name, value in settings.items() if name not in kept})

    wanted = [method for method in (METHODS if methods is None else methods) if method != "sd"]
    found = [method if isinstance(method, PatchConfig) else changed(named(method)) for method in wanted]
    if methods is None:
        found += [changed(varied(method, **changes), changes) for method, changes in VARIATIONS]
    return _once(found)


def _fitted(configs: Sequence[PatchConfig], denoiser: nn.Module, *, named: bool) -> list[PatchConfig]:
    """Return the configurations that methods are on a denoiser, each kind of work once."""
    denoisers, levels = {"denoiser": denoiser}, max(1, len(families.levels_of(families.find_layers(denoiser))))
    found = [fitted(config, denoisers) for config in configs if named or fits(config, denoisers)]
    for config in found if named else ():
        warn_without_effect(config)
    return _once(dataclasses.replace(config, levels=levels) if config.levels > levels else config for config in found)


def _once(configs: Iterable[PatchConfig]) -> list[PatchConfig]:
    kept = dict[PatchConfig, PatchConfig]()
    for config in configs:
        kept.setdefault(work_of(config), config)
    return [*kept.values()]


def work_of(config: PatchConfig) -> PatchConfig:
    """Return what configurations that do the same have in common, whatever their names; peers are what these say."""
    method = config.method if differs_by_step(config.method) else PEER * is_peer(config.method)
    return dataclasses.replace(config, method=method or "any")


def line_up(
    configs: Sequence[PatchConfig],
    denoiser: nn.Module | None = None,
    *,
    by_phase: bool,
    named: bool = True,
    ending: str = "",
    competitors: Iterable[Backend] = (),
) -> Lineup:
    """Work out what to time for methods: each as a whole, or a call in each of its phases.

    Untouched is first, tomesd before our own token merging, and the floors come after the methods. Methods that do not
    fit the denoiser are left out, or refused where somebody `named` them. The `ending` is that of twins: `AUTOTUNED`
    of patches, `COMPILED` of all that are not peers. Competitors are backends of exact attention in all layers.
    """
    tomesd = denoiser is None or isinstance(families.family_of(denoiser), UNet)  # which patches nothing else
    lineup = Lineup()
    lineup.add(UNPATCHED, UNTOUCHED)
    floors: dict[str, Variant] = {}
    for config in configs if denoiser is None else _fitted(configs, denoiser, named=named):
        method = config.method
        mixed = len({phase.residual_steps for phase in config.all_phases} - {1}) > 1
        if by_phase and (config.reuse or mixed or differs_by_step(method)):
            raise ElfattError(f"{method} is timed over a whole run: elfatt-sd bench pipeline.")
        if differs_by_step(method):
            lineup.add(method, Variant(method))
            continue
        floor = FLOOR if config.levels == 1 else f"{FLOOR} of {config.levels} levels"
        layers = PatchConfig(levels=config.levels, max_downsample=config.max_downsample)
        if config.max_downsample is not None:
            floor = f"{FLOOR} to 1/{config.max_downsample}"
        if config.per_layer:
            floor = f"{FLOOR} of {method}"
            layers = dataclasses.replace(layers, phases=config.phases, per_layer=config.per_layer)
        floors.setdefault(floor, Variant(FLOOR, layers))
        peer = is_peer(method)
        if tomesd and (peer or (method == MERGING and any(phase.merge.ratio > 0 for phase in config.all_phases))):
            lineup.add(method if peer else PEER, Variant(PEER, config), floor)
        if by_phase and not peer:
            pieces = [(f"{method}/{index}", *piece) for index, piece in enumerate(single_phases(config))]
            parts = tuple((lineup.place(name, variant), steps) for name, variant, steps in pieces)
            lineup.runs[method] = RunParts(parts, floor)
        elif not peer:
            lineup.add(method, Variant("patch", config) if config.active else UNTOUCHED, floor)
    for name, variant in floors.items():
        lineup.add(name, variant)
    if ending:
        lineup.add_twins(ending)
    for backend in competitors:
        name = EXACT_THROUGH + backend
        lineup.add(name, Variant("patch", PatchConfig(name, levels=ALL_LEVELS, attention_backend=backend)))
    return lineup


def single_phases(config: PatchConfig) -> list[tuple[Variant, int]]:
    """Cut a method in variants of one phase each.

    A phase whose matching serves several steps is cut in two: calls that match (`reuse_steps=1`), and calls that take
    over the matching of the call before them, which all calls of one step do but the first. So is one whose steps share
    the difference to exact attention: calls that measure it, and calls that add it.
    """
    counts, parts = Counter[Variant](), [config.at(step, STEPS) for step in range(STEPS)]
    for step, part in enumerate(parts):
        shared = max((phase.residual_steps for phase in part.all_phases), default=1)
        goes_on = step > 0 and part == parts[step - 1]
        reuses = goes_on and step % config.reuse_steps > 0 and any(phase.matches for phase in part.all_phases)
        measures = shared > 1 and not (goes_on and step % shared)
        part = dataclasses.replace(part, reuse_steps=config.reuse_steps if reuses else 1)
        counts[Variant("patch", part, measures=measures) if part.active else UNTOUCHED] += 1
    return list(counts.items())


def named(method: str) -> PatchConfig:
    """Return a preset, a peer, an attention after exact early steps, or a saved configuration."""
    if method == PEER:
        return dataclasses.replace(PatchConfig.preset(MERGING), method=PEER)
    if method in PEERS:
        return PatchConfig(method)
    if method in ALONE:
        return ALONE[method]
    if method not in METHODS and is_place(method):
        return dataclasses.replace(PatchConfig.load(method), method=method)
    if ":" not in method:  # which `package.module:Class` has
        checks.choice("method", method, [*method_names(), *PEERS, *ALONE])
    return method_named(method)


def varied(method: str, **settings: Any) -> PatchConfig:
    """Return a method with other settings, and these in its name: `elfatt-fast:levels=2`."""
    if method == PEER and (unknown := sorted(settings.keys() - {*PEER_SETTINGS})):
        raise ElfattError(f"setting {unknown[0]!r} of {PEER} is not known; accepted: {', '.join(PEER_SETTINGS)}.")
    changes = ",".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    config = named(method)
    if differs_by_step(method):
        check_settings(method, settings)
    else:
        config = config.with_settings(**settings)
    return dataclasses.replace(config, method=f"{config.method}:{changes}" if changes else config.method)


def read_size(text: str) -> Size:
    """Read a size in pixels: `1024`, or `832x480`, width first."""
    found = re.fullmatch(r"(\d{1,18})(?:x(\d{1,18}))?", text.strip(), re.ASCII)
    numbers = [int(number) for number in found.groups() if number] if found else [0]
    if min(numbers) <= 0 or any(number % 8 for number in numbers):
        raise ElfattError(f"size={text} is not accepted; give a positive multiple of 8, or two as in 832x480.")
    return numbers[0] if len(numbers) == 1 else "x".join(map(str, numbers))


def height_and_width(size: Size) -> tuple[int, int]:
    width, _, height = str(size).partition("x")
    return int(height or width), int(width)


def grid_side(tokens: int) -> int:
    side = math.isqrt(max(tokens, 0))
    if tokens < 1 or side * side != tokens:
        raise ElfattError(f"tokens={tokens} is not accepted; give the number of tokens of a square grid.")
    return side
