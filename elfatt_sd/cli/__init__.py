"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import elfatt_sd
from elfatt_sd import __version__
from elfatt_sd import errors as checks
from elfatt_sd.cli import bench, evaluation, options
from elfatt_sd.cli.console import OneLineErrors, adds_options, complain, optional, output, process, quiet_libraries
from elfatt_sd.cli.options import DEFAULT, METHOD, METHODS, MODELS, SHAPE_NAMES, Json, PatchOptions, PipelineOptions
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.files import check_writable, write_file
from elfatt_sd.toy import EMBEDDED, PROMPT

if TYPE_CHECKING:
    from elfatt_sd.drawing.studio import OnImage, OnStep, Result, Studio

SHOWN = 24  # pairs of images on a page at most
app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False, no_args_is_help=True)
app.add_typer(evaluation.app, name="eval", help="Measure quality, time and memory of methods.")
app.add_typer(bench.app, name="bench", help="Time and memory, side by side in one run.")


def main() -> None:
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99", "HF_HUB_VERBOSITY": "critical"}
    for variable, level in quiet.items():  # libraries read them when they are loaded
        os.environ.setdefault(variable, level)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a prompt, on a console or in a file of another encoding
    process["own"] = True
    app(prog_name="elfatt-sd")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"elfatt-sd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Faster Stable Diffusion without training, and what it costs."""


@contextmanager
def progress(
    images: int, drawings: int | None = None, say: Callable[[str], None] = typer.echo
) -> Iterator[tuple[OnStep, OnImage]]:
    """Show how far the steps of all images are, and say each image; a comparison draws more of them than it has."""
    from elfatt_sd.measure import progress_of

    total, finished, drawn = drawings or images, 0, 0

    def on_image(said: str, fault: str) -> None:
        nonlocal finished
        finished += 1
        say(said)
        if fault:
            complain(fault, "warning")

    def on_step(step: int, steps: int) -> None:
        nonlocal drawn
        tell(f"image {min(finished + 1, images)} of {images}", drawn * steps + step, total * steps)
        drawn += step == steps

    with progress_of("steps") as tell:
        yield on_step, on_image


