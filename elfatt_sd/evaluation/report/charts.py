"""What each plot shows. A function returns a `Chart`, or a line that says what the run did not measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elfatt_sd.evaluation.report.data import BASELINE, NULL, Estimate, Results, Row, setting_text, setting_title
from elfatt_sd.evaluation.report.palette import BASE, INK, PAPER, Palette
from elfatt_sd.evaluation.report.text import decimals_for, fixed, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.2, 3.5  # inches; one column of the page
_OFFSETS = ((5, 4), (-5, 4), (5, -9), (-5, -9))  # points; keeps the names of neighbouring methods apart
PARTS = {"end_to_end": "end to end", "unet": "UNet alone"}


@dataclass(frozen=True)
class Chart:
    """A drawn figure with its words; `points` are its data, for those who cannot see it."""

    name: str
    title: str
    caption: str
    figure: Figure
    points: list[str] = field(default_factory=list)


def _figure(height: float = HEIGHT) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def differences(results: Results, palette: Palette) -> Chart | str:
    """Draw each row's paired difference in distance to the baseline, with interval, zero line and the null row."""
    name = results.distance or "distance"
    rows = [row for row in results.rows if row.role != BASELINE and row.difference(name) is not None]
    if not rows:
        return "Difference to the untouched pipeline: no paired difference was measured."
    rows.sort(key=lambda row: row.role != NULL)
    figure, axes = _figure(0.9 + 0.27 * len(rows))
    decimals = decimals_for(row.difference(name) for row in rows)
    points = []
    for place, row in enumerate(rows):
        found, style = row.difference(name), palette.style(row)
        if found is None:
            continue
        sure = found.ends is not None and (found.ends[0] > 0 or found.ends[1] < 0)
        if found.ends:
            axes.hlines(place, *found.ends, color=style.colour, linewidth=1.6)
            if row.role == NULL:
                axes.axvspan(*found.ends, color=style.colour, alpha=0.15, linewidth=0)
        face = style.colour if sure else PAPER
        axes.plot(found.value, place, style.marker, color=style.colour, markerfacecolor=face)
        points.append(
            f"{row.name}: {fixed(found.value, decimals, sign=True)} {interval(found, decimals, sign=True)}, "
            f"{row.verdict(name) or 'no verdict'}"
        )
    axes.axvline(0, color=INK, linewidth=0.9)
    _row_axis(axes, rows)
    axes.set_xlim(*_methods_range(rows, name))
    axes.set_xlabel(f"{name} minus untouched (left is better)")
    caption = "Line: 95 % interval of the paired difference. Filled: the interval excludes zero."
    if any(row.role == NULL for row in rows):
        caption += (
            " Shaded: the interval of the null row, the untouched pipeline with other seeds, where nothing but chance "
            "is at work; it may go on beyond the edges. Other seeds share no latents with the baseline, so it is wider "
            "than those of the methods."
        )
    return Chart("difference", f"Difference in {name} to the untouched pipeline", caption, figure, points)


