"""Calls timed interleaved, after a warm-up that tells which of them are quick and which do not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.measuring.clock import Call, Comparison, Turn, timed

QUICK = 1.0  # seconds of a call up to which every call is warmed up as it is


def only_memory(name: str, error: Exception) -> None:
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
    tell: Callable[[int, int], None] = lambda done, total: None,
    lose: Callable[[str, Exception], None] = only_memory,
) -> dict[str, list[float]]:
    """Time functions interleaved, after a warm-up round that does not count."""
    warm, repeated = calls if warm_up is None else warm_up, dict[str, int]()

    def take(turn: Turn) -> float:
        return timed(calls[turn.name], device, repeated.get(turn.name, 1))

    def warm_one(turn: Turn) -> float:
        taken = timed(warm[turn.name], device)
        if device.type != "cpu" and turn.name in calls and taken < QUICK:
            repeated[turn.name] = max(1, min(20, round(0.1 / timed(warm[turn.name], device))))
        return taken

    compared = Comparison([*calls], take, repeats, tell, lose, {} if times is None else times)
    lasted = compared.warm_up(warm_one, warm)
    if any(lasted.get(name, QUICK) < QUICK for name in calls):
        for name in calls:
            if name not in warm:
                calls[name]()
    try:
        compared.run(seconds)
    finally:
        compared.drop_unfinished_round()
    return compared.times


def without_gradients(calls: Mapping[str, Call]) -> dict[str, Call]:
    return {name: torch.inference_mode()(call) for name, call in calls.items()}
