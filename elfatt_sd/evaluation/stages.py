"""All stages in order (reference, images, scores, time, memory, report), and the check of a finished run.

A stage is skipped when it is finished and its inputs did not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd import files
from elfatt_sd.errors import REPORT, ElfattError, ElfattFailure, need
from elfatt_sd.evaluation import run as runs
from elfatt_sd.evaluation.extraction import by_first, check_exists, every_minute, is_first, leave_processes
from elfatt_sd.evaluation.generate import check_size, costs, generate, load_protocol_pipeline, row_patch, write_cost
from elfatt_sd.evaluation.measure import Report, free_memory, measure_memory, measure_time
from elfatt_sd.evaluation.metrics import load_metrics
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import TOLERANCE, Protocol, decisive, unequal
from elfatt_sd.evaluation.records import SCORES_FORMAT, StageFile, read_data
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.evaluation.report.page import write_report
from elfatt_sd.evaluation.score import build_references, load_extractors, network_device, score_inputs, score_run
from elfatt_sd.loading import check_model, pick_device, pick_dtype
from elfatt_sd.measure import Progress, Stopwatch
from elfatt_sd.peers import packages_of

_PNG_BYTES_PER_PIXEL = 1.6  # of photographs; flat images take less
_ROUNDING = 1e-9


def _done_before(run: runs.RunFolder) -> dict[str, str]:
    """Return the hash of what each stage was made from, by its name."""
    with contextlib.suppress(ElfattError):
        return files.read_typed(run.folder / runs.STAGES_FILE, dict[str, str], "") or {}
    return {}


def outlook(run: runs.RunFolder) -> list[str]:
    """Say how many images a run has, what they take of the disk, as an estimate, and what is to do."""
    protocol, count, done = run.protocol, len(run.prompts) * len(run.rows), _done_before(run)
    needed = count * protocol.frames * protocol.height * protocol.width * _PNG_BYTES_PER_PIXEL / 2**30
    there = next(place for place in (run.folder, *run.folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free / 2**30
    left = len(run.prompts) * sum(not row.finished for row in run.rows)
    wanted = {"score": True, "time": protocol.time is not None, "memory": protocol.memory is not None, "report": True}
    parts = [f"{left} images of {protocol.steps} steps"] if left else []
    parts += [stage for stage in wanted if wanted[stage] and stage not in done]
    return [
        f"{count} images, {len(run.prompts)} a row, about {needed:.2g} GiB of disk ({free:.3g} GiB are free)",
        f"to do: {', '.join(parts) or 'nothing'}",
    ]


def first_checks(protocol: Protocol, *, scored: bool = True) -> Iterator[Callable[[], Any]]:
    """Yield what is to be tried before anything is loaded, also for scores; each raises an `ElfattError`."""

    def prompts() -> None:
        if len(run_prompts(protocol)) < 2:
            raise ElfattError("1 image a row has no distance; give at least 2 (limit, classes or images_per_class).")

    def weights() -> None:
        if protocol.inception_weights and not Path(protocol.inception_weights).is_file():
            what = f"inception_weights={protocol.inception_weights!r}"
            raise ElfattError(f"{what} is not a file; give the one that Inception's weights are in.")

    yield lambda: pick_dtype(protocol.dtype, pick_device(protocol.device))
    yield lambda: check_model(protocol.model, variant=protocol.variant or None)
    if scored:
        yield prompts
        yield lambda: need("an evaluation", "torchmetrics", *REPORT, *packages_of(protocol.peers))
        yield weights
        if protocol.extractors:
            yield lambda: check_exists(protocol.reference.source)


def obstacles(run: runs.RunFolder, reuse: Sequence[Path] = ()) -> list[str]:
    """Try everything that a run needs, and return a line for each thing that would stop it or a row."""
    protocol, found = run.protocol, dict[str, None]()
    try:
        pick_dtype(protocol.dtype, pick_device(protocol.device))
    except ElfattError as error:
        found[str(error)] = None
        protocol = dataclasses.replace(protocol, device="cpu", dtype="float32")  # go on to the other obstacles

    def pipeline() -> None:
        pipe = load_protocol_pipeline(protocol)
        for cell in protocol.cells:
            with row_patch(pipe, cell):
                pass
        check_size(protocol, pipe)

    checks: list[Callable[[], Any]] = [lambda: files.check_writable(run.folder), run.check]
    checks += [functools.partial(runs.RunFolder.open, other) for other in reuse]
    checks += first_checks(protocol)
    checks += [functools.partial(load_metrics, [each], network_device(protocol)) for each in protocol.metrics]
    alone = [dataclasses.replace(protocol, extractors=(each,), metrics=()) for each in protocol.extractors]
    checks += [functools.partial(score_inputs, part) for part in (*alone, protocol)]
    for check in (*checks, pipeline):
        try:
            check()
        except ElfattError as error:
            found[str(error)] = None
    return list(found)


def evaluate(
    run: runs.RunFolder, report: Report = print, *, reuse: Sequence[runs.RunFolder] = (), show_progress: bool = True
) -> dict[str, str]:
    """Go through all stages of a run; what is finished already is not done again.

    Where the untouched pipeline, the baseline, fails, nothing else is done.

    Under `accelerate launch` the processes share images and features, and the first one does the rest.
    """
    protocol = run.protocol
    for check in first_checks(protocol):
        check()
    with run.writing() as first:
        by_first(run.check)
        by_first(lambda: score_inputs(protocol))
        tell = report if first else lambda line: None
        if not (run.folder / runs.SCORES_FILE).exists():
            tell("reference: begun")
        # first: what is wrong with it should cost no images
        build_references(protocol, progress=every_minute(tell))
        free_memory()
        failed = generate(run, reuse=reuse, show_progress=show_progress)
        by_first(lambda: write_cost(run))
        free_memory()
        score(run, tell)
        leave_processes()
        if not first:
            return {}
        if protocol.time is not None:
            failed |= _once(run, "time", runs.TIME_FILE, report, lambda: measure_time(run, report))
        free_memory()
        if protocol.memory is not None:
            failed |= _once(run, "memory", runs.MEMORY_FILE, report, lambda: measure_memory(run, report))
        results = {runs.RESULTS_FILE: files.sha256_of_data(run.write_results())}
        _once(run, "report", "report/index.html", report, lambda: write_report(load_results(run.folder)), results)
        return failed


def score(run: runs.RunFolder, report: Report = print) -> None:
    """Score the images of a run, building the reference if it is not cached; skipped where nothing changed."""
    if not run.baseline.finished:
        reason = run.baseline.failure or "it is not generated yet"
        raise ElfattFailure(f"row {run.baseline.name!r}, the baseline, has no images: {reason}")
    inputs = {row.name: files.sha256_of_file(row.manifest) for row in run.finished}
    extractors = load_extractors(run.protocol)
    inputs |= {"format": str(SCORES_FORMAT), **score_inputs(run.protocol, extractors)}
    progress = every_minute(report)
    _once(run, "score", runs.SCORES_FILE, report, lambda: score_run(run, extractors, progress=progress), inputs)


def _once(
    run: runs.RunFolder,
    name: str,
    output: str,
    report: Report,
    action: Callable[[], Any],
    inputs: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Do a stage unless the file that it writes last is there and was made from the same inputs.

    Returns why rows could not be measured, by their names; the stage is then done again the next time.
    """
    now, path = files.sha256_of_data([run.record.identity, inputs or {}]), run.folder / output
    if by_first(lambda: path.is_file() and _done_before(run).get(name) == now):
        report(f"{name}: done before")
        return {}
    report(f"{name}: begun")
    with Stopwatch() as watch:
        found = action()
    errors: dict[str, str] = found.get("errors", {}) if isinstance(found, dict) else {}
    if is_first() and not errors:
        files.write_json(run.folder / runs.STAGES_FILE, {**_done_before(run), name: now})
    report(f"{name}: done in {watch.seconds:.0f} s")
    return errors


