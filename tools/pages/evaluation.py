"""Pages on quality: tables and plots of published runs, between markers in a text that people write.

<!-- eval NAME PLOT PLOT -->                  the table of a run and plots of it
<!-- rows NAME PLOT ROW ROW -->               one plot and at most six rows of a run, in the columns that vary
<!-- headline RUN/ROW RUN/ROW -->             a table and a plot of closeness and speed; see `draw_headline`
<!-- compare NAME ROW OTHER ROW OTHER -->     rows image by image; see `compare_rows`
<!-- pareto PLOT NAME NAME -->                several runs in one plane; see `draw_pareto`
<!-- end -->
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.shown import link, short_commit
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.evaluation.report.tables import plural, to_markdown
from elfatt_sd.files import place_of
from tools.pages.blocks import MISSING, check_markers, check_results, fill_blocks
from tools.pages.compare import compare_rows
from tools.pages.short import short_study, study_table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "results"


def fill_page(text: str, folder: Path, start: Path) -> tuple[str, dict[Path, bytes]]:
    """Put the results of runs between the markers of a page.

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
    writers: dict[str, Callable[[str, Sequence[str]], str]] = {
        "eval": lambda name, options: _section(place_of(folder, name), options, start),
        "rows": lambda name, options: _rows(place_of(folder, name), options, start),
        "compare": lambda name, cells: _compare(name, cells, folder),
        "pareto": lambda plot, names: _pareto(plot, names, folder, start, plots),
        "headline": lambda plot, cells: _headline(plot, cells, folder, start, plots),
    }
    check_markers(text, [*writers])
    for word, write in writers.items():
        text = fill_blocks(text, word, write)
    return text, plots


def _compare(name: str, cells: Sequence[str], folder: Path) -> str:
    names = dict.fromkeys([name, *(cell.split("/")[0] for cell in cells if "/" in cell)])
    folders = [place_of(folder, each) for each in names]
    if not all(each.is_dir() for each in folders):
        return f"{MISSING}\n"
    own, *others = map(load_results, folders)
    return compare_rows(own, cells, others)


def _headline(plot: str, cells: Sequence[str], folder: Path, start: Path, plots: dict[Path, bytes]) -> str:
    from elfatt_sd.evaluation.report.charts import drawing, to_png
    from tools.pages.headline import draw_headline, headline_table

    chosen = []
    for cell in cells:
        run, _, name = cell.partition("/")
        results = load_results(place_of(folder, run))
        found = [row for row in results.rows if row.cell == name]
        if not found:
            known = ", ".join(row.cell for row in results.rows)
            raise ElfattError(f"row {name!r} of {run} does not exist; there are: {known}.")
        chosen.append((results, found[0]))
    with drawing():
        chart = draw_headline(chosen)
        path = place_of(folder, plot, ".png")
        plots[path] = to_png(chart.figure)
    return f"{headline_table(chosen, BENCHMARKS)}\n{_link(chart.title, path, start)}\n"


def _rows(folder: Path, options: Sequence[str], start: Path) -> str:
    if not folder.is_dir():
        return f"{MISSING}\n"
    results, (plot, *cells) = load_results(folder), options
    lines = [short_study(results, cells), _link(plot.replace("_", " "), _plot(folder, plot), start), ""]
    return "\n".join([*lines, f"[All rows]({link(folder / 'table.md', start)}). {_origin(results)}", ""])


def _pareto(plot: str, names: Sequence[str], folder: Path, start: Path, plots: dict[Path, bytes]) -> str:
    from elfatt_sd.evaluation.report.charts import drawing, to_png
    from tools.pages.pareto import draw_pareto

    there = [name for name in names if place_of(folder, name).is_dir()]
    if not there:
        return f"{MISSING}\n"
    with drawing():
        chart, table = draw_pareto([load_results(folder / name) for name in there])
        path = place_of(folder, plot, ".png")
        plots[path] = to_png(chart.figure)
    absent = [name for name in names if name not in there]
    said = f" Not in it yet: {', '.join(f'`{name}`' for name in absent)}." if absent else ""
    return f"{table}\n{_link(chart.title, path, start)}\n\n{chart.caption}{said}\n"


def _link(name: str, path: Path, start: Path) -> str:
    return f"![{name}]({link(path, start)})"


def _plot(folder: Path, name: str) -> Path:
    path = place_of(folder, name, ".png")
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in folder.glob("*.png")))
        raise ElfattError(f"plot {name!r} of {folder} does not exist; there are: {known or 'none'}.")
    return path


def _section(folder: Path, plots: Sequence[str], start: Path) -> str:
    if not folder.is_dir():
        return f"{MISSING}\n"
    results = load_results(folder)
    lines = [to_markdown(study_table(results))]
    for plot in plots:
        lines += [_link(plot.replace("_", " "), _plot(folder, plot), start), ""]
    return "\n".join([*lines, _origin(results), ""])


def _origin(results: Results) -> str:
    """Say in a sentence where the figures come from."""
    packages = results.environment.get("packages") or {}
    images = max((row.images or 0 for row in results.rows), default=0)
    settings = [f"{plural(images, 'image')} a row", f"{results.protocol.get('steps')} steps"]
    versions = [f"{name} {packages[name]}" for name in ("torch", "diffusers") if name in packages]
    identity = results.identity[:12]
    said = ", ".join([*settings, results.hardware or "unknown hardware", *versions])
    commit = short_commit(results.environment.get("commit"))
    return f"Protocol `{results.name}` ({identity}): {said}" + (f", at commit {commit}." if commit else ".")
