"""`elfatt-sd bench`: parse, call `elfatt_sd.benchmark`, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from elfatt_sd.config import METHODS

app = typer.Typer(no_args_is_help=True)

Tokens = Annotated[list[int], typer.Option(help="Tokens of a square grid; may be given several times.")]
Sizes = Annotated[list[int], typer.Option("--size", help="Side of the pictures in pixels; may be given several times.")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help=f"One of {', '.join(METHODS)}; several times, or all of them.")
]
Model = Annotated[str, typer.Option(help="sd15 or sdxl (random weights), toy, a directory, a hub id or a file.")]
Ratio = Annotated[float | None, typer.Option(help="Share of the tokens that are merged.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
Batch = Annotated[int, typer.Option(help="Pictures at a time (a UNet sees two for each with guidance).")]
Repeats = Annotated[int, typer.Option(help="Rounds that count.")]
MaxSeconds = Annotated[float, typer.Option(help="Leave out what is expected to take longer for one call.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Also write JSON, Markdown and a plot to this folder.")]
Compile = Annotated[bool, typer.Option("--compile", help="Run everything through torch.compile.")]
Memory = Annotated[bool, typer.Option("--memory/--no-memory", help="Also measure the peak memory.")]


@app.command()
def layer(
    tokens: Tokens = [4096, 16384],  # noqa: B006
    batch: Batch = 2,
    repeats: Repeats = 5,
    block_size: BlockSize = 128,
    max_seconds: MaxSeconds = float("inf"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = None,
) -> None:
    """One self-attention layer of SD 1.5's finest level, attention alone and with its projections."""
    options = {"batch": batch, "repeats": repeats, "block_size": block_size, "max_seconds": max_seconds}
    _run("layer", out, tokens=tokens, device=device, dtype=dtype, **options)


@app.command()
def growth(
    tokens: Tokens = [4096, 9216, 16384, 36864, 65536],  # noqa: B006
    batch: Batch = 2,
    repeats: Repeats = 5,
    block_size: BlockSize = 128,
    max_seconds: MaxSeconds = float("inf"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = None,
) -> None:
    """How a layer's time grows with the number of tokens: the exponent of each attention."""
    options = {"batch": batch, "repeats": repeats, "block_size": block_size, "max_seconds": max_seconds}
    _run("growth", out, tokens=tokens, device=device, dtype=dtype, **options)


@app.command()
def unet(
    model: Model = "sd15",
    sizes: Sizes = [512, 1024],  # noqa: B006
    methods: Methods = None,
    ratio: Ratio = None,
    batch: Batch = 2,
    repeats: Repeats = 5,
    device: Device = "auto",
    dtype: Dtype = "auto",
    compile: Compile = False,
    memory: Memory = True,
    out: Out = None,
) -> None:
    """One UNet call in every phase of every method, added up over a run."""
    options = {"batch": batch, "repeats": repeats, "compile": compile, "memory": memory, **_given(ratio=ratio)}
    _run("unet", out, model=model, sizes=sizes, methods=methods, device=device, dtype=dtype, **options)


@app.command()
def pipeline(
    model: Model = "toy",
    sizes: Sizes = [],  # noqa: B006
    methods: Methods = None,
    ratio: Ratio = None,
    batch: Batch = 1,
    repeats: Repeats = 5,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 25,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = None,
) -> None:
    """A whole pipeline with guidance, from prompt to picture."""
    options = {"batch": batch, "repeats": repeats, "steps": steps, **_given(ratio=ratio)}
    _run("pipeline", out, model=model, sizes=sizes, methods=methods, device=device, dtype=dtype, **options)


@app.command()
def merging(
    tokens: Tokens = [4096, 16384],  # noqa: B006
    ratio: Annotated[float, typer.Option(help="Share of the tokens that are merged.")] = 0.5,
    batch: Batch = 2,
    repeats: Repeats = 5,
    device: Device = "auto",
    dtypes: Annotated[list[str], typer.Option("--dtype", help="May be given several times.")] = ["float32", "bfloat16"],  # noqa: B006
    out: Out = None,
) -> None:
    """Matching, merge and unmerge beside tomesd's."""
    _run("merging", out, tokens=tokens, ratio=ratio, batch=batch, repeats=repeats, device=device, dtypes=dtypes)


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _run(name: str, out: Path | None, **options: Any) -> None:
    from elfatt_sd import benchmark
    from elfatt_sd.config import ElfattError
    from elfatt_sd.generation import check_writable

    for option in ("batch", "repeats", "steps"):
        if options.get(option, 1) < 1:
            raise ElfattError(f"{option}={options[option]} is not accepted; give a whole number of at least 1.")
    if out is not None:
        check_writable(out)
    results = getattr(benchmark, name)(**options)
    print(benchmark.markdown(results), end="")
    if out is not None:
        print("\n".join(map(str, benchmark.save(results, out))))
