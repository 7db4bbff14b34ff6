"""What tuning is asked for, how closeness is measured, and what was run and proved."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image

from elfatt_sd import errors as checks
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import main_denoiser
from elfatt_sd.families.shapes import fingerprint
from elfatt_sd.measure import student_quantile, times_as_fast
from elfatt_sd.methods.base import in_one_line
from elfatt_sd.plans import input_grid
from elfatt_sd.tuning.runs import Drawn, Sample

Metric = Literal["psnr", "ssim", "lpips", "dists"]
Compare = Callable[[Image.Image, Image.Image], float]
METRICS: tuple[Metric, ...] = get_args(Metric)
_RANGES = {"psnr": (0.0, 100.0), "ssim": (-1.0, 1.0)}  # distances have no greatest value
_ANY = {"low": -math.inf, "high": math.inf}  # its range is that of the measure
FEWEST, EVERY = 8, 4  # images before the first look at them, and from one look to the next
LEAST_SKEW = 0.5  # to far, of the distribution of closeness: few images do not show what is rare
MOST = 1000  # images
_HOPELESS = 1.3  # standard errors by which the images to come would have to be closer than those that were drawn
_PATHS = 50_000  # that are simulated to find the level of a look


@dataclass(frozen=True)
class Budget:
    """What the settings have to keep to."""

    # to the untouched image of the same seed, at least (at most, for a measure of distance); a mean over images, in the
    # measure's unit
    closeness: float | None = field(default=None, metadata=_ANY)
    # times as fast as the untouched pipeline, at least
    speed: float | None = field(default=None, metadata={"low": 1.0, "high": 100.0})
    # GiB at the peak of an image, at most
    memory: float | None = field(default=None, metadata={"high": 10**6})
    # closeness of every image, at least (at most, for a measure of distance)
    lowest: float | None = field(default=None, metadata=_ANY)
    # with which closeness and speed are promised
    confidence: float = field(default=0.9, metadata={"low": 0.5, "open_high": True})

    def __post_init__(self) -> None:
        if self.closeness is None and self.speed is None and self.lowest is None:
            raise ElfattError(
                "there is no budget; give closeness (35 dB PSNR, for instance), lowest (28, for the worst image), or "
                "speed (1.5)."
            )
        checks.fields(self)
        if self.confidence == 0.5:  # the mean itself
            raise ElfattError("confidence=0.5 is not accepted; give a number above 0.5 and below 1.")

    @property
    def by_speed(self) -> bool:
        """Whether the closest settings are looked for, and not the fastest."""
        return self.closeness is None and self.lowest is None

    def keeps(self, measure: Measure, closeness: float, lowest: float, speed: float = math.inf, peak: int = 1) -> bool:
        """Tell whether figures, or their bounds, keep to it: mean and lowest closeness, speed, and bytes of memory."""
        pairs = ((closeness, self.closeness), (lowest, self.lowest))
        close = all(asked is None or measure.keeps(value, asked) for value, asked in pairs)
        fast = self.speed is None or speed >= self.speed
        return close and fast and (self.memory is None or 0 < peak <= self.memory * 2**30)

    def words(self, measure: Measure) -> str:
        parts, bound = [], "at least" if measure.higher else "at most"
        if self.closeness is not None:
            parts.append(f"{measure.words(self.closeness)} {bound}")
        if self.lowest is not None:
            parts.append(f"{measure.words(self.lowest)} {bound} in every image")
        if self.speed is not None:
            parts.append(f"{self.speed:g} times as fast at least")
        if self.memory is not None:
            parts.append(f"{self.memory:g} GiB at most")
        return ", ".join(parts)


def check_wanted(
    budget: Budget, metric: Metric | Compare, prompts: Sequence[str] | None, images: int, frames: int | None
) -> None:
    """Check that two images can be as close as wanted, and what the images of tuning are; None is the model's own."""
    closeness, lowest = budget.closeness, budget.lowest
    if not callable(metric):
        checks.choice("metric", metric, METRICS)
        for name, value in (("closeness", closeness), ("lowest", lowest)):
            if value is not None:
                checks.real(f"metric={metric!r} with {name}", value, *_RANGES.get(metric, (0.0, math.inf)))
    better = min if metric in ("lpips", "dists") else max
    if closeness is not None and lowest is not None and better(closeness, lowest) != closeness:
        asked = f"the mean, closeness={closeness:g}"
        raise ElfattError(f"lowest={lowest:g} is not accepted; the worst image cannot be closer than {asked}.")
    words = [*prompts] if isinstance(prompts, Collection) and not isinstance(prompts, str) else []
    written = all(isinstance(prompt, str) and prompt.strip() for prompt in words)
    if prompts is not None and (not written or len(set(words)) < 2):
        raise ElfattError("prompts: give two or more different ones: some serve the search, the others the proof.")
    checks.whole("images", images, FEWEST, MOST)  # fewer promise nothing of a mean
    if frames is not None:
        checks.whole("frames", frames, 1)


