"""The tables of a report: what each column shows of a row, as Markdown and LaTeX; and every figure as CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any

from elfatt_sd.evaluation.records import Estimate, Figure, estimate
from elfatt_sd.evaluation.report.data import (
    BASELINE,
    FIGURES,
    MEASURES,
    NULL,
    PARTS,
    STAGES,
    TIME_COLUMNS,
    Results,
    Row,
    is_withheld,
    published_for,
    published_rows,
    published_source,
    setting_text,
    setting_title,
)
from elfatt_sd.evaluation.statistics import BETTER, TOO_FEW, WORSE

MISSING, DASH, REFERENCE, THIS_RUN = "not measured", "—", "reference", "This run"
MINUS, TIMES, TO = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
OTHER_IMAGE = 20  # dB: below, little is left of the untouched image; unrelated ones have 10 to 20
_VERDICTS = {BETTER: "better", WORSE: "worse", TOO_FEW: "few"}
_ARROWS = {"higher": " ↑", "lower": " ↓"}
_REORDERING = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # signs by which a text shows other words than it holds
_CONTROL = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f{_REORDERING}\ud800-\udfff\ufffe\uffff]")
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Entry:
    """One cell of a table."""

    text: str  # the figure
    note: str = ""  # its interval or spread, set smaller
    kind: str = "number"  # `number`, `text`, `reference`, `missing`, or a verdict: `better`, `worse`, `same`, `few`
    remark: str = ""  # what limits it, in words

    @property
    def small(self) -> str:
        return ", ".join(filter(None, (self.note, self.remark)))


@dataclass(frozen=True)
class Column:
    """A column: its title, the group of columns it belongs to, and whether it holds figures."""

    title: str
    group: str = ""
    figures: bool = True


@dataclass(frozen=True)
class Line:
    """A row of a table; the reason of a failure stands in place of all entries that the run should have filled."""

    row: Row
    heads: list[Entry]  # method and settings
    entries: list[Entry]  # the figures of this run
    published: list[Entry]  # the figures to compare them with
    rule: bool  # whether a rule separates it from the row before it

    @property
    def failed(self) -> str | None:
        return self.row.failed


@dataclass(frozen=True)
class Table:
    """Columns and lines; `heads` is the number of leading columns that name the row."""

    columns: list[Column]
    lines: list[Line]
    heads: int

    def groups(self) -> list[tuple[str, int]]:
        """Return the groups of neighbouring columns with their widths."""
        return [(title, len([*columns])) for title, columns in groupby(self.columns, lambda column: column.group)]


_Maker = Callable[[Row], Entry]
_Columns = list[tuple[str, _Maker]]


def main_table(results: Results) -> Table:
    """Build the table in the paper's shape: distance and verdict, time, memory, closeness, published figures.

    On the toy the accuracy of all attributes follows the distance.
    """
    columns = [] if results.distance is None else _distance_columns(results, results.distance)
    if "mean" in results.attributes:
        columns.append(("Accuracy ↑", _values(results, "accuracy", "mean")))
    columns += [(TIME_COLUMNS[results.time_part], _times(results, results.time_part))]
    columns += [("GiB/img", _memory(results)), ("PSNR, dB", _paired(results, "psnr", 1))]
    return _table(results, columns, published=bool(published_rows(results)))


def more_table(results: Results) -> Table:
    """Build the table of everything else: other distances, SSIM, cosine, accuracy, UNet time, memory fit."""
    columns: _Columns = [("Pictures", lambda row: Entry(str(row.images)) if row.images is not None else _missing())]
    for name in results.distances:
        columns += _distance_columns(results, name) if name != results.distance else []
    columns += _lowest_column(results)
    columns += [("SSIM", _paired(results, "ssim", 2)), ("Feature cosine", _paired(results, "cosine", 2))]
    for name in results.attributes:
        if name == "mean":
            columns += _difference_columns(results, "Accuracy", "accuracy", name)
        else:
            columns.append((f"{setting_title(name)} accuracy", _values(results, "accuracy", name)))
    columns += [(TIME_COLUMNS[part], _times(results, part)) for part in PARTS if part != results.time_part]
    plain: list[tuple[str, list[float | None]]] = [("Attention density", [row.cost.density for row in results.rows])]
    adds = [row.cost.multiply_adds and row.cost.multiply_adds / 1e12 for row in results.rows]
    plain += [("Denoiser, 10¹² multiply-adds/img", adds)]
    for stage, title in STAGES.items():
        plain.append((f"{title}, GiB/img", [_slope(row, stage) for row in results.rows]))
    plain = [(title, values) for title, values in plain if any(value is not None for value in values)]
    plain.append(("Memory at batch 0, GiB", [row.memory.intercept_gib for row in results.rows]))
    plain.append(("Fit error, GiB", [row.memory.fit_error_gib for row in results.rows]))
    for title, values in plain:
        known = {row: estimate(value) for row, value in zip(results.rows, values, strict=True)}
        columns.append((title, _estimates(results, known.__getitem__)))
    return _table(results, columns)


def _slope(row: Row, stage: str) -> float | None:
    return row.stages[stage].gib_per_image if stage in row.stages else None


def study_table(results: Results) -> Table:
    """Build the table of a study: closeness to the untouched images, distance and accuracy, UNet time."""
    columns: _Columns = [("PSNR, dB", _paired(results, "psnr", 1)), *_lowest_column(results)]
    columns += [("SSIM", _paired(results, "ssim", 2)), ("Feature cosine", _paired(results, "cosine", 2))]
    if results.distance is not None:
        _, (title, difference), verdict = _distance_columns(results, results.distance)
        columns += [(f"{results.distance} {title[0].lower()}{title[1:]}", difference), verdict]
    if "mean" in results.attributes:
        plain = _values(results, "accuracy", "mean")

        def judged(row: Row) -> Entry:
            """The interval of the share alone does not tell: the verdict is of the paired difference."""
            verdict = row.accuracy["mean"].difference.verdict
            return replace(plain(row), remark=verdict) if verdict in (BETTER, WORSE) else plain(row)

        columns.append(("Accuracy ↑", judged))
    part = "unet" if any(row.timed["unet"].seconds_per_image is not None for row in results.rows) else results.time_part
    return _table(results, [*columns, (TIME_COLUMNS[part], _times(results, part))])


def metrics_table(results: Results) -> Table | None:
    """Build the table of all further metrics; None where there is none."""
    columns: _Columns = []
    for name in results.metrics:
        figures = [row.metrics[name] for row in results.rows]
        better = next((figure.better for figure in figures if figure.better), "")
        values = _values(results, "metrics", name, paired=results.compares(name))
        columns.append((f"{name}{_ARROWS.get(better, '')}", values))
        difference, verdict = _difference_columns(results, name, "metrics", name)
        columns += [difference] if any(figure.difference.value is not None for figure in figures) else []
        columns += [verdict] if any(figure.difference.verdict for figure in figures) else []
    return _table(results, columns) if columns else None


def _values(results: Results, kind: str, name: str, *, paired: bool = False) -> _Maker:
    return _estimates(results, lambda row: getattr(row, kind)[name].estimate, paired=paired)


def _difference_columns(results: Results, title: str, kind: str, name: str) -> _Columns:
    def figure(row: Row) -> Figure:
        found: Figure = getattr(row, kind)[name]
        return found

    values = _estimates(results, lambda row: figure(row).difference.estimate, sign=True, paired=True)
    return [(f"{title} difference", values), (f"{title} verdict", _verdicts(figure))]


def published_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the whole published table as titles and texts."""
    rows = published_rows(results)
    settings = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in ("label", *FIGURES)]
    titles = ["Method", *(setting_title(key) for key in settings), *(title for title, _ in FIGURES.values())]
    lines = [
        [str(row.get("label", "")), *(setting_text(row.get(key)) for key in settings), *_published_texts(row)]
        for row in rows
    ]
    return titles, lines


