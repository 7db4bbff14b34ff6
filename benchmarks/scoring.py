"""How long scoring takes and how much memory: `python benchmarks/scoring.py`; features are drawn, no network runs.

For each number of images: a row's Frechet and kernel distance, with all that intervals need, and the paired differences
to a baseline that is scored already, with their intervals over classes of two images.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from elfatt_sd.devices import device_name
from elfatt_sd.evaluation.frechet import Target, frechet_figures
from elfatt_sd.evaluation.statistics import KERNEL_SAMPLE, kernel_distance, moments
from elfatt_sd.measure import PeakMeter, Stopwatch

ROWS = 4096  # drawn at once


def draw(path: Path, count: int, dimension: int, seed: int) -> torch.Tensor:
    """Write features, and map them into memory."""
    generator = np.random.default_rng(seed)
    features = np.lib.format.open_memmap(path, "w+", "float32", (count, dimension))
    for start in range(0, count, ROWS):
        rows = features[start : start + ROWS]
        rows[:] = generator.standard_normal(rows.shape, dtype=np.float32) * np.linspace(1, 0.1, dimension)
    features.flush()
    return torch.from_numpy(features)


def score(folder: Path, count: int, reference: Target, sample: torch.Tensor) -> None:
    """Score one row against a baseline and print the seconds of each part and the growth of memory."""
    dimension = len(reference.mean)
    row, baseline = (draw(folder / f"{name}.npy", count, dimension, seed) for seed, name in enumerate(("row", "base")))
    classes = torch.arange(count) // 2
    base, other = frechet_figures(baseline, reference, classes), kernel_distance(baseline, sample, classes)
    meter = PeakMeter(torch.device("cpu"))
    meter.restart()
    before = meter.read() or 0
    with Stopwatch() as frechet:
        _, interval = frechet_figures(row, reference, classes).limit_difference(base)
    with Stopwatch() as kernel:
        (kernel_distance(row, sample, classes) - other).interval()
    grown = ((meter.read() or 0) - before) / 2**30
    width = interval[1] - interval[0] if interval else 0.0
    print(
        f"{count} images of {dimension} features: {frechet.seconds + kernel.seconds:.1f} s "
        f"(Frechet distance {frechet.seconds:.1f} s, kernel distance {kernel.seconds:.1f} s); "
        f"{grown:.2f} GiB with the mapped file; "
        f"interval of the difference {width:.3g} wide",
        flush=True,
    )


def main() -> None:
    """Parse the command line and score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[2000, 50_000])
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--reference", type=int, default=2 * KERNEL_SAMPLE, help="images of the reference")
    chosen = parser.parse_args()
    print(f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="elfatt-scoring-") as name:
        folder = Path(name)
        sample = draw(folder / "reference.npy", chosen.reference, chosen.features, 7)
        reference = Target(*moments(*torch.split(sample, ROWS)))
        for count in chosen.counts:
            score(folder, count, reference, sample[:KERNEL_SAMPLE])


if __name__ == "__main__":
    main()
