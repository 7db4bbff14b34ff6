"""A run as its report reads it: `results.json` as Structs, a name for every row, and the published figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import structs

from elfatt_sd.config import PatchConfig, known_method
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import PRINTED
from elfatt_sd.evaluation.records import (
    Changes,
    Estimate,
    Figure,
    Growth,
    ReferenceRecord,
    ResultRow,
    ResultsRecord,
    Seconds,
    estimate,
    read_data,
    without_intervals_of_few,
    without_nulls,
)
from elfatt_sd.evaluation.run import RESULTS_FILE
from elfatt_sd.evaluation.statistics import TOO_FEW
from elfatt_sd.files import checked, is_plain_name

BASELINE, NULL, METHOD = "baseline", "null", "method"
STAGES = {"text": "Text", "unet": "UNet", "vae": "VAE", "reserved": "Reserved"}
PARTS = {"end_to_end": "end to end", "unet": "UNet alone"}
TIME_COLUMNS = {"end_to_end": "s/img", "unet": "UNet, s/img"}
MEASURES = ("psnr", "ssim", "cosine")
CROWD = 8  # methods; with more, colours repeat and a legend cannot name them
_TEXTS = 14  # rows; with more, their texts in a plot cover each other


class Row:
    """One cell of the run: a method with its settings, and all that was measured of it."""

    def __init__(self, record: ResultRow, name: str, suffix: str, number: int | None) -> None:
        self.record = record
        self.name = name  # what tells the row from all others in a plot or a sentence
        self.suffix = suffix  # the part of the name behind the label
        self.number = number  # its place in a run of so many rows that they are known by their numbers, else None
        self.cell, self.role, self.settings, self.failed = record.cell, record.role, record.settings, record.failed
        self.label = label_of(record)
        self.method = record.peer or record.method  # the name in configurations; of a peer the package
        self.images, self.classes, self.most_changed = record.images, record.classes, record.most_changed
        # figures by name; `Results` fills in those that only other rows have
        self.distances = {key: _from_zero(key, value) for key, value in record.distances.items()}
        self.accuracy, self.metrics = dict(record.accuracy), dict(record.metrics)
        self.changes: dict[str, Changes] = {measure: getattr(record.paired, measure) for measure in MEASURES}
        self.image_classes = record.paired.classes  # of every image; empty where they were not kept
        self.time, self.memory, self.cost = record.time, record.memory, record.cost
        self.timed: dict[str, Seconds] = {part: getattr(record.time, part) for part in PARTS}
        self.stages: dict[str, Growth] = {**record.memory.stages, "reserved": record.memory.reserved}
        self.identical = self.changes["psnr"].identical  # images that equal the baseline's in every pixel
        self.mostly_identical = 2 * (self.identical or 0) > (self.images or 0)
        # Mean PSNR of the images that differ; None where most are identical.
        self.psnr = None if self.mostly_identical else self.changes["psnr"].estimate
        # GiB that one more image of a batch takes, with the interval that the fit allows.
        self.slope = estimate(self.memory.gib_per_image, self.memory.interval)

    @property
    def title(self) -> str:
        """The label, behind the row's number where it has one."""
        return self.label if self.number is None else f"{self.number} · {self.label}"

    def short(self, width: int) -> str:
        return shortened(self.name.removesuffix(self.suffix).rstrip(), self.suffix, width)

    def distance(self, name: str | None) -> Figure:
        return self.distances.get(name or "", Figure())


