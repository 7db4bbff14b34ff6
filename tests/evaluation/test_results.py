"""`results.json` stays as it was: what it holds, and the figures of images that are known."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.runs import protocol, write_run
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.types import SerializableData, SerializedData

from elfatt_sd.evaluation.results import write_results
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.score import score_run

MEASURED = ("time", "memory")
OF_THE_FOLDER = ("identity", "created", "sha256")


class Figures(JSONSnapshotExtension):
    """Figures of images with the same hashes are equal to three digits; another processor draws others."""

    def serialize(self, data: SerializableData, **_: Any) -> SerializedData:
        return json.dumps(data, indent=1) + "\n"

    def matches(self, *, serialized_data: SerializedData, snapshot_data: SerializedData) -> bool:
        now, kept = json.loads(serialized_data), json.loads(snapshot_data)
        same = now.pop("images") == kept.pop("images")
        return close(now, kept, 1e-3 if same else 0.05)


def close(now: Any, kept: Any, tolerance: float) -> bool:
    if isinstance(now, float) and isinstance(kept, float):
        return math.isclose(now, kept, rel_tol=tolerance, abs_tol=tolerance / 10)
    if isinstance(now, dict) and isinstance(kept, dict):
        loose = {"interval": 0.2}  # of few images: refits, which follow the last digits of a processor
        return [*now] == [*kept] and all(close(now[key], kept[key], loose.get(key, tolerance)) for key in now)
    if isinstance(now, list) and isinstance(kept, list):
        return len(now) == len(kept) and all(close(*pair, tolerance) for pair in zip(now, kept, strict=True))
    return bool(now == kept)


def bare(data: Any) -> Any:
    """What of a measurement is the same anywhere: its keys, and how many values there are."""
    if isinstance(data, dict):
        return {key: bare(value) for key, value in data.items()}
    return [bare(value) for value in data] if isinstance(data, list) else "measured"


def lasting(data: Any, folder: str) -> Any:
    """Results without times, the machine, and where the run lies."""
    if isinstance(data, str):
        return data.replace(folder, "FOLDER")
    if isinstance(data, list):
        return [lasting(value, folder) for value in data]
    if not isinstance(data, dict):
        return data
    masked = {key: re.sub(r"\w", "0", data[key]) for key in OF_THE_FOLDER if isinstance(data.get(key), str)}
    masked |= {key: bare(data[key]) for key in MEASURED if key in data}
    masked |= {"environment": sorted(data["environment"])} if "environment" in data else {}
    return {key: masked[key] if key in masked else lasting(value, folder) for key, value in data.items()}


def golden(run_dir: Path) -> dict[str, Any]:
    rows = {path.parent.name: path.read_text() for path in sorted(run_dir.glob("cells/*/manifest.jsonl"))}
    images = {name: re.findall(r'"sha256": ?"(\w{8})', text) for name, text in rows.items()}
    return {"images": images, **lasting(write_results(Run.open(run_dir)), str(run_dir.parent))}


@pytest.mark.usefixtures("shared_cache")
def test_a_run_of_every_stage(finished_run: Path, snapshot: SnapshotAssertion) -> None:
    assert golden(finished_run) == snapshot(extension_class=Figures)


def test_scores_of_known_images(tmp_path: Path, own_cache: Path, snapshot: SnapshotAssertion) -> None:
    """Renders, of which a row is darker and another has three that differ: distances, pairs, accuracy, verdicts."""
    run_dir = write_run(tmp_path / "run", protocol(), stride=1)
    score_run(Run.open(run_dir))
    assert golden(run_dir) == snapshot(extension_class=Figures)
