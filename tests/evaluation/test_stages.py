"""The stages of a run: what is done once, what is done again, and what is told before any work, as by a dry run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import runs
from support.runs import row_of

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction, generate, score, stages
from elfatt_sd.evaluation.features import load_extractor
from elfatt_sd.evaluation.measure import program_of
from elfatt_sd.evaluation.metrics import MetricChoice
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.run import Run, RunFailure


def test_unreadable_reference_pictures_are_named(full_protocol: Protocol, copy: Path) -> None:
    scores = json.loads((copy / "scores.json").read_text())
    next(iter(scores["references"].values()))["unreadable"] = ["a.JPEG (truncated)"]
    (copy / "scores.json").write_text(json.dumps(scores))
    lines: list[str] = []
    stages.score(Run(copy, full_protocol), lines.append)
    assert lines == ["score: done before", "score: reference image not readable: a.JPEG (truncated)"]
    stages.write_page(Run.open(copy), lines.append)
    page = (copy / "report" / "index.html").read_text()
    assert "1 reference image could not be read: a.JPEG (truncated)." in page


def test_a_second_run_does_nothing_again(
    finished_run: Path, full_protocol: Protocol, shared_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = runs.tree(finished_run)
    lines: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished stage was done again")

    for name in ("measure_time", "measure_memory"):
        monkeypatch.setattr(stages, name, refuse)
    monkeypatch.setattr(generate, "load_protocol_pipeline", refuse)
    assert stages.evaluate(Run(finished_run, full_protocol), lines.append, show_progress=False) == {}
    assert lines == [f"{stage}: done before" for stage in ("score", "time", "memory", "report")]
    assert runs.tree(finished_run) == before


@pytest.mark.parametrize("damage", ["lost", "torn", "of another run"])
def test_what_a_stage_wrote_is_made_again_where_it_is_lost(
    copy: Path, full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """What is timed and measured is made up; what is kept in the end is whole."""
    names = ("cost.json", "time.json", "memory.json", "scores.json")
    done = {name: (copy / name).read_bytes() for name in names}
    for name, content in done.items():
        other = content.replace(full_protocol.identity.encode(), b"other")
        (copy / name).write_bytes(content[:-9] if damage == "torn" else other)
        if damage == "lost":
            (copy / name).unlink()
    for stage in ("time", "memory"):

        def write(run: Run, report: Any, name: str = f"{stage}.json") -> dict[str, Any]:
            (run.folder / name).write_bytes(done[name])
            return {}

        monkeypatch.setattr(stages, f"measure_{stage}", write)
    assert stages.evaluate(Run(copy, full_protocol), lambda line: None, show_progress=False) == {}
    for name, content in done.items():
        made, before = json.loads((copy / name).read_bytes()), json.loads(content)
        assert (made["identity"], made["rows"].keys()) == (full_protocol.identity, before["rows"].keys())


def test_other_images_are_scored_anew_but_not_timed_anew(
    finished_run: Path, copy: Path, full_protocol: Protocol
) -> None:
    """And a row that was lost is made again."""
    shutil.rmtree(row_of(copy, full_protocol.cells[2]).folder)
    cell = full_protocol.cells[-1]
    first, second = (row_of(copy, cell).image_file(index) for index in (0, 1))
    shutil.copy(second, first)
    made = row_of(copy, cell).made_images()
    manifest = row_of(copy, cell).manifest
    manifest.write_text(manifest.read_text().replace(made[0].sha256, made[1].sha256))
    lines: list[str] = []
    stages.evaluate(Run(copy, full_protocol), lines.append, show_progress=False)
    assert [line.split(" in ")[0] for line in lines if not line.endswith(": begun")] == [
        "score: done",
        "time: done before",
        "memory: done before",
        "report: done",
    ]
    before, now = (json.loads((run / "scores.json").read_text())["rows"] for run in (finished_run, copy))
    assert now[cell.name]["paired"] != before[cell.name]["paired"]
    assert now["null"] == before["null"]
    lost = row_of(copy, full_protocol.cells[2]).folder
    assert runs.tree(lost) == runs.tree(row_of(finished_run, full_protocol.cells[2]).folder)


def test_a_row_that_fails_in_several_stages_is_in_the_results_with_its_reasons(
    full_protocol: Protocol, finished_run: Path, shared_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = generate.make_row, {"null": "image 0 is black", "sd": None}

    def make(run: Run, pipe: Any, row: Any, *rest: Any) -> Any:
        return failing[row.name] if failing.get(row.name) else real(run, pipe, row, *rest)

    monkeypatch.setattr(generate, "make_row", make)
    errors = {"null": "image 0 is black", "sd": "no such thing"}
    for stage in ("time", "memory"):

        def write(run: Run, report: Any, name: str = f"{stage}.json") -> dict[str, Any]:
            shutil.copy(finished_run / name, run.folder / name)
            return {"errors": errors if name == "time.json" else {"sd": "out of memory"}}

        monkeypatch.setattr(stages, f"measure_{stage}", write)
    failed = stages.evaluate(Run(tmp_path / "run", full_protocol), lambda line: None, show_progress=False)
    assert failed == {"null": "image 0 is black", "sd": "no such thing; out of memory"}
    rows = {row["cell"]: row for row in json.loads((tmp_path / "run" / "results.json").read_text())["rows"]}
    assert (rows["null"]["failed"], rows["null"]["distances"], rows["sd"]["failed"]) == ("image 0 is black", None, None)
    assert rows["sd"]["distances"]


def test_a_baseline_that_fails_ends_the_run_at_once(
    full_protocol: Protocol, shared_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def fail(run: Any, pipe: Any, row: Any, *_: Any) -> str:
        made.append(row.name)
        return "image 0 is black"

    monkeypatch.setattr(generate, "make_row", fail)
    last_first = dataclasses.replace(full_protocol, cells=full_protocol.cells[::-1])
    with pytest.raises(RunFailure, match=r"'sd', the baseline, has no images: image 0 is black"):
        stages.evaluate(Run(tmp_path / "run", last_first), lambda line: None, show_progress=False)
    assert made == ["sd"]


def test_a_torn_reference_picture_costs_no_images(
    full_protocol: Protocol, workplace: Path, own_cache: Path, tmp_path: Path
) -> None:
    """It is found before the first image; the option that its message names goes on in the same folder."""
    shutil.copytree(workplace / "val", tmp_path / "torn")
    min((tmp_path / "torn").iterdir()).write_bytes(b"\xff\xd8\xff")
    torn = dataclasses.replace(full_protocol.reference, source=str(tmp_path / "torn"), allow_count=False)
    protocol = dataclasses.replace(full_protocol, reference=torn, time=None, memory=None)
    with pytest.raises(ElfattError, match="--allow-count"):
        stages.evaluate(Run(tmp_path / "run", protocol), lambda line: None, show_progress=False)
    assert not (tmp_path / "run" / "cells").exists()
    allowed = dataclasses.replace(protocol, reference=dataclasses.replace(torn, allow_count=True))
    lines: list[str] = []
    assert stages.evaluate(Run(tmp_path / "run", allowed), lines.append, show_progress=False) == {}
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert list(scores["references"]) == ["FD-CLIP (ViT of width 32/8@32) (11 reference images)"]
    assert any("ILSVRC2012_val_00000001.JPEG" in line for line in lines)


def test_a_row_that_could_not_be_measured_is_told_and_tried_again(
    copy: Path, full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = json.loads((copy / stages.STAGES_FILE).read_text())
    (copy / stages.STAGES_FILE).write_text(json.dumps({**done, "time": "", "memory": ""}))
    errors = {"time": {"null": "no such thing"}, "memory": {"sd": "no such thing"}}
    for stage, found in errors.items():
        monkeypatch.setattr(stages, f"measure_{stage}", lambda *_, found=found: {"errors": dict(found)})
    for expected, skipped in (({"null": "no such thing", "sd": "no such thing"}, False), ({}, False), ({}, True)):
        lines: list[str] = []
        assert stages.evaluate(Run(copy, full_protocol), lines.append, show_progress=False) == expected
        assert all((f"{stage}: done before" in lines) == skipped for stage in errors)
        for found in errors.values():
            found.clear()


def test_a_changed_reference_is_scored_anew(copy: Path, full_protocol: Protocol, workplace: Path) -> None:
    picture = min((workplace / "val").iterdir())
    content, times = picture.read_bytes(), (picture.stat().st_atime_ns, picture.stat().st_mtime_ns)
    lines: list[str] = []
    try:
        picture.write_bytes(content + b" ")
        stages.score(Run(copy, full_protocol), lines.append)
    finally:
        picture.write_bytes(content)
        os.utime(picture, ns=times)
    assert [line.split(" in ")[0] for line in lines if not line.endswith(": begun")] == ["score: done"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reference.source=/nowhere/val", "/nowhere/val does not exist"),
        ("reference.source=", "reference.source is missing"),
        ('extractors=["clip:/nowhere"]', "/nowhere"),
        ('extractors=["incepton"]', "'incepton' is not known"),
        ("labels=/nowhere.txt", "nowhere.txt"),
        ("limit=1", "1 image a row has no distance; give at least 2"),
        ("reference.count=13", "has 12 images; accepted are 13"),
        ("reference.source=/nowhere/statistics.npz", "/nowhere/statistics.npz does not exist"),
        ("reference.resize=cropp", "resize='cropp' is not known"),
        ("reference.resize=crop", "size=0 with resize='crop'"),
        ("reference.filter=mitchel", "filter='mitchel' is not known"),
        ("reference.source=renders:0", "renders"),
        ("reference.source=garbage.npz", "garbage.npz"),
        ("device=abacus", "device='abacus' is not known"),
        ("model=/nowhere/sd", "'/nowhere/sd' does not exist"),
    ],
)
def test_missing_inputs_are_told_before_any_work(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.npz").write_bytes(b"?")
    protocol = runs.small_protocol(tmp_path, workplace / "sd15", *runs.full_overrides(workplace), override)
    with pytest.raises(ElfattError, match=message):
        stages.evaluate(Run(tmp_path / "run", protocol), lambda line: None, show_progress=False)
    assert {path.name for path in (tmp_path / "run").glob("*")} <= {".lock"}


def test_a_reference_is_checked_in_all_before_any_work(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number of pictures too, where they are known by their statistics only; and a folder is listed once."""
    overrides = runs.full_overrides(workplace)
    listed: list[Path] = []
    monkeypatch.setattr(
        extraction, "_folder", lambda path, list_it=extraction._folder: listed.append(path) or list_it(path)
    )
    stages.check_inputs(runs.small_protocol(tmp_path, workplace / "sd15", *overrides))
    assert listed == [workplace / "val"]
    dimension = load_extractor(f"clip:{workplace / 'clip'}").dimension
    with open(tmp_path / "five.NPZ", "wb") as file:
        np.savez(file, mu=np.zeros(dimension), sigma=np.diag((np.arange(dimension) < 4) * 1.0), count=np.int64(5))
    overrides += [f"reference.source={tmp_path / 'five.NPZ'}"]
    with pytest.raises(ElfattError, match=r"five\.NPZ has 5 images; accepted are 12, or give --allow-count"):
        stages.check_inputs(runs.small_protocol(tmp_path, workplace / "sd15", *overrides))
    overrides += ["reference.allow_count=true"]
    stages.check_inputs(runs.small_protocol(tmp_path, workplace / "sd15", *overrides))


