"""The result of a run for the terminal: headline and a short table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from elfatt_sd.evaluation.intervals import BETTER, NO_DIFFERENCE, TOO_FEW, WORSE
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.rows import BASELINE, NULL, Row
from elfatt_sd.evaluation.report.summary import headline, limits
from elfatt_sd.evaluation.report.text import TIMES, decimals_for, fixed, shown

_VERDICTS = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "none shown", TOO_FEW: "not judged"}
_GAP, _LEAST = 2, 12  # characters between columns, and of a row's name


def terminal_summary(results: Results, width: int = 80) -> str:
    """Write the headline and a table in lines of at most so many characters."""
    paragraphs = [headline(results), *([words] if (words := limits(results)) else [])]
    lines = [line for text in paragraphs for line in textwrap.wrap(text, width)]
    return shown("\n".join([*lines, "", *_table(results, width)]))


def _table(results: Results, width: int) -> list[str]:
    distance = results.distance
    titles = ["Row", *(["Distance", "Difference"] if distance else []), "Speed", "GiB/image", "PSNR"]
    decimals = max(decimals_for(row.distance(distance) for row in results.rows), 1) if distance else 0
    texts = [_texts(results, row, decimals) for row in results.rows]
    widths = [max(map(len, column)) for column in zip(titles[1:], *(line for line in texts if line), strict=True)]
    room = max(width - sum(widths) - _GAP * len(widths), _LEAST)
    room = min(room, max(len(row.name) for row in results.rows) if results.rows else _LEAST)
    lines = [_line(titles[0], titles[1:], room, widths)]
    for row, line in zip(results.rows, texts, strict=True):
        if row.failed:
            lines.append(textwrap.shorten(f"{row.short(room)}  failed: {row.failed}", width, placeholder="…"))
        else:
            lines.append(_line(row.short(room), line, room, widths))
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


def _line(name: str, texts: Sequence[str], room: int, widths: Sequence[int]) -> str:
    figures = (text.rjust(size) for text, size in zip(texts, widths, strict=True))
    return (" " * _GAP).join([name.ljust(room), *figures]).rstrip()
