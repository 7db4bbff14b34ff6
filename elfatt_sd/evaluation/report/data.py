"""The results of a run as the report reads them: nothing is required of a row, what is missing is None."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.records import ResultsRecord, read_data
from elfatt_sd.evaluation.report.rows import BASELINE, NULL, Row, is_kernel, label_of, settings_of
from elfatt_sd.evaluation.report.values import Estimate, dig, number, setting_text, setting_title
from elfatt_sd.evaluation.results import RESULTS_FILE, without_intervals_of_few
from elfatt_sd.files import is_plain_name

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
