"""Protocols run to their end, the paper's own with small random networks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs, tiny_transformers
from support import tiny_pipelines as tiny
from support.runs import row_of

from elfatt_sd.config import METHODS
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate, stages
from elfatt_sd.evaluation.protocols import Protocol, load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.verify import unequal
from elfatt_sd.files import sha256_of_file


def test_the_papers_table_runs_to_the_end(workplace: Path, own_cache: Path, in_process: None, tmp_path: Path) -> None:
    """`eval run eval/paper_table.toml` with its sizes overridden; memory in this process in place of fresh ones."""
    protocol = load_protocol(
        runs.ROOT / "eval" / "paper_table.toml",
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
def test_the_other_protocols_run_to_the_end(name: str, workplace: Path, own_cache: Path, tmp_path: Path) -> None:
    """On the model of their kind, against a folder with a folder for each class, resized as they say."""
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


def test_two_processes_go_through_all_stages(finished_run: Path, workplace: Path, tmp_path: Path) -> None:
    """Under a launcher, with nothing replaced: the scores are those of one process, of which some rows are here."""
    root = runs.ROOT
    launch = [*runs.TWO_PROCESSES, str(root / "cli.py")]
    protocol = runs.write_protocol(tmp_path, workplace / "sd15", runs.UNTOUCHED)
    command = ["eval", "run", str(protocol), "--out", str(tmp_path / "run")]
    for override in runs.full_overrides(workplace):
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
    finished_run: Path,
    full_protocol: Protocol,
    inception_file: Path,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the message says that refuses a folder of other settings; no image is made again."""
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
    assert runs.tree(run_dir / "cells") == runs.tree(finished_run / "cells")
    rows = json.loads((run_dir / "results.json").read_text())["rows"]
    (name,) = {name for row in rows for name in row["distances"] if not name.startswith("K")}
    assert name.endswith("(12 reference images)")
    assert not name.startswith("FID")
    assert all(row["distances"][name]["value"] > 0 for row in rows)


def test_the_toys_protocol_fills_every_row(own_cache: Path, in_process: None, tmp_path: Path) -> None:
    """`eval run eval/toy.toml` with everything in the package, at fewer images, steps and repeats."""
    few = ["limit=2", "steps=2", "height=128", "width=128", "device=cpu", "reference.count=8", "memory.batches=[1, 2]"]
    protocol = load_protocol("toy", [*few, "memory.steps=2", "time.repeats=1", "time.warmup=0"])
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


OWN = """
[[cells]]
label = "own"
method = "someones_own:Values"
factor = [0.5, 2.0]
"""


def hashes(run: Run) -> dict[str, list[str]]:
    return {row.name: [made.sha256 for made in row.made_images()] for row in run.rows}


def test_a_class_in_a_protocol_gets_a_row_for_each_setting(module: str, tmp_path: Path, model: Path) -> None:
    protocol = load_protocol(runs.write_protocol(tmp_path, model, runs.UNTOUCHED + OWN))
    names = ["someones_own-Values-factor0.5", "someones_own-Values-factor2.0"]
    assert [cell.name for cell in protocol.cells[-2:]] == names
    assert [cell.config().phases[0].attention for cell in protocol.cells[-2:]] == [
        sys.modules["someones_own"].Values(factor) for factor in (0.5, 2.0)
    ]
    assert Protocol.from_dict(protocol.to_dict()).identity == protocol.identity
    run = Run(tmp_path / "run", protocol)
    assert generate.generate(run, show_progress=False) == {}
    made = hashes(run)
    assert len({tuple(found) for found in made.values()}) == len(made)


def test_a_pixart_pipeline_gets_its_images(tmp_path: Path) -> None:
    tiny_transformers.pixart(tmp_path / "parts").save_pretrained(tmp_path / "pixart")
    cells = runs.UNTOUCHED + '[[cells]]\nmethod = "elfatt-fast"\nblock_size = 4\nactive_fraction = 1\n'
    protocol = load_protocol(runs.write_protocol(tmp_path, tmp_path / "pixart", cells))
    run = Run(tmp_path / "run", protocol)
    with torch.random.fork_rng():
        assert generate.generate(run, show_progress=False) == {}
    untouched, _, fast = hashes(run).values()
    assert len(untouched) == len(fast) == 5
    assert not set(untouched) & set(fast)


@pytest.mark.parametrize("family", ["unet", "pixart"])
def test_they_go_through_every_stage(
    family: str, module: str, workplace: Path, shared_cache: None, in_process: None, tmp_path: Path
) -> None:
    """Timed, measured, scored, and in the report's table under their names."""
    model = workplace / "sd15"
    if family == "pixart":
        model = tmp_path / "pixart"
        tiny_transformers.pixart(tmp_path / "parts").save_pretrained(model)
    path = runs.write_protocol(tmp_path, model, runs.UNTOUCHED + OWN)
    run = Run(tmp_path / "run", load_protocol(path, runs.full_overrides(workplace)))
    assert stages.evaluate(run, lambda line: None, show_progress=False) == {}
    table = (tmp_path / "run" / "report" / "table.md").read_text()
    assert {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| own")} == {"0.5", "2"}
