"""Measure approximations on what the layers of a running pipeline are really given: error, time, effect.

The run stays untouched: a layer's exact output goes on, and the approximations of it are thrown away once measured.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.calls import Call, LayerState
from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.exact_run import ExactRun
from elfatt_sd.families import find_denoisers
from elfatt_sd.measuring.clock import Stopwatch, timed
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.tuning.candidates import bases

SINCE = (0, 1, 3)  # steps since the difference to exact attention was measured; in between, errors are interpolated
KEPT = 2**16  # values of a difference that are kept, so that memory stays bounded however large the model is
REUSED = -1  # in place of an approximation's number: the output of an earlier step


@dataclass
class LayerFigures:
    """What was measured in a layer.

    Attributes:
        bases: the approximations.
        lost: numbers of those that ran out of memory, or gave values that are not finite.
        seconds: of exact attention, by call.
        calls: of the layer in the probed steps.
        ratios: of each approximation, time by time of exact attention.
        plain: by stretch and approximation, the squared relative errors.
        shared: by stretch, approximation and number of steps since the difference was measured, likewise.
        effects: by stretch, the squared relative change of the denoiser's output by squared relative error of the
            layer's.
    """

    bases: list[Phase]
    lost: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    calls: int = 0
    ratios: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    plain: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    shared: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    effects: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def error(self, stretch: int, base: int, since: int = 0) -> float:
        """Return the mean squared relative error of an approximation in a stretch.

        Args:
            stretch: number of the stretch.
            base: number of the approximation, or `REUSED`.
            since: steps since the difference was measured that corrects it; 0 corrects nothing.
        """
        if base in self.lost:
            return math.inf
        if not since:
            return statistics.fmean(self.plain.get((stretch, base)) or [math.inf])
        known = [each for each in SINCE if (stretch, base, each) in self.shared]
        errors = [statistics.fmean(self.shared[stretch, base, each]) for each in known]
        return float(np.interp(since, known, errors)) if known else math.inf

    def ratio(self, base: int) -> float:
        """Return an approximation's time by that of exact attention."""
        return 0.0 if base == REUSED else statistics.median(self.ratios[base] or [math.inf])


@dataclass(frozen=True)
class Stretch:
    """Steps of the run that are tuned together.

    Attributes:
        first: its first step.
        last: its last one.
    """

    first: int
    last: int

    def __len__(self) -> int:
        """Return the number of its steps."""
        return self.last - self.first + 1

    @property
    def probed(self) -> list[int]:
        """Steps since its first one that are measured."""
        return [since for since in SINCE if since < len(self)]


