"""Distances between sets of features, with honest uncertainty; float64, and no scipy.

Every figure is an `Estimate`: its value and the influence of each picture on it. Influences make intervals and,
subtracted picture by picture, paired differences. The variance is that of the infinitesimal jackknife over classes
(Jaeckel 1972; Efron 1982, chapter 6): for Frechet distances it needs the eigenvectors of one symmetric matrix, where a
bootstrap needs a thousand such decompositions.
Legend for shapes: n pictures, m reference pictures, d features.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.config import ElfattError
from elfatt_sd.files import atomic_file

Interval = tuple[float, float]
Features = Tensor | np.ndarray[Any, Any]  # in memory, or memory-mapped
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
TOO_FEW = "too few classes to tell"
# What an interval knows of damage to one picture in ten, it knows from the pictures that are hit. Of 30 classes none is
# hit in 0.9 ** 30 = 4 % of all runs; of 5 none in 59 %, and the interval is then short, and wrong.
FEWEST_CLASSES = 30
ROWS = 4096  # rows of a feature file that are in memory at once
KERNEL_SAMPLE = 5000  # pictures that the kernel distance compares with, at most


class FeatureStatistics:
    """Mean and covariance of features that arrive in batches (Chan, Golub and LeVeque 1979)."""

    def __init__(self, dimension: int) -> None:
        """Start with no samples of `dimension` features."""
        self.count = 0
        self.mean = torch.zeros(dimension, dtype=torch.float64)
        self._scatter = torch.zeros(dimension, dimension, dtype=torch.float64)

    @classmethod
    def from_moments(cls, mean: Tensor, covariance: Tensor, count: int) -> FeatureStatistics:
        """Build from a mean `[d]`, an unbiased covariance `[d, d]` and the number of samples, at least 2."""
        statistics = cls(len(mean))
        statistics.count = count
        statistics.mean = mean.to(torch.float64)
        statistics._scatter = covariance.to(torch.float64) * (count - 1)
        return statistics

    @classmethod
    def of(cls, features: Features) -> FeatureStatistics:
        """Stream over all rows of features `[n, d]`, in memory or memory-mapped."""
        statistics = cls(features.shape[1])
        for rows in batches(features):
            statistics.update(rows)
        return statistics

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance `[d, d]`.

        Raises:
            ElfattError: there are fewer than 2 samples.
        """
        if self.count < 2:
            raise ElfattError(f"{self.count} pictures have no covariance; a distance needs at least 2.")
        return self._scatter / (self.count - 1)

    def update(self, features: Tensor) -> None:
        """Add a batch of features `[n, d]`."""
        rows = features.detach().to("cpu", torch.float64)
        if len(rows):
            mean = rows.mean(0)
            centred = rows - mean
            total, step = self.count + len(rows), mean - self.mean
            between = torch.outer(step, step) * (self.count * len(rows) / total)
            self._scatter = self._scatter + centred.T @ centred + between
            self.mean = self.mean + step * (len(rows) / total)
            self.count = total

    def save(self, path: Path) -> None:
        """Write `mu`, `sigma` and `count` as `.npz`, the names that other tools use."""
        with atomic_file(path) as file:
            np.savez(file, mu=self.mean.numpy(), sigma=self.covariance.numpy(), count=np.int64(self.count))

    @classmethod
    def load(cls, path: Path) -> FeatureStatistics:
        """Read what `save` wrote.

        Raises:
            ElfattError: the file is missing or holds something else.
        """
        mean, covariance, count = load_moments(path)
        if count is None:
            raise ElfattError(f"{path} has no count; accepted is a file with mu, sigma and count.")
        return cls.from_moments(mean, covariance, count)


