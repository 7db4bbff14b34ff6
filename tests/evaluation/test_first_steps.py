"""What rows have in common at their start is made once, and no image shows it."""

from __future__ import annotations

import dataclasses
import errno
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_run
import tiny_pipelines as tiny
import torch

from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation.first_steps import _keep, _kept, exact_calls, first_steps, kept_calls
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.locks import folder_lock

CELLS = (
    small_run.UNTOUCHED
    + """
[[cells]]
name = "half"
label = "exact half"
reuse_steps = 2
phases = [{ until = 0.5 }, { until = 1.0, attention = "elfatt", ratio = 0.5, block_size = 16, agents = 8 }]

[[cells]]
name = "quarter"
label = "exact quarter"
phases = [{ until = 0.25 }, { until = 1.0, attention = "sampled", block_size = 16 }]

[[cells]]
name = "residual"
label = "difference shared"
phases = [{ until = 0.5 }, { until = 1.0, attention = "sampled", block_size = 16, residual_steps = 4 }]

[[cells]]
name = "last"
label = "last half exact"
phases = [{ until = 0.5, attention = "sampled", block_size = 16 }]

[[cells]]
name = "peer"
label = "tomesd"
method = "tome"
peer = "tomesd"
ratio = 0.5
"""
)


@pytest.fixture
def protocol(tmp_path: Path, model: Path) -> Protocol:
    """Eight steps, three images in batches of two."""
    return small_run.small_protocol(tmp_path, model, "steps=8", "limit=3", cells=CELLS)


def make(run_dir: Path, protocol: Protocol) -> None:
    with folder_lock(run_dir):
        assert generate.generate(Run(run_dir, protocol), show_progress=False) == {}


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the UNet's forward passes of each batch from now on."""
    counts: list[int] = []
    load = generate.load_protocol_pipeline

    def loaded(*args: Any) -> Any:
        pipe = load(*args)
        pipe.unet.conv_in.register_forward_hook(lambda *_: counts.__setitem__(-1, counts[-1] + 1))
        return pipe

    real = generate.make_images

    def made(*args: Any) -> torch.Tensor:
        counts.append(0)
        return real(*args)

    monkeypatch.setattr(generate, "load_protocol_pipeline", loaded)
    monkeypatch.setattr(generate, "make_images", made)
    return counts


def test_calls_that_a_row_shares(protocol: Protocol) -> None:
    calls = {cell.name: exact_calls(cell, protocol.steps) for cell in protocol.cells}
    assert list(calls.values()) == [8, 0, 4, 2, 0, 0, 0]
    assert [kept_calls(protocol, cell) for cell in protocol.cells] == [4, 0, 4, 2, 0, 0, 0]
    without = dataclasses.replace(protocol, cells=(*protocol.cells[:2], *protocol.cells[4:]))
    assert [kept_calls(without, cell) for cell in without.cells] == [0] * 5
    kernel = dataclasses.replace(protocol.cells[2], settings={"attention_backend": "native"})
    assert exact_calls(kernel, protocol.steps) == 0


