"""Tables and plots of results on disk: of one benchmark, or of all parts of a suite (`benchmarks/gpu_suite.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.benchmarking.plots import plot, save
from elfatt_sd.benchmarking.rows import Results
from elfatt_sd.benchmarking.tables import markdown
from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.files import atomic_file, link, place_of
from elfatt_sd.measuring.machine import short_commit
from elfatt_sd.typed import read_typed


def write_report(path: Path) -> list[Path]:
    """Write tables and plots of a file of results into its folder; return all files."""
    data = read_results(path)
    if data is None:
        raise ElfattError(f"{path} does not exist; give a file of `elfatt-sd bench` or benchmarks/gpu_suite.py.")
    try:
        return save(data, path) if "groups" in data else _save_suite(data, path)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _no_results(path, error) from error


def read_results(path: Path) -> dict[str, Any] | None:
    """Return what a file of results holds, None where there is no file."""
    return read_typed(path, dict[str, Any], "`elfatt-sd bench` makes it again")


def _save_suite(suite: Results, path: Path) -> list[Path]:
    table = path.with_suffix(".md")
    pictures = draw_parts(suite, path)
    with atomic_file(table) as file:
        file.write(describe_suite(suite, path, path.parent).encode())
    return [path, table, *pictures]


def draw_parts(suite: Results, path: Path) -> list[Path]:
    """Draw each part of a suite into a folder of the suite's name; return the plots."""
    pictures = []
    for name, part in suite.get("parts", {}).items():
        pictures.append(_part_picture(path, name))
        with atomic_file(pictures[-1]) as file:
            plot(part, name).savefig(file, format="png", dpi=150)
    return pictures


def describe_file(path: Path, start: Path) -> str:
    """Return tables, plots and origin of a file of results, as Markdown for a page in the folder `start`."""
    data = read_results(path) or {}
    try:
        if "parts" in data:
            return describe_suite(data, path, start)
        return describe_part("", data, path, start)
    except (ValueError, KeyError, TypeError) as error:
        raise _no_results(path, error) from error


def _no_results(path: Path, error: Exception) -> ElfattError:
    return ElfattError(f"{path} holds no results of a benchmark ({type(error).__name__}: {error}).")


def describe_suite(suite: Results, path: Path, start: Path) -> str:
    said = [describe_part(name, results, path, start) for name, results in suite["parts"].items()]
    return "\n".join([*said, _concluded(suite)])


def describe_part(name: str, results: Results, path: Path, start: Path) -> str:
    lines = [f"### {name}", ""] if name else []
    lines += [markdown(results)]
    lines += picture_line(results, _part_picture(path, name) if name else path.with_suffix(".png"), start)
    return "\n".join([*lines, origin(results), ""])


def _concluded(suite: Results) -> str:
    lines: list[str] = []
    if goals := suite.get("goals"):
        lines += ["### Goals", "", "| part | method | what | measured | at least | rounds | |", "|---" * 7 + "|"]
        for goal in goals:
            met = verdict(goal["gain"] >= goal["goal"], goal["rounds"])
            figures = f"{goal['gain']:.2f} | {goal['goal']} | {goal['rounds']}"
            lines.append(f"| {goal['part']} | {goal['method']} | {goal['what']} | {figures} | {met} |")
        lines.append("")
    if peaks := suite.get("peaks"):
        lines += ["### Greatest peak of our methods", "", "| part | method | fraction of the untouched call's |"]
        lines += ["|---|---|---|"]
        lines += [f"| {part} | {peak['method']} | {peak['share']:.3f} |" for part, peak in peaks.items()]
        lines.append("")
    if slopes := suite.get("memory_slope"):
        methods = list(dict.fromkeys(method for known in slopes.values() for method in known))
        lines += ["### GB for +1 image", "", f"| method | {' | '.join(slopes)} |", "|---" * (len(slopes) + 1) + "|"]
        for method in methods:
            cells = [f"{known[method]:.3f}" if method in known else "" for known in slopes.values()]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines.append("")
    for heading, key in (("Not measured", "errors"), ("Packages that were not there", "missing")):
        if found := suite.get(key):
            listed = (f"- {name}: {' '.join(why.split())}" for name, why in found.items())
            lines += [f"### {heading}", "", *listed, ""]
    return "\n".join(lines)


def verdict(met: bool, rounds: int = FEW_REPEATS) -> str:
    """Say whether a goal is met, or that too few rounds were run to tell."""
    return few_rounds(rounds) or ("met" if met else "**missed**")


def few_rounds(rounds: int) -> str:
    """Say that there are too few rounds, or nothing."""
    return f"only {rounds} round{'s' * (rounds > 1)}" if rounds < FEW_REPEATS else ""


def picture_line(results: Results, path: Path, start: Path) -> list[str]:
    return [f"![{results['kind']}]({link(path, start)})", ""] if path.exists() else []


def _part_picture(path: Path, name: str) -> Path:
    return place_of(path.with_suffix(""), name.replace(" ", "-"), ".png")


def origin(results: Results) -> str:
    """Say in a sentence or two where figures come from."""
    machine = results["machine"]
    packages = machine["packages"]
    threads = f"{machine['cpu_threads']} thread{'s' * (machine['cpu_threads'] != 1)}"
    versions = [f"{name} {packages[name]}" for name in ("torch", "diffusers")]
    memory = "freed memory kept" if machine.get("keeps_freed_memory") else ""
    said = ", ".join(filter(None, [machine["device"], threads, *versions, _precision(results), memory]))
    rounds = [row["rounds"] for row in results["rows"] if "rounds" in row]
    if rounds:
        several = f"medians of {_span(rounds)} interleaved rounds, in brackets the least and greatest ratio"
        said += "; one round" if max(rounds) == 1 else f"; {several}"
    sittings = [sitting for group in results["groups"] for sitting in group["sittings"]]
    shares = [sitting["bystanders"] for sitting in sittings if sitting["bystanders"] is not None]
    if shares:
        said += f"; other processes took at most {max(shares):.0%} of the processors' time"
    commit = short_commit(machine.get("commit"))
    made = f"Made by `{results['command']}`" if results.get("command") else "Made"
    return f"{said}. {made}" + (f" at commit {commit}." if commit else ".")


def _precision(results: Results) -> str:
    of_rows = ", ".join(dict.fromkeys(row["dtype"] for row in results["rows"] if "dtype" in row))
    always = "float32" if results["kind"] in ("host", "orders") else ""
    return str(results["settings"].get("dtype") or of_rows or always)


def _span(counts: Sequence[int]) -> str:
    return str(counts[0]) if len({*counts}) == 1 else f"{min(counts)} to {max(counts)}"
