"""Results as a plot, which is saved next to their table."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.benchmarking.names import is_reference
from elfatt_sd.benchmarking.record import Results, own_part
from elfatt_sd.benchmarking.tables import groups, markdown, mean_error, methods_of
from elfatt_sd.errors import need
from elfatt_sd.evaluation.report.charts import drawing
from elfatt_sd.files import atomic_file, write_file

MOST_MAPS = 9  # of layers and steps in one plot
_LARGE = 12  # points, readable where the plot is 400 pixels wide


def plot(results: Results, name: str = "") -> Any:
    """Draw time over tokens for a layer, errors over steps or as maps, otherwise bars of the speed with its spread."""
    need("a plot", "matplotlib")
    if results["kind"] == "orders" and len(methods_of(results["rows"])) <= MOST_MAPS:
        with drawing():
            return _maps(results["rows"], f"What attentions lose, by layer and step: {results['settings']['model']}")
    figure, settings = _figure(results), results["settings"]
    what = name or settings.get("model") or results["kind"].replace("_", " ")
    about = filter(None, [what, settings.get("dtype"), results["machine"]["device"]])
    figure.suptitle(", ".join(about), fontsize=10)
    return figure


def save(results: Results, path: Path) -> list[Path]:
    """Write a Markdown table and a plot next to the JSON file of results; return the paths of the three."""
    table, picture = path.with_suffix(".md"), path.with_suffix(".png")
    write_file(table, markdown(results).encode())
    with atomic_file(picture) as file:
        plot(results).savefig(file, format="png", dpi=150)
    return [path, table, picture]


def _figure(results: Results) -> Any:
    from matplotlib.figure import Figure

    rows = results["rows"]
    if results["kind"] == "orders":
        figure = Figure(figsize=(11, 7), layout="constrained")
        steps, means = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_errors(steps, rows)
        _draw_means(means, rows)
        return figure
    if results["kind"] == "host":
        names = [f"{row['method']}, {row['what']}, {row['size']}" for row in rows]
        operations = "device operations more in each layer", [row["operations"] for row in rows]
        times = "microseconds of the host for each layer and step", [1e6 * row["seconds"] for row in rows]
        return _bars(names, operations, times)
    if results["kind"] == "profile":
        names = [f"{row['method']}, {row['size']}" for row in rows]
        sides = ((f"milliseconds of the {side}", [1e3 * row[side] for row in rows]) for side in ("host", "device"))
        return _bars(names, *sides)
    if results["kind"] == "correctness":
        return _correctness_figure(rows)
    if results["kind"] in ("layer", "growth"):
        return _growth_figure(rows)
    panels = groups(rows)
    columns = min(2, len(panels))
    height = 0.8 + 0.42 * max(len(panel) for panel in panels.values())
    figure = Figure(figsize=(6.5 * columns, height * math.ceil(len(panels) / columns) + 0.8), layout="constrained")
    grid = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flatten()
    for axes, (name, panel) in zip(grid, panels.items(), strict=False):
        _draw_speeds(axes, panel, name, results["bases"][0])
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    several = max(row["rounds"] for row in rows) > 1
    caption = "Bars: median over the rounds; whiskers: least and greatest round." if several else "One round."
    caption += "\nGrey: to compare with; blue: " + ("other kernels" if results["kind"] == "kernels" else "ours")
    phases = ", mean over a run; orange: one call in its own phase, the fastest of several" * any(map(own_part, rows))
    figure.supxlabel(f"{caption}{phases}.", fontsize=8)
    return figure


def _correctness_figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the differences of each method as points, one kind for a dtype and backend, and what is accepted."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(f"{row['model']}, {row['method']}" for row in rows))
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots()
    kinds = dict.fromkeys((row["dtype"], row["backend"]) for row in rows)
    for number, (dtype, backend) in enumerate(kinds):
        own = [row for row in rows if (row["dtype"], row["backend"]) == (dtype, backend)]
        places = [names.index(f"{row['model']}, {row['method']}") for row in own]
        style = {"linestyle": "none", "markerfacecolor": "none", **_style(number)}
        axes.plot([row["error"] or math.nan for row in own], places, label=f"{dtype}, {backend}", **style)
        axes.plot([row["limit"] for row in own], places, "|", color="0.6", label="" if number else "accepted")
        if lost := [(row["limit"], place) for row, place in zip(own, places, strict=True) if row["error"] is None]:
            axes.plot(*zip(*lost, strict=True), "rx", label=f"{dtype}, {backend}: failed")
    axes.set(xscale="log", xlabel="relative L2 difference to a CPU in float32")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    figure.legend(loc="outside right upper")
    return figure


def _bars(names: Sequence[str], *sides: tuple[str, Sequence[float]]) -> Any:
    """Draw bars with the same names side by side, each with a title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 0.4 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(panels, sides, strict=True):
        axes.barh(names, values)
        axes.set_xlabel(title)
    panels[0].invert_yaxis()
    return figure


