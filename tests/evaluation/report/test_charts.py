"""The plots of a report: what they show and how it can be told apart."""

import re

from PIL import Image

from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report import charts
from elfatt_sd.evaluation.report.charts import Palette, Spot, closeness_over_time, distance_over, front
from elfatt_sd.evaluation.report.data import Results


def drawn(draw, results, *options):
    shown = Results(results)
    return draw(shown, Palette(shown), *options)


def test_what_plots_say_is_unchanged(plots_of, snapshot):
    """Titles, captions and every figure, of a run and of a sweep of 40 rows."""
    for plots in plots_of.values():
        assert {name: [plot.title, plot.caption, plot.alt] for name, plot in plots.items()} == snapshot


def test_plots_are_written_as_png_too(run):
    folder, _, page = run
    paths = list((folder / "report").glob("*.png"))
    assert len(paths) == len(page.all("svg")) == 10
    for path in paths:
        with Image.open(path) as image:
            assert image.width > 900 and image.convert("L").getextrema()[0] < 100


def test_a_method_has_one_colour_everywhere(run):
    folder, results, _ = run
    shown = Results(results)
    styles = {row.label: Palette(shown).style(row) for row in shown.methods}
    assert len({style.colour for style in styles.values()}) == len({style.marker for style in styles.values()}) == 3
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert all(f"var({style.variable})" in svg for style in styles.values())
        assert not any(style.colour in svg for style in styles.values()), "a fixed colour would not follow dark mode"


def test_every_picture_is_drawn(results):
    results["rows"][2]["paired"]["psnr"]["pictures"][5] = None
    rows = [row for row in Results(results).rows if row.psnr is not None]
    (axes,) = drawn(charts.closeness, results).figure.axes
    assert [list(line.get_xdata()) for line in axes.lines[::2]] == [
        [value for value in row.changes["psnr"].pictures if value is not None] for row in rows
    ]
    assert [line.get_xdata()[0] for line in axes.lines[1::2]] == [row.psnr.value for row in rows]
    assert [tuple(line.get_segments()[0][:, 0]) for line in axes.collections] == [row.psnr.ends for row in rows]


def test_an_arrow_marks_an_interval_that_goes_on(results):
    def arrows(low, high):
        for row in filter(lambda row: row["distances"], results["rows"][1:]):
            row["distances"]["FD-toy"]["difference"]["interval"] = [-1.0, 1.0]
        results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.0, "interval": [low, high]}
        axes = drawn(charts.differences, results).figure.axes[0]
        return [line.get_marker() for line in axes.lines if line.get_marker() in ("<", ">")]

    assert [arrows(-0.5, 0.5), arrows(-50.0, 0.5), arrows(-50.0, 50.0)] == [[], ["<"], ["<", ">"]]


def test_forty_rows_are_numbered_and_told_apart(sweep, plots_of):
    shown = Results(sweep)
    names = [row.short(34) for row in shown.rows]
    assert len(set(names)) == 40 and all(len(name) <= 34 for name in names)
    assert names[22].startswith("23 · ELFATT") and names[22].endswith("… 0.3, block size 32")
    styles = {Palette(shown).style(row) for row in shown.methods}
    assert len(styles) == len({row.label for row in shown.methods}) == 22, "a style of its own for each method"
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", plots_of["sweep"]["distance_unet_time"].svg)
    assert {str(number) for number in range(3, 41)} <= set(texts)


def test_only_points_that_differ_in_one_number_are_joined(sweep):
    for row in sweep["rows"][3:5]:  # two block orders have no order
        row["label"] = "blocks of 128"
        row["settings"] = {**row["settings"], "block_order": row["cell"]}
    (axes,) = drawn(closeness_over_time, sweep).figure.axes
    series = [line for line in axes.lines if line.get_marker() != "None"]
    joined = [len(line.get_xdata()) for line in series if line.get_linestyle() == "-"]
    apart = [len(line.get_xdata()) for line in series if line.get_linestyle() == "None"]
    assert joined == [6], "the shares of steps"
    assert sorted(apart)[-2:] == [2, 12], "two orders; ratios and block sizes"


def test_a_legend_names_few_methods_of_many_rows(sweep):
    """As in a study of few methods with many settings: rows have numbers beside their points."""
    sweep["rows"] = sweep["rows"][:2] + sweep["rows"][22:]
    (axes,) = drawn(closeness_over_time, sweep).figure.axes
    assert all(text.get_text().isdecimal() for text in axes.texts)
    (legend,) = axes.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["ELFATT with blocks along a curve in the first fifth of all steps", "ToMe, then exact"]


def test_the_stepped_line_joins_rows_that_none_beats_in_both(results):
    places = zip((3.0, 1.0, 2.0, 2.0, 1.5), (1.0, 9.0, 5.0, 4.0, 9.0), strict=True)
    spots = [Spot(row, across, Estimate(up)) for row, (across, up) in zip(Results(results).rows, places, strict=False)]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=True)] == [(1, 9), (2, 4), (3, 1)]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=False)] == [(1, 9)]


def test_a_wide_or_far_null_row_does_not_hide_the_methods(results, plots_of):
    plots, null = plots_of["run"], results["rows"][1]["paired"]["psnr"]["mean"]
    assert f"The null row is far off this plot, at {null:.3g}." in plots["closeness_time"].caption
    assert "null row" not in plots["closeness_time"].alt and "null row" in plots["distance_time"].alt
    results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.3, "interval": [-90.0, 90.6]}
    low, high = drawn(charts.differences, results).figure.axes[0].get_xlim()
    found = [row.distances["FD-toy"].difference.estimate for row in Results(results).methods if not row.failed]
    ends = [end for each in found for end in each.ends]
    assert -10 < low < min(ends) and max(ends) < high < 10


def test_the_interval_over_time_is_that_of_the_difference(results):
    """The distance of the methods is known less well than how it differs from the untouched pipeline's."""
    for row in results["rows"]:
        if row["distances"]:
            row["distances"]["FD-toy"]["interval"] = [0.0, 900.0]
    shown = Results(results)
    (axes,) = drawn(distance_over, results, "unet").figure.axes
    ends = sorted(tuple(line.get_segments()[0][:, 1]) for line in axes.collections)
    base = shown.baseline.distances["FD-toy"].value
    found = [row.distances["FD-toy"].difference.estimate for row in shown.methods if not row.failed]
    assert ends == sorted((base + each.low, base + each.high) for each in found)
