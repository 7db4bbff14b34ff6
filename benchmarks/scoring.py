"""How long scoring takes and how much memory: `python benchmarks/scoring.py`; features are drawn, no network runs.

For each number of pictures: the Frechet distance of a row and of its baseline with the influence of every picture,
torchmetrics' figure beside it, the kernel distance, and the paired difference with its interval over classes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from elfatt_sd.devices import device_name
from elfatt_sd.evaluation.score import torchmetrics_distance
from elfatt_sd.evaluation.statistics import KERNEL_SAMPLE, FeatureStatistics, frechet_estimate, kernel_distance
from elfatt_sd.measuring.memory import PeakMeter

ROWS = 4096  # drawn at once


def draw(path: Path, count: int, dimension: int, seed: int) -> np.ndarray:
    """Write features as scoring leaves them, and map them into memory."""
    generator = np.random.default_rng(seed)
    features = np.lib.format.open_memmap(path, "w+", "float32", (count, dimension))
    for start in range(0, count, ROWS):
        rows = features[start : start + ROWS]
        rows[:] = generator.standard_normal(rows.shape, dtype=np.float32) * np.linspace(1, 0.1, dimension)
    features.flush()
    return np.load(path, mmap_mode="r")


def score(folder: Path, count: int, dimension: int, reference: FeatureStatistics, sample: np.ndarray) -> None:
    """Score one row against a baseline and print the seconds of each part and the growth of memory."""
    row, baseline = (draw(folder / f"{name}.npy", count, dimension, seed) for seed, name in enumerate(("row", "base")))
    meter = PeakMeter(torch.device("cpu"))
    meter.restart()
    before, began = meter.read() or 0, time.perf_counter()
    mine, other = (frechet_estimate(side, reference.mean, reference.covariance) for side in (row, baseline))
    low, high = (mine - other).interval(torch.arange(count) // 2)  # type: ignore[misc]
    distance = time.perf_counter()
    torchmetrics_distance(row, reference)
    published = time.perf_counter()
    kernel_distance(row, sample)
    kernel = time.perf_counter()
    parts = {
        "difference with interval": distance - began,
        "torchmetrics": published - distance,
        "kernel distance": kernel - published,
    }
    listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    grown = ((meter.read() or 0) - before) / 2**30
    print(
        f"{count} pictures of {dimension} features: {kernel - began:.1f} s ({listed}); {grown:.2f} GiB "
        f"with the mapped files; interval {high - low:.3g} wide",
        flush=True,
    )


def main() -> None:
    """Parse the command line and score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[2000, 50_000])
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--reference", type=int, default=2 * KERNEL_SAMPLE, help="pictures of the reference")
    chosen = parser.parse_args()
    print(f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="elfatt-scoring-") as name:
        folder = Path(name)
        sample = draw(folder / "reference.npy", chosen.reference, chosen.features, 7)
        reference = FeatureStatistics.of(sample)
        for count in chosen.counts:
            score(folder, count, chosen.features, reference, sample[:KERNEL_SAMPLE])


if __name__ == "__main__":
    main()
