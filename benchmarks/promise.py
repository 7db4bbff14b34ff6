"""Whether what `tune` promises holds: `python -m benchmarks.promise`; some minutes, no model runs.

Thousands of tunings choose and prove as `tune` does, by its own code. Their images are drawn at random from those of a
published run (settings of different closeness, 64 images each), or from distributions that are skewed on purpose. What
is predicted for a choice is off by some dB, another number in each tuning.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from elfatt_sd.tuning import SEARCHED, SHARES, Search
from elfatt_sd.tuning.model import Choice
from elfatt_sd.tuning.proof import Budget, Measure, Promise
from elfatt_sd.tuning.runs import Drawn, Sample

RESULTS = Path(__file__).parents[1] / "eval" / "results" / "tuned_toy" / "results.json"
ASKED = (30.0, 35.0, 40.0, 45.0)
OFF = 2.0  # dB, standard deviation of what predictions are off by in a tuning
LEVELS = [round(20 + 0.25 * number, 2) for number in range(200)]  # predicted PSNR of choices, in dB


class Pictures:
    """How close images are at a mean closeness: a row of dB about it for each of some means, between them a mixture."""

    def __init__(self, means: Sequence[float], rows: Sequence[Sequence[float]]) -> None:
        self.means, table = np.array(means), np.array(rows)
        self.rows = table - table.mean(1, keepdims=True)

    def closeness(self, mean: float, image: int) -> float:
        shape = [np.interp(mean, self.means, self.rows[:, image])] if len(self.means) > 1 else self.rows[:, image]
        return float(mean + shape[0])


def published() -> Pictures:
    """Return the images of a published run of tuned settings."""
    results = msgspec.json.decode(RESULTS.read_bytes())
    rows = [row["paired"]["psnr"]["pictures"] for row in results["rows"] if row["label"].endswith("dB asked")]
    rows.sort(key=statistics.fmean)
    return Pictures([statistics.fmean(row) for row in rows], rows)


def skewed(generator: np.random.Generator, images: int = 4096) -> dict[str, Pictures]:
    """Return images by distributions, with the mean's 0 dB and a spread of about 6 dB."""
    rare = np.where(generator.random(images) < 0.03, -20.0, 0.0)  # another image
    values = {
        "normal": generator.normal(0, 6, images),
        "skewed to far": -6 * generator.gamma(2, 1 / math.sqrt(2), images),
        "skewed to close": 6 * generator.gamma(2, 1 / math.sqrt(2), images),
        "3 % are another image": generator.normal(0, 5, images) + rare,
        "of two kinds": generator.choice([-7.0, 5.0], images) + generator.normal(0, 2, images),
    }
    return {name: Pictures([35.0], [each]) for name, each in values.items()}


def rare(generator: np.random.Generator, images: int = 4096) -> Pictures:
    """Return images that are alike, but for one of twenty, which is another image: few proofs see one."""
    values = generator.normal(0, 2, images) + np.where(generator.random(images) < 0.05, -20.0, 0.0)
    return Pictures([35.0], [values])


class Model:
    """What a search asks of a model: a choice is its predicted PSNR, and so are its configuration and its parts."""

    def parts(self, choice: Choice) -> float:
        return choice.psnr

    chosen = parts
    config = staticmethod(float)


class Runs:
    """What a search asks of runs: an image is how close it is; each choice is twice as fast as untouched."""

    def __init__(self, pictures: Pictures, off: float, images: Sequence[int]) -> None:
        self.pictures, self.off, self.images, self.drawn = pictures, off, images, 0.0

    def draw(self, sample: Sample, config: float | None = None) -> Drawn:
        seconds = 1.0 if config is None else 0.5
        self.drawn += seconds
        value = 1000.0 + sample.seed  # another one for each untouched image
        if config is not None:
            value = self.pictures.closeness(config + self.off, self.images[sample.seed])
        return Drawn((np.float64(value),), seconds)  # type: ignore[arg-type]

    def stage(self, name: str, images: float) -> None:
        """Tell nobody."""

    def pace(self) -> float:
        return 1.0


