"""What a report says of a run: its tables, as Markdown; every figure, as CSV; a headline and at most four findings.

A sentence claims a gain only where the figures carry it: a verdict for quality, spread and null row for time.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.evaluation.records import Estimate, estimate
from elfatt_sd.evaluation.report.data import ACCURACY, BASELINE, NULL, PARTS, Results, Row, setting_text, setting_title
from elfatt_sd.evaluation.statistics import BETTER, FEWEST_CLASSES, NO_DIFFERENCE, TOO_FEW, WORSE

MISSING, DASH, REFERENCE = "not measured", "—", "reference"
MINUS, TIMES, TO = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
OTHER_IMAGE = 20  # dB: below, little is left of the untouched image; unrelated ones have 10 to 20
TIME_COLUMNS = {"end_to_end": "s/img", "unet": "UNet, s/img"}
_PRINTED = {"FID": ("FID ↓", 1), "seconds_per_image": ("s/img", 3), "gb_per_image": ("GB/img", 2)}
_VERDICTS = {BETTER: "better", WORSE: "worse", TOO_FEW: "few"}
_ARROWS = {"higher": " ↑", "lower": " ↓"}
_MANY = 10  # comparisons from which on chance verdicts are worth a word
_ERROR_RATE = 0.05  # of a 95 % interval
_QUALITY = {BETTER: "better in", NO_DIFFERENCE: "not shown to be worse in", WORSE: "worse in"}
_COUNTED = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "without a difference shown"}
_NOT_WORSE = (BETTER, NO_DIFFERENCE)


@dataclass(frozen=True)
class Field:
    text: str  # the figure
    note: str = ""  # its interval or spread, set smaller
    kind: str = "number"  # or `text`, `setting`, `reference`, `missing`, a verdict: `better`, `worse`, `same`, `few`
    remark: str = ""  # what limits it, in words

    @property
    def small(self) -> str:
        return ", ".join(filter(None, (self.note, self.remark)))


@dataclass(frozen=True)
class Line:
    row: Row
    entries: list[Field]
    rule: bool = False  # whether a rule separates it from the row before it


@dataclass(frozen=True)
class Table:
    titles: list[str]
    figures: list[bool]  # whether a column holds figures
    lines: list[Line]


Column = tuple[str, list[Field]]  # a title, and what stands there of each row


def main_table(results: Results) -> Table:
    """Build the table in the paper's shape: distance and verdict, time, memory, closeness.

    On the toy the accuracy of all attributes follows the distance.
    """
    columns = figure_columns(results, results.distance, " ↓") if results.distance else []
    columns += figure_columns(results, ACCURACY, " ↑")[:1] if ACCURACY in results.attributes else []
    limits = [row.memory.failed or row.memory.note for row in results.rows]
    memory = estimates(results, [row.slope for row in results.rows], least=2, reasons=limits)
    for place, (row, limit) in enumerate(zip(results.rows, limits, strict=True)):
        if row.slope and limit:
            memory[place] = replace(memory[place], remark=limit)
    columns += [time_column(results, results.time_part), ("GiB/img", memory), closeness_columns(results)[0]]
    return make_table(results, columns)


def more_table(results: Results) -> Table:
    """Build the table of everything else: other distances, SSIM, cosine, accuracy, UNet time, memory fit."""
    rows = results.rows
    columns = [("Pictures", [_missing(row) if row.images is None else Field(str(row.images)) for row in rows])]
    for name in results.distances:
        columns += figure_columns(results, name, " ↓") if name != results.distance else []
    columns += closeness_columns(results)[1:]
    for name in results.attributes:  # of all attributes the accuracy itself is in the main table
        columns += figure_columns(results, name)[1:] if name == ACCURACY else figure_columns(results, name)[:1]
    columns += [time_column(results, part) for part in PARTS if part != results.time_part]
    plain: dict[str, list[float | None]] = {
        "Attention density": [row.cost.density for row in rows],
        "Denoiser, 10¹² multiply-adds/img": [(adds := row.cost.multiply_adds) and adds / 1e12 for row in rows],
        "Memory at batch 0, GiB": [row.memory.intercept_gib for row in rows],
        "Fit error, GiB": [row.memory.fit_error_gib for row in rows],
    }
    known = {title: [*map(estimate, values)] for title, values in plain.items()}
    columns += [(title, estimates(results, values)) for title, values in known.items() if any(values)]
    return make_table(results, columns)


def metrics_table(results: Results) -> Table | None:
    columns = list[Column]()
    for name in results.metrics:
        better = next((row.figure(name).better for row in results.rows if row.figure(name).better), "")
        columns += figure_columns(results, name, _ARROWS.get(better, ""))
    return make_table(results, columns) if columns else None


def make_table(results: Results, columns: Sequence[Column]) -> Table:
    titles = ["Method", *map(setting_title, results.varied), *(title for title, _ in columns)]
    lines: list[Line] = []
    for place, row in enumerate(results.rows):
        note = {BASELINE: "(untouched)", NULL: "(null row)"}.get(row.role, "")
        entries = [Field(row.title, f"failed: {row.failed}" if row.failed else note, "text")]
        entries += [Field(setting_text(row.settings.get(key)), kind="setting") for key in results.varied]
        entries += [Field(DASH, kind="missing") if row.failed else fields[place] for _, fields in columns]
        rule = bool(lines) and (lines[-1].row.label, lines[-1].row.role) != (row.label, row.role)
        lines.append(Line(row, entries, rule))
    return Table(titles, [title != "Method" and "erdict" not in title for title in titles], lines)


def told_apart(table: Table) -> tuple[Table, str]:
    """Leave out the columns that are the same in all rows, and say what stands there."""
    kept, same, missing = [0], list[str](), list[str]()
    for place, title in list(enumerate(table.titles))[1:]:
        entries = [line.entries[place] for line in table.lines]
        texts = [f"{each.text} {each.small}".strip() for each in entries if each.text not in (REFERENCE, DASH)]
        some = " (where a row has one)" * any(each.kind == "setting" and each.text == DASH for each in entries)
        if len(set(texts)) > 1 or len(texts) == 1:
            kept.append(place)
        elif texts[:1] == [MISSING]:
            missing.append(title)
        elif texts:
            same.append(f"{title.rstrip(' ↑↓')}: {texts[0]}{some}")
    said = [f"The same in all rows: {'; '.join(same)}."] * bool(same)
    said += [f"Not measured: {', '.join(missing)}."] * bool(missing)
    lines = [replace(line, entries=[line.entries[place] for place in kept]) for line in table.lines]
    left = Table([table.titles[place] for place in kept], [table.figures[place] for place in kept], lines)
    return left, " ".join(said)


def published_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the published table, which stands in the protocol, as titles and texts."""
    names = dict.fromkeys(key for row in results.published.rows for key in row)
    settings = [key for key in names if key not in ("label", *_PRINTED)]
    titles = ["Method", *map(setting_title, settings), *(title for title, _ in _PRINTED.values())]
    lines = []
    for row in results.published.rows:
        values = ((row.get(key), decimals) for key, (_, decimals) in _PRINTED.items())
        figures = [fixed(value, decimals) if isinstance(value, int | float) else DASH for value, decimals in values]
        lines.append([str(row.get("label", "")), *(setting_text(row.get(key)) for key in settings), *figures])
    return titles, lines


