"""`elfatt-sd try`: every method in one strip."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import PROMPT, call, check_error, files

import elfatt_sd
from elfatt_sd.drawing.studio import Studio

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_try_draws_every_method_and_recommends(model: Path, tmp_path: Path) -> None:
    result = call("try", model, "a", "red", "star", "--steps", 6, "--rounds", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    for method in elfatt_sd.METHODS[1:]:
        assert f"{method}, round 1 of 1" in result.stdout
    assert "PSNR to untouched, dB" in result.stdout
    assert files(tmp_path) == ["0001-a-red-star.json", "0001-a-red-star.png"]


def test_try_takes_methods(model: Path, tmp_path: Path) -> None:
    words = ["--method", "tome", "--method", "elfatt", "--steps", 2, "--rounds", 1, "--out", tmp_path]
    result = call("try", model, "a red star", *words)
    assert re.findall(r"^([a-z-]+), round", result.stdout, re.MULTILINE) == ["untouched", "tome", "elfatt"]
    check_error(call("try", model, "a red star", "--method", "elfat"), "method='elfat' is not known")


def test_try_keeps_what_is_finished_when_it_is_stopped(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    drawn, calls = Studio.draw, []

    def third_is_interrupted(self: Studio, *given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return drawn(self, *given, **named)

    monkeypatch.setattr(Studio, "draw", third_is_interrupted)
    result = call("try", model, PROMPT, "--steps", 2, "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr == "error: stopped; what was finished stays\n"
    record = json.loads((tmp_path / "0001-a-red-star.json").read_text())
    assert [row["method"] for row in record["methods"]] == ["sd", "tome"]


def test_several_prompts_or_models_are_a_sheet(model: Path, tmp_path: Path) -> None:
    words = ["--model", model, "--prompt", "a dog", "--method", "tome", "--steps", 6, "--rounds", 1]
    result = call("try", "toy", "a", "red", "star", *words, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert files(tmp_path) == ["0001-demo-sheet.json", "0001-demo-sheet.png"]
    assert str(tmp_path / "0001-demo-sheet.png") in result.stdout
    trials = json.loads((tmp_path / "0001-demo-sheet.json").read_text())["trials"]
    assert [trial["prompt"] for trial in trials] == ["a red star", "a dog"] * 2
    assert [trial["model"] for trial in trials] == ["toy"] * 2 + [str(model)] * 2
    check_error(call("try", "toy", "--model", tmp_path / "none", "--out", tmp_path), "none")
