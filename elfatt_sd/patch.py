"""Install a method in a pipeline and take it out again; the only file that changes a pipeline."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from elfatt_sd.attention import make_ready
from elfatt_sd.autotune import Tuner, measure_phases
from elfatt_sd.calls import Call, Denoiser, is_recomputing
from elfatt_sd.config import EXACT, ElfattError, PatchConfig, Phase, Settings
from elfatt_sd.devices import in_optimized_module, is_captured
from elfatt_sd.families import (
    Given,
    SelfAttention,
    family_of,
    find_denoisers,
    find_layers,
    levels_of,
    replaceable,
    select_layers,
    unwrap,
)
from elfatt_sd.methods import Attention, is_own
from elfatt_sd.methods.conformance import check
from elfatt_sd.planning import Plan, input_grid, make_plan
from elfatt_sd.presets import DEFAULT, Method, for_transformers
from elfatt_sd.processor import PatchedLayer
from elfatt_sd.schedule import ANYWHERE, BEYOND, Position, Run, Schedule, SchedulerFinder, unknown_position
from elfatt_sd.surroundings import likely_cause, modules_around, skips_calls

Pipeline = TypeVar("Pipeline")
_Layers = tuple[list[SelfAttention], list[SelfAttention]]  # all of a denoiser, and those that a method patches
_PATCH = "elfatt_patch"  # attribute of a patched UNet or ControlNet


def apply_patch(
    pipe: Pipeline,
    method: Method | PatchConfig | Attention = DEFAULT,
    *,
    autotune: bool = False,
    take_over: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Pipeline:
    """Make a pipeline use a method's self-attention; a patch that is there already is replaced.

    Args:
        pipe: a diffusers pipeline with a UNet or a transformer of a known family, or such a module. Its ControlNets
            are patched too.
        method: the name of a preset or of a registered attention, a configuration, or an attention for the whole run.
        autotune: measure, at the first call of each size, which layers the method makes faster on this device, and
            leave the others alone; with them, and a warning, those that `torch.compile` serves, which cannot be timed.
        take_over: names of classes of attention processors that are not plain attention (cross-frame, shared style,
            ...), whose layers are patched nevertheless; others are left alone, with a warning. Those that keep maps
            of attention for the pipeline, as Attend-and-Excite's do, cannot be.
        **settings: changes to it, such as `ratio=0.5` or `block_size=128`; see `Settings`.

    Returns:
        The same object.

    Raises:
        ElfattError: unknown method or setting, no UNet, no layer that the method could patch, or a processor in
            `take_over` that cannot be replaced.
    """
    denoisers = find_denoisers(pipe)
    config = fitted(resolve(method, settings), denoisers)
    chosen = choose_layers(denoisers, config, take_over)
    make_ready(config.attention_backend)
    remove_patch(pipe)
    if config.active:
        main = next(iter(denoisers.values()))
        schedule = Schedule(SchedulerFinder(pipe), family_of(main).takes_noise_levels(unwrap(main)))
        for name, denoiser in denoisers.items():
            _Patch(config, autotune, tuple(take_over), schedule, denoiser, chosen[name]).install()
        _tell_left_alone(chosen, config)
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
    pipe: Any,
    method: Method | PatchConfig | Attention = DEFAULT,
    *,
    autotune: bool = False,
    take_over: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Iterator[Plan]:
    """Patch a pipeline for the length of a `with` block, and give its plan, at the model's own picture size.

    What was patched before is patched again afterwards, also after an exception.

    Args:
        pipe: as for `apply_patch`.
        method: as for `apply_patch`.
        autotune: as for `apply_patch`.
        take_over: as for `apply_patch`.
        **settings: as for `apply_patch`.
    """
    before, config = _patches(pipe), resolve(method, settings)
    apply_patch(pipe, config, autotune=autotune, take_over=take_over)
    try:
        yield plan(pipe, config, autotune=autotune, take_over=take_over)
    finally:
        remove_patch(pipe)
        for patch in before.values():
            patch.renewed().install()


def plan(
    pipe: Any,
    method: Method | PatchConfig | Attention = DEFAULT,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    autotune: bool = False,
    take_over: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Plan:
    """Tell what a patch would do, layer by layer and phase by phase, without changing anything.

    Args:
        pipe: as for `apply_patch`.
        method: as for `apply_patch`.
        height: of the picture in pixels (of the latent, for a bare UNet); the model's own by default.
        width: likewise.
        frames: of a video; the model's own number by default.
        autotune: measure on this device, for one picture with guidance, which layers the method makes faster;
            without, the plan says which of them the multiply-adds make slower.
        take_over: as for `apply_patch`.
        **settings: as for `apply_patch`.

    Raises:
        ElfattError: as `apply_patch`, or a size that does not fit the model.
    """
    denoisers = find_denoisers(pipe)
    config = fitted(resolve(method, settings), denoisers)
    chosen = choose_layers(denoisers, config, take_over)
    size = input_grid(pipe, height, width, frames)
    decisions = {}
    if autotune:
        for name, net in denoisers.items():
            shared = Denoiser(config)
            shared.layers = _patched_layers(shared, chosen[name])
            for layer in shared.layers:
                decisions[name, layer.layer.name] = measure_phases(layer, net, size)
    return make_plan(config, chosen, decisions, size).counting(denoisers)


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
    return next((patch.config for patch in _patches(pipe).values()), None)


def _patches(pipe: Any) -> dict[str, _Patch]:
    """Return the patches of a pipeline's UNet and ControlNets, as far as they have one."""
    found = {name: getattr(unwrap(denoiser), _PATCH, None) for name, denoiser in find_denoisers(pipe).items()}
    return {name: patch for name, patch in found.items() if patch is not None}