@app.command()
@options.takes_patch
@options.takes_source()
@options.takes_drawing
def generate(
    chosen: PatchOptions,
    drawing: dict[str, Any],
    source: Any,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompts to draw.")] = None,
    prompt_file: options.PromptFile = None,
    model: Annotated[str, typer.Option(help=f"{MODELS}.")] = "toy",
    seed: Annotated[int, typer.Option(help="Seed of each prompt's first image; the next ones count up.")] = 0,
    num_images: Annotated[int, typer.Option(help="Images for each prompt.")] = 1,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the images.")] = Path("outputs"),
    compare: Annotated[bool, typer.Option("--compare", help="Draw untouched and patched, side by side.")] = False,
    each: Annotated[bool, typer.Option("--each", help="Accept prompts of one word: draw each one.")] = False,
    graphs: options.Graphs = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what a layer does, in a further run.")] = False,
    layer: Annotated[str | None, typer.Option(metavar="PATH", help="--explain: of `patch --json`, or with *.")] = None,
    step: Annotated[int | None, typer.Option(help="--explain: from 1; one of each phase if not given.")] = None,
    at: Annotated[str, typer.Option(metavar="X,Y", help="--explain: point whose query is followed.")] = "0.5,0.5",
    as_json: Json = False,
) -> None:
    """Draw images, each a PNG with its settings inside and a JSON file next to it."""
    from elfatt_sd.drawing.compare import closeness, compared
    from elfatt_sd.drawing.studio import Request, Studio
    from elfatt_sd.evaluation.prompts import texts_of
    from elfatt_sd.evaluation.report.page import write_pairs
    from elfatt_sd.loading import set_steps
    from elfatt_sd.visualize import check_wanted, watched_layers

    words = prompts or []
    if not each and sum(len(prompt.split()) == 1 for prompt in words) > 1:
        raise ElfattError(
            f"{len(words)} prompts, some of one word, look like one without quotes; give elfatt-sd generate "
            f'"{" ".join(words)}", or --each to draw every one of them (or --prompt-file, one a line).'
        )
    prompts = [*words, *texts_of(prompt_file)]
    asked = {"seed": seed, "num_images": num_images, "compare": compare, "explain": explain, **drawing}
    request = Request(tuple(prompts), chosen.config, chosen.autotune, model, **asked)
    check_writable(out)
    point: tuple[float, ...] = ()
    with suppress(ValueError):
        point = tuple(map(float, at.split(",")))
    check_wanted(step, point)
    if not explain and (layer, step, at) != (None, None, "0.5,0.5"):
        raise ElfattError("--layer, --step and --at are accepted with --explain; give it too, or leave them out.")
    if graphs and compare:  # which patches anew for each image
        raise ElfattError("--graphs is not accepted with --compare; elfatt-sd bench pipeline --graphs times both.")
    if explain:
        need("--explain", "matplotlib")
    pipe, say = source(model).load_for(request), functools.partial(typer.echo, err=as_json)
    if graphs:
        elfatt_sd.graphs(pipe, say=say)
    results: list[Result] = []
    studio = Studio(pipe, request, out)
    if explain:
        if step is not None:
            set_steps(pipe.scheduler, studio.steps)
            checks.whole("step", step, 1, len(pipe.scheduler.timesteps))
        with studio.patched():
            watched_layers(pipe, layer)
    images = request.num_images * len(prompts)
    with progress(images, 2 * images + 1 if compare else images, say) as (studio.on_step, on_image):
        for result in compared(studio) if compare else studio.results():
            results.append(result if len(results) < SHOWN else replace(result, pair=None))
            said = result.figures or f"{result.seconds:.2f} s"
            on_image(f"{result.path}\n  {said}", result.fault and f"{result.path}: {result.fault}")
    seconds = median(result.seconds for result in results)
    say(f"{len(results)} written; {seconds:.2f} s from prompt to image (median); {results[-1].memory}")
    close = [result.psnr_db for result in results if result.psnr_db is not None]
    lines, shown = [closeness(close)] * (len(close) > 1), [result.pair for result in results[:SHOWN]]
    page = write_pairs(results[0].path, shown, lines) if compare else None
    for line in (*lines, *[f"page: {page}"] * bool(page)):
        say(line)
    explained = [*_explain(studio, results, {"layer": layer, "step": step, "at": point}, say)] if explain else []
    if as_json:
        drawn = [{**_record_of(result.path), "fault": result.fault or None} for result in results]
        print(json.dumps({"images": drawn, "explained": explained, "page": page}, indent=2))


def _record_of(path: Path) -> dict[str, Any]:
    return {"path": str(path), **json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))}


def _explain(studio: Studio, results: Sequence[Result], wanted: dict[str, Any], say: Any) -> Iterator[str]:
    """Draw every image once more, watched, and write what was seen next to it; the times are of the first run."""
    from elfatt_sd.evaluation.report.charts import to_png
    from elfatt_sd.visualize import draw, watch

    studio.on_step = lambda step, steps: None
    for result, (prompt, seed) in zip(results, studio.shots(), strict=True):
        with studio.patched(), watch(studio.pipe, **wanted) as looks:
            image = studio.draw(prompt, seed).frames[0]
        layers = list(dict.fromkeys(look.layer for look in looks))
        for look in looks:
            number = f"-layer-{layers.index(look.layer) + 1}" if len(layers) > 1 else ""
            path = result.path.with_name(f"{result.path.stem}-explained{number}-step-{look.step + 1}.png")
            write_file(path, to_png(draw(look, image)))
            say(path)
            yield str(path)