# Columns.


def estimates(
    results: Results,
    values: Sequence[Estimate | None],
    *,
    sign: bool = False,
    least: int = 0,
    paired: bool = False,
    reasons: Sequence[str | None] = (),
) -> list[Field]:
    """Write the value of each row with its interval; the untouched pipeline has none that is `paired`."""
    decimals = max(decimals_for(values), least)
    return [
        Field(fixed(value.value, decimals, sign=sign), interval(value, decimals, sign=sign))
        if value
        else _missing(row, reason, paired=paired)
        for row, value, reason in zip(results.rows, values, reasons or [None] * len(values), strict=True)
    ]


def _missing(row: Row, reason: str | None = None, *, paired: bool = False) -> Field:
    """Say why a row has no figure: the untouched pipeline is what others are compared with."""
    if paired and row.role == BASELINE:
        return Field(REFERENCE, kind="reference")
    return Field(reason or MISSING, kind="missing")


def figure_columns(results: Results, name: str, arrow: str = "") -> list[Column]:
    """The columns of a distance, an accuracy or a metric: value, and where there are any, differences and verdicts."""
    figures = [row.figure(name) for row in results.rows]
    moved, verdicts = ([getattr(each.difference, key) for each in figures] for key in ("estimate", "verdict"))
    title = "Accuracy" if name == ACCURACY else name
    if name in results.attributes and name != ACCURACY:
        title = f"{setting_title(name.removeprefix('accuracy '))} accuracy"
    names = ("Difference", "Verdict") if name == results.distance else (f"{title} difference", f"{title} verdict")
    compares = any(figure.compares for figure in figures)  # with the untouched images
    columns = [(f"{title}{arrow}", estimates(results, [each.estimate for each in figures], paired=compares))]
    if any(moved) or any(verdicts):
        limit = ", extrapolated" if results.extrapolated(name) else ""  # to infinitely many images
        reasons = [DASH if said == TOO_FEW else None for said in verdicts]  # it is not shown
        columns.append((f"{names[0]}{limit}", estimates(results, moved, sign=True, paired=True, reasons=reasons)))
    if any(verdicts):
        none = [replace(_missing(row, paired=True), kind="text") for row in results.rows]
        judged = [said and Field(said, kind=_VERDICTS.get(said, "same")) for said in verdicts]
        columns.append((names[1], [found or other for found, other in zip(judged, none, strict=True)]))
    return columns


