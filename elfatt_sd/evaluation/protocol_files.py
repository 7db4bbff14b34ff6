"""Read protocols from TOML files, change some of their values, and turn their cells into rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.evaluation.protocols import NULL_SEED_OFFSET, Cell, Memory, Protocol, Time
from elfatt_sd.files import read_plain, visible
from elfatt_sd.methods import attention_named
from elfatt_sd.settings import RUN_SETTINGS, setting_names
from elfatt_sd.typed import checked, refused

QUICK_STEPS = 2  # of each call that measures memory, in a quick look
_FOLDERS = (Path("eval"), Path(__file__).parents[2] / "eval", Path(__file__).parent / "protocols")


def load_protocol(path_or_name: str | Path, overrides: Sequence[str] = (), limit: int | None = None) -> Protocol:
    """Read a protocol and change some of its values."""
    path = _find(path_or_name)
    data = _read(path)
    if limit is not None:
        _make_quick(data, limit)
    for override in overrides:
        _override(data, override)
    _leave_out_unmeasured(data)
    cells = data.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ElfattError(f"{path}: cells is missing; give one [[cells]] table for every row.")
    data["cells"] = _expand([_with_saved(cell, path.parent) for cell in cells])
    data.setdefault("name", path.stem)
    if isinstance(data.get("published"), str):
        data["published"] = _published(data["published"])
    try:
        protocol = checked(data, Protocol)
        _check_plain(data)
    except ElfattError as error:
        raise ElfattError(f"{path}: {error}") from error
    return protocol


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_plain(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # numbers of too many digits included
        raise ElfattError(f"{path} is not valid TOML: {error}.") from error
    except OSError as error:
        raise ElfattError(f"{path} cannot be read: {error.strerror}.") from error


def _check_plain(data: Any, place: str = "") -> None:
    """Refuse what JSON cannot hold: dates, numbers that are not finite, and text that is not UTF-8."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            _check_plain(key, place)
            _check_plain(value, f"{place}.{key}" if place else str(key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            _check_plain(value, f"{place}[{index}]")
    else:
        try:
            json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise refused(ascii(f"{place}={data}")[1:-1], "text in UTF-8, finite numbers, true and false") from error


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if os.path.isfile(path):  # which takes any name
        return path
    if path.name == str(path_or_name) and not path.suffix:
        for folder in _FOLDERS:
            if (folder / f"{path}.toml").is_file():
                return folder / f"{path}.toml"
    known = sorted({file.stem for folder in _FOLDERS if folder.is_dir() for file in visible(folder.glob("*.toml"))})
    raise ElfattError(
        f"protocol {str(path)!r} does not exist; give a TOML file or one of: {', '.join(known) or 'none'}."
    )


def _published(name: str) -> dict[str, Any]:
    table = _read(_find(name)).get("published")
    if not isinstance(table, dict):
        raise refused(f"published={name!r}", "a table with source and rows, or the name of a protocol that has one")
    return table


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
        if ":" in str(cell.get("method", "")):
            attention_named(cell["method"])  # imported, so that its settings are known
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


def _with_saved(cell: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Put a saved configuration in the place of a cell's `config`, the file's name; what the cell says itself counts."""
    if "config" not in cell:
        return dict(cell)
    given = {key: value for key, value in cell.items() if key != "config"}
    if not isinstance(cell["config"], str) or given.keys() & {"phases", "per_layer"}:
        raise refused(f"config={cell['config']!r} of a cell", "the name of a saved configuration, without other phases")
    saved = PatchConfig.load(folder / cell["config"])
    data, usual = saved.to_dict(), PatchConfig().to_dict()
    changed = {key: value for key, value in data.items() if key in RUN_SETTINGS and value != usual[key]}
    phases = {key: data[key] for key in ("phases", "per_layer") if data.get(key)}
    return {"method": saved.method, **phases, **changed, **given}


def _choices(values: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    empty = [key for key, value in values.items() if value == []]
    if empty:
        raise refused(f"{empty[0]}=[] of {where}", "a value, or a list of at least one")
    lists = [value if isinstance(value, list) else [value] for value in values.values()]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*lists)]


def _expand_phases(phases: Any, number: int) -> list[dict[str, Any]]:
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
    method = str(own.get("method", "custom" if own.keys() & {"phases", "per_layer"} else "sd"))
    base = str(own.get("peer")) if own.get("peer") else ("null" if own.get("role") == "null" else method)
    varied = [*settings.items(), *own.get("swept", {}).items()]
    base = str(own.get("name", re.sub(r"[^\w.=+-]", "-", base)))
    name = "-".join([base, *(f"{key}{value}" for key, value in varied)])
    return {"label": method, **own, "method": method, "name": name, "settings": settings}
