"""The plots, as PNG; a function that draws returns a `Chart`, or None where the run did not measure what it shows."""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elfatt_sd.config import COLOURED
from elfatt_sd.errors import need
from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report.data import BASELINE, NULL, PARTS, Results, Row, shortened
from elfatt_sd.evaluation.statistics import BETTER, WORSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, RULE, PAPER = "#1c2024", "#dcdfe3", "#ffffff"
BASE, SHADOW = "#6a7077", "#8d939a"
METHODS = ("#0072b2", "#d55e00", "#008a63", "#a8468f", "#9a6a00", "#2b8cc4", "#7a4fd0", "#b03a48")
_MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("p", "⬟"))
_FIXED = {name: slot for slot, name in enumerate(COLOURED)}
WIDTH, HEIGHT = 5.2, 3.5  # inches; one column of the page
CROWDED_HEIGHT = 4.8
_LOOK = Path(__file__).with_name("plots.mplstyle")
_LEGEND = 32  # characters of a name in a legend of two columns
_NAME = 34  # characters of a row's name next to a plot


class Style(NamedTuple):
    """How a row looks: its colour, and its marker in plots and in text."""

    colour: str
    marker: str
    glyph: str


def styles(results: Results) -> dict[Row, Style]:
    """Known methods always have the same style, others take what is free; past the colours, one has another marker."""
    taken = {_FIXED[row.method] for row in results.methods if row.method in _FIXED}
    free = (slot for slot in itertools.count() if slot not in taken)
    slots: dict[str, int] = {}
    for row in results.methods:
        if row.label not in slots:
            slot = _FIXED.get(row.method)
            slots[row.label] = next(free) if slot is None or slot in slots.values() else slot
    places = {row: divmod(slots[row.label], len(METHODS)) for row in results.methods}
    found = {
        row: Style(METHODS[slot], *_MARKERS[(slot + turn) % len(_MARKERS)]) for row, (turn, slot) in places.items()
    }
    others = {BASELINE: Style(BASE, "o", "○"), NULL: Style(SHADOW, "d", "◇")}
    return {row: found.get(row) or others[row.role] for row in results.rows}


class Chart(NamedTuple):
    """A drawn figure with its words."""

    name: str  # the file name without its ending
    title: str  # what it shows
    caption: str  # how to read it
    figure: Figure


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
    filled: bool = True


