"""What is approximated when: phases of the denoising run, presets of the published methods, validation.

A configuration is data: frozen, comparable, and equal to itself after a round trip through JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

from elfatt_sd.errors import ElfattError as ElfattError
from elfatt_sd.errors import ElfattFailure as ElfattFailure
from elfatt_sd.files import write_json

# The accepted values, once for type checkers and editors, and once to check what comes at run time.
Method = Literal["sd", "tome", "agent", "elfatt", "elfatt-fast", "elfatt-quality"]
Attention = Literal["softmax", "agent", "block", "elfatt", "cell_spread", "sampled"]
BlockOrder = Literal["sequence", "raster", "windows", "curve", "strided", "spread"]
AgentSource = Literal["pooled", "merged"]
Split = Literal["auto", "heads", "channels"]
Downsample = Literal[1, 2, 4, 8]
Backend = Literal["auto", "native", "flash", "flash_hub", "_flash_3", "flex", "sage", "xformers"]
METHODS: tuple[Method, ...] = get_args(Method)
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
BLOCK_ORDERS: tuple[BlockOrder, ...] = get_args(BlockOrder)
AGENT_SOURCES: tuple[AgentSource, ...] = get_args(AgentSource)
SPLITS: tuple[Split, ...] = get_args(Split)
DOWNSAMPLES: tuple[Downsample, ...] = get_args(Downsample)
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class Settings(TypedDict, total=False):
    """Changes to a method by keyword, as `apply_patch` and `PatchConfig.preset` take them; no key is required.

    The fields of `Phase` but `until` and `attention` and of `PatchConfig` but `method` and `phases`, which say what
    each means, and `active_fraction`: the fraction of the run in which the method's own attention is active.
    """

    active_fraction: float
    ratio: float
    stride: int
    block_size: int
    block_order: BlockOrder
    second_order: BlockOrder | None
    groups: int
    lattice: bool
    redraw: bool
    residual_steps: int
    agents: int
    agent_source: AgentSource
    agent_ratio: float
    agent_scale: float
    value_shortcut: float
    agent_share: float
    split: Split
    levels: int
    max_downsample: Downsample | None
    seed: int
    use_rand: bool
    reuse_steps: int
    reuse_layers: bool
    attention_backend: Backend
    fp32_logits: bool


_UNMERGED = ("cell_spread", "sampled")  # attentions that see every token as it is
SETTINGS = frozenset(Settings.__annotations__)


def _choice(name: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ElfattError(f"{name}={value!r} is not known; accepted: {', '.join(accepted)}.")


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not valid:
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ElfattError(f"{name}={value!r} is not accepted; give a whole number {span}.")


def _real(name: str, value: object, low: float, high: float, *, open_high: bool = False) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value <= high or (open_high and value == high):  # type: ignore[operator]
        span = f"from {low:g} to less than {high:g}" if open_high else f"from {low:g} to {high:g}"
        raise ElfattError(f"{name}={value!r} is not accepted; give a number {span}.")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ElfattError(f"{name}={value!r} is not accepted; give True or False.")


@dataclass(frozen=True)
class Phase:
    """One stretch of the denoising run and the self-attention used in it.

    Attributes:
        until: share of the denoising steps at which the phase ends, in (0, 1].
        attention: `softmax` (exact), `agent`, `block`, `elfatt` (agents and blocks, half of the heads each),
            `cell_spread` (the own compact cell exactly, and a `spread` block that stands for all other cells; without
            merging), or `sampled` (every query sees a stratified random sample of the picture; without merging).
        ratio: share of the tokens that are merged before attention (ToMe); 0 merges nothing.
        stride: one destination token for each `stride x stride` cell of the grid.
        block_size: tokens in a block, to the nearest size that tiles the sequence; for `sampled` the keys that every
            query sees.
        block_order: which tokens share a block, or are pooled to an agent: `sequence` (as they come: after merging, by
            similarity), `raster`, `windows` (rectangles, as square as the size allows), `curve` (Hilbert curve),
            `strided` (every n-th token) or `spread` (stratified random sample of the picture, drawn from seed, step
            and layer).
        second_order: for `block`, another such order for the second half of the heads; None is the same for all heads.
        groups: for `sampled`, the number of groups of queries that have a sample of their own.
        lattice: whether a group's queries lie on a lattice of the picture, far from each other, so that what the groups
            get wrong averages out among neighbours; else in columns, where it can show as streaks.
        redraw: whether what is random in blocks and samples is drawn anew in every step, or once for a run.
        residual_steps: number of steps that share the difference between exact attention and the approximation. The
            first of them computes both, and its output is exact; the others add the difference to their approximation
            (residual sharing of DiTFastAttn, arXiv:2406.08552). What is random is drawn once for them. 1 adds nothing.
        agents: number of agent tokens when they are pooled.
        agent_source: `pooled` averages neighbouring queries (ELFATT); `merged` projects tokens that are merged at
            `agent_ratio` (Agent-SD).
        agent_ratio: share of tokens merged away to form the agents, for `agent_source="merged"`.
        agent_scale: the second softmax has scale `head_dim ** (-0.5 * agent_scale)`; 1 is the usual scale.
        value_shortcut: share of the values that is added to the output of agent attention.
        agent_share: share of the heads (or channels) that attend through agents in `elfatt`.
        split: `heads` gives each half its own heads (eq. lepe2sd), `channels` half of every head's channels
            (eq. lepe1sd), `auto` splits heads where their number allows it.
    """

    until: float = 1.0
    attention: Attention = "softmax"
    ratio: float = 0.0
    stride: int = 2
    block_size: int = 128
    block_order: BlockOrder = "sequence"
    second_order: BlockOrder | None = None
    groups: int = 2
    lattice: bool = True
    redraw: bool = True
    residual_steps: int = 1
    agents: int = 64
    agent_source: AgentSource = "pooled"
    agent_ratio: float = 0.95
    agent_scale: float = 1.0
    value_shortcut: float = 0.0
    agent_share: float = 0.5
    split: Split = "auto"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range; the message says what is accepted.
        """
        _real("until", self.until, 0.0, 1.0)
        if self.until == 0:
            raise ElfattError("until=0 is an empty phase; give a number greater than 0 and up to 1.")
        _choice("attention", self.attention, ATTENTIONS)
        _real("ratio", self.ratio, 0.0, 1.0, open_high=True)
        _whole("stride", self.stride, 2, 64)
        _whole("block_size", self.block_size, 1)
        _choice("block_order", self.block_order, BLOCK_ORDERS)
        if self.second_order is not None:
            _choice("second_order", self.second_order, BLOCK_ORDERS)
        _whole("groups", self.groups, 1)
        _flag("lattice", self.lattice)
        _flag("redraw", self.redraw)
        _whole("residual_steps", self.residual_steps, 1)
        _whole("agents", self.agents, 1)
        _choice("agent_source", self.agent_source, AGENT_SOURCES)
        _real("agent_ratio", self.agent_ratio, 0.0, 1.0, open_high=True)
        _real("agent_scale", self.agent_scale, 0.0, 2.0)
        _real("value_shortcut", self.value_shortcut, 0.0, 1.0)
        _real("agent_share", self.agent_share, 0.0, 1.0)
        _choice("split", self.split, SPLITS)
        if self.attention == "cell_spread" and (self.block_order != "spread" or self.ratio > 0):
            raise ElfattError(
                f"block_order={self.block_order!r} and ratio={self.ratio!r} are not accepted with "
                "attention='cell_spread'; give block_order='spread' and ratio=0."
            )
        if self.attention == "sampled" and self.ratio > 0:
            raise ElfattError(f"ratio={self.ratio!r} is not accepted with attention='sampled'; give ratio=0.")
        if self.attention == "block" and self.second_order is not None and self.ratio > 0:
            raise ElfattError(f"ratio={self.ratio!r} is not accepted with a second_order; give ratio=0.")

    @property
    def exact(self) -> bool:
        """Whether the untouched attention runs in this phase."""
        return self.attention == "softmax" and self.ratio == 0

    @property
    def uses_blocks(self) -> bool:
        """Whether any head attends inside blocks."""
        return self.attention in ("block", "cell_spread") or (self.attention == "elfatt" and self.agent_share < 1)

    @property
    def uses_agents(self) -> bool:
        """Whether any head attends through agents."""
        return self.attention == "agent" or (self.attention == "elfatt" and self.agent_share > 0)

    @property
    def uses_matching(self) -> bool:
        """Whether similar tokens are looked for: to merge them, or to form agents."""
        return self.ratio > 0 or (self.uses_agents and self.agent_source == "merged")

    @property
    def used_settings(self) -> frozenset[str]:
        """The fields that change what the phase does."""
        groups = {
            "ratio": self.attention not in _UNMERGED,
            "stride": self.uses_matching,
            "block_size": self.uses_blocks or self.attention == "sampled",
            "block_order": self.uses_order,
            "second_order": self.attention == "block",
            "groups lattice": self.attention == "sampled",
            "redraw": self.uses_blocks or self.attention == "sampled",
            "residual_steps": not self.exact,
            "agents": self.uses_agents and self.agent_source == "pooled",
            "agent_source agent_scale value_shortcut": self.uses_agents,
            "agent_ratio": self.uses_agents and self.agent_source == "merged",
            "agent_share split": self.attention == "elfatt",
        }
        return frozenset(name for names, used in groups.items() if used for name in names.split())

    @property
    def uses_order(self) -> bool:
        """Whether the order of the tokens matters: to blocks, and to agents that are pooled."""
        return self.uses_blocks or (self.uses_agents and self.agent_source == "pooled")


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
        reuse_steps: number of steps that share one token matching where they merge alike; 1 computes it anew in every
            step.
        reuse_layers: layers on the same grid share the matching of the first of them.
        attention_backend: `auto`, or the name of a backend of diffusers' attention dispatcher, which then serves the
            patched layers in exact phases too.
        fp32_logits: compute the attention logits of approximated layers in float32 (advised for SD 2.1).
    """

    method: str = "custom"
    phases: tuple[Phase, ...] = ()
    levels: int = 1
    max_downsample: Downsample | None = None
    seed: int = 0
    use_rand: bool = True
    reuse_steps: int = 1
    reuse_layers: bool = False
    attention_backend: Backend = "auto"
    fp32_logits: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range; the message says what is accepted.
        """
        if not isinstance(self.method, str) or not self.method:
            raise ElfattError(f"method={self.method!r} is not accepted; give a name.")
        if not isinstance(self.phases, tuple) or not all(isinstance(phase, Phase) for phase in self.phases):
            raise ElfattError(f"phases={self.phases!r} is not accepted; give a tuple of Phase.")
        ends = [phase.until for phase in self.phases]
        if any(later <= earlier for earlier, later in itertools.pairwise(ends)):
            raise ElfattError(f"phases end at {ends}; each must end later than the one before it.")
        if self.max_downsample is not None and (
            isinstance(self.max_downsample, bool) or self.max_downsample not in DOWNSAMPLES
        ):
            raise ElfattError(f"max_downsample={self.max_downsample!r} is not accepted; give 1, 2, 4, 8 or None.")
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("levels", self.levels, 1)
        _flag("use_rand", self.use_rand)
        _flag("reuse_layers", self.reuse_layers)
        _whole("reuse_steps", self.reuse_steps, 1)
        _choice("attention_backend", self.attention_backend, BACKENDS)
        _flag("fp32_logits", self.fp32_logits)
        if self.attention_backend not in ("auto", "native") and any(p.attention == "cell_spread" for p in self.phases):
            raise ElfattError(
                f"attention_backend={self.attention_backend!r} is not accepted with attention='cell_spread', which "
                "needs log-sum-exps that the dispatcher does not hand out; give 'auto' or 'native'."
            )

    @property
    def active(self) -> bool:
        """Whether a patch does anything: approximate in some phase, or choose the kernel of exact attention."""
        return any(not phase.exact for phase in self.phases) or self.attention_backend != "auto"

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
        return PRESETS[known_method(method)].with_settings(**settings)

    def with_settings(self, /, **settings: Unpack[Settings]) -> PatchConfig:
        """Return a copy with some settings changed.

        Args:
            **settings: see `Settings`; those of phases are applied to every phase that is not exact.

        Raises:
            ElfattError: unknown setting, or a value out of range.
        """
        unknown = sorted(settings.keys() - SETTINGS)
        if unknown:
            raise ElfattError(f"setting {unknown[0]!r} is not known; accepted: {', '.join(sorted(SETTINGS))}.")
        own: dict[str, Any] = {name: value for name, value in settings.items() if name in _RUN_SETTINGS}
        per_phase: dict[str, Any] = {name: value for name, value in settings.items() if name in _PHASE_SETTINGS}
        Phase(**per_phase)  # a setting that no phase of this method uses is still checked
        self._check_merging(per_phase.get("ratio", 0))
        phases = tuple(phase if phase.exact else dataclasses.replace(phase, **per_phase) for phase in self.phases)
        if "active_fraction" in settings:
            _real("active_fraction", settings["active_fraction"], 0.0, 1.0)
            phases = _with_active_fraction(phases, float(settings["active_fraction"]))
        return dataclasses.replace(self, phases=phases, **own)

    def without_effect(self, settings: Iterable[str]) -> list[str]:
        """Return those of some settings that change nothing in this configuration, which has them already."""
        approximating = [phase for phase in self.phases if not phase.exact]
        used = {name for phase in approximating for name in phase.used_settings} | _RUN_SETTINGS | {"active_fraction"}
        if not any(phase.uses_matching for phase in approximating):
            used -= {"use_rand", "reuse_steps", "reuse_layers"}
        if self.max_downsample is not None:
            used -= {"levels"}
        return [name for name in settings if name not in used or (not approximating and name != "attention_backend")]

    def _check_merging(self, ratio: float) -> None:
        """Check a ratio that a user gave, in the words of the method."""
        if ratio > 0 and any(phase.attention in _UNMERGED for phase in self.phases):
            merging = [name for name, config in PRESETS.items() if any(phase.ratio > 0 for phase in config.phases)]
            raise ElfattError(
                f"ratio={ratio!r} is not accepted with method {self.method!r}, which does not merge tokens; leave "
                f"ratio away, or take a method that merges: {', '.join(merging)}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        data = dataclasses.asdict(self)
        data["phases"] = list(data["phases"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PatchConfig:
        """Build a configuration from what `to_dict` gave.

        Raises:
            ElfattError: a key is unknown, or a value is out of range.
        """
        if not isinstance(data, Mapping):
            raise ElfattError(f"{type(data).__name__} is not a configuration; give an object as `to_dict` returns it.")
        _known_keys("configuration", data, cls)
        phases = data.get("phases", ())
        if not isinstance(phases, list | tuple) or not all(isinstance(phase, Mapping) for phase in phases):
            raise ElfattError(f"phases={phases!r} is not accepted; give a list of objects.")
        for phase in phases:
            _known_keys("phase", phase, Phase)
        return cls(**{**data, "phases": tuple(Phase(**phase) for phase in phases)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON; a file that is there is replaced, as a whole or not at all.

        Args:
            path: of the file; its folder is made.

        Raises:
            ElfattError: it cannot be written.
        """
        try:
            write_json(Path(path), self.to_dict())
        except (OSError, TypeError, ValueError) as error:
            raise _file_error(path, "cannot be written", error, "the name of a file in a writable folder") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PatchConfig:
        """Read a configuration that `save` wrote.

        Args:
            path: of the file.

        Raises:
            ElfattError: there is no such file, it is not JSON, or not a configuration.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8-sig"))  # editors on Windows put a BOM first
        except json.JSONDecodeError as error:
            raise _file_error(path, "is not JSON", error, _SAVED) from error
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise _file_error(path, "cannot be read", error, _SAVED) from error
        try:
            return cls.from_dict(data)
        except ElfattError as error:
            raise ElfattError(f"config={_shown(path)} is not accepted: {error}") from error

    def phase_at(self, step: int, steps: int) -> Phase:
        """Return the phase of a step; exact attention past the last phase.

        Args:
            step: index of the UNet call in the schedule, from 0.
            steps: number of UNet calls of the whole schedule.
        """
        for phase in self.phases:
            if step < phase.until * steps - 1e-9:
                return phase
        return EXACT

    def shares_difference(self, step: int, steps: int) -> bool:
        """Tell whether the step after one adds the difference that this one measures or has added.

        Args:
            step: as for `phase_at`; see `Phase.residual_steps`.
            steps: as for `phase_at`.
        """
        phase = self.phase_at(step, steps)
        last_of_group = step % phase.residual_steps == phase.residual_steps - 1
        return not last_of_group and step + 1 < steps and self.phase_at(step + 1, steps) == phase

    def approximates(self, first: int, steps: int) -> bool:
        """Tell whether any step of a run is approximated.

        Args:
            first: the step that the run begins with.
            steps: as for `phase_at`.
        """
        for step in range(first, steps):
            phase = self.phase_at(step, steps)
            added = step > first and self.shares_difference(step - 1, steps)
            if not phase.exact and (phase.residual_steps == 1 or added):
                return True
        return False

    @property
    def remedy(self) -> str:
        """Why a run may have too few steps for the method to approximate any, and what to give for it."""
        if self.phases[0].exact:
            return "its first steps are exact. Give active_fraction=1 to approximate all steps."
        if any(phase.residual_steps > 1 for phase in self.phases):
            return (
                "it measures in a step what it adds in the next ones. Give residual_steps=1 to approximate all steps."
            )
        return "it approximates earlier steps only. Give a phase that ends later."


EXACT = Phase()

_PHASE_SETTINGS = frozenset(field.name for field in dataclasses.fields(Phase)) - {"until", "attention"}
_RUN_SETTINGS = frozenset(field.name for field in dataclasses.fields(PatchConfig)) - {"method", "phases"}
_SAVED = "a file that `PatchConfig.save` or `elfatt-sd patch --save` wrote"


def known_method(name: object) -> Method:
    """Return the name of a method that came from outside, such as a command line, as one that type checkers know.

    Args:
        name: one of `METHODS`.

    Raises:
        ElfattError: it is not.
    """
    _choice("method", name, METHODS)
    return cast(Method, name)


def _shown(path: object) -> str:
    return repr(os.fspath(path) if isinstance(path, os.PathLike) else path)


def _file_error(path: object, what: str, error: Exception, accepted: str) -> ElfattError:
    """Return an error in one line that names the file, what is wrong with it, and what is accepted."""
    reason = getattr(error, "strerror", None) or str(error)
    return ElfattError(f"config={_shown(path)} {what} ({reason}); give {accepted}.")


def _known_keys(what: str, data: Mapping[str, Any], kind: type) -> None:
    accepted = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(data) - set(accepted), key=str)
    if unknown:
        raise ElfattError(f"{what} key {unknown[0]!r} is not known; accepted: {', '.join(accepted)}.")


def _with_active_fraction(phases: tuple[Phase, ...], fraction: float) -> tuple[Phase, ...]:
    """Move the border between the method's own phase and the rest of the run."""
    if not phases:
        return phases
    first, *rest = phases
    border = 1 - fraction if first.exact else fraction
    if border == 0:
        return tuple(rest)
    return (dataclasses.replace(first, until=border), *(phase for phase in rest if phase.until > border))


_TOME = Phase(1.0, "softmax", ratio=0.5, stride=2)

PRESETS: dict[Method, PatchConfig] = {
    "sd": PatchConfig("sd"),
    "tome": PatchConfig("tome", (_TOME,)),
    # Agent-SD as published: agents in steps 0-19 of 50, then ToMe.
    "agent": PatchConfig(
        "agent",
        (
            Phase(0.4, "agent", ratio=0.4, stride=4, agent_source="merged", agent_scale=0.3, value_shortcut=0.075),
            dataclasses.replace(_TOME, ratio=0.4),
        ),
    ),
    # The paper: ELFATT in the first 20 % of the steps, blocks of 128 (its table tabSDa1), then ToMe. On the toy
    # the block size is not shown to matter: docs/quality.md, `study_block_size`; 512 of its pictures: `study_presets`.
    "elfatt": PatchConfig("elfatt", (Phase(0.2, "elfatt", ratio=0.5), _TOME)),
    # Beyond the paper: exact early steps, then stratified random samples of keys, without merging. Of all ways to see
    # 128 keys that keep nothing from step to step the closest to untouched: docs/quality.md, `study_blocks`. 128 keys
    # on one level from the first step on, with a difference shared by 8 steps, are 3.4 dB closer at about its speed
    # (`study_residual`) and 1.19 times the memory: docs/performance.md. Without exact early steps some pictures become
    # others: `study_steps`. The second level costs 0.7 dB: `study_residual`. 512 of its pictures: `study_presets`.
    "elfatt-fast": PatchConfig("elfatt-fast", (Phase(0.2), Phase(1.0, "sampled", block_size=128)), levels=2),
    # More keys, from the first step on; one step of four is exact, and its difference corrects the other three. No row
    # of its speed is closer to untouched: docs/quality.md, `study_residual`; 512 of its pictures: `study_presets`.
    "elfatt-quality": PatchConfig("elfatt-quality", (Phase(1.0, "sampled", block_size=512, residual_steps=4),)),
}
