"""The table as Markdown, LaTeX (booktabs) and lines of a terminal, and every figure of the run as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from elfatt_sd.evaluation.report.data import BASELINE, NULL, PARTS, STAGES, Estimate, Results, Row, setting_text
from elfatt_sd.evaluation.report.published import FIGURES, published_for
from elfatt_sd.evaluation.report.summary import headline, limits
from elfatt_sd.evaluation.report.tables import (
    DASH,
    MINUS,
    THIS_RUN,
    TIMES,
    TO,
    Entry,
    Line,
    Table,
    decimals_for,
    fixed,
    shown,
)
from elfatt_sd.evaluation.statistics import BETTER, NO_DIFFERENCE, TOO_FEW, WORSE

_VERDICTS = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "none shown", TOO_FEW: "not judged"}
_GAP, _LEAST = 2, 12  # characters between columns, and of a row's name


def terminal_summary(results: Results, width: int = 80) -> str:
    """Write the headline and a table in lines of at most so many characters."""
    lines = [line for text in (headline(results), limits(results)) for line in textwrap.wrap(text, width)]
    return shown("\n".join([*lines, "", *_table(results, width)]))


def _table(results: Results, width: int) -> list[str]:
    distance = results.distance
    titles = ["Row", *(["Distance", "Difference"] if distance else []), "Speed", "GiB/image", "PSNR"]
    decimals = max(decimals_for(row.distance(distance) for row in results.rows), 1) if distance else 0
    texts = [_texts(results, row, decimals) for row in results.rows]
    widths = [max(map(len, column)) for column in zip(titles[1:], *(line for line in texts if line), strict=True)]
    left = max(width - sum(widths) - _GAP * len(widths), _LEAST)
    first = min(left, max((len(row.name) for row in results.rows), default=_LEAST))
    lines = [_line(titles[0], titles[1:], first, widths)]
    for row, line in zip(results.rows, texts, strict=True):
        if row.failed:
            lines.append(textwrap.shorten(f"{row.short(first)}  failed: {row.failed}", width, placeholder="…"))
        else:
            lines.append(_line(row.short(first), line, first, widths))
    return lines


def _texts(results: Results, row: Row, decimals: int) -> list[str]:
    if row.failed:
        return []
    found: list[str] = []
    name = results.distance
    if name:
        value, said = row.distance(name), row.verdict(name)
        verdict = "-" if row.role == BASELINE or said is None else _VERDICTS.get(said, said)
        found += ["-" if value is None else fixed(value.value, decimals), verdict]
    ratio, slope = row.speedup(results.time_part), row.slope
    found += ["-" if ratio is None else f"{fixed(ratio.value, 2)}{TIMES}"]
    found += ["-" if slope is None else fixed(slope.value, 3)]
    closeness = None if row.role in (BASELINE, NULL) else row.psnr
    same = "identical" if row.mostly_identical else "-"
    return [*found, same if closeness is None else fixed(closeness.value, 1)]


def _line(name: str, texts: Sequence[str], first: int, widths: Sequence[int]) -> str:
    figures = (text.rjust(size) for text, size in zip(texts, widths, strict=True))
    return (" " * _GAP).join([name.ljust(first), *figures]).rstrip()


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
    """Escape a text for Markdown."""
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
        lines.append(f"    {' & '.join(_tex_cells(line))} \\\\")
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
    figures += [(name, row.metric(name), name, "metrics") for name in results.metrics]
    for title, figure, name, of in figures:
        record |= _columns(title, figure) | _columns(f"{title} difference", row.difference(name, of))
        record[f"{title} verdict"] = row.verdict(name, of)
    for part in PARTS:
        record[f"{part} seconds_per_image"] = row.seconds(part)
        record |= _columns(f"{part} speedup", row.speedup(part))
    record |= _columns("gib_per_image", row.slope)
    record |= {"intercept_gib": row.memory.intercept_gib, "fit_error_gib": row.memory.fit_error_gib}
    record |= {f"{stage} gib_per_image": row.stage_slope(stage) for stage in STAGES}
    multiply_adds = row.cost.multiply_adds
    record |= {"density": row.cost.density, "multiply_adds": multiply_adds and float(multiply_adds)}
    record |= {"memory kind": row.memory.kind, "memory note": row.memory.note, "failed": row.failed}
    published = published_for(results, row) or {}
    return record | {f"published {key}": published.get(key) for key in FIGURES}


def _columns(name: str, value: Estimate | None, ends: tuple[str, ...] = ()) -> dict[str, Any]:
    figures = (value.value, value.low, value.high) if value else (None, None, None)
    return dict(zip((name, *(ends or (f"{name} low", f"{name} high"))), figures, strict=True))
