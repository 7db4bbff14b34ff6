"""Trade-offs: one figure of each row over another, and the line of the rows that no other row beats in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elfatt_sd.evaluation.report.charts import Chart, figure_and_axes, groups, legend_above, legend_name
from elfatt_sd.evaluation.report.data import PARTS, Results
from elfatt_sd.evaluation.report.palette import BASE, INK, PAPER, Palette
from elfatt_sd.evaluation.report.rows import BASELINE, NULL, Row
from elfatt_sd.evaluation.report.text import decimals_for, fixed
from elfatt_sd.evaluation.report.values import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