def closeness_columns(results: Results) -> list[Column]:
    """The columns of PSNR, of the PSNR of the image that is changed most, of SSIM and cosine."""
    psnr, ssim, cosine = (
        estimates(results, [row.changes[name].estimate for row in results.rows], least=least, paired=True)
        for name, least in {"psnr": 1, "ssim": 2, "cosine": 2}.items()
    )
    lowest = list[Field]()  # and how many images have become others
    for place, row in enumerate(results.rows):
        changes, equal = row.paired.psnr, f"{row.identical} of {row.images}" if row.identical else ""
        others = sum(value is not None and value < OTHER_IMAGE for value in changes.pictures)
        if changes.lowest is None:
            lowest.append(Field("identical") if row.identical else _missing(row, paired=True))
        else:
            lowest.append(Field(fixed(changes.lowest, 1), f"({others} below {OTHER_IMAGE})" if others else ""))
        if row.mostly_identical:
            psnr[place] = Field("identical", f"({equal})")
        elif equal:
            psnr[place] = replace(psnr[place], remark=f"{equal} identical")
    return [("PSNR, dB", psnr), ("Lowest PSNR, dB", lowest), ("SSIM", ssim), ("Feature cosine", cosine)]


def time_column(results: Results, part: str) -> Column:
    seconds = [estimate(row.timed[part].seconds_per_image) for row in results.rows]
    fields = estimates(results, seconds, reasons=[row.time.failed for row in results.rows])
    for place, row in enumerate(results.rows):
        ratio = row.timed[part].speed
        if ratio and seconds[place] and row.role != BASELINE:
            fields[place] = replace(fields[place], note=f"{fixed(ratio.value, 2)}{TIMES} ({span(ratio, 2)})")
    return TIME_COLUMNS[part], fields


# Numbers and words as in print.


