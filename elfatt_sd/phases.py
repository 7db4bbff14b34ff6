"""Phases: which attention and which merging between two fractions of a run, and the settings they have."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

from elfatt_sd import errors
from elfatt_sd.attention.ordering import BlockOrder
from elfatt_sd.errors import ElfattError
from elfatt_sd.files import known_keys
from elfatt_sd.methods import Attention, AttentionName, Merge, attention_named, attentions
from elfatt_sd.methods.published import AgentSource, Split

Downsample = Literal[1, 2, 4, 8]
Backend = Literal[
    "auto",
    "native",
    "flash",
    "flash_hub",
    "_flash_3",
    "_flash_3_hub",
    "_native_cudnn",
    "sage",
    "sage_hub",
    "xformers",
    "triton",
]
Kept = Literal["device", "host", "fp8"]
Narrower = Literal["bfloat16", "float16"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class AttentionSettings(TypedDict, total=False):
    """Settings of merging and of the package's attentions, by keyword.

    `ratio` and `stride` are those of `Merge`. The classes in `elfatt_sd.methods` explain the others: `Blocks`,
    `Sampled`, `CellSpread`, `Agents` and `Elfatt`. An attention that has no such setting ignores it.
    """

    ratio: float
    stride: int
    keys: int
    block_size: int
    cell: int | None
    weighted: bool
    block_order: BlockOrder
    second_order: BlockOrder | None
    groups: int
    lattice: bool
    redraw: bool
    agents: int
    agent_source: AgentSource
    agent_ratio: float
    agent_scale: float
    value_shortcut: float
    agent_share: float
    split: Split


class Settings(AttentionSettings, total=False):
    """Changes to a method by keyword, as `apply_patch` and `PatchConfig.preset` take them; no key is required.

    `active_fraction` is how much of the run has the method's own attention: from its first step on or, if these are
    exact, up to the last. `residual_steps`, `residual_guidance` and `attention_dtype` are those of `Phase`,
    `PatchConfig` explains the others below. The keys of `AttentionSettings` are accepted: `ratio` and `stride` (see
    `Merge`), and the fields of `Blocks`, `Sampled`, `CellSpread`, `Agents`, `Elfatt` and attentions of your own.
    """

    active_fraction: float
    residual_steps: int
    residual_guidance: bool
    attention_dtype: Narrower | None
    levels: int
    max_downsample: Downsample | None
    seed: int
    use_rand: bool
    reuse_steps: int
    reuse_layers: bool
    attention_backend: Backend
    fp32_logits: bool
    residuals: Kept
    residual_limit: float | None
    reuse: tuple[StepReuse, ...]


_OWN = ("attention_dtype", "residual_guidance", "residual_steps")  # settings that are fields of a phase itself
MERGE_SETTINGS = frozenset(field.name for field in dataclasses.fields(Merge))
RUN_SETTINGS = Settings.__optional_keys__ - AttentionSettings.__optional_keys__ - {"active_fraction", *_OWN}


def phase_settings() -> list[str]:
    """Return the names of all settings of phases: of merging, and of every attention that is known."""
    of_attentions = [name for kind in attentions().values() for name in kind.settings()]
    return list(dict.fromkeys([*MERGE_SETTINGS, *_OWN, *of_attentions]))


def setting_names() -> list[str]:
    """Return the names of all settings that a method can be given."""
    return sorted({*phase_settings(), *RUN_SETTINGS, "active_fraction"})


def check_settings(settings: Mapping[str, Any]) -> None:
    unknown = sorted(settings.keys() - set(phase_settings()))
    if unknown:
        raise ElfattError(f"setting {unknown[0]!r} is not known; accepted: {', '.join(setting_names())}.")
    Merge(**_some(settings, MERGE_SETTINGS))
    if own := _some(settings, _OWN):
        Phase(**own)
    for name, value in settings.items():
        kind = next((kind for kind in attentions().values() if name in kind.settings()), None)
        if kind is not None:
            kind().with_settings({name: value})


def _some(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


@dataclass(frozen=True, init=False)
class Phase:
    """One stretch of the denoising run and the self-attention used in it.

    Attributes:
        until: fraction of the denoising steps at which the phase ends, in (0, 1].
        attention: which attention, with its settings.
        merge: what is merged before it.
        residual_steps: number of steps that share the difference between exact attention and the approximation. The
            first of them computes both, and its output is exact; the others add the difference to their approximation
            (residual sharing of DiTFastAttn, arXiv:2406.08552). What is random is drawn once for them. 1 adds nothing.
        residual_guidance: whether the rows of a batch that have the same latents, with the prompt and without, share
            that difference too. It is measured in the last of them alone, and the others are approximated in that step
            as well: less is computed there, and less is kept. So do calls of a step that are given the same latents, of
            which the first measures it.
        attention_dtype: dtype that queries, keys and values are rounded to before attention, `bfloat16` or `float16`;
            None leaves them as they are, and so do models in 16 bits. With `softmax` and no merging, that is all that
            the phase does, and steps share nothing.
    """

    until: float
    attention: Attention
    merge: Merge
    residual_steps: int
    residual_guidance: bool
    attention_dtype: Narrower | None = None

    def __init__(
        self,
        until: float = 1.0,
        attention: Attention | AttentionName = "softmax",
        *,
        merge: Merge | None = None,
        residual_steps: int = 1,
        residual_guidance: bool = False,
        attention_dtype: Narrower | None = None,
        **settings: Unpack[AttentionSettings],
    ) -> None:
        check_settings(settings)
        kind = attention if isinstance(attention, Attention) else attention_named(attention)()
        vars(self).update(
            until=until,
            attention=kind.with_settings(settings),
            merge=dataclasses.replace(merge or Merge(), **_some(settings, MERGE_SETTINGS)),
            residual_steps=residual_steps,
            residual_guidance=residual_guidance,
            attention_dtype=attention_dtype,
        )
        errors.fields(self)
        if until == 0:
            raise ElfattError("until=0 is an empty phase; give a number greater than 0 and up to 1.")
        if self.dense and not self.exact:
            vars(self).update(residual_steps=1)
        if self.attention.empty and residual_steps == 1:
            raise ElfattError(
                f"residual_steps=1 is not accepted with attention={self.attention.name!r}, which reuses the output of "
                "an earlier step; give the number of steps that share one output, such as residual_steps=2."
            )
        self.attention.accepts(self.merge)

    if not TYPE_CHECKING:  # a type checker that saw it would accept every name

        def __getattr__(self, name: str) -> Any:
            if name not in phase_settings():
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            holder = self.merge if name in MERGE_SETTINGS else self.attention
            return getattr(holder, type(holder).aliases.get(name, name) if holder is self.attention else name)

    @property
    def exact(self) -> bool:
        """Whether the untouched attention runs in this phase."""
        return self.dense and self.attention_dtype is None

    @property
    def dense(self) -> bool:
        """Whether every query sees every key."""
        return self.attention.exact and self.merge.ratio == 0

    @property
    def corrects(self) -> bool:
        """Whether an approximation is corrected by a difference that steps share."""
        return self.residual_steps > 1 and not self.exact and not self.attention.empty

    @property
    def shares_guidance(self) -> bool:
        """Whether rows, or calls, of the same latents share that difference."""
        return self.residual_guidance and self.corrects

    @property
    def matches(self) -> bool:
        """Whether similar tokens are looked for: to merge them, or to form agents."""
        return self.merge.ratio > 0 or self.attention.matches

    def with_settings(self, settings: Mapping[str, Any]) -> Phase:
        """Return a copy with settings changed; those that it does not have are ignored.

        Raises:
            ElfattError: a value is out of range.
        """
        own = {name: getattr(self, name) for name in _OWN}
        return Phase(self.until, self.attention, merge=self.merge, **{**own, **settings})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, flat: the settings of merging and attention are with the phase's own."""
        data: dict[str, Any] = {"until": self.until, "attention": self.attention.name}
        data |= dataclasses.asdict(self.merge) | {"residual_steps": self.residual_steps}
        data |= {"residual_guidance": True} if self.residual_guidance else {}  # files of earlier versions have none
        data |= {"attention_dtype": self.attention_dtype} if self.attention_dtype else {}
        return data | dataclasses.asdict(self.attention)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Phase:
        """Build a phase from what `to_dict` gave, also in earlier versions, where every phase had all settings.

        Raises:
            ElfattError: a key is unknown, or a value is out of range.
        """
        known_keys("phase.", data, ["until", "attention", *phase_settings()])
        if ":" in str(data.get("attention")):  # a file may not name code to import
            raise ElfattError(f"attention={data['attention']!r} is not accepted here; register it, and give its name.")
        return cls(**data)


