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
from elfatt_sd.benchmarking.names import is_reference
from elfatt_sd.benchmarking.record import Record, Session, make_rows, own_part, time_in_turns, title

KEY = {"size": 64, "batch": 2}


def calls(names: str, seen: list[str]) -> dict[str, Callable[[], None]]:
    return {name: lambda name=name: seen.append(name) for name in names}


def test_interleaved_calls_take_turns(cpu: torch.device) -> None:
    """One warm-up round, then rounds that each start with another call."""
    seen: list[str] = []
    times = time_in_turns(calls("abc", seen), 3, cpu)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = ["".join(seen[start : start + 3]) for start in range(0, 12, 3)]
    assert [sorted(each) for each in rounds] == [list("abc")] * 4
    assert len(set(rounds[1:])) == 3


def test_the_warm_up_can_be_other_calls(cpu: torch.device) -> None:
    seen: list[str] = []
    time_in_turns(calls("ab", seen), 1, cpu, warm_up=calls("xyz", seen))
    assert "".join(seen) == "xyzab"


def test_no_round_starts_late_but_one_is_run(cpu: torch.device) -> None:
    seen: list[str] = []
    times = time_in_turns(calls("a", seen), 100, cpu, seconds=0)
    assert (len(seen), len(times["a"])) == (2, 1)


def test_a_round_that_is_stopped_does_not_count(cpu: torch.device) -> None:
    """Ctrl-C in the second round leaves the first one, whole."""
    seen: list[str] = []
    times: dict[str, list[float]] = {}

    def stop() -> None:
        seen.append("stop")
        if seen.count("stop") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_in_turns({**calls("a", seen), "stop": stop}, 5, cpu, times=times)
    assert (len(times["a"]), len(times["stop"])) == (1, 1)


def test_who_is_told_hears_of_every_call(cpu: torch.device) -> None:
    heard: list[tuple[int, int]] = []
    time_in_turns(calls("ab", []), 2, cpu, tell=lambda done, total: heard.append((done, total)))
    assert heard == [(done, 6) for done in range(1, 7)]


def test_a_call_is_timed(cpu: torch.device) -> None:
    """Sleeping takes at least as long as asked for."""
    assert min(time_in_turns({"a": lambda: time.sleep(0.02)}, 2, cpu)["a"]) >= 0.02