@pytest.mark.parametrize("scheduler", ["stored", "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler"])
def test_images_are_those_of_rows_made_alone(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    """The rows that share steps make fewer calls, and the same bytes."""
    protocol = dataclasses.replace(protocol, scheduler=scheduler)
    counts = count_calls(monkeypatch)
    make(tmp_path / "together", protocol)
    shared, whole = list(counts), counts[0]
    assert not Run(tmp_path / "together", protocol).first_steps_folder.exists()
    monkeypatch.setattr(generate, "kept_calls", lambda *_: 0)
    make(tmp_path / "alone", protocol)
    assert small_run.tree(tmp_path / "together" / "cells") == small_run.tree(tmp_path / "alone" / "cells")
    rows = [count for calls in (8, 8, 4, 6, 8, 8, 8) for count in [whole - 8 + calls] * 2]
    assert shared == rows


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system's own error, of which the run makes a line."""
    unet = torch.nn.Identity()
    unet.conv_in = unet.down_blocks = unet.mid_block = None
    unet.forward = lambda sample: (sample,)  # type: ignore[method-assign]
    monkeypatch.setattr("elfatt_sd.files.atomic_file", lambda _: io.FileIO("/dev/full", "w"))
    with (
        pytest.raises(OSError, match="No space left") as told,
        first_steps(SimpleNamespace(unet=unet), tmp_path / "steps.pt", 1),
    ):
        unet.forward(torch.zeros(1, 4, 64, 64))
    assert told.value.errno == errno.ENOSPC


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"half", b"flipped"])
def test_damaged_steps_are_made_anew(tmp_path: Path, content: bytes) -> None:
    unet, path = tiny.sd15(tmp_path).unet, tmp_path / "steps.pt"
    given = (torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 3, unet.config.cross_attention_dim))
    with torch.no_grad(), first_steps(SimpleNamespace(unet=unet), path, 1):
        whole = unet.forward(*given)[0]
    kept_bytes = path.read_bytes()
    flipped = kept_bytes.replace(whole.numpy().tobytes(), (-whole).numpy().tobytes())
    assert flipped != kept_bytes
    path.write_bytes({b"half": kept_bytes[:200], b"flipped": flipped}.get(content, content))
    with torch.no_grad(), first_steps(SimpleNamespace(unet=unet), path, 1):
        assert torch.equal(unet.forward(*given)[0], whole)
    (kept,) = _kept(path)
    assert torch.equal(kept, whole)


def test_a_run_that_was_stopped_goes_on_with_the_steps_it_has(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_calls(monkeypatch)
    make(tmp_path / "whole", protocol)
    whole = list(counts)
    real = generate.check_images

    def stopped(*args: Any) -> None:
        if len(counts) == len(whole) + 6:  # in the second batch of the third row
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(generate, "check_images", stopped)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "stopped", protocol)
    assert len(list(Run(tmp_path / "stopped", protocol).first_steps_folder.iterdir())) == 2
    make(tmp_path / "stopped", protocol)
    assert counts[len(whole) :] == [*whole[:6], *whole[5:]]
    assert small_run.tree(tmp_path / "stopped" / "cells") == small_run.tree(tmp_path / "whole" / "cells")


def test_steps_of_nothing_are_not_taken(protocol: Protocol, tmp_path: Path) -> None:
    """They may come from other weights, where a run was killed before its first image."""
    make(tmp_path / "whole", protocol)
    steps = Run(tmp_path / "killed", protocol).first_steps_folder
    steps.mkdir(parents=True)
    (tmp_path / "killed" / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
    _keep(steps / "000000.pt", [torch.zeros(4, 4, 16, 16)] * 4)
    make(tmp_path / "killed", protocol)
    assert small_run.tree(tmp_path / "killed" / "cells") == small_run.tree(tmp_path / "whole" / "cells")


def test_a_longer_row_adds_to_the_steps_of_a_shorter_one(protocol: Protocol, tmp_path: Path) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    path = tmp_path / "steps.pt"
    images = []
    for calls, kept in ((2, 2), (4, 4), (3, 4)):
        with torch.no_grad(), first_steps(pipe, path, calls):
            images.append(generate.make_images(pipe, protocol, ["cat"], [3]))
        assert len(_kept(path)) == kept
        assert "forward" not in vars(pipe.unet)
    assert torch.equal(images[0], images[1])
    assert torch.equal(images[0], images[2])


def test_a_wrapper_of_the_unet_stays_and_an_error_keeps_nothing(protocol: Protocol, tmp_path: Path) -> None:
    pipe = generate.load_protocol_pipeline(protocol)
    wrapped = pipe.unet.forward

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    pipe.unet.forward = wrapper
    with pytest.raises(KeyboardInterrupt), first_steps(pipe, tmp_path / "steps.pt", 2):
        with torch.no_grad():
            generate.make_images(pipe, protocol, ["cat"], [3])
        raise KeyboardInterrupt
    assert pipe.unet.forward is wrapper
    assert not (tmp_path / "steps.pt").exists()