EXACT = Phase()
DENSE: dict[Narrower | None, Phase] = {  # exact attention in the dtype of a phase
    None: EXACT,
    **{dtype: Phase(attention_dtype=dtype) for dtype in get_args(Narrower)},
}


@dataclass(frozen=True)
class LayerPhases:
    """Phases that some layers have in place of the configuration's own.

    Attributes:
        layers: the layers' path in their denoiser, as `elfatt-sd patch --json` lists it, or `name` of
            `plan(...).layers`. `*` stands for any text: `up_blocks.3.*`.
        phases: in order of `until`; none keeps the layers exact.
    """

    layers: str
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        check_stretches("phases", self.phases, Phase)

    def matches(self, layer: str) -> bool:
        """Tell whether a layer, given by its path, has these phases."""
        return fnmatch.fnmatchcase(layer, self.layers)


@dataclass(frozen=True)
class StepReuse:
    """A stretch of the run in which some steps take over from earlier ones what lies within a cut of the denoiser.

    What is taken over is extrapolated from the last steps that computed it: a polynomial in the number of the step.

    Attributes:
        until: fraction of the denoising steps at which the stretch ends; it begins where the one before it ends.
        cut: where the denoiser is cut: `shallow-N` of a UNet (the last N layers are run), `blocks-F-B` of a transformer
            (the first F and the last B blocks are run), or `output` (nothing is).
        every: one of so many steps computes everything.
        order: of the polynomial: 0 takes over what the last such step had, 1 goes on in a line, 2 in a parabola.
        first: steps at the beginning of the stretch that compute everything.
        last: likewise at its end.
    """

    until: float = 1.0
    cut: str = "output"
    every: int = dataclasses.field(default=2, metadata={"low": 2})
    order: int = dataclasses.field(default=1, metadata={"low": 0, "high": 2})
    first: int = dataclasses.field(default=4, metadata={"low": 0})
    last: int = dataclasses.field(default=3, metadata={"low": 0})

    def __post_init__(self) -> None:
        errors.fields(self)
        if not isinstance(self.cut, str) or not self.cut:
            raise ElfattError(f"cut={self.cut!r} is not accepted; give the name of a cut, such as 'shallow-1'.")


