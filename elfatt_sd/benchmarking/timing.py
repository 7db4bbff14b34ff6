"""Calls timed in turns, after a warm-up that tells which of them are quick and which do not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.measuring.clock import Call, Turn, interleave, timed

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


def time_in_turns(
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
    warm = calls if warm_up is None else warm_up
    done, each = 0, repeats - first
    total = len(warm) + each * len(calls)

    def tell() -> None:
        nonlocal done
        done += 1
        watch.turn(done, total)

    def lose(turn: Turn, error: Exception) -> None:
        nonlocal total
        if turn.name not in calls or not is_out_of_memory(error):
            raise error
        total -= each
        watch.lost(turn.name)
        tell()

    repeated = dict.fromkeys(calls, 1)
    lasted: dict[str, float] = {}
    for turns in interleave([*warm], lambda turn: timed(warm[turn.name], device), [0], lose=lose):
        for turn, taken in turns:
            lasted[turn.name] = taken
            if device.type != "cpu" and turn.name in repeated and taken < QUICK:
                repeated[turn.name] = max(1, min(20, round(0.1 / timed(warm[turn.name], device))))
            tell()
    names = [name for name in calls if name in lasted or name not in warm]
    if any(lasted.get(name, QUICK) < QUICK for name in names):
        for name in names:
            if name not in warm:
                calls[name]()
    if not names:
        return times

    def take(turn: Turn) -> float:
        taken = timed(calls[turn.name], device, repeated[turn.name])
        tell()
        return taken

    for turns in interleave(names, take, range(first, repeats), seconds=seconds):
        for name, taken in {turn.name: taken for turn, taken in turns}.items():  # of a whole round
            times[name].append(taken)
        watch.round()
    return times


def without_gradients(calls: Mapping[str, Call]) -> dict[str, Call]:
    """Return the calls, each under `torch.inference_mode`."""
    return {name: torch.inference_mode()(call) for name, call in calls.items()}
