"""What a benchmark gives: the raw rounds of what is timed together, such as one image size, and the rows from them."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from elfatt_sd.benchmarking.variants import plain_name
from elfatt_sd.devices import Bystanders, describe_machine
from elfatt_sd.errors import is_out_of_memory
from elfatt_sd.measure import Call, Comparison, Spread, Turn, now, ratios, timed
from elfatt_sd.progress import Progress

Results = dict[str, Any]
Times = Mapping[str, Sequence[float]]
QUICK = 1.0  # seconds of a call on a GPU below which several calls are timed together


@dataclass
class Session:
    """One invocation of a benchmark: what it writes and tells, and at any time the rows of what is measured so far."""

    out: Path | None = None  # folder of the files of results; None writes nothing
    name: str | None = None  # of these files, if not that of the benchmark
    command: str = ""  # the words that were typed, which the results have
    markdown: bool = False  # whether the table is printed as Markdown
    # called with a group's name, and the numbers of its calls that are done and that it has
    progress: Progress = lambda name, done, total: None
    # leave out a variant that fails, and keep the reason; otherwise only what does not fit into memory
    keep_going: bool = False
    results: Results = field(default_factory=dict)  # empty until it begins

    def begin(self, kind: str, device: torch.device, settings: Mapping[str, Any], **details: Any) -> Self:
        self._device = device
        self.results = {"kind": kind, "command": self.command, "settings": dict(settings)}
        self.results |= {"machine": describe_machine(device), **details, "groups": [], "rows": []}
        return self

    def path(self) -> Path | None:
        return None if self.out is None else self.out / f"{self.name or self.results['kind']}.json"

    def time(
        self,
        key: Mapping[str, Any],
        calls: Mapping[str, Call],
        repeats: int,
        *,
        seconds: float = math.inf,
        warm_up: Mapping[str, Call] | None = None,
    ) -> None:
        """Time calls interleaved, and keep each whole round; they are warmed up, or what is given does so for them."""
        group, bystanders, started = self.group(key), Bystanders(), now()
        warm, repeated = warm_up or calls, dict[str, int]()

        def take(turn: Turn) -> float:
            return timed(calls[turn.name], self._device, repeated.get(turn.name, 1))

        def warm_one(turn: Turn) -> float:
            taken = timed(warm[turn.name], self._device)
            if self._device.type != "cpu" and taken < QUICK:
                repeated[turn.name] = max(1, min(20, round(0.1 / timed(warm[turn.name], self._device))))
            return taken

        tell = functools.partial(self.progress, title(key))
        lose = functools.partial(self.lose, key)
        compared = Comparison([*calls], take, repeats, tell, lose, group["times"])
        tell(0, (repeats + 1) * len(calls))
        try:
            compared.warm_up(warm_one)
            compared.run(seconds)
        finally:  # also when it is stopped
            rounds = min((len(compared.times[name]) for name in compared.names), default=0)
            for name in compared.names:
                del compared.times[name][rounds:]  # of a round that was not finished
            if rounds:
                group["sittings"] = [{"started": started, "rounds": rounds, "bystanders": bystanders.share()}]
            self.work_out()

    def lose(self, key: Mapping[str, Any], variant: str, error: Exception) -> None:
        """Leave a variant out: it does not fit into memory or, where the session keeps going, failed otherwise."""
        group = self.group(key)
        if is_out_of_memory(error):
            group["lost"].append(variant)
        elif self.keep_going:
            group.setdefault("failed", {})[variant] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            raise error

    def keep_peak(self, key: Mapping[str, Any], variant: str, batch: int, measure: Callable[[], int | None]) -> None:
        """Measure the peak memory of a variant, unless the variant did not fit into memory."""
        group, what = self.group(key), f"{variant}, memory at batch {batch}"
        if variant in group["lost"] or variant in group.get("failed", ()):
            return
        self.progress(f"{title(key)}, {what}", 0, 1)
        peaks = group["peaks"].setdefault(variant, {})
        peaks[str(batch)] = None
        try:
            peaks[str(batch)] = measure()
        except Exception as error:
            self.lose(key, what, error)
        self.work_out()

    def keep_rows(self, key: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        """Keep rows that were measured as they are, without rounds."""
        self.group(key)["measured"] = [{**key, **row} for row in rows]
        self.work_out()

    def group(self, key: Mapping[str, Any]) -> dict[str, Any]:
        found = next((group for group in self.results["groups"] if group["key"] == dict(key)), None)
        if found is None:
            found = {"key": dict(key), "times": {}, "peaks": {}, "lost": [], "sittings": []}
            self.results["groups"].append(found)
        return found

    def work_out(self) -> None:
        self.results["rows"] = make_rows(self.results)


def make_rows(results: Results) -> list[dict[str, Any]]:
    """Work out a row for each group and method."""
    rows: list[dict[str, Any]] = []
    for group in results["groups"]:
        rows += group.get("measured", ())
        known = {name: times for name, times in group["times"].items() if times}
        runs = results.get("runs") or {name: {"parts": [[name, 1]], "floor": None} for name in known}
        runs = {method: run for method, run in runs.items() if all(name in known for name, _ in run["parts"])}
        totals: dict[str, list[float]] = {}
        for method, run in runs.items():  # round by round, the parts of a run added up, as the mean of its steps
            steps = sum(count for _, count in run["parts"])
            turns = range(min(len(known[name]) for name, _ in run["parts"]))
            totals[method] = [sum(known[name][turn] * count for name, count in run["parts"]) / steps for turn in turns]
        for method, run in runs.items():
            bases = [base for base in results["bases"] if base in totals]
            names = [name for name, _ in run["parts"]]
            row = {**group["key"], "method": method, **_timing(totals[method], totals, bases, run["floor"])}
            # The greatest peak of the parts at the timed batch, and its growth for one more image, which is two rows.
            peaks = [group["peaks"].get(name, {}) for name in names]
            known_at = [{int(batch): peak for batch, peak in each.items() if peak is not None} for each in peaks]
            batches = sorted(set.intersection(*map(set, known_at)))
            greatest = {batch: max(each[batch] for each in known_at) for batch in batches}
            growth = None
            if len(batches) > 1:
                growth = 2 * (greatest[batches[-1]] - greatest[batches[0]]) / (batches[-1] - batches[0])
            row |= {"peak_bytes": greatest.get(group["key"].get("batch")), "bytes_per_picture": growth}
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


def _timing(own: Sequence[float], totals: Times, bases: Sequence[str], floor: str | None) -> dict[str, Any]:
    def ratio(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
        return Spread.over(ratios(base, other))._asdict()

    return {
        "seconds": statistics.median(own),
        "rounds": len(own),
        "speed": {base: ratio(totals[base], own) for base in bases},
        "floor": {"name": floor, **ratio(own, totals[floor])} if floor is not None and floor in totals else None,
    }


def title(key: Mapping[str, Any]) -> str:
    """Name a group in a few words."""
    words = {"size": "{0} pixels", "batch": "batch {0}", "tokens": "{0} tokens"}
    return ", ".join(words.get(name, "{0}").format(value) for name, value in key.items())
