"""Moments of features that arrive in batches or lie in memory-mapped files; float64, and no scipy.

Legend for shapes: n images, d features.
"""

from __future__ import annotations

import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.config import ElfattError
from elfatt_sd.files import atomic_file

Features = Tensor | np.ndarray[Any, Any]  # in memory, or memory-mapped
COVARIANCE_ROUNDING = 1e-5  # by the largest value: of covariances that were kept in float32
DAMAGED = (  # what NumPy's readers raise for a file that is not whole: of zip, of zlib, of headers that are no Python
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_SHOWN = 120  # characters of what a file holds, or of an error, that a message repeats
_MOST = 1 << 32  # bytes of all arrays of a file of moments
ROWS = 4096  # rows of a feature file that are in memory at once
LARGEST = 1e15  # of a feature; the sixth power, which the kernel distance's interval takes, is still a number


class FeatureStatistics:
    """Mean and covariance of features that arrive in batches (Chan, Golub and LeVeque 1979)."""

    def __init__(self, dimension: int) -> None:
        self.count = 0
        self.mean = torch.zeros(dimension, dtype=torch.float64, device="cpu")
        self._scatter = torch.zeros(dimension, dimension, dtype=torch.float64, device="cpu")

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
        """Unbiased covariance `[d, d]`."""
        if self.count < 2:
            raise ElfattError(f"{self.count} images have no covariance; a distance needs at least 2.")
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
        """Read what `save` wrote."""
        mean, covariance, count = load_moments(path)
        if count is None:
            raise ElfattError(f"{path} has no count; accepted is a file with mu, sigma and count.")
        return cls.from_moments(mean, covariance, count)


def load_moments(path: Path) -> tuple[Tensor, Tensor, int | None]:
    """Read `mu` `[d]` and `sigma` `[d, d]` from an `.npz` of this or another tool, and `count` where it is given."""
    accepted = "accepted is an .npz file with mu and sigma"
    try:
        _check_archive(path)
        with load_plain(path) as data:
            mean, covariance = (_numbers(key, data[key]) for key in ("mu", "sigma"))
            given = data.get("count")
    except DAMAGED as error:
        raise ElfattError(f"{path} cannot be read ({str(error)[:_SHOWN]}); {accepted}.") from error
    count = None if given is None else _count(path, given)
    if mean.dim() != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"mu {tuple(mean.shape)} and sigma {tuple(covariance.shape)}"
        raise ElfattError(f"{path} has {shapes}; accepted are [d] and [d, d].")
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise ElfattError(f"{path} holds NaN or infinity; accepted are finite mu and sigma.")
    if (mean.abs() > LARGEST).any() or (covariance.abs() > LARGEST**2).any():
        raise ElfattError(f"{path} holds numbers too large for a distance; accepted are means and covariances.")
    return mean, covariance, count


def _check_archive(path: Path) -> None:
    """Refuse what is not a zip file, holds two arrays of one name, or would fill the memory."""
    with open(_plain(path), "rb") as file:
        if file.read(2) != b"PK":  # NumPy would take it for a pickle, and say how to run its code
            raise ValueError("it is not an archive of arrays")
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        size = sum(member.file_size for member in archive.infolist())
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"it holds two arrays {twice!r}")
    if size > _MOST:
        raise ValueError(f"its arrays are of {size / 2**30:.0f} GiB")


def _numbers(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "iuf":  # a conversion would take texts, dates and the real parts of complex numbers
        raise TypeError(f"{name} holds {array.dtype}, no real numbers")
    return torch.from_numpy(array.astype(np.float64))


def _count(path: Path, given: np.ndarray[Any, Any]) -> int:
    value = given.item() if given.size == 1 else None
    if not isinstance(value, int | float) or value != value // 1 or not 2 <= value < 2**53:
        said = f"an array of shape {list(given.shape)}" if value is None else repr(value)[:_SHOWN]
        raise ElfattError(f"{path} has count {said}; accepted is a whole number of at least 2.")
    return int(value)


def check_covariance(path: Path, covariance: Tensor, count: int | None = None) -> Tensor:
    """Return a covariance `[d, d]` of another tool, without what rounding left of asymmetry."""
    largest, asymmetry = covariance.abs().max(), (covariance - covariance.T).abs().max()
    if asymmetry > COVARIANCE_ROUNDING * largest:
        raise ElfattError(f"{path} has a sigma that is not symmetric (by {asymmetry:.3g}); accepted is a covariance.")
    symmetric = (covariance + covariance.T) / 2
    values = torch.linalg.eigvalsh(symmetric)
    if values[0] < -COVARIANCE_ROUNDING * values[-1].abs():
        raise ElfattError(f"{path} has a sigma with the negative eigenvalue {values[0]:.3g}; accepted is a covariance.")
    rank = int((values > COVARIANCE_ROUNDING * values[-1]).sum())
    if count is not None and rank >= count:
        what = f"count {count} and a sigma of rank {rank}"
        raise ElfattError(
            f"{path} has {what}; accepted is a covariance of so many images, of rank {count - 1} at most."
        )
    return symmetric


def load_plain(path: Path, mmap_mode: Literal["r"] | None = None) -> Any:
    """Return what NumPy finds in a file, without running any code."""
    return np.load(_plain(path), mmap_mode=mmap_mode, allow_pickle=False)


def _plain(path: Path) -> Path:
    if not os.path.isfile(path):
        raise FileNotFoundError("it is not a plain file")
    return path


def read_array(path: Path, *shape: int, dtype: str = "float32") -> np.ndarray[Any, Any] | None:
    """Return an array `[n, *shape]` of a `.npy` file, memory-mapped; None where there is none that is whole."""
    try:
        with np.errstate(over="raise"):  # of a shape that lies, whose size would wrap around
            found: np.ndarray[Any, Any] = load_plain(path, mmap_mode="r")
    except DAMAGED:
        return None
    alike = isinstance(found, np.ndarray) and found.dtype == dtype and found.ndim and found.shape[1:] == shape
    return found if alike and found.flags.c_contiguous else None  # in another order, sums would round otherwise


def is_finite(features: np.ndarray[Any, Any]) -> bool:
    return all((np.abs(features[start : start + ROWS]) < LARGEST).all() for start in range(0, len(features), ROWS))


def batches(features: Features) -> Iterator[Tensor]:
    """Cut features `[n, d]`, which may be memory-mapped, into float64 pieces of at most `ROWS` rows."""
    for start in range(0, len(features), ROWS):
        yield take(features, slice(start, start + ROWS))


def take(features: Features, rows: slice | Tensor) -> Tensor:
    """Read some rows of features `[n, d]`, which may be memory-mapped, as float64."""
    if isinstance(features, np.ndarray):
        features = torch.from_numpy(np.array(features[rows.numpy() if isinstance(rows, Tensor) else rows]))
    else:
        features = features[rows]
    return features.to(torch.float64)
