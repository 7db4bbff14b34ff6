"""The table as Markdown and LaTeX (booktabs), and every figure of the run as CSV."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from elfatt_sd.evaluation.report.data import STAGES, Results
from elfatt_sd.evaluation.report.metrics import metric_names
from elfatt_sd.evaluation.report.published import FIGURES, published_for
from elfatt_sd.evaluation.report.rows import Row
from elfatt_sd.evaluation.report.tables import DASH, THIS_RUN, Column, Entry, Line, Table
from elfatt_sd.evaluation.report.text import MINUS, TIMES, TO, shown
from elfatt_sd.evaluation.report.values import Estimate, dig, number, setting_text


def to_markdown(table: Table) -> str:
    """Write a table as GitHub Markdown."""
    titles = [f"{column.title}{_md_group(column)}" for column in table.columns]
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


def _md_group(column: Column) -> str:
    return f" — {column.group}" if column.group not in ("", THIS_RUN) else ""


def md_escape(text: str) -> str:
    """Escape a text for Markdown."""
    escaped = {"<": "&lt;", ">": "&gt;"}
    text = "".join(escaped.get(char, f"\\{char}" if char in "\\`*_[]|" else char) for char in text)
    return shown(" ".join(text.split()))


_FORMULA = re.compile("\\s*[=+\\-@\t\r\uff1d\uff0b\uff0d\uff20]")  # the last four are wide forms of the first
_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?")
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    MINUS: "$-$", TIMES: r"$\times$", TO: "--", "—": "---", "·": r"$\cdot$",
    "↓": r"$\downarrow$", "↑": r"$\uparrow$", "∞": r"$\infty$",
    "“": "``", "”": "''", "\N{LEFT SINGLE QUOTATION MARK}": "`", "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "…": r"\ldots{}", "°": r"$^{\circ}$", "±": r"$\pm$", "µ": r"$\mu$",
    "ß": r"\ss{}", "æ": r"\ae{}", "Æ": r"\AE{}", "œ": r"\oe{}", "Œ": r"\OE{}", "ø": r"\o{}", "Ø": r"\O{}",
    "ł": r"\l{}", "Ł": r"\L{}", "\N{LATIN SMALL LETTER DOTLESS I}": r"\i{}", "|": r"\textbar{}",
    "[": "{[}", "]": "{]}", "*": "{*}",  # which would belong to a line's end before them
}  # fmt: skip
_MARKS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"
_ACCENTS = dict(zip(_MARKS, "`'^~=u.\"rHvc", strict=True))
_HIDDEN = ("Cc", "Cf", "Cs", "Cn", "Co")  # kinds of characters that no printer shows


def tex_escape(text: str) -> str:
    """Escape a text for LaTeX, in ASCII, which every engine reads; what it has no command for is named: U+732B."""
    return "".join(map(_tex_char, " ".join(text.split())))


def _tex_char(char: str) -> str:
    if char in _TEX:
        return _TEX[char]
    if unicodedata.category(char) in _HIDDEN:
        return ""
    if char.isascii():
        return char
    letter, accent = [*unicodedata.normalize("NFD", char), "", ""][:2]
    if letter.isascii() and accent in _ACCENTS and len(unicodedata.normalize("NFD", char)) == 2:
        return f"\\{_ACCENTS[accent]}{{{letter}}}"
    compatible = unicodedata.normalize("NFKC", char)
    return tex_escape(compatible) if compatible.isascii() else f"U+{ord(char):04X}"


def to_latex(table: Table, caption: str, label: str) -> str:
    """Write a table as LaTeX with booktabs, shaped as the paper's tables; verdicts and intervals included.

    Args:
        table: what to write.
        caption: plain text that names protocol, images and hardware.
        label: the LaTeX label.
    """
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table*}[htbp]", "  \\scriptsize", "  \\centering"]
    lines += ["  \\setlength{\\tabcolsep}{3pt}"]
    lines += [f"  \\caption{{{tex_escape(caption)}}}", f"  \\label{{tab:{_tex_label(label)}}}"]
    lines += [f"  \\begin{{tabular}}{{{''.join('r' if column.figures else 'l' for column in table.columns)}}}"]
    lines += ["    \\toprule", *_tex_groups(table)]
    lines += [f"    {' & '.join(tex_escape(column.title) for column in table.columns)} \\\\", "    \\midrule"]
    for line in table.lines:
        lines += ["    \\midrule"] if line.rule else []
        lines.append(f"    {' & '.join(_tex_cells(line))} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table*}", ""]
    return "\n".join(lines)


def _tex_label(label: str) -> str:
    return "".join(char if char.isascii() and (char.isalnum() or char in "-:") else "-" for char in label)


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


def _tex_cells(line: Line) -> list[str]:
    heads, published = map(_tex_entry, line.heads), map(_tex_entry, line.published)
    if line.failed:
        return [*heads, f"\\multicolumn{{{len(line.entries)}}}{{l}}{{failed: {tex_escape(line.failed)}}}", *published]
    return [*heads, *(_tex_entry(entry) for entry in line.entries), *published]


def _tex_entry(entry: Entry) -> str:
    """Set the interval or spread smaller, as the page does."""
    return tex_escape(entry.text) + (f" {{\\tiny {tex_escape(entry.small)}}}" if entry.small else "")


def to_csv(results: Results) -> str:
    """Write every figure of every row, unrounded; an empty field is a figure that was not measured."""
    records = [_record(results, row) for row in results.rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_csv_cell, names))
    writer.writerows([_csv_cell(record.get(name)) for name in names] for record in records)
    return stream.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return a value as a cell; a text that a spreadsheet would compute gets an apostrophe before it."""
    if not isinstance(value, str):
        return "" if value is None else value
    return f"'{value}" if _FORMULA.match(value) and not _NUMBER.fullmatch(value) else value


