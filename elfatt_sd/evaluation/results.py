"""Join what the stages measured into `results.json`, one row for each cell: all that the report reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elfatt_sd.evaluation import folder
from elfatt_sd.evaluation.measure import MEMORY_FILE, TIME_FILE
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.files import write_json

RESULTS_FILE, SCORES_FILE = "results.json", "scores.json"
FORMAT = 1
_SCORED = ("images", "classes", "distances", "paired", "accuracy", "most_changed")


def join_results(run_dir: Path) -> dict[str, Any]:
    """Return the rows of a run with everything that was measured so far; what was not is None.

    Raises:
        ElfattError: the folder holds no run, or a file in it is damaged.
    """
    run = folder.run_data(run_dir)
    protocol = Protocol.from_dict(run["protocol"])
    scores, time, memory = (_stage(run_dir / name, run["identity"]) for name in (SCORES_FILE, TIME_FILE, MEMORY_FILE))
    environment = dict(run["environment"])
    if time:
        environment["timing"] = {
            key: time[key] for key in ("measured", "environment", "clocks", "note") if time.get(key)
        }
    return {
        "format": FORMAT,
        "name": protocol.name,
        "description": " ".join(protocol.description.split()),
        "identity": run["identity"],
        "created": run["created"],
        "protocol": run["protocol"],
        "environment": environment,
        "reference": scores.get("references"),
        "rows": [_row(run_dir, cell, scores, time, memory) for cell in protocol.cells],
        "published": run["protocol"]["published"] or None,
    }


def write_results(run_dir: Path) -> dict[str, Any]:
    """Write `results.json` and return its content.

    Raises:
        ElfattError: as `join_results`.
    """
    results = join_results(run_dir)
    write_json(run_dir / RESULTS_FILE, results)
    return results


def unreadable_references(references: object) -> list[str]:
    """Return name and reason of the reference pictures that could not be read, from what `scores.json` holds."""
    parts = references.values() if isinstance(references, Mapping) else ()
    found = [part.get("unreadable") for part in parts if isinstance(part, Mapping)]
    return list(dict.fromkeys(str(name) for names in found if isinstance(names, list) for name in names))


def left_out_of_references(references: object) -> list[str]:
    """Return what the references say of files that are no images, from what `scores.json` holds."""
    parts = references.values() if isinstance(references, Mapping) else ()
    found = [part.get("left_out") for part in parts if isinstance(part, Mapping)]
    return list(dict.fromkeys(str(words) for words in found if words))


def _stage(path: Path, identity: str) -> dict[str, Any]:
    """Return what a stage wrote; nothing where it has not run yet, or where the file is of another run.

    The identity is the recorded one: a later version, with more settings, would compute another.
    """
    data: dict[str, Any] = folder.read_json(path) or {}
    return data if data.get("identity") == identity else {}


def _row(
    run_dir: Path, cell: Cell, scores: dict[str, Any], time: dict[str, Any], memory: dict[str, Any]
) -> dict[str, Any]:
    score, timing, peak = (stage.get("rows", {}).get(cell.name) or {} for stage in (scores, time, memory))
    generated = folder.manifest_path(run_dir, cell).is_file()
    row: dict[str, Any] = {
        "cell": cell.name,
        "label": cell.label,
        "method": cell.method,
        "peer": cell.peer or None,
        "settings": cell.shown,
        "role": cell.role,
        **{key: score.get(key) for key in _SCORED},
        "time": timing or None,
        "memory": peak or None,
        "failed": folder.read_failure(run_dir, cell),
    }
    if row["images"] is None and generated:
        row["images"] = len(folder.read_manifest(run_dir, cell))
    return row
