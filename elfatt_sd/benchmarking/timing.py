"""Timing in turns, and what is worked out from the rounds."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.devices import is_out_of_memory, synchronize

Call = Callable[[], Any]
QUICK = 1.0  # seconds of a call up to which every call is warmed up as it is


@dataclass(frozen=True)
class Watch:
    """Who is told how a timing goes on.

    Attributes:
        turn: called after every call that counts or warms up, with the number of them so far and in all.
        round: called after every whole round.
        lost: called with the name of what does not fit into memory.
    """

    turn: Callable[[int, int], None] = lambda done, total: None
    round: Callable[[], None] = lambda: None
    lost: Callable[[str], None] = lambda name: None


def interleave(
    calls: Mapping[str, Call],
    repeats: int,
    device: torch.device,
    *,
    seconds: float = math.inf,
    warm_up: Mapping[str, Call] | None = None,
    times: dict[str, list[float]] | None = None,
    watch: Watch | None = None,
) -> dict[str, list[float]]:
    """Time functions in turns, after a warm-up round that does not count; what runs out of memory there is left out.

    Args:
        calls: what to time, by name.
        repeats: rounds; every round runs all of them, each time starting with another one.
        device: that they run on; quick calls on an accelerator are repeated within a turn.
        seconds: start no further round past this time, once there is one.
        warm_up: calls for the warm-up round, in place of the timed ones; where timed ones among them are quick, the
            others are warmed up as they are, too.
        times: of earlier rounds, to which whole rounds are added.
        watch: who is told.

    Returns:
        Seconds of one call in each round, by name; the same object as `times` where that was given.
    """
    watch = watch or Watch()
    times = {} if times is None else times
    first = min((len(times.setdefault(name, [])) for name in calls), default=repeats)
    if first >= repeats:
        return times
    start, names = time.monotonic(), list(calls)
    warm = calls if warm_up is None else warm_up
    total, done = len(warm) + (repeats - first) * len(calls), 0
    repeated = dict.fromkeys(names, 1)
    first_calls: dict[str, float] = {}
    for name, call in warm.items():
        try:
            first_calls[name] = _timed(call, 1, device)
            if device.type != "cpu" and name in repeated and first_calls[name] < QUICK:
                repeated[name] = max(1, min(20, round(0.1 / _timed(call, 1, device))))
        except Exception as error:
            if name not in calls or not is_out_of_memory(error):
                raise
            names.remove(name)
            total -= repeats - first
            watch.lost(name)
        done += 1
        watch.turn(done, total)
    if not names:
        return times
    if any(first_calls.get(name, QUICK) < QUICK for name in names):
        for name in names:
            if name not in warm:
                calls[name]()
    for turn in range(first, repeats):
        if turn > first and time.monotonic() - start > seconds:
            break
        shift, taken = turn % len(names), {}
        for name in names[shift:] + names[:shift]:
            taken[name] = _timed(calls[name], repeated[name], device)
            done += 1
            watch.turn(done, total)
        for name in names:
            times[name].append(taken[name])
        watch.round()
    return times


def _timed(call: Call, repeated: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeated):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeated


def without_gradients(calls: Mapping[str, Call]) -> dict[str, Call]:
    """Return the calls, each under `torch.inference_mode`."""
    return {name: torch.inference_mode()(call) for name, call in calls.items()}


def ratios(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest of `base / other` over the rounds."""
    return _span([before / after for before, after in zip(base, other, strict=True)])


def fit_exponent(times: Mapping[int, Sequence[float]]) -> dict[str, float] | None:
    """Return median, least and greatest of the slope of time over tokens in double logarithm, over the rounds.

    Args:
        times: seconds in each round, by the number of tokens; rounds that not all sizes have are left out.

    Returns:
        None for fewer than two sizes.
    """
    if len(times) < 2:
        return None
    sizes = [math.log(tokens) for tokens in times]
    turns = zip(*times.values(), strict=False)
    return _span([statistics.linear_regression(sizes, [math.log(t) for t in turn]).slope for turn in turns])


def _span(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class Bystanders:
    """Measures what share of the machine's processor time went to other processes, from its making on."""

    def __init__(self) -> None:
        self._start = _processor_seconds()

    def share(self) -> float | None:
        """Return the share since the start, in [0, 1]; None where the system does not tell."""
        now = _processor_seconds()
        if now is None or self._start is None:
            return None
        everything, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        return min(1.0, max(0.0, (busy - own) / everything)) if everything > 0 else None


def _processor_seconds() -> tuple[float, float, float] | None:
    """Return the seconds of all processors, those they were busy, and those spent for this process."""
    try:
        fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    unit = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]
    own = os.times()
    return (
        sum(fields) / unit,
        (sum(fields) - idle) / unit,
        own.user + own.system + own.children_user + own.children_system,
    )
