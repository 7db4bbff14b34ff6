"""How often intervals and verdicts of distances are right, where the answer is known: `python benchmarks/coverage.py`.

Frechet: features of a decaying spectrum, two images a class that resemble each other, a method that is the untouched
pipeline with a correlation, and that keeps the variety or loses 3 % of it. The tails are normal, or Student's t with 5
degrees of freedom, for each feature apart (`features`) or for all features of an image together (`images`). The
distance must cover its expectation at n images, the difference that of infinitely many images.
Heavy tails: the same with features that are log-normal, that are 0 but for 2 % of the images (`spikes`; in the feature
of the largest variance alone: `one spiky`), or with 2 % of the images at ten times their distance (`far images`).
Kernel: non-negative features of images in one and in several blocks; a method that does not differ.
Few classes: one image a class, and a method that makes every image a little better and spoils some, so that it is
worse. Verdicts are those that `FEWEST_CLASSES` keeps from being given.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.evaluation import statistics as kernel
from elfatt_sd.evaluation.frechet import Target, frechet_figures
from elfatt_sd.evaluation.statistics import (
    BETTER,
    FEWEST_CLASSES,
    WORSE,
    ClassEstimate,
    Interval,
    kernel_distance,
    kernel_within,
    share_interval,
    verdict,
)

TAILS, RATIOS, CORRELATIONS = ("normal", "features", "images"), (0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 25.0), (0.0, 0.9, 0.99)
HEAVY_TAILS = ("log-normal", "spikes", "one spiky", "far images")
FREEDOM = 5  # of Student's t
RARE, FAR = 0.02, 10.0  # fraction of the images that heavy tails rest on, and their distance
FEATURES, IMAGES = 32, 64  # at least
FEW_FEATURES, SPREAD = 8, 1.2  # of the images of few classes, in standard deviations of the reference
SHARPER, MOVED = 0.95, 2.0  # a method multiplies all features by the first, and adds the second where it spoils
ALIKE = 0.5  # part of the variance that images of a class share


@dataclass(frozen=True)
class Setting:
    """What is drawn.

    Attributes:
        tail: of `TAILS` or `HEAVY_TAILS`.
        ratio: images per feature.
        correlation: of a method's image with the untouched one.
        shift: of the reference, in standard deviations.
        variety: standard deviation of the method's features, of that of the untouched ones.
    """

    tail: str
    ratio: float
    correlation: float
    shift: float
    variety: float

    @property
    def size(self) -> tuple[int, int]:
        """Images and features."""
        features = max(FEATURES, round(IMAGES / self.ratio))
        return round(self.ratio * features), features


@dataclass(frozen=True)
class Rates:
    """Fractions of runs: intervals that cover, of the distance and of the difference, and wrong verdicts."""

    distance: float
    difference: float
    wrong: float


def settings() -> Iterator[Setting]:
    """Yield all settings."""
    yield from itertools.starmap(Setting, itertools.product(TAILS, RATIOS, CORRELATIONS, (0.0, 0.5), (1.0, 0.97)))


def heavy_settings() -> Iterator[Setting]:
    """Yield all settings of heavy tails."""
    found = itertools.product(HEAVY_TAILS, (0.5, 2.0, 8.0), (0.0, 0.5, 0.95), (0.0,), (1.0,))
    yield from itertools.starmap(Setting, found)


def covered(setting: Setting, runs: int) -> Rates:
    """Simulate the Frechet distance."""
    count, dimension = setting.size
    generator = torch.Generator().manual_seed(1)
    scale = torch.arange(1, dimension + 1, dtype=torch.float64) ** -0.5
    mean = setting.shift * scale * torch.randn(dimension, generator=generator, dtype=torch.float64)
    target, classes = Target(mean, torch.diag(scale**2)), torch.arange(count) // 2
    truth = (1 - setting.variety) ** 2 * scale.square().sum().item()  # the means are the same
    distances, differences, said = [], [], []
    for _ in range(runs):
        before = draw(setting.tail, count, dimension, generator)
        other = draw(setting.tail, count, dimension, generator)
        after = setting.correlation * before + (1 - setting.correlation**2) ** 0.5 * other
        ours, theirs = (frechet_figures(each * scale, target, classes) for each in (setting.variety * after, before))
        _, interval = ours.limit_difference(theirs)
        distances.append((theirs.published.value, theirs.published.interval()))
        differences.append((truth, interval))
        said.append(verdict(interval, count // 2))
    wrong = (BETTER,) if truth else (BETTER, WORSE)
    return Rates(_covered(distances), _covered(differences, truth), sum(each in wrong for each in said) / runs)


def draw(tail: str, count: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Draw features `[n, d]` of unit variance, two images a class."""
    shared, own = (_noise(tail, size, dimension, generator) for size in (count // 2, count))
    return ALIKE**0.5 * shared.repeat_interleave(2, 0) + (1 - ALIKE) ** 0.5 * own


def _noise(tail: str, count: int, dimension: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    if tail == "normal":
        return normal
    if tail == "log-normal":
        return (normal.exp() - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)
    if tail in HEAVY_TAILS:
        rare = torch.rand(count, 1 if tail == "far images" else dimension, generator=generator) < RARE
        if tail == "far images":
            return normal * torch.where(rare, FAR, 1.0) / math.sqrt(1 + RARE * (FAR**2 - 1))
        spikes = normal * rare / math.sqrt(RARE)
        return spikes if tail == "spikes" else torch.cat((spikes[:, :1], normal[:, 1:]), 1)
    columns = dimension if tail == "features" else 1
    squares = torch.randn(count, columns, FREEDOM, generator=generator, dtype=torch.float64).square().sum(2)
    return normal * ((FREEDOM - 2) / squares).sqrt()


def _covered(found: Sequence[tuple[float, Interval | None]], truth: float | None = None) -> float:
    """Fraction of intervals that hold the truth, by default the mean of all values."""
    wanted = sum(value for value, _ in found) / len(found) if truth is None else truth
    return sum(ends is not None and ends[0] <= wanted <= ends[1] for _, ends in found) / len(found)


@dataclass(frozen=True)
class KernelSetting:
    """What is drawn: `blocks` of images, a correlation, and a shift of the reference."""

    blocks: int
    correlation: float
    shift: float


def kernel_settings() -> Iterator[KernelSetting]:
    """Yield all settings."""
    yield from itertools.starmap(KernelSetting, itertools.product((1, 2, 10), CORRELATIONS, (0.1, 0.5)))


def covered_kernel(setting: KernelSetting, runs: int, count: int = 600, dimension: int = 32) -> Rates:
    """Simulate the kernel distance of images in blocks of `count / blocks`, and as many of the reference."""
    generator = torch.Generator().manual_seed(1)
    block, hidden = count // setting.blocks, 12
    weights = torch.randn(hidden, dimension, generator=generator, dtype=torch.float64) / hidden**0.5
    offset = 0.3 + 0.3 * torch.randn(dimension, generator=generator, dtype=torch.float64)

    def features(causes: Tensor) -> Tensor:
        return 1.5 * torch.relu(causes @ weights + offset)

    def causes(size: int) -> Tensor:
        return torch.randn(size, hidden, generator=generator, dtype=torch.float64)

    reference, classes = features(causes(block) + setting.shift), torch.arange(count) // 2
    within = kernel_within(reference)
    distances, differences, said = [], [], []
    known, kernel.KERNEL_SAMPLE = kernel.KERNEL_SAMPLE, block
    try:
        for _ in range(runs):
            before, other = causes(count), causes(count)
            after = setting.correlation * before + (1 - setting.correlation**2) ** 0.5 * other
            ours, theirs = (
                kernel_distance(features(each), reference, classes, within=within) for each in (after, before)
            )
            interval = (ours - theirs).interval()
            distances.append((theirs.value, theirs.interval()))
            differences.append((0.0, interval))
            said.append(verdict(interval, count // 2))
    finally:
        kernel.KERNEL_SAMPLE = known
    return Rates(_covered(distances), _covered(differences, 0.0), sum(each in (BETTER, WORSE) for each in said) / runs)


@dataclass(frozen=True)
class FewSetting:
    """What is drawn: `classes` of one image each, and the fraction of images that are spoiled."""

    classes: int
    spoiled: float


@dataclass(frozen=True)
class FewRates:
    """Fractions of runs: intervals that cover, and verdicts that would call the worse method better."""

    accuracy: float
    accuracy_difference: float
    psnr: float
    distance_difference: float
    better: float
    better_as_published: float


def few_settings() -> Iterator[FewSetting]:
    """Yield all settings."""
    yield from itertools.starmap(FewSetting, itertools.product((5, 10, 20, FEWEST_CLASSES, 60, 100), (0.05, 0.1, 0.2)))


def covered_few(setting: FewSetting, runs: int) -> FewRates:
    """Simulate accuracy, PSNR and the Frechet distance of few images."""
    generator = torch.Generator().manual_seed(1)
    good, target = 1 - setting.spoiled, Target(torch.zeros(FEW_FEATURES), torch.eye(FEW_FEATURES))
    found = [_of_one_run(setting, target, generator) for _ in range(runs)]
    truths = (good, good - 1, 20 + 20 * good, _worse_by(setting.spoiled, target))
    held = [_covered([(truth, each[place]) for each in found], truth) for place, truth in enumerate(truths)]
    better = [sum(verdict(each[place], FEWEST_CLASSES) == BETTER for each in found) / runs for place in (3, 4)]
    return FewRates(*held, *better)


def _of_one_run(setting: FewSetting, target: Target, generator: torch.Generator) -> list[Interval | None]:
    """Return the intervals of accuracy, its difference, PSNR, and the distance's difference, extrapolated and not."""
    count, classes = setting.classes, range(setting.classes)
    good = (torch.rand(count, generator=generator) >= setting.spoiled).double()
    psnr = 20 + 20 * good + 3 * torch.randn(count, generator=generator)
    before = SPREAD * torch.randn(count, FEW_FEATURES, generator=generator, dtype=torch.float64)
    after = SHARPER * before + MOVED * (1 - good)[:, None]
    ours, theirs = (frechet_figures(each, target, classes) for each in (after, before))
    accuracy, untouched, closeness = (ClassEstimate.mean(each, classes) for each in (good, torch.ones(count), psnr))
    means = [share_interval(good, classes), (accuracy - untouched).interval(), closeness.interval()]
    return [*means, ours.limit_difference(theirs)[1], (ours.published - theirs.published).interval()]


def frechet_distance(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    """Squared Frechet distance of two Gaussians, from symmetric eigenvalues only (Dowson and Landau 1982).

    |mu1 - mu2|^2 + tr(S1 + S2) - 2 tr (F^T S2 F)^(1/2) with S1 = F F^T. F leaves out the directions in which the
    covariance of lower rank is zero: with fewer samples than features these would add noise.
    """
    first, second = Target(mean1, covariance1), Target(mean2, covariance2)
    factor, other = (first.factor, second) if first.rank <= second.rank else (second.factor, first)
    product = factor.T @ other.covariance @ factor
    roots = torch.linalg.eigvalsh((product + product.T) / 2).clamp_min(0).sqrt()
    traces = first.covariance.trace() + second.covariance.trace()
    return float((first.mean - second.mean).square().sum() + traces - 2 * roots.sum())


def _worse_by(spoiled: float, target: Target) -> float:
    """Return the difference in distance of infinitely many images, which is above 0."""
    one, own = torch.ones(FEW_FEATURES).double(), SPREAD**2 * torch.eye(FEW_FEATURES).double()
    mixed = SHARPER**2 * own + MOVED**2 * spoiled * (1 - spoiled) * torch.outer(one, one)
    known = target.mean, target.covariance
    return frechet_distance(MOVED * spoiled * one, mixed, *known) - frechet_distance(0 * one, own, *known)


def table(titles: list[str], lines: Sequence[tuple[Any, Any]]) -> str:
    """Write a Markdown table, a line for each setting."""
    rows = [titles, ["---"] * len(titles)]
    for setting, rates in lines:
        values = [getattr(setting, field.name) for field in fields(setting)]
        rates_of = [f"{getattr(rates, field.name):.3f}" for field in fields(rates)]
        rows.append([*(value if isinstance(value, str) else f"{value:g}" for value in values), *rates_of])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def report(runs: int, every: int) -> str:
    """Simulate every so many of the settings, and write the page."""
    named = ["distance covered", "difference covered", "wrong verdicts"]
    frechet = [(each, covered(each, runs)) for each in itertools.islice(settings(), 0, None, every)]
    heavy = [(each, covered(each, runs)) for each in itertools.islice(heavy_settings(), 0, None, every)]
    kernels = [(each, covered_kernel(each, runs)) for each in itertools.islice(kernel_settings(), 0, None, every)]
    parts = [
        "# Coverage of intervals and verdicts",
        "`python benchmarks/coverage.py --out docs/coverage.md` wrote this page. "
        f"Fractions of {runs} simulated runs for each setting; an interval of 95 % should cover in 0.95, and with "
        f"{runs} runs two standard deviations of chance are {2 * (0.05 * 0.95 / runs) ** 0.5:.3f}. "
        "How the draws are made stands in the script.",
        "## Frechet distance",
        _summary(frechet),
        table(["tail", "images per feature", "correlation", "shift", "variety", *named], frechet),
        "## Heavy tails",
        _summary(heavy),
        table(["tail", "images per feature", "correlation", "shift", "variety", *named], heavy),
        "## Kernel distance",
        _summary(kernels),
        table(["blocks", "correlation", "shift", *named], kernels),
        few_section(runs, every),
    ]
    return "\n\n".join(parts) + "\n"


def few_section(runs: int, every: int = 1) -> str:
    """Simulate few classes, and write the section."""
    found = [(each, covered_few(each, runs)) for each in itertools.islice(few_settings(), 0, None, every)]
    named = ["accuracy covered", "its difference covered", "PSNR covered", "distance difference covered"]
    parts = [
        "## Few classes",
        "A method makes every image a little better, and spoils some of them. So it is worse. "
        f"Fewer than {FEWEST_CLASSES} classes get no verdict, and no interval but that of an accuracy. "
        "The table shows what they would get without this rule. The distance's difference is extrapolated. "
        "The last column is of the published distance.",
        table(["classes", "spoiled", *named, "called better", "called better as published"], found),
    ]
    return "\n\n".join(parts)


def _summary(lines: list[tuple[Setting, Rates]] | list[tuple[KernelSetting, Rates]]) -> str:
    found = [rates for _, rates in lines]
    said = [
        f"{title}: {sum(values) / len(values):.3f} on average, {end} {worst(values):.3f}"
        for title, values, end, worst in (
            ("Distance covered", [each.distance for each in found], "lowest", min),
            ("difference covered", [each.difference for each in found], "lowest", min),
            ("wrong verdicts", [each.wrong for each in found], "highest", max),
        )
    ]
    return f"{'; '.join(said)}; {len(found)} settings."


def main() -> None:
    """Parse the command line and simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="of each setting")
    parser.add_argument("--every", type=int, default=1, help="take every so many of the settings")
    parser.add_argument("--out", type=Path, help="page to write; the terminal by default")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    text = report(chosen.runs, chosen.every)
    if chosen.out:
        chosen.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