def _record(results: Results, row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"protocol": results.name, "identity": results.data.get("identity"), "cell": row.cell}
    record |= {"label": row.label, "method": row.method, "role": row.role}
    record |= {f"setting_{key}": setting_text(value) for key, value in row.settings.items()}
    record |= {"images": row.images, "classes": row.classes}
    for name in results.distances:
        record |= _columns(name, row.distance(name)) | _columns(f"{name} difference", row.difference(name))
        record[f"{name} verdict"] = row.verdict(name)
        record[f"{name} difference extrapolated"] = row.extrapolated(name) or None
    for measure in ("psnr", "ssim", "cosine"):
        spread = _columns(
            f"{measure} median", row.pictures(measure), (f"{measure} quartile 1", f"{measure} quartile 3")
        )
        record |= _columns(measure, row.paired(measure)) | spread | {f"{measure} lowest": row.lowest(measure)}
    record["psnr identical"] = row.identical
    figures = [(f"accuracy {name}", row.accuracy(name), name, "accuracy") for name in results.attributes]
    figures += [(name, row.metric(name), name, "metrics") for name in metric_names(results)]
    for title, figure, name, of in figures:
        record |= _columns(title, figure) | _columns(f"{title} difference", row.difference(name, of))
        record[f"{title} verdict"] = row.verdict(name, of)
    for part in ("end_to_end", "unet"):
        record[f"{part} seconds_per_image"] = row.seconds(part)
        record |= _columns(f"{part} speedup", row.speedup(part))
    record |= _columns("gib_per_image", row.slope)
    record |= {key: row.memory(key) for key in ("intercept_gib", "fit_error_gib")}
    record |= {f"{stage} gib_per_image": row.stage_slope(stage) for stage in STAGES}
    record |= {key: number(row.data, "cost", key) for key in ("density", "multiply_adds")}
    record |= {f"memory {key}": dig(row.data, "memory", key) for key in ("kind", "note")}
    record["failed"] = row.failed
    published = published_for(results, row) or {}
    return record | {f"published {key}": published.get(key) for key in FIGURES}


def _columns(name: str, value: Estimate | None, ends: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the columns of a value and of the ends of its interval, which have its name unless they get their own."""
    found = value or Estimate(math.nan)
    names = (name, *(ends or (f"{name} low", f"{name} high")))
    figures = zip(names, (found.value, found.low, found.high), strict=True)
    return {key: None if figure is None or math.isnan(figure) else figure for key, figure in figures}
