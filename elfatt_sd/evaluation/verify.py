"""Check a finished run: images against their hashes, scores and cost against new ones, and results against those."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.generate import row_costs
from elfatt_sd.evaluation.images import load_protocol_pipeline
from elfatt_sd.evaluation.protocols import decisive
from elfatt_sd.evaluation.records import ResultsRecord, read_data
from elfatt_sd.evaluation.results import RESULTS_FILE, STAGE_FILES, join_results
from elfatt_sd.evaluation.run import COST_FILE, RUN_FILE, SCORES_FILE, Row, Run, clear_disk_errors
from elfatt_sd.evaluation.score import score_run
from elfatt_sd.files import cache_folder, read_json, sha256_of_data, sha256_of_file, visible
from elfatt_sd.progress import Progress

TOLERANCE = 1e-3  # another machine sums in another order
_ROUNDING = 1e-9
_SHAPES = {**STAGE_FILES, RESULTS_FILE: ResultsRecord}


def verify_run(run: Run, *, recompute: bool = True, progress: Progress | None = None) -> list[str]:
    problems = [problem for row in run.rows for problem in _check_images(run, row)]
    if sha256_of_data(decisive(run.record.protocol)) != run.record.identity:
        place = run.folder / RUN_FILE
        problems.insert(0, f"{place}: the protocol does not have the identity that is given; it was edited")
    if problems:
        return problems
    if recompute:
        problems += [*_check_scores(run, progress), *_check_cost(run)]
    return [*problems, *_check_results(run)]


def _check_images(run: Run, row: Row) -> Iterator[str]:
    try:
        if row.failure is not None:
            return
        made = row.made_images()
    except ElfattError as error:
        yield str(error)
        return
    if not run.shows_its_prompts(row, made):
        yield f"{row.manifest}: images, prompts, classes or seeds are not the protocol's"
    paths = {row.image_file(each.index): each.sha256 for each in made}
    for each in made:
        if row.folder / each.file != row.image_file(each.index):
            yield f"{row.manifest}: file={each.file!r} is not where image {each.index} lies"
    for path, digest in paths.items():
        if not path.is_file():
            yield f"{path}: deleted"
        elif sha256_of_file(path) != digest:
            yield f"{path}: altered"
    for path in visible(row.images_folder.glob("*.png")):
        if path not in paths:
            yield f"{path}: not an image of this run"


def _check_scores(run: Run, progress: Progress | None) -> Iterator[str]:
    """Score the images again, in a folder that has nothing of what was computed before."""
    recorded = yield from _recorded(run, SCORES_FILE, "deleted, or the run is not scored yet")
    if recorded is None:
        return
    place = cache_folder()  # which has room for features; a folder for temporary files may lie in memory
    with clear_disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="verify-", dir=place, ignore_cleanup_errors=True) as name:
            score_run(run, folder=Path(name), progress=progress)
            computed = read_json(Path(name) / SCORES_FILE, "")
    for key, before, now in unequal(recorded, computed):
        yield f"{run.folder / SCORES_FILE}: {key} is {before}, computed again {now}"


def _check_cost(run: Run) -> Iterator[str]:
    recorded = yield from _recorded(run, COST_FILE)
    if recorded is None:
        return
    try:
        computed = row_costs(run.protocol, load_protocol_pipeline(run.protocol))
    except ElfattError as error:
        yield f"{run.folder / COST_FILE}: it cannot be worked out again: {error}"
        return
    for key, before, now in unequal(recorded["rows"], computed, tolerance=_ROUNDING):
        yield f"{run.folder / COST_FILE}: {key} is {before}, worked out again {now}"


def _check_results(run: Run) -> Iterator[str]:
    recorded = yield from _recorded(run, RESULTS_FILE, "deleted, or the run is not finished")
    if recorded is not None:
        for key, before, now in unequal(recorded, join_results(run), tolerance=0):
            yield f"{run.folder / RESULTS_FILE}: {key} is {before}, in the files of the stages {now}"


def _recorded(run: Run, name: str, missing: str = "") -> Generator[str, None, dict[str, Any] | None]:
    try:
        identity = run.record.identity if name in STAGE_FILES else None
        remedy = "it was edited" if name in STAGE_FILES else "`elfatt-sd eval report` writes it again"
        data = read_data(run.folder / name, _SHAPES[name], remedy, identity)
    except ElfattError as error:
        yield str(error)
        return None
    if data is None and missing:
        yield f"{run.folder / name}: {missing}"
    return data


def unequal(
    before: Any, now: Any, key: str = "", *, tolerance: float = TOLERANCE, size: float = 0.0
) -> Iterator[tuple[str, Any, Any]]:
    """Compare plain data; yields the place and both values of each difference."""
    if isinstance(before, dict) and isinstance(now, dict):
        middle, ends = now.get("value", now.get("mean")), now.get("interval")
        width = ends[1] - ends[0] if isinstance(ends, list) else 0.0
        size = max(size, abs(middle) if isinstance(middle, float) else 0.0, width)
        for name in dict.fromkeys([*before, *now]):
            place = f"{key}.{name}" if key else str(name)
            yield from unequal(before.get(name), now.get(name), place, tolerance=tolerance, size=size)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            name = old.get("cell", index) if isinstance(old, dict) else index
            yield from unequal(old, new, f"{key}[{name}]", tolerance=tolerance, size=size)
    elif isinstance(before, float) and isinstance(now, float):
        if not abs(before - now) <= tolerance * max(size, abs(now)):  # so written, NaN differs from all
            yield key, before, now
    elif before != now:
        yield key, before, now