def _published_texts(row: Mapping[str, Any]) -> list[str]:
    values = ((row.get(key), decimals) for key, (_, decimals) in FIGURES.items())
    return [fixed(value, decimals) if isinstance(value, int | float) else DASH for value, decimals in values]


def _published_entries(results: Results, row: Mapping[str, Any] | None) -> list[Entry]:
    """Write a published row, with the ratio of the published times to that of the published baseline."""
    if row is None:
        return [Entry(DASH) for _ in FIGURES]
    base = published_for(results, results.baseline) if results.baseline else None
    before, after = (base or {}).get("seconds_per_image"), row.get("seconds_per_image")
    ratio = f"{fixed(before / after, 2)}{TIMES}" if before and after and row is not base else ""
    notes = (ratio if key == "seconds_per_image" else "" for key in FIGURES)
    return [Entry(*parts) for parts in zip(_published_texts(row), notes, strict=True)]


def _table(results: Results, made: _Columns, *, published: bool = False) -> Table:
    heads = [Column("Method", figures=False), *(Column(setting_title(name)) for name in results.varied)]
    columns = [*heads, *(Column(title, THIS_RUN, "erdict" not in title) for title, _ in made)]
    if published:
        columns += [Column(title, f"Published ({published_source(results)})") for title, _ in FIGURES.values()]
    lines, before = [], None
    for row in results.rows:
        names = [Entry(row.title, {BASELINE: "(untouched)", NULL: "(null row)"}.get(row.role, ""), kind="text")]
        names += [Entry(setting_text(row.settings.get(key))) for key in results.varied]
        others = _published_entries(results, published_for(results, row)) if published else []
        rule = before is not None and before != (row.label, row.role)
        lines.append(Line(row, names, [make(row) for _, make in made], others, rule))
        before = (row.label, row.role)
    return Table(columns, lines, len(heads))