@app.command(name="try")
@options.takes_source()
@options.takes_drawing
def try_methods(
    drawing: dict[str, Any],
    source: Any,
    model: Annotated[str | None, typer.Argument(help=f"{MODELS}.", show_default="toy")] = None,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="The prompt to draw.")] = None,
    models: Annotated[list[str] | None, typer.Option("--model", help="Another model; several times.")] = None,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="Another prompt; several times.")] = None,
    prompt_file: options.PromptFile = None,
    seed: Annotated[int, typer.Option(help="Seed of all images.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often each method is timed, interleaved.")] = 2,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", autocompletion=lambda: [DEFAULT, *METHODS], help=f"{METHOD} Several; all if none."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the strip and its JSON.")] = Path("outputs"),
    as_json: Json = False,
) -> None:
    """Draw a prompt with every method: a strip, times, closeness, and which method to use here.

    Of several prompts or models, a sheet: untouched, the fastest method and the closest one, as the first prompt shows.
    """
    from elfatt_sd.config import PatchConfig, method_named
    from elfatt_sd.drawing.compare import Sheet, Trial
    from elfatt_sd.drawing.studio import Request, Studio
    from elfatt_sd.evaluation.prompts import texts_of
    from elfatt_sd.evaluation.report.page import write_pairs
    from elfatt_sd.loading import check_model

    first = prompt if prompt and all(" " in each for each in prompt) else [" ".join(prompt)] if prompt else []
    words = [*first, *(prompts or ()), *texts_of(prompt_file)]
    all_prompts, all_models = words or [PROMPT], [*([model] if model else []), *(models or ())]
    sources = {name: source(name) for name in all_models or ["toy"]}
    request = Request((all_prompts[0],), PatchConfig.preset("sd"), model=next(iter(sources)), seed=seed, **drawing)
    checks.whole("repeats", repeats, 1)
    chosen = list(methods or METHODS)
    [*map(method_named, chosen)]  # checks them
    check_writable(out)
    drawn: Trial | Sheet
    if len(sources) > 1 or len(all_prompts) > 1:
        for name, each in sources.items():
            check_model(name, allow_pickle=each.allow_pickle, variant=each.variant)
        load = lambda request: sources[request.model].load_for(request)  # noqa: E731
        drawn = Sheet(load, list(sources), all_prompts, chosen, repeats, {"seed": seed, **drawing})
    else:
        drawn = Trial(Studio(sources[request.model].load_for(request), request, out), chosen, repeats)
    try:
        say = functools.partial(typer.echo, err=as_json)
        with progress(drawn.images, say=say) as (on_step, on_image):
            drawn.run(on_image, on_step)
    finally:  # what is finished is shown and kept when it is stopped
        if drawn.rows:
            path = drawn.write(out)
            page = write_pairs(path, drawn.pairs(), drawn.figures())
            record = json.dumps({**_record_of(path), "page": page}, indent=2)
            print(*[record] if as_json else [*drawn.figures(), path, *[f"page: {page}"] * bool(page)], sep="\n")


def _check_file(save: Path | None) -> None:
    if save is not None:
        if save.is_dir():
            raise ElfattError(f"save={str(save)!r} is a folder; give the name of a file.")
        check_writable(save.parent, f"save={str(save)!r}")


