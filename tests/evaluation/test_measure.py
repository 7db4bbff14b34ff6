"""Time and memory: what is summed and fitted, who has its turn when, and that running out of memory is a result."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs

from elfatt_sd import measure as clocks
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.evaluation import generate, measure
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import RunFolder

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
Stage = Callable[..., dict[str, Any]]


@pytest.fixture
def timed(tmp_path: Path, model: Path) -> Protocol:
    return runs.small_protocol(tmp_path, model, "time.repeats=3", "time.batch=1", "memory.batches=[4, 1, 2]")


@pytest.fixture
def time(timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Times rows with a made-up call: of the cell and the protocol, which has the steps."""

    def run(call: Callable[[Cell, Protocol], dict[str, float]], **changes: Any) -> dict[str, Any]:
        monkeypatch.setattr(measure, "timed_call", lambda pipe, protocol, cell, *_: call(cell, protocol))
        return measure.measure_time(RunFolder(tmp_path, dataclasses.replace(timed, **changes)), lambda line: None)

    return run


@pytest.fixture
def weigh(timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Measures memory with a made-up worker: of the cell and the batch."""

    def run(worker: Callable[[Cell, int], dict[str, Any]]) -> dict[str, Any]:
        monkeypatch.setattr(measure, "run_worker", lambda protocol, cell, batch: worker(cell, batch))
        data = measure.measure_memory(RunFolder(tmp_path, timed), lambda line: None)
        assert json.loads((tmp_path / measure.MEMORY_FILE).read_text()) == data
        return data

    return run


def test_a_timed_call_counts_all_and_divides_by_the_images(timed: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: clock[0])
    pipe = generate.load_protocol_pipeline(timed)

    def slow(part: Any, name: str, seconds: float) -> None:
        real = getattr(part, name)

        def call(*args: Any, **options: Any) -> Any:
            clock[0] += seconds
            return real(*args, **options)

        monkeypatch.setattr(part, name, call)

    slow(pipe.unet, "forward", 1.0)
    slow(pipe.text_encoder, "forward", 10.0)
    slow(pipe.vae, "decode", 100.0)
    seconds = measure.timed_call(pipe, timed, timed.baseline, 2)
    assert seconds["unet"] == 5 / 2  # PLMS makes one call more than it has steps
    assert seconds["end_to_end"] == (5 + 2 * 10 + 100) / 2


def test_rows_take_turns_in_every_round(time: Stage, timed: Protocol) -> None:
    """The median and the spread are those of the rounds, and each round has its ratio."""
    order: list[tuple[str, int]] = []

    def call(cell: Cell, protocol: Protocol) -> dict[str, float]:
        order.append((cell.name, protocol.steps))
        turn = (len(order) - 1) // 4  # the warm-up is the first
        slow = (9.0, 2.0, 4.0, 6.0) if cell.role == "baseline" else (9.0, 1.0, 4.0, 2.0)
        return {"end_to_end": slow[turn], "unet": slow[turn]}

    data = time(call, steps=50)
    rows = {cell.name for cell in timed.cells}
    rounds = [order[start : start + len(rows)] for start in range(0, len(order), len(rows))]
    assert [{steps for _, steps in once} for once in rounds] == [{measure.WARMUP_STEPS}, {50}, {50}, {50}]
    assert all({name for name, _ in once} == rows for once in rounds)
    assert len({once[0][0] for once in rounds[1:]}) == 3, "no row is always first"
    found = data["rows"]["null"]["unet"]
    assert (found["seconds_per_image"], found["spread"], found["values"]) == (2.0, [1.0, 4.0], [1.0, 4.0, 2.0])
    assert found["ratio"] == {"median": 2.0, "low": 1.0, "high": 3.0, "values": [2.0, 1.0, 3.0]}
    assert data["environment"]["packages"]["torch"]


def test_a_row_that_cannot_be_timed_is_told_and_the_others_are(time: Stage) -> None:
    """Out of memory is a result and no error; a baseline that fails later gives no ratios of the rounds before."""
    calls: list[str] = []

    def call(cell: Cell, _: Protocol) -> dict[str, float]:
        calls.append(cell.name)
        if cell.peer:
            raise ElfattError("peer 'tomesd' is not installed")
        if cell.method == "elfatt":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if cell.role == "baseline" and calls.count(cell.name) == 3:
            raise RuntimeError("shapes do not fit\nCompile with TORCH_USE_CUDA_DSA")
        return {"end_to_end": 2.0, "unet": 1.0}

    data = time(call)
    said = {"tomesd-ratio0.5": "peer 'tomesd' is not installed", "sd": "RuntimeError: shapes do not fit"}
    assert data["errors"] == {name: f"time not measured: {each}" for name, each in said.items()}
    failed = {row["failed"] for row in data["rows"].values() if "failed" in row}
    assert failed == {"out of memory at batch 1", *data["errors"].values()} and calls.count("sd") == 3
    assert (len(data["rows"]["null"]["unet"]["values"]), data["rows"]["null"]["unet"]["ratio"]) == (3, None)


@pytest.mark.parametrize("stage", [measure.measure_time, measure.measure_memory])
def test_no_other_model_is_measured(made: tuple[Path, Protocol], monkeypatch: pytest.MonkeyPatch, stage: Any) -> None:
    """Although all images are there, so that none had to be made."""
    real, other = generate.image_environment, {"model_sha256": "other"}
    monkeypatch.setattr(generate, "image_environment", lambda *given: real(*given) | other)
    for name in ("timed_call", "run_worker"):
        monkeypatch.setattr(measure, name, lambda *_: pytest.fail("measured"))
    with pytest.raises(ElfattError, match=r"images come out differently \(model_sha256: \w+ there, other here\)"):
        stage(RunFolder(*made), lambda line: None)


def test_memory_is_the_slope_of_a_line_with_the_interval_that_the_fit_allows() -> None:
    """Against the textbook's formula for a slope's standard error, times Student's t."""
    peaks = {1: 1.0, 2: 2.2, 3: 2.9, 5: 5.1, 9: 8.8}
    found = measure.summarize_memory(peaks, "VmHWM")
    slope, intercept = found["gib_per_image"], found["intercept_gib"]
    squares = sum((peak - intercept - slope * batch) ** 2 for batch, peak in peaks.items())
    error = (squares / 3 / sum((batch - 4) ** 2 for batch in peaks)) ** 0.5
    assert found["fit_error_gib"] == pytest.approx((squares / 5) ** 0.5)
    assert found["interval"] == pytest.approx([slope - 3.1824 * error, slope + 3.1824 * error], rel=1e-3)
    two = measure.summarize_memory({1: 1.0, 2: 3.0}, "VmHWM")
    assert (two["gib_per_image"], two["intercept_gib"], two["interval"]) == (2.0, -1.0, None)


def test_what_ends_or_hides_a_measurement_is_told(
    weigh: Stage, timed: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory; a peak that loading hides, which would flatten the line; an error; a system that does not tell."""
    asked, broken, stops = list[str](), ["Segmentation fault"], [KeyboardInterrupt()]
    _, _, elfatt, peer = (cell.name for cell in timed.cells)

    def worker(cell: Cell, batch: int) -> dict[str, Any]:
        if cell.name == elfatt and stops:
            raise stops.pop()
        asked.append(cell.name)
        if cell.peer and broken:
            raise ElfattFailure(broken.pop())
        if batch == 4 or (cell.name == elfatt and batch == 2):
            return {"failed": f"out of memory at batch {batch}"}
        return {"kind": "CUDA allocated", "peak": 1.0 + batch, "loading": 2.5 if cell.peer else 0.0}

    with pytest.raises(KeyboardInterrupt):
        weigh(worker)
    data = weigh(worker)
    rows = data["rows"]
    assert rows["sd"]["gib_per_image"] == pytest.approx(1.0)
    assert (rows["sd"]["note"], rows["sd"]["kind"]) == ("out of memory at batch 4", "CUDA allocated")
    assert (rows[elfatt]["gib_per_image"], rows[elfatt]["peaks_gib"]) == (None, [2.0])
    assert rows["null"]["same_program_as"] == "sd" and "null" not in asked
    assert (data["errors"], rows[peer]["failed"]) == ({peer: "Segmentation fault"}, "Segmentation fault")
    again = weigh(worker)
    hidden = "batch 1 took less than loading the model, and is left out; out of memory at batch 4"
    assert (again["rows"][peer]["batches"], again["rows"][peer]["note"]) == ([2], hidden)
    assert (again["errors"], again["environment"]) == ({}, data["environment"])
    assert (asked.count("sd"), asked.count(peer)) == (3, 4), "what was measured is kept"
    monkeypatch.setattr("elfatt_sd.measure.process_peak", lambda: None)
    data = weigh(lambda *_: pytest.fail("measured"))
    assert {row["failed"].partition(":")[0] for row in data["rows"].values()} == {"not measured"} and not data["errors"]


@pytest.mark.parametrize("device", DEVICES)
def test_real_measurements(timed: Protocol, tmp_path: Path, device: str) -> None:
    """Times replace those of an earlier attempt, and a fresh process tells its peak."""
    (tmp_path / measure.TIME_FILE).write_text('{"rows": {"sd": {"unet": {"values": [1e9]}}}}')
    protocol = dataclasses.replace(timed, device=device, steps=2)
    for row in measure.measure_time(RunFolder(tmp_path, protocol), lambda line: None)["rows"].values():
        assert len(row["unet"]["values"]) == len(row["end_to_end"]["values"]) == 3
        assert 0 < row["unet"]["seconds_per_image"] < row["end_to_end"]["seconds_per_image"] < 1e6
    result = measure.run_worker(protocol, timed.cells[2], 2)
    assert result["kind"] == {"cpu": "VmHWM", "cuda": "CUDA allocated"}[device]
    assert {"cpu": 0.05, "cuda": 1e-4}[device] < result["peak"] < 20


def test_a_peak_that_cannot_start_anew_has_that_of_loading(timed: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    for restarts, loading in ((True, 0.0), (False, 2.0)):
        readings = iter([3 << 30] if restarts else [2 << 30, 3 << 30])
        monkeypatch.setattr(measure.PeakMeter, "read", lambda self, readings=readings: next(readings))
        monkeypatch.setattr(measure.PeakMeter, "restart", lambda self, can=restarts: can)
        found = measure.measure_peak(timed, timed.baseline, 1)
        assert (found["peak"], found["loading"]) == (3.0, loading)


MEMORY = "out of memory at batch 2"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("assert\nCompile with DSA"), "memory not measured at batch 2: RuntimeError: assert"),
        (torch.OutOfMemoryError("CUDA out of memory"), MEMORY),
        (None, "memory not measured at batch 2: the code of elfatt_sd was changed during the run"),
        (-9, MEMORY),
        (1, "memory not measured at batch 2: ValueError: no such thing"),
    ],
    ids=repr,
)
def test_what_goes_wrong_in_a_worker_is_one_line(
    timed: Protocol, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Any, said: str
) -> None:
    """An exception there, an edit of the code meanwhile, and a process that ends with a code. Out of memory is none."""

    def broken(*_: Any) -> None:
        raise error or pytest.fail("measured")

    def run(command: list[str], *, input: str, **_: Any) -> Any:
        if isinstance(error, int):
            return done([], error, "", "Traceback ...\nValueError: no such thing\n")
        order = json.loads(input) | ({} if error else {"code": {"method_sha256": "of what ran before an edit"}})
        monkeypatch.setattr(measure.sys, "stdin", io.StringIO(json.dumps(order)))
        try:
            measure._worker()
        except SystemExit as end:
            return done([], 1, "", f"{end}\n")
        return done([], 0, capsys.readouterr().out, "")

    done = measure.subprocess.CompletedProcess
    monkeypatch.setattr(measure, "measure_peak", broken)
    monkeypatch.setattr(measure.subprocess, "run", run)
    if said == MEMORY:
        assert measure.run_worker(timed, timed.baseline, 2) == {"failed": MEMORY}
    else:
        with pytest.raises(ElfattError, match=said):
            measure.run_worker(timed, timed.baseline, 2)
