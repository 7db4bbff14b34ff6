"""The command `elfatt-sd tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elfatt_sd import checks
from elfatt_sd.cli_options import (
    GUIDANCE,
    MODELS,
    STEPS,
    AllowPickle,
    Device,
    Dtype,
    Force,
    Height,
    Json,
    NegativePrompt,
    Source,
    Variant,
    Width,
)
from elfatt_sd.console import complain
from elfatt_sd.files import check_writable
from elfatt_sd.preflight import check_sizes_fit, check_steps
from elfatt_sd.progress import progress_of
from elfatt_sd.request import check_run, read_prompts
from elfatt_sd.tuning.asked import METRICS, Budget, check_images

if TYPE_CHECKING:
    from elfatt_sd.tuning.tuned import Tuned


def tune(
    model: Annotated[str, typer.Argument(help=f"{MODELS}.")] = "toy",
    closeness: Annotated[
        float | None, typer.Option(help="Closeness to the untouched images, at least: PSNR in dB, or --metric.")
    ] = None,
    speed: Annotated[float | None, typer.Option(help="Speed, at least: times as fast as untouched.")] = None,
    memory: Annotated[float | None, typer.Option(help="Peak memory in GiB, at most.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts such as yours, one a line, two at least.")
    ] = None,
    metric: Annotated[str, typer.Option(help=f"{', '.join(METRICS)}.")] = "psnr",
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Torchvision's weights of the network in lpips and dists.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help=STEPS)] = None,
    guidance: Annotated[float | None, typer.Option(help=GUIDANCE)] = None,
    height: Height = None,
    width: Width = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a clip; the model's own if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first image; the next ones count up.")] = 0,
    images: Annotated[int, typer.Option(help="Images drawn for the search and the proof together.")] = 8,
    presets: Annotated[bool, typer.Option("--presets/--no-presets", help="Run the presets, too.")] = True,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the settings as JSON, for --config.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page with the curve and images.")] = None,
    negative_prompt: NegativePrompt = None,
    force: Force = False,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    allow_pickle: AllowPickle = False,
    variant: Variant = None,
) -> None:
    """Find the settings that a model can take on this machine, by closeness or by speed, and prove them."""
    Budget(closeness, speed, memory)
    checks.choice("metric", metric, METRICS)
    check_run(steps, guidance, seed, height, width)
    lines = None if prompts is None else read_prompts(prompts)
    check_images(lines, images, frames)
    if save is not None:
        check_writable(save.parent, f"save={str(save)!r}")
    if out is not None:
        check_writable(out)
        _check_page()
    source = Source(model, device, dtype, allow_pickle, variant)
    source.check()
    check_steps(model, steps)
    rows = 1 if guidance is not None and guidance <= 1 else 2
    if not force:
        check_sizes_fit(model, device, dtype, [(height, width)], rows)
    pipe = source.load()
    pipe.set_progress_bar_config(disable=True)
    if not force:
        _check_fits(pipe, (height, width), steps, rows, images, frames)

    from elfatt_sd.tuning import tune as tune_pipeline

    with progress_of("steps") as tell:
        found = tune_pipeline(
            pipe,
            closeness=closeness,
            speed=speed,
            memory=memory,
            prompts=lines,
            metric=metric,
            weights=weights,
            steps=steps,
            guidance=guidance,
            height=height,
            width=width,
            frames=frames,
            negative_prompt=negative_prompt,
            seed=seed,
            images=images,
            presets=presets,
            progress=tell,
        )
    if save is not None:
        found.save(save)
    page = None if out is None else found.report(out)
    _print(found, as_json, save, page)


def _check_fits(
    pipe: Any, size: tuple[int | None, int | None], steps: int | None, rows: int, images: int, frames: int | None
) -> None:
    """Refuse images that do not fit into memory."""
    from elfatt_sd.budget import check_fits
    from elfatt_sd.running import taken

    own = taken(pipe)["num_inference_steps"].default
    check_fits(pipe, *size, steps=own if steps is None else steps, images=images, rows=rows, frames=frames)


def _check_page() -> None:
    from elfatt_sd.optional import need

    need("the page of a tuning (--out)", "jinja2", "matplotlib")


def _print(found: Tuned, as_json: bool, save: Path | None, page: Path | None) -> None:
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(found)
    if save is not None:
        print(f"\nsettings: {save}; use them with elfatt-sd generate ... --config {save}")
    if page is not None:
        print(f"page: {page}")
    if found.proof is None and save is not None:
        complain("the settings leave the pipeline untouched", "note")
