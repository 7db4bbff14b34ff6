"""What a benchmark gives: the raw rounds of what is timed together, such as one image size, and the rows from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.benchmarking.rows import Results, make_rows
from elfatt_sd.benchmarking.timing import time_in_turns
from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.measuring.clock import Call, now
from elfatt_sd.measuring.machine import Bystanders, describe_machine
from elfatt_sd.progress import Progress


@dataclass
class Session:
    """What one invocation of a benchmark writes and tells."""

    out: Path | None = None  # folder of the files of results; None writes nothing
    name: str | None = None  # of these files, if not that of the benchmark
    command: str = ""  # the words that were typed, which the results have
    markdown: bool = False  # whether the table is printed as Markdown
    # called with a group's name, the number of all calls done, and of all that are known to come
    progress: Progress = lambda name, done, total: None
    # leave out a variant that fails, and keep the reason; otherwise only what does not fit into memory
    keep_going: bool = False
    results: Results | None = None  # of the benchmark that began last

    def path(self, kind: str) -> Path | None:
        return None if self.out is None else self.out / f"{self.name or kind}.json"


class Record:
    """The results of one benchmark, at any time with the rows of what is measured so far."""

    def __init__(
        self, session: Session | None, kind: str, device: torch.device, settings: Mapping[str, Any], **details: Any
    ) -> None:
        self._session = session or Session()
        self._device = device
        self._done = self._ahead = 0  # calls of stages that are over, and of those that were announced
        self.results: Results = {"kind": kind, "command": self._session.command, "settings": dict(settings)}
        self.results |= {"machine": describe_machine(device), **details, "groups": [], "rows": []}
        self._session.results = self.results

    def time(
        self,
        key: Mapping[str, Any],
        calls: Mapping[str, Call],
        repeats: int,
        *,
        seconds: float = math.inf,
        warm_up: Mapping[str, Call] | None = None,
    ) -> None:
        """Time calls interleaved, and keep each whole round and what was lost; see `time_in_turns`."""
        group, bystanders, started = self.group(key), Bystanders(), now()
        self._ahead = max(0, self._ahead - repeats * len(calls))
        turns = [0]

        def turn(done: int, total: int) -> None:
            turns.append(done)
            self.tell(title(key), done, total)

        self.tell(title(key), 0, repeats * len(calls) + len(calls if warm_up is None else warm_up))
        try:
            options: dict[str, Any] = {"seconds": seconds, "warm_up": warm_up, "times": group["times"], "tell": turn}
            lose = functools.partial(self.lose, key)
            time_in_turns(calls, repeats, self._device, **options, lose=lose)
        finally:  # also when it is stopped
            self._done += turns[-1]
            if rounds := max(map(len, group["times"].values()), default=0):
                group["sittings"] = [{"started": started, "rounds": rounds, "bystanders": bystanders.share()}]
            self.work_out()

    def lose(self, key: Mapping[str, Any], variant: str, error: Exception) -> None:
        """Leave a variant out: it does not fit into memory or, where the session keeps going, failed otherwise."""
        group = self.group(key)
        if is_out_of_memory(error):
            group["lost"].append(variant)
        elif self._session.keep_going:
            group.setdefault("failed", {})[variant] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            raise error

    def keep_peak(self, key: Mapping[str, Any], variant: str, batch: int, measure: Callable[[], int | None]) -> None:
        """Measure the peak memory of a variant, unless the variant did not fit into memory."""
        self._ahead = max(0, self._ahead - 1)
        group, what = self.group(key), f"{title(key)}, memory at batch {batch}"
        if variant in group["lost"] or variant in group.get("failed", ()):
            return
        self.tell(what, 0, 1)
        peaks = group["peaks"].setdefault(variant, {})
        peaks[str(batch)] = None
        try:
            peaks[str(batch)] = measure()
        except Exception as error:
            self.lose(key, f"{variant}, memory at batch {batch}", error)
        self.work_out()
        self._done += 1
        self.tell(what, 0, 0)

    def keep_rows(self, key: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        """Keep rows that were measured as they are, without rounds."""
        self.group(key)["measured"] = [{**key, **row} for row in rows]
        self.work_out()

    def announce(self, calls: int) -> None:
        """Let the progress count calls that come later: rounds times variants, and measurements of memory."""
        self._ahead += calls

    def tell(self, name: str, done: int, total: int) -> None:
        """Tell how far a benchmark is, by the calls of a stage that are done and all that it has."""
        self._session.progress(name, self._done + done, self._done + total + self._ahead)

    def group(self, key: Mapping[str, Any]) -> dict[str, Any]:
        found = next((group for group in self.results["groups"] if group["key"] == dict(key)), None)
        if found is None:
            found = {"key": dict(key), "times": {}, "peaks": {}, "lost": [], "sittings": []}
            self.results["groups"].append(found)
        return found

    def work_out(self) -> None:
        """Make the rows of what there is."""
        self.results["rows"] = make_rows(self.results)


def title(key: Mapping[str, Any]) -> str:
    """Name a group in a few words."""
    words = {"size": "{0} pixels", "batch": "batch {0}", "tokens": "{0} tokens"}
    return ", ".join(words.get(name, "{0}").format(value) for name, value in key.items())
