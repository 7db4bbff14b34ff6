"""What one setting does: distance, accuracy, closeness and time over the values that a run sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elfatt_sd.evaluation.report.charts import LEGEND, WIDTH, Chart, legend_above
from elfatt_sd.evaluation.report.data import TIME_COLUMNS, Results
from elfatt_sd.evaluation.report.palette import BASE, Palette
from elfatt_sd.evaluation.report.rows import Row
from elfatt_sd.evaluation.report.values import Estimate, setting_text, setting_title, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class _Series:
    """Rows that differ in the setting alone."""

    name: str
    line: str
    rows: list[Row]


def ablation(results: Results, palette: Palette, setting: str) -> Chart | str:
    """Draw every measure over one setting that the run varies, a line for each set of the other settings."""
    title = setting_title(setting)
    series = _series(results, setting)
    values = _ordered(dict.fromkeys(row.settings[setting] for one in series for row in one.rows))
    shown = [row for one in series for row in one.rows]
    measures = [(what, get) for what, get in _measures(results) if any(get(row) for row in shown)]
    if not measures:
        return f"{title}: fewer than two values were measured."
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.6 + 1.6 * len(measures)), layout="constrained")
    panels = figure.subplots(len(measures), sharex=True, squeeze=False)[:, 0]
    points = []
    for axes, (what, get) in zip(panels, measures, strict=True):
        for one in series:
            placed = [(values.index(row.settings[setting]), row) for row in one.rows]
            points += _draw(axes, palette, one, setting, placed, what, get)
        reference = get(results.baseline) if results.baseline else None
        if reference is not None:
            axes.axhline(reference.value, color=BASE, linewidth=0.8, linestyle="--", label="untouched")
        axes.set_ylabel(what)
    panels[-1].set_xticks(range(len(values)), [setting_text(value) for value in values])
    panels[-1].set_xlabel(title)
    legend_above(figure, panels[0])
    caption = "The values of the setting, evenly spaced. Lines up and down: 95 % interval"
    named = results.distance if results.distance in dict(measures) else None
    caption += f", for {named} that of the paired difference to untouched" if named else ""
    if named and results.extrapolated(named):
        caption += " (extrapolated to infinitely many images, and added to the value of untouched)"
    if TIME_COLUMNS[results.time_part] in dict(measures):
        caption += ", for times those of the fastest and the slowest round"
    caption += ". Dashed: untouched."
    return Chart(f"ablation_{setting}", f"Ablation: {title.lower()}", caption, figure, points)


def _measures(results: Results) -> list[tuple[str, Callable[[Row], Estimate | None]]]:
    name, part = results.distance or "distance", results.time_part
    return [
        (name, results.paired_distance),
        ("Accuracy", lambda row: row.accuracy("mean")),
        ("PSNR, dB", lambda row: row.psnr),
        (TIME_COLUMNS[part], lambda row: _timed(row, part)),
    ]


def _timed(row: Row, part: str) -> Estimate | None:
    """The median time, with that of the fastest and of the slowest round."""
    value, rounds = row.seconds(part), row.time_values(part)
    return None if value is None else Estimate(value, min(rounds), max(rounds)) if rounds else Estimate(value)


def _draw(
    axes: Axes,
    palette: Palette,
    series: _Series,
    setting: str,
    placed: Sequence[tuple[int, Row]],
    what: str,
    get: Callable[[Row], Estimate | None],
) -> list[str]:
    """Draw one line, or points where the setting has names; returns the points in words."""
    style = palette.style(series.rows[0])
    numeric = all(isinstance(row.settings[setting], int | float) for row in series.rows)
    found = sorted(((place, value, row) for place, row in placed if (value := get(row))), key=lambda point: point[0])
    axes.plot(
        [place for place, _, _ in found], [value.value for _, value, _ in found], style.marker,
        color=style.colour, linestyle=series.line if numeric else "", label=series.name,
    )  # fmt: skip
    for place, value, _ in found:
        if value.ends:
            axes.vlines(place, *value.ends, color=style.colour, linewidth=0.9, alpha=0.6)
    return [f"{row.name}: {what} {value.value:.4g}" for _, value, row in found]


def _series(results: Results, setting: str) -> list[_Series]:
    """Group the rows that differ in one setting alone, and drop groups in which it has one value."""
    others = [name for name in results.varied if name != setting]
    groups: dict[str, dict[tuple[str, ...], list[Row]]] = {}
    for row in results.methods:
        if _plain(row.settings.get(setting)) and not row.failed:
            key = tuple(setting_text(row.settings.get(name)) for name in others)
            groups.setdefault(row.label, {}).setdefault(key, []).append(row)
    found = []
    for of_label in groups.values():
        kept = {key: rows for key, rows in of_label.items() if len({row.settings[setting] for row in rows}) > 1}
        differing = [place for place in range(len(others)) if len({key[place] for key in kept}) > 1]
        for number, (key, rows) in enumerate(kept.items()):
            told = ", ".join(f"{setting_title(others[place]).lower()} {key[place]}" for place in differing)
            found.append(_Series(shortened(rows[0].label, told, LEGEND), _LINES[number % len(_LINES)], rows))
    return found


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _ordered(values: Sequence[object] | dict[object, None]) -> list[object]:
    """Sort numbers; keep names in the order of the protocol."""
    found = list(values)
    if all(isinstance(value, int | float) for value in found):
        return sorted(found, key=lambda value: float(value))  # type: ignore[arg-type]
    return found
