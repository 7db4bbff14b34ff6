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


def test_marks_that_end_lines_elsewhere_stay_in_prompts(tmp_path: Path, protocol: Protocol) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text(f"{MARKS}\ndog\n", encoding="utf-8")
    assert [label.name for label in read_labels(labels)] == [MARKS, "dog"]
    (tmp_path / "labels.csv").write_text(f"name\n{MARKS}\ndog\n", encoding="utf-8")
    assert [label.name for label in read_labels(tmp_path / "labels.csv")] == [MARKS, "dog"]
    row = Row(tmp_path / "row", protocol.baseline, 0)
    made = [MadeImage(index, "images/0.png", MARKS, 0, index, "0" * 64) for index in range(2)]
    row.add_batch(0, made)
    row.finish(row.batch_file(0).read_bytes())
    assert row.made_images() == made


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"format": 4, "identity": 3}', '{"format": NaN}', '"\\ud800"'])
@pytest.mark.parametrize("name", ["scores.json", "stages.json"])
def test_what_can_be_rebuilt_is(copy: Path, full_protocol: Protocol, name: str, content: str) -> None:
    before = (copy / "scores.json").read_bytes()
    (copy / name).write_text(content)
    stages.score(Run(copy, full_protocol), lambda line: None)
    assert (copy / "scores.json").read_bytes() == before
    assert json.loads((copy / "stages.json").read_text())["score"]


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
    for part in (str(row.manifest), *parts):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: os.symlink(path, path)], ids=["folder", "pipe", "loop"]
)
def test_what_is_no_plain_file_is_told(copy: Path, make: Callable[[Path], None]) -> None:
    for name in ("results.json", "cells/sd/manifest.jsonl", "run.json"):
        (copy / name).unlink()
        make(copy / name)
    for read in (lambda: load_results(copy), lambda: Run.open(copy)):
        with pytest.raises(ElfattError, match=r"cannot be read: (it is not a plain file|Too many levels)"):
            read()
    with pytest.raises(ElfattError, match=r"manifest\.jsonl (cannot be read|does not exist)"):
        RowFolder(copy / "cells" / "sd").made_images()


def test_a_list_that_is_cut_short_is_not_scored(copy: Path, full_protocol: Protocol) -> None:
    for row in Run.open(copy).rows:
        row.manifest.write_text("\n".join(row.manifest.read_text().split("\n")[:3]) + "\n")
    with pytest.raises(ElfattError, match=r"manifest\.jsonl lists 3 images; accepted: 5; delete the file"):
        stages.score(Run(copy, full_protocol), lambda line: None)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"half", b"other"])
