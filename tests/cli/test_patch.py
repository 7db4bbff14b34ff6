"""`elfatt-sd patch`: the plan, the lines that do it, and saved configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, check_error, draw

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
    from elfatt_sd.patch import current_config

    assert current_config(names["pipe"]) == elfatt_sd.PatchConfig.preset("elfatt", ratio=0.25, block_order="curve")


def test_patch_of_the_default_model() -> None:
    result = call("patch")
    assert result.exit_code == 0, result.output
    assert "4096 tokens (64x64)" in result.stdout
    assert 'pipe = elfatt_sd.load_pipeline("toy")\n' in result.stdout


def test_patch_as_json(model: Path) -> None:
    result = call("patch", model, "--method", "tome", "--height", 64, "--width", 48, "--json")
    data = json.loads(result.stdout)
    assert (data["height"], data["width"]) == (32, 24)
    assert sum(layer["patched"] for layer in data["layers"]) == 3
    assert max(layer["tokens"] for layer in data["layers"]) == 32 * 24
    assert data["multiply_adds_after"] < data["multiply_adds_before"]
    assert data["python"][-1] == 'elfatt_sd.apply_patch(pipe, "tome")'
    pickles = json.loads(call("patch", model, "--allow-pickle", "--json").stdout)["python"]
    assert f'pipe = elfatt_sd.load_pipeline("{model}", allow_pickle=True)' in pickles


@pytest.mark.parametrize("shape", ["sd15", "sdxl"])
def test_patch_of_a_shape_allocates_nothing(shape: str) -> None:
    """Its own size is that of bench; equal layers are one row, and the whole call is counted."""
    result = call("patch", shape, "--json")
    data = json.loads(result.stdout)
    patched, layers, tokens = {"sd15": (5, 16, 4096), "sdxl": (10, 70, 4096)}[shape]
    assert [sum(layer["patched"] for layer in data["layers"]), len(data["layers"])] == [patched, layers]
    assert max(layer["tokens"] for layer in data["layers"]) == tokens
    assert data["call"]["before"] == {"sd15": 401_636_720_640, "sdxl": 3_380_618_199_040}[shape]
    assert 1 < data["call"]["speed"] < data["call"]["limit"]
    assert data["python"][2] == 'pipe = elfatt_sd.load_pipeline("path/or/hub-id")'


def test_patch_of_a_shape_fits_a_terminal(monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    result = call("patch", "sd15")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 45
    assert "…" not in result.stdout


def test_patch_of_a_shape_names_both_kinds_of_blocks() -> None:
    lines = [line.strip() for line in call("patch", "flux").stdout.splitlines()]
    assert {"57 layers, 24 heads", "transformer_blocks.0 to 18", "single_transformer_blocks.0 to 37"} <= {
        line.split("   ")[0].strip() for line in lines
    }


def test_a_shape_has_nothing_to_measure() -> None:
    check_error(call("patch", "sd15", "--autotune"), "model='sd15' is a shape without weights")


def test_a_configuration_file_that_is_none(model: Path, tmp_path: Path) -> None:
    for text, says in (("{", "not JSON"), ("[]", "is not a configuration"), ('{"colour": 1}', "'colour' is not known")):
        (tmp_path / "c.json").write_text(text)
        check_error(call("patch", model, "--config", tmp_path / "c.json"), says)
