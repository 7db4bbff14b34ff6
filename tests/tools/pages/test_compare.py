"""Two rows picture by picture: what each lacks in closeness, with the interval of the mean."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.results import FORMAT, RESULTS_FILE
from elfatt_sd.files import write_json
from tools.pages.blocks import MISSING
from tools.pages.compare import compare_rows
from tools.pages.evaluation import fill_page

T_QUANTILE = 3.182446  # of Student's t with 3 degrees of freedom, at 97.5 %
FIRST, SECOND = [40.0, 30.0, 20.0, 45.0], [39.0, 28.5, 19.5, 46.0]


def row(cell: str, psnr: list[float | None] | None, ssim: list[float] | None = None) -> dict[str, Any]:
    paired: dict[str, Any] = {"psnr": {"mean": 30.0, "identical": 0}, "ssim": {"mean": 0.9}}
    if psnr is not None:
        paired["classes"] = list(range(len(psnr)))
        paired["psnr"]["pictures"] = psnr
        paired["ssim"]["pictures"] = ssim or [0.9] * len(psnr)
    return {"cell": cell, "label": cell.upper(), "method": "custom", "paired": paired}


def data(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "name": "study", "rows": [{"cell": "sd", "role": "baseline"}, *rows]}


def cells(table: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [[text.replace("\\", "").replace("\N{MINUS SIGN}", "-") for text in line] for line in lines]


def test_the_mean_of_the_differences_and_its_interval() -> None:
    """Means of 33.75 and 33.25 with intervals of about 10 dB hide what each picture shows."""
    table = compare_rows(Results(data(row("a", FIRST), row("b-0.5", SECOND))), ["a", "b-0.5", "b-0.5", "a"])
    titles, rule, there, back = cells(table)
    assert titles == ["Row", "Against", "PSNR, dB", "SSIM", "Closer by PSNR"]
    assert rule == [":---", ":---", "---:", "---:", "---:"]
    assert (there[:2], there[-1]) == (["A", "B-0.5"], "3 of 4")
    assert (back[:2], back[-1]) == (["B-0.5", "A"], "1 of 4")
    each = [one - other for one, other in zip(FIRST, SECOND, strict=True)]
    half = T_QUANTILE * statistics.stdev(each) / 2
    value, low, high = (float(text) for text in there[2].replace("[", "").replace("]", "").replace(",", "").split())
    assert (value, low, high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=0.06)
    assert back[2].startswith("-0.5")


def test_speed_is_compared_within_rounds_of_one_run() -> None:
    timed = [row("a", FIRST), row("b", SECOND)]
    for each, values in zip(timed, ([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]), strict=True):
        each["time"] = {"unet": {"values": values}}
    table = cells(compare_rows(Results(data(*timed)), ["a", "b"]))
    assert (table[0][-1], table[2][-1]) == ("Times as fast", "2.00 (1.00 to 3.00)")
    other = Results({**data(*timed), "name": "other"})
    assert cells(compare_rows(Results(data(*timed)), ["a", "other/b"], [other]))[0][-1] == "Closer by PSNR"
    assert cells(compare_rows(Results(data(timed[0], row("b", SECOND))), ["a", "b"]))[0][-1] == "Closer by PSNR"


def test_pictures_of_one_class_count_once() -> None:
    """Twice the same four pictures tell no more than four."""
    once = data(row("a", FIRST), row("b", SECOND))
    twice = data(row("a", FIRST * 2), row("b", SECOND * 2))
    for entry in twice["rows"][1:]:
        entry["paired"]["classes"] = [0, 1, 2, 3] * 2
    assert cells(compare_rows(Results(once), ["a", "b"]))[2][2] == cells(compare_rows(Results(twice), ["a", "b"]))[2][2]


def test_identical_pictures_have_no_psnr() -> None:
    """Their SSIM is one."""
    some, none = row("a", [None, 30.0, 20.0], [1.0, 0.9, 0.8]), row("c", [None, None, None], [1.0, 1.0, 1.0])
    line = cells(compare_rows(Results(data(some, row("b", [1.0, 28.0, 19.0], [0.7, 0.6, 0.5]))), ["a", "b"]))[2]
    assert line[2].startswith("+1.5 [") and line[3].startswith("+0.30") and line[4] == "3 of 3"
    table = cells(compare_rows(Results(data(some, none)), ["a", "c", "c", "a", "c", "c"]))
    assert [line[2::2] for line in table[2:]] == [["—", "0 of 3"], ["—", "2 of 3"], ["identical", "0 of 3"]]


@pytest.mark.parametrize("names", [[], ["a"], ["a", "absent"], ["a", "old"]])
def test_what_cannot_be_compared_is_named(names: list[str]) -> None:
    results = Results(data(row("a", FIRST), row("old", None)))
    with pytest.raises(
        ElfattError, match="cannot be paired; there are: sd, a, old" if names[1:] != ["old"] else "again"
    ):
        compare_rows(results, names)


def test_rows_of_two_runs_with_the_same_pictures() -> None:
    """The other run is named; pictures of other prompts or another pipeline are refused."""
    one, other = data(row("a", FIRST)), data(row("a", SECOND)) | {"name": "second"}
    line = cells(compare_rows(Results(one), ["a", "second/a"], [Results(other)]))[2]
    assert line[:2] == ["A", "A (second)"] and line[2].startswith("+0.5")
    with pytest.raises(ElfattError, match=r"cannot be paired; there are: sd, a, second/sd, second/a"):
        compare_rows(Results(one), ["a", "second/b"], [Results(other)])
    with pytest.raises(ElfattError, match="runs with different steps have nothing in common: study 25, second 50"):
        compare_rows(
            Results(one | {"protocol": {"steps": 25}}), ["a", "second/a"],
            [Results(other | {"protocol": {"steps": 50}})],
        )  # fmt: skip
    fewer = data(row("a", SECOND[:3])) | {"name": "second"}
    other["rows"][1]["paired"]["classes"] = [3, 2, 1, 0]
    for unlike in (fewer, other):
        with pytest.raises(ElfattError, match="are not of the same prompts"):
            compare_rows(Results(one), ["a", "second/a"], [Results(unlike)])


def test_a_page_is_filled(tmp_path: Path) -> None:
    """Names of rows have dots; a run that is not there yet is no error."""
    write_json(tmp_path / "study" / RESULTS_FILE, data(row("a", FIRST), row("b-0.5", SECOND)))
    page = "<!-- eval none -->\n<!-- end -->\n<!-- compare study a b-0.5 -->\nold\n<!-- end -->\n"
    page += "<!-- compare none a b -->\n<!-- end -->\n<!-- compare study a none/b -->\n<!-- end -->\n"
    page += "<!-- compare study a more/b-0.5 -->\n<!-- end -->\n"
    write_json(tmp_path / "more" / RESULTS_FILE, data(row("b-0.5", SECOND)) | {"name": "more"})
    text, _ = fill_page(page, tmp_path, tmp_path)
    assert "| A | B-0.5 | +0.5" in text and "| A | B-0.5 (more) | +0.5" in text and "old" not in text
    assert text.count(MISSING) == 3
