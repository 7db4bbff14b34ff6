"""A row of the results: a method with its settings, and all that was measured of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.records import ResultsRecord, read_data
from elfatt_sd.evaluation.results import RESULTS_FILE, without_intervals_of_few
from elfatt_sd.evaluation.statistics import TOO_FEW
from elfatt_sd.files import is_plain_name


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the interval, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def dig(data: Any, *path: str) -> Any:
    """Follow keys into nested mappings; None where a level is missing."""
    for key in path:
        if not isinstance(data, Mapping):
            return None
        data = data.get(key)
    return data


def number(data: Any, *path: str) -> float | None:
    """Return the number at the end of a path; None for anything else, NaN included. Infinity is a number."""
    value = dig(data, *path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number beyond all of float's
        return None
    return None if math.isnan(found) else found


def numbers(data: Any, *path: str) -> list[float]:
    values = dig(data, *path)
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    found = (number(value) for value in values)
    return [value for value in found if value is not None and math.isfinite(value)]


def estimate(data: Any, value: str = "value", interval: str = "interval") -> Estimate | None:
    middle, ends = number(data, value), numbers(data, interval)
    if middle is None:
        return None
    return Estimate(middle, ends[0], ends[-1]) if len(ends) >= 2 else Estimate(middle)


def setting_title(name: str) -> str:
    """Write the name of a setting for a reader: `block_size` is "Block size"."""
    return name.replace("_", " ").capitalize()


def setting_text(value: Any) -> str:
    """Write the value of a setting; a dash for one that the method does not have."""
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, str | int) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def shortened(head: str, tail: str, width: int) -> str:
    """Join two texts within so many characters; the first one is cut, or, where it stands alone, its middle.

    The end is what tells rows apart, so it is kept. Words stay whole where that leaves at least half of a part.
    """
    whole = f"{head} {tail}".strip()
    if len(whole) <= width:
        return whole
    end = f" {tail}" if tail else head[-(width * 2 // 5) :]
    end = end[max(end.find(" ", 0, len(end) // 2), 0) :]
    room = max(width - len(end) - 1, width // 5)
    border = head.rfind(" ", max(room // 2, 8), room + 1)
    start = head[: border if border > 0 else room]
    return f"{start.rstrip(' ,')}…{end[-(width - room - 1) :]}"


pass  # MOVED
pass  # MOVED

STAGES = {"text": "Text", "unet": "UNet", "vae": "VAE", "reserved": "Reserved"}
PARTS = {"end_to_end": "end to end", "unet": "UNet alone"}
TIME_COLUMNS = {"end_to_end": "s/img", "unet": "UNet, s/img"}
CROWD = 8  # methods; with more, colours repeat and a legend cannot name them
_TEXTS = 14  # rows; with more, their texts in a plot cover each other


class Results:
    """A run: its rows, and what they have in common."""

    def __init__(self, data: Mapping[str, Any], folder: Path = Path()) -> None:
        self.data, self.folder = data, folder
        # results of earlier versions had such intervals
        raw = without_intervals_of_few([row for row in data.get("rows") or [] if isinstance(row, Mapping)])
        self.varied = _varied_settings(raw)
        suffixes = [_suffix(row, self.varied) for row in raw]
        roles = [" (null row)" if row.get("role") == NULL else "" for row in raw]
        parts = zip(raw, suffixes, roles, strict=True)
        names = [f"{label_of(row)} {suffix}".strip() + role for row, suffix, role in parts]
        unique = [
            name if names.count(name) == 1 else f"{name} ({row.get('cell')})"
            for row, name in zip(raw, names, strict=True)
        ]
        methods = {label_of(row) for row in raw if row.get("role") not in (BASELINE, NULL)}
        self.legend = len(methods) <= CROWD  # whether the legend of a plot can name all methods
        self.crowded = not self.legend or len(raw) > _TEXTS  # whether rows are known by their numbers
        if self.crowded:
            unique = [f"{place} · {name}" for place, name in enumerate(unique, 1)]
        places = [place if self.crowded else None for place in range(1, len(raw) + 1)]
        self.rows = [Row(*parts) for parts in zip(raw, unique, suffixes, places, strict=True)]

    @property
    def name(self) -> str:
        """The protocol's name."""
        return str(self.data.get("name") or "unnamed protocol")

    @property
    def folder_name(self) -> str:
        """The name, checked for use as that of a folder."""
        if not is_plain_name(self.name):
            raise ElfattError(f"{RESULTS_FILE} has the name {self.name!r}, which cannot be that of a folder.")
        return self.name

    @property
    def protocol(self) -> Mapping[str, Any]:
        """The whole protocol, overrides included."""
        protocol = self.data.get("protocol")
        return protocol if isinstance(protocol, Mapping) else {}

    @property
    def environment(self) -> Mapping[str, Any]:
        """The machine and the versions."""
        environment = self.data.get("environment")
        return environment if isinstance(environment, Mapping) else {}

    @property
    def machine(self) -> Mapping[str, Any]:
        """The environment of the timing; where nothing was timed, that of the pipeline."""
        timed = dig(self.environment, "timing", "environment")
        return timed if isinstance(timed, Mapping) else self.environment

    @property
    def hardware(self) -> str:
        """The processor of `machine`, and how many threads ran where it is a CPU; empty where it was not recorded."""
        device, threads = self.machine.get("device"), number(self.machine, "cpu_threads")
        if not isinstance(device, str):
            return ""
        several = "s" * (threads != 1)
        return f"{device}, {threads:g} thread{several}" if threads and self.machine.get("cuda") is None else device

    @cached_property
    def baseline(self) -> Row | None:
        """The untouched pipeline."""
        return next((row for row in self.rows if row.role == BASELINE), None)

    @cached_property
    def null(self) -> Row | None:
        """The untouched pipeline with other seeds."""
        return next((row for row in self.rows if row.role == NULL), None)

    @cached_property
    def methods(self) -> list[Row]:
        """All rows that are neither baseline nor null."""
        return [row for row in self.rows if row.role not in (BASELINE, NULL)]

    @cached_property
    def distances(self) -> list[str]:
        """The names of all distances, in order of appearance."""
        return _keys(self.rows, "distances")

    @cached_property
    def distance(self) -> str | None:
        """The distance of the main table: the first Frechet distance, or what there is."""
        return next((name for name in self.distances if not is_kernel(name)), next(iter(self.distances), None))

    def paired_distance(self, row: Row) -> Estimate | None:
        """Return the baseline's distance of the main table plus a row's paired difference, with the interval of that.

        Where the difference is extrapolated, this is not the row's own distance. A row without a difference stands at
        its own distance where differences are not extrapolated, and nowhere else.
        """
        name = self.distance or ""
        own, difference = row.distance(name), row.difference(name)
        base = None if self.baseline is None else self.baseline.distance(name)
        if base is None or difference is None:
            return own and Estimate(own.value) if row is self.baseline or not self.extrapolated(name) else None
        ends = difference.ends and tuple(base.value + end for end in difference.ends)
        return Estimate(base.value + difference.value, *(ends or ()))

    def extrapolated(self, name: str) -> bool:
        return any(row.extrapolated(name) for row in self.rows)

    def withheld(self, name: str) -> bool:
        return any(row.withheld(name) for row in self.rows)

    @cached_property
    def attributes(self) -> list[str]:
        """The attributes whose accuracy was measured, and `mean`, that of all of them."""
        return _keys(self.rows, "accuracy")

    @cached_property
    def time_part(self) -> str:
        """What the time of the main table is of: `end_to_end`, or `unet` where nothing else was timed."""
        timed = [part for part in PARTS if any(row.seconds(part) is not None for row in self.rows)]
        return next(iter(timed), "end_to_end")

    @cached_property
    def stages(self) -> list[str]:
        """The stages whose memory was measured apart."""
        return [stage for stage in STAGES if any(row.stage_slope(stage) is not None for row in self.rows)]

    def from_protocol(self, key: str) -> Any:
        return next((value for name, value in _walk(self.protocol) if name == key), None)