@app.command()
@options.takes_patch
@options.takes_source("cpu")
def patch(
    chosen: PatchOptions,
    source: Any,
    model: Annotated[str, typer.Argument(help=f"{MODELS}; {', '.join(SHAPE_NAMES)} load nothing.")] = "toy",
    height: options.Height = None,
    width: options.Width = None,
    steps: options.Steps = None,
    as_json: Json = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the configuration as JSON.")] = None,
) -> None:
    """Show what would be patched, layer by layer, and the Python lines that do it."""
    from elfatt_sd.drawing.studio import check_sizes, own_settings
    from elfatt_sd.patch import plan

    check_sizes(height, width)
    _check_file(save)
    from_where: PipelineOptions = source(model)
    if model not in SHAPE_NAMES:
        pipe = from_where.load()
    elif chosen.autotune:
        raise ElfattError(
            f"model={model!r} is a shape without weights, which --autotune cannot measure; give a model, or time the "
            f"shape with elfatt-sd bench denoiser --model {model} --autotune."
        )
    else:
        from elfatt_sd.families.shapes import sketch
        from elfatt_sd.loading import pick_device, pick_dtype

        quiet_libraries()
        pick_dtype(from_where.dtype, pick_device(from_where.device))
        pipe = sketch(model)
    if steps is None and (model in EMBEDDED or chosen.config.origin):
        steps = own_settings(pipe, model)[0]
    planned = plan(pipe, chosen.config, height=height, width=width, steps=steps, autotune=chosen.autotune)
    if planned.auto:
        written = chosen.arguments.replace(DEFAULT, planned.config.method, 1)
        chosen = chosen._replace(config=planned.config, arguments=written)
    if save is not None:
        chosen.config.save(save)
        chosen = options.build_patch(config_file=str(save), autotune=chosen.autotune)
    lines = ["import elfatt_sd", "", from_where.python(), f"elfatt_sd.apply_patch(pipe, {chosen.arguments})"]
    if as_json:
        print(json.dumps({**planned.to_dict(), "model": model, "python": lines}, indent=2))
        return
    output().print(str(planned))
    print("\nIn Python:\n\n" + "\n".join(f"    {line}" for line in lines))


GIVEN = ("lora", "image", "strength", "scheduler")  # to `tune`, not to `elfatt_sd.tune`
TUNE_OPTIONS: dict[str, tuple[Any, Any]] = {  # of `tune`, that go on as they are
    "metric": (Annotated[str, typer.Option(help=f"{', '.join(options.METRICS)}.")], "psnr"),
    "weights": optional(Path, metavar="FILE", help="Of the network of lpips and dists, torchvision's file."),
    **options.DRAWING_OPTIONS,
    "frames": optional(int, help="Of a clip; the model's own if not given."),
    "seed": (Annotated[int, typer.Option(help="Of the first image; the next ones count up.")], 0),
    "images": optional(int, "--num-images", default=24, help="For the proof at most; they end when it is decided."),
    "presets": (Annotated[bool, typer.Option("--presets/--no-presets", help="Run the presets, too.")], True),
    "reuse": (Annotated[bool, typer.Option("--reuse/--no-reuse", help="Steps may take over from earlier ones.")], True),
}


