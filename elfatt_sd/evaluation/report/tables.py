"""The further metrics of a run, `metrics` of each row, and their table."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from elfatt_sd.evaluation.report.data import (
    BASELINE,
    NULL,
    PARTS,
    STAGES,
    TIME_COLUMNS,
    Estimate,
    Results,
    Row,
    dig,
    number,
    setting_text,
    setting_title,
)
from elfatt_sd.evaluation.report.published import FIGURES, published_for, published_rows, published_source
from elfatt_sd.evaluation.statistics import BETTER, TOO_FEW, WORSE

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


pass  # MOVED

DASH = "—"
EXTRAPOLATED = ", extrapolated"  # of a difference with infinitely many images
REFERENCE = "reference"
THIS_RUN = "This run"
OTHER_IMAGE = 20  # dB: below, little is left of the untouched image; unrelated ones have 10 to 20
_VERDICTS = {BETTER: "better", WORSE: "worse", TOO_FEW: "few"}


@dataclass(frozen=True)
class Entry:
    """One cell of a table."""

    text: str  # the figure
    note: str = ""  # its interval or spread, set smaller
    kind: str = "number"  # `number`, `text`, `reference`, `missing`, or a verdict: `better`, `worse`, `same`, `few`
    remark: str = ""  # what limits it, in words

    @property
    def small(self) -> str:
        """Note and remark in one."""
        return ", ".join(filter(None, (self.note, self.remark)))


@dataclass(frozen=True)
class Column:
    """A column: its title, the group of columns it belongs to, and whether it holds figures."""

    title: str
    group: str = ""
    figures: bool = True


@dataclass(frozen=True)
class Line:
    """A row of a table; `failed` stands in place of all entries that the run should have filled."""

    row: Row  # the results it shows
    heads: list[Entry]  # method and settings
    entries: list[Entry]  # the figures of this run
    published: list[Entry]  # the figures to compare them with
    rule: bool  # whether a rule separates it from the row before it

    @property
    def failed(self) -> str | None:
        """The reason, or None."""
        return self.row.failed


@dataclass(frozen=True)
class Table:
    """Columns and lines; `heads` is the number of leading columns that name the row."""

    columns: list[Column]
    lines: list[Line]
    heads: int

    def groups(self) -> list[tuple[str, int]]:
        """Return the groups of neighbouring columns with their widths."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found


_Maker = Callable[[Row], Entry]


def main_table(results: Results) -> Table:
    """Build the table in the paper's shape: distance and verdict, time, memory, closeness, published figures.

    On the toy the accuracy of all attributes follows the distance.
    """
    makers: list[tuple[str, _Maker]] = []
    if results.distance is not None:
        makers += _distance_columns(results, results.distance)
    if "mean" in results.attributes:
        makers += [("Accuracy ↑", estimate_maker(results, lambda row: row.accuracy("mean")))]
    makers += [(TIME_COLUMNS[results.time_part], _time_maker(results, results.time_part))]
    makers += [("GiB/img", _memory_maker(results))]
    makers += [("PSNR, dB", _paired_maker(results, "psnr", 1))]
    return build_table(results, makers, published=True)


def more_table(results: Results) -> Table:
    """Build the table of everything else: other distances, SSIM, cosine, accuracy, UNet time, memory fit."""
    makers: list[tuple[str, _Maker]] = [("Pictures", lambda row: _count(row.images))]
    for name in results.distances:
        if name != results.distance:
            makers += _distance_columns(results, name)
    makers += _lowest_column(results)
    makers += [("SSIM", _paired_maker(results, "ssim", 2)), ("Feature cosine", _paired_maker(results, "cosine", 2))]
    for name in results.attributes:
        if name == "mean":
            makers += _accuracy_difference(results)
        else:
            title = f"{setting_title(name)} accuracy"
            makers.append((title, estimate_maker(results, lambda row, name=name: row.accuracy(name))))  # type: ignore[misc]
    makers += [(TIME_COLUMNS[part], _time_maker(results, part)) for part in PARTS if part != results.time_part]
    makers += _cost_columns(results)
    for stage in results.stages:
        title = f"{STAGES[stage]}, GiB/img"
        makers.append((title, _plain_maker(results, lambda row, stage=stage: row.stage_slope(stage))))  # type: ignore[misc]
    for key, title in (("intercept_gib", "Memory at batch 0, GiB"), ("fit_error_gib", "Fit error, GiB")):
        makers.append((title, _plain_maker(results, lambda row, key=key: row.memory(key))))  # type: ignore[misc]
    return build_table(results, makers, published=False)