@dataclass(frozen=True)
class Measure:
    name: str  # of the measure
    compare: Compare  # gives a number for an untouched image and another one of its size
    higher: bool = True  # whether a higher number is closer
    unit: str = ""  # of the number
    digits: int = 2  # after the point, for people

    def between(self, untouched: Drawn, other: Drawn) -> float:
        """Return how close two images, or the frames of two clips, are."""
        with in_one_line(f"metric {self.name!r} cannot compare two images"):
            pairs = zip(untouched.frames, other.frames, strict=True)
            most = 100.0 if self.unit == "dB" and not untouched.same(other) else math.inf  # of equal frames of a clip
            value = float(np.mean([min(float(self.compare(one, two)), most) for one, two in pairs]))
        if math.isnan(value) or (math.isinf(value) and not untouched.same(other)):
            raise ElfattError(
                f"metric {self.name!r} gives {value} for two images; give one that always gives a number."
            )
        return value

    def words(self, value: float) -> str:
        if math.isinf(value):
            return "identical"
        return f"{self.name} {value:.{self.digits}f}{' ' * bool(self.unit)}{self.unit}"

    @property
    def sign(self) -> int:
        return 1 if self.higher else -1

    def keeps(self, value: float, asked: float) -> bool:
        return self.sign * value >= self.sign * asked

    def lowest(self, values: Iterable[float]) -> float:
        """Return the one that is farthest from untouched."""
        return self.sign * min(self.sign * value for value in values)


def measure_named(metric: Metric | Compare, weights: Any = None, device: str = "cpu") -> Measure:
    if callable(metric):
        measure = Measure(getattr(metric, "__name__", "closeness"), metric)
        noise = np.random.default_rng(0).integers(0, 256, (2, 256, 256, 3), np.uint8)
        measure.between(*(Drawn((Image.fromarray(each),), 0.0) for each in noise))  # one that fails does so at once
        return measure
    if metric == "psnr":
        from elfatt_sd.drawing.compare import psnr

        return Measure("PSNR", psnr, unit="dB", digits=1)

    def tensor(image: Image.Image) -> Any:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]

    if metric == "ssim":
        from elfatt_sd.evaluation.score import structural_similarity

        def ssim(first: Image.Image, second: Image.Image) -> float:
            return float(structural_similarity(tensor(first).double(), tensor(second).double(), 255.0))

        return Measure("SSIM", ssim, digits=3)
    if weights is None:
        raise ElfattError(f"metric={metric!r} needs weights; give torchvision's file of the network as weights.")
    from elfatt_sd.evaluation.metrics import Batch, load_closeness

    network = load_closeness(metric, Path(weights), device)

    def distance(first: Image.Image, second: Image.Image) -> float:
        return float(network.measure(Batch(tensor(second)[None], ("",), tensor(first)[None])))

    return Measure(network.name, distance, higher=False, digits=3)


