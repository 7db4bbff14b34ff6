"""What a run would take, and everything that would stop it, before anything is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.fits import check_batches_fit, misfits
from elfatt_sd.evaluation.images import image_seed, load_protocol_pipeline, row_patch
from elfatt_sd.evaluation.measure import WARMUP_STEPS, timed_call
from elfatt_sd.evaluation.memory import program_of
from elfatt_sd.evaluation.metrics.choice import MetricChoice
from elfatt_sd.evaluation.processes import process_state
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.records import read_data
from elfatt_sd.evaluation.results import STAGE_FILES
from elfatt_sd.evaluation.run import MEMORY_FILE, SCORES_FILE, TIME_FILE, Run, RunFailure
from elfatt_sd.evaluation.stages import check_device, first_checks
from elfatt_sd.files import check_writable
from elfatt_sd.measuring.clock import Stopwatch

_PNG_BYTES_PER_PIXEL = 1.6  # of photographs; flat images take less
_PROBE_STEPS = 2
_PROBE_IMAGES = 8  # for an extractor


@dataclass(frozen=True)
class Estimate:
    """How long the rest of a run will take, as if every row were the untouched pipeline.

    Attributes:
        seconds_per_image: of the untouched pipeline on this machine, in the protocol's batches.
        generation_hours: to make the images.
        timing_hours: to time all rows, warm-up included; 0 where that is done.
        memory_hours: to measure the memory of all rows that are not measured, each program once, with the start of
            each process.
        scoring_hours: to put the images and the reference's through the extractors; 0 where that is done.
        processes: that share making and scoring.
    """

    seconds_per_image: float
    generation_hours: float
    timing_hours: float
    memory_hours: float
    scoring_hours: float = 0.0
    processes: int = 1

    @property
    def parts(self) -> dict[str, float]:
        """The hours of each part, by what it is for."""
        return {
            "to generate": self.generation_hours,
            "to time": self.timing_hours,
            "for the memory": self.memory_hours,
            "for the features": self.scoring_hours,
        }

    @property
    def hours(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())


def estimate(run: Run) -> Estimate:
    """Estimate the time of a run, from one batch with two steps; what is finished does not count.

    Raises:
        ElfattError: the model or the labels cannot be loaded.
    """
    with Stopwatch() as starting:  # a process imports more, but draws no image
        seconds = probe_seconds(run.protocol)
    weighed, processes = _memory_to_measure(run)
    hours = (count * seconds / 3600 for count in (_images_to_make(run), _images_to_time(run), weighed))
    generation, timed, memory = hours
    sharing = process_state(run.protocol.device).num_processes
    scoring = _seconds_to_score(run) / 3600
    started = processes * starting.seconds / 3600
    return Estimate(seconds, generation / sharing, timed, memory + started, scoring / sharing, sharing)


def _seconds_to_score(run: Run) -> float:
    """Estimate how long the extractors take, from one batch each; metrics and distances take little."""
    from elfatt_sd.evaluation.score import load_extractors, reference_left

    protocol = run.protocol
    finished = all(row.finished for row in run.rows) and (run.folder / SCORES_FILE).exists()
    images = 0 if finished or not protocol.extractors else count_images(run) * protocol.frames
    pictures = torch.zeros(_PROBE_IMAGES, 3, protocol.height, protocol.width, dtype=torch.uint8, device="cpu")
    seconds = 0.0
    for extractor in load_extractors(protocol) if images else ():
        extractor(pictures[:1])
        with Stopwatch() as watch:
            extractor(pictures)
        seconds += watch.seconds / _PROBE_IMAGES * (images + reference_left(protocol, extractor))
    return seconds


def _images_to_make(run: Run) -> int:
    batches = list(enumerate(run.batches))
    left = [each for row in run.rows if not row.finished for number, each in batches if not row.has_batch(number, each)]
    return sum(map(len, left))


def _images_to_time(run: Run) -> float:
    protocol = run.protocol
    done = _read(run, TIME_FILE)
    if protocol.time is None or (done and not done.get("errors")):
        return 0.0
    rounds = protocol.time.repeats + protocol.time.warmup * min(WARMUP_STEPS, protocol.steps) / protocol.steps
    return len(protocol.cells) * (protocol.time.batch or protocol.batch) * rounds


def _memory_to_measure(run: Run) -> tuple[float, int]:
    """Return the images that the memory takes, counted by their steps, and the number of processes."""
    memory, steps = run.protocol.memory, run.protocol.steps
    if memory is None:
        return 0.0, 0
    data = _read(run, MEMORY_FILE)
    known = data.get("programs", {})
    programs = {program_of(cell) for cell in run.protocol.cells if cell.name not in data.get("rows", {})} - known.keys()
    batches = set(memory.batches)
    return len(programs) * sum(batches) * (memory.steps or steps) / steps, len(programs) * len(batches)


def _read(run: Run, name: str) -> dict[str, Any]:
    return read_data(run.folder / name, STAGE_FILES[name], "delete it") or {}


def count_images(run: Run) -> int:
    """Return the number of images over all rows."""
    return len(run.prompts) * len(run.rows)


def disk_gib(run: Run) -> float:
    """Estimate the disk that the images of a run take, in GiB."""
    pixels = run.protocol.frames * run.protocol.height * run.protocol.width
    return count_images(run) * pixels * _PNG_BYTES_PER_PIXEL / 2**30


def probe_seconds(protocol: Protocol) -> float:
    """Estimate the seconds per image of the untouched pipeline from one batch with two steps, after one to warm up.

    Raises:
        ElfattError: the model cannot be loaded, or its images do not fit into memory.
    """
    from elfatt_sd.evaluation.prompts import run_prompts

    short = dataclasses.replace(protocol, steps=_PROBE_STEPS, time=None, memory=None)
    check_batches_fit(short)
    pipe = load_protocol_pipeline(protocol)
    check_batches_fit(short, pipe)
    prompts = [prompt.text for prompt in run_prompts(protocol)[: protocol.batch]]
    seeds = [image_seed(protocol, protocol.baseline, index) for index in range(len(prompts))]
    timed_call(pipe, short, protocol.baseline, prompts, seeds)
    batch = timed_call(pipe, short, protocol.baseline, prompts, seeds)
    seconds = {part: taken / len(prompts) for part, taken in batch.items()}
    probed = len(pipe.scheduler.timesteps)  # calls of the denoiser, which some schedulers make twice in a step
    steps = probed * protocol.steps / _PROBE_STEPS
    if not pipe.scheduler.config.get("use_dynamic_shifting"):  # which needs to know the image's size
        pipe.scheduler.set_timesteps(protocol.steps)
        steps = len(pipe.scheduler.timesteps)
    rest = seconds["end_to_end"] - seconds["unet"]
    return seconds["unet"] * steps / probed + rest


def obstacles(run: Run, reuse: Sequence[Path] = (), *, force: bool = False) -> list[str]:
    """Try everything that a run needs, and return a line for each thing that would stop it or a row.

    Args:
        run: which one.
        reuse: folders of other runs.
        force: leave out what is estimated not to fit into memory.
    """
    from elfatt_sd.evaluation.metrics.scores import OF_FEATURES, check_feature_metrics, load_metrics
    from elfatt_sd.evaluation.reference import Wanted
    from elfatt_sd.evaluation.score import load_extractors, network_device, score_inputs

    protocol = runnable = run.protocol
    given = protocol.reference
    reference = Wanted(given.source, expected=given.count, allow_count=given.allow_count, per_class=given.per_class)
    if _reason_against(lambda: check_device(protocol)):
        runnable = dataclasses.replace(protocol, device="cpu", dtype="float32")  # go on to the other obstacles

    def each_extractor(spec: str) -> None:
        part = dataclasses.replace(runnable, extractors=(spec,), metrics=())
        score_inputs(part, load_extractors(part))

    def each_metric(choice: MetricChoice) -> None:
        if choice.metric in OF_FEATURES:  # of others, a missing extractor hides nothing
            check_feature_metrics([choice], load_extractors(runnable))
        load_metrics([choice], network_device(runnable))

    checks: list[Callable[[], Any]] = [
        lambda: check_writable(run.folder),
        run.check,
        *(functools.partial(Run.open, other) for other in reuse),
        *first_checks(protocol),
        *([reference.check] if protocol.extractors else []),
        *(functools.partial(each_extractor, spec) for spec in protocol.extractors),
        lambda: load_extractors(runnable),
        *(functools.partial(each_metric, choice) for choice in protocol.metrics),
        lambda: load_metrics(protocol.metrics, network_device(runnable)),  # are all names different?
        lambda: _check_disk(run),
    ]
    found = [reason for check in checks if (reason := _reason_against(check))]
    return list(dict.fromkeys([*found, *_obstacles_of_rows(runnable, force)]))


def _reason_against(check: Callable[[], Any]) -> str:
    try:
        check()
    except (ElfattError, RunFailure) as error:
        return str(error)
    return ""


def _check_disk(run: Run) -> None:
    needed, free = disk_gib(run), run.free_gib
    if needed > free:
        raise ElfattError(
            f"{run.folder}: about {needed:.3g} GiB of disk are needed and {free:.3g} are free; make room."
        )


def _obstacles_of_rows(protocol: Protocol, force: bool) -> list[str]:
    """Load the pipeline and patch it with each row's method."""
    loaded: list[Any] = []
    if not force and (beyond := misfits(protocol)):
        return beyond
    if missing := _reason_against(lambda: loaded.append(load_protocol_pipeline(protocol))):
        return [missing]
    (pipe,) = loaded
    if not force and (beyond := misfits(protocol, pipe)):
        return beyond

    def patch(cell: Cell) -> None:
        with row_patch(pipe, cell):
            pass

    found = [(cell, _reason_against(functools.partial(patch, cell))) for cell in protocol.cells]
    return [f"row {cell.name!r}: {reason}" for cell, reason in found if reason]
