"""Results: what the stages wrote is joined, whatever version reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.results import SCORES_FILE, join_results
from elfatt_sd.evaluation.run import COST_FILE, MEMORY_FILE, RUN_FILE, TIME_FILE, Run
from elfatt_sd.files import sha256_of_data, write_json


def _copy_of_an_earlier_version(finished_run: Path, place: Path) -> tuple[Path, str]:
    """Copy a run as a version would have made it whose protocols had one field less."""
    run_dir = place / "run"
    shutil.copytree(finished_run, run_dir)
    run: dict[str, Any] = json.loads((run_dir / RUN_FILE).read_text())
    del run["protocol"]["template"]
    identity = sha256_of_data(run["protocol"])
    write_json(run_dir / RUN_FILE, {**run, "identity": identity})
    for path in (run_dir / name for name in (SCORES_FILE, TIME_FILE, MEMORY_FILE, COST_FILE)):
        write_json(path, {**json.loads(path.read_text()), "identity": identity})
    return run_dir, identity


def test_a_run_of_an_earlier_version_keeps_its_figures(finished_run: Path, tmp_path: Path) -> None:
    run_dir, identity = _copy_of_an_earlier_version(finished_run, tmp_path)
    assert Run.open(run_dir).protocol.identity != identity
    results = join_results(Run.open(run_dir))
    assert results["identity"] == identity
    assert results["reference"]
    assert results["environment"]["timing"]["environment"]
    whole = join_results(Run.open(finished_run))
    assert results["rows"] == whole["rows"]
    assert all(row["distances"] and row["time"] and row["memory"] for row in results["rows"])


@pytest.mark.parametrize("name", [SCORES_FILE, TIME_FILE, MEMORY_FILE, COST_FILE])
def test_figures_of_another_run_are_refused(finished_run: Path, tmp_path: Path, name: str) -> None:
    run_dir, _ = _copy_of_an_earlier_version(finished_run, tmp_path)
    shutil.copy(finished_run / name, run_dir / name)
    with pytest.raises(ElfattError, match=f"{name} is of another run, .*; delete the file"):
        join_results(Run.open(run_dir))
