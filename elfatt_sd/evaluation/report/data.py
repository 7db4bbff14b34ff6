"""A run as its report reads it: what `results.json` holds, and a name for every row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, structs

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import records
from elfatt_sd.evaluation.run import RESULTS_FILE
from elfatt_sd.files import checked

BASELINE, NULL, METHOD = "baseline", "null", "method"
PARTS = {"end_to_end": "end to end", "unet": "UNet alone"}
MEASURES = ("psnr", "ssim", "cosine")
ACCURACY = "accuracy mean"  # of all attributes
CROWD = 8  # methods; with more, colours repeat and a legend cannot name them
_TEXTS = 14  # rows; with more, their texts in a plot cover each other


class Row(records.ResultRow, eq=False, dict=True):
    """One cell of the run: a method with its settings, and all that was measured of it."""

    def __post_init__(self) -> None:
        self.label = self.label or self.method or self.cell or "unnamed"
        self.method = self.peer or self.method  # the name in configurations; of a peer the package
        self.figures = {**self.distances, **self.metrics}
        self.figures |= {f"accuracy {name}": figure for name, figure in self.accuracy.items()}
        for name, figure in self.distances.items():  # no Frechet distance is below 0; estimates of kernel ones may be
            if figure.interval and not is_kernel(name):
                self.figures[name] = structs.replace(figure, interval=[max(end, 0.0) for end in figure.interval])
        self.changes: dict[str, records.Changes] = {measure: getattr(self.paired, measure) for measure in MEASURES}
        self.timed: dict[str, records.Seconds] = {part: getattr(self.time, part) for part in PARTS}
        self.identical = self.paired.psnr.identical  # images that equal the baseline's in every pixel
        self.mostly_identical = 2 * (self.identical or 0) > (self.images or 0)
        # Mean PSNR of the images that differ; None where most are identical.
        self.psnr = None if self.mostly_identical else self.paired.psnr.estimate
        # GiB that one more image of a batch takes, with the interval that the fit allows.
        self.slope = records.estimate(self.memory.gib_per_image, self.memory.interval)
        self.speed: records.Estimate | None = None  # of the part that is in the main table
        self.verdicts: dict[str, str | None] = {}  # by the names of figures; see `Results.judges`
        self.verdict: str | None = None  # the first of them
        self.title = self.suffix = self.name = ""  # see `Results`
        self.number: int | None = None  # by which the rows of a large run are known

    def figure(self, name: str | None) -> records.Figure:
        """Return a distance, an accuracy or a metric, empty where the row has none."""
        return self.figures.get(name or "", records.Figure())


class Published(Struct, frozen=True):
    source: Any = "published"
    rows: list[dict[str, Any]] = []


class Results(Struct, eq=False, dict=True):
    """A run: its rows, and what they have in common."""

    format: Literal[1]
    rows: list[Row]
    name: str = "unnamed protocol"
    description: str = ""
    identity: str = ""
    protocol: dict[str, Any] = {}  # the whole protocol, overrides included
    environment: dict[str, Any] = {}  # the machine and the versions
    reference: dict[str, records.ReferenceRecord] = {}
    published: Published = Published()

    @classmethod
    def of(cls, data: Mapping[str, Any], folder: Path = Path()) -> Results:
        """Read what `results.json` holds; intervals of too few classes, which earlier versions wrote, are left out."""
        known = {**data, "rows": records.without_intervals_of_few(data.get("rows") or [])}
        free = {key: data[key] for key in ("protocol", "environment") if data.get(key)}  # with their nulls
        results = checked({**records.without_nulls(known), **free}, cls)
        results.data, results.folder = data, folder
        return results

    def __post_init__(self) -> None:
        self.data: Mapping[str, Any] = {}
        self.folder = Path()
        self.baseline = next((row for row in self.rows if row.role == BASELINE), None)
        self.null = next((row for row in self.rows if row.role == NULL), None)  # untouched, with other seeds
        self.methods = [row for row in self.rows if row.role not in (BASELINE, NULL)]
        self.legend = len({row.label for row in self.methods}) <= CROWD  # whether that of a plot can name all methods
        self.crowded = not self.legend or len(self.rows) > _TEXTS  # whether rows are known by their numbers
        self._give_names()
        self.distances, attributes, self.metrics = (
            list(dict.fromkeys(name for row in self.rows for name in getattr(row, kind)))
            for kind in ("distances", "accuracy", "metrics")
        )
        self.attributes = [f"accuracy {name}" for name in attributes]
        # those that compare with the untouched images first
        self.metrics.sort(key=lambda name: not any(row.figure(name).compares for row in self.rows))
        # the machine of the timing; where nothing was timed, that of the images
        self.machine = (self.environment.get("timing") or {}).get("environment") or self.environment
        # of the main table: the first Frechet distance, or what there is
        self.distance = next((name for name in self.distances if not is_kernel(name)), next(iter(self.distances), None))
        # all figures with verdicts, that of the main table first
        names = [*sorted(self.distances, key=lambda name: name != self.distance), ACCURACY, *self.metrics]
        self.judges = [name for name in names if any(row.figure(name).difference.verdict for row in self.rows)]
        timed = (part for part in PARTS if any(row.timed[part].seconds_per_image is not None for row in self.rows))
        self.time_part = next(timed, "end_to_end")  # of the main table
        for row in self.rows:
            row.verdicts = {name: row.figure(name).difference.verdict for name in self.judges}
            row.verdict = next(iter(row.verdicts.values()), None)
            row.speed = row.timed[self.time_part].speed

    def _give_names(self) -> None:
        """Tell rows apart by their label, the ratio and the settings in which rows of one method differ."""
        methods = {(row.label, row.method) for row in self.rows}
        values: dict[str, set[tuple[str, ...]]] = {name: set() for row in self.rows for name in row.settings}
        for name, found in values.items():
            found |= {(row.label, row.method, setting_text(row.settings.get(name))) for row in self.rows}
        varied = [name for name, found in values.items() if name == "ratio" or len(found) > len(methods)]
        self.varied = sorted(varied, key=lambda name: name != "ratio")
        for place, row in enumerate(self.rows, 1):
            row.number = place if self.crowded else None
            row.title = f"{place} · {row.label}" if self.crowded else row.label
            texts = {name: setting_text(row.settings[name]) for name in self.varied if name in row.settings}
            titles = {name: "" if name == "ratio" else f"{setting_title(name).lower()} " for name in texts}
            row.suffix = ", ".join(f"{titles[name]}{text}" for name, text in texts.items())  # `0.5, block size 128`
            row.name = f"{row.title} {row.suffix}".strip() + " (null row)" * (row.role == NULL)
        counts = Counter(row.name for row in self.rows)
        for row in self.rows:
            row.name += f" ({row.cell})" * (counts[row.name] > 1)

    @property
    def hardware(self) -> str:
        """The processor of `machine`, and how many threads ran where it is a CPU; empty where it was not recorded."""
        device, threads = self.machine.get("device") or "", self.machine.get("cpu_threads")
        several = "s" * (threads != 1)
        return f"{device}, {threads} thread{several}" if device and threads and not self.machine.get("cuda") else device

    def extrapolated(self, name: str) -> bool:
        return any(row.figure(name).difference.images == "infinite" for row in self.rows)


def load_results(folder: Path) -> Results:
    path = folder / RESULTS_FILE
    data = records.read_data(path, Results, "make it again with `elfatt-sd eval report`")
    if data is None:
        raise ElfattError(f"{path} does not exist; `elfatt-sd eval score` writes it.")
    return Results.of(data, folder)


def is_kernel(name: str) -> bool:
    return name.startswith(("KID", "KD"))


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


def shortened(text: str, width: int) -> str:
    """Cut the middle of a text to so many characters, at blanks where it can: its ends are what tells rows apart."""
    if len(text) <= width:
        return text
    end = text[-(width * 3 // 5) :].split(" ", 1)[-1]
    return f"{text[: width - len(end)].rpartition(' ')[0].rstrip(',') or text[: width - len(end) - 1]}…{end}"
