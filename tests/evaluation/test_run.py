"""All stages in order, on the paper's own protocol with small random networks; and what is done only once."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run
import tiny_pipelines as tiny
from small_run import row_of

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import dry_run, generate, memory, sources, stages
from elfatt_sd.evaluation import score as scoring
from elfatt_sd.evaluation.features import load_extractor
from elfatt_sd.evaluation.memory import program_of
from elfatt_sd.evaluation.protocol_files import load_protocol
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import Run, RunFailure
from elfatt_sd.evaluation.verify import unequal
from elfatt_sd.files import sha256_of_file
from elfatt_sd.presets import METHODS


def test_the_papers_table_runs_to_the_end(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval run eval/paper_table.toml` with its sizes overridden; memory in this process in place of fresh ones."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "run_worker", memory.measure_peaks)
    protocol = load_protocol(
        Path(__file__).parents[2] / "eval" / "paper_table.toml",
        [
            f"model={workplace / 'sd15'}",
            f'extractors=["clip:{workplace / "clip"}"]',
            f"reference.source={workplace / 'val'}",
            "reference.count=12",
            *("dtype=float32", "device=cpu", "height=32", "width=32", "steps=2", "batch=4", "limit=2"),
            *("time.repeats=1", "time.warmup=0", "time.batch=1", "memory.batches=[1, 2]"),
        ],
    )
    assert stages.evaluate(Run(tmp_path / "run", protocol), lambda line: None, show_progress=False) == {}
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["rows"]) == 17
    for row in results["rows"]:
        assert row["failed"] is None
        assert row["images"] == 2
        assert row["distances"]["FD-CLIP (ViT of width 32/8@32) (12 reference images)"]["value"] > 0
        assert row["time"]["end_to_end"]["seconds_per_image"] > 0
        assert row["memory"]["batches"] == [1, 2]
        assert (row["paired"] is None) == (row["role"] == "baseline")
    assert {row["label"] for row in results["rows"]} > {row["label"] for row in results["published"]["rows"]} - {""}
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "ELFATT-SD" in page
    assert (tmp_path / "run" / "report" / "table.csv").read_text().count("\n") >= 17


@pytest.mark.parametrize("name", ["sdxl", "tome2023", "block_size", "early_steps"])
def test_the_other_protocols_run_to_the_end(
    name: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the model of their kind, against a folder with a folder for each class, resized as they say."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    model = workplace / "sd15"
    if name == "sdxl":
        model = tmp_path / "sdxl"
        tiny.sdxl(tmp_path).save_pretrained(model)
    for index, picture in enumerate(sorted((workplace / "val").iterdir())):
        (tmp_path / "val" / f"n{index % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, tmp_path / "val" / f"n{index % 2}")
    protocol = load_protocol(
        name,
        [
            f"model={model}",
            f'extractors=["clip:{workplace / "clip"}"]',
            f"reference.source={tmp_path / 'val'}",
            f"reference.count={10 if name == 'tome2023' else 12}",
            *(["reference.size=24"] if name == "tome2023" else []),
            *("dtype=float32", "device=cpu", "height=32", "width=32", "steps=2", "batch=2", "limit=2"),
            *("time.repeats=0", "memory.batches=[]"),
        ],
    )
    assert stages.evaluate(Run(tmp_path / "run", protocol), lambda line: None, show_progress=False) == {}
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["label"] for row in rows] == [cell.label for cell in protocol.cells]
    for row in rows:
        assert (row["failed"], row["images"]) == (None, 2)
        name = f"FD-CLIP (ViT of width 32/8@32) ({protocol.reference.count} reference images"
        assert [figure["value"] > 0 for key, figure in row["distances"].items() if key.startswith(name)] == [True]
    made = {cell.name: row_of(tmp_path / "run", cell).image_file(0).read_bytes() for cell in protocol.cells}
    unchanged = {cell.method for cell in protocol.cells if made[cell.name] == made["sd"]}
    assert unchanged <= {"sd", "elfatt-fast"}, "which samples 128 keys where there are no more"


def test_unreadable_reference_pictures_are_named(full_protocol: Protocol, finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    next(iter(scores["references"].values()))["unreadable"] = ["a.JPEG (truncated)"]
    (tmp_path / "run" / "scores.json").write_text(json.dumps(scores))
    lines: list[str] = []
    stages.score(Run(tmp_path / "run", full_protocol), lines.append)
    assert lines == ["score: done before", "score: reference picture not readable: a.JPEG (truncated)"]
    stages.write_page(Run.open(tmp_path / "run"), lines.append)
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "1 reference picture could not be read: a.JPEG (truncated)." in page


def test_two_processes_go_through_all_stages(finished_run: Path, workplace: Path, tmp_path: Path) -> None:
    """Under a launcher, with nothing replaced: the scores are those of one process, of which some rows are here."""
    root = Path(__file__).parents[2]
    launch = [*small_run.TWO_PROCESSES, str(root / "cli.py")]
    protocol = small_run.write_protocol(tmp_path, workplace / "sd15", small_run.UNTOUCHED)
    command = ["eval", "run", str(protocol), "--out", str(tmp_path / "run")]
    for override in small_run.full_overrides(workplace):
        command += ["--set", override]
    cache = tmp_path / "cache"  # so that the reference is shared out, too
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELFATT_SD_CACHE": str(cache), "PYTHONPATH": str(root)}
    done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    finished = [line.split(" in ")[0] for line in done.stderr.splitlines() if ": done in" in line]
    assert finished == [f"{stage}: done" for stage in ("score", "time", "memory", "report")]  # each of them once
    both, one = (json.loads((run / "scores.json").read_text()) for run in (tmp_path / "run", finished_run))
    assert list(unequal({name: one["rows"][name] for name in both["rows"]}, both["rows"])) == []
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())["rows"]
    assert [row["batches"] for row in memory.values()] == [[1, 2]] * 2
    assert (tmp_path / "run" / "report" / "index.html").is_file()


def test_the_same_images_with_inception_in_a_new_folder(
    finished_run: Path, full_protocol: Protocol, inception_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the message says that refuses a folder of other settings; no image is made again."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    weights = {"inception_weights": str(inception_file), "inception_sha256": sha256_of_file(inception_file)}
    changes: dict[str, Any] = {"extractors": ("inception",), **weights, "time": None, "memory": None}
    protocol = dataclasses.replace(full_protocol, **changes)
    with pytest.raises(ElfattError, match=f"--reuse {finished_run}"):
        stages.evaluate(Run(finished_run, protocol), lambda line: None, show_progress=False)
    monkeypatch.setattr(generate, "make_images", None)
    run_dir = tmp_path / "run"
    assert (
        stages.evaluate(Run(run_dir, protocol), lambda line: None, reuse=[Run.open(finished_run)], show_progress=False)
        == {}
    )
    assert small_run.tree(run_dir / "cells") == small_run.tree(finished_run / "cells")
    rows = json.loads((run_dir / "results.json").read_text())["rows"]
    (name,) = {name for row in rows for name in row["distances"] if not name.startswith("K")}
    assert name.endswith("(12 reference images)")
    assert not name.startswith("FID")
    assert all(row["distances"][name]["value"] > 0 for row in rows)


def test_reasons_of_several_stages_are_joined() -> None:
    joined = stages._joined({"a": "out of memory at batch 2"}, {"a": "no such thing", "b": "no such thing"})
    assert joined == {"a": "out of memory at batch 2; no such thing", "b": "no such thing"}


def test_a_second_run_does_nothing_again(
    finished_run: Path, full_protocol: Protocol, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    before = small_run.tree(finished_run)
    lines: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished stage was done again")

    for name in ("measure_time", "measure_memory"):
        monkeypatch.setattr(stages, name, refuse)
    monkeypatch.setattr(generate, "load_protocol_pipeline", refuse)
    assert stages.evaluate(Run(finished_run, full_protocol), lines.append, show_progress=False) == {}
    assert lines == [f"{stage}: done before" for stage in ("score", "time", "memory", "report")]
    assert small_run.tree(finished_run) == before


def test_a_lost_row_is_made_again_and_nothing_else(
    finished_run: Path, full_protocol: Protocol, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    shutil.rmtree(row_of(copy, full_protocol.cells[-1]).folder)
    lines: list[str] = []
    assert stages.evaluate(Run(copy, full_protocol), lines.append, show_progress=False) == {}
    assert lines == [f"{stage}: done before" for stage in ("score", "time", "memory", "report")]
    assert small_run.tree(copy / "cells") == small_run.tree(finished_run / "cells")


def test_other_images_are_scored_anew_but_not_timed_anew(
    finished_run: Path, full_protocol: Protocol, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
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


def test_a_failed_row_is_in_the_results_with_its_reason(
    full_protocol: Protocol, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    monkeypatch.setattr(memory, "run_worker", memory.measure_peaks)
    check = generate.check_images

    def broken(images: Any, indices: list[int]) -> None:
        check(images * (current[-1] != "null"), indices)

    current = [""]
    real = generate._Maker.make_row

    def follow(maker: Any, row: Any, *rest: Any) -> Any:
        current.append(row.name)
        return real(maker, row, *rest)

    monkeypatch.setattr(generate, "check_images", broken)
    monkeypatch.setattr(generate._Maker, "make_row", follow)
    failed = stages.evaluate(Run(tmp_path / "run", full_protocol), lambda line: None, show_progress=False)
    assert failed == {"null": "image 0 is black"}
    rows = {row["cell"]: row for row in json.loads((tmp_path / "run" / "results.json").read_text())["rows"]}
    assert rows["null"]["failed"] == "image 0 is black"
    assert rows["null"]["distances"] is None
    assert rows["sd"]["failed"] is None
    assert rows["sd"]["distances"]


def test_a_baseline_that_fails_ends_the_run_at_once(
    full_protocol: Protocol, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    made: list[str] = []

    def fail(maker: Any, row: Any, *_: Any) -> str:
        made.append(row.name)
        return "image 0 is black"

    monkeypatch.setattr(generate._Maker, "make_row", fail)
    last_first = dataclasses.replace(full_protocol, cells=full_protocol.cells[::-1])
    with pytest.raises(RunFailure, match=r"'sd', the baseline, has no images: image 0 is black"):
        stages.evaluate(Run(tmp_path / "run", last_first), lambda line: None, show_progress=False)
    assert made == ["sd"]


def test_a_torn_reference_picture_costs_no_images(
    full_protocol: Protocol, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found before the first image; the option that its message names goes on in the same folder."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
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


@pytest.mark.parametrize("stage", ["time", "memory"])
def test_a_row_that_could_not_be_measured_is_told_and_tried_again(
    finished_run: Path,
    full_protocol: Protocol,
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    done = json.loads((copy / stages.STAGES_FILE).read_text())
    del done[stage]
    (copy / stages.STAGES_FILE).write_text(json.dumps(done))
    errors = {"null": "no such thing"}
    monkeypatch.setattr(stages, f"measure_{stage}", lambda *_: {"errors": dict(errors)})
    for _ in range(2):
        lines: list[str] = []
        assert stages.evaluate(Run(copy, full_protocol), lines.append, show_progress=False) == errors
        assert f"{stage}: done before" not in lines
    errors.clear()
    assert stages.evaluate(Run(copy, full_protocol), lambda line: None, show_progress=False) == {}
    lines = []
    assert stages.evaluate(Run(copy, full_protocol), lines.append, show_progress=False) == {}
    assert f"{stage}: done before" in lines


def test_a_changed_reference_is_scored_anew(
    finished_run: Path, full_protocol: Protocol, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    shutil.copytree(finished_run, tmp_path / "run")
    picture = min((workplace / "val").iterdir())
    content, times = picture.read_bytes(), (picture.stat().st_atime_ns, picture.stat().st_mtime_ns)
    lines: list[str] = []
    try:
        picture.write_bytes(content + b" ")
        stages.score(Run(tmp_path / "run", full_protocol), lines.append)
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
        ("reference.count=13", "has 12 pictures; accepted are 13"),
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
    protocol = small_run.small_protocol(tmp_path, workplace / "sd15", *small_run.full_overrides(workplace), override)
    with pytest.raises(ElfattError, match=message):
        stages.evaluate(Run(tmp_path / "run", protocol), lambda line: None, show_progress=False)
    assert {path.name for path in (tmp_path / "run").glob("*")} <= {".lock"}


def test_a_reference_is_checked_in_all_before_any_work(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number of pictures too, where they are known by their statistics only; and a folder is listed once."""
    overrides = small_run.full_overrides(workplace)
    listed: list[Path] = []
    monkeypatch.setattr(sources, "_folder", lambda path, list_it=sources._folder: listed.append(path) or list_it(path))
    stages.check_inputs(small_run.small_protocol(tmp_path, workplace / "sd15", *overrides))
    assert listed == [workplace / "val"]
    dimension = load_extractor(f"clip:{workplace / 'clip'}").dimension
    with open(tmp_path / "five.NPZ", "wb") as file:
        np.savez(file, mu=np.zeros(dimension), sigma=np.eye(dimension), count=np.int64(5))
    overrides += [f"reference.source={tmp_path / 'five.NPZ'}"]
    with pytest.raises(ElfattError, match=r"five\.NPZ has 5 pictures; accepted are 12, or give --allow-count"):
        stages.check_inputs(small_run.small_protocol(tmp_path, workplace / "sd15", *overrides))
    overrides += ["reference.allow_count=true"]
    stages.check_inputs(small_run.small_protocol(tmp_path, workplace / "sd15", *overrides))