def _distance_columns(results: Results, name: str) -> _Columns:
    power = unit_for(row.distance(name).estimate for row in results.rows)
    values = _estimates(results, lambda row: in_unit(row.distance(name).estimate, power))
    shown = _estimates(
        results, lambda row: in_unit(row.distance(name).difference.estimate, power), sign=True, paired=True
    )
    unit = f" ({TIMES}10{str(power).translate(_RAISED)})" if power else ""
    titles = ("Difference", "Verdict") if name == results.distance else (f"{name} difference", f"{name} verdict")
    limit = ", extrapolated" if results.extrapolated(name) else ""  # to infinitely many images

    def difference(row: Row) -> Entry:
        return Entry(DASH, kind="missing") if is_withheld(row.distance(name)) else shown(row)

    return [
        (f"{name}{unit} ↓", values),
        (f"{titles[0]}{limit}{unit}", difference),
        (titles[1], _verdicts(lambda row: row.distance(name))),
    ]


def _missing(reason: str | None = None) -> Entry:
    return Entry(reason or MISSING, kind="missing")


def _no_pair(row: Row, kind: str = "reference") -> Entry:
    """Say why a row has no comparison: the untouched pipeline is what others are compared with."""
    return Entry(REFERENCE, kind=kind) if row.role == BASELINE else _missing()


def _estimates(
    results: Results, get: Callable[[Row], Estimate | None], *, sign: bool = False, paired: bool = False
) -> _Maker:
    """Make entries of values with their intervals; the untouched pipeline has none that is `paired`."""
    decimals = decimals_for(map(get, results.rows))

    def make(row: Row) -> Entry:
        if (found := get(row)) is None:
            return _no_pair(row) if paired else _missing()
        return Entry(fixed(found.value, decimals, sign=sign), interval(found, decimals, sign=sign))

    return make


