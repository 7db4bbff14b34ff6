"""Things run interleaved, ratios are taken within rounds, progress; no time is asserted from above."""

from __future__ import annotations

import mmap
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks import DEVICES

from elfatt_sd import measure
from elfatt_sd.errors import ElfattError
from elfatt_sd.measure import CallTimer, Comparison, PeakMeter, Spread, Stopwatch, Turn, peak_memory, ratios, timed

CPU = torch.device("cpu")
MIB = 2**20


def test_things_take_turns_and_what_fails_has_no_further_ones() -> None:
    """After a warm-up, every round starts with another thing; no round begins once the time is up."""
    seen: list[Turn] = []
    lost, told = list[Any](), list[tuple[int, int]]()

    def take(turn: Turn) -> float:
        seen.append(turn)
        if turn.name == "broken":
            raise ValueError("no")
        return 1.0 + (turn.name == "slow")

    names = ["slow", "broken", "fast"]
    tell = lambda done, total: told.append((done, total))  # noqa: E731
    compared = Comparison([*names], take, 2, tell, lambda name, error: lost.append((name, str(error))))
    compared.warm_up()
    compared.run()
    assert [f"{turn.name}{turn.number}" for turn in seen[3:]] == ["slow0", "fast0", "fast1", "slow1"]
    assert [(turn.name, turn.number) for turn in seen[:3]] == [(name, -1) for name in names]
    assert lost == [("broken", "no")] and told[-1] == (7, 7) and [done for done, _ in told] == [*range(1, 8)]
    assert compared.busy() == ""
    compared.times["fast"].append(9.0)
    assert "equal runs took 1.00 to 9.00 s" in compared.busy()
    assert compared.times == {"slow": [2.0, 2.0], "broken": [], "fast": [1.0, 1.0, 9.0]}
    with pytest.raises(ValueError, match="no"):
        Comparison([*names], take, 2).run()
    late = Comparison(["broken", "fast"], take, 3, tell, lambda name, error: lost.append(name))
    late.run()
    assert (late.names, late.times["fast"], lost[1:], told[-1]) == (["fast"], [1.0] * 3, ["broken"], (4, 4))
    late.run(seconds=0)
    assert len(late.times["fast"]) == 4


def test_ratios_are_taken_within_rounds_that_both_have() -> None:
    assert ratios([2.0, 4.0, 9.0], [1.0, 1.0, 3.0]) == (2.0, 4.0, 3.0) and ratios([2.0], [1.0, 5.0]) == (2.0,)
    spread = Spread.over([2.0, 4.0, 3.0])
    assert spread._asdict() == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert (spread.words(), Spread.over([1.001, 1.0]).words()) == ("3.00 (2.00 to 4.00)", "1.00")


def test_the_clock_waits_for_the_device_and_counts_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(measure, "synchronize", waited.append)
    with Stopwatch(torch.device("cuda:1")) as watch:
        time.sleep(0.02)
    assert waited == [torch.device("cuda:1")] * 2 and watch.seconds >= 0.02
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 6 if now[0] else 2

    assert timed(call, CPU, repeated=2) == 4, "the mean"

    class Network(torch.nn.Module):
        def forward(self, seconds: float) -> None:
            now[0] += seconds

    network, second = Network(), Network()
    with CallTimer([network, second], CPU) as timer:
        network(2.0)
        now[0] += 100  # the scheduler
        network(3.0)
        second(4.0)
    network(50.0)
    assert sum(timer.each()) == 9.0


def test_peak_memory_is_what_the_call_needs() -> None:
    """Two tensors at the highest point, without what was there before; what does not fit, or is not told, has none."""
    kept = torch.ones(64 * MIB, dtype=torch.uint8)

    def call() -> None:
        first = torch.ones(20 * MIB, dtype=torch.uint8)
        second = first + kept[: 20 * MIB]
        del first
        second[:MIB] + 1

    def fail(error: Exception) -> None:
        raise error

    peak = peak_memory(call, CPU)
    assert peak is not None and 40 * MIB <= peak < 40 * MIB + 4096
    assert peak_memory(call, CPU) == peak
    assert peak_memory(lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), CPU) is None
    with pytest.raises(ElfattError, match="other"):
        peak_memory(lambda: fail(ElfattError("other")), CPU)
    assert peak_memory(lambda: None, torch.device("meta")) is None


@pytest.mark.parametrize("device", DEVICES)
def test_the_meter_sees_an_allocation_and_starts_anew(device: str) -> None:
    meter = PeakMeter(torch.device(device))
    before = meter.read() if meter.restart() else None
    if before is None:
        pytest.skip("the peak cannot start anew here")
    if device == "cpu":  # pages that are new to the process: a tensor may get those that it freed, but still holds
        block = torch.frombuffer(mmap.mmap(-1, 256 * MIB), dtype=torch.uint8).fill_(1)
    else:
        block = torch.ones(256 * MIB, dtype=torch.uint8, device=device)
    del block
    assert meter.kind and (meter.read() or 0) > before + 200 * MIB
    meter.restart()
    assert (meter.read() or 0) < before + 100 * MIB


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("win32", ("peak working set", 7)), ("darwin", ("maximum resident set", 9)), ("other", (None, None))],
)
def test_the_peak_that_each_system_tells(monkeypatch: pytest.MonkeyPatch, platform: str, expected: object) -> None:
    usage = SimpleNamespace(getrusage=lambda who: SimpleNamespace(ru_maxrss=9), RUSAGE_SELF=0)
    info = SimpleNamespace(rss=1, **({"peak_wset": 7} if platform == "win32" else {}))
    monkeypatch.setattr(measure, "proc_value", lambda file, key: None)
    monkeypatch.setattr(measure.sys, "platform", platform)
    monkeypatch.setitem(sys.modules, "resource", usage)
    monkeypatch.setattr(measure.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: info))
    monkeypatch.setattr(measure, "synchronize", lambda device: None)
    meter = PeakMeter(CPU)
    assert (meter.kind, meter.read()) == expected
    assert PeakMeter(torch.device("mps")).kind is PeakMeter(torch.device("mps")).read() is None


def test_progress_is_a_line_after_a_while(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Another count or total has its own speed: steps of a shorter run say nothing of those to come."""
    now, said = [0.0], list[str]()
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    tell = measure.Lines(said.append, "calls", every=30)
    for done in range(5):
        tell("first", done, 10)
        now[0] += 20
    tell = measure.Lines(said.append, "steps", every=0)
    for done, total, seconds in ((10, 30, 10), (20, 30, 0), (5, 30, 1), (26, 300, 10), (27, 300, 0)):
        tell("image", done, total)
        now[0] += seconds
    assert said == [
        "first: 2 of 10 calls done, about 0:02:40 left",
        "first: 4 of 10 calls done, about 0:02:00 left",
        "image: 10 of 30 steps done",
        "image: 20 of 30 steps done, about 0:00:10 left",
        "image: 5 of 30 steps done",
        "image: 26 of 300 steps done",
        "image: 27 of 300 steps done, about 0:45:30 left",
    ]
    with measure.progress_of("steps") as tell_quick:
        tell_quick("image 1 of 1", 1, 2)
    with measure.progress_of("steps", shown=False) as tell_nothing:
        now[0] += 1000
        tell_nothing("image 1 of 1", 2, 2)
    assert capsys.readouterr() == ("", "")