def load_moments(path: Path) -> tuple[Tensor, Tensor, int | None]:
    """Read `mu` `[d]` and `sigma` `[d, d]` from an `.npz` of this or another tool, and `count` where it is given.

    Raises:
        ElfattError: the file cannot be read, lacks an array, or their shapes do not fit.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            mean, covariance = (torch.from_numpy(np.asarray(data[key], dtype=np.float64)) for key in ("mu", "sigma"))
            count = int(data["count"]) if "count" in data else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ElfattError(f"{path} cannot be read ({error}); accepted is an .npz file with mu and sigma.") from error
    if mean.dim() != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"mu {tuple(mean.shape)} and sigma {tuple(covariance.shape)}"
        raise ElfattError(f"{path} has {shapes}; accepted are [d] and [d, d].")
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise ElfattError(f"{path} holds NaN or infinity; accepted are finite mu and sigma.")
    return mean, covariance, count


def batches(features: Features) -> Iterator[Tensor]:
    """Cut features `[n, d]`, which may be memory-mapped, into float64 pieces of at most `ROWS` rows."""
    for start in range(0, len(features), ROWS):
        piece = features[start : start + ROWS]
        yield torch.as_tensor(np.array(piece) if isinstance(piece, np.ndarray) else piece).to(torch.float64)


@dataclass(frozen=True)
class Estimate:
    """A figure and how much each picture moves it.

    Attributes:
        value: the figure.
        influence: `[n]` float64, the derivative of the figure in the direction of picture i's weight (sums to 0).
    """

    value: float
    influence: Tensor

    @classmethod
    def mean(cls, values: Tensor) -> Estimate:
        """The mean of one number per picture, `[n]`."""
        values = values.to(torch.float64)
        return cls(values.mean().item(), values - values.mean())

    def __sub__(self, other: Estimate) -> Estimate:
        """The paired difference of two figures of the same prompts and latents."""
        return Estimate(self.value - other.value, self.influence - other.influence)

    def standard_error(self, groups: Sequence[int] | Tensor) -> float | None:
        """Standard error over classes; None with fewer than 2 classes.

        Args:
            groups: the class of each picture, n of them; pictures of one class may depend on each other.
        """
        classes, index = torch.unique(torch.as_tensor(groups), return_inverse=True)
        count = len(classes)
        if count < 2:
            return None
        sums = torch.zeros(count, dtype=torch.float64).index_add_(0, index, self.influence)
        return math.sqrt(sums.square().sum().item() * count / (count - 1)) / len(self.influence)

    def interval(self, groups: Sequence[int] | Tensor) -> Interval | None:
        """Interval of 95 % for the figure's expectation at this number of pictures; None with fewer than 2 classes.

        A Frechet distance of n pictures is biased upwards, by about the same amount for all methods; the interval
        does not remove that.

        Args:
            groups: the class of each picture, n of them.
        """
        error = self.standard_error(groups)
        if error is None:
            return None
        half = student_quantile(0.975, len(torch.unique(torch.as_tensor(groups))) - 1) * error
        return self.value - half, self.value + half


def verdict(interval: Interval | None, classes: int, *, lower_is_better: bool = True) -> str:
    """Say what the interval of a difference to the baseline shows.

    Args:
        interval: of the difference.
        classes: number of different classes behind it; fewer than `FEWEST_CLASSES` show nothing.
        lower_is_better: which way is better.
    """
    if classes < FEWEST_CLASSES:
        return TOO_FEW
    if interval is None or interval[0] <= 0 <= interval[1]:
        return NO_DIFFERENCE
    return BETTER if (interval[1] < 0) == lower_is_better else WORSE


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else Abramowitz and Stegun 26.7.5."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        centred = 2 * probability - 1
        return centred * math.sqrt(2 / (1 - centred**2))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def share_interval(shares: Tensor, groups: Sequence[int] | Tensor, parts: int = 1) -> Interval | None:
    """Interval of 95 % for the mean of shares, which stays within 0 and 1 and has a width also where all are equal.

    Wilson's interval, with as many trials as would give the standard error over classes (Kish 1965), and with Student's
    quantile, since that error is known from so many classes only. Where the classes do not differ, each of them is one
    trial. None with fewer than 2 classes.

    Args:
        shares: `[n]` numbers from 0 to 1, one per picture.
        groups: the class of each picture.
        parts: judgements that a share is the mean of; there cannot be more trials than that times n.
    """
    figure, classes = Estimate.mean(shares), len(torch.unique(torch.as_tensor(groups)))
    error, share = figure.standard_error(groups), min(max(figure.value, 0.0), 1.0)
    if error is None:
        return None
    trials = min(share * (1 - share) / error**2, parts * len(shares)) if error else classes
    return wilson_interval(share * trials, trials, student_quantile(0.975, classes - 1))


def wilson_interval(successes: float, trials: float, quantile: float | None = None) -> Interval:
    """Interval for a share (Wilson 1927).

    Args:
        successes: how many of the trials.
        trials: their number, which need not be whole.
        quantile: how many standard errors it reaches; None for those of a normal interval of 95 %.
    """
    z = NormalDist().inv_cdf(0.975) if quantile is None else quantile
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return (low if successes else 0.0), (high if successes < trials else 1.0)


def frechet_distance(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    """Squared Frechet distance of two Gaussians, from symmetric eigenvalues only (Dowson and Landau 1982).

    |mu1 - mu2|^2 + tr(S1 + S2) - 2 tr (F^T S2 F)^(1/2) with S1 = F F^T. F leaves out the directions in which the
    covariance of lower rank is zero: with fewer samples than features these would add noise.

    Args:
        mean1: `[d]`.
        covariance1: `[d, d]`.
        mean2: `[d]`.
        covariance2: `[d, d]`.
    """
    mean1, covariance1, mean2, covariance2 = (x.to(torch.float64) for x in (mean1, covariance1, mean2, covariance2))
    first, second = _factor(covariance1), _factor(covariance2)
    factor, other = (first, covariance2) if first.shape[1] <= second.shape[1] else (second, covariance1)
    roots = torch.linalg.eigvalsh(_symmetric(factor.T @ other @ factor)).clamp_min(0).sqrt()
    return float((mean1 - mean2).square().sum() + covariance1.trace() + covariance2.trace() - 2 * roots.sum())


def _factor(covariance: Tensor) -> Tensor:
    """F `[d, rank]` with F F^T the covariance."""
    values, vectors = torch.linalg.eigh(_symmetric(covariance))
    kept = values > values.abs().max() * len(values) * torch.finfo(torch.float64).eps
    factor: Tensor = vectors[:, kept] * values[kept].sqrt()
    return factor


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


def frechet_estimate(features: Features, mean: Tensor, covariance: Tensor) -> Estimate:
    """Squared Frechet distance of pictures to a reference, with the influence of each picture.

    With centred features C `[n, d]`, the trace of the root is that of K^(1/2), K = C S C^T / (n - 1) `[n, n]`.
    Weighting row i changes tr K^(1/2) at the rate (K^(1/2))_ii / 2, so one symmetric eigenproblem gives the value and
    all influences, and no inverse appears. With more pictures than features the same numbers come from `[d, d]`
    matrices, in passes over the features.

    Args:
        features: `[n, d]`, in memory or memory-mapped.
        mean: the reference's `[d]`.
        covariance: the reference's `[d, d]`.

    Raises:
        ElfattError: there are fewer than 2 pictures, or the numbers of features differ.
    """
    count, dimension = features.shape
    if dimension != len(mean):
        message = (
            f"features have {dimension} columns, the reference {len(mean)}; give a reference of the same extractor."
        )
        raise ElfattError(message)
    statistics = FeatureStatistics.of(features)
    spread, shift = statistics.covariance.trace(), statistics.mean - mean
    root = (_root_by_pictures if count <= dimension else _root_by_features)(features, statistics, covariance)
    parts = []
    for rows, diagonal in zip(batches(features), torch.split(root, ROWS), strict=True):
        centred = rows - statistics.mean
        parts.append(2 * centred @ shift + centred.square().sum(1) * (count / (count - 1)) - count * diagonal)
    value = shift.square().sum() + spread + covariance.trace() - 2 * root.sum()
    return Estimate(value.item(), torch.cat(parts) - spread + root.sum())


def _root_by_pictures(features: Features, statistics: FeatureStatistics, covariance: Tensor) -> Tensor:
    """Diagonal `[n]` of K^(1/2) from the `[n, n]` matrix."""
    centred = torch.cat(list(batches(features))) - statistics.mean
    values, vectors = torch.linalg.eigh(_symmetric(centred @ covariance @ centred.T / (len(centred) - 1)))
    noise = values.max() * len(values) * torch.finfo(torch.float64).eps  # centring leaves one direction empty
    diagonal: Tensor = vectors.square() @ torch.where(values > noise, values, 0).sqrt()
    return diagonal


def _root_by_features(features: Features, statistics: FeatureStatistics, covariance: Tensor) -> Tensor:
    """Diagonal `[n]` of K^(1/2) = Y |Y^T Y|^(-1/2) Y^T with Y = C F V, F F^T the reference's covariance."""
    factor = _factor(covariance)
    values, vectors = torch.linalg.eigh(_symmetric(factor.T @ statistics.covariance @ factor))
    kept = values > values.max() * len(values) * torch.finfo(torch.float64).eps
    basis = factor @ vectors[:, kept] * values[kept] ** -0.25
    return torch.cat([((rows - statistics.mean) @ basis).square().sum(1) for rows in batches(features)]) / (
        statistics.count - 1
    )