def test_scoring_loads_each_extractor_once(
    finished_run: Path, full_protocol: Protocol, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(workplace / "cache"))
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "scores.json").unlink()
    loaded: list[str] = []

    def load(spec: str, **options: Any) -> Any:
        loaded.append(spec)
        return load_extractor(spec, **options)

    monkeypatch.setattr(scoring, "load_extractor", load)
    stages.score(Run(tmp_path / "run", full_protocol), lambda line: None)
    assert loaded == list(full_protocol.extractors)
    assert (tmp_path / "run" / "scores.json").read_bytes() == (finished_run / "scores.json").read_bytes()


def test_the_estimate_counts_images_and_extrapolates_steps(
    full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "timed_call", _three_calls)
    found = dry_run.estimate(Run(Path("nowhere"), full_protocol))
    assert dry_run.count_images(Run(Path("nowhere"), full_protocol)) == 5 * 4
    assert dry_run.disk_gib(Run(Path("nowhere"), full_protocol)) == pytest.approx(20 * 32 * 32 * 1.6 / 2**30)
    assert found.seconds_per_image == pytest.approx(1.0 + 5 * 0.5)  # 4 steps of PLMS are 5 calls
    assert found.generation_hours == pytest.approx(20 * 3.5 / 3600)
    assert found.timing_hours == pytest.approx(4 * (2 + 1) * 1 * 3.5 / 3600)  # a warm-up has all four steps
    memory = full_protocol.memory
    assert memory is not None
    weighed = sum(memory.batches) * (memory.steps or 4) / 4
    programs = len({program_of(cell) for cell in full_protocol.cells})
    assert programs == 3  # the untouched one for baseline and null row
    least = programs * weighed * 3.5 / 3600
    assert least < found.memory_hours  # each process has to start
    assert found.memory_hours < least + 0.2


