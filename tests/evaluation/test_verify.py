"""Verification names what was altered, deleted, added or edited."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from elfatt_sd.evaluation import folder
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.verify import unequal, verify_run


@pytest.fixture
def copy(finished_run: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_is_in_order(copy: Path) -> None:
    assert verify_run(copy) == []


def _alter(run_dir: Path, image: Path) -> None:
    with Image.open(image) as picture:
        flipped = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    flipped.save(image)


def _delete(run_dir: Path, image: Path) -> None:
    image.unlink()


def _add(run_dir: Path, image: Path) -> None:
    shutil.copy(image, image.with_name("00009.png"))


def _swap_prompt(run_dir: Path, image: Path) -> None:
    manifest = image.parents[1] / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"owl"', '"eagle"'))


def _cut_manifest(run_dir: Path, image: Path) -> None:
    manifest = image.parents[1] / "manifest.jsonl"
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:-1]))


def _edit_protocol(run_dir: Path, image: Path) -> None:
    path = run_dir / folder.RUN_FILE
    path.write_text(path.read_text().replace('"guidance": 7.5', '"guidance": 5.0'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_alter, "cells/null/images/00002.png: altered"),
        (_delete, "cells/null/images/00002.png: deleted"),
        (_add, "cells/null/images/00009.png: not an image of this run"),
        (_swap_prompt, "cells/null/manifest.jsonl: images, prompts or seeds are not those"),
        (_cut_manifest, "cells/null/manifest.jsonl: images, prompts or seeds are not those"),
        (_edit_protocol, "run.json: the protocol does not have the identity"),
    ],
)
def test_damage_is_named(
    copy: Path, full_protocol: Protocol, damage: Callable[[Path, Path], None], message: str
) -> None:
    damage(copy, folder.image_path(copy, full_protocol.cells[1], 2))
    problems = verify_run(copy)
    assert any(message in problem for problem in problems), problems


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_edited_scores_are_found_by_computing_them_anew(copy: Path) -> None:
    def improve(data: Any) -> None:
        data["rows"]["null"]["distances"]["FD-CLIP (12 reference images)"]["value"] *= 0.9

    _edit(copy / "scores.json", improve)
    (problem, *rest) = verify_run(copy)
    assert "scores.json: null.distances.FD-CLIP (12 reference images).value is" in problem
    assert any("results.json" in line for line in rest)
    assert all("results.json" in line for line in verify_run(copy, recompute=False))


def test_an_edited_table_is_found(copy: Path) -> None:
    def improve(data: Any) -> None:
        data["rows"][2]["time"]["unet"]["seconds_per_image"] /= 2

    _edit(copy / "results.json", improve)
    (problem,) = verify_run(copy, recompute=False)
    assert "time.unet.seconds_per_image" in problem


def test_an_edited_table_of_the_report_is_found(copy: Path) -> None:
    path = copy / "report" / "table.csv"
    path.write_bytes(path.read_bytes().replace(b"ELFATT-SD", b"ELFATT-SD*", 1))
    (problem,) = verify_run(copy, recompute=False)
    assert "report/table.csv: not the table of results.json" in problem


def test_missing_files_are_named(copy: Path) -> None:
    (copy / "scores.json").unlink()
    assert any("scores.json: deleted" in problem for problem in verify_run(copy))


def test_numbers_are_compared_with_a_tolerance() -> None:
    assert list(unequal({"a": [1.0, 2]}, {"a": [1.0 + 1e-6, 2]})) == []
    assert list(unequal({"a": [1.0, 2]}, {"a": [1.01, 2]})) == [("a[0]", 1.0, 1.01)]
    assert list(unequal({"a": 1}, {"b": 1})) == [("a", 1, None), ("b", None, 1)]
    assert list(unequal({"a": True}, {"a": 1})) == []
