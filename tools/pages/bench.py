"""The page on performance: tables and plots of committed results, between markers in a text that people write.

<!-- bench NAME -->                 what `NAME.json` holds
<!-- bench NAME METHOD METHOD -->   these rows of it, at most six
<!-- end -->

`NAME/PART` is one part of a suite, with hyphens for its spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.shown import describe_file, describe_part, draw_parts, link, origin, picture_line
from elfatt_sd.benchmarking.report import read_results, save
from tools.pages.blocks import MISSING, check_markers, check_results, fill_blocks
from tools.pages.goals import goals_table
from tools.pages.short import short_calls


def render(folder: Path) -> None:
    """Write the tables and plots of a folder of results again."""
    for path in sorted(folder.glob("*.json")):
        results = read_results(path) or {}
        if "groups" in results:
            save(results, path)
        draw_parts(results, path)


def fill_page(text: str, folder: Path, start: Path) -> str:
    """Put results between the markers of a page.

    Args:
        text: of the page.
        folder: of the results.
        start: folder of the page, from which links lead to the plots.

    Raises:
        ElfattError: no such folder, the page has no markers, or a file is not a result of a benchmark.
    """
    check_results(folder)
    check_markers(text, ["bench"])

    def write(name: str, methods: Sequence[str]) -> str:
        return goals_table(folder) if name == "goals" else _section(folder, name, start, methods)

    return fill_blocks(text, "bench", write)


def _section(folder: Path, name: str, start: Path, methods: Sequence[str]) -> str:
    file, _, part = name.partition("/")
    path = folder / f"{file}.json"
    data = read_results(path)
    parts = {each.replace(" ", "-"): each for each in data["parts"]} if part and data else {}
    if data is None or (part and part not in parts):
        return f"{MISSING}\n"
    data = data["parts"][parts[part]] if part else data
    if not methods:
        return describe_part(parts[part], data, path, start) if part else describe_file(path, start)
    full = f"[All rows]({link(path.with_suffix('.md'), start)}); {origin(data)}"
    return "\n".join([short_calls(data, methods), *picture_line(data, folder / f"{name}.png", start), full, ""])
