"""What decides images beside the protocol, and what is read of the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elfatt_sd import attention
from elfatt_sd.evaluation import environment
from elfatt_sd.evaluation.environment import (
    attention_kernels,
    commit_of,
    describe_environment,
    read_high_water_mark,
    same_images,
    sha256_of_code,
)
from elfatt_sd.evaluation.protocols import Cell

SD = Cell("sd", "SD", "sd", role="baseline")
TOME = Cell("tome", "ToMe", "tome")
XFORMERS = Cell("xf", "ToMe", "tome", settings={"attention_backend": "xformers"})
NATIVE = Cell("native", "ToMe", "tome", settings={"attention_backend": "native"})
FLASH = Cell("flash", "ToMe", "tome", settings={"attention_backend": "flash"})
FLOAT = Cell("float", "ELFATT", "elfatt", settings={"fp32_logits": True})
SPREAD = Cell(
    "spread", "cells", "custom", phases=({"until": 1.0, "attention": "cell_spread", "block_order": "spread"},)
)
PEER = Cell("peer", "tomesd", "tome", peer="tomesd")
EVERY = {"sd", "tome", "xf", "native", "peer"}


def described(**changes: Any) -> dict[str, Any]:
    packages = {"torch": "2", "diffusers": "0", "transformers": "5", "tomesd": "1", "numpy": "2", "flash-attn": "2"}
    hashes = {f"{name}_sha256": "00" for name in ("model", "prompts", "code", "method")}
    found = {"elfatt_sd": "0.1", "commit": "abc", "device": "2 cores", "cpu_threads": 2, "cuda": None, **hashes}
    return {**found, **changes, "packages": {**packages, **changes.get("packages", {})}}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"packages": {"torch": "3"}}, EVERY),
        ({"packages": {"transformers": "6"}}, EVERY),
        ({"packages": {"tomesd": "2"}}, {"peer"}),
        ({"packages": {"flash-attn": "3"}}, {"tome"}),
        ({"packages": {"xformers": "1"}}, {"xf"}),
        ({"packages": {"numpy": "3"}}, set()),
        ({"method_sha256": "11"}, {"tome", "xf", "native"}),
        ({"model_sha256": "11"}, EVERY),
        ({"code_sha256": "11"}, EVERY),
        ({"cpu_threads": 1}, EVERY),
        ({"commit": "def", "elfatt_sd": "0.2"}, set()),
    ],
)
def test_rows_differ_by_what_they_use(changes: dict[str, Any], rows: set[str]) -> None:
    """A thread more changes pixels on the CPU: measured on the toy."""
    cells = (SD, TOME, XFORMERS, NATIVE, PEER)
    assert {cell.name for cell in cells if same_images(described(), described(**changes), [cell])} == rows
    assert bool(same_images(described(), described(**changes), cells)) == bool(rows)


def test_a_gpus_numbers_do_not_hang_on_threads_but_on_its_settings() -> None:
    cuda = {"runtime": "13", "cudnn": 9, "tf32": False, "driver": "580"}
    before = described(cuda=cuda)
    assert same_images(before, described(cuda={**cuda, "driver": "590"}, cpu_threads=64), [TOME]) == []
    assert same_images(before, described(cuda={**cuda, "tf32": True}), [TOME]) == ["tf32: False there, True here"]


def test_this_machine_is_itself() -> None:
    here = describe_environment(torch.device("cpu"))
    assert same_images(here, here, [SD, TOME, PEER]) == []
    assert here["packages"]["torch"]


@pytest.mark.parametrize(
    ("cell", "taken", "kernels"),
    [
        (SD, True, ["native"]),
        (PEER, True, ["native"]),
        (TOME, True, ["flash-attn"]),
        (TOME, False, ["native"]),
        (FLOAT, True, ["native"]),
        (SPREAD, True, ["native"]),
        (FLASH, False, ["flash-attn"]),
        (NATIVE, True, ["native"]),
        (XFORMERS, True, ["xformers"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_kernels_of_a_row(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, cell: Cell, taken: bool, kernels: list[str]
) -> None:
    """`auto` is resolved for the heads, the dtype and the device of the layers that are patched."""
    first = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    asked = []

    def takes(query: torch.Tensor) -> bool:
        asked.append((query.shape[-1], query.device))
        return taken and query.dtype == torch.bfloat16

    monkeypatch.setattr(attention, "flash_takes", takes)
    pipe.unet.to(torch.bfloat16)
    try:
        assert attention_kernels(pipe, cell) == kernels
    finally:
        pipe.unet.to(torch.float32)
    assert set(asked) <= {(first.to_q.out_features // first.heads, pipe.device)}
    assert bool(asked) == (cell in (TOME, FLOAT))


def test_the_commit_is_that_of_tracked_files(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *options, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    package, installed = tmp_path / "package", tmp_path / "site-packages" / "package"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("one = 1\n")
    assert commit_of(package) is None
    git("init", "--quiet")
    git("add", "package")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    assert commit_of(package) == commit  # although the repository has other changes
    assert commit_of(installed) is None  # although it lies in the repository
    (package / "__init__.py").write_text("one = 2\n")
    assert commit_of(package) == f"{commit}+changes"


CODE = '''
"""A module."""
def double(x):
    """Twice x."""
    return 2 * x  # exactly
'''


def test_the_hash_of_code_is_of_what_it_does() -> None:
    found = sha256_of_code([CODE])
    assert found == sha256_of_code(["def double(x):\n\n    return (2\n        * x)\n"])
    assert found != sha256_of_code([CODE.replace("2 * x", "3 * x")])
    assert found != sha256_of_code([CODE, CODE])


def test_clocks_are_those_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own number: `CUDA_VISIBLE_DEVICES` gives another card the index 0."""
    asked: list[tuple[str, ...]] = []

    def answer(*command: str) -> str:
        asked.append(command)
        return "1980, 2619, 1980, 31, 75.5"

    properties = SimpleNamespace(uuid="0f2c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(environment, "_first_line", answer)
    assert environment.read_clocks(torch.device("cuda", 0))["clocks.sm"] == "1980"
    assert "--id=GPU-0f2c" in asked[0]


def test_the_high_water_mark_counts_what_was_held() -> None:
    before = read_high_water_mark()
    if before is None:
        pytest.skip("this system does not tell")
    size = before + 2**26
    block = bytearray(size)
    block[::4096] = b"1" * len(range(0, size, 4096))
    after = read_high_water_mark()
    assert after is not None
    assert after > size
