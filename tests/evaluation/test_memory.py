"""Memory: what is fitted, and that running out of memory is a result, as is a system that does not tell."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate
from elfatt_sd.evaluation import measure as memory
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import Run, RunFailure

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture
def timed(tmp_path: Path, model: Path) -> Protocol:
    return small_run.small_protocol(tmp_path, model, "time.repeats=3", "time.batch=1", "memory.batches=[4, 1, 2]")


def test_memory_is_the_slope_of_a_line() -> None:
    results = [
        {"kind": "VmHWM", "peaks": {"text": 1.0, "unet": 2 + 0.5 * batch, "vae": 1 + 0.75 * batch}}
        for batch in (1, 2, 8)
    ]
    found = memory.summarize_memory([1, 2, 8], results)
    assert found["peaks_gib"] == [2.5, 3.0, 7.0]  # the largest of the stages, which is not the same one everywhere
    slopes = {stage: line["gib_per_image"] for stage, line in found["stages"].items()}
    assert slopes == pytest.approx({"text": 0.0, "unet": 0.5, "vae": 0.75})
    assert found["stages"]["unet"]["intercept_gib"] == pytest.approx(2.0)
    assert found["stages"]["unet"]["fit_error_gib"] == pytest.approx(0.0, abs=1e-12)
    assert found["kind"] == "VmHWM"


def test_fit_error_is_the_residuals_root_mean_square() -> None:
    results = [{"kind": "VmHWM", "peaks": {"all": peak}} for peak in (1.0, 3.0, 2.0)]
    found = memory.summarize_memory([1, 2, 3], results)
    assert found["gib_per_image"] == pytest.approx(0.5)
    assert found["intercept_gib"] == pytest.approx(1.0)
    assert found["fit_error_gib"] == pytest.approx(0.5**0.5)
    assert "stages" not in found


def test_the_slope_has_the_interval_that_the_fit_allows() -> None:
    """Against the textbook's formula for a slope's standard error, times Student's t."""
    peaks, batches = [1.0, 2.2, 2.9, 5.1, 8.8], [1, 2, 3, 5, 9]
    found = memory.summarize_memory(batches, [{"kind": "VmHWM", "peaks": {"all": peak}} for peak in peaks])
    slope, intercept = found["gib_per_image"], found["intercept_gib"]
    squares = sum((peak - intercept - slope * batch) ** 2 for batch, peak in zip(batches, peaks, strict=True))
    error = (squares / 3 / sum((batch - 4) ** 2 for batch in batches)) ** 0.5
    assert found["interval"] == pytest.approx([slope - 3.1824 * error, slope + 3.1824 * error], rel=1e-3)
    assert found["interval"][0] < found["interval"][1]
    two = memory.summarize_memory([1, 2], [{"kind": "VmHWM", "peaks": {"all": peak}} for peak in (1.0, 3.0)])
    assert (two["gib_per_image"], two["interval"]) == (2.0, None)


