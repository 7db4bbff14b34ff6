"""The run in a few sentences: a headline, and what a reader must know of verdicts, chance, speed and gaps.

A sentence claims a gain only where the figures carry it: a verdict for quality, spread and null row for time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.evaluation.report.data import PARTS, Estimate, Results, Row
from elfatt_sd.evaluation.report.tables import decimals_for, fixed, interval, join_names, plural, span
from elfatt_sd.evaluation.results import unreadable_references
from elfatt_sd.evaluation.statistics import BETTER, FEWEST_CLASSES, NO_DIFFERENCE, TOO_FEW, WORSE

_WORDS = {BETTER: "better", WORSE: "worse"}
_NAMED = 4  # judges that a sentence names where they see nothing bad; more are counted


@dataclass(frozen=True)
class Judge:
    """A figure with verdicts."""

    name: str  # what sentences call it
    key: str  # its name in the results
    of: str  # `distances`, `accuracy` or `metrics`

    def verdict(self, row: Row) -> str | None:
        return row.verdict(self.key, self.of)


def judges(results: Results) -> list[Judge]:
    """Return all figures with verdicts, that of the headline first.

    The distance of the main table comes before the others, then accuracy, then metrics in their order.
    """
    distances = sorted(results.distances, key=lambda name: name != results.distance)
    found = [Judge(name, name, "distances") for name in distances]
    found += [Judge("accuracy", "mean", "accuracy")] if "mean" in results.attributes else []
    found += [Judge(name, name, "metrics") for name in results.metrics]
    return [judge for judge in found if any(judge.verdict(row) for row in results.rows)]


def first_verdict(results: Results, row: Row) -> str | None:
    return next((judge.verdict(row) for judge in judges(results)), None)


def judged_worse(results: Results, row: Row) -> bool:
    return any(judge.verdict(row) == WORSE for judge in judges(results))


def said_of(results: Results, row: Row) -> str:
    """Write all verdicts: `, better in FID and KID`, or `, not shown to be worse in FID, but worse in accuracy`."""
    groups: dict[str, list[str]] = {}
    for judge in judges(results):
        if (said := judge.verdict(row)) not in (None, TOO_FEW):
            groups.setdefault(_WORDS.get(said or "", "not shown to be worse"), []).append(judge.name)
    *parts, last = [f"{word} in {_listed(word, names)}" for word, names in groups.items()] or [""]
    joined = ", ".join([*parts, f"{'but' if 'worse' in groups else 'and'} {last}"]) if parts else last
    return joined and f", {joined}"


def _listed(word: str, names: Sequence[str]) -> str:
    if word == "worse" or len(names) <= _NAMED:
        return join_names(names)
    return join_names([*names[: _NAMED - 1], plural(len(names) - _NAMED + 1, "other figure")])


_MANY = 10  # comparisons from which on chance verdicts are worth a word
_ERROR_RATE = 0.05  # of a 95 % interval
_TRIFLE = 0.05  # by which the untouched pipeline may differ from itself before a headline says so


def headline(results: Results) -> str:
    """Say what a user wants to know: the fastest method that is not shown to be worse, and how close it stays."""
    timed = _timed(results)
    if not timed:
        return "Time was not measured."
    faster = [row for row in timed if _is_faster(results, row)]
    good = [row for row in faster if not judged_worse(results, row)]
    best = _fastest(results, [row for row in good if _is_judged(results, row)] or good or faster or timed)
    said = said_of(results, best) if _is_judged(results, best) or judged_worse(results, best) else ""
    figures = f"{_as_fast(results, best)}{said}{_closeness(best)}{_beside_null(results)}."
    if good and _is_judged(results, best):
        return figures
    if good:
        return f"{figures} Its quality is not judged: {_no_verdict(results)}."
    if faster:
        return f"No setting is shown to be faster without being worse. {figures}"
    rounds = len(best.time_values(results.time_part))
    few = f" by {plural(rounds, 'round')} of timing ({FEW_REPEATS} are needed)" if rounds < FEW_REPEATS else ""
    return f"No setting is shown to be faster{few}. {figures}"


def findings(results: Results) -> list[str]:
    return [said for part in (_verdicts, _null, _speed, _gaps) if (said := part(results))]


def recommended(results: Results) -> Row | None:
    timed = _timed(results)
    good = [row for row in timed if not judged_worse(results, row)] or timed
    return _fastest(results, good) if good else next((row for row in results.methods if not row.failed), None)


def limits(results: Results) -> str:
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


def _timed(results: Results) -> list[Row]:
    return [row for row in results.methods if not row.failed and row.speedup(results.time_part)]


def _fastest(results: Results, rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: ratio.value if (ratio := row.speedup(results.time_part)) else 0.0)


def _is_judged(results: Results, row: Row) -> bool:
    return first_verdict(results, row) in (BETTER, NO_DIFFERENCE)


def _is_faster(results: Results, row: Row) -> bool:
    part = results.time_part
    ratio, again = row.speedup(part), results.null.speedup(part) if results.null else None
    noise = max(1.0, again.ends[1]) if again and again.ends else 1.0
    enough = len(row.time_values(part)) >= FEW_REPEATS
    return enough and ratio is not None and ratio.ends is not None and ratio.ends[0] > noise


def _as_fast(results: Results, row: Row) -> str:
    if (ratio := row.speedup(results.time_part)) is None:
        return row.name
    small = ", ".join(filter(None, ("UNet alone" if results.time_part == "unet" else "", span(ratio, 2))))
    return f"{row.name}: {fixed(ratio.value, 2)} times as fast as the untouched pipeline{small and f' ({small})'}"


def _times(ratio: Estimate) -> str:
    return f"{fixed(ratio.value, 2)} times{f' ({span(ratio, 2)})' if ratio.ends else ''}"


def _closeness(row: Row) -> str:
    if row.mostly_identical:
        return ", most images identical"
    return "" if row.psnr is None else f", PSNR {fixed(row.psnr.value, 1)} dB"


def _beside_null(results: Results) -> str:
    """Say how much faster the untouched pipeline was when timed again, where that is more than a trifle."""
    ratio = results.null.speedup(results.time_part) if results.null else None
    if ratio is None or max(abs(ratio.value - 1), *(abs(end - 1) for end in ratio.ends or ())) < _TRIFLE:
        return ""
    return f"; untouched timed again: {_times(ratio)}"


def _no_verdict(results: Results) -> str:
    said = {first_verdict(results, row) for row in results.methods}
    return "the classes are too few" if TOO_FEW in said else "no paired difference was measured"


def _verdicts(results: Results) -> str:
    """Count the verdicts of the headline's judge, or say that the classes are too few for any."""
    said = [first_verdict(results, row) for row in results.methods]
    if TOO_FEW in said:
        rest = " but that of accuracy" if results.attributes else ""
        why = f"an interval over fewer than {FEWEST_CLASSES} classes of one size may be far too short"
        return f"No verdicts, and no intervals{rest}: {why}."
    titles = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "without a difference shown"}
    counts = [f"{said.count(known)} {title}" for known, title in titles.items() if known in said]
    if not counts:
        return ""
    count = sum(map(said.count, titles))
    chance = ""
    if count >= _MANY:
        chance = f"; of {count} that do not differ, about {max(round(count * _ERROR_RATE), 1)} would get a verdict"
    judge = judges(results)[0].name
    return f"By {judge}, of {plural(count, 'setting')}: {join_names(counts)} (paired 95 % intervals{chance})."


