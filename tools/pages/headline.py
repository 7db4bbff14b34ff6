"""What the project gains and costs, in one table and one plot: closeness and speed of each method and of its peers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.benchmarking.report import spread
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.charts import INK, METHODS, Chart, figure_and_axes
from elfatt_sd.evaluation.report.data import Results, Row
from elfatt_sd.evaluation.report.tables import TIMES, fixed

CALLS = {"unet-512": "SD 1.5, 512", "unet-1024": "SD 1.5, 1024", "sdxl-1024": "SDXL, 1024"}
_ROOM = 0.15  # beyond the outermost points, as a fraction of the plot
_HEIGHT, _WIDTH, _TEXT = 3.6, 4.6, 9  # inches and points: still readable where the page is 400 pixels wide


def headline_table(chosen: Sequence[tuple[Results, Row]], benchmarks: Path) -> str:
    """Return a row for each method: closeness and speed on the toy, and the speed of UNets of real shapes.

    Times of the toy are those of one machine: the one that most rows are of.

    Args:
        chosen: rows, each with its run.
        benchmarks: folder of the benchmarks' results.
    """
    calls = {title: _speeds(benchmarks / f"{name}.json") for name, title in CALLS.items()}
    titles = ["method", "closeness (PSNR)", "toy, 256", *calls]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    places = _places(chosen)
    first, *others = places
    for results, row in chosen:
        psnr, speed = row.psnr, row.timed["unet"].speed if _place(results) == first else None
        cells = ["" if psnr is None else f"{fixed(psnr.value, 1)} dB"]
        cells += ["" if speed is None else f"{fixed(speed.value, 2)}{TIMES}"]
        cells += [_call(known.get(row.method)) for known in calls.values()]
        lines.append(f"| `{row.method}` | {' | '.join(cells)} |")
    said = [f"Closeness and toy: {first}"]
    said += [f"closeness of {', '.join(places[place])}: {place}, whose times do not compare" for place in others]
    shapes: dict[str, list[str]] = {}
    for name, title in CALLS.items():
        if (path := benchmarks / f"{name}.json").is_file():
            made = json.loads(path.read_text(encoding="utf-8"))
            shapes.setdefault(f"{made['machine']['device']}, {made['settings']['dtype']}", []).append(title)
    said += [f"{' and '.join(titles)}: {place}" for place, titles in shapes.items()]
    return "\n".join([*lines, "", f"{'; '.join(said)}."]) + "\n"


def draw_headline(chosen: Sequence[tuple[Results, Row]]) -> Chart:
    """Draw the closeness of rows over their speed, of the rows of the machine that most are of.

    Args:
        chosen: rows, each with its run.

    Raises:
        ElfattError: a row has no closeness or no time.
    """
    figure, axes = figure_and_axes(_HEIGHT, _WIDTH)
    marks = zip(itertools.cycle(METHODS), itertools.cycle("oDP^svXp"))  # of this plot: the rows are of several runs
    for (run, row), (colour, marker) in zip(chosen, marks):  # noqa: B905  # the marks have no end
        psnr, speed = row.psnr, row.timed["unet"].speed
        if _place(run) != next(iter(_places(chosen))):
            continue
        if psnr is None or speed is None:
            raise ElfattError(f"row {row.name!r} of {run.name} has no closeness or no time, and no place in the plot.")
        if psnr.ends:
            axes.vlines(speed.value, *psnr.ends, color=colour, linewidth=1.1)
        if speed.ends:
            axes.hlines(psnr.value, *speed.ends, color=colour, linewidth=1.1, alpha=0.45)
        axes.plot(speed.value, psnr.value, marker, color=colour, markersize=8, label=row.method)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle="--")
    axes.margins(_ROOM)
    axes.set_xlabel("times as fast, UNet of the toy (right is faster)")
    axes.set_ylabel("PSNR to untouched, dB (up is closer)")
    figure.legend(loc="outside upper left", ncols=3, fontsize=_TEXT)
    return Chart("headline", "Closeness over speed", "", figure)


def _places(chosen: Sequence[tuple[Results, Row]]) -> dict[str, list[str]]:
    """Return the methods that each machine ran, of most rows first."""
    places: dict[str, list[str]] = {}
    for results, row in chosen:
        places.setdefault(_place(results), []).append(f"`{row.method}`")
    return dict(sorted(places.items(), key=lambda each: -len(each[1])))


def _place(results: Results) -> str:
    return f"{results.environment['device']}, {results.protocol['dtype']}"


def _speeds(path: Path) -> Mapping[str, Any]:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return {row["method"]: row["speed"].get("untouched") for row in rows}


def _call(speed: Mapping[str, Any] | None) -> str:
    return "" if speed is None else f"{spread(speed).split(' ')[0]}{TIMES}"
