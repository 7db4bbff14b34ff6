"""Predict what a choice of phases, by layer and stretch, costs in time and in closeness, and find the best choices.

Errors of different layers are nearly independent, so that their squares add up; see `Predictor`. What one image says
of a stretch is noisy (on the embedded pipelines by a factor of about e).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from elfatt_sd.config import PatchConfig
from elfatt_sd.phases import LayerPhases, Phase, StepReuse, reused_steps
from elfatt_sd.tuning.probe import EXACTLY, Candidate, LayerFigures, Stretch, candidates, slow_layers

_APART = 0.023  # of the logarithm of an image's squared error (0.1 dB), in which one choice is kept, the fastest
_LEAST_MSE = 1e-6  # of an image; less cannot be told from nothing
_DAMPED = 0.5  # power of a layer's effect on the denoiser's output, to which its effect on the image goes
_FIXED = 10.0  # times as much is done to the image by errors that are not drawn at random, than their size says
_NOISE = 0.7  # standard deviation of the logarithm of an image's squared error, where all is as predicted
_SCATTER, _SCATTER_SPREAD = 5.0, 1.5  # `r` where nothing is known of it, and the standard deviation of its logarithm
_NOTHING: Mapping[int, StepReuse] = {}
_SCATTERS = np.geomspace(0.1, 100, 31)  # that are tried


@dataclass(frozen=True)
class Option:
    """What a layer can do in a stretch."""

    candidate: Candidate  # its phase
    saved: float  # seconds that it saves in an image
    mse: float  # mean squared error of the image, of pixels from 0 to 255, that it is predicted to add


@dataclass(frozen=True)
class ReuseOption:
    """What all layers of the denoiser can take over from earlier steps in a stretch."""

    reuse: StepReuse | None = None  # as if the stretch were the run; None where every step computes everything
    computed: float = 1.0  # fraction of the steps that compute everything
    saved: float = 0.0  # seconds that it saves in an image, of the untouched denoiser
    mse: float = 0.0  # that it is predicted to add to the image


@dataclass(frozen=True)
class Choice:
    """A choice for every layer and stretch."""

    options: Mapping[tuple[str, int], Option]  # by layer and stretch
    saved: float  # seconds of an image, predicted
    mse: float  # of the image, predicted
    psnr: float  # of the image in dB, predicted
    reuse: tuple[ReuseOption, ...] = ()  # by stretch


class _Run(NamedTuple):
    """A run in which one stretch alone was approximated."""

    stretch: int  # its number
    image: int  # number of the image
    total: float  # what its errors do to the image, before `B`, as they add up over steps
    scatter: float  # likewise, as they scatter about their mean
    mse: float  # logarithm of the mean squared error of the image


_Front = list[tuple[float, float, tuple[Any, ...]]]  # seconds saved, error, and what was picked, by rising error


def psnr_of(mse: float) -> float:
    return math.inf if mse <= 0 else 10 * math.log10(255**2 / mse)


def _joined(front: _Front, options: Sequence[tuple[float, float, Any]]) -> _Front:
    """Return what is best of all pairs: without what is slower and farther than another, and what is hardly closer."""
    saved, mse = (np.add.outer(*([each[part] for each in one] for one in (front, options))).ravel() for part in (0, 1))
    order = np.lexsort((-saved, mse))
    fastest = np.maximum.accumulate(saved[order])
    order = order[np.append(True, fastest[1:] > fastest[:-1])]
    places = np.log(np.maximum(mse[order], _LEAST_MSE)) // _APART
    kept = order[np.append(places[1:] != places[:-1], True) | (np.arange(len(order)) == 0)]
    picks = [(*front[one][2], options[two][2]) for one, two in (divmod(each, len(options)) for each in kept.tolist())]
    return list(zip(saved[kept].tolist(), mse[kept].tolist(), picks, strict=True))


class Predictor:
    """Predicts, and chooses by its predictions.

    `MSE = sum of B_s w_ls (|sum of E|^2 + r * sum of |E - mean of E|^2) / N` over layers l and stretches s of N steps,
    for the errors `E` of a layer in these steps, and its effect `w` on the image. See docs/method.md.
    """

    def __init__(
        self,
        figures: Mapping[str, LayerFigures],
        stretches: Sequence[Stretch],
        *,
        share: bool = True,
        exact_start: bool = False,
    ) -> None:
        self._figures = {name: figures[name] for name in slow_layers(figures)}
        self._stretches = stretches
        self._probed = sum(len(stretch.probed) for stretch in stretches)  # steps
        self._share = share  # may steps share differences?
        self._exact_start = exact_start  # is the first stretch exact in all layers?
        self._runs: list[_Run] = []
        # of a stretch that takes over from earlier steps: seconds that it saves, and the image's error, by image
        self.reused: dict[tuple[int, StepReuse], dict[int, tuple[float, float]]] = {}
        self.scale = [1.0] * len(stretches)  # `B`, by stretch
        self.scatter = _SCATTER  # `r`

    def calibrate(self, stretch: int, image: int, mse: float, phases: Mapping[str, Candidate]) -> None:
        """Learn a stretch's part in the image from a run in which it alone is approximated; see `fit`."""
        parts = [self._parts(name, stretch, each) for name, each in phases.items()]
        total, scatter = (sum(column) for column in zip(*parts, strict=True)) if parts else (0.0, 0.0)
        if total > 0 and math.isfinite(total + scatter):
            self._runs.append(_Run(stretch, image, total, scatter, math.log(max(mse, _LEAST_MSE))))

    def fit(self) -> None:
        """Find `B` and `r` by least squares of logarithms, for an image like the mean of those that were drawn."""
        if not self._runs:
            return
        stretches, images = len(self._stretches), 1 + max(run.image for run in self._runs)
        table = np.zeros((len(self._runs), stretches + images))
        for row, run in zip(table, self._runs, strict=True):
            row[run.stretch] = row[stretches + run.image] = 1.0
        best, logs = math.inf, np.zeros(stretches + images)
        for ratio in _SCATTERS:
            wanted = np.array([run.mse - math.log(run.total + ratio * run.scatter) for run in self._runs])
            found = np.linalg.lstsq(table, wanted, rcond=None)[0]
            off = float(((table @ found - wanted) ** 2).sum()) / _NOISE**2
            off += (math.log(ratio / _SCATTER) / _SCATTER_SPREAD) ** 2
            if off < best:
                best, self.scatter, logs = off, float(ratio), found
        own, seen = logs[:stretches], sorted({run.stretch for run in self._runs})
        own[[number for number in range(stretches) if number not in seen]] = own[seen].mean()
        drawn = logs[sorted({stretches + run.image for run in self._runs})].mean()
        self.scale = [math.exp(each + drawn) for each in own]

    def _parts(self, layer: str, stretch: int, candidate: Candidate) -> tuple[float, float]:
        """Return what a layer's error does to the image, damped towards the mean of all layers, and its scatter."""
        place, known = self._stretches[stretch], dict[str, float]()
        for name, own in self._figures.items():
            means = sorted(
                (self._stretches[number].first, statistics.fmean(each)) for number, each in own.effects.items()
            )
            known[name] = 0.0
            if means and all(value > 0 for _, value in means):
                steps, values = zip(*means, strict=True)
                known[name] = float(np.interp((place.first + place.last) / 2, steps, np.log(values)))
        mean = statistics.fmean(known.values())
        total, effect = self.error(layer, stretch, candidate), math.exp(mean + _DAMPED * (known[layer] - mean))
        effect *= 1.0 if candidate.base in self._figures[layer].fresh else _FIXED
        squares = sum(map(sum, self._squares(layer, stretch, candidate)))
        return effect * total, effect * max(0.0, squares - total) / len(place)

    def mse(self, layer: str, stretch: int, candidate: Candidate) -> float:
        total, scatter = self._parts(layer, stretch, candidate)
        return self.scale[stretch] * (total + self.scatter * scatter)

    def reference(self, stretch: int) -> dict[str, Candidate]:
        numbers = {name: own.middle(stretch) for name, own in self._figures.items()}
        known = {name: number for name, number in numbers.items() if number is not None}
        return {name: Candidate(self._figures[name].bases[number], number) for name, number in known.items()}

    def error(self, layer: str, stretch: int, candidate: Candidate) -> float:
        """Return what an approximation adds to the image in a stretch, by step: the squared norm of its errors' sum.

        Errors of fresh draws are independent, so that their squares add up. Otherwise two steps have much of an error
        in common: `2 <E_i, E_j> = |E_i|^2 + |E_j|^2 - |E_i - E_j|^2`, whose last term was measured.
        """
        own, base, phase = self._figures[layer], candidate.base, candidate.phase
        groups, steps = self._squares(layer, stretch, candidate), len(self._stretches[stretch])
        apart = functools.partial(own.error, stretch, base)
        if phase.residual_steps == 1 and base in own.fresh:
            return sum(map(sum, groups)) / steps
        total = 0.0
        for squares in groups:
            pairs = itertools.combinations(range(len(squares)), 2)
            total += sum(squares) + sum(max(0.0, squares[i] + squares[j] - apart(j - i)) for i, j in pairs)
        if phase.residual_guidance and base not in own.fresh:  # groups have in common that rows differ
            for squares in groups:
                common = (max(0.0, each - (apart(since) if since else 0.0)) for since, each in enumerate(squares))
                total += sum(common) * (steps - len(squares))
        return total / steps

    def _squares(self, layer: str, stretch: int, candidate: Candidate) -> list[list[float]]:
        own, steps, phase = self._figures[layer], self._stretches[stretch], candidate.phase
        if candidate is EXACTLY:
            return []
        error = functools.partial(own.error, stretch, candidate.base)
        if phase.residual_steps == 1:
            return [[error()] * len(steps)]
        groups, guided = steps.groups(phase.residual_steps), phase.residual_guidance
        dense = own.dense(phase)
        # what the step that measures leaves, in rows that it measures
        measured = 0.0 if dense is None else own.error(stretch, dense)
        squares = [measured + (error(since, guided=guided) if since or guided else 0.0) for since in range(max(groups))]
        return [squares[:size] for size in groups]

    def seconds(self, layer: str, stretch: int, candidate: Candidate) -> float:
        """Return the mean seconds of one call of a layer; a step that measures a difference computes both."""
        own, shared = self._figures[layer], candidate.phase.residual_steps
        exact = statistics.median(own.seconds)
        if candidate is EXACTLY:
            return exact
        steps = self._stretches[stretch]
        measured = len(steps.groups(shared)) / len(steps) if shared > 1 else 0.0
        rows = 1 / own.copies if candidate.phase.residual_guidance else 1.0
        dense = own.dense(candidate.phase)
        return exact * (own.ratio(candidate.base) + measured * rows * (1.0 if dense is None else own.ratio(dense)))

    def options(self, layer: str, stretch: int) -> list[Option]:
        """Return what a layer can do in a stretch, without what is slower and farther than another option."""
        own, steps = self._figures[layer], len(self._stretches[stretch])
        calls = own.calls / self._probed  # in a step
        if self._exact_start and stretch == 0:
            return [Option(EXACTLY, 0.0, 0.0)]
        exact = self.seconds(layer, stretch, EXACTLY)
        found = []
        for each in candidates(own.bases, steps, share=self._share, guided=own.copies > 1):
            saved = (exact - self.seconds(layer, stretch, each)) * steps * calls
            mse = self.mse(layer, stretch, each)
            if each is EXACTLY or (saved > 0 and math.isfinite(mse)):
                found.append(Option(each, saved, mse))
        found.sort(key=lambda option: (option.mse, -option.saved))
        kept: list[Option] = []
        for option in found:
            if not kept or option.saved > kept[-1].saved:
                kept.append(option)
        return kept

    def reuse_options(self, stretch: int) -> list[ReuseOption]:
        """Return what a stretch can take over, with its error in an image like the mean of those that were drawn.

        An image is as far as another one times a factor, which all options that were drawn of both say.
        """
        logs = {
            key: {image: math.log(max(mse, _LEAST_MSE)) for image, (_, mse) in each.items()}
            for key, each in self.reused.items()
        }
        farther = dict[int, float]()
        for image in {image for each in logs.values() for image in each}:
            ratios = [each[image] - each[0] for each in logs.values() if {0, image} <= each.keys()]
            farther[image] = statistics.fmean(ratios) if ratios else 0.0
        found, own = [ReuseOption()], self._stretches[stretch]
        for (number, reuse), known in logs.items():
            if number == stretch:
                log = statistics.fmean(log - farther[image] for image, log in known.items())
                mse = math.exp(log + statistics.fmean(farther.values()))
                saved = statistics.median(seconds for seconds, _ in self.reused[number, reuse].values())
                plan = reused_steps(self._spread({number: reuse}), self._stretches[-1].last + 1)
                computed = plan[own.first : own.last + 1].count(None) / len(own)
                found += [ReuseOption(reuse, computed, saved, mse)] if saved > 0 else []
        return found

    def curve(self) -> list[Choice]:
        """Return the best choices, from untouched to the fastest one, of falling predicted closeness.

        Layers are joined, then stretches. Where a stretch takes over, a layer saves its time in whole steps alone.
        """
        nothing: _Front = [(0.0, 0.0, ())]
        whole = nothing
        for number in range(len(self._stretches)):
            layers = nothing
            for layer in self._figures:
                options = [(each.saved, each.mse, ((layer, number), each)) for each in self.options(layer, number)]
                layers = _joined(layers, options)
            own = [
                (each.computed * saved + each.saved, each.mse + mse, (picked, each))
                for each in self.reuse_options(number)
                for saved, mse, picked in layers
            ]
            whole = _joined(whole, [(saved, mse, picked) for saved, mse, (picked,) in _joined(nothing, own)])
        found = list[Choice]()
        for saved, mse, stretches in whole:
            picked = dict(pair for pairs, _ in stretches for pair in pairs)
            found.append(Choice(picked, saved, mse, psnr_of(mse), tuple(each for _, each in stretches)))
        return found

    def chosen(self, choice: Choice) -> PatchConfig:
        taken = {number: each.reuse for number, each in enumerate(choice.reuse) if each.reuse is not None}
        return self.config(self.parts(choice), taken)

    def config(
        self, parts: Sequence[Mapping[str, Candidate]], reuse: Mapping[int, StepReuse] = _NOTHING, name: str = "tuned"
    ) -> PatchConfig:
        """Return the configuration of what layers do and take over, by stretch; equal stretches are one."""
        own, steps = [], self._stretches[-1].last + 1
        for layer in self._figures:
            phases: list[Phase] = []
            for stretch, part in zip(self._stretches, parts, strict=True):
                phase = part.get(layer, EXACTLY).phase
                if phases and replace(phases[-1], until=1.0) == phase:
                    phases.pop()
                phases.append(replace(phase, until=(stretch.last + 1) / steps))
            while phases and phases[-1].exact:
                phases.pop()
            if phases:
                own.append(LayerPhases(layer, tuple(phases)))
        return PatchConfig(name, per_layer=tuple(own), reuse=self._spread(reuse))

    def _spread(self, reuse: Mapping[int, StepReuse]) -> tuple[StepReuse, ...]:
        """Return what stretches take over, by their number, as stretches of the run."""
        taken, first = list[StepReuse](), self._stretches[0].first
        for number, stretch in enumerate(self._stretches):
            end, each = (stretch.last + 1) / (self._stretches[-1].last + 1), reuse.get(number)
            if each is None:
                first += len(stretch)
            elif taken and not first and replace(taken[-1], until=1.0, first=0) == replace(each, last=0):
                taken[-1] = replace(taken[-1], until=end, last=each.last)
            else:
                taken, first = [*taken, replace(each, until=end, first=first + each.first)], 0
        return tuple(taken)

    def parts(self, choice: Choice) -> list[dict[str, Candidate]]:
        found: list[dict[str, Candidate]] = [{} for _ in self._stretches]
        for (layer, number), option in choice.options.items():
            if option.candidate is not EXACTLY:
                found[number][layer] = option.candidate
        return found
