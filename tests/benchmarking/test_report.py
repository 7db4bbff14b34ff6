"""Tables, the conclusion, and what a terminal shows: each thing is said once, and noise is called noise."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from support.commands import call, check_error

from benchmarks.shown import growth_table, profile_cells
from elfatt_sd.benchmarking.report import clock, conclude, legend, markdown, show

NOISE = "* faster than its floor: noise, repeat with more rounds."


def span(median: float, least: float | None = None, most: float | None = None) -> dict[str, float]:
    return {"median": median, "min": median if least is None else least, "max": median if most is None else most}


def row(method: str, speed: dict[str, float], floor: float | None = None, /, **changes: Any) -> dict[str, Any]:
    return {
        "size": 512,
        "batch": 2,
        "method": method,
        "seconds": 4.0,
        "rounds": 5,
        "speed": {"untouched": speed},
        "floor": None if floor is None else {"name": "floor", **span(floor)},
        "peak_bytes": 2**27,
        "bytes_per_picture": 1e8,
        **changes,
    }


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
        (ROWS, "elfatt-fast is fastest, 1.50 times as fast as untouched (1.40 to 1.60 in 5 rounds). "
               "Does not pay: agent 0.90 (0.85 to 0.95). Not faster in every round, so undecided: tome."),
        ((ROWS[0], ROWS[4]), "no method is faster than untouched; the best is agent, 0.90 times"),
        ((ROWS[0], row("x", span(2.0), 0.99)), "That is faster than its floor, so it is noise"),
        ((ROWS[0], row("x", span(2.0), 1.1, rounds=1)), "One round tells little"),
        ((ROWS[0], row("untouched, compiled", span(1.9)), row("x, compiled", span(1.5), speed=TWINS)),
         "Does not pay: x, compiled 0.80."),
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


def test_what_all_rows_share_stands_above() -> None:
    lines = markdown(results(*ROWS[:2])).splitlines()
    assert lines[:2] == ["512 pixels, batch 2:", ""]
    assert lines[2] == "| method | time | times as fast as untouched | peak MiB | GB for +1 image |"
    lines = markdown(results(ROWS[0], row("b", span(1.0, 0.5, 2.0), 1.2, batch=4))).splitlines()
    assert lines[0] == "512 pixels:" and lines[2].startswith("| batch | method |")
    assert "| 1.00 (0.50 to 2.00) | 1.200 |" in lines[5]


def test_an_untouched_phase_has_no_share_of_a_floor() -> None:
    timing = {"seconds": 1.0, "speed": {}, "floor": {"name": "floor", **span(1.7)}}
    parts = [{"variant": name, "steps": 25, "what": name, **timing} for name in ("untouched", "a/1")]
    exact, own = markdown(results(row("a", span(1.0), 1.2, parts=parts))).splitlines()[5:7]
    assert exact == "| &nbsp; 25 steps: untouched | 1000 ms |  |  |  |  |"
    assert own == "| &nbsp; 25 steps: a/1 | 1000 ms |  | 1.700 |  |  |"


def test_names_are_explained_where_they_occur() -> None:
    text = markdown(results(row("untouched", span(1.0)), row("elfatt:ratio=0", span(1.0))))
    assert text.splitlines()[-1] == legend({"untouched", "elfatt:ratio=0"})
    assert "`ratio=0` merges nothing" in text and "`floor` leaves out" not in text
    assert "`floor` leaves out" in legend({"floor"}) and legend({"tome", "elfatt-fast"}) == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.0012344, "1.234 ms"), (9.9994, "9999 ms"), (10.0, "10.0 s")])
def test_seconds_from_ten_on(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_kernels_have_names_that_fit_a_table() -> None:
    """Without namespaces and template arguments; variants of one kernel are one name."""
    seen = [f"void cudnn::kernels::{'long_' * 12}name_{size}" for size in (64, 128)]
    long = "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>(long, c10::Half)"
    figures = {"host": 1.0, "device": 1.0, "wall": 1.0, "kernels": 3, "attention": seen, "longest": [[long, 0.5, 1]]}
    attention, longest = profile_cells([{"size": 512, "batch": 2, "method": "untouched", **figures}])[1][-2:]
    assert attention == f"`{'long_' * 12}`"
    assert longest.startswith("`RowwiseMomentsCUDAKernel` ")


def test_exponents_of_fewer_sizes_say_so() -> None:
    rows = [row("a", span(1.0), tokens=tokens, part="layer") for tokens in (1, 2, 3)]
    rows += [row("b", span(1.0), tokens=tokens, part="layer") for tokens in (1, 2)]
    text = growth_table(results(*rows, exponents={"layer": {"a": span(1.0, 0.9, 1.1), "b": span(2.0)}}))
    assert "to the power of: a 1.00 (0.90 to 1.10); b 2.00 (2 sizes)." in text


def test_rows_of_a_script_that_is_not_at_hand_are_a_plain_table() -> None:
    text = markdown(results({"method": "x", "figure": 1.5}, {"method": "y"}, kind="another"))
    assert text.splitlines() == ["| method | figure |", "|---|---|", "| x | 1.5 |", "| y |  |"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "does not exist"), ("{", "is damaged"), ("{}", "holds no results"), ('{"parts": [1]}', "holds no results")],
)
def test_what_is_no_result_is_not_drawn(tmp_path: Any, content: str | None, says: str) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    check_error(call("bench", "report", file), says)
