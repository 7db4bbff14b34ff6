"""Measure approximations on what the layers of a running pipeline are really given: error, time, effect.

The run stays untouched: a layer's exact output goes on, and the approximations of it are thrown away once measured.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.calls import Call
from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.exact_run import ExactRun
from elfatt_sd.families import find_denoisers
from elfatt_sd.layer_state import LayerState
from elfatt_sd.measuring.clock import Stopwatch, timed
from elfatt_sd.methods import Draws
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.tuning.candidates import bases

SINCE = (0, 1, 3, 7)  # steps since the difference to exact attention was measured; in between, errors are interpolated
ALIGNED = 4  # stretches begin at multiples of it, where differences that steps share are measured
KEPT = 2**16  # values of a difference that are kept, so that memory stays bounded however large the model is
REUSED = -1  # in place of an approximation's number: the output of an earlier step


@dataclass
class LayerFigures:
    """What was measured in a layer.

    Attributes:
        bases: the approximations.
        lost: numbers of those that ran out of memory, or gave values that are not finite.
        fresh: numbers of those that draw at random in each step, so that their errors in two steps are independent.
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
    fresh: set[int] = field(default_factory=set)
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

    def middle(self, stretch: int) -> int | None:
        """Return the number of the approximation of median error in a stretch; None where there is none."""
        errors = {number: self.error(stretch, number) for number in self.ratios}
        usable = sorted((number for number in errors if math.isfinite(errors[number])), key=errors.__getitem__)
        return usable[len(usable) // 2] if usable else None

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

    def groups(self, shared: int) -> list[int]:
        """Return the lengths of the groups of steps in it that share a difference, `shared` steps at most."""
        inner = (step for step in range(self.first + 1, self.last + 1) if step % shared == 0)
        return [end - start for start, end in itertools.pairwise([self.first, *inner, self.last + 1])]


class Probe:
    """Measures within a `with` block, while the pipeline runs.

    Args:
        pipe: a pipeline without a patch.
        stretches: of the run.
        effects: calls of the denoiser, at most, that measure the effect of each layer on its output: one a layer in
            some stretches.
        known: figures of another image; of this one, the effects alone are measured, and join theirs.
    """

    def __init__(
        self,
        pipe: Any,
        stretches: list[Stretch],
        *,
        effects: int = 0,
        known: dict[str, LayerFigures] | None = None,
    ) -> None:
        self._denoisers = find_denoisers(pipe)
        self._run = ExactRun(pipe, self._denoisers, self._after_layer, self._after_call)
        self._stretches = stretches
        count = min(len(stretches), effects // max(1, self._run.layers))
        self._effects_of = set(map(round, np.linspace(0, len(stretches) - 1, count)))
        self._kept: dict[tuple[str, int, int], Tensor] = {}  # by layer, call within the step and approximation
        self._latest: dict[str, tuple[int, float]] = {}  # by layer, an approximation and its squared error
        self._effects_alone = known is not None
        self.figures: dict[str, LayerFigures] = known or {}

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
        self._latest.pop(name, None)
        if self._effects_alone:
            self._see(state, place, again, flat(output))
            return
        figures = self.figures.setdefault(name, LayerFigures(bases(state.grid.tokens, self._denoisers)))
        figures.calls += 1
        exact, device = flat(output), output[0].device if isinstance(output, tuple) else output.device
        if place[1] == 0 or not figures.seconds:
            figures.seconds.append(timed(again, device))
        size = float(exact.square().sum()) or 1.0
        self._share(figures, (name, turn, REUSED), place, exact, exact, size)
        for number, phase in enumerate(figures.bases):
            if number in figures.lost:
                continue
            with _loses(figures, number):
                self._measure(figures, state, (name, turn, number), phase, place, again, exact, size)
        if (middle := figures.middle(place[0])) is not None:
            self._latest[name] = middle, figures.plain[place[0], middle][-1]

    def _see(self, state: LayerState, place: tuple[int, int], again: Callable[[], Any], exact: Tensor) -> None:
        """Measure the error of the approximation whose effect is measured."""
        figures = self.figures.get(state.layer.name)
        number = None if figures is None or not self._affects(place) else figures.middle(place[0])
        if figures is not None and number is not None:
            with _loses(figures, number):
                first = self._stretches[place[0]].first
                error = exact - flat(self._run.approximate(state, again, figures.bases[number], first))
                self._latest[state.layer.name] = number, float(error.square().sum() / exact.square().sum())

    def _affects(self, place: tuple[int, int]) -> bool:
        """Tell whether the effects of layers are measured in a step."""
        return place[1] == 0 and place[0] in self._effects_of

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
        number, stretch = key[2], place[0]
        draws = _Seen()
        with Stopwatch(exact.device) as watch:
            output = self._run.approximate(state, again, phase, self._stretches[stretch].first, ahead=draws)
        figures.ratios[number].append(watch.seconds / figures.seconds[-1])
        figures.fresh.update({number} if draws.fresh else ())
        approximated = flat(output)
        error = exact - approximated
        squared = float(error.square().sum()) / size
        if not math.isfinite(squared):
            figures.lost.add(number)
            return
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
        if place is None or not self._affects(place):
            return
        exact = flat(output)
        size = float(exact.square().sum()) or 1.0
        for state in call.states.values():
            if state.layer.name not in self._latest:
                continue
            number, error = self._latest[state.layer.name]
            figures = self.figures[state.layer.name]
            call.restart()
            with _loses(figures, number):
                state.begin(figures.bases[number], self._stretches[place[0]].first, exact.device)
                effect = float((flat(again()) - exact).square().sum()) / size
                if error > 0 and math.isfinite(effect):
                    figures.effects[place[0]].append(effect / error)
            state.begin(EXACT, call.step, exact.device)
        call.restart()


class _Seen:
    """Sees whether an approximation draws at random in each step."""

    def __init__(self) -> None:
        self.fresh = False

    def made(self, draws: Draws, what: str, count: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Make what is drawn in one step."""
        self.fresh = self.fresh or draws.shared > 0
        return draws.upload(make(draws.uniform(what, count)))


@contextlib.contextmanager
def _loses(figures: LayerFigures, number: int) -> Iterator[None]:
    """Leave an approximation out that runs out of memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        figures.lost.add(number)


def flat(output: Any) -> Tensor:
    """Return what a layer or a denoiser gave as one float32 tensor without shape."""
    if isinstance(output, Tensor):
        return output.detach().float().flatten()
    if isinstance(output, tuple | list):
        return torch.cat([flat(each) for each in output if each is not None])
    return flat(output.sample)


def stretches_of(steps: int, count: int) -> list[Stretch]:
    """Cut a run in stretches, which begin at multiples of `ALIGNED`; the last one is as short as it can be.

    In the last steps the image changes most from step to step, so that they share least: they are measured apart.

    Args:
        steps: calls of the denoiser in the run.
        count: of the stretches, at most.
    """
    last = (steps - 1) // ALIGNED * ALIGNED if count > 1 else 0
    before = (int(last * number / (count - 1) / ALIGNED + 0.5) * ALIGNED for number in range(count - 1))
    starts = sorted({*before, last})
    return [Stretch(first, end - 1) for first, end in itertools.pairwise([*starts, steps])]
