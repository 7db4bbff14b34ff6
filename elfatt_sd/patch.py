"""Install a method in a pipeline and take it out again; the only file that changes a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from elfatt_sd.autotune import Tuner, measure_phases
from elfatt_sd.config import ElfattError, Method, PatchConfig, Settings
from elfatt_sd.layers import SelfAttention, find_denoisers, find_layers, levels_of, select_layers, unwrap
from elfatt_sd.planning import Plan, latent_grid, make_plan
from elfatt_sd.processor import STATE, Denoiser, ElfattProcessor, LayerState, warn_displaced
from elfatt_sd.schedule import Position, Schedule, SchedulerFinder, unknown_position

Pipeline = TypeVar("Pipeline")
_Layers = tuple[list[SelfAttention], list[SelfAttention]]  # all of a denoiser, and those that a method patches
_PATCH = "elfatt_patch"  # attribute of a patched UNet or ControlNet


def apply_patch(
    pipe: Pipeline, method: Method | PatchConfig = "elfatt", *, autotune: bool = False, **settings: Unpack[Settings]
) -> Pipeline:
    """Make a pipeline use a method's self-attention; a patch that is there already is replaced.

    Args:
        pipe: a diffusers pipeline with a UNet, or a bare UNet. Its ControlNets are patched too.
        method: the name of a preset, or a configuration.
        autotune: measure, at the first call of each size, which layers the method makes faster on this device, and
            leave the others alone; with them, and a warning, those that `torch.compile` serves, which cannot be timed.
        **settings: changes to it, such as `ratio=0.5` or `block_size=128`; see `Settings`.

    Returns:
        The same object.

    Raises:
        ElfattError: unknown method or setting, no UNet, or no layer that the method could patch.
    """
    config = resolve(method, settings)
    denoisers = find_denoisers(pipe)
    chosen = choose_layers(denoisers, config)
    remove_patch(pipe)
    if config.active:
        schedule = Schedule(SchedulerFinder(pipe))
        for name, denoiser in denoisers.items():
            _Patch(config, autotune, schedule, denoiser, chosen[name]).install()
    return pipe


def remove_patch(pipe: Pipeline) -> Pipeline:
    """Put back the processors that were there before; a pipeline without a patch stays as it is.

    Args:
        pipe: what `apply_patch` was given.

    Returns:
        The same object.

    Raises:
        ElfattError: there is no UNet.
    """
    for patch in _patches(pipe).values():
        patch.remove()
    return pipe


@contextmanager
def patched(
    pipe: Any, method: Method | PatchConfig = "elfatt", *, autotune: bool = False, **settings: Unpack[Settings]
) -> Iterator[Plan]:
    """Patch a pipeline for the length of a `with` block, and give its plan, at the model's own picture size.

    What was patched before is patched again afterwards, also after an exception.

    Args:
        pipe: as for `apply_patch`.
        method: as for `apply_patch`.
        autotune: as for `apply_patch`.
        **settings: as for `apply_patch`.
    """
    before = _patches(pipe)
    apply_patch(pipe, method, autotune=autotune, **settings)
    try:
        yield plan(pipe, method, autotune=autotune, **settings)
    finally:
        remove_patch(pipe)
        for patch in before.values():
            patch.renewed().install()


def plan(
    pipe: Any,
    method: Method | PatchConfig = "elfatt",
    *,
    height: int | None = None,
    width: int | None = None,
    autotune: bool = False,
    **settings: Unpack[Settings],
) -> Plan:
    """Tell what a patch would do, layer by layer and phase by phase, without changing anything.

    Args:
        pipe: as for `apply_patch`.
        method: as for `apply_patch`.
        height: of the picture in pixels (of the latent, for a bare UNet); the model's own by default.
        width: likewise.
        autotune: measure on this device, for one picture with guidance, which layers the method makes faster;
            without, the plan says which of them the multiply-adds make slower.
        **settings: as for `apply_patch`.

    Raises:
        ElfattError: as `apply_patch`, or a size that does not fit the model.
    """
    config = resolve(method, settings)
    denoisers = find_denoisers(pipe)
    chosen = choose_layers(denoisers, config)
    rows, columns = latent_grid(pipe, height, width)
    decisions = {}
    if autotune:
        for name, net in denoisers.items():
            shared = Denoiser(config)
            shared.layers = _states(shared, chosen[name])
            for state in shared.layers:
                decisions[name, state.layer.name] = measure_phases(state, net, rows, columns)
    return make_plan(config, chosen, decisions, rows, columns)


def is_patched(pipe: Any) -> bool:
    """Tell whether a pipeline, or a bare UNet, has a patch.

    Args:
        pipe: as for `apply_patch`.

    Raises:
        ElfattError: there is no UNet.
    """
    return bool(_patches(pipe))


def current_config(pipe: Any) -> PatchConfig | None:
    """Return the configuration that a pipeline is patched with, or None."""
    patch = _patches(pipe).get("unet")
    return None if patch is None else patch.config


def _patches(pipe: Any) -> dict[str, _Patch]:
    """Return the patches of a pipeline's UNet and ControlNets, as far as they have one."""
    found = {name: getattr(unwrap(denoiser), _PATCH, None) for name, denoiser in find_denoisers(pipe).items()}
    return {name: patch for name, patch in found.items() if patch is not None}