def kernel_distance(features: Features, reference: Features, *, within: float | None = None) -> Estimate:
    """Unbiased squared maximum mean discrepancy with the kernel (x . y / d + 1)^3 (KID; Binkowski et al. 2018).

    This is the full U-statistic, which the usual average over random subsets approximates. Every picture is compared
    with at most `KERNEL_SAMPLE` others and as many of the reference, evenly spaced, so that time grows linearly with
    the number of pictures.

    Args:
        features: `[n, d]`, in memory or memory-mapped.
        reference: `[m, d]`.
        within: the reference's part, from `kernel_within(reference)`, to compute it once for many methods.

    Raises:
        ElfattError: there are fewer than 2 pictures.
    """
    if len(features) < 2 or len(reference) < 2:
        fewest = min(len(features), len(reference))
        raise ElfattError(f"{fewest} pictures have no kernel distance; it needs at least 2.")
    within = kernel_within(reference) if within is None else within
    own, across = _similarity(features, features, same=True), _similarity(features, reference)
    projection = 2 * (own - across)
    return Estimate((own.mean() - 2 * across.mean()).item() + within, projection - projection.mean())


def kernel_within(reference: Features) -> float:
    """Mean kernel between different pictures of the reference `[m, d]`."""
    return _similarity(_spaced(reference), _spaced(reference), same=True).mean().item()


