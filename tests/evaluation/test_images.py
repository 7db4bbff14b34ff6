"""Images of a row: latents, pixels and schedulers; other code, weights or versions are refused where they made some."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from support import runs
from support.runs import make, row_of, run_data

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.generate import check_images, image_environment, row_patch, start_noise, to_uint8
from elfatt_sd.evaluation.protocols import Cell, Protocol


def test_latents_do_not_depend_on_batches_rows_or_dtype(protocol: Protocol) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    together = start_noise(pipe, protocol, [3, 4, 5])["latents"]
    alone = torch.cat([start_noise(pipe, protocol, [seed])["latents"] for seed in (3, 4, 5)])
    assert torch.equal(together, alone)
    assert together.std() == pytest.approx(1, abs=0.1)
    pipe.unet.to(torch.bfloat16)
    assert torch.equal(start_noise(pipe, protocol, [3])["latents"], together[:1].to(torch.bfloat16))


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


def test_another_specification_and_code_are_refused(
    made: tuple[Path, Protocol], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the untouched rows are there, the run goes on, and says which code made the others.

    Processes of a launch must make the same images, too.
    """
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
    first = before = image_environment(protocol, pipe)
    assert image_environment(protocol, generate.load_protocol_pipeline(protocol)) == before
    with torch.no_grad():
        pipe.unet.conv_in.bias += 1
    before = image_environment(protocol, pipe)
    assert [key for key in before if before[key] != first[key]] == ["model_sha256"]
    changes = (("unet", "attention_head_dim", 4), ("vae", "scaling_factor", 0.5), ("scheduler", "steps_offset", 7))
    for part, name, value in changes:
        getattr(pipe, part).register_to_config(**{name: value})
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
    environment = {**os.environ, "ELFATT_SD_CACHE": str(place / "cache"), "PYTHONUTF8": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(runs.ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", WITHOUT_UNIX, str(workplace / "sd15"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    rows = json.loads((place / "run" / "results.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 and all(row["distances"] and row["time"] for row in rows)
    assert all(row["memory"]["failed"].startswith("not measured: ") for row in rows), "no system tells"
    for path in (place / "run").rglob("*"):
        assert not set(path.name) & set('<>:"|?*\\'), path
