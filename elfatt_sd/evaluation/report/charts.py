"""What each plot shows. A function returns a `Chart`, or a line that says what the run did not measure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elfatt_sd.config import COLOURED
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
        free = (slot for slot in itertools.count() if slot not in self._wanted(results))
        for row in results.methods:
            if row.label not in self._slots:
                slot = _FIXED.get(row.method)
                self._slots[row.label] = next(free) if slot is None or slot in self._slots.values() else slot

    @staticmethod
    def _wanted(results: Results) -> set[int]:
        return {_FIXED[row.method] for row in results.methods if row.method in _FIXED}

    def style(self, row: Row) -> Style:
        if row.role == BASELINE:
            return Style(BASE, "--base", "o", "○")
        if row.role == NULL:
            return Style(SHADOW, "--shadow", "d", "◇")
        turn, slot = divmod(self._slots[row.label], len(METHODS))
        return Style(METHODS[slot], f"--m{slot}", *_MARKERS[(slot + turn) % len(_MARKERS)])

    @staticmethod
    def variables() -> dict[str, str]:
        """Map the colours of a plot to the page's variables."""
        named = {INK: "--ink", RULE: "--rule", PAPER: "--paper", BASE: "--base", SHADOW: "--shadow"}
        return named | {colour: f"--m{slot}" for slot, colour in enumerate(METHODS)}


WIDTH, HEIGHT = 5.2, 3.5  # inches; one column of the page
_LINES = 20  # fitted lines that one plot can hold
LEGEND = 32  # characters of a name in a legend of two columns
_NAME = 34  # characters of a row's name next to a plot


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


def differences(results: Results, palette: Palette) -> Chart | str:
    """Draw each row's paired difference in distance to the baseline, with interval, zero line and the null row."""
    name = results.distance or "distance"
    rows = [row for row in results.rows if row.role != BASELINE and row.difference(name) is not None]
    if not rows:
        why = "the classes are too few" if results.withheld(name) else "no paired difference was measured"
        return f"Difference to the untouched pipeline: {why}."
    rows.sort(key=lambda row: row.role != NULL)
    figure, axes = figure_and_axes(0.9 + 0.27 * len(rows))
    decimals = decimals_for(row.difference(name) for row in rows)
    left, right = _methods_range(rows, name)
    points = []
    for place, row in enumerate(rows):
        if (found := row.difference(name)) is None:
            continue
        style, verdict = palette.style(row), row.verdict(name)
        if found.ends:
            axes.hlines(place, *found.ends, color=style.colour, linewidth=1.6)
            beyond = [(left, "<")] * (found.ends[0] < left) + [(right, ">")] * (found.ends[1] > right)
            for edge, arrow in beyond:
                axes.plot(edge, place, arrow, color=style.colour, clip_on=False)
            if row.role == NULL:
                axes.axvspan(*found.ends, color=style.colour, alpha=0.15, linewidth=0)
        face = style.colour if verdict in (BETTER, WORSE) else PAPER
        axes.plot(found.value, place, style.marker, color=style.colour, markerfacecolor=face)
        figures = f"{fixed(found.value, decimals, sign=True)} {interval(found, decimals, sign=True)}"
        points.append(f"{row.name}: {figures}, {verdict or 'no verdict'}")
    axes.axvline(0, color=INK, linewidth=0.9)
    _row_axis(axes, rows)
    axes.set_xlim(left, right)
    axes.set_xlabel(f"{name} minus untouched (left is better)")
    caption = _difference_caption(rows, name, results.extrapolated(name))
    return Chart("difference", f"Difference in {name} to the untouched pipeline", caption, figure, points)


def _difference_caption(rows: Sequence[Row], name: str, extrapolated: bool) -> str:
    caption = "Line: 95 % interval of the paired difference. Filled: a verdict, since the interval excludes zero."
    if extrapolated:
        caption += " The difference is extrapolated to infinitely many images."
    if any(row.role == NULL for row in rows):
        caption += (
            " Shaded: the interval of the null row, the untouched pipeline with other seeds, where nothing but chance "
            "is at work; an arrow says that it goes on beyond the edge. Other seeds share no latents with the baseline."
        )
    return caption


def closeness(results: Results, palette: Palette) -> Chart | str:
    """Draw each row's PSNR to the untouched images: the mean with its interval, and every image."""
    found = [(row, row.psnr) for row in results.rows if row.role != BASELINE]
    means = [(row, mean) for row, mean in found if mean is not None]
    if not means:
        return "Closeness to the untouched images: no row has a PSNR."
    room = 2 * _NAME if results.crowded else _NAME
    figure, axes = figure_and_axes(0.9 + 0.27 * len(means), WIDTH * 1.4 if results.crowded else WIDTH)
    decimals = decimals_for(mean for _, mean in means)
    points = []
    for place, (row, mean) in enumerate(means):
        style, each = palette.style(row), [value for value in row.each("psnr") if value is not None]
        axes.plot(each, [place] * len(each), "|", color=style.colour, alpha=0.35, markersize=7)
        if mean.ends:
            axes.hlines(place, *mean.ends, color=style.colour, linewidth=2.4)
        axes.plot(
            mean.value, place, style.marker, color=style.colour, markeredgecolor=PAPER, markersize=5.5,
            markeredgewidth=0.8,
        )  # fmt: skip
        lowest = f", lowest {min(each):.1f}" if each else ""
        points.append(f"{row.name}: {fixed(mean.value, decimals)} {interval(mean, decimals)}{lowest}")
    _row_axis(axes, [row for row, _ in means], room)
    axes.set_xlabel("PSNR to untouched, dB (right is closer)")
    caption = (
        "Symbol and thick line: mean over the images that differ, with its 95 % interval. Thin strokes: every "
        "image, against the untouched pipeline's from the same latent. The null row shows how far apart unrelated "
        "images are."
    )
    return Chart("closeness", "Closeness to the untouched images", caption, figure, points)


