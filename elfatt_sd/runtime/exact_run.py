"""Layers that are watched in a run that stays untouched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.config import LayerPhases, PatchConfig
from elfatt_sd.families import takes_steps
from elfatt_sd.phases import Phase
from elfatt_sd.runtime.call import Call, LayerCall
from elfatt_sd.runtime.denoiser import Owner, Patch
from elfatt_sd.runtime.layer import PatchedLayer, after_forward, choose_layers, device_of
from elfatt_sd.runtime.schedule import Schedule

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
        self._schedule = Schedule(Owner(pipe))
        self._patches = {
            name: Patch(_PLACEHOLDER, chosen[name], denoiser, self._schedule) for name, denoiser in denoisers.items()
        }
        self._after_layer, self._after_call = after_layer, after_call
        self._undo = ExitStack()
        self._busy = False

    @property
    def steps(self) -> int:
        return self._schedule.run.steps

    def __enter__(self) -> ExactRun:
        with ExitStack() as undo:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            for name, patch in self._patches.items():
                patch.install()
                undo.callback(patch.remove)
                patch.watched, patch.pays = True, lambda *_: False  # every layer stays exact
                for layer in patch.layers:
                    after = functools.partial(self._after, functools.partial(_state, layer), self._after_layer)
                    undo.callback(after_forward(layer.layer.attention, after))
                if self._after_call is not None and takes_steps(name):
                    after = functools.partial(self._after, functools.partial(getattr, patch, "call"), self._after_call)
                    undo.callback(after_forward(patch.module, after))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def approximate(
        self,
        state: LayerCall,
        again: Callable[[], Any],
        phase: Phase,
        step: int,
        config: PatchConfig = _PLACEHOLDER,
        ahead: Any = None,
    ) -> Any:
        """Return what a layer gives in place of its exact output; nothing is carried over from other layers."""
        states, call = state.call.states, Call(config, step)
        call.given = state.call.given
        states[state.index] = own = LayerCall(state.patched, call, state.grid)
        try:
            own.begin(phase, step, device_of(state.patched.parts, call.given.sample.device), ahead)
            own.block_input = state.block_input
            return again()
        finally:
            states[state.index] = state

    def _after(self, find: Callable[[], Any], tell: Callable[..., None], again: Callable[[], Any], output: Any) -> None:
        """Tell of a call of a module that is over, but not of those that are made to measure."""
        if not self._busy and (found := find()) is not None:
            self._busy = True
            try:
                tell(found, again, output)
            finally:
                self._busy = False


def _state(layer: PatchedLayer) -> LayerCall | None:
    state = layer.state
    return state if state is not None and state.grid.tokens else None


def image_of(output: Any, state: LayerCall) -> Tensor:
    given: Tensor = output[0] if isinstance(output, tuple) else output
    given = given.flatten(2).transpose(1, 2) if given.ndim == 4 else given
    before = state.call.given.before if given.shape[1] > state.grid.tokens else 0
    return given[:, before : before + state.grid.tokens].detach()
