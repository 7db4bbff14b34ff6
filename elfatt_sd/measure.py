"""Time, memory and progress. Things are compared interleaved, round by round: a clock that drifts slows all alike."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, Self

import psutil
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from elfatt_sd.devices import memory_counters, proc_value, synchronize
from elfatt_sd.errors import is_out_of_memory

Call = Callable[[], Any]
Progress = Callable[[str, int, int], None]  # of a stage: its name, what is done, and how much there is in all
BUSY = 1.2  # longest over shortest time of equal runs, above which something else took the machine
_CPU = torch.device("cpu")
_PROCESS_KINDS = {"linux": "VmHWM", "win32": "peak working set", "darwin": "maximum resident set"}


@dataclass(frozen=True)
class Turn:
    name: str  # of the thing
    number: int  # of the round; those below 0 warm up
    place: int  # within the round, from 1


@dataclass
class Comparison:
    """Things that are timed against each other: a warm-up, then rounds, each of which starts with another one."""

    names: list[str]  # of the things; without those that were lost
    take: Callable[[Turn], Any]  # runs one of them once, and returns its seconds, or what else is kept of a turn
    rounds: int = 1  # that count
    # called after every turn, with the number of turns so far and in all
    tell: Callable[[int, int], None] = lambda done, total: None
    # told what a turn raised; the thing is then left out. Without it, the exception goes on to the caller.
    lose: Callable[[str, Exception], None] | None = None
    times: dict[str, list[Any]] = field(default_factory=dict)  # what each turn that counts gave, by name

    def __post_init__(self) -> None:
        self.times |= {name: [] for name in self.names}
        self._done, self._total = 0, self.rounds * len(self.names)

    def warm_up(self, take: Callable[[Turn], Any] | None = None) -> None:
        """Run every thing once without counting it, perhaps in another way."""
        self._total += len(self.names)
        for place, name in enumerate([*self.names], 1):
            self._turn(Turn(name, -1, place), take or self.take)

    def run(self, seconds: float = math.inf) -> None:
        """Run the rounds that count; none starts past these seconds, once there is one."""
        start = time.monotonic()
        for number in range(self.rounds):
            if number and time.monotonic() - start > seconds:
                return
            shift = number % max(1, len(self.names))
            for place, name in enumerate([*self.names[shift:], *self.names[:shift]], 1):
                self._turn(Turn(name, number, place), self.take)

    def _turn(self, turn: Turn, take: Callable[[Turn], Any]) -> None:
        try:
            taken = take(turn)
        except Exception as error:
            if self.lose is None:
                raise
            self.lose(turn.name, error)
            self.names.remove(turn.name)
            self._total -= self.rounds - 1 - turn.number
        else:
            self.times[turn.name] += [taken] if turn.number >= 0 else []
        self._done += 1
        self.tell(self._done, self._total)

    def busy(self) -> str:
        return busy(times for times in self.times.values() if times)


@dataclass
class Stopwatch:
    """Measures the `seconds` of a block, between moments at which the device has nothing left to do."""

    device: torch.device = _CPU
    seconds: float = 0.0

    def __enter__(self) -> Self:
        synchronize(self.device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        synchronize(self.device)
        self.seconds = time.perf_counter() - self._start


def timed(call: Call, device: torch.device, repeated: int = 1) -> float:
    with Stopwatch(device) as watch:
        for _ in range(repeated):
            call()
    return watch.seconds / repeated


@dataclass
class CallTimer:
    """Adds up the time of calls of modules that do not call each other; on CUDA without waiting between them."""

    modules: Iterable[nn.Module]
    device: torch.device
    marks: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        for module in self.modules:
            self.handles.append(module.register_forward_pre_hook(lambda *_: self._mark(), prepend=True))
            self.handles.append(module.register_forward_hook(lambda *_: self._mark()))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            synchronize(self.device)
            self.marks.append(time.perf_counter())

    def each(self) -> list[float]:
        """Return the seconds of every call."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        if self.device.type != "cuda":
            return [end - start for start, end in pairs]
        synchronize(self.device)
        return [float(start.elapsed_time(end)) / 1000 for start, end in pairs]


def ratios(base: Sequence[float], own: Sequence[float]) -> tuple[float, ...]:
    return tuple(before / after for before, after in zip(base, own, strict=False))


def busy(times: Iterable[Sequence[float]]) -> str:
    """Return what to say where equal runs took times so far apart that no ratio of them counts; empty otherwise."""
    shortest, longest = max(((min(each), max(each)) for each in times), key=lambda pair: pair[1] / pair[0])
    if longest <= BUSY * shortest:
        return ""
    return (
        f"the machine was busy: equal runs took {shortest:.2f} to {longest:.2f} s. Do not trust these speeds: close "
        "what else runs, and repeat"
    )


