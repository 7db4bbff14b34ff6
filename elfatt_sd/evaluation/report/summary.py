"""The run in a few sentences: a headline, and what a reader must know of verdicts, chance, speed and gaps.

A sentence claims a gain only where the figures carry it: a verdict for quality, spread and null row for time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.evaluation.records import Difference, Estimate
from elfatt_sd.evaluation.report.data import BASELINE, NULL, PARTS, Results, Row
from elfatt_sd.evaluation.report.tables import TIMES, decimals_for, fixed, interval, join_names, plural, shown, span
from elfatt_sd.evaluation.statistics import BETTER, FEWEST_CLASSES, NO_DIFFERENCE, TOO_FEW, WORSE

_NAMED = 4  # judges that a sentence names where they see nothing bad; more are counted
_MANY = 10  # comparisons from which on chance verdicts are worth a word
_ERROR_RATE = 0.05  # of a 95 % interval
_TRIFLE = 0.05  # by which the untouched pipeline may differ from itself before a headline says so
_SHORT = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "none shown", TOO_FEW: "not judged"}
_GAP, _LEAST = 2, 12  # characters between columns, and of a row's name


@dataclass(frozen=True)
class Judge:
    """A figure with verdicts."""

    name: str  # what sentences call it
    key: str  # its name in the results
    kind: str  # `distances`, `accuracy` or `metrics`

    def difference(self, row: Row) -> Difference:
        found: Difference = getattr(row, self.kind)[self.key].difference
        return found


def _judges(results: Results) -> list[Judge]:
    """Return all figures with verdicts: the distance of the main table, other distances, accuracy, metrics."""
    distances = sorted(results.distances, key=lambda name: name != results.distance)
    found = [Judge(name, name, "distances") for name in distances]
    found += [Judge("accuracy", "mean", "accuracy")] if "mean" in results.attributes else []
    found += [Judge(name, name, "metrics") for name in results.metrics]
    return [judge for judge in found if any(judge.difference(row).verdict for row in results.rows)]


def _verdicts_of(results: Results, row: Row) -> dict[str, str | None]:
    return {judge.name: judge.difference(row).verdict for judge in _judges(results)}


def _first_verdict(results: Results, row: Row) -> str | None:
    return next(iter(_verdicts_of(results, row).values()), None)


def _judged_worse(results: Results, row: Row) -> bool:
    return WORSE in _verdicts_of(results, row).values()


def _is_judged(results: Results, row: Row) -> bool:
    return _first_verdict(results, row) in (BETTER, NO_DIFFERENCE)


def headline(results: Results) -> str:
    """Say what a user wants to know: the fastest method that is not shown to be worse, and how close it stays."""
    part, timed = results.time_part, _timed(results)
    if not timed:
        return "Time was not measured."
    faster = [row for row in timed if _is_faster(results, row)]
    good = [row for row in faster if not _judged_worse(results, row)]
    best = _fastest(results, [row for row in good if _is_judged(results, row)] or good or faster or timed)
    judged, ratio = _is_judged(results, best), _speed_of(results, best)
    alone = "UNet alone, " if part == "unet" else ""
    figures = f"{best.name}: {fixed(ratio.value, 2)} times as fast as the untouched pipeline ({alone}{span(ratio, 2)})"
    figures += _quality(results, best) if judged or _judged_worse(results, best) else ""
    if best.mostly_identical:
        figures += ", most images identical"
    elif best.psnr is not None:
        figures += f", PSNR {fixed(best.psnr.value, 1)} dB"
    again = results.null and results.null.timed[part].speed
    if again and max(abs(again.value - 1), *(abs(end - 1) for end in again.ends or ())) >= _TRIFLE:
        figures += f"; untouched timed again: {_times(again)}"
    if good and judged:
        return f"{figures}."
    if good:
        few = TOO_FEW in {_first_verdict(results, row) for row in results.methods}
        why = "the classes are too few" if few else "no paired difference was measured"
        return f"{figures}. Its quality is not judged: {why}."
    if faster:
        return f"No setting is shown to be faster without being worse. {figures}."
    rounds = len(best.timed[part].values)
    needed = f" by {plural(rounds, 'round')} of timing ({FEW_REPEATS} are needed)" if rounds < FEW_REPEATS else ""
    return f"No setting is shown to be faster{needed}. {figures}."


def findings(results: Results) -> list[str]:
    return [said for part in (_verdicts, _null, _speed, _gaps) if (said := part(results))]


def recommended(results: Results) -> Row | None:
    timed = _timed(results)
    good = [row for row in timed if not _judged_worse(results, row)] or timed
    return _fastest(results, good) if good else next((row for row in results.methods if not row.failed), None)


def _timed(results: Results) -> list[Row]:
    return [row for row in results.methods if not row.failed and row.timed[results.time_part].speed]


def _speed_of(results: Results, row: Row) -> Estimate:
    return row.timed[results.time_part].speed or Estimate(0.0)


def _fastest(results: Results, rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: _speed_of(results, row).value)


def _is_faster(results: Results, row: Row) -> bool:
    """Tell whether all rounds were faster, and faster than the null row's, and there were enough of them."""
    part = results.time_part
    again, ratio = results.null and results.null.timed[part].ratio, row.timed[part].ratio
    enough = len(row.timed[part].values) >= FEW_REPEATS
    return enough and ratio is not None and ratio.low > max(1.0, again.high if again else 1.0)


