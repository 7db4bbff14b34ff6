"""The stages of a run and the commands: what is done once, what is done again, and one line for every error."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import runs
from support.commands import call
from support.runs import full_overrides, row_of

from elfatt_sd.cli.evaluation import build_protocol
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate, stages
from elfatt_sd.evaluation.metrics import MetricChoice
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import RowFolder, RunFolder

STAGES = ("score", "time", "memory", "report")


def finished_stages(lines: list[str]) -> list[str]:
    return [line.split(" in ")[0] for line in lines if ": done" in line]


def evaluate(run_dir: Path, protocol: Protocol, lines: list[str] | None = None) -> dict[str, str]:
    told: Callable[[str], None] = (lines if lines is not None else []).append
    return stages.evaluate(RunFolder(run_dir, protocol), told, show_progress=False)


def test_a_second_run_does_nothing_again(
    finished_run: Path, full_protocol: Protocol, shared_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lines = runs.tree(finished_run), list[str]()
    for module, name in ((stages, "measure_time"), (stages, "measure_memory"), (generate, "load_protocol_pipeline")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a finished stage was done again"))
    assert evaluate(finished_run, full_protocol, lines) == {}
    assert lines == [f"{stage}: done before" for stage in STAGES]
    assert runs.tree(finished_run) == before
    assert stages.outlook(RunFolder(finished_run, full_protocol))[1] == "to do: nothing"


def test_other_images_are_scored_but_not_timed_anew(finished_run: Path, copy: Path, full_protocol: Protocol) -> None:
    """And a row that was lost is made again."""
    shutil.rmtree(row_of(copy, full_protocol.cells[2]).folder)
    row = row_of(copy, full_protocol.cells[-1])
    shutil.copy(row.image_file(1), row.image_file(0))
    made = row.made_images()
    row.manifest.write_text(row.manifest.read_text().replace(made[0].sha256, made[1].sha256))
    lines: list[str] = []
    evaluate(copy, full_protocol, lines)
    assert finished_stages(lines) == ["score: done", "time: done before", "memory: done before", "report: done"]
    before, now = (json.loads((run / "scores.json").read_text())["rows"] for run in (finished_run, copy))
    assert now[row.name]["paired"] != before[row.name]["paired"] and now["null"] == before["null"]
    lost = row_of(copy, full_protocol.cells[2]).folder
    assert runs.tree(lost) == runs.tree(row_of(finished_run, full_protocol.cells[2]).folder)


def test_a_row_that_fails_is_in_the_results_with_its_reasons_and_tried_again(
    full_protocol: Protocol, finished_run: Path, shared_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a stage wrote is made again where it is lost. What is timed and measured is that of another run."""
    real, black, third = generate.make_batch, "image 0 is black", full_protocol.cells[2].name
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
    failing = {"null": ElfattError(black), third: full}
    errors = {"time": {"null": black, "sd": "no such thing"}, "memory": {"sd": "out of memory"}}

    def measure(stage: str, run: RunFolder, report: Any) -> dict[str, Any]:
        shutil.copy(finished_run / f"{stage}.json", run.folder)
        return {"errors": errors.get(stage, {})}

    def make(run: RunFolder, pipe: Any, row: RowFolder, *rest: Any) -> None:
        if row.name in failing:
            raise failing[row.name]
        real(run, pipe, row, *rest)

    monkeypatch.setattr(generate, "make_batch", make)
    for stage in ("time", "memory"):
        monkeypatch.setattr(stages, f"measure_{stage}", functools.partial(measure, stage))
    failed = evaluate(tmp_path / "run", full_protocol)
    assert failed == {"null": black, third: "out of memory at batch 2", "sd": "out of memory"}
    rows = {row["cell"]: row for row in json.loads((tmp_path / "run" / "results.json").read_text())["rows"]}
    assert (rows["null"]["failed"], rows["null"]["distances"], rows["sd"]["failed"]) == (black, None, None)
    assert rows["sd"]["distances"]
    failing.clear()
    errors.clear()
    (tmp_path / "run" / "stages.json").write_text('{"score": 3}')
    (tmp_path / "run" / "cost.json").unlink()
    for again in (True, False):
        lines: list[str] = []
        assert evaluate(tmp_path / "run", full_protocol, lines) == {}
        assert finished_stages(lines) == [f"{stage}: done{'' if again else ' before'}" for stage in STAGES]
    assert (tmp_path / "run" / "cost.json").is_file()


