"""The run in a few sentences: a headline, and what a reader must know of verdicts, chance, speed and gaps.

A sentence claims a gain only where the figures carry it: a verdict for quality, spread and null row for time.
"""

from __future__ import annotations

from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report.data import PARTS, Results, Row
from elfatt_sd.evaluation.report.tables import decimals_for, fixed, interval, join_names, plural, span
from elfatt_sd.evaluation.statistics import BETTER, FEWEST_CLASSES, NO_DIFFERENCE, TOO_FEW, WORSE

_MANY = 10  # comparisons from which on chance verdicts are worth a word
_ERROR_RATE = 0.05  # of a 95 % interval
_TRIFLE = 0.05  # by which the untouched pipeline may differ from itself before a headline says so
_QUALITY = {BETTER: "better in", NO_DIFFERENCE: "not shown to be worse in", WORSE: "worse in"}
_COUNTED = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "without a difference shown"}
_NOT_WORSE = (BETTER, NO_DIFFERENCE)


def headline(results: Results) -> str:
    """Say what a user wants to know: the fastest method that is not shown to be worse, and how close it stays."""
    best = recommended(results)
    if best is None or best.speed is None:
        return "Time was not measured."
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
    again = results.null and results.null.speed
    if again and max(abs(again.value - 1), *(abs(end - 1) for end in again.ends or ())) >= _TRIFLE:
        figures += f"; untouched timed again: {_times(again)}"
    faster = _is_faster(results, best)
    if faster and WORSE not in verdicts.values():
        if best.verdict in _NOT_WORSE:
            return f"{figures}."
        few = TOO_FEW in {row.verdict for row in results.methods}
        why = "the classes are too few" if few else "no paired difference was measured"
        return f"{figures}. Its quality is not judged: {why}."
    if faster:
        return f"No setting is shown to be faster without being worse. {figures}."
    rounds = len(best.timed[results.time_part].values)
    needed = f" by {plural(rounds, 'round')} of timing ({FEW_REPEATS} are needed)" if rounds < FEW_REPEATS else ""
    return f"No setting is shown to be faster{needed}. {figures}."


def findings(results: Results) -> list[str]:
    """Speak of verdicts, chance, speed, and what limits the run: few images or rounds, unreadable ones, failed rows."""
    unreadable = [*dict.fromkeys(name for part in results.reference.values() for name in part.unreadable)]
    failed = [row.name for row in results.rows if row.failed]
    limit = results.protocol.get("limit")
    gaps = [f"A quick look: every row was limited to {plural(limit, 'image')}."] if limit else []
    gaps += [f"Time: {results.timing['note']}."] if results.timing.get("note") else []
    if unreadable:
        gaps.append(f"{plural(len(unreadable), 'reference image')} could not be read: {join_names(unreadable[:3])}.")
    gaps += [f"Failed: {join_names(failed)}."] if failed else []
    parts = [_verdicts(results), _null(results), _speed(results), " ".join(gaps)]
    return [part for part in parts if part]


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
    unfailed = next((row for row in results.methods if not row.failed), None)
    return next(iter(judged or good or faster or timed), unfailed)


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
        return "Time was not measured."
    place = f" on {results.hardware}" if results.hardware else ""
    start = "Fastest by the median" if _is_faster(results, best) else "None is shown to be faster; highest median"
    noise = f"; the null row, untouched again: {_times(again)}" if again else ""
    return f"{start}, {PARTS[results.time_part]}{place}: {best.name}, {_times(best.speed)} as fast{noise}."
