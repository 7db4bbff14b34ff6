"""`elfatt-sd sheet`: prompts by models in one PNG."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_checks import call, check_error, files

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_sheet_is_written(model: Path, tmp_path: Path) -> None:
    result = call("sheet", "--model", model, "--prompt", "a red star", "--steps", 6, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert files(tmp_path) == ["0001-demo-sheet.json", "0001-demo-sheet.png"]
    assert str(tmp_path / "0001-demo-sheet.png") in result.stdout


def test_an_unknown_model_is_told_at_once(tmp_path: Path) -> None:
    check_error(call("sheet", "--model", tmp_path / "none", "--out", tmp_path), "none")