def _methods_range(rows: Sequence[Row], name: str) -> tuple[float, float]:
    shown = [row for row in rows if row.role != NULL] or rows
    ends = [row.difference(name) for row in shown]
    places = [0.0, *(end for found in ends if found and found.ends for end in found.ends)]
    places += [found.value for row in rows if (found := row.difference(name))]
    margin = 0.08 * (max(places) - min(places)) or 1.0
    return min(places) - margin, max(places) + margin


def memory_regression(results: Results, palette: Palette) -> Chart | str:
    """Draw the peaks over the batch size, with the fitted line whose slope is the memory per image."""
    rows = [row for row in results.rows if row.memory_points()]
    if not rows:
        return "Memory regression: memory was not measured."
    if len(rows) > _LINES:
        return _memory_slopes(rows, palette)
    figure, axes = figure_and_axes()
    points = []
    for row in rows:
        style, measured = palette.style(row), row.memory_points()
        axes.plot(*zip(*measured, strict=True), style.marker, color=style.colour, label=legend_name(row), markersize=4)
        slope, start = row.memory.gib_per_image, row.memory.intercept_gib
        if slope is not None and start is not None:
            ends = [0.0, max(batch for batch, _ in measured)]
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
    found = [(row, row.slope) for row in rows]
    sloped = [(row, slope) for row, slope in found if slope is not None]
    if not sloped:
        return "Memory regression: no row has two batch sizes."
    figure, axes = figure_and_axes(0.85 + 0.27 * len(sloped))
    points = []
    for place, (row, slope) in enumerate(sloped):
        style = palette.style(row)
        if slope.ends:
            axes.hlines(place, *slope.ends, color=style.colour, linewidth=1.6)
        axes.plot(slope.value, place, style.marker, color=style.colour)
        points.append(f"{row.name}: {slope.value:.3g} GiB per image")
        if row.role == BASELINE:
            axes.axvline(slope.value, color=BASE, linewidth=0.8, linestyle="--", zorder=1)
    _row_axis(axes, [row for row, _ in sloped])
    axes.set_xlabel("GiB per image of a batch (left is better)")
    caption = (
        "The slope of the line through the peaks of several batch sizes, with its 95 % interval. Dashed: untouched."
    )
    return Chart("memory", "Memory per image", caption, figure, points)


def timing_strip(results: Results, palette: Palette, part: str) -> Chart | str:
    """Draw every raw timing of each row, and their median."""
    rows = [row for row in results.rows if row.time_values(part)]
    if not rows:
        return f"Timing, {PARTS[part]}: time was not measured."
    figure, axes = figure_and_axes(0.85 + 0.27 * len(rows))
    points = []
    for place, row in enumerate(rows):
        style, values = palette.style(row), row.time_values(part)
        axes.plot(values, [place] * len(values), style.marker, color=style.colour, alpha=0.65, markersize=4.5)
        middle = row.seconds(part)
        if middle is not None:
            axes.vlines(middle, place - 0.32, place + 0.32, color=style.colour, linewidth=2)
            spread = f"{len(values)} repeats from {min(values):.4g} to {max(values):.4g}"
            points.append(f"{row.name}: {middle:.4g} s, {spread}")
            if row.role == BASELINE:
                axes.axvline(middle, color=BASE, linewidth=0.8, linestyle="--", zorder=1)
    _row_axis(axes, rows)
    axes.set_xlabel(f"Seconds per image, {PARTS[part]} (left is better)")
    caption = (
        "Every repeat is one mark, the bar is the median. The methods are interleaved in one run. Dashed: untouched."
    )
    return Chart(f"timing_{part}", f"Time, {PARTS[part]}: every measurement", caption, figure, points)


def legend_name(row: Row) -> str:
    return row.name if row.role == NULL else row.label


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows of one method, in order of appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.role, row.label), []).append(row)
    return list(groups.values())


def _row_axis(axes: Axes, rows: Sequence[Row], room: int = _NAME) -> None:
    """Label the vertical axis with one row each, the first on top."""
    axes.set_yticks(range(len(rows)), [row.short(room) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def legend_above(figure: Figure, axes: Axes) -> None:
    """Put one entry for each label above the plot."""
    handles, labels = axes.get_legend_handles_labels()
    first = {label: handle for handle, label in reversed(list(zip(handles, labels, strict=True)))}
    names = list(dict.fromkeys(labels))
    longest = max(map(len, names), default=0)
    columns = 3 if longest <= LEGEND * 2 // 3 else 1 if longest > LEGEND and len(names) <= 3 else 2
    shown = [shortened(name, "", LEGEND if columns > 1 else 2 * LEGEND) for name in names]
    figure.legend([first[name] for name in names], shown, loc="outside upper left", ncols=columns)