def _methods_range(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """Return limits that hold zero, every value, and the intervals of the methods (of all rows, if there are none)."""
    shown = [row for row in rows if row.role != NULL] or rows
    ends = [row.difference(name) for row in shown]
    places = [0.0, *(end for found in ends if found and found.ends for end in found.ends)]
    places += [found.value for row in rows if (found := row.difference(name))]
    margin = 0.08 * (max(places) - min(places)) or 1.0
    return min(places) - margin, max(places) + margin


def distance_over_time(results: Results, palette: Palette) -> Chart | str:
    """Draw the distance over the seconds per image."""
    return _tradeoff(results, palette, "time", "Seconds per image, end to end", lambda row: row.seconds())


def distance_over_memory(results: Results, palette: Palette) -> Chart | str:
    """Draw the distance over the memory that one more image of a batch takes."""
    return _tradeoff(results, palette, "memory", "GiB per image of a batch", lambda row: row.memory())


def _tradeoff(
    results: Results, palette: Palette, what: str, title: str, x: Callable[[Row], float | None]
) -> Chart | str:
    name = results.distance
    if name is None:
        return f"Distance over {what}: no distance was measured."
    chart = _scatter(results, palette, x, lambda row: row.distance(name))
    if chart is None:
        return f"{name} over {what}: no row has both."
    figure, axes, points = chart
    axes.set_xlabel(f"{title} (left is better)")
    axes.set_ylabel(f"{name} (down is better)")
    caption = (
        f"Line up and down: 95 % interval of {name} itself, which is wider than that of a paired difference. Dashed: "
        "the untouched pipeline."
    )
    return Chart(f"distance_{what}", f"{name} over {what}", caption, figure, points)


def closeness_over_time(results: Results, palette: Palette) -> Chart | str:
    """Draw the PSNR to the untouched pictures over the seconds per image."""
    chart = _scatter(results, palette, lambda row: row.seconds(), _differs)
    if chart is None:
        return "Closeness over time: no row has both PSNR and time."
    figure, axes, points = chart
    axes.set_xlabel("Seconds per image, end to end (left is better)")
    axes.set_ylabel("PSNR to untouched, dB (up is closer)")
    caption = (
        "Median and quartiles over the pictures, each against the untouched pipeline's picture from the same latent. "
        "Closer is not the same as better. The null row shows how far apart unrelated pictures are."
    )
    return Chart("closeness_time", "Closeness to the untouched pictures over time", caption, figure, points)


def _differs(row: Row) -> Estimate | None:
    """Return the PSNR of a row whose pictures differ from the baseline's."""
    value = row.paired("psnr")
    return None if value is None or row.identical or not math.isfinite(value.value) else value


def _scatter(
    results: Results, palette: Palette, x: Callable[[Row], float | None], y: Callable[[Row], Estimate | None]
) -> tuple[Figure, Axes, list[str]] | None:
    """Draw one point for each row that has both figures, joined by lines within a method."""
    found = [(row, x(row), y(row)) for row in results.rows]
    placed = [(row, across, up) for row, across, up in found if across is not None and up is not None]
    if not placed:
        return None
    figure, axes = _figure()
    for place, group in enumerate(_groups([row for row, _, _ in placed])):
        style = palette.style(group[0])
        series = [(row, across, up) for row, across, up in placed if row in group]
        axes.plot(
            [across for _, across, _ in series], [up.value for _, _, up in series], style.marker,
            color=style.colour, linestyle="-", label=_legend(group[0]), zorder=3,
            markerfacecolor=PAPER if group[0].role != "method" else style.colour,
        )  # fmt: skip
        for row, across, up in series:
            if up.ends:
                axes.vlines(across, *up.ends, color=style.colour, linewidth=0.9, alpha=0.6)
            if row.suffix and row.role == "method":
                axes.annotate(
                    row.suffix, (across, up.value), _OFFSETS[place % len(_OFFSETS)], textcoords="offset points",
                    fontsize=7, color=style.colour, ha="right" if place % 2 else "left",
                )  # fmt: skip
            if row.role == BASELINE:
                axes.axhline(up.value, color=BASE, linewidth=0.8, linestyle="--", zorder=1)
    _legend_above(figure, axes)
    decimals = decimals_for(up for _, _, up in placed)
    return figure, axes, [f"{row.name}: {across:.3g}, {fixed(up.value, decimals)}" for row, across, up in placed]


def ablation(results: Results, palette: Palette, setting: str) -> Chart | str:
    """Draw distance and time over one setting that the run varies."""
    name, title = results.distance or "distance", setting_title(setting)
    rows = [row for row in results.methods if row.settings.get(setting) is not None and not row.failed]
    measures: list[tuple[str, Callable[[Row], Estimate | None]]] = [
        (name, lambda row: row.distance(name)),
        ("s/img", lambda row: _only(row.seconds())),
    ]
    measures = [(what, get) for what, get in measures if any(get(row) for row in rows)]
    values = _ordered(dict.fromkeys(row.settings[setting] for row in rows if _plain(row.settings[setting])))
    if len(values) < 2 or not measures:
        return f"{title}: fewer than two values were measured."
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.6 + 1.75 * len(measures)), layout="constrained")
    panels = figure.subplots(len(measures), sharex=True, squeeze=False)[:, 0]
    points = []
    for axes, (what, get) in zip(panels, measures, strict=True):
        for group in _series(rows, results.varied, setting):
            style = palette.style(group[0])
            found = [row for row in group if _plain(row.settings[setting])]
            series = sorted(((values.index(row.settings[setting]), get(row), row) for row in found), key=_first)
            shown = [(place, value) for place, value, _ in series if value is not None]
            axes.plot(
                [place for place, _ in shown], [value.value for _, value in shown], style.marker,
                color=style.colour, linestyle="-", label=_legend(group[0]),
            )  # fmt: skip
            for place, value in shown:
                if value.ends:
                    axes.vlines(place, *value.ends, color=style.colour, linewidth=0.9, alpha=0.6)
            points += [f"{row.name}: {what} {value.value:.4g}" for _, value, row in series if value is not None]
        reference = get(results.baseline) if results.baseline else None
        if reference is not None:
            axes.axhline(reference.value, color=BASE, linewidth=0.8, linestyle="--", label="untouched")
        axes.set_ylabel(what)
    panels[-1].set_xticks(range(len(values)), [setting_text(value) for value in values])
    panels[-1].set_xlabel(title)
    _legend_above(figure, panels[0])
    caption = "The values of the setting, evenly spaced. Lines up and down: 95 % interval. Dashed: untouched."
    return Chart(f"ablation_{setting}", f"What {title.lower()} does", caption, figure, points)


