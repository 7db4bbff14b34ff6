"""Generation: the same latents for all rows, the same bytes whatever happens on the way, and rows taken over."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import runs
from support.runs import ROOT, make, row_of, run_data

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.generate import take_over
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import RUN_FILE, Row, Run, RunFailure
from elfatt_sd.files import HOLDER_FILE, folder_lock, write_json

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image)


def test_every_row_has_its_images_and_their_hashes(made: tuple[Path, Protocol]) -> None:
    run_dir, protocol = made
    for cell in protocol.cells:
        entries = row_of(run_dir, cell).made_images()
        assert [entry.prompt for entry in entries] == list(runs.LABELS)
        assert [entry.seed for entry in entries] == [3 + cell.seed_offset + index for index in range(5)]
        for entry in entries:
            path = row_of(run_dir, cell).image_file(entry.index)
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
            assert pixels(path).shape == (32, 32, 3)
        left = {path.name for path in row_of(run_dir, cell).folder.iterdir()}
        assert left == {"images", "manifest.jsonl"}


def test_rows_differ_as_their_methods_do(made: tuple[Path, Protocol]) -> None:
    run_dir, protocol = made
    hashes = [{entry.sha256 for entry in row_of(run_dir, cell).made_images()} for cell in protocol.cells]
    for index, first in enumerate(hashes):
        for second in hashes[index + 1 :]:
            assert not first & second


def test_run_file_names_weights_and_versions(made: tuple[Path, Protocol]) -> None:
    run_dir, protocol = made
    run = run_data(run_dir)
    assert run["identity"] == protocol.identity
    assert Run.open(run_dir).protocol == protocol
    assert run["environment"]["packages"]["torch"] == importlib.metadata.version("torch")
    assert len(run["environment"]["model_sha256"]) == 64


def test_images_are_those_of_the_plain_pipeline(made: tuple[Path, Protocol]) -> None:
    """The baseline's images, made without any of the harness."""
    from diffusers import StableDiffusionPipeline

    run_dir, protocol = made
    pipe = StableDiffusionPipeline.from_pretrained(protocol.model)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.cat([torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)])
    images = pipe(["cat", "dog"], num_inference_steps=4, latents=noise, height=32, width=32, output_type="np").images
    for index in range(2):
        ours = pixels(row_of(run_dir, protocol.baseline).image_file(index))
        assert np.array_equal(ours, (images[index] * 255).round().astype(np.uint8))


