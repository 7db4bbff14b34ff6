"""The spectrum of images seen through a reference, with and without each class of images, from one eigenproblem.

With scatter S = F^T C^T C F (C centred features, F F^T the reference's covariance) and its eigenvalues l:

    phi(t) = sum of l / (l + t), t = exp(s)       degrees of freedom above the scale t
    tr S^(1/2) = 2 / pi * integral of t^(1/2) * slope(s) ds,  slope = -d phi / ds
    log det(1 + S_(-c) / t) = log det(1 + S / t) + log det(1 - H(t)),  H the leverages of the images of class c

The derivatives of the last line give phi and slope of the images without class c, exactly.

Legend for shapes: n images, d features, r eigenvalues, q scales, g classes, m images of a class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from elfatt_sd.evaluation.intervals import Groups
from elfatt_sd.evaluation.statistics import ROWS, Features, FeatureStatistics, batches, take

# With a step of 1 the trapezoidal rule has an error of 1e-8; 9 steps beyond the spectrum leave 1e-4 of a correction.
MARGIN, RANGE = 9.0, 40.0
# Directions of smaller eigenvalues, by the largest one, are lost to rounding; their roots still count.
RESOLVED = 1e-9
ELEMENTS = 2**24  # of the largest tensors, at most


class Spectrum:
    """Eigenvalues of the scatter of images, seen through the factor of a reference's covariance."""

    def __init__(self, features: Features, statistics: FeatureStatistics, factor: Tensor) -> None:
        if statistics.count <= factor.shape[1]:
            seen = (torch.cat(list(batches(features))) - statistics.mean) @ factor
            values, vectors = torch.linalg.eigh(seen @ seen.T)
            kept = values > values.max() * RESOLVED
            vectors = seen.T @ vectors[:, kept] / values[kept].sqrt()
        else:
            scatter = factor.T @ (statistics.covariance * (statistics.count - 1)) @ factor
            values, vectors = torch.linalg.eigh((scatter + scatter.T) / 2)
            kept = values > values.max() * RESOLVED
            vectors = vectors[:, kept]
        noise = values.max() * len(values) * torch.finfo(torch.float64).eps
        self.root = torch.where(values > noise, values, 0).sqrt().sum()  # the trace of S^(1/2), of all values
        self.values = values[kept]  # `[r]`, those whose directions are resolved
        # `[d, r]`; centred features times this are orthonormal columns
        self.basis = factor @ vectors / self.values.sqrt()
        alike = [-RANGE, -RANGE]  # ends of images that do not vary
        ends = self.values.log()[[0, -1]].tolist() if len(self.values) else alike  # in ascending order
        low, high = max(ends[0], ends[1] - RANGE) - MARGIN, ends[1] + MARGIN
        # `[q]`, a step of 1 in their logarithm
        self.scales = torch.arange(low, high + 1, dtype=torch.float64, device="cpu").exp()
        self.shares = self.values / (self.values + self.scales[:, None])  # [q, r]

    @property
    def phi(self) -> Tensor:
        """Degrees of freedom above each scale, `[q]`."""
        phi: Tensor = self.shares.sum(1)
        return phi

    def most(self, free: int) -> Tensor:
        """Most degrees of freedom `[q]` that a part of the images with `free` of them has, by interlacing."""
        most: Tensor = self.shares[:, max(len(self.values) - free, 0) :].sum(1)
        return most

    @property
    def slope(self) -> Tensor:
        """Their decrease from scale to scale, `[q]`."""
        slope: Tensor = (self.shares * (1 - self.shares)).sum(1)
        return slope


def integral(squares: Tensor, slope: Tensor) -> Tensor:
    """2 / pi * integral of squares^(1/2) * slope ds over the scales, the last dimension."""
    terms = squares.clamp_min(0).sqrt() * slope
    return 2 / math.pi * (terms.sum(-1) + terms[..., -1] / math.expm1(0.5))  # the terms beyond fall by exp(-1 / 2) each


@dataclass(frozen=True)
class ByClass:
    """Sums over the images of each class, and the spectrum without the class."""

    sizes: Tensor  # images of each class, `[g]`; at least 2 images must be left without any
    along: Tensor  # sum of centred features times the shift of the means, `[g]`
    sums: Tensor  # squared length of the sum of centred features, `[g]`
    squares: Tensor  # sum of their squared lengths, `[g]`
    roots: Tensor  # part of the class in tr S^(1/2), `[g]`
    phi: Tensor  # degrees of freedom without the class, `[g, q]`
    slope: Tensor  # their decrease, `[g, q]`
    inside: Tensor  # sum of x^T (S + t)^(-1) x over images x of the class, `[g, q]`
    outside: Tensor  # sum of x^T (S_(-c) + t)^(-1) x over images x of the class, `[g, q]`
    kurtosis: float  # of a feature, the largest of all


