"""Rows add the parts of a run up, round by round; ratios, floors and memory growth follow from raw figures."""

from __future__ import annotations

from typing import Any

import pytest

from elfatt_sd.benchmarking.names import is_reference
from elfatt_sd.benchmarking.record import make_rows, own_part


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
