"""The trade-off over several runs: which rows no other beats, and what is written of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.tables import TO
from elfatt_sd.evaluation.results import FORMAT, RESULTS_FILE
from elfatt_sd.files import write_json
from tools.pages.blocks import MISSING
from tools.pages.evaluation import fill_page
from tools.pages.pareto import draw_pareto

UNTOUCHED = {"cell": "sd", "method": "sd", "label": "SD", "role": "baseline"}


def row(label: str, speed: float | None, psnr: float, **fields: Any) -> dict[str, Any]:
    ratio = {"median": speed, "low": 0.9 * speed, "high": 1.1 * speed} if speed else None
    return {
        "cell": label,
        "label": label,
        "method": "custom",
        "images": 64,
        "paired": {"psnr": {"mean": psnr, "interval": [psnr - 1, psnr + 1], "identical": 0}},
        "time": ratio and {"unet": {"seconds_per_image": 1.0, "ratio": ratio}},
        **fields,
    }


def data(name: str, rows: list[dict[str, Any]], **protocol: Any) -> dict[str, Any]:
    settings = {"model": "toy", "steps": 25, "height": 256, "width": 256, **protocol}
    return {"format": FORMAT, "name": name, "protocol": settings, "rows": [UNTOUCHED, *rows]}


@pytest.fixture
def runs() -> list[dict[str, Any]]:
    """`fast` and `close` are best in one figure, `middle` lies above their line, `worse` is beaten by all."""
    first = [row("fast", 2.0, 20.0), row("worse", 1.1, 15.0), row("null", 3.0, 50.0, role="null")]
    second = [row("close", 1.25, 40.0), row("middle", 1.6, 30.0), row("untimed", None, 60.0)]
    return [data("study_a", first), data("study_b", [*second, row("preset", 1.2, 16.0, method="elfatt")])]


def test_rows_that_no_other_beats_are_named(runs: list[dict[str, Any]]) -> None:
    """From the fastest to the slowest; a preset is named wherever it lies."""
    chart, table = draw_pareto([Results(run) for run in runs])
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [(line[1], line[2], line[-1]) for line in lines] == [
        ("fast", "study\\_a", "no"),
        ("middle", "study\\_b", "no"),
        ("close", "study\\_b", "no"),
        ("preset", "study\\_b", "yes"),
    ]
    assert lines[0][0] == "1" and lines[0][3:5] == ["64", f"2.00 (1.80{TO}2.20)"]
    assert sorted(text.get_text() for text in chart.figure.axes[0].texts) == ["1", "2", "3", "4"]
    assert len(chart.points) == 5
    assert chart.points[0].startswith("fast: 0.50, ")


def test_each_row_has_the_digits_of_its_own_interval(runs: list[dict[str, Any]]) -> None:
    runs[0]["rows"][1]["paired"]["psnr"] = {"mean": 20.125, "interval": [20.1, 20.15], "identical": 0}
    table = draw_pareto([Results(run) for run in runs])[1]
    assert r"| 20.125 \[20.100, 20.150\] |" in table
    assert r"| 40.0 \[39.0, 41.0\] |" in table


PHASE = {
    "attention": "softmax",
    "ratio": 0.0,
    "block_order": "sequence",
    "second_order": None,
    "residual_steps": 1,
    "agent_share": 0.5,
}


@pytest.mark.parametrize(
    ("phase", "kind", "shared"),
    [
        ({"attention": "sampled"}, "sampled keys", False),
        ({"attention": "sampled", "residual_steps": 4}, "sampled keys", True),
        ({"attention": "block", "block_order": "spread"}, "spread blocks", False),
        ({"attention": "block", "block_order": "spread", "second_order": "windows"}, "other blocks", False),
        ({"attention": "cell_spread", "block_order": "spread"}, "spread blocks", False),
        ({"attention": "block", "block_order": "raster", "residual_steps": 2}, "other blocks", True),
        ({"ratio": 0.5}, "merging (ToMe)", False),
        ({"attention": "agent"}, "agents", False),
        ({"attention": "elfatt"}, "ELFATT", False),
        ({"attention": "elfatt", "agent_share": 1.0}, "agents", False),
        ({"attention": "elfatt", "agent_share": 0.0}, "other blocks", False),
        ({}, "unknown", False),
    ],
)
def test_a_mark_tells_the_kind_of_approximation(
    runs: list[dict[str, Any]], phase: dict[str, Any], kind: str, shared: bool
) -> None:
    """The phases are those of the row, where exact steps and merging beside another kind do not count."""
    phases = [PHASE, PHASE | {"ratio": 0.5}, PHASE | phase] if phase.get("attention") else [PHASE, PHASE | phase]
    runs[0]["protocol"]["cells"] = [{"name": "fast", "config": {"phases": phases}}, {"name": "worse"}]
    chart = draw_pareto([Results(run) for run in runs])[0]
    labels = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert {*labels} == {"unknown", kind}
    mark = next(line for line in chart.figure.axes[0].lines if list(line.get_xdata()) == [0.5])
    assert mark.get_label() == kind
    assert (mark.get_markerfacecolor() == mark.get_color()) is not shared
    assert ("Hollow" in chart.caption) is shared


def test_different_numbers_of_threads_are_told(runs: list[dict[str, Any]]) -> None:
    """Two threads may speed up one part of a UNet more than another."""
    timed = [{**run, "environment": {"cpu_threads": count}} for run, count in zip(runs, (1, 2), strict=True)]
    assert "threads" not in draw_pareto([Results(timed[0]), Results(timed[0])])[0].caption
    said = draw_pareto([Results(each) for each in (*timed, timed[1])])[0].caption
    assert said.endswith("Timed with different numbers of threads: `study_a` with 1, the others with 2.")


def test_what_does_not_fit_together_is_refused(runs: list[dict[str, Any]]) -> None:
    with pytest.raises(ElfattError, match="different steps have nothing in common: study_a 25, large 50"):
        draw_pareto([Results(runs[0]), Results(data("large", [], steps=50))])
    with pytest.raises(ElfattError, match="no row of empty has both UNet time and closeness"):
        draw_pareto([Results(data("empty", []))])


def test_a_page_holds_table_and_plot(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    text = "<!-- eval none -->\n<!-- end -->\n<!-- pareto pareto_closeness study_a study_b study_c -->\n<!-- end -->\n"
    page, plots = fill_page(text, tmp_path, tmp_path)
    assert page.count(MISSING) == 2 and plots == {}
    for run in runs:
        write_json(tmp_path / run["name"] / RESULTS_FILE, run)
    page, plots = fill_page(page, tmp_path, tmp_path)
    assert list(plots) == [tmp_path / "pareto_closeness.png"]
    assert plots[tmp_path / "pareto_closeness.png"].startswith(b"\x89PNG")
    assert "(pareto_closeness.png)" in page and "Not in it yet: `study_c`." in page and "| fast |" in page
    assert fill_page(page, tmp_path, tmp_path) == (page, plots)
