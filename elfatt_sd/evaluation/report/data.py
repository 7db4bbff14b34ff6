"""A run as its report reads it: `results.json` as Structs, with a name for every row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.records import (
    Changes,
    Figure,
    MemoryRow,
    Paired,
    ResultRow,
    ResultsRecord,
    RowCost,
    Seconds,
    TimedRow,
    read_data,
)
from elfatt_sd.evaluation.results import RESULTS_FILE, without_intervals_of_few
from elfatt_sd.evaluation.statistics import TOO_FEW
from elfatt_sd.files import checked, is_plain_name

BASELINE, NULL, METHOD = "baseline", "null", "method"
STAGES = {"text": "Text", "unet": "UNet", "vae": "VAE", "reserved": "Reserved"}
PARTS = {"end_to_end": "end to end", "unet": "UNet alone"}
TIME_COLUMNS = {"end_to_end": "s/img", "unet": "UNet, s/img"}
CROWD = 8  # methods; with more, colours repeat and a legend cannot name them
_TEXTS = 14  # rows; with more, their texts in a plot cover each other


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


def estimate(value: float | None, ends: Sequence[float] | None) -> Estimate | None:
    if value is None:
        return None
    return Estimate(value, ends[0], ends[-1]) if ends else Estimate(value)


class Row:
    """One cell of the run: a method with its settings, and all that was measured of it."""

    def __init__(self, record: ResultRow, name: str, suffix: str, number: int | None) -> None:
        self.record = record
        self.name = name  # what tells the row from all others in a plot or a sentence
        self.suffix = suffix  # the part of the name behind the label
        self.number = number  # its place in a run of so many rows that they are known by their numbers, else None
        self.cell = record.cell or ""  # the folder of its images
        self.label = label_of(record)  # the method's name in tables
        self.method = record.peer or record.method or ""  # the name in configurations; of a peer the package
        self.role = record.role or METHOD
        self.settings = record.settings or {}
        self.failed = record.failed or None  # why it has no figures
        self.images, self.classes = record.images, record.classes
        self.most_changed = record.most_changed or []  # indices of images, the one that differs most first
        self.distances, self.accuracies = record.distances or {}, record.accuracy or {}
        self.metrics, self.changes = record.metrics or {}, record.paired or Paired()
        self.timed, self.memory = record.time or TimedRow(), record.memory or MemoryRow()
        self.cost = record.cost or RowCost()
        self.image_classes = self.changes.classes or []  # of every image; empty where they were not kept
        self.identical = self._change("psnr").identical  # images that equal the baseline's in every pixel
        self.mostly_identical = 2 * (self.identical or 0) > (self.images or 0)
        # Mean PSNR of the images that differ; None where most are identical.
        self.psnr = None if self.mostly_identical else self.paired("psnr")
        # GiB that one more image of a batch takes, with the interval that the fit allows.
        self.slope = estimate(self.memory.gib_per_image, self.memory.interval)

    @property
    def title(self) -> str:
        """The label, behind the row's number where it has one."""
        return self.label if self.number is None else f"{self.number} · {self.label}"

    def short(self, width: int) -> str:
        return shortened(self.name.removesuffix(self.suffix).rstrip(), self.suffix, width)

    def figure(self, name: str, of: str = "distances") -> Figure:
        kinds: dict[str, Mapping[str, Figure]]
        kinds = {"distances": self.distances, "accuracy": self.accuracies, "metrics": self.metrics}
        return kinds[of].get(name) or Figure()

    def distance(self, name: str) -> Estimate | None:
        """Return the distance to the reference; the interval of a Frechet distance begins at 0, as no such is below.

        The unbiased estimate of a kernel distance may itself be below 0, so its interval stays as it is.
        """
        figure = self.figure(name)
        ends = figure.interval
        return estimate(figure.value, ends if not ends or is_kernel(name) else [max(ends[0], 0.0), *ends[1:]])

    def accuracy(self, name: str) -> Estimate | None:
        return estimate(self.figure(name, "accuracy").value, self.figure(name, "accuracy").interval)

    def metric(self, name: str) -> Estimate | None:
        return estimate(self.figure(name, "metrics").value, self.figure(name, "metrics").interval)

    def difference(self, name: str, of: str = "distances") -> Estimate | None:
        """Return the paired difference in a figure, this row minus the baseline."""
        found = self.figure(name, of).difference
        return None if found is None else estimate(found.value, found.interval)

    def verdict(self, name: str, of: str = "distances") -> str | None:
        found = self.figure(name, of).difference
        return None if found is None else found.verdict

    def extrapolated(self, name: str) -> bool:
        found = self.figure(name).difference
        return found is not None and found.images == "infinite"

    def withheld(self, name: str) -> bool:
        return self.extrapolated(name) and self.verdict(name) == TOO_FEW

    def _change(self, measure: str) -> Changes:
        found: Changes | None = getattr(self.changes, measure)
        return found or Changes()

    def paired(self, measure: str) -> Estimate | None:
        """Return the mean of `psnr`, `ssim` or `cosine` between this row's images and the baseline's."""
        return estimate(self._change(measure).mean, self._change(measure).interval)

    def pictures(self, measure: str) -> Estimate | None:
        """Return the median over images, with quartiles."""
        return estimate(self._change(measure).median, self._change(measure).quartiles)

    def each(self, measure: str) -> list[float | None]:
        return self._change(measure).pictures or []

    def lowest(self, measure: str) -> float | None:
        return self._change(measure).lowest

    def _part(self, part: str) -> Seconds:
        found: Seconds | None = getattr(self.timed, part)
        return found or Seconds()

    def seconds(self, part: str = "end_to_end") -> float | None:
        return self._part(part).seconds_per_image

    def time(self, part: str = "end_to_end") -> Estimate | None:
        return estimate(self.seconds(part), None)

    def time_values(self, part: str = "end_to_end") -> list[float]:
        return self._part(part).values

    def speedup(self, part: str = "end_to_end") -> Estimate | None:
        ratio = self._part(part).ratio
        return None if ratio is None else Estimate(ratio.median, ratio.low, ratio.high)

    def stage_slope(self, stage: str) -> float | None:
        growth = self.memory.reserved if stage == "reserved" else (self.memory.stages or {}).get(stage)
        return None if growth is None else growth.gib_per_image

    def memory_points(self) -> list[tuple[float, float]]:
        """Return the batch sizes with their peaks."""
        return list(zip(self.memory.batches, self.memory.peaks_gib or [], strict=False))


