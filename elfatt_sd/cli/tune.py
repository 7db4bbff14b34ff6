"""The command `elfatt-sd tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from elfatt_sd.cli.console import adds_options, complain, optional
from elfatt_sd.cli.options import DRAWING_OPTIONS, METRICS, MODELS, Json, Source, takes_source
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.files import check_writable
from elfatt_sd.progress import progress_of

OPTIONS: dict[str, tuple[Any, Any]] = {  # that go on as they are
    "metric": (Annotated[str, typer.Option(help=f"{', '.join(METRICS)}.")], "psnr"),
    "weights": optional(Path, metavar="FILE", help="Of the network of lpips and dists, torchvision's file."),
    **{name: DRAWING_OPTIONS[name] for name in ("steps", "guidance", "height", "width", "negative_prompt")},
    "frames": optional(int, help="Of a clip; the model's own if not given."),
    "seed": (Annotated[int, typer.Option(help="Of the first image; the next ones count up.")], 0),
    "images": (Annotated[int, typer.Option(help="Drawn for the proof at most; they end when it is decided.")], 24),
    "presets": (Annotated[bool, typer.Option("--presets/--no-presets", help="Run the presets, too.")], True),
}


@takes_source()
@adds_options("asked", OPTIONS, dict)
def tune(
    source: Any,
    asked: dict[str, Any],
    model: Annotated[str, typer.Argument(help=f"{MODELS}.")] = "toy",
    closeness: Annotated[
        float | None, typer.Option(help="Mean closeness to the untouched images, at least: PSNR in dB, or --metric.")
    ] = None,
    lowest: Annotated[float | None, typer.Option(help="Closeness of the worst of --images images, at least.")] = None,
    speed: Annotated[float | None, typer.Option(help="Speed, at least: times as fast as untouched.")] = None,
    memory: Annotated[float | None, typer.Option(help="Peak memory in GiB, at most.")] = None,
    confidence: Annotated[float, typer.Option(help="With which closeness and speed are promised.")] = 0.9,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts such as yours, one a line, two at least.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the settings as JSON, for --config.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page with the curve and images.")] = None,
    as_json: Json = False,
) -> None:
    """Find the settings that a model can take on this machine, by closeness or by speed, and what can be promised."""
    from elfatt_sd.drawing.running import warn_if_too_large
    from elfatt_sd.drawing.studio import check_run, read_prompts
    from elfatt_sd.tuning import tune as tune_pipeline
    from elfatt_sd.tuning.proof import Budget, check_wanted

    wanted: dict[str, Any] = {
        "closeness": closeness, "speed": speed, "memory": memory, "lowest": lowest, "confidence": confidence
    }  # fmt: skip
    budget = Budget(**wanted)
    size, steps, guidance = (asked["height"], asked["width"]), asked["steps"], asked["guidance"]
    check_run(steps, guidance, asked["seed"], *size)
    lines = None if prompts is None else read_prompts(prompts)
    check_wanted(budget, asked["metric"], lines, asked["images"], asked["frames"])
    if save is not None:
        if save.is_dir():
            raise ElfattError(f"save={str(save)!r} is a folder; give the name of a file.")
        check_writable(save.parent, f"save={str(save)!r}")
    if out is not None:
        check_writable(out)
        need("the page of a tuning (--out)", "jinja2", "matplotlib")
    from_where: Source = source(model)
    pipe = from_where.load()
    pipe.set_progress_bar_config(disable=True)
    rows = 1 if guidance is not None and guidance <= 1 else 2
    warn_if_too_large(pipe, *size, rows=rows, frames=asked["frames"])
    with progress_of("steps") as tell:
        found = tune_pipeline(pipe, **wanted, prompts=lines, progress=tell, **asked)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found)  # first: a disk may be full
    if save is not None:
        try:
            found.save(save)
        except (OSError, ElfattError):
            if not as_json:  # which has them
                print(f"\n{json.dumps(found.config.to_dict())}")
            raise
        if not as_json:
            print(f"\nsettings: {save}; use them with elfatt-sd generate ... --config {save}")
        if found.proof is None:
            complain("the settings leave the pipeline untouched", "note")
    if out is not None:
        page = found.report(out)
        if not as_json:
            print(f"page: {page}")