def _times(ratio: Estimate) -> str:
    return f"{fixed(ratio.value, 2)} times ({span(ratio, 2)})"


def _quality(results: Results, row: Row) -> str:
    """Write all verdicts: `, better in FID and KID`, or `, not shown to be worse in FID, but worse in accuracy`."""
    groups: dict[str, list[str]] = {}
    for name, verdict in _verdicts_of(results, row).items():
        if verdict not in (None, TOO_FEW):
            words = {BETTER: "better in", WORSE: "worse in"}.get(verdict or "", "not shown to be worse in")
            groups.setdefault(words, []).append(name)
    parts = []
    for words, names in groups.items():
        more = len(names) - _NAMED + 1
        if words != "worse in" and more > 1:
            names = [*names[: _NAMED - 1], plural(more, "other figure")]
        parts.append(f"{words} {join_names(names)}")
    if len(parts) > 1:
        parts[-1] = f"{'but' if 'worse in' in groups else 'and'} {parts[-1]}"
    return "".join(f", {part}" for part in parts)


def _verdicts(results: Results) -> str:
    """Count the verdicts of the headline's judge, or say that the classes are too few for any."""
    said = [_first_verdict(results, row) for row in results.methods]
    if TOO_FEW in said:
        rest = " but that of accuracy" if results.attributes else ""
        why = f"an interval over fewer than {FEWEST_CLASSES} classes of one size may be far too short"
        return f"No verdicts, and no intervals{rest}: {why}."
    titles = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "without a difference shown"}
    counts = [f"{said.count(known)} {title}" for known, title in titles.items() if known in said]
    if not counts:
        return ""
    count, chance = sum(map(said.count, titles)), ""
    if count >= _MANY:
        chance = f"; of {count} that do not differ, about {max(round(count * _ERROR_RATE), 1)} would get a verdict"
    judge = _judges(results)[0].name
    return f"By {judge}, of {plural(count, 'setting')}: {join_names(counts)} (paired 95 % intervals{chance})."


def _null(results: Results) -> str:
    row, judges = results.null, _judges(results)
    if row is None:
        return "There is no null row: how far chance alone moves the figures is not known."
    found = judges[0].difference(row).estimate if judges else None
    if found is None:
        return ""
    decimals = decimals_for([found])
    figure = f"{fixed(found.value, decimals, sign=True)} {interval(found, decimals, sign=True)}".strip()
    odd = [name for name, verdict in _verdicts_of(results, row).items() if verdict in (BETTER, WORSE)]
    more = f" It was judged different in {join_names(odd)}, so every verdict needs more images." if odd else ""
    name = judges[0].name
    return f"The null row, the same pipeline with other seeds, differs by {figure} in {name}, by chance.{more}"


