"""Keep what the denoiser gave in an untouched run, so that other runs of that image need not compute their beginning.

Up to the first step that is approximated, a run is the untouched one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from elfatt_sd.families import step_denoisers
from elfatt_sd.surroundings import around_forward


class Playback:
    """The denoiser's outputs in one run, kept on the host."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._modules = list(step_denoisers(pipe).values())
        self._outputs: list[Any] = []
        self._ends: list[int] = []  # after each step, the number of calls so far

    @property
    def possible(self) -> bool:
        return not any(module._compiled_call_impl for module in self._modules)

    @property
    def steps(self) -> int:
        """Number of steps of the run that was recorded."""
        return len(self._ends)

    def end_step(self) -> None:
        """Take note that a step of the run is done."""
        self._ends.append(len(self._outputs))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the outputs of the run within the `with` block."""

        def keep(compute: Callable[[], Any]) -> Any:
            output = compute()
            self._outputs.append(_copied(output, torch.device("cpu")))
            return output

        with self._around(keep):
            yield

    @contextlib.contextmanager
    def playing(self, steps: int) -> Iterator[None]:
        """Give the kept outputs in the first steps of the run within the `with` block, and compute the others."""
        calls, known = itertools.count(), self._ends[steps - 1] if steps else 0
        device = self._pipe._execution_device

        def play(compute: Callable[[], Any]) -> Any:
            number = next(calls)
            return _copied(self._outputs[number], device) if number < known else compute()

        with self._around(play):
            yield

    @contextlib.contextmanager
    def _around(self, around: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for module in self._modules:
                undo.callback(around_forward(module, around))
            yield


def _copied(output: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda each: each.detach().to(device, copy=True), output)
