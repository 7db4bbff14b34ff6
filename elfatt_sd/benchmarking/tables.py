"""Results as Markdown."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from elfatt_sd.benchmarking.names import UNPATCHED, legend, plain_name
from elfatt_sd.benchmarking.record import Results, beats_its_floor, title
from elfatt_sd.measure import Spread

MOST_COLUMNS = 10  # of a table of errors: where there are more steps and layers, they are lines
KEYS = ("size", "tokens", "batch", "dtype", "part")


def markdown(results: Results) -> str:
    """Return the rows as a Markdown table, with what all of them share above it and what their names mean below it."""
    rows = results["rows"]
    if results["kind"] == "orders":
        return error_table(rows)
    if results["kind"] in CELLS:
        head, *cells = CELLS[results["kind"]](rows)
        lines = [*_start(head), *map(_line, cells)]
        for line in lost(results):
            lines += ["", line]
        return "".join(f"{line}\n" for line in lines)
    lines = _table(rows, results["bases"]) if rows else []
    if named := legend({row["method"] for row in rows}):
        lines += ["", named]
    noisy = [row["method"] for row in rows if any(map(beats_its_floor, (row, *row.get("parts", ()))))]
    if noisy:
        named = ", ".join(f"`{name}`" for name in dict.fromkeys(noisy))
        lines += ["", f"Faster than its floor, which is noise (repeat with more rounds): {named}."]
    for line in lost(results):
        lines += ["", line]
    for part, fitted in results.get("exponents", {}).items():
        own = [row["method"] for row in rows if row["part"] == part]
        sizes = max(map(own.count, own))
        few = {name: f" ({own.count(name)} sizes)" for name in own if own.count(name) < sizes}
        said = [f"{name} {spread(value)}{few.get(name, '')}" for name, value in fitted.items() if value is not None]
        lines += ["", f"Time of the {part} grows with tokens to the power of: {'; '.join(said)}."]
    return "".join(f"{line}\n" for line in lines)


def lost(results: Results) -> list[str]:
    """Say for each group what did not fit into memory, and what failed otherwise."""
    said = []
    for group in results["groups"]:
        where = title(group["key"])
        if group.get("lost"):
            said.append(f"Did not fit into memory ({where}): {', '.join(group['lost'])}.")
        said += [f"Failed ({where}): {name}: {why}" for name, why in group.get("failed", {}).items()]
    return said


def groups(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(title({key: row[key] for key in KEYS if key in row}), []).append(row)
    return found


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


CELLS = {"host": host_cells, "correctness": correctness_cells, "profile": profile_cells}


def error_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the relative errors, as a mean over layers and steps, for each step, and for each layer."""
    steps, layers = (list(dict.fromkeys(row[name] for row in rows)) for name in ("step", "layer"))
    if len(steps) + len(layers) > MOST_COLUMNS:
        return _errors_by("layer", rows) + "\n" + _errors_by("step", rows)
    short = [f"layer {index + 1}" for index in range(len(layers))]
    lines = _start(["method", "mean", *(f"step {step}" for step in steps), *short])
    for method in methods_of(rows):
        parts = [mean_error(rows, method=method), *(mean_error(rows, method=method, step=step) for step in steps)]
        parts += [mean_error(rows, method=method, layer=layer) for layer in layers]
        lines.append(_line([method, *parts]))
    named = ", ".join(f"{name} is `{layer}`" for name, layer in zip(short, layers, strict=True))
    return "\n".join([*lines, "", f"{named}."]) + "\n" if layers else ""


def _errors_by(what: str, rows: Sequence[Mapping[str, Any]]) -> str:
    methods, found = methods_of(rows), list(dict.fromkeys(row[what] for row in rows))
    lines = _start([f"relative error by {what}", *methods])
    for number, value in enumerate(found, 1):
        name = f"{number}: `{value}`" if what == "layer" else str(value)
        lines.append(_line([name, *(mean_error(rows, method=method, **{what: value}) for method in methods)]))
    lines.append(_line(["mean", *(mean_error(rows, method=method) for method in methods)]))
    return "\n".join(lines) + "\n"


def methods_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def mean_error(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> str:
    errors = [row["error"] for row in rows if all(row[name] == value for name, value in wanted.items())]
    return f"{statistics.fmean(errors):.3f}" if errors else ""


def _table(rows: Sequence[Mapping[str, Any]], bases: Sequence[str]) -> list[str]:
    values = {key: {row.get(key) for row in rows} for key in KEYS}
    keys = [key for key in KEYS if len(values[key]) > 1]
    shared = {key: rows[0][key] for key in KEYS if len(values[key]) == 1 and key in rows[0]}
    bases = [base for base in bases if any(base in row["speed"] for row in rows)]
    floors = any(row["floor"] for row in rows)
    peaks = any(row["peak_bytes"] is not None for row in rows)
    growth = any(row["bytes_per_picture"] is not None for row in rows)
    head = [*keys, "method", "time", *(f"times as fast as {base}" for base in bases)]
    head += ["of its floor's time"] * floors + ["peak MiB"] * peaks + ["GB for +1 image"] * growth
    caption = title(shared)
    lines = [f"{caption[:1].upper()}{caption[1:]}:", ""] * bool(shared) + _start(head)
    for row in rows:
        for each in (row, *parts(row, indent="&nbsp; ")):
            cells = [clock(each["seconds"]), *(spread(each["speed"].get(base)) for base in bases)]
            cells += [spread(each["floor"], 3)] * floors
            cells += [scaled(each.get("peak_bytes"), 2**20, 0)] * peaks
            cells += [scaled(each.get("bytes_per_picture"), 1e9, 3)] * growth
            lines.append(_line([*(str(row.get(key, "")) for key in keys), each["method"], *cells]))
    return lines


def parts(row: Mapping[str, Any], indent: str) -> list[dict[str, Any]]:
    return [
        {**part, "method": f"{indent}{part['steps']} steps: {part['what']}"}
        | ({"floor": None} if plain_name(part["variant"]) == UNPATCHED else {})
        for part in row.get("parts", ())
    ]


def clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.4g} ms"


def _start(head: Sequence[str]) -> list[str]:
    return [_line(head), "|" + "---|" * len(head)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(ratio: Mapping[str, Any] | None, digits: int = 2) -> str:
    return "" if ratio is None else Spread.read(ratio).words(digits)


def scaled(value: float | None, unit: float, digits: int) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"
