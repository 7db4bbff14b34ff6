"""Protocols: what is evaluated, as data. A TOML file is read, checked and resolved into frozen dataclasses.

The identity of a run is the hash of its resolved protocol, overrides included.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from elfatt_sd.config import ElfattError, PatchConfig, setting_names
from elfatt_sd.files import sha256_of_data
from elfatt_sd.presets import known_method

Kind = TypeVar("Kind")
ROLES = ("baseline", "null", "method")
SCOPES = ("end_to_end", "unet")
PEERS = ("tomesd",)
FEW_REPEATS = 5  # rounds of timing; with fewer the results say so, and claim no gain
QUICK_STEPS = 2  # of each call that measures memory, in a quick look
NULL_SEED_OFFSET = 1_000_000  # the null row's seeds start here, past those of every image of a run
_PEER_SETTINGS = ("max_downsample", "ratio", "stride", "use_rand")
PRINTED = ("FID", "seconds_per_image", "gb_per_image")  # the figures of a published row
_REPORT_ONLY = ("description", "published")  # words and printed figures: they change no measurement
_LENIENT = {"reference": ("allow_count",)}  # lets a run go on; what it let pass stands in the metric's name
_FOLDERS = (Path("eval"), Path(__file__).parents[2] / "eval", Path(__file__).parent / "protocols")
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Cell:
    """One row of the table: a method with its settings.

    Attributes:
        name: folder of the row's images.
        label: name in the table.
        method: one of `METHODS`, or `custom` where `phases` are given.
        role: `baseline` (the untouched pipeline), `null` (the same with other seeds) or `method`.
        settings: settings of the method, as `PatchConfig.with_settings` takes them.
        phases: phases of a custom method, as `Phase` takes them.
        swept: the values, by a name for tables, that this row took where a phase lists several; they stand in `phases`.
        peer: `tomesd` runs that package in place of this one's patch.
        seed_offset: of the null row, added to the seed of every image; at least the number of images.
    """

    name: str
    label: str
    method: str
    role: str = "method"
    settings: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[Mapping[str, Any], ...] = ()
    swept: Mapping[str, Any] = field(default_factory=dict)
    peer: str = ""
    seed_offset: int = 0

    def __post_init__(self) -> None:
        """Check every field, the method's configuration included."""
        if not re.fullmatch(r"[\w.=+-]+", self.name) or self.name.startswith("."):
            raise _error(f"cell name {self.name!r}", "letters, digits and . _ - + =")
        if self.role not in ROLES:
            raise _error(f"role={self.role!r} of cell {self.name!r}", ", ".join(ROLES))
        if (self.role == "null") != (self.seed_offset > 0) or self.seed_offset < 0:
            accepted = "at least the number of images for the null row, 0 for all others"
            raise _error(f"seed_offset={self.seed_offset} of cell {self.name!r}", accepted)
        if self.peer and self.peer not in PEERS:
            raise _error(f"peer={self.peer!r} of cell {self.name!r}", ", ".join(PEERS))
        unknown = sorted(set(self.settings) - set(_PEER_SETTINGS)) if self.peer else []
        if unknown:
            raise _error(f"setting {unknown[0]!r} of peer cell {self.name!r}", ", ".join(_PEER_SETTINGS))
        try:
            config = self.config()
        except ElfattError as error:
            raise ElfattError(f"cell {self.name!r}: {error}") from error
        if (self.role != "method") != (not config.phases):
            raise _error(
                f"role={self.role!r} of cell {self.name!r} with method {self.method!r}",
                "baseline and null for the untouched pipeline (method 'sd'), method for all others",
            )

    @property
    def shown(self) -> dict[str, Any]:
        """Settings and swept values, as tables show them."""
        return {**self.settings, **self.swept}

    def config(self) -> PatchConfig:
        """Return the patch of this row; a peer's row gets what the package has in its place."""
        if not self.phases:
            return PatchConfig.preset(known_method(self.method), **self.settings)
        phases = [dict(phase) for phase in self.phases]
        return PatchConfig.from_dict({"method": self.method, "phases": phases}).with_settings(**self.settings)


