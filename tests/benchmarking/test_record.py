"""Rounds are kept as they come, and the same benchmark goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elfatt_sd
from elfatt_sd.benchmarking import record as records
from elfatt_sd.benchmarking.record import Record, Session, code_hash, title
from elfatt_sd.config import ElfattError

KEY = {"size": 64, "batch": 2}


def begin(folder: Path, device: torch.device, **changes: Any) -> Record:
    settings = {"model": "x", **changes.pop("settings", {})}
    return Record(Session(folder, **changes), "unet", device, settings, bases=["a"])


def calls(seen: list[str]) -> dict[str, Callable[[], None]]:
    return {name: lambda name=name: seen.append(name) for name in "ab"}


def read(folder: Path, name: str = "unet") -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_a_file_after_every_round(tmp_path: Path, cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    write = records.write_json
    monkeypatch.setattr(
        records,
        "write_json",
        lambda path, data: (write(path, data), rounds.append(len(read(tmp_path)["groups"][0]["times"]["a"]))),
    )
    begin(tmp_path, cpu).time(KEY, calls([]), 3)
    assert rounds == [1, 2, 3]
    results = read(tmp_path)
    assert [row["method"] for row in results["rows"]] == ["a", "b"]
    assert results["rows"][0]["rounds"] == 3


def test_a_stopped_run_goes_on(tmp_path: Path, cpu: torch.device) -> None:
    """What was timed before is kept, the rest is added, and both sittings are on record."""
    begin(tmp_path, cpu).time(KEY, calls([]), 2)
    before = read(tmp_path)["groups"][0]["times"]
    seen: list[str] = []
    results = begin(tmp_path, cpu)
    results.time(KEY, calls(seen), 3)
    after = read(tmp_path)["groups"][0]
    assert len(seen) == 4  # a warm-up and one round
    assert {name: times[:2] for name, times in after["times"].items()} == before
    assert [sitting["rounds"] for sitting in after["sittings"]] == [2, 1]
    assert results.results["rows"][0]["rounds"] == 3


def test_what_no_longer_fits_has_no_rows(tmp_path: Path, cpu: torch.device) -> None:
    """Rounds of an earlier sitting stand beside none of the others'; that it was lost is on disk at once."""
    begin(tmp_path, cpu).time(KEY, calls([]), 2)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, cpu).time(KEY, {"b": fail, "a": stop}, 3)
    assert read(tmp_path)["groups"][0]["lost"] == ["b"]
    record = begin(tmp_path, cpu)
    record.time(KEY, calls([]), 4)
    assert [(row["method"], row["rounds"]) for row in record.results["rows"]] == [("a", 4)]


def test_a_finished_run_is_shown_again(tmp_path: Path, cpu: torch.device) -> None:
    begin(tmp_path, cpu).time(KEY, calls([]), 2)
    seen: list[str] = []
    again = begin(tmp_path, cpu)
    again.time(KEY, calls(seen), 2)
    assert seen == []
    assert again.results["rows"] == read(tmp_path)["rows"]


def test_start_over(tmp_path: Path, cpu: torch.device) -> None:
    begin(tmp_path, cpu).time(KEY, calls([]), 2)
    begin(tmp_path, cpu, again=True).time(KEY, calls([]), 1)
    assert len(read(tmp_path)["groups"][0]["times"]["a"]) == 1


def test_other_settings_or_code_are_not_mixed(tmp_path: Path, cpu: torch.device, monkeypatch: Any) -> None:
    begin(tmp_path, cpu).time(KEY, calls([]), 1)
    with pytest.raises(ElfattError, match=r'unet.json holds other results \(model: "x", now "y"\)'):
        begin(tmp_path, cpu, settings={"model": "y"})
    begin(tmp_path, cpu, name="other", settings={"model": "y"}).time(KEY, calls([]), 1)
    assert read(tmp_path, "other")["settings"]["model"] == "y"
    monkeypatch.setattr(records, "code_hash", lambda: "other")
    with pytest.raises(ElfattError, match="code_sha256"):
        begin(tmp_path, cpu)


def test_docstrings_of_what_is_timed_do_not_count(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(elfatt_sd, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "cli.py").write_text("x = 1")
    (tmp_path / "a.py").write_text('"""Words."""\nx = 1\n')
    found = records.code_hash()
    (tmp_path / "a.py").write_text("x = 1  # why\n")
    (tmp_path / "cli.py").write_text("x = 2")  # which is not timed
    assert records.code_hash() == found
    (tmp_path / "a.py").write_text("x = 2\n")
    assert records.code_hash() != found


def test_another_commit_of_the_same_code_goes_on(tmp_path: Path, cpu: torch.device) -> None:
    begin(tmp_path, cpu).time(KEY, calls([]), 1)
    results = read(tmp_path)
    results["machine"]["commit"] = "other"
    (tmp_path / "unet.json").write_text(json.dumps(results))
    assert len(begin(tmp_path, cpu).results["groups"]) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"groups": 1}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, cpu: torch.device, content: str) -> None:
    (tmp_path / "unet.json").write_text(content)
    with pytest.raises(ElfattError, match="holds no results"):
        begin(tmp_path, cpu)


def test_a_peak_is_measured_once(tmp_path: Path, cpu: torch.device) -> None:
    measured: list[int] = []

    def measure() -> int:
        measured.append(0)
        return 7

    for _ in range(2):
        record = begin(tmp_path, cpu)
        record.time(KEY, calls([]), 1)
        record.keep_peak(KEY, "a", 2, measure)
    assert len(measured) == 1
    assert [row["peak_bytes"] for row in read(tmp_path)["rows"]] == [7, None]


def test_who_is_told(cpu: torch.device) -> None:
    told: list[tuple[str, int, int]] = []
    session = Session(progress=lambda *said: told.append(said))
    Record(session, "unet", cpu, {}, bases=["a"]).time(KEY, calls([]), 1)
    assert told == [("64 pixels, batch 2", done, 4) for done in (0, 1, 2, 3, 4)]
    assert session.results is not None
    assert session.results["rows"][0]["method"] == "a"


def test_a_group_is_named() -> None:
    assert title({"tokens": 4096, "batch": 2, "part": "layer"}) == "4096 tokens, batch 2, layer"


def test_the_hash_is_that_of_the_code(tmp_path: Path, monkeypatch: Any) -> None:
    counts = ("merging.py", "benchmarking/timing.py", "measuring/clock.py", "methods/own.py", "evaluation/errors.py")
    others = ("cli.py", "toy/recipe.py", "evaluation/measure.py")  # print what was measured, or measure otherwise
    for name in ("__init__.py", *counts, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(records.elfatt_sd, "__file__", str(tmp_path / "__init__.py"))
    before = code_hash()
    for name in others:
        (tmp_path / name).write_text("2")
    assert code_hash() == before
    for name in counts:
        (tmp_path / name).write_text("2")
        assert code_hash() != before
        before = code_hash()
