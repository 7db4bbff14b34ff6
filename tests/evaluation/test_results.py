"""`results.json` stays as it was; what was altered, deleted, added, edited or damaged is named, in one line."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import protocol, write_run
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.types import SerializableData, SerializedData

from elfatt_sd.devices import describe_machine
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.evaluation.protocols import Cell, unequal
from elfatt_sd.evaluation.records import same_images
from elfatt_sd.evaluation.report.data import load_results
from elfatt_sd.evaluation.report.page import write_report
from elfatt_sd.evaluation.run import RowFolder, RunFolder
from elfatt_sd.evaluation.score import score_run
from elfatt_sd.evaluation.stages import verify_run


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


def lasting(data: Any, folder: str, key: str = "", measured: bool = False) -> Any:
    """Results without the machine and where the run lies; of times and memory, how many values there are."""
    measured = measured or key in ("time", "memory")
    if key == "environment" and not measured:
        return sorted(data)
    if isinstance(data, dict):
        return {name: lasting(value, folder, name, measured) for name, value in data.items()}
    if isinstance(data, list):
        return [lasting(value, folder, "", measured) for value in data]
    if measured or not isinstance(data, str):
        return "measured" if measured else data
    return re.sub(r"\w", "0", data) if key in ("identity", "created", "sha256") else data.replace(folder, "FOLDER")


def golden(run_dir: Path) -> dict[str, Any]:
    rows = {path.parent.name: path.read_text() for path in sorted(run_dir.glob("cells/*/manifest.jsonl"))}
    images = {name: re.findall(r'"sha256": ?"(\w{8})', text) for name, text in rows.items()}
    return {"images": images, **lasting(RunFolder.open(run_dir).write_results(), str(run_dir.parent))}


@pytest.mark.usefixtures("shared_cache")
def test_a_run_of_every_stage(finished_run: Path, snapshot: SnapshotAssertion) -> None:
    assert golden(finished_run) == snapshot(extension_class=Figures)
    told: list[Any] = []
    stray = finished_run.parent / "val" / "weights.bin"  # no image, and so no damage
    stray.touch()
    assert verify_run(RunFolder.open(finished_run), progress=lambda *seen: told.append(seen)) == []
    stray.unlink()
    assert {seen[1:] for seen in told} >= {(5, 5)}  # the images of a row, while they are scored again


def test_scores_of_known_images(tmp_path: Path, own_cache: Path, snapshot: SnapshotAssertion) -> None:
    """Renders, of which a row is darker and another has three that differ: distances, pairs, accuracy, verdicts."""
    run_dir = write_run(tmp_path / "run", protocol(), stride=1)
    score_run(RunFolder.open(run_dir))
    assert golden(run_dir) == snapshot(extension_class=Figures)


ELFATT = "elfatt-ratio0.5-block_size16-agents8"
FD = "FD-CLIP (ViT of width 32/8@32) (12 reference images)"
MANIFEST, BEFORE, IMAGE = (f"cells/null/{name}" for name in ("manifest.jsonl", "images/00001.png", "images/00002.png"))


def edited(place: str, *keys: Any) -> Callable[[Path], None]:
    """Double the figure that lies at the end of the keys; drop what is none; put another text in place of one."""

    def damage(run_dir: Path) -> None:
        whole = data = json.loads((run_dir / place).read_text())
        for key in keys[:-1]:
            data = data[key]
        value = data.pop(keys[-1])
        if not isinstance(value, dict):
            data[keys[-1]] = "Abacus" if isinstance(value, str) else 2 * value or 1
        (run_dir / place).write_text(json.dumps(whole))

    return damage


def listed_otherwise(run_dir: Path) -> None:
    (run_dir / MANIFEST).write_text((run_dir / MANIFEST).read_text().replace('"owl"', '"eagle"'))


@pytest.mark.parametrize(
    ("damage", "recompute", "messages"),
    [
        (lambda run_dir: shutil.copy(run_dir / BEFORE, run_dir / IMAGE), True, [f"{IMAGE}: altered"]),
        (lambda run_dir: (run_dir / IMAGE).unlink(), True, [f"{IMAGE}: deleted"]),
        (lambda run_dir: (run_dir / IMAGE.replace("2.", "9.")).touch(), True, ["00009.png: not an image of this run"]),
        (listed_otherwise, True, [f"{MANIFEST}: images, prompts, classes or seeds are not"]),
        (edited("run.json", "protocol", "guidance"), True, ["protocol does not have the identity"]),
        (lambda run_dir: (run_dir / "scores.json").unlink(), True, ["scores.json: deleted", "results.json"]),
        (
            edited("scores.json", "rows", "null", "distances", FD, "value"),
            True,
            [f"scores.json: rows.null.distances.{FD}.value is", "results.json"],
        ),
        (edited("cost.json", "rows", "null"), True, ["cost.json: rows.null is None, computed again", "results.json"]),
        (edited("time.json", "identity"), False, ["time.json is of another run"]),
        (
            edited("results.json", "rows", 2, "time", "unet", "seconds_per_image"),
            False,
            [f"rows[{ELFATT}].time.unet.seconds_per_image"],
        ),
        (edited("results.json", "protocol", "steps"), False, ["protocol.steps is 8, computed again 4"]),
        (edited("results.json", "environment", "timing", "environment", "device"), False, ["device is Abacus"]),
    ],
)
def test_damage_is_named(copy: Path, damage: Callable[[Path], object], recompute: bool, messages: list[str]) -> None:
    """An altered figure of a stage is told for its own file first, and then for the results that were made of it."""
    damage(copy)
    problems = verify_run(RunFolder.open(copy), recompute=recompute)
    assert len(problems) >= len(messages)
    for message, problem in zip(messages, (problems[0], problems[-1]), strict=False):
        assert message in problem, problems


def test_figures_are_compared_with_a_tolerance() -> None:
    """That of a difference is that of its figure: near 0 it has the rounding errors of the distances that it is of."""
    assert list(unequal({"a": [1.0, 2], "b": 1}, {"a": [1.0 + 1e-6, 2], "b": 1})) == []
    wrong = unequal({"a": [1.0, 10_000], "b": math.nan, "c": 1}, {"a": [1.01, 10_001], "b": 1.0})
    assert [key for key, *_ in wrong] == ["a[0]", "a[1]", "b", "c"]
    assert list(unequal({"a": 1.0}, {"a": 1.0 + 1e-6}, tolerance=0)) == [("a", 1.0, 1.0 + 1e-6)]

    def distance(difference: float, low: float = -0.5) -> dict[str, Any]:
        ends = {"value": difference, "interval": [low, 0.5], "verdict": "no difference shown"}
        return {"FID": {"value": 20.0, "interval": [19.0, 21.0], "difference": ends}}

    assert list(unequal(distance(1e-5), distance(3e-5))) == []
    assert list(unequal(distance(1e-5), distance(0.1))) == [("FID.difference.value", 1e-5, 0.1)]
    assert list(unequal(distance(0.0), distance(0.0, -0.6))) == [("FID.difference.interval[0]", -0.5, -0.6)]
    assert list(unequal({"value": 0.0, "interval": [-2.0, 2.0]}, {"value": 1e-3, "interval": [-2.0, 2.0]})) == []


READ: dict[str, Callable[[Path], object]] = {
    "run.json": RunFolder.open,
    "results.json": load_results,
    MANIFEST: lambda run_dir: RowFolder(run_dir / "cells" / "null").made_images(),
}  # others when results are joined
LOST = r"run\.json: .*; put the file back from a copy"
UNREADABLE = r"cannot be read: (it is not a plain file|Too many levels)"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("run.json", {"format": 2}, LOST),
        ("run.json", {"protocol": {}}, LOST),
        ("run.json", None, r"is damaged \(it holds nothing, null\)"),
        ("results.json", {"rows": [{"distances": {"FID": {"interval": [1]}}}]}, r"={'FID': {'interval': \[1\]"),
        ("results.json", Path.unlink, "does not exist; `elfatt-sd eval score` writes it"),
        ("scores.json", {"format": 99}, "format=99 is not accepted"),
        ("cost.json", {"rows": 3}, "rows=3 is not accepted"),
        (MANIFEST, {"sha256": "x"}, "line 2 .*; delete the file to make row 'null' again .*sha256"),
        (MANIFEST, {"prompt": "\ud800"}, "line 2 is damaged"),
        (MANIFEST, os.mkfifo, "does not exist"),
        ("run.json", os.mkfifo, UNREADABLE),
        ("results.json", lambda path: path.symlink_to(path), UNREADABLE),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_damaged_file_is_told(copy: Path, name: str, damage: Any, message: str) -> None:
    """Changed fields are those of the second line of a manifest."""
    path = copy / name
    if callable(damage):
        if damage is not Path.unlink:
            path.unlink()
        damage(path)
    else:
        lines = path.read_text().split("\n") if name == MANIFEST else ["", path.read_text()]
        lines[1] = json.dumps(damage and json.loads(lines[1]) | damage)
        path.write_text("\n".join(lines))
    with pytest.raises(ElfattError, match=message) as error:
        READ.get(name, lambda run_dir: RunFolder.open(run_dir).results())(copy)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_what_stands_in_the_way_of_writing_is_one_line_and_links_lead_nowhere(copy: Path) -> None:
    run, outside, report = RunFolder.open(copy), copy.parent / "outside", copy / "report"
    outside.mkdir()
    (outside / "mine.png").write_bytes(b"mine")
    shutil.rmtree(report)
    report.symlink_to(outside)
    with run.writing(), pytest.raises(ElfattError, match="report is a link"):
        write_report(load_results(copy))
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"mine.png": b"mine"}
    report.unlink()
    report.write_text("a file stands here")
    with pytest.raises(ElfattFailure, match="report: File exists; finished work is kept"), run.writing():
        write_report(load_results(copy))
    assert report.read_text() == "a file stands here"
    (copy / "results.json").unlink()
    (copy / "results.json").mkdir()
    with pytest.raises(ElfattFailure, match=r"results\.json: Is a directory; finished work is kept"), run.writing():
        run.write_results()


def cell(name: str, method: str = "tome", **settings: Any) -> Cell:
    return Cell(name, "", method, "baseline" if method == "sd" else "method", settings=settings)


CELLS = (
    cell("sd", "sd"),
    cell("tome"),
    cell("xformers", attention_backend="xformers"),
    cell("native", attention_backend="native"),
    Cell("peer", "tomesd", "tome", peer="tomesd"),
)
EVERY, PATCHED = {each.name for each in CELLS}, {"tome", "xformers", "native"}
CUDA = {"runtime": "13", "cudnn": 9, "tf32": False, "driver": "580"}


def described(**changes: Any) -> dict[str, Any]:
    packages = {"torch": "2", "diffusers": "0", "transformers": "5", "tomesd": "1", "numpy": "2", "flash-attn": "2"}
    hashes = {f"{name}_sha256": "00" for name in ("model", "prompts", "code", "method")}
    found = {"elfatt_sd": "0.1", "commit": "abc", "device": "2 cores", "cpu_threads": 2, "cuda": None, **hashes}
    return {**found, **changes, "packages": {**packages, **changes.get("packages", {})}}


@pytest.mark.parametrize(
    ("before", "changes", "rows"),
    [
        ({}, {"packages": {"torch": "3"}}, EVERY),
        ({}, {"packages": {"tomesd": "2"}}, {"peer"}),
        ({}, {"packages": {"flash-attn": "3"}}, {"xformers", "native"}),
        ({}, {"packages": {"xformers": "1"}}, {"xformers", "native"}),
        ({}, {"packages": {"numpy": "3"}}, set()),
        ({}, {"method_sha256": "11"}, PATCHED),
        ({}, {"model_sha256": "11"}, EVERY),
        ({}, {"code_sha256": "11"}, EVERY),
        ({}, {"cpu_threads": 1}, EVERY),  # a thread more changes pixels on the CPU: measured on the toy
        ({}, {"commit": "def", "elfatt_sd": "0.2"}, set()),
        ({"cuda": CUDA}, {"cuda": {**CUDA, "driver": "590"}, "cpu_threads": 64}, set()),
        ({"cuda": CUDA}, {"cuda": {**CUDA, "tf32": True}}, EVERY),
    ],
)
def test_rows_differ_by_what_they_use(before: dict[str, Any], changes: dict[str, Any], rows: set[str]) -> None:
    there, here = described(**before), described(**changes)
    assert {each.name for each in CELLS if same_images(there, here, [each])} == rows
    assert bool(same_images(there, here, CELLS)) == bool(rows)
    now = describe_machine(torch.device("cpu"))
    assert same_images(now, now, CELLS) == [] and now["packages"]["torch"]
