"""Read protocols from TOML files, change some of their values, and turn their cells into rows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from elfatt_sd.config import PatchConfig, known_method
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.metrics import MetricChoice
from elfatt_sd.evaluation.prompts import PromptFile
from elfatt_sd.files import checked, is_plain_name, one_folder, read_plain, refused, sha256_of_data, visible
from elfatt_sd.methods import attention_named
from elfatt_sd.methods.base import in_one_line
from elfatt_sd.peers import PEERS, check_settings
from elfatt_sd.phases import RUN_SETTINGS, setting_names

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Maybe = Annotated[int, Meta(ge=0)]  # 0 stands for all, none, or the protocol's own
Pixels = Annotated[int, Meta(ge=8, multiple_of=8)]
Scope = Literal["end_to_end", "unet"]
FEW_REPEATS = 5  # rounds of timing; with fewer the report says so, and claims no gain
NULL_SEED_OFFSET = 1_000_000  # a null row's seeds start so far on: past those of every image of the rows before it
_IN_PLACE = "tomesd"  # its rows name the preset that does the same, and have its settings
_REPORT_ONLY = ("description", "published", "frame_rate")  # words and printed figures: they change no measurement
# keys that are younger than results that are published, with the value that leaves a run as it was
_UNGIVEN: dict[str, Any] = {"variant": "", "prompts": None, "metrics": [], "frames": 1, "negative_prompt": ""}
_LISTS = ("phases", "per_layer", "reuse")  # of a configuration that a cell spells out
NAME = "letters, digits and . _ - + =, and no name that a system keeps for itself"
TOLERANCE = 1e-3  # of figures that are computed again: another machine sums in another order
QUICK_STEPS = 2  # of each call that measures memory, in a quick look
_FOLDERS = (Path("eval"), Path(__file__).parents[2] / "eval", Path(__file__).parent / "protocols")


@dataclass(frozen=True)
class Cell:
    """One row of the table: a method with its settings."""

    name: str  # folder of the row's images
    label: str  # name in the table
    method: str  # one of `METHODS`, or `custom` where `phases` are given
    # `baseline` (the untouched pipeline), `null` (the same with other seeds) or `method`
    role: Literal["baseline", "null", "method"] = "method"
    # settings of the method, as `PatchConfig.with_settings` takes them
    settings: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[Mapping[str, Any], ...] = ()  # phases of a custom method, as `Phase` takes them
    # layers with phases of their own, as `PatchConfig.from_dict` takes them
    per_layer: tuple[Mapping[str, Any], ...] = ()
    reuse: tuple[Mapping[str, Any], ...] = ()  # what steps take over from earlier ones, likewise
    # the values, by a name for tables, that this row took where a phase lists several; they stand in `phases`
    swept: Mapping[str, Any] = field(default_factory=dict)
    # another package's accelerator, as `elfatt_sd.peers` names it. One that a patch can join is on together with the
    # method; the others take the patch's place.
    peer: str = ""
    peer_settings: Mapping[str, Any] = field(default_factory=dict)  # of the peer; tomesd's may stand in `settings`
    seed_offset: int = 0  # of the null row, added to the seed of every image; no key of a file

    def __post_init__(self) -> None:
        if not is_plain_name(self.name):
            raise refused(f"cell name {self.name!r}", NAME)
        try:
            config = self.config()
            if self.peer:
                check_settings(self.peer, self.options)
        except ElfattError as error:
            raise ElfattError(f"cell {self.name!r}: {error}") from error
        if self.peer_settings and not self.peer:
            raise refused(f"peer_settings of cell {self.name!r}", "settings together with a peer")
        if self.peer and self.peer != _IN_PLACE and not PEERS[self.peer].joins and config.active:
            what = f"method={self.method!r} with peer {self.peer!r} of cell {self.name!r}"
            raise refused(what, "sd, as it takes the patch's place")
        if (self.role != "method") != (not (config.all_phases or config.reuse) and not self.peer):
            what = f"role={self.role!r} of cell {self.name!r} with method {self.method!r}"
            raise refused(what, "baseline and null for the untouched pipeline (method 'sd'), method for all others")

    @property
    def options(self) -> dict[str, Any]:
        return {**(self.settings if self.peer == _IN_PLACE else {}), **self.peer_settings}

    @property
    def patched(self) -> bool:
        return self.config().active and (not self.peer or PEERS[self.peer].joins)

    @property
    def shown(self) -> dict[str, Any]:
        """Settings and swept values, as tables show them."""
        return {**self.settings, **self.peer_settings, **self.swept}

    def config(self) -> PatchConfig:
        data: dict[str, Any] = {name: getattr(self, name) for name in _LISTS}
        if not any(data.values()):
            return PatchConfig.preset(known_method(self.method), **self.settings)
        return PatchConfig.from_dict({"method": self.method, **data}).with_settings(**self.settings)


@dataclass(frozen=True)
class ReferenceChoice:
    source: str = ""  # folder, parquet, `.npz` of statistics, or `toy` (renders)
    count: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 50_000  # number of images that there must be
    allow_count: bool = False  # accept another number, which the metric's name then says
    size: Maybe = 0  # side of the square that they are resized to; 0 leaves them as they are
    resize: Literal["none", "crop", "stretch"] = "none"  # how the square comes about
    filter: Literal["bicubic", "bilinear", "lanczos", "box", "nearest"] = "bicubic"  # Pillow's resampling filter
    per_class: Maybe = 0  # take only the first so many of each class; 0 takes all

    def __post_init__(self) -> None:
        if (self.size > 0) != (self.resize != "none"):
            raise refused(f"size={self.size} with resize={self.resize!r} of the reference", "both, or neither")


@dataclass(frozen=True)
class Time:
    # rounds over all rows; the report names fewer than `FEW_REPEATS`. A file may say 0 to measure none.
    repeats: Count = 5
    warmup: Maybe = 1  # untimed calls of every row before the first round, of a few steps each
    batch: Maybe = 0  # images per call; 0 takes the protocol's batch
    # `end_to_end` (prompt to uint8, no disk) and `unet` (the sum of the UNet's calls)
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = ("end_to_end", "unet")


@dataclass(frozen=True)
class PeakMemory:
    """How memory is measured: one fresh process for every row and batch size."""

    # batch sizes, the points of the regression. A file may say [] to measure none.
    batches: tuple[Count, ...] = (1, 2, 4)
    steps: Maybe = 0  # denoising steps of each call; 0 takes the protocol's

    def __post_init__(self) -> None:
        if len(set(self.batches)) < 2:
            raise refused(f"memory.batches={list(self.batches)!r}", "two or more different batch sizes, for the slope")


@dataclass(frozen=True)
class Protocol:
    """All that decides the numbers of a run."""

    name: str  # the protocol's name, without which its figures mean nothing
    cells: tuple[Cell, ...]  # the rows
    description: str = ""  # what the protocol is, in a sentence or two
    model: str = "toy"  # `toy`, a diffusers directory, a `.safetensors` file or a hub id
    variant: str = ""  # of the model's weights, as for `load_pipeline`; empty takes those without
    scheduler: str = "stored"  # `stored` (the model's own), `PLMS`, or the name of a diffusers class
    steps: Count = 50  # denoising steps
    guidance: Annotated[float, Meta(ge=0, le=1e6)] = 7.5  # classifier-free guidance scale
    # what guidance leads away from, for every image; empty gives none. Qwen-Image and Flux guide twice a step only with
    # one.
    negative_prompt: str = ""
    height: Pixels = 512  # of the images, in pixels
    width: Pixels = 512  # of the images, in pixels
    frames: Count = 1  # of each image; more than 1 for clips, which video pipelines make
    frame_rate: Annotated[float, Meta(ge=0.01, le=1000)] = 16.0  # of clips in the report, in frames per second
    dtype: str = "float16"  # of the pipeline
    device: str = "auto"  # `auto` or a torch device
    batch: Count = 1  # images per call of the pipeline
    labels: str = "imagenet1k"  # `imagenet1k`, `toy`, or a text file of labels
    template: str = "{label}"  # prompt for a label, with `{label}` in it
    prompts: PromptFile | None = None  # a file of prompts, in place of labels and template; None has none
    images_per_class: Count = 1  # images for every label, or for every prompt of the file
    classes: Maybe = 0  # number of labels, or prompts of the file, spread evenly over the list; 0 takes all
    limit: Maybe = 0  # number of images of each row, spread evenly over the prompts; 0 takes all
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # image `i` has seed `seed + i`
    # feature extractors, as `elfatt_sd.evaluation.features` names them; without any, the reference is not looked at,
    # and rows are compared with the untouched pipeline only
    extractors: tuple[str, ...] = ("inception",)
    inception_weights: str = ""  # file of Inception's weights, for use without a network
    inception_sha256: str = ""  # hash that this file must have; empty takes the published one
    metrics: tuple[MetricChoice, ...] = ()  # further metrics
    reference: ReferenceChoice = field(default_factory=ReferenceChoice)  # the images to compare with
    time: Time | None = None  # how time is measured; None leaves it out
    memory: PeakMemory | None = None  # how memory is measured; None leaves it out
    # printed figures that the report compares with ours: `source`, and `rows`. A file may name another protocol that
    # has them.
    published: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_plain_name(self.name) or set(self.name) & set(".+="):
            raise refused(f"name={self.name!r}", "letters, digits, _ and -, and no name that a system keeps for itself")
        if "{label}" not in self.template:
            raise refused(f"template={self.template!r}", "a text with {label} in it")
        names = [one_folder(cell.name) for cell in self.cells]
        twice = [cell.name for cell in self.cells if names.count(one_folder(cell.name)) > 1]
        if twice:
            raise refused(f"cell {twice[-1]!r}, given twice", "cells that differ; give each its own name")
        baselines = [cell.name for cell in self.cells if cell.role == "baseline"]
        if len(baselines) != 1:
            named = ", ".join(baselines) or "none"
            raise refused(f"{len(baselines)} cells of role 'baseline' ({named})", "exactly one")

    @property
    def baseline(self) -> Cell:
        return next(cell for cell in self.cells if cell.role == "baseline")

    @property
    def of_toy(self) -> bool:
        return self.labels == "toy" and self.prompts is None

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(cell.peer for cell in self.cells if cell.peer)

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for cell, row in zip(self.cells, data["cells"], strict=True):
            row["config"] = cell.config().to_dict()
            if not cell.reuse:  # it is younger than results that are published
                del row["reuse"]
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(data))  # with lists for tuples
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        cells = [{key: cell[key] for key in cell if key != "config"} for cell in data.get("cells", ())]
        return checked({**data, "cells": cells}, cls)

    @property
    def identity(self) -> str:
        """sha256 of all that decides a number, in hex."""
        return sha256_of_data(decisive(self.to_dict()))


def decisive(data: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(item for item in data.items() if item[0] not in _REPORT_ONLY and item not in _UNGIVEN.items())
    reference = kept.get("reference") or {}
    # `allow_count` lets a run go on; what it let pass stands in the metric's name
    return {**kept, "reference": {key: value for key, value in reference.items() if key != "allow_count"}}


def differences(before: Any, now: Any) -> list[str]:
    """List what differs between two nested tables, as lines such as `time.repeats: 5 there, 3 here`."""
    return [f"{key}: {there} there, {here} here" for key, there, here in unequal(before, now, tolerance=0.0)]


def unequal(
    before: Any, now: Any, key: str = "", *, tolerance: float = TOLERANCE, size: float = 0.0
) -> Iterator[tuple[str, Any, Any]]:
    """Compare plain data; yields the place and both values of each difference."""
    if isinstance(now, dict):
        middle, ends = now.get("value", now.get("mean")), now.get("interval")
        width = ends[1] - ends[0] if isinstance(ends, list) else 0.0
        size = max(size, abs(middle) if isinstance(middle, float) else 0.0, width)
    old, new = _parts(before), _parts(now)
    if old is not None and new is not None:
        for name in dict.fromkeys([*old, *new]):
            place = f"{key}{name}".removeprefix(".")
            yield from unequal(old.get(name), new.get(name), place, tolerance=tolerance, size=size)
    elif isinstance(before, float) and isinstance(now, float):
        if not abs(before - now) <= tolerance * max(size, abs(now)):  # so written, NaN differs from all
            yield key, before, now
    elif before != now:
        yield key, before, now


def _parts(data: Any) -> dict[str, Any] | None:
    """Return what a table or a list holds, by its place there: a key, a row's name, a number."""
    if isinstance(data, list):
        rows = (item if isinstance(item, dict) else {} for item in data)
        return {f"[{row.get('cell', row.get('name', index))}]": data[index] for index, row in enumerate(rows)}
    return {f".{name}": item for name, item in data.items()} if isinstance(data, dict) else None


