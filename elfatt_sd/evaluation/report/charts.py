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
from typing import TYPE_CHECKING, Any, NamedTuple

from elfatt_sd.config import COLOURED
from elfatt_sd.errors import need
from elfatt_sd.evaluation.records import Estimate, estimate
from elfatt_sd.evaluation.report.data import BASELINE, NULL, PARTS, Results, Row, shortened
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
_ACROSS = {part: f"Seconds per image, {said} (left is better)" for part, said in PARTS.items()}
_ACROSS["memory"] = "GiB per image of a batch (left is better)"
_LEGEND = 32  # characters of a name in a legend of two columns
_NAME = 34  # characters of a row's name next to a plot


class Style(NamedTuple):
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


class Chart(NamedTuple):
    """A drawn figure with its words; `points` are its data, for those who cannot see it."""

    name: str  # the file name without its ending
    title: str  # what it shows
    caption: str  # how to read it
    figure: Figure
    points: list[str]
    svg: str = ""  # inline SVG, without references to anything outside
    png: bytes = b""

    @property
    def alt(self) -> str:
        return f"{self.title}. {'; '.join(self.points)}."


def figure_and_axes(height: float = HEIGHT, width: float = WIDTH) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


# Plots with a line for each row.


class Mark(NamedTuple):
    """The line of a row: a value with its interval, and every single measurement."""

    row: Row
    value: Estimate
    each: Sequence[float] = ()
    said: str = ""  # behind the figures, for those who cannot see the plot
    filled: bool = True