def memory_regression(results: Results, palette: Palette) -> Chart | str:
    """Draw the peaks over the batch size, with the fitted line whose slope is the memory per image."""
    rows = [row for row in results.rows if row.memory_points()]
    if not rows:
        return "Memory regression: memory was not measured."
    figure, axes = _figure()
    points = []
    for row in rows:
        style, measured = palette.style(row), row.memory_points()
        axes.plot(*zip(*measured, strict=True), style.marker, color=style.colour, label=_legend(row), markersize=4)
        slope, start = row.memory(), row.memory("intercept_gib")
        if slope is not None and start is not None:
            ends = [0.0, max(batch for batch, _ in measured)]
            axes.plot(ends, [start + slope * batch for batch in ends], color=style.colour, linewidth=1)
            points.append(f"{row.name}: {start:.3g} GiB and {slope:.3g} GiB per image")
    axes.set_xlabel("Pictures in a batch")
    axes.set_ylabel("Peak memory, GiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _legend_above(figure, axes)
    caption = (
        "Each point is the peak of a fresh process; the slope of the fitted line is the GiB/img of the table, its "
        "start is what the weights and the program take."
    )
    return Chart("memory", "Peak memory over batch size", caption, figure, points)


def timing_strip(results: Results, palette: Palette, part: str) -> Chart | str:
    """Draw every raw timing of each row, and their median."""
    rows = [row for row in results.rows if row.time_values(part)]
    if not rows:
        return f"Timing, {PARTS[part]}: time was not measured."
    figure, axes = _figure(0.85 + 0.27 * len(rows))
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
    caption = "Every repeat is one mark, the bar is the median. The methods took turns in one run. Dashed: untouched."
    return Chart(f"timing_{part}", f"Time, {PARTS[part]}: every measurement", caption, figure, points)


def _only(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value)


def _first(point: tuple[int, Estimate | None, Row]) -> int:
    return point[0]


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _ordered(values: Sequence[object] | dict[object, None]) -> list[object]:
    """Sort numbers; keep names in the order of the protocol."""
    found = list(values)
    if all(isinstance(value, int | float) for value in found):
        return sorted(found, key=lambda value: float(value))  # type: ignore[arg-type]
    return found


def _legend(row: Row) -> str:
    return row.name if row.role == NULL else row.label


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows of one method, in order of appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.role, row.label), []).append(row)
    return list(groups.values())


def _series(rows: Sequence[Row], varied: Sequence[str], setting: str) -> list[list[Row]]:
    """Group rows that differ in one setting alone."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        others = (setting_text(row.settings.get(name)) for name in varied if name != setting)
        groups.setdefault((row.label, *others), []).append(row)
    return list(groups.values())


def _row_axis(axes: Axes, rows: Sequence[Row]) -> None:
    """Label the vertical axis with one row each, the first on top."""
    names = [row.name for row in rows]
    axes.set_yticks(range(len(rows)), [name if len(name) <= 34 else f"{name[:33]}…" for name in names])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _legend_above(figure: Figure, axes: Axes) -> None:
    """Put one entry for each label above the plot."""
    handles, labels = axes.get_legend_handles_labels()
    first = {label: handle for handle, label in reversed(list(zip(handles, labels, strict=True)))}
    names = list(dict.fromkeys(labels))
    shown = [name if len(name) <= 28 else f"{name[:27]}…" for name in names]
    columns = 3 if max(map(len, shown), default=0) <= 20 else 2
    figure.legend([first[name] for name in names], shown, loc="outside upper left", ncols=columns)