@pytest.mark.parametrize(("quick", "warmed"), [(1e9, ["s", "b", "a"]), (0.0, ["s", "b"])])
def test_quick_calls_are_warmed_up_as_they_are(
    cpu: torch.device, quick: float, warmed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something smaller in their place only where they would take long."""
    monkeypatch.setattr(record, "QUICK", quick)
    seen: list[str] = []
    full = calls("ab", seen)
    time_in_turns(full, 1, cpu, warm_up={**calls("s", seen), "b": full["b"]})
    assert seen == [*warmed, "a", "b"]


def test_what_does_not_fit_is_left_out(cpu: torch.device) -> None:
    """It is told, not timed again, and the others have all their rounds; another error stops everything."""
    seen: list[str] = []
    lost: list[str] = []
    heard: list[tuple[int, int]] = []

    def fail(error: Exception) -> None:
        seen.append("x")
        raise error

    told: Any = {"tell": lambda done, total: heard.append((done, total)), "lose": lambda name, _: lost.append(name)}
    full = {**calls("ab", seen), "x": lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))}
    times = time_in_turns(full, 2, cpu, **told)
    assert (lost, seen.count("x"), heard[-1]) == (["x"], 1, (7, 7))
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2, "x": 0}
    with pytest.raises(RuntimeError, match="other"):
        time_in_turns({"x": lambda: fail(RuntimeError("other"))}, 2, cpu)


def begin(device: torch.device) -> Record:
    return Record(None, "unet", device, {"model": "x"}, bases=["a"])


def test_a_stopped_benchmark_has_its_whole_rounds(cpu: torch.device) -> None:
    seen: list[str] = []
    made = begin(cpu)

    def stop() -> None:
        seen.append("stop")
        if seen.count("stop") == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.time(KEY, {"a": lambda: None, "b": stop}, 5)
    assert [(row["method"], row["rounds"]) for row in made.results["rows"]] == [("a", 2), ("b", 2)]
    [sitting] = made.results["groups"][0]["sittings"]
    assert sitting["rounds"] == 2 and sitting["started"]


def test_what_does_not_fit_has_no_row(cpu: torch.device) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    made = begin(cpu)
    made.time(KEY, {"b": fail, **{name: call for name, call in calls("ab", []).items() if name != "b"}}, 3)
    made.keep_peak(KEY, "b", 2, lambda: 9)
    assert made.results["groups"][0]["lost"] == ["b"]
    assert [(row["method"], row["rounds"], row["peak_bytes"]) for row in made.results["rows"]] == [("a", 3, None)]


def test_peaks_stand_in_the_rows(cpu: torch.device) -> None:
    made = begin(cpu)
    made.time(KEY, calls("ab", []), 1)
    made.keep_peak(KEY, "a", 2, lambda: 7)
    assert [row["peak_bytes"] for row in made.results["rows"]] == [7, None]


def test_who_is_told(cpu: torch.device) -> None:
    told: list[tuple[str, int, int]] = []
    session = Session(progress=lambda *said: told.append(said))
    Record(session, "unet", cpu, {}, bases=["a"]).time(KEY, calls("ab", []), 1)
    assert told == [("64 pixels, batch 2", done, 4) for done in (0, 1, 2, 3, 4)]
    assert session.results is not None
    assert session.results["rows"][0]["method"] == "a"


def test_a_group_is_named() -> None:
    assert title({"tokens": 4096, "batch": 2, "part": "layer"}) == "4096 tokens, batch 2, layer"


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
    return {
        "runs": runs,
        "bases": ["untouched"],
        "groups": [group],
        "settings": {"variants": named},
        **changes,
    }


def test_rows_add_up_the_parts() -> None:
    untouched, x, floor = make_rows(results())
    assert (x["size"], x["batch"], x["rounds"], x["seconds"]) == (512, 2, 2, 4.5)  # 3 and 6 seconds a call
    assert x["speed"]["untouched"]["median"] == pytest.approx(5 / 3)
    assert x["floor"] == {"name": "floor", **dict.fromkeys(("median", "min", "max"), pytest.approx(1.5))}
    assert untouched["floor"] is None and floor["floor"] is None


def test_each_part_has_its_own_figures() -> None:
    _, x, floor = make_rows(results())
    exact, own = x["parts"]
    assert (own["variant"], own["steps"], own["what"]) == ("x/1", 40, "what x/1 is")
    assert own["speed"]["untouched"]["median"] == 2
    assert own["floor"]["median"] == pytest.approx(1.25)
    assert exact["floor"]["median"] == pytest.approx(2.5)
    assert "parts" not in floor


def test_memory_is_that_of_the_greatest_part_and_grows_by_picture() -> None:
    """A picture is two rows of the batch: from 9 to 12 bytes for two more rows."""
    untouched, x, floor = make_rows(results())
    assert (x["peak_bytes"], x["bytes_per_picture"]) == (9, 3)
    assert (untouched["peak_bytes"], untouched["bytes_per_picture"]) == (7, 4)
    assert (floor["peak_bytes"], floor["bytes_per_picture"]) == (None, None)


def test_a_peak_is_that_of_the_batch_that_is_timed() -> None:
    data = results()
    data["groups"][0]["key"]["batch"] = 4
    assert [row["peak_bytes"] for row in make_rows(data)] == [11, 12, None]
    data["groups"][0]["key"]["batch"] = 8
    assert [row["peak_bytes"] for row in make_rows(data)] == [None] * 3
    assert make_rows(data)[0]["bytes_per_picture"] == 4


def test_one_batch_has_a_peak_and_no_growth() -> None:
    data = results()
    data["groups"][0]["peaks"] = {"untouched": {"2": 7}, "x/1": {"2": None}}
    untouched, x, _ = make_rows(data)
    assert (untouched["peak_bytes"], untouched["bytes_per_picture"]) == (7, None)
    assert x["peak_bytes"] is None, "one of its parts is not known"


def test_a_base_that_was_not_timed_is_left_out() -> None:
    data = results(runs=None, bases=["softmax", "floor"])
    assert [list(row["speed"]) for row in make_rows(data)] == [["floor"]] * 3


def test_without_its_floor_a_row_has_no_share_of_it() -> None:
    data = results()
    data["groups"][0]["times"]["floor"] = []
    assert [row["floor"] for row in make_rows(data)] == [None, None]


def test_a_group_without_a_whole_round_has_no_rows() -> None:
    data = results()
    data["groups"][0]["times"] = {"untouched": [], "x/1": [], "floor": []}
    assert make_rows(data) == []


def test_what_was_measured_without_rounds_is_rows_as_it_is() -> None:
    errors = [{"layer": "a", "step": 2, "method": "m", "error": 0.1}]
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


def test_what_is_there_to_compare_with() -> None:
    references = ("untouched", "tomesd", "floor", "floor of 2 levels", "untouched, compiled", "floor, compiled")
    assert all(is_reference(name) for name in references)
    assert not any(is_reference(name) for name in ("tome", "elfatt-fast", "elfatt-fast, compiled", "tome, autotuned"))