class Results:
    """A run: its rows, and what they have in common. `data` is the content of `results.json`."""

    def __init__(self, data: Mapping[str, Any], folder: Path = Path()) -> None:
        self.data, self.folder = data, folder
        # results of earlier versions had such intervals
        records = checked(without_intervals_of_few(data.get("rows") or []), list[ResultRow])
        self.varied = _varied_settings(records)
        suffixes = [_suffix(record.settings or {}, self.varied) for record in records]
        names = [
            f"{label_of(record)} {suffix}".strip() + " (null row)" * (record.role == NULL)
            for record, suffix in zip(records, suffixes, strict=True)
        ]
        unique = [
            name if names.count(name) == 1 else f"{name} ({record.cell})"
            for record, name in zip(records, names, strict=True)
        ]
        methods = {label_of(record) for record in records if record.role not in (BASELINE, NULL)}
        self.legend = len(methods) <= CROWD  # whether the legend of a plot can name all methods
        self.crowded = not self.legend or len(records) > _TEXTS  # whether rows are known by their numbers
        self.rows = [
            Row(record, f"{place} · {name}", suffix, place) if self.crowded else Row(record, name, suffix, None)
            for place, (record, name, suffix) in enumerate(zip(records, unique, suffixes, strict=True), 1)
        ]
        self.name: str = data.get("name") or "unnamed protocol"
        self.protocol: Mapping[str, Any] = data.get("protocol") or {}  # the whole protocol, overrides included
        self.environment: Mapping[str, Any] = data.get("environment") or {}  # the machine and the versions
        self.timing: Mapping[str, Any] = self.environment.get("timing") or {}  # where and when time was taken
        # the machine of the timing; where nothing was timed, that of the images
        self.machine: Mapping[str, Any] = self.timing.get("environment") or self.environment
        self.published: Mapping[str, Any] = data.get("published") or {}  # `source` and `rows`
        self.baseline = next((row for row in self.rows if row.role == BASELINE), None)
        self.null = next((row for row in self.rows if row.role == NULL), None)  # untouched, with other seeds
        self.methods = [row for row in self.rows if row.role not in (BASELINE, NULL)]
        self.distances = list(dict.fromkeys(name for row in self.rows for name in row.distances))
        # of the main table: the first Frechet distance, or what there is
        self.distance = next((name for name in self.distances if not is_kernel(name)), next(iter(self.distances), None))
        # the attributes whose accuracy was measured, and `mean`, that of all of them
        self.attributes = list(dict.fromkeys(name for row in self.rows for name in row.accuracies))
        timed = (part for part in PARTS if any(row.seconds(part) is not None for row in self.rows))
        self.time_part = next(timed, "end_to_end")  # of the main table
        # whose memory was measured apart
        self.stages = [stage for stage in STAGES if any(row.stage_slope(stage) is not None for row in self.rows)]

    @property
    def folder_name(self) -> str:
        """The name, checked for use as that of a folder."""
        if not is_plain_name(self.name):
            raise ElfattError(f"{RESULTS_FILE} has the name {self.name!r}, which cannot be that of a folder.")
        return self.name

    @property
    def hardware(self) -> str:
        """The processor of `machine`, and how many threads ran where it is a CPU; empty where it was not recorded."""
        device, threads = self.machine.get("device") or "", self.machine.get("cpu_threads")
        several = "s" * (threads != 1)
        return f"{device}, {threads} thread{several}" if device and threads and not self.machine.get("cuda") else device

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the further metrics, those that compare with the untouched images first."""
        names = dict.fromkeys(name for row in self.rows for name in row.metrics)
        return sorted(names, key=lambda name: not self.compares(name))

    def compares(self, metric: str) -> bool:
        return any(row.metrics[metric].compares for row in self.rows if metric in row.metrics)

    def extrapolated(self, name: str) -> bool:
        return any(row.extrapolated(name) for row in self.rows)

    def withheld(self, name: str) -> bool:
        return any(row.withheld(name) for row in self.rows)

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
        ends = difference.ends and [base.value + end for end in difference.ends]
        return estimate(base.value + difference.value, ends)


def load_results(folder: Path) -> Results:
    """Read `results.json` of a run, or of what was published of it."""
    path = folder / RESULTS_FILE
    data = read_data(path, ResultsRecord, "make it again with `elfatt-sd eval report`")
    if data is None:
        raise ElfattError(f"{path} does not exist; `elfatt-sd eval score` writes it.")
    return Results(data, folder)


def is_kernel(name: str) -> bool:
    return name.startswith(("KID", "KD"))


def label_of(record: ResultRow) -> str:
    return record.label or record.method or record.cell or "unnamed"


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
    left = max(width - len(end) - 1, width // 5)
    border = head.rfind(" ", max(left // 2, 8), left + 1)
    start = head[: border if border > 0 else left]
    return f"{start.rstrip(' ,')}…{end[-(width - left - 1) :]}"


def _varied_settings(records: Sequence[ResultRow]) -> list[str]:
    """Name the ratio and the settings in which rows of one method differ, the ratio first."""
    names = dict.fromkeys(name for record in records for name in record.settings or {})

    def varies(name: str) -> bool:
        seen: dict[tuple[str, str | None], set[str]] = {}
        for record in records:
            values = seen.setdefault((label_of(record), record.method), set())
            values.add(setting_text((record.settings or {}).get(name)))
        return any(len(values) > 1 for values in seen.values())

    return sorted((name for name in names if name == "ratio" or varies(name)), key=lambda name: name != "ratio")


def _suffix(settings: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Write the varied settings of a row: `0.5, block size 128`."""
    parts = [(name, setting_text(settings[name])) for name in varied if settings.get(name) is not None]
    return ", ".join(text if name == "ratio" else f"{setting_title(name).lower()} {text}" for name, text in parts)
