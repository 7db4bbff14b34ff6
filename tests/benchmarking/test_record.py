"""Calls run interleaved in whole rounds, which are kept as they come; rows, ratios, floors and growth follow from them.

No time is asserted from above.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elfatt_sd.benchmarking import record
from elfatt_sd.benchmarking.record import Record, Session, make_rows, own_part, title
from elfatt_sd.benchmarking.variants import is_reference

KEY = {"size": 64, "batch": 2}


def calls(names: str, seen: list[str]) -> dict[str, Callable[[], None]]:
    return {name: lambda name=name: seen.append(name) for name in names}


@pytest.fixture
def told() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture
def made(cpu: torch.device, told: list[tuple[str, int, int]]) -> Record:
    return Record(Session(progress=lambda *said: told.append(said)), "unet", cpu, {"model": "x"}, bases=["a"])


def rounds(made: Record) -> dict[str, int]:
    return {row["method"]: row["rounds"] for row in made.results["rows"]}


def test_interleaved_calls_take_turns(made: Record, told: Any) -> None:
    """One warm-up round, then rounds that each start with another call; the progress counts every call."""
    seen: list[str] = []
    made.time(KEY, calls("abc", seen), 3)
    assert rounds(made) == {"a": 3, "b": 3, "c": 3}
    turns = ["".join(seen[start : start + 3]) for start in range(0, 12, 3)]
    assert [sorted(each) for each in turns] == [list("abc")] * 4
    assert len(set(turns[1:])) == 3
    assert told == [("64 pixels, batch 2", done, 12) for done in range(13)]


def test_the_warm_up_can_be_other_calls(made: Record) -> None:
    seen: list[str] = []
    made.time(KEY, calls("ab", seen), 1, warm_up=calls("xyz", seen))
    assert "".join(seen) == "xyzab"


def test_no_round_starts_late_but_one_is_run(made: Record) -> None:
    seen: list[str] = []
    made.time(KEY, calls("a", seen), 100, seconds=0)
    assert (len(seen), rounds(made)) == (2, {"a": 1})


def test_a_call_is_timed(made: Record) -> None:
    """Sleeping takes at least as long as asked for."""
    made.time(KEY, {"a": lambda: time.sleep(0.02)}, 2)
    assert min(made.results["groups"][0]["times"]["a"]) >= 0.02


@pytest.mark.parametrize(("quick", "warmed"), [(1e9, ["s", "b", "a"]), (0.0, ["s", "b"])])
def test_quick_calls_are_warmed_up_as_they_are(
    made: Record, quick: float, warmed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something smaller in their place only where they would take long."""
    monkeypatch.setattr(record, "QUICK", quick)
    seen: list[str] = []
    full = calls("ab", seen)
    made.time(KEY, full, 1, warm_up={**calls("s", seen), "b": full["b"]})
    assert seen == [*warmed, "a", "b"]


def test_what_does_not_fit_is_left_out(made: Record, told: Any) -> None:
    """It is named, not timed again, and the others have all their rounds; another error stops everything."""
    seen: list[str] = []

    def fail(error: Exception) -> None:
        seen.append("x")
        raise error

    full = {**calls("ab", seen), "x": lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))}
    made.time(KEY, full, 2)
    made.keep_peak(KEY, "x", 2, lambda: 9)
    assert (made.results["groups"][0]["lost"], seen.count("x"), told[-1][1:]) == (["x"], 1, (7, 7))
    assert rounds(made) == {"a": 2, "b": 2}
    with pytest.raises(RuntimeError, match="other"):
        made.time({"size": 128}, {"x": lambda: fail(RuntimeError("other"))}, 2)


def test_a_stopped_benchmark_has_its_whole_rounds(made: Record) -> None:
    seen: list[str] = []

    def stop() -> None:
        seen.append("stop")
        if seen.count("stop") == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.time(KEY, {"a": lambda: None, "b": stop}, 5)
    assert rounds(made) == {"a": 2, "b": 2}
    [sitting] = made.results["groups"][0]["sittings"]
    assert sitting["rounds"] == 2 and sitting["started"]


def test_peaks_stand_in_the_rows(made: Record) -> None:
    made.time(KEY, calls("ab", []), 1)
    made.keep_peak(KEY, "a", 2, lambda: 7)
    assert [row["peak_bytes"] for row in made.results["rows"]] == [7, None]


