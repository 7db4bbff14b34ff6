"""Every bad input is one line, told before anything heavy, and leaves nothing behind; helps are quick and true."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import tiny_pipelines as tiny
from support.commands import PROMPT, ROOT, call, draw, files
from syrupy.assertion import SnapshotAssertion

import elfatt_sd
from elfatt_sd import config, loading, peers, phases
from elfatt_sd.attention import ordering
from elfatt_sd.benchmarking import variants as benchmarking
from elfatt_sd.cli import options
from elfatt_sd.families import shapes
from elfatt_sd.tuning import proof

pytestmark = pytest.mark.usefixtures("library_chatter")
SAID = Path(__file__).with_name("__snapshots__") / "test_errors.ambr"
RUN = """
import json, shlex, sys
from support.commands import call
for line in sys.stdin.read().splitlines():
    result = call(*shlex.split(line))
    heavy = sorted({'torch', 'diffusers', 'transformers', 'matplotlib'} & set(sys.modules))
    print(json.dumps([result.exit_code, result.stdout, result.stderr, heavy]))
"""


def commands(test: str) -> list[str]:
    """The commands of a snapshot, whose lines say what each is told; a new one is a line `COMMAND -> ` there."""
    told = SAID.read_text(encoding="utf-8").split(f"# name: {test}\n  '''\n")[1].split("\n  '''\n")[0]
    return [line.strip().partition(" ->")[0] for line in told.splitlines()]


def early(lines: Sequence[str], cwd: Path) -> list[list[Any]]:
    """Exit code, output, errors and heavy modules of each command, in one process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    pipes: dict[str, Any] = {"input": "\n".join(lines), "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", RUN], **pipes, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def told(line: str, said: str) -> str:
    """A command and its one line."""
    assert said.startswith("error: ") and said.count("\n") == 1, (line, said)
    return f"{line} -> {said.replace(str(ROOT), 'ROOT').strip()}"


def test_wrong_use_is_one_line(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "file").write_text("in the way")
    lines = commands("test_wrong_use_is_one_line")
    found = early(lines, tmp_path)
    assert {(code, out) for code, out, *_ in found} == {(2, "")}
    assert files(tmp_path) == ["file"]
    assert "\n".join(told(line, said) for line, (_, _, said, _) in zip(lines, found, strict=True)) == snapshot


def test_help_version_and_wrong_options_import_nothing_heavy(tmp_path: Path) -> None:
    groups = ["", "generate", "try", "patch", "tune", "demo", "doctor", "bench", "bench denoiser", "eval", "eval run"]
    wrong = ["generate --fast", "bench unet --nope"]
    found = early([*(f"{name} --help" for name in groups), "--version", *wrong], tmp_path)
    assert [(code, *heavy) for code, *_, heavy in found] == [(0,)] * (len(groups) + 1) + [(2,)] * len(wrong)
    assert found[len(groups)][1] == f"elfatt-sd {elfatt_sd.__version__}\n"


def test_names_in_the_helps_are_those_of_the_package() -> None:
    homes = {config: "METHODS DEFAULT", ordering: "BLOCK_ORDERS", phases: "BACKENDS", loading: "SCHEDULERS"}
    homes |= {proof: "METRICS", shapes: "UNET_NAMES SHAPE_NAMES", peers: "PEERS", benchmarking: "PEER ALONE"}
    for home, listed in homes.items():
        for name in listed.split():
            assert [*getattr(options, name)] == [*getattr(home, name)], name
    assert all(hasattr(diffusers, name) for name in loading.SCHEDULERS.values())


def test_wrong_input_is_one_line_and_leaves_nothing(
    model: Path, lora: Path, tmp_path: Path, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 8}
    transformer = diffusers.DiTTransformer2DModel(in_channels=4, norm_num_groups=4, **size)
    diffusers.DiTPipeline(transformer, tiny.vae(), tiny.ddim()).save_pretrained(tmp_path / "dit")
    shutil.copytree(model, tmp_path / "tiny")
    shutil.copytree(model, tmp_path / "damaged", ignore=lambda folder, names: {"vae"} & {*names})
    for name in ("file", "weights.ckpt", "bad.safetensors"):
        (tmp_path / name).write_text("in the way")
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "colour.json").write_text('{"colour": 1}')
    (tmp_path / "parts.json").write_text('{"parts": [1]}')
    weights = load_file(lora)
    save_file({f"transformer.{name}": each for name, each in weights.items()}, tmp_path / "other.safetensors")
    save_file({name: torch.cat([each] * 2) for name, each in weights.items()}, tmp_path / "large.safetensors")
    save_file({"weight": torch.zeros(1)}, tmp_path / "none.safetensors")
    Image.new("RGB", (32, 32)).save(tmp_path / "photo.png")
    Image.new("RGB", (5, 5)).save(tmp_path / "small.png")
    monkeypatch.chdir(tmp_path)
    before, said = files(tmp_path), []
    for line in commands("test_wrong_input_is_one_line_and_leaves_nothing"):
        result = call(*shlex.split(line))
        assert (result.exit_code, result.stdout) == (2, ""), (line, result.output)
        said.append(told(line, result.stderr))
    assert files(tmp_path) == before
    assert "\n".join(said) == snapshot


ERRORS: dict[str, Exception] = {
    "luck": RuntimeError("out of luck\nsecond line"),
    "MemoryError": MemoryError(),
    "RuntimeError": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes"),
    "OutOfMemoryError": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0"),
    "ElfattFailure": elfatt_sd.errors.ElfattFailure("the hub is away."),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_failures_are_told_in_plain_words(
    model: Path, monkeypatch: Any, error: Exception, snapshot: SnapshotAssertion
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("elfatt_sd.loading.load_pipeline", explode)
    result = call("patch", model)
    assert result.exit_code == 1
    assert told(repr(error), result.stderr) == snapshot
    result = call("patch", model, "--debug")
    assert result.exit_code == 1 and "Traceback" in result.stderr and "in explode" in result.stderr


def test_a_picture_that_cannot_be_written_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    result = call("generate", PROMPT, "--model", model, "--method", "tome", "--steps", 1, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path / '0001-a-red-star.png'}: No space left on device")
    assert files(tmp_path) == []


@pytest.mark.filterwarnings("default::UserWarning")
def test_what_has_no_good_effect_is_warned_of_once(model: Path, tmp_path: Path) -> None:
    words = ["--height", 8, "--width", 8, "--method", "tome", "--agents", 7, "--guidance", 1]
    said = draw(model, tmp_path, *words, "--negative-prompt", "blue", "--steps", 1).stderr
    assert "warning: the model is made for images of 32x32; expect poor ones at 8x8.\n" in said
    assert said.count("warning: method 'tome' has no setting agents.\n") == 1
    assert "warning: negative_prompt has no effect with guidance=1" in said