def decimals_for(values: Iterable[Estimate | None]) -> int:
    """Return the decimals that show two digits of the typical half interval of a column, one below 1e-6.

    Without intervals, three digits of the largest value.
    """
    found = [value for value in values if value is not None]
    halves = [(value.ends[1] - value.ends[0]) / 2 for value in found if value.ends and value.ends[1] > value.ends[0]]
    size = median(halves) if halves else max((abs(value.value) for value in found), default=1.0)
    wanted = 2 if size <= 0 else max((1 if halves else 2) - math.floor(math.log10(size)), 0)
    return wanted if wanted <= 6 else min(wanted - 1, 9)


def fixed(value: float, decimals: int, *, sign: bool = False) -> str:
    """Write a number with a true minus sign.

    With `sign`, what rounds to zero keeps the sign that it has, so that an interval never seems to hold a zero that it
    excludes; without, there is no negative zero.
    """
    prefix = ("+" if value > 0 else MINUS if value < 0 else "") if sign else ""
    return prefix + f"{abs(value) if sign else round(value, decimals) + 0.0:.{decimals}f}".replace("-", MINUS)


def interval(value: Estimate, decimals: int, *, sign: bool = False) -> str:
    """Write the interval: `[-0.41, +0.12]`; empty where there is none."""
    ends = ", ".join(fixed(end, decimals, sign=sign) for end in value.ends or ())
    return ends and f"[{ends}]"


def span(value: Estimate, decimals: int) -> str:
    """Write the spread: 1.40 to 1.45, joined by a dash; empty where there is none."""
    return TO.join(fixed(end, decimals) for end in value.ends or ())


def join_names(names: Iterable[str]) -> str:
    """Write a list as in a sentence: `a, b and c`."""
    *first, last = list(names) or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: `1 image`, `128 images`, `5 classes`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}".replace(",", " ")


# Files.


def written_tables(results: Results) -> dict[str, str]:
    """Return the table in its two written forms, by the names of their files."""
    metrics, published, made = metrics_table(results), results.published, results.environment
    bullets = "".join(f"- {md_escape(sentence)}\n" for sentence in findings(results))
    parts = [f"# {md_escape(results.name)}", md_escape(headline(results)), bullets]
    parts += [to_markdown(main_table(results)), md_escape(comparison(results))]
    if published.rows:
        titles, lines = published_table(results)
        table = md_table(titles, lines, [title != "Method" for title in titles])
        parts += [f"## Published figures ({md_escape(str(published.source))})", table]
    parts += ["## Further metrics", to_markdown(metrics)] if metrics else []
    said = f"elfatt-sd {made.get('elfatt_sd', MISSING)}, commit {made.get('commit', MISSING)}."
    parts += ["## More measures", to_markdown(more_table(results)), said]
    return {"table.csv": to_csv(results), "table.md": "\n\n".join(part.strip() for part in parts) + "\n"}


def to_markdown(table: Table) -> str:
    texts = [[f"{entry.text} {entry.small}".strip() for entry in line.entries] for line in table.lines]
    return md_table(table.titles, texts, table.figures)


