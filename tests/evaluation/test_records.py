"""Files of a run that were damaged: what is wrong is said in one line, and what can be rebuilt is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elfatt_sd.attention import softmax as attention
from elfatt_sd.devices import describe_machine
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import stages
from elfatt_sd.evaluation.generate import generate
from elfatt_sd.evaluation.measure import attention_kernels
from elfatt_sd.evaluation.prompts import read_labels
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.records import MadeImage, same_images
from elfatt_sd.evaluation.report import load_results, write_report
from elfatt_sd.evaluation.results import join_results, write_results
from elfatt_sd.evaluation.run import Row, RowFolder, Run, RunFailure
from elfatt_sd.files import is_plain_name

MARKS = "a\u2028b\u2029c\x85d\x0ce"  # each ends a line for `str.splitlines`


def quiet(line: str) -> None:
    """Say nothing."""


def test_marks_that_end_lines_elsewhere_stay_in_prompts(tmp_path: Path, protocol: Protocol) -> None:
    for name, head in (("labels.txt", ""), ("labels.csv", "name\n")):
        (tmp_path / name).write_text(f"{head}{MARKS}\ndog\n", encoding="utf-8")
        assert [label.name for label in read_labels(tmp_path / name)] == [MARKS, "dog"]
    row = Row(tmp_path / "row", protocol.baseline, 0)
    made = [MadeImage(index, "images/0.png", MARKS, 0, index, "0" * 64) for index in range(2)]
    row.add_batch(0, made)
    row.finish(row.batch_file(0).read_bytes())
    assert row.made_images() == made


@pytest.mark.parametrize("content", ["[]", "{", '{"format": 4, "identity": 3}', '{"format": NaN}'])
@pytest.mark.parametrize("name", ["scores.json", "stages.json"])
def test_what_can_be_rebuilt_is(copy: Path, full_protocol: Protocol, name: str, content: str) -> None:
    before = (copy / "scores.json").read_bytes()
    (copy / name).write_text(content)
    stages.score(Run(copy, full_protocol), quiet)
    assert (copy / "scores.json").read_bytes() == before
    assert json.loads((copy / "stages.json").read_text())["score"]


@pytest.mark.parametrize("damage", ["empty", "half", "shape", "short", "nan", "infinite"])
def test_damaged_features_are_made_anew(copy: Path, full_protocol: Protocol, damage: str) -> None:
    before = (copy / "scores.json").read_bytes()
    whole = {path: path.read_bytes() for path in (copy / "scores").glob("*.npy")}
    for path, kept in whole.items():
        features = np.load(path)
        if damage in ("empty", "half"):
            path.write_bytes(kept[: len(kept) // 2] if damage == "half" else b"")
        else:
            wrong = {"shape": np.zeros((2, 3)), "short": features[:3], "nan": features * np.nan}
            np.save(path, wrong.get(damage, np.full_like(features, np.inf)))
    (copy / "scores.json").unlink()
    stages.score(Run(copy, full_protocol), quiet)
    assert (copy / "scores.json").read_bytes() == before
    assert {path: path.read_bytes() for path in whole} == whole


def test_batches_with_damaged_lists_are_made_anew(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(made[0], tmp_path / "run")), made[1])
    whole = [row.manifest.read_bytes() for row in run.rows]
    damages = (b"", b"{}\n", b"\xff\n", b"other")
    for row, content, damage in zip(run.rows, whole, damages, strict=True):
        lines = content.splitlines(keepends=True)
        row.manifest.unlink()
        row.batches_folder.mkdir()
        row.batch_file(0).write_bytes(b"".join(lines[:2]))
        row.batch_file(1).write_bytes(lines[0] if damage == b"other" else damage)
        assert row.has_batch(0, run.batches[0]) and not row.has_batch(1, run.batches[1])
    generate(run, show_progress=False)
    assert [row.manifest.read_bytes() for row in run.rows] == whole


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("sha256", "x", ("line 2", "sha256='x'")),
        ("index", -1, ("line 2", "index=-1", "at least 0")),
        ("prompt", None, ("line 2", "prompt=None", "text")),
        ("index", 3, ("index=3 of image 2", "accepted: 1")),
        ("prompt", "\ud800", ("line 2 is damaged",)),
        ("seed", float("nan"), ("line 2 is damaged",)),
    ],
)
def test_a_damaged_manifest_is_told_by_line_and_field(copy: Path, field: str, value: Any, parts: tuple[str]) -> None:
    row = Run.open(copy).baseline
    lines = [json.loads(line) for line in row.manifest.read_text().split("\n") if line]
    lines[1][field] = value
    row.manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ElfattError) as error:
        row.made_images()
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in (str(row.manifest), *parts))


def test_a_list_that_is_cut_short_is_not_scored(copy: Path, full_protocol: Protocol) -> None:
    for row in Run.open(copy).rows:
        row.manifest.write_text("\n".join(row.manifest.read_text().split("\n")[:3]) + "\n")
    with pytest.raises(ElfattError, match=r"manifest\.jsonl lists 3 images; accepted: 5; delete the file"):
        stages.score(Run(copy, full_protocol), quiet)


def opened(run: Path) -> object:
    return Run.open(run)


def joined(run: Path) -> object:
    return join_results(Run.open(run))


def named(run: Path) -> object:
    return load_results(run).folder_name


LOST = r"run\.json: .*; put the file back from a copy"


@pytest.mark.parametrize(
    ("name", "changed", "read", "message"),
    [
        ("run.json", {"format": 2}, opened, LOST),
        ("run.json", {"protocol": {}}, opened, LOST),
        ("run.json", {"environment": 3}, opened, LOST),
        ("run.json", {"environment": {"cuda": 3}}, opened, LOST),
        ("run.json", None, opened, r"is damaged \(it holds nothing, null\)"),
        ("results.json", None, load_results, r"is damaged \(it holds nothing, null\)"),
        *(("results.json", {"name": name}, named, "which cannot be that of a folder") for name in ("../../x", "nul")),
        ("scores.json", {"format": 99}, joined, "format=99 is not accepted"),
        ("time.json", {"format": 99}, joined, "format=99 is not accepted"),
        ("memory.json", {"format": 99}, joined, "format=99 is not accepted"),
        ("cost.json", {"rows": 3}, joined, "rows=3 is not accepted"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_file_that_is_damaged_or_of_another_version_is_told(
    copy: Path, name: str, changed: dict[str, Any] | None, read: Callable[[Path], object], message: str
) -> None:
    data = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(changed and data | changed))
    with pytest.raises(ElfattError, match=message) as error:
        read(copy)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: os.symlink(path, path)], ids=["folder", "pipe", "loop"]
)
def test_what_is_no_plain_file_is_told(copy: Path, make: Callable[[Path], None]) -> None:
    for name in ("results.json", "cells/sd/manifest.jsonl", "run.json"):
        (copy / name).unlink()
        make(copy / name)
    for read in (load_results, Run.open):
        with pytest.raises(ElfattError, match=r"cannot be read: (it is not a plain file|Too many levels)"):
            read(copy)
    with pytest.raises(ElfattError, match=r"manifest\.jsonl (cannot be read|does not exist)"):
        RowFolder(copy / "cells" / "sd").made_images()


def test_an_image_that_cannot_be_read_is_not_remembered(copy: Path, full_protocol: Protocol) -> None:
    before, image = (copy / "scores.json").read_bytes(), copy / "cells" / "sd" / "images" / "00001.png"
    kept = image.read_bytes()
    shutil.rmtree(copy / "scores")
    (copy / "scores.json").unlink()
    image.unlink()
    os.mkfifo(image)  # which would wait for ever
    with pytest.raises(ElfattError, match=r"00001\.png \(it is not a plain file\) cannot be read; put it back"):
        stages.score(Run(copy, full_protocol), quiet)
    image.unlink()
    image.write_bytes(kept)
    stages.score(Run(copy, full_protocol), quiet)
    assert (copy / "scores.json").read_bytes() == before


def test_what_stands_in_the_way_of_writing_is_one_line_and_links_lead_nowhere(copy: Path) -> None:
    run, outside = Run.open(copy), copy.parent / "outside"
    (copy / "results.json").unlink()
    (copy / "results.json").mkdir()
    with pytest.raises(RunFailure, match=r"results\.json: Is a directory; finished work is kept"), run.writing():
        write_results(run)
    (copy / "results.json").rmdir()
    write_results(run)
    outside.mkdir()
    (outside / "mine.png").write_bytes(b"mine")
    shutil.rmtree(copy / "report")
    (copy / "report").symlink_to(outside)
    (copy / ".locked-by").symlink_to(outside / "mine.png")
    with run.writing(), pytest.raises(ElfattError, match="report is a link"):
        write_report(load_results(copy))
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"mine.png": b"mine"}


def test_plain_names() -> None:
    for name in ("elfatt-ratio0.5", "é", "a=b+c", "console"):
        assert is_plain_name(name), name
    for name in ("a.", ".a", "", "a b", "a:b", "a/b", "a\\b", "a\n", "CON", "aux.txt", "Lpt1", "x" * 200, "..", "/etc"):
        assert not is_plain_name(name), name


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
        ({"packages": {"tomesd": "2"}}, {"peer"}),
        ({"packages": {"flash-attn": "3"}}, {"tome"}),
        ({"packages": {"xformers": "1"}}, {"xf"}),
        ({"packages": {"numpy": "3"}}, set()),
        ({"method_sha256": "11"}, {"tome", "xf", "native"}),
        ({"model_sha256": "11"}, EVERY),
        ({"code_sha256": "11"}, EVERY),
        ({"cpu_threads": 1}, EVERY),  # a thread more changes pixels on the CPU: measured on the toy
        ({"commit": "def", "elfatt_sd": "0.2"}, set()),
    ],
)
def test_rows_differ_by_what_they_use(changes: dict[str, Any], rows: set[str]) -> None:
    cells = (SD, TOME, XFORMERS, NATIVE, PEER)
    assert {cell.name for cell in cells if same_images(described(), described(**changes), [cell])} == rows
    assert bool(same_images(described(), described(**changes), cells)) == bool(rows)


def test_a_gpus_numbers_do_not_hang_on_threads_but_on_its_settings() -> None:
    cuda = {"runtime": "13", "cudnn": 9, "tf32": False, "driver": "580"}
    before = described(cuda=cuda)
    assert same_images(before, described(cuda={**cuda, "driver": "590"}, cpu_threads=64), [TOME]) == []
    assert same_images(before, described(cuda={**cuda, "tf32": True}), [TOME]) == ["tf32: False there, True here"]
    here = describe_machine(torch.device("cpu"))
    assert same_images(here, here, [SD, TOME, PEER]) == [] and here["packages"]["torch"]


KERNELS = [(SD, True, "native"), (PEER, True, "native"), (TOME, True, "flash-attn"), (TOME, False, "native")]
KERNELS += [(FLOAT, True, "native"), (SPREAD, True, "native"), (FLASH, False, "flash-attn")]
KERNELS += [(NATIVE, True, "native"), (XFORMERS, True, "xformers")]


@pytest.mark.parametrize(("cell", "taken", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", None))
def test_the_kernels_of_a_row(pipe: Any, monkeypatch: pytest.MonkeyPatch, cell: Cell, taken: bool, kernel: str) -> None:
    """`auto` is resolved for the heads, the dtype and the device of the layers that are patched."""
    first = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    asked = []

    def takes(query: torch.Tensor) -> bool:
        asked.append((query.shape[-1], query.device))
        return taken and query.dtype == torch.bfloat16

    monkeypatch.setattr(attention, "flash_takes", takes)
    pipe.unet.to(torch.bfloat16)
    try:
        assert attention_kernels(pipe, cell) == [kernel]
    finally:
        pipe.unet.to(torch.float32)
    assert set(asked) <= {(first.to_q.out_features // first.heads, pipe.device)}
    assert bool(asked) == (cell in (TOME, FLOAT))