def load_results(folder: Path) -> Results:
    """Read `results.json` of a run, or of what was published of it."""
    path = folder / RESULTS_FILE
    data = read_data(path, ResultsRecord, "make it again with `elfatt-sd eval report`")
    if data is None:
        raise ElfattError(f"{path} does not exist; `elfatt-sd eval score` writes it.")
    return Results(data, folder)


def _keys(rows: Sequence[Row], part: str) -> list[str]:
    found = [dig(row.data, part) for row in rows]
    return list(dict.fromkeys(str(key) for part in found if isinstance(part, Mapping) for key in part))


def _varied_settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(str(name) for row in rows for name in settings_of(row))

    def varies(name: str) -> bool:
        seen: dict[tuple[str, str], set[str]] = {}
        for row in rows:
            seen.setdefault((label_of(row), str(row.get("method"))), set()).add(
                setting_text(settings_of(row).get(name))
            )
        return any(len(values) > 1 for values in seen.values())

    return sorted((name for name in names if name == "ratio" or varies(name)), key=lambda name: name != "ratio")


def _suffix(row: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Write the varied settings of a row: `0.5, block size 128`."""
    settings = settings_of(row)
    parts = [(name, setting_text(settings[name])) for name in varied if settings.get(name) is not None]
    return ", ".join(text if name == "ratio" else f"{setting_title(name).lower()} {text}" for name, text in parts)


def _walk(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    level: list[Mapping[str, Any]] = [data]
    while level:
        yield from ((str(key), value) for mapping in level for key, value in mapping.items())
        level = [value for mapping in level for value in mapping.values() if isinstance(value, Mapping)]


pass  # MOVED

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
