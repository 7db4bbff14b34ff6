"""Timesteps as plain numbers: the units that pipelines hand them over in, and what can be a schedule of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

TRAIN_STEPS = 1000  # of a schedule that is not known
SHORTEST = 3  # steps that make a tensor without a scheduler a schedule
_LARGEST_NOISE = 100.0  # level of a scheduler that does not tell: more than models of latents are trained on
_UNEVEN = 12  # times as wide as its neighbour a step of a schedule can be; among diffusers' schedulers it is 10
_CLOSE = 1e-4  # relative difference of two values that are the same
FRACTION, RISING = 0, 1  # of `other_units`: what is left of the run, and how much of it is done
_NOISE_LEVELS = ("sigmas", "schedule", "discrete_sigmas")  # attributes of schedulers


def train_steps(scheduler: Any) -> int:
    return int(getattr(getattr(scheduler, "config", None), "num_train_timesteps", None) or TRAIN_STEPS)


def place(value: float, scheduler: Any, certain: bool = False) -> int | None:
    """Return the place of a timestep among all that a model was trained on, from the noisiest one."""
    steps = train_steps(scheduler)
    if not 0 <= value < steps + certain or not (certain or isinstance(value, int) or value > largest_noise(scheduler)):
        return None
    return int(steps - 1 - value) if value < steps - 1 else 0


def largest_noise(scheduler: Any) -> float:
    levels = [level for sigmas in _noise_levels(scheduler) for level in sigmas]
    signal = getattr(scheduler, "alphas_cumprod", None)
    if not levels and isinstance(signal, torch.Tensor):
        least = float(signal.min())
        return math.sqrt((1 - least) / least) if least > 0 else math.inf
    return max(levels, default=_LARGEST_NOISE)


def other_units(scheduler: Any, timesteps: Sequence[float]) -> Iterator[Sequence[float]]:
    """Yield what some pipelines hand to their models in place of timesteps, each as a sequence over the steps."""
    whole = train_steps(scheduler) if max(timesteps) > 2 else 1
    yield [step / whole for step in timesteps]  # FRACTION
    yield [1 - step / whole for step in timesteps]  # RISING
    for sigmas in _noise_levels(scheduler):
        if len(sigmas) >= len(timesteps):
            falling = sorted(sigmas, reverse=True)[: len(timesteps)]
            logarithms = [math.log(sigma) if sigma > 0 else -math.inf for sigma in falling]
            yield falling
            yield [sigma / 2 for sigma in falling]  # KarrasVePipeline
            yield [logarithm / 4 for logarithm in logarithms]  # EDM, and the latent upscaler
            yield logarithms


def _noise_levels(scheduler: Any) -> Iterator[list[float]]:
    for name in _NOISE_LEVELS:
        sigmas = getattr(scheduler, name, None)
        if isinstance(sigmas, torch.Tensor) and sigmas.ndim == 1:
            yield sigmas.tolist()


def matches(levels: Sequence[float], value: float, rounding: float = 0.0) -> list[int]:
    """Return the steps whose level is a value; an `int` may be what is left of a level without its fraction."""
    whole, close = isinstance(value, int) and value > 1, max(_CLOSE, rounding)
    return [
        step
        for step, level in enumerate(levels)
        if math.isclose(level, value, rel_tol=close, abs_tol=_CLOSE / 10) or (whole and int(level) == value)
    ]


def rounding(timestep: Any) -> float:
    half = isinstance(timestep, torch.Tensor) and timestep.dtype in (torch.float16, torch.bfloat16)
    return torch.finfo(timestep.dtype).eps if half else 0.0


def rises(values: Sequence[float]) -> bool:
    return values[0] < values[-1]


def schedule_length(values: Sequence[float], scheduler: Any) -> int:
    """Return the steps of a tensor that is not a scheduler's; 0 if it cannot be a schedule.

    A schedule falls, begins at the top of the noise as nearly as its own steps are wide, and goes down evenly: no step
    is many times as wide as its neighbour. Timesteps drawn for training do not, unless they happen to be as even. A
    zero at the end of noise levels or of fractions is where the last step leads, and no step.
    """
    whole = train_steps(scheduler)
    for top in (whole, 1.0, largest_noise(scheduler)):
        steps = len(values) if top is whole else len(values) - list(values).count(0)
        levels, slack = list(dict.fromkeys(values[:steps])), top / TRAIN_STEPS
        lowest = (len(levels) - 1) * (TRAIN_STEPS // max(len(levels), 1)) - 1
        if len(levels) < 2 or not lowest * slack <= levels[0] <= top + slack:
            continue
        falls = all(before - after > -slack for before, after in pairwise(values))  # but for rounding
        widths = [max(before - after, 0) + slack for before, after in pairwise(levels)]
        even = all(1 / _UNEVEN < one / other < _UNEVEN for one, other in pairwise(widths))
        return steps if falls and even else 0
    return 0
