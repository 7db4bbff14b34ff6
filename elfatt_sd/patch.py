"""Install a method in a pipeline and take it out again; the only file that changes a pipeline."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import torch

from elfatt_sd.attention.softmax import make_ready
from elfatt_sd.config import DEFAULT, FAST, UNTOUCHED, Method, PatchConfig, is_auto, method_named, warn_without_effect
from elfatt_sd.errors import ElfattError, flag, whole
from elfatt_sd.families import find_denoisers, levels_of, main_denoiser, select_layers, takes_steps, unwrap
from elfatt_sd.methods import Attention
from elfatt_sd.phases import Settings
from elfatt_sd.plans import WORTH, Plan, default_of, input_grid, make_plan
from elfatt_sd.runtime import warn
from elfatt_sd.runtime.autotune import measure_phases
from elfatt_sd.runtime.denoiser import OWNER, PATCH, Owner, Patch
from elfatt_sd.runtime.layer import Layers, choose_layers, device_of, fitted, resolve
from elfatt_sd.runtime.schedule import Schedule

Pipeline = TypeVar("Pipeline")
# Times as fast by multiply-adds, from which on `auto` patches. On a CPU UNets gained at least what is counted: 1.04 to
# 1.07 for 1.04 (SD 1.5 at 256x256), 1.26 for 1.14 (SDXL), 1.41 for 1.15 (SD 1.5 at 512x512). Flux at 1024x1024 gained
# 1.03 for 1.10. An H100 gave half: 1.04 at best for 1.15, 1.15 for 1.31. See docs/performance.md.
PAYS, PAYS_ON_A_GPU = WORTH, 1.3
OWN = (None, None, None)  # height, width and frames
TakeOver = Sequence[str | type]


def apply_patch(
    pipe: Pipeline,
    method: Method | str | os.PathLike[str] | PatchConfig | Attention = DEFAULT,
    *,
    autotune: bool = False,
    take_over: Sequence[str | type] = (),
    **settings: Unpack[Settings],
) -> Pipeline:
    """Make a pipeline use a method's self-attention. An earlier patch is replaced.

    Args:
        pipe: a diffusers pipeline with a UNet or a transformer of a known family, or such a module. Its ControlNets
            are patched too.
        method: the name of a preset or of a registered attention, a configuration, an attention for the whole run, or
            settings that `tune` found: their file, their folder, or their id on the hub.
            `auto` is `elfatt-fast` where that is expected to pay at the pipeline's own size and steps, and otherwise
            nothing; a line is printed that says which. For another size give `plan(pipe, height=...).config`.
        autotune: measure, at the first call of each size, which layers the method makes faster on this device, and
            leave the others alone. Layers that `torch.compile` serves cannot be timed: they are left alone too, with a
            warning.
        take_over: classes of attention processors, or their names, that are not plain attention (cross-frame, shared
            style, ...), whose layers are patched nevertheless; others are left alone, with a warning. Those that keep
            maps of attention for the pipeline, as Attend-and-Excite's do, cannot be.
        **settings: changes to it, such as `ratio=0.5` or `block_size=128`; see `Settings`.

    Returns:
        The same object.

    Raises:
        ElfattError: unknown method or setting, no UNet, no layer that the method could patch, or a processor in
            `take_over` that cannot be replaced.
    """
    flag("autotune", autotune)
    denoisers, names = find_denoisers(pipe), _class_names(take_over)
    config = fitted(decided(pipe, resolve(method, settings), take_over), denoisers)
    chosen = choose_layers(denoisers, config, names)
    warn_without_effect(config)
    make_ready(config.attention_backend)
    _remove(pipe)
    if config.active:
        main, owner = next(iter(denoisers.values())), Owner(pipe)
        if pipe is not unwrap(main):
            vars(pipe)[OWNER] = owner
        schedule = Schedule(owner)
        for name, denoiser in denoisers.items():
            Patch(config, chosen[name], denoiser, schedule, owner, autotune, names, not takes_steps(name)).install()
        _warn_of_others_processors(chosen, config)
        owner.origin = config.origin  # its runs say what differs
        if not autotune:
            warn_if_slower(make_plan(config, chosen, {}, input_grid(pipe)))
    return pipe


def warn_if_slower(planned: Plan) -> None:
    if planned.slower:
        warn("slower", 4, method=planned.config.method, slower=planned.slower)


def _class_names(take_over: Any) -> tuple[str, ...]:
    """Return the names of classes that `take_over` stands for: names, or the classes themselves."""
    given = [take_over] if isinstance(take_over, str | type) else take_over
    if not isinstance(given, Iterable) or not all(isinstance(each, str | type) for each in given):
        raise ElfattError(f"take_over={take_over!r} is not accepted; give names of classes, or classes.")
    return tuple(each.__name__ if isinstance(each, type) else each for each in given)


def _warn_of_others_processors(chosen: dict[str, Layers], config: PatchConfig) -> None:
    levels = levels_of(next(iter(chosen.values())).found)
    left = [
        layer
        for layers in chosen.values()
        for layer in select_layers(layers.found, config, levels)
        if layer.obstacle and layer not in layers.chosen
    ]
    if not left:
        return
    kinds = {type(layer.processor) for layer in left if not layer.obstacle_to(layer.processor)}
    names = ", ".join(sorted({kind.__name__ for kind in kinds}))
    advice = f" Give take_over=[...] with the class names ({names}) to replace them in approximated steps."
    warn("left alone", 4, count=len(left), first=left[0].name, why=left[0].obstacle, advice=advice if names else "")


def remove_patch(pipe: Pipeline) -> Pipeline:
    """Restore the original attention processors. A pipeline without a patch stays as it is.

    Models that the pipeline held when it was patched are restored as well, wherever they are now.

    Args:
        pipe: what `apply_patch` was given.

    Returns:
        The same object.

    Raises:
        ElfattError: there is no UNet.
    """
    if (owner := _owner(pipe)) is not None:
        owner.warn_of_others()
    _remove(pipe)
    return pipe


def _remove(pipe: Any) -> None:
    for patch in _all_patches(pipe):
        patch.remove()
    getattr(pipe, "__dict__", {}).pop(OWNER, None)


def _all_patches(pipe: Any) -> list[Patch]:
    """Return the patches of what a pipeline holds, and of what it held when it was patched."""
    owner = _owner(pipe)
    kept = [] if owner is None else owner.patches
    try:
        return list({id(patch): patch for patch in (*patches_of(pipe).values(), *kept)}.values())
    except ElfattError:
        if kept:  # its denoiser was taken out, or exchanged for one of no known family
            return kept
        raise


def _owner(pipe: Any) -> Owner | None:
    owner: Owner | None = getattr(pipe, "__dict__", {}).get(OWNER)
    if owner is not None:
        owner.target = weakref.ref(pipe)  # it may have been pickled
    return owner


@contextmanager
def patched(
    pipe: Any,
    method: Method | str | os.PathLike[str] | PatchConfig | Attention = DEFAULT,
    *,
    autotune: bool = False,
    take_over: Sequence[str | type] = (),
    **settings: Unpack[Settings],
) -> Iterator[Plan]:
    """Patch a pipeline for the length of a `with` block.

    Afterwards the pipeline is as it was before, with its earlier patch if it had one; also after an exception.

    Args:
        pipe: a diffusers pipeline, or its UNet or transformer.
        method: a preset, a registered attention, a configuration, or an attention; see `apply_patch`.
        autotune: leave alone the layers that measure slower with the method; see `apply_patch`.
        take_over: classes of processors to replace although they are not plain attention; see `apply_patch`.
        **settings: changes to the method, such as `ratio=0.5`; see `Settings`.

    Yields:
        The plan at the model's own image size; see `plan`. Also with `autotune` it says what is estimated.

    Raises:
        ElfattError: as `apply_patch`.
    """
    config = decided(pipe, resolve(method, settings), take_over)
    with restored(pipe):
        apply_patch(pipe, config, autotune=autotune, take_over=take_over)
        yield _plan(pipe, config, OWN, False, take_over)


@contextmanager
def restored(pipe: Any) -> Iterator[None]:
    """Patch again what was patched before, and nothing else, after a `with` block; also after an exception."""
    before, owner = _all_patches(pipe), _owner(pipe)
    try:
        yield
    finally:
        remove_patch(pipe)
        for patch in before:
            if not hasattr(patch.module, PATCH):  # else somebody has patched it meanwhile
                patch.install()
        if owner is not None:
            vars(pipe)[OWNER] = owner


def plan(
    pipe: Any,
    method: Method | str | os.PathLike[str] | PatchConfig | Attention = DEFAULT,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    autotune: bool = False,
    take_over: Sequence[str | type] = (),
    **settings: Unpack[Settings],
) -> Plan:
    """Tell what a patch would do, layer by layer and phase by phase, without changing anything.

    Args:
        pipe: a diffusers pipeline, or its UNet or transformer.
        method: a preset, a registered attention, a configuration, or an attention; see `apply_patch`.
        height: height of the image in pixels (of the latent, for a bare UNet); the model's own by default.
        width: width, in the same unit.
        frames: frames of a video; the model's own number by default.
        steps: of the run, of which a phase gets whole ones; by default it gets its fraction of them.
        autotune: measure on this device, for one image with guidance, which layers the method makes faster. Without
            it, the plan says which layers need more multiply-adds with the method.
        take_over: classes of processors to replace although they are not plain attention; see `apply_patch`.
        **settings: changes to the method, such as `ratio=0.5`; see `Settings`.

    Returns:
        The plan. `print` shows it; `to_dict()` returns plain data, with multiply-adds per call of the denoiser.

    Raises:
        ElfattError: as `apply_patch`, or a size that does not fit the model.
    """
    if steps is not None:
        whole("steps", steps, 1)
    planned = _plan(pipe, resolve(method, settings), (height, width, frames), autotune, take_over, steps)
    warn_without_effect(planned.config)
    return planned


def _plan(
    pipe: Any, config: PatchConfig, size: Any, autotune: bool, take_over: TakeOver, steps: int | None = None
) -> Plan:
    if is_auto(config):
        return _plan_auto(pipe, config, size, autotune, take_over, steps or default_of(pipe, "num_inference_steps"))
    denoisers = find_denoisers(pipe)
    config = fitted(config, denoisers)
    chosen = choose_layers(denoisers, config, _class_names(take_over))
    grid, decisions = input_grid(pipe, *size), {}
    for name, denoiser in denoisers.items() if autotune else ():
        for layer in Patch(config, chosen[name]).layers:
            decisions[name, layer.layer.name] = measure_phases(layer, denoiser, grid)
    return make_plan(config, chosen, decisions, grid, steps).counting(denoisers)


def _plan_auto(pipe: Any, config: PatchConfig, *others: Any) -> Plan:
    planned = _plan(pipe, method_named(FAST).with_settings(**config.changes), *others)
    speed, modules = round(planned.call.speed or 0, 2), unwrap(main_denoiser(pipe)).modules()  # as it is shown
    least = PAYS if device_of(modules, torch.device("cpu")).type in ("cpu", "meta") else PAYS_ON_A_GPU
    steps = f", {planned.steps} step{'s' * (planned.steps > 1)}" if planned.steps else ""
    said = f"{FAST}, {speed:.2f} times as fast by multiply-adds (latent {planned.grid}{steps})"
    if speed < least:
        said = f"untouched; {said} is below {least}"
        if not speed:
            said = "untouched, as the multiply-adds of a call cannot be counted; name a method"
        planned = _plan(pipe, method_named(UNTOUCHED).with_settings(**config.changes), *others)
        if planned.config.active:
            said = said.replace("untouched", f"untouched but for {', '.join(config.changes)}", 1)
    return replace(planned, auto=f"auto: {said}")


def decided(
    pipe: Any, config: PatchConfig, take_over: TakeOver = (), size: Any = OWN, steps: int | None = None
) -> PatchConfig:
    """Return what `auto` is for a pipeline, and say it; another configuration as it is."""
    if not is_auto(config):
        return config
    planned = _plan(pipe, config, size, False, take_over, steps)
    print(planned.auto, file=sys.stderr, flush=True)  # as a script's own output may be data
    return planned.config


def is_patched(pipe: Any) -> bool:
    """Tell whether a pipeline has a patch.

    Args:
        pipe: a diffusers pipeline, or its UNet or transformer.

    Raises:
        ElfattError: there is no UNet and no transformer of a known family.
    """
    if (owner := _owner(pipe)) is not None:
        owner.warn_of_others()
    return bool(patches_of(pipe))


def patches_of(pipe: Any) -> dict[str, Patch]:
    found = {name: getattr(unwrap(denoiser), PATCH, None) for name, denoiser in find_denoisers(pipe).items()}
    return {name: patch for name, patch in found.items() if patch is not None}