def _spaced(features: Features) -> Tensor:
    """At most `KERNEL_SAMPLE` evenly spaced rows, float64."""
    return torch.cat(list(batches(features[_spaced_rows(len(features))])))


def _spaced_rows(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(min(count, KERNEL_SAMPLE)) * count // min(count, KERNEL_SAMPLE)


def _similarity(features: Features, partners: Features, *, same: bool = False) -> Tensor:
    """Mean kernel `[n]` of each row with the partners; with `same`, a row is not its own partner."""
    others, dimension, parts = _spaced(partners), features.shape[1], []
    for rows in batches(features):
        parts += [(piece @ others.T / dimension + 1).pow(3).sum(1) for piece in torch.split(rows, 1024)]
    total, count = torch.cat(parts), torch.full((len(features),), len(others), dtype=torch.float64)
    if same:
        chosen = _spaced_rows(len(features))
        total[chosen] -= (others.square().sum(1) / dimension + 1).pow(3)
        count[chosen] -= 1
    return total / count


def estimate_as_dict(estimate: Estimate, groups: Sequence[int] | Tensor) -> dict[str, Any]:
    """Plain data: `value` and `interval` (None with fewer than 2 classes)."""
    return {"value": estimate.value, "interval": as_list(estimate.interval(groups))}


def as_list(interval: Interval | None) -> list[float] | None:
    """Plain data for an interval."""
    return None if interval is None else list(interval)
