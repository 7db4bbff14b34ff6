"""What a patch will be, before anything is changed: which configuration, and which layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from elfatt_sd.config import UNTOUCHED, Method, PatchConfig, complaints, for_transformers
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import (
    SelfAttention,
    family_of,
    find_layers,
    levels_of,
    replaceable,
    select_layers,
    unwrap,
)
from elfatt_sd.methods import Attention, is_own
from elfatt_sd.methods.conformance import check
from elfatt_sd.phases import Phase, Settings
from elfatt_sd.runtime.call import Denoiser
from elfatt_sd.runtime.processor import PatchedLayer
from elfatt_sd.runtime.surroundings import refuse_context_parallel

Layers = tuple[list[SelfAttention], list[SelfAttention]]  # all of a denoiser, and those that a method patches


def resolve(method: Method | PatchConfig | Attention, settings: Settings) -> PatchConfig:
    """Return the configuration that a method and settings stand for."""
    if isinstance(method, Attention):
        method = PatchConfig(method.name, (Phase(1.0, method),))
    config = method if isinstance(method, PatchConfig) else PatchConfig.preset(method)
    config = config.with_settings(**settings)
    for phase in config.all_phases:
        if not is_own(type(phase.attention)):
            check(phase.attention)
    return config


def fitted(config: PatchConfig, denoisers: dict[str, nn.Module]) -> PatchConfig:
    """Return the configuration that a method is on a family of denoisers; presets have one for transformers."""
    main = next(iter(denoisers.values()))
    family = family_of(main)
    if not family.joint:
        return config
    config, name = for_transformers(config), type(unwrap(main)).__name__
    for phase in config.all_phases:
        if phase.matches and not family.merges:
            raise ElfattError(
                f"method {config.method!r} merges tokens, and those of {name} have rotary positions, which cannot be "
                "merged; give a method that does not merge, such as 'elfatt-fast'."
            )
        if family.text and phase.attention.matches:
            raise ElfattError(
                f"agent_source='merged' is not accepted for {name}, which joins image and text; give "
                "agent_source='pooled'."
            )
        if family.text and not phase.attention.joint:
            raise ElfattError(
                f"attention={phase.attention.name!r} does not attend to text (its `joint` is False), and {name} joins "
                "image and text; give another one."
            )
    if family.text and config.attention_backend not in ("auto", "triton"):
        raise ElfattError(
            f"attention_backend={config.attention_backend!r} is not accepted for {name}, whose parts of attention are "
            "joined by log-sum-exps; leave it out, and call set_attention_backend of the model for exact attention."
        )
    return config


def fits(config: PatchConfig, denoisers: dict[str, nn.Module]) -> bool:
    try:
        fitted(config, denoisers)
    except ElfattError:
        return False
    return True


def choose_layers(
    denoisers: dict[str, nn.Module], config: PatchConfig, take_over: Sequence[str] = ()
) -> dict[str, Layers]:
    """Return, for each denoiser, its self-attention layers and those of them that the method patches."""
    for denoiser in denoisers.values() if config.active else ():
        refuse_context_parallel(unwrap(denoiser))
    found = {name: find_layers(denoiser) for name, denoiser in denoisers.items()}
    main, title = next(iter(found)), family_of(next(iter(denoisers.values()))).title
    levels = levels_of(found[main])
    chosen = {name: select_layers(layers, config, levels) for name, layers in found.items()}
    if config.active and not found[main]:
        raise ElfattError(f"the {title} has no self-attention layer over the image; there is nothing to patch.")
    for own in config.per_layer:
        if not any(own.matches(layer.name) for layers in found.values() for layer in layers):
            names = ", ".join(layer.name for layer in found[main][:3])
            raise ElfattError(f"no self-attention layer matches layers={own.layers!r}; this {title} has {names}, ...")
    if config.active and not chosen[main]:
        raise ElfattError(
            f"no self-attention layer matches max_downsample={config.max_downsample}; this {title} has some at "
            f"{', '.join(map(str, levels))}. Give max_downsample=None to take the finest level of them."
        )
    return {
        name: (layers, [layer for layer in chosen[name] if replaceable(layer, layer.processor, take_over)])
        for name, layers in found.items()
    }


def class_names(take_over: Any) -> tuple[str, ...]:
    """Return the names of classes that `take_over` stands for: names, or the classes themselves."""
    given = take_over if isinstance(take_over, Iterable) and not isinstance(take_over, str | type) else [take_over]
    names = tuple(each.__name__ if isinstance(each, type) else each for each in given)
    if not all(isinstance(name, str) for name in names):
        raise ElfattError(f"take_over={take_over!r} is not accepted; give names of processors' classes.")
    return names


def tell_without_effect(config: PatchConfig) -> None:
    """Warn of changes to a method that change nothing; loops over methods make them to `sd`, too."""
    for message in complaints(config) if config.phases or config.method != UNTOUCHED else ():
        warnings.warn(f"elfatt-sd: {message}.", stacklevel=3)


def tell_left_alone(chosen: dict[str, Layers], config: PatchConfig, take_over: Sequence[str]) -> None:
    """Warn of layers whose processors do something else than plain attention."""
    levels = levels_of(next(iter(chosen.values()))[0])
    left = [
        layer
        for found, patched in chosen.values()
        for layer in select_layers(found, config, levels)
        if layer.obstacle and layer not in patched
    ]
    if left:
        names = sorted({layer.processor_name for layer in left if not layer.obstacle_to(layer.processor)})
        classes = ", ".join(names)
        advice = f" Give take_over=[...] with the class names ({classes}) to replace them in approximated steps."
        others = f" ({', '.join(take_over)} in take_over is another class.)" if names and take_over else ""
        warnings.warn(
            f"elfatt-sd: {len(left)} layers are left alone, the first is {left[0].name}: {left[0].obstacle}."
            f"{advice if names else ''}{others}",
            stacklevel=3,
        )


def patched_layers(shared: Denoiser, layers: Layers, taken_over: tuple[str, ...] = ()) -> list[PatchedLayer]:
    found, chosen = layers
    return [
        PatchedLayer(layer, index, layer.processor, shared, taken_over)
        for index, layer in enumerate(found)
        if layer in chosen
    ]
