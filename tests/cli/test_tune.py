"""`elfatt-sd tune`: settings, page and JSON; wrong use is one line before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import call, check_error, files

from elfatt_sd.config import PatchConfig

pytestmark = pytest.mark.usefixtures("library_chatter", "own_cache")


def test_tune_saves_settings_and_writes_a_page(model: Path, tmp_path: Path) -> None:
    prompts, save, out = tmp_path / "prompts.txt", tmp_path / "tuned.json", tmp_path / "page"
    prompts.write_text("a cat\na dog\n")
    small = ["--steps", 4, "--images", 2, "--prompts", prompts, "--no-presets"]
    result = call("tune", model, "--closeness", 20, *small, "--save", save, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(("tuned: ", "untouched: "))
    assert "asked for: PSNR 20.0 dB at least" in result.stdout
    assert PatchConfig.load(save).active == result.stdout.startswith("tuned")
    assert "index.html" in files(out)
    again = call("tune", model, "--closeness", 20, *small, "--json")
    assert json.loads(again.stdout)["asked"] == {"closeness": 20.0, "speed": None, "memory": None}


def test_what_is_found_is_printed_where_it_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("elfatt_sd.config.write_json", full)
    save = tmp_path / "tuned.json"
    result = call("tune", model, "--closeness", 20, "--steps", 2, "--images", 2, "--no-presets", "--save", save)
    assert result.exit_code == 2
    assert f"'{save}' cannot be written" in result.stderr
    assert result.stdout.startswith(("tuned: ", "untouched: "))
    PatchConfig.from_dict(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no budget; give closeness"),
        (["--speed", 0.9], "speed=0.9 is not accepted"),
        (["--closeness", 30, "--height", 30], "height=30 is not accepted"),
        (["--closeness", 30, "--prompts", "nowhere.txt"], "cannot be read"),
        (["--closeness", 30, "--save", "pyproject.toml/x.json"], "save="),
        (["--closeness", 30, "--steps", 5000], "steps=5000 is not accepted; give a whole number from 1 to 1000"),
        (["--closeness", 30, "--steps", 0], "steps=0 is not accepted; give a whole number of at least 1"),
        (["--closeness", 30, "--guidance", "nan"], "guidance=nan is not accepted"),
        (["--closeness", 30, "--seed", -1], "seed=-1 is not accepted"),
        (["--closeness", 30, "--images", 0], "images=0 is not accepted; give a whole number of at least 2"),
        (["--closeness", 30, "--frames", 0], "frames=0 is not accepted"),
        (["--closeness", 30, "--metric", "fid"], "metric='fid' is not known"),
        (["--closeness", -5], "closeness=-5 is not accepted; metric='psnr' gives 0 at least"),
        (["--closeness", 500], "8-bit images that are not identical end near 60 to 90"),
        (["--closeness", 30, "--metric", "ssim"], "closeness=30 is not accepted; metric='ssim' gives 1 at most"),
        (["--closeness", 30, "--save", "."], "save='.' is a folder; give the name of a file"),
    ],
)
def test_wrong_use_is_one_line(model: Path, words: list[object], says: str) -> None:
    check_error(call("tune", model, *words), says)
