"""Join what the stages measured into `results.json`, one row for each cell: all that the report reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elfatt_sd.evaluation.records import Cost, Peaks, Scores, Times, read_data
from elfatt_sd.evaluation.run import COST_FILE, MEMORY_FILE, SCORES_FILE, TIME_FILE, Row, Run
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.files import write_json

RESULTS_FILE = "results.json"
FORMAT = 1
STAGE_FILES = {SCORES_FILE: Scores, TIME_FILE: Times, MEMORY_FILE: Peaks, COST_FILE: Cost}
_OVER_CLASSES = ("distances", "paired", "accuracy", "metrics")  # parts of a row with intervals over classes
_SCORED = ("images", "classes", "distances", "paired", "accuracy", "most_changed", "metrics")


def join_results(run: Run) -> dict[str, Any]:
    """Return the rows of a run with everything that was measured so far; what was not is None."""
    record = run.record
    found = {name: _stage(run, name) for name in STAGE_FILES}
    time = found[TIME_FILE]
    environment = dict(record.environment)
    if time:
        environment["timing"] = {
            key: time[key] for key in ("measured", "environment", "clocks", "note") if time.get(key)
        }
    rows = {name: data.get("rows", {}) for name, data in found.items()}
    return {
        "format": FORMAT,
        "name": run.protocol.name,
        "description": " ".join(run.protocol.description.split()),
        "identity": record.identity,
        "created": record.created,
        "protocol": record.protocol,
        "environment": environment,
        "reference": found[SCORES_FILE].get("references"),
        "rows": without_intervals_of_few(
            [_row(row, {name: data.get(row.name) or {} for name, data in rows.items()}) for row in run.rows]
        ),
        "published": record.protocol.get("published") or None,
    }


def write_results(run: Run) -> dict[str, Any]:
    results = join_results(run)
    write_json(run.folder / RESULTS_FILE, results)
    return results


def without_intervals_of_few(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out of rows what is of too few classes for a reader: intervals that miss rare damage, and what they bound.

    Those are the intervals of every difference and of every figure but an accuracy, which knows how few classes there
    are, and the value of a difference that is extrapolated to infinitely many images. `scores.json` keeps all of them.
    """
    return [_without_intervals(row) for row in rows] if any(map(_is_of_few, rows)) else list(rows)


def _is_of_few(row: Mapping[str, Any]) -> bool:
    classes = row.get("classes")
    few = isinstance(classes, int) and 0 < classes < FEWEST_CLASSES
    return few or any(TOO_FEW in _verdicts(row.get(part)) for part in _OVER_CLASSES)


def _verdicts(data: object) -> Iterator[object]:
    if isinstance(data, Mapping):
        yield data.get("verdict")
        for value in data.values():
            yield from _verdicts(value)


def _without_intervals(row: Mapping[str, Any]) -> Mapping[str, Any]:
    shown = {part: _bare(row[part]) for part in _OVER_CLASSES if part in row}
    if isinstance(row.get("accuracy"), Mapping):
        shown["accuracy"] = {
            name: {**shown["accuracy"][name], "interval": each.get("interval")} if isinstance(each, Mapping) else each
            for name, each in row["accuracy"].items()
        }
    return {**row, **shown}


def _bare(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    hidden = ["interval", *(["value"] if data.get("images") == "infinite" else [])]
    return {name: None if name in hidden else _bare(value) for name, value in data.items()}


def unreadable_references(references: object) -> list[str]:
    parts = references.values() if isinstance(references, Mapping) else ()
    found = [part.get("unreadable") for part in parts if isinstance(part, Mapping)]
    return list(dict.fromkeys(str(name) for names in found if isinstance(names, list) for name in names))


def _stage(run: Run, name: str) -> dict[str, Any]:
    remedy = "delete the file, and give the `eval run` command again"
    return read_data(run.folder / name, STAGE_FILES[name], remedy, run.record.identity) or {}


def _row(row: Row, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join a row with what each stage found, by the names of their files."""
    cell, score = row.cell, found[SCORES_FILE]
    images = score.get("images")
    return {
        "cell": cell.name,
        "label": cell.label,
        "method": cell.method,
        "peer": cell.peer or None,
        "settings": cell.shown,
        "role": cell.role,
        **{key: score.get(key) for key in _SCORED},
        "images": len(row.made_images()) if images is None and row.finished else images,
        "time": found[TIME_FILE] or None,
        "memory": found[MEMORY_FILE] or None,
        "cost": found[COST_FILE] or None,
        "failed": row.failure,
    }
