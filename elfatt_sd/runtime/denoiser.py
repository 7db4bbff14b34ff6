"""A method installed in one denoiser: its hooks, its warnings, and the beginning of a call."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import in_optimized_module, refuse_tracing
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import (
    Given,
    family_of,
    find_denoisers,
    unwrap,
)
from elfatt_sd.families.joint import forget_read
from elfatt_sd.phases import EXACT
from elfatt_sd.runtime.autotune import Tuner
from elfatt_sd.runtime.call import Call, Denoiser, leaves, recomputed_part
from elfatt_sd.runtime.choosing import Layers, patched_layers
from elfatt_sd.runtime.processor import PatchedLayer
from elfatt_sd.runtime.schedule import ANYWHERE, BEYOND, Position, Run, Schedule, unknown_position
from elfatt_sd.runtime.surroundings import likely_cause, modules_around, refuse_context_parallel, skips_calls

_ITERATE = "Iterate over scheduler.timesteps in a function that holds the scheduler"


class Notices:
    """The warnings of one patched denoiser."""

    def __init__(
        self, config: PatchConfig, module: nn.Module, around: Sequence[nn.Module], layers: Sequence[PatchedLayer]
    ) -> None:
        self._config = config
        self._module = module
        self._around = around
        self._layers = layers
        self._told: set[str] = set()

    def tell(self, what: str, message: str) -> None:
        """Warn, once for each kind of message."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"elfatt-sd: {message}", stacklevel=2)

    def warn_if_displaced(self) -> None:
        """Say which layers have got another processor since."""
        others = {
            layer.layer.name: type(layer.layer.attention.processor).__name__
            for layer in self._layers
            if not layer.installed
        }
        if others:
            self.tell(
                "displaced",
                f"{len(others)} patched layers now have another attention processor "
                f"({', '.join(sorted(set(others.values())))}), the first is {next(iter(others))}; it is left there, "
                "and they are not accelerated. If your code set it, call apply_patch again afterwards; if the pipeline "
                "sets it in every call, as with perturbed-attention guidance, only the others can be accelerated.",
            )

    def warn_if_idle(self, position: Position, run: Run) -> None:
        """Say at the first call of a run that none of its steps will be approximated, or that it is on no schedule."""
        config = self._config
        if all(phase.exact for phase in config.all_phases):
            return
        if not position.scheduled:
            if any(phase.residual_steps > 1 for phase in config.all_phases):
                self.tell(
                    "no schedule",
                    f"{config.method} adds in one step what it measured in another, and these calls are on no "
                    f"schedule: they are exact. {_ITERATE}, or give residual_steps=1.",
                )
            elif position not in (ANYWHERE, BEYOND) and not torch.is_grad_enabled() and self._layers[0].layer.joint:
                self.tell(
                    "no schedule",
                    "these calls are on no schedule of a scheduler that the calling functions hold; the phase of each "
                    f"is that of its noise level, which is not its step where the schedule is shifted. {_ITERATE}.",
                )
            return
        if position.step == run.first and not config.approximates(position.step, position.steps):
            which = f"a run of {position.steps} step{'s' * (position.steps > 1)}"
            if position.step:
                which = f"this run, which begins with step {position.step + 1} of {position.steps}"
            self.tell(
                "idle",
                f"{config.method} approximates no step of {which}; give more steps, or settings that approximate in "
                "these, such as active_fraction=1 or residual_steps=1.",
            )

    def compare_with_plan(self, call: Call) -> None:
        """Say which layers of the first call that should approximate them did not do it."""
        expected = [state for state in call.states.values() if not state.phase.exact and state.patched.installed]
        grids = {str(state.grid) for state in expected if state.merges_nothing}
        if grids:
            self.tell(
                "nothing merged",
                f"no token of {', '.join(sorted(grids))} can be merged by {self._config.method}, whose attention is "
                "exact there; give a larger ratio, a smaller stride, or a larger image.",
            )
        wrong = {state.layer.name: state.outcome for state in expected if state.outcome not in ("done", "")}
        skipped = [state.layer.name for state in expected if not state.outcome]
        whole = call.last or not call.scheduled or len(skipped) == len(expected)
        if skipped and whole and not call.given.partial and not skips_calls(self._around):
            wrong |= dict.fromkeys(skipped, "its attention processor was never called")
        if wrong:
            name, why = next(iter(wrong.items()))
            self.tell(
                "not approximated",
                f"{len(wrong)} of {len(expected)} patched layers stay exact, the first is {name}: {why}. "
                f"{likely_cause(self._module, self._around)}",
            )


_OUTSIDE = (
    "elfatt-sd finds the step of a call in Python, before compiled code: give torch.compile(fullgraph=True) the model "
    "itself, and not a function that calls it"
)
PATCH = "elfatt_patch"  # attribute of a patched UNet or ControlNet
OWNER = "elfatt_owner"  # of a pipeline, whose models may be exchanged


