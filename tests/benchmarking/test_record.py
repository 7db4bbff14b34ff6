"""Rounds are kept as they come, and progress counts all calls that are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from elfatt_sd.benchmarking.record import Record, Session, title

KEY = {"size": 64, "batch": 2}


def begin(device: torch.device) -> Record:
    return Record(None, "unet", device, {"model": "x"}, bases=["a"])


def calls(seen: list[str]) -> dict[str, Callable[[], None]]:
    return {name: lambda name=name: seen.append(name) for name in "ab"}


def test_a_stopped_benchmark_has_its_whole_rounds(cpu: torch.device) -> None:
    seen: list[str] = []
    record = begin(cpu)

    def stop() -> None:
        seen.append("stop")
        if seen.count("stop") == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.time(KEY, {"a": lambda: None, "b": stop}, 5)
    assert [(row["method"], row["rounds"]) for row in record.results["rows"]] == [("a", 2), ("b", 2)]
    [sitting] = record.results["groups"][0]["sittings"]
    assert sitting["rounds"] == 2 and sitting["started"]


def test_what_does_not_fit_has_no_row(cpu: torch.device) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    record = begin(cpu)
    record.time(KEY, {"b": fail, **{name: call for name, call in calls([]).items() if name != "b"}}, 3)
    record.keep_peak(KEY, "b", 2, lambda: 9)
    assert record.results["groups"][0]["lost"] == ["b"]
    assert [(row["method"], row["rounds"], row["peak_bytes"]) for row in record.results["rows"]] == [("a", 3, None)]


def test_peaks_stand_in_the_rows(cpu: torch.device) -> None:
    record = begin(cpu)
    record.time(KEY, calls([]), 1)
    record.keep_peak(KEY, "a", 2, lambda: 7)
    assert [row["peak_bytes"] for row in record.results["rows"]] == [7, None]


def test_who_is_told(cpu: torch.device) -> None:
    told: list[tuple[str, int, int]] = []
    session = Session(progress=lambda *said: told.append(said))
    Record(session, "unet", cpu, {}, bases=["a"]).time(KEY, calls([]), 1)
    assert told == [("64 pixels, batch 2", done, 4) for done in (0, 1, 2, 3, 4)]
    assert session.results is not None
    assert session.results["rows"][0]["method"] == "a"


def test_a_group_is_named() -> None:
    assert title({"tokens": 4096, "batch": 2, "part": "layer"}) == "4096 tokens, batch 2, layer"
