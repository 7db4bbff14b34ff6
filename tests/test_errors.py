"""The core works without the packages of the extras, and what needs one says how to install it before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.commands import ROOT, call

from elfatt_sd.errors import PACKAGES, ElfattError, OptionalPackage, install_line, is_out_of_memory, need
from elfatt_sd.evaluation.extraction import open_source
from elfatt_sd.evaluation.features import load_extractor

EVAL = "pip install 'elfatt-sd[eval]'"
COMMANDS = """
import sys
sys.modules |= dict.fromkeys({hidden})  # None there is a package that is not installed
from elfatt_sd.cli import app
for code, words in (
    (2, "eval run toy --out run"),
    (2, "bench unet --model toy --out run"),
    (0, "generate a --model tiny --steps 2 --compare"),
    (0, "patch tiny --save saved.json"),
    (0, "generate a --model tiny --steps 2 --config saved.json"),
    (0, "eval run --help"),
    (0, "bench unet --help"),
    (0, "doctor"),
):
    try:
        app(words.split())
    except SystemExit as done:
        assert (done.code or 0) == code, words
"""


@pytest.fixture
def absent(monkeypatch: Any) -> None:
    """Nothing optional is installed."""
    monkeypatch.setattr(OptionalPackage, "missing", True)


def test_the_core_does_without_the_extras(folder: Path, tmp_path: Path) -> None:
    tiny.sd15(folder).save_pretrained(tmp_path / "tiny")
    code = COMMANDS.format(hidden=[package.module for package in PACKAGES.values()])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for scores of evaluations" in done.stdout  # the doctor
    assert EVAL in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "saved.json", "outputs"}


@pytest.mark.usefixtures("absent", "library_chatter")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("eval run toy --out run", "an evaluation needs torchmetrics, matplotlib, jinja2, markupsafe, tomesd"),
        ("eval generate toy --out run", "an evaluation with rows of peers needs tomesd"),
        ("bench unet --model toy", "elfatt-sd bench needs matplotlib, tomesd"),
        ("bench layer", "elfatt-sd bench needs matplotlib, tomesd"),
    ],
)
def test_a_command_says_what_it_needs_in_one_line(words: str, says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {says} (not installed): {EVAL}\n"


@pytest.mark.usefixtures("absent", "library_chatter")
def test_an_extractor_a_source_and_a_dry_run_say_what_they_need(tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=r"extractor='inception' needs .*elfatt-sd\[inception,eval\]'$"):
        load_extractor("inception")
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"a \.parquet reference needs pyarrow.*pip install 'elfatt-sd\[parquet\]'$"):
        open_source(tmp_path / "a.parquet")
    assert EVAL in call("eval", "run", "toy", "--dry-run", "--out", tmp_path / "run").stderr


def test_an_import_that_was_not_foreseen_names_its_extra(monkeypatch: Any) -> None:
    def fails() -> None:
        raise ModuleNotFoundError("No module named 'torchmetrics.image'", name="torchmetrics.image")

    monkeypatch.setattr("elfatt_sd.drawing.doctor.examine", fails)
    result = call("doctor")
    assert (result.exit_code, result.stderr) == (2, f"error: torchmetrics.image is not installed: {EVAL}\n")

    need("a test", "tomesd", "torchmetrics")  # which are there
    assert install_line("tomesd", "matplotlib", "pyarrow") == "pip install 'elfatt-sd[eval,parquet]'"
    assert install_line("tomesd", "peft") == f"{EVAL} peft"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_memory_that_ran_out(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