def _cost_columns(results: Results) -> list[tuple[str, _Maker]]:
    """What a row computes, by multiply-adds; none where it was not worked out."""

    def get(key: str, unit: float) -> Callable[[Row], float | None]:
        return lambda row: None if (found := number(row.data, "cost", key)) is None else found / unit

    columns = (("density", "Attention density", 1.0), ("multiply_adds", "Denoiser, 10¹² multiply-adds/img", 1e12))
    known = [each for each in columns if any(number(row.data, "cost", each[0]) is not None for row in results.rows)]
    return [(title, _plain_maker(results, get(key, unit))) for key, title, unit in known]


def study_table(results: Results) -> Table:
    """Build the table of a study: closeness to the untouched images, distance and accuracy, UNet time."""
    makers: list[tuple[str, _Maker]] = [
        ("PSNR, dB", _paired_maker(results, "psnr", 1)),
        *_lowest_column(results),
        ("SSIM", _paired_maker(results, "ssim", 2)),
        ("Feature cosine", _paired_maker(results, "cosine", 2)),
    ]
    if results.distance is not None:
        _, (title, difference), verdict = _distance_columns(results, results.distance)
        makers += [(f"{results.distance} {title[0].lower()}{title[1:]}", difference), verdict]
    if "mean" in results.attributes:
        makers += [("Accuracy ↑", _accuracy_maker(results))]
    part = "unet" if any(row.seconds("unet") is not None for row in results.rows) else results.time_part
    return build_table(results, [*makers, (TIME_COLUMNS[part], _time_maker(results, part))], published=False)


