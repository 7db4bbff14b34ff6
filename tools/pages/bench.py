"""The page on performance: tables and plots of committed results, between markers in a text that people write.

<!-- bench NAME -->                 what `NAME.json` holds
<!-- bench NAME METHOD METHOD -->   these rows of it, at most six
<!-- end -->
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.benchmarking.plots import plot, save
from elfatt_sd.benchmarking.rows import Results
from elfatt_sd.benchmarking.tables import markdown
from elfatt_sd.config import ElfattError
from elfatt_sd.files import atomic_file
from elfatt_sd.measuring.machine import short_commit
from elfatt_sd.typed import read_typed
from tools.pages.blocks import check_markers, check_results, fill_blocks, link, place_of
from tools.pages.goals import goals_table, verdict
from tools.pages.short import short_calls

MISSING = "Not measured yet."


def render(folder: Path) -> None:
    """Write the tables and plots of a folder of results again."""
    for path in sorted(folder.glob("*.json")):
        results = _read(path)
        if "groups" in results:
            save(results, path)
        for name, part in results.get("parts", {}).items():
            picture = _part_picture(path, name)
            picture.parent.mkdir(exist_ok=True)
            with atomic_file(picture) as file:
                plot(part).savefig(file, format="png", dpi=150)


def fill_page(text: str, folder: Path, start: Path) -> str:
    """Put results between the markers of a page.

    Args:
        text: of the page.
        folder: of the results.
        start: folder of the page, from which links lead to the plots.

    Raises:
        ElfattError: no such folder, the page has no markers, or a file is no result of a benchmark.
    """
    check_results(folder)
    check_markers(text, ["bench"])

    def write(name: str, methods: Sequence[str]) -> str:
        return goals_table(folder) if name == "goals" else _section(folder / f"{name}.json", start, methods)

    return fill_blocks(text, "bench", write)


def _section(path: Path, start: Path, methods: Sequence[str]) -> str:
    if not path.exists():
        return f"{MISSING}\n"
    data = _read(path)
    try:
        if methods:
            full = f"[All rows]({link(path.with_suffix('.md'), start)}); {_origin(data)}"
            return "\n".join([short_calls(data, methods), *_plot(data, path.with_suffix(".png"), start), full, ""])
        if "parts" not in data:
            return _described("", data, path, start)
        said = [_described(name, results, path, start) for name, results in data["parts"].items()]
        said.append(_concluded(data))
    except (ValueError, KeyError, TypeError) as error:
        raise ElfattError(f"{path} holds no results of a benchmark ({type(error).__name__}: {error}).") from error
    return "\n".join(said)


def _read(path: Path) -> dict[str, Any]:
    found = read_typed(path, dict[str, Any], "`elfatt-sd bench` makes it again")
    return {} if found is None else found


def _concluded(suite: Results) -> str:
    """Return a suite's goals, its greatest peaks, the growth of its memory, and what it could not measure."""
    lines: list[str] = []
    if goals := suite.get("goals"):
        lines += ["### Goals", "", "| part | method | times as fast as untouched | at least | rounds | |"]
        lines += ["|---|---|---|---|---|---|"]
        for goal in goals:
            met = verdict(goal["gain"] >= goal["goal"], goal["rounds"])
            figures = f"{goal['gain']:.2f} | {goal['goal']} | {goal['rounds']}"
            lines.append(f"| {goal['part']} | {goal['method']} | {figures} | {met} |")
        lines.append("")
    if peaks := suite.get("peaks"):
        lines += ["### Greatest peak of our methods", "", "| part | method | share of the untouched call's |"]
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
    if errors := suite.get("errors"):
        lines += [
            "### Not measured",
            "",
            *(f"- {part}: {' '.join(error.split())}" for part, error in errors.items()),
            "",
        ]
    return "\n".join(lines)


def _described(name: str, results: Results, path: Path, start: Path) -> str:
    """Return one benchmark's table, plot and origin."""
    lines = [f"### {name}", ""] if name else []
    lines += [markdown(results)]
    lines += _plot(results, _part_picture(path, name) if name else path.with_suffix(".png"), start)
    return "\n".join([*lines, _origin(results), ""])


def _plot(results: Results, path: Path, start: Path) -> list[str]:
    return [f"![{results['kind']}]({link(path, start)})", ""] if path.exists() else []


def _part_picture(path: Path, name: str) -> Path:
    """Return where the plot of a suite's part lies: in a folder of the suite's name."""
    return place_of(path.with_suffix(""), name.replace(" ", "-"), ".png")


def _origin(results: Results) -> str:
    """Say in a sentence or two where figures come from."""
    machine = results["machine"]
    packages = machine["packages"]
    said = f"{machine['device']}, {machine['cpu_threads']} threads, torch {packages['torch']}, diffusers "
    said += f"{packages['diffusers']}, {_precision(results)}" + ", freed memory kept" * machine.get(
        "keeps_freed_memory", 0
    )
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
    settings = results["settings"]
    return (
        settings.get("dtype")
        or ", ".join(dict.fromkeys(row["dtype"] for row in results["rows"] if "dtype" in row))
        or "float32"
    )


def _span(counts: Sequence[int]) -> str:
    return str(counts[0]) if len({*counts}) == 1 else f"{min(counts)} to {max(counts)}"
