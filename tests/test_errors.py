"""What is missing or broken is told with its remedy: by the core without its extras, by each command, by the doctor."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.commands import ROOT, call

from elfatt_sd import errors
from elfatt_sd.drawing import doctor
from elfatt_sd.errors import PACKAGES, ElfattError, OptionalPackage, install_line, is_out_of_memory
from elfatt_sd.evaluation.extraction import open_source
from elfatt_sd.evaluation.features import load_extractor

pytestmark = pytest.mark.usefixtures("library_chatter")
EVAL = "pip install '.[eval]'"
COMMANDS = """
import sys
sys.modules |= dict.fromkeys({hidden})  # None there is a package that is not installed
from elfatt_sd.cli import app
for code, words in (
    (2, "eval run toy --out run"),
    (2, "bench unet --model toy --out run"),
    (0, "generate a --model tiny --steps 2 --method tome --compare"),
    (0, "patch tiny --save saved.json"),
    (0, "eval run --help"),
    (0, "doctor"),
):
    try:
        app(words.split())
    except SystemExit as done:
        assert (done.code or 0) == code, words
"""


def test_the_core_does_without_the_extras(folder: Path, tmp_path: Path) -> None:
    tiny.sd15(folder).save_pretrained(tmp_path / "tiny")
    code = COMMANDS.format(hidden=[package.module for package in PACKAGES.values()])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for scores of evaluations" in done.stdout and EVAL in done.stdout, "the doctor"
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "saved.json", "outputs"}


def test_what_needs_a_package_says_so_in_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(OptionalPackage, "missing", True)
    monkeypatch.chdir(tmp_path)
    for words, says in (
        ("eval run toy --out run", "an evaluation needs torchmetrics, matplotlib, jinja2, markupsafe, tomesd"),
        ("eval generate toy --out run", "an evaluation with rows of peers needs tomesd"),
        ("bench layer", "elfatt-sd bench needs matplotlib, tomesd"),
    ):
        result = call(*words.split())
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"error: {says} (not installed): {EVAL}\n"
    with pytest.raises(ElfattError, match=r"extractor='inception' needs .*\.\[inception,eval\]'$"):
        load_extractor("inception")
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"a \.parquet reference needs pyarrow.*pip install '\.\[parquet\]'$"):
        open_source(tmp_path / "a.parquet")
    assert EVAL in call("eval", "run", "toy", "--dry-run", "--out", tmp_path / "run").stderr
    assert install_line("tomesd", "peft") == f"{EVAL} peft"


def test_an_import_that_was_not_foreseen_names_its_extra(monkeypatch: Any) -> None:
    def fails() -> None:
        raise ModuleNotFoundError("No module named 'torchmetrics.image'", name="torchmetrics.image")

    monkeypatch.setattr(doctor, "examine", fails)
    result = call("doctor")
    assert (result.exit_code, result.stderr) == (2, f"error: torchmetrics.image is not installed: {EVAL}\n")


def test_memory_that_ran_out() -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ):
        assert is_out_of_memory(error), error
    for other in (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), ValueError("out of memory")):
        assert not is_out_of_memory(other)


def test_the_doctor_finds_what_is_missing_broken_or_wrong(monkeypatch: Any) -> None:
    """Each with its install line; what raises is a finding, so that the rest is still shown."""
    healthy = call("doctor", "--json")
    assert (healthy.exit_code, healthy.stderr) == (0, "")
    data = json.loads(healthy.stdout)
    assert data.pop("healthy") is True
    assert list(data) == ["machine", "needed packages", "optional packages"]
    assert {"torch", "diffusers", "transformers"} <= {finding["name"] for finding in data["needed packages"]}
    lines = ["torch>=9999", "no-such-package", "diffusers>=0.32.1", "nope>=1; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    absent = {"nothing": OptionalPackage("no_such", "it", "eval"), "alone": OptionalPackage("no_such", "it")}
    for place in (errors, doctor):
        monkeypatch.setattr(place, "PACKAGES", absent)
    found, healthy_now = doctor.examine()
    assert [(each.name, each.status, each.remedy) for each in found["needed packages"]] == [
        ("torch", "missing", "pip install 'torch>=9999'"),
        ("no-such-package", "missing", "pip install 'no-such-package'"),
        ("diffusers", "ok", ""),
    ]
    remedies = [(each.status, each.remedy) for each in found["optional packages"]]
    assert remedies == [("optional", EVAL), ("optional", "pip install alone")]
    assert not healthy_now

    def broken() -> None:
        raise RuntimeError("the driver is gone\nand more")

    monkeypatch.setattr("elfatt_sd.devices.accelerators", broken)
    last = doctor.examine()[0]["machine"][-1]
    assert (last.value, last.status) == ("RuntimeError: the driver is gone", "missing")
    result = call("doctor")
    assert result.exit_code == 1 and "pip install 'no-such-package'" in result.stdout
