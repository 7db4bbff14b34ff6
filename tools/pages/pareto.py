"""The trade-off over several runs of one pipeline, with times as fractions of the untouched one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elfatt_sd.config import METHODS
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report.charts import (
    CROWDED_HEIGHT,
    INK,
    PAPER,
    Chart,
    Spot,
    draw_front,
    figure_and_axes,
    front,
    legend_above,
    write_beside,
)
from elfatt_sd.evaluation.report.charts import METHODS as COLOURS
from elfatt_sd.evaluation.report.data import METHOD, Results, Row, setting_text
from elfatt_sd.evaluation.report.tables import TIMES, decimals_for, fixed, interval, md_table, span
from elfatt_sd.methods import Attention
from elfatt_sd.phases import Phase
from tools.pages.compare import check_alike

_MERGING = "merging (ToMe)"
# Marker and colour of what a method approximates with.
_KINDS = {
    "unknown": ("X", COLOURS[5]),
    "sampled keys": ("o", COLOURS[0]),
    "spread blocks": ("s", COLOURS[1]),
    "other blocks": ("^", COLOURS[2]),
    _MERGING: ("D", COLOURS[3]),
    "agents": ("v", COLOURS[4]),
    "ELFATT": ("P", COLOURS[6]),
}
_CLOSENESS = "PSNR to untouched, dB"
_SPEEDS = (1, 1.25, 1.5, 2, 2.5, 3)  # marks of the upper axis


@dataclass(frozen=True)
class _Entrant:
    run: Results
    spot: Spot
    speed: Estimate

    @property
    def name(self) -> str:
        row = self.spot.row
        return f"{row.label} {row.suffix}".strip()

    @property
    def phases(self) -> list[Phase]:
        """The phases of the row's method that approximate; empty where the run does not tell them."""
        cells = self.run.protocol.get("cells") or []
        config = next((cell.get("config") for cell in cells if cell["name"] == self.spot.row.cell), None) or {}
        try:
            phases = [Phase.from_dict(each) for each in config.get("phases") or []]
        except ElfattError:  # an attention of somebody else's, which is not registered here
            return []
        return [phase for phase in phases if not phase.exact]

    @property
    def kind(self) -> str:
        """What the method approximates with, as the legend says it; merging is named where there is nothing else."""
        found = {_group(phase.attention) for phase in self.phases}
        own = found - {_MERGING} or found
        return next((kind for kind in reversed(_KINDS) if kind in own), "unknown")

    @property
    def shared(self) -> bool:
        """Whether several steps share the difference to exact attention."""
        return any(phase.residual_steps > 1 for phase in self.phases)


def _group(attention: Attention) -> str:
    """Return what a method's attention is grouped with; with agents in none or all of the heads, it is what is left."""
    if (share := getattr(attention, "agent_share", 0)) > 0:
        return "ELFATT" if share < 1 else "agents"
    orders = {order for name in ("block_order", "second_order") if (order := getattr(attention, name, None))}
    blocks = "spread blocks" if orders == {"spread"} else "other blocks"
    known = {"softmax": _MERGING, "sampled": "sampled keys", "cell_spread": "spread blocks"}
    return known.get(attention.name, blocks if orders else attention.name)


def draw_pareto(runs: Sequence[Results]) -> tuple[Chart, str]:
    """Draw the closeness of every row of several runs over the UNet's time, and name the rows that no other beats.

    Args:
        runs: with times; the null row and rows without time or closeness have no place.

    Returns:
        The plot, and a Markdown table of the rows that it names and of the presets.

    Raises:
        ElfattError: runs of different pipelines, or no row has both figures.
    """
    check_alike(runs)
    entrants = _entrants(runs)
    if not entrants:
        raise ElfattError(f"no row of {', '.join(run.name for run in runs)} has both UNet time and closeness.")
    best = front([entrant.spot for entrant in entrants])
    chosen = [entrant for entrant in entrants if entrant.spot in best or _is_preset(entrant.spot.row)]
    chosen.sort(key=lambda entrant: entrant.spot.across)
    figure, axes = figure_and_axes(CROWDED_HEIGHT)
    for entrant in sorted(entrants, key=lambda entrant: [*_KINDS].index(entrant.kind)):  # the legend's order
        _draw_entrant(axes, entrant, named=entrant in chosen)
    _draw_axes(axes)
    said = draw_front(axes, best)
    legend_above(figure, axes)
    for place, entrant in enumerate(chosen, 1):
        write_beside(axes, entrant.spot, str(place), _KINDS[entrant.kind][1])
    table = _table(chosen, ["no" if entrant.spot in best else "yes" for entrant in chosen])
    return Chart("pareto", f"{_CLOSENESS} over UNet time", _caption(runs, entrants, said), figure), table