class Results:
    """A run: its rows, and what they have in common. `data` is the content of `results.json`."""

    def __init__(self, data: Mapping[str, Any], folder: Path = Path()) -> None:
        self.data, self.folder = data, folder
        # results of earlier versions had such intervals
        rows = without_intervals_of_few(data.get("rows") or [])
        records = checked(without_nulls(rows), list[ResultRow])
        self.varied = _varied_settings(records)
        methods = {label_of(record) for record in records if record.role not in (BASELINE, NULL)}
        self.legend = len(methods) <= CROWD  # whether the legend of a plot can name all methods
        self.crowded = not self.legend or len(records) > _TEXTS  # whether rows are known by their numbers
        suffixes = [_suffix(record.settings, self.varied) for record in records]
        names = _names(records, suffixes)
        if self.crowded:
            names = [f"{place} · {name}" for place, name in enumerate(names, 1)]
        self.rows = [
            Row(record, name, suffix, place if self.crowded else None)
            for place, (record, name, suffix) in enumerate(zip(records, names, suffixes, strict=True), 1)
        ]
        self.distances, self.attributes, self.metrics = map(self._complete, ("distances", "accuracy", "metrics"))
        # those that compare with the untouched images first
        self.metrics.sort(key=lambda name: not self.compares(name))
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
        # of the main table: the first Frechet distance, or what there is
        self.distance = next((name for name in self.distances if not is_kernel(name)), next(iter(self.distances), None))
        timed = (part for part in PARTS if any(row.timed[part].seconds_per_image is not None for row in self.rows))
        self.time_part = next(timed, "end_to_end")  # of the main table

    def _complete(self, kind: str) -> list[str]:
        """Return the names of all figures of a kind, and give every row one, empty where it has none."""
        figures: list[dict[str, Figure]] = [getattr(row, kind) for row in self.rows]
        names = list(dict.fromkeys(name for each in figures for name in each))
        for each in figures:
            each.update({name: each.get(name, Figure()) for name in names})
        return names

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
    def unreadable(self) -> list[str]:
        """Images of the references that could not be read, each once."""
        parts = checked(without_nulls(self.data.get("reference") or {}), dict[str, ReferenceRecord]).values()
        return list(dict.fromkeys(name for part in parts for name in part.unreadable))

    def compares(self, metric: str) -> bool:
        return any(row.metrics[metric].compares for row in self.rows)

    def extrapolated(self, name: str) -> bool:
        return any(row.distance(name).extrapolated for row in self.rows)

    def withheld(self, name: str) -> bool:
        return any(is_withheld(row.distance(name)) for row in self.rows)

    def paired_distance(self, row: Row) -> Estimate | None:
        """Return the baseline's distance of the main table plus a row's paired difference, with the interval of that.

        Where the difference is extrapolated, this is not the row's own distance. A row without a difference stands at
        its own distance where differences are not extrapolated, and nowhere else.
        """
        own, difference = row.distance(self.distance).estimate, row.distance(self.distance).difference.estimate
        base = None if self.baseline is None else self.baseline.distance(self.distance).estimate
        if base is None or difference is None:
            apart = row is not self.baseline and self.extrapolated(self.distance or "")
            return None if own is None or apart else Estimate(own.value)
        return estimate(base.value + difference.value, [base.value + end for end in difference.ends or ()])


def load_results(folder: Path) -> Results:
    """Read `results.json` of a run, or of what was published of it."""
    path = folder / RESULTS_FILE
    data = read_data(path, ResultsRecord, "make it again with `elfatt-sd eval report`")
    if data is None:
        raise ElfattError(f"{path} does not exist; `elfatt-sd eval score` writes it.")
    return Results(data, folder)


def is_kernel(name: str) -> bool:
    return name.startswith(("KID", "KD"))


def is_withheld(figure: Figure) -> bool:
    """Tell a difference that is not shown: extrapolated, of too few classes."""
    return figure.extrapolated and figure.difference.verdict == TOO_FEW


def _from_zero(name: str, figure: Figure) -> Figure:
    """Let the interval of a Frechet distance begin at 0, as no such is below; an estimate of a kernel distance may."""
    if is_kernel(name) or not figure.interval:
        return figure
    return structs.replace(figure, interval=[max(figure.interval[0], 0.0), *figure.interval[1:]])


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
    names = dict.fromkeys(name for record in records for name in record.settings)

    def varies(name: str) -> bool:
        seen: dict[tuple[str, str], set[str]] = {}
        for record in records:
            values = seen.setdefault((label_of(record), record.method), set())
            values.add(setting_text(record.settings.get(name)))
        return any(len(values) > 1 for values in seen.values())

    return sorted((name for name in names if name == "ratio" or varies(name)), key=lambda name: name != "ratio")