def test_the_estimate_leaves_out_what_is_done(
    full_protocol: Protocol, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "probe_seconds", lambda _: 3.5)
    found = dry_run.estimate(Run(finished_run, full_protocol))
    assert (found.generation_hours, found.timing_hours, found.memory_hours) == (0, 0, 0)


def test_every_obstacle_is_named_at_once(
    full_protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dry_run.obstacles(Run(tmp_path / "new", full_protocol)) == []
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(Run, "free_gib", 0.0)
    wrong = dataclasses.replace(
        full_protocol,
        model="/nowhere/sd",
        extractors=("clip:/nowhere/clip", "dinov2:/nowhere/dino"),
        reference=dataclasses.replace(full_protocol.reference, source="/nowhere/val"),
    )
    told = dry_run.obstacles(Run(tmp_path / "new", wrong), [tmp_path / "lost"])
    for part in ("/nowhere/sd", "/nowhere/clip", "/nowhere/dino", "/nowhere/val", "lost", "GiB of disk are needed"):
        assert sum(part in line for line in told) == 1, (part, told)


def test_the_estimate_counts_steps_that_rows_share_once(
    full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "probe_seconds", lambda _: 3.5)
    phases = ({"until": 0.5}, {"until": 1.0, "attention": "sampled"})
    rows = [Cell(name, name, "custom", phases=phases) for name in ("first", "second")]
    before = dry_run.estimate(Run(Path("nowhere"), full_protocol))
    after = dry_run.estimate(
        Run(Path("nowhere"), dataclasses.replace(full_protocol, cells=(*full_protocol.cells, *rows)))
    )
    assert after.generation_hours == pytest.approx(before.generation_hours * (4 + 0.5 + 0.5) / 4)
    assert after.timing_hours == pytest.approx(before.timing_hours * 6 / 4)


def test_the_estimate_counts_the_calls_of_schedulers_with_two_in_a_step(
    full_protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heun's takes one in its last step: 3 calls of 2 steps, 7 of 4."""
    heun = dataclasses.replace(full_protocol, scheduler="HeunDiscreteScheduler")
    monkeypatch.setattr(dry_run, "timed_call", _three_calls)
    assert dry_run.probe_seconds(heun) == pytest.approx(1.0 + 7 * 0.5)


def _three_calls(pipe: Any, protocol: Protocol, cell: Any, prompts: list[str], seeds: list[int]) -> dict[str, float]:
    calls: list[int] = []
    handle = pipe.unet.register_forward_hook(lambda *_: calls.append(1))
    generate.make_images(pipe, protocol, prompts, seeds)
    handle.remove()
    assert len(calls) == 3  # two steps of PLMS, or of Heun's
    return {"end_to_end": 2.5, "unet": 1.5}


def test_the_toys_protocol_fills_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval run eval/toy.toml` with everything in the package, at fewer images, steps and repeats."""
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "run_worker", memory.measure_peaks)
    few = ["limit=2", "steps=2", "device=cpu", "height=128", "width=128", "reference.count=8", "memory.batches=[1, 2]", "memory.steps=2"]
    protocol = load_protocol("toy", [*few, "time.repeats=1", "time.warmup=0"])
    assert {cell.method for cell in protocol.cells} == set(METHODS)
    lines: list[str] = []
    assert stages.evaluate(Run(tmp_path / "run", protocol), lines.append, show_progress=False) == {}
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["label"] for row in rows] == [cell.label for cell in protocol.cells]
    for row in rows:
        assert (row["failed"], row["images"]) == (None, 2)
        assert {"FD-toy", "KD-toy"} == row["distances"].keys()
        assert row["accuracy"]["mean"]["interval"]
        assert all(row["time"][scope]["seconds_per_image"] > 0 for scope in ("end_to_end", "unet"))
        assert row["memory"]["gib_per_image"] is not None
        assert (row["paired"] is None) == (row["role"] == "baseline")
    assert (tmp_path / "run" / "report" / "index.html").is_file()
