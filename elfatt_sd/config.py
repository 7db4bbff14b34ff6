"""A configuration: phases, layers and settings of a method; the methods and presets by name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack, cast, get_args

from elfatt_sd import errors
from elfatt_sd.errors import ElfattError, ElfattFailure, is_unreachable, shortened
from elfatt_sd.files import HUB_ID, known_keys, write_json
from elfatt_sd.methods import attention_named, attentions, is_own, reserve
from elfatt_sd.phases import (
    EXACT,
    RUN_SETTINGS,
    Backend,
    Downsample,
    Kept,
    LayerPhases,
    Phase,
    Settings,
    StepReuse,
    check_settings,
    check_stretches,
    objects_of,
    phases_of,
    reuse_of,
    reused_steps,
)

SETTINGS = "elfatt_sd.json"  # in a folder, or in a repository of the hub
FORMAT = 1  # of files of settings that say where these come from
_WITH_SUMS = ("auto", "native", "triton")  # backends that go with attentions that need log-sum-exps


@dataclass(frozen=True)
class PatchConfig:
    """A method: its phases in order, and what holds for the whole run.

    Attributes:
        method: the name that tables show.
        phases: in order of `until`; what follows the last one is exact attention.
        levels: number of levels to patch, counted from the finest one that has self-attention.
        max_downsample: deepest level to patch instead, as the factor by which its grid is smaller than the latent (1,
            2, 4, 8), as tomesd counts; None goes by `levels`.
        seed: seed of the random destinations, blocks and sampled keys, drawn from `(seed, step, layer)`.
        use_rand: draw the merge destinations at random (True) or take the first token of each cell (False).
        reuse_steps: number of steps that share one token matching where they merge alike; 1 computes it again in every
            step.
        reuse_layers: layers on the same grid share the matching of the first of them.
        attention_backend: `auto`, or the name of a backend of diffusers' attention dispatcher, which then serves the
            patched layers in exact phases too.
        fp32_logits: compute the attention logits of approximated layers in float32 (advised for SD 2.1). The kernels
            of CUDA cards since Ampere do so by themselves in half precision, where it changes nothing.
        residuals: where the differences of `residual_steps` are kept: on the `device`, on the `host`, which copies them
            there and back, or in 8 bits on the device (`fp8`).
        residual_limit: GiB that those of all calls of a step may take; None is half of what is free.
        per_layer: layers with phases of their own, whatever their level; the first that names a layer counts.
        reuse: stretches of the run in which steps take over from earlier ones, in order of `until`; what follows the
            last one computes everything.
        changes: what `with_settings` changed; neither compared nor saved.
        origin: what `tune` found it for, as plain data, until a setting is changed; saved, but not compared.
    """

    method: str = "custom"
    phases: tuple[Phase, ...] = ()
    levels: int = 1
    max_downsample: Downsample | None = None
    seed: int = field(default=0, metadata={"low": 0, "high": 2**63 - 1})
    use_rand: bool = True
    reuse_steps: int = 1
    reuse_layers: bool = False
    attention_backend: Backend = "auto"
    fp32_logits: bool = False
    residuals: Kept = "device"
    residual_limit: float | None = field(default=None, metadata={"high": 10**6})
    per_layer: tuple[LayerPhases, ...] = ()
    reuse: tuple[StepReuse, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    origin: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ElfattError(f"method={self.method!r} is not accepted; give a name.")
        check_stretches("phases", self.phases, Phase)
        check_stretches("reuse", self.reuse, StepReuse)
        errors.fields(self)
        narrower = next((phase.attention_dtype for phase in self.all_phases if phase.attention_dtype), None)
        if self.fp32_logits and narrower:
            raise ElfattError(
                f"attention_dtype={narrower!r} is not accepted with fp32_logits=True; give one of the two."
            )
        needing = [phase.attention.name for phase in self.all_phases if phase.attention.needs_sums]
        if needing and self.attention_backend not in _WITH_SUMS:
            raise ElfattError(
                f"attention_backend={self.attention_backend!r} is not accepted with attention={needing[0]!r}, which "
                "needs log-sum-exps that the dispatcher does not hand out; give 'auto', 'native' or 'triton'."
            )

    @property
    def active(self) -> bool:
        """Whether a patch does anything: approximate, take over from earlier steps, or choose the exact kernel."""
        return any(not phase.exact for phase in self.all_phases) or bool(self.reuse) or self.attention_backend != "auto"

    @property
    def all_phases(self) -> tuple[Phase, ...]:
        """The phases, and those of layers that have their own."""
        return tuple(itertools.chain(self.phases, *(own.phases for own in self.per_layer)))

    @property
    def stretches(self) -> tuple[float, ...]:
        """Fractions of the run at which the phase of any layer ends, in order; the last is 1."""
        return tuple(sorted({1.0, *(phase.until for phase in self.all_phases)}))

    def for_layer(self, layer: str) -> PatchConfig:
        """Return the configuration of one layer, in which none has phases of its own."""
        phases = next((own.phases for own in self.per_layer if own.matches(layer)), self.phases)
        return dataclasses.replace(self, phases=phases, per_layer=(), reuse=()) if self.per_layer else self

    @classmethod
    def preset(cls, method: Method, **settings: Unpack[Settings]) -> PatchConfig:
        """Build the configuration of a named method, with some settings changed.

        Args:
            method: one of `METHODS`; a name that only the run knows goes through `known_method`.
            **settings: as for `with_settings`.

        Returns:
            The configuration.

        Raises:
            ElfattError: unknown method or setting, or a value out of range.
        """
        return method_named(method).with_settings(**settings)

    def with_settings(self, /, **settings: Unpack[Settings]) -> PatchConfig:
        """Return a copy with some settings changed.

        Args:
            **settings: see `Settings`; those of phases are applied to every phase that is not exact.

        Raises:
            ElfattError: unknown setting, or a value out of range.
        """
        own: dict[str, Any] = {name: value for name, value in settings.items() if name in RUN_SETTINGS}
        per_phase: dict[str, Any] = {name: value for name, value in settings.items() if name not in own}
        own |= {"reuse": reuse_of(own["reuse"])} if "reuse" in own else {}
        own |= {"origin": {}} if settings else {}
        fraction = per_phase.pop("active_fraction", None)
        check_settings(per_phase)
        ratio = per_phase.get("ratio", 0)
        if ratio > 0 and not all(phase.attention.merges for phase in self.all_phases):
            merging = [name for name, config in PRESETS.items() if any(phase.merge.ratio for phase in config.phases)]
            raise ElfattError(
                f"ratio={ratio!r} is not accepted with method {self.method!r}, which does not merge tokens; leave "
                f"ratio away, or take a method that merges: {', '.join(merging)}."
            )
        if fraction is not None:
            errors.real("active_fraction", fraction, 0.0, 1.0)

        def with_changes(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
            phases = tuple(phase if phase.exact else phase.with_settings(per_phase) for phase in phases)
            if fraction is None or not phases:
                return phases
            first, *rest = phases  # the border between the method's own phase and the rest of the run moves
            border = 1 - float(fraction) if first.exact else float(fraction)
            changed = (dataclasses.replace(first, until=border),) if border else ()
            return (*changed, *(phase for phase in rest if phase.until > border))

        return self._with_phases(with_changes, **own, changes={**self.changes, **settings})

    def _with_phases(self, change: Callable[[tuple[Phase, ...]], tuple[Phase, ...]], **own: Any) -> PatchConfig:
        per_layer = tuple(LayerPhases(each.layers, change(each.phases)) for each in self.per_layer)
        return dataclasses.replace(self, phases=change(self.phases), per_layer=per_layer, **own)

    def without_effect(self, settings: Iterable[str]) -> list[str]:
        """Return those of some settings that this configuration has not: no phase that approximates uses them."""
        used = {*RUN_SETTINGS, "active_fraction"}
        for phase in (phase for phase in self.all_phases if not phase.exact):
            used |= {*phase.attention.settings(), "attention_dtype"}
            used |= {"ratio"} if phase.attention.merges else set()
            used |= {"stride"} if phase.matches else set()
            used |= set() if phase.dense else {"residual_steps"}
            used |= {"residual_guidance"} if phase.corrects else set()
        return [name for name in settings if name not in used]

    def to_dict(self, *, origin: bool = False) -> dict[str, Any]:
        """Return plain data, ready for JSON; with `origin` also where it comes from, on which no image depends."""
        data = {name: getattr(self, name) for name in _SAVED}
        data["phases"] = [phase.to_dict() for phase in self.phases]
        data["reuse"] = list(map(dataclasses.asdict, self.reuse))
        own = [{"layers": each.layers, "phases": [phase.to_dict() for phase in each.phases]} for each in self.per_layer]
        data["per_layer"] = own
        # what was saved before there were any stays the same
        data = {name: value for name, value in data.items() if value or name not in ("reuse", "per_layer")}
        return data | ({"format": FORMAT, "origin": dict(self.origin)} if origin and self.origin else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PatchConfig:
        """Build a configuration from what `to_dict` gave, or from what a file holds.

        Raises:
            ElfattError: a key is unknown, or a value is out of range.
        """
        if not isinstance(data, Mapping):
            raise ElfattError(f"{type(data).__name__} is not a configuration; give an object as `to_dict` returns it.")
        if (written := data.get("format", FORMAT)) != FORMAT:
            raise ElfattError(f"format={written!r} is not {FORMAT}; a larger one needs a later version of elfatt-sd.")
        if not isinstance(origin := data.get("origin", {}), Mapping):
            raise ElfattError(f"origin={origin!r} is not accepted; give an object.")
        data = {name: value for name, value in data.items() if name not in ("format", "origin")}
        known_keys("", data, _SAVED)
        own = []
        for each in objects_of("per_layer", data.get("per_layer", ())):
            known_keys("per_layer.", each, ["layers", "phases"])
            own.append(LayerPhases(str(each.get("layers", "")), phases_of(each)))
        reuse = reuse_of(data.get("reuse", ()))
        return cls(**{**data, "phases": phases_of(data), "per_layer": tuple(own), "reuse": reuse, "origin": origin})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON; a file that is there is replaced, as a whole or not at all.

        Args:
            path: of the file; its folder is made.

        Raises:
            OSError: it cannot be written.
        """
        write_json(Path(path), self.to_dict(origin=True))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PatchConfig:
        """Read a configuration that `save` wrote, or settings that `tune` found.

        Args:
            path: of the file, of a folder that has it as `elfatt_sd.json`, or the id of such a repository of the hub.

        Raises:
            ElfattError: there is no such file, it is not JSON, or not a configuration.
            ElfattFailure: the hub cannot be reached.
        """
        try:
            data = json.loads(_file_of(path).read_text(encoding="utf-8-sig"))  # editors on Windows put a BOM first
        except (OSError, TypeError, ValueError, RecursionError) as error:
            what = "are not JSON" if isinstance(error, ValueError) else "cannot be read"
            if isinstance(error, ElfattError):  # of the hub
                raise
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, FileNotFoundError) and os.path.isdir(path):
                reason = f"the folder has no {SETTINGS}"
            raise ElfattError(
                f"settings {str(path)!r} {what} ({reason}); give a file or folder that elfatt-sd "
                "wrote, such as `patch --save` does, or an id of the hub."
            ) from error
        try:
            return cls.from_dict(data)
        except ElfattError as error:
            raise ElfattError(f"settings {str(path)!r} are not accepted: {error}") from error

    def phase_at(self, step: int, steps: int) -> Phase:
        """Return the phase of a step; exact attention past the last phase.

        Args:
            step: index of the UNet call in the schedule, from 0.
            steps: number of UNet calls of the whole schedule.
        """
        return next((phase for phase in self.phases if step < phase.until * steps - 1e-9), EXACT)

    def phase_until(self, end: float) -> Phase:
        """Return the phase of the stretch that ends at a fraction of the run, one of `stretches`."""
        return next((phase for phase in self.phases if phase.until >= end), EXACT)

    def at(self, step: int, steps: int) -> PatchConfig:
        """Return the configuration that does in every step what this one does in one."""

        def there(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
            phase = dataclasses.replace(self, phases=phases).phase_at(step, steps)
            return () if phase.exact else (dataclasses.replace(phase, until=1.0),)

        return self._with_phases(there, reuse=())

    def shares_difference(self, step: int, steps: int) -> bool:
        """Tell whether the step after one adds the difference that this one measures or has added."""
        phase = self.phase_at(step, steps)
        last_of_group = step % phase.residual_steps == phase.residual_steps - 1
        return not last_of_group and step + 1 < steps and self.phase_at(step + 1, steps) == phase

    @property
    def shares_guidance(self) -> bool:
        """Whether rows of the same latents share differences, wherever steps share any."""
        return any(phase.shares_guidance for phase in self.all_phases)

    def approximates(self, first: int, steps: int) -> bool:
        """Tell whether any step of a run is approximated."""
        own = (dataclasses.replace(self, phases=each.phases, per_layer=()) for each in self.per_layer)
        for config, step in itertools.product((self, *own), range(first, steps)):
            phase = config.phase_at(step, steps)
            added = step > first and config.shares_difference(step - 1, steps)
            if not phase.exact and (phase.residual_steps == 1 or added):
                return True
        return any(reused_steps(self.reuse, steps)[first:])


_SAVED = tuple(each.name for each in dataclasses.fields(PatchConfig) if each.name not in ("changes", "origin"))

Method = Literal["sd", "tome", "agent", "elfatt", "elfatt-fast", "elfatt-quality"]
"""The name of a preset, for type checkers; `sd` is the untouched model."""
METHODS: tuple[Method, ...] = get_args(Method)
"""The names of all presets. `docs/choose.md` compares them."""
AUTO = "auto"  # `FAST` where that pays, and otherwise nothing; see `patch.decided`
FAST: Method = "elfatt-fast"
DEFAULT = AUTO
UNTOUCHED: Method = "sd"
# Those with a colour of their own in plots, in the colours' order: pages that are there already keep theirs.
COLOURED = ("elfatt", "tome", "agent", "elfatt-fast", "tomesd", "elfatt-quality")
reserve(
    (AUTO, *METHODS, *COLOURED),
    [*RUN_SETTINGS, *(field.name for field in dataclasses.fields(Phase)), "active_fraction"],
)


def method_names() -> list[str]:
    """Return the names of all methods: presets, and attentions that others registered."""
    return [*METHODS, *(name for name, kind in attentions().items() if not is_own(kind))]


def known_method(name: object) -> Method:
    """Return the name of a method that came from outside, such as a command line, as one that type checkers know.

    Args:
        name: one of `METHODS`, the name of a registered attention, or `package.module:Class`.

    Returns:
        The name. That of a class given by its module is the class's `name`; the class is registered then.

    Raises:
        ElfattError: there is no such method; the message lists those that there are.
    """
    return _known(name)


def _known(name: object, *more: str) -> Method:
    if isinstance(name, str) and ":" in name:
        name = attention_named(name).name
    errors.choice("method", name, [*more[:1], *method_names(), *more[1:]])
    return cast(Method, name)


def method_named(name: object) -> PatchConfig:
    """Return the configuration of a method; a registered attention attends in the whole run."""
    if name == AUTO:
        return _AUTO
    if name not in method_names() and is_place(name):
        return PatchConfig.load(cast(str, name))
    known = _known(name, AUTO, "a file, folder or hub id of settings")
    return PRESETS[known] if known in PRESETS else PatchConfig(known, (Phase(1.0, attention_named(known)()),))


_TOME = Phase(1.0, "softmax", ratio=0.5, stride=2)

PRESETS: dict[Method, PatchConfig] = {
    "sd": PatchConfig("sd"),
    "tome": PatchConfig("tome", (_TOME,)),
    # Agent-SD as published: agents in steps 0-19 of 50, then ToMe.
    "agent": PatchConfig(
        "agent",
        (
            Phase(0.4, "agent", ratio=0.4, stride=4, agent_source="merged", agent_scale=0.3, value_shortcut=0.075),
            Phase(1.0, ratio=0.4),
        ),
    ),
    # ELFATT-SD: agents and blocks of 128 in the first 20 % of the steps (the paper's tabSDa1), then ToMe. On the toy
    # the block size is not shown to matter: docs/quality.md, `study_block_size`; 512 of its images: `study_presets`.
    "elfatt": PatchConfig("elfatt", (Phase(0.2, "elfatt", ratio=0.5), _TOME)),
    # Beyond the paper: exact early steps, without which some images become others (docs/quality.md, `study_steps`), and
    # stratified random samples of keys, without merging: of all ways to see 128 keys that keep nothing from step to
    # step the closest to untouched (`study_blocks`). What a shared difference gains and takes: `study_residual`.
    "elfatt-fast": PatchConfig("elfatt-fast", (Phase(0.2), Phase(1.0, "sampled", keys=128)), levels=2),
    # More keys, from the first step on; one step of four is exact, and its difference corrects the other three. No row
    # of its speed is closer to untouched: docs/quality.md, `study_residual`; 512 of its images: `study_presets`.
    "elfatt-quality": PatchConfig("elfatt-quality", (Phase(1.0, "sampled", keys=512, residual_steps=4),)),
}


def is_hub_id(name: object) -> bool:
    return bool(HUB_ID.fullmatch(str(name))) and not str(name).endswith(".json")


def is_place(name: object) -> bool:
    """Tell whether a method's name is that of a file, a folder, or a repository of the hub."""
    text = str(name)
    return isinstance(name, os.PathLike) or is_hub_id(text) or text.endswith(".json") or os.path.exists(text)


def _file_of(place: str | os.PathLike[str]) -> Path:
    """Return the file of settings in a place; from the hub it is loaded."""
    path, name = Path(place), Path(place).as_posix()
    if path.is_dir():
        return path / SETTINGS
    if path.exists() or not is_hub_id(name):
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.ERROR)  # each of its retries is a line
    try:
        return Path(hf_hub_download(name, SETTINGS))
    except Exception as error:
        failed, why = ElfattError, f"no settings ({SETTINGS}) of that name are on the hub"
        if is_unreachable(error):
            failed, why = ElfattFailure, "the hub cannot be reached"
        raise failed(f"settings {name!r} are not on this machine, and {why}: {shortened(error)}") from error
    finally:
        set_verbosity(level)


