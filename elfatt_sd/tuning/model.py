"""Predict what a choice of phases, by layer and stretch, costs in time and in closeness, and find the best choices.

An error of a layer changes the denoiser's output in proportion to it, and that changes the image. Errors of different
layers and steps are nearly independent, so that their squares add up:
`MSE = sum over stretches s of B_s * R_s * sum over layers l of W_ls * e_ls^2`. Here `e_ls` is the relative error of a
layer's output, and `W_ls` its effect on the denoiser's output. `R_s` is what their sum is wrong by, one number for
shared differences and one for the rest: both are measured with some choices, in runs that are kept on the untouched
path. `B_s` is measured by runs in which stretch `s` alone is approximated. What one image says of it is noisy (on the
embedded pipelines by a factor of about e), so that stretches are told apart only as far as several images agree.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elfatt_sd.config import LayerPhases, PatchConfig
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.tuning.candidates import EXACTLY, Candidate, candidates
from elfatt_sd.tuning.probe import LayerFigures, Stretch, slow_layers

_SLOPES = 400  # prices of an error that are tried
_LEAST_MSE = 1e-4  # of an image; less cannot be told from nothing
_NOISE, _NOISE_WEIGHT = 1.0, 4  # variance of log B_s between images, and as how many degrees of freedom it counts


@dataclass(frozen=True)
class Option:
    """What a layer can do in a stretch.

    Attributes:
        candidate: its phase.
        saved: seconds that it saves in an image.
        mse: mean squared error of the image, of pixels from 0 to 255, that it is predicted to add.
    """

    candidate: Candidate
    saved: float
    mse: float


@dataclass(frozen=True)
class Choice:
    """A choice for every layer and stretch.

    Attributes:
        options: by layer and stretch.
        saved: seconds of an image, predicted.
        mse: of the image, predicted.
    """

    options: Mapping[tuple[str, int], Option]
    saved: float
    mse: float

    @property
    def psnr(self) -> float:
        """Predicted PSNR in dB."""
        return math.inf if self.mse <= 0 else 10 * math.log10(255**2 / self.mse)


class Model:
    """Predicts, and chooses by its predictions.

    Args:
        figures: what was measured, by layer.
        stretches: of the run.
        share: whether steps may share differences.
    """

    def __init__(
        self, figures: Mapping[str, LayerFigures], stretches: Sequence[Stretch], *, share: bool = True
    ) -> None:
        self._figures = {name: figures[name] for name in slow_layers(figures)}
        self._stretches = stretches
        self._share = share
        self._scales: list[list[float]] = [[] for _ in stretches]  # log B_s, by stretch and image
        self._ratios: dict[tuple[bool, int], float] = {}  # `R_s`, of shared differences and others

    @property
    def copies(self) -> int:
        """Of the same latents among the rows of a call, where guidance makes one of them; 1 otherwise."""
        return max((own.copies for own in self._figures.values()), default=1)

    def calibrate(self, stretch: int, mse: float, phases: Mapping[str, Candidate]) -> None:
        """Learn a stretch's part in the image from a run in which it alone is approximated.

        Args:
            stretch: its number.
            mse: of that run's image; every stretch is learnt from the same images, in the same order.
            phases: what each layer did.
        """
        effect = self._denoiser_error(stretch, phases)
        if effect > 0:
            self._scales[stretch].append(math.log(max(mse, _LEAST_MSE) / effect))

    def compare(self, choice: Choice, errors: Sequence[float]) -> None:
        """Learn by which factor the denoiser's error in each stretch differs from the sum over layers.

        Errors that remain of shared differences have another factor than others. Later choices are trusted as much as
        all earlier ones together: the sum is wrong by another factor for each.

        Args:
            choice: what each layer did.
            errors: squared relative errors of the denoiser's output, by step.
        """
        for number, steps in enumerate(self._stretches):
            phases = {layer: option.candidate for (layer, own), option in choice.options.items() if own == number}
            expected = self._denoiser_error(number, phases)
            measured = statistics.fmean(errors[steps.first : steps.last + 1])
            if expected > 0 and measured > 0:
                ratio = measured / expected
                for place in {(each.shares, number) for each in phases.values() if each is not EXACTLY}:
                    known = self._ratios.get(place)
                    self._ratios[place] = ratio if known is None else known * math.sqrt(ratio)

    def _denoiser_error(self, stretch: int, phases: Mapping[str, Candidate]) -> float:
        """Return the squared relative error of the denoiser's output, as the sum over layers."""
        return sum(self._effect(name, stretch, each) * self.error(name, stretch, each) for name, each in phases.items())

    def everywhere(self, steps: int = 1) -> Choice:
        """Return the choice of each layer's `reference` in all stretches, with differences that some steps share."""
        picked = {}
        for number, stretch in enumerate(self._stretches):
            for layer, own in self.reference(number).items():
                phase = dataclasses.replace(own.phase, residual_steps=min(steps, len(stretch)))
                picked[layer, number] = Option(Candidate(phase, own.base), 0.0, 0.0)
        return _choice(picked)

    @property
    def scale(self) -> list[float]:
        """`B_s` by stretch: the geometric mean over images, drawn to that of all stretches as noise demands."""
        if not (known := [each for each in self._scales if each]):
            return [1.0] * len(self._scales)
        trust, middle = _trust(known), statistics.fmean(map(statistics.fmean, known))
        means = [statistics.fmean(each or [middle]) for each in self._scales]
        return [math.exp(middle + trust * (mean - middle)) for mean in means]

    def reference(self, stretch: int) -> dict[str, Candidate]:
        """Return, for each layer, the approximation of median error in a stretch, without sharing."""
        found = {}
        for name, own in self._figures.items():
            if (number := own.middle(stretch)) is not None:
                found[name] = Candidate(own.bases[number], number)
        return found

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
        total = sum(_summed(squares, apart) for squares in groups)
        if phase.residual_guidance and base not in own.fresh:  # groups have in common that rows differ
            for squares in groups:
                common = (max(0.0, each - (apart(since) if since else 0.0)) for since, each in enumerate(squares))
                total += sum(common) * (steps - len(squares))
        return total / steps

    def _squares(self, layer: str, stretch: int, candidate: Candidate) -> list[list[float]]:
        """Return the squared errors of the steps of a stretch, by the groups of steps that share a difference."""
        steps, shared, guided = (
            self._stretches[stretch],
            candidate.phase.residual_steps,
            candidate.phase.residual_guidance,
        )
        if candidate is EXACTLY:
            return []
        error = functools.partial(self._figures[layer].error, stretch, candidate.base)
        if shared == 1:
            return [[error()] * len(steps)]
        groups = steps.groups(shared)  # a step that measures has no error but in rows that it does not measure
        squares = [error(since, guided=guided) if since or guided else 0.0 for since in range(max(groups))]
        return [squares[:size] for size in groups]

    def _effect(self, layer: str, stretch: int, candidate: Candidate) -> float:
        """Return `R_s W_ls`: `W` may grow a thousandfold in the course of a run; its logarithm is interpolated."""
        effects, ratio = self._figures[layer].effects, self._ratios.get((candidate.shares, stretch), 1.0)
        known = sorted((self._stretches[number].first, statistics.fmean(own)) for number, own in effects.items())
        if not known or not all(value > 0 for _, value in known):
            return ratio
        own, (steps, values) = self._stretches[stretch], zip(*known, strict=True)
        return ratio * math.exp(float(np.interp((own.first + own.last) / 2, steps, np.log(values))))

    def seconds(self, layer: str, stretch: int, candidate: Candidate) -> float:
        """Return the mean seconds of one call of a layer; a step that measures a difference computes both."""
        own, shared = self._figures[layer], candidate.phase.residual_steps
        exact = statistics.median(own.seconds)
        if candidate is EXACTLY:
            return exact
        steps = self._stretches[stretch]
        measured = len(steps.groups(shared)) / len(steps) if shared > 1 else 0.0
        rows = 1 / own.copies if candidate.phase.residual_guidance else 1.0
        return exact * (own.ratio(candidate.base) + measured * rows)

    def options(self, layer: str, stretch: int, calls: float) -> list[Option]:
        """Return what a layer can do in a stretch, without what is slower and farther than another option.

        Args:
            layer: its name.
            stretch: number of the stretch.
            calls: of the layer in one step.
        """
        own, steps = self._figures[layer], len(self._stretches[stretch])
        exact = self.seconds(layer, stretch, EXACTLY)
        scale = self.scale[stretch]
        found = []
        for each in candidates(own.bases, steps, share=self._share, guided=own.copies > 1):
            saved = (exact - self.seconds(layer, stretch, each)) * steps * calls
            mse = scale * self._effect(layer, stretch, each) * self.error(layer, stretch, each)
            if each is EXACTLY or (saved > 0 and math.isfinite(mse)):
                found.append(Option(each, saved, mse))
        found.sort(key=lambda option: (option.mse, -option.saved))
        kept: list[Option] = []
        for option in found:
            if not kept or option.saved > kept[-1].saved:
                kept.append(option)
        return kept

    def curve(self, calls: Mapping[str, float]) -> list[Choice]:
        """Return the best choices, from untouched to the fastest one, of falling predicted closeness.

        Args:
            calls: of each layer in one step.
        """
        table = {
            (layer, stretch): self.options(layer, stretch, calls[layer])
            for layer, stretch in itertools.product(self._figures, range(len(self._stretches)))
        }
        steps = (pair for row in table.values() for pair in itertools.pairwise(row))
        slopes = [(after.mse - before.mse) / (after.saved - before.saved) for before, after in steps]
        slopes = [slope for slope in slopes if slope > 0]
        if not slopes:
            return [_choice({place: row[0] for place, row in table.items()})]
        low, high = math.log(min(slopes) / 2), math.log(max(slopes) * 2)
        prices = [math.exp(low + (high - low) * number / _SLOPES) for number in range(_SLOPES + 1)]
        found: list[Choice] = []
        for price in (0.0, *prices):
            picked = {place: max(row, key=lambda each: price * each.saved - each.mse) for place, row in table.items()}
            choice = _choice(picked)
            if not found or choice.saved > found[-1].saved:
                found.append(choice)
        return found

    def config(self, choice: Choice, name: str = "tuned") -> PatchConfig:
        """Return the configuration of a choice."""
        own = []
        steps = self._stretches[-1].last + 1
        for layer in self._figures:
            picked = [choice.options[layer, number].candidate.phase for number in range(len(self._stretches))]
            phases = _joined(picked, [(stretch.last + 1) / steps for stretch in self._stretches])
            if any(not phase.exact for phase in phases):
                own.append(LayerPhases(layer, phases))
        return PatchConfig(name, per_layer=tuple(own))

    def alone(self, stretch: int, phases: Mapping[str, Candidate]) -> PatchConfig:
        """Return the configuration in which one stretch alone is approximated."""
        steps = self._stretches[-1].last + 1
        first, end = self._stretches[stretch].first / steps, (self._stretches[stretch].last + 1) / steps
        own = []
        for layer, candidate in phases.items():
            before = (_until(EXACT, first),) if first else ()
            own.append(LayerPhases(layer, (*before, _until(candidate.phase, end))))
        return PatchConfig("probe", per_layer=tuple(own))