def _draw_speeds(axes: Any, rows: Sequence[Mapping[str, Any]], name: str, base: str) -> None:
    """Draw a bar for each method's run, and a thinner one for its own phase where the run has several."""
    greatest = 1.0
    for place, row in enumerate(rows):
        part, peer = own_part(row), row["method"] == base or is_reference(row["method"])
        if base not in row["speed"]:  # it did not fit into memory
            axes.annotate(f"no {base} to compare with", (0, place), va="center", fontsize=8)
            continue
        bars = [(row["speed"][base], place - 0.15 * (part is not None), 0.5, "0.75" if peer else "tab:blue")]
        bars += [] if part is None else [(part["speed"][base], place + 0.25, 0.25, "tab:orange")]
        for speed, where, width, colour in bars:
            spread = [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]
            axes.barh(where, speed["median"], width, xerr=spread, color=colour, error_kw={"linewidth": 1})
            text = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(f"{speed['median']:.2f}", (speed["max"], where), **text)
            greatest = max(greatest, speed["max"])
    axes.axvline(1, color="0.4", linewidth=0.8, zorder=0)
    axes.set(title=name, xlabel=f"times as fast as {base}", xlim=(0, 1.18 * greatest))
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()


def _growth_figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw time over tokens, a panel for each part, with one colour and one legend for the methods of all parts."""
    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(row["part"] for row in rows))
    figure = Figure(figsize=(5.2 * len(parts) + 1.8, 4.8), layout="constrained")
    panels = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    lines: dict[str, Any] = {}
    for axes, part in zip(panels, parts, strict=True):
        own = [row for row in rows if row["part"] == part]
        _draw_guides(axes, own)
        for index, kind in enumerate(kinds):
            if line := _draw_growth(axes, [row for row in own if _kind(row) == kind], _style(index)):
                lines[kind] = line
        sizes = sorted({row["tokens"] for row in own})
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=part)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds")
    figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize=8)
    figure.supxlabel("Bands: all block orders. Dashed: proportional to the tokens, and to their square.", fontsize=8)
    return figure


def _kind(row: Mapping[str, Any]) -> str:
    return str(row["method"]).split(",")[0]


def _draw_growth(axes: Any, rows: Sequence[Mapping[str, Any]], style: Mapping[str, Any]) -> Any:
    """Draw the median over the block orders as a line, and their span as a band; return the line."""
    if not rows:
        return None
    times: dict[int, list[float]] = {}
    for row in rows:
        times.setdefault(row["tokens"], []).append(row["seconds"] * 1e3)
    low, middle, high = ([pick(each) for each in times.values()] for pick in (min, statistics.median, max))
    axes.fill_between(list(times), low, high, color=style["color"], alpha=0.25, linewidth=0)
    return axes.plot(list(times), middle, **style)[0]


def _draw_guides(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw growth by the tokens below, and by their square above what was measured."""
    sizes = sorted({row["tokens"] for row in rows})
    first = [row["seconds"] * 1e3 for row in rows if row["tokens"] == sizes[0]]
    for slope, start in ((1, 0.8 * min(first)), (2, 1.25 * max(first))):
        times = [start * (size / sizes[0]) ** slope for size in sizes]
        axes.plot(sizes, times, linestyle="--", color="0.6", linewidth=0.8, zorder=0)