def results(**changes: Any) -> dict[str, Any]:
    runs = {
        "untouched": {"parts": [["untouched", 50]], "floor": None},
        "x": {"parts": [["untouched", 10], ["x/1", 40]], "floor": "floor"},
        "floor": {"parts": [["floor", 50]], "floor": None},
    }
    group = {
        "key": {"size": 512, "batch": 2},
        "times": {"untouched": [5.0, 10.0], "x/1": [2.5, 5.0], "floor": [2.0, 4.0]},
        "peaks": {"untouched": {"2": 7, "4": 11}, "x/1": {"2": 9, "4": 12}},
    }
    named = {name: {"what": f"what {name} is"} for name in group["times"]}
    return {"runs": runs, "bases": ["untouched"], "groups": [group], "settings": {"variants": named}, **changes}


def test_rows_add_up_the_parts() -> None:
    untouched, x, floor = make_rows(results())
    assert (x["size"], x["batch"], x["rounds"], x["seconds"]) == (512, 2, 2, 4.5)  # 3 and 6 seconds a call
    assert x["speed"]["untouched"]["median"] == pytest.approx(5 / 3)
    assert x["floor"] == {"name": "floor", **dict.fromkeys(("median", "min", "max"), pytest.approx(1.5))}
    assert untouched["floor"] is None and floor["floor"] is None
    exact, own = x["parts"]
    assert (own["variant"], own["steps"], own["what"]) == ("x/1", 40, "what x/1 is")
    assert own["speed"]["untouched"]["median"] == 2
    assert (own["floor"]["median"], exact["floor"]["median"]) == (pytest.approx(1.25), pytest.approx(2.5))
    assert "parts" not in floor


@pytest.mark.parametrize(
    ("batch", "peaks", "figures"),
    [
        (2, None, [(7, 4), (9, 3), (None, None)]),  # from 9 to 12 bytes for one more image, which is two rows
        (4, None, [(11, 4), (12, 3), (None, None)]),
        (8, None, [(None, 4), (None, 3), (None, None)]),
        (2, {"untouched": {"2": 7}, "x/1": {"2": None}}, [(7, None), (None, None), (None, None)]),
    ],
)
def test_memory_is_that_of_the_greatest_part_and_grows_by_image(batch: int, peaks: Any, figures: Any) -> None:
    data = results()
    data["groups"][0]["key"]["batch"] = batch
    data["groups"][0]["peaks"] = peaks or data["groups"][0]["peaks"]
    assert [(row["peak_bytes"], row["bytes_per_picture"]) for row in make_rows(data)] == figures


def test_what_was_not_timed_is_left_out() -> None:
    data = results(runs=None, bases=["softmax", "floor"])
    assert [list(row["speed"]) for row in make_rows(data)] == [["floor"]] * 3
    data = results()
    data["groups"][0]["times"]["floor"] = []
    assert [row["floor"] for row in make_rows(data)] == [None, None]
    data["groups"][0]["times"] = {"untouched": [], "x/1": [], "floor": []}
    assert make_rows(data) == []
    errors = [{"layer": "a", "step": 2, "method": "m", "error": 0.1}]  # measured without rounds
    group = {"key": {"method": "m"}, "times": {}, "peaks": {}, "measured": errors}
    assert make_rows({"groups": [group], "bases": []}) == errors


@pytest.mark.parametrize("ending", ["", ", compiled", ", autotuned"])
def test_a_run_has_a_phase_of_its_own(ending: str) -> None:
    times = (("untouched", 30, 1.0), ("x/1", 15, 3.0), ("x/2", 5, 2.0))
    parts = [{"variant": f"{name}{ending}", "steps": steps, "seconds": seconds} for name, steps, seconds in times]
    row = {"method": f"x{ending}", "parts": parts}
    assert own_part(row) == parts[2]
    assert own_part({**row, "parts": parts[2:]}) is None
    assert own_part({"method": "floor"}) is None


def test_names_of_rows() -> None:
    assert title({"tokens": 4096, "batch": 2, "part": "layer"}) == "4096 tokens, batch 2, layer"
    references = ("untouched", "tomesd", "floor", "floor of 2 levels", "untouched, compiled", "floor, compiled")
    assert all(is_reference(name) for name in references)
    assert not any(is_reference(name) for name in ("tome", "elfatt-fast", "elfatt-fast, compiled", "tome, autotuned"))