@dataclass(frozen=True)
class Point:
    name: str  # of it, for tables and plots
    config: PatchConfig  # it
    predicted: float | None  # its predicted PSNR in dB; None for what was not chosen by prediction
    closeness: tuple[float, ...]  # to the untouched image, by image
    speed: tuple[float, ...]  # times as fast as the untouched pipeline, by run
    busy: str = ""  # what to say where these are not to be trusted; empty otherwise

    @property
    def mean(self) -> float:
        return statistics.fmean([each for each in self.closeness if math.isfinite(each)] or [math.inf])

    @property
    def times(self) -> float:
        return statistics.median(self.speed)

    @property
    def fast(self) -> str:
        return times_as_fast([self.times], self.busy)


@functools.cache
def level_of_looks(error: float, looks: tuple[int, ...]) -> float:
    """Return the level of one-sided t tests after so many images each, of which any errs with a probability.

    All looks have the same level (Pocock, Biometrika 64, 1977). It is found by simulating normal values.
    """
    if error * _PATHS < 100:  # too rare to be simulated
        return error / len(looks)
    generator, counts, steps = np.random.default_rng(0), np.array(looks), np.diff(looks, prepend=0)
    sums = generator.standard_normal((_PATHS, len(looks))) * np.sqrt(steps)  # of the values from one look to the next
    squares = (sums**2 / steps + generator.chisquare(steps - 1, sums.shape)).cumsum(1)
    means = sums.cumsum(1) / counts
    tests = means / np.sqrt((squares / counts - means**2) / (counts - 1))
    low, high = error / len(looks), error
    for _ in range(20):
        level = (low + high) / 2
        critical = np.array([student_quantile(1 - level, count - 1) for count in looks])
        low, high = (low, level) if float((tests > critical).any(1).mean()) > error else (level, high)
    return low


@dataclass(frozen=True)
class Promise:
    """What images say of a mean, where they are looked at while they are drawn. Higher values are better."""

    images: int  # that may be drawn
    error: float  # probability with which any bound may be above the mean

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of images after which they are looked at."""
        return (*range(FEWEST, self.images - 1, max(EVERY, self.images // 6)), self.images)

    def bound(self, values: Sequence[float]) -> float:
        """Return what the mean is promised to be at least: Student's t, corrected for skew (Johnson, JASA 73, 1978)."""
        mean, spread, skew = self._moments(values)
        return mean - spread * self._reach(len(values), skew)

    def hopeless(self, values: Sequence[float], asked: float) -> bool:
        """Tell whether the images that may still be drawn will hardly lift the bound to what was asked."""
        mean, spread, skew = self._moments(values)
        lacks = asked + spread * self._reach(self.images, skew) - mean
        return lacks > _HOPELESS * spread * math.sqrt(1 / len(values) - 1 / self.images)

    def _reach(self, count: int, skew: float) -> float:
        """Return the standard deviations of images from the mean of so many to its bound."""
        quantile = student_quantile(1 - level_of_looks(self.error, self.looks), count - 1)
        return quantile / math.sqrt(count) + skew * (1 + 2 * quantile**2) / (6 * count)

    @staticmethod
    def _moments(values: Sequence[float]) -> tuple[float, float, float]:
        """Return mean, standard deviation and skew to far; equal images count like the closest others."""
        known = np.array(values)
        if not np.isfinite(known).any():
            return math.inf, 0.0, 0.0
        known = known.clip(max=known[np.isfinite(known)].max())
        apart, spread = known - known.mean(), float(known.std(ddof=1))
        skew = -float((apart**3).mean()) / spread**3 if spread else 0.0
        return float(known.mean()), spread, max(skew, LEAST_SKEW)

    def excludes(self, count: int) -> float:
        """Return the fraction of images that are below the lowest of so many, at most; rounded up to percents."""
        return math.ceil(100 * (1 - float(self.error ** (1 / count)))) / 100


