"""Join what the stages measured into `results.json`, one row for each cell: all that the report reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    remedy = "delete the file, and give the `eval run` command again"
    found = {
        name: read_data(run.folder / name, shape, remedy, record.identity) or {} for name, shape in STAGE_FILES.items()
    }
    environment, time = dict(record.environment), found[TIME_FILE]
    if time:
        environment["timing"] = {
            key: time[key] for key in ("measured", "environment", "clocks", "note") if time.get(key)
        }
    rows = [_row(row, {name: data.get("rows", {}).get(row.name) for name, data in found.items()}) for row in run.rows]
    return {
        "format": FORMAT,
        "name": run.protocol.name,
        "description": " ".join(run.protocol.description.split()),
        "identity": record.identity,
        "created": record.created,
        "protocol": record.protocol,
        "environment": environment,
        "reference": found[SCORES_FILE].get("references"),
        "rows": without_intervals_of_few(rows),
        "published": record.protocol.get("published") or None,
    }


def _row(row: Row, found: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    cell, score = row.cell, found[SCORES_FILE] or {}
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


def write_results(run: Run) -> dict[str, Any]:
    results = join_results(run)
    write_json(run.folder / RESULTS_FILE, results)
    return results


def without_intervals_of_few(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out of rows what is of too few classes for a reader: intervals that miss rare damage, and what they bound.

    Those are the intervals of every difference and of every figure but an accuracy, which knows how few classes there
    are, and the value of a difference that is extrapolated to infinitely many images. `scores.json` keeps all of them.
    """
    if not any(map(_is_of_few, rows)):
        return list(rows)
    return [{key: _bare(value, key) if key in _OVER_CLASSES else value for key, value in row.items()} for row in rows]


def _is_of_few(row: Mapping[str, Any]) -> bool:
    classes = row.get("classes")
    few = isinstance(classes, int) and 0 < classes < FEWEST_CLASSES
    return few or f"'verdict': {TOO_FEW!r}" in str([row.get(part) for part in _OVER_CLASSES])


def _bare(data: Any, part: str) -> Any:
    if not isinstance(data, Mapping):
        return data
    hidden = ["interval"] if part != "accuracy" or "verdict" in data else []
    hidden += ["value"] if data.get("images") == "infinite" else []
    return {name: None if name in hidden else _bare(value, part) for name, value in data.items()}
