"""Find the settings that a pipeline can take on this machine: ask for closeness or for speed, and have it proved."""

from __future__ import annotations

import csv
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError

if TYPE_CHECKING:
    from elfatt_sd.tuning.budget import Compare, Metric
    from elfatt_sd.tuning.runs import Runs
    from elfatt_sd.tuning.search import Search
    from elfatt_sd.tuning.tuned import Tuned

SEARCHED, HELD_OUT = 3, 5  # images of the search, and of the proof
PRESETS = ("elfatt", "elfatt-fast", "elfatt-quality")
_FIGURES = 5  # version of what is measured
_COMPARED = 2  # images of the search that presets are run with
_PROMPTS = Path(__file__).parents[1] / "evaluation" / "prompt_lists" / "images.csv"

Tell = Callable[[str, int, int], None]


def tune(
    pipe: Any,
    *,
    closeness: float | None = None,
    speed: float | None = None,
    memory: float | None = None,
    prompts: Sequence[str] | None = None,
    metric: Metric | Compare = "psnr",
    weights: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    negative_prompt: str | None = None,
    seed: int = 0,
    images: int = SEARCHED + HELD_OUT,
    presets: bool = True,
    inputs: Mapping[str, Any] | None = None,
    progress: Tell | None = None,
) -> Tuned:
    """Find the fastest settings that are as close to the untouched image as asked, or the closest that are as fast.

    The pipeline runs untouched, with its layers watched; then in choices that are predicted to fit; then, untouched and
    tuned in turn, with prompts that were not used before. It is as it was before afterwards, also after an exception.
    What was measured is kept on the disk: tuning goes on where it was stopped. See docs/tuning.md.

    Args:
        pipe: a diffusers pipeline with a UNet or a transformer of a known family.
        closeness: wanted mean closeness: PSNR in dB at least, or what `metric` gives.
        speed: wanted speed: times as fast as the untouched pipeline.
        memory: GiB at the peak of an image at most; of the whole process on a CPU.
        prompts: two or more, such as you use; by default those of the embedded pipelines, or a list of photographs.
            The first ones serve the search, the others the proof.
        metric: `psnr`, `ssim`, `lpips`, `dists`, or a function of two PIL images, of which a higher value is closer.
        weights: for LPIPS and DISTS, torchvision's file of the network that it compares features of.
        steps: denoising steps; the pipeline's own by default.
        guidance: guidance scale; the pipeline's own by default.
        height: of the image in pixels; the pipeline's own by default.
        width: likewise.
        frames: of a clip; the pipeline's own by default.
        negative_prompt: what guidance leads away from.
        seed: of the first image; the next ones count up.
        images: images of the search and the proof together, five of eight for the proof.
        presets: also run the presets, for the curve.
        inputs: further arguments of the pipeline's call, such as an image.
        progress: told of every stage: its name, the denoising steps done in it and in all.

    Returns:
        The settings, with what was measured.

    Raises:
        ElfattError: a budget that makes no sense, fewer than two prompts, or a pipeline that cannot be tuned.
        ElfattFailure: a speed that no choice has, or none that is as close as asked.
    """
    from elfatt_sd.config import method_named
    from elfatt_sd.drawing.running import check_steps, taken, tell_cut_prompts
    from elfatt_sd.drawing.studio import check_run
    from elfatt_sd.families import main_denoiser
    from elfatt_sd.patch import patches_of, remove_patch, restored
    from elfatt_sd.tuning.budget import Budget, check_wanted, measure_named
    from elfatt_sd.tuning.runs import Runs, Sample, Settings, Store
    from elfatt_sd.tuning.search import Search

    main_denoiser(pipe)
    if not {"prompt", "num_inference_steps"} <= taken(pipe).keys():
        raise ElfattError(f"a {type(pipe).__name__} cannot be tuned; give a pipeline that is called with a prompt.")
    budget = Budget(closeness, speed, memory)
    check_run(steps, guidance, seed, height, width)
    check_wanted(budget, metric, prompts, images, frames)
    measure = measure_named(metric, weights, str(getattr(pipe, "device", "cpu")))
    own_steps, own_guidance, own_prompts = _own(pipe)
    words = own_prompts if prompts is None else prompts
    samples = [Sample(words[number % len(words)], seed + number) for number in range(images)]
    settings = Settings(
        own_steps if steps is None else steps,
        own_guidance if guidance is None else guidance,
        height,
        width,
        frames,
        negative_prompt,
        inputs or {},
    )
    check_steps(pipe, settings.steps)
    settings.check(pipe)
    tell_cut_prompts(pipe, [*(sample.prompt for sample in samples), negative_prompt or ""])
    searched = max(1, len(samples) * SEARCHED // (SEARCHED + HELD_OUT))
    with restored(pipe):
        known = [(name, method_named(name)) for name in PRESETS if presets]
        known += [("as it was", patch.config) for patch in patches_of(pipe).values()]
        remove_patch(pipe)
        runs = Runs(pipe, settings)
        record = _record(runs)
        store = Store(record | {"samples": samples, "figures": _FIGURES})

        def say(stage: str, images: float) -> None:
            before = runs.steps_done

            def on_step(step: int, steps: int) -> None:
                done = max(0, runs.steps_done - before)
                if progress is not None:
                    progress(stage, done, max(round(images * steps), done))

            runs.on_step = on_step

        return _tuned(Search(runs, samples, searched, budget, measure, store, say), known, record)


def _tuned(search: Search, known: Sequence[tuple[str, PatchConfig]], record: dict[str, Any]) -> Tuned:
    """Search, and prove what was found."""
    from elfatt_sd.tuning.search import Proving
    from elfatt_sd.tuning.tuned import UNTOUCHED, Tuned

    start = time.monotonic()
    search.measure_untouched()
    search.measure_layers()
    search.check_reachable()
    for name, config in known:
        try:
            search.run_config(name, config, _COMPARED)
        except ElfattError as error:  # it does not go with this pipeline
            warnings.warn(f"elfatt-sd: {name} is left out of the curve: {error}", stacklevel=3)
    choice = search.settle()
    proving = Proving(search)
    proof = proving.prove(choice)
    proving.check(proof)
    return Tuned(
        config=UNTOUCHED if proof is None else proof.point.config,
        budget=search.budget,
        measure=search.measure,
        proof=proof,
        points=tuple(search.points),
        curve=tuple(search.curve),
        untouched_seconds=search.seconds,
        floor=search.floor,
        images=(time.monotonic() - start) / search.seconds,
        record=record,
    )


def _own(pipe: Any) -> tuple[int, float | None, list[str]]:
    """Return the steps, the guidance scale and the prompts of a model, where nobody gives others."""
    from elfatt_sd.drawing.running import own_settings
    from elfatt_sd.toy import EMBEDDED
    from elfatt_sd.toy.renderer import caption, sample_scenes

    where = str(getattr(pipe.config, "_name_or_path", ""))
    embedded = next((name for name, each in EMBEDDED.items() if where == str(each.folder)), "")
    if embedded:
        return (*own_settings(pipe, embedded), list(map(caption, sample_scenes(32, 1))))
    with _PROMPTS.open(encoding="utf-8", newline="") as file:
        prompts = [row["prompt"] for row in csv.DictReader(file)]
    return (*own_settings(pipe, ""), prompts[:: len(prompts) // 16])


def _record(runs: Runs) -> dict[str, Any]:
    """Return what the figures are of: model, settings, machine and versions."""
    import dataclasses

    import torch
    from torch import nn

    from elfatt_sd.devices import device_name
    from elfatt_sd.drawing.studio import versions
    from elfatt_sd.methods import attentions
    from elfatt_sd.tuning.runs import fingerprint

    pipe, settings = runs.pipe, dataclasses.asdict(runs.settings)
    settings["inputs"] = {name: str(type(value)) for name, value in settings["inputs"].items()}
    scheduler = {name: value for name, value in pipe.scheduler.config.items() if not name.startswith("_")}
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {
        "pipeline": type(pipe).__name__,
        "model": str(getattr(pipe.config, "_name_or_path", "")),
        "weights": {name: fingerprint(part) for name, part in parts.items()},
        "scheduler": {"class": type(pipe.scheduler).__name__, **scheduler},
        "settings": settings,
        "device": device_name(runs.device),
        "threads": torch.get_num_threads(),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "attentions": sorted(attentions()),
        "versions": versions(),
    }
