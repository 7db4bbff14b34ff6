"""Results: what the stages wrote is joined, whatever version reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.intervals import FEWEST_CLASSES, NO_DIFFERENCE, TOO_FEW
from elfatt_sd.evaluation.results import SCORES_FILE, join_results, without_intervals_of_few
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


def test_few_classes_leave_no_interval_but_that_of_accuracy(finished_run: Path) -> None:
    """Nor a difference that is extrapolated: whoever reads the file, not the report, would take it for one."""
    scored = json.loads((finished_run / SCORES_FILE).read_text())["rows"]["null"]
    (row,) = (row for row in join_results(Run.open(finished_run))["rows"] if row["cell"] == "null")
    assert row["classes"] == 5
    frechet, kernel = row["distances"].values()
    for name, figure in row["distances"].items():
        kept = scored["distances"][name]
        assert kept["interval"] and kept["difference"]["interval"]
        assert figure["interval"] is figure["difference"]["interval"] is None
        assert figure["value"] == kept["value"]
    assert frechet["difference"]["value"] is None
    assert kernel["difference"]["value"] == kernel["value"] - _baseline(finished_run, 1)
    assert row["paired"]["psnr"]["interval"] is None
    assert row["paired"]["psnr"]["mean"] == scored["paired"]["psnr"]["mean"]


def _baseline(run_dir: Path, distance: int) -> Any:
    row = join_results(Run.open(run_dir))["rows"][0]
    return list(row["distances"].values())[distance]["value"]


@pytest.mark.parametrize("classes", [29, 64])
def test_classes_are_few_by_number_or_by_a_verdict_of_any_row(classes: int) -> None:
    """The untouched pipeline has no verdict of its own."""
    ends = {"value": 0.5, "interval": [0.1, 0.9]}
    figure = {**ends, "difference": {**ends, "verdict": TOO_FEW if classes == 64 else NO_DIFFERENCE}}
    rows = [
        {"classes": classes, "distances": {"FID": ends}, "accuracy": {"mean": ends}, "paired": None},
        {"classes": classes, "distances": {"FID": figure}, "accuracy": {"mean": figure}, "paired": {"psnr": ends}},
    ]
    first, second = without_intervals_of_few(rows)
    assert first["distances"]["FID"] == {"value": 0.5, "interval": None}
    assert first["accuracy"]["mean"] == ends
    assert second["accuracy"]["mean"]["interval"] == ends["interval"]
    assert second["accuracy"]["mean"]["difference"]["interval"] is None
    assert second["accuracy"]["mean"]["difference"]["value"] == 0.5
    enough = [{**row, "classes": FEWEST_CLASSES, "distances": {"FID": ends}, "accuracy": None} for row in rows]
    assert without_intervals_of_few(enough) == enough