@dataclass(frozen=True)
class Reference:
    """The pictures that the generated ones are compared with.

    Attributes:
        source: folder, tar, zip, shards, parquet, `.npz` of statistics, or `toy` (renders).
        count: number of pictures that there must be.
        allow_count: accept another number, which the metric's name then says.
        size: side of the square that they are resized to; 0 leaves them as they are.
        resize: how the square comes about: `crop`, `stretch` or `none`.
        filter: Pillow's resampling filter.
        per_class: take only the first so many of each class; 0 takes all.
    """

    source: str = ""
    count: int = 50_000
    allow_count: bool = False
    size: int = 0
    resize: str = "none"
    filter: str = "bicubic"
    per_class: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        _at_least("reference.count", self.count, 1)
        _at_least("reference.size", self.size, 0)
        _at_least("reference.per_class", self.per_class, 0)


@dataclass(frozen=True)
class Time:
    """How time is measured.

    Attributes:
        repeats: rounds over all rows; the results name fewer than `FEW_REPEATS`. A file may say 0 to measure none.
        warmup: untimed calls of every row before the first round, of a few steps each.
        batch: images per call; 0 takes the protocol's batch.
        scopes: `end_to_end` (prompt to uint8, no disk) and `unet` (the sum of the UNet's calls).
    """

    repeats: int = 5
    warmup: int = 1
    batch: int = 0
    scopes: tuple[str, ...] = SCOPES

    def __post_init__(self) -> None:
        """Check every field."""
        _at_least("time.repeats", self.repeats, 1)
        _at_least("time.warmup", self.warmup, 0)
        _at_least("time.batch", self.batch, 0)
        unknown = [scope for scope in self.scopes if scope not in SCOPES]
        if unknown or not self.scopes:
            raise _error(f"time.scopes={list(self.scopes)!r}", ", ".join(SCOPES))


@dataclass(frozen=True)
class Memory:
    """How memory is measured: one fresh process for every row and batch size.

    Attributes:
        batches: batch sizes, the points of the regression. A file may say [] to measure none.
        steps: denoising steps of each call; 0 takes the protocol's.
    """

    batches: tuple[int, ...] = (1, 2, 4)
    steps: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        for batch in self.batches:
            _at_least("memory.batches", batch, 1)
        if len(set(self.batches)) < 2:
            raise _error(f"memory.batches={list(self.batches)!r}", "two or more different batch sizes, for the slope")
        _at_least("memory.steps", self.steps, 0)