@app.command()
@options.takes_source()
@adds_options("asked", TUNE_OPTIONS, dict)
def tune(
    source: Any,
    asked: dict[str, Any],
    model: Annotated[str, typer.Argument(help=f"{MODELS}.")] = "toy",
    closeness: Annotated[float | None, typer.Option(help="Mean closeness, at least: PSNR in dB, or --metric.")] = None,
    lowest: Annotated[float | None, typer.Option(help="Closeness of the worst of --num-images, at least.")] = None,
    speed: Annotated[float | None, typer.Option(help="Speed, at least: times as fast as untouched.")] = None,
    memory: Annotated[float | None, typer.Option(help="Peak memory of a GPU in GiB, at most.")] = None,
    confidence: Annotated[float, typer.Option(help="With which closeness and speed are promised.")] = 0.9,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="Two or more, such as you use.")] = None,
    prompt_file: options.PromptFile = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the settings as JSON, for --config.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page with the curve and images.")] = None,
    as_json: Json = False,
) -> None:
    """Find the settings that a model can take on this machine, by closeness or by speed, and what can be promised.

    The same command goes on where it stopped.
    """
    from elfatt_sd.drawing import studio
    from elfatt_sd.evaluation.prompts import texts_of
    from elfatt_sd.loading import make_scheduler, scheduler_class
    from elfatt_sd.measure import progress_of
    from elfatt_sd.tuning import tune as tune_pipeline
    from elfatt_sd.tuning.proof import FEWEST, MOST, Budget, check_wanted

    budget, guidance = Budget(closeness, speed, memory, lowest, confidence), asked["guidance"]
    given, size = {name: asked.pop(name) for name in GIVEN}, (asked["height"], asked["width"])
    lora, image, strength, scheduler = given.values()
    studio.check_run(asked["steps"], guidance, asked["seed"], *size)
    studio.read_image(image, strength)
    if scheduler is not None:
        scheduler_class(scheduler)
    lines = [*(prompts or ()), *texts_of(prompt_file)] or None
    checks.whole("num_images", asked["images"], FEWEST, MOST)
    check_wanted(budget, asked["metric"], lines, asked["images"], asked["frames"])
    _check_file(save)
    if out is not None:
        check_writable(out)
        need("the page of a tuning (--out)", "jinja2", "matplotlib")
    from_where: PipelineOptions = source(model)
    pipe = from_where.load(lora)
    own_steps, own_guidance = studio.own_settings(pipe, model)
    if scheduler is not None:
        pipe.scheduler = make_scheduler(scheduler, pipe.scheduler)
    if image is not None:
        pipe, asked["inputs"], size = studio.begin_with(pipe, image, strength, asked["steps"] or own_steps, *size)
        asked["height"], asked["width"] = size
    pipe.set_progress_bar_config(disable=True)
    rows = studio.rows_of(pipe, own_guidance if guidance is None else guidance, asked["negative_prompt"])
    studio.warn_if_too_large(pipe, *size, rows=rows, frames=asked["frames"])
    if text := studio.dimensions_of(pipe).small(*size):
        complain(text, "warning")
    with progress_of("steps") as tell:
        found = tune_pipeline(pipe, **vars(budget), prompts=lines, progress=tell, **asked)
    found.record["settings"] |= given | {"image": image and str(image)}  # for the page's lines
    print(json.dumps(found.to_dict(), indent=2) if as_json else found)  # first: a disk may be full
    if save is not None:
        try:
            found.save(save)
        except (OSError, ElfattError):
            typer.echo(f"\n{json.dumps(found.config.to_dict(origin=True))}", err=as_json)
            raise
        use = f"use them with elfatt-sd generate ... --config {shlex.quote(str(save))}"
        use = use if found.proof else "they leave it untouched"
        typer.echo(f"\nsettings: {save}; {use}", err=as_json)
    if out is not None:
        typer.echo(f"page: {found.report(out)}", err=as_json)


@app.command()
def demo(
    model: Annotated[list[str] | None, typer.Option(help="Model to choose from; may be given several times.")] = None,
    method: Annotated[str, typer.Option(help="Method that is chosen at first.")] = DEFAULT,
    steps: Annotated[int, typer.Option(min=1, max=50, help="Denoising steps that are chosen at first.")] = 12,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the page, which this machine alone opens.")] = 7860,
    browse: Annotated[bool, typer.Option("--browse", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page that draws untouched and patched images side by side; Ctrl-C ends it."""
    from elfatt_sd.config import method_named
    from elfatt_sd.loading import check_model, load_pipeline

    method_named(method)
    for name in model or ():
        check_model(name)
    need("elfatt-sd demo", "gradio")
    from elfatt_sd.drawing.demo import make_page

    quiet_libraries()
    page = make_page(load_pipeline, model or list(EMBEDDED), method, steps)
    print(f"http://127.0.0.1:{port}  (Ctrl-C ends it)")
    page.launch(server_name="127.0.0.1", server_port=port, share=False, inbrowser=browse, quiet=True)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what this machine has and what is missing; exit code 1 if something needed is missing."""
    from elfatt_sd.drawing.doctor import examine

    sections, healthy = examine()
    if as_json:
        data = {name: [vars(finding) for finding in findings] for name, findings in sections.items()}
        print(json.dumps({"healthy": healthy, **data}, indent=2))
    marks = {"ok": ("ok", "green"), "missing": ("missing", "red"), "optional": ("not there", "yellow"), "info": ("",)}
    for name, findings in sections.items() if not as_json else ():
        table = Table(title=name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            table.add_row(Text(*marks[finding.status]), finding.name, finding.value, finding.remedy)
        output().print(table, "", sep="\n")
    if not healthy:
        raise typer.Exit(1)
