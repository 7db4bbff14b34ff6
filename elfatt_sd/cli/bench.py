"""`elfatt-sd bench`: parse, call `elfatt_sd.benchmarking`, print."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from elfatt_sd import errors as checks
from elfatt_sd.cli.console import FAILURE, adds_options, name_and_value, optional, output, quiet_libraries
from elfatt_sd.cli.options import ALONE, LOADING, METHODS, MODELS, PEER, PEERS, SHAPE_NAMES, UNET_NAMES, Graphs
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.files import check_writable, is_plain_name

app = typer.Typer(no_args_is_help=True)

Options = dict[str, tuple[Any, Any]]
ONE_OF = (
    "One of {}, a saved FILE.json, or package.module:Class; with settings as in elfatt-fast:block_size=512,levels=2; "
    "several times, or the benchmark's own set."
)
SIZE = "Side of the images in pixels, or 832x480, width first; may be given several times."
ATTENTION = "Time a ViT-S's layer with softmax, elfatt, effatt, local, agent or focused; may be given several times."
OPTIONS: Options = {  # of all benchmarks
    "tokens": optional(list[int], default=[4096, 16384], help="Tokens of a square grid; may be given several times."),
    "attention": optional(list[str], help=ATTENTION),
    "model": optional(str, default="sd15", help=f"{', '.join(SHAPE_NAMES)} (random weights), {MODELS}."),
    "sizes": optional(list[str], "--size", default=["512", "1024"], help=SIZE),
    "methods": optional(list[str], "--method", help=ONE_OF.format(", ".join((*METHODS, PEER, *ALONE)))),
    "ratio": optional(float, help="Fraction of the tokens that are merged, for all that merge."),
    "batch": optional(int, default=2, help="Rows of a UNet's batch: two for each image with guidance."),
    "repeats": optional(int, default=5, help="Rounds that count."),
    "block_size": optional(int, default=128, help="Tokens in a block."),
    "max_seconds": optional(float, default=math.inf, help="Leave out what is expected to take longer for one call."),
    "seconds": optional(float, default=math.inf, help="Start no further round past this time, for each size."),
    "steps": optional(int, default=25, help="Denoising steps."),
    "graphs": (Graphs, False),
    "compile": optional(bool, "--compile", help="Time all but other packages through torch.compile too."),
    "autotune": optional(bool, "--autotune", help="Time every method also with those layers alone that it speeds up."),
    "memory": optional(bool, "--memory/--no-memory", default=True, help="Also measure the peak memory."),
    "memory_batch": optional(
        list[int],
        help="Rows at which the peak is measured, two such batches for the growth; "
        "if not given --batch and twice that.",
    ),
}
PIPELINE: Options = {
    "model": optional(str, default="toy", help=f"{', '.join(UNET_NAMES)} (random weights), {MODELS}."),
    "sizes": optional(list[str], "--size", default=[], help=SIZE),
    "methods": optional(list[str], "--method", help=ONE_OF.format(", ".join((*METHODS, *PEERS, *ALONE)))),
    "batch": optional(int, default=1, help="Images at a time."),
}
SESSION: Options = {
    "out": optional(Path, metavar="DIR", help="Folder for JSON, a Markdown table and a plot."),
    "name": optional(str, help="Of those files, if not the benchmark's."),
    "as_markdown": optional(bool, "--markdown", help="Print the table as Markdown, as it stands in the file."),
}


def takes(*names: str, **own: tuple[Any, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command options, which have the names of the benchmark's own."""
    return adds_options("options", {name: (LOADING | OPTIONS | own)[name] for name in names} | SESSION, dict)


@app.command()
@takes("tokens", "attention", "batch", "repeats", "block_size", "max_seconds", "memory", "device", "dtype")
def layer(options: Any) -> None:
    """One self-attention layer of SD 1.5's finest level, attention alone and with its projections; or of a ViT-S."""
    _run("layer", **options)


