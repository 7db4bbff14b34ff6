"""What the commands print: progress, images, plans, findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from elfatt_sd.cli.console import complain, one_line, output
from elfatt_sd.cli.names import SHAPE_NAMES
from elfatt_sd.progress import progress_of

if TYPE_CHECKING:
    from elfatt_sd.cli.options import Source
    from elfatt_sd.drawing.compare import Trial
    from elfatt_sd.drawing.studio import Drawn, Result
    from elfatt_sd.plans import Plan


MARKS = {
    "ok": Text("ok", "green"),
    "missing": Text("missing", "red"),
    "optional": Text("not there", "yellow"),
    "info": Text(),
}


@contextmanager
def progress(
    images: int, drawings: int | None = None
) -> Iterator[tuple[Callable[[int, int], None], Callable[[Drawn], None]]]:
    """Show how far the steps of all images are, and print each image; a comparison draws more of them than it has."""
    total, finished, drawn = drawings or images, 0, 0

    def on_image(result: Drawn) -> None:
        nonlocal finished
        finished += 1
        print_result(result)

    def on_step(step: int, steps: int) -> None:
        nonlocal drawn
        tell(f"image {min(finished + 1, images)} of {images}", drawn * steps + step, total * steps)
        drawn += step == steps

    with progress_of("steps", at_once=False) as tell:
        yield on_step, on_image


def print_result(result: Drawn) -> None:
    """Print where an image lies, and what is wrong with it."""
    print(result.summary())
    sys.stdout.flush()
    if result.fault:
        complain(f"{result.name}: {result.fault}", "warning")


def print_trial(trial: Trial, path: Path) -> None:
    """Print what every method took and how close it came, the recommendation, and where the strip lies."""
    console = output()
    table = Table(title=one_line(f"{trial.prompt}, seed {trial.seed}"), title_justify="left")
    for name in ("method", "seconds", "times as fast", "PSNR to untouched, dB"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in trial.rows:
        table.add_row(row.label, f"{row.seconds:.2f}", row.speed_text(), row.psnr_text())
    console.print(table)
    print(trial.recommendation())
    print(path)


def print_summary(results: list[Result]) -> None:
    """Print how many images there are, their median time, and the memory."""
    seconds = median(result.seconds for result in results)
    print(f"{len(results)} written; {seconds:.2f} s from prompt to image (median); {results[-1].memory}")


def python_lines(source: Source, arguments: str) -> list[str]:
    given = json.dumps("path/or/hub-id" if source.model in SHAPE_NAMES else source.model)
    given += ", allow_pickle=True" * source.allow_pickle
    given += f", variant={json.dumps(source.variant)}" if source.variant else ""
    load, apply = f"pipe = elfatt_sd.load_pipeline({given})", f"elfatt_sd.apply_patch(pipe, {arguments})"
    return ["import elfatt_sd", "", load, apply]


def print_plan(planned: Plan) -> None:
    """Print a plan as a table and what it adds up to."""
    from elfatt_sd.plans import giga, places

    console = output()
    table = Table(title=planned.heading, title_justify="left", box=SIMPLE)
    table.add_column("layers", overflow="fold")
    table.add_column("what happens", overflow="fold", min_width=30)
    for name in ("before", "after"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in planned.groups():
        layer, number = group[0], len(group)
        which = [f"{number} layer{'s' * (number > 1)}, {layer.heads} heads"]
        which += [f"{layer.tokens} tokens ({layer.grid})", *places(group)]
        work = (sum(each.multiply_adds for each in group), sum(map(planned.average, group)))
        style = "" if layer.patched else "dim"
        table.add_row("\n".join(which), layer.reason, *map(giga, work), style=style, end_section=True)
    console.print(table)
    console.print("before, after: G (10^9) multiply-adds of these layers in one call for one image.")
    console.print("after is the mean over the run. --json lists every layer.\n")
    for line in planned.summary():
        console.print(f"{line[:1].upper()}{line[1:]}.")


def print_findings(sections: dict[str, list[Any]]) -> None:
    """Print what `doctor` found, a table for each section."""
    console = output()
    for name, findings in sections.items():
        table = Table(title=name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = MARKS[finding.status]
            table.add_row(mark, finding.name, finding.value, finding.remedy)
        console.print(table)
        console.print()
