"""The plots of a report: what they show and how it can be told apart."""

import csv
import io
import re

from PIL import Image
from support.runs import lowest_psnr

from elfatt_sd.evaluation.report import charts
from elfatt_sd.evaluation.report.charts import Palette
from elfatt_sd.evaluation.report.data import Estimate, Results
from elfatt_sd.evaluation.report.plots import Spot, closeness_over_time, distance_over_time, draw_plots, front
from elfatt_sd.evaluation.report.summary import findings
from elfatt_sd.evaluation.report.tables import main_table, study_table
from elfatt_sd.evaluation.report.writers import to_csv, to_markdown


def test_plots_are_written_as_png_too(run):
    folder, _, page = run
    names = {path.stem for path in (folder / "report").glob("*.png")}
    assert names == {
        "difference", "distance_time", "distance_unet_time", "distance_memory", "accuracy_time", "closeness",
        "closeness_time",
        "memory", "timing_end_to_end", "timing_unet",
    }  # fmt: skip
    assert len(page.all("svg")) == len(names)
    for name in names:
        with Image.open(folder / "report" / f"{name}.png") as image:
            assert image.width > 900 and image.convert("L").getextrema()[0] < 100


def test_a_method_has_one_colour_everywhere(run):
    folder, results, _ = run
    shown = Results(results)
    palette = Palette(shown)
    styles = {row.label: palette.style(row) for row in shown.methods}
    assert len({style.colour for style in styles.values()}) == len({style.marker for style in styles.values()}) == 3
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert all(f"var({style.variable})" in svg for style in styles.values())
        assert not any(style.colour in svg for style in styles.values()), "a fixed colour would not follow dark mode"


def test_every_picture_is_drawn(results):
    results["rows"][2]["paired"]["psnr"]["pictures"][5] = None
    shown = Results(results)
    chart = charts.closeness(shown, Palette(shown))
    rows = [row for row in shown.rows if row.psnr is not None]
    lines = chart.figure.axes[0].lines
    assert [list(line.get_xdata()) for line in lines[::2]] == [
        [value for value in row.each("psnr") if value is not None] for row in rows
    ]
    assert [line.get_xdata()[0] for line in lines[1::2]] == [row.psnr.value for row in rows]
    segments = [tuple(drawn.get_segments()[0][:, 0]) for drawn in chart.figure.axes[0].collections]
    assert segments == [row.psnr.ends for row in rows]
    assert (
        chart.points[1].startswith("ToMe-SD 0.1: ") and f"lowest {min(rows[1].each('psnr')[:5]):.1f}" in chart.points[1]
    )
    for row in results["rows"]:
        row["paired"] = None
    assert charts.closeness(Results(results), Palette(shown)) == "Closeness to the untouched images: no row has a PSNR."


def test_identical_pictures_are_called_identical(results):
    most, some, all_ = (results["rows"][place]["paired"]["psnr"] for place in (-1, -2, -3))
    most["identical"], some["identical"] = 61, 3
    all_ |= dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest")) | {"identical": 64}
    shown = Results(results)
    psnr = [line.entries[-1] for line in main_table(shown).lines[-3:]]
    assert [entry.text for entry in psnr] == ["identical", f"{some['mean']:.2f}", "identical"]
    low, high = some["interval"]
    assert [entry.small for entry in psnr] == [
        "(64 of 64)",
        f"[{low:.2f}, {high:.2f}], 3 of 64 identical",
        "(61 of 64)",
    ]
    assert f"{low:.2f}, {high:.2f}\\], 3 of 64 identical |" in to_markdown(main_table(shown))
    assert lowest_psnr(study_table(shown))[-3:] == ["identical", f"{some['lowest']:.1f}", f"{most['lowest']:.1f}"]
    assert [record["psnr identical"] for record in csv.DictReader(io.StringIO(to_csv(shown)))][-3:] == ["64", "3", "61"]
    plots = {plot.name: plot.alt for plot in draw_plots(shown, Palette(shown))[0]}
    assert "ELFATT-SD 0.5:" not in plots["closeness_time"] and "ELFATT-SD 0.3:" in plots["closeness_time"]


def test_an_arrow_marks_an_interval_that_goes_on(results):
    def arrows(low, high):
        for row in filter(lambda row: row["distances"], results["rows"][1:]):
            row["distances"]["FD-toy"]["difference"]["interval"] = [-1.0, 1.0]
        results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.0, "interval": [low, high]}
        axes = charts.differences(Results(results), Palette(Results(results))).figure.axes[0]
        return [line.get_marker() for line in axes.lines if line.get_marker() in ("<", ">")]

    assert results["rows"][1]["role"] == "null"
    assert arrows(-0.5, 0.5) == []
    assert arrows(-50.0, 0.5) == ["<"]
    assert arrows(-50.0, 50.0) == ["<", ">"]