def _summed(squares: Sequence[float], apart: Callable[[int], float]) -> float:
    """Return the squared norm of a sum of errors.

    Args:
        squares: of the errors, in the order of the steps.
        apart: of a number of steps, returns the square of the difference of errors that are so far apart.
    """
    pairs = itertools.combinations(range(len(squares)), 2)
    return sum(squares) + sum(max(0.0, squares[i] + squares[j] - apart(j - i)) for i, j in pairs)


def _trust(table: Sequence[Sequence[float]]) -> float:
    """Return which fraction of the differences between rows is more than noise, by an analysis of variance.

    Args:
        table: by stretch and image; what all stretches of an image have in common says nothing.
    """
    rows, columns = len(table), len(table[0])
    means = [statistics.fmean(row) for row in table]
    shifts = [statistics.fmean(column) for column in zip(*table, strict=True)]
    middle = statistics.fmean(means)
    left = sum(
        (value - mean - shift + middle) ** 2
        for row, mean in zip(table, means, strict=True)
        for value, shift in zip(row, shifts, strict=True)
    )
    noise = (_NOISE * _NOISE_WEIGHT + left) / (_NOISE_WEIGHT + (rows - 1) * (columns - 1))
    between = statistics.variance(means) if rows > 1 else 0.0
    return max(0.0, 1 - noise / columns / between) if between > 0 else 0.0


def _choice(picked: Mapping[tuple[str, int], Option]) -> Choice:
    saved, mse = (sum(getattr(option, name) for option in picked.values()) for name in ("saved", "mse"))
    return Choice(picked, saved, mse)


def _joined(phases: Sequence[Phase], ends: Sequence[float]) -> tuple[Phase, ...]:
    """Return phases with their ends; equal ones that follow each other are one, exact ones at the end are left out."""
    found: list[Phase] = []
    for phase, end in zip(phases, ends, strict=True):
        if found and _until(found[-1], 1.0) == _until(phase, 1.0):
            found.pop()
        found.append(_until(phase, end))
    while found and found[-1].exact:
        found.pop()
    return tuple(found)


def _until(phase: Phase, end: float) -> Phase:
    return dataclasses.replace(phase, until=end)