class Probe:
    """Measures within a `with` block, while the pipeline runs.

    Args:
        pipe: a pipeline without a patch.
        stretches: of the run.
        effects_of: numbers of the stretches in which the effect of each layer on the denoiser's output is measured.
    """

    def __init__(self, pipe: Any, stretches: list[Stretch], *, effects_of: Collection[int] = ()) -> None:
        self._denoisers = find_denoisers(pipe)
        self._run = ExactRun(pipe, self._denoisers, self._after_layer, self._after_call if effects_of else None)
        self._stretches = stretches
        self._effects_of = effects_of
        self._kept: dict[tuple[str, int, int], Tensor] = {}  # by layer, call within the step and approximation
        self._latest: dict[str, dict[int, float]] = {}  # plain squared errors of the latest visit, by layer
        self.figures: dict[str, LayerFigures] = {}

    def __enter__(self) -> Probe:
        """Install."""
        self._run.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Put everything back."""
        self._run.__exit__()
        self._kept.clear()

    def _place(self, step: int) -> tuple[int, int] | None:
        """Return the stretch of a step, and its place among those that may share; None where nothing is measured."""
        for number, stretch in enumerate(self._stretches):
            if stretch.first <= step <= stretch.last and step - stretch.first in SINCE:
                return number, step - stretch.first
        return None

    def _after_layer(self, state: LayerState, again: Callable[[], Any], output: Any) -> None:
        place = self._place(state.call.step)
        if place is None:
            return
        name, turn = state.layer.name, state.calls
        figures = self.figures.setdefault(name, LayerFigures(bases(state.grid.tokens, self._denoisers)))
        figures.calls += 1
        exact, device = _flat(output), output[0].device if isinstance(output, tuple) else output.device
        if place[1] == 0 or not figures.seconds:
            figures.seconds.append(timed(again, device))
        size = float(exact.square().sum()) or 1.0
        self._share(figures, (name, turn, REUSED), place, exact, exact, size)
        self._latest[name] = {}
        for number, phase in enumerate(figures.bases):
            if number in figures.lost:
                continue
            with _loses(figures, number):
                self._measure(figures, state, (name, turn, number), phase, place, again, exact, size)

    def _measure(
        self,
        figures: LayerFigures,
        state: LayerState,
        key: tuple[str, int, int],
        phase: Phase,
        place: tuple[int, int],
        again: Callable[[], Any],
        exact: Tensor,
        size: float,
    ) -> None:
        """Measure one approximation: its draws are those of the steps that share, its time has them in it."""
        name, _, number = key
        stretch = place[0]
        with Stopwatch(exact.device) as watch:
            output = self._run.approximate(state, again, phase, self._stretches[stretch].first)
        figures.ratios[number].append(watch.seconds / figures.seconds[-1])
        approximated = _flat(output)
        error = exact - approximated
        squared = float(error.square().sum()) / size
        if not math.isfinite(squared):
            figures.lost.add(number)
            return
        self._latest[name][number] = squared
        figures.plain[stretch, number].append(squared)
        self._share(figures, key, place, error, error, size)

    def _share(
        self,
        figures: LayerFigures,
        key: tuple[str, int, int],
        place: tuple[int, int],
        kept: Tensor,
        error: Tensor,
        size: float,
    ) -> None:
        """Keep the difference in the first step of a stretch, and see in the others what correcting by it leaves."""
        stretch, since = place
        every = max(1, error.numel() // KEPT) | 1  # odd, so that all channels have their turn
        if since == 0:
            self._kept[key] = kept[::every].clone()
        elif (known := self._kept.get(key)) is not None and known.shape == error[::every].shape:
            left = float((error[::every] - known).square().mean()) * error.numel() / size
            figures.shared[stretch, key[2], since].append(left)

    def _after_call(self, call: Call, again: Callable[[], Any], output: Any) -> None:
        """Measure what an error of each layer does to the denoiser's output."""
        place = self._place(call.step)
        if place is None or place[1] != 0 or place[0] not in self._effects_of:
            return
        exact = _flat(output)
        size = float(exact.square().sum()) or 1.0
        for state in call.states.values():
            errors = self._latest.get(state.layer.name)
            if not errors:
                continue
            number = sorted(errors, key=lambda each: errors[each])[len(errors) // 2]
            figures = self.figures[state.layer.name]
            call.restart()
            with _loses(figures, number):
                state.begin(figures.bases[number], self._stretches[place[0]].first, exact.device)
                effect = float((_flat(again()) - exact).square().sum()) / size
                if errors[number] > 0 and math.isfinite(effect):
                    figures.effects[place[0]].append(effect / errors[number])
            state.begin(EXACT, call.step, exact.device)
        call.restart()


@contextlib.contextmanager
def _loses(figures: LayerFigures, number: int) -> Iterator[None]:
    """Leave an approximation out that runs out of memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        figures.lost.add(number)


def _flat(output: Any) -> Tensor:
    """Return what a layer or a denoiser gave as one float32 tensor without shape."""
    if isinstance(output, Tensor):
        return output.detach().float().flatten()
    if isinstance(output, tuple | list):
        return torch.cat([_flat(each) for each in output if each is not None])
    return _flat(output.sample)


def stretches_of(steps: int, count: int) -> list[Stretch]:
    """Cut a run in stretches of nearly equal length.

    Args:
        steps: calls of the denoiser in the run.
        count: of the stretches, at most.
    """
    count = max(1, min(count, steps))
    ends = [round(steps * number / count) for number in range(count + 1)]
    return [Stretch(first, last - 1) for first, last in itertools.pairwise(ends)]