def by_class(features: Features, mean: Tensor, shift: Tensor, spectrum: Spectrum, groups: Groups) -> ByClass:
    """Go through the images once, classes of one size together."""
    _, place, sizes = torch.unique(torch.as_tensor(groups, device="cpu"), return_inverse=True, return_counts=True)
    count, scales = len(features), len(spectrum.scales)
    along, sums, squares, roots = torch.zeros(4, len(sizes), dtype=torch.float64, device="cpu")
    second, fourth = torch.zeros(2, len(mean), dtype=torch.float64, device="cpu")
    phi, slope, inside, outside = torch.zeros(4, len(sizes), scales, dtype=torch.float64, device="cpu")
    for chosen, rows in _chunks(place, sizes, len(spectrum.values), scales):
        shape, rest = (*rows.shape, -1), count - rows.shape[1]
        centred = take(features, rows.flatten()) - mean
        powers = centred.square()
        second, fourth = second + powers.sum(0), fourth + powers.square().sum(0)
        seen = (centred @ spectrum.basis).reshape(shape)  # [g, m, r]
        centred = centred.reshape(shape)
        total = centred.sum(1)
        along[chosen], sums[chosen] = total @ shift, total.square().sum(1)
        squares[chosen], roots[chosen] = centred.square().sum((1, 2)), seen.square().sum(1) @ spectrum.values.sqrt()
        if rest >= 2:
            # without the class the mean moves, too: its part of the scatter is C^T (1 + 11^T / rest) C
            seen = seen + seen.mean(1, keepdim=True) * (math.sqrt(count / rest) - 1)
            large = 4 * rows.shape[1] > len(spectrum.values)
            inside[chosen] = seen.square().sum(1) @ spectrum.shares.T
            found, slope[chosen], outside[chosen] = (_anew if large else _downdated)(seen, spectrum)
            phi[chosen] = torch.minimum(found, spectrum.most(rest - 1))
    kurtosis = (fourth * count / second.square()).nan_to_num(0).max().item()  # NaN where a feature does not vary
    return ByClass(sizes.to(torch.float64), along, sums, squares, roots, phi, slope, inside, outside, kurtosis)


def _chunks(place: Tensor, sizes: Tensor, rank: int, scales: int) -> Iterator[tuple[Tensor, Tensor]]:
    order, starts = torch.argsort(place, stable=True), sizes.cumsum(0) - sizes
    for size in torch.unique(sizes).tolist():
        step = max(min(ROWS // size, ELEMENTS // (size * max(rank, 3 * scales * size))), 1)
        for chosen in torch.split((sizes == size).nonzero()[:, 0], step):
            yield chosen, order[starts[chosen, None] + torch.arange(size, device="cpu")]


def _downdated(seen: Tensor, spectrum: Spectrum) -> tuple[Tensor, Tensor, Tensor]:
    first = spectrum.shares * (1 - spectrum.shares)
    weights = torch.stack((spectrum.shares, first, first * (1 - 2 * spectrum.shares)))
    here, once, twice = _products(seen, weights.flatten(0, 1)).chunk(3, dim=1)  # [g, q, m, m] each
    inverse = torch.linalg.inv(torch.eye(seen.shape[1], dtype=torch.float64, device="cpu") - here)
    moved = inverse @ once
    falls = (_trace(moved, moved) + _trace(inverse, twice), _trace(inverse, once), _trace(inverse, here))
    return spectrum.phi - falls[1], spectrum.slope - falls[0], falls[2]


def _products(seen: Tensor, weights: Tensor) -> Tensor:
    """Sums `[g, k, m, m]` of weights `[k, r]` times the products of any two of the rows `[g, m, r]`."""
    count, size, rank = seen.shape
    found = seen.new_zeros(count, len(weights), size, size)
    for pairs in torch.split(torch.triu_indices(size, size, device="cpu"), max(ELEMENTS // (count * rank), 1), dim=1):
        first, second = pairs
        sums = ((seen[:, first] * seen[:, second]) @ weights.T).mT
        found[:, :, first, second] = sums
        found[:, :, second, first] = sums
    return found


def _trace(left: Tensor, right: Tensor) -> Tensor:
    """tr(left right) of the last two dimensions."""
    return (left * right.mT).sum((-2, -1))


def _anew(seen: Tensor, spectrum: Spectrum) -> tuple[Tensor, Tensor, Tensor]:
    phi, slope, outside = [], [], []
    root = spectrum.values.sqrt()
    for rows in seen:
        added = root[:, None] * (rows.T @ rows) * root
        values, vectors = torch.linalg.eigh(torch.diag(spectrum.values) - added)
        shares = values.clamp_min(0) / (values.clamp_min(0) + spectrum.scales[:, None])
        phi.append(shares.sum(1))
        slope.append((shares * (1 - shares)).sum(1))
        far = ((added @ vectors) * vectors).sum(0)
        outside.append((far / (values.clamp_min(0) + spectrum.scales[:, None])).sum(1))
    return torch.stack(phi), torch.stack(slope), torch.stack(outside)
