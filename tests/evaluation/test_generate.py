"""Images of a run: latents, pixels and schedulers; the same bytes whatever happens on the way; rows taken over."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from support import runs
from support.commands import call
from support.runs import ROOT, make, row_of, run_data

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.generate import check_images, image_environment, row_patch, start_noise, take_over, to_uint8
from elfatt_sd.evaluation.protocols import Cell, Protocol, unequal
from elfatt_sd.evaluation.records import MadeImage
from elfatt_sd.evaluation.run import RowFolder, RunFolder
from elfatt_sd.files import folder_lock, write_json

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_rows_differ_and_the_baseline_is_that_of_the_plain_pipeline(made: tuple[Path, Protocol]) -> None:
    """Without any of the harness."""
    from diffusers import StableDiffusionPipeline

    run_dir, protocol = made
    rows = [row_of(run_dir, cell) for cell in protocol.cells]
    hashes = [entry.sha256 for row in rows for entry in row.made_images()]
    assert len({*hashes}) == len(hashes) == 20, "rows differ as their methods do"
    assert all({path.name for path in row.folder.iterdir()} == {"images", "manifest.jsonl"} for row in rows)
    run = run_data(run_dir)
    assert (run["identity"], RunFolder.open(run_dir).protocol) == (protocol.identity, protocol)
    assert run["environment"]["packages"]["torch"] == importlib.metadata.version("torch")
    pipe = StableDiffusionPipeline.from_pretrained(protocol.model)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.cat([torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)])
    plain = pipe(["cat", "dog"], num_inference_steps=4, latents=noise, height=32, width=32, output_type="np").images
    for index in range(2):
        ours = np.asarray(Image.open(row_of(run_dir, protocol.baseline).image_file(index)))
        assert np.array_equal(ours, (plain[index] * 255).round().astype(np.uint8))


STOPPED = """
import os, sys
from elfatt_sd.cli import main
name, stop = sys.argv.pop(1), sys.argv.pop(1)
rename = os.replace

def replace(source, known):
    if os.path.basename(known) == name:
        exec(stop)
    rename(source, known)

os.replace = replace
main()
"""
KILL = "os.kill(os.getpid(), 9)"


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    """By a kill, by Ctrl-C, by a full disk, where a file gets its name; finished batches are not made again."""
    run_dir, protocol = made
    command = ["eval", "generate", str(run_dir.parent / "small.toml"), "--out", str(tmp_path / "run"), "--quiet"]
    finished = {0}
    for name, stop, code, says in (
        ("run.json", KILL, -9, ""),
        ("00003.png", "raise KeyboardInterrupt", 130, "error: stopped; what was finished stays"),
        ("00004.png", "raise OSError(28, 'full')", 1, "error: no space left on the disk of "),
        ("manifest.jsonl", KILL, -9, ""),
    ):
        words = [sys.executable, "-c", STOPPED, name, stop, *command]
        done = subprocess.run(words, env=ONE_THREAD, capture_output=True, text=True, timeout=500)
        assert (done.returncode, done.stderr.count("\n")) == (code, bool(says)) and done.stderr.startswith(says)
        finished |= {path.stat().st_mtime_ns for path in tmp_path.glob("run/cells/sd/images/00000.png")}
    assert call(*command).exit_code == 0
    assert finished == {0, row_of(tmp_path / "run", protocol.baseline).image_file(0).stat().st_mtime_ns}
    assert runs.tree(tmp_path / "run" / "cells") == runs.tree(run_dir / "cells")


def test_two_processes_go_through_all_stages(finished_run: Path, workplace: Path, tmp_path: Path) -> None:
    """They share the images; bytes and scores are those of one process, of which some rows are here."""
    protocol = runs.write_protocol(tmp_path, workplace / "sd15", runs.UNTOUCHED)
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
    command = [*runs.TWO_PROCESSES, str(tmp_path / "start.py"), "eval", "run", str(protocol), "--out", tmp_path / "run"]
    for override in [*runs.full_overrides(workplace), "time.repeats=1", "memory.steps=1"]:
        command += ["--set", override]
    environment = {**ONE_THREAD, "ELFATT_SD_CACHE": str(tmp_path / "cache")}  # the reference is shared out
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    shares = {f"process {number % 2} made {name} {number}" for name in ("sd", "null") for number in range(3)}
    assert {path.name for path in tmp_path.glob("process *")} == shares
    finished = [line.split(" in ")[0] for line in done.stderr.splitlines() if ": done in" in line]
    assert finished == [f"{stage}: done" for stage in ("score", "time", "memory", "report")]  # each of them once
    both, one = (json.loads((run / "scores.json").read_text())["rows"] for run in (tmp_path / "run", finished_run))
    assert list(unequal({name: one[name] for name in both}, both)) == []
    for name in both:
        assert runs.tree(tmp_path / "run" / "cells" / name) == runs.tree(finished_run / "cells" / name)
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())["rows"]
    assert [row["batches"] for row in memory.values()] == [[1, 2]] * 2
    assert (tmp_path / "run" / "report" / "index.html").is_file()


def test_batches_with_damaged_lists_are_made_anew(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(made[0], tmp_path / "run")), made[1])
    whole = [row.manifest.read_bytes() for row in run.rows]
    for row, content, damage in zip(run.rows, whole, (b"", b"{}\n", b"\xff\n", b"other"), strict=True):
        lines = content.splitlines(keepends=True)
        row.manifest.unlink()
        row.batches_folder.mkdir()
        row.batch_file(0).write_bytes(b"".join(lines[:2]))
        row.batch_file(1).write_bytes(lines[0] if damage == b"other" else damage)
        assert row.has_batch(0, run.batches[0]) and not row.has_batch(1, run.batches[1])
    generate.generate(run, show_progress=False)
    assert [row.manifest.read_bytes() for row in run.rows] == whole


def test_a_row_is_finished_before_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends in between leaves no failure; marks that end lines elsewhere stay in prompts."""
    marks = "a\u2028b\u2029c\x85d\x0ce"  # each ends a line for `str.splitlines`
    row = RowFolder(tmp_path / "row")
    made = [MadeImage(index, "images/0.png", marks, 0, index, "0" * 64) for index in range(2)]
    write_json(row.failure_file, {"reason": "image 0 is black"})
    manifest = msgspec.json.Encoder().encode_lines(made)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
        row.finish(manifest)
    assert not row.finished and row.failure is None
    row.finish(manifest)
    assert row.made_images() == made


