"""The commands of `elfatt-sd eval`: parse, call, print."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elfatt_sd.cli import console
from elfatt_sd.cli.console import adds_options, complain, one_line, optional, output, quiet_libraries
from elfatt_sd.cli.options import Json
from elfatt_sd.errors import ElfattError
from elfatt_sd.files import check_writable

if TYPE_CHECKING:
    from elfatt_sd.evaluation.protocols import Protocol
    from elfatt_sd.evaluation.run import RunFolder

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The run's folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
Reuse = Annotated[
    list[Path] | None,
    typer.Option(metavar="RUN", help="Another run, whose rows are copied where they are the same; several times."),
]
PROTOCOL_OPTIONS: dict[str, tuple[Any, Any]] = {
    "protocol_file": (
        Annotated[str, typer.Argument(metavar="PROTOCOL", help="A TOML file, or the name of one under eval/.")],
        inspect.Parameter.empty,
    ),
    "set": optional(list[str], metavar="KEY=VALUE", help="Change a value, as in time.repeats=10."),
    "limit": optional(int, min=1, help="A quick look: so many images a row, and short timing and memory."),
    "model": optional(str, help="In place of the protocol's model."),
    "variant": optional(str, help="Of its weights: fp16 loads *.fp16.safetensors."),
    "device": optional(str, help="In place of the protocol's device."),
    "dtype": optional(str, help="In place of the protocol's dtype."),
    "prompts": optional(str, "--prompt-file", metavar="FILE", help="One a line, .csv or .tsv; in place of labels."),
    "reference": optional(str, metavar="SOURCE", help="Folder, .parquet, .npz, or toy."),
    "allow_count": optional(bool, "--allow-count", help="Take a reference of another size, which the name then says."),
    "inception_weights": optional(str, metavar="FILE", help="Inception's weights, for use offline."),
}
_KEYS = {"prompts": "prompts.file", "reference": "reference.source", "allow_count": "reference.allow_count"}


def build_protocol(
    protocol_file: str, set: list[str] | None = None, limit: int | None = None, **options: Any
) -> Protocol:
    """Load a protocol with what the options change; None is not given."""
    from elfatt_sd.evaluation.protocols import load_protocol

    given = {_KEYS.get(name, name): value for name, value in options.items() if value is not None}
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    return load_protocol(protocol_file, [*(set or ()), *overrides], limit)


takes_protocol = adds_options("protocol", PROTOCOL_OPTIONS, build_protocol)


@app.command("run")
@takes_protocol
def run_command(
    protocol: Any,
    out: Out,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print rows, disk, what is to do, and obstacles.")] = False,
    reuse: Reuse = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Do all of it: images, reference, scores, time, memory, report. Stopped, it goes on, but for the times."""
    from elfatt_sd.evaluation.extraction import is_first
    from elfatt_sd.evaluation.report.data import load_results
    from elfatt_sd.evaluation.report.tables import findings, headline
    from elfatt_sd.evaluation.run import RESULTS_FILE, RunFolder
    from elfatt_sd.evaluation.stages import evaluate

    if dry_run:
        quiet_libraries()
        _print_plan(RunFolder(out, protocol), reuse or (), as_json)
        return
    check_writable(out)
    others = [RunFolder.open(other) for other in reuse or ()]
    quiet_libraries()
    failed = evaluate(RunFolder(out, protocol), _reporter(quiet), reuse=others, show_progress=not quiet)
    if is_first():
        results = load_results(out)
        for line in (headline(results), *findings(results)):
            typer.echo(one_line(line), err=as_json)
        typer.echo(f"\n{out / 'report' / 'index.html'}", err=as_json)
        if as_json:
            typer.echo((out / RESULTS_FILE).read_bytes())
        _stop_at([f"row {cell} failed: {reason}" for cell, reason in failed.items()])


@app.command("generate")
@takes_protocol
def generate_command(protocol: Any, out: Out, reuse: Reuse = None, quiet: Quiet = False) -> None:
    """Make the images of every row. Several processes share them under `accelerate launch`."""
    from elfatt_sd.evaluation.extraction import is_first, leave_processes
    from elfatt_sd.evaluation.generate import generate
    from elfatt_sd.evaluation.run import RunFolder
    from elfatt_sd.evaluation.stages import first_checks

    check_writable(out)
    for check in first_checks(protocol, scored=False):
        check()
    others, run = [RunFolder.open(other) for other in reuse or ()], RunFolder(out, protocol)
    quiet_libraries()
    with run.writing():
        failed = generate(run, reuse=others, show_progress=not quiet)
        leave_processes()
    if is_first():
        typer.echo(out / "cells")
        _stop_at([f"row {cell} failed: {reason}" for cell, reason in failed.items()])


