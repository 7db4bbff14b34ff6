"""Generation: the same latents for all rows, and the same bytes whatever happens on the way."""

from __future__ import annotations

import ast
import errno
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from small_run import row_of, run_data

import elfatt_sd
from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import generate, provenance
from elfatt_sd.evaluation.images import BadImage, check_images, row_patch, start_noise, to_uint8
from elfatt_sd.evaluation.progress import image_progress
from elfatt_sd.evaluation.prompts import run_prompts, spread
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.provenance import image_environment
from elfatt_sd.evaluation.run import Run, RunFailure, clear_disk_errors
from elfatt_sd.locks import HOLDER_FILE, folder_lock

ROOT = Path(__file__).parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def make(run_dir: Path, protocol: Protocol) -> dict[str, str]:
    with clear_disk_errors(run_dir), folder_lock(run_dir):
        return generate.generate(Run(run_dir, protocol), show_progress=False)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Protocol]:
    """A finished generation and its protocol."""
    place = tmp_path_factory.mktemp("made")
    protocol = small_run.small_protocol(place, model)
    assert make(place / "run", protocol) == {}
    return place / "run", protocol


def test_every_row_has_its_images_and_their_hashes(made: tuple[Path, Protocol]) -> None:
    run_dir, protocol = made
    for cell in protocol.cells:
        entries = row_of(run_dir, cell).made_images()
        assert [entry.prompt for entry in entries] == list(small_run.LABELS)
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
    assert run is not None
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


