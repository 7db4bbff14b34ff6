"""How alike two images are: SSIM (Wang et al., *Image Quality Assessment*, IEEE TIP 13(4), 2004). Pure tensors.

The values are those of torchmetrics to rounding, which a test holds. Its window is a two-dimensional convolution, for
which PyTorch has no fast float64 kernel on a CPU. Here rows are blurred, and then columns, each tap of the symmetric
window once.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

SIGMA = 1.5  # pixels
REACH = 5  # pixels from the middle of the window to its edge
K1, K2 = 0.01, 0.03


def structural_similarity(first: Tensor, second: Tensor, data_range: float) -> Tensor:
    """Return the SSIM of each pair of images, the mean over pixels and channels; edges are reflected."""
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    x, y = (functional.pad(pictures, (REACH,) * 4, mode="reflect") for pictures in (first, second))
    mean_x, mean_y, square_x, square_y, product = (_blurred(part) for part in (x, y, x * x, y * y, x * y))
    variances = (square_x - mean_x**2).clamp(min=0) + (square_y - mean_y**2).clamp(min=0)
    covariance = product - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return (luminance * (2 * covariance + c2) / (variances + c2)).mean((1, 2, 3))


def _blurred(pictures: Tensor) -> Tensor:
    """Average under a Gaussian window, where the whole of it lies inside."""
    taps = [math.exp(-0.5 * (place / SIGMA) ** 2) for place in range(-REACH, REACH + 1)]
    middle, *sides = (tap / sum(taps) for tap in taps[REACH:])
    for axis in (-1, -2):
        size = pictures.shape[axis] - 2 * REACH
        blurred = pictures.narrow(axis, REACH, size) * middle
        for place, tap in enumerate(sides, 1):
            pair = pictures.narrow(axis, REACH - place, size) + pictures.narrow(axis, REACH + place, size)
            blurred = blurred.add_(pair, alpha=tap)
        pictures = blurred
    return pictures
