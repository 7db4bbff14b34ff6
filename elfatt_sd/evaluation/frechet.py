"""The Frechet distance of images to a reference, its limit for infinitely many images, and intervals by class."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from elfatt_sd.evaluation.statistics import ROWS, ClassEstimate, Groups, Interval, left_out, moments

# With a step of 1 the trapezoidal rule has an error of 1e-8; 9 steps beyond the spectrum leave 1e-4 of a correction.
MARGIN, RANGE = 9.0, 40.0
# Directions of smaller eigenvalues, by the largest one, are lost to rounding; their roots still count.
RESOLVED = 1e-9
ELEMENTS = 2**24  # of the largest tensors, at most
HEAVY = 8.0  # kurtosis of a feature, 3 where it is normal: beyond it, a few images may make the standard error
EPS = torch.finfo(torch.float64).eps


class Target:
    """The Gaussian of a reference, whose factor is computed once for many rows."""

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        self.mean, self.covariance = mean.to(torch.float64), covariance.to(torch.float64)
        values, vectors = torch.linalg.eigh((self.covariance + self.covariance.T) / 2)
        kept = values > values.abs().max() * len(values) * EPS
        self.factor: Tensor = vectors[:, kept] * values[kept].sqrt()  # F `[d, rank]` with F F^T the covariance
        self.rank = self.factor.shape[1]  # directions in which the reference varies


@dataclass(frozen=True)
class FrechetFigures:
    """What n images say of their squared Frechet distance to a reference."""

    published: ClassEstimate  # the distance of these n images, D_n, as it is published
    # the distance of infinitely many images, where the scales below those that the images resolve hold as many
    # directions as they can. Equal to `most` with more images than features.
    least: ClassEstimate
    most: ClassEstimate  # the same, where these scales hold no direction more
    # `[2, g]`, what each class moves `least` and `most` if the relation of scales is found again without it
    refits: Tensor
    kurtosis: float  # of a feature, the largest of all

    def limit_difference(self, other: FrechetFigures) -> tuple[float, Interval | None]:
        """The paired difference with infinitely many images, and its interval of 95 %; both ends hold for all scales.

        With heavy tails a few images say how scales relate, which must then be found again without each class. They
        make the standard error, too: `ClassEstimate.interval` then has few degrees of freedom.
        """
        ends = [self.least - other.least, self.most - other.most]
        heavy = max(self.kurtosis, other.kurtosis) > HEAVY
        if heavy:
            refits = (self.refits - other.refits)[:, None]
            ends = [
                ClassEstimate(end.value, torch.cat((end.moves, moves))) for end, moves in zip(ends, refits, strict=True)
            ]
        known = [interval for end in ends if (interval := end.interval(heavy=heavy)) is not None]
        value = (ends[0].value + ends[1].value) / 2
        return value, (min(low for low, _ in known), max(high for _, high in known)) if known else None


def frechet_figures(features: Tensor, target: Target, groups: Groups) -> FrechetFigures:
    """Measure images against a reference, with what every class of images does to the figures.

    D_n follows the definition. D of infinitely many images needs tr S^(1/2) of the images' distribution; its mean and
    variance enter as the mean of |x - mu|^2, which has no bias. Where n images show phi(t), their distribution has that
    at the larger scale k(t), and the root is the integral over k in place of t / (n - 1). k(t) is known from how far an
    image lies from images of other classes: k = t phi_out / phi, phi_out the mean of x^T (S_(-g) + t)^(-1) x over
    images x of class g. For independent light-tailed images this is t / (n - 1 - phi), the equation of Marcenko and
    Pastur (1967) that Tiomoko and Couillet (2019) use for this distance; the mean over classes left out also holds for
    heavy tails and for images of a class that resemble each other. Chong and Forsyth (2020) extrapolate in 1 / n; that
    needs n far above d, this does not. Scales below k(0), of n images with n below d, are not seen: there are between
    none and all directions that the images leave, and both ends are given.
    """
    count = len(features)
    mean, covariance = moments(*torch.split(features, ROWS))
    trace, shift = covariance.trace(), mean - target.mean
    constant, length = target.covariance.trace(), shift.square().sum()
    free = torch.tensor(count - 1, dtype=torch.float64, device="cpu")
    spectrum = Spectrum(features, mean, covariance, target.factor)
    left = by_class(features, mean, shift, spectrum, groups)

    # the derivative of D_n in the weight of each class, with the diagonal of a root (Jaeckel's infinitesimal jackknife)
    slope = 2 * left.along / count + left.squares / free - left.roots / free.sqrt()
    slope = slope - left.sizes / count * slope.sum()
    near = left.squares + 2 * left.along + left.sizes * length  # sum of |x - mu|^2 over the images of each class
    alone = count - left.sizes.max() < 2  # no distance is left without a class
    published = length + trace + constant - 2 * spectrum.root / free.sqrt()
    alike = not len(spectrum.values)  # as far as the reference varies, too
    one = torch.ones_like(spectrum.scales)
    ratio = one if alone or alike else left.outside.sum(0) / count * (free - spectrum.phi) / spectrum.phi
    roots = _limit_roots(spectrum, spectrum.root, spectrum.phi, spectrum.slope, ratio, free, target.rank)
    limits = near.sum() / count + constant - 2 * roots
    if alone:
        whole, least, most = (ClassEstimate(value.item(), slope[None]) for value in (published, *limits))
        return FrechetFigures(whole, least, most, slope.expand(2, -1), left.kurtosis)

    rest = count - left.sizes
    root = spectrum.root - integral(spectrum.scales, spectrum.slope - left.slope)
    moved = length - 2 * left.along / rest + left.sums / rest.square()
    spread = (trace * free - left.squares - left.sums / rest) / (rest - 1)
    published_without = moved + spread + constant - 2 * root / (rest - 1).sqrt()
    near_without = (near.sum() - near) / rest + constant

    def limits_without(ratio: Tensor) -> Tensor:
        return near_without - 2 * _limit_roots(spectrum, root, left.phi, left.slope, ratio, rest - 1, target.rank)

    withouts = (published_without, *limits_without(ratio))
    # To leave out is right where one class changes much that others determine, such as n images near d features; it is
    # short where a few images of a heavy tail come to light nowhere else, and the derivative is not.
    whole, least, most = (
        ClassEstimate(value.item(), torch.stack((slope, left_out(without))))
        for value, without in zip((published, *limits), withouts, strict=True)
    )
    # the relation of scales without each class
    joint = (left.inside - (spectrum.phi - left.phi)).clamp_min(0)
    inverse = 1 + left.outside / left.sizes[:, None]  # P
    raised = (inverse * joint).sum(0) / (joint / inverse).sum(0).clamp_min(EPS) * joint
    outside = (left.outside.sum(0) - left.outside + raised) / rest[:, None]
    found = outside * (rest[:, None] - 1 - left.phi) / left.phi.clamp_min(EPS)
    return FrechetFigures(whole, least, most, left_out(limits_without(found)), left.kurtosis)


def _limit_roots(
    spectrum: Spectrum, root: Tensor, phi: Tensor, slope: Tensor, ratio: Tensor, free: Tensor, rank: int
) -> Tensor:
    """Roots of the distribution `[2, ...]`, with all directions below the scales that are seen, and with none."""
    free = free[..., None]
    scales = ratio * spectrum.scales / (free - phi).clamp_min(EPS)
    seen = root / free[..., 0].sqrt() + integral(scales, slope) - integral(spectrum.scales / free, slope)
    return torch.stack((seen + 2 / math.pi * scales[..., 0].sqrt() * (rank - phi[..., 0]).clamp_min(0), seen))


class Spectrum:
    """Eigenvalues of the scatter of images, seen through the factor of a reference's covariance."""

    def __init__(self, features: Tensor, mean: Tensor, covariance: Tensor, factor: Tensor) -> None:
        if len(features) <= factor.shape[1]:
            seen = (features.double() - mean) @ factor
            values, vectors = torch.linalg.eigh(seen @ seen.T)
            kept = values > values.max() * RESOLVED
            vectors = seen.T @ vectors[:, kept] / values[kept].sqrt()
        else:
            scatter = factor.T @ (covariance * (len(features) - 1)) @ factor
            values, vectors = torch.linalg.eigh((scatter + scatter.T) / 2)
            kept = values > values.max() * RESOLVED
            vectors = vectors[:, kept]
        noise = values.max() * len(values) * EPS
        self.root = torch.where(values > noise, values, 0).sqrt().sum()  # the trace of S^(1/2), of all values
        self.values = values[kept]  # `[r]`, those whose directions are resolved
        # `[d, r]`; centred features times this are orthonormal columns
        self.basis = factor @ vectors / self.values.sqrt()
        # in ascending order; images that do not vary have none
        ends = self.values.log()[[0, -1]].tolist() if len(self.values) else [-RANGE, -RANGE]
        low, high = max(ends[0], ends[1] - RANGE) - MARGIN, ends[1] + MARGIN
        # `[q]`, a step of 1 in their logarithm
        self.scales = torch.arange(low, high + 1, dtype=torch.float64, device="cpu").exp()
        self.shares = self.values / (self.values + self.scales[:, None])  # [q, r]
        self.phi = self.shares.sum(1)  # `[q]`, degrees of freedom above each scale
        self.slope = (self.shares * (1 - self.shares)).sum(1)  # `[q]`, their decrease from scale to scale


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