def test_killed_runs_end_with_the_same_bytes(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    """One process forks a child for each moment; the child is killed (-9) at that rename, before or after it."""
    run_dir, _ = made
    script = f"""
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.protocols import load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.files import folder_lock

protocol = load_protocol({str(run_dir.parent / "small.toml")!r})
pipe = generate.load_protocol_pipeline(protocol)
generate.load_protocol_pipeline = lambda *_: pipe
rename = os.replace

def die_at(moment, before):
    count = 0
    def replace(source, target):
        nonlocal count
        count += 1
        if count == moment and before:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    os.replace = replace

for moment, before in ((1, True), (3, False), (10, True), (30, True)):
    target = Path({str(tmp_path)!r}) / f"killed{{moment}}"
    child = os.fork()
    if not child:
        die_at(moment, before)
        with folder_lock(target):
            generate.generate(Run(target, protocol), show_progress=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    child = os.fork()
    if not child:
        with folder_lock(target):
            generate.generate(Run(target, protocol), show_progress=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""
    subprocess.run([sys.executable, "-c", script], env=ONE_THREAD, check=True, timeout=500)
    uninterrupted = runs.tree(run_dir / "cells")
    for moment in (1, 3, 10, 30):
        assert runs.tree(tmp_path / f"killed{moment}" / "cells") == uninterrupted, moment


def test_two_processes_make_the_same_bytes(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    run_dir, protocol = made
    (tmp_path / "start.py").write_text(f"""
import os
from pathlib import Path
from elfatt_sd.cli import main
from elfatt_sd.evaluation import generate

def noted(maker, row, number, batch):
    (Path({str(tmp_path)!r}) / f"process {{os.environ['RANK']}} made {{row.name}} {{number}}").touch()
    make(maker, row, number, batch)

make, generate._Maker.make_batch = generate._Maker.make_batch, noted
main()
""")
    command = ["eval", "generate", str(run_dir.parent / "small.toml"), "--out", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run(
        [*runs.TWO_PROCESSES, str(tmp_path / "start.py"), *command],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shares = {f"process {number % 2} made {cell.name} {number}" for cell in protocol.cells for number in range(3)}
    assert {path.name for path in tmp_path.glob("process *")} == shares
    assert runs.tree(tmp_path / "run" / "cells") == runs.tree(run_dir / "cells")


def test_processes_that_do_not_see_one_folder_are_refused(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written; how they find out is tested with the cache of the reference."""
    _, protocol = made
    asked: list[Path] = []

    def elsewhere(run_dir: Path, *_: str) -> None:
        asked.append(run_dir)
        raise ElfattError("not that of process 1")

    monkeypatch.setattr(generate, "check_shared", elsewhere)
    with pytest.raises(ElfattError, match="not that of process 1"):
        generate.generate(Run(tmp_path, protocol), show_progress=False)
    assert asked == [tmp_path] and not list(tmp_path.iterdir())


def test_an_interrupted_run_keeps_its_batches(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, protocol = made
    calls: list[list[int]] = []
    real = generate.make_images

    def interrupted(pipe: Any, protocol: Protocol, prompts: list[str], seeds: list[int]) -> torch.Tensor:
        calls.append(seeds)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(pipe, protocol, prompts, seeds)

    monkeypatch.setattr(generate, "make_images", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "run", protocol)
    assert make(tmp_path / "run", protocol) == {}
    assert calls[:4] == [[3, 4], [5, 6], [7], [7]]  # the two batches that were finished are not made again
    assert runs.tree(tmp_path / "run" / "cells") == runs.tree(run_dir / "cells")
    make(tmp_path / "run", protocol)
    assert len(calls) == 3 + 3 * len(protocol.cells) - 2  # and a finished run makes nothing


def test_a_full_disk_is_one_line_and_finished_work_stays(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, protocol = made
    real, calls = os.fsync, [0]

    def full(handle: int) -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailure, match="no space left on the disk of") as error:
        make(tmp_path / "run", protocol)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "run" / "cells").rglob("*.jsonl"))
    monkeypatch.undo()
    make(tmp_path / "run", protocol)
    assert runs.tree(tmp_path / "run" / "cells") == runs.tree(run_dir / "cells")


