"""What the project asks of its speed and memory, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.goals import KEPT, few_rounds, greatest_peak, verdict
from elfatt_sd.benchmarking.report import Results, own_part, spread
from elfatt_sd.benchmarking.variants import PEER, UNPATCHED
from elfatt_sd.evaluation.protocols import FEW_REPEATS
from elfatt_sd.files import read_typed

Row = Mapping[str, Any]
BUSY = 0.05  # fraction of the processors' time that other processes may take
FLOOR, PEAK = 1.10, 1.02  # of a transformer's floor's time, and of its untouched call's peak
POSITIONS = 1.005  # the indices of the tokens that a method merges or samples
MERGING = 0.6  # of tomesd's time
NOISE = 0.97  # of its floor's time: no call is faster, so a round below was disturbed
CALLS = {  # results of UNet calls
    "unet-512": "512x512",
    "unet-1024": "1024x1024",
    "unet-2048": "2048x2048",
    "sdxl-1024": "SDXL's shape, 1024x1024",
}
TRANSFORMERS = {  # results of calls of transformers; what the approximating phase is asked to gain
    "flux-2048": ("Flux, 2048x2048, 16,896 tokens", 1.7),
    "wan-480p": ("Wan 1.3B, 480p, 32,760 tokens", 3.0),
}


@dataclass(frozen=True)
class Goal:
    """A figure that is asked for.

    Attributes:
        what: it is.
        limit: that it must not pass.
        value: that was measured, over the rounds: `median`, `min` and `max`; None where nothing was.
        row: that it was read off.
        doubt: why the figure decides nothing; empty where it does.
        remark: what is said next to the verdict.
        most: whether the limit is an upper one.
    """

    what: str
    limit: float
    value: Mapping[str, float] | None
    row: str = ""
    doubt: str = ""
    remark: str = ""
    most: bool = True

    def __str__(self) -> str:
        """Return the goal as a line of a table."""
        asked = f"at {'most' if self.most else 'least'} {self.limit:g}"
        if self.value is None:
            return f"| {self.what} | {asked} | not measured yet | | |"
        met = [self._meets(self.value[name]) for name in ("median", "min", "max")]
        said = verdict(met[0]) + " by the median, not in every round" * (len({*met}) > 1) + self.remark
        return f"| {self.what} | {asked} | {spread(self.value, 3)} | `{self.row}` | {self.doubt or said} |"

    def _meets(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit


def goals_table(folder: Path) -> str:
    """Return all goals as a Markdown table.

    Args:
        folder: of the results.
    """
    lines = ["| goal | asked | measured | row | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(str, _goals(folder))]) + "\n"


def _goals(folder: Path) -> Iterator[Goal]:
    merging, growth = _read(folder, "merging"), _read(folder, "growth")
    for tokens in (4096, 16384):
        for dtype in ("float32", "bfloat16"):
            rows = _rows(merging, tokens=tokens, dtype=dtype, method="ours")
            floor = _share(_rows(merging, tokens=tokens, dtype=dtype, method="floor: similarities"), PEER)
            beyond = floor is not None and floor["median"] > MERGING
            remark = f"; its floor takes {floor['median']:.2f}" if floor and beyond else ""
            what = f"merging {tokens} tokens, {dtype}: fraction of tomesd's time"
            yield Goal(what, MERGING, _share(rows, PEER), "ours", _doubt(merging, rows), remark)
    own = _rows(growth, part="layer", method="elfatt")
    for tokens, limit in ((4096, 0.15), (16384, 0.05)):
        rows = [row for row in own if row["tokens"] == tokens]
        what = f"ELFATT's layer without merging, {tokens} tokens: fraction of fused softmax's time"
        yield Goal(what, limit, _share(rows, "softmax"), "elfatt", _doubt(growth, rows))
    exponent = growth.get("exponents", {}).get("layer", {}).get("elfatt")
    what = "ELFATT's layer without merging: exponent of the growth with the tokens"
    yield Goal(what, 1.15, exponent, "elfatt", _doubt(growth, own))
    calls = {name: _read(folder, name) for name in CALLS}
    small, large = calls["unet-512"], calls["unet-1024"]
    row = _fast(small, lambda config: config["levels"] == 1 and config["phases"][0]["block_size"] == 128)
    yield from _call_goals("512x512, one level, 128 keys", small, row, 1.06, {UNPATCHED: 1.5, PEER: 1.15})
    row = _fast(large, lambda config: config["levels"] == 2)
    yield from _call_goals("1024x1024, two levels", large, row, 1.10, {UNPATCHED: 3.5, PEER: 2.0})
    for name, results in calls.items():
        for kept in ("", *KEPT):
            greatest, share = greatest_peak(results, kept)
            what = f"peak memory, {CALLS[name]}{kept and f', with `{kept}`'}: greatest fraction of the untouched call's"
            if share is not None or not kept:
                yield Goal(what, POSITIONS, _certain(share), greatest)
    for name, (title, speed) in TRANSFORMERS.items():
        results = _read(folder, name)
        yield from _call_goals(title, results, _fast(results, lambda _: True), FLOOR, {UNPATCHED: speed})
        greatest, share = greatest_peak(results)
        yield Goal(f"peak memory, {title}: greatest fraction of the untouched call's", PEAK, _certain(share), greatest)


def _call_goals(
    what: str, results: Results, row: Row | None, floor: float, speeds: Mapping[str, float]
) -> Iterator[Goal]:
    """Yield the goals of one call in the phase of `elfatt-fast`."""
    part = (own_part(row) if row else None) or {}
    speed: Mapping[str, Any] = part.get("speed", {})
    name, doubt = (row["method"], _doubt(results, [row])) if row else ("", "")
    share = part.get("floor")
    noise = f"; noisy, a round at {share['min']:.2f} of its floor" if share and share["min"] < NOISE else ""
    yield Goal(f"elfatt-fast, {what}: times its floor's time", floor, share, name, doubt, noise)
    floors = _rows(results, method=share["name"]) if share else []
    for base, limit in speeds.items():
        reachable = floors[0]["speed"][base]["median"] if floors else limit
        remark = f"; its floor is {reachable:.2f} times as fast" if reachable < limit else ""
        yield Goal(f"elfatt-fast, {what}: times as fast as {base}", limit, speed.get(base), name, doubt, remark, False)


def _fast(results: Results, fits: Callable[[Mapping[str, Any]], bool]) -> Row | None:
    """Return the row whose phase of `elfatt-fast` is closest to its floor, among the settings that fit."""
    named = results["settings"]["variants"] if results else {}
    rows = [row for row in results.get("rows", ()) if row["method"].split(":")[0] == "elfatt-fast"]
    parts = {row["method"]: part for row in rows if (part := own_part(row)) is not None and part["floor"]}
    fitting = [row for row in rows if (part := parts.get(row["method"])) and fits(named[part["variant"]]["config"])]
    return min(fitting, key=lambda row: parts[row["method"]]["floor"]["median"], default=None)


def _doubt(results: Results, rows: Sequence[Row]) -> str:
    """Say why rows decide nothing: too few rounds, or a machine that did something else."""
    rounds = min((row["rounds"] for row in rows), default=FEW_REPEATS)
    groups = [group for group in results.get("groups", ()) if any(group["key"].items() <= row.items() for row in rows)]
    busy = max((sitting["bystanders"] or 0.0 for group in groups for sitting in group["sittings"]), default=0.0)
    return ", ".join(filter(None, (few_rounds(rounds), f"machine busy ({busy:.0%})" * (busy > BUSY))))


def _share(rows: Sequence[Row], base: str) -> dict[str, float] | None:
    """Return a method's time as a fraction of another's; None where one of them was not measured."""
    speed = rows[0]["speed"].get(base) if rows else None
    return {"median": 1 / speed["median"], "min": 1 / speed["max"], "max": 1 / speed["min"]} if speed else None


def _certain(value: float | None) -> dict[str, float] | None:
    """Return a figure that is the same in all rounds."""
    return None if value is None else dict.fromkeys(("median", "min", "max"), value)


def _rows(results: Results, **key: Any) -> list[Row]:
    return [row for row in results.get("rows", ()) if key.items() <= row.items()]


def _read(folder: Path, name: str) -> Results:
    path = folder / f"{name}.json"
    results: Results = read_typed(path, dict[str, Any], "`elfatt-sd bench` makes it again") or {}
    return results