def _strips(
    results: Results, palette: Palette, marks: Sequence[Mark], label: str, words: tuple[str, str, str]
) -> Chart:
    wide = 1 + results.crowded
    figure, axes = figure_and_axes(0.9 + 0.27 * len(marks), WIDTH * (1.4 if results.crowded else 1))
    axes.set_yticks(range(len(marks)), [shortened(mark.row.name, wide * _NAME) for mark in marks])
    axes.set_ylim(len(marks) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    decimals = decimals_for(mark.value for mark in marks)
    points = []
    for place, mark in enumerate(marks):
        style, value = palette.style(mark.row), mark.value
        if mark.each:
            axes.plot(mark.each, [place] * len(mark.each), "|", color=style.colour, alpha=0.3, markersize=8)
        if value.ends:
            axes.hlines(place, *value.ends, color=style.colour, linewidth=2.2)
        face, edge = style.colour if mark.filled else PAPER, PAPER if mark.each else style.colour
        axes.plot(value.value, place, style.marker, color=face, markeredgecolor=edge, markersize=6.5)
        figures = f"{fixed(value.value, decimals)} {interval(value, decimals)}".strip()
        points.append(f"{mark.row.name}: {figures}{mark.said}")
    return Chart(*words, figure, points)


def differences(results: Results, palette: Palette) -> Chart | str:
    """Draw each row's paired difference in distance to the baseline, with interval, zero line and the null row."""
    name, marks = results.distance or "distance", []
    for row in sorted(results.rows, key=lambda row: row.role != NULL):
        difference = row.figure(name).difference
        if row.role != BASELINE and difference.estimate is not None:
            said, judged = f", {difference.verdict or 'no verdict'}", difference.verdict in (BETTER, WORSE)
            marks.append(Mark(row, difference.estimate, (), said, judged))
    if not marks:
        why = "the classes are too few" if results.withheld(name) else "no paired difference was measured"
        return f"Difference to the untouched pipeline: {why}."
    null = marks[0].value if marks[0].row.role == NULL else None
    caption = "Line: 95 % interval of the paired difference. Filled: a verdict, since the interval excludes zero."
    if results.extrapolated(name):
        caption += " The difference is extrapolated to infinitely many images."
    if null is not None:
        caption += (
            " Shaded: the interval of the null row, the untouched pipeline with other seeds, where nothing but chance "
            "is at work; it may go on beyond the edge. Other seeds share no latents with the baseline."
        )
    words = "difference", f"Difference in {name} to the untouched pipeline", caption
    chart = _strips(results, palette, marks, f"{name} minus untouched (left is better)", words)
    (axes,) = chart.figure.axes
    axes.axvline(0, color=INK, linewidth=0.9)
    if null is not None and null.ends:
        axes.axvspan(*null.ends, color=SHADOW, alpha=0.15, linewidth=0)
    # the interval of the null row may be so wide that it presses all others together
    kept = [mark.value for mark in marks if mark.row.role != NULL] or [mark.value for mark in marks]
    places = [0.0, *(end for value in kept for end in value.ends or ()), *(mark.value.value for mark in marks)]
    margin = 0.08 * (max(places) - min(places)) or 1.0
    axes.set_xlim(min(places) - margin, max(places) + margin)
    return chart


def closeness(results: Results, palette: Palette) -> Chart | str:
    """Draw each row's PSNR to the untouched images: the mean with its interval, and every image."""
    marks = []
    for row in results.rows:
        if row.role != BASELINE and row.psnr is not None:
            each = [value for value in row.changes["psnr"].pictures if value is not None]
            marks.append(Mark(row, row.psnr, each, f", lowest {min(each):.1f}" if each else ""))
    if not marks:
        return "Closeness to the untouched images: no row has a PSNR."
    caption = (
        "Symbol and thick line: mean over the images that differ, with its 95 % interval. Thin strokes: every "
        "image, against the untouched pipeline's from the same latent. The null row shows how far apart unrelated "
        "images are."
    )
    words = "closeness", "Closeness to the untouched images", caption
    return _strips(results, palette, marks, "PSNR to untouched, dB (right is closer)", words)


# Plots of one figure over another.


class Spot(NamedTuple):
    """A row in the plane."""

    row: Row
    across: float
    up: Estimate


def distance_over(results: Results, palette: Palette, what: str) -> Chart | str:
    """Draw the distance over the seconds per image of a part, or over the memory that one more image takes.

    Up is the baseline's distance plus the row's paired difference, with the interval of that. Where the difference is
    extrapolated, this is not the row's own distance.
    """
    title = {"end_to_end": "time", "unet": "UNet time", "memory": "memory"}[what]
    name = results.distance
    if name is None:
        return f"Distance over {title}: no distance was measured."
    if results.withheld(name):
        return f"{name} over {title}: the classes are too few for a difference."
    base = results.baseline.figure(name).value if results.baseline else None
    ups: dict[Row, Estimate | None] = {}
    for row in results.rows:
        own, difference = row.figure(name).value, row.figure(name).difference.estimate
        if base is not None and difference is not None:
            ends = [base + end for end in difference.ends or ()]
            ups[row] = estimate(base + difference.value, ends)
        elif row is results.baseline or not results.extrapolated(name):
            ups[row] = estimate(own)
    caption = (
        f"Line up and down: 95 % interval of the paired difference in {name} to the untouched pipeline (dashed); that "
        f"of {name} itself, in the table, is wider."
    )
    if results.extrapolated(name):
        caption += f" Height: {name} of the untouched pipeline plus the row's difference, extrapolated to infinitely "
        caption += "many images."
    file = f"distance_{title.lower().replace(' ', '_')}"
    words = file, f"{name} over {title}", caption, f"{name} (down is better)"
    return _trade_off(results, palette, what, ups.get, words, low_is_better=True)


def closeness_over_time(results: Results, palette: Palette) -> Chart | str:
    caption = (
        "Mean over the images that differ, with its 95 % interval, each against the untouched pipeline's image "
        "from the same latent; a row with most images identical has no place. Closer is not the same as better."
    )
    title = "Closeness to the untouched images over time"
    words = "closeness_time", title, caption, "PSNR to untouched, dB (up is closer)"
    return _trade_off(results, palette, results.time_part, lambda row: row.psnr, words)


def _trade_off(
    results: Results,
    palette: Palette,
    over: str,
    up: Callable[[Row], Estimate | None],
    words: tuple[str, str, str, str],
    *,
    low_is_better: bool = False,
) -> Chart | str:
    """Draw a figure over the time of a part or the memory; the null row, which may be far off, has no place there."""
    name, title, caption, label = words
    spots = []
    for row in results.rows:
        slope = row.slope.value if row.slope else None
        across, value = slope if over == "memory" else row.timed[over].seconds_per_image, up(row)
        if row.role != NULL and across is not None and value is not None:
            spots.append(Spot(row, across, value))
    if not spots:
        return f"{title}: no row has both."
    figure, axes = figure_and_axes(CROWDED_HEIGHT if results.crowded else HEIGHT)
    axes.set_xlabel(_ACROSS[over])
    axes.set_ylabel(label)
    best = front(spots, low_is_better=low_is_better)
    series: dict[tuple[str, str], list[Spot]] = {}  # of each method, in order of appearance
    for spot in spots:
        series.setdefault((spot.row.role, spot.row.label), []).append(spot)
    for method in series.values():
        row, colour = method[0].row, palette.style(method[0].row).colour
        untouched = row.role == BASELINE
        axes.plot(
            [spot.across for spot in method], [spot.up.value for spot in method], palette.style(row).marker,
            color=colour, linestyle="-" if _is_curve(method) else "", zorder=3,
            label=row.label if results.legend or untouched else None, markerfacecolor=PAPER if untouched else colour,
        )  # fmt: skip
        if untouched:
            axes.axhline(method[0].up.value, color=BASE, linewidth=0.8, linestyle="--", zorder=1)
        for spot in method:
            if spot.up.ends and (spot in best or not results.crowded):
                axes.vlines(spot.across, *spot.up.ends, color=colour, linewidth=0.9, alpha=0.6)
    caption += draw_front(axes, best)
    legend_above(figure, axes)
    for spot in spots:
        text = str(spot.row.number) if results.crowded else spot.row.suffix
        write_beside(axes, spot, text, palette.style(spot.row).colour)
    caption += " Numbers: the rows of the table." if results.crowded else ""
    decimals = decimals_for(spot.up for spot in spots)
    points = [f"{spot.row.name}: {spot.across:.3g}, {fixed(spot.up.value, decimals)}" for spot in spots]
    return Chart(name, title, caption, figure, points)


def front(spots: Sequence[Spot], *, low_is_better: bool) -> list[Spot]:
    sign = 1 if low_is_better else -1
    best: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.across, sign * spot.up.value)):
        if not best or sign * spot.up.value < sign * best[-1].up.value:
            best.append(spot)
    return best


