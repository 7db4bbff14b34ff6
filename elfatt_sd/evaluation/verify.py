"""Check a finished run: every image against its hash, and the table against one computed anew from the images."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import folder
from elfatt_sd.evaluation.generate import image_seed, run_prompts
from elfatt_sd.evaluation.protocols import Cell, Protocol, decisive
from elfatt_sd.evaluation.results import RESULTS_FILE, SCORES_FILE, join_results
from elfatt_sd.files import sha256_of_data, sha256_of_file

_TOLERANCE = 1e-3  # relative: another machine sums in another order


def verify_run(run_dir: Path, *, recompute: bool = True) -> list[str]:
    """Check a run.

    Args:
        run_dir: the run's folder.
        recompute: extract all features and compute all scores anew, without any cache of the run, where the images
            are as they were.

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
        problems += _check_scores(run_dir)
    problems += _check_results(run_dir)
    return problems or list(_check_tables(run_dir))


def _check_identity(run_dir: Path) -> Iterator[str]:
    run = folder.read_run(run_dir) or {}
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
        wanted = [(prompt.index, prompt.text, image_seed(protocol, cell, prompt.index)) for prompt in prompts]
        if [(entry["index"], entry["prompt"], entry["seed"]) for entry in entries] != wanted:
            yield f"{folder.manifest_path(run_dir, cell)}: images, prompts or seeds are not those of the protocol"
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


def _check_scores(run_dir: Path) -> Iterator[str]:
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
        score_run(copy)
        computed = folder.read_json(copy / SCORES_FILE)
    for key, before, now in unequal(recorded["rows"], computed["rows"]):
        yield f"{path}: {key} is {before}, computed anew {now}"


def _check_results(run_dir: Path) -> Iterator[str]:
    path = run_dir / RESULTS_FILE
    recorded = folder.read_json(path)
    if recorded is None:
        yield f"{path}: deleted, or the run is not finished"
        return
    for key, before, now in unequal(recorded["rows"], join_results(run_dir)["rows"]):
        yield f"{path}: {key} is {before}, in the files of the stages {now}"


def _check_tables(run_dir: Path) -> Iterator[str]:
    """Compare the tables of the report with those that the results give."""
    from elfatt_sd.evaluation.report import written_tables
    from elfatt_sd.evaluation.report.data import load_results

    for name, text in written_tables(load_results(run_dir)).items():
        path = run_dir / "report" / name
        if path.is_file() and path.read_bytes() != text.encode():
            yield f"{path}: not the table of {RESULTS_FILE}; `elfatt-sd eval report {run_dir}` writes it anew"


def unequal(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Compare plain data, numbers with a tolerance; yields the place and both values of each difference."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            yield from unequal(before.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            name = old.get("cell", index) if isinstance(old, dict) else index
            yield from unequal(old, new, f"{key}[{name}]")
    elif _is_number(before) and _is_number(now):
        if not (math.isclose(before, now, rel_tol=_TOLERANCE, abs_tol=1e-6) or (before != before and now != now)):
            yield key, before, now
    elif before != now:
        yield key, before, now


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
