"""The core works without the packages of the extras, and what needs one says how to install it before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny_pipelines as tiny
from typer.testing import CliRunner

from elfatt_sd import cli
from elfatt_sd.errors import PACKAGES, ElfattError, OptionalPackage, install_line, need
from elfatt_sd.evaluation.extraction import open_source
from elfatt_sd.evaluation.features import load_extractor

ROOT = Path(__file__).parents[1]
EVAL = "pip install 'elfatt-sd[eval]'"
COMMANDS = """
import sys
sys.modules |= dict.fromkeys({hidden})  # None there is a package that is not installed
from elfatt_sd.cli import app
model = {model!r}
for words in (
    ["generate", "a", "--model", model, "--steps", "2", "--compare"],
    ["patch", model, "--save", "saved.json"],
    ["generate", "a", "--model", model, "--steps", "2", "--config", "saved.json"],
    ["eval", "run", "--help"],
    ["bench", "unet", "--help"],
    ["doctor"],
):
    try:
        app(words)
    except SystemExit as done:
        assert not done.code, words
"""

EARLY = """
import sys
sys.modules |= dict.fromkeys({hidden})
from elfatt_sd.cli import app
try:
    app({words})
except SystemExit as done:
    assert done.code == 2
"""


@pytest.fixture
def absent(monkeypatch: Any) -> None:
    """Nothing optional is installed."""
    monkeypatch.setattr(OptionalPackage, "missing", True)


def test_the_core_does_without_the_extras(folder: Path, tmp_path: Path) -> None:
    tiny.sd15(folder).save_pretrained(tmp_path / "tiny")
    hidden = [package.module for package in PACKAGES.values()]
    code = COMMANDS.format(hidden=hidden, model=str(tmp_path / "tiny"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for scores of evaluations" in done.stdout  # the doctor
    assert EVAL in done.stdout


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "eval run toy --out run",
            "an evaluation needs torchmetrics, matplotlib, jinja2, markupsafe, tomesd, which",
        ),
        ("eval generate toy --out run", "an evaluation with rows of peers needs tomesd, which is not installed"),
        ("bench unet --model toy", "elfatt-sd bench needs matplotlib, tomesd, which are not installed"),
        ("bench layer", "elfatt-sd bench needs matplotlib"),
    ],
)
def test_a_command_says_what_it_needs_in_one_line(words: str, says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, words.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {says}")
    assert result.stderr.endswith(f": {EVAL}\n")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("words", ["eval run toy --out run", "bench unet --model toy"])
def test_a_process_of_its_own_says_so_and_leaves_nothing(words: str, tmp_path: Path) -> None:
    code = EARLY.format(hidden=[package.module for package in PACKAGES.values()], words=words.split())
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("absent", "library_chatter")
def test_a_dry_run_names_what_is_not_installed(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["eval", "run", "toy", "--dry-run", "--out", str(tmp_path / "run")])
    assert EVAL in result.stderr


@pytest.mark.usefixtures("absent")
def test_an_extractor_and_a_source_say_what_they_need(tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=r"extractor='inception' needs .*elfatt-sd\[inception,eval\]'$"):
        load_extractor("inception")
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"a \.parquet reference needs pyarrow.*pip install 'elfatt-sd\[parquet\]'$"):
        open_source(tmp_path / "a.parquet")


def test_an_import_that_was_not_foreseen_names_its_extra(monkeypatch: Any) -> None:
    def fails() -> None:
        raise ModuleNotFoundError("No module named 'torchmetrics.image'", name="torchmetrics.image")

    monkeypatch.setattr("elfatt_sd.drawing.doctor.examine", fails)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert (result.exit_code, result.stderr) == (2, f"error: torchmetrics.image is not installed: {EVAL}\n")


def test_what_is_there_is_not_asked_for() -> None:
    need("a test", "tomesd", "torchmetrics")
    assert install_line("peft") == "pip install peft"
    assert install_line("tomesd", "matplotlib", "pyarrow") == "pip install 'elfatt-sd[eval,parquet]'"
    assert install_line("tomesd", "peft") == f"{EVAL} peft"
