"""What a run would do, and everything that would stop it, before anything is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.images import check_size, load_protocol_pipeline, row_patch
from elfatt_sd.evaluation.memory import program_of
from elfatt_sd.evaluation.metrics.choice import MetricChoice
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.records import read_data
from elfatt_sd.evaluation.results import STAGE_FILES
from elfatt_sd.evaluation.run import MEMORY_FILE, SCORES_FILE, TIME_FILE, Run, RunFailure
from elfatt_sd.evaluation.stages import check_device, first_checks
from elfatt_sd.files import check_writable

_PNG_BYTES_PER_PIXEL = 1.6  # of photographs; flat images take less


def to_do(run: Run) -> str:
    """Say what is left to do of a run, by its stages."""
    protocol, batches = run.protocol, list(enumerate(run.batches))
    left = [each for row in run.rows if not row.finished for number, each in batches if not row.has_batch(number, each)]
    parts = [f"{sum(map(len, left))} images of {protocol.steps} steps"] if left else []
    timed, weighed = _read(run, TIME_FILE), _read(run, MEMORY_FILE)
    if protocol.time is not None and (not timed or timed.get("errors")):
        parts += [f"{protocol.time.repeats} rounds of {len(protocol.cells)} rows to time"]
    if protocol.memory is not None:
        programs = {program_of(cell) for cell in protocol.cells if cell.name not in weighed.get("rows", {})}
        count = len(programs - weighed.get("programs", {}).keys()) * len(set(protocol.memory.batches))
        parts += [f"{count} processes to measure the memory"] if count else []
    parts += [] if (run.folder / SCORES_FILE).exists() and not left else ["the scores"]
    return ", ".join(parts) or "nothing"


def _read(run: Run, name: str) -> dict[str, Any]:
    return read_data(run.folder / name, STAGE_FILES[name], "delete it") or {}


def count_images(run: Run) -> int:
    return len(run.prompts) * len(run.rows)


def disk_gib(run: Run) -> float:
    """Estimate the disk that the images of a run take, in GiB."""
    pixels = run.protocol.frames * run.protocol.height * run.protocol.width
    return count_images(run) * pixels * _PNG_BYTES_PER_PIXEL / 2**30


def obstacles(run: Run, reuse: Sequence[Path] = ()) -> list[str]:
    """Try everything that a run needs, and return a line for each thing that would stop it or a row."""
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
    return list(dict.fromkeys([*found, *_obstacles_of_rows(runnable)]))


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


def _obstacles_of_rows(protocol: Protocol) -> list[str]:
    """Load the pipeline and patch it with each row's method."""
    try:
        pipe = load_protocol_pipeline(protocol)
        check_size(protocol, pipe)
    except (ElfattError, RunFailure) as error:
        return [str(error)]

    def patch(cell: Cell) -> None:
        with row_patch(pipe, cell):
            pass

    found = [(cell, _reason_against(functools.partial(patch, cell))) for cell in protocol.cells]
    return [f"row {cell.name!r}: {reason}" for cell, reason in found if reason]
