"""How far something is: a bar on a terminal; elsewhere a line where a stage begins, and now and then within one."""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

Progress = Callable[[str, int, int], None]  # of a stage: its name, what is done, and how much there is in all


@dataclass
class Lines:
    """Progress as lines, with the time that is left."""

    say: Callable[[str], None]  # gets each line
    unit: str  # what is counted
    _: KW_ONLY
    every: float = 60.0  # seconds between two lines of a stage
    title: str = "{}:"  # how a line begins
    at_once: bool = True  # also say where a stage begins

    def __post_init__(self) -> None:
        self._said = time.monotonic()
        self._name: str | None = None
        self._begun = (0, 0.0)  # where and when counting began
        self._last = (0, 0)

    def __call__(self, name: str, done: int, total: int) -> None:
        moment = time.monotonic()
        before, whole = self._last
        if done < before or before == whole or total != whole:  # another count
            self._begun = (done, moment)
        new, self._name, self._last = name != self._name, name, (done, total)
        if moment - self._said < self.every and not (new and self.at_once):
            return
        self._said = moment
        first, start = self._begun
        left = ""
        if done > first:
            seconds = (moment - start) / (done - first) * (total - done)
            left = f", about {datetime.timedelta(seconds=round(seconds))} left"
        self.say(f"{self.title.format(name)} {done} of {total} {self.unit} done{left}")


@contextlib.contextmanager
def progress_of(
    unit: str, *, every: float = 30.0, title: str = "{}:", at_once: bool = True, shown: bool = True
) -> Iterator[Progress]:
    if not shown:
        yield lambda name, done, total: None
        return
    from rich.console import Console  # the GPU suite does without rich
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        say = functools.partial(print, file=sys.stderr, flush=True)
        yield Lines(say, unit, every=every, title=title, at_once=at_once)
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
