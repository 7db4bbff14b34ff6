"""What tuning found: the settings, how close and how fast they are on held-out images, and the curve they are on."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elfatt_sd.config import PatchConfig
from elfatt_sd.measuring.clock import Spread
from elfatt_sd.patch import apply_patch, remove_patch
from elfatt_sd.tuning.asked import Budget, Measure
from elfatt_sd.tuning.model import Choice
from elfatt_sd.tuning.points import Point, Proof

Pipeline = TypeVar("Pipeline")
UNTOUCHED = PatchConfig("untouched")


@dataclass(frozen=True)
class Tuned:
    """What `tune` found."""

    config: PatchConfig  # the settings; without phases where the pipeline is best left untouched
    budget: Budget  # what was asked for
    measure: Measure  # how closeness was measured
    proof: Proof | None  # of the settings, on held-out images; None where the pipeline is best left untouched
    points: tuple[Point, ...]  # what was run, of the search and of the proofs; presets too
    curve: tuple[Choice, ...]  # the choices that were predicted to be best, from untouched to the fastest
    untouched_seconds: float  # of an untouched image
    realised: float  # fraction of the predicted seconds that runs really saved
    floor: float  # closeness of two untouched images of one seed; infinity where the model repeats itself bit for bit
    images: float  # how many untouched images could have been drawn in the time that tuning took
    record: dict[str, Any]  # model, size, steps, device and versions, as plain data

    def apply(self, pipe: Pipeline) -> Pipeline:
        """Patch a pipeline with the settings; it is left untouched where that is best."""
        return apply_patch(pipe, self.config) if self.config.active else remove_patch(pipe)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as JSON, for `--config` and `PatchConfig.load`."""
        self.config.save(path)

    def report(self, folder: str | os.PathLike[str]) -> Path:
        """Write a page with the curve, the map of the choices, and images side by side, and return its path."""
        from elfatt_sd.tuning import page

        return page.write_page(self, Path(folder))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; values that are not finite are null."""
        proof = None
        if self.proof is not None:
            half = self.proof.interval()
            proof = {
                **_point(self.proof.point),
                "interval": _finite(half),
                "samples": [sample._asdict() for sample in self.proof.samples],
            }
        return {
            "config": self.config.to_dict(),
            "asked": dataclasses.asdict(self.budget),
            "metric": self.measure.name,
            "proof": proof,
            "points": list(map(_point, self.points)),
            "untouched_seconds": self.untouched_seconds,
            "noise_floor": _finite(self.floor),
            "images": self.images,
            **self.record,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return what was found in lines."""
        asked = f"asked for: {self.budget.words(self.measure)}"
        cost = f"tuning took the time of {self.images:.0f} untouched images of {self.untouched_seconds:.2f} s"
        if self.proof is None:
            return [f"untouched: {self.why_untouched()}", asked, *self._curve(), *self._noise(), cost]
        point, proof = self.proof.point, self.proof
        worst = self.measure.words(point.closeness[proof.worst])
        return [
            f"{point.name}: {Spread.over(point.speed).words()} times as fast, {self._mean(proof)}",
            asked,
            f"held-out images: {len(proof.samples)}, worst {worst} ({proof.samples[proof.worst].prompt!r}, "
            f"seed {proof.samples[proof.worst].seed})",
            *self._memory(),
            f"layers: {self.config_words()}",
            *self._curve(),
            *self._noise(),
            cost,
        ]

    def why_untouched(self) -> str:
        """Say why the pipeline is best left alone."""
        if not any(choice.saved > 0 for choice in self.curve):
            return "no approximation is faster than exact attention in any layer, at this size on this machine"
        return "no choice that is as close as asked was faster in the images that were drawn"

    def config_words(self) -> str:
        """Say how many layers have which kinds of phases; the settings of a preset are the same in all."""
        phases = [phase for phase in self.config.all_phases if not phase.exact]
        kinds = sorted({phase.attention.name for phase in phases if not phase.dense})
        kinds += sorted({f"attention in {phase.attention_dtype}" for phase in phases if phase.attention_dtype})
        if not self.config.per_layer:
            return f"all have the settings of {self.config.method} ({', '.join(kinds)})"
        return f"{len(self.config.per_layer)} have settings of their own ({', '.join(kinds)})"

    def _mean(self, proof: Proof) -> str:
        half = proof.interval()
        mean = self.measure.words(proof.point.mean)
        return f"{mean} +- {half:.{self.measure.digits}f} (mean and 95 % interval)" if half < float("inf") else mean

    def _memory(self) -> list[str]:
        peaks = [max((drawn.peak or 0 for drawn in drawings), default=0) for drawings in self._drawn()]
        if not all(peaks):
            return ["memory: not measured"]
        before, after = (peak / 2**30 for peak in peaks)
        return [f"peak memory: {after:.2f} GiB, untouched {before:.2f} GiB"]

    def _drawn(self) -> tuple[list[Any], list[Any]]:
        assert self.proof is not None
        return self.proof.untouched, self.proof.tuned

    def _curve(self) -> list[str]:
        rows = [f"{'what was run':<16} {'times as fast':>13} {self.measure.name:>9} {'images':>6}"]
        for point in sorted(self.points, key=lambda each: each.times):
            times = "busy" if point.busy else f"{point.times:.2f}"
            measured = f"{times:>13} {point.mean:>9.{self.measure.digits}f} {len(point.closeness):>6}"
            rows.append(f"{point.name:<16} {measured}")
        rows += [point.busy for point in self.points if point.busy][:1]
        return rows if self.points else []

    def _noise(self) -> list[str]:
        if self.floor == float("inf") or self.floor == self.measure.best:
            return []
        return [
            f"the model does not repeat itself: two untouched images of one seed have {self.measure.words(self.floor)}"
        ]


def _point(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "predicted_psnr": None if point.predicted is None else _finite(point.predicted),
        "closeness": list(map(_finite, point.closeness)),
        "speed": list(point.speed),
        "busy": bool(point.busy),
        "config": point.config.to_dict(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
