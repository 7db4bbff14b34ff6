"""From raw rounds to rows: medians, ratios within rounds, peak memory and its growth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from elfatt_sd.benchmarking.names import UNPATCHED, is_reference, plain_name
from elfatt_sd.measuring.clock import Spread, ratios

Results = dict[str, Any]
Times = Mapping[str, Sequence[float]]
KEPT = RESIDUALS, MATCHINGS = "residual_steps", "reuse_steps"  # settings that keep something for other steps


def make_rows(results: Results) -> list[dict[str, Any]]:
    """Work out a row for each group and method."""
    rows: list[dict[str, Any]] = []
    for group in results["groups"]:
        rows += group.get("measured", ())
        known = {name: times for name, times in group["times"].items() if times}
        runs = results.get("runs") or {name: {"parts": [[name, 1]], "floor": None} for name in known}
        runs = {method: run for method, run in runs.items() if all(name in known for name, _ in run["parts"])}
        totals = {method: _total(run["parts"], known) for method, run in runs.items()}
        for method, run in runs.items():
            bases = [base for base in results["bases"] if base in totals]
            names = [name for name, _ in run["parts"]]
            row = {**group["key"], "method": method, **_timing(totals[method], totals, bases, run["floor"])}
            row |= _memory([group["peaks"].get(name, {}) for name in names], group["key"].get("batch"))
            if len(names) > 1 or names[0] != method:
                row["parts"] = [
                    {"variant": name, "steps": steps, "what": results["settings"]["variants"][name]["what"]}
                    | _timing(known[name], totals, bases, run["floor"])
                    for name, steps in run["parts"]
                ]
            rows.append(row)
    return rows


def own_part(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    parts, prefix = row.get("parts", ()), f"{plain_name(row['method'])}/"
    own = [part for part in parts if part["variant"].startswith(prefix)]
    return min(own, key=lambda part: part["seconds"], default=None) if len(parts) > 1 else None


def beats_its_floor(row: Mapping[str, Any]) -> bool:
    floor = row.get("floor")
    return floor is not None and round(floor["median"], 3) < 1


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


def _total(parts: Sequence[tuple[str, int]], times: Times) -> list[float]:
    """Add up, round by round, the parts of a run, as the mean of its steps."""
    steps = sum(count for _, count in parts)
    turns = min(len(times[name]) for name, _ in parts)
    return [sum(times[name][turn] * count for name, count in parts) / steps for turn in range(turns)]


def _timing(own: Sequence[float], totals: Times, bases: Sequence[str], floor: str | None) -> dict[str, Any]:
    return {
        "seconds": statistics.median(own),
        "rounds": len(own),
        "speed": {base: _ratio(totals[base], own) for base in bases},
        "floor": {"name": floor, **_ratio(own, totals[floor])} if floor is not None and floor in totals else None,
    }


def _ratio(base: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    return Spread.over(ratios(base, own))._asdict()


def _memory(peaks: Sequence[Mapping[str, int | None]], batch: int | None) -> dict[str, Any]:
    """Take the greatest peak of a run's parts at the timed batch, and its growth for one more image: two rows."""
    known = [{int(batch): peak for batch, peak in each.items() if peak is not None} for each in peaks]
    batches = sorted(set.intersection(*map(set, known)))
    greatest = {batch: max(each[batch] for each in known) for batch in batches}
    growth = None
    if len(batches) > 1:
        least, most = batches[0], batches[-1]
        growth = 2 * (greatest[most] - greatest[least]) / (most - least)
    return {"peak_bytes": None if batch is None else greatest.get(batch), "bytes_per_picture": growth}