@dataclass(frozen=True)
class Protocol:
    """All that decides the numbers of a run.

    Attributes:
        name: the protocol's name, without which its figures mean nothing.
        cells: the rows.
        description: what the protocol is, in a sentence or two.
        model: `toy`, a diffusers directory, a `.safetensors` file or a hub id.
        scheduler: `stored` (the model's own), `PLMS`, or the name of a diffusers class.
        steps: denoising steps.
        guidance: classifier-free guidance scale.
        height: of the images, in pixels.
        width: of the images, in pixels.
        dtype: of the pipeline.
        device: `auto` or a torch device.
        batch: images per call of the pipeline.
        labels: `imagenet1k`, `toy`, or a text file of labels.
        template: prompt for a label, with `{label}` in it.
        images_per_class: images for every label.
        classes: number of labels, spread evenly over the list; 0 takes all.
        limit: number of images of each row, spread evenly over the prompts; 0 takes all.
        seed: image `i` has seed `seed + i`.
        extractors: feature extractors, as `elfatt_sd.evaluation.features` names them.
        inception_weights: file of Inception's weights, for use without a network.
        inception_sha256: hash that this file must have; empty takes the published one.
        reference: the pictures to compare with.
        time: how time is measured; None leaves it out.
        memory: how memory is measured; None leaves it out.
        published: printed figures that the report shows beside ours: `source`, and `rows`. A file may name another
            protocol that has them.
    """

    name: str
    cells: tuple[Cell, ...]
    description: str = ""
    model: str = "toy"
    scheduler: str = "stored"
    steps: int = 50
    guidance: float = 7.5
    height: int = 512
    width: int = 512
    dtype: str = "float16"
    device: str = "auto"
    batch: int = 1
    labels: str = "imagenet1k"
    template: str = "{label}"
    images_per_class: int = 1
    classes: int = 0
    limit: int = 0
    seed: int = 0
    extractors: tuple[str, ...] = ("inception",)
    inception_weights: str = ""
    inception_sha256: str = ""
    reference: Reference = field(default_factory=Reference)
    time: Time | None = None
    memory: Memory | None = None
    published: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field and that the rows fit together."""
        if not re.fullmatch(r"[\w-]+", self.name):
            raise _error(f"name={self.name!r}", "letters, digits, _ and -")
        for name in ("steps", "batch", "images_per_class"):
            _at_least(name, getattr(self, name), 1)
        for name in ("classes", "limit"):
            _at_least(name, getattr(self, name), 0)
        if not 0 <= self.seed < 2**63:
            raise _error(f"seed={self.seed}", "a whole number from 0 to 2^63 - 1")
        for name in ("height", "width"):
            _at_least(name, getattr(self, name), 8)
            if getattr(self, name) % 8:
                raise _error(f"{name}={getattr(self, name)}", "a multiple of 8")
        if not math.isfinite(self.guidance) or self.guidance < 0:
            raise _error(f"guidance={self.guidance}", "a number of at least 0")
        if "{label}" not in self.template:
            raise _error(f"template={self.template!r}", "a text with {label} in it")
        names = [cell.name for cell in self.cells]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise _error(f"cell {twice[0]!r}, given twice", "cells that differ; give each its own name")
        baselines = [cell.name for cell in self.cells if cell.role == "baseline"]
        if len(baselines) != 1:
            raise _error(f"{len(baselines)} cells of role 'baseline' ({', '.join(baselines) or 'none'})", "exactly one")
        _check_published(self.published)

    @property
    def baseline(self) -> Cell:
        """The untouched pipeline, which every other row is compared with."""
        return next(cell for cell in self.cells if cell.role == "baseline")

    @property
    def peers(self) -> frozenset[str]:
        """Packages that some rows run in place of this one's patch."""
        return frozenset(cell.peer for cell in self.cells if cell.peer)

    def cell(self, name: str) -> Cell:
        """Return a row by its name.

        Raises:
            ElfattError: there is none.
        """
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise _error(f"cell {name!r}", ", ".join(cell.name for cell in self.cells))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with the resolved configuration of every row."""
        data = _plain(dataclasses.asdict(self))
        for cell, row in zip(self.cells, data["cells"], strict=True):
            row["config"] = _plain(cell.config().to_dict())
        return typing.cast(dict[str, Any], data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """Build a protocol from what `to_dict` gave.

        Raises:
            ElfattError: a key is unknown, or a value is not accepted.
        """
        cells = [{key: value for key, value in row.items() if key != "config"} for row in data.get("cells", ())]
        return _build(cls, {**data, "cells": cells}, "")

    @property
    def identity(self) -> str:
        """sha256 of all that decides a number, in hex."""
        return sha256_of_data(decisive(self.to_dict()))


def decisive(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a protocol's data decides its numbers."""
    kept = {key: value for key, value in data.items() if key not in _REPORT_ONLY}
    for table, lenient in _LENIENT.items():
        kept[table] = {key: value for key, value in (kept.get(table) or {}).items() if key not in lenient}
    return kept


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what differs between two protocols' data, as lines such as `steps: 50 there, 25 here`."""
    old, new = _flat(decisive(before)), _flat(decisive(now))
    return [
        f"{key}: {old.get(key, 'absent')!s} there, {new.get(key, 'absent')!s} here"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def load_protocol(path_or_name: str | Path, overrides: Sequence[str] = (), limit: int | None = None) -> Protocol:
    """Read a protocol and change some of its values.

    Args:
        path_or_name: a TOML file, or the name of one under `eval/`.
        limit: a quick look: so many images a row, and as little of time and memory; overrides go before it.
        overrides: `key=value` or `table.key=value`, the value as TOML writes it; what is no TOML is text.

    Raises:
        ElfattError: no such file, not TOML, a key that is not known, or a value that is not accepted.
    """
    path = _find(path_or_name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ElfattError(f"{path} is not valid TOML: {error}.") from error
    except OSError as error:
        raise ElfattError(f"{path} cannot be read: {error.strerror}.") from error
    if limit is not None:
        _make_quick(data, limit)
    for override in overrides:
        _override(data, override)
    _leave_out_unmeasured(data)
    cells = data.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ElfattError(f"{path}: cells is missing; give one [[cells]] table for every row.")
    data["cells"] = _expand(cells)
    data.setdefault("name", path.stem)
    if isinstance(data.get("published"), str):
        data["published"] = _published(data["published"])
    try:
        return _build(Protocol, data, "")
    except ElfattError as error:
        raise ElfattError(f"{path}: {error}") from error


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if path.is_file():
        return path
    if path.name == str(path_or_name) and not path.suffix:
        for folder in _FOLDERS:
            if (folder / f"{path}.toml").is_file():
                return folder / f"{path}.toml"
    known = sorted({file.stem for folder in _FOLDERS if folder.is_dir() for file in folder.glob("*.toml")})
    raise ElfattError(
        f"protocol {str(path)!r} does not exist; give a TOML file or one of: {', '.join(known) or 'none'}."
    )


def _published(name: str) -> dict[str, Any]:
    """Return the printed figures that another protocol carries."""
    table = tomllib.loads(_find(name).read_text(encoding="utf-8")).get("published")
    if not isinstance(table, dict):
        raise _error(f"published={name!r}", "a table with source and rows, or the name of a protocol that has one")
    return table


def _check_published(published: Mapping[str, Any]) -> None:
    """Check the names in a table of printed figures; it may be empty."""
    _known_keys("published.", published, ("source", "rows"))
    rows = published.get("rows", [])
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) and "label" in row for row in rows):
        raise _error("published.rows", "a list of tables, each with a label")
    for row in rows:
        _known_keys(f"published.rows[{row['label']}].", row, ("label", *PRINTED, *setting_names()))


