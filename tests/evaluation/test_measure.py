"""Time: what is summed, who has its turn when, and that running out of memory is a result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch

from elfatt_sd import measure as clocks
from elfatt_sd.attention import softmax as attention
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate, measure
from elfatt_sd.evaluation import measure as memory
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.files import folder_lock

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture
def timed(tmp_path: Path, model: Path) -> Protocol:
    return small_run.small_protocol(tmp_path, model, "time.repeats=3", "time.batch=1", "memory.batches=[4, 1, 2]")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that a test turns."""
    now = [0.0]
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    yield now


def test_a_timed_call_counts_all_and_divides_by_the_images(
    timed: Protocol, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = generate.load_protocol_pipeline(timed)
    forward, encode, decode = pipe.unet.forward, pipe.text_encoder.forward, pipe.vae.decode

    def taking(seconds: float, function: Any) -> Any:
        def slow(*args: Any, **options: Any) -> Any:
            clock[0] += seconds
            return function(*args, **options)

        return slow

    monkeypatch.setattr(pipe.unet, "forward", taking(1.0, forward))
    monkeypatch.setattr(pipe.text_encoder, "forward", taking(10.0, encode))
    monkeypatch.setattr(pipe.vae, "decode", taking(100.0, decode))
    seconds = measure.timed_call(pipe, timed, timed.baseline, ["cat", "dog"], [3, 4])
    assert seconds["unet"] == 5 / 2  # PLMS makes one call more than it has steps
    assert seconds["end_to_end"] == (5 + 2 * 10 + 100) / 2


def test_rows_take_turns_in_every_round(timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def call(pipe: Any, protocol: Protocol, cell: Cell, prompts: list[str], seeds: list[int]) -> dict[str, float]:
        order.append((cell.name, protocol.steps))
        slow = 2.0 if cell.role == "baseline" else 1.0
        return {"end_to_end": slow * len(order), "unet": slow}

    monkeypatch.setattr(measure, "timed_call", call)
    measure.measure_time(Run(tmp_path, timed), lambda line: None)
    names = [name for name, _ in order]
    rows = {cell.name for cell in timed.cells}
    rounds = [names[start : start + len(rows)] for start in range(0, len(names), len(rows))]
    assert len(rounds) == 4  # one to warm up
    assert all(set(once) == rows for once in rounds)
    assert len({once[0] for once in rounds[1:]}) == 3  # no row is always first
    data = json.loads((tmp_path / measure.TIME_FILE).read_text())
    assert {len(row["unet"]["values"]) for row in data["rows"].values()} == {3}
    assert data["rows"]["null"]["unet"]["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0, "values": [2.0] * 3}
    assert "only 3 repeats" in data["note"]
    assert data["environment"]["packages"]["torch"]
    assert len(data["clocks"]) == 5


def test_a_warm_up_is_short(timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def call(pipe: Any, protocol: Protocol, *_: Any) -> dict[str, float]:
        steps.append(protocol.steps)
        return {"end_to_end": 2.0, "unet": 1.0}

    monkeypatch.setattr(measure, "timed_call", call)
    measure.measure_time(Run(tmp_path, dataclasses.replace(timed, steps=50)), lambda line: None)
    assert steps == [measure.WARMUP_STEPS] * 4 + [50] * 12
    steps.clear()
    measure.measure_time(Run(tmp_path, dataclasses.replace(timed, steps=2)), lambda line: None)
    assert steps == [2] * 16


@pytest.mark.parametrize("device", DEVICES)
def test_real_times_replace_those_of_an_earlier_attempt(timed: Protocol, tmp_path: Path, device: str) -> None:
    (tmp_path / measure.TIME_FILE).write_text('{"rows": {"sd": {"unet": {"values": [1e9]}}}}')
    lines: list[str] = []
    data = measure.measure_time(Run(tmp_path, dataclasses.replace(timed, device=device)), lines.append)
    assert lines[:2] == ["time: warm-up, row 1 of 4, tomesd-ratio0.5", "time: warm-up, row 2 of 4, sd"]
    assert lines[4] == "time: round 1 of 3, row 1 of 4, sd"
    for row in data["rows"].values():
        assert row["attention_kernels"] == ["native"]
        for scope in ("end_to_end", "unet"):
            assert len(row[scope]["values"]) == 3
            assert 0 < row[scope]["seconds_per_image"] < 1e6
        assert row["unet"]["seconds_per_image"] < row["end_to_end"]["seconds_per_image"]


def test_a_row_that_cannot_be_timed_is_told_and_the_others_are(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(pipe: Any, protocol: Protocol, cell: Cell, prompts: list[str], seeds: list[int]) -> dict[str, float]:
        if cell.peer:
            raise ElfattError("peer 'tomesd' is not installed")
        if cell.method == "elfatt":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"end_to_end": 2.0, "unet": 1.0}

    monkeypatch.setattr(measure, "timed_call", call)
    data = measure.measure_time(Run(tmp_path, timed), lambda line: None)
    assert data["errors"] == {"tomesd-ratio0.5": "peer 'tomesd' is not installed"}  # no memory is a result instead
    failed = {row["failed"] for row in data["rows"].values() if "failed" in row}
    assert failed == {"out of memory at batch 1", "peer 'tomesd' is not installed"}
    assert data["rows"]["null"]["unet"]["ratio"]["median"] == 1


@pytest.mark.parametrize("stage", [measure.measure_time, memory.measure_memory])
def test_nothing_is_measured_on_another_model(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Any
) -> None:
    """Although all images are there, so that none had to be made."""
    with folder_lock(tmp_path / "run"):
        generate.generate(Run(tmp_path / "run", timed), show_progress=False)
    load = measure.load_protocol_pipeline

    def retrained(protocol: Protocol) -> Any:
        pipe = load(protocol)
        with torch.no_grad():
            pipe.unet.conv_in.bias += 1
        return pipe

    for module, name in ((measure, "timed_call"), (memory, "run_worker")):
        monkeypatch.setattr(module, "load_protocol_pipeline", retrained)
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("measured"))
    with pytest.raises(ElfattError, match=r"images come out differently \(model_sha256: \w+ there, \w+ here\)"):
        stage(Run(tmp_path / "run", timed), lambda line: None)


def test_an_error_while_timing_fails_its_row_alone(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def call(pipe: Any, protocol: Protocol, cell: Cell, *_: Any) -> dict[str, float]:
        calls.append(cell.name)
        if cell.role == "baseline" and calls.count(cell.name) == 3:
            raise RuntimeError("shapes do not fit\nCompile with TORCH_USE_CUDA_DSA")
        return {"end_to_end": 2.0, "unet": 1.0}

    monkeypatch.setattr(measure, "timed_call", call)
    data = measure.measure_time(Run(tmp_path, timed), lambda line: None)
    assert data["errors"] == {"sd": "time not measured: RuntimeError: shapes do not fit"}
    assert data["rows"]["sd"] == {"failed": "time not measured: RuntimeError: shapes do not fit"}
    assert calls.count("sd") == 3
    assert len(data["rows"]["null"]["unet"]["values"]) == 3
    assert data["rows"]["null"]["unet"]["ratio"] is None  # not that of the rounds before


def test_the_kernel_of_every_row_is_recorded(timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "timed_call", lambda *_: {"end_to_end": 2.0, "unet": 1.0})
    monkeypatch.setattr(attention, "flash_takes", lambda query: True)
    rows = measure.measure_time(Run(tmp_path, timed), lambda line: None)["rows"]
    assert {name: row["attention_kernels"] for name, row in rows.items()} == {
        "sd": ["native"], "null": ["native"], timed.cells[2].name: ["flash-attn"], "tomesd-ratio0.5": ["native"],
    }  # fmt: skip


def test_summary_of_times() -> None:
    own = [{"unet": 1.0}, {"unet": 4.0}, {"unet": 2.0}]
    untouched = [{"unet": 2.0}, {"unet": 4.0}, {"unet": 6.0}]
    found = measure.summarize_time(own, untouched, ["unet"])["unet"]
    assert (found["seconds_per_image"], found["spread"]) == (2.0, [1.0, 4.0])
    assert found["ratio"] == {"median": 2.0, "low": 1.0, "high": 3.0, "values": [2.0, 1.0, 3.0]}
    assert measure.summarize_time(own, [], ["unet"])["unet"]["ratio"] is None
