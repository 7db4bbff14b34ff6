"""The page on quality: tables and plots of published runs, between markers in a text that people write.

<!-- eval NAME PLOT PLOT -->                  the table of a run and plots of it
<!-- compare NAME ROW OTHER ROW OTHER -->     rows picture by picture; see `compare_rows`
<!-- pareto MEASURE NAME NAME -->             several runs in one plane; see `draw_pareto`
<!-- end -->
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.evaluation.report.tables import study_table
from elfatt_sd.evaluation.report.text import plural
from elfatt_sd.evaluation.report.writers import to_markdown
from elfatt_sd.measuring.machine import short_commit
from tools.pages.blocks import check_results, fill_blocks, place_of
from tools.pages.compare import compare_rows

MISSING = "Not measured yet."


def fill_page(text: str, folder: Path, start: Path) -> tuple[str, dict[Path, bytes]]:
    """Put the results of runs between the markers of a page.

    `<!-- eval NAME PLOT PLOT -->` takes the table of a run and plots of it, `<!-- compare NAME ROW OTHER ROW OTHER -->`
    rows picture by picture, `RUN/ROW` being one of another run (see `compare_rows`), and
    `<!-- pareto MEASURE NAME NAME -->` all these runs in one plane, and the rows that stand out there (see
    `draw_pareto`).

    Args:
        text: of the page.
        folder: of all published results.
        start: folder of the page, from which links lead to the plots.

    Returns:
        The page, and the plots that it needs and that are of no single run, by their paths.

    Raises:
        ElfattError: no such folder, the page has no markers, a file holds no results, or a plot is not there.
    """
    check_results(folder)
    plots: dict[Path, bytes] = {}
    text = fill_blocks(text, "eval", lambda name, options: _section(place_of(folder, name), options, start))

    def compare(name: str, cells: Sequence[str]) -> str:
        names = dict.fromkeys([name, *(cell.split("/")[0] for cell in cells if "/" in cell)])
        folders = [place_of(folder, each) for each in names]
        if not all(each.is_dir() for each in folders):
            return f"{MISSING}\n"
        own, *others = map(load_results, folders)
        return compare_rows(own, cells, others)

    text = fill_blocks(text, "compare", compare, required=False)

    def draw(measure: str, names: Sequence[str]) -> str:
        return _pareto(measure, names, folder, start, plots)

    return fill_blocks(text, "pareto", draw, required=False), plots


def _pareto(measure: str, names: Sequence[str], folder: Path, start: Path, plots: dict[Path, bytes]) -> str:
    from elfatt_sd.evaluation.report.plots import drawing, to_png
    from tools.pages.pareto import draw_pareto

    there = [name for name in names if place_of(folder, name).is_dir()]
    if not there:
        return f"{MISSING}\n"
    with drawing():
        chart, table = draw_pareto([load_results(folder / name) for name in there], measure)
        path = folder / f"{chart.name}.png"
        plots[path] = to_png(chart.figure)
    absent = [name for name in names if name not in there]
    said = f" Not in it yet: {', '.join(f'`{name}`' for name in absent)}." if absent else ""
    return f"{table}\n{_link(chart.title, path, start)}\n\n{chart.caption}{said}\n"


def _link(name: str, path: Path, start: Path) -> str:
    return f"![{name}]({Path(os.path.relpath(path, start)).as_posix()})"


def _section(folder: Path, plots: Sequence[str], start: Path) -> str:
    if not folder.is_dir():
        return f"{MISSING}\n"
    results = load_results(folder)
    lines = [to_markdown(study_table(results))]
    for plot in plots:
        path = place_of(folder, plot, ".png")
        if not path.is_file():
            known = ", ".join(sorted(found.stem for found in folder.glob("*.png")))
            raise ElfattError(f"plot {plot!r} of {folder} does not exist; there are: {known or 'none'}.")
        lines += [_link(plot.replace("_", " "), path, start), ""]
    return "\n".join([*lines, _origin(results), ""])


def _origin(results: Results) -> str:
    """Say in a sentence where the figures come from."""
    packages = results.environment.get("packages") or {}
    images = max((row.images or 0 for row in results.rows), default=0)
    settings = [f"{plural(images, 'picture')} a row", f"{results.from_protocol('steps')} steps"]
    versions = [f"{name} {packages[name]}" for name in ("torch", "diffusers") if name in packages]
    identity = str(results.data.get("identity") or "")[:12]
    said = ", ".join([*settings, results.hardware or "unknown hardware", *versions])
    commit = short_commit(results.environment.get("commit"))
    return f"Protocol `{results.name}` ({identity}): {said}" + (f", at commit {commit}." if commit else ".")