def md_table(titles: Sequence[str], lines: Sequence[Sequence[str]], figures: Sequence[bool]) -> str:
    rule = ["---:" if each else ":---" for each in figures]
    rows = [[*map(md_escape, titles)], rule, *([*map(md_escape, line)] for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def md_escape(text: str) -> str:
    escaped = {"<": "&lt;", ">": "&gt;"}
    text = "".join(escaped.get(char, f"\\{char}" if char in "\\`*_[]|" else char) for char in text)
    return " ".join(text.split())


def to_csv(results: Results) -> str:
    """Write every figure of every row, unrounded; an empty field is a figure that was not measured."""
    records: list[dict[str, Any]] = []
    for row in results.rows:
        record: dict[str, Any] = {"protocol": results.name, "identity": results.identity}
        record |= {key: getattr(row, key) for key in ("cell", "label", "method", "role")}
        record |= {f"setting_{key}": setting_text(value) for key, value in row.settings.items()}
        record |= {"images": row.images, "classes": row.classes}
        for name in results.distances:
            extrapolated = row.figure(name).difference.images == "infinite" or None
            record |= _figure_fields(name, row) | {f"{name} difference extrapolated": extrapolated}
        for measure, changes in row.changes.items():
            spread = estimate(changes.median, changes.quartiles)
            ends = f"{measure} quartile 1", f"{measure} quartile 3"
            record |= _fields(measure, changes.estimate) | _fields(f"{measure} median", spread, ends)
            record[f"{measure} lowest"] = changes.lowest
        record["psnr identical"] = row.identical
        for name in (*results.attributes, *results.metrics):
            record |= _figure_fields(name, row)
        for part, seconds in row.timed.items():
            record[f"{part} seconds_per_image"] = seconds.seconds_per_image
            record |= _fields(f"{part} speedup", seconds.speed)
        memory, adds = row.memory, row.cost.multiply_adds
        record |= _fields("gib_per_image", row.slope)
        record |= {"intercept_gib": memory.intercept_gib, "fit_error_gib": memory.fit_error_gib}
        record |= {"density": row.cost.density, "multiply_adds": adds and float(adds)}
        records.append(record | {"memory kind": memory.kind, "memory note": memory.note, "failed": row.failed})
    stream = io.StringIO(newline="")
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(stream, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def _figure_fields(name: str, row: Row) -> dict[str, Any]:
    figure = row.figure(name)
    difference = _fields(f"{name} difference", figure.difference.estimate)
    return _fields(name, figure.estimate) | difference | {f"{name} verdict": figure.difference.verdict}


def _fields(name: str, value: Estimate | None, ends: tuple[str, ...] = ()) -> dict[str, Any]:
    figures = (value.value, *(value.ends or (None, None))) if value else (None, None, None)
    return dict(zip((name, *(ends or (f"{name} low", f"{name} high"))), figures, strict=True))


# Sentences.


def headline(results: Results) -> str:
    """Say what a user wants to know: the fastest method that is not shown to be worse, and how close it stays."""
    best = recommended(results)
    if best is None or best.speed is None:
        return "No method was timed."
    times, spread = fixed(best.speed.value, 2), span(best.speed, 2)
    alone = "UNet alone, " if results.time_part == "unet" else ""
    figures = f"{best.name}: {times} times as fast as the untouched pipeline ({alone}{spread})"
    verdicts = best.verdicts
    for verdict, words in _QUALITY.items():
        names = [name.removesuffix(" mean") for name, found in verdicts.items() if found == verdict]
        figures += f", {words} {join_names(names)}" if names else ""
    if best.mostly_identical:
        figures += ", most images identical"
    elif best.psnr is not None:
        figures += f", PSNR {fixed(best.psnr.value, 1)} dB"
    faster = _is_faster(results, best)
    if faster and WORSE not in verdicts.values():
        if best.verdict in _NOT_WORSE:
            return f"{figures}."
        few = TOO_FEW in {row.verdict for row in results.methods}
        return f"{figures}. Its quality is not judged: {'the classes are too few' if few else 'nothing is paired'}."
    if faster:
        return f"No setting is shown to be faster without being worse. {figures}."
    rounds = len(best.timed[results.time_part].values)
    needed = f" by {plural(rounds, 'round')} of timing ({FEW_REPEATS} are needed)" if rounds < FEW_REPEATS else ""
    return f"No setting is shown to be faster{needed}. {figures}."


def findings(results: Results) -> list[str]:
    """Speak of verdicts, chance, speed, and what limits the run: few images, unreadable ones, failed rows."""
    unreadable = [*dict.fromkeys(name for part in results.reference.values() for name in part.unreadable)]
    failed = [row.name for row in results.rows if row.failed]
    limits = {row.images for row in results.rows} & {results.protocol.get("limit")}
    gaps = [f"A quick look: every row was limited to {plural(limit, 'image')}." for limit in filter(None, limits)]
    if unreadable:
        gaps.append(f"{plural(len(unreadable), 'reference image')} could not be read: {join_names(unreadable[:3])}.")
    gaps += [f"Failed: {join_names(failed)}."] if failed else []
    return [part for part in [_verdicts(results), _null(results), _speed(results), " ".join(gaps)] if part]


def comparison(results: Results) -> str:
    if not results.published.rows:
        return "No published table belongs to this protocol; a number means nothing without its protocol's name."
    return (
        "Compare the direction of differences to the untouched pipeline and ratios of times, not values: they move "
        "with the protocol, weights, resizing and random numbers, and published ones come without intervals."
    )


def recommended(results: Results) -> Row | None:
    """Return the fastest method that is shown to be faster and judged not to be worse, or what comes next to that."""
    timed = _fastest(results)
    faster = [row for row in timed if _is_faster(results, row)]
    good = [row for row in faster if WORSE not in row.verdicts.values()]
    judged = [row for row in good if row.verdict in _NOT_WORSE]
    return next(iter(judged or good or faster or timed), next((row for row in results.methods if not row.failed), None))


def _fastest(results: Results) -> list[Row]:
    """Return the methods that were timed, the fastest first."""
    speeds = {row: row.speed.value for row in results.methods if row.speed and not row.failed}
    return sorted(speeds, key=lambda row: -speeds[row])


def _is_faster(results: Results, row: Row) -> bool:
    """Tell whether all rounds were faster, and faster than the null row's, and there were enough of them."""
    own, again = ((each and each.speed and each.speed.ends) or (0.0, 0.0) for each in (row, results.null))
    return len(row.timed[results.time_part].values) >= FEW_REPEATS and own[0] > max(1.0, again[1])


def _times(ratio: Estimate) -> str:
    return f"{fixed(ratio.value, 2)} times ({span(ratio, 2)})"


def _verdicts(results: Results) -> str:
    """Count the verdicts of the first figure that has any, or say that the classes are too few for any."""
    said = [row.verdict for row in results.methods]
    if TOO_FEW in said:
        rest = " but that of accuracy" if results.attributes else ""
        why = f"an interval over fewer than {FEWEST_CLASSES} classes of one size may be far too short"
        return f"No verdicts, and no intervals{rest}: {why}."
    counts = [f"{said.count(known)} {title}" for known, title in _COUNTED.items() if known in said]
    if not counts:
        return ""
    count, chance = sum(map(said.count, _COUNTED)), ""
    if count >= _MANY:
        chance = f"; of {count} that do not differ, about {max(round(count * _ERROR_RATE), 1)} would get a verdict"
    judge = results.judges[0]
    return f"By {judge}, of {plural(count, 'setting')}: {join_names(counts)} (paired 95 % intervals{chance})."


def _null(results: Results) -> str:
    row, judges = results.null, results.judges
    if row is None:
        return "There is no null row: how far chance alone moves the figures is not known."
    found = row.figure(judges[0]).difference.estimate if judges else None
    if found is None:
        return ""
    decimals = decimals_for([found])
    figure = f"{fixed(found.value, decimals, sign=True)} {interval(found, decimals, sign=True)}".strip()
    odd = [name for name, verdict in row.verdicts.items() if verdict in (BETTER, WORSE)]
    more = f" It was judged different in {join_names(odd)}, so every verdict needs more images." if odd else ""
    return f"The null row, the same pipeline with other seeds, differs by {figure} in {judges[0]}, by chance.{more}"


def _speed(results: Results) -> str:
    best, again = next(iter(_fastest(results)), None), results.null and results.null.speed
    if best is None or best.speed is None:
        return ""
    timed = PARTS[results.time_part] + (f" on {results.hardware}" if results.hardware else "")
    noise = f"; the null row, untouched again: {_times(again)}" if again else ""
    if best is recommended(results):  # which the headline names, with its speed
        return f"Timed {timed}{noise}."
    start = "Fastest by the median" if _is_faster(results, best) else "None is shown to be faster; highest median"
    return f"{start}, {timed}: {best.name}, {_times(best.speed)} as fast{noise}."
