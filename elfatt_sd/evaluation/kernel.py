"""The kernel distance (KID; Binkowski et al. 2018), an unbiased squared maximum mean discrepancy of sets of features.

Legend for shapes: n images, m reference images, d features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.intervals import Estimate, Groups
from elfatt_sd.evaluation.statistics import Features, take

KERNEL_SAMPLE = 5000  # images of a block, and of the reference, at most
ROWS = 1024  # of a piece of the kernel matrix
WIDTH = 10.0  # of the Gaussian kernel

Kernel = Callable[[Tensor, Tensor], Tensor]  # `[n, d]` and `[m, d]` to `[n, m]`


def polynomial(rows: Tensor, others: Tensor) -> Tensor:
    return (rows @ others.T).div_(rows.shape[1]).add_(1).pow_(3)


def gaussian(rows: Tensor, others: Tensor) -> Tensor:
    squares = rows.square().sum(1)[:, None] + others.square().sum(1) - 2 * rows @ others.T
    return squares.clamp_(min=0).mul_(-0.5 / WIDTH**2).exp_()


def kernel_distance(
    features: Features,
    reference: Features,
    groups: Groups,
    *,
    within: float | None = None,
    kernel: Kernel = polynomial,
) -> Estimate:
    """Unbiased squared maximum mean discrepancy with a kernel, and its derivative in every image.

    Images are dealt out to blocks of at most `KERNEL_SAMPLE`, image i to block i modulo their number. The figure is the
    mean over blocks of the full U-statistic, weighted by their sizes. So every image counts, equally, in value and in
    interval, and time grows linearly with n. The usual figure is the mean over random subsets instead, which differs
    from this one by its chance.
    """
    if len(features) < 2 or len(reference) < 2:
        fewest = min(len(features), len(reference))
        raise ElfattError(f"{fewest} images have no kernel distance; it needs at least 2.")
    within = kernel_within(reference, kernel) if within is None else within
    count = len(features)
    blocks = -(-count // KERNEL_SAMPLE)
    own, across = (torch.zeros(count, dtype=torch.float64, device="cpu") for _ in range(2))
    known = take(reference, slice(None))
    for block in range(blocks):
        rows = torch.arange(block, count, blocks, device="cpu")
        images = take(features, rows)
        own[rows] = _mean_to_others(images, kernel)
        across[rows] = torch.cat([kernel(piece, known).mean(1) for piece in torch.split(images, ROWS)])
    projection = 2 * (own - across)
    value = (own.mean() - 2 * across.mean()).item() + within
    return Estimate.linear(value, projection - projection.mean(), groups)


def kernel_within(reference: Features, kernel: Kernel = polynomial) -> float:
    """Mean kernel between different images of the reference `[m, d]`."""
    return _mean_to_others(take(reference, slice(None)), kernel).mean().item()


def _mean_to_others(images: Tensor, kernel: Kernel) -> Tensor:
    """Mean kernel `[n]` of each image with all others; each pair of pieces is computed once."""
    total = torch.zeros(len(images), dtype=torch.float64, device="cpu")
    pieces = torch.split(torch.arange(len(images), device="cpu"), ROWS)
    for place, rows in enumerate(pieces):
        for columns in pieces[place:]:
            values = kernel(images[rows[0] : rows[-1] + 1], images[columns[0] : columns[-1] + 1])
            if columns is rows:
                values.fill_diagonal_(0)
            else:
                total[columns] += values.sum(0)
            total[rows] += values.sum(1)
    return total / (len(images) - 1)
