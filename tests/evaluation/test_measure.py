"""Time and memory: what is summed and fitted, who has its turn when, and that running out of memory is a result."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs

from elfatt_sd import measure as clocks
from elfatt_sd.attention import softmax as attention
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate, measure
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import Run, RunFailure
from elfatt_sd.files import folder_lock

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture
def timed(tmp_path: Path, model: Path) -> Protocol:
    return runs.small_protocol(tmp_path, model, "time.repeats=3", "time.batch=1", "memory.batches=[4, 1, 2]")


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


@pytest.mark.parametrize("stage", [measure.measure_time, measure.measure_memory])
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

    monkeypatch.setattr(measure, "load_protocol_pipeline", retrained)
    for name in ("timed_call", "run_worker"):
        monkeypatch.setattr(measure, name, lambda *_: pytest.fail("measured"))
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


def test_memory_is_the_slope_of_a_line() -> None:
    results = [
        {"kind": "VmHWM", "peaks": {"text": 1.0, "unet": 2 + 0.5 * batch, "vae": 1 + 0.75 * batch}}
        for batch in (1, 2, 8)
    ]
    found = measure.summarize_memory([1, 2, 8], results)
    assert found["peaks_gib"] == [2.5, 3.0, 7.0]  # the largest of the stages, which is not the same one everywhere
    slopes = {stage: line["gib_per_image"] for stage, line in found["stages"].items()}
    assert slopes == pytest.approx({"text": 0.0, "unet": 0.5, "vae": 0.75})
    assert found["stages"]["unet"]["intercept_gib"] == pytest.approx(2.0)
    assert found["stages"]["unet"]["fit_error_gib"] == pytest.approx(0.0, abs=1e-12)
    assert found["kind"] == "VmHWM"


def test_fit_error_is_the_residuals_root_mean_square() -> None:
    results = [{"kind": "VmHWM", "peaks": {"all": peak}} for peak in (1.0, 3.0, 2.0)]
    found = measure.summarize_memory([1, 2, 3], results)
    assert found["gib_per_image"] == pytest.approx(0.5)
    assert found["intercept_gib"] == pytest.approx(1.0)
    assert found["fit_error_gib"] == pytest.approx(0.5**0.5)
    assert "stages" not in found


def test_the_slope_has_the_interval_that_the_fit_allows() -> None:
    """Against the textbook's formula for a slope's standard error, times Student's t."""
    peaks, batches = [1.0, 2.2, 2.9, 5.1, 8.8], [1, 2, 3, 5, 9]
    found = measure.summarize_memory(batches, [{"kind": "VmHWM", "peaks": {"all": peak}} for peak in peaks])
    slope, intercept = found["gib_per_image"], found["intercept_gib"]
    squares = sum((peak - intercept - slope * batch) ** 2 for batch, peak in zip(batches, peaks, strict=True))
    error = (squares / 3 / sum((batch - 4) ** 2 for batch in batches)) ** 0.5
    assert found["interval"] == pytest.approx([slope - 3.1824 * error, slope + 3.1824 * error], rel=1e-3)
    assert found["interval"][0] < found["interval"][1]
    two = measure.summarize_memory([1, 2], [{"kind": "VmHWM", "peaks": {"all": peak}} for peak in (1.0, 3.0)])
    assert (two["gib_per_image"], two["interval"]) == (2.0, None)