def resolve(method: Method | PatchConfig | Attention, settings: Settings) -> PatchConfig:
    """Return the configuration that a method and settings stand for.

    Raises:
        ElfattError: unknown method or setting, a value out of range, or an attention of somebody else's that breaks
            the contract of `methods.Attention`.
    """
    if isinstance(method, Attention):
        method = PatchConfig(method.name, (Phase(1.0, method),))
    config = method if isinstance(method, PatchConfig) else PatchConfig.preset(method)
    config = config.with_settings(**settings)
    for name in config.without_effect(settings) if config.active else ():
        value = dict(settings)[name]
        warnings.warn(f"elfatt-sd: {name}={value!r} has no effect on method {config.method!r}.", stacklevel=3)
    for phase in config.phases:
        if not is_own(type(phase.attention)):
            check(phase.attention)
    return config


def fitted(config: PatchConfig, denoisers: dict[str, nn.Module]) -> PatchConfig:
    """Return the configuration that a method is on a family of denoisers; presets have one for transformers.

    Raises:
        ElfattError: the method merges tokens that have rotary positions, or does not attend to text.
    """
    main = next(iter(denoisers.values()))
    family = family_of(main)
    if not family.joint:
        return config
    config, name = for_transformers(config), type(unwrap(main)).__name__
    for phase in config.phases:
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
    if family.text and config.attention_backend != "auto":
        raise ElfattError(
            f"attention_backend={config.attention_backend!r} is not accepted for {name}, whose parts of attention are "
            "joined by log-sum-exps; leave it away, and call set_attention_backend of the model for exact attention."
        )
    return config