def _override(data: dict[str, Any], override: str) -> None:
    """Set one value; tables that are not there yet are made."""
    key, equals, text = override.partition("=")
    *tables, last = [part.strip() for part in key.split(".")]
    if last == "cells":
        raise ElfattError(f"override {override!r} is not accepted; rows are changed in the protocol's file.")
    if not equals or not last or len(tables) > 1:
        raise ElfattError(f"override {override!r} is not accepted; give key=value or table.key=value.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target = data
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ElfattError(f"override {override!r} is not accepted; {table!r} is not a table.")
    target[last] = value


def _make_quick(data: dict[str, Any], limit: int) -> None:
    """Limit the images of a row, the rounds and batch of the timing, and the batch sizes and steps of the memory."""
    data["limit"] = limit
    timing, memory = data.get("time"), data.get("memory")
    if isinstance(timing, dict):
        batch = timing.get("batch") or data.get("batch", 1)
        timing["repeats"] = _at_most(timing.get("repeats", Time.repeats), limit)
        timing["batch"] = _at_most(batch, limit)
    if isinstance(memory, dict):
        batches = memory.get("batches", list(Memory.batches))
        if isinstance(batches, list) and all(isinstance(batch, int) for batch in batches):
            memory["batches"] = sorted(set(batches))[:2]
        memory["steps"] = _at_most(memory.get("steps") or data.get("steps", QUICK_STEPS), QUICK_STEPS)


def _at_most(value: Any, most: int) -> Any:
    return min(value, most) if isinstance(value, int) else value  # what is no number is refused later


def _leave_out_unmeasured(data: dict[str, Any]) -> None:
    """Drop the tables that say that nothing is to be measured: time without repeats, memory without batches."""
    for table, key, nothing in (("time", "repeats", 0), ("memory", "batches", [])):
        settings = data.get(table)
        if isinstance(settings, dict) and settings.get(key) == nothing and settings.get(key) is not False:
            del data[table]


def _expand(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn settings with several values into one row for each, and give rows their names and seeds."""
    fields = {item.name for item in dataclasses.fields(Cell)} - {"settings", "swept"}
    expanded: list[dict[str, Any]] = []
    for number, cell in enumerate(cells, 1):
        own = {key: value for key, value in cell.items() if key in fields}
        settings = {key: value for key, value in cell.items() if key not in fields}
        unknown = sorted(settings.keys() - set(setting_names()))
        if unknown:
            accepted = ", ".join(sorted(fields.union(setting_names())))
            raise ElfattError(f"key {unknown[0]!r} of cell {number} is not known; accepted: {accepted}.")
        for chosen in _choices(settings, f"cell {number}"):
            expanded += [_row({**own, **swept}, chosen) for swept in _expand_phases(own.get("phases"), number)]
    nulls = [row for row in expanded if row.get("role") == "null"]
    for count, row in enumerate(nulls, 1):
        row.setdefault("seed_offset", count * NULL_SEED_OFFSET)
    return expanded


def _choices(values: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return every combination of the values, of which those that are lists give one each.

    Raises:
        ElfattError: a list is empty.
    """
    empty = [key for key, value in values.items() if value == []]
    if empty:
        raise _error(f"{empty[0]}=[] of {where}", "a value, or a list of at least one")
    lists = [value if isinstance(value, list) else [value] for value in values.values()]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*lists)]


