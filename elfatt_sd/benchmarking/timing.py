"""Calls timed interleaved, after a warm-up that tells which of them are quick and which do not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.measuring.clock import Call, Turn, interleave, timed

QUICK = 1.0  # seconds of a call up to which every call is warmed up as it is


@dataclass(frozen=True)
class Watch:
    """Who is told how a timing goes on.

    Attributes:
        turn: called after every call that counts or warms up, with the number of them so far and in all.
        lost: called with the name of a call that failed as it warmed up, and with what it raised; it is then left out,
            unless this raises.
    """

    turn: Callable[[int, int], None] = lambda done, total: None
    lost: Callable[[str, Exception], None] = lambda name, error: _only_memory(error)


def _only_memory(error: Exception) -> None:
    """Raise what is not a lack of memory."""
    if not is_out_of_memory(error):
        raise error


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
    """Time functions interleaved, after a warm-up round that does not count; what fails there, the watch may leave out.

    Args:
        calls: what to time, by name.
        repeats: rounds; every round runs all of them, each time starting with another one.
        device: that they run on; quick calls on an accelerator are repeated within a turn.
        seconds: start no further round past this time, once there is one.
        warm_up: calls for the warm-up round, in place of the timed ones; where timed ones among them are quick, the
            others are warmed up as they are, too.
        times: where each whole round is kept as soon as it is over.
        watch: who is told.

    Returns:
        Seconds of one call in each round, by name; the same object as `times` where that was given.
    """
    times = {} if times is None else times
    times |= {name: [] for name in calls}
    warm = calls if warm_up is None else warm_up
    told = _Told(watch or Watch(), len(warm) + repeats * len(calls))

    def lose(turn: Turn, error: Exception) -> None:
        if turn.name not in calls:
            raise error
        told.lose(turn.name, error, repeats)

    lasted = _warm_up(calls, warm, device, lose, told)
    names = [name for name in calls if name in lasted or name not in warm]
    if not names:
        return times

    def take(turn: Turn) -> float:
        taken = timed(calls[turn.name], device, lasted.get(turn.name, _Lasted()).repeated)
        told.turn()
        return taken

    for turns in interleave(names, take, range(repeats), seconds=seconds):
        for name, taken in {turn.name: taken for turn, taken in turns}.items():  # of a whole round
            times[name].append(taken)
    return times


class _Told:
    """Counts the turns of a timing, and tells who watches it."""

    def __init__(self, watch: Watch, total: int) -> None:
        self.watch, self._total, self._done = watch, total, 0

    def turn(self) -> None:
        self._done += 1
        self.watch.turn(self._done, self._total)

    def lose(self, name: str, error: Exception, turns: int) -> None:
        """Leave out the further turns of what failed."""
        self.watch.lost(name, error)
        self._total -= turns
        self.turn()


class _Lasted(NamedTuple):
    """How long a call took to warm up, and how often it is repeated within a turn."""

    seconds: float = QUICK
    repeated: int = 1


def _warm_up(
    calls: Mapping[str, Call],
    warm: Mapping[str, Call],
    device: torch.device,
    lose: Callable[[Turn, Exception], None],
    told: _Told,
) -> dict[str, _Lasted]:
    """Warm up, and return what the calls took, without those that are lost."""
    lasted: dict[str, _Lasted] = {}
    for turns in interleave([*warm], lambda turn: timed(warm[turn.name], device), [0], lose=lose):
        for turn, taken in turns:
            repeated = 1
            if device.type != "cpu" and turn.name in calls and taken < QUICK:
                repeated = max(1, min(20, round(0.1 / timed(warm[turn.name], device))))
            lasted[turn.name] = _Lasted(taken, repeated)
            told.turn()
    if any(name in lasted and lasted[name].seconds < QUICK for name in calls):
        for name in calls:
            if name not in warm:
                calls[name]()
    return lasted


def without_gradients(calls: Mapping[str, Call]) -> dict[str, Call]:
    """Return the calls, each under `torch.inference_mode`."""
    return {name: torch.inference_mode()(call) for name, call in calls.items()}
