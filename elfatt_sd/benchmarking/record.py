"""The record of a benchmark: raw rounds on disk as they come, and the same command goes on where it stopped.

A group is what is timed together, such as one image size. Its rounds are whole, so rounds of several sittings can
be compared: ratios are taken within a round.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import elfatt_sd
from elfatt_sd.benchmarking.rows import Results, make_exponents, make_rows
from elfatt_sd.benchmarking.timing import Watch, time_in_turns
from elfatt_sd.config import ElfattError
from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.files import is_hidden, write_json
from elfatt_sd.measuring.clock import Call, now
from elfatt_sd.measuring.machine import Bystanders, describe_machine
from elfatt_sd.progress import Progress

_FREE = ("commit",)  # of the machine: the hash of the code says more
_NOT_TIMED = (  # files and folders of the package
    "benchmark_cli",
    "cli",
    "conclusion",
    "console",
    "doctor",
    "evaluation",
    "generation",
    "pictures",
    "plots",
    "progress",
    "report",
    "rows",
    "suite",
    "tables",
    "terminal",
    "toy",
    "trial",
)


@dataclass
class Session:
    """What one invocation of a benchmark writes and tells.

    Attributes:
        out: folder of the JSON file; None writes nothing.
        name: of the file, if not that of the benchmark.
        again: start over where the file holds results.
        command: the words that were typed, for the record.
        markdown: whether the table is printed as Markdown.
        progress: called with a group's name, the number of all calls done, and of all that are known to come.
        keep_going: leave out a variant that fails, and keep the reason; otherwise only what does not fit into memory.
        results: of the benchmark that began last.
    """

    out: Path | None = None
    name: str | None = None
    again: bool = False
    command: str = ""
    markdown: bool = False
    progress: Progress = lambda name, done, total: None
    keep_going: bool = False
    results: Results | None = None

    def path(self, kind: str) -> Path | None:
        """Return where a benchmark's results go."""
        return None if self.out is None else self.out / f"{self.name or kind}.json"