def choose_layers(
    denoisers: dict[str, nn.Module], config: PatchConfig, take_over: Sequence[str] = ()
) -> dict[str, _Layers]:
    """Return, for each denoiser, its self-attention layers and those of them that the method patches.

    Args:
        denoisers: by name.
        config: the method.
        take_over: as for `apply_patch`.

    Raises:
        ElfattError: the UNet has none that the method could patch.
    """
    found = {name: find_layers(denoiser) for name, denoiser in denoisers.items()}
    main, title = next(iter(found)), family_of(next(iter(denoisers.values()))).title
    levels = levels_of(found[main])
    chosen = {name: select_layers(layers, config, levels) for name, layers in found.items()}
    if config.active and not found[main]:
        raise ElfattError(f"the {title} has no self-attention layer over the image; there is nothing to patch.")
    if config.active and not chosen[main]:
        raise ElfattError(
            f"no self-attention layer matches max_downsample={config.max_downsample}; this {title} has some at "
            f"{', '.join(map(str, levels))}. Give max_downsample=None to take the finest level of them."
        )
    return {
        name: (layers, [layer for layer in chosen[name] if replaceable(layer, layer.processor, take_over)])
        for name, layers in found.items()
    }


def _tell_left_alone(chosen: dict[str, _Layers], config: PatchConfig) -> None:
    """Warn of layers whose processors do something else than plain attention."""
    levels = levels_of(next(iter(chosen.values()))[0])
    left = [
        layer
        for found, patched in chosen.values()
        for layer in select_layers(found, config, levels)
        if layer.obstacle and layer not in patched
    ]
    if left:
        names = ", ".join(sorted({layer.processor_name for layer in left}))
        warnings.warn(
            f"elfatt-sd: {len(left)} layers are left alone, the first is {left[0].name}: {left[0].obstacle}. Give "
            f"take_over=[...] with the class names ({names}) to replace them in approximated steps.",
            stacklevel=3,
        )


def _patched_layers(shared: Denoiser, layers: _Layers, taken_over: tuple[str, ...] = ()) -> list[PatchedLayer]:
    """Return the chosen layers, each numbered among all layers."""
    found, chosen = layers
    return [
        PatchedLayer(layer, index, layer.processor, shared, taken_over)
        for index, layer in enumerate(found)
        if layer in chosen
    ]