def resolve(method: Method | PatchConfig, settings: Settings) -> PatchConfig:
    """Return the configuration that a method and settings stand for.

    Raises:
        ElfattError: unknown method or setting, or a value out of range.
    """
    if isinstance(method, PatchConfig):
        return method.with_settings(**settings)
    return PatchConfig.preset(method, **settings)


def choose_layers(denoisers: dict[str, nn.Module], config: PatchConfig) -> dict[str, _Layers]:
    """Return, for each denoiser, its self-attention layers and those of them that the method patches.

    Raises:
        ElfattError: the UNet has none that the method could patch.
    """
    found = {name: find_layers(denoiser) for name, denoiser in denoisers.items()}
    levels = levels_of(found["unet"])
    chosen = {name: (layers, select_layers(layers, config, levels)) for name, layers in found.items()}
    if config.active and not found["unet"]:
        raise ElfattError("the UNet has no self-attention layer over the picture; there is nothing to patch.")
    if config.active and not chosen["unet"][1]:
        raise ElfattError(
            f"no self-attention layer matches max_downsample={config.max_downsample}; this UNet has some at "
            f"{', '.join(map(str, levels))}. Give max_downsample=None to take the finest level of them."
        )
    return chosen


def _states(shared: Denoiser, layers: _Layers) -> list[LayerState]:
    """Return fresh states of the chosen layers, each numbered among all layers."""
    found, chosen = layers
    states = []
    for index, layer in enumerate(found):
        if layer in chosen:
            patched: LayerState | None = getattr(layer.attention, STATE, None)
            original = layer.attention.processor if patched is None else patched.original
            states.append(LayerState(layer, index, original, shared))
    return states


class _Patch:
    """A method installed in one UNet or ControlNet."""

    def __init__(
        self, config: PatchConfig, autotune: bool, schedule: Schedule, denoiser: nn.Module, layers: _Layers
    ) -> None:
        self.config = config
        self.autotune = autotune
        self._schedule = schedule
        self._layers = layers
        self._outer = denoiser
        self._module = unwrap(denoiser)
        self._tuner = Tuner(denoiser) if autotune else None
        self._shared = Denoiser(config, None if self._tuner is None else self._tuner.pays)
        self._shared.layers = _states(self._shared, layers)
        self._handles: list[Any] = []
        self._warned = False

    def renewed(self) -> _Patch:
        """Return its like, to be installed after it was removed."""
        return _Patch(self.config, self.autotune, self._schedule, self._outer, self._layers)

    def install(self) -> None:
        processor: Any = ElfattProcessor()
        for state in self._shared.layers:
            setattr(state.layer.attention, STATE, state)
            state.layer.attention.set_processor(processor)
            if state.layer.norm is not None and any(phase.uses_matching for phase in self.config.phases):
                self._handles.append(state.layer.norm.register_forward_pre_hook(state.remember_block_input))
        self._handles.append(self._outer.register_forward_pre_hook(self._before_call, with_kwargs=True))
        setattr(self._module, _PATCH, self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for state in self._shared.layers:
            if isinstance(state.layer.attention.processor, ElfattProcessor):
                original: Any = state.original
                state.layer.attention.set_processor(original)
            delattr(state.layer.attention, STATE)
        delattr(self._module, _PATCH)

    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the UNet."""
        self._begin(args, kwargs, torch.compiler.is_compiling())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> None:
        """Find the step and tell the layers."""
        if self._tuner is not None:
            self._tuner.compiling = compiling
        sample = args[0] if args else kwargs["sample"]
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        position = self._schedule.locate(timestep)
        if position is None:
            keeps = self.config.reuse_steps > 1 or any(phase.residual_steps > 1 for phase in self.config.phases)
            if keeps or [phase.until for phase in self.config.phases] not in ([], [1.0]):
                raise unknown_position(len(self.config.phases))
            position = Position(0, 1)
        self._warn_if_displaced()
        self._shared.begin(position, self._schedule.runs, sample)

    def _warn_if_displaced(self) -> None:
        if self._warned:
            return
        others = {
            state.layer.name: type(state.layer.attention.processor).__name__
            for state in self._shared.layers
            if not isinstance(state.layer.attention.processor, ElfattProcessor)
        }
        if others:
            self._warned = True
            warn_displaced(list(others), ", ".join(sorted(set(others.values()))))