_AUTO = dataclasses.replace(PRESETS[FAST], method=AUTO)


def is_auto(config: PatchConfig) -> bool:
    return config.method == AUTO and config == _AUTO.with_settings(**config.changes)


# The same methods for transformers, where tokens have rotary positions and cannot be merged. The two beyond the paper
# have the closest attention of those that keep nothing from step to step (which takes gigabytes here), after exact
# early steps: docs/transformers.md.
_NEAR_AND_FAR = Phase(1.0, "cell_spread", cell=256, block_size=1024)
_TRANSFORMER_PRESETS: dict[Method, PatchConfig] = {
    "agent": PatchConfig("agent", (Phase(0.4, "agent", block_order="windows"),)),
    "elfatt": PatchConfig("elfatt", (Phase(0.2, "elfatt", block_order="windows"),)),
    "elfatt-fast": PatchConfig("elfatt-fast", (Phase(0.2), _NEAR_AND_FAR)),
    "elfatt-quality": PatchConfig("elfatt-quality", (Phase(0.4), _NEAR_AND_FAR)),
}


def for_transformers(config: PatchConfig) -> PatchConfig:
    """Return what a preset, with the settings that were changed, is on transformers; another configuration as it is."""
    name = cast(Method, config.method.partition(":")[0])  # without the settings that benchmarks put into it
    preset, plain = PRESETS.get(name), dataclasses.replace(config, method=name)
    if name not in _TRANSFORMER_PRESETS or preset is None or plain != preset.with_settings(**config.changes):
        return config
    return dataclasses.replace(_TRANSFORMER_PRESETS[name].with_settings(**config.changes), method=config.method)


def warn_without_effect(config: PatchConfig) -> None:
    """Warn of changes to a method that change nothing; loops over methods make them to `sd`, too."""
    base = PRESETS.get(cast(Method, config.method.partition(":")[0]))  # without what benchmarks put into it
    if not config.phases and config.method == UNTOUCHED:
        return
    said = [f"method {config.method!r} has no setting {name}" for name in config.without_effect(config.changes)]
    if not config.active and (base.active if base else not config.all_phases):
        changes = "".join(f"with {name}={value!r}, " for name, value in config.changes.items())
        said = [f"{changes}method {config.method!r} approximates nothing: the pipeline stays untouched"]
    for each in said:
        warnings.warn(f"elfatt-sd: {each}.", stacklevel=3)