def _expand_phases(phases: Any, number: int) -> list[dict[str, Any]]:
    """Return the rows that the lists of values inside a cell's phases make: `phases` and `swept` of each."""
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return [{}]  # none; or what `Cell` will refuse
    lists = {(place, key): value for place, phase in enumerate(phases) for key, value in phase.items()}
    lists = {where: value for where, value in lists.items() if isinstance(value, list)}
    keys = [key for _, key in lists]
    titles = {(place, key): key if keys.count(key) == 1 else f"phase{place + 1}_{key}" for place, key in lists}
    rows = []
    for chosen in _choices({titles[where]: value for where, value in lists.items()}, f"cell {number}"):
        own = [dict(phase) for phase in phases]
        for (place, key), title in titles.items():
            own[place][key] = chosen[title]
        rows.append({"phases": own, "swept": chosen})
    return rows


def _row(own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    method = str(own.get("method", "custom" if "phases" in own else "sd"))
    base = own.get("peer") or ("null" if own.get("role") == "null" else method)
    varied = [*settings.items(), *own.get("swept", {}).items()]
    name = "-".join([str(own.get("name", base)), *(f"{key}{value}" for key, value in varied)])
    return {"label": method, **own, "method": method, "name": name, "settings": settings}


def _build(kind: type[Kind], data: Mapping[str, Any], prefix: str) -> Kind:
    """Build a dataclass from plain data, each value checked against the type of its field."""
    hints = typing.get_type_hints(kind)
    _known_keys(prefix, data, hints)
    required = [item.name for item in dataclasses.fields(kind) if _is_required(item)]  # type: ignore[arg-type]
    missing = [name for name in required if name not in data]
    if missing:
        raise ElfattError(f"key {prefix + missing[0]!r} is missing; it is required.")
    return kind(**{name: _convert(prefix + name, value, hints[name]) for name, value in data.items()})


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Check a value against a type; lists become tuples, tables become their dataclass."""
    if isinstance(hint, types.UnionType):
        return None if value is None else _convert(name, value, typing.get_args(hint)[0])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, _mapping(name, value), name + ".")
    origin = typing.get_origin(hint)
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise _error(f"{name}={value!r}", "a list")
        return tuple(_convert(f"{name}[{index}]", item, inner) for index, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        return dict(_mapping(name, value))
    wanted = (int, float) if hint is float else hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise _error(f"{name}={value!r}", _KINDS[hint])
    return float(value) if hint is float else value


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(f"{name}={value!r}", "a table")
    return value


def _plain(value: Any) -> Any:
    """Turn tuples into lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_ABSENT = object()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables; rows go by their names."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        items = [(str(item.get("name", index)), item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _known_keys(prefix: str, data: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ElfattError(f"key {prefix + unknown[0]!r} is not known; accepted: {', '.join(known)}.")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise _error(f"{name}={value!r}", f"a whole number of at least {low}")


def _error(what: str, accepted: str) -> ElfattError:
    return ElfattError(f"{what} is not accepted; accepted: {accepted}.")