@dataclass(frozen=True)
class Proof:
    """What the held-out images say of a configuration."""

    point: Point  # the configuration, with its closeness and speed
    samples: Sequence[Sample]  # the held-out images that were drawn
    untouched: Sequence[Drawn]  # them, drawn by the untouched pipeline
    tuned: Sequence[Drawn]  # them, drawn with the configuration
    promise: Promise  # how sure its bounds are
    measure: Measure
    confidence: float  # with which what is promised holds, whichever of several choices is proved

    @property
    def order(self) -> list[int]:
        """The numbers of the images, those farthest from the untouched ones first."""
        close = self.point.closeness
        return sorted(range(len(close)), key=close.__getitem__, reverse=not self.measure.higher)

    @property
    def lowest(self) -> float:
        """The closeness of the image farthest from its untouched one."""
        return self.measure.lowest(self.point.closeness)

    @property
    def bound(self) -> float:
        """The mean closeness that is promised."""
        return self.measure.sign * self.promise.bound(self._close)

    @property
    def speed_bound(self) -> float:
        """How many times as fast it is promised to be."""
        return math.exp(self.promise.bound(np.log(self.point.speed).tolist()))

    def holds(self, budget: Budget) -> bool:
        """Tell whether what was asked for can be promised; of every image only once all have been drawn."""
        every = budget.lowest is None or len(self.samples) == self.promise.images
        fast = math.inf if budget.speed is None else self.speed_bound
        return every and budget.keeps(self.measure, self.bound, self.lowest, fast, peak_of(self.tuned))

    def hopeless(self, budget: Budget) -> bool:
        """Tell whether further images would hardly change that it does not hold."""
        asked, speed, nearest = budget.closeness, budget.speed, self.measure.sign * math.inf
        return (
            (asked is not None and self.promise.hopeless(self._close, self.measure.sign * asked))
            or (speed is not None and self.promise.hopeless(np.log(self.point.speed).tolist(), math.log(speed)))
            or not budget.keeps(self.measure, nearest, self.lowest, peak=peak_of(self.tuned))
        )

    @property
    def promised(self) -> str:
        """The bound in words, rounded to the side where it holds."""
        factor = self.measure.sign * 10**self.measure.digits
        return self.measure.words(float(np.floor(self.bound * factor) / factor))

    def words(self) -> str:
        digits, differ = self.measure.digits, [value for value in self.point.closeness if math.isfinite(value)]
        said = f"{self.promised} promised ({100 * self.confidence:g}% confidence, {len(self.samples)} images)"
        if not differ:
            return said
        some = f" of the {len(differ)} that differ" * (len(differ) < len(self.samples))
        end = f"{'lowest' if self.measure.higher else 'highest'} {self.lowest:.{digits}f}"
        return f"{said}: mean {statistics.fmean(differ):.{digits}f}{some}, {end}"

    def with_origin(self, pipe: Any, budget: Budget, record: dict[str, Any]) -> PatchConfig:
        """Return settings that were proved, with what their file, and whoever applies them, is told."""
        frames, where = self.untouched[0].frames, record["model"] or record["pipeline"]
        width, height = frames[0].size
        origin = {
            "model": os.path.basename(os.path.abspath(where)) if os.path.exists(where) else where,
            "weights": fingerprint(main_denoiser(pipe)),
            "size": f"{width}x{height}" + f", {len(frames)} frames" * (len(frames) > 1),
            "input": str(input_grid(pipe, height, width, len(frames))),
            **{name: record["settings"][name] for name in ("steps", "guidance")},
            "negative_prompt": record["settings"]["negative_prompt"] or "",
            **{name: record[name] for name in ("calls", "first")},
            "scheduler": type(pipe.scheduler).__name__,
            **{name: record[name] for name in ("device", "dtype", "versions")},
            "asked": budget.words(self.measure),
            "promised": f"{self.words()}; {self.point.fast}",
            "prompts": len({sample.prompt for sample in self.samples}),
            "images": len(self.samples),
            "date": time.strftime("%Y-%m-%d"),
        }
        return dataclasses.replace(self.point.config, origin=origin)

    @property
    def _close(self) -> list[float]:
        return [self.measure.sign * value for value in self.point.closeness]


def peak_of(drawn: Sequence[Drawn]) -> int:
    """Return the highest memory use in bytes; 0 where it was not measured."""
    return max((each.peak or 0 for each in drawn), default=0)