def test_a_folder_of_something_else_or_in_use_is_refused(protocol: Protocol, tmp_path: Path) -> None:
    """But not one with hidden files, or with a stale lock."""
    run_dir, lock = tmp_path / "run", tmp_path / "lock"
    for name in (".ipynb_checkpoints", "@eaDir", ".DS_Store"):
        (run_dir / name).mkdir(parents=True)
    RunFolder(run_dir, protocol).check()
    (run_dir / "holiday.png").write_bytes(b"")
    with pytest.raises(ElfattError, match=r"not empty and holds no run \(there is 'holiday.png'\)"):
        make(run_dir, protocol)
    with folder_lock(lock), pytest.raises(ElfattError, match="in use by another process; wait for it"):
        make(lock, protocol)
    with folder_lock(lock):
        pass


@pytest.mark.parametrize(
    ("changes", "environment", "listed", "taken", "said"),
    [
        ({"name": "larger", "extractors": ()}, {}, None, 4, "reused"),
        ({}, {"device": "another"}, None, 0, "not reused: device: "),
        ({}, {"method_sha256": "of other code"}, None, 3, "not reused: method_sha256: "),
        ({}, {}, (3, "owl"), 3, "does not list this run's images"),
        ({}, {}, (5, "dove"), 3, "does not list this run's images"),
        *(({key: value}, {}, None, 0, None) for key, value in (("steps", 3), ("seed", 4), ("guidance", 2.0))),
        ({"batch": 1}, {}, None, 0, None),
    ],
)
def test_only_rows_of_the_same_images_are_copied_and_each_is_told(
    made: tuple[Path, Protocol], tmp_path: Path, changes: Any, environment: Any, listed: Any, taken: int, said: Any
) -> None:
    """Under another name; a row of another block size is not. A model counts by its weights, not by its place."""
    (tmp_path / "model").symlink_to(made[1].model)
    there, (untouched, null, third, peer) = Path(shutil.copytree(made[0], tmp_path / "there")), made[1].cells
    if listed:
        manifest = row_of(there, untouched).manifest
        kept = manifest.read_text(encoding="utf-8").splitlines(keepends=True)[: listed[0]]
        manifest.write_text("".join(kept).replace("owl", listed[1]), encoding="utf-8")
    other = dataclasses.replace(third, name="other", settings={**third.settings, "block_size": 32})
    cells = (untouched, dataclasses.replace(null, name="seeds"), third, other, peer)
    protocol = dataclasses.replace(made[1], model=str(tmp_path / "model"), cells=cells, **changes)
    run = RunFolder(tmp_path / "new", protocol)
    run.begin({**run_data(there)["environment"], **environment})
    write_json(run.rows[1].failure_file, {"reason": "image 0 is black"})
    lines: list[str] = []
    take_over(run, [RunFolder.open(there)], lines.append)
    assert len(run.finished) == taken and not run.row("other").finished
    assert (run.rows[1].failure is None) == run.rows[1].finished
    if said:
        alike = [row.name for row in run.rows if row.name != "other"]
        assert [line.partition(f" of {there} is ")[0] for line in lines] == [f"generate: row {name}" for name in alike]
        assert sum(said in line for line in lines) == (4 if said == "reused" else 4 - taken)
    for row, source in zip(run.rows, (untouched, null, third, other, peer), strict=True):
        if row.finished:
            assert runs.tree(row.folder) == runs.tree(row_of(there, source).folder)