def verify_run(run: runs.RunFolder, *, recompute: bool = True, progress: Progress | None = None) -> list[str]:
    """Compare images with their hashes, scores and cost with new ones, and the results with the files of the stages."""
    record = run.record
    problems = [problem for row in run.rows for problem in _wrong_images(run, row)]
    if files.sha256_of_data(decisive(record.protocol)) != record.identity:
        place = run.folder / runs.RUN_FILE
        problems.insert(0, f"{place}: the protocol does not have the identity that is given; it was edited")
    if problems:
        return problems

    def scores() -> Any:
        place = files.cache_folder()  # which has room for features; a folder for temporary files may lie in memory
        with runs.clear_disk_errors(place):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="verify-", dir=place, ignore_cleanup_errors=True) as name:
                score_run(run, folder=Path(name), progress=progress)  # there is nothing of what was computed before
                return files.read_json(Path(name) / runs.SCORES_FILE, "")

    computed = [(runs.SCORES_FILE, scores, TOLERANCE), (runs.COST_FILE, lambda: costs(run), _ROUNDING)]
    for name, compute, tolerance in [*(computed if recompute else ()), (runs.RESULTS_FILE, run.results, 0.0)]:
        path, shape = run.folder / name, Results if name == runs.RESULTS_FILE else StageFile
        try:
            recorded = read_data(path, shape, "`elfatt-sd eval report` writes `results.json` again", record.identity)
            if recorded is None:
                problems += [f"{path}: deleted, or the run is not that far"] if name != runs.COST_FILE else []
                continue
            told = unequal(recorded, compute(), tolerance=tolerance)
            problems += [f"{path}: {key} is {before}, computed again {now}" for key, before, now in told]
        except ElfattError as error:
            problems.append(str(error))
    return problems


def _wrong_images(run: runs.RunFolder, row: runs.RowFolder) -> Iterator[str]:
    try:
        if row.failure is not None:
            return
        made = row.made_images()
    except ElfattError as error:
        yield str(error)
        return
    if not run.lists_its_prompts(row, made):
        yield f"{row.manifest}: images, prompts, classes or seeds are not the protocol's"
    paths = {row.image_file(each.index): each for each in made}
    for path, each in paths.items():
        if not path.is_file():
            yield f"{path}: deleted"
        elif files.sha256_of_file(path) != each.sha256:
            yield f"{path}: altered"
    for path in files.visible(row.images_folder.glob("*.png")):
        if path not in paths:
            yield f"{path}: not an image of this run"
