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
from elfatt_sd.evaluation.run import Row, Run, RunFailure
from elfatt_sd.files import HOLDER_FILE, folder_lock

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
        assert {path.name for path in row_of(run_dir, cell).folder.iterdir()} == {"images", "manifest.jsonl"}
    hashes = [made.sha256 for cell in protocol.cells for made in row_of(run_dir, cell).made_images()]
    assert len({*hashes}) == len(hashes), "rows differ as their methods do"
    run = run_data(run_dir)
    assert (run["identity"], Run.open(run_dir).protocol) == (protocol.identity, protocol)
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

for moment, before in ((1, True), (3, False), (10, True)):
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
    for moment in (1, 3, 10):
        assert runs.tree(tmp_path / f"killed{moment}" / "cells") == uninterrupted, moment


def test_two_processes_make_the_same_bytes(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    run_dir, protocol = made
    (tmp_path / "start.py").write_text(f"""
import os
from pathlib import Path
from elfatt_sd.cli import main
from elfatt_sd.evaluation import generate

def noted(run, pipe, row, number, batch):
    (Path({str(tmp_path)!r}) / f"process {{os.environ['RANK']}} made {{row.name}} {{number}}").touch()
    make(run, pipe, row, number, batch)

make, generate.make_batch = generate.make_batch, noted
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
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written; how they find out is tested with the cache of the reference."""

    def elsewhere(run_dir: Path, *_: str) -> None:
        raise ElfattError(f"{run_dir} is not that of process 1")

    monkeypatch.setattr(generate, "check_shared", elsewhere)
    with pytest.raises(ElfattError, match="run is not that of process 1"):
        generate.generate(Run(tmp_path / "run", protocol), show_progress=False)
    assert not (tmp_path / "run").exists()


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
    """Also where the process ends with the very rename that finishes the row; half-written files are removed."""
    run_dir, protocol = made
    copy, cell = tmp_path / "run", protocol.cells[1]
    shutil.copytree(run_dir, copy)
    left = [copy / place / ".x.1.part" for place in (".", "cells/sd/images", "scores/a.parts", "report")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
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
    assert not any(path.exists() for path in left)


def test_prompts_that_are_cut_off_are_counted_before_the_first_image(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "_make_rows", lambda *_: {})
    long = dataclasses.replace(protocol, template="a " * 80 + "{label}")
    with pytest.warns(UserWarning, match="5 of 5 prompts are cut off: the text encoder takes 75 tokens"):
        make(tmp_path / "run", long)


def test_a_strange_folder_is_refused_and_one_with_hidden_files_is_not(protocol: Protocol, tmp_path: Path) -> None:
    for name in (".ipynb_checkpoints", "@eaDir", ".DS_Store"):
        (tmp_path / "run" / name).mkdir(parents=True)
    Run(tmp_path / "run", protocol).check()
    (tmp_path / "run" / "holiday.png").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"not empty and holds no run \(there is 'holiday.png'\)"):
        make(tmp_path / "run", protocol)


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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "image 3 is not finite"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory at batch 2"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "out of memory at batch 2"),
    ],
)
def test_a_row_that_fails_is_named_and_no_other_fails(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    real, null = generate.make_images, protocol.cells[1]

    def broken(pipe: Any, protocol: Protocol, prompts: list[str], seeds: list[int]) -> torch.Tensor:
        images = real(pipe, protocol, prompts, seeds)
        if seeds[0] == 3 + null.seed_offset + 2:
            images[1] = torch.nan
            if error:
                raise error
        return images

    monkeypatch.setattr(generate, "make_images", broken)
    failed = make(tmp_path / "run", protocol)
    assert list(failed) == ["null"] and said in failed["null"]
    row = row_of(tmp_path / "run", null)
    assert row.failure == failed["null"] and not row.image_file(2).exists()
    assert len(row_of(tmp_path / "run", protocol.cells[2]).made_images()) == 5
    monkeypatch.undo()
    assert make(tmp_path / "run", protocol) == {} and row.failure is None


def images(run_dir: Path, protocol: Protocol) -> dict[str, list[str]]:
    return {cell.name: [entry.sha256 for entry in row_of(run_dir, cell).made_images()] for cell in protocol.cells}


def test_rows_of_the_same_images_are_copied(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another name; a row of another block size is made."""
    there, protocol = made
    untouched, null, third, peer = protocol.cells
    other = dataclasses.replace(third, name="other", settings={**third.settings, "block_size": 32})
    cells = (untouched, dataclasses.replace(null, name="seeds"), third, other, peer)
    larger = dataclasses.replace(protocol, name="larger", cells=cells)
    generated: list[str] = []
    original = generate.make_batch

    def note(run: Run, pipe: Any, row: Row, *rest: Any) -> None:
        generated.append(row.name)
        original(run, pipe, row, *rest)

    monkeypatch.setattr(generate, "make_batch", note)
    make(tmp_path / "reusing", larger, there)
    assert set(generated) == {"other"}
    reused, former = images(tmp_path / "reusing", larger), images(there, protocol)
    assert [reused[name] for name in ("sd", "seeds", third.name, peer.name)] == list(former.values())


def begun(place: Path, there: Path, protocol: Protocol, **environment: Any) -> Run:
    """A run of a protocol that is begun on the machine of another one, but for some changes."""
    run = Run(place, protocol)
    run.begin({**run_data(there)["environment"], **environment})
    return run


@pytest.mark.parametrize("changed", [{"steps": 3}, {"seed": 4}, {"guidance": 2.0}, {"batch": 1}])
def test_rows_of_other_images_are_not(made: tuple[Path, Protocol], tmp_path: Path, changed: dict[str, float]) -> None:
    there, protocol = made
    other = dataclasses.replace(protocol, **changed)  # type: ignore[arg-type]
    assert take_over(begun(tmp_path, there, other), [Run.open(there)]) == {}


@pytest.mark.parametrize(
    ("environment", "taken", "said"),
    [
        ({}, 4, "reused"),
        ({"device": "another"}, 0, "not reused: device: "),
        ({"method_sha256": "of other code"}, 3, "not reused: method_sha256: "),
    ],
    ids=str,
)
def test_rows_of_the_same_machine_and_code_are_and_each_is_told(
    made: tuple[Path, Protocol], tmp_path: Path, environment: dict[str, str], taken: int, said: str
) -> None:
    """A model counts by its weights, not by its place; a row that failed before has not failed then."""
    there, protocol = made
    (tmp_path / "model").symlink_to(protocol.model)
    elsewhere = dataclasses.replace(protocol, model=str(tmp_path / "model"))
    run, lines = begun(tmp_path / "new", there, elsewhere, **environment), list[str]()
    run.rows[1].fail("image 0 is black")
    found = take_over(run, [Run.open(there)], lines.append)
    assert len(found) == taken and (taken == 0 or run.rows[1].failure is None)
    rows = [line.partition(f" of {there} is ") for line in lines]
    assert [row for row, *_ in rows] == [f"generate: row {cell.name}" for cell in protocol.cells]
    assert sum(line.startswith(said) for *_, line in rows) == (taken or 4 if said == "reused" else 4 - taken)


@pytest.mark.parametrize("change", ["cut", "other prompt"])
def test_lists_of_other_images_are_not_taken(made: tuple[Path, Protocol], tmp_path: Path, change: str) -> None:
    there, protocol = made
    shutil.copytree(there, tmp_path / "there")
    manifest = row_of(tmp_path / "there", protocol.cells[0]).manifest
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = lines[:3] if change == "cut" else [line.replace("owl", "dove") for line in lines]
    manifest.write_text("".join(lines), encoding="utf-8")
    told = list[str]()
    taken = take_over(begun(tmp_path / "new", there, protocol), [Run.open(tmp_path / "there")], told.append)
    assert protocol.cells[0].name not in taken and len(taken) == len(protocol.cells) - 1
    assert sum("does not list this run's images" in line for line in told) == 1


def test_altered_images_and_folders_without_a_run_are_refused(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    there, protocol = made
    shutil.copytree(there, tmp_path / "copy")
    path = row_of(tmp_path / "copy", protocol.cells[1]).image_file(2)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ElfattError, match=r"00002\.png is not the image that was generated; row 'null'"):
        make(tmp_path / "again", protocol, tmp_path / "copy")
    with pytest.raises(ElfattError, match="holds no run"):
        make(tmp_path / "new", protocol, tmp_path / "nothing")
