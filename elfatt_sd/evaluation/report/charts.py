"""The plots: each is drawn once and kept as PNG, for papers, and as SVG that takes the colours of the page.

A function that draws returns a `Chart`, or a line that says what the run did not measure.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elfatt_sd.config import COLOURED
from elfatt_sd.errors import need
from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report.data import BASELINE, METHOD, NULL, PARTS, Results, Row, shortened
from elfatt_sd.evaluation.report.tables import decimals_for, fixed, interval
from elfatt_sd.evaluation.statistics import BETTER, WORSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, RULE, PAPER = "#1c2024", "#dcdfe3", "#ffffff"
BASE, SHADOW = "#6a7077", "#8d939a"
METHODS = ("#0072b2", "#d55e00", "#008a63", "#a8468f", "#9a6a00", "#2b8cc4", "#7a4fd0", "#b03a48")
METHODS_DARK = ("#4aa8e0", "#ff8b45", "#2fc096", "#d987c3", "#e0ae3d", "#8fd0f5", "#b39bf2", "#f0919c")
_MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("p", "⬟"))
_FIXED = {name: slot for slot, name in enumerate(COLOURED)}
# Colours of a plot, and the page's variables for them.
_VARIABLES = {INK: "--ink", RULE: "--rule", PAPER: "--paper", BASE: "--base", SHADOW: "--shadow"}
_VARIABLES |= {colour: f"--m{slot}" for slot, colour in enumerate(METHODS)}
WIDTH, HEIGHT = 5.2, 3.5  # inches; one column of the page
CROWDED_HEIGHT = 4.8
_LINES = 20  # fitted lines that one plot can hold
_LEGEND = 32  # characters of a name in a legend of two columns
_NAME = 34  # characters of a row's name next to a plot


@dataclass(frozen=True)
class Style:
    """How a method looks: colour on white paper, the page's variable for it, marker in plots and in text."""

    colour: str
    variable: str
    marker: str
    glyph: str


class Palette:
    """The styles of a run's methods: known methods always have the same, others take what is free.

    Past the number of colours, a colour comes again with another marker.
    """

    def __init__(self, results: Results) -> None:
        self._slots: dict[str, int] = {}
        taken = {_FIXED[row.method] for row in results.methods if row.method in _FIXED}
        free = (slot for slot in itertools.count() if slot not in taken)
        for row in results.methods:
            if row.label not in self._slots:
                slot = _FIXED.get(row.method)
                self._slots[row.label] = next(free) if slot is None or slot in self._slots.values() else slot

    def style(self, row: Row) -> Style:
        if row.role == BASELINE:
            return Style(BASE, "--base", "o", "○")
        if row.role == NULL:
            return Style(SHADOW, "--shadow", "d", "◇")
        turn, slot = divmod(self._slots[row.label], len(METHODS))
        return Style(METHODS[slot], f"--m{slot}", *_MARKERS[(slot + turn) % len(_MARKERS)])


@dataclass(frozen=True)
class Chart:
    """A drawn figure with its words; `points` are its data, for those who cannot see it."""

    name: str
    title: str
    caption: str
    figure: Figure
    points: list[str] = field(default_factory=list)


def figure_and_axes(height: float = HEIGHT, width: float = WIDTH) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


# Plots with a line for each row.


