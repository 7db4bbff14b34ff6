"""All stages in order: reference, images, scores, time, memory, report.

A stage is skipped when it is finished and its inputs did not change.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import folder
from elfatt_sd.evaluation.first_steps import kept_calls
from elfatt_sd.evaluation.generate import (
    generate,
    image_seed,
    load_protocol_pipeline,
    row_patch,
    run_prompts,
)
from elfatt_sd.evaluation.measure import (
    MEMORY_FILE,
    TIME_FILE,
    WARMUP_STEPS,
    PeakMeter,
    free_memory,
    measure_memory,
    measure_time,
    program_of,
    timed_call,
)
from elfatt_sd.evaluation.processes import by_first, is_first, leave_processes, process_state
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.results import (
    RESULTS_FILE,
    SCORES_FILE,
    left_out_of_references,
    unreadable_references,
    write_results,
)
from elfatt_sd.files import check_writable, nearest_existing, sha256_of_data, sha256_of_file, write_json
from elfatt_sd.optional import REPORT, need

STAGES_FILE = "stages.json"
_PNG_BYTES_PER_PIXEL = 1.6  # of photographs; flat pictures take less
_PROBE_STEPS = 2
_Report = Callable[[str], None]


@dataclass(frozen=True)
class Estimate:
    """How long the rest of a run will take, as if every row were the untouched pipeline.

    Attributes:
        seconds_per_image: of the untouched pipeline on this machine, one image at a time.
        generation_hours: to make the images, the exact first steps that rows have in common once.
        timing_hours: to time all rows, warm-up included; 0 where that is done.
        memory_hours: to measure the memory of all rows that are not measured, each program once, with the start of
            each process.
    """

    seconds_per_image: float
    generation_hours: float
    timing_hours: float
    memory_hours: float


def estimate(protocol: Protocol, run_dir: Path | None = None) -> Estimate:
    """Estimate the time of a run, from one image with two steps.

    Args:
        protocol: what to run.
        run_dir: its folder, where what is finished does not count.

    Raises:
        ElfattError: the model or the labels cannot be loaded.
    """
    begun = time.perf_counter()
    seconds = probe_seconds(protocol)
    starting = time.perf_counter() - begun  # a process imports more, but draws no image
    timing = 0.0 if _is_done(run_dir, TIME_FILE) else _images_to_time(protocol)
    weighed, processes = _memory_to_measure(protocol, run_dir)
    hours = (count * seconds / 3600 for count in (_images_to_make(protocol, run_dir), timing, weighed))
    generation, timed, memory = hours
    return Estimate(seconds, generation, timed, memory + processes * starting / 3600)


def _is_done(run_dir: Path | None, name: str) -> bool:
    data = (folder.read_json(run_dir / name) if run_dir else None) or {"errors": "not begun"}
    return not data.get("errors")


def _images_to_make(protocol: Protocol, run_dir: Path | None) -> float:
    """Count images, of those that share their exact first steps what is left of each."""
    left = {cell.name: _missing_images(protocol, cell, run_dir) for cell in protocol.cells}
    kept = {cell.name: left[cell.name] * kept_calls(protocol, cell) / protocol.steps for cell in protocol.cells}
    return sum(left.values()) - sum(kept.values()) + max(kept.values())


def _missing_images(protocol: Protocol, cell: Cell, run_dir: Path | None) -> int:
    count = len(run_prompts(protocol))
    if run_dir is None:
        return count
    if folder.manifest_path(run_dir, cell).is_file():
        return 0
    done = len(list(folder.batches_dir(run_dir, cell).glob("*.jsonl")))
    return max(count - done * protocol.batch, 0)


def _images_to_time(protocol: Protocol) -> float:
    if protocol.time is None:
        return 0.0
    rounds = protocol.time.repeats + protocol.time.warmup * min(WARMUP_STEPS, protocol.steps) / protocol.steps
    return len(protocol.cells) * (protocol.time.batch or protocol.batch) * rounds


def _memory_to_measure(protocol: Protocol, run_dir: Path | None) -> tuple[float, int]:
    """Return the images that the memory takes, counted by their steps, and the number of processes."""
    memory = protocol.memory
    if memory is None:
        return 0.0, 0
    data = (folder.read_json(run_dir / MEMORY_FILE) if run_dir else None) or {}
    known = data.get("programs", {})
    programs = {program_of(cell) for cell in protocol.cells if cell.name not in data.get("rows", {})} - known.keys()
    batches = set(memory.batches)
    weighed = sum(batches) * (memory.steps or protocol.steps) / protocol.steps
    return len(programs) * weighed, len(programs) * len(batches)


def count_images(protocol: Protocol) -> int:
    """Return the number of images over all rows."""
    return len(run_prompts(protocol)) * len(protocol.cells)


def disk_gib(protocol: Protocol) -> float:
    """Estimate the disk that the images of a run take, in GiB."""
    return count_images(protocol) * protocol.height * protocol.width * _PNG_BYTES_PER_PIXEL / 2**30


def probe_seconds(protocol: Protocol) -> float:
    """Estimate the seconds per image of the untouched pipeline from one image with two steps, after one to warm up.

    Raises:
        ElfattError: the model cannot be loaded.
    """
    pipe = load_protocol_pipeline(protocol)
    short = dataclasses.replace(protocol, steps=_PROBE_STEPS)
    prompt = [run_prompts(protocol)[0].text]
    seeds = [image_seed(protocol, protocol.baseline, 0)]
    timed_call(pipe, short, protocol.baseline, prompt, seeds)
    seconds = timed_call(pipe, short, protocol.baseline, prompt, seeds)
    probed = len(pipe.scheduler.timesteps)  # calls of the UNet, which some schedulers make twice in a step
    pipe.scheduler.set_timesteps(protocol.steps)
    rest = seconds["end_to_end"] - seconds["unet"]
    return seconds["unet"] * len(pipe.scheduler.timesteps) / probed + rest


def run(
    protocol: Protocol,
    run_dir: Path,
    report: _Report = print,
    *,
    reuse: Sequence[Path] = (),
    show_progress: bool = True,
) -> dict[str, str]:
    """Run all stages of a protocol; what is finished already is not done again.

    Where the untouched pipeline, the baseline, fails, nothing else is done.

    Under `accelerate launch` the processes share images and features, and the first one does the rest.

    Args:
        protocol: what to run.
        run_dir: its folder.
        report: gets a line for each step of each stage.
        reuse: folders of other runs, whose rows are copied where they are the same.
        show_progress: draw a bar while generating.

    Returns:
        The rows that failed, with the reason.

    Raises:
        ElfattError: wrong input, or a folder that belongs to another specification or is in use.
        RunFailure: the disk is full.
    """
    from elfatt_sd.evaluation.extraction import every_minute
    from elfatt_sd.evaluation.score import build_references

    with writing(run_dir, protocol.device) as first:
        by_first(lambda: _check(run_dir, protocol))
        tell = report if first else _say_nothing
        if not (run_dir / SCORES_FILE).exists():
            tell("reference: begun")
        build_references(protocol, progress=every_minute(tell))  # first: what is wrong with it should cost no images
        free_memory()
        failed = generate(run_dir, protocol, reuse=reuse, show_progress=show_progress)
        free_memory()
        score(run_dir, protocol, tell)
        leave_processes()
        if not first:
            return {}
        if protocol.time is not None:
            timed = _once(run_dir, "time", {}, TIME_FILE, lambda: measure_time(run_dir, protocol, report), report)
            failed = _joined(failed, timed)
        free_memory()
        if protocol.memory is not None:
            peaks = _once(run_dir, "memory", {}, MEMORY_FILE, lambda: measure_memory(run_dir, protocol, report), report)
            failed = _joined(failed, peaks)
        write_page(run_dir, report)
        return failed


def _check(run_dir: Path, protocol: Protocol) -> None:
    folder.check_run(run_dir, protocol)
    check_inputs(protocol)


@contextmanager
def writing(run_dir: Path, device: str) -> Iterator[bool]:
    """Hold the lock of a run's folder, in the first of several processes that work on a device.

    Yields:
        Whether this is the first process.

    Raises:
        ElfattError: another run writes there.
        RunFailure: the disk is full.
    """
    first = bool(process_state(device).is_main_process)
    with folder.clear_disk_errors(run_dir):
        if first:
            with folder.run_lock(run_dir):
                yield True
        else:
            yield False


def free_gib(run_dir: Path) -> float:
    """Return the free space of the disk that a run's folder is or will be on, in GiB."""
    return shutil.disk_usage(nearest_existing(run_dir)).free / 2**30