@functools.cache
def reused_steps(reuse: tuple[StepReuse, ...], steps: int) -> tuple[StepReuse | None, ...]:
    """Return for every step of a run what it takes over; None where it computes everything."""
    found, start, in_a_row = list[StepReuse | None](), 0, 0
    for each in reuse:
        end = math.ceil(each.until * steps - 1e-9)
        after = max(start + each.first, each.order + 1) if each.every <= end - start else end
        for step in range(start, end):
            takes = after <= step < end - each.last and in_a_row < each.every - 1
            in_a_row = in_a_row + 1 if takes else 0
            found.append(each if takes else None)
        start = max(start, end)
    return (*found, *[None] * (steps - len(found)))


def words_of_reuse(reuse: tuple[StepReuse, ...], steps: int) -> list[str]:
    """Say what steps take over: a map of a run of so many steps."""
    plan, lines = reused_steps(reuse, steps), list[str]()
    for cut in dict.fromkeys(each.cut for each in reuse):
        letters = "".join("." if each is None or each.cut != cut else str(each.order) for each in plan)
        said = f"of {steps} steps ('.' computes everything, a number is the order), some take over {cut}: {letters}"
        lines.append(said if letters.strip(".") else f"of {steps} steps none can take over {cut}; give more steps")
    return lines


def check_stretches(name: str, stretches: object, kind: type[Phase | StepReuse]) -> None:
    if not isinstance(stretches, tuple) or not all(isinstance(each, kind) for each in stretches):
        raise ElfattError(f"{name}={stretches!r} is not accepted; give a tuple of {kind.__name__}.")
    ends = [each.until for each in stretches]
    if any(later <= earlier for earlier, later in itertools.pairwise(ends)):
        raise ElfattError(f"{name} end at {ends}; each must end later than the one before it.")


def objects_of(name: str, value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise ElfattError(f"{name}={value!r} is not accepted; give a list of objects.")
    return list(value)


def reuse_of(value: Any) -> tuple[StepReuse, ...]:
    """Return stretches that are given as such, or as plain data."""
    if isinstance(value, list | tuple) and all(isinstance(each, StepReuse) for each in value):
        return tuple(value)
    given = objects_of("reuse", value)
    for each in given:
        known_keys("reuse.", each, [field.name for field in dataclasses.fields(StepReuse)])
    return tuple(StepReuse(**each) for each in given)


def phases_of(data: Mapping[str, Any]) -> tuple[Phase, ...]:
    return tuple(Phase.from_dict(phase) for phase in objects_of("phases", data.get("phases", ())))
