"""What results say in a sentence or two: what is fastest, and what does not pay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elfatt_sd.benchmarking.names import COMPILED, is_reference
from elfatt_sd.benchmarking.rows import Results, beats_its_floor
from elfatt_sd.benchmarking.tables import groups, spread

Row = Mapping[str, Any]
MOST_GROUPS = 3  # that have sentences: the last ones, which are the largest


def conclude(results: Results) -> list[str]:
    named = list(groups(results["rows"]).items())[-MOST_GROUPS:]
    return [f"{name}: {' '.join(_sentences(rows, results['bases']))}" for name, rows in named]


def _sentences(rows: Sequence[Row], bases: Sequence[str]) -> Iterator[str]:
    base = next((base for base in bases if any(base in row["speed"] for row in rows)), None)
    ours = [row for row in rows if row["method"] not in bases and not is_reference(row["method"])]
    if base is None or not ours:
        yield "nothing was timed that could be compared."
        return
    speeds = {row["method"]: row["speed"].get(base + COMPILED * row["method"].endswith(COMPILED)) for row in ours}
    speeds = {name: speed or row["speed"][base] for (name, speed), row in zip(speeds.items(), ours, strict=True)}
    best = max(ours, key=lambda row: row["speed"][base]["median"])
    yield from _fastest(best, base)
    losers = {name: speed for name, speed in speeds.items() if speed["median"] <= 1}
    if losers:
        yield f"Does not pay: {', '.join(f'{name} {spread(speed)}' for name, speed in losers.items())}."
    unsure = [name for name, speed in speeds.items() if speed["min"] <= 1 < speed["median"]]
    if unsure:
        yield f"Not faster in every round, so undecided: {', '.join(unsure)}."


def _fastest(row: Row, base: str) -> Iterator[str]:
    ratio, rounds = row["speed"][base], row["rounds"]
    least = "" if ratio["min"] == ratio["max"] else f" ({ratio['min']:.2f} to {ratio['max']:.2f} in {rounds} rounds)"
    if ratio["median"] > 1:
        yield f"{row['method']} is fastest, {ratio['median']:.2f} times as fast as {base}{least}."
    else:
        yield f"no method is faster than {base}; the best is {row['method']}, {ratio['median']:.2f} times{least}."
    if beats_its_floor(row):
        yield "That is faster than its floor, so it is noise: repeat with more rounds."
    elif rounds == 1:
        yield "One round tells little: repeat with more rounds."
