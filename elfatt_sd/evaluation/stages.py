"""All stages in order: reference, images, scores, time, memory, report.

A stage is skipped when it is finished and its inputs did not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.extraction import every_minute
from elfatt_sd.evaluation.generate import generate, write_cost
from elfatt_sd.evaluation.images import check_size, load_protocol_pipeline, row_patch
from elfatt_sd.evaluation.measure import Report, free_memory, measure_memory, measure_time, program_of
from elfatt_sd.evaluation.metrics import OF_FEATURES, MetricChoice, check_feature_metrics, load_metrics
from elfatt_sd.evaluation.processes import by_first, is_first, leave_processes
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Cell, Protocol, check_packages
from elfatt_sd.evaluation.records import SCORES_FORMAT, Peaks, Scores, Times, is_whole, read_record
from elfatt_sd.evaluation.reference import check_given, check_images, is_moments
from elfatt_sd.evaluation.results import RESULTS_FILE, STAGE_FILES, write_results
from elfatt_sd.evaluation.run import MEMORY_FILE, SCORES_FILE, STAGES_FILE, TIME_FILE, Run, RunFailure
from elfatt_sd.evaluation.score import build_references, load_extractors, network_device, score_inputs, score_run
from elfatt_sd.evaluation.statistics import check_enough
from elfatt_sd.files import check_writable, read_typed, sha256_of_data, sha256_of_file, write_json
from elfatt_sd.loading import pick_device, pick_dtype
from elfatt_sd.measure import Stopwatch

_REMEDY = "delete it"
_PNG_BYTES_PER_PIXEL = 1.6  # of photographs; flat images take less


def to_do(run: Run) -> str:
    """Say what is left to do of a run, by its stages."""
    protocol, batches = run.protocol, list(enumerate(run.batches))
    left = [each for row in run.rows if not row.finished for number, each in batches if not row.has_batch(number, each)]
    parts = [f"{sum(map(len, left))} images of {protocol.steps} steps"] if left else []
    timed = read_record(run.folder / TIME_FILE, Times, _REMEDY)
    weighed = read_record(run.folder / MEMORY_FILE, Peaks, _REMEDY) or Peaks("", {}, {}, {})
    if protocol.time is not None and (timed is None or timed.errors):
        parts += [f"{protocol.time.repeats} rounds of {len(protocol.cells)} rows to time"]
    if protocol.memory is not None:
        programs = {program_of(cell) for cell in protocol.cells if cell.name not in weighed.rows}
        count = len(programs - weighed.programs.keys()) * len(set(protocol.memory.batches))
        parts += [f"{count} processes to measure the memory"] if count else []
    parts += [] if (run.folder / SCORES_FILE).exists() and not left else ["the scores"]
    return ", ".join(parts) or "nothing"


def count_images(run: Run) -> int:
    return len(run.prompts) * len(run.rows)


def disk_gib(run: Run) -> float:
    """Estimate the disk that the images of a run take, in GiB."""
    pixels = run.protocol.frames * run.protocol.height * run.protocol.width
    return count_images(run) * pixels * _PNG_BYTES_PER_PIXEL / 2**30


def obstacles(run: Run, reuse: Sequence[Path] = ()) -> list[str]:
    """Try everything that a run needs, and return a line for each thing that would stop it or a row."""
    protocol = runnable = run.protocol
    found: list[str] = []

    def attempt(check: Callable[..., Any], *given: Any, where: str = "") -> bool:
        try:
            check(*given)
        except (ElfattError, RunFailure) as error:
            found.append(f"{where}{error}")
            return False
        return True

    def extractor(spec: str) -> None:
        part = dataclasses.replace(runnable, extractors=(spec,), metrics=())
        score_inputs(part, load_extractors(part))

    def metric(choice: MetricChoice) -> None:
        if choice.metric in OF_FEATURES:  # of others, a missing extractor hides nothing
            check_feature_metrics([choice], load_extractors(runnable))
        load_metrics([choice], network_device(runnable))

    def disk() -> None:
        needed, free = disk_gib(run), run.free_gib
        if needed > free:
            said = f"about {needed:.3g} GiB of disk are needed and {free:.3g} are free; make room."
            raise ElfattError(f"{run.folder}: {said}")

    def patch(pipe: Any, cell: Cell) -> None:
        with row_patch(pipe, cell):
            pass

    attempt(check_writable, run.folder)
    attempt(run.check)
    for other in reuse:
        attempt(Run.open, other)
    if not attempt(check_device, protocol):
        runnable = dataclasses.replace(protocol, device="cpu", dtype="float32")  # go on to the other obstacles
    for check in first_checks(runnable):
        attempt(check)
    if protocol.extractors:
        attempt(lambda: is_moments(protocol.reference) or check_images(protocol.reference))
    for each in protocol.extractors:
        attempt(extractor, each)
    attempt(load_extractors, runnable)
    for choice in protocol.metrics:
        attempt(metric, choice)
    attempt(load_metrics, protocol.metrics, network_device(runnable))  # are all names different?
    attempt(disk)
    pipes: list[Any] = []
    if attempt(lambda: pipes.append(load_protocol_pipeline(runnable))) and attempt(check_size, runnable, *pipes):
        for cell in runnable.cells:
            attempt(patch, *pipes, cell, where=f"row {cell.name!r}: ")
    return list(dict.fromkeys(found))


def evaluate(
    run: Run, report: Report = print, *, reuse: Sequence[Run] = (), show_progress: bool = True
) -> dict[str, str]:
    """Go through all stages of a run; what is finished already is not done again.

    Where the untouched pipeline, the baseline, fails, nothing else is done.

    Under `accelerate launch` the processes share images and features, and the first one does the rest.
    """
    with run.writing() as first:
        by_first(run.check)
        by_first(lambda: check_inputs(run.protocol))
        tell = report if first else lambda line: None
        if not (run.folder / SCORES_FILE).exists():
            tell("reference: begun")
        # first: what is wrong with it should cost no images
        build_references(run.protocol, progress=every_minute(tell))
        free_memory()
        failed = generate(run, reuse=reuse, show_progress=show_progress)
        by_first(lambda: write_cost(run))
        free_memory()
        score(run, tell)
        leave_processes()
        if not first:
            return {}
        measured = []
        if run.protocol.time is not None:
            measured += [_Stage(run, "time", TIME_FILE, report).once(lambda: measure_time(run, report))]
        free_memory()
        if run.protocol.memory is not None:
            measured += [_Stage(run, "memory", MEMORY_FILE, report).once(lambda: measure_memory(run, report))]
        write_page(run, report)
        for name, reason in ((name, reason) for errors in measured for name, reason in errors.items()):
            if reason not in failed.get(name, "").split("; "):
                failed[name] = f"{failed[name]}; {reason}" if name in failed else reason
        return failed


def check_inputs(protocol: Protocol) -> None:
    """Try what can fail before hours of work: packages, device, prompts, extractors, and what the reference is."""
    for check in first_checks(protocol):
        check()
    score_inputs(protocol, load_extractors(protocol))


def first_checks(protocol: Protocol) -> list[Callable[[], Any]]:
    """Return what is to be tried before an extractor is fetched; each raises an `ElfattError`."""
    checks = [lambda: check_packages(protocol), lambda: check_device(protocol), lambda: check_prompts(protocol)]
    return [*checks, lambda: check_given(protocol.reference.source)] if protocol.extractors else checks


def check_device(protocol: Protocol) -> None:
    """Check that this machine has the device, and the device the dtype."""
    pick_dtype(protocol.dtype, pick_device(protocol.device))


def check_prompts(protocol: Protocol) -> None:
    count = len(run_prompts(protocol))
    if count < 2:
        raise ElfattError("1 image a row has no distance; give at least 2 (limit, or classes and images_per_class).")
    if any(choice.metric == "prdc" for choice in protocol.metrics):
        check_enough(count * protocol.frames)


def score(run: Run, report: Report = print) -> None:
    """Score the images of a run, building the reference if it is not cached; skipped where nothing changed."""
    if not run.baseline.finished:
        reason = run.baseline.failure or "it is not generated yet"
        raise RunFailure(f"row {run.baseline.name!r}, the baseline, has no images: {reason}")
    inputs = {row.name: sha256_of_file(row.manifest) for row in run.finished}
    extractors = load_extractors(run.protocol)
    inputs |= {"format": str(SCORES_FORMAT), **score_inputs(run.protocol, extractors)}
    stage = _Stage(run, "score", SCORES_FILE, report, inputs)
    stage.once(lambda: score_run(run, extractors, progress=every_minute(report)))
    scores = read_record(run.folder / SCORES_FILE, Scores, _REMEDY)
    references = scores.references.values() if scores else ()
    for name in dict.fromkeys(name for part in references for name in part.unreadable):
        report(f"score: reference image not readable: {name}")
    for words in dict.fromkeys(part.left_out for part in references if part.left_out):
        report(f"score: reference: {words}")


def write_page(run: Run, report: Report = print) -> None:
    """Join the results and write the report; skipped where the results did not change."""
    from elfatt_sd.evaluation.report import load_results, write_report

    results = {RESULTS_FILE: sha256_of_data(write_results(run))}
    _Stage(run, "report", "report/index.html", report, results).once(lambda: write_report(load_results(run.folder)))


@dataclass(frozen=True)
class _Stage:
    """A stage that is done once for the same inputs under the same specification."""

    run: Run  # whose
    name: str  # of the stage
    output: str  # the file that it writes last
    report: Report  # gets a line for what becomes of it
    inputs: Mapping[str, str] = field(default_factory=dict)  # hashes of what it depends on besides the specification

    def once(self, action: Callable[[], Any]) -> dict[str, str]:
        """Do the stage unless its output is there and was made from the same inputs."""
        now = sha256_of_data([self.run.record.identity, self.inputs])
        if by_first(lambda: self._is_whole() and self._done().get(self.name) == now):
            self.report(f"{self.name}: done before")
            return {}
        self.report(f"{self.name}: begun")
        with Stopwatch() as watch:
            found = action()
        errors: dict[str, str] = found.get("errors", {}) if isinstance(found, dict) else {}
        if is_first() and not errors:
            write_json(self.run.folder / STAGES_FILE, {**self._done(), self.name: now})
        self.report(f"{self.name}: done in {watch.seconds:.0f} s")
        return errors

    def _is_whole(self) -> bool:
        path = self.run.folder / self.output
        if not path.is_file():
            return False
        shape = STAGE_FILES.get(self.output)
        if shape is None or is_whole(path, shape, self.run.record.identity):
            return True
        self.report(f"{self.name}: {path} is damaged or of another run, and is made again")
        path.unlink()
        return False

    def _done(self) -> dict[str, str]:
        with contextlib.suppress(ElfattError):
            return read_typed(self.run.folder / STAGES_FILE, dict[str, str], "") or {}
        return {}
