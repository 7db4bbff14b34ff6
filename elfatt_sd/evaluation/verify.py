"""Check a finished run: images against their hashes, all figures against new ones, results and report against those."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import folder
from elfatt_sd.evaluation.extraction import Progress
from elfatt_sd.evaluation.generate import image_seed, run_prompts
from elfatt_sd.evaluation.measure import MEMORY_FILE, TIME_FILE, few_repeats, summarize_memory, summarize_time
from elfatt_sd.evaluation.protocols import SCOPES, Cell, Memory, Protocol, Time, decisive
from elfatt_sd.evaluation.results import RESULTS_FILE, SCORES_FILE, join_results
from elfatt_sd.files import sha256_of_data, sha256_of_file

TOLERANCE = 1e-3  # another machine sums in another order
_ROUNDING = 1e-9  # seconds or GiB: another version of Python fits a line with another rounding


def verify_run(run_dir: Path, *, recompute: bool = True, progress: Progress | None = None) -> list[str]:
    """Check a run.

    Args:
        run_dir: the run's folder.
        recompute: extract all features and compute all scores anew, without any cache of the run, where the images
            are as they were. Time and memory are always computed anew, from the raw values in their files.
        progress: called with what is looked at, the number of pictures done, and their total.

    Returns:
        What is wrong, a line each, naming the file; empty where all is well.

    Raises:
        ElfattError: the folder holds no run.
    """
    protocol = folder.load_run(run_dir)
    problems = [*_check_identity(run_dir), *_check_images(run_dir, protocol)]
    if problems:
        return problems
    if recompute:
        problems += _check_scores(run_dir, progress)
    problems += [*_check_measurements(run_dir, protocol), *_check_results(run_dir)]
    return problems or list(_check_report(run_dir))


def _check_identity(run_dir: Path) -> Iterator[str]:
    run = folder.run_data(run_dir)
    if sha256_of_data(decisive(run["protocol"])) != run["identity"]:
        yield f"{run_dir / folder.RUN_FILE}: the protocol does not have the identity that is given; it was edited"


def _check_images(run_dir: Path, protocol: Protocol) -> Iterator[str]:
    prompts = run_prompts(protocol)
    for cell in protocol.cells:
        if folder.read_failure(run_dir, cell) is not None:
            continue
        try:
            entries = folder.read_manifest(run_dir, cell)
        except ElfattError as error:
            yield str(error)
            continue
        wanted = [
            {
                "index": prompt.index,
                "prompt": prompt.text,
                "class_index": prompt.class_index,
                "seed": image_seed(protocol, cell, prompt.index),
            }
            for prompt in prompts
        ]
        if [{key: entry.get(key) for key in wanted[0]} for entry in entries] != wanted:
            yield f"{folder.manifest_path(run_dir, cell)}: images, prompts, classes or seeds are not the protocol's"
        yield from _check_files(run_dir, cell, entries)


def _check_files(run_dir: Path, cell: Cell, entries: list[dict[str, Any]]) -> Iterator[str]:
    paths = {folder.image_path(run_dir, cell, entry["index"]): entry["sha256"] for entry in entries}
    for path, digest in paths.items():
        if not path.is_file():
            yield f"{path}: deleted"
        elif sha256_of_file(path) != digest:
            yield f"{path}: altered"
    for path in sorted((folder.cell_dir(run_dir, cell) / "images").glob("*.png")):
        if path not in paths:
            yield f"{path}: not an image of this run"


def _check_scores(run_dir: Path, progress: Progress | None) -> Iterator[str]:
    """Score a copy of the run that has its images and nothing else."""
    from elfatt_sd.evaluation.score import score_run

    path = run_dir / SCORES_FILE
    recorded = folder.read_json(path)
    if recorded is None:
        yield f"{path}: deleted, or the run is not scored yet"
        return
    with tempfile.TemporaryDirectory(prefix="elfatt-verify-") as name:
        copy = Path(name)
        for part in (folder.RUN_FILE, "cells"):
            os.symlink((run_dir / part).resolve(), copy / part)
        score_run(copy, progress=progress)
        computed = folder.read_json(copy / SCORES_FILE)
    for key, before, now in unequal(recorded, computed):
        yield f"{path}: {key} is {before}, computed anew {now}"


def _check_measurements(run_dir: Path, protocol: Protocol) -> Iterator[str]:
    """Summarize time and memory anew from the raw values that stand beside the figures."""
    for name, again in ((TIME_FILE, _timed_again), (MEMORY_FILE, _fitted_again)):
        path = run_dir / name
        recorded = folder.read_json(path)
        if recorded is None:
            continue
        try:
            computed = again(recorded, protocol)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            yield f"{path}: damaged, there are not all raw values ({error!r})"
            continue
        for key, before, now in unequal(recorded, computed, tolerance=_ROUNDING, size=1.0):
            yield f"{path}: {key} is {before}, from the raw values {now}"


def _timed_again(data: dict[str, Any], protocol: Protocol) -> dict[str, Any]:
    repeats = (protocol.time or Time()).repeats
    rounds = {name: _rounds(row) for name, row in data["rows"].items()}
    for name, own in rounds.items():
        if own and len(own) != repeats:
            raise ValueError(f"row {name} has {len(own)} of {repeats} rounds")
    rows = {
        name: row | summarize_time(rounds[name], rounds[protocol.baseline.name], [key for key in SCOPES if key in row])
        for name, row in data["rows"].items()
    }
    return {**data, "repeats": repeats, "note": few_repeats(repeats), "rows": rows}


def _rounds(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return seconds per image by scope of each round; none of a row that failed."""
    values = {scope: row[scope]["values"] for scope in SCOPES if scope in row}
    return [dict(zip(values, seconds, strict=True)) for seconds in zip(*values.values(), strict=True)]


