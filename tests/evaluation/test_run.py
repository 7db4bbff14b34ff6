"""Protocols run to their end: the paper's own with small random networks, and those of diffusion transformers."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
import torch
from own_metrics import write_classifier, write_clip
from PIL import Image
from support import runs, tiny_transformers
from support import tiny_pipelines as tiny
from support.runs import row_of

from elfatt_sd.config import METHODS
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import generate, measure
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.images import check_size, load_protocol_pipeline, make_images
from elfatt_sd.evaluation.protocols import Protocol, load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.stages import evaluate, unequal, verify_run

UNTIMED = ("time.repeats=0", "memory.batches=[]")
TINY = ("dtype=float32", "device=cpu", "height=32", "width=32", "steps=2", "batch=2", "limit=2", *UNTIMED)


def results_of(folder: Path, protocol: Protocol, *reuse: Run) -> dict[str, Any]:
    """Run a protocol to its end, and return what `results.json` holds."""
    assert evaluate(Run(folder, protocol), lambda line: None, reuse=reuse, show_progress=False) == {}
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize("name", ["paper_table", "sdxl", "tome2023", "block_size", "early_steps"])
def test_protocols_run_to_the_end(name: str, workplace: Path, own_cache: Path, tmp_path: Path) -> None:
    """On the model of their kind, against a folder with a folder for each class, resized as they say."""
    model = workplace / "sd15"
    if name == "sdxl":
        model = tmp_path / "sdxl"
        tiny.sdxl(tmp_path).save_pretrained(model)
    for index, picture in enumerate(sorted((workplace / "val").iterdir())):
        (tmp_path / "val" / f"n{index % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, tmp_path / "val" / f"n{index % 2}")
    reference = [f"reference.source={tmp_path / 'val'}", "reference.count=12"]
    reference += ["reference.count=10", "reference.size=24"] if name == "tome2023" else []
    extractor = f'extractors=["clip:{workplace / "clip"}"]'
    protocol = load_protocol(name, [f"model={model}", extractor, *reference, *TINY])
    results = results_of(tmp_path / "run", protocol)
    rows = results["rows"]
    assert [row["label"] for row in rows] == [cell.label for cell in protocol.cells]
    for row in rows:
        assert (row["failed"], row["images"]) == (None, 2)
        start = f"FD-CLIP (ViT of width 32/8@32) ({protocol.reference.count} reference images"
        assert [figure["value"] > 0 for key, figure in row["distances"].items() if key.startswith(start)] == [True]
        assert (row["paired"] is None) == (row["role"] == "baseline")
    made = {cell.name: row_of(tmp_path / "run", cell).image_file(0).read_bytes() for cell in protocol.cells}
    unchanged = {cell.method for cell in protocol.cells if made[cell.name] == made["sd"]}
    assert unchanged <= {"sd", "elfatt-fast"}, "which samples 128 keys where there are no more"
    report = tmp_path / "run" / "report"
    assert (report / "table.csv").read_text().count("\n") >= len(rows)
    if name == "paper_table":
        assert len(rows) == 17 and "ELFATT-SD" in (report / "index.html").read_text()
        assert {row["label"] for row in rows} > {row["label"] for row in results["published"]["rows"]} - {""}


def test_two_processes_go_through_all_stages(finished_run: Path, workplace: Path, tmp_path: Path) -> None:
    """Under a launcher, with nothing replaced: the scores are those of one process, of which some rows are here."""
    protocol = runs.write_protocol(tmp_path, workplace / "sd15", runs.UNTOUCHED)
    command = [*runs.TWO_PROCESSES, str(runs.ROOT / "cli.py"), "eval", "run", str(protocol), "--out", tmp_path / "run"]
    for override in [*runs.full_overrides(workplace), "time.repeats=1", "memory.steps=1"]:
        command += ["--set", override]
    places = {"ELFATT_SD_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(runs.ROOT)}  # the reference is shared out
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **places}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    finished = [line.split(" in ")[0] for line in done.stderr.splitlines() if ": done in" in line]
    assert finished == [f"{stage}: done" for stage in ("score", "time", "memory", "report")]  # each of them once
    both, one = (json.loads((run / "scores.json").read_text()) for run in (tmp_path / "run", finished_run))
    assert list(unequal({name: one["rows"][name] for name in both["rows"]}, both["rows"])) == []
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())["rows"]
    assert [row["batches"] for row in memory.values()] == [[1, 2]] * 2
    assert (tmp_path / "run" / "report" / "index.html").is_file()


def test_the_same_images_with_other_settings_go_to_a_new_folder(
    finished_run: Path, full_protocol: Protocol, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the message says that refuses a folder of other settings; no image is made again."""
    changes: dict[str, Any] = {"extractors": (), "time": None, "memory": None, "cells": full_protocol.cells[:2]}
    protocol = dataclasses.replace(full_protocol, **changes)
    with pytest.raises(ElfattError, match=f"--reuse {finished_run}"):
        results_of(finished_run, protocol)
    monkeypatch.setattr(generate, "make_images", None)
    rows = results_of(tmp_path / "run", protocol, Run.open(finished_run))["rows"]
    assert [(row["distances"], row["images"]) for row in rows] == [({}, 5)] * 2 and rows[1]["paired"]
    for cell in protocol.cells:
        assert runs.tree(row_of(tmp_path / "run", cell).folder) == runs.tree(row_of(finished_run, cell).folder)


