"""Numbers as a reader wants them: as many decimals as the uncertainty allows, true minus signs, units elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from statistics import median

from elfatt_sd.evaluation.report.values import Estimate

MISSING = "not measured"
_REORDERING = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # signs by which a text shows other words than it holds
_CONTROL = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f{_REORDERING}\ud800-\udfff\ufffe\uffff]")
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MINUS, TIMES, TO = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"


def decimals_for(values: Iterable[Estimate | None], default: int = 3) -> int:
    """Return the decimals that show two digits of the typical half interval of a column, 6 at most."""
    found = [value for value in values if value is not None and math.isfinite(value.value)]
    halves = [(value.ends[1] - value.ends[0]) / 2 for value in found if value.ends and value.ends[1] > value.ends[0]]
    if halves:
        size, digits = median(halves), 2
    else:
        size, digits = max((abs(value.value) for value in found), default=1.0), default
    if not math.isfinite(size) or size <= 0:
        return 2
    return min(max(digits - 1 - math.floor(math.log10(size)), 0), 6)


def unit_for(values: Iterable[Estimate | None]) -> int:
    """Return the power of ten, a multiple of 3, in which a column is easy to read: 0 from 0.01 to 10 000."""
    sizes = [max(abs(value.value), *map(abs, value.ends or ())) for value in values if value is not None and value.ends]
    size = median(sizes) if sizes else 1.0
    if not math.isfinite(size) or size <= 0 or 0.01 <= size < 10_000:
        return 0
    return math.floor(math.log10(size) / 3) * 3


def in_unit(value: Estimate | None, power: int) -> Estimate | None:
    """Write a value in units of a power of ten."""
    if value is None or not power:
        return value
    ends = (None, None) if value.ends is None else (value.ends[0] / 10.0**power, value.ends[1] / 10.0**power)
    return Estimate(value.value / 10.0**power, *ends)


def unit_text(power: int) -> str:
    """Write a power of ten behind a column's name; nothing for 0."""
    return f" ({TIMES}10{str(power).translate(_RAISED)})" if power else ""


def fixed(value: float, decimals: int, *, sign: bool = False) -> str:
    """Write a number with a true minus sign; infinity as its symbol.

    With `sign`, what rounds to zero keeps the sign that it has, so that an interval never seems to hold a zero that it
    excludes; without, there is no negative zero.
    """
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    prefix = ("+" if value > 0 else MINUS if value < 0 else "") if sign else ""
    text = f"{abs(value) if sign else round(value, decimals) + 0.0:.{decimals}f}"
    return prefix + text.replace("-", MINUS)


def interval(value: Estimate, decimals: int, *, sign: bool = False) -> str:
    """Write the interval: `[-0.41, +0.12]`; empty where there is none."""
    if value.ends is None:
        return ""
    low, high = (fixed(end, decimals, sign=sign) for end in value.ends)
    return f"[{low}, {high}]"


def span(value: Estimate, decimals: int) -> str:
    """Write the spread: 1.40 to 1.45, joined by a dash; empty where there is none."""
    return "" if value.ends is None else TO.join(fixed(end, decimals) for end in value.ends)


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
