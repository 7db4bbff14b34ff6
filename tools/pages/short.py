"""Short tables for readers: a few rows of a run or a benchmark, and only the columns that vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elfatt_sd.benchmarking.report import KEYS, clock, scaled, spread
from elfatt_sd.benchmarking.report import Results as Benchmark
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import ACCURACY, Results
from elfatt_sd.evaluation.report.tables import (
    Table,
    closeness_columns,
    figure_columns,
    make_table,
    time_column,
    to_markdown,
)
from elfatt_sd.evaluation.statistics import BETTER, WORSE

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


def study_table(results: Results) -> Table:
    """Build the table of a study: closeness to the untouched images, distance and accuracy, UNet time."""
    columns = closeness_columns(results)
    if results.distance is not None:
        for title, fields in figure_columns(results, results.distance, " ↓")[1:]:
            own = f"{results.distance} {title[0].lower()}{title[1:]}"
            columns.append((own if "ifference" in title else title, fields))
    if ACCURACY in results.attributes:
        title, fields = figure_columns(results, ACCURACY, " ↑")[0]
        for place, row in enumerate(results.rows):
            # the interval of the share alone does not tell: the verdict is of the paired difference
            verdict = row.figure(ACCURACY).difference.verdict
            if verdict in (BETTER, WORSE):
                fields[place] = replace(fields[place], remark=verdict)
        columns.append((title, fields))
    timed = any(row.timed["unet"].seconds_per_image is not None for row in results.rows)
    return make_table(results, [*columns, time_column(results, "unet" if timed else results.time_part)])


def _check(names: Sequence[str], known: object, rows: int) -> None:
    missing = [name for name in names if name not in known]  # type: ignore[operator]
    if missing or rows > MOST_ROWS:
        raise ElfattError(f"rows={list(names)!r} are not accepted; accepted: at most {MOST_ROWS} of {sorted(known)}.")  # type: ignore[call-overload]


def _varying(table: Table) -> Table:
    """Leave out the columns in which all rows say the same."""

    def varies(place: int) -> bool:
        entries = [line.entries[place] for line in table.lines]
        said = {(entry.text, entry.small) for entry in entries if entry.kind not in _GIVEN}
        return place == 0 or (len(said) > 1 and table.titles[place] not in _LEFT_OUT)

    kept = [place for place in range(len(table.titles)) if varies(place)]
    if not any("erdict" in table.titles[place] for place in kept):  # then no difference is judged
        kept = [place for place in kept if "difference" not in table.titles[place]]
    lines = [replace(line, entries=[line.entries[place] for place in kept]) for line in table.lines]
    return Table([table.titles[place] for place in kept], [table.figures[place] for place in kept], lines)