def _verdicts(get: Callable[[Row], Figure]) -> _Maker:
    def make(row: Row) -> Entry:
        verdict = get(row).difference.verdict
        return _no_pair(row, "text") if verdict is None else Entry(verdict, kind=_VERDICTS.get(verdict, "same"))

    return make


def _paired(results: Results, measure: str, least: int) -> _Maker:
    decimals = max(decimals_for(row.changes[measure].estimate for row in results.rows), least)

    def make(row: Row) -> Entry:
        found = row.changes[measure].estimate
        equal = f"{row.identical} of {row.images}" if measure == "psnr" and row.identical else ""
        if equal and row.mostly_identical:
            return Entry("identical", f"({equal})")
        if found is None:
            return _no_pair(row)
        return Entry(fixed(found.value, decimals), interval(found, decimals), remark=equal and f"{equal} identical")

    return make


def _lowest_column(results: Results) -> _Columns:
    """The PSNR of the image that is changed most, and how many have become others; none where it was not kept."""

    def make(row: Row) -> Entry:
        psnr = row.changes["psnr"]
        if psnr.lowest is None:
            return Entry("identical") if row.identical else _no_pair(row)
        others = sum(value is not None and value < OTHER_IMAGE for value in psnr.pictures)
        return Entry(fixed(psnr.lowest, 1), f"({others} below {OTHER_IMAGE})" if others else "")

    kept = any(row.changes["psnr"].lowest is not None for row in results.rows)
    return [("Lowest PSNR, dB", make)] if kept else []


def _times(results: Results, part: str) -> _Maker:
    decimals = decimals_for(estimate(row.timed[part].seconds_per_image) for row in results.rows)

    def make(row: Row) -> Entry:
        found, ratio = row.timed[part].seconds_per_image, row.timed[part].speed
        if found is None:
            return _missing(row.time.failed or row.time.note)
        if ratio is None or row.role == BASELINE:
            return Entry(fixed(found, decimals))
        return Entry(fixed(found, decimals), f"{fixed(ratio.value, 2)}{TIMES} ({span(ratio, 2)})")

    return make


def _memory(results: Results) -> _Maker:
    decimals = max(decimals_for((row.slope for row in results.rows), default=2), 2)

    def make(row: Row) -> Entry:
        found, reason = row.slope, row.memory.failed or row.memory.note
        if found is None:
            return _missing(reason)
        return Entry(fixed(found.value, decimals), interval(found, decimals), remark=reason or "")

    return make


def decimals_for(values: Iterable[Estimate | None], default: int = 3) -> int:
    """Return the decimals that show two digits of the typical half interval of a column, 6 at most."""
    found = [value for value in values if value is not None]
    halves = [(value.ends[1] - value.ends[0]) / 2 for value in found if value.ends and value.ends[1] > value.ends[0]]
    size = median(halves) if halves else max((abs(value.value) for value in found), default=1.0)
    digits = 2 if halves else default
    return 2 if size <= 0 else min(max(digits - 1 - math.floor(math.log10(size)), 0), 6)


def unit_for(values: Iterable[Estimate | None]) -> int:
    """Return the power of ten, a multiple of 3, in which a column is easy to read: 0 from 0.01 to 10 000."""
    sizes = [max(abs(value.value), *map(abs, value.ends or ())) for value in values if value is not None and value.ends]
    size = median(sizes) if sizes else 1.0
    return 0 if size <= 0 or 0.01 <= size < 10_000 else math.floor(math.log10(size) / 3) * 3


def in_unit(value: Estimate | None, power: int) -> Estimate | None:
    """Write a value in units of a power of ten."""
    if value is None or not power:
        return value
    return estimate(value.value / 10.0**power, value.ends and [end / 10.0**power for end in value.ends])


