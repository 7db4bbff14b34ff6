"""A run that stays untouched while its self-attention layers are watched: their approximations are thrown away."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.config import LayerPhases, PatchConfig
from elfatt_sd.families import takes_steps, unwrap
from elfatt_sd.methods.base import Ahead
from elfatt_sd.phases import Phase
from elfatt_sd.runtime.call import Call, LayerCall
from elfatt_sd.runtime.choosing import choose_layers
from elfatt_sd.runtime.denoiser import Owner, Patch
from elfatt_sd.runtime.processor import PatchedLayer
from elfatt_sd.runtime.schedule import Schedule, SchedulerFinder
from elfatt_sd.runtime.surroundings import after_forward, device_of

_PLACEHOLDER = PatchConfig(
    "probe", residual_limit=10**6, per_layer=(LayerPhases("*", (Phase(1.0, "reuse", residual_steps=2),)),)
)
AfterLayer = Callable[[LayerCall, Callable[[], Any], Any], None]
AfterCall = Callable[[Call, Callable[[], Any], Any], None]


class ExactRun:
    """Watches all self-attention layers within a `with` block, while a pipeline runs; the exact output goes on."""

    def __init__(
        self,
        pipe: Any,
        denoisers: Mapping[str, nn.Module],
        after_layer: AfterLayer,
        after_call: AfterCall | None = None,
    ) -> None:
        chosen = choose_layers(dict(denoisers), _PLACEHOLDER)
        self._schedule = Schedule(SchedulerFinder(pipe), False)
        self._denoisers = denoisers
        self._patches = {
            name: Patch(_PLACEHOLDER, False, (), self._schedule, denoiser, chosen[name], Owner())
            for name, denoiser in denoisers.items()
        }
        self._after_layer, self._after_call = after_layer, after_call
        self._undo = contextlib.ExitStack()
        self._busy = False
        self._block_inputs: dict[str, Tensor] = {}

    @property
    def steps(self) -> int:
        """Calls of the denoiser in the schedule of the run that goes on."""
        return self._schedule.run.steps

    def __enter__(self) -> ExactRun:
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            for name, patch in self._patches.items():
                patch.install()
                undo.callback(patch.remove)
                patch._shared.pays = lambda *_: False  # so that every layer stays exact
                for layer in patch.layers:
                    self._watch(layer, undo)
                if self._after_call is not None and takes_steps(name):
                    self._wrap(unwrap(self._denoisers[name]), functools.partial(self._called, patch), undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._block_inputs.clear()

    def approximate(
        self,
        state: LayerCall,
        again: Callable[[], Any],
        phase: Phase,
        step: int,
        config: PatchConfig = _PLACEHOLDER,
        ahead: Ahead | None = None,
    ) -> Any:
        """Return what a layer gives in place of its exact output; nothing is carried over from other layers."""
        states, call = state.call.states, Call(config, step)
        call.given = state.call.given
        states[state.index] = own = LayerCall(state.patched, call, state.grid)
        try:
            own.begin(phase, step, device_of(state.patched.parts, call.given.sample.device), ahead)
            own.block_input = self._block_inputs.get(state.layer.name)
            return again()
        finally:
            states[state.index] = state

    def _watch(self, layer: PatchedLayer, undo: contextlib.ExitStack) -> None:
        if layer.layer.norm is not None:

            def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
                if not self._busy:
                    self._block_inputs[layer.layer.name] = args[0]

            undo.callback(layer.layer.norm.register_forward_pre_hook(keep).remove)
        self._wrap(layer.layer.attention, functools.partial(self._attended, layer), undo)

    def _wrap(self, module: Any, after: Callable[..., None], undo: contextlib.ExitStack) -> None:
        """Call `after(call_again, output)` after every call of a module's forward."""

        def measured(again: Callable[[], Any], output: Any) -> None:
            if not self._busy:
                self._busy = True
                try:
                    after(again, output)
                finally:
                    self._busy = False

        undo.callback(after_forward(module, measured))

    def _attended(self, layer: PatchedLayer, again: Callable[[], Any], output: Any) -> None:
        state = layer.state
        if state is not None and state.grid.tokens:
            self._after_layer(state, again, output)

    def _called(self, patch: Patch, again: Callable[[], Any], output: Any) -> None:
        call = patch._shared.call
        if call is not None and self._after_call is not None:
            self._after_call(call, again, output)


def image_of(output: Any, state: LayerCall) -> Tensor:
    given: Tensor = output[0] if isinstance(output, tuple) else output
    given = given.flatten(2).transpose(1, 2) if given.ndim == 4 else given
    before = state.call.given.before if given.shape[1] > state.grid.tokens else 0
    return given[:, before : before + state.grid.tokens].detach()