def test_the_toys_protocol_fills_every_row(own_cache: Path, in_process: None, tmp_path: Path) -> None:
    """`eval run eval/toy.toml` with everything in the package, at fewer images, steps and repeats."""
    few = ["limit=2", "steps=2", "height=64", "width=64", "device=cpu", "reference.count=8", "memory.batches=[1, 2]"]
    protocol = load_protocol("toy", [*few, "memory.steps=2", "time.repeats=1", "time.warmup=0"])
    assert {cell.method for cell in protocol.cells} == set(METHODS)
    rows = results_of(tmp_path / "run", protocol)["rows"]
    assert [row["label"] for row in rows] == [cell.label for cell in protocol.cells]
    for row in rows:
        assert (row["failed"], row["images"]) == (None, 2)
        assert {"FD-toy", "KD-toy"} == row["distances"].keys() and row["accuracy"]["mean"]["interval"]
        assert all(row["time"][scope]["seconds_per_image"] > 0 for scope in ("end_to_end", "unet"))
        assert row["memory"]["gib_per_image"] is not None
    assert (tmp_path / "run" / "report" / "index.html").is_file()


OWN = """
[[cells]]
label = "own"
method = "someones_own:Values"
factor = [0.5, 2.0]
"""


@pytest.mark.parametrize("family", ["unet", "pixart"])
def test_a_class_in_a_protocol_gets_a_row_for_each_setting(
    family: str, module: str, workplace: Path, shared_cache: None, tmp_path: Path
) -> None:
    """Scored, and in the report's table under their names."""
    model = workplace / "sd15"
    if family == "pixart":
        model = tmp_path / "pixart"
        tiny_transformers.pixart(tmp_path / "parts").save_pretrained(model)
    fast = '[[cells]]\nmethod = "elfatt-fast"\nblock_size = 4\nactive_fraction = 1\n'
    path = runs.write_protocol(tmp_path, model, runs.UNTOUCHED + OWN + fast)
    protocol = load_protocol(path, [*runs.full_overrides(workplace), *UNTIMED])
    assert [cell.name for cell in protocol.cells[2:4]] == [f"someones_own-Values-factor{each}" for each in (0.5, 2.0)]
    assert [cell.config().phases[0].attention for cell in protocol.cells[2:4]] == [
        sys.modules["someones_own"].Values(factor) for factor in (0.5, 2.0)
    ]
    assert Protocol.from_dict(protocol.to_dict()).identity == protocol.identity
    with torch.random.fork_rng():
        results_of(tmp_path / "run", protocol)
    rows = Run(tmp_path / "run", protocol).rows
    made = {tuple(made.sha256 for made in row.made_images()) for row in rows}
    assert len(made) == len(rows), "no method is without an effect"
    table = (tmp_path / "run" / "report" / "table.md").read_text()
    assert {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| own")} == {"0.5", "2"}


all_three = pytest.mark.skipif(
    not hasattr(diffusers, "QwenImagePipeline") or not hasattr(diffusers, "WanPipeline"),
    reason="this version of diffusers has not all three",
)


class Case(NamedTuple):
    """A protocol's model, how it is made, and its size."""

    write: Callable[[Path], Path]
    height: int
    width: int
    frames: int = 1


CASES = {
    "flux": Case(tiny_transformers.write_flux, 32, 32),
    "qwen_image": Case(tiny_transformers.write_qwen_image, 64, 64),
    "wan": Case(tiny_transformers.write_wan, 64, 48, 5),
}


def specification(name: str, model: Path, *overrides: str) -> Protocol:
    case = CASES[name]
    size = [f"height={case.height}", f"width={case.width}", f"frames={case.frames}"]
    quick = ["steps=5", "batch=2", "classes=4", "dtype=float32", "device=cpu", "time.repeats=1", "memory.steps=5"]
    return load_protocol(name, [f"model={model}", *size, *quick, "memory.batches=[1, 2]", *overrides])


class Finished(NamedTuple):
    """A run that went to its end, with the protocol's metrics by weights of tiny networks."""

    case: Case
    run: Run
    rows: dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=CASES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    alexnet, clip = write_classifier(folder / "alexnet.pth", "alexnet"), write_clip(folder / "clip")
    metrics = f'{{metric="clip-score", weights="{clip}"}}, {{metric="lpips", weights="{alexnet}"}}, '
    metrics += '{metric="own_metrics:brightness", better="higher"}'
    run = Run(folder / "run", specification(request.param, case.write(folder), f"metrics=[{metrics}]"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELFATT_SD_CACHE", str(folder / "cache"))
        patch.setattr(measure, "run_worker", measure.measure_peaks)
        return Finished(case, run, {row["cell"]: row for row in results_of(run.folder, run.protocol)["rows"]})


@all_three
def test_every_row_has_every_figure(finished: Finished) -> None:
    """In the results, and side by side on the page."""
    case, run, rows = finished
    scores = json.loads((run.folder / "scores.json").read_text())["rows"]
    assert [row.name for row in run.finished] == list(rows) == [cell.name for cell in run.protocol.cells]
    for name, row in rows.items():
        assert row["images"] == row["classes"] == 4 and row["distances"] == {}
        assert row["time"]["end_to_end"]["seconds_per_image"] > 0 and row["memory"]["peaks_gib"]
        assert len(row["metrics"]) == (2 if name == "sd" else 3)
        for metric, found in row["metrics"].items():
            assert found["interval"] is None, "four classes are too few"
            low, high = scores[name]["metrics"][metric]["interval"]
            assert low <= found["value"] <= high
            assert ("difference" in found) == (name != "sd" and not metric.startswith("LPIPS"))
        if name != "sd":
            psnr = row["paired"]["psnr"]
            assert psnr["identical"] + sum(value is not None for value in psnr["pictures"]) == 4, "one for each clip"
            assert len(row["paired"]["ssim"]["pictures"]) == 4
    cost = {name: row["cost"] for name, row in rows.items()}
    assert (
        cost["sd"]["density"] == cost["null"]["density"] == 1 and len({each["density"] for each in cost.values()}) > 2
    )
    assert all(each["reason"] is None and each["density"] > 0 for each in cost.values())
    assert cost["sd"]["multiply_adds"] == cost["null"]["multiply_adds"] > 0
    page = (run.folder / "report" / "index.html").read_text()
    found = re.findall(r'<button[^>]*data-index="0"[^>]*><img src="data:image/webp;base64,([^"]+)"', page)
    assert len(found) == len(rows) - 1, "all rows but the null row"
    for uri in found:
        with Image.open(io.BytesIO(base64.b64decode(uri))) as shown:
            assert shown.size == (case.width, case.height) and getattr(shown, "n_frames", 1) == case.frames
    assert "Further metrics" in page and "Attention density" in page


@all_three
def test_files_hold_what_the_pipeline_made(finished: Finished) -> None:
    """An image depends on its seed alone, and on guidance.

    Qwen-Image is guided only with a negative prompt; Flux is given the scale, if it was trained for that.
    """
    case, run, _ = finished
    pipe, texts = load_protocol_pipeline(run.protocol), [each.text for each in run.prompts[:2]]
    with torch.no_grad():
        made = make_images(pipe, run.protocol, texts, [0, 1])
        alone = make_images(pipe, run.protocol, texts[1:], [1])
        unguided = make_images(pipe, dataclasses.replace(run.protocol, guidance=1.0), texts[1:], [1])
    torch.testing.assert_close(made[1:], alone, rtol=0, atol=2e-3)
    assert not torch.equal(made[0], made[1])
    assert torch.equal(alone, unguided) == (run.protocol.name == "flux"), "whose model is not distilled here"
    made = made.reshape(2, case.frames, 3, case.height, case.width)
    images = Images.of_row(run.baseline, case.frames)
    stacks = torch.stack([stack for stack, _ in zip(images.stacks(), range(2), strict=False)])
    assert stacks.shape == made.shape and ((made * 255).round() - stacks).abs().max() <= 0.51
    if case.frames > 1:
        assert (stacks[:, 0] != stacks[:, -1]).any(), "the clip moves"


@all_three
def test_metrics_of_clips_are_means_over_frames_and_an_edited_one_is_found(
    finished: Finished, tmp_path: Path, own_cache: Path
) -> None:
    case, run, rows = finished
    mine, other = (torch.stack(list(Images.of_row(run.row(name), case.frames).stacks())) for name in ("agent", "sd"))
    expected = np.mean([stack.double().mean().item() for stack in mine])
    assert rows["agent"]["metrics"]["brightness"]["value"] == pytest.approx(expected)
    errors = (mine.double() - other.double()).square().flatten(1).mean(1)
    decibels = (10 * torch.log10(255**2 / errors)).tolist()
    kept = rows["agent"]["paired"]["psnr"]["pictures"]
    assert [value or math.inf for value in kept] == pytest.approx(decibels, abs=1e-5)
    path = Path(shutil.copytree(run.folder, tmp_path / "run")) / "scores.json"
    data = json.loads(path.read_text())
    data["rows"]["agent"]["metrics"]["brightness"]["value"] += 1
    path.write_text(json.dumps(data))
    scores, *others = verify_run(Run.open(tmp_path / "run"))
    assert "rows.agent.metrics.brightness.value" in scores and all("results.json" in line for line in others)


@all_three
@pytest.mark.parametrize(("name", "frames"), [("flux", 5), ("wan", 4)])
def test_frames_that_a_pipeline_does_not_make(tmp_path: Path, name: str, frames: int) -> None:
    protocol = specification(name, CASES[name].write(tmp_path), "metrics=[]", f"frames={frames}")
    with pytest.raises(ElfattError, match=f"frames={frames}"):
        check_size(protocol, load_protocol_pipeline(protocol))
