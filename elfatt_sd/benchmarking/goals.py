"""What the project asks of its speed and memory, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elfatt_sd.benchmarking.names import PEER, UNPATCHED, is_reference
from elfatt_sd.benchmarking.rows import Results, own_part

Row = Mapping[str, Any]
MEMORY_NOISE = 1.01  # pages that a process counts late


@dataclass(frozen=True)
class Goal:
    """A figure that is asked for.

    Attributes:
        what: it is.
        limit: that it must not pass.
        value: that was measured; None where nothing was.
        most: whether the limit is an upper one.
    """

    what: str
    limit: float
    value: float | None
    most: bool = True

    def __str__(self) -> str:
        """Return the goal as a line of a table."""
        asked = f"at {'most' if self.most else 'least'} {self.limit:g}"
        if self.value is None:
            return f"| {self.what} | {asked} | not measured yet | |"
        met = self.value <= self.limit if self.most else self.value >= self.limit
        return f"| {self.what} | {asked} | {self.value:.3f} | {'met' if met else '**missed**'} |"


def goals_table(folder: Path) -> str:
    """Return all goals as a Markdown table.

    Args:
        folder: of the results.
    """
    lines = ["| goal | asked | measured | |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(str, _goals(folder))]) + "\n"


def _goals(folder: Path) -> Iterator[Goal]:
    merging, growth = _read(folder, "merging"), _read(folder, "growth")
    for tokens in (4096, 16384):
        for dtype in ("float32", "bfloat16"):
            own = _row(merging, tokens=tokens, dtype=dtype, method="ours")
            yield Goal(f"merging {tokens} tokens, {dtype}: share of tomesd's time", 0.6, _share(own, "tomesd"))
    for tokens, limit in ((4096, 0.15), (16384, 0.05)):
        own = _row(growth, tokens=tokens, part="layer", method="elfatt")
        yield Goal(f"elfatt's layer, {tokens} tokens: share of fused softmax's time", limit, _share(own, "softmax"))
    exponent = growth.get("exponents", {}).get("layer", {}).get("elfatt")
    yield Goal("elfatt's layer: exponent of the growth with the tokens", 1.15, exponent)
    small, large = _read(folder, "unet-512"), _read(folder, "unet-1024")
    part = _fast(small, lambda config: config["levels"] == 1 and config["phases"][0]["block_size"] == 128)
    yield from _call_goals("512x512, one level, 128 keys", part, 1.06, 1.5, 1.15)
    part = _fast(large, lambda config: config["levels"] == 2)
    yield from _call_goals("1024x1024, two levels", part, 1.10, 3.5, 2.0)
    for size, results in ((512, small), (1024, large)):
        yield Goal(
            f"peak memory at {size}x{size}: greatest share of the untouched call's", MEMORY_NOISE, _memory(results)
        )


def _call_goals(what: str, part: Row | None, floor: float, untouched: float, tomesd: float) -> Iterator[Goal]:
    """Yield the goals of one call in the phase of `elfatt-fast`."""
    speed: Mapping[str, Any] = part["speed"] if part else {}
    yield Goal(f"elfatt-fast, {what}: times its floor's time", floor, part["floor"]["median"] if part else None)
    for base, limit in ((UNPATCHED, untouched), (PEER, tomesd)):
        measured = speed[base]["median"] if base in speed else None
        yield Goal(f"elfatt-fast, {what}: times as fast as {base}", limit, measured, most=False)


def _fast(results: Results, fits: Callable[[Mapping[str, Any]], bool]) -> Row | None:
    """Return the phase of `elfatt-fast` that is closest to its floor, among the settings that fit."""
    named = results["settings"]["variants"] if results else {}
    rows = [row for row in results.get("rows", ()) if row["method"].split(":")[0] == "elfatt-fast"]
    parts = [part for part in map(own_part, rows) if part and fits(named[part["variant"]]["config"])]
    return min(parts, key=lambda part: part["floor"]["median"], default=None)


def _memory(results: Results) -> float | None:
    """Return the greatest peak of our methods as a share of the untouched call's."""
    known = {row["method"]: row["peak_bytes"] for row in results.get("rows", ()) if row["peak_bytes"] is not None}
    ours = [peak for method, peak in known.items() if not is_reference(method)]
    return max(ours) / known[UNPATCHED] if ours else None


def _share(row: Row | None, base: str) -> float | None:
    """Return a method's time as a share of another's."""
    return 1 / row["speed"][base]["median"] if row else None


def _row(results: Results, **key: Any) -> Row | None:
    rows = results.get("rows", ())
    return next((row for row in rows if all(row.get(name) == value for name, value in key.items())), None)


def _read(folder: Path, name: str) -> Results:
    path = folder / f"{name}.json"
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results
