"""What a patched model warns of: once for each kind, at a call or after it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from elfatt_sd.calls import Call
from elfatt_sd.config import PatchConfig
from elfatt_sd.processor import PatchedLayer
from elfatt_sd.runs import Run
from elfatt_sd.schedule import ANYWHERE, BEYOND, Position
from elfatt_sd.surroundings import likely_cause, skips_calls

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