def test_forty_rows_are_numbered_and_told_apart(sweep, sweep_plots):
    shown = Results(sweep)
    assert len(shown.rows) == 40 and shown.crowded
    names = [row.short(34) for row in shown.rows]
    assert len(set(names)) == 40 and all(len(name) <= 34 for name in names)
    assert names[22].startswith("23 · ELFATT") and names[22].endswith("… 0.3, block size 32")
    styles = {Palette(shown).style(row) for row in shown.methods}
    assert len(styles) == len({row.label for row in shown.methods}) == 22, "a style of its own for each method"
    assert all(len(sentence) < 400 for sentence in findings(shown))
    assert main_table(shown).lines[4].heads[0].text.startswith("5 · blocks of a stratified")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", sweep_plots["distance_unet_time"].svg)
    assert {str(number) for number in range(3, 41)} <= set(texts)


def test_only_points_that_differ_in_one_number_are_joined(sweep):
    for row in sweep["rows"][3:5]:  # two block orders have no order
        row["label"] = "blocks of 128"
        row["settings"] = {**row["settings"], "block_order": row["cell"]}
    shown = Results(sweep)
    (axes,) = closeness_over_time(shown, Palette(shown)).figure.axes
    series = [line for line in axes.lines if line.get_marker() != "None"]
    joined = [len(line.get_xdata()) for line in series if line.get_linestyle() == "-"]
    apart = [len(line.get_xdata()) for line in series if line.get_linestyle() == "None"]
    assert joined == [6], "the shares of steps"
    assert sorted(apart)[-2:] == [2, 12], "two orders; ratios and block sizes"


def test_a_legend_names_few_methods_of_many_rows(sweep):
    """As in a study of few methods with many settings: rows have numbers beside their points."""
    sweep["rows"] = sweep["rows"][:2] + sweep["rows"][22:]
    shown = Results(sweep)
    assert shown.crowded
    (axes,) = closeness_over_time(shown, Palette(shown)).figure.axes
    assert all(text.get_text().isdecimal() for text in axes.texts)
    (legend,) = axes.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["ELFATT with blocks along a curve in the first fifth of all steps", "ToMe, then exact"]


def test_a_run_without_time_or_memory_says_so(sweep):
    for row in sweep["rows"]:
        row["time"] = None
    shown = Results(sweep)
    line = main_table(shown).lines[5]
    told = dict(zip([column.title for column in main_table(shown).columns], [*line.heads, *line.entries], strict=True))
    assert told["s/img"].text == told["GiB/img"].text == "not measured"
    assert "Time was not measured." in findings(shown)


def test_the_stepped_line_joins_rows_that_none_beats_in_both(results):
    spots = [
        Spot(row, across, Estimate(up))
        for row, across, up in zip(
            Results(results).rows, (3.0, 1.0, 2.0, 2.0, 1.5), (1.0, 9.0, 5.0, 4.0, 9.0), strict=False
        )
    ]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=True)] == [(1, 9), (2, 4), (3, 1)]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=False)] == [(1, 9)]


def test_a_far_null_row_does_not_press_the_others_together(results):
    shown = Results(results)
    plots = {plot.name: plot for plot in draw_plots(shown, Palette(shown))[0]}
    null = results["rows"][1]["paired"]["psnr"]["mean"]
    assert f"The null row is far off this plot, at {null:.3g}." in plots["closeness_time"].caption
    assert "null row" not in plots["closeness_time"].alt
    assert "far off" not in plots["distance_time"].caption and "null row" in plots["distance_time"].alt


def test_a_wide_null_row_does_not_hide_the_methods(results):
    results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.3, "interval": [-90.0, 90.6]}
    shown = Results(results)
    low, high = charts.differences(shown, Palette(shown)).figure.axes[0].get_xlim()
    ends = [end for row in shown.methods if (found := row.difference("FD-toy")) for end in found.ends]
    assert -10 < low < min(ends) and max(ends) < high < 10
    low, high = distance_over_time(shown, Palette(shown), "unet").figure.axes[0].get_ylim()
    values = [found.value for row in shown.rows if (found := row.distance("FD-toy"))]
    assert min(values) - 10 < low < min(values) and max(values) < high < max(values) + 10


def test_the_interval_over_time_is_that_of_the_difference(results):
    """The distance of the methods is known less well than how it differs from the untouched pipeline's."""
    for row in results["rows"]:
        if row["distances"]:
            row["distances"]["FD-toy"]["interval"] = [0.0, 900.0]
    shown = Results(results)
    (axes,) = distance_over_time(shown, Palette(shown), "unet").figure.axes
    ends = sorted(tuple(line.get_segments()[0][:, 1]) for line in axes.collections)
    base = shown.baseline.distance("FD-toy").value
    differences = [found for row in shown.methods if (found := row.difference("FD-toy"))]
    assert ends == sorted((base + found.low, base + found.high) for found in differences)
