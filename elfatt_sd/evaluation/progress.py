"""How far the making of images has come: a bar, or a line a minute where there is no terminal."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LOG_SECONDS = 60.0  # between two lines


@contextlib.contextmanager
def image_progress(total: int, *, shares: int = 1, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Draw a bar over all rows; yields a function that takes the number of new images and the row's name.

    Of several processes only one draws, and knows of its own share alone.
    """
    what = "images" if shares == 1 else f"images of process 1 of {shares}"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    logged, told = shown and not console.is_terminal, 0.0
    # A batch can take minutes; from the usual 30 seconds no speed, and so no time left, would be known.
    bar = Progress(
        *columns,
        console=console,
        disable=not shown or logged,
        speed_estimate_period=3600,
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar as progress:
        task = progress.add_task("generate", total=total)

        def advance(images: int, row: str) -> None:
            nonlocal told
            progress.update(task, advance=images, description=row)
            if logged and (not images or console.get_time() - told >= _LOG_SECONDS):  # a new row, or long silence
                told = console.get_time()
                done, seconds = progress.tasks[0].completed, progress.tasks[0].time_remaining
                left = "" if seconds is None else f", about {datetime.timedelta(seconds=seconds)} left"
                print(f"generate: {row}, {done:.0f} of {total} {what} done{left}", file=sys.stderr)

        yield advance