def _strips(
    rows: Sequence[Row], label: str, *, more: float = 0.85, width: float = WIDTH, letters: int = _NAME
) -> tuple[Figure, Axes]:
    """Begin a plot with a line for each row, the first on top."""
    figure, axes = figure_and_axes(more + 0.27 * len(rows), width)
    axes.set_yticks(range(len(rows)), [row.short(letters) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    return figure, axes


def differences(results: Results, palette: Palette) -> Chart | str:
    """Draw each row's paired difference in distance to the baseline, with interval, zero line and the null row."""
    name = results.distance or "distance"
    rows = sorted(results.rows, key=lambda row: row.role != NULL)
    known = [(row, row.distance(name).difference.estimate) for row in rows if row.role != BASELINE]
    found = [(row, difference) for row, difference in known if difference is not None]
    if not found:
        why = "the classes are too few" if results.withheld(name) else "no paired difference was measured"
        return f"Difference to the untouched pipeline: {why}."
    figure, axes = _strips([row for row, _ in found], f"{name} minus untouched (left is better)", more=0.9)
    decimals = decimals_for(difference for _, difference in found)
    left, right = _methods_range(found)
    points = []
    for place, (row, difference) in enumerate(found):
        style, verdict = palette.style(row), row.distance(name).difference.verdict
        if difference.ends:
            axes.hlines(place, *difference.ends, color=style.colour, linewidth=1.6)
            beyond = [(left, "<")] * (difference.ends[0] < left) + [(right, ">")] * (difference.ends[1] > right)
            for edge, arrow in beyond:
                axes.plot(edge, place, arrow, color=style.colour, clip_on=False)
            if row.role == NULL:
                axes.axvspan(*difference.ends, color=style.colour, alpha=0.15, linewidth=0)
        face = style.colour if verdict in (BETTER, WORSE) else PAPER
        axes.plot(difference.value, place, style.marker, color=style.colour, markerfacecolor=face)
        figures = f"{fixed(difference.value, decimals, sign=True)} {interval(difference, decimals, sign=True)}"
        points.append(f"{row.name}: {figures}, {verdict or 'no verdict'}")
    axes.axvline(0, color=INK, linewidth=0.9)
    axes.set_xlim(left, right)
    caption = "Line: 95 % interval of the paired difference. Filled: a verdict, since the interval excludes zero."
    if results.extrapolated(name):
        caption += " The difference is extrapolated to infinitely many images."
    if found[0][0].role == NULL:
        caption += (
            " Shaded: the interval of the null row, the untouched pipeline with other seeds, where nothing but chance "
            "is at work; an arrow says that it goes on beyond the edge. Other seeds share no latents with the baseline."
        )
    return Chart("difference", f"Difference in {name} to the untouched pipeline", caption, figure, points)


def _methods_range(found: Sequence[tuple[Row, Estimate]]) -> tuple[float, float]:
    """The interval of the null row may be so wide that it presses all others together."""
    shown = [each for row, each in found if row.role != NULL] or [each for _, each in found]
    places = [0.0, *(end for each in shown for end in each.ends or ()), *(each.value for _, each in found)]
    margin = 0.08 * (max(places) - min(places)) or 1.0
    return min(places) - margin, max(places) + margin


def closeness(results: Results, palette: Palette) -> Chart | str:
    """Draw each row's PSNR to the untouched images: the mean with its interval, and every image."""
    means = [(row, row.psnr) for row in results.rows if row.role != BASELINE and row.psnr is not None]
    if not means:
        return "Closeness to the untouched images: no row has a PSNR."
    wide = 1 + results.crowded
    figure, axes = _strips(
        [row for row, _ in means], "PSNR to untouched, dB (right is closer)", more=0.9,
        width=WIDTH * 1.4 if results.crowded else WIDTH, letters=wide * _NAME,
    )  # fmt: skip
    decimals = decimals_for(mean for _, mean in means)
    points = []
    for place, (row, mean) in enumerate(means):
        style, each = palette.style(row), [value for value in row.changes["psnr"].pictures if value is not None]
        axes.plot(each, [place] * len(each), "|", color=style.colour, alpha=0.35, markersize=7)
        if mean.ends:
            axes.hlines(place, *mean.ends, color=style.colour, linewidth=2.4)
        axes.plot(
            mean.value, place, style.marker, color=style.colour, markeredgecolor=PAPER, markersize=5.5,
            markeredgewidth=0.8,
        )  # fmt: skip
        lowest = f", lowest {min(each):.1f}" if each else ""
        points.append(f"{row.name}: {fixed(mean.value, decimals)} {interval(mean, decimals)}{lowest}")
    caption = (
        "Symbol and thick line: mean over the images that differ, with its 95 % interval. Thin strokes: every "
        "image, against the untouched pipeline's from the same latent. The null row shows how far apart unrelated "
        "images are."
    )
    return Chart("closeness", "Closeness to the untouched images", caption, figure, points)


def memory_regression(results: Results, palette: Palette) -> Chart | str:
    """Draw the peaks over the batch size, with the fitted line whose slope is the memory per image."""
    rows = [row for row in results.rows if row.memory.batches and row.memory.peaks_gib]
    if not rows:
        return "Memory regression: memory was not measured."
    if len(rows) > _LINES:
        return _memory_slopes(rows, palette)
    figure, axes = figure_and_axes()
    points = []
    for row in rows:
        style, batches, peaks = palette.style(row), row.memory.batches, row.memory.peaks_gib
        shown = min(len(batches), len(peaks))
        axes.plot(
            batches[:shown], peaks[:shown], style.marker, color=style.colour, label=_legend_name(row), markersize=4
        )
        slope, start = row.memory.gib_per_image, row.memory.intercept_gib
        if slope is not None and start is not None:
            ends = [0.0, max(batches)]
            axes.plot(ends, [start + slope * batch for batch in ends], color=style.colour, linewidth=1)
            points.append(f"{row.name}: {start:.3g} GiB and {slope:.3g} GiB per image")
    axes.set_xlabel("Images in a batch")
    axes.set_ylabel("Peak memory, GiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    legend_above(figure, axes)
    caption = (
        "Each point is the peak of a fresh process; the slope of the fitted line is the GiB/img of the table, its "
        "start is what the weights and the program take."
    )
    return Chart("memory", "Peak memory over batch size", caption, figure, points)


def _memory_slopes(rows: Sequence[Row], palette: Palette) -> Chart | str:
    """Draw the slopes alone, where there are too many lines to tell apart."""
    sloped = [(row, row.slope) for row in rows if row.slope is not None]
    if not sloped:
        return "Memory regression: no row has two batch sizes."
    figure, axes = _strips([row for row, _ in sloped], "GiB per image of a batch (left is better)")
    points = []
    for place, (row, slope) in enumerate(sloped):
        style = palette.style(row)
        if slope.ends:
            axes.hlines(place, *slope.ends, color=style.colour, linewidth=1.6)
        axes.plot(slope.value, place, style.marker, color=style.colour)
        points.append(f"{row.name}: {slope.value:.3g} GiB per image")
        if row.role == BASELINE:
            axes.axvline(slope.value, color=BASE, linewidth=0.8, linestyle="--", zorder=1)
    caption = (
        "The slope of the line through the peaks of several batch sizes, with its 95 % interval. Dashed: untouched."
    )
    return Chart("memory", "Memory per image", caption, figure, points)


def timing_strip(results: Results, palette: Palette, part: str) -> Chart | str:
    """Draw every raw timing of each row, and their median."""
    rows = [row for row in results.rows if row.timed[part].values]
    if not rows:
        return f"Timing, {PARTS[part]}: time was not measured."
    figure, axes = _strips(rows, f"Seconds per image, {PARTS[part]} (left is better)")
    points = []
    for place, row in enumerate(rows):
        style, values, middle = palette.style(row), row.timed[part].values, row.timed[part].seconds_per_image
        axes.plot(values, [place] * len(values), style.marker, color=style.colour, alpha=0.65, markersize=4.5)
        if middle is not None:
            axes.vlines(middle, place - 0.32, place + 0.32, color=style.colour, linewidth=2)
            spread = f"{len(values)} repeats from {min(values):.4g} to {max(values):.4g}"
            points.append(f"{row.name}: {middle:.4g} s, {spread}")
            if row.role == BASELINE:
                axes.axvline(middle, color=BASE, linewidth=0.8, linestyle="--", zorder=1)
    caption = (
        "Every repeat is one mark, the bar is the median. The methods are interleaved in one run. Dashed: untouched."
    )
    return Chart(f"timing_{part}", f"Time, {PARTS[part]}: every measurement", caption, figure, points)


# Plots of one figure over another.


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


def _seconds(part: str) -> Measure:
    def get(row: Row) -> Estimate | None:
        seconds = row.timed[part].seconds_per_image
        return None if seconds is None else Estimate(seconds)

    return Measure(f"Seconds per image, {PARTS[part]} (left is better)", get)


def distance_over(results: Results, palette: Palette, what: str) -> Chart | str:
    """Draw the distance over the seconds per image of a part, or over the memory that one more image takes."""
    if what == "memory":
        title, across = what, Measure("GiB per image of a batch (left is better)", lambda row: row.slope)
    else:
        title, across = {"end_to_end": "time", "unet": "UNet time"}[what], _seconds(what)
    name = results.distance
    if name is None:
        return f"Distance over {title}: no distance was measured."
    if results.withheld(name):
        return f"{name} over {title}: the classes are too few for a difference."
    limit = results.extrapolated(name)
    up = Measure(f"{name}{' of untouched + difference' * limit} (down is better)", results.paired_distance)
    caption = (
        f"Line up and down: 95 % interval of the paired difference in {name} to the untouched pipeline (dashed); that "
        f"of {name} itself, in the table, is wider."
    )
    if limit:
        caption += f" Height: {name} of the untouched pipeline plus the row's difference, extrapolated to infinitely "
        caption += "many images."
    file = f"distance_{title.lower().replace(' ', '_')}"
    return _tradeoff(results, palette, file, f"{name} over {title}", across, up, caption)


def accuracy_over_time(results: Results, palette: Palette) -> Chart | str:
    """Draw the fraction of attributes that the toy's classifier finds right over the time."""
    up = Measure("Accuracy of attributes (up is better)", lambda row: row.accuracy["mean"].estimate, False)
    caption = (
        "Fraction of the prompt's attributes that the classifier sees in the image, with its 95 % interval. Dashed: "
        "the untouched pipeline."
    )
    across = _seconds(results.time_part)
    return _tradeoff(results, palette, "accuracy_time", "Accuracy over time", across, up, caption)


def closeness_over_time(results: Results, palette: Palette) -> Chart | str:
    up = Measure("PSNR to untouched, dB (up is closer)", lambda row: row.psnr, False)
    caption = (
        "Mean over the images that differ, with its 95 % interval, each against the untouched pipeline's image "
        "from the same latent; a row with most images identical has no place. Closer is not the same as better; the "
        "null row shows how far apart unrelated images are."
    )
    title = "Closeness to the untouched images over time"
    return _tradeoff(results, palette, "closeness_time", title, _seconds(results.time_part), up, caption)


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
    figure, axes = figure_and_axes(CROWDED_HEIGHT if results.crowded else HEIGHT)
    best = front([spot for spot in spots if spot.row.role != NULL], low_is_better=up.low_is_better)
    axes.set_xlabel(across.title)
    axes.set_ylabel(up.title)
    series: dict[tuple[str, str], list[Spot]] = {}  # of each method, in order of appearance
    for spot in spots:
        series.setdefault((spot.row.role, spot.row.label), []).append(spot)
    for method in series.values():
        _draw_series(axes, palette, method, named=results.legend)
        colour = palette.style(method[0].row).colour
        for spot in method:  # the null row's can be so wide that it presses all others together
            if spot.up.ends and spot.row.role != NULL and (spot in best or not results.crowded):
                axes.vlines(spot.across, *spot.up.ends, color=colour, linewidth=0.9, alpha=0.6)
    caption += draw_front(axes, best)
    legend_above(figure, axes)
    marks = []
    for spot in spots:
        text = str(spot.row.number) if results.crowded else spot.row.suffix
        marks.append((spot.across, spot.up.value, text, palette.style(spot.row).colour))
    write_beside(axes, marks)
    caption += " Numbers: the rows of the table." if results.crowded else ""
    decimals = decimals_for(spot.up for spot in spots)
    points = [f"{spot.row.name}: {spot.across:.3g}, {fixed(spot.up.value, decimals)}" for spot in spots]
    return Chart(file, title, caption, figure, points)


def front(spots: Sequence[Spot], *, low_is_better: bool) -> list[Spot]:
    """Return the spots that no other beats in both."""
    sign = 1 if low_is_better else -1
    best: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.across, sign * spot.up.value)):
        if not best or sign * spot.up.value < sign * best[-1].up.value:
            best.append(spot)
    return best


def _draw_series(axes: Axes, palette: Palette, series: Sequence[Spot], *, named: bool) -> None:
    """Draw the points of one method, joined if they are a curve; a method is in the legend if it is to be named."""
    row, style = series[0].row, palette.style(series[0].row)
    plain = row.role == METHOD
    axes.plot(
        [spot.across for spot in series], [spot.up.value for spot in series], style.marker,
        color=style.colour, linestyle="-" if _is_curve(series) else "", zorder=3,
        label=_legend_name(row) if named or not plain else None, markerfacecolor=style.colour if plain else PAPER,
    )  # fmt: skip
    if row.role == BASELINE:
        axes.axhline(series[0].up.value, color=BASE, linewidth=0.8, linestyle="--", zorder=1)


def _is_curve(series: Sequence[Spot]) -> bool:
    """Tell whether rows differ in one number alone."""
    names = {name for spot in series for name in spot.row.settings}
    values = [[spot.row.settings.get(name) for spot in series] for name in names]
    differing = [each for each in values if any(value != each[0] for value in each)]
    return len(differing) == 1 and all(isinstance(value, int | float) for value in differing[0])


def _legend_name(row: Row) -> str:
    return row.name if row.role == NULL else row.label


def draw_front(axes: Axes, best: Sequence[Spot]) -> str:
    """Draw the stepped line of the best rows, and return what the caption says of it."""
    if len(best) < 2:
        return ""
    places, values = [spot.across for spot in best], [spot.up.value for spot in best]
    axes.step(places, values, where="post", color=INK, linewidth=0.8, alpha=0.45, zorder=2)
    return " Stepped line: rows that no other beats in both, by the values alone."


def _far_null(spots: Sequence[Spot]) -> Spot | None:
    """Return the null row where it would press the others together."""
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


def legend_above(figure: Figure, axes: Axes) -> None:
    """Put one entry for each label above the plot."""
    handles, labels = axes.get_legend_handles_labels()
    first = {label: handle for handle, label in reversed(list(zip(handles, labels, strict=True)))}
    names = list(dict.fromkeys(labels))
    longest = max(map(len, names), default=0)
    columns = 3 if longest <= _LEGEND * 2 // 3 else 1 if longest > _LEGEND and len(names) <= 3 else 2
    shown = [shortened(name, "", _LEGEND if columns > 1 else 2 * _LEGEND) for name in names]
    figure.legend([first[name] for name in names], shown, loc="outside upper left", ncols=columns)


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
    name: str  # the file name without its ending
    title: str  # what it shows
    caption: str  # how to read it
    alt: str  # its content in words and figures
    svg: str  # inline SVG, without references to anything outside
    png: bytes  # the same as a PNG file


def draw_plots(results: Results, palette: Palette) -> tuple[list[Plot], list[str]]:
    """Draw every plot for which the run has figures."""
    with drawing():
        made = [make(results, palette) for make in _makers(results)]
        plots = [_finish(chart) for chart in made if isinstance(chart, Chart)]
    return plots, [line for line in made if isinstance(line, str)]


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw in the style of the report."""
    need("a plot", "matplotlib")
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # the page's own fonts may have it
        yield


def to_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def _makers(results: Results) -> Iterator[Callable[[Results, Palette], Chart | str]]:
    yield differences
    for what in (*PARTS, "memory"):
        yield functools.partial(distance_over, what=what)
    if "mean" in results.attributes:
        yield accuracy_over_time
    yield closeness
    yield closeness_over_time
    yield memory_regression
    for part in PARTS:
        yield functools.partial(timing_strip, part=part)


def _finish(chart: Chart) -> Plot:
    svg = io.StringIO()
    chart.figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    alt = f"{chart.title}. {'; '.join(chart.points)}."
    inline = _inline(svg.getvalue(), chart.name)
    return Plot(chart.name, chart.title, chart.caption, alt, inline, to_png(chart.figure))


def _inline(svg: str, name: str) -> str:
    """Make a standalone SVG fit for a page: no prolog, ids of its own, colours from the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg, count=3).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match[1]}{name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = re.sub(f"(?<=: ){re.escape(colour)}\\b", f"var({variable})", svg)
    svg = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif", r"font: \1sans-serif", svg)
    width, height = (float(side) for side in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    svg = re.sub(r"^<svg [^>]*>", f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true" focusable="false">', svg)
    return re.sub(r">\s+<", "><", svg)