def published_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the whole published table as titles and texts, with the ratio of times to its baseline."""
    rows = published_rows(results)
    keys = dict.fromkeys(key for row in rows for key in row)
    settings = [key for key in keys if key != "label" and key not in FIGURES]
    titles = ["Method", *(setting_title(key) for key in settings), *(title for title, _ in FIGURES.values())]
    lines = [
        [str(row.get("label", "")), *(setting_text(row.get(key)) for key in settings), *_published_texts(row)]
        for row in rows
    ]
    return titles, lines


def _published_texts(row: Mapping[str, Any]) -> list[str]:
    values = ((number(row, key), decimals) for key, (_, decimals) in FIGURES.items())
    return [DASH if value is None else fixed(value, decimals) for value, decimals in values]


def _published_entries(results: Results, row: Mapping[str, Any] | None) -> list[Entry]:
    """Write a published row, with the ratio of the published times to that of the published baseline."""
    if row is None:
        return [Entry(DASH) for _ in FIGURES]
    base = published_for(results, results.baseline) if results.baseline else None
    before, after = number(base, "seconds_per_image"), number(row, "seconds_per_image")
    ratio = f"{fixed(before / after, 2)}{TIMES}" if before and after and row is not base else ""
    notes = (ratio if key == "seconds_per_image" else "" for key in FIGURES)
    return [Entry(*parts) for parts in zip(_published_texts(row), notes, strict=True)]


def build_table(results: Results, makers: Sequence[tuple[str, _Maker]], *, published: bool) -> Table:
    """Build a table of all rows, from the title of each column and what makes its entries."""
    heads = [Column("Method", figures=False), *(Column(setting_title(name)) for name in results.varied)]
    beside = published and bool(published_rows(results))
    source = f"Published ({published_source(results)})"
    columns = [*heads, *(Column(title, THIS_RUN, "erdict" not in title) for title, _ in makers)]
    columns += [Column(title, source) for title, _ in FIGURES.values()] if beside else []
    lines, before = [], None
    for row in results.rows:
        names = [Entry(row.title, row_kind(row), kind="text")]
        names += [Entry(setting_text(row.settings.get(key))) for key in results.varied]
        found = published_for(results, row) if beside else None
        rule = before is not None and before != (row.label, row.role)
        entries = [make(row) for _, make in makers]
        lines.append(Line(row, names, entries, _published_entries(results, found) if beside else [], rule))
        before = (row.label, row.role)
    return Table(columns, lines, len(heads))


def _count(value: int | None) -> Entry:
    return Entry(MISSING, kind="missing") if value is None else Entry(str(value))


def _distance_columns(results: Results, name: str) -> list[tuple[str, _Maker]]:
    power = unit_for(row.distance(name) for row in results.rows)
    values = estimate_maker(results, lambda row: in_unit(row.distance(name), power))
    shown = difference_maker(results, lambda row: in_unit(row.difference(name), power))
    verdict, unit = verdict_maker(lambda row: row.verdict(name)), unit_text(power)
    titles = ("Difference", "Verdict") if name == results.distance else (f"{name} difference", f"{name} verdict")
    limit = EXTRAPOLATED if results.extrapolated(name) else ""

    def difference(row: Row) -> Entry:
        return Entry(DASH, kind="missing") if row.withheld(name) else shown(row)

    return [(f"{name}{unit} ↓", values), (f"{titles[0]}{limit}{unit}", difference), (titles[1], verdict)]


def _accuracy_difference(results: Results) -> list[tuple[str, _Maker]]:
    difference = difference_maker(results, lambda row: row.difference("mean", "accuracy"))
    verdict = verdict_maker(lambda row: row.verdict("mean", "accuracy"))
    return [("Accuracy difference", difference), ("Accuracy verdict", verdict)]


def difference_maker(results: Results, get: Callable[[Row], Estimate | None]) -> _Maker:
    """Make entries of differences to the untouched pipeline, which has none itself."""
    decimals = decimals_for(get(row) for row in results.rows)

    def make(row: Row) -> Entry:
        found = get(row)
        if found is None:
            return no_pair(row)
        return Entry(fixed(found.value, decimals, sign=True), interval(found, decimals, sign=True))

    return make


def verdict_maker(get: Callable[[Row], str | None]) -> _Maker:
    """Make entries of verdicts."""

    def make(row: Row) -> Entry:
        said = get(row)
        return no_pair(row, "text") if said is None else Entry(said, kind=_VERDICTS.get(said, "same"))

    return make


def no_pair(row: Row, kind: str = "reference") -> Entry:
    return Entry(REFERENCE, kind=kind) if row.role == BASELINE else Entry(MISSING, kind="missing")


def estimate_maker(results: Results, get: Callable[[Row], Estimate | None]) -> _Maker:
    """Make entries of values with their intervals."""
    decimals = decimals_for(get(row) for row in results.rows)

    def make(row: Row) -> Entry:
        found = get(row)
        if found is None:
            return Entry(MISSING, kind="missing")
        return Entry(fixed(found.value, decimals), interval(found, decimals))

    return make


def _accuracy_maker(results: Results) -> _Maker:
    """The fraction of right attributes, and the verdict of its paired difference where one is shown."""
    plain = estimate_maker(results, lambda row: row.accuracy("mean"))

    def make(row: Row) -> Entry:
        verdict = row.verdict("mean", "accuracy")
        return replace(plain(row), remark=verdict) if verdict in (BETTER, WORSE) else plain(row)

    return make


def _plain_maker(results: Results, get: Callable[[Row], float | None]) -> _Maker:
    def wrap(row: Row) -> Estimate | None:
        value = get(row)
        return None if value is None else Estimate(value)

    return estimate_maker(results, wrap)


def _paired_maker(results: Results, measure: str, least: int) -> _Maker:
    decimals = max(decimals_for(row.paired(measure) for row in results.rows), least)

    def make(row: Row) -> Entry:
        found = row.paired(measure)
        if row.role == BASELINE and found is None:
            return Entry(REFERENCE, kind="reference")
        equal = f"{row.identical} of {row.images}" if measure == "psnr" and row.identical else ""
        if equal and row.mostly_identical:
            return Entry("identical", f"({equal})")
        if found is None:
            return Entry(MISSING, kind="missing")
        return Entry(fixed(found.value, decimals), interval(found, decimals), remark=equal and f"{equal} identical")

    return make


def _lowest_column(results: Results) -> list[tuple[str, _Maker]]:
    """The PSNR of the image that is changed most, and how many have become others; none where it was not kept."""

    def make(row: Row) -> Entry:
        found = row.lowest("psnr")
        if found is None:
            return Entry("identical") if row.identical else no_pair(row)
        others = sum(value is not None and value < OTHER_IMAGE for value in row.each("psnr"))
        return Entry(fixed(found, 1), f"({others} below {OTHER_IMAGE})" if others else "")

    kept = any(row.lowest("psnr") is not None for row in results.rows)
    return [("Lowest PSNR, dB", make)] if kept else []


def _time_maker(results: Results, part: str) -> _Maker:
    decimals = decimals_for(row.time(part) for row in results.rows)

    def make(row: Row) -> Entry:
        found, ratio = row.seconds(part), row.speedup(part)
        if found is None:
            return Entry(row.reason("time") or MISSING, kind="missing")
        note = ""
        if ratio is not None and row.role != BASELINE:
            spread = f" ({span(ratio, 2)})" if ratio.ends else ""
            note = f"{fixed(ratio.value, 2)}{TIMES}{spread}"
        return Entry(fixed(found, decimals), note)

    return make


def _memory_maker(results: Results) -> _Maker:
    decimals = max(decimals_for((row.slope for row in results.rows), default=2), 2)

    def make(row: Row) -> Entry:
        found = row.slope
        if found is None:
            return Entry(row.reason("memory") or MISSING, kind="missing")
        return Entry(fixed(found.value, decimals), interval(found, decimals), remark=row.reason("memory") or "")

    return make


def row_kind(row: Row) -> str:
    return {BASELINE: "(untouched)", NULL: "(null row)"}.get(row.role, "")


pass  # MOVED

_ARROWS = {"higher": " ↑", "lower": " ↓"}


def metric_names(results: Results) -> list[str]:
    names = dict.fromkeys(name for row in results.rows for name in dig(row.data, "metrics") or {})
    return sorted(map(str, names), key=lambda name: not compares(results, name))


def compares(results: Results, name: str) -> bool:
    return any(dig(row.data, "metrics", name, "compares") for row in results.rows)


def metrics_table(results: Results) -> Table | None:
    """Build the table of all metrics; None where there is none."""
    makers: list[tuple[str, Callable[[Row], Entry]]] = []
    for name in metric_names(results):
        better = next((dig(row.data, "metrics", name, "better") for row in results.rows if row.metric(name)), "")
        makers.append((f"{name}{_ARROWS.get(str(better), '')}", _value_maker(results, name)))
        difference = functools.partial(Row.difference, name=name, of="metrics")
        verdict = functools.partial(Row.verdict, name=name, of="metrics")
        if any(difference(row) for row in results.rows):
            makers.append((f"{name} difference", difference_maker(results, difference)))
        if any(verdict(row) for row in results.rows):
            makers.append((f"{name} verdict", verdict_maker(verdict)))
    return build_table(results, makers, published=False) if makers else None


def _value_maker(results: Results, name: str) -> Callable[[Row], Entry]:
    plain = estimate_maker(results, lambda row: row.metric(name))
    return lambda row: plain(row) if row.metric(name) or not compares(results, name) else no_pair(row)