def fixed(value: float, decimals: int, *, sign: bool = False) -> str:
    """Write a number with a true minus sign.

    With `sign`, what rounds to zero keeps the sign that it has, so that an interval never seems to hold a zero that it
    excludes; without, there is no negative zero.
    """
    prefix = ("+" if value > 0 else MINUS if value < 0 else "") if sign else ""
    text = f"{abs(value) if sign else round(value, decimals) + 0.0:.{decimals}f}"
    return prefix + text.replace("-", MINUS)


def interval(value: Estimate, decimals: int, *, sign: bool = False) -> str:
    """Write the interval: `[-0.41, +0.12]`; empty where there is none."""
    ends = ", ".join(fixed(end, decimals, sign=sign) for end in value.ends or ())
    return ends and f"[{ends}]"


def span(value: Estimate, decimals: int) -> str:
    """Write the spread: 1.40 to 1.45, joined by a dash; empty where there is none."""
    return TO.join(fixed(end, decimals) for end in value.ends or ())


def shown(text: str) -> str:
    """Put a sign for each control character but tabs and ends of lines: pages and tables must not hold them.

    So do signs that turn the order of letters around.
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def join_names(names: Iterable[str]) -> str:
    """Write a list as in a sentence: `a, b and c`."""
    *first, last = list(names) or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: `1 image`, `128 images`, `5 classes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}".replace(",", " ")


def to_markdown(table: Table) -> str:
    """Write a table as GitHub Markdown."""
    groups = (f" — {column.group}" if column.group not in ("", THIS_RUN) else "" for column in table.columns)
    titles = [f"{column.title}{group}" for column, group in zip(table.columns, groups, strict=True)]
    lines: list[Sequence[str]] = []
    for line in table.lines:
        entries = line.entries
        if line.failed:
            entries = [Entry(f"failed: {line.failed}"), *(Entry(DASH) for _ in entries[1:])]
        cells = [*line.heads, *entries, *line.published]
        lines.append([f"{cell.text} {cell.small}".strip() for cell in cells])
    return md_table(titles, lines, [column.figures for column in table.columns])


def md_table(titles: Sequence[str], lines: Sequence[Sequence[str]], figures: Sequence[bool]) -> str:
    """Write a table as GitHub Markdown; columns of figures are set to the right."""
    rule = ["---:" if each else ":---" for each in figures]
    rows = [[*map(md_escape, titles)], rule, *([*map(md_escape, line)] for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def md_escape(text: str) -> str:
    escaped = {"<": "&lt;", ">": "&gt;"}
    text = "".join(escaped.get(char, f"\\{char}" if char in "\\`*_[]|" else char) for char in text)
    return " ".join(text.split())


_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    MINUS: "$-$", TIMES: r"$\times$", TO: "--", "—": "---", "·": r"$\cdot$",
    "↓": r"$\downarrow$", "↑": r"$\uparrow$", "∞": r"$\infty$",
    "[": "{[}", "]": "{]}", "*": "{*}",  # which would belong to a line's end before them
    **{raised: f"$^{plain}$" for raised, plain in zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True)},
}  # fmt: skip


def tex_escape(text: str) -> str:
    """Escape a text for LaTeX, which reads other letters as UTF-8."""
    return "".join(_TEX.get(char, char) for char in " ".join(text.split()))


def to_latex(table: Table, caption: str, label: str) -> str:
    """Write a table as LaTeX with booktabs, shaped as the paper's tables; verdicts and intervals included."""
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table*}[htbp]", "  \\scriptsize", "  \\centering"]
    lines += ["  \\setlength{\\tabcolsep}{3pt}"]
    key = "".join(char if char.isascii() and (char.isalnum() or char in "-:") else "-" for char in label)
    lines += [f"  \\caption{{{tex_escape(caption)}}}", f"  \\label{{tab:{key}}}"]
    lines += [f"  \\begin{{tabular}}{{{''.join('r' if column.figures else 'l' for column in table.columns)}}}"]
    lines += ["    \\toprule", *_tex_groups(table)]
    lines += [f"    {' & '.join(tex_escape(column.title) for column in table.columns)} \\\\", "    \\midrule"]
    for line in table.lines:
        lines += ["    \\midrule"] if line.rule else []
        entries = [_tex_entry(entry) for entry in line.entries]
        if line.failed:
            entries = [f"\\multicolumn{{{len(entries)}}}{{l}}{{failed: {tex_escape(line.failed)}}}"]
        cells = [*map(_tex_entry, line.heads), *entries, *map(_tex_entry, line.published)]
        lines.append(f"    {' & '.join(cells)} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table*}", ""]
    return "\n".join(lines)


