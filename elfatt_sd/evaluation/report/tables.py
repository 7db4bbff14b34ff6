"""The tables of a report: what each column shows of a row, as page, Markdown and LaTeX write it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
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
    estimate,
    setting_text,
    setting_title,
)
from elfatt_sd.evaluation.report.published import FIGURES, published_for, published_rows, published_source
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
        columns.append(("Accuracy ↑", _estimates(results, lambda row: row.accuracy("mean"))))
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
            columns.append(
                ("Accuracy difference", _differences(results, lambda row: row.difference("mean", "accuracy")))
            )
            columns.append(("Accuracy verdict", _verdicts("mean", "accuracy")))
        else:
            columns.append(
                (f"{setting_title(name)} accuracy", _estimates(results, functools.partial(Row.accuracy, name=name)))
            )
    columns += [(TIME_COLUMNS[part], _times(results, part)) for part in PARTS if part != results.time_part]
    plain: list[tuple[str, Callable[[Row], float | None]]] = []
    if any(row.cost.density is not None for row in results.rows):
        plain.append(("Attention density", lambda row: row.cost.density))
    if any(row.cost.multiply_adds is not None for row in results.rows):
        plain.append(
            ("Denoiser, 10¹² multiply-adds/img", lambda row: row.cost.multiply_adds and row.cost.multiply_adds / 1e12)
        )
    plain += [
        (f"{STAGES[stage]}, GiB/img", functools.partial(Row.stage_slope, stage=stage)) for stage in results.stages
    ]
    plain.append(("Memory at batch 0, GiB", lambda row: row.memory.intercept_gib))
    plain.append(("Fit error, GiB", lambda row: row.memory.fit_error_gib))
    columns += [(title, _estimates(results, _whole(get))) for title, get in plain]
    return _table(results, columns)


def _whole(get: Callable[[Row], float | None]) -> Callable[[Row], Estimate | None]:
    return lambda row: estimate(get(row), None)


def study_table(results: Results) -> Table:
    """Build the table of a study: closeness to the untouched images, distance and accuracy, UNet time."""
    columns: _Columns = [("PSNR, dB", _paired(results, "psnr", 1)), *_lowest_column(results)]
    columns += [("SSIM", _paired(results, "ssim", 2)), ("Feature cosine", _paired(results, "cosine", 2))]
    if results.distance is not None:
        _, (title, difference), verdict = _distance_columns(results, results.distance)
        columns += [(f"{results.distance} {title[0].lower()}{title[1:]}", difference), verdict]
    if "mean" in results.attributes:
        columns.append(("Accuracy ↑", _judged_accuracy(results)))
    part = "unet" if any(row.seconds("unet") is not None for row in results.rows) else results.time_part
    return _table(results, [*columns, (TIME_COLUMNS[part], _times(results, part))])


def metrics_table(results: Results) -> Table | None:
    """Build the table of all further metrics; None where there is none."""
    columns: _Columns = []
    for name in results.metrics:
        better = next(row.metrics[name].better for row in results.rows if name in row.metrics)
        values = _estimates(results, functools.partial(Row.metric, name=name))
        made = _where_compared(values, name) if results.compares(name) else values
        columns.append((f"{name}{_ARROWS.get(better, '')}", made))
        if any(row.difference(name, "metrics") for row in results.rows):
            differences = _differences(results, functools.partial(Row.difference, name=name, of="metrics"))
            columns.append((f"{name} difference", differences))
        if any(row.verdict(name, "metrics") for row in results.rows):
            columns.append((f"{name} verdict", _verdicts(name, "metrics")))
    return _table(results, columns) if columns else None


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
    power = unit_for(row.distance(name) for row in results.rows)
    values = _estimates(results, lambda row: in_unit(row.distance(name), power))
    shown = _differences(results, lambda row: in_unit(row.difference(name), power))
    unit = f" ({TIMES}10{str(power).translate(_RAISED)})" if power else ""
    titles = ("Difference", "Verdict") if name == results.distance else (f"{name} difference", f"{name} verdict")
    limit = ", extrapolated" if results.extrapolated(name) else ""  # to infinitely many images

    def difference(row: Row) -> Entry:
        return Entry(DASH, kind="missing") if row.withheld(name) else shown(row)

    return [
        (f"{name}{unit} ↓", values),
        (f"{titles[0]}{limit}{unit}", difference),
        (titles[1], _verdicts(name, "distances")),
    ]


def _missing(reason: str | None = None) -> Entry:
    return Entry(reason or MISSING, kind="missing")


def _no_pair(row: Row, kind: str = "reference") -> Entry:
    """Say why a row has no comparison: the untouched pipeline is what others are compared with."""
    return Entry(REFERENCE, kind=kind) if row.role == BASELINE else _missing()


def _estimates(results: Results, get: Callable[[Row], Estimate | None]) -> _Maker:
    """Make entries of values with their intervals."""
    decimals = decimals_for(map(get, results.rows))

    def make(row: Row) -> Entry:
        found = get(row)
        return _missing() if found is None else Entry(fixed(found.value, decimals), interval(found, decimals))

    return make


def _differences(results: Results, get: Callable[[Row], Estimate | None]) -> _Maker:
    """Make entries of differences to the untouched pipeline, which has none itself."""
    decimals = decimals_for(map(get, results.rows))

    def make(row: Row) -> Entry:
        if (found := get(row)) is None:
            return _no_pair(row)
        return Entry(fixed(found.value, decimals, sign=True), interval(found, decimals, sign=True))

    return make


def _verdicts(name: str, of: str) -> _Maker:
    def make(row: Row) -> Entry:
        said = row.verdict(name, of)
        return _no_pair(row, "text") if said is None else Entry(said, kind=_VERDICTS.get(said, "same"))

    return make


def _where_compared(values: _Maker, name: str) -> _Maker:
    return lambda row: values(row) if row.metric(name) else _no_pair(row)


def _judged_accuracy(results: Results) -> _Maker:
    """The fraction of right attributes, and the verdict of its paired difference where one is shown."""
    plain = _estimates(results, lambda row: row.accuracy("mean"))

    def make(row: Row) -> Entry:
        verdict = row.verdict("mean", "accuracy")
        return replace(plain(row), remark=verdict) if verdict in (BETTER, WORSE) else plain(row)

    return make


def _paired(results: Results, measure: str, least: int) -> _Maker:
    decimals = max(decimals_for(row.paired(measure) for row in results.rows), least)

    def make(row: Row) -> Entry:
        found = row.paired(measure)
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
        found = row.lowest("psnr")
        if found is None:
            return Entry("identical") if row.identical else _no_pair(row)
        others = sum(value is not None and value < OTHER_IMAGE for value in row.each("psnr"))
        return Entry(fixed(found, 1), f"({others} below {OTHER_IMAGE})" if others else "")

    return [("Lowest PSNR, dB", make)] if any(row.lowest("psnr") is not None for row in results.rows) else []


def _times(results: Results, part: str) -> _Maker:
    decimals = decimals_for(row.time(part) for row in results.rows)

    def make(row: Row) -> Entry:
        found, ratio = row.seconds(part), row.speedup(part)
        if found is None:
            return _missing(row.timed.failed or row.timed.note)
        if ratio is None or row.role == BASELINE:
            return Entry(fixed(found, decimals))
        spread = f" ({span(ratio, 2)})" if ratio.ends else ""
        return Entry(fixed(found, decimals), f"{fixed(ratio.value, 2)}{TIMES}{spread}")

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
