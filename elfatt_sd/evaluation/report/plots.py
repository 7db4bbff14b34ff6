"""The plots: each is drawn once and kept as PNG, for papers, and as SVG that takes the colours of the page."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elfatt_sd.errors import need
from elfatt_sd.evaluation.report import charts
from elfatt_sd.evaluation.report.charts import (
    BASE,
    INK,
    PAPER,
    RULE,
    Chart,
    Palette,
    figure_and_axes,
    groups,
    legend_above,
    legend_name,
)
from elfatt_sd.evaluation.report.data import BASELINE, NULL, PARTS, Estimate, Results, Row
from elfatt_sd.evaluation.report.tables import decimals_for, fixed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CROWDED_HEIGHT = 4.8  # inches


@dataclass(frozen=True)
class Measure:
    """What one axis shows."""

    title: str  # of the axis
    get: Callable[[Row], Estimate | None]  # the figure of a row, None where there is none
    low_is_better: bool = True  # which way is better


@dataclass(frozen=True)
class Spot:
    """A row in the plane."""

    row: Row
    across: float
    up: Estimate


def distance_over_time(results: Results, palette: Palette, part: str) -> Chart | str:
    """Draw the distance over the seconds per image of a part: `end_to_end` or `unet`."""
    name = "time" if part == "end_to_end" else "UNet time"
    return _distance(results, palette, name, f"distance_{name.lower().replace(' ', '_')}", _seconds(part))


def distance_over_memory(results: Results, palette: Palette) -> Chart | str:
    """Draw the distance over the memory that one more image of a batch takes."""
    memory = Measure("GiB per image of a batch (left is better)", lambda row: row.slope)
    return _distance(results, palette, "memory", "distance_memory", memory)


def _distance(results: Results, palette: Palette, what: str, file: str, across: Measure) -> Chart | str:
    name = results.distance
    if name is None:
        return f"Distance over {what}: no distance was measured."
    if results.withheld(name):
        return f"{name} over {what}: the classes are too few for a difference."
    limit = results.extrapolated(name)
    title = f"{name} of untouched + difference" if limit else name
    up = Measure(f"{title} (down is better)", results.paired_distance)
    caption = (
        f"Line up and down: 95 % interval of the paired difference in {name} to the untouched pipeline (dashed); that "
        f"of {name} itself, in the table, is wider."
    )
    if limit:
        caption += f" Height: {name} of the untouched pipeline plus the row's difference, extrapolated to infinitely "
        caption += "many images."
    return _tradeoff(results, palette, file, f"{name} over {what}", across, up, caption)


def accuracy_over_time(results: Results, palette: Palette) -> Chart | str:
    """Draw the fraction of attributes that the toy's classifier finds right over the time."""
    up = Measure("Accuracy of attributes (up is better)", lambda row: row.accuracy("mean"), low_is_better=False)
    caption = (
        "Fraction of the prompt's attributes that the classifier sees in the image, with its 95 % interval. Dashed: "
        "the untouched pipeline."
    )
    part = results.time_part
    return _tradeoff(results, palette, "accuracy_time", "Accuracy over time", _seconds(part), up, caption)


def closeness_over_time(results: Results, palette: Palette) -> Chart | str:
    """Draw the PSNR to the untouched images over the time."""
    up = Measure("PSNR to untouched, dB (up is closer)", lambda row: row.psnr, low_is_better=False)
    caption = (
        "Mean over the images that differ, with its 95 % interval, each against the untouched pipeline's image "
        "from the same latent; a row with most images identical has no place. Closer is not the same as better; the "
        "null row shows how far apart unrelated images are."
    )
    title = "Closeness to the untouched images over time"
    return _tradeoff(results, palette, "closeness_time", title, _seconds(results.time_part), up, caption)


def _seconds(part: str) -> Measure:
    return Measure(f"Seconds per image, {PARTS[part]} (left is better)", lambda row: row.time(part))


def _tradeoff(
    results: Results, palette: Palette, file: str, title: str, across: Measure, up: Measure, caption: str
) -> Chart | str:
    found = [(row, across.get(row), up.get(row)) for row in results.rows]
    spots = [Spot(row, x.value, y) for row, x, y in found if x is not None and y is not None]
    if not spots:
        return f"{title}: no row has both."
    far = _far_null(spots)
    if far is not None:
        spots.remove(far)
        caption += f" The null row is far off this plot, at {far.up.value:.3g}."
    figure, axes = figure_and_axes(*(CROWDED_HEIGHT,) * results.crowded)
    best = front([spot for spot in spots if spot.row.role != NULL], low_is_better=up.low_is_better)
    axes.set_xlabel(across.title)
    axes.set_ylabel(up.title)
    for rows in groups([spot.row for spot in spots]):
        series = [spot for spot in spots if spot.row in rows]
        _draw_series(axes, palette, series, named=results.legend)
        _draw_intervals(axes, palette, [spot for spot in series if not results.crowded or spot in best])
    caption += draw_front(axes, best)
    legend_above(figure, axes)
    texts = [str(spot.row.number) if results.crowded else spot.row.suffix for spot in spots]
    marks = [
        (spot.across, spot.up.value, text, palette.style(spot.row).colour)
        for spot, text in zip(spots, texts, strict=True)
    ]
    write_beside(axes, marks)
    caption += " Numbers: the rows of the table." if results.crowded else ""
    decimals = decimals_for(spot.up for spot in spots)
    points = [f"{spot.row.name}: {spot.across:.3g}, {fixed(spot.up.value, decimals)}" for spot in spots]
    return Chart(file, title, caption, figure, points)