def _tex_groups(table: Table) -> list[str]:
    groups = table.groups()
    if len(groups) < 3:  # only the names and this run
        return []
    cells, rules, start = [], [], 1
    for title, size in groups:
        cells.append(f"\\multicolumn{{{size}}}{{c}}{{{tex_escape(title)}}}")
        rules += [f"\\cmidrule(lr){{{start}-{start + size - 1}}}"] if title else []
        start += size
    return [f"    {' & '.join(cells)} \\\\", f"    {' '.join(rules)}"]


def _tex_entry(entry: Entry) -> str:
    """Set the interval or spread smaller, as the page does."""
    return tex_escape(entry.text) + (f" {{\\tiny {tex_escape(entry.small)}}}" if entry.small else "")


def to_csv(results: Results) -> str:
    """Write every figure of every row, unrounded; an empty field is a figure that was not measured."""
    records = [_record(results, row) for row in results.rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def _record(results: Results, row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"protocol": results.name, "identity": results.data.get("identity")}
    record |= {key: getattr(row, key) for key in ("cell", "label", "method", "role")}
    record |= {f"setting_{key}": setting_text(value) for key, value in row.settings.items()}
    record |= {"images": row.images, "classes": row.classes}
    for name in results.distances:
        figure = row.distance(name)
        record |= _figure_columns(name, figure) | {f"{name} difference extrapolated": figure.extrapolated or None}
    for measure in MEASURES:
        changes, ends = row.changes[measure], (f"{measure} quartile 1", f"{measure} quartile 3")
        spread = _columns(f"{measure} median", estimate(changes.median, changes.quartiles), ends)
        record |= _columns(measure, changes.estimate) | spread | {f"{measure} lowest": changes.lowest}
    record["psnr identical"] = row.identical
    for name in results.attributes:
        record |= _figure_columns(f"accuracy {name}", row.accuracy[name])
    for name in results.metrics:
        record |= _figure_columns(name, row.metrics[name])
    for part in PARTS:
        record[f"{part} seconds_per_image"] = row.timed[part].seconds_per_image
        record |= _columns(f"{part} speedup", row.timed[part].speed)
    record |= _columns("gib_per_image", row.slope)
    record |= {"intercept_gib": row.memory.intercept_gib, "fit_error_gib": row.memory.fit_error_gib}
    record |= {f"{stage} gib_per_image": _slope(row, stage) for stage in STAGES}
    multiply_adds = row.cost.multiply_adds
    record |= {"density": row.cost.density, "multiply_adds": multiply_adds and float(multiply_adds)}
    record |= {"memory kind": row.memory.kind, "memory note": row.memory.note, "failed": row.failed}
    published = published_for(results, row) or {}
    return record | {f"published {key}": published.get(key) for key in FIGURES}


def _figure_columns(name: str, figure: Figure) -> dict[str, Any]:
    difference = _columns(f"{name} difference", figure.difference.estimate)
    return _columns(name, figure.estimate) | difference | {f"{name} verdict": figure.difference.verdict}


def _columns(name: str, value: Estimate | None, ends: tuple[str, ...] = ()) -> dict[str, Any]:
    figures = (value.value, value.low, value.high) if value else (None, None, None)
    return dict(zip((name, *(ends or (f"{name} low", f"{name} high"))), figures, strict=True))