def test_a_torn_reference_is_found(full_protocol: Protocol, workplace: Path, own_cache: Path, tmp_path: Path) -> None:
    """It is found before the first image, as is a limit of one; the option that its message names goes on."""
    shutil.copytree(workplace / "val", tmp_path / "torn")
    min((tmp_path / "torn").iterdir()).write_bytes(b"\xff\xd8\xff")
    torn = dataclasses.replace(full_protocol.reference, source=str(tmp_path / "torn"), allow_count=False)
    protocol = dataclasses.replace(full_protocol, reference=torn, time=None, memory=None, cells=full_protocol.cells[:2])
    for wrong, said in ((protocol, "--allow-count"), (dataclasses.replace(protocol, limit=1), "give at least 2")):
        with pytest.raises(ElfattError, match=said):
            evaluate(tmp_path / "run", wrong)
    assert not (tmp_path / "run" / "cells").exists()
    allowed = dataclasses.replace(protocol, reference=dataclasses.replace(torn, allow_count=True))
    assert evaluate(tmp_path / "run", allowed) == {}
    ((name, found),) = json.loads((tmp_path / "run" / "scores.json").read_text())["references"].items()
    assert name == "FD-CLIP (ViT of width 32/8@32) (11 reference images)" and len(found["unreadable"]) == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        (
            {"device": "abacus", "model": "/nowhere/sd", "extractors": ("clip:/nowhere/a", "clip:/nowhere/b")},
            ["device='abacus'", "/nowhere/sd", "/nowhere/a", "/nowhere/b"],
        ),
        ({"metrics": (MetricChoice("no_module:f"),)}, ["no_module:f"]),
        ({"height": 33}, ["height=33 is not accepted"]),
        ({"limit": 1}, ["1 image a row has no distance; give at least 2"]),
    ],
    ids=str,
)
def test_obstacles_are_told(full_protocol: Protocol, tmp_path: Path, changes: dict[str, Any], named: list[str]) -> None:
    told = stages.obstacles(RunFolder(tmp_path / "new", dataclasses.replace(full_protocol, **changes)))
    assert [sum(part in line for line in told) for part in named] == [1] * len(named) and len(told) == len(named), told
    assert not (tmp_path / "new").exists()


@pytest.fixture
def file(tmp_path: Path, workplace: Path) -> Path:
    return runs.write_protocol(tmp_path, workplace / "sd15")


def sets(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.mark.usefixtures("shared_cache")
def test_run_and_the_other_commands_on_it(workplace: Path, file: Path, in_process: None, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = call("eval", "run", file, "--out", run_dir, "--limit", 3, "--quiet", *sets(full_overrides(workplace)))
    assert done.exit_code == 0, done.stderr
    said, _, path = done.stdout.strip().rpartition("\n\n")
    page = Path(path)
    assert page == run_dir / "report" / "index.html" and page.is_file()
    assert "\nNo verdicts" in said and "A quick look: every row was limited to 3 images" in said
    assert RunFolder.open(run_dir).protocol.limit == len(RunFolder.open(run_dir).baseline.made_images()) == 3
    done = call("eval", "score", run_dir, "--quiet", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, json.loads((run_dir / "results.json").read_text()))
    done = call("eval", "run", file, "--out", run_dir, "--limit", 3, "--json", *sets(full_overrides(workplace)))
    assert done.stdout == (run_dir / "results.json").read_text() + "\n" and str(page) in done.stderr
    page.unlink()
    assert call("eval", "report", run_dir).exit_code == 0 and page.is_file()
    done = call("eval", "verify", run_dir)
    assert (done.exit_code, done.stderr) == (0, "")
    RunFolder.open(run_dir).rows[1].image_file(1).unlink()
    done = call("eval", "verify", run_dir)
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1) and "null/images/00001.png: deleted" in done.stderr
    overrides = sets([line for line in full_overrides(workplace) if "reference" not in line])
    done = call("eval", "reference", file, "--reference", workplace / "val", "--allow-count", *overrides)
    assert done.exit_code == 0 and '"count": 12' in done.stdout


@pytest.mark.usefixtures("shared_cache")
def test_dry_run_prints_and_makes_nothing(workplace: Path, file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().replace("SD (Baseline)", "[/b] :star: \\u001b[2J"))  # printed as it is
    new = ["--out", tmp_path / "run", "--dry-run"]
    done = call("eval", "run", file, *new, *sets(full_overrides(workplace)))
    assert (done.exit_code, done.stderr) == (0, "")
    parts = [r"[/b] :star: \x1b[2J", "tomesd-ratio0.5", "20 images, 5 a row, about", "GiB are free"]
    parts += ["to do: 20 images of 4 steps, score, time, memory, report"]
    assert [part for part in parts if part not in done.stdout] == []
    assert not (tmp_path / "run").exists()
    data = json.loads(call("eval", "run", file, *new, "--json", *sets(full_overrides(workplace))).stdout)
    assert (len(data["rows"]), data["obstacles"]) == (4, []) and "to do: 20 images" in data["outlook"][1]
    done = call("eval", "run", "toy", "--dry-run", *sets(["height=64", "width=64"]), "--out", file, "--reuse", file)
    assert done.exit_code == 2 and "cannot be written" in done.stderr and "holds no run" in done.stderr
    assert build_protocol("toy", model="models/\N{GRINNING FACE}é").model == "models/\N{GRINNING FACE}é"


def test_a_failed_row_is_named(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the baseline, which is the last here, the others are not begun."""
    _, baseline, null = runs.UNTOUCHED.split("[[cells]]")
    file = runs.write_protocol(tmp_path, workplace / "sd15", f"[[cells]]{null}\n[[cells]]{baseline}")
    check, run = generate.check_images, RunFolder(tmp_path / "run", build_protocol(str(file)))
    command = ("generate", file, "--out", tmp_path / "run", "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(generate, "check_images", lambda images, indices: check(images * 0, indices))
        done = call("eval", *command)
    black = "image 0 is black: an overflow (give dtype float32 or bfloat16), or a safety checker"
    assert (done.exit_code, done.stderr) == (1, f"error: row sd failed: {black}\n")
    assert not any(row.images_folder.exists() for row in run.rows) and run.rows[0] is not run.baseline
    assert f"'sd', the baseline, has no images: {black}" in call("eval", "score", tmp_path / "run").stderr
    assert call("eval", *command).exit_code == 0 and len(run.baseline.made_images()) == 5
