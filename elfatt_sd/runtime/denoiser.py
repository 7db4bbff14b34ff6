"""A method installed in one denoiser: its hooks, its layers, its calls by thread, and what a user is warned of."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import refuse_tracing
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import Given, family_of, find_denoisers, main_denoiser, unwrap
from elfatt_sd.families.cuts import OUTPUT, Cuts, Stand, Taking, put_back
from elfatt_sd.families.joint import READ, named
from elfatt_sd.families.shapes import fingerprint
from elfatt_sd.methods import Grid
from elfatt_sd.phases import EXACT, Phase, reused_steps
from elfatt_sd.runtime import origin_in_words, other_than, warn
from elfatt_sd.runtime.autotune import Tuner
from elfatt_sd.runtime.call import Call, LayerCall, Repeats
from elfatt_sd.runtime.joint_processor import joint_processor_for
from elfatt_sd.runtime.layer import (
    Layers,
    PatchedLayer,
    device_of,
    device_of_weights,
    modules_around,
    recomputed_part,
    refuse_context_parallel,
    skips_calls,
)
from elfatt_sd.runtime.memory import AT_ONCE, ByPlace, RunDraws, check_differences, kept_bytes
from elfatt_sd.runtime.processor import processor_for
from elfatt_sd.runtime.schedule import ANYWHERE, BEYOND, Position, Run, Schedule

PATCH = "elfatt_patch"  # attribute of a patched UNet, transformer or ControlNet
GRAPHS = "elfatt_graphs"  # of one whose calls are replayed as CUDA graphs, which stand outside of a patch
OWNER = "elfatt_owner"  # of a pipeline, whose models may be exchanged
KEPT_CALLS = 32  # of one step, that keep something for the next steps; it bounds the memory of calls without a schedule
_OUTSIDE = (
    "elfatt-sd finds the step of a call in Python, before compiled code: give torch.compile(fullgraph=True) the model "
    "itself, and not a function that calls it"
)


class Owner:
    """What `apply_patch` was given, which may hold other models afterwards, and the modules that were patched for it.

    It finds the scheduler, and keeps no pipeline alive. Copied, it follows the copy; pickled, it keeps the scheduler
    alone. The copies of the modules come to it by themselves.
    """

    def __init__(self, target: Any = None, scheduler: Any = None, known: tuple[Any, ...] = ({}, {})) -> None:
        self.target = None if target is None else weakref.ref(target)
        self._scheduler = scheduler
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.origin: Mapping[str, Any] = known[0]  # of settings
        self.here: dict[str, Any] = {**known[1]}  # what is known of its runs, under the names of an origin
        self._told = set[str]()  # what of it was said to differ

    def __call__(self) -> Any:
        return self._scheduler if self.target is None else getattr(self.target(), "scheduler", None)

    def __deepcopy__(self, copied: dict[int, Any]) -> Owner:
        target = self.target and self.target()
        if target is None:
            return Owner(None, copy.deepcopy(self._scheduler, copied), (self.origin, self.here))
        return Owner(copied.get(id(target), target), None, (self.origin, self.here))

    def __reduce__(self) -> tuple[Any, ...]:
        return Owner, (None, self(), (self.origin, self.here))

    @property
    def patches(self) -> list[Patch]:
        found = [vars(module).get(PATCH) for module in self.modules]
        return [patch for patch in found if patch is not None and patch.owner is self]

    def check_origin(self, grid: Grid, steps: int, run: Run) -> None:
        """Say what differs in a run from those that settings were tuned for, each thing once."""
        target, scheduler = self.target and self.target(), run.scheduler and run.scheduler()
        if "weights" not in self.here and target is not None:  # with LoRAs that came after the patch
            with contextlib.suppress(ElfattError):  # there is none any more
                self.here["weights"] = fingerprint(main_denoiser(target)) or None
        own = target if scheduler is not None and scheduler is self() else None  # the pipeline that runs
        steps = self.origin.get("steps", steps) if steps == self.origin.get("calls") else steps
        here = {**self.here, "input": str(grid) if grid.tokens else None}
        here |= {"scheduler": scheduler and type(scheduler).__name__, "first": run.first + 1}
        here |= {"steps": getattr(scheduler, "num_inference_steps", None) or steps}
        here.setdefault("guidance", getattr(own, "_guidance_scale", None))
        here = {name: value for name, value in here.items() if name not in self._told}
        self._told |= {name for name, value in here.items() if other_than(self.origin, **{name: value})}
        if words := other_than(self.origin, **here):
            warn("other origin", 4, origin=origin_in_words(self.origin), here=words)

    def warn_of_others(self, caller: nn.Module | None = None) -> None:
        target, others = self.target and self.target(), {}
        if target is None or not self.patches:
            return
        with contextlib.suppress(ElfattError):  # there is none now, or one of no known family
            others = {name: unwrap(net) for name, net in find_denoisers(target).items()}
        if caller is not None and caller not in others.values():
            return
        for name, module in others.items():
            if not (module in self.modules or module in self._warned or hasattr(module, PATCH)):
                self._warned.add(module)
                warn("other model", name=name, pipe=type(target).__name__)


class Patch:
    """A method installed in one UNet, transformer or ControlNet."""

    def __init__(
        self,
        config: PatchConfig,
        layers: Layers,
        denoiser: nn.Module | None = None,  # None where layers stand alone
        schedule: Schedule | None = None,
        owner: Owner | None = None,
        autotune: bool = False,
        take_over: tuple[str, ...] = (),
        whole: bool = False,  # whether what it takes over from earlier steps is its whole output
    ) -> None:
        self.config, self.owner, self.take_over = config, owner or Owner(), take_over
        self.schedule = schedule or Schedule(lambda: None)
        self.module: Any = None if denoiser is None else unwrap(denoiser)
        self._tuner = Tuner(unwrap(denoiser)) if autotune and denoiser is not None else None
        self.pays = None if self._tuner is None else self._tuner.pays  # whether a phase pays in a layer; None: it does
        numbered = enumerate(layers.found)
        self.layers = [PatchedLayer(layer, index, self) for index, layer in numbered if layer in layers.chosen]
        self.watched = False  # whether layers are approximated on the side, in exact phases too
        self.latest: Call | None = None  # of any thread
        self._calls: dict[int, Call] = {}  # that go on, by thread
        self.repeats = Repeats()
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self._forward: Forward | None = None
        self._around: list[nn.Module] = []
        self._cuts: Cuts | None = None
        self._undo: list[Callable[[], None]] = []  # of the cuts
        if self.module is not None:
            self._family = family_of(self.module)
            self._around = modules_around(self.module, [layer.layer.name for layer in self.layers])
            for layer in self.layers:
                layer.parts += reversed(modules_around(self.module, [layer.layer.name])[:-1])
            if config.reuse:
                reuse = tuple(replace(each, cut=OUTPUT) for each in config.reuse) if whole else config.reuse
                self._cuts = Cuts(reuse, self._family, self.module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": None, "_calls": {}, "repeats": Repeats()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.owner.modules.add(self.module)

    def warn(self, kind: str, **values: Any) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(kind, method=self.config.method, **values)

    def install(self) -> None:
        if (graphs := vars(self.module).get(GRAPHS)) is not None:
            graphs.remove()
        for layer in self.layers:
            layer.install()
            if layer.layer.norm is not None:
                self._handles.append(layer.layer.norm.register_forward_pre_hook(layer.keep_block_input))
        for part in self._around[1:]:
            self._handles.append(part.register_forward_pre_hook(self._before_part, with_kwargs=True))
        module = self.module
        for name, parts in self._cuts.parts.items() if self._cuts is not None else ():
            self._undo += [Stand(part, functools.partial(self._taking, name)).remove for part in parts]
        self._handles += [
            module.register_forward_pre_hook(self.before_call, with_kwargs=True),
            module.register_forward_hook(self.after_call, always_call=True),
        ]
        module.forward = self._forward = Forward(self, module)
        if (stem := getattr(module, "conv_in", None)) is not None:
            self._handles.append(stem.register_state_dict_pre_hook(self._before_copy))
        setattr(module, PATCH, self)
        self.owner.modules.add(module)
        if graphs is not None:
            graphs.install()

    def remove(self) -> None:
        if (graphs := vars(self.module).get(GRAPHS)) is not None:
            graphs.remove()
        while self._handles:
            self._handles.pop().remove()
        for layer in self.layers:
            layer.remove()
        if self._forward is not None:
            put_back(self.module, self._forward, self._forward.__wrapped__, self._forward.replaced)
        while self._undo:
            self._undo.pop()()
        delattr(self.module, PATCH)
        if graphs is not None:
            graphs.install()

    @staticmethod
    def processor_of(layer: PatchedLayer) -> Any:
        return joint_processor_for(layer.original) if layer.layer.joint else processor_for(layer.accepted)()

    @property
    def call(self) -> Call | None:
        return self._calls.get(threading.get_ident())

    def _taking(self, cut: str) -> Taking | None:
        """Return what the call that goes on takes over, or keeps, of a cut."""
        call = self.latest if torch.compiler.is_compiling() else self.call
        return None if call is None else call.takings.get(cut)

    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator, no-untyped-call]
    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the denoiser: find the step and prepare the layers."""
        refuse_context_parallel(self.module)  # before the first step, which may well be exact
        given = self._family.call(self.module, args, kwargs)
        learning = torch.is_grad_enabled() or any(
            getattr(each, "requires_grad", False) for each in tree_leaves([args, kwargs])
        )
        scale = named(self.module, args, kwargs).get("conditioning_scale", 1.0)  # 0 outside of a ControlNet's steps
        whole = given.whole or not (any(scale) if isinstance(scale, list) else scale)
        self._find_step(replace(given, differentiated=learning, whole=whole), args, kwargs)
        if self.call is not None:
            self.call.module = module

    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator, no-untyped-call]
    def after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the denoiser, also after an exception."""
        call = self.end()
        if call is not None and output is not None:
            self._warn_of_exact_layers(call)
            if self._cuts is not None:
                self._keep(call, self._cuts.orders)
            if call.last or not call.scheduled:
                READ.clear()  # a CUDA graph that is replayed writes ids unseen
            if self._is_compiled():
                if call.last:  # what decodes the latents needs the memory
                    call.memory.buffers.clear()
                call.memory.own([call.matchings, *(state.residuals for state in call.states.values())])

    def _keep(self, call: Call, orders: dict[str, int]) -> None:
        """Keep what a call that computed everything leaves; of compiled code a copy, as that writes over it."""
        memory, place = call.memory, call.place
        kept = {name: taking.kept for name, taking in call.takings.items() if taking.taken is None and taking.kept}
        history = memory.history.setdefault(place, {})
        if kept and not history:
            needed = sum((orders[name] + 1) * value.nbytes for name, own in kept.items() for value in own.values())
            memory.needs[place] += needed
            check_differences(self.schedule.run, self.config, call.given.sample.device)
        for name, own in kept.items():
            values = {key: value.clone() for key, value in own.items()} if call.given.compiled else own
            history.setdefault(name, deque(maxlen=orders[name] + 1)).append((call.step, values))
        if call.last:  # what decodes the latents needs the memory
            history.clear()  # the other calls of the step may still take over
            call.takings.clear()

    def _before_copy(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Pre-hook of the state of the first convolution alone, which is asked for to build another model of it."""
        if not prefix:
            self.warn("copied")

    def _before_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the modules around the layers: a checkpoint hands a part what the call handed it."""
        if torch.compiler.is_compiling():
            return
        call = self.call or self.repeats.call(args, kwargs)
        if call is not None and call.repeats:
            self.repeats.remember(call, args, kwargs)  # also of a part within a part that is computed once more

    def _find_step(self, given: Given, *inputs: Any) -> None:
        """Find the step of a call and begin it; by its inputs, a checkpoint around the model finds it again."""
        refuse_tracing(given.sample.device)
        compiled = self._is_compiled()
        if compiled and self._calls and self.call is None:
            raise ElfattError(
                "two threads call a compiled and patched model at once, and compiled code cannot tell them apart; let "
                "them call one after the other, give each a copy of the model, or leave it uncompiled."
            )
        call = self.repeats.recall(*inputs) if recomputed_part() is not None else None
        if call is not None:  # a checkpoint around the whole model
            call.restart()
            self.enter(call)
            return
        if self._tuner is not None:
            self._tuner.compiling = compiled
        position, phases = self.schedule.locate(given.timestep, given.unit), self.config.all_phases
        if position is None or not position.scheduled:
            keeps = self.config.reuse_steps > 1 or any(phase.residual_steps > 1 for phase in phases)
            if not keeps and self.config.stretches == (1.0,):
                position = ANYWHERE
        if position is None:
            raise ElfattError(
                "the denoising step of this call is not known, on which depends what the patch does; iterate over "
                "scheduler.timesteps, or give the timestep as a whole number that is the same for the whole batch."
            )
        if position == BEYOND:
            self.warn("other unit")
        if not given.grid.tokens:
            self.warn("no grid")
        run = self.schedule.run if position.scheduled else Run()
        self._warn_of_idle_run(position, run)
        if not position.scheduled or position.step == run.first:
            self.owner.warn_of_others(self.module)
            if self.owner.origin and position.scheduled:
                self.owner.check_origin(given.grid, position.steps, run)
        if compiled:
            self._allow_recompiling()
        self.begin(position, run, replace(given, compiled=compiled))
        call = self.call
        if call is not None and given.differentiated:
            call.repeats = True
            self.repeats.forget_expired()
            self.repeats.remember(call, *inputs)

    def begin(self, position: Position, run: Run, given: Given) -> None:
        """Prepare the layers for a call: phase, grids, and what is drawn at random.

        A step may take several calls: with the prompt and without, or one for each view of a panorama. What a call
        keeps is for the calls of later steps that have the same place among those of their step, and the same shape.
        """
        config, step, sample = self.config, position.step, given.sample
        phases = self._phases(step, position.steps)
        call = Call(config, step, phases)
        shape = tuple(map(int, sample.shape))
        call.memory = memory = run.kept.setdefault(self, call.memory)
        place = memory.place(step, shape)
        call.place = place
        call.copies, first = memory.same_latents(place, sample) if config.shares_guidance else (1, place)
        call.scheduled = position.scheduled
        kept = position.scheduled and place[0] < KEPT_CALLS
        call.matchings = memory.matchings.take(step // config.reuse_steps, place, kept and config.reuse_steps > 1)
        call.last = 1 < position.steps == step + 1
        if memory.whole is not given.whole and self._cuts is not None:  # a ControlNet begins, or ends
            for known in (each for other in run.kept.values() for each in other.history.values()):
                for values in known.values():
                    values.clear()
        memory.whole = given.whole
        call.given = replace(given, timestep=None)  # a view of the schedule, which would keep its run
        skipped: set[nn.Module] = set()
        if self._cuts is not None and kept and not (given.differentiated or given.partial or given.whole):
            call.takings = self._cuts.takings(step, position.steps, memory.history.setdefault(place, {}))
            for name, taking in call.takings.items():
                skipped |= self._cuts.skipped(name) if taking.taken is not None else set()
        draws = self._run_draws(call, position, run)
        if draws is not None:
            draws.fill(step)
        for layer in self.layers:
            state = call.states[layer.index] = LayerCall(layer, call)
            if layer.layer.attention in skipped:
                state.outcome = "done"
                continue
            if draws is not None and layer.index in draws.prepared:
                state.grid, state.phase, state.split, state.prepared = draws.prepared[layer.index]
            else:
                self._begin_layer(state, draws)
            phase = phases[layer.index]
            if phase.residual_steps > 1 or layer.index in memory.residuals:  # what an earlier phase kept is let go
                state.shares = kept and layer.config.shares_difference(step, position.steps)
                group = step // phase.residual_steps, phase
                where = first if phase.shares_guidance else place
                differences = memory.residuals.setdefault(layer.index, ByPlace())
                state.residuals = differences.take(group, where, kept and phase.residual_steps > 1)
                state.buffer = state.buffer_at(place) if given.compiled and state.shares else None
        for other in run.kept.values():
            other.let_go(step)
        if kept and place not in memory.needs:
            memory.needs[place] = self._needed(call, position, 0 if first != place else given.rows // call.copies)
            check_differences(run, config, sample.device)
        self.enter(call)

    def _phases(self, step: int, steps: int) -> dict[int, Phase]:
        return {layer.index: layer.config.phase_at(step, steps) for layer in self.layers}

    def _begin_layer(self, state: LayerCall, draws: RunDraws | None) -> None:
        layer, call = state.patched, state.call
        given = call.given
        state.grid = layer.layer.grid(given.grid)
        own = call.phases[layer.index] if state.grid.tokens else EXACT
        if self.pays is not None and not own.exact and not self.pays(state, own, given.sample):
            own = EXACT
        device = device_of(layer.parts, given.sample.device) if draws is None else draws.device_of(layer.index)
        holds = state.begin(own, call.step, device, draws)
        if holds and draws is not None and draws.allocated and self.pays is None:
            draws.prepared[layer.index] = state.grid, state.phase, state.split, state.prepared

    def _run_draws(self, call: Call, position: Position, run: Run) -> RunDraws | None:
        """Return what the layers draw in the steps of the phase that goes on; None where each step draws for itself."""
        given, known = call.given, call.memory.draws
        if not (position.scheduled and self.layers) or run.schedule is None or torch.is_grad_enabled():
            return None
        where = device_of_weights(self.layers[0].parts, given.sample.device)
        key = (tuple(map(id, call.phases.values())), given.grid, given.sample.device, where)
        if key not in known:
            of_phase = {other: kept for other, kept in known.items() if other[0] == key[0]}
            known.clear()
            known.update(of_phase)
            devices = {layer.index: device_of(layer.parts, given.sample.device) for layer in self.layers}
            if all(device.type in AT_ONCE for device in devices.values()):
                known[key] = None
            else:
                later = (self._phases(step, position.steps) for step in range(call.step, position.steps))
                steps = len(list(itertools.takewhile(lambda phases: phases == call.phases, later)))
                draws = RunDraws(devices, call.step + steps)
                for layer in self.layers:  # each asks for what it draws
                    self._begin_layer(LayerCall(layer, call), draws)
                draws.allocate()
                known[key] = draws
        return known[key]

    def _needed(self, call: Call, position: Position, guided: int) -> float:
        given, sizes, left = call.given, [], range(position.step, position.steps)
        for layer in self.layers:
            sharing = any(phase.residual_steps > 1 for phase in layer.config.phases)
            if sharing and any(layer.config.shares_difference(step, position.steps) for step in left):
                rows = guided if layer.config.shares_guidance else given.rows
                sizes.append((rows * layer.layer.grid(given.grid).tokens, layer.layer.channels))
        dtype = given.sample.dtype if given.sample.dtype.is_floating_point else torch.float32
        return kept_bytes(sizes, dtype, self.config.residuals)

    def enter(self, call: Call) -> None:
        self._calls[threading.get_ident()] = self.latest = call
        for layer in self.layers:
            layer.latest = call.states[layer.index]

    def end(self) -> Call | None:
        """End this thread's call and return it; compiled layers forget it, but for what a checkpoint may repeat."""
        call = self._calls.pop(threading.get_ident(), None)
        if call is not None and not call.repeats:
            for layer in self.layers:
                layer.latest = None
        return call

    def _is_compiled(self) -> bool:
        inside = bool(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_is_in_optimized_module", bool)())
        return inside or any(module._compiled_call_impl is not None for module in self._around)

    def _allow_recompiling(self) -> None:
        """Let dynamo compile as often as there are phases and grids: its limit is one for all layers of a class."""
        from torch._dynamo import config as dynamo

        layers = {(layer.layer.downsample, layer.layer.attention.inner_dim) for layer in self.layers}
        each = sum(1 if phase.residual_steps == 1 else 4 for phase in (*self.config.all_phases, EXACT))
        name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
        setattr(dynamo, name, max(getattr(dynamo, name), 8 + len(layers) * each))

    def _warn_of_idle_run(self, position: Position, run: Run) -> None:
        """Warn of layers that have another processor, and of a run without an approximated step or on no schedule."""
        others = [layer.layer for layer in self.layers if not layer.installed]
        if others:
            classes = ", ".join(sorted({type(layer.attention.processor).__name__ for layer in others}))
            self.warn("displaced", count=len(others), classes=classes, first=others[0].name)
        config, (step, steps, scheduled) = self.config, position
        if not (self._cuts or any(not phase.exact for phase in config.all_phases)):
            return
        if scheduled:
            if step == run.first and not config.approximates(step, steps):
                self.warn("idle", first=step + 1, steps=steps)
                return
            plan = reused_steps(config.reuse, steps)
            taking = (each and plan[step:place].count(None) > each.order for place, each in enumerate(plan))
            if step == run.first and self._cuts and not any(taking):
                self.warn("no reuse", first=step + 1, steps=steps)
        elif self._cuts or any(phase.residual_steps > 1 for phase in config.all_phases):
            self.warn("no schedule")
        elif position not in (ANYWHERE, BEYOND) and not torch.is_grad_enabled() and self._family.joint:
            self.warn("noise level")

    def _warn_of_exact_layers(self, call: Call) -> None:
        expected = [state for state in call.states.values() if not state.phase.exact and state.patched.installed]
        wrong, skipped, unmerged = dict[str, str](), list[str](), set[str]()
        for state in expected:
            phase = state.phase
            if phase.attention.exact and phase.merge.ratio > 0 and not phase.merge.merged(state.grid):
                unmerged.add(str(state.grid))
            if not state.outcome:
                skipped.append(state.layer.name)
            elif state.outcome != "done":
                wrong[state.layer.name] = state.outcome
        if unmerged:
            self.warn("nothing merged", grids=", ".join(sorted(unmerged)))
        whole = call.last or not call.scheduled or len(skipped) == len(expected)
        if skipped and whole and not call.given.partial and not skips_calls(self._around):
            wrong |= dict.fromkeys(skipped, "its attention processor was never called")
        if wrong:
            first, why = next(iter(wrong.items()))
            self.warn("stays exact", count=len(wrong), expected=len(expected), first=first, why=why)


class Forward:
    """Stands in for the `forward` of a patched model, so that a call by name, without hooks, is patched."""

    def __init__(self, patch: Patch, module: Any) -> None:
        self._patch = patch
        self._module = module
        self.replaced = vars(module).get("forward")  # a wrapper of somebody's; None for the class's own

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(type(self._module).forward, self._module) if self.replaced is None else self.replaced

    def _compute(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.replaced is None:
            return type(module).forward(module, *args, **kwargs)
        return self.replaced(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch = self._patch
        compiling = torch.compiler.is_compiling()
        if compiling and patch.layers and patch.layers[0].latest is None:  # compiled by name, without the hooks
            patch.layers[0].warn_of_bypass()
        if compiling or vars(self._module).get(PATCH) is not patch:
            return self._compute(self._module, args, kwargs)
        call = patch.call
        if begins := call is None or call.entered:
            patch.before_call(self._module, args, kwargs)
            call = patch.call
        assert call is not None
        call.entered, output = True, None
        try:
            output = self._compute(call.module, args, kwargs)
        finally:
            if begins or output is None:  # hooks are not told of Ctrl-C
                patch.after_call(self._module, args, output)
        return output
