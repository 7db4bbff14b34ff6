"""Some rows of a run, in the columns that vary."""

from __future__ import annotations

from pathlib import Path

import pytest

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import load_results
from elfatt_sd.evaluation.report.tables import TIMES
from tools.pages.evaluation import fill_page
from tools.pages.short import short_study

RESULTS = Path(__file__).parents[3] / "eval" / "results"


def titles(table: str) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")]


def test_columns_without_differences_are_left_out() -> None:
    """The accuracy is the same in all rows, and no difference in distance is shown."""
    table = short_study(load_results(RESULTS / "toy_full"), ["elfatt-fast", "elfatt-quality"])
    assert titles(table) == ["Method", "PSNR, dB", "Lowest PSNR, dB", "SSIM", "UNet, s/img"]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| ELFATT-SD fast", "| ELFATT-SD quality"]


def test_verdicts_that_differ_are_shown() -> None:
    table = short_study(load_results(RESULTS / "study_transformer"), ["few-keys", "no-cell"])
    assert {"Block size", "Feature cosine"} & {*titles(table)} == set()
    assert {"FD-toy difference, extrapolated", "Verdict", "Accuracy ↑"} <= {*titles(table)}


def test_too_many_rows_and_unknown_ones_are_refused() -> None:
    run = load_results(RESULTS / "study_steps")
    with pytest.raises(ElfattError, match="at most 6 of"):
        short_study(run, ["tome-all"] * 7)
    with pytest.raises(ElfattError, match=r"rows=.'tome'. are not accepted"):
        short_study(run, ["tome"])


def test_a_headline_has_its_plot_and_table(tmp_path: Path) -> None:
    marker = "<!-- headline plot study_presets/tome study_presets/elfatt-fast -->\n"
    page, plots = fill_page(f"{marker}<!-- end -->\n", RESULTS, tmp_path)
    assert [path.name for path in plots] == ["plot.png"]
    assert f"| `tome` | 36.0 dB | 1.56{TIMES} | 1.34{TIMES} |" in page
    assert [line.split(" | ")[0] for line in page.splitlines() if "`" in line] == ["| `tome`", "| `elfatt-fast`"]
    with pytest.raises(ElfattError, match="row 'none' of study_presets does not exist; there are: sd, null, tome"):
        fill_page("<!-- headline plot study_presets/none -->\n<!-- end -->\n", RESULTS, tmp_path)
    with pytest.raises(ElfattError, match="of study_large has no closeness or no time"):
        fill_page("<!-- headline plot study_large/tome -->\n<!-- end -->\n", RESULTS, tmp_path)
