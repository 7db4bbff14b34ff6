"""Tables and plots of what these scripts measure, and of a whole suite: `python -m benchmarks.shown FILE.json...`."""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goals import verdict
from elfatt_sd.benchmarking.report import (
    OTHERS,
    Results,
    clock,
    draw,
    markdown,
    no_results,
    part_file,
    read_results,
    speed_table,
    spread,
    table_lines,
    with_notes,
    write_report,
)
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.charts import drawing
from elfatt_sd.files import write_file

MOST_COLUMNS = 10  # of a table of errors: where there are more steps and layers, they are lines
MOST_MAPS = 9  # of layers and steps in one plot
_LARGE = 12  # points, readable where the plot is 400 pixels wide


def growth_figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw time over tokens, a panel for each part, with one colour and one legend for the methods of all parts.

    A line is the median over the block orders, a band their span. Dashed lines grow as the tokens, below what was
    measured, and as their square, above it.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(row["part"] for row in rows))
    figure = Figure(figsize=(5.2 * len(panels) + 1.8, 4.8), layout="constrained")
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    kinds = list(dict.fromkeys(row["method"].split(",")[0] for row in rows))
    lines: dict[str, Any] = {}
    for axes, part in zip(drawn, panels, strict=True):
        own = [row for row in rows if row["part"] == part]
        sizes = sorted({row["tokens"] for row in own})
        first = [row["seconds"] * 1e3 for row in own if row["tokens"] == sizes[0]]
        for slope, start in ((1, 0.8 * min(first)), (2, 1.25 * max(first))):
            guide = [start * (size / sizes[0]) ** slope for size in sizes]
            axes.plot(sizes, guide, linestyle="--", color="0.6", linewidth=0.8, zorder=0)
        for index, kind in enumerate(kinds):
            times: dict[int, list[float]] = {}
            for row in own:
                if row["method"].split(",")[0] == kind:
                    times.setdefault(row["tokens"], []).append(row["seconds"] * 1e3)
            if times:
                low, middle, high = ([pick(each) for each in times.values()] for pick in (min, statistics.median, max))
                style = line_style(index)
                axes.fill_between(list(times), low, high, color=style["color"], alpha=0.25, linewidth=0)
                lines[kind] = axes.plot(list(times), middle, **style)[0]
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=part)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    drawn[0].set_ylabel("milliseconds")
    figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize=8)
    figure.supxlabel("Bands: all block orders. Dashed: proportional to the tokens, and to their square.", fontsize=8)
    return figure


