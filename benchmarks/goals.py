"""What follows from the parts of a suite: goals, the growth of memory, the greatest peaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elfatt_sd.benchmarking.report import Results, own_part
from elfatt_sd.benchmarking.variants import UNPATCHED, is_reference
from elfatt_sd.evaluation.protocols import FEW_REPEATS

FRACTION = 0.8  # of the floor's gain, at LARGE pixels and above, in a method's own phase
LARGE, SMALL = 768, 512  # pixels; with graphs no method may be slower than untouched at the smaller size
GAIN = 0.02  # of a floor, below which a fraction of it is noise
KEPT = RESIDUALS, MATCHINGS = "residual_steps", "reuse_steps"  # settings that keep something for other steps

Parts = Mapping[str, Results]


def all_goals(parts: Parts) -> list[dict[str, Any]]:
    """Return what is asked of all parts."""
    return [goal for name, part in parts.items() for goal in goals(name, part)]


def goals(name: str, part: Results) -> Iterator[dict[str, Any]]:
    """Yield what is asked of a part: a fraction of the floor's gain, and never to be slower than untouched."""
    rows = {row["method"]: row for row in part["rows"] if UNPATCHED in row.get("speed", ())}
    words = name.split()
    size = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    for method, row in rows.items():
        about = {"part": name, "method": method, "rounds": row["rounds"]}
        if is_reference(method):
            continue
        if size == SMALL and "graph" in words:
            yield about | {"what": "times as fast as untouched", "gain": speed(row), "goal": 1.0}
        floor = rows.get((row["floor"] or {}).get("name", ""))
        if size >= LARGE and method.startswith("elfatt-fast") and floor is not None and speed(floor) > 1 + GAIN:
            fraction = (speed(own_part(row) or row) - 1) / (speed(floor) - 1)
            yield about | {"what": "fraction of its floor's gain, own phase", "gain": fraction, "goal": FRACTION}


def speed(row: Mapping[str, Any]) -> float:
    """Return how many times as fast as untouched a row is."""
    return float(row["speed"][UNPATCHED]["median"])


def memory_slopes(parts: Parts) -> dict[str, dict[str, float]]:
    """Work out, from the largest and the least batch of a size, the peak memory of one more image in GB."""
    peaks: dict[str, dict[str, dict[int, int]]] = {}
    slopes: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        shape = " ".join(name.split()[:2])
        for row in part["rows"] if name.split()[-1].isdigit() else ():
            if row["bytes_per_picture"] is not None:
                slopes.setdefault(shape, {})[row["method"]] = row["bytes_per_picture"] / 1e9
            elif row["peak_bytes"] is not None:
                known = peaks.setdefault(shape, {}).setdefault(row["method"], {})
                known[int(name.split()[-1])] = row["peak_bytes"]
    for shape, methods in peaks.items():
        for method, known in methods.items():
            if len(known) > 1:
                growth = (known[max(known)] - known[min(known)]) / (max(known) - min(known))
                slopes.setdefault(shape, {})[method] = growth / 1e9
    return slopes


def greatest_peaks(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return, for each part with peaks, which of our methods has the greatest, and which fraction of untouched's."""
    found = {name: greatest_peak(part) for name, part in parts.items() if "runs" in part}
    return {name: {"method": method, "share": share} for name, (method, share) in found.items() if share}


def greatest_peak(results: Results, kept: str = "") -> tuple[str, float | None]:
    """Return which of our methods has the greatest peak, and that as a fraction of the untouched call's."""
    known = {row["method"]: row["peak_bytes"] for row in results.get("rows", ()) if row["peak_bytes"]}
    fitting = {row["method"] for row in results.get("rows", ()) if _kept(results, row) == kept}
    ours = [method for method in known if not is_reference(method) and method in fitting]
    if not ours or UNPATCHED not in known:
        return "", None
    greatest = max(ours, key=known.__getitem__)
    return greatest, known[greatest] / known[UNPATCHED]


def _kept(results: Results, row: Mapping[str, Any]) -> str:
    """Name the setting by which a method keeps the difference to exact attention, or a matching, for other steps."""
    named = results["settings"]["variants"]
    configs = [named[part["variant"]]["config"] for part in row.get("parts", ())]
    if any(phase["residual_steps"] > 1 for config in configs for phase in config["phases"]):
        return RESIDUALS
    return MATCHINGS if any(config["reuse_steps"] > 1 for config in configs) else ""


def verdict(met: bool, rounds: int = FEW_REPEATS) -> str:
    return few_rounds(rounds) or ("met" if met else "**missed**")


def few_rounds(rounds: int) -> str:
    return f"only {rounds} round{'s' * (rounds > 1)}" if rounds < FEW_REPEATS else ""