def _strips(results: Results, marks: Sequence[Mark], label: str, words: tuple[str, str, str]) -> Chart:
    wide, looks = 1 + results.crowded, styles(results)
    figure, axes = figure_and_axes(0.9 + 0.27 * len(marks), WIDTH * (1.4 if results.crowded else 1))
    axes.set_yticks(range(len(marks)), [shortened(mark.row.name, wide * _NAME) for mark in marks])
    axes.set_ylim(len(marks) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    for place, mark in enumerate(marks):
        style, value = looks[mark.row], mark.value
        if mark.each:
            axes.plot(mark.each, [place] * len(mark.each), "|", color=style.colour, alpha=0.3, markersize=8)
        if value.ends:
            axes.hlines(place, *value.ends, color=style.colour, linewidth=2.2)
        face, edge = style.colour if mark.filled else PAPER, PAPER if mark.each else style.colour
        axes.plot(value.value, place, style.marker, color=face, markeredgecolor=edge, markersize=6.5)
    return Chart(*words, figure)


def differences(results: Results) -> Chart | None:
    """Draw each method's paired difference in distance to the baseline, with its interval, and a line at zero."""
    name = results.distance or "distance"
    found = {row: row.figure(name).difference for row in results.methods}
    marks = [
        Mark(row, difference.estimate, filled=difference.verdict in (BETTER, WORSE))
        for row, difference in found.items()
        if difference.estimate is not None
    ]
    if not marks:
        return None
    caption = "Line: 95 % interval of the paired difference. Filled: a verdict, since the interval excludes zero."
    if results.extrapolated(name):
        caption += " The difference is extrapolated to infinitely many images."
    null = results.null and results.null.figure(name).difference.estimate
    if null and null.ends:
        caption += " Shaded: that of the null row, the untouched pipeline with other seeds: chance alone."
    words = "difference", f"Difference in {name} to the untouched pipeline", caption
    chart = _strips(results, marks, f"{name} minus untouched (left is better)", words)
    (axes,) = chart.figure.axes
    axes.axvline(0, color=INK, linewidth=0.9)
    if null and null.ends:
        axes.set_xlim(axes.get_xlim())  # of the methods; the null row's interval may be far wider
        axes.axvspan(*null.ends, color=SHADOW, alpha=0.15, linewidth=0)
    return chart


def closeness(results: Results) -> Chart | None:
    """Draw each row's PSNR to the untouched images: the mean with its interval, and every image."""
    marks = []
    for row in results.rows:
        if row.role != BASELINE and row.psnr is not None:
            marks.append(Mark(row, row.psnr, [value for value in row.changes["psnr"].pictures if value is not None]))
    if not marks:
        return None
    caption = "Symbol and thick line: mean over the images that differ, with its 95 % interval."
    caption += " Thin strokes: every image, against the untouched pipeline's from the same latent."
    if results.null and results.null.psnr:
        caption += " The null row shows how far apart unrelated images are."
    words = "closeness", "Closeness to the untouched images", caption
    return _strips(results, marks, "PSNR to untouched, dB (right is closer)", words)


# Closeness over time.


class Spot(NamedTuple):
    """A row in the plane."""

    row: Row
    across: float
    up: Estimate


def closeness_over_time(results: Results) -> Chart | None:
    caption = (
        "Mean over the images that differ, with its 95 % interval, each against the untouched pipeline's image "
        "from the same latent; a row with most images identical has no place. Closer is not the same as better."
    )
    words = "closeness_time", "Closeness to the untouched images over time", caption
    return _over_time(results, lambda row: row.psnr, words, "PSNR to untouched, dB (up is closer)")


def distance_over_time(results: Results) -> Chart | None:
    name = results.distance
    if name is None:
        return None
    caption = f"{name} with its own 95 % interval; that of the paired difference, in its plot, is narrower."
    words = "distance_time", f"{name} over time", caption
    return _over_time(results, lambda row: row.figure(name).estimate, words, f"{name} (down is better)", sign=-1)


def _over_time(
    results: Results, up: Callable[[Row], Estimate | None], words: tuple[str, str, str], label: str, sign: int = 1
) -> Chart | None:
    """Draw a figure over the time; the null row, which is far off, has no place there."""
    part, looks, (name, title, caption) = results.time_part, styles(results), words
    spots = []
    for row in results.methods:
        seconds, value = row.timed[part].seconds_per_image, up(row)
        if seconds is not None and value is not None:
            spots.append(Spot(row, seconds, value))
    if not spots:
        return None
    figure, axes = figure_and_axes(CROWDED_HEIGHT if results.crowded else HEIGHT)
    axes.set_xlabel(f"Seconds per image, {PARTS[part]} (left is better)")
    axes.set_ylabel(label)
    best = front(spots, sign)
    series: dict[str, list[Spot]] = {}  # of each method, in order of appearance
    for spot in spots:
        series.setdefault(spot.row.label, []).append(spot)
    for label, method in series.items():
        style = looks[method[0].row]
        axes.plot(
            [spot.across for spot in method], [spot.up.value for spot in method], style.marker, color=style.colour,
            linestyle="-" if _is_curve(method) else "", zorder=3, label=label if results.legend else None,
        )  # fmt: skip
        for spot in method:
            if spot.up.ends and (spot in best or not results.crowded):
                axes.vlines(spot.across, *spot.up.ends, color=style.colour, linewidth=0.9, alpha=0.6)
            write_beside(axes, spot, str(spot.row.number) if results.crowded else spot.row.suffix, style.colour)
    caption += draw_front(axes, best) + (" Numbers: the rows of the table." if results.crowded else "")
    legend_above(figure, axes)
    return Chart(name, title, caption, figure)


def front(spots: Sequence[Spot], sign: int = 1) -> list[Spot]:
    best: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.across, -sign * spot.up.value)):
        if not best or sign * spot.up.value > sign * best[-1].up.value:
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


def draw_plots(results: Results) -> list[tuple[Chart, bytes]]:
    with drawing():
        made = [draw(results) for draw in (differences, distance_over_time, closeness, closeness_over_time)]
        return [(chart, to_png(chart.figure)) for chart in made if chart]


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    need("a plot", "matplotlib")
    import matplotlib

    with matplotlib.rc_context(fname=_LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # names may be in any script
        yield


def to_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()