def test_latents_are_drawn_in_full_precision(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    drawn = start_noise(pipe, protocol, [3, 4])["latents"]
    pipe.unet.to(torch.bfloat16)
    assert torch.equal(start_noise(pipe, protocol, [3])["latents"], drawn[:1].to(torch.bfloat16))


def test_pixels_are_rounded_in_full_precision_and_bad_images_named() -> None:
    """As diffusers does; half precision has no 255 levels, and all that it rounds wrongly comes out darker."""
    for dtype in (torch.float16, torch.bfloat16):
        images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(images.float()))[0]
        assert np.array_equal(to_uint8(images)[0].numpy(), np.asarray(expected))
    check_images(images, [6])
    for value, message in ((0.0, "image 7 is black"), (math.nan, "image 7 .*not finite")):
        with pytest.raises(ElfattError, match=message):
            check_images(torch.cat([images, torch.full_like(images, value)]), [6, 7])


def test_rows_are_patched_for_their_length_alone_and_a_peer_is_deterministic(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    with row_patch(pipe, Cell("sd", "SD", "sd", role="baseline", settings={"attention_backend": "native"})):
        assert elfatt_sd.is_patched(pipe)
    with row_patch(pipe, protocol.baseline):
        assert not elfatt_sd.is_patched(pipe)
    cell = protocol.cell("tomesd-ratio0.5")
    state, kind = torch.get_rng_state(), type(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0])

    def image(seed: int) -> torch.Tensor:
        with row_patch(pipe, cell, seed), torch.no_grad():
            return generate.make_images(pipe, protocol, ["cat"], [3])

    first = image(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(first, image(1)) and not torch.equal(first, image(2))
    assert type(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]) is kind