def test_a_row_that_failed_and_then_succeeded_is_never_said_to_have_failed(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process ends with the very rename that finishes the row."""
    run_dir, protocol = made
    copy, cell = tmp_path / "run", protocol.cells[1]
    shutil.copytree(run_dir, copy)
    shutil.rmtree(row_of(copy, cell).folder)
    row_of(copy, cell).fail("image 0 is black")
    rename = os.replace

    def last(source: Path, target: Path) -> None:
        rename(source, target)
        if target == row_of(copy, cell).manifest:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", last)
    with pytest.raises(KeyboardInterrupt):
        make(copy, protocol)
    assert row_of(copy, cell).manifest.is_file()
    assert row_of(copy, cell).failure is None


def test_half_written_files_are_removed_from_the_whole_run(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    run_dir, protocol = made
    shutil.copytree(run_dir, tmp_path / "run")
    left = [tmp_path / "run" / place / ".x.1.part" for place in (".", "cells/sd/images", "scores/a.parts", "report")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    make(tmp_path / "run", protocol)
    assert [path for path in left if path.exists()] == []


def test_prompts_that_are_cut_off_are_counted_before_the_first_image(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "_make_rows", lambda *_: {})
    long = dataclasses.replace(protocol, template="a " * 80 + "{label}")
    with pytest.warns(UserWarning, match="5 of 5 prompts are cut off: the text encoder takes 75 tokens"):
        make(tmp_path / "run", long)


def test_a_folder_with_hidden_files_alone_is_empty(protocol: Protocol, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name in (".ipynb_checkpoints", "@eaDir"):
        (folder / name).mkdir(parents=True)
    (folder / ".DS_Store").write_bytes(b"")
    Run(folder, protocol).check()


def test_a_strange_folder_is_refused(protocol: Protocol, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.png").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"not empty and holds no run \(there is 'holiday.png'\)"):
        make(tmp_path / "photos", protocol)


def test_a_folder_in_use_is_refused_and_a_stale_lock_is_not(tmp_path: Path) -> None:
    with (
        folder_lock(tmp_path),
        pytest.raises(ElfattError, match=f"in use by process {os.getpid()}"),
        folder_lock(tmp_path),
    ):
        pass
    (tmp_path / HOLDER_FILE).write_text("process 999999 on elsewhere")
    with folder_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / HOLDER_FILE).read_text()


def test_a_bad_image_fails_its_row_by_name_and_no_other(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = generate.make_images

    def broken(pipe: Any, protocol: Protocol, prompts: list[str], seeds: list[int]) -> torch.Tensor:
        images = real(pipe, protocol, prompts, seeds)
        if seeds[0] == 3 + protocol.cells[1].seed_offset + 2:
            images[1] = torch.nan
        return images

    monkeypatch.setattr(generate, "make_images", broken)
    failed = make(tmp_path / "run", protocol)
    assert list(failed) == ["null"]
    assert "image 3 is not finite" in failed["null"]
    assert row_of(tmp_path / "run", protocol.cells[1]).failure == failed["null"]
    assert not row_of(tmp_path / "run", protocol.cells[1]).image_file(2).exists()
    assert len(row_of(tmp_path / "run", protocol.cells[2]).made_images()) == 5
    monkeypatch.undo()
    assert make(tmp_path / "run", protocol) == {}
    assert row_of(tmp_path / "run", protocol.cells[1]).failure is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_row_that_does_not_fit_fails_and_no_other(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = generate.make_images

    def too_large(pipe: Any, protocol: Protocol, prompts: list[str], seeds: list[int]) -> torch.Tensor:
        if seeds[0] >= protocol.cells[1].seed_offset:
            raise error
        return real(pipe, protocol, prompts, seeds)

    monkeypatch.setattr(generate, "make_images", too_large)
    assert make(tmp_path / "run", protocol) == {"null": "out of memory at batch 2"}
    assert len(row_of(tmp_path / "run", protocol.cells[2]).made_images()) == 5


def images(run_dir: Path, protocol: Protocol) -> dict[str, list[str]]:
    return {cell.name: [entry.sha256 for entry in row_of(run_dir, cell).made_images()] for cell in protocol.cells}


def renamed(protocol: Protocol, method: str) -> Protocol:
    """The same protocol under another name, its third row under another name and with another block size."""
    untouched, null, third, peer = protocol.cells
    other = dataclasses.replace(third, name="other", settings={**third.settings, "block_size": 32})
    return dataclasses.replace(
        protocol, name=method, cells=(untouched, dataclasses.replace(null, name="seeds"), third, other, peer)
    )


def test_rows_of_the_same_images_are_copied(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, protocol = made
    larger = renamed(protocol, "larger")
    generated: list[str] = []
    original = generate._Maker.make_batch

    def note(maker: generate._Maker, row: Row, *rest: Any) -> None:
        generated.append(row.name)
        original(maker, row, *rest)

    monkeypatch.setattr(generate._Maker, "make_batch", note)
    make(tmp_path / "reusing", larger, there)
    assert set(generated) == {"other"}
    make(tmp_path / "alone", larger)
    assert images(tmp_path / "reusing", larger) == images(tmp_path / "alone", larger)


@pytest.mark.parametrize("changed", [{"steps": 3}, {"seed": 4}, {"guidance": 2.0}, {"batch": 1}])
def test_rows_of_other_images_are_not(made: tuple[Path, Protocol], tmp_path: Path, changed: dict[str, float]) -> None:
    there, protocol = made
    other = dataclasses.replace(protocol, **changed)  # type: ignore[arg-type]
    run = run_data(there)
    write_json(tmp_path / RUN_FILE, {**run, "protocol": other.to_dict(), "identity": other.identity})
    assert take_over(Run(tmp_path, other), [Run.open(there)]) == {}


def test_rows_of_another_machine_are_not(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    there, protocol = made
    run = run_data(there)
    elsewhere = {**run, "environment": {**run["environment"], "device": "another"}}
    write_json(tmp_path / RUN_FILE, elsewhere)
    assert take_over(Run(tmp_path, protocol), [Run.open(there)]) == {}
    write_json(tmp_path / RUN_FILE, run)
    assert set(take_over(Run(tmp_path, protocol), [Run.open(there)])) == {cell.name for cell in protocol.cells}


def test_each_row_is_told(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    """Of a row that is not taken over, what it was made with; and a model counts by its weights, not by its place."""
    there, protocol = made
    run = run_data(there)
    (tmp_path / "model").symlink_to(protocol.model)
    elsewhere = dataclasses.replace(protocol, model=str(tmp_path / "model"))
    for device, said in ((run["environment"]["device"], "reused"), ("another", "not reused: device: ")):
        place, told = tmp_path / said[:3], []  # type: tuple[Path, list[str]]
        write_json(place / RUN_FILE, {**run, "environment": {**run["environment"], "device": device}})
        taken = take_over(Run(place, elsewhere), [Run.open(there)], told.append)
        assert len(taken) == (len(protocol.cells) if said == "reused" else 0)
        assert [line.partition(f" of {there} is ")[0] for line in told] == [
            f"generate: row {cell.name}" for cell in protocol.cells
        ]
        assert all(f" is {said}" in line for line in told)


@pytest.mark.parametrize("change", ["cut", "other prompt"])
def test_lists_of_other_images_are_not_taken(made: tuple[Path, Protocol], tmp_path: Path, change: str) -> None:
    there, protocol = made
    shutil.copytree(there, tmp_path / "there")
    manifest = row_of(tmp_path / "there", protocol.cells[0]).manifest
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = lines[:3] if change == "cut" else [line.replace("owl", "dove") for line in lines]
    manifest.write_text("".join(lines), encoding="utf-8")
    run, told = Run(tmp_path / "new", protocol), list[str]()
    run.begin(run_data(there)["environment"])
    taken = take_over(run, [Run.open(tmp_path / "there")], told.append)
    assert protocol.cells[0].name not in taken and len(taken) == len(protocol.cells) - 1
    assert sum("does not list this run's images" in line for line in told) == 1


def test_an_altered_image_is_named(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    there, protocol = made
    make(tmp_path / "copy", protocol, there)
    path = row_of(tmp_path / "copy", protocol.cells[1]).image_file(2)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ElfattError, match=r"00002\.png is not the image that was generated; row 'null'"):
        make(tmp_path / "again", protocol, tmp_path / "copy")


def test_rows_of_other_code_are_made_again_and_the_untouched_are_not(
    made: tuple[Path, Protocol], tmp_path: Path
) -> None:
    there, protocol = made
    run = run_data(there)
    environment = {**run["environment"], "method_sha256": "of other code"}
    write_json(tmp_path / RUN_FILE, {**run, "environment": environment})
    assert set(take_over(Run(tmp_path, protocol), [Run.open(there)])) == {"sd", "null", "tomesd-ratio0.5"}


def test_a_row_that_failed_before_it_was_taken_over_has_not_failed(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    there, protocol = made
    run = run_data(there)
    write_json(tmp_path / RUN_FILE, run)
    cell = protocol.cells[1]
    write_json(row_of(tmp_path, cell).failure_file, {"reason": "image 0 is black"})
    take_over(Run(tmp_path, protocol), [Run.open(there)])
    assert row_of(tmp_path, cell).manifest.is_file()
    assert row_of(tmp_path, cell).failure is None


def test_a_folder_without_a_run_is_refused(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match="holds no run"):
        make(tmp_path / "new", made[1], tmp_path / "nothing")