def _draw_entrant(axes: Any, entrant: _Entrant, *, named: bool) -> None:
    """Draw a row's marker, and its intervals where it is named."""
    (marker, colour), spot = _KINDS[entrant.kind], entrant.spot
    axes.plot(
        spot.across, spot.up.value, marker, label=entrant.kind,
        color=colour, markerfacecolor=PAPER if entrant.shared else colour, markersize=4, zorder=3,
    )  # fmt: skip
    thin: dict[str, Any] = {"color": colour, "linewidth": 0.9, "alpha": 0.6}
    if spot.up.ends and named:
        axes.vlines(spot.across, *spot.up.ends, **thin)
    if entrant.speed.ends and named:
        axes.hlines(spot.up.value, 1 / entrant.speed.ends[1], 1 / entrant.speed.ends[0], **thin)


def _draw_axes(axes: Any) -> None:
    axes.axvline(1, color=INK, linewidth=0.6, linestyle="--", zorder=1)
    axes.set_xlabel("UNet time, fraction of the untouched pipeline's (left is faster)")
    axes.set_ylabel(f"{_CLOSENESS} (up is closer)")
    times = axes.secondary_xaxis("top", functions=(_inverse, _inverse))
    times.set_xticks(_SPEEDS, [f"{speed:g}{TIMES}" for speed in _SPEEDS])


def _caption(runs: Sequence[Results], entrants: Sequence[_Entrant], said: str) -> str:
    caption = f"Every row of every run; times are ratios within a run.{said} Numbers: the rows of the table. Lines up "
    caption += "and down: 95 % interval; across: fastest and slowest round."
    if any(entrant.shared for entrant in entrants):
        caption += " Hollow: several steps share the difference to exact attention."
    return caption + _threads(runs)


def _inverse(values: ArrayLike) -> NDArray[np.float64]:
    """Return how many times as fast a fraction of the time is, and back; the axis asks at zero, too."""
    return 1 / np.maximum(np.asarray(values, dtype=np.float64), 1e-9)


def _threads(runs: Sequence[Results]) -> str:
    """Say which runs were timed with how many threads, where they differ."""
    by_count: dict[str, list[str]] = {}
    for run in runs:
        by_count.setdefault(setting_text(run.machine.get("cpu_threads")), []).append(run.name)
    if len(by_count) < 2:
        return ""
    *few, (most, _) = sorted(by_count.items(), key=lambda item: len(item[1]))
    said = [f"{', '.join(f'`{name}`' for name in names)} with {count}" for count, names in few]
    return f" Timed with different numbers of threads: {', '.join(said)}, the others with {most}."


def _entrants(runs: Sequence[Results]) -> list[_Entrant]:
    found: list[_Entrant] = []
    for run in runs:
        for row in run.rows:
            speed, value = row.timed["unet"].speed, row.psnr
            if row.role == METHOD and speed is not None and value is not None:
                found.append(_Entrant(run, Spot(row, 1 / speed.value, value), speed))
    return found


def _is_preset(row: Row) -> bool:
    return row.method in METHODS and not row.settings


def _table(chosen: Sequence[_Entrant], beaten: Sequence[str]) -> str:
    titles = ["", "row", "run", "images", "times as fast (UNet)", _CLOSENESS, "beaten in both"]
    lines = []
    for place, (entrant, said) in enumerate(zip(chosen, beaten, strict=True), 1):
        speed, value = entrant.speed, entrant.spot.up
        decimals = decimals_for([value])  # runs of more images have narrower intervals
        lines.append(
            [
                str(place),
                entrant.name,
                entrant.run.name,
                setting_text(entrant.spot.row.images),
                f"{fixed(speed.value, 2)} ({span(speed, 2)})" if speed.ends else fixed(speed.value, 2),
                f"{fixed(value.value, decimals)} {interval(value, decimals)}".strip(),
                said,
            ]
        )
    return md_table(titles, lines, [True, False, False, True, True, True, False])