def by_class(features: Tensor, mean: Tensor, shift: Tensor, spectrum: Spectrum, groups: Groups) -> ByClass:
    """Go through the images once, classes of one size together."""
    _, place, sizes = torch.unique(torch.as_tensor(groups, device="cpu"), return_inverse=True, return_counts=True)
    count, scales = len(features), len(spectrum.scales)
    along, sums, squares, roots = torch.zeros(4, len(sizes), dtype=torch.float64, device="cpu")
    second, fourth = torch.zeros(2, len(mean), dtype=torch.float64, device="cpu")
    phi, slope, inside, outside = torch.zeros(4, len(sizes), scales, dtype=torch.float64, device="cpu")
    order, starts = torch.argsort(place, stable=True), sizes.cumsum(0) - sizes
    chunks = list[tuple[Tensor, Tensor]]()  # some classes of one size, and the rows of their images
    for size in torch.unique(sizes).tolist():
        step = max(min(ROWS // size, ELEMENTS // (size * max(len(spectrum.values), 3 * scales * size))), 1)
        for chosen in torch.split((sizes == size).nonzero()[:, 0], step):
            chunks.append((chosen, order[starts[chosen, None] + torch.arange(size, device="cpu")]))
    for chosen, rows in chunks:
        shape, rest = (*rows.shape, -1), count - rows.shape[1]
        centred = features[rows.flatten()].double() - mean
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
            # by interlacing, the others have no more degrees of freedom than the largest eigenvalues
            phi[chosen] = torch.minimum(found, spectrum.shares[:, max(len(spectrum.values) - (rest - 1), 0) :].sum(1))
    kurtosis = (fourth * count / second.square()).nan_to_num(0).max().item()  # NaN where a feature does not vary
    return ByClass(sizes.to(torch.float64), along, sums, squares, roots, phi, slope, inside, outside, kurtosis)


def _downdated(seen: Tensor, spectrum: Spectrum) -> tuple[Tensor, Tensor, Tensor]:
    first = spectrum.shares * (1 - spectrum.shares)
    weights = torch.cat((spectrum.shares, first, first * (1 - 2 * spectrum.shares)))  # [k, r]
    count, size, rank = seen.shape
    products = seen.new_zeros(count, len(weights), size, size)  # sums of weights times any two rows' products
    for pairs in torch.split(torch.triu_indices(size, size, device="cpu"), max(ELEMENTS // (count * rank), 1), dim=1):
        left, right = pairs
        sums = ((seen[:, left] * seen[:, right]) @ weights.T).mT
        products[:, :, left, right] = sums
        products[:, :, right, left] = sums
    here, once, twice = products.chunk(3, dim=1)  # [g, q, m, m] each
    inverse = torch.linalg.inv(torch.eye(seen.shape[1], dtype=torch.float64, device="cpu") - here)
    moved = inverse @ once
    falls = (_trace(moved, moved) + _trace(inverse, twice), _trace(inverse, once), _trace(inverse, here))
    return spectrum.phi - falls[1], spectrum.slope - falls[0], falls[2]


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