def _draw_errors(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a line for each kind of method, at the middle one of its sizes; the legend has the order of their ends."""
    steps = sorted({row["step"] for row in rows})
    lines = []
    for index, names in enumerate(_kinds(rows).values()):
        name = names[len(names) // 2]
        means = [_mean(row for row in rows if (row["method"], row["step"]) == (name, step)) for step in steps]
        lines += axes.plot(steps, means, label=name, **_style(index))
    axes.set(xlabel="denoising step", ylabel="relative L2 error, mean over layers", yscale="log")
    axes.set_xticks(steps)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    lines.sort(key=lambda line: line.get_ydata()[-1], reverse=True)
    axes.legend(handles=lines, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _maps(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw the errors of each method as a map of layers and steps, all in the same colours."""
    from matplotlib.figure import Figure

    methods, layers = methods_of(rows), list(dict.fromkeys(row["layer"] for row in rows))
    columns = min(3, len(methods))
    lines = math.ceil(len(methods) / columns)
    height = 1.3 + 0.16 * min(len(layers), 24)
    figure = Figure(figsize=(1.3 + 2.7 * columns, 1.2 + lines * height), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    colours = _colours_of(rows)
    for axes, method in zip(panels.flatten(), methods, strict=False):
        _draw_map(axes, [row for row in rows if row["method"] == method], layers, colours)
    for axes in panels.flatten()[len(methods) :]:
        axes.set_visible(False)
    bar = figure.colorbar(colours, ax=panels, label="relative error", format="{x:g}")
    _mark_colours(bar)
    figure.suptitle(title, fontsize=_LARGE, fontweight="bold")
    exact = "; grey: exact" * any(row["error"] == 0 for row in rows)
    figure.supxlabel(f"denoising step, from 0{exact}", fontsize=_LARGE)
    figure.supylabel("layer, from the first", fontsize=_LARGE)
    return figure


def _colours_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    errors = [row["error"] for row in rows if row["error"] > 0] or [1.0]
    return ScalarMappable(LogNorm(max(min(errors), max(errors) / 100), max(errors)), "OrRd")


def _mark_colours(bar: Any) -> None:
    """Write what the colours stand for in large letters."""
    from matplotlib.ticker import LogLocator

    bar.locator = LogLocator(subs=(1, 2, 5))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=_LARGE)
    bar.ax.yaxis.label.set_size(_LARGE)


def _draw_map(axes: Any, rows: Sequence[Mapping[str, Any]], layers: Sequence[str], colours: Any) -> None:
    """Draw one method's errors; what is exact is grey."""
    steps = sorted({row["step"] for row in rows})
    own = {(row["layer"], row["step"]): row["error"] for row in rows}
    shown = [[own.get((layer, step)) or math.nan for step in steps] for layer in layers]
    axes.imshow(shown, cmap=colours.cmap, norm=colours.norm, aspect="auto")
    axes.set_facecolor("0.85")
    axes.grid(False)
    axes.set_title(f"{textwrap.fill(rows[0]['method'], 28)}\nmean {mean_error(rows)}", fontsize=_LARGE)
    every, each = math.ceil(len(steps) / 6), math.ceil(len(layers) / 8)
    axes.set_xticks(range(0, len(steps), every), steps[::every], fontsize=_LARGE)
    axes.set_yticks(range(0, len(layers), each), range(1, len(layers) + 1, each), fontsize=_LARGE)


def _draw_means(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a bar for each method, in the colour of its kind."""
    colours = {name: _style(index)["color"] for index, names in enumerate(_kinds(rows).values()) for name in names}
    means = {name: _mean(row for row in rows if row["method"] == name) for name in colours}
    ranked = sorted(means, key=means.__getitem__)
    bars = axes.barh(ranked, [means[name] for name in ranked], color=[colours[name] for name in ranked])
    axes.bar_label(bars, fmt="%.3f", padding=2, fontsize=7)
    axes.set(xlabel="mean over layers and steps")
    axes.margins(x=0.2, y=0.01)
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()


def _kinds(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        kinds.setdefault(re.sub(r"\d+", "", name), []).append(name)
    return kinds


def _mean(rows: Any) -> float:
    return statistics.fmean(row["error"] for row in rows)


def _style(index: int) -> dict[str, Any]:
    from matplotlib import colormaps

    colour = colormaps["tab20"](2 * index % 20 + index // 10 % 2)
    return {"color": colour, "marker": "osv^Dx"[index % 6], "markersize": 4}
