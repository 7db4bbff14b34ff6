"""How far something is: a bar on a terminal; elsewhere a line where a stage begins, and now and then within one."""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the GPU suite does without rich
    from rich.console import Console
    from rich.progress import Progress as Bar

FORECAST_FROM = 10.0  # seconds that are worth saying
Progress = Callable[[str, int, int], None]  # of a stage: its name, what is done, and how much there is in all


def duration(seconds: float) -> str:
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
    unit = next((name for name, size in units.items() if seconds >= 2 * size), "seconds")
    return f"{seconds / units[unit]:,.0f} {unit}"


class Lines:
    """Progress as lines, with the time that is left."""

    def __init__(
        self, say: Callable[[str], None], unit: str, *, every: float = 60.0, title: str = "{}:", at_once: bool = True
    ) -> None:
        # say: gets each line
        # unit: what is counted
        # every: seconds between two lines of a stage
        # title: how a line begins
        # at_once: also say where a stage begins
        self.say, self.unit, self.every, self.title, self.at_once = say, unit, every, title, at_once
        self._said = time.monotonic()
        self._name: str | None = None
        self._begun: tuple[int, float] | None = None  # where and when counting began
        self._last = (0, 0)

    def __call__(self, name: str, done: int, total: int) -> None:
        moment = time.monotonic()
        before, whole = self._last
        if self._begun is None or done < before or before == whole or total != whole:  # another count
            self._begun = (done, moment)
        new, self._name, self._last = name != self._name, name, (done, total)
        if moment - self._said < self.every and not (new and self.at_once):
            return
        self._said = moment
        self.say(f"{self.title.format(name)} {done} of {total} {self.unit} done{self._left(done, total, moment)}")

    def _left(self, done: int, total: int, moment: float) -> str:
        first, start = self._begun or (done, moment)
        if done <= first:
            return ""
        seconds = (moment - start) / (done - first) * (total - done)
        return f", about {datetime.timedelta(seconds=round(seconds))} left"


@contextlib.contextmanager
def progress_of(
    unit: str, *, every: float = 30.0, title: str = "{}:", at_once: bool = True, shown: bool = True
) -> Iterator[Progress]:
    """Show progress on stderr."""
    if not shown:
        yield lambda name, done, total: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        say = functools.partial(print, file=sys.stderr, flush=True)
        yield Lines(say, unit, every=every, title=title, at_once=at_once)
    else:
        with _bar(console) as bar:
            task = bar.add_task("preparing", total=None, counted="")

            def tell(name: str, done: int, total: int) -> None:
                counted = f"{done}/{total} {unit}"
                bar.update(task, description=name, completed=done, total=total, counted=counted, refresh=True)

            yield tell


def _bar(console: Console) -> Bar:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
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
    )


class Forecast:
    """Says before a benchmark how many calls it makes, and how long that takes once calls were timed; passes on."""

    def __init__(self, tell: Callable[[str, int, int], None]) -> None:
        self._tell = tell
        self._latest = (0, 0.0)
        self._said = 0.0  # seconds

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        before, moment = self._latest
        if not moment:
            print(f"{total} calls in all", file=sys.stderr)
        elif done > before > 0:  # the very first call takes longer
            seconds = (now - moment) / (done - before) * total
            if seconds > max(FORECAST_FROM, 2 * self._said):
                self._said = seconds
                print(f"about {duration(seconds)} in all, if each takes as long as the latest", file=sys.stderr)
        self._latest = done, now
        self._tell(name, done, total)