class Tuning(Search):
    """The choices and proofs of a tuning whose model, images and times are made up."""

    def __init__(self, budget: Budget, runs: Runs, images: int) -> None:
        samples = [Sample("", number) for number in range(SEARCHED + images)]
        store = SimpleNamespace(drawn=lambda sample, make: None)
        measure = Measure("PSNR", lambda _, value: float(value), unit="dB", digits=1)  # type: ignore[arg-type]
        super().__init__(runs, samples, budget, measure, store)  # type: ignore[arg-type]
        self.model: Any = Model()
        self.curve = [Choice({}, 0.0, 0.0, math.inf)]
        self.curve += [Choice({}, 0.8 - level / 100, 255**2 / 10 ** (level / 10), level) for level in reversed(LEVELS)]
        self.untouched = [self.runs.draw(sample) for sample in self.samples]
        self._seconds, self.seconds, self._pace = [1.0], 1.0, 1.0

    def _calibrate(self, *given: Any) -> None:
        """What one image says more of a stretch is a part of what predictions are off by."""


def tunings(pictures: Pictures, asked: float, count: int, seed: int = 0, images: int = 24) -> dict[str, float]:
    """Simulate tunings; return fractions of them, and means over those that promise something."""
    generator = np.random.default_rng(seed)
    promised, held, bounded, cost, above, drawn = 0, 0, 0, list[float](), list[float](), list[int]()
    for _ in range(count):
        off = float(generator.normal(0, OFF))
        picked = generator.choice(pictures.rows.shape[1], SEARCHED + images).tolist()
        runs = Runs(pictures, off, picked)
        search = Tuning(Budget(asked), runs, images)
        first = search.settle()
        before = runs.drawn
        proof = search.prove(first)
        cost.append(runs.drawn - before)
        if proof is not None and proof.point.predicted is not None:
            mean = proof.point.predicted + off
            promised += 1
            held += mean >= asked
            bounded += mean >= proof.bound
            above.append(mean - asked)
            drawn.append(len(proof.samples))
    return {
        "promised": promised / count,
        "false": 1 - held / max(1, promised),
        "bound below mean": bounded / max(1, promised),
        "dB above": statistics.fmean(above),
        "images": statistics.fmean(drawn),
        "cost": statistics.fmean(cost),
    }


def false_promises(pictures: Pictures, count: int, confidence: float = 0.9, images: int = 24, seed: int = 0) -> float:
    """Return how often choices whose mean is what was asked, and no more, are promised: the worst case.

    All choices of a tuning are looked at with the same images.
    """
    generator, promises = np.random.default_rng(seed), [Promise(images, (1 - confidence) * each) for each in SHARES]
    rows, false = pictures.rows, 0
    for _ in range(count):
        picked = generator.choice(rows.shape[1], images)
        values = rows[generator.integers(len(rows), size=(len(promises), 1)), picked]
        false += any(
            promise.bound(own[:look].tolist()) > 0
            for promise, own in zip(promises, values, strict=True)
            for look in promise.looks
        )
    return false / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="tunings for each line")
    count = parser.parse_args().count
    populations = {"published run": published()} | skewed(np.random.default_rng(1))
    populations["5 % are another image, the others alike"] = rare(np.random.default_rng(2))
    print("| images | promised where the mean is just what was asked |\n| :--- | ---: |")
    for name, pictures in populations.items():
        print(f"| {name} | {false_promises(pictures, count):.1%} |", flush=True)
    heads = ("images", "asked, dB", "promised", "of these false", "bound below the mean", "mean above asked, dB")
    print("\n| " + " | ".join((*heads, "images of a proof", "untouched images that proofs cost")) + " |")
    print("| :--- |" + " ---: |" * 7)
    for (name, pictures), asked in itertools.product(populations.items(), ASKED):
        figures = tunings(pictures, asked, count)
        cells = (f"{figures[key]:.1%}" for key in ("promised", "false", "bound below mean"))
        others = (f"{figures[key]:.1f}" for key in ("dB above", "images", "cost"))
        print("| " + " | ".join((name, f"{asked:g}", *cells, *others)) + " |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
