"""The report of a run: one self-contained page, the table as CSV, Markdown and LaTeX, and each plot as PNG.

`write_report` reads `RUN/results.json` and the images of the run. Each figure on the page stands in `results.json` or
in the published table; what is not there is shown as "not measured".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elfatt_sd.errors import REPORT, ElfattError, need
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.files import write_file

__all__ = ["PAGE", "load_results", "replace_files", "report_files", "write_report", "written_tables"]

PAGE = "index.html"
_FILES = (PAGE, "table.*", "*.png", "written.json")  # the last one of earlier versions


def write_report(results: Results) -> Path:
    folder = results.folder / "report"
    replace_files(folder, report_files(results))
    return folder / PAGE


def report_files(results: Results, *, page: bool = True) -> dict[str, bytes]:
    """Return the whole report: page, tables and plots, by the names of their files."""
    need("a report", *REPORT)
    from elfatt_sd.evaluation.report.charts import Palette, draw_plots
    from elfatt_sd.evaluation.report.page import render_page

    plots, missing = draw_plots(results, Palette(results))
    tables = written_tables(results)
    texts = {**tables, **({PAGE: render_page(results, plots, missing, tables)} if page else {})}
    return {name: text.encode() for name, text in texts.items()} | {f"{plot.name}.png": plot.png for plot in plots}


def replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a report's files into a folder and remove those that a former report left there."""
    if folder.is_symlink():
        raise ElfattError(f"{folder} is a link; a report replaces and removes files, so it takes a folder of its own.")
    for name, content in contents.items():
        write_file(folder / name, content)
    for path in {path for pattern in _FILES for path in folder.glob(pattern)}:
        if path.name not in contents and (path.is_symlink() or path.is_file()):
            path.unlink()


def written_tables(results: Results) -> dict[str, str]:
    """Return the table in its three written forms, by the names of their files."""
    from elfatt_sd.evaluation.report import tables
    from elfatt_sd.evaluation.report.summary import comparison, findings, headline

    main, metrics, escape = tables.main_table(results), tables.metrics_table(results), tables.md_escape
    said, words = headline(results), comparison(results)
    bullets = "".join(f"- {escape(sentence)}\n" for sentence in findings(results))
    parts = [f"# {escape(results.name)}", escape(said), bullets, tables.to_markdown(main), escape(words)]
    if results.published.rows:
        titles, lines = tables.published_table(results)
        parts += [
            f"## Published figures ({escape(str(results.published.source))})",
            tables.md_table(titles, lines, [title != "Method" for title in titles]),
        ]
    parts += ["## Further metrics", tables.to_markdown(metrics)] if metrics else []
    parts += ["## More measures", tables.to_markdown(tables.more_table(results))]
    written = {
        "table.csv": tables.to_csv(results),
        "table.md": "\n\n".join(part.strip() for part in parts) + "\n",
        "table.tex": tables.to_latex(main, f"Protocol {results.name}. {said} {words}", results.name),
    }
    return {name: tables.shown(text) for name, text in written.items()}