class Record:
    """The results of one benchmark; they are written after every round.

    Args:
        session: where to; None keeps them in memory.
        kind: which benchmark.
        device: that it runs on.
        settings: what decides about the figures; earlier results with other ones are not added to.
        **details: further keys of the results, such as `bases`, the rows that others are compared with.

    Raises:
        ElfattError: the file holds results of other settings, code or another machine.
    """

    def __init__(
        self, session: Session | None, kind: str, device: torch.device, settings: Mapping[str, Any], **details: Any
    ) -> None:
        self._session = session or Session()
        self._device = device
        self._done = self._ahead = 0  # calls of stages that are over, and of those that were announced
        self._path = self._session.path(kind)
        machine = {**describe_machine(device), "code_sha256": code_hash()}
        fresh = {"kind": kind, "command": self._session.command, "settings": dict(settings), "machine": machine}
        fresh |= {**details, "groups": [], "rows": []}
        fresh = json.loads(json.dumps(fresh))  # as it will be read back
        earlier = None if self._session.again else _read(self._path)
        if earlier is not None:
            if different := differences(earlier, fresh):
                raise ElfattError(
                    f"{self._path} holds other results ({'; '.join(different)}); give another --name, or "
                    "--again to start over."
                )
            fresh |= {"groups": earlier["groups"]}
        self.results: Results = fresh
        self._session.results = fresh
        self._work_out()

    def time(
        self,
        key: Mapping[str, Any],
        calls: Mapping[str, Call],
        repeats: int,
        *,
        seconds: float = math.inf,
        warm_up: Mapping[str, Call] | None = None,
    ) -> dict[str, list[float]]:
        """Time calls interleaved, and keep each whole round and what was lost; see `time_in_turns`.

        Args:
            key: what tells this group from the others.
            calls: by the name of the variant.
            repeats: rounds in all, those of earlier sittings included.
            seconds: start no further round past this time.
            warm_up: calls of the warm-up round.
        """
        group = self.group(key)

        self._ahead = max(0, self._ahead - repeats * len(calls))
        turns = [0]

        def turn(done: int, total: int) -> None:
            turns.append(done)
            self.tell(title(key), done, total)

        watch = Watch(turn, self.sitting(group), lambda name, error: self.lose(key, name, error))
        calls = {name: call for name, call in calls.items() if not _is_lost(group, name)}
        warm_up = warm_up and {name: call for name, call in warm_up.items() if not _is_lost(group, name)}
        missing = repeats - min(map(len, group["times"].values()), default=0)
        if missing > 0:
            self.tell(title(key), 0, missing * len(calls) + len(calls if warm_up is None else warm_up))
        options: dict[str, Any] = {"seconds": seconds, "warm_up": warm_up, "times": group["times"], "watch": watch}
        times = time_in_turns(calls, repeats, self._device, **options)
        self._done += turns[-1]
        return times

    def lose(self, key: Mapping[str, Any], variant: str, error: Exception) -> None:
        """Leave a variant out: it does not fit into memory or, where the session keeps going, failed otherwise.

        Raises:
            Exception: the error, where it is not a reason to leave the variant out.
        """
        group = self.group(key)
        if is_out_of_memory(error):
            group["lost"].append(variant)
        elif self._session.keep_going:
            group.setdefault("failed", {})[variant] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            raise error
        group["times"].get(variant, []).clear()  # of earlier sittings, with which no more rounds can be compared
        self.save()

    def sitting(self, group: dict[str, Any]) -> Callable[[], None]:
        """Begin a sitting of a group, and return what writes everything after each of its rounds."""
        sitting: dict[str, Any] = {"started": now(), "rounds": 0, "bystanders": None}
        bystanders = Bystanders()

        def keep_round() -> None:
            if not sitting["rounds"]:
                group["sittings"].append(sitting)
            sitting["rounds"] += 1
            sitting["bystanders"] = bystanders.share()
            self.save()

        return keep_round

    def keep_peak(self, key: Mapping[str, Any], variant: str, batch: int, measure: Callable[[], int | None]) -> None:
        """Measure the peak memory of a variant, unless it is known or the variant did not fit into memory."""
        self._ahead = max(0, self._ahead - 1)
        if _is_lost(self.group(key), variant):
            return
        known = self.group(key)["peaks"].setdefault(variant, {})
        if str(batch) not in known:
            self.tell(f"{title(key)}, memory at batch {batch}", 0, 1)
            known[str(batch)] = None
            try:
                known[str(batch)] = measure()
            except Exception as error:
                self.lose(key, f"{variant}, memory at batch {batch}", error)
            self.save()
            self._done += 1
            self.tell(f"{title(key)}, memory at batch {batch}", 0, 0)

    def keep_errors(self, method: str, rows: list[dict[str, Any]]) -> None:
        """Keep further rows of a method that is compared with exact attention."""
        self.group({"method": method}).setdefault("errors", []).extend(rows)
        self.save()

    def keep_rows(self, key: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        """Keep rows that were measured as they are, without rounds."""
        self.group(key)["measured"] = [{**key, **row} for row in rows]
        self.save()

    def announce(self, calls: int) -> None:
        """Let the progress count calls that come later: rounds times variants, and measurements of memory."""
        self._ahead += calls

    def tell(self, name: str, done: int, total: int) -> None:
        """Tell how far a benchmark is, by the calls of a stage that are done and all that it has."""
        self._session.progress(name, self._done + done, self._done + total + self._ahead)

    def begun(self, key: Mapping[str, Any]) -> dict[str, list[float]]:
        """Return the rounds of a group by variant; nothing where it is not begun."""
        found = self._find(key)
        return {} if found is None else found["times"]

    def group(self, key: Mapping[str, Any]) -> dict[str, Any]:
        """Return the group of a key; a new one if there is none."""
        found = self._find(key)
        if found is None:
            found = {"key": dict(key), "times": {}, "peaks": {}, "lost": [], "sittings": []}
            self.results["groups"].append(found)
        return found

    def _find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        return next((group for group in self.results["groups"] if group["key"] == dict(key)), None)

    def save(self) -> None:
        """Work out the rows and write everything."""
        self._work_out()
        if self._path is not None:
            write_json(self._path, self.results)

    def _work_out(self) -> None:
        self.results["rows"] = make_rows(self.results)
        if self.results["kind"] == "growth":
            self.results["exponents"] = make_exponents(self.results["groups"])


def _is_lost(group: Mapping[str, Any], variant: str) -> bool:
    return variant in group["lost"] or variant in group.get("failed", ())


def title(key: Mapping[str, Any]) -> str:
    """Name a group in a few words."""
    words = {"size": "{0} pixels", "batch": "batch {0}", "tokens": "{0} tokens"}
    return ", ".join(words.get(name, "{0}").format(value) for name, value in key.items())


def differences(earlier: Results, now: Results) -> list[str]:
    """Name what keeps the rounds of two results from being compared."""
    found = []
    for part in ("kind", "settings", "machine"):
        old, new = ({part: each} if part == "kind" else each for each in (earlier.get(part, {}), now[part]))
        keys = sorted(({*old} | {*new}) - {*_FREE})
        found += [
            f"{key}: {_short(old.get(key))}, now {_short(new.get(key))}" for key in keys if old.get(key) != new.get(key)
        ]
    return found


def code_hash() -> str:
    """Return a hash of the code that is timed and of the code that times it."""
    package = Path(elfatt_sd.__file__).parent
    digest = hashlib.sha256()
    files = {path.relative_to(package).with_suffix("").as_posix(): path for path in package.rglob("*.py")}
    for name, path in sorted(files.items()):
        parts = name.split("/")
        if not any(map(is_hidden, parts)) and (not {*_NOT_TIMED} & {*parts} or name == "evaluation/errors"):
            digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path | None) -> Results | None:
    """Read earlier results; None where there are none."""
    if path is None or not path.exists():
        return None
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or not isinstance(earlier.get("groups"), list):
        raise ElfattError(f"{path} holds no results of a benchmark; give another --name, or --again to replace it.")
    return earlier


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else "..."
