"""What tuning is asked for, how closeness is measured, and what was run and proved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from elfatt_sd import errors as checks
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.tuning.runs import Drawn, Sample

if TYPE_CHECKING:
    from PIL import Image

Metric = Literal["psnr", "ssim", "lpips", "dists"]
Compare = Callable[["Image.Image", "Image.Image"], float]
METRICS: tuple[Metric, ...] = get_args(Metric)
_RANGES = {"psnr": (0.0, 100.0), "ssim": (-1.0, 1.0)}  # distances have no greatest value


@dataclass(frozen=True)
class Budget:
    """What the settings have to keep to."""

    # to the untouched image of the same seed, at least (at most, for a measure of distance); a mean over images, in the
    # measure's unit
    closeness: float | None = None
    speed: float | None = None  # times as fast as the untouched pipeline, at least
    memory: float | None = None  # GiB at the peak of an image, at most; of the process on a CPU

    def __post_init__(self) -> None:
        if self.closeness is None and self.speed is None:
            raise ElfattError("there is no budget; give closeness (35 dB PSNR, for instance), or speed (1.5), or both.")
        close = 0.0 if self.closeness is None else self.closeness  # its range is that of the measure
        if not isinstance(close, int | float) or not math.isfinite(close):
            raise ElfattError(f"closeness={close!r} is not accepted; give a number.")
        if self.speed is not None:
            checks.real("speed", self.speed, 1.0, 100.0)
        if self.memory is not None:
            checks.real("memory", self.memory, 0.0, 10**6)

    def keeps(self, point: Point, measure: Measure) -> bool:
        """Tell whether a configuration keeps to it, but for memory."""
        close = self.closeness is None or measure.keeps(point.mean, self.closeness)
        return close and (self.speed is None or point.times >= self.speed)

    def words(self, measure: Measure) -> str:
        """Return it for people."""
        parts = []
        if self.closeness is not None:
            parts.append(f"{measure.words(self.closeness)} at {'least' if measure.higher else 'most'}")
        if self.speed is not None:
            parts.append(f"{self.speed:g} times as fast at least")
        if self.memory is not None:
            parts.append(f"{self.memory:g} GiB at most")
        return ", ".join(parts)


def check_wanted(
    budget: Budget, metric: Metric | Compare, prompts: Sequence[str] | None, images: int, frames: int | None
) -> None:
    """Check that two images can be as close as wanted, and what the images of tuning are; None is the model's own."""
    closeness = budget.closeness
    if not callable(metric):
        checks.choice("metric", metric, METRICS)
        least, most = _RANGES.get(metric, (0.0, math.inf))
        if closeness is not None and not least <= closeness <= most:
            span = f"{least:g} at least" if closeness < least else f"{most:g} at most"
            near = " (in dB; 8-bit images that are not identical end near 60 to 90)" * (metric == "psnr")
            raise ElfattError(f"closeness={closeness:g} is not accepted; metric={metric!r} gives {span}{near}.")
    words = () if isinstance(prompts, str) else (prompts or ())
    written = all(isinstance(prompt, str) and prompt.strip() for prompt in words)
    if prompts is not None and (not written or len(set(words)) < 2):
        raise ElfattError("prompts: give two or more different ones: the first serve the search, the others the proof.")
    checks.whole("images", images, 2)
    if frames is not None:
        checks.whole("frames", frames, 1)


@dataclass(frozen=True)
class Measure:
    """How far two images are apart."""

    name: str  # of the measure
    compare: Compare  # gives a number for an untouched image and another one of its size
    higher: bool = True  # whether a higher number is closer
    best: float = math.inf  # of two equal images; infinity where there is no greatest number
    unit: str = ""  # of the number
    digits: int = 2  # after the point, for people

    def between(self, untouched: Drawn, other: Drawn) -> float:
        """Return how close two images, or the frames of two clips, are."""
        try:
            pairs = zip(untouched.frames, other.frames, strict=True)
            value = float(np.mean([float(self.compare(one, two)) for one, two in pairs]))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ElfattError(f"metric {self.name!r} cannot compare two images ({reason}).") from error
        if math.isnan(value):
            raise ElfattError(f"metric {self.name!r} gives nan for two images; give one that always gives a number.")
        return value

    def words(self, value: float) -> str:
        if math.isinf(value):
            return "identical"
        return f"{self.name} {value:.{self.digits}f}{' ' * bool(self.unit)}{self.unit}"

    def keeps(self, value: float, asked: float) -> bool:
        return value >= asked if self.higher else value <= asked


def measure_named(metric: Metric | Compare, weights: Any = None, device: str = "cpu") -> Measure:
    if callable(metric):
        return Measure(getattr(metric, "__name__", "closeness"), metric)
    if metric == "psnr":
        from elfatt_sd.drawing.pictures import psnr

        return Measure("PSNR", psnr, unit="dB", digits=1)

    def tensor(image: Image.Image) -> Any:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]

    if metric == "ssim":
        from elfatt_sd.evaluation.score import structural_similarity

        def ssim(first: Image.Image, second: Image.Image) -> float:
            return float(structural_similarity(tensor(first).double(), tensor(second).double(), 255.0))

        return Measure("SSIM", ssim, best=1.0, digits=3)
    if weights is None:
        raise ElfattError(f"metric={metric!r} needs weights; give torchvision's file of the network as weights.")
    from elfatt_sd.evaluation.metrics import Batch, load_closeness

    network = load_closeness(metric, Path(weights), device)

    def distance(first: Image.Image, second: Image.Image) -> float:
        return float(network.measure(Batch(tensor(second)[None], ("",), tensor(first)[None])))

    return Measure(network.name, distance, higher=False, best=0.0, digits=3)


@dataclass(frozen=True)
class Point:
    """A configuration that was run."""

    name: str  # of it, for tables and plots
    config: PatchConfig  # it
    predicted: float | None  # its predicted PSNR in dB; None for what was not chosen by prediction
    closeness: tuple[float, ...]  # to the untouched image, by image
    speed: tuple[float, ...]  # times as fast as the untouched pipeline, by run
    busy: str = ""  # what to say where these are not to be trusted; empty otherwise

    @property
    def mean(self) -> float:
        return statistics.fmean(self.closeness)

    @property
    def times(self) -> float:
        return statistics.median(self.speed)


@dataclass(frozen=True)
class Proof:
    """What the held-out images say of a configuration."""

    point: Point  # the configuration, with its closeness and speed
    samples: Sequence[Sample]  # the held-out images
    untouched: Sequence[Drawn]  # them, drawn by the untouched pipeline
    tuned: Sequence[Drawn]  # them, drawn with the configuration
    order: Sequence[int]  # their numbers, those farthest from the untouched ones first

    def interval(self) -> float:
        """Return half of the 95 % interval of the mean closeness."""
        from elfatt_sd.evaluation.statistics import student_quantile

        values = self.point.closeness
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return math.inf
        return student_quantile(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def peak_of(drawn: Sequence[Drawn]) -> int:
    """Return the highest memory use in bytes; 0 where it was not measured."""
    return max((each.peak or 0 for each in drawn), default=0)
