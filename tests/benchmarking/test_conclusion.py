"""What a benchmark says in the end: the fastest, what does not pay, what is noise; and that it fits a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from elfatt_sd.benchmarking.report import conclude, show
from elfatt_sd.benchmarking.tables import markdown

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


def test_the_fastest_of_ours_and_what_does_not_pay() -> None:
    assert conclude(results(*ROWS)) == [
        "512 pixels, batch 2: elfatt-fast is fastest, 1.50 times as fast as untouched (1.40 to 1.60 in 5 rounds). "
        "Does not pay: agent 0.90 (0.85 to 0.95). Not faster in every round, so undecided: tome."
    ]


def test_where_nothing_pays_that_is_said() -> None:
    said = conclude(results(ROWS[0], ROWS[4]))
    assert said == [
        "512 pixels, batch 2: no method is faster than untouched; the best is agent, 0.90 times (0.85 to 0.95 in 5 "
        "rounds). Does not pay: agent 0.90 (0.85 to 0.95)."
    ]


def test_a_fastest_row_that_beats_its_floor_is_noise() -> None:
    assert conclude(results(ROWS[0], row("x", span(2.0), 0.99)))[0].endswith(
        "That is faster than its floor, so it is noise: repeat with more rounds."
    )
    assert "noise" not in conclude(results(ROWS[0], row("x", span(2.0), 1.0)))[0]
    assert "One round tells little" in conclude(results(ROWS[0], row("x", span(2.0), 1.1, rounds=1)))[0]


def test_each_size_has_its_own_sentences_and_the_largest_are_said() -> None:
    rows = [row(name, span(1.5), size=size) for size in (256, 512, 1024, 2048) for name in ("untouched", "x")]
    assert [line.split(" ")[0] for line in conclude(results(*rows))] == ["512", "1024", "2048"]


def test_a_compiled_row_pays_beside_the_compiled_model() -> None:
    twins = {"untouched": span(1.5), "untouched, compiled": span(0.8)}
    rows = [row("untouched, compiled", span(1.9)), row("x, compiled", span(1.5), speed=twins)]
    said = conclude(results(ROWS[0], *rows, bases=["untouched", "untouched, compiled"]))
    assert "Does not pay: x, compiled 0.80." in said[0]


@pytest.mark.parametrize("rows", [(), ROWS[:1], (row("x", span(1.0), speed={}),)])
def test_without_anything_to_compare_that_is_said(rows: tuple[dict[str, Any], ...]) -> None:
    assert all(line.endswith("nothing was timed that could be compared.") for line in conclude(results(*rows)))


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


def test_noise_is_marked_in_files_too() -> None:
    noisy = results(ROWS[0], row("x", span(2.0), 0.99))
    assert "Faster than its floor, which is noise (repeat with more rounds): `x`." in markdown(noisy)
    assert "Faster" not in markdown(results(*ROWS))
    assert NOISE in shown(noisy)
    assert NOISE not in shown(results(*ROWS))


def test_what_did_not_fit_is_said_where_there_is_nothing_else() -> None:
    text = shown(results(groups=[{"key": {"size": 512}, "lost": ["untouched"]}]))
    assert "Did not fit into memory (512 pixels): untouched." in text
