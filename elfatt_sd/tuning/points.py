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
    """A configuration that was run."""

    name: str  # of it, for tables and plots
    config: PatchConfig  # it
    predicted: float | None  # its predicted PSNR in dB; None for what was not chosen by prediction
    closeness: tuple[float, ...]  # to the untouched image, by image
    speed: tuple[float, ...]  # times as fast as the untouched pipeline, by run
    busy: str = ""  # what to say where these are not to be trusted; empty otherwise

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
    """What the held-out images say of a configuration."""

    point: Point  # the configuration, with its closeness and speed
    samples: Sequence[Sample]  # the held-out images
    untouched: list[Drawn] = field(default_factory=list)  # them, drawn by the untouched pipeline
    tuned: list[Drawn] = field(default_factory=list)  # them, drawn with the configuration
    higher: bool = True  # whether a higher closeness is closer

    def interval(self) -> float:
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
