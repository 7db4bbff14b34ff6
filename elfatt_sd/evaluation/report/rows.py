"""A row of the results: a method with its settings, and all that was measured of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elfatt_sd.evaluation.intervals import TOO_FEW
from elfatt_sd.evaluation.report.values import Estimate, dig, estimate, number, numbers, shortened

BASELINE, NULL, METHOD = "baseline", "null", "method"


def is_kernel(name: str) -> bool:
    return name.startswith(("KID", "KD"))


@dataclass(frozen=True)
class Row:
    """One cell of the run: a method with its settings."""

    data: Mapping[str, Any]  # the row of `results.json`
    name: str  # what tells the row from all others in a plot or a sentence
    suffix: str  # the part of the name behind the label
    # the row's place in a run of so many rows that they are known by their numbers, else None
    number: int | None = None

    @property
    def cell(self) -> str:
        """The folder of the row's images."""
        return str(self.data.get("cell", ""))

    @property
    def label(self) -> str:
        """The method's name in tables."""
        return label_of(self.data)

    @property
    def title(self) -> str:
        """The label, behind the row's number where it has one."""
        return self.label if self.number is None else f"{self.number} · {self.label}"

    def short(self, width: int) -> str:
        return shortened(self.name.removesuffix(self.suffix).rstrip(), self.suffix, width)

    @property
    def method(self) -> str:
        """The method's name in configurations; for a peer's row the package."""
        return str(self.data.get("peer") or self.data.get("method") or "")

    @property
    def role(self) -> str:
        """`baseline` (untouched), `null` (untouched with other seeds) or `method`."""
        return str(self.data.get("role") or METHOD)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the method."""
        return settings_of(self.data)

    @property
    def failed(self) -> str | None:
        """The reason why the row has no figures, or None."""
        reason = self.data.get("failed")
        return None if reason in (None, False, "") else str(reason)

    @property
    def images(self) -> int | None:
        """The number of images."""
        count = number(self.data, "images")
        return None if count is None or not math.isfinite(count) else int(count)

    @property
    def classes(self) -> int | None:
        """The number of distinct classes, or prompts, of the images."""
        count = number(self.data, "classes")
        return None if count is None else int(count)

    @property
    def most_changed(self) -> list[int]:
        """The indices of the images that differ most from the baseline's, most first."""
        return [int(index) for index in numbers(self.data, "most_changed")]

    def reason(self, part: str) -> str | None:
        reasons = (dig(self.data, part, key) for key in ("failed", "note"))
        return next((str(reason) for reason in reasons if reason), None)

    def distance(self, name: str) -> Estimate | None:
        """Return the distance to the reference; the interval of a Frechet distance begins at 0, as no such is below.

        The unbiased estimate of a kernel distance may itself be below 0, so its interval stays as it is.
        """
        found = estimate(dig(self.data, "distances", name))
        if found is None or found.low is None or is_kernel(name):
            return found
        return replace(found, low=max(found.low, 0.0))

    def difference(self, name: str, of: str = "distances") -> Estimate | None:
        """Return the paired difference in a distance, or in another of its figures, this row minus the baseline."""
        return estimate(dig(self.data, of, name, "difference"))

    def withheld(self, name: str) -> bool:
        return self.extrapolated(name) and self.verdict(name) == TOO_FEW

    def extrapolated(self, name: str) -> bool:
        return bool(dig(self.data, "distances", name, "difference", "images") == "infinite")

    def verdict(self, name: str, of: str = "distances") -> str | None:
        verdict = dig(self.data, of, name, "difference", "verdict")
        return None if verdict is None else str(verdict)

    def paired(self, measure: str) -> Estimate | None:
        return estimate(dig(self.data, "paired", measure), "mean")

    def pictures(self, measure: str) -> Estimate | None:
        return estimate(dig(self.data, "paired", measure), "median", "quartiles")

    def each(self, measure: str) -> list[float | None]:
        values = dig(self.data, "paired", measure, "pictures")
        return [number(value) for value in values] if isinstance(values, list) else []

    @property
    def image_classes(self) -> list[int]:
        """The class of every image; empty where it was not kept."""
        return [int(index) for index in numbers(self.data, "paired", "classes")]

    def lowest(self, measure: str) -> float | None:
        return number(self.data, "paired", measure, "lowest")

    @property
    def identical(self) -> int | None:
        """The number of images that equal the baseline's in every pixel; the PSNR is that of the others."""
        count = number(self.data, "paired", "psnr", "identical")
        return None if count is None or not math.isfinite(count) else int(count)

    @property
    def mostly_identical(self) -> bool:
        return 2 * (self.identical or 0) > (self.images or 0)

    @property
    def psnr(self) -> Estimate | None:
        """The mean PSNR to the baseline's images; None where most are identical."""
        return None if self.mostly_identical else self.paired("psnr")

    def accuracy(self, name: str) -> Estimate | None:
        return estimate(dig(self.data, "accuracy", name))

    def metric(self, name: str) -> Estimate | None:
        return estimate(dig(self.data, "metrics", name))

    def seconds(self, part: str = "end_to_end") -> float | None:
        return number(self.data, "time", part, "seconds_per_image")

    def time(self, part: str = "end_to_end") -> Estimate | None:
        value = self.seconds(part)
        return None if value is None else Estimate(value)

    def time_values(self, part: str = "end_to_end") -> list[float]:
        return numbers(self.data, "time", part, "values")

    def speedup(self, part: str = "end_to_end") -> Estimate | None:
        ratio = dig(self.data, "time", part, "ratio")
        middle, low, high = (number(ratio, key) for key in ("median", "low", "high"))
        return None if middle is None else Estimate(middle, low, high)

    def memory(self, key: str = "gib_per_image") -> float | None:
        return number(self.data, "memory", key)

    @property
    def slope(self) -> Estimate | None:
        """The GiB that one more image of a batch takes, with the interval that the fit allows."""
        return estimate(dig(self.data, "memory"), "gib_per_image")

    def stage_slope(self, stage: str) -> float | None:
        path = (stage,) if stage == "reserved" else ("stages", stage)
        return number(dig(self.data, "memory", *path), "gib_per_image")

    def memory_points(self) -> list[tuple[float, float]]:
        batches, peaks = (dig(self.data, "memory", key) for key in ("batches", "peaks_gib"))
        if not isinstance(batches, list) or not isinstance(peaks, list):
            return []
        pairs = [numbers(pair) for pair in zip(batches, peaks, strict=False)]
        return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def label_of(row: Mapping[str, Any]) -> str:
    return str(row.get("label") or row.get("method") or row.get("cell") or "unnamed")


def settings_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = row.get("settings")
    return settings if isinstance(settings, Mapping) else {}
