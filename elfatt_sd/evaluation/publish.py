"""Keep what a finished run found, without its pictures, in a folder to commit; fill pages from there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.report import replace_files, report_files
from elfatt_sd.evaluation.report.compare import compare_rows
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.evaluation.report.tables import study_table
from elfatt_sd.evaluation.report.text import plural
from elfatt_sd.evaluation.report.writers import to_markdown
from elfatt_sd.evaluation.results import RESULTS_FILE
from elfatt_sd.files import write_json
from elfatt_sd.measuring.machine import short_commit
from elfatt_sd.pages import check_results, fill_blocks

MISSING = "Not measured yet."
MOST_BYTES = 5_000_000  # of a run that is committed


def publish(run_dir: Path, folder: Path, *, page: bool = True) -> Path:
    """Write results, tables and plots of a run to `folder/NAME`, all from the same results.

    What an earlier publication left there and this one does not have is removed.

    Args:
        run_dir: a run with its results.
        folder: of all published results.
        page: write the report's page, too, which holds pictures.

    Returns:
        The folder of the run's results.

    Raises:
        ElfattError: the run has no results, or a folder cannot be written.
    """
    results = load_results(run_dir)
    target = folder / results.folder_name
    files = report_files(run_dir, results, page=page)
    try:
        write_json(target / RESULTS_FILE, dict(results.data))
    except OSError as error:
        raise ElfattError(f"{target} cannot be written: {error.strerror}.") from error
    replace_files(target, files)
    return target


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
    text = fill_blocks(text, "eval", lambda name, options: _section(folder / name, options, start))

    def compare(name: str, cells: Sequence[str]) -> str:
        names = dict.fromkeys([name, *(cell.split("/")[0] for cell in cells if "/" in cell)])
        if not all((folder / each).is_dir() for each in names):
            return f"{MISSING}\n"
        own, *others = (load_results(folder / each) for each in names)
        return compare_rows(own, cells, others)

    text = fill_blocks(text, "compare", compare, required=False)

    def draw(measure: str, names: Sequence[str]) -> str:
        return _pareto(measure, names, folder, start, plots)

    return fill_blocks(text, "pareto", draw, required=False), plots


def _pareto(measure: str, names: Sequence[str], folder: Path, start: Path, plots: dict[Path, bytes]) -> str:
    from elfatt_sd.evaluation.report.pareto import draw_pareto
    from elfatt_sd.evaluation.report.plots import drawing, to_png

    there = [name for name in names if (folder / name).is_dir()]
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
        path = folder / f"{plot}.png"
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