def check_inputs(protocol: Protocol) -> None:
    """Try what can fail before hours of work: packages, device, prompts, extractors, and what the reference is.

    Raises:
        ElfattError: one of them is missing or wrong.
    """
    from elfatt_sd.evaluation.score import load_extractors, score_inputs

    for check in _first_checks(protocol):
        check()
    score_inputs(protocol, load_extractors(protocol))


def _first_checks(protocol: Protocol) -> list[Callable[[], Any]]:
    """Return what is to be tried before an extractor is fetched; each raises an `ElfattError`."""
    from elfatt_sd.evaluation.reference import check_given

    return [
        lambda: need("an evaluation", "torchmetrics", *REPORT, *sorted(protocol.peers)),
        lambda: _check_device(protocol),
        lambda: _check_prompts(protocol),
        lambda: check_given(protocol.reference.source),
    ]


def _check_device(protocol: Protocol) -> None:
    from elfatt_sd.pipelines import pick_device, pick_dtype

    pick_dtype(protocol.dtype, pick_device(protocol.device))


def _check_prompts(protocol: Protocol) -> None:
    if len(run_prompts(protocol)) < 2:
        raise ElfattError("1 image a row has no distance; give at least 2 (limit, or classes and images_per_class).")


def obstacles(protocol: Protocol, run_dir: Path, reuse: Sequence[Path] = ()) -> list[str]:
    """Try everything that a run needs, and return a line for each thing that would stop it or a row.

    Args:
        protocol: what to run.
        run_dir: its folder.
        reuse: folders of other runs.
    """
    from elfatt_sd.evaluation.reference import check_source
    from elfatt_sd.evaluation.score import load_extractors, score_inputs

    runnable, wrong = protocol, _reason_against(lambda: _check_device(protocol))
    if wrong:  # go on to the other obstacles where there is neither the device nor the dtype
        runnable = dataclasses.replace(protocol, device="cpu", dtype="float32")

    def each_extractor(spec: str) -> None:
        part = dataclasses.replace(runnable, extractors=(spec,))
        score_inputs(part, load_extractors(part))

    checks: list[Callable[[], Any]] = [
        lambda: check_writable(run_dir),
        lambda: folder.check_run(run_dir, protocol),
        *(functools.partial(folder.load_run, other) for other in reuse),
        *_first_checks(protocol),
        lambda: check_source(protocol.reference),
        *(functools.partial(each_extractor, spec) for spec in protocol.extractors),
        lambda: load_extractors(runnable),
        lambda: _check_disk(protocol, run_dir),
    ]
    found = [reason for check in checks if (reason := _reason_against(check))]
    return list(dict.fromkeys([*found, *_obstacles_of_rows(runnable)]))


