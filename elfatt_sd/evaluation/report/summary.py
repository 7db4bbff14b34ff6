"""The run in a few sentences: what was compared, on what, and what came out.

A sentence claims a gain only where the figures carry it: a verdict for quality, spread and null row for time, the
intervals of both lines for memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from elfatt_sd.evaluation.intervals import BETTER, FEWEST_CLASSES, NO_DIFFERENCE, TOO_FEW, WORSE
from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.evaluation.report.data import PARTS, Results
from elfatt_sd.evaluation.report.rows import Row, is_kernel
from elfatt_sd.evaluation.report.text import decimals_for, fixed, interval, join_names, plural, span
from elfatt_sd.evaluation.report.values import Estimate, dig, number, numbers
from elfatt_sd.evaluation.report.verdicts import Judge, disagreements, first_verdict, judged_worse, judges, said_of
from elfatt_sd.evaluation.results import left_out_of_references, unreadable_references

_COUNTED = (
    (BETTER, "{0} {1} better than the untouched pipeline"),
    (WORSE, "{0} {1} worse than the untouched pipeline"),
    (NO_DIFFERENCE, "{0} show{2} no difference"),
)
_LISTED = 6  # methods that a headline names; more are counted
_NAMED = 3  # unreadable images that a sentence names
_MANY = 10  # comparisons from which on chance verdicts are worth a word
_ERROR_RATE = 0.05  # of a 95 % interval
_NOTHING = 1e-9  # a distance of images to themselves: rounding alone
_TRIFLE = 0.05  # by which the untouched pipeline may differ from itself before a headline says so


def headline(results: Results) -> str:
    """Say what a user wants to know: the fastest method that is not shown to be worse, and how close it stays."""
    faster = [row for row in results.methods if not row.failed and _is_faster(results, row)]
    judged = [row for row in faster if first_verdict(results, row) in (BETTER, NO_DIFFERENCE)]
    good = [row for row in judged if not judged_worse(results, row)]
    if good:
        best = _fastest(results, good)
        return f"{_as_fast(results, best)}, {said_of(results, best)}{_closeness(best)}{_beside_null(results)}."
    if not faster:
        return _no_gain(results)
    best = _fastest(results, faster)
    if judged_worse(results, best):
        start = f"No setting is shown to be faster without being worse. {_as_fast(results, best)}"
        return f"{start}, {said_of(results, best)}{_closeness(best)}."
    figures = f"{_as_fast(results, best)}{_closeness(best)}{_beside_null(results)}"
    return f"{figures}. Its quality is not judged: {_no_verdict(results)}."


def _no_gain(results: Results) -> str:
    """Say that no setting is shown to be faster, or why that cannot be told."""
    timed = [row for row in results.methods if not row.failed and row.speedup(results.time_part)]
    if not timed:
        return f"Time was not measured. Quality: {_verdict_counts(results)}."
    best = _fastest(results, timed)
    figures = f"{_as_fast(results, best)}{_closeness(best)}{_beside_null(results)}"
    rounds, ratio = len(best.time_values(results.time_part)), best.speedup(results.time_part)
    if rounds < FEW_REPEATS and ratio is not None and ratio.value > 1:
        why = f"{plural(rounds, 'round')} of timing {'is' if rounds == 1 else 'are'} too few to claim it"
        return f"{figures}; {why}. Quality: {_verdict_counts(results)}."
    return f"No setting is shown to be faster. {figures}. Quality: {_verdict_counts(results)}."


def recommended(results: Results) -> Row | None:
    """Return the row that a reader should look at first: the fastest that is not worse, otherwise the fastest."""
    timed = [row for row in results.methods if not row.failed and row.speedup(results.time_part)]
    good = [row for row in timed if not judged_worse(results, row)] or timed
    known = [row for row in results.methods if not row.failed]
    return _fastest(results, good) if good else next(iter(known), None)


def _fastest(results: Results, rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: ratio.value if (ratio := row.speedup(results.time_part)) else 0.0)


def _is_faster(results: Results, row: Row) -> bool:
    """Tell whether every one of enough rounds was faster than untouched, and than the null row ever was."""
    part = results.time_part
    ratio = row.speedup(part)
    enough = len(row.time_values(part)) >= FEW_REPEATS
    return enough and ratio is not None and ratio.ends is not None and ratio.ends[0] > _clock_noise(results, part)[1]


def _as_fast(results: Results, row: Row) -> str:
    ratio = row.speedup(results.time_part)
    if ratio is None:
        return row.name
    alone = "UNet alone" if results.time_part == "unet" else ""
    small = ", ".join(filter(None, (alone, span(ratio, 2))))
    fast = f"{row.name}: {fixed(ratio.value, 2)} times as fast as the untouched pipeline"
    return fast + (f" ({small})" if small else "")


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


def scope(results: Results) -> str:
    """Say in one sentence what was compared, on what, and with which verdicts."""
    counts = sorted({row.images for row in results.rows if row.images})
    images = f"{counts[0]} to {plural(counts[-1], 'image')}" if len(counts) > 1 else plural(sum(counts), "image")
    labels = list(dict.fromkeys(row.label for row in results.methods))
    methods = join_names(labels) if len(labels) <= _LISTED else plural(len(labels), "method")
    model = results.from_protocol("model")
    where = f" ({PurePath(model).name or model})" if isinstance(model, str) and model else ""
    start = f"{plural(len(results.methods), 'setting')} of {methods} on {images} each{where}"
    return f"{start}: {_verdict_counts(results)}."


def _verdict_counts(results: Results) -> str:
    said = [first_verdict(results, row) for row in results.methods]
    counts = [(title, sum(verdict == known for verdict in said)) for known, title in _COUNTED]
    parts = [title.format(count, *(("is", "s") if count == 1 else ("are", ""))) for title, count in counts if count]
    failed = sum(row.failed is not None for row in results.methods)
    parts += [f"{failed} failed"] if failed else []
    if any(count for _, count in counts):
        others = [f"{other.name} disagrees on {len(rows)}" for _, other, rows in disagreements(results)]
        return "; ".join([f"by {judges(results)[0].name}, {join_names(parts)}", *others])
    return join_names([f"no verdict, since {_no_verdict(results)}", *parts])


def findings(results: Results) -> list[str]:
    """Return one sentence for each thing a reader must know: verdicts by name, chance, speed, kernels, memory, gaps."""
    divided = [_disagreement(*parts) for parts in disagreements(results)]
    rest = [part(results) for part in (_null, _reference, _bias, _speed, _kernels, _memory)]
    return [sentence for sentence in (_named_verdicts(results), *divided, *rest, *_gaps(results)) if sentence]


def _named_verdicts(results: Results) -> str:
    judged = [(row, first_verdict(results, row)) for row in results.methods]
    if any(said == TOO_FEW for _, said in judged):
        classes = next((row.classes for row, _ in judged if row.classes), None)
        seen = "" if classes is None else f" from {plural(classes, 'class')}"
        uneven = " of very different sizes" if classes and classes >= FEWEST_CLASSES else ""
        why = f"an interval over fewer than {FEWEST_CLASSES} classes of one size may be far too short"
        rest = " but that of accuracy" if results.attributes else ""
        return f"No verdicts{seen}{uneven}, and no intervals{rest}: {why}."
    known = (BETTER, WORSE, NO_DIFFERENCE)
    grouped = [(title, [row for row, said in judged if said == title]) for title in known]
    parts = [f"{title}: {_grouped(rows)}" for title, rows in grouped if rows]
    if not parts:
        return ""
    text, count = "; ".join(parts), sum(len(rows) for _, rows in grouped)
    chance = ""
    if count >= _MANY:
        chance = f"; of {count} rows that do not differ, about {max(round(count * _ERROR_RATE), 1)} would get one"
    rest = f"verdicts rest on the paired 95 % interval of the difference in {judges(results)[0].name}{chance}"
    return f"{text[0].upper()}{text[1:]} ({rest})."


def _disagreement(first: Judge, other: Judge, rows: Sequence[Row]) -> str:
    """Name the rows on which two figures disagree, with what the second one says."""
    said = [(title, [row for row in rows if other.verdict(row) == title]) for title, _ in _COUNTED]
    parts = [f"{title}: {_grouped(found)}" for title, found in said if found]
    return f"{other.name} disagrees with {first.name}, so look at both. By {other.name}, {'; '.join(parts)}."


def _grouped(rows: Sequence[Row]) -> str:
    """Name rows, those of one method together: `ToMe-SD 0.1 / 0.3 and ELFATT-SD 0.5`; or by their numbers."""
    numbers = [row.number for row in rows if row.number is not None]
    if numbers:
        return f"row{'s' if len(numbers) > 1 else ''} {join_names(_stretches(numbers))}"
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row.suffix)
    return join_names(f"{label} {' / '.join(filter(None, suffixes))}".strip() for label, suffixes in groups.items())


def _stretches(numbers: Sequence[int]) -> list[str]:
    """Write ascending numbers, three or more in a row as a stretch: `3 to 6`, `9`."""
    stretches: list[list[int]] = []
    for value in numbers:
        if stretches and value == stretches[-1][-1] + 1:
            stretches[-1].append(value)
        else:
            stretches.append([value])
    long = [[f"{part[0]} to {part[-1]}"] if len(part) > 2 else [str(value) for value in part] for part in stretches]
    return [text for texts in long for text in texts]


def _null(results: Results) -> str:
    row, first = results.null, next(iter(judges(results)), None)
    if row is None:
        return "There is no null row: how far chance alone moves the figures is not known."
    found = None if first is None else row.difference(first.key, first.of)
    if first is None or found is None:
        return ""
    decimals = decimals_for([found])
    figure = f"{fixed(found.value, decimals, sign=True)} {interval(found, decimals, sign=True)}".strip()
    sentence = (
        f"The null row, the same pipeline with other seeds, differs by {figure} in {first.name}, by chance alone."
    )
    odd = [judge.name for judge in judges(results) if judge.verdict(row) in (BETTER, WORSE)]
    if odd:
        sentence += f" It was itself judged different in {join_names(odd)}, so every verdict of this run needs more "
        sentence += "images."
    return sentence


def _reference(results: Results) -> str:
    """Warn of a reference that says little: the images of a row, or no more images than features."""
    name = results.distance or ""
    known = [(row, row.distance(name)) for row in results.rows] if name and not is_kernel(name) else []
    same = [row for row, found in known if found is not None and found.value < _NOTHING]
    if same:
        return f"The reference is the images of {_grouped(same)}: no distance to it, and no verdict by it, counts."
    count = number(results.data, "reference", name, "count")
    if count is None or results.features is None or count > results.features:
        return ""
    few = plural(int(count), "reference image")
    return f"{few} are no more than the {results.features} features of {name}: they show only a part of their variety."


def _bias(results: Results) -> str:
    """Warn of a Frechet distance whose covariance is singular."""
    fewest = min((row.images for row in results.rows if row.images), default=None)
    if fewest is None or results.features is None or fewest > results.features:
        return ""
    unbiased = next((name for name in results.distances if is_kernel(name)), None)
    name = results.distance or ""
    limit = results.extrapolated(name) and not results.withheld(name)
    free = ["the difference, which is extrapolated"] if limit else []
    free += [f"{unbiased}, among the other measures"] if unbiased else []
    other = f"; {join_names(free)}, {'are' if len(free) > 1 else 'is'} free of it" if free else ""
    return (
        f"{plural(fewest, 'image')} a row are no more than the {results.features} features of {results.distance}: "
        f"its value is raised by that, and not by the same amount for images of another variety{other}."
    )


def _speed(results: Results) -> str:
    part = results.time_part
    timed = [(row, row.speedup(part)) for row in results.methods]
    known: list[tuple[Row, Estimate]] = [(row, ratio) for row, ratio in timed if ratio is not None]
    if not known:
        return "Time was not measured."
    row, best = max(known, key=lambda pair: pair[1].value)
    place = f" on {results.hardware}" if results.hardware else ""
    figure = (
        f"{row.name}, {fixed(best.value, 2)} times as fast as untouched{f' ({span(best, 2)})' if best.ends else ''}"
    )
    rounds = len(row.time_values(part))
    if rounds < FEW_REPEATS:
        return f"Too few rounds of timing{place} to claim a gain ({rounds}): the highest median is that of {figure}."
    low, _ = _clock_noise(results, part)
    again = results.null.speedup(part) if results.null else None
    noise = f" The untouched pipeline timed again (the null row): {_times(again)}." if again else ""
    slower = sum(ratio.ends is not None and ratio.ends[1] < low for _, ratio in known)
    rest = f" {plural(slower, 'setting')} {'is' if slower == 1 else 'are'} slower than untouched." if slower else ""
    if not _is_faster(results, row):
        start = f"No setting is shown to be faster than the untouched pipeline{place}"
        return f"{start}: the highest median is that of {figure}.{rest}{noise}"
    return f"Fastest by the median, {PARTS[part]}{place}: {figure}.{rest}{noise}"


def _clock_noise(results: Results, part: str) -> tuple[float, float]:
    """Return the ratios between which no row differs from the untouched pipeline: 1, and those of the null row."""
    ratio = results.null.speedup(part) if results.null else None
    ends = ratio.ends if ratio else None
    return (1.0, 1.0) if ends is None else (min(1.0, ends[0]), max(1.0, ends[1]))


def _kernels(results: Results) -> str:
    """Warn where rows attend with different kernels, so that their times compare more than methods."""
    users: dict[str, list[Row]] = {}
    for row in results.rows:
        for kernel in dig(row.data, "time", "attention_kernels") or ():
            users.setdefault(kernel, []).append(row)
    if len(users) < 2:
        return ""
    said = "; ".join(f"{kernel} in {_grouped(rows)}" for kernel, rows in users.items())
    return f"The times compare different attention kernels, too: {said}."


def _memory(results: Results) -> str:
    known = [(row, slope) for row in results.methods if (slope := row.slope) is not None]
    if not known:
        return "Memory was not measured."
    kinds = sorted({str(dig(row.data, "memory", "kind")) for row in results.rows if row.slope is not None})
    if len(kinds) > 1:
        return f"Memory was measured as {join_names(kinds)}, which cannot be compared."
    base = results.baseline.slope if results.baseline else None
    row, least = min(known, key=lambda pair: pair[1].value)
    decimals = max(decimals_for([least, base]), 2)
    kind = f"{dig(row.data, 'memory', 'kind') or 'kind not recorded'}, with the 95 % interval of the fitted line"
    figure = f"{row.name}, {_slope(least, decimals)} GiB per image"
    if base is None:
        return f"Memory of the untouched pipeline was not measured; the least of the others is {figure} ({kind})."
    beside = f"untouched {_slope(base, decimals)}"
    more = sum(_apart(base, slope) for _, slope in known)
    rest = f" {plural(more, 'setting')} {'takes' if more == 1 else 'take'} more than untouched." if more else ""
    if not _apart(least, base):
        start = "No setting is shown to take less memory than the untouched pipeline"
        return f"{start}: the smallest slope is {figure}, {beside} ({kind}).{rest}"
    return f"Least memory: {figure}, {beside} ({kind}).{rest}"


def _slope(value: Estimate, decimals: int) -> str:
    return f"{fixed(value.value, decimals)} {interval(value, decimals) or '(no interval)'}"


def _apart(less: Estimate, more: Estimate) -> bool:
    """Tell whether one slope is below another beyond the errors of both lines."""
    return less.ends is not None and more.ends is not None and less.ends[1] < more.ends[0]


def limits(results: Results) -> str:
    """Say what a quick look limited; empty for a whole run."""
    limit = number(results.protocol, "limit")
    if not limit:
        return ""
    rounds, batches = number(results.protocol, "time", "repeats"), numbers(results.protocol.get("memory"), "batches")
    parts = [f"every row was limited to {plural(int(limit), 'image')}"]
    parts += [f"time to {plural(int(rounds), 'round')}"] if rounds else []
    parts += [f"memory to batches of {join_names(f'{batch:g}' for batch in batches)}"] if batches else []
    return f"A quick look: {join_names(parts)}."


def _gaps(results: Results) -> Iterable[str]:
    """Name what limits the run: a limit on the images, few rounds of timing, what could not be read, failed cells."""
    note = dig(results.environment, "timing", "note")
    if words := limits(results):
        yield words
    if note:
        yield f"Time: {note}."
    unreadable = unreadable_references(results.data.get("reference"))
    if unreadable:
        rest = f", and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        names = "; ".join(unreadable[:_NAMED])
        yield f"{plural(len(unreadable), 'reference image')} could not be read: {names}{rest}."
    yield from (f"Reference: {words}." for words in left_out_of_references(results.data.get("reference")))
    yield from (f"Failed: {row.name} ({row.failed})." for row in results.rows if row.failed)