def _suffix(settings: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Write the varied settings of a row: `0.5, block size 128`."""
    parts = [(name, setting_text(settings[name])) for name in varied if settings.get(name) is not None]
    return ", ".join(text if name == "ratio" else f"{setting_title(name).lower()} {text}" for name, text in parts)


def _names(records: Sequence[ResultRow], suffixes: Sequence[str]) -> list[str]:
    pairs = list(zip(records, suffixes, strict=True))
    names = [f"{label_of(each)} {suffix}".strip() + " (null row)" * (each.role == NULL) for each, suffix in pairs]
    return [
        name if names.count(name) == 1 else f"{name} ({record.cell})"
        for name, record in zip(names, records, strict=True)
    ]


# Published figures, and what keeps them from being compared with those of the run.

FIGURES = dict(zip(PRINTED, (("FID ↓", 1), ("s/img", 3), ("GB/img", 2)), strict=True))
_TABLE = {
    "Model": "Stable Diffusion v1.5, diffusers 0.32.1",
    "Sampling": "50 steps, guidance 7.5, 512 x 512",
    "Precision": "FP16",
    "Images per row": "2000, two per ImageNet-1K class",
    "Reference": "50 000 images of the ImageNet-1K validation set",
    "Distance": "FID, published without an interval",
    "Hardware": "1 NVIDIA Tesla A100 (40 GB), FlashAttention-2",
    "Time": "batch of 48",
    "Memory": "growth of GPU memory per +1 batch",
}
_PRECISIONS = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}
_TOME = {
    "Model": "Stable Diffusion v1.5",
    "Sampling": "50 PLMS steps, guidance 7.5, 512 x 512",
    "Precision": "FP16",
    "Images per row": "2000, two per ImageNet-1K class",
    "Reference": "5000 images of the ImageNet-1K validation set, resized and cropped to 512 x 512",
    "Distance": "FID, published without an interval",
    "Hardware": "1 NVIDIA RTX 4090",
    "Memory": "peak divided by the batch size",
}
SETUPS = {
    "Token Merging for Fast Stable Diffusion": _TOME,
    "tabSD": _TABLE,
    "tabSDa1": _TABLE,
    "tabSDa2": {**_TABLE, "Precision": "BF16"},
}
_ASKED = {"scheduler": "PLMS", "steps": 50, "guidance": 7.5, "width": 512, "height": 512, "dtype": "float16"}
ASKED = {  # of a run's protocol, for its figures to be compared with the published ones
    "Token Merging for Fast Stable Diffusion": _ASKED,
    "tabSD": _ASKED,
    "tabSDa1": _ASKED,
    "tabSDa2": {**_ASKED, "dtype": "bfloat16"},
}
_PICTURES = 2000  # of a row, in every published table
_USUAL = "FID (pytorch-fid)"  # published tables are pytorch-fid's, as this harness names it
_DISTANCES = {"Token Merging for Fast Stable Diffusion": f"{_USUAL} (5000 reference images, cropped to 512)"}


def published_rows(results: Results) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = results.published.get("rows") or []
    return rows


def published_source(results: Results) -> str:
    return str(results.published.get("source") or "published")


def published_for(results: Results, row: Row) -> Mapping[str, Any] | None:
    others = [] if row.role == NULL else published_rows(results)
    return next((other for other in others if _same(other, row)), None)


def comparability(results: Results) -> list[tuple[str, str, str]]:
    """Compare the conditions of the run with the published ones: (what, this run, published)."""
    setup = SETUPS.get(published_source(results), {})
    here = _conditions(results)
    return [(what, here.get(what) or "not recorded", there) for what, there in setup.items()]


def comparable_words(results: Results) -> str:
    """Say how far the published figures can be compared with those of the run."""
    if not published_rows(results):
        return "No published table belongs to this protocol; a number means nothing without its protocol's name."
    different = _departures(results)
    start = f"This is not the published protocol: {', '.join(different)}. " if different else ""
    return start + (
        "Compare the direction of differences to the untouched pipeline and ratios of times, not values: they move "
        "with weights, resizing and random numbers, and published ones come without intervals."
    )


def _departures(results: Results) -> list[str]:
    """List where a run is not what the published table's protocol asks for, as `steps 2 in place of 50`."""
    source, labels = published_source(results), "those of the labels"
    asked = ASKED.get(source)
    if asked is None:
        return []
    counts = sorted({row.images for row in results.rows if row.images} - {_PICTURES})
    found = [(name, results.protocol.get(name, wanted), wanted) for name, wanted in asked.items()]
    found += [("prompts", (results.protocol.get("prompts") or {}).get("file") or labels, labels)]
    found += [("images per row", counts[0] if counts else _PICTURES, _PICTURES)]
    found += [("distance", results.distance, _DISTANCES.get(source, _USUAL))]
    return [
        f"{name} {setting_text(here)} in place of {setting_text(wanted)}"
        for name, here, wanted in found
        if here != wanted
    ]


def _conditions(results: Results) -> dict[str, str]:
    """Describe the run in the terms of the published setup, from whatever the protocol and environment record."""
    protocol = results.protocol

    def said(key: str, pattern: str = "{}") -> str:
        value = protocol.get(key)
        return "" if value in (None, "") else pattern.format(setting_text(value))

    timed = (protocol.get("time") or {}).get("batch") or protocol.get("batch")
    counts = sorted({row.images for row in results.rows if row.images})
    size = " x ".join(filter(None, (said("width"), said("height"))))
    sampling = [said("steps", "{} steps"), said("guidance", "guidance {}"), size]
    if said("scheduler") != "stored":  # the model's own
        sampling.append(said("scheduler", "scheduler {}"))
    kinds = sorted({row.memory.kind for row in results.rows if row.memory.kind})
    return {
        "Model": said("model"),
        "Sampling": ", ".join(filter(None, sampling)),
        "Precision": _PRECISIONS.get(said("dtype"), said("dtype")),
        "Images per row": " to ".join(str(count) for count in dict.fromkeys([*counts[:1], *counts[-1:]])),
        "Reference": _reference(protocol.get("reference")),
        "Distance": results.distance or "",
        "Hardware": results.hardware,
        "Time": f"batch of {timed}" if timed else "",
        "Memory": f"growth of {', '.join(kinds)} per +1 batch" if kinds else "not measured",
    }


def _reference(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "" if value is None else setting_text(value)
    count = f"{value['count']} images" if value.get("count") else ""
    resized = {"crop": "resized and cropped to {0} x {0}", "stretch": "stretched to {0} x {0}"}
    words = resized.get(str(value.get("resize")), "").format(value.get("size"))
    each = f"the first {value['per_class']} of each class" if value.get("per_class") else ""
    return ", ".join(filter(None, (str(value.get("source") or ""), count, each, words)))


def _same(published: Mapping[str, Any], row: Row) -> bool:
    """Tell whether a published row is of the program of a row: its label, and what its settings come to."""
    settings = {key: value for key, value in published.items() if key != "label" and key not in FIGURES}
    wanted = {key: setting_text(value) for key, value in settings.items() if value is not None}
    if _bare(str(published.get("label", ""))) != _bare(row.record.label):
        return False
    if row.role == BASELINE:
        return not wanted
    named = {key: value for key, value in row.settings.items() if key in wanted}
    if {key: setting_text(value) for key, value in named.items()} != wanted:
        return False
    if named == row.settings:
        return True
    try:
        method = known_method(row.record.method)
        return PatchConfig.preset(method, **row.settings) == PatchConfig.preset(method, **named)
    except ElfattError:  # phases of its own, whose settings are not known
        return False


def _bare(label: str) -> str:
    return label.replace("(Baseline)", "").replace("(baseline)", "").strip().lower()