def test_damaged_features_are_made_anew(copy: Path, full_protocol: Protocol, content: bytes) -> None:
    before = (copy / "scores.json").read_bytes()
    whole = {path: path.read_bytes() for path in (copy / "scores").glob("*.npy")}
    for path, kept in whole.items():
        path.write_bytes(kept[: len(kept) // 2] if content == b"half" else content)
        if content == b"other":
            np.save(path, np.zeros((2, 3)))
    (copy / "scores.json").unlink()
    stages.score(Run(copy, full_protocol), lambda line: None)
    assert (copy / "scores.json").read_bytes() == before
    assert {path: path.read_bytes() for path in whole} == whole


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\n", b"other"])
def test_a_batch_with_a_damaged_list_is_made_anew(tmp_path: Path, protocol: Protocol, content: bytes) -> None:
    run = Run(tmp_path / "run", protocol)
    generate(run, show_progress=False)
    row, (first, second, *_) = run.baseline, run.batches
    lines = row.manifest.read_bytes().splitlines(keepends=True)
    row.manifest.unlink()
    row.batches_folder.mkdir()
    row.batch_file(0).write_bytes(b"".join(lines[:2]))
    row.batch_file(1).write_bytes(lines[0] if content == b"other" else content)
    assert row.has_batch(0, first) and not row.has_batch(1, second)
    generate(run, show_progress=False)
    assert row.manifest.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("changed", [{"format": 2}, {"environment": 3}, {"protocol": {}}, {"environment": {"cuda": 3}}])
def test_a_damaged_run_file_is_told_and_not_to_be_deleted(copy: Path, changed: dict[str, Any]) -> None:
    data = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(data | changed))
    with pytest.raises(ElfattError, match=r"run\.json: .*; put the file back from a copy") as error:
        Run.open(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../../x", "/etc", "a/b", "..", "a:b", "nul"])
def test_results_lead_nowhere_else(copy: Path, name: str) -> None:
    data = json.loads((copy / "results.json").read_text())
    (copy / "results.json").write_text(json.dumps(data | {"name": name}))
    with pytest.raises(ElfattError, match=r"results\.json has the name .*, which cannot be that of a folder"):
        _ = load_results(copy).folder_name


@pytest.mark.parametrize(
    ("name", "plain"),
    [("elfatt-ratio0.5", True), ("é", True), ("a=b+c", True), ("console", True), ("a.", False), (".a", False)]
    + [(name, False) for name in ("", "a b", "a:b", "a/b", "a\\b", "a\n", "CON", "aux.txt", "Lpt1", "x" * 200)],
)
def test_plain_names(name: str, plain: bool) -> None:
    assert is_plain_name(name) == plain


@pytest.mark.parametrize("name", ["run.json", "results.json"])
def test_nothing_in_a_file_is_not_no_file(copy: Path, name: str) -> None:
    (copy / name).write_text("null")
    with pytest.raises(ElfattError, match=rf"{name} is damaged \(it holds nothing, null\)"):
        Run.open(copy) if name == "run.json" else load_results(copy)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, {"format": 99}) for name in ("scores.json", "time.json", "memory.json")] + [("cost.json", {"rows": 3})],
)
def test_files_of_other_versions_are_told(copy: Path, name: str, wrong: dict[str, Any]) -> None:
    data = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(data | wrong))
    with pytest.raises(ElfattError, match=rf"{name}: (format=99|rows=3) is not accepted"):
        join_results(Run(copy, Run.open(copy).protocol))


@pytest.mark.parametrize("kind", ["short", "nan", "infinite"])
def test_features_that_no_network_gives_are_made_again(copy: Path, full_protocol: Protocol, kind: str) -> None:
    before = (copy / "scores.json").read_bytes()
    path = next((copy / "scores").glob("sd-clip-*.npy"))
    whole = np.load(path)
    spoilt = whole[:3] if kind == "short" else np.full_like(whole, np.nan if kind == "nan" else np.inf)
    np.save(path, spoilt)
    (copy / "scores.json").unlink()
    stages.score(Run(copy, full_protocol), lambda line: None)
    assert (copy / "scores.json").read_bytes() == before
    assert np.array_equal(np.load(path), whole)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_an_image_that_cannot_be_read_is_not_remembered(
    copy: Path, full_protocol: Protocol, make: Callable[[Path], None]
) -> None:
    before, image = (copy / "scores.json").read_bytes(), copy / "cells" / "sd" / "images" / "00001.png"
    kept = image.read_bytes()
    shutil.rmtree(copy / "scores")
    (copy / "scores.json").unlink()
    image.unlink()
    make(image)
    with pytest.raises(ElfattError, match=r"00001\.png \(it is not a plain file\) cannot be read; put it back"):
        stages.score(Run(copy, full_protocol), lambda line: None)
    os.rmdir(image) if image.is_dir() else image.unlink()
    image.write_bytes(kept)
    stages.score(Run(copy, full_protocol), lambda line: None)
    assert (copy / "scores.json").read_bytes() == before


def test_a_folder_in_place_of_a_file_is_one_line(copy: Path) -> None:
    run = Run.open(copy)
    (copy / "results.json").unlink()
    (copy / "results.json").mkdir()
    with pytest.raises(RunFailure, match=r"results\.json: Is a directory; finished work is kept"), run.writing():
        write_results(run)


def test_links_lead_no_writing_elsewhere(copy: Path) -> None:
    outside = copy.parent / "outside"
    outside.mkdir()
    (outside / "mine.png").write_bytes(b"mine")
    shutil.rmtree(copy / "report")
    (copy / "report").symlink_to(outside)
    (copy / ".locked-by").symlink_to(outside / "mine.png")
    with Run.open(copy).writing(), pytest.raises(ElfattError, match="report is a link"):
        write_report(load_results(copy))
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"mine.png": b"mine"}


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
    here = describe_machine(torch.device("cpu"))
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