def test_scoring_loads_each_extractor_once(
    finished_run: Path, copy: Path, full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "scores.json").unlink()
    loaded: list[str] = []

    def load(spec: str, **options: Any) -> Any:
        loaded.append(spec)
        return load_extractor(spec, **options)

    monkeypatch.setattr(score, "load_extractor", load)
    stages.score(Run(copy, full_protocol), lambda line: None)
    assert loaded == list(full_protocol.extractors)
    assert (copy / "scores.json").read_bytes() == (finished_run / "scores.json").read_bytes()


def test_what_is_left_to_do_is_counted(full_protocol: Protocol, finished_run: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", full_protocol)
    assert stages.count_images(run) == 5 * 4
    assert stages.disk_gib(run) == pytest.approx(20 * 32 * 32 * 1.6 / 2**30)
    assert len({program_of(cell) for cell in full_protocol.cells}) == 3  # the untouched one for baseline and null row
    assert stages.to_do(run) == (
        "20 images of 4 steps, 2 rounds of 4 rows to time, 6 processes to measure the memory, the scores"
    )
    assert stages.to_do(Run(finished_run, full_protocol)) == "nothing"


def test_every_obstacle_is_named_at_once(
    full_protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stages.obstacles(Run(tmp_path / "new", full_protocol)) == []
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(Run, "free_gib", 0.0)
    wrong = dataclasses.replace(
        full_protocol,
        model="/nowhere/sd",
        extractors=("clip:/nowhere/clip", "dinov2:/nowhere/dino"),
        reference=dataclasses.replace(full_protocol.reference, source="/nowhere/val"),
        metrics=(MetricChoice("lpips", "/nowhere/alex.pth"), MetricChoice("no_module:f"), MetricChoice("cmmd")),
    )
    told = stages.obstacles(Run(tmp_path / "new", wrong), [tmp_path / "lost"])
    parts = ["/nowhere/sd", "/nowhere/clip", "/nowhere/dino", "/nowhere/val", "lost", "GiB of disk are needed"]
    for part in (*parts, "/nowhere/alex.pth", "no_module:f"):
        assert sum(part in line for line in told) == 1, (part, told)


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"height": 33}, "height=33 is not accepted"),
        ({"metrics": (MetricChoice("prdc"),), "limit": 5}, "metric 'prdc' needs more than 5 images and reference"),
        ({"scheduler": "FlowMatchEulerDiscreteScheduler"}, "scheduler='FlowMatchEulerDiscreteScheduler' does not fit"),
        ({"metrics": (MetricChoice("colorsys:rgb_to_hsv", name="x"),) * 2}, "metrics give 'x' twice"),
    ],
    ids=str,
)
def test_an_obstacle_is_named_alone(
    full_protocol: Protocol, tmp_path: Path, changes: dict[str, Any], obstacle: str
) -> None:
    (said,) = stages.obstacles(Run(tmp_path / "new", dataclasses.replace(full_protocol, **changes)))
    assert said.startswith(obstacle)


def test_images_of_the_run_are_no_reference(full_protocol: Protocol, tmp_path: Path) -> None:
    (own := tmp_path / "run" / "cells" / "sd" / "images").mkdir(parents=True)
    given = dataclasses.replace(full_protocol.reference, source=str(own))
    said = stages.obstacles(Run(tmp_path / "run", dataclasses.replace(full_protocol, reference=given)))
    assert any("is of this run; give images that it is compared with" in line for line in said)