def _null(results: Results) -> str:
    row, first = results.null, next(iter(judges(results)), None)
    if row is None:
        return "There is no null row: how far chance alone moves the figures is not known."
    if first is None or (found := row.difference(first.key, first.of)) is None:
        return ""
    decimals = decimals_for([found])
    figure = f"{fixed(found.value, decimals, sign=True)} {interval(found, decimals, sign=True)}".strip()
    odd = [judge.name for judge in judges(results) if judge.verdict(row) in (BETTER, WORSE)]
    more = f" It was judged different in {join_names(odd)}, so every verdict needs more images." if odd else ""
    return f"The null row, the same pipeline with other seeds, differs by {figure} in {first.name}, by chance.{more}"


def _speed(results: Results) -> str:
    part, timed = results.time_part, _timed(results)
    if not timed:
        return "Time was not measured."
    best = _fastest(results, timed)
    place = f" on {results.hardware}" if results.hardware else ""
    start = "Fastest by the median" if _is_faster(results, best) else "None is shown to be faster; highest median"
    again = results.null.speedup(part) if results.null else None
    noise = f"; the null row, untouched again: {_times(again)}" if again else ""
    kernels = {name for row in results.rows for name in row.timed.attention_kernels or ()}
    mixed = f" Rows attend with different kernels: {join_names(sorted(kernels))}." if len(kernels) > 1 else ""
    figure = f"{best.name}, {_times(best.speedup(part) or Estimate(1.0))} as fast"
    return f"{start}, {PARTS[part]}{place}: {figure}{noise}.{mixed}"


def _gaps(results: Results) -> str:
    """Name what limits the run: a limit on the images, few rounds of timing, what could not be read, failed rows."""
    note, unreadable = results.timing.get("note"), unreadable_references(results.data.get("reference"))
    failed = [row.name for row in results.rows if row.failed]
    parts = [
        limits(results),
        f"Time: {note}." if note else "",
        f"{plural(len(unreadable), 'reference image')} could not be read: {join_names(unreadable[:3])}."
        if unreadable
        else "",
        f"Failed: {join_names(failed)}." if failed else "",
    ]
    return " ".join(filter(None, parts))
