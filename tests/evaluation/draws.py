"""Features of which the distribution is known."""

from __future__ import annotations

import torch
from torch import Tensor

from elfatt_sd.evaluation.statistics import FeatureStatistics


def normal(count: int, dimension: int, seed: int) -> Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(dimension: int) -> Tensor:
    """Standard deviations that fall off, as those of real features do."""
    return torch.arange(1, dimension + 1, dtype=torch.float64) ** -0.5


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    found = FeatureStatistics.of(features)
    return found.mean, found.covariance