def _fitted_again(data: dict[str, Any], protocol: Protocol) -> dict[str, Any]:
    rows = {}
    for name, row in data["rows"].items():
        twin = row.get("same_program_as")
        rows[name] = _fitted(row, protocol) if twin is None else {**data["rows"][twin], "same_program_as": twin}
    return {**data, "rows": rows}


def _fitted(row: Mapping[str, Any], protocol: Protocol) -> dict[str, Any]:
    batches, note = row["batches"], row["note"]
    if note is None and batches != sorted(set((protocol.memory or Memory()).batches)):
        raise ValueError(f"peaks of batches {batches}")
    stages = row.get("stages", {"all": row})
    results: list[dict[str, Any]] = [
        {"kind": row["kind"], "peaks": {stage: line["peaks_gib"][index] for stage, line in stages.items()}}
        for index in range(len(batches))
    ]
    if "reserved" in row:
        for result, peak in zip(results, row["reserved"]["peaks_gib"], strict=True):
            result["reserved"] = {"all": peak}
    return summarize_memory(batches, results, note)


def _check_results(run_dir: Path) -> Iterator[str]:
    path = run_dir / RESULTS_FILE
    recorded = folder.read_json(path)
    if recorded is None:
        yield f"{path}: deleted, or the run is not finished"
        return
    for key, before, now in unequal(recorded, join_results(run_dir), tolerance=0):
        yield f"{path}: {key} is {before}, in the files of the stages {now}"


def _check_report(run_dir: Path) -> Iterator[str]:
    """Compare the report with the one that the results give; of plots and pictures only that they are there.

    How these are encoded depends on the versions of other packages.
    """
    from elfatt_sd.evaluation.report import leftovers, report_files
    from elfatt_sd.evaluation.report.data import load_results

    report = run_dir / "report"
    remedy = f"`elfatt-sd eval report {run_dir}` writes it anew"
    files = report_files(run_dir, load_results(run_dir))
    for name, content in files.items():
        path = report / name
        if not path.is_file():
            yield f"{path}: deleted, or the report is not written yet; {remedy}"
        elif path.suffix != ".png" and _words(path.read_bytes()) != _words(content):
            yield f"{path}: not that of {RESULTS_FILE}; {remedy}"
    for path in leftovers(report, files):
        yield f"{path}: not of this report"


def _words(content: bytes) -> bytes:
    return re.sub(rb"<svg .*?</svg>|data:image/webp[^\"]*", b"", content, flags=re.DOTALL)


def unequal(
    before: Any, now: Any, key: str = "", *, tolerance: float = TOLERANCE, size: float = 0.0
) -> Iterator[tuple[str, Any, Any]]:
    """Compare plain data; yields the place and both values of each difference.

    Args:
        before: what was recorded.
        now: what it should be.
        key: the place of both.
        tolerance: of numbers with a fraction, as a share of the figure that they belong to: of its value or of the
            width of its interval, or of the figure around it, such as the distance around a difference. All else must
            be equal.
        size: of the figure around both.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        size = max(size, _size(now))
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


def _size(figure: dict[str, Any]) -> float:
    """Return the value of a figure or the width of its interval, whichever is larger; 0 of other data."""
    middle, ends = figure.get("value", figure.get("mean")), figure.get("interval")
    width = ends[1] - ends[0] if isinstance(ends, list) else 0.0
    return max(abs(middle) if isinstance(middle, float) else 0.0, width)