def test_out_of_memory_ends_a_row_and_is_named(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def worker(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
        asked.append((cell.name, batch))
        if batch == 4 or (cell.method == "elfatt" and batch == 2):
            return {"failed": f"out of memory at batch {batch}"}
        return {
            "kind": "CUDA allocated",
            "peaks": dict.fromkeys(measure.STAGES, 1.0 + batch),
            "reserved": {"unet": 9.0},
        }

    monkeypatch.setattr(measure, "run_worker", worker)
    rows = measure.measure_memory(Run(tmp_path, timed), lambda line: None)["rows"]
    assert rows["sd"]["gib_per_image"] == pytest.approx(1.0)
    assert rows["sd"]["note"] == "out of memory at batch 4"
    assert rows["sd"]["reserved"]["kind"] == "CUDA reserved"
    elfatt = next(cell.name for cell in timed.cells if cell.method == "elfatt")
    assert rows[elfatt]["gib_per_image"] is None
    assert rows[elfatt]["peaks_gib"] == [2.0]
    assert rows["null"]["same_program_as"] == "sd"
    assert not [name for name, _ in asked if name == "null"]
    before = len(asked)
    (tmp_path / measure.MEMORY_FILE).write_text(
        json.dumps({**json.loads((tmp_path / measure.MEMORY_FILE).read_text()), "rows": {"sd": rows["sd"]}})
    )
    assert measure.measure_memory(Run(tmp_path, timed), lambda line: None)["rows"]["sd"] == rows["sd"]
    assert {name for name, _ in asked[before:]} == {elfatt, "tomesd-ratio0.5"}  # finished rows are not measured again


def peaks(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
    """What a worker might find."""
    return {"kind": "VmHWM", "peaks": {"all": 1.0 + batch}}


def test_memory_of_two_environments_is_not_mixed(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "run_worker", peaks)
    first = measure.measure_memory(Run(tmp_path, timed), lambda line: None)
    assert first["environment"]["device"]
    path = tmp_path / measure.MEMORY_FILE
    for elsewhere in ({**first["environment"], "device": "a GPU"}, {}):
        rows = {"sd": {**first["rows"]["sd"], "kind": "CUDA allocated"}}
        path.write_text(json.dumps({**first, "environment": elsewhere, "rows": rows}))
        again = measure.measure_memory(Run(tmp_path, timed), lambda line: None)
        assert again["environment"] == first["environment"]
        assert {row["kind"] for row in again["rows"].values()} == {"VmHWM"}
        assert json.loads(path.read_text()) == again


def test_memory_that_could_not_be_measured_is_measured_later(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def worker(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
        asked.append(cell.name)
        if cell.peer and not installed:
            raise ElfattError("peer 'tomesd' is not installed")
        return peaks(protocol, cell, batch)

    installed = False
    monkeypatch.setattr(measure, "run_worker", worker)
    data = measure.measure_memory(Run(tmp_path, timed), lambda line: None)
    assert data["errors"] == {"tomesd-ratio0.5": "peer 'tomesd' is not installed"}
    assert data["rows"]["tomesd-ratio0.5"]["failed"] == "peer 'tomesd' is not installed"
    asked.clear()
    installed = True
    data = measure.measure_memory(Run(tmp_path, timed), lambda line: None)
    assert set(asked) == {"tomesd-ratio0.5"}
    assert data["errors"] == {}
    assert data["rows"]["tomesd-ratio0.5"]["gib_per_image"] == pytest.approx(1)


def test_a_crash_of_a_worker_fails_its_row_alone(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worker(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
        if cell.method == "elfatt":
            raise RunFailure("Segmentation fault")
        return peaks(protocol, cell, batch)

    monkeypatch.setattr(measure, "run_worker", worker)
    lines: list[str] = []
    measure.measure_memory(Run(tmp_path, timed), lines.append)
    data = json.loads((tmp_path / measure.MEMORY_FILE).read_text())
    elfatt = timed.cells[2].name
    assert data["errors"] == {elfatt: "Segmentation fault"}
    assert data["rows"][elfatt]["failed"] == "Segmentation fault"
    assert data["rows"]["tomesd-ratio0.5"]["gib_per_image"] == pytest.approx(1)
    assert lines[3:5] == [f"memory: row 3 of 4, {elfatt}, batch 1", "memory: row 4 of 4, tomesd-ratio0.5, batch 1"]


def test_a_peak_that_loading_hides_is_left_out(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the peak cannot start anew, a small batch may stay below what loading took: the line would be too flat."""

    def worker(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
        loading = 10.0 if cell.method == "elfatt" else 2.5
        return {"kind": "VmHWM", "peaks": {"all": max(1.0 + batch, loading)}, "loading": loading}

    monkeypatch.setattr(measure, "run_worker", worker)
    rows = measure.measure_memory(Run(tmp_path, timed), lambda line: None)["rows"]
    notes = [f"batch {batch} took less than loading the model, and is left out" for batch in (1, 2, 4)]
    assert (rows["sd"]["batches"], rows["sd"]["peaks_gib"]) == ([2, 4], [3.0, 5.0])
    assert rows["sd"]["gib_per_image"] == pytest.approx(1)
    assert rows["sd"]["note"] == notes[0]
    assert rows[timed.cells[2].name] == {"batches": [], "note": "; ".join(notes), "failed": "; ".join(notes)}


@pytest.mark.parametrize("device", DEVICES)
def test_a_fresh_process_measures_every_stage(timed: Protocol, device: str) -> None:
    result = measure.run_worker(dataclasses.replace(timed, device=device), timed.cells[2], 2)
    assert result["kind"] == {"cpu": "VmHWM", "cuda": "CUDA allocated"}[device]
    assert set(result["peaks"]) in ({"text", "unet", "vae"}, {"all"})
    assert all({"cpu": 0.05, "cuda": 1e-4}[device] < peak < 20 for peak in result["peaks"].values())
    held = result.get("reserved", {})
    assert set(held) == (set(result["peaks"]) if device == "cuda" else set())
    assert all(held[stage] >= result["peaks"][stage] for stage in held)


def test_a_worker_that_fails_says_why(timed: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(code: int, stderr: str = "", stdout: str = "") -> None:
        done = measure.subprocess.CompletedProcess([], code, stdout, stderr)
        monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: done)

    ended(-9)
    assert measure.run_worker(timed, timed.baseline, 48) == {"failed": "out of memory at batch 48"}
    ended(1, "Traceback ...\nValueError: no such thing\n")
    with pytest.raises(RunFailure, match="memory not measured at batch 2: ValueError: no such thing"):
        measure.run_worker(timed, timed.baseline, 2)
    ended(0, stdout='{"error": "no such peer"}\n')
    with pytest.raises(ElfattError, match="no such peer"):
        measure.run_worker(timed, timed.baseline, 2)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("assert\nCompile with DSA"), {"error": "memory not measured at batch 2: RuntimeError: assert"}),
        (KeyError(), {"error": "memory not measured at batch 2: KeyError"}),
        (ElfattError("no such peer"), {"error": "no such peer"}),
        (torch.OutOfMemoryError("CUDA out of memory"), {"failed": "out of memory at batch 2"}),
    ],
    ids=repr,
)
def test_what_goes_wrong_in_a_worker_is_one_line(
    timed: Protocol,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    said: dict[str, str],
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(measure, "measure_peaks", broken)
    assert worker_says(timed, monkeypatch, capsys, measure.code_hashes()) == said


def worker_says(timed: Protocol, monkeypatch: Any, capsys: Any, code: dict[str, str]) -> Any:
    """What a fresh process would print."""
    order = {"protocol": timed.to_dict(), "cell": "sd", "batch": 2, "code": code}
    monkeypatch.setattr(measure.sys, "stdin", io.StringIO(json.dumps(order)))
    measure._worker()
    return json.loads(capsys.readouterr().out)


def test_a_fresh_process_with_other_code_measures_nothing(timed: Protocol, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(measure, "measure_peaks", lambda *_: pytest.fail("measured"))
    said = worker_says(timed, monkeypatch, capsys, {"method_sha256": "of what ran before an edit"})
    assert said["error"].startswith("the code of elfatt_sd was changed during the run")


def test_stages_are_told_apart(timed: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the meter belongs to the part of the pipeline that has just run."""
    running = ["text"]
    pipe = generate.load_protocol_pipeline(timed)
    pipe.unet.register_forward_hook(lambda *_: running.append("unet"))
    pipe.vae.decoder.register_forward_hook(lambda *_: running.append("vae"))
    monkeypatch.setattr(measure, "load_protocol_pipeline", lambda *_: pipe)
    monkeypatch.setattr(measure.PeakMeter, "read", lambda self: {"text": 1, "unet": 2, "vae": 3}[running[-1]] << 30)
    monkeypatch.setattr(measure.PeakMeter, "restart", lambda self: True)
    assert measure.measure_peaks(timed, timed.baseline, 1)["peaks"] == {"text": 1.0, "unet": 2.0, "vae": 3.0}
    monkeypatch.setattr(measure.PeakMeter, "restart", lambda self: False)
    running[:] = ["text"]
    found = measure.measure_peaks(timed, timed.baseline, 1)
    assert (found["peaks"], found["loading"]) == ({"all": 3.0}, 1.0)


def test_a_system_that_does_not_tell_is_a_result(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no error, which would be tried again for ever."""
    monkeypatch.setattr("elfatt_sd.measure.process_peak", lambda: None)
    monkeypatch.setattr(measure, "run_worker", lambda *_: pytest.fail("measured"))
    data = measure.measure_memory(Run(tmp_path, timed), lambda line: None)
    assert data["errors"] == {}
    assert {row["failed"].partition(":")[0] for row in data["rows"].values()} == {"not measured"}
    assert {row["gib_per_image"] for row in data["rows"].values() if "gib_per_image" in row} <= {None}
