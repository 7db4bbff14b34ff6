"""The named methods: the published ones, the package's own, and any registered attention by its name."""

from __future__ import annotations

from typing import Literal, cast, get_args

from elfatt_sd import checks
from elfatt_sd.config import PatchConfig
from elfatt_sd.methods import attention_named, attentions, is_own
from elfatt_sd.phases import Phase

Method = Literal["sd", "tome", "agent", "elfatt", "elfatt-fast", "elfatt-quality"]
"""The name of a preset, for type checkers; `sd` is the untouched model."""
METHODS: tuple[Method, ...] = get_args(Method)
"""The names of all presets. `docs/choose.md` compares them."""
DEFAULT: Method = "elfatt"
UNTOUCHED: Method = "sd"
# Those with a colour of their own in plots, in the colours' order: pages that are there already keep theirs.
COLOURED = ("elfatt", "tome", "agent", "elfatt-fast", "tomesd", "elfatt-quality")


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
    if isinstance(name, str) and ":" in name:
        name = attention_named(name).name
    checks.choice("method", name, method_names())
    return cast(Method, name)


def method_named(name: object) -> PatchConfig:
    """Return the configuration of a method; a registered attention attends in the whole run."""
    known = known_method(name)
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
    # Beyond the paper: exact early steps, then stratified random samples of keys, without merging. Of all ways to see
    # 128 keys that keep nothing from step to step the closest to untouched: docs/quality.md, `study_blocks`. 128 keys
    # on one level from the first step on, with a difference shared by 8 steps, are 3.4 dB closer at about its speed
    # (`study_residual`) and 1.19 times the memory: docs/performance.md. Without exact early steps some images become
    # others: `study_steps`. The second level costs 0.7 dB: `study_residual`. 512 of its images: `study_presets`.
    "elfatt-fast": PatchConfig("elfatt-fast", (Phase(0.2), Phase(1.0, "sampled", keys=128)), levels=2),
    # More keys, from the first step on; one step of four is exact, and its difference corrects the other three. No row
    # of its speed is closer to untouched: docs/quality.md, `study_residual`; 512 of its images: `study_presets`.
    "elfatt-quality": PatchConfig("elfatt-quality", (Phase(1.0, "sampled", keys=512, residual_steps=4),)),
}

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
    preset, plain = PRESETS.get(name), config.renamed(name)
    if name not in _TRANSFORMER_PRESETS or preset is None or plain != preset.with_settings(**config.changes):
        return config
    return _TRANSFORMER_PRESETS[name].with_settings(**config.changes).renamed(config.method)


def complaints(config: PatchConfig) -> list[str]:
    """Return what to say of changes to a method that has no such settings, or that they leave nothing to do."""
    base = PRESETS.get(cast(Method, config.method.partition(":")[0]))  # without what benchmarks put into it
    if not config.active and base is not None and base.active:
        changes = " and ".join(f"{name}={value!r}" for name, value in config.changes.items())
        return [f"with {changes}, method {config.method!r} approximates nothing"]
    return [f"method {config.method!r} has no setting {name}" for name in config.without_effect(config.changes)]
