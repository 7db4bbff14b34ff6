"""`elfatt-sd patch`: the plan, the lines that do it, and saved configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, draw

import elfatt_sd

pytestmark = pytest.mark.usefixtures("library_chatter")


def test_a_saved_configuration_can_be_used(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "my.json"
    result = call("patch", model, "--method", "agent", "--ratio", 0.2, "--save", saved)
    assert result.exit_code == 0, result.output
    assert f"elfatt_sd.apply_patch(pipe, elfatt_sd.PatchConfig.load({str(saved)!r}))" in result.stdout
    config = elfatt_sd.PatchConfig.load(saved)
    assert config == elfatt_sd.PatchConfig.preset("agent", ratio=0.2)
    draw(model, tmp_path / "out", "--config", saved, "--set", "fp32_logits=true")
    record = json.loads((tmp_path / "out" / "0001-a-red-star.json").read_text())
    assert elfatt_sd.PatchConfig.from_dict(record["config"]) == config.with_settings(fp32_logits=True)


def test_patch_prints_the_plan_and_lines_that_run(model: Path) -> None:
    result = call("patch", model, "--ratio", 0.25, "--block-order", "curve")
    assert result.exit_code == 0, result.output
    assert "elfatt: patches 3 of 7 self-attention layers" in result.stdout
    assert "256 tokens (16x16)" in result.stdout
    assert "times as fast" in result.stdout
    lines = result.stdout.split("In Python:")[1]
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in lines.splitlines()), names)
    assert names["pipe"].unet.elfatt_patch.config == elfatt_sd.PatchConfig.preset(
        "elfatt", ratio=0.25, block_order="curve"
    )


def test_patch_as_json(model: Path) -> None:
    words = ["--method", "tome", "--height", 64, "--width", 48, "--allow-pickle", "--json"]
    data = json.loads(call("patch", model, *words).stdout)
    assert (data["height"], data["width"]) == (32, 24)
    assert sum(layer["patched"] for layer in data["layers"]) == 3
    assert max(layer["tokens"] for layer in data["layers"]) == 32 * 24
    assert data["multiply_adds_after"] < data["multiply_adds_before"]
    assert data["python"][2:] == [
        f'pipe = elfatt_sd.load_pipeline("{model}", allow_pickle=True)',
        'elfatt_sd.apply_patch(pipe, "tome")',
    ]
    assert json.loads(call("patch", "--json").stdout)["python"][2] == 'pipe = elfatt_sd.load_pipeline("toy")'


def test_patch_of_a_shape_fits_a_terminal(monkeypatch: Any) -> None:
    """Equal layers are one row, and nothing is loaded."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    result = call("patch", "sd15")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 45
    assert "…" not in result.stdout
    assert '    pipe = elfatt_sd.load_pipeline("path/or/hub-id")' in lines