@app.command("reference")
@takes_protocol
def reference_command(protocol: Any, quiet: Quiet = False) -> None:
    """Compute the features of a protocol's reference, or find them in the cache."""
    from elfatt_sd.evaluation.extraction import every_minute
    from elfatt_sd.evaluation.score import build_references

    quiet_libraries()
    for reference in build_references(protocol, progress=every_minute(_reporter(quiet))):
        unreadable = reference.description["unreadable"]
        typer.echo(json.dumps({**reference.description, "unreadable": len(unreadable)}, ensure_ascii=False))
        for name in unreadable:
            complain(f"not readable: {name}", "warning")


@app.command("score")
def score_command(run: RunDir, quiet: Quiet = False, as_json: Json = False) -> None:
    """Score the images of a run against the reference and against the untouched pipeline."""
    from elfatt_sd.evaluation.extraction import leave_processes
    from elfatt_sd.evaluation.run import RunFolder
    from elfatt_sd.evaluation.stages import score

    opened = RunFolder.open(run)
    quiet_libraries()
    with opened.writing() as first:
        score(opened, _reporter(quiet))
        leave_processes()
        if first:
            results = opened.write_results()
            if as_json:
                typer.echo(json.dumps(results, indent=2))


@app.command("report")
def report_command(run: RunDir, as_json: Json = False) -> None:
    """Write the page, the tables and the plots of a run from what was measured so far."""
    from elfatt_sd.evaluation.report.data import load_results
    from elfatt_sd.evaluation.report.page import write_report
    from elfatt_sd.evaluation.run import RESULTS_FILE, RunFolder

    opened = RunFolder.open(run)
    with opened.writing():
        opened.write_results()
        page = write_report(load_results(run))
        typer.echo((run / RESULTS_FILE).read_bytes() if as_json else page)


@app.command("verify")
def verify_command(
    run: RunDir,
    recompute: Annotated[bool, typer.Option("--recompute/--hashes-only", help="Compute all scores again.")] = True,
    quiet: Quiet = False,
) -> None:
    """Check every image of a run against its hash, and its table against one computed again."""
    from elfatt_sd.evaluation.extraction import every_minute
    from elfatt_sd.evaluation.run import RunFolder
    from elfatt_sd.evaluation.stages import verify_run

    opened = RunFolder.open(run)
    quiet_libraries()
    _stop_at(verify_run(opened, recompute=recompute, progress=every_minute(_reporter(quiet))))
    typer.echo(f"{run}: images and figures are as they were made")


def _print_plan(run: RunFolder, reuse: Sequence[Path], as_json: bool) -> None:
    from rich.table import Table

    from elfatt_sd.evaluation.stages import obstacles, outlook

    found, lines, protocol = obstacles(run, reuse), list[str](), run.protocol
    with contextlib.suppress(ElfattError):  # it is among the obstacles
        lines = outlook(run)
    if as_json:
        rows = [{"cell": each.name, "label": each.label, "role": each.role, **each.shown} for each in protocol.cells]
        data = {"name": protocol.name, "identity": protocol.identity, "rows": rows, "outlook": lines}
        typer.echo(json.dumps(data | {"obstacles": found}, indent=2, default=str))
    else:
        table = Table("cell", "label", "role", "settings", title=f"{protocol.name} {protocol.identity[:12]}")
        for cell in protocol.cells:
            settings = ", ".join(f"{key} {value}" for key, value in cell.shown.items())
            table.add_row(cell.name, one_line(cell.label), cell.role, one_line(settings))
        output().print(table, *lines, sep="\n")
    _stop_at(found, console.WRONG_USE)


def _reporter(quiet: bool) -> Callable[[str], None]:
    return lambda line: None if quiet else typer.echo(one_line(line), err=True)


def _stop_at(problems: Sequence[str], code: int = console.FAILURE) -> None:
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(code)