def _speed(results: Results) -> str:
    part, timed = results.time_part, _timed(results)
    if not timed:
        return "Time was not measured."
    best = _fastest(results, timed)
    place = f" on {results.hardware}" if results.hardware else ""
    start = "Fastest by the median" if _is_faster(results, best) else "None is shown to be faster; highest median"
    again = results.null and results.null.timed[part].speed
    noise = f"; the null row, untouched again: {_times(again)}" if again else ""
    kernels = {name for row in results.rows for name in row.time.attention_kernels}
    mixed = f" Rows attend with different kernels: {join_names(sorted(kernels))}." if len(kernels) > 1 else ""
    figure = f"{best.name}, {_times(_speed_of(results, best))} as fast"
    return f"{start}, {PARTS[part]}{place}: {figure}{noise}.{mixed}"


def _gaps(results: Results) -> str:
    """Name what limits the run: a limit on the images, few rounds of timing, what could not be read, failed rows."""
    note, unreadable = results.timing.get("note"), results.unreadable
    failed = [row.name for row in results.rows if row.failed]
    lost = f"{plural(len(unreadable), 'reference image')} could not be read: {join_names(unreadable[:3])}."
    parts = [
        _limits(results),
        f"Time: {note}." if note else "",
        lost if unreadable else "",
        f"Failed: {join_names(failed)}." if failed else "",
    ]
    return " ".join(filter(None, parts))


def _limits(results: Results) -> str:
    """Say what a quick look limited; empty for a whole run."""
    protocol = results.protocol
    if not protocol.get("limit"):
        return ""
    rounds = (protocol.get("time") or {}).get("repeats")
    batches = (protocol.get("memory") or {}).get("batches")
    parts = [f"every row was limited to {plural(protocol['limit'], 'image')}"]
    parts += [f"time to {plural(rounds, 'round')}"] if rounds else []
    parts += [f"memory to batches of {join_names(map(str, batches))}"] if batches else []
    return f"A quick look: {join_names(parts)}."


def terminal_summary(results: Results, width: int = 80) -> str:
    """Write the headline and a table in lines of at most so many characters."""
    lines = [line for text in (headline(results), _limits(results)) for line in textwrap.wrap(text, width)]
    return shown("\n".join([*lines, "", *_terminal_table(results, width)]))


def _terminal_table(results: Results, width: int) -> list[str]:
    distance, gap = results.distance, " " * _GAP
    titles = [*(["Distance", "Difference"] if distance else []), "Speed", "GiB/image", "PSNR"]
    decimals = max(decimals_for(row.distance(distance).estimate for row in results.rows), 1)
    texts = [_terminal_line(results, row, decimals) for row in results.rows if not row.failed]
    widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
    left = max(width - sum(widths) - _GAP * len(widths), _LEAST)
    first = min(left, max((len(row.name) for row in results.rows), default=_LEAST))
    remaining, lines = iter(texts), []
    for name, row in [("Row", None), *((row.short(first), row) for row in results.rows)]:
        if row is not None and row.failed:
            lines.append(textwrap.shorten(f"{name}  failed: {row.failed}", width, placeholder="…"))
        else:
            figures = titles if row is None else next(remaining)
            aligned = (text.rjust(size) for text, size in zip(figures, widths, strict=True))
            lines.append(gap.join([name.ljust(first), *aligned]).rstrip())
    return lines


def _terminal_line(results: Results, row: Row, decimals: int) -> list[str]:
    found: list[str] = []
    if results.distance:
        figure = row.distance(results.distance)
        verdict = figure.difference.verdict
        known = row.role != BASELINE and verdict is not None
        found += ["-" if figure.value is None else fixed(figure.value, decimals)]
        found += [_SHORT.get(verdict or "", verdict or "") if known else "-"]
    ratio, psnr = row.timed[results.time_part].speed, None if row.role in (BASELINE, NULL) else row.psnr
    found += ["-" if ratio is None else f"{fixed(ratio.value, 2)}{TIMES}"]
    found += ["-" if row.slope is None else fixed(row.slope.value, 3)]
    same = "identical" if row.mostly_identical else "-"
    return [*found, same if psnr is None else fixed(psnr.value, 1)]
