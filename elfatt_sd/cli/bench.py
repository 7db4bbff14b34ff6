"""`elfatt-sd bench`: parse, call `elfatt_sd.benchmarking`, print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elfatt_sd import errors as checks
from elfatt_sd.cli.console import FAILURE, adds_options, name_and_value, optional, output, quiet_libraries
from elfatt_sd.cli.options import ALONE, METHODS, MODELS, PEER, PEERS, SHAPE_NAMES, UNET_NAMES, Device, Dtype, Variant
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.files import check_writable

app = typer.Typer(no_args_is_help=True)

Tokens = Annotated[list[int], typer.Option(help="Tokens of a square grid; may be given several times.")]
Attentions = Annotated[
    list[str] | None,
    typer.Option(
        help="Time a ViT-S's layer with softmax, elfatt, effatt, local, agent or focused; may be given several times."
    ),
]
Sizes = Annotated[
    list[str],
    typer.Option("--size", help="Side of the images in pixels, or 832x480, width first; may be given several times."),
]
ONE_OF = (
    "One of {}, a saved FILE.json, or package.module:Class; with settings as in elfatt-fast:block_size=512,levels=2; "
    "several times, or the benchmark's own set."
)
CallMethods = Annotated[
    list[str] | None, typer.Option("--method", help=ONE_OF.format(", ".join((*METHODS, PEER, *ALONE))))
]
RunMethods = Annotated[
    list[str] | None, typer.Option("--method", help=ONE_OF.format(", ".join((*METHODS, *PEERS, *ALONE))))
]
Model = Annotated[str, typer.Option(help=f"{', '.join(SHAPE_NAMES)} (random weights), {MODELS}.")]
PipelineModel = Annotated[str, typer.Option(help=f"{', '.join(UNET_NAMES)} (random weights), {MODELS}.")]
Ratio = Annotated[float | None, typer.Option(help="Fraction of the tokens that are merged, for all that merge.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
Batch = Annotated[int, typer.Option(help="Images at a time.")]
Rows = Annotated[int, typer.Option("--batch", help="Rows of a UNet's batch: two for each image with guidance.")]
Repeats = Annotated[int, typer.Option(help="Rounds that count.")]
MaxSeconds = Annotated[float, typer.Option(help="Leave out what is expected to take longer for one call.")]
Compile = Annotated[bool, typer.Option("--compile", help="Time all but other packages through torch.compile too.")]
Autotune = Annotated[
    bool, typer.Option("--autotune", help="Time every method also with only those layers patched that it makes faster.")
]
Memory = Annotated[bool, typer.Option("--memory/--no-memory", help="Also measure the peak memory.")]
MemoryBatch = Annotated[
    list[int] | None,
    typer.Option(
        help="Rows at which the peak is measured, two such batches for the growth; if not given --batch and twice that."
    ),
]
Seconds = Annotated[float, typer.Option(help="Start no further round past this time, for each size.")]
Steps = Annotated[int, typer.Option(help="Denoising steps.")]
SESSION_OPTIONS: dict[str, tuple[Any, Any]] = {
    "out": optional(
        Path, metavar="DIR", help="Folder for JSON, a Markdown table and a plot; earlier ones are replaced."
    ),
    "name": optional(str, help="Of those files, if not the benchmark's."),
    "as_markdown": optional(bool, "--markdown", help="Print the table as Markdown, as it stands in the file."),
}


def build_session(out: Path | None, name: str | None, as_markdown: bool | None) -> dict[str, Any]:
    """Check the folder, and return what a `Session` is made of, which needs PyTorch."""
    if name is not None and (out is None or Path(name).name != name):
        raise ElfattError(f"name={name!r} is not accepted; give --out DIR and a name without a folder or an ending.")
    if out is not None:
        check_writable(out)
    return {"out": out, "name": name, "markdown": bool(as_markdown)}


takes_session = adds_options("session", SESSION_OPTIONS, build_session)


# Commands hand their options on as they are, by `locals()`: they have the names of the benchmarks' own.
@app.command()
@takes_session
def layer(
    session: Any,
    tokens: Tokens = [4096, 16384],  # noqa: B006
    attention: Attentions = None,
    batch: Rows = 2,
    repeats: Repeats = 5,
    block_size: BlockSize = 128,
    max_seconds: MaxSeconds = float("inf"),
    memory: Memory = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """One self-attention layer of SD 1.5's finest level, attention alone and with its projections; or of a ViT-S."""
    _run("layer", **locals())


@app.command()
@takes_session
def denoiser(
    session: Any,
    model: Model = "sd15",
    sizes: Sizes = ["512", "1024"],  # noqa: B006
    methods: CallMethods = None,
    ratio: Ratio = None,
    batch: Rows = 2,
    repeats: Repeats = 5,
    seconds: Seconds = float("inf"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    compile: Compile = False,
    autotune: Autotune = False,
    memory: Memory = True,
    memory_batch: MemoryBatch = None,
    variant: Variant = None,
) -> None:
    """One call of a UNet or transformer in every phase of every method, added up over a run."""
    options = locals()
    if memory_batch and not memory:
        raise ElfattError("--memory-batch is not accepted with --no-memory; leave one of them out.")
    if compile and autotune:
        raise ElfattError("--autotune is not accepted with --compile; compiled layers cannot be measured.")
    checks.whole("memory_batch", min(memory_batch or [1]), 1)
    _run("unet", **options | {"memory": options.pop("memory_batch") if memory else []})


app.command("unet", hidden=True)(denoiser)  # its name before transformers had a place


@app.command()
@takes_session
def pipeline(
    session: Any,
    model: PipelineModel = "toy",
    sizes: Sizes = [],  # noqa: B006
    methods: RunMethods = None,
    ratio: Ratio = None,
    batch: Batch = 1,
    repeats: Repeats = 5,
    steps: Steps = 25,
    memory: Memory = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    variant: Variant = None,
) -> None:
    """A whole pipeline with guidance, from prompt to image."""
    _run("pipeline", **locals())


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


def _run(name: str, session: dict[str, Any], **options: Any) -> None:
    """Check the options of a benchmark, run it, and show what it has, also when it is stopped."""
    options = {option: value for option, value in options.items() if value is not None}
    need("elfatt-sd bench", "matplotlib", "tomesd")
    for option in ("batch", "repeats", "steps"):
        checks.whole(option, options.get(option, 1), 1)
    for option in ("seconds", "max_seconds"):
        if not options.get(option, 1.0) > 0:
            raise ElfattError(f"{option}={options[option]:g} is not accepted; give a number above 0.")
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
    made = Session(**session, command=shlex.join(["elfatt-sd", *sys.argv[1:]]))
    quiet_libraries()
    try:
        with progress_of("calls") as made.progress:
            getattr(benchmarking, name)(session=made, **options)
    finally:
        if results := made.results:
            if made.markdown:
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
    if "=" not in settings:  # a name alone, or package.module:Class
        named(text)  # checks it
        return text
    return varied(method, **dict(map(name_and_value, settings.split(","))))