def front(spots: Sequence[Spot], *, low_is_better: bool) -> list[Spot]:
    sign = 1 if low_is_better else -1
    best: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.across, sign * spot.up.value)):
        if not best or sign * spot.up.value < sign * best[-1].up.value:
            best.append(spot)
    return best


def _draw_series(axes: Axes, palette: Palette, series: Sequence[Spot], *, named: bool) -> None:
    """Draw the points of one method, joined if they are a curve; a method is in the legend if it is to be named."""
    row, style = series[0].row, palette.style(series[0].row)
    plain = row.role == "method"
    axes.plot(
        [spot.across for spot in series], [spot.up.value for spot in series], style.marker,
        color=style.colour, linestyle="-" if _is_curve(series) else "", zorder=3,
        label=legend_name(row) if named or not plain else None, markerfacecolor=style.colour if plain else PAPER,
    )  # fmt: skip
    if row.role == BASELINE:
        axes.axhline(series[0].up.value, color=BASE, linewidth=0.8, linestyle="--", zorder=1)


def _is_curve(series: Sequence[Spot]) -> bool:
    names = {name for spot in series for name in spot.row.settings}
    values = [[spot.row.settings.get(name) for spot in series] for name in names]
    differing = [each for each in values if any(value != each[0] for value in each)]
    return len(differing) == 1 and all(isinstance(value, int | float) for value in differing[0])


def _draw_intervals(axes: Axes, palette: Palette, spots: Sequence[Spot]) -> None:
    for spot in spots:
        if spot.up.ends and spot.row.role != NULL:  # it can be so wide that it presses all others together
            axes.vlines(spot.across, *spot.up.ends, color=palette.style(spot.row).colour, linewidth=0.9, alpha=0.6)


def draw_front(axes: Axes, best: Sequence[Spot]) -> str:
    """Draw the stepped line of the best rows, and return what the caption says of it."""
    if len(best) < 2:
        return ""
    places, values = [spot.across for spot in best], [spot.up.value for spot in best]
    axes.step(places, values, where="post", color=INK, linewidth=0.8, alpha=0.45, zorder=2)
    return " Stepped line: rows that no other beats in both, by the values alone."


def _far_null(spots: Sequence[Spot]) -> Spot | None:
    values = [value for spot in spots if spot.row.role != NULL for value in (spot.up.value, *(spot.up.ends or ()))]
    null = next((spot for spot in spots if spot.row.role == NULL), None)
    if not values or null is None:
        return None
    low, high = min(values), max(values)
    return null if max(low - null.up.value, null.up.value - high) > (high - low) / 2 else None


def write_beside(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write a short text to the upper right of each point, of which place, text and colour are given."""
    for across, up, text, colour in points:
        axes.annotate(text, (across, up), (4, 3), textcoords="offset points", fontsize=7, color=colour, zorder=4)


_STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.parse_math": False,  # labels are text, whatever they contain
    "svg.fonttype": "none",
    "svg.hashsalt": "elfatt-sd",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
}


@dataclass(frozen=True)
class Plot:
    """A finished plot."""

    name: str  # the file name without its ending
    title: str  # what it shows
    caption: str  # how to read it
    alt: str  # its content in words and figures
    svg: str  # inline SVG, without references to anything outside
    png: bytes  # the same as a PNG file


def draw_plots(results: Results, palette: Palette) -> tuple[list[Plot], list[str]]:
    """Draw every plot for which the run has figures."""
    plots: list[Plot] = []
    missing: list[str] = []
    with drawing():
        for make in _makers(results):
            chart = make(results, palette)
            if isinstance(chart, str):
                missing.append(chart)
            else:
                plots.append(_finish(chart, palette))
    return plots, missing


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw in the style of the report."""
    need("a plot", "matplotlib")
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # the page's own fonts may have it
        yield


def to_png(figure: Figure) -> bytes:
    """Write a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def _makers(results: Results) -> Iterator[Callable[[Results, Palette], charts.Chart | str]]:
    yield charts.differences
    for part in PARTS:
        yield functools.partial(distance_over_time, part=part)
    yield distance_over_memory
    if "mean" in results.attributes:
        yield accuracy_over_time
    yield charts.closeness
    yield closeness_over_time
    yield charts.memory_regression
    for part in PARTS:
        yield functools.partial(charts.timing_strip, part=part)


def _finish(chart: charts.Chart, palette: Palette) -> Plot:
    svg = io.StringIO()
    chart.figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    alt = f"{chart.title}. {'; '.join(chart.points)}."
    inline = _inline(svg.getvalue(), chart.name, palette)
    return Plot(chart.name, chart.title, chart.caption, alt, inline, to_png(chart.figure))


def _inline(svg: str, name: str, palette: Palette) -> str:
    """Make a standalone SVG fit for a page: no prolog, ids of its own, colours from the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg, count=3).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match[1]}{name}-", svg)
    for colour, variable in palette.variables().items():
        svg = re.sub(f"(?<=: ){re.escape(colour)}\\b", f"var({variable})", svg)
    svg = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif", r"font: \1sans-serif", svg)
    width, height = (float(side) for side in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    svg = re.sub(r"^<svg [^>]*>", f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true" focusable="false">', svg)
    return re.sub(r">\s+<", "><", svg)
