"""Calls take turns, rounds are whole; no time is asserted from above."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elfatt_sd.benchmarking import record as timing
from elfatt_sd.benchmarking.record import time_in_turns


def calls(names: str, seen: list[str]) -> dict[str, Callable[[], None]]:
    return {name: lambda name=name: seen.append(name) for name in names}


def test_interleaved_calls_take_turns(cpu: torch.device) -> None:
    """One warm-up round, then rounds that each start with another call."""
    seen: list[str] = []
    times = time_in_turns(calls("abc", seen), 3, cpu)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = ["".join(seen[start : start + 3]) for start in range(0, 12, 3)]
    assert [sorted(each) for each in rounds] == [list("abc")] * 4
    assert len(set(rounds[1:])) == 3


def test_the_warm_up_can_be_other_calls(cpu: torch.device) -> None:
    seen: list[str] = []
    time_in_turns(calls("ab", seen), 1, cpu, warm_up=calls("xyz", seen))
    assert "".join(seen) == "xyzab"


def test_no_round_starts_late_but_one_is_run(cpu: torch.device) -> None:
    seen: list[str] = []
    times = time_in_turns(calls("a", seen), 100, cpu, seconds=0)
    assert (len(seen), len(times["a"])) == (2, 1)


def test_a_round_that_is_stopped_does_not_count(cpu: torch.device) -> None:
    """Ctrl-C in the second round leaves the first one, whole."""
    seen: list[str] = []
    times: dict[str, list[float]] = {}

    def stop() -> None:
        seen.append("stop")
        if seen.count("stop") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_in_turns({**calls("a", seen), "stop": stop}, 5, cpu, times=times)
    assert (len(times["a"]), len(times["stop"])) == (1, 1)


def test_who_is_told_hears_of_every_call(cpu: torch.device) -> None:
    heard: list[tuple[int, int]] = []
    time_in_turns(calls("ab", []), 2, cpu, tell=lambda done, total: heard.append((done, total)))
    assert heard == [(done, 6) for done in range(1, 7)]


def test_a_call_is_timed(cpu: torch.device) -> None:
    """Sleeping takes at least as long as asked for."""
    assert min(time_in_turns({"a": lambda: time.sleep(0.02)}, 2, cpu)["a"]) >= 0.02


@pytest.mark.parametrize(("quick", "warmed"), [(1e9, ["s", "b", "a"]), (0.0, ["s", "b"])])
def test_quick_calls_are_warmed_up_as_they_are(
    cpu: torch.device, quick: float, warmed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something smaller in their place only where they would take long."""
    monkeypatch.setattr(timing, "QUICK", quick)
    seen: list[str] = []
    full = calls("ab", seen)
    time_in_turns(full, 1, cpu, warm_up={**calls("s", seen), "b": full["b"]})
    assert seen == [*warmed, "a", "b"]


def test_what_does_not_fit_is_left_out(cpu: torch.device) -> None:
    """It is told, not timed again, and the others have all their rounds; another error stops everything."""
    seen: list[str] = []
    lost: list[str] = []
    heard: list[tuple[int, int]] = []

    def fail(error: Exception) -> None:
        seen.append("x")
        raise error

    told: Any = {"tell": lambda done, total: heard.append((done, total)), "lose": lambda name, _: lost.append(name)}
    full = {**calls("ab", seen), "x": lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))}
    times = time_in_turns(full, 2, cpu, **told)
    assert (lost, seen.count("x"), heard[-1]) == (["x"], 1, (7, 7))
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2, "x": 0}
    with pytest.raises(RuntimeError, match="other"):
        time_in_turns({"x": lambda: fail(RuntimeError("other"))}, 2, cpu)