def load_protocol(path_or_name: str | Path, overrides: Sequence[str] = (), limit: int | None = None) -> Protocol:
    path = _find(path_or_name)
    data = _read(path)
    if limit is not None:
        _make_quick(data, limit)
    for override in overrides:
        key, equals, text = override.partition("=")
        *tables, last = [part.strip() for part in key.split(".")]
        target = data.setdefault(tables[0], {}) if tables else data  # tables that are not there yet are made
        if not equals or not last or len(tables) > 1 or not isinstance(target, dict):
            raise ElfattError(f"override {override!r} is not accepted; give key=value or table.key=value.")
        try:
            target[last] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            target[last] = text
    for table, key, none in (("time", "repeats", 0), ("memory", "batches", [])):  # where nothing is to be measured
        settings = data.get(table)
        if isinstance(settings, dict) and settings.get(key) == none and type(settings[key]) is type(none):
            del data[table]
    cells = data.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ElfattError(f"{path}: cells is missing; give one [[cells]] table for every row.")
    data["cells"] = _expand([_with_saved(cell, path.parent) for cell in cells])
    data.setdefault("name", path.stem)
    if isinstance(name := data.get("published"), str):
        data["published"] = _read(_find(name)).get("published")
        if not isinstance(data["published"], dict):
            raise refused(f"published={name!r}", "a table with source and rows, or the name of a protocol that has one")
    try:
        return checked(data, Protocol)
    except ElfattError as error:
        raise ElfattError(f"{path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    content = read_plain(path)
    with in_one_line(f"{path} is not valid TOML"):
        return tomllib.loads(content.decode("utf-8"))


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if os.path.isfile(path):  # which takes any name
        return path
    if path.name == str(path_or_name) and not path.suffix:
        for folder in _FOLDERS:
            if (folder / f"{path}.toml").is_file():
                return folder / f"{path}.toml"
    known = sorted({file.stem for folder in _FOLDERS if folder.is_dir() for file in visible(folder.glob("*.toml"))})
    named = ", ".join(known) or "none"
    raise ElfattError(f"protocol {str(path)!r} does not exist; give a TOML file or one of: {named}.")


def _make_quick(data: dict[str, Any], limit: int) -> None:
    """Limit the images of a row, the rounds and batch of the timing, and the batch sizes and steps of the memory."""
    data["limit"] = limit
    timing, memory = data.get("time"), data.get("memory")
    with contextlib.suppress(AttributeError, TypeError):  # what is no table or no number is refused later
        if timing is not None:  # an empty table is one of defaults
            timing["repeats"] = min(timing.get("repeats", Time.repeats), limit)
            timing["batch"] = min(timing.get("batch") or data.get("batch", 1), limit)
        if memory is not None:
            memory["batches"] = sorted(set(memory.get("batches", PeakMemory.batches)))[:2]
            memory["steps"] = min(memory.get("steps") or data.get("steps", QUICK_STEPS), QUICK_STEPS)


def _expand(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn settings with several values into one row for each, and give rows their names and seeds."""
    fields = {item.name for item in dataclasses.fields(Cell)} - {"settings", "swept", "seed_offset"}
    expanded: list[dict[str, Any]] = []
    for number, cell in enumerate(cells, 1):
        if ":" in str(cell.get("method", "")):
            attention_named(cell["method"])  # imported, so that its settings are known
        own = {key: value for key, value in cell.items() if key in fields}
        settings = {key: value for key, value in cell.items() if key not in fields}
        unknown = sorted(settings.keys() - set(setting_names()))
        if unknown:
            accepted = ", ".join(sorted(fields.union(setting_names())))
            raise ElfattError(f"key {unknown[0]!r} of cell {number} is not known; accepted: {accepted}.")
        expanded += _rows(own, settings, number)
    for count, row in enumerate((row for row in expanded if row.get("role") == "null"), 1):
        row["seed_offset"] = count * NULL_SEED_OFFSET
    return expanded


def _with_saved(cell: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Put a saved configuration in place of a cell's `config`, the file's name; what the cell says counts."""
    if "config" not in cell:
        return dict(cell)
    given = {key: value for key, value in cell.items() if key != "config"}
    if not isinstance(cell["config"], str) or given.keys() & {*_LISTS}:
        raise refused(f"config={cell['config']!r} of a cell", "the name of a saved configuration, without other phases")
    saved = PatchConfig.load(folder / cell["config"])
    data, usual = saved.to_dict(), PatchConfig().to_dict()
    changed = {key: value for key, value in data.items() if key in RUN_SETTINGS - {*_LISTS} and value != usual[key]}
    return {"method": saved.method, **{key: data[key] for key in _LISTS if data.get(key)}, **changed, **given}


def _rows(own: Mapping[str, Any], settings: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each choice among the values of a cell's settings, and of those of its phases."""
    phases = own.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        phases = []  # none; or what `Cell` will refuse
    values = {(place, key): value for place, phase in enumerate(phases) for key, value in phase.items()}
    lists = {where: value for where, value in values.items() if isinstance(value, list)}
    keys = [key for _, key in lists]
    titles = [key if keys.count(key) == 1 else f"phase{place + 1}_{key}" for place, key in lists]
    names, choices = [*settings, *titles], [*settings.values(), *lists.values()]
    if [] in choices:
        raise refused(f"{names[choices.index([])]}=[] of cell {number}", "a value, or a list of at least one")
    method = str(own.get("method", "custom" if own.keys() & {*_LISTS} else "sd"))
    base = str(own.get("peer")) if own.get("peer") else ("null" if own.get("role") == "null" else method)
    base = str(own.get("name", re.sub(r"[^\w.=+-]", "-", base)))
    for chosen in itertools.product(*(value if isinstance(value, list) else [value] for value in choices)):
        name = "-".join([base, *(f"{title}{value}" for title, value in zip(names, chosen, strict=True))])
        row = {"label": method, **own, "method": method, "name": name}
        row["settings"], swept = dict(zip(settings, chosen, strict=False)), chosen[len(settings) :]
        if phases:
            row |= {"phases": [dict(phase) for phase in phases], "swept": dict(zip(titles, swept, strict=True))}
        for (place, key), value in zip(lists, swept, strict=True):
            row["phases"][place][key] = value
        yield row
