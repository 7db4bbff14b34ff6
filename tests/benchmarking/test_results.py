"""Calls run in whole rounds, rows follow from them, tables and a conclusion say what they mean; no time is asserted."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.commands import call, check_error

from benchmarks.shown import profile_cells
from elfatt_sd.benchmarking.record import Record, Session, make_rows, own_part, title
from elfatt_sd.benchmarking.report import clock, conclude, markdown, show
from elfatt_sd.benchmarking.variants import is_reference

KEY = {"size": 64, "batch": 2}
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "results"


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


def test_calls_take_turns(made: Record, told: Any) -> None:
    """One warm-up round, by other calls if need be, and rounds that count; the progress counts every call."""
    seen: list[str] = []
    made.time(KEY, calls("abc", seen), 3)
    assert rounds(made) == {"a": 3, "b": 3, "c": 3}
    assert [sorted(seen[start : start + 3]) for start in range(0, 12, 3)] == [list("abc")] * 4
    assert told == [("64 pixels, batch 2", done, 12) for done in range(13)]
    seen.clear()
    made.time({"size": 8}, calls("a", seen), 100, seconds=0, warm_up={"a": lambda: seen.append("x")})
    assert seen == ["x", "a"], "no round starts late, but one is run"


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
    made.keep_peak(KEY, "a", 2, lambda: 7)
    assert [row["peak_bytes"] for row in made.results["rows"]] == [7, None]
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


def test_rows_add_up_the_parts() -> None:
    """Times by round, memory of the greatest part, and its growth by image; what was not timed is left out."""
    runs = {
        "untouched": {"parts": [["untouched", 50]], "floor": None},
        "x": {"parts": [["untouched", 10], ["x/1", 40]], "floor": "floor"},
        "floor": {"parts": [["floor", 50]], "floor": None},
    }
    group: dict[str, Any] = {
        "key": {"size": 512, "batch": 2},
        "times": {"untouched": [5.0, 10.0], "x/1": [2.5, 5.0], "floor": [2.0, 4.0]},
        "peaks": {"untouched": {"2": 7, "4": 11}, "x/1": {"2": 9, "4": 12}},
    }
    named = {name: {"what": f"what {name} is"} for name in group["times"]}
    data = {"runs": runs, "bases": ["untouched"], "groups": [group], "settings": {"variants": named}}
    untouched, x, floor = make_rows(data)
    assert (x["size"], x["batch"], x["rounds"], x["seconds"]) == (512, 2, 2, 4.5)  # 3 and 6 seconds a call
    assert x["speed"]["untouched"]["median"] == pytest.approx(5 / 3)
    assert x["floor"] == {"name": "floor", **dict.fromkeys(("median", "min", "max"), pytest.approx(1.5))}
    assert untouched["floor"] is floor["floor"] is None and "parts" not in floor
    exact, own = x["parts"]
    assert (own["variant"], own["steps"], own["what"]) == ("x/1", 40, "what x/1 is")
    assert own["speed"]["untouched"]["median"] == 2
    assert (own["floor"]["median"], exact["floor"]["median"]) == (pytest.approx(1.25), pytest.approx(2.5))
    memory = [(row["peak_bytes"], row["bytes_per_picture"]) for row in (untouched, x, floor)]
    assert memory == [(7, 4), (9, 3), (None, None)], "from 9 to 12 bytes for one more image, which is two rows"
    group["peaks"] = {"untouched": {"2": 7}, "x/1": {"2": None}}
    group["times"]["floor"] = []
    assert [(row["peak_bytes"], row["floor"]) for row in make_rows(data)] == [(7, None), (None, None)]
    group["times"] = {"untouched": [], "x/1": [], "floor": []}
    assert make_rows(data) == []


@pytest.mark.parametrize("ending", ["", ", compiled", ", autotuned"])
def test_a_run_has_a_phase_of_its_own(ending: str) -> None:
    times = (("untouched", 30, 1.0), ("x/1", 15, 3.0), ("x/2", 5, 2.0))
    parts = [{"variant": f"{name}{ending}", "steps": steps, "seconds": seconds} for name, steps, seconds in times]
    row = {"method": f"x{ending}", "parts": parts}
    assert own_part(row) == parts[2]
    assert own_part({**row, "parts": parts[2:]}) is own_part({"method": "floor"}) is None


def test_names_of_rows() -> None:
    assert title({"tokens": 4096, "batch": 2, "part": "layer"}) == "4096 tokens, batch 2, layer"
    references = ("untouched", "tomesd", "floor", "floor of 2 levels", "untouched, compiled", "floor, compiled")
    assert all(is_reference(name) for name in references)
    assert not any(is_reference(name) for name in ("tome", "elfatt-fast", "elfatt-fast, compiled", "tome, autotuned"))
    assert [clock(seconds) for seconds in (0.0012344, 9.9994, 10.0)] == ["1.234 ms", "9999 ms", "10.0 s"]


def test_published_tables_are_those_of_their_rounds() -> None:
    """Rows, what all of them share, parts, floors, and what names mean: as they stand in files that people read."""
    for table in sorted(PUBLISHED.glob("*.md")):
        if (file := table.with_suffix(".json")).exists() and "groups" in (data := json.loads(file.read_text())):
            assert markdown(data) == table.read_text(), table.name
            if data["kind"] != "orders":  # whose rows are those of an earlier form
                assert json.loads(json.dumps(make_rows(data))) == data["rows"], table.name


NOISE = "* faster than its floor: noise, repeat with more rounds."


def span(median: float, least: float | None = None, most: float | None = None) -> dict[str, float]:
    return {"median": median, "min": median if least is None else least, "max": median if most is None else most}


def row(method: str, speed: dict[str, float], floor: float | None = None, /, **changes: Any) -> dict[str, Any]:
    found = {"size": 512, "batch": 2, "method": method, "seconds": 4.0, "rounds": 5, "speed": {"untouched": speed}}
    found["floor"] = None if floor is None else {"name": "floor", **span(floor)}
    return {**found, "peak_bytes": 2**27, "bytes_per_picture": 1e8, **changes}


def results(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"kind": "unet", "bases": ["untouched", "tomesd"], "groups": [], "rows": list(rows), **changes}


ROWS = (
    row("untouched", span(1.0)),
    row("tomesd", span(2.5)),
    row("tome", span(1.1, 0.98, 1.2), 1.3),
    row("elfatt-fast", span(1.5, 1.4, 1.6), 1.05),
    row("agent", span(0.9, 0.85, 0.95), 1.6),
    row("floor", span(1.6)),
)
TWINS = {"untouched": span(1.5), "untouched, compiled": span(0.8)}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (ROWS, "elfatt-fast is fastest, 1.50 (1.40 to 1.60) times as fast as untouched. "
               "Not faster in every round: tome 1.10 (0.98 to 1.20), agent 0.90 (0.85 to 0.95)."),
        ((ROWS[0], ROWS[4]), "no method is faster than untouched; the best is agent, 0.90 (0.85 to 0.95) times"),
        ((ROWS[0], row("x", span(2.0), 0.99)), "That is faster than its floor, so it is noise"),
        ((ROWS[0], row("untouched, compiled", span(1.9)), row("x, compiled", span(1.5), speed=TWINS)),
         "Not faster in every round: x, compiled 0.80."),
        (ROWS[:1], "nothing was timed that could be compared."),
        ((row("x", span(1.0), speed={}),), "nothing was timed that could be compared."),
    ],
)  # fmt: skip
def test_a_conclusion_is_said_for_each_size(rows: Any, says: str) -> None:
    [said] = conclude(results(*rows, bases=["untouched", "untouched, compiled"]))
    assert said.startswith("512 pixels, batch 2: ") and says in said
    assert ("noise" in said) == ("noise" in says)
    rows = [row(name, span(1.5), size=size) for size in (256, 512, 1024, 2048) for name in ("untouched", "x")]
    assert [line.split(" ")[0] for line in conclude(results(*rows))] == ["512", "1024", "2048"], "the largest ones"


def shown(data: dict[str, Any], width: int = 80) -> str:
    file = io.StringIO()
    show(data, Console(file=file, width=width, highlight=False))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_fits_the_terminal(width: int) -> None:
    parts = [
        {"variant": name, "steps": 25, "what": "50% merged (stride 2), softmax attention", "seconds": 123.4}
        | {"speed": {"untouched": span(1.23, 1.11, 1.44)}, "floor": {"name": "floor", **span(floor)}}
        for name, floor in (("a/0", 1.1), ("a/1", 0.98))
    ]
    text = shown(results(*ROWS, row("spread:block_size=128,levels=1", span(1.2, 1.1, 1.3), 1.2, parts=parts)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "1.50 (1.40 to 1.60)" in text and "0.98*" in text and NOISE in text
    assert "nbsp" not in text and "|" not in text and "…" not in text
    assert "elfatt-fast is fastest" in text
    assert NOISE not in shown(results(*ROWS))


def test_noise_and_what_did_not_fit_are_named_in_files_too() -> None:
    noisy = results(ROWS[0], row("x", span(2.0), 0.99), groups=[{"key": {"size": 512}, "lost": ["untouched"]}])
    for text in (markdown(noisy), shown(noisy)):
        assert "Did not fit into memory (512 pixels): untouched." in text
    assert "Faster than its floor, which is noise (repeat with more rounds): `x`." in markdown(noisy)
    assert "Faster" not in markdown(results(*ROWS))
    plain = markdown(results({"method": "x", "figure": 1.5}, {"method": "y"}, kind="another"))  # of a script elsewhere
    assert plain.splitlines() == ["| method | figure |", "|---|---|", "| x | 1.5 |", "| y |  |"]


def test_kernels_have_names_that_fit_a_table() -> None:
    """Without namespaces and template arguments; variants of one kernel are one name."""
    seen = [f"void cudnn::kernels::{'long_' * 12}name_{size}" for size in (64, 128)]
    long = "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>(long, c10::Half)"
    figures = {"host": 1.0, "device": 1.0, "wall": 1.0, "kernels": 3, "attention": seen, "longest": [[long, 0.5, 1]]}
    attention, longest = profile_cells([{"size": 512, "batch": 2, "method": "untouched", **figures}])[1][-2:]
    assert attention == f"`{'long_' * 12}`"
    assert longest.startswith("`RowwiseMomentsCUDAKernel` ")


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "does not exist"), ("{", "is damaged"), ("{}", "holds no results"), ('{"parts": [1]}', "holds no results")],
)
def test_what_is_no_result_is_not_drawn(tmp_path: Any, content: str | None, says: str) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    check_error(call("bench", "report", file), says)
