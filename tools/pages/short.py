"""Short tables for readers: a few rows of a run or a benchmark, and only the columns that vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elfatt_sd.benchmarking.record import Results as Benchmark
from elfatt_sd.benchmarking.report import KEYS, clock, scaled, spread
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.tables import Line, Table, study_table, to_markdown

MOST_ROWS = 6
_LEFT_OUT = ("Feature cosine",)  # moves with the SSIM
_GIVEN = ("reference", "missing")  # kinds of entries that are no figures


def short_calls(results: Benchmark, methods: Sequence[str]) -> str:
    """Return some rows of a benchmark as Markdown: time, speed-up, and memory where the rows differ in it.

    Args:
        results: of a benchmark of calls.
        methods: names of the rows; all groups of them, such as sizes, are shown.

    Raises:
        ElfattError: there is no such row, or there are more than six.
    """
    found = [row for row in results["rows"] for name in methods if row["method"] == name]
    _check(methods, {row["method"] for row in results["rows"]}, len(found))
    keys = [key for key in KEYS if len({row.get(key) for row in found}) > 1]
    bases = [base for base in results["bases"] if any(base in row["speed"] for row in found)]
    titles = [*keys, "method", "time", *(f"times as fast as {base}" for base in bases), "peak MiB"]
    lines = [
        [*(str(row[key]) for key in keys), row["method"], clock(row["seconds"])]
        + [spread(row["speed"].get(base)) for base in bases]
        + [scaled(row["peak_bytes"], 2**20, 0)]
        for row in found
    ]
    kept = [
        place for place in range(len(titles)) if place <= len(keys) or len({line[place] for line in lines} - {""}) > 1
    ]
    head, rule = [titles[place] for place in kept], ["---"] * len(kept)
    rows = [head, rule, *([line[place] for place in kept] for line in lines)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def short_study(results: Results, cells: Sequence[str]) -> str:
    """Return some rows of a run as Markdown: closeness, and whatever else varies among them.

    Args:
        results: of a run.
        cells: names of the rows, in the table's order.

    Raises:
        ElfattError: there is no such row, or there are more than six.
    """
    table = study_table(results)
    by_cell = {line.row.cell: line for line in table.lines}
    _check(cells, by_cell, len(cells))
    return to_markdown(_varying(replace(table, lines=[by_cell[cell] for cell in cells])))


def _check(names: Sequence[str], known: object, rows: int) -> None:
    missing = [name for name in names if name not in known]  # type: ignore[operator]
    if missing or rows > MOST_ROWS:
        raise ElfattError(f"rows={list(names)!r} are not accepted; accepted: at most {MOST_ROWS} of {sorted(known)}.")  # type: ignore[call-overload]


def _varying(table: Table) -> Table:
    """Leave out the columns in which all rows say the same."""
    cells = [[*line.heads, *line.entries] for line in table.lines]

    def varies(place: int) -> bool:
        if place == 0:
            return True
        said = {(entry[place].text, entry[place].small) for entry in cells if entry[place].kind not in _GIVEN}
        return len(said) > 1 and table.columns[place].title not in _LEFT_OUT

    kept = [place for place in range(len(table.columns)) if varies(place)]
    if not any("erdict" in table.columns[place].title for place in kept):  # then no difference is judged
        kept = [place for place in kept if "difference" not in table.columns[place].title]

    def cut(line: Line) -> Line:
        own = [*line.heads, *line.entries]
        heads = sum(place < table.heads for place in kept)
        return replace(
            line, heads=[own[place] for place in kept[:heads]], entries=[own[place] for place in kept[heads:]]
        )

    heads = sum(place < table.heads for place in kept)
    return Table([table.columns[place] for place in kept], [cut(line) for line in table.lines], heads)
