"""`results.json` stays as it was; and verification names what was altered, deleted, added or edited."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.runs import protocol, row_of, write_run
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.types import SerializableData, SerializedData

from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.results import write_results
from elfatt_sd.evaluation.run import RUN_FILE, Run
from elfatt_sd.evaluation.score import score_run
from elfatt_sd.evaluation.verify import _check_cost, unequal, verify_run

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


ELFATT = "elfatt-ratio0.5-block_size16-agents8"


def test_a_finished_run_is_in_order(copy: Path) -> None:
    told: list[Any] = []
    assert verify_run(Run.open(copy), progress=lambda *seen: told.append(seen)) == []
    assert {seen[1:] for seen in told} >= {(5, 5)}  # the images of a row, while they are scored again


def _alter(run_dir: Path, image: Path) -> None:
    with Image.open(image) as picture:
        flipped = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    flipped.save(image)


def _replace(place: str, before: str, now: str) -> Callable[[Path, Path], None]:
    """Return what puts one text in place of another in a file of the run."""

    def damage(run_dir: Path, image: Path) -> None:
        text = (run_dir / place).read_text()
        assert before in text
        (run_dir / place).write_text(text.replace(before, now))

    return damage


def _cut_manifest(run_dir: Path, image: Path) -> None:
    manifest = run_dir / MANIFEST
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:-1]))


MANIFEST = "cells/null/manifest.jsonl"
UNLIKE = f"{MANIFEST}: images, prompts, classes or seeds are not"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_alter, "cells/null/images/00002.png: altered"),
        (lambda _, image: image.unlink(), "cells/null/images/00002.png: deleted"),
        (lambda _, image: shutil.copy(image, image.with_name("00009.png")), "00009.png: not an image of this run"),
        (_replace(MANIFEST, '"owl"', '"eagle"'), UNLIKE),
        (_replace(MANIFEST, '"class_index": 2', '"class_index": 1'), UNLIKE),
        (
            _replace(MANIFEST, "images/00002.png", "../other.png"),
            f"{MANIFEST}: file='../other.png' is not where image 2 lies",
        ),
        (_cut_manifest, UNLIKE),
        (lambda run_dir, _: (run_dir / "scores.json").unlink(), "scores.json: deleted"),
        (_replace(RUN_FILE, '"guidance": 7.5', '"guidance": 5.0'), "run.json: the protocol does not have the identity"),
    ],
)
def test_damage_is_named(
    copy: Path, full_protocol: Protocol, damage: Callable[[Path, Path], None], message: str
) -> None:
    damage(copy, row_of(copy, full_protocol.cells[1]).image_file(2))
    problems = verify_run(Run.open(copy))
    assert any(message in problem for problem in problems), problems


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


FD = "FD-CLIP (ViT of width 32/8@32) (12 reference images)"


def test_edited_scores_are_found_by_computing_them_anew(copy: Path) -> None:
    def edit(data: Any) -> None:
        data["rows"]["null"]["distances"][FD]["value"] *= 0.9
        data["references"][FD]["count"] = 50_000

    _edit(copy / "scores.json", edit)
    reference, distance, *rest = verify_run(Run.open(copy))
    assert f"scores.json: references.{FD}.count is 50000, computed again 12" in reference
    assert f"scores.json: rows.null.distances.{FD}.value is" in distance
    assert any("results.json" in line for line in rest)
    assert all("results.json" in line for line in verify_run(Run.open(copy), recompute=False))


@pytest.mark.parametrize("change", ["halve", "drop"])
def test_an_edited_cost_is_found_by_working_it_out_anew(copy: Path, change: str) -> None:
    def edit(data: Any) -> None:
        if change == "drop":
            del data["rows"]["null"]
        else:
            data["rows"][ELFATT]["multiply_adds"] //= 2

    _edit(copy / "cost.json", edit)
    problem = verify_run(Run.open(copy))[0]
    place = "null is None" if change == "drop" else f"{ELFATT}.multiply_adds is"
    assert f"cost.json: {place}" in problem
    assert "worked out again" in problem


def test_a_cost_that_cannot_be_worked_out_is_named(copy: Path) -> None:
    _edit(copy / "run.json", lambda data: data["protocol"].update(model=str(copy / "none")))
    (problem,) = _check_cost(Run.open(copy))
    assert "cost.json: it cannot be worked out again" in problem


@pytest.mark.parametrize(
    ("keys", "change", "place"),
    [
        (("rows", 2, "time", "unet", "seconds_per_image"), 0.5, f"rows[{ELFATT}].time.unet.seconds_per_image"),
        (("rows", 2, "distances", FD, "value"), 1 - 1e-6, f"distances.{FD}.value"),
        (("rows", 2, "paired", "psnr", "identical"), 1, "paired.psnr.identical is 1,"),
        (("protocol", "steps"), 50, "protocol.steps is 50, in the files of the stages 4"),
        (
            ("environment", "timing", "environment", "device"),
            "Abacus",
            "environment.timing.environment.device is Abacus",
        ),
    ],
)
def test_edited_results_are_found(copy: Path, keys: tuple[Any, ...], change: Any, place: str) -> None:
    """A figure is multiplied, anything else replaced."""

    def edit(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = data[keys[-1]] * change if isinstance(change, float) else change

    _edit(copy / "results.json", edit)
    (problem,) = verify_run(Run.open(copy), recompute=False)
    assert "results.json: " in problem
    assert place in problem


def test_numbers_with_a_fraction_are_compared_with_a_tolerance() -> None:
    assert list(unequal({"a": [1.0, 2]}, {"a": [1.0 + 1e-6, 2]})) == []
    assert list(unequal({"a": [1.0, 2]}, {"a": [1.01, 2]})) == [("a[0]", 1.0, 1.01)]
    assert list(unequal({"a": 1.0}, {"a": 1.0 + 1e-6}, tolerance=0)) == [("a", 1.0, 1.0 + 1e-6)]
    assert list(unequal({"a": 10_000}, {"a": 10_001})) == [("a", 10_000, 10_001)]
    assert list(unequal({"a": 1}, {"b": 1})) == [("a", 1, None), ("b", None, 1)]
    assert len(list(unequal({"a": float("nan")}, {"a": 1.0}))) == 1


def test_the_tolerance_of_a_difference_is_that_of_its_figure() -> None:
    """A difference near 0 has the rounding errors of the distances that it is of."""

    def distance(difference: float, low: float = -0.5) -> dict[str, Any]:
        ends = {"value": difference, "interval": [low, 0.5], "verdict": "no difference shown"}
        return {"FID": {"value": 20.0, "interval": [19.0, 21.0], "difference": ends}}

    assert list(unequal(distance(1e-5), distance(3e-5))) == []
    assert list(unequal(distance(1e-5), distance(0.1))) == [("FID.difference.value", 1e-5, 0.1)]
    assert list(unequal(distance(0.0), distance(0.0, -0.6))) == [("FID.difference.interval[0]", -0.5, -0.6)]
    assert list(unequal({"value": 0.0, "interval": [-2.0, 2.0]}, {"value": 1e-3, "interval": [-2.0, 2.0]})) == []