class Owner:
    """What `apply_patch` was given, which may hold other models afterwards, and the modules that were patched for it.

    Copied or pickled, it begins with nothing: the copies of the modules come to it by themselves.
    """

    def __init__(self, target: Any = None) -> None:
        self.target = None if target is None else weakref.ref(target)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __deepcopy__(self, copied: dict[int, Any]) -> Owner:
        return Owner(copied.get(id(self.target and self.target())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Owner, ()

    def add(self, module: nn.Module) -> None:
        """Keep a module, weakly."""
        self._modules.add(module)

    @property
    def patches(self) -> list[Patch]:
        """The patches that are in place."""
        found = [vars(module).get(PATCH) for module in self._modules]
        return [patch for patch in found if patch is not None and patch.owner is self]

    def tell_of_others(self, caller: nn.Module | None = None) -> None:
        """Warn of models that came into the pipeline since, as far as they have no patch."""
        target, others = self.target and self.target(), {}
        if target is None or not self.patches:
            return
        with contextlib.suppress(ElfattError):  # there is none now, or one of no known family
            others = {name: unwrap(net) for name, net in find_denoisers(target).items()}
        if caller is not None and caller not in others.values():
            return
        for name, module in others.items():
            if not (module in self._modules or module in self._told or hasattr(module, PATCH)):
                self._told.add(module)
                warnings.warn(
                    f"elfatt-sd: the {name} of this {type(target).__name__} came into it after apply_patch, and has no "
                    "patch; call apply_patch again.",
                    stacklevel=3,
                )


class Patch:
    """A method installed in one UNet or ControlNet."""

    def __init__(
        self,
        config: PatchConfig,
        autotune: bool,
        taken_over: tuple[str, ...],
        schedule: Schedule,
        denoiser: nn.Module,
        layers: Layers,
        owner: Owner,
    ) -> None:
        self.config = config
        self.owner = owner
        self.autotune = autotune
        self.taken_over = taken_over
        self._schedule = schedule
        self._layers = layers
        self._module = unwrap(denoiser)
        self._family = family_of(self._module)
        self._tuner = Tuner(self._module) if autotune else None
        self._shared = Denoiser(config, None if self._tuner is None else self._tuner.pays)
        self._shared.layers = patched_layers(self._shared, layers, taken_over)
        self._handles: list[Any] = []
        self._around = modules_around(self._module, [layer.layer.name for layer in self._shared.layers])
        for layer in self._shared.layers:
            layer.parts += reversed(modules_around(self._module, [layer.layer.name])[:-1])
        self._notices = Notices(config, self._module, self._around, self._shared.layers)
        self._forward: _Forward | None = None
        self._direct: dict[int, dict[str, Any]] = {}  # by thread: what a call of `forward` was given, so far

    @property
    def layers(self) -> list[PatchedLayer]:
        """The patched layers."""
        return self._shared.layers

    @property
    def steps(self) -> int:
        """Calls of the denoiser in the run that goes on in this thread; 0 where none does."""
        return self._schedule.run.steps

    def renew(self) -> None:
        """Install its like after it was removed, unless somebody has patched the module meanwhile."""
        if not hasattr(self._module, PATCH):
            made = self.config, self.autotune, self.taken_over, self._schedule, self._module, self._layers, self.owner
            Patch(*made).install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.owner.add(self._module)

    def install(self) -> None:
        """Put it into the module."""
        for layer in self._shared.layers:
            layer.install()
            if layer.layer.norm is not None:
                self._handles.append(layer.layer.norm.register_forward_pre_hook(layer.keep_block_input))
            if layer.layer.transformer is not None:
                hook = layer.before_transformer
                self._handles.append(layer.layer.transformer.register_forward_pre_hook(hook, with_kwargs=True))
        for part in self._around[1:]:
            self._handles.append(part.register_forward_pre_hook(self._shared.before_part, with_kwargs=True))
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
        if not entrances:
            module.forward = self._forward = _Forward(self)
        stem: Any = dict(entrances).get("sample")
        if stem is not None:
            self._handles.append(stem.register_state_dict_pre_hook(self._before_copy))
        setattr(module, PATCH, self)
        self.owner.add(module)

    def remove(self) -> None:
        """Take it out of the module."""
        for handle in self._handles:
            handle.remove()
        for layer in self._shared.layers:
            layer.remove()
        if self._forward is not None:
            self._forward.put_back()
        delattr(self._module, PATCH)

    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator, no-untyped-call]
    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the UNet: find the step and tell the layers."""
        refuse_context_parallel(self._module)  # before the first step, which may well be exact
        self._direct.pop(threading.get_ident(), None)
        given = self._family.call(self._module, args, kwargs)
        self._begin(replace(given, differentiated=_differentiated(args, kwargs)), args, kwargs)
        if self._shared.call is not None:
            self._shared.call.module = module

    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator, no-untyped-call]
    def _after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the UNet, also after an exception."""
        call = self._shared.end()
        if call is not None and output is not None:
            self._notices.compare_with_plan(call)
            if call.last or not call.scheduled:
                forget_read()
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
                latent = Given.latent(given["sample"], given["timestep"])
                self._begin(replace(latent, differentiated=_differentiated(given)), given["sample"])
            if self._shared.call is not None:
                self._shared.call.entered = True
        elif call is None or call.entered:
            self._direct.setdefault(thread, {}).setdefault(what, args[0])  # a second one is of class labels

    def _before_copy(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Pre-hook of the state of the first convolution alone, which is asked for to build another model of it."""
        if not prefix:
            self._notices.tell(
                "copied",
                "the weights of a patched model are copied into another one, as AnimateDiffPipeline.from_pipe and "
                "ControlNetModel.from_unet do; the copy has no patch. Call apply_patch on the pipeline that it is in.",
            )

    def _begin(self, given: Given, *inputs: Any) -> None:
        """Find the step of a call and tell the layers; by its inputs, a checkpoint around the model finds it again."""
        sample, timestep = given.sample, given.timestep
        refuse_tracing(sample.device)
        compiled = self._is_compiled()
        if compiled and self._shared.threads and self._shared.call is None:
            raise ElfattError(
                "two threads call a compiled and patched model at once, and compiled code cannot tell them apart; let "
                "them call one after the other, give each a copy of the model, or leave it uncompiled."
            )
        call = self._shared.recall(*inputs) if recomputed_part() is not None else None
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
            raise unknown_position(len(self.config.stretches))
        if position == BEYOND:
            self._notices.tell(
                "other unit",
                "the timestep of this call is on no schedule and in a unit that is not known (a noise level?), so that "
                "its attention is exact; iterate over a tensor of all timesteps, such as scheduler.timesteps.",
            )
        if not given.grid.tokens:
            self._notices.tell(
                "no grid", "the image tokens of this call are not a grid of rows and columns; they stay exact."
            )
        run = self._schedule.run if position.scheduled else Run()
        self._notices.warn_if_displaced()
        self._notices.warn_if_idle(position, run)
        if not position.scheduled or position.step == run.first:
            self.owner.tell_of_others(self._module)
        if compiled:
            self._allow_recompiling()
        self._shared.begin(position, run, replace(given, compiled=compiled))
        call = self._shared.call
        if call is not None and given.differentiated:
            call.repeats = True
            self._shared.forget_expired()
            self._shared.remember(call, *inputs)

    @property
    def _needs_steps(self) -> bool:
        phases = self.config.all_phases
        keeps = self.config.reuse_steps > 1 or any(phase.residual_steps > 1 for phase in phases)
        return keeps or self.config.stretches != (1.0,)

    def _is_compiled(self) -> bool:
        return in_optimized_module() or any(module._compiled_call_impl is not None for module in self._around)

    def _allow_recompiling(self) -> None:
        """Let dynamo compile as often as there are phases and grids: its limit is one for all layers of a class."""
        from torch._dynamo import config as dynamo

        layers = {(layer.layer.downsample, layer.layer.attention.inner_dim) for layer in self._shared.layers}
        each = sum(1 if phase.residual_steps == 1 else 4 for phase in (*self.config.all_phases, EXACT))
        name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
        setattr(dynamo, name, max(getattr(dynamo, name), 8 + len(layers) * each))


class _Forward:
    """Stands in for the `forward` of a patched transformer, so that a call by name, without hooks, is patched."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        self._module: Any = patch._module
        self._replaced = vars(self._module).get("forward")  # a wrapper of somebody's; None for the class's own

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(type(self._module).forward, self._module) if self._replaced is None else self._replaced

    def _compute(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._replaced is None:
            return type(module).forward(module, *args, **kwargs)
        return self._replaced(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch = self._patch
        compiling = torch.compiler.is_compiling()
        if compiling and patch.layers and patch.layers[0].latest is None:  # compiled by name, without the hooks
            patch.layers[0].tell_of_bypass()
        if compiling or vars(self._module).get(PATCH) is not patch:
            return self._compute(self._module, args, kwargs)
        call = patch._shared.call
        if begins := call is None or call.entered:
            patch._before_call(self._module, args, kwargs)
            call = patch._shared.call
        assert call is not None
        call.entered, output = True, None
        try:
            output = self._compute(call.module, args, kwargs)
        finally:
            if begins:
                patch._after_call(self._module, args, output)
        return output

    def put_back(self) -> None:
        """Put back what it stands for, also where accelerate or diffusers has wrapped it since."""
        registry = getattr(self._module, "_diffusers_hook", None)
        for holder in (self._module, *getattr(registry, "_fn_refs", ())):
            for name, value in vars(holder).items():
                if value is self:
                    setattr(holder, name, self.__wrapped__)
        if self._replaced is None and vars(self._module).get("forward") == self.__wrapped__:
            del self._module.forward


def _differentiated(*inputs: Any) -> bool:
    return torch.is_grad_enabled() or any(getattr(each, "requires_grad", False) for each in leaves(inputs))
