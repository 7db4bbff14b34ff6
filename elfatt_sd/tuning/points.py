"""Configurations that were run, and what held-out images say of one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from elfatt_sd.config import PatchConfig
from elfatt_sd.tuning.runs import Drawn, Sample


@dataclass(frozen=True)
class Point:
    """A configuration that was run.

    Attributes:
        name: of it, for tables and plots.
        config: it.
        predicted: its predicted PSNR in dB; None for what was not chosen by prediction.
        closeness: to the untouched image, by image.
        speed: times as fast as the untouched pipeline, by run.
        busy: what to say where these are not to be trusted; empty otherwise.
    """

    name: str
    config: PatchConfig
    predicted: float | None
    closeness: tuple[float, ...]
    speed: tuple[float, ...]
    busy: str = ""

    @property
    def mean(self) -> float:
        """Mean closeness."""
        return statistics.fmean(self.closeness)

    @property
    def times(self) -> float:
        """Median speed."""
        return statistics.median(self.speed)


@dataclass
class Proof:
    """What the held-out images say of a configuration.

    Attributes:
        point: the configuration, with its closeness and speed.
        samples: the held-out images.
        untouched: them, drawn by the untouched pipeline.
        tuned: them, drawn with the configuration.
        higher: whether a higher closeness is closer.
    """

    point: Point
    samples: Sequence[Sample]
    untouched: list[Drawn] = field(default_factory=list)
    tuned: list[Drawn] = field(default_factory=list)
    higher: bool = True

    def interval(self) -> float:
        """Return half of the 95 % interval of the mean closeness."""
        from elfatt_sd.evaluation.intervals import student_quantile

        values = self.point.closeness
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return math.inf
        return student_quantile(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))

    @property
    def peak(self) -> int:
        """Highest memory use, in bytes."""
        return max((drawn.peak or 0 for drawn in self.tuned), default=0)

    @property
    def worst(self) -> int:
        """Number of the image that is farthest from the untouched one."""
        far = min if self.higher else max
        return far(range(len(self.samples)), key=self.point.closeness.__getitem__)
