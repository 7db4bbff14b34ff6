"""The run in a few sentences: what was compared, on what, and what came out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from elfatt_sd.evaluation.report.data import Estimate, Results, Row, dig, number
from elfatt_sd.evaluation.report.text import decimals_for, fixed, interval, join_names, plural

ENOUGH = 64  # pictures; with fewer, a Frechet distance and its interval are a test of the harness
_COUNTED = (
    ("better", "{0} {1} better than the untouched pipeline"),
    ("worse", "{0} {1} worse than the untouched pipeline"),
    ("no difference shown", "{0} show{2} no difference"),
)
_VERDICTS = (("better", "better"), ("worse", "worse"), ("no difference shown", "no difference shown"))


def headline(results: Results) -> str:
    """Say in one sentence what was compared, on what, and with which verdicts."""
    counts = sorted({row.images for row in results.rows if row.images})
    pictures = f"{counts[0]} to {plural(counts[-1], 'picture')}" if len(counts) > 1 else plural(sum(counts), "picture")
    methods = join_names(dict.fromkeys(row.label for row in results.methods))
    model = results.from_protocol("model")
    where = f" ({PurePath(model).name or model})" if isinstance(model, str) and model else ""
    start = f"{plural(len(results.methods), 'setting')} of {methods} on {pictures} each{where}"
    return f"{start}: {_verdict_counts(results)}."


def _verdict_counts(results: Results) -> str:
    name = results.distance
    said = [row.verdict(name) for row in results.methods] if name else []
    counts = [(title, sum(verdict == known for verdict in said)) for known, title in _COUNTED]
    parts = [title.format(count, *(("is", "s") if count == 1 else ("are", ""))) for title, count in counts if count]
    failed = sum(row.failed is not None for row in results.methods)
    parts += [f"{failed} failed"] if failed else []
    if not any(count for _, count in counts):
        return join_names(["no verdict, since no paired difference was measured", *parts])
    return f"by {name}, {join_names(parts)}"


def findings(results: Results) -> list[str]:
    """Return one sentence for each thing a reader must know: verdicts by name, chance, speed, memory, gaps."""
    found = [_named_verdicts(results), _null(results), _speed(results), _memory(results), *_gaps(results)]
    return [sentence for sentence in found if sentence]


def _named_verdicts(results: Results) -> str:
    name = results.distance
    if name is None:
        return ""
    parts = []
    for known, title in _VERDICTS:
        rows = [row for row in results.methods if row.verdict(name) == known]
        if rows:
            parts.append(f"{title}: {_grouped(rows)}")
    if not parts:
        return ""
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]} (verdicts rest on the paired 95 % interval of the difference in {name})."


def _grouped(rows: Iterable[Row]) -> str:
    """Name rows, those of one method together: `ToMe-SD 0.1, 0.3 and ELFATT-SD 0.5`."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row.suffix)
    return join_names(f"{label} {' / '.join(filter(None, suffixes))}".strip() for label, suffixes in groups.items())


def _null(results: Results) -> str:
    name, row = results.distance, results.null
    found = row.difference(name) if row and name else None
    if row is None or found is None or name is None:
        return "There is no null row: how far chance alone moves the figures is not known."
    decimals = decimals_for([found])
    sentence = (
        f"The null row, the same pipeline with other seeds, differs by {fixed(found.value, decimals, sign=True)} "
        f"{interval(found, decimals, sign=True)}, by chance alone."
    )
    if row.verdict(name) in ("better", "worse"):
        sentence += " It was itself judged different, so every verdict of this run needs more pictures."
    return sentence


def _speed(results: Results) -> str:
    timed = [(row, row.speedup()) for row in results.methods]
    known: list[tuple[Row, Estimate]] = [(row, ratio) for row, ratio in timed if ratio is not None]
    if not known:
        return "Time was not measured."
    row, best = max(known, key=lambda pair: pair[1].value)
    place = f" on {results.hardware}" if results.hardware else ""
    spread = f" ({fixed(best.ends[0], 2)} to {fixed(best.ends[1], 2)})" if best.ends else ""
    if best.value <= 1:
        closest = f"the closest is {row.name}, {fixed(best.value, 2)} times as fast{spread}"
        return f"No setting is faster than the untouched pipeline{place}; {closest}."
    slower = sum(ratio.value < 1 for _, ratio in known)
    rest = f" {plural(slower, 'setting')} {'is' if slower == 1 else 'are'} slower than untouched." if slower else ""
    return f"Fastest end to end{place}: {row.name}, {fixed(best.value, 2)} times as fast as untouched{spread}.{rest}"


def _memory(results: Results) -> str:
    base = results.baseline.memory() if results.baseline else None
    known = [(row, value) for row in results.methods if (value := row.memory()) is not None]
    if not known:
        return "Memory was not measured."
    row, least = min(known, key=lambda pair: pair[1])
    beside = f", untouched {base:.2f}" if base is not None else ""
    kind = dig(row.data, "memory", "kind") or "kind not recorded"
    return f"Least memory: {row.name}, {least:.2f} GiB per image{beside} ({kind})."


def _gaps(results: Results) -> list[str]:
    """Name what limits the run: a limit on the pictures, cells that failed."""
    limit, note = number(results.protocol, "limit"), dig(results.environment, "timing", "note")
    cut = [f"A quick look: every row was limited to {plural(int(limit), 'picture')}."] if limit else []
    fewest = min((row.images for row in results.rows if row.images), default=ENOUGH)
    if fewest < ENOUGH:
        cut.append(
            f"{plural(fewest, 'picture')} a row are too few to judge quality by a distance, whatever the verdicts say."
        )
    cut += [f"Time: {note}."] if note else []
    return cut + [f"Failed: {row.name} ({row.failed})." for row in results.rows if row.failed]