def _is_curve(series: Sequence[Spot]) -> bool:
    names = {name for spot in series for name in spot.row.settings}
    values = [[spot.row.settings.get(name) for spot in series] for name in names]
    differing = [each for each in values if any(value != each[0] for value in each)]
    return len(differing) == 1 and all(isinstance(value, int | float) for value in differing[0])


def draw_front(axes: Axes, best: Sequence[Spot]) -> str:
    """Draw the stepped line of the best rows, and return what the caption says of it."""
    if len(best) < 2:
        return ""
    places, values = [spot.across for spot in best], [spot.up.value for spot in best]
    axes.step(places, values, where="post", color=INK, linewidth=0.8, alpha=0.45, zorder=2)
    return " Stepped line: rows that no other beats in both, by the values alone."


def write_beside(axes: Axes, spot: Spot, text: str, colour: str) -> None:
    """Write a short text to the upper right of a row's place."""
    place = spot.across, spot.up.value
    axes.annotate(text, place, (4, 3), textcoords="offset points", fontsize=7, color=colour, zorder=4)


def legend_above(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels[::-1], handles[::-1], strict=True))
    names = list(dict.fromkeys(labels))
    columns = 3 if max(map(len, names), default=0) <= _LEGEND * 2 // 3 else 2
    shown = [shortened(name, _LEGEND) for name in names]
    figure.legend([first[name] for name in names], shown, loc="outside upper left", ncols=columns)


_STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.parse_math": False,  # labels are text, whatever they contain
    "svg.fonttype": "none",
    "svg.hashsalt": "elfatt-sd",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
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


def draw_plots(results: Results, palette: Palette) -> tuple[list[Chart], list[str]]:
    with drawing():
        made = [make(results, palette) for make in PLOTS]
        charts = [chart for chart in made if isinstance(chart, Chart)]
        plots = [chart._replace(svg=_inline_svg(chart), png=to_png(chart.figure)) for chart in charts]
    return plots, [line for line in made if isinstance(line, str)]


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    need("a plot", "matplotlib")
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # the page's own fonts may have it
        yield


def to_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


PLOTS: Sequence[Callable[[Results, Palette], Chart | str]] = (
    differences,
    *(functools.partial(distance_over, what=what) for what in (*PARTS, "memory")),
    closeness,
    closeness_over_time,
)


def _inline_svg(chart: Chart) -> str:
    """Write SVG that is fit for a page: no prolog, ids of its own, colours from the page's variables."""
    file = io.StringIO()
    chart.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg, count=3).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match[1]}{chart.name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = re.sub(f"(?<=: ){re.escape(colour)}\\b", f"var({variable})", svg)
    svg = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif", r"font: \1sans-serif", svg)
    width, height = (float(side) for side in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    svg = re.sub(r"^<svg [^>]*>", f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true" focusable="false">', svg)
    return re.sub(r">\s+<", "><", svg)