def test_latents_do_not_depend_on_batches_or_rows(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    together = start_noise(pipe, protocol, [3, 4, 5])["latents"]
    alone = torch.cat([start_noise(pipe, protocol, [seed])["latents"] for seed in (3, 4, 5)])
    assert torch.equal(together, alone)
    assert together.std() == pytest.approx(1, abs=0.1)


def test_half_precision_latents_are_rounded_float32_ones(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    exact = start_noise(pipe, protocol, [3])["latents"]
    pipe.unet.to(torch.bfloat16)
    rounded = start_noise(pipe, protocol, [3])["latents"]
    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_killed_runs_end_with_the_same_bytes(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    """One process forks a child for each moment; the child is killed (-9) at that rename, before or after it."""
    run_dir, _ = made
    script = f"""
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.protocol_files import load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.locks import folder_lock

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
    uninterrupted = small_run.tree(run_dir / "cells")
    for moment in (1, 3, 10, 30):
        assert small_run.tree(tmp_path / f"killed{moment}" / "cells") == uninterrupted, moment


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
        [*small_run.TWO_PROCESSES, str(tmp_path / "start.py"), *command],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shares = {f"process {number % 2} made {cell.name} {number}" for cell in protocol.cells for number in range(3)}
    assert {path.name for path in tmp_path.glob("process *")} == shares
    assert small_run.tree(tmp_path / "run" / "cells") == small_run.tree(run_dir / "cells")


def test_processes_that_would_make_other_images_are_refused(
    made: tuple[Path, Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a machine with another version of PyTorch; no row need have been begun."""
    run_dir, protocol = made
    environment = run_data(run_dir)["environment"]
    packages = environment["packages"] | {"torch": "1.0"}
    for other, differ in (({**environment, "packages": packages}, True), (environment, False)):
        monkeypatch.setattr(generate, "gathered", lambda own, other=other: [own, other])
        with (
            pytest.raises(ElfattError, match=r"0 and 1 would .* \(torch: .* there, 1.0 here")
            if differ
            else nullcontext()
        ):
            generate._check_processes(environment, protocol.cells)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pixels_are_rounded_in_full_precision(dtype: torch.dtype) -> None:
    """As diffusers does; half precision has no 255 levels, and all that it rounds wrongly comes out darker."""
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(images.float()))[0]
    assert np.array_equal(to_uint8(images)[0].numpy(), np.asarray(expected))


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
    assert small_run.tree(tmp_path / "run" / "cells") == small_run.tree(run_dir / "cells")
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
    assert small_run.tree(tmp_path / "run" / "cells") == small_run.tree(run_dir / "cells")


def test_another_specification_is_refused_with_the_difference(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    run_dir, protocol = made
    other = small_run.small_protocol(tmp_path, Path(protocol.model), "steps=5", "guidance=2.0")
    with pytest.raises(ElfattError) as error:
        make(run_dir, other)
    refused = ("another specification", "steps: 4 there, 5 here", "guidance: 7.5 there, 2.0 here", f"--reuse {run_dir}")
    for part in refused:
        assert part in str(error.value)


def test_other_weights_are_refused(made: tuple[Path, Protocol], tmp_path: Path) -> None:
    import tiny_pipelines as tiny

    run_dir, protocol = made
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    row_of(copy, protocol.cells[-1]).manifest.unlink()
    pipe = tiny.sd15(tmp_path)
    with torch.no_grad():
        pipe.unet.conv_in.bias += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "load_protocol_pipeline", lambda *_: pipe)
        with pytest.raises(ElfattError, match=r"images come out differently \(model_sha256"):
            make(copy, protocol)


def code_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the method's code be another from now on."""
    real = image_environment
    monkeypatch.setattr(generate, "image_environment", lambda *args: {**real(*args), "method_sha256": "of other code"})


def test_other_code_is_refused_where_it_has_made_images(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, protocol = made
    shutil.copytree(run_dir, tmp_path / "run")
    row_of(tmp_path / "run", protocol.cells[-1]).manifest.unlink()
    code_changes(monkeypatch)
    with pytest.raises(
        ElfattError, match=r"images come out differently \(method_sha256: \w+ there, of other code here\)"
    ):
        make(tmp_path / "run", protocol)


def test_other_code_is_no_matter_where_it_has_made_none(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the untouched rows are there: the run goes on, and says which code made the others."""
    run_dir, protocol = made
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    shutil.rmtree(row_of(copy, protocol.cells[2]).folder)
    before = run_data(copy)
    code_changes(monkeypatch)
    assert make(copy, protocol) == {}
    now = run_data(copy)
    assert before is not None
    assert now is not None
    assert now["environment"]["method_sha256"] == "of other code"
    assert {**now, "environment": before["environment"]} == before


def test_the_hashed_modules_are_all_that_a_patch_imports() -> None:
    """A module that a patch comes to use has to be added, or named here as one that changes no image."""
    package, images = ROOT / "elfatt_sd", {*provenance._METHOD, "methods", "families"}
    idle = {"autotune", "checks", "devices", "errors", "files", "notices", "planning", "plans", "surroundings"}
    for name in provenance._METHOD:
        for node in ast.walk(ast.parse((package / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("elfatt_sd."):
                assert str(node.module).split(".")[1] in images | idle, f"{name} imports {node.module}"


@pytest.mark.parametrize(
    ("part", "changed"),
    [("unet", {"attention_head_dim": 4}), ("vae", {"scaling_factor": 0.5}), ("scheduler", {"steps_offset": 7})],
)
def test_settings_of_parts_belong_to_the_model(protocol: Protocol, part: str, changed: dict[str, float]) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    before = image_environment(protocol, pipe)
    assert image_environment(protocol, generate.load_protocol_pipeline(protocol)) == before
    getattr(pipe, part).register_to_config(**changed)
    now = image_environment(protocol, pipe)
    assert [name for name in now if now[name] != before[name]] == ["model_sha256"]


def test_tokenizers_count_by_what_they_make_of_the_prompts(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    before = image_environment(protocol, pipe)
    pipe.tokenizer.model_max_length -= 1
    now = image_environment(protocol, pipe)
    assert [name for name in now if now[name] != before[name]] == ["prompts_sha256"]


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


def test_the_untouched_pipeline_takes_another_backend(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    cell = Cell("sd", "SD", "sd", role="baseline", settings={"attention_backend": "native"})
    with row_patch(pipe, cell):
        assert elfatt_sd.is_patched(pipe)
    with row_patch(pipe, protocol.baseline):
        assert "ElfattProcessor" not in {type(each).__name__ for each in pipe.unet.attn_processors.values()}


@pytest.mark.parametrize(("offsets", "wrong"), [((4,), 4), ((5, 9), 9), ((5, 5), 5), ((5, 10), None), ((5,), None)])
def test_null_rows_share_no_seed(tmp_path: Path, model: Path, offsets: tuple[int, ...], wrong: int | None) -> None:
    nulls = "".join(
        f'[[cells]]\nname = "null{index}"\nmethod = "sd"\nrole = "null"\nseed_offset = {offset}\n'
        for index, offset in enumerate(offsets)
    )
    protocol = small_run.small_protocol(tmp_path, model, cells=f'[[cells]]\nmethod = "sd"\nrole = "baseline"\n{nulls}')
    if wrong is None:
        assert len(run_prompts(protocol)) == 5
        return
    with pytest.raises(ElfattError, match=f"seed_offset={wrong} is not accepted; with 5 images a row"):
        run_prompts(protocol)


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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, "image 7 is black"),
        (0.5, "single value 0.500"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
    ],
)
def test_bad_images_are_told(value: float, message: str) -> None:
    good = torch.linspace(0, 1, 48).reshape(1, 3, 4, 4)
    check_images(good, [6])
    with pytest.raises(BadImage, match=message):
        check_images(torch.cat([good, torch.full((1, 3, 4, 4), value)]), [6, 7])


def test_the_peer_is_deterministic_and_leaves_no_trace(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    cell = protocol.cell("tomesd-ratio0.5")
    state, kind = torch.get_rng_state(), type(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0])

    def image(seed: int) -> torch.Tensor:
        with row_patch(pipe, cell, seed), torch.no_grad():
            return generate.make_images(pipe, protocol, ["cat"], [3])

    first = image(1)
    torch.rand(3)
    assert torch.equal(first, image(1))
    assert not torch.equal(first, image(2))
    assert type(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]) is kind
    torch.set_rng_state(state)
    image(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_schedulers_by_name(tmp_path: Path, model: Path) -> None:
    protocol = small_run.small_protocol(tmp_path, model, "scheduler=EulerAncestralDiscreteScheduler")
    pipe = generate.load_protocol_pipeline(protocol)
    assert type(pipe.scheduler).__name__ == "EulerAncestralDiscreteScheduler"
    together = generate.make_images(pipe, protocol, ["cat", "dog"], [3, 4])
    alone = generate.make_images(pipe, protocol, ["dog"], [4])
    assert torch.allclose(together[1], alone[0], atol=1e-4)  # its noise comes from each image's own generator
    plms = small_run.small_protocol(tmp_path, model, "scheduler=PLMS")
    pipe.scheduler.register_to_config(skip_prk_steps=False)  # as of a model that is not stored with PLMS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elfatt_sd.pipelines.load_pipeline", lambda *_, **__: pipe)
        generate.load_protocol_pipeline(plms)
    pipe.scheduler.set_timesteps(4)
    assert type(pipe.scheduler).__name__ == "PNDMScheduler"
    assert len(pipe.scheduler.timesteps) == 5  # PLMS visits its second step twice; Runge and Kutta would need more
    wrong = small_run.small_protocol(tmp_path, model, "scheduler=Eulerish")
    with pytest.raises(ElfattError, match="'Eulerish' is not known"):
        generate.load_protocol_pipeline(wrong)


def test_spread_is_even_and_not_in_step_with_the_list() -> None:
    values = list(range(1792))
    chosen = spread(values, 256)
    assert chosen == spread(values, 256)
    assert [value // 7 for value in chosen] == list(range(256))
    assert len({value % 7 for value in chosen}) == 7
    assert spread(values, 0) == spread(values, 5000) == values


def test_a_log_tells_the_time_left_however_long_a_batch_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("elfatt_sd.progress.time.monotonic", lambda: clock[0])
    with image_progress(100, shown=True) as advance:
        advance(0, "sd")
        for _ in range(4):
            clock[0] += 45  # seconds for 10 images
            advance(10, "sd")
        advance(0, "tome")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "generate: sd, 0 of 100 images done"
    assert lines[-1] == "generate: tome, 40 of 100 images done, about 0:04:30 left"
    assert len(lines) == 4  # one for each row, and of the batches not more than one a minute
    with image_progress(50, shares=2, shown=True) as advance:
        advance(0, "sd")
    assert capsys.readouterr().err == "generate: sd, 0 of 50 images of process 1 of 2 done\n"