def _reason_against(check: Callable[[], Any]) -> str:
    try:
        check()
    except (ElfattError, folder.RunFailure) as error:
        return str(error)
    return ""


def _check_disk(protocol: Protocol, run_dir: Path) -> None:
    needed, free = disk_gib(protocol), free_gib(run_dir)
    if needed > free:
        raise ElfattError(f"{run_dir}: about {needed:.3g} GiB of disk are needed and {free:.3g} are free; make room.")


def _obstacles_of_rows(protocol: Protocol) -> list[str]:
    """Load the pipeline and patch it with each row's method."""
    loaded: list[Any] = []
    missing = _reason_against(lambda: loaded.append(load_protocol_pipeline(protocol)))
    if missing:
        return [missing]
    (pipe,) = loaded

    def patch(cell: Cell) -> None:
        with row_patch(pipe, cell):
            pass

    found = [(cell, _reason_against(functools.partial(patch, cell))) for cell in protocol.cells]
    rows = [f"row {cell.name!r}: {reason}" for cell, reason in found if reason]
    memory = _reason_against(lambda: PeakMeter(pipe.unet.device)) if protocol.memory else ""
    return [*rows, *filter(None, [memory])]


def score(run_dir: Path, protocol: Protocol, report: _Report = print) -> None:
    """Score the images of a run, building the reference if it is not cached; skipped where nothing changed.

    Raises:
        ElfattError: no row is finished, or reference or extractor are missing.
    """
    from elfatt_sd.evaluation.extraction import every_minute
    from elfatt_sd.evaluation.score import FORMAT, load_extractors, score_inputs, score_run

    finished = [cell for cell in protocol.cells if folder.manifest_path(run_dir, cell).is_file()]
    if protocol.baseline not in finished:
        reason = folder.read_failure(run_dir, protocol.baseline) or "it is not generated yet"
        raise folder.RunFailure(f"row {protocol.baseline.name!r}, the baseline, has no images: {reason}")
    inputs = {cell.name: sha256_of_file(folder.manifest_path(run_dir, cell)) for cell in finished}
    extractors = load_extractors(protocol)
    inputs |= {"format": str(FORMAT), **score_inputs(protocol, extractors)}

    def work() -> None:
        score_run(run_dir, extractors, progress=every_minute(report))

    _once(run_dir, "score", inputs, SCORES_FILE, work, report)
    references = folder.read_json(run_dir / SCORES_FILE)["references"]
    for name in unreadable_references(references):
        report(f"score: reference picture not readable: {name}")
    for words in left_out_of_references(references):
        report(f"score: reference: {words}")