def test_out_of_memory_ends_a_row_and_is_named(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def worker(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
        asked.append((cell.name, batch))
        if batch == 4 or (cell.method == "elfatt" and batch == 2):
            return {"failed": f"out of memory at batch {batch}"}
        return {"kind": "CUDA allocated", "peaks": dict.fromkeys(memory.STAGES, 1.0 + batch), "reserved": {"unet": 9.0}}

    monkeypatch.setattr(memory, "run_worker", worker)
    rows = memory.measure_memory(Run(tmp_path, timed), lambda line: None)["rows"]
    assert rows["sd"]["gib_per_image"] == pytest.approx(1.0)
    assert rows["sd"]["note"] == "out of memory at batch 4"
    assert rows["sd"]["reserved"]["kind"] == "CUDA reserved"
    elfatt = next(cell.name for cell in timed.cells if cell.method == "elfatt")
    assert rows[elfatt]["gib_per_image"] is None
    assert rows[elfatt]["peaks_gib"] == [2.0]
    assert rows["null"]["same_program_as"] == "sd"
    assert not [name for name, _ in asked if name == "null"]
    before = len(asked)
    (tmp_path / memory.MEMORY_FILE).write_text(
        json.dumps({**json.loads((tmp_path / memory.MEMORY_FILE).read_text()), "rows": {"sd": rows["sd"]}})
    )
    assert memory.measure_memory(Run(tmp_path, timed), lambda line: None)["rows"]["sd"] == rows["sd"]
    assert {name for name, _ in asked[before:]} == {elfatt, "tomesd-ratio0.5"}  # finished rows are not measured again


def peaks(protocol: Protocol, cell: Cell, batch: int) -> dict[str, Any]:
    """What a worker might find."""
    return {"kind": "VmHWM", "peaks": {"all": 1.0 + batch}}


def test_memory_of_two_environments_is_not_mixed(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "run_worker", peaks)
    first = memory.measure_memory(Run(tmp_path, timed), lambda line: None)
    assert first["environment"]["device"]
    path = tmp_path / memory.MEMORY_FILE
    for elsewhere in ({**first["environment"], "device": "a GPU"}, {}):
        rows = {"sd": {**first["rows"]["sd"], "kind": "CUDA allocated"}}
        path.write_text(json.dumps({**first, "environment": elsewhere, "rows": rows}))
        again = memory.measure_memory(Run(tmp_path, timed), lambda line: None)
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
    monkeypatch.setattr(memory, "run_worker", worker)
    data = memory.measure_memory(Run(tmp_path, timed), lambda line: None)
    assert data["errors"] == {"tomesd-ratio0.5": "peer 'tomesd' is not installed"}
    assert data["rows"]["tomesd-ratio0.5"]["failed"] == "peer 'tomesd' is not installed"
    asked.clear()
    installed = True
    data = memory.measure_memory(Run(tmp_path, timed), lambda line: None)
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

    monkeypatch.setattr(memory, "run_worker", worker)
    lines: list[str] = []
    memory.measure_memory(Run(tmp_path, timed), lines.append)
    data = json.loads((tmp_path / memory.MEMORY_FILE).read_text())
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

    monkeypatch.setattr(memory, "run_worker", worker)
    rows = memory.measure_memory(Run(tmp_path, timed), lambda line: None)["rows"]
    notes = [f"batch {batch} took less than loading the model, and is left out" for batch in (1, 2, 4)]
    assert (rows["sd"]["batches"], rows["sd"]["peaks_gib"]) == ([2, 4], [3.0, 5.0])
    assert rows["sd"]["gib_per_image"] == pytest.approx(1)
    assert rows["sd"]["note"] == notes[0]
    assert rows[timed.cells[2].name] == {"batches": [], "note": "; ".join(notes), "failed": "; ".join(notes)}


@pytest.mark.parametrize("device", DEVICES)
def test_a_fresh_process_measures_every_stage(timed: Protocol, device: str) -> None:
    result = memory.run_worker(dataclasses.replace(timed, device=device), timed.cells[2], 2)
    assert result["kind"] == {"cpu": "VmHWM", "cuda": "CUDA allocated"}[device]
    assert set(result["peaks"]) in ({"text", "unet", "vae"}, {"all"})
    assert all({"cpu": 0.05, "cuda": 1e-4}[device] < peak < 20 for peak in result["peaks"].values())
    held = result.get("reserved", {})
    assert set(held) == (set(result["peaks"]) if device == "cuda" else set())
    assert all(held[stage] >= result["peaks"][stage] for stage in held)


def test_a_worker_that_fails_says_why(timed: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(code: int, stderr: str = "", stdout: str = "") -> None:
        done = memory.subprocess.CompletedProcess([], code, stdout, stderr)
        monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: done)

    ended(-9)
    assert memory.run_worker(timed, timed.baseline, 48) == {"failed": "out of memory at batch 48"}
    ended(1, "Traceback ...\nValueError: no such thing\n")
    with pytest.raises(RunFailure, match="memory not measured at batch 2: ValueError: no such thing"):
        memory.run_worker(timed, timed.baseline, 2)
    ended(0, stdout='{"error": "no such peer"}\n')
    with pytest.raises(ElfattError, match="no such peer"):
        memory.run_worker(timed, timed.baseline, 2)


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

    monkeypatch.setattr(memory, "measure_peaks", broken)
    assert worker_says(timed, monkeypatch, capsys, memory.code_hashes()) == said


def worker_says(timed: Protocol, monkeypatch: Any, capsys: Any, code: dict[str, str]) -> Any:
    """What a fresh process would print."""
    order = {"protocol": timed.to_dict(), "cell": "sd", "batch": 2, "code": code}
    monkeypatch.setattr(memory.sys, "stdin", io.StringIO(json.dumps(order)))
    memory._worker()
    return json.loads(capsys.readouterr().out)


def test_a_fresh_process_with_other_code_measures_nothing(timed: Protocol, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(memory, "measure_peaks", lambda *_: pytest.fail("measured"))
    said = worker_says(timed, monkeypatch, capsys, {"method_sha256": "of what ran before an edit"})
    assert said["error"].startswith("the code of elfatt_sd was changed during the run")


def test_stages_are_told_apart(timed: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the meter belongs to the part of the pipeline that has just run."""
    running = ["text"]
    pipe = generate.load_protocol_pipeline(timed)
    pipe.unet.register_forward_hook(lambda *_: running.append("unet"))
    pipe.vae.decoder.register_forward_hook(lambda *_: running.append("vae"))
    monkeypatch.setattr(memory, "load_protocol_pipeline", lambda *_: pipe)
    monkeypatch.setattr(memory.PeakMeter, "read", lambda self: {"text": 1, "unet": 2, "vae": 3}[running[-1]] << 30)
    monkeypatch.setattr(memory.PeakMeter, "restart", lambda self: True)
    assert memory.measure_peaks(timed, timed.baseline, 1)["peaks"] == {"text": 1.0, "unet": 2.0, "vae": 3.0}
    monkeypatch.setattr(memory.PeakMeter, "restart", lambda self: False)
    running[:] = ["text"]
    found = memory.measure_peaks(timed, timed.baseline, 1)
    assert (found["peaks"], found["loading"]) == ({"all": 3.0}, 1.0)


def test_a_system_that_does_not_tell_is_a_result(
    timed: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no error, which would be tried again for ever."""
    monkeypatch.setattr("elfatt_sd.measure.process_peak", lambda: None)
    monkeypatch.setattr(memory, "run_worker", lambda *_: pytest.fail("measured"))
    data = memory.measure_memory(Run(tmp_path, timed), lambda line: None)
    assert data["errors"] == {}
    assert {row["failed"].partition(":")[0] for row in data["rows"].values()} == {"not measured"}
    assert {row["gib_per_image"] for row in data["rows"].values() if "gib_per_image" in row} <= {None}