@app.command()
@takes(
    *("model", "sizes", "methods", "ratio", "batch", "repeats", "seconds", "device", "dtype", "compile"),
    *("autotune", "memory", "memory_batch", "variant"),
)
def denoiser(options: Any) -> None:
    """One call of a UNet or transformer in every phase of every method, added up over a run."""
    memory, batches = options["memory"], options.pop("memory_batch")
    if batches and not memory:
        raise ElfattError("--memory-batch is not accepted with --no-memory; leave one of them out.")
    if options["compile"] and options["autotune"]:
        raise ElfattError("--autotune is not accepted with --compile; compiled layers cannot be measured.")
    checks.whole("memory_batch", min(batches or [1]), 1)
    _run("unet", **options | {"memory": batches if memory else []})


app.command("unet", hidden=True)(denoiser)  # its name before transformers had a place


@app.command()
@takes(
    *("model", "sizes", "methods", "ratio", "batch", "repeats", "steps", "memory"),
    *("graphs", "device", "dtype", "variant"),
    **PIPELINE,
)
def pipeline(options: Any) -> None:
    """A whole pipeline with guidance, from prompt to image."""
    _run("pipeline", **options)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.json...", help="What a benchmark or a suite wrote.")],
) -> None:
    """Tables and plots of results, next to their file: of a benchmark, or of all parts of benchmarks/gpu_suite.py."""
    need("elfatt-sd bench", "matplotlib")
    from elfatt_sd.benchmarking.report import write_report

    for file in files:
        for made in write_report(file):
            print(made)


def _run(benchmark: str, out: Path | None, name: str | None, as_markdown: bool | None, **options: Any) -> None:
    """Check the options of a benchmark, run it, and show what it has, also when it is stopped."""
    if name is not None and (out is None or not is_plain_name(name)):
        raise ElfattError(f"name={name!r} is not accepted; give --out DIR and a name without a folder or an ending.")
    if out is not None:
        check_writable(out)
    options = {each: value for each, value in options.items() if value is not None}
    need("elfatt-sd bench", "matplotlib", "tomesd")
    for each in ("batch", "repeats", "steps"):
        checks.whole(each, options.get(each, 1), 1)
    for each in ("seconds", "max_seconds"):
        if not options.get(each, 1.0) > 0:
            raise ElfattError(f"{each}={options[each]:g} is not accepted; give a number above 0.")
    from elfatt_sd import benchmarking
    from elfatt_sd.benchmarking.report import Session, markdown, show
    from elfatt_sd.benchmarking.variants import read_size
    from elfatt_sd.loading import check_model, pick_device, pick_dtype
    from elfatt_sd.measure import progress_of

    pick_dtype(options["dtype"], pick_device(options["device"]))
    if "model" in options:
        model, variant = options["model"], options.get("variant")
        options["sizes"] = [*map(read_size, options["sizes"])]
        if model not in SHAPE_NAMES:
            check_model(model, variant=variant)
        elif variant is not None:
            raise ElfattError(f"variant={variant!r} is for weights, and model={model!r} has random ones.")
    if "methods" in options:
        options["methods"] = [read_method(text) for text in options["methods"]]
    made = Session(out, name, command=shlex.join(["elfatt-sd", *sys.argv[1:]]))
    quiet_libraries()
    try:
        with progress_of("calls") as made.progress:
            getattr(benchmarking, benchmark)(session=made, **options)
    finally:
        if results := made.results:
            if as_markdown:
                print(markdown(results), end="")
            else:
                show(results, output())
            for path in made.write() if results["rows"] else ():
                print(path)
    if results and not results["rows"]:  # nothing fitted into memory, as is told
        raise typer.Exit(FAILURE)


def read_method(text: str) -> Any:
    """Return what `--method` names, with the settings that follow its name."""
    from elfatt_sd.benchmarking.variants import named, varied

    method, _, settings = text.rpartition(":")
    if not method or "=" not in settings:  # a name alone, or package.module:Class
        named(text)  # checks it
        return text
    return varied(method, **dict(map(name_and_value, settings.split(","))))