def line_style(index: int) -> dict[str, Any]:
    from matplotlib import colormaps

    colour = colormaps["tab20"](2 * index % 20 + index // 10 % 2)
    return {"color": colour, "marker": "osv^Dx"[index % 6], "markersize": 4}


def host_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a table on what methods cost the host, its head first."""
    head = ["pixels", "method", "phase", "layers", "operations more a layer", "us a layer and step", "us in the first"]
    lines = []
    for row in rows:
        times = [f"{1e6 * row[name]:.1f}" for name in ("seconds", "first")]
        lines.append(
            [str(row["size"]), row["method"], row["what"], str(row["layers"]), f"{row['operations']:.1f}", *times]
        )
    return [head, *lines]


def correctness_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a table on what methods compute, its head first."""
    head = ["model", "method", "dtype", "backend", "relative L2 difference to a CPU in float32", "at most", ""]
    lines = []
    for row in rows:
        said = "right" if row["right"] else f"**wrong**{': ' * bool(row['failed'])}{row['failed'] or ''}"
        error = "" if row["error"] is None else f"{row['error']:.2g}"
        lines.append([*(row[name] for name in head[:4]), error, f"{row['limit']:.2g}", said])
    return [head, *lines]


def profile_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a table on host and device, its head first."""
    head = ["pixels", "batch", "method", "host", "device", "both", "kernels", "attention through", "longest kernels"]
    lines = []
    for row in rows:
        times = [clock(row[name]) for name in ("host", "device", "wall")]
        longest = [f"`{_kernel(name)}` {clock(seconds)}" for name, seconds, _ in row["longest"][:3]]
        attention = dict.fromkeys(f"`{_kernel(name)}`" for name in row["attention"])
        cells = [str(row["size"]), str(row["batch"]), row["method"], *times, str(row["kernels"])]
        lines.append([*cells, ", ".join(attention), ", ".join(longest)])
    return [head, *lines]


def _kernel(name: str) -> str:
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain)[0].rpartition("::")[2][:60]


def error_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the relative errors, as a mean over layers and steps, for each step, and for each layer."""
    steps, layers = (list(dict.fromkeys(row[name] for row in rows)) for name in ("step", "layer"))
    if len(steps) + len(layers) > MOST_COLUMNS:
        return _errors_by("layer", rows) + "\n" + _errors_by("step", rows)
    short = [f"layer {index + 1}" for index in range(len(layers))]
    cells = [["method", "mean", *(f"step {step}" for step in steps), *short]]
    for method in methods_of(rows):
        parts = [mean_error(rows, method=method), *(mean_error(rows, method=method, step=step) for step in steps)]
        parts += [mean_error(rows, method=method, layer=layer) for layer in layers]
        cells.append([method, *parts])
    named = ", ".join(f"{name} is `{layer}`" for name, layer in zip(short, layers, strict=True))
    return "\n".join([*table_lines(cells), "", f"{named}."]) + "\n" if layers else ""


def _errors_by(what: str, rows: Sequence[Mapping[str, Any]]) -> str:
    methods, found = methods_of(rows), list(dict.fromkeys(row[what] for row in rows))
    cells = [[f"relative error by {what}", *methods]]
    for number, value in enumerate(found, 1):
        name = f"{number}: `{value}`" if what == "layer" else str(value)
        cells.append([name, *(mean_error(rows, method=method, **{what: value}) for method in methods)])
    cells.append(["mean", *(mean_error(rows, method=method) for method in methods)])
    return "\n".join(table_lines(cells)) + "\n"


def methods_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def mean_error(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> str:
    errors = [row["error"] for row in rows if all(row[name] == value for name, value in wanted.items())]
    return f"{statistics.fmean(errors):.3f}" if errors else ""


def growth_table(results: Results) -> str:
    """Return the table of a layer, and the exponents of its growth."""
    rows, lines = results["rows"], []
    for part, fitted in results.get("exponents", {}).items():
        own = [row["method"] for row in rows if row["part"] == part]
        sizes = max(map(own.count, own))
        few = {name: f" ({own.count(name)} sizes)" for name in own if own.count(name) < sizes}
        said = [f"{name} {spread(value)}{few.get(name, '')}" for name, value in fitted.items() if value is not None]
        lines += ["", f"Time of the {part} grows with tokens to the power of: {'; '.join(said)}."]
    return speed_table(results) + "".join(f"{line}\n" for line in lines)


def _orders_figure(results: Results) -> Any:
    from matplotlib.figure import Figure

    rows = results["rows"]
    if len(methods_of(rows)) <= MOST_MAPS:
        with drawing():
            return _maps(rows, f"What attentions lose, by layer and step: {results['settings']['model']}")
    figure = Figure(figsize=(11, 7), layout="constrained")
    steps, means = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_errors(steps, rows)
    _draw_means(means, rows)
    return figure


def _host_figure(results: Results) -> Any:
    rows = results["rows"]
    names = [f"{row['method']}, {row['what']}, {row['size']}" for row in rows]
    operations = "device operations more in each layer", [row["operations"] for row in rows]
    times = "microseconds of the host for each layer and step", [1e6 * row["seconds"] for row in rows]
    return _bars(names, operations, times)


def _profile_figure(results: Results) -> Any:
    rows = results["rows"]
    names = [f"{row['method']}, {row['size']}" for row in rows]
    sides = ((f"milliseconds of the {side}", [1e3 * row[side] for row in rows]) for side in ("host", "device"))
    return _bars(names, *sides)


def _correctness_figure(results: Results) -> Any:
    """Draw the differences of each method as points, one kind for a dtype and backend, and what is accepted."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    names = list(dict.fromkeys(f"{row['model']}, {row['method']}" for row in rows))
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots()
    kinds = dict.fromkeys((row["dtype"], row["backend"]) for row in rows)
    for number, (dtype, backend) in enumerate(kinds):
        own = [row for row in rows if (row["dtype"], row["backend"]) == (dtype, backend)]
        places = [names.index(f"{row['model']}, {row['method']}") for row in own]
        style = {"linestyle": "none", "markerfacecolor": "none", **line_style(number)}
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


def _draw_errors(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a line for each kind of method, at the middle one of its sizes; the legend has the order of their ends."""
    steps = sorted({row["step"] for row in rows})
    lines = []
    for index, names in enumerate(_kinds(rows).values()):
        name = names[len(names) // 2]
        means = [_mean(row for row in rows if (row["method"], row["step"]) == (name, step)) for step in steps]
        lines += axes.plot(steps, means, label=name, **line_style(index))
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
    colours = {name: line_style(index)["color"] for index, names in enumerate(_kinds(rows).values()) for name in names}
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


def write_suite(path: Path) -> list[Path]:
    """Write a page with tables and plots of all parts of a suite, or those of a benchmark; return all files."""
    data = read_results(path) or {}
    if "parts" not in data:
        return write_report(path)
    pictures, table = draw_parts(data, path), path.with_suffix(".md")
    write_file(table, describe_suite(data, path, path.parent).encode())
    return [path, table, *pictures]


def draw_parts(suite: Results, path: Path) -> list[Path]:
    """Draw each part of a suite into a folder of the suite's name; return the plots."""
    return [file for name, part in suite.get("parts", {}).items() for file in draw(part, part_file(path, name), name)]


def describe_file(path: Path, start: Path) -> str:
    """Return tables, plots and origin of a file of results, as Markdown for a page in the folder `start`."""
    data = read_results(path) or {}
    try:
        return describe_suite(data, path, start) if "parts" in data else describe_part("", data, path, start)
    except (ValueError, KeyError, TypeError) as error:
        raise no_results(path) from error


def describe_part(name: str, results: Results, path: Path, start: Path) -> str:
    lines = [f"### {name}", ""] if name else []
    lines += [markdown(results)]
    lines += picture_line(results, part_file(path, name).with_suffix(".png"), start)
    return "\n".join([*lines, origin(results), ""])


def describe_suite(suite: Results, path: Path, start: Path) -> str:
    lines = [describe_part(name, results, path, start) for name, results in suite["parts"].items()]
    if goals := suite.get("goals"):
        cells = [["part", "method", "what", "measured", "at least", "rounds", ""]]
        for goal in goals:
            met = verdict(goal["gain"] >= goal["goal"], goal["rounds"])
            words = [goal[name] for name in ("part", "method", "what")]
            cells.append([*words, f"{goal['gain']:.2f}", str(goal["goal"]), str(goal["rounds"]), met])
        lines += ["### Goals", "", *table_lines(cells), ""]
    if peaks := suite.get("peaks"):
        cells = [[part, peak["method"], f"{peak['share']:.3f}"] for part, peak in peaks.items()]
        head = ["part", "method", "fraction of the untouched call's"]
        lines += ["### Greatest peak of our methods", "", *table_lines([head, *cells]), ""]
    if slopes := suite.get("memory_slope"):
        cells = [["method", *slopes]]
        for method in dict.fromkeys(method for known in slopes.values() for method in known):
            cells.append([method, *(f"{known[method]:.3f}" if method in known else "" for known in slopes.values())])
        lines += ["### GB for +1 image", "", *table_lines(cells), ""]
    for heading, key in (("Not measured", "errors"), ("Packages that were not there", "missing")):
        if found := suite.get(key):
            lines += [f"### {heading}", "", *(f"- {name}: {' '.join(why.split())}" for name, why in found.items()), ""]
    return "\n".join(lines)


def short_commit(commit: str | None) -> str:
    digest, plus, changes = (commit or "").partition("+")
    return digest[:12] + plus + changes


def link(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def picture_line(results: Results, path: Path, start: Path) -> list[str]:
    return [f"![{results['kind']}]({link(path, start)})", ""] if path.exists() else []


def origin(results: Results) -> str:
    """Say in a sentence or two where figures come from."""
    machine, rows = results["machine"], results["rows"]
    threads = f"{machine['cpu_threads']} thread{'s' * (machine['cpu_threads'] != 1)}"
    versions = [f"{name} {machine['packages'][name]}" for name in ("torch", "diffusers")]
    memory = "freed memory kept" if machine.get("keeps_freed_memory") else ""
    of_rows = ", ".join(dict.fromkeys(row["dtype"] for row in rows if "dtype" in row))
    always = "float32" if results["kind"] in ("host", "orders") else ""
    dtype = str(results["settings"].get("dtype") or of_rows or always)
    said = ", ".join(filter(None, [machine["device"], threads, *versions, dtype, memory]))
    rounds = [row["rounds"] for row in rows if "rounds" in row]
    if rounds:
        span = str(max(rounds)) if len({*rounds}) == 1 else f"{min(rounds)} to {max(rounds)}"
        several = f"medians of {span} interleaved rounds, in brackets the least and greatest ratio"
        said += "; one round" if max(rounds) == 1 else f"; {several}"
    sittings = [sitting for group in results["groups"] for sitting in group["sittings"]]
    shares = [sitting["bystanders"] for sitting in sittings if sitting["bystanders"] is not None]
    if shares:
        said += f"; other processes took at most {max(shares):.0%} of the processors' time"
    commit = short_commit(machine.get("commit"))
    made = f"Made by `{results['command']}`" if results.get("command") else "Made"
    return f"{said}. {made}" + (f" at commit {commit}." if commit else ".")


def _table(cells: Callable[[Sequence[Mapping[str, Any]]], list[list[str]]]) -> Callable[[Results], str]:
    return lambda results: with_notes(table_lines(cells(results["rows"])), results)


OTHERS |= {
    "growth": (growth_table, lambda results: growth_figure(results["rows"])),
    "orders": (lambda results: error_table(results["rows"]), _orders_figure),
    "host": (_table(host_cells), _host_figure),
    "profile": (_table(profile_cells), _profile_figure),
    "correctness": (
        _table(correctness_cells),
        _correctness_figure,
    ),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        try:
            print(*write_suite(path), sep="\n")
        except ElfattError as error:
            sys.exit(f"error: {error}")