class Spread(NamedTuple):
    """What values of several rounds have in the middle, at least and at most."""

    median: float
    min: float
    max: float

    @classmethod
    def over(cls, values: Iterable[float]) -> Self:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def words(self, digits: int = 2) -> str:
        median, least, greatest = (f"{value:.{digits}f}" for value in self)
        return median if least == greatest else f"{median} ({least} to {greatest})"


def times_as_fast(ratios: Sequence[float], busy: object = "") -> str:
    """Say how many times as fast something was; where the machine was busy, nobody knows."""
    return "machine busy, speed unknown" if busy else f"{Spread.over(ratios).words()} times as fast"


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else Abramowitz and Stegun 26.7.5."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        centred = 2 * probability - 1
        return centred * math.sqrt(2 / (1 - centred**2))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def process_peak() -> int | None:
    if sys.platform == "darwin":
        import resource

        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # in bytes there
    if value := proc_value("/proc/self/status", "VmHWM"):  # ru_maxrss would include the parent's before `exec`
        return int(value.split()[0]) * 1024
    peak: int | None = getattr(psutil.Process().memory_info(), "peak_wset", None)  # on Windows
    return peak


class PeakMeter:
    """Reads the highest memory use of a device: PyTorch's on CUDA, ROCm and XPU, on a CPU that of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind: str | None = None  # what is counted; None where it cannot be measured
        self._counters = memory_counters(device)
        if self._counters is not None:
            self.kind = f"{device.type.upper()} allocated"
            self.restart()
        elif device.type == "cpu" and process_peak() is not None:
            self.kind = _PROCESS_KINDS.get(sys.platform, sys.platform)

    def restart(self) -> bool:
        """Start again from the present use; tell whether that was possible."""
        if self._counters is not None:
            synchronize(self.device)
            self._counters.reset_peak_memory_stats(self.device)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def read(self) -> int | None:
        """Wait for the device, and return the highest use in bytes; None where it cannot be measured."""
        synchronize(self.device)
        if self._counters is not None:
            return int(self._counters.max_memory_allocated(self.device))
        return process_peak() if self.device.type == "cpu" else None


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Return the bytes that tensors hold at the highest point of a call, beyond what they hold before it.

    On a CPU this is the running sum of what PyTorch's profiler sees allocated and freed. What libraries take without
    PyTorch's allocator, and the pages of the code that runs, is not in it.
    """
    counters = memory_counters(device)
    gc.collect()
    try:
        if counters is not None:
            meter, before = PeakMeter(device), int(counters.memory_allocated(device))
            call()
            return (meter.read() or 0) - before
        if device.type != "cpu":
            return None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    profiler: Any = profiled.profiler
    events = profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(itertools.accumulate((size for _, size in changes), initial=0))


@dataclass
class Lines:
    """Progress as lines, with the time that is left."""

    say: Callable[[str], None]  # gets each line
    unit: str  # what is counted
    every: float = 60.0  # seconds between two lines of a stage
    title: str = "{}:"  # how a line begins

    def __post_init__(self) -> None:
        self._said = time.monotonic()
        self._begun = (0, 0.0)  # where and when counting began
        self._last = (0, 0)

    def __call__(self, name: str, done: int, total: int) -> None:
        moment = time.monotonic()
        before, whole = self._last
        if done < before or before == whole or total != whole:  # another count
            self._begun = (done, moment)
        self._last = done, total
        if moment - self._said < self.every:
            return
        self._said = moment
        first, start = self._begun
        left = ""
        if done > first:
            seconds = (moment - start) / (done - first) * (total - done)
            left = f", about {datetime.timedelta(seconds=round(seconds))} left"
        self.say(f"{self.title.format(name)} {done} of {total} {self.unit} done{left}")


@contextlib.contextmanager
def progress_of(unit: str, *, every: float = 30.0, title: str = "{}:", shown: bool = True) -> Iterator[Progress]:
    if not shown:
        yield lambda name, done, total: None
        return
    from rich.console import Console  # the GPU suite does without rich
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(functools.partial(print, file=sys.stderr, flush=True), unit, every=every, title=title)
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[counted]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        expand=True,
        redirect_stdout=sys.stdout.isatty(),
        auto_refresh=False,  # a thread that draws would take time from what is measured
        speed_estimate_period=3600,  # a step can take minutes; with the usual 30 seconds no speed would be known
    ) as bar:
        task = bar.add_task("preparing", total=None, counted="")

        def tell(name: str, done: int, total: int) -> None:
            counted = f"{done}/{total} {unit}"
            bar.update(task, description=name, completed=done, total=total, counted=counted, refresh=True)

        yield tell