def write_page(run_dir: Path, report: _Report = print) -> None:
    """Join the results and write the report; skipped where the results did not change.

    Raises:
        ElfattError: the folder holds no run.
    """
    from elfatt_sd.evaluation.report import write_report

    results = write_results(run_dir)
    _once(
        run_dir,
        "report",
        {RESULTS_FILE: sha256_of_data(results)},
        "report/index.html",
        lambda: write_report(run_dir),
        report,
    )


def _once(
    run_dir: Path, stage: str, inputs: Mapping[str, str], output: str, action: Callable[[], Any], report: _Report
) -> dict[str, str]:
    """Do a stage unless its output is there and was made from the same inputs under the same specification.

    Returns:
        The `errors` of what the action returns, if it does: rows with reasons. A stage that has any is done again next
        time.
    """
    path = run_dir / STAGES_FILE
    now = sha256_of_data([folder.run_data(run_dir)["identity"], inputs])
    if by_first(lambda: (folder.read_json(path) or {}).get(stage) == now and (run_dir / output).is_file()):
        report(f"{stage}: done before")
        return {}
    report(f"{stage}: begun")
    started = time.perf_counter()
    found = action()
    errors: dict[str, str] = found.get("errors", {}) if isinstance(found, dict) else {}
    if is_first() and not errors:
        write_json(path, {**(folder.read_json(path) or {}), stage: now})
    report(f"{stage}: done in {time.perf_counter() - started:.0f} s")
    return errors


def _joined(failed: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Join the reasons of rows that failed in several stages."""
    names = dict.fromkeys([*failed, *more])
    return {name: "; ".join(dict.fromkeys(part[name] for part in (failed, more) if name in part)) for name in names}


def _say_nothing(line: str) -> None:
    """Print nothing, in all processes but the first."""