class _Patch:
    """A method installed in one UNet or ControlNet."""

    def __init__(
        self,
        config: PatchConfig,
        autotune: bool,
        taken_over: tuple[str, ...],
        schedule: Schedule,
        denoiser: nn.Module,
        layers: _Layers,
    ) -> None:
        self.config = config
        self.autotune = autotune
        self.taken_over = taken_over
        self._schedule = schedule
        self._layers = layers
        self._module = unwrap(denoiser)
        self._family = family_of(self._module)
        self._tuner = Tuner(self._module) if autotune else None
        self._shared = Denoiser(config, None if self._tuner is None else self._tuner.pays)
        self._shared.layers = _patched_layers(self._shared, layers, taken_over)
        self._handles: list[Any] = []
        self._told: set[str] = set()
        self._around = modules_around(self._module, [layer.layer.name for layer in self._shared.layers])
        for layer in self._shared.layers:
            layer.parts += reversed(modules_around(self._module, [layer.layer.name])[:-1])
        self._direct: dict[int, dict[str, Any]] = {}  # by thread: what a call of `forward` was given, so far

    def renewed(self) -> _Patch:
        """Return its like, to be installed after it was removed."""
        return _Patch(self.config, self.autotune, self.taken_over, self._schedule, self._module, self._layers)

    def install(self) -> None:
        """Put it into the module."""
        for layer in self._shared.layers:
            layer.install()
            if layer.layer.norm is not None:
                self._handles.append(layer.layer.norm.register_forward_pre_hook(layer.remember_block_input))
            if layer.layer.transformer is not None:
                hook = layer.before_transformer
                self._handles.append(layer.layer.transformer.register_forward_pre_hook(hook, with_kwargs=True))
        module: Any = self._module
        self._handles += [
            module.register_forward_pre_hook(self._before_call, with_kwargs=True),
            module.register_forward_hook(self._after_call, always_call=True),
        ]
        entrances = self._family.entrances(module)
        for what, entrance in entrances if len(entrances) > 1 else ():
            last = entrance is entrances[-1][1]
            hook = functools.partial(self._before_entrance, what, last)
            self._handles.append(entrance.register_forward_pre_hook(hook))
        stem: Any = dict(entrances).get("sample")
        if stem is not None:
            self._handles.append(stem.register_state_dict_pre_hook(self._before_copy))
        setattr(module, _PATCH, self)

    def remove(self) -> None:
        """Take it out of the module."""
        for handle in self._handles:
            handle.remove()
        for layer in self._shared.layers:
            layer.remove()
        delattr(self._module, _PATCH)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the UNet: find the step and tell the layers."""
        self._direct.pop(threading.get_ident(), None)
        self._begin(self._family.call(self._module, args, kwargs))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the UNet, also after an exception."""
        call = self._shared.end()
        if call is not None and output is not None:
            self._compare_with_plan(call)
            if self._is_compiled():
                call.memory.own(call)

    def _before_entrance(self, what: str, last: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of what is given sample and timestep: begin a call of `forward`, which has no hooks."""
        if torch.compiler.is_compiling():
            return
        thread, call = threading.get_ident(), self._shared.call
        if last:
            given = self._direct.pop(thread, {})
            if given:
                given.setdefault(what, args[0])
                self._begin(Given.latent(given["sample"], given["timestep"]))
            if self._shared.call is not None:
                self._shared.call.entered = True
        elif call is None or call.entered:
            self._direct.setdefault(thread, {}).setdefault(what, args[0])  # a second one is of class labels

    def _before_copy(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Pre-hook of the state of the first convolution alone, which is asked for to build another model of it."""
        if not prefix:
            self._tell(
                "copied",
                "the weights of a patched model are copied into another one, as AnimateDiffPipeline.from_pipe and "
                "ControlNetModel.from_unet do; the copy has no patch. Call apply_patch on the pipeline that it is in.",
            )

    def _begin(self, given: Given) -> None:
        """Find the step of a call and tell the layers."""
        sample, timestep = given.sample, given.timestep
        self._refuse_tracing(sample.device)
        compiled = self._is_compiled()
        if compiled and self._shared.threads and self._shared.call is None:
            raise ElfattError(
                "two threads call a compiled and patched model at once, and compiled code cannot tell them apart; let "
                "them call one after the other, give each a copy of the model, or leave it uncompiled."
            )
        call = self._shared.recall(sample) if torch.is_grad_enabled() and is_recomputing() else None
        if call is not None:  # a checkpoint around the whole model
            call.restart()
            self._shared.enter(call)
            return
        if self._tuner is not None:
            self._tuner.compiling = compiled
        position = self._schedule.locate(timestep, given.unit)
        if not self._needs_steps and not (position is not None and position.scheduled):
            position = ANYWHERE
        if position is None:
            raise unknown_position(len(self.config.phases))
        if position == BEYOND:
            self._tell(
                "other unit",
                "the timestep of this call is on no schedule and in a unit that is not known (a noise level?), so that "
                "its attention is exact; iterate over a tensor of all timesteps, such as scheduler.timesteps.",
            )
        if not given.grid.tokens:
            self._tell("no grid", "the image tokens of this call are no grid of rows and columns; they stay exact.")
        run = self._schedule.run if position.scheduled else Run()
        self._warn_if_displaced()
        self._warn_if_idle(position, run)
        if compiled:
            self._allow_recompiling()
        self._shared.begin(position, run, given)
        if torch.is_grad_enabled() and self._shared.call is not None:
            self._shared.remember(sample, self._shared.call)

    @property
    def _needs_steps(self) -> bool:
        """Whether it matters to the method which step of the run a call is."""
        phases = self.config.phases
        keeps = self.config.reuse_steps > 1 or any(phase.residual_steps > 1 for phase in phases)
        return keeps or [phase.until for phase in phases] not in ([], [1.0])

    def _is_compiled(self) -> bool:
        """Tell whether `torch.compile` serves the call that now begins, or a part of it."""
        return in_optimized_module() or any(module._compiled_call_impl is not None for module in self._around)

    def _allow_recompiling(self) -> None:
        """Let dynamo compile as often as there are phases and grids: its limit is one for all layers of a class."""
        from torch._dynamo import config as dynamo

        layers = {(layer.layer.downsample, layer.layer.attention.inner_dim) for layer in self._shared.layers}
        each = sum(1 if phase.residual_steps == 1 else 4 for phase in (*self.config.phases, EXACT))
        name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
        setattr(dynamo, name, max(getattr(dynamo, name), 8 + len(layers) * each))

    def _refuse_tracing(self, device: torch.device) -> None:
        """Refuse what would make a program of one call.

        Raises:
            ElfattError: the model is being traced, exported or captured in a CUDA graph.
        """
        if is_captured(device):
            raise ElfattError(
                "a CUDA graph of a patched model would replay one step's phase and random draws for ever; use "
                "torch.compile(mode='reduce-overhead'), or call elfatt_sd.remove_patch(pipe) first."
            )
        exporting = getattr(torch.compiler, "is_exporting", bool)
        if torch._C._is_tracing() or exporting():
            raise ElfattError(
                "a trace or an export of a patched model would hold one step's phase and random draws for ever; "
                "call elfatt_sd.remove_patch(pipe) first, or use torch.compile."
            )

    def _tell(self, what: str, message: str) -> None:
        """Warn, once for each kind of message."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"elfatt-sd: {message}", stacklevel=2)

    def _warn_if_displaced(self) -> None:
        others = {
            layer.layer.name: type(layer.layer.attention.processor).__name__
            for layer in self._shared.layers
            if not layer.installed
        }
        if others:
            self._tell(
                "displaced",
                f"{len(others)} patched layers now have another attention processor "
                f"({', '.join(sorted(set(others.values())))}), the first is {next(iter(others))}; it is left there, "
                "and they are not accelerated. If your code set it, call apply_patch again afterwards; if the pipeline "
                "sets it in every call, as with perturbed-attention guidance, only the others can be accelerated.",
            )

    def _warn_if_idle(self, position: Position, run: Run) -> None:
        """Say at the first call of a run that none of its steps will be approximated."""
        config = self.config
        if all(phase.exact for phase in config.phases):
            return
        if not position.scheduled:
            if any(phase.residual_steps > 1 for phase in config.phases):
                self._tell(
                    "no schedule",
                    f"{config.method} adds in one step what it measured in another, and these calls are on no "
                    "schedule: they are exact. Iterate over scheduler.timesteps, or give residual_steps=1.",
                )
            return
        if position.step == run.first and not config.approximates(position.step, position.steps):
            which = f"a run of {position.steps} step{'s' * (position.steps > 1)}"
            if position.step:
                which = f"this run, which begins with step {position.step + 1} of {position.steps}"
            self._tell(
                "idle",
                f"{config.method} approximates no step of {which}: {config.remedy(position.step, position.steps)}",
            )

    def _compare_with_plan(self, call: Call) -> None:
        """Say which layers of the first call that should approximate them did not do it."""
        expected = [state for state in call.states.values() if not state.phase.exact and state.patched.installed]
        wrong = {state.layer.name: state.outcome for state in expected if state.outcome not in ("done", "")}
        skipped = [state.layer.name for state in expected if not state.outcome]
        whole = call.last or not call.scheduled or len(skipped) == len(expected)
        if skipped and whole and not call.given.partial and not skips_calls(self._around):
            wrong |= dict.fromkeys(skipped, "its attention processor was never called")
        if wrong:
            name, why = next(iter(wrong.items()))
            self._tell(
                "not approximated",
                f"{len(wrong)} of {len(expected)} patched layers stay exact, the first is {name}: {why}. "
                f"{likely_cause(self._module, self._around)}",
            )
