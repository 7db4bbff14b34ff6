"""The plot of the README: every method has its name, readable where the page is narrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.tables import TIMES
from elfatt_sd.evaluation.results import FORMAT
from tools.pages.headline import draw_headline, headline_table

NARROW = 400  # pixels


def row(method: str, speed: float, psnr: float) -> dict[str, Any]:
    ratio = {"median": speed, "low": speed - 0.1, "high": speed + 0.1}
    return {
        "cell": method,
        "label": method,
        "method": method,
        "images": 64,
        "paired": {"psnr": {"mean": psnr, "interval": [psnr - 1, psnr + 1], "identical": 0}},
        "time": {"unet": {"seconds_per_image": 1.0, "ratio": ratio}},
    }


@pytest.fixture
def results() -> Results:
    rows = [
        row("elfatt", 1.7, 35.0),
        row("agent", 1.65, 35.5),
        row("elfatt-fast", 2.0, 41.0),
        row("untimed", 1.0, 30.0),
    ]
    rows[-1].pop("time")
    return Results({"format": FORMAT, "name": "study_a", "protocol": {"model": "toy"}, "rows": rows})


def test_names_are_readable_on_a_narrow_page(results: Results) -> None:
    figure = draw_headline([(results, row) for row in results.rows[:3]]).figure
    (axes,) = figure.axes
    names = figure.legends[0].get_texts()
    assert [text.get_text() for text in names] == ["elfatt", "agent", "elfatt-fast"]
    words = [*names, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
    pixels = NARROW / figure.get_size_inches()[0] / 72
    assert min(text.get_fontsize() for text in words) * pixels > 10
    figure.draw_without_rendering()
    for label in (axes.xaxis.label, axes.yaxis.label):
        box = label.get_window_extent()
        assert figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max)


def test_a_row_without_time_has_no_place_in_the_plot(results: Results) -> None:
    with pytest.raises(ElfattError, match="untimed"):
        draw_headline([(results, results.rows[-1])])


def test_what_was_not_measured_is_an_empty_cell(results: Results, tmp_path: Path) -> None:
    measured = {"rows": [{"method": "elfatt", "speed": {"untouched": {"median": 1.37, "min": 1.2, "max": 1.6}}}]}
    (tmp_path / "unet-512.json").write_text(json.dumps(measured))
    lines = headline_table([(results, row) for row in results.rows[1:] + results.rows[:1]], tmp_path).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert cells["`elfatt`"] == ["35.0 dB", f"1.70{TIMES}", f"1.37{TIMES}", "", ""]
    assert cells["`agent`"][2:] == ["", "", ""]
    assert cells["`untimed`"][1] == ""