def test_schedulers_by_name(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = runs.small_protocol(tmp_path, model, "scheduler=EulerAncestralDiscreteScheduler")
    pipe = generate.load_protocol_pipeline(protocol)
    assert type(pipe.scheduler).__name__ == "EulerAncestralDiscreteScheduler"
    together = generate.make_images(pipe, protocol, ["cat", "dog"], [3, 4])
    alone = generate.make_images(pipe, protocol, ["dog"], [4])
    assert torch.allclose(together[1], alone[0], atol=1e-4)  # its noise comes from each image's own generator
    pipe.scheduler.register_to_config(skip_prk_steps=False)  # as of a model that is not stored with PLMS
    monkeypatch.setattr(generate, "load_pipeline", lambda *_, **__: pipe)
    generate.load_protocol_pipeline(runs.small_protocol(tmp_path, model, "scheduler=PLMS"))
    pipe.scheduler.set_timesteps(4)
    assert type(pipe.scheduler).__name__ == "PNDMScheduler"
    assert len(pipe.scheduler.timesteps) == 5  # PLMS visits its second step twice; Runge and Kutta would need more


def test_other_code_is_refused(made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untouched rows go on with other code, and the run says which made them; processes of a launch have to agree."""
    run_dir, protocol = made
    with monkeypatch.context() as patch, pytest.raises(ElfattError, match=r"0 and 1 would .* \(torch: .* there, 1.0"):
        other = {"packages": run_data(run_dir)["environment"]["packages"] | {"torch": "1.0"}}
        patch.setattr(generate, "gathered", lambda own: [own, own | other])
        make(tmp_path / "two", protocol)
    with pytest.raises(ElfattError, match="another specification") as error:
        make(run_dir, runs.small_protocol(tmp_path, Path(protocol.model), "steps=5", "guidance=2.0"))
    for part in ("steps: 4 there, 5 here", "guidance: 7.5 there, 2.0 here", f"--reuse {run_dir}"):
        assert part in str(error.value)
    refused, goes_on = (Path(shutil.copytree(run_dir, tmp_path / name)) for name in ("refused", "goes_on"))
    row_of(refused, protocol.cells[-1]).manifest.unlink()
    shutil.rmtree(row_of(goes_on, protocol.cells[2]).folder)
    before = run_data(goes_on)
    other = {"method_sha256": "of another"}
    monkeypatch.setattr(generate, "image_environment", lambda *given: image_environment(*given) | other)
    with pytest.raises(ElfattError, match=r"come out differently \(method_sha256: \w+ there, of another here\)"):
        make(refused, protocol)
    assert make(goes_on, protocol) == {}
    now = run_data(goes_on)
    assert now["environment"] == before["environment"] | other
    assert {**now, "environment": before["environment"]} == before


def test_settings_of_parts_belong_to_the_model(protocol: Protocol) -> None:
    """As weights do. And tokenizers count by what they make of the prompts."""
    pipe = generate.load_protocol_pipeline(protocol)
    before = image_environment(protocol, pipe)
    assert image_environment(protocol, generate.load_protocol_pipeline(protocol)) == before
    changes = (("unet", "attention_head_dim", 4), ("vae", "scaling_factor", 0.5), ("scheduler", "steps_offset", 7))
    for part, name, value in (("unet", None, None), *changes):
        if name:
            getattr(pipe, part).register_to_config(**{name: value})
        else:
            pipe.unet.conv_in.bias.data += 1
        now = image_environment(protocol, pipe)
        assert [key for key in now if now[key] != before[key]] == ["model_sha256"]
        before = now
    pipe.tokenizer.model_max_length -= 1
    assert image_environment(protocol, pipe)["prompts_sha256"] != before["prompts_sha256"]


WITHOUT_UNIX = """
import ctypes, os, platform, sys
import accelerate, diffusers, filelock, matplotlib.pyplot, psutil, torchmetrics.image.fid, transformers

def hide(event, given):
    if event == "open" and str(given[0]).startswith("/proc/self"):
        raise FileNotFoundError(given[0])

def load(name=None, *given, library=ctypes.CDLL, **more):
    if name is None:
        raise OSError("no glibc")
    return library(name, *given, **more)

platform.uname()
diffusers.DiffusionPipeline.from_pretrained(sys.argv.pop(1))  # which imports what it needs
for name in ("uname", "fork", "pread", "pwrite", "getuid", "symlink"):
    delattr(os, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
ctypes.CDLL = load
sys.addaudithook(hide)
from elfatt_sd.cli import app
app(sys.argv[1:])
"""


def test_a_small_evaluation_without_unix(workplace: Path, tmp_path: Path) -> None:
    """Of what Windows lacks, other packages know; this one must not need any."""
    place = tmp_path / "mit Leerzeichen é"
    place.mkdir()
    cells = runs.UNTOUCHED + '[[cells]]\nmethod = "elfatt"\nratio = 0.5\nblock_size = 16\nagents = 8\n'
    protocol = runs.write_protocol(place, workplace / "sd15", cells)
    words = ["eval", "run", str(protocol), "--out", str(place / "run"), "--quiet", "--limit", "2"]
    for override in runs.full_overrides(workplace):
        words += ["--set", override]
    environment = {**ONE_THREAD, "ELFATT_SD_CACHE": str(place / "cache"), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", WITHOUT_UNIX, str(workplace / "sd15"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    rows = json.loads((place / "run" / "results.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 and all(row["distances"] and row["time"] for row in rows)
    assert all(row["memory"]["failed"].startswith("not measured: ") for row in rows), "no system tells"
    for path in (place / "run").rglob("*"):
        assert not set(path.name) & set('<>:"|?*\\'), path
