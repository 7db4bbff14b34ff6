"""Settings by keyword: their names, the values that they take, and how wrong ones are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, get_args

from elfatt_sd import checks
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import Merge, attentions
from elfatt_sd.methods.agents import AgentSource
from elfatt_sd.methods.elfatt import Split
from elfatt_sd.tiling import BlockOrder

# The accepted values, once for type checkers and editors, and once to check what comes at run time.
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
KEPT: tuple[Kept, ...] = get_args(Kept)
NARROWER: tuple[Narrower, ...] = get_args(Narrower)
DOWNSAMPLES: tuple[Downsample, ...] = get_args(Downsample)
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

    `active_fraction` is the fraction of the run, from its first step, in which the method's own attention is active.
    `residual_steps`, `residual_guidance` and `attention_dtype` are those of `Phase`. `PatchConfig` explains the others
    below. The keys of `AttentionSettings` are accepted too: `ratio` and `stride` (see `Merge`), and the fields of
    `Blocks`, `Sampled`, `CellSpread`, `Agents` and `Elfatt`. An attention of your own adds its fields.
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


_PHASE_SETTINGS = {"residual_steps", "residual_guidance", "attention_dtype"}
MERGE_SETTINGS = frozenset(field.name for field in dataclasses.fields(Merge))
RUN_SETTINGS = Settings.__optional_keys__ - AttentionSettings.__optional_keys__ - {"active_fraction", *_PHASE_SETTINGS}


def phase_settings() -> list[str]:
    """Return the names of all settings of phases: of merging, and of every attention that is known."""
    own = [name for kind in attentions().values() for name in kind.settings()]
    return list(dict.fromkeys([*MERGE_SETTINGS, *sorted(_PHASE_SETTINGS), *own]))


def of_merging(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some settings that are of merging."""
    return {name: value for name, value in settings.items() if name in MERGE_SETTINGS}


def setting_names() -> list[str]:
    """Return the names of all settings that a method can be given."""
    return sorted({*phase_settings(), *RUN_SETTINGS, "active_fraction"})


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings of phases, also those that a phase ignores."""
    unknown = sorted(settings.keys() - set(phase_settings()))
    if unknown:
        raise ElfattError(f"setting {unknown[0]!r} is not known; accepted: {', '.join(setting_names())}.")
    Merge(**of_merging(settings))
    check_phase_settings(**{name: value for name, value in settings.items() if name in _PHASE_SETTINGS})
    for name, value in settings.items():
        kind = next((kind for kind in attentions().values() if name in kind.settings()), None)
        if kind is not None:
            kind().with_settings({name: value})


def check_phase_settings(
    residual_steps: object = 1, residual_guidance: object = False, attention_dtype: object = None
) -> None:
    """Check a phase's own settings."""
    checks.whole("residual_steps", residual_steps, 1)
    checks.flag("residual_guidance", residual_guidance)
    if attention_dtype is not None:
        checks.choice("attention_dtype", attention_dtype, NARROWER)


def known_keys(what: str, data: Mapping[str, Any], accepted: Iterable[str]) -> None:
    """Check the keys of saved data."""
    unknown = sorted(set(data) - set(accepted), key=str)
    if unknown:
        raise ElfattError(f"{what} key {unknown[0]!r} is not known; accepted: {', '.join(accepted)}.")
