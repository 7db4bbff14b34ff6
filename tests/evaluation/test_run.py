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
from elfatt_sd.evaluation import generate, measure, stages
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.images import check_size, load_protocol_pipeline, make_images
from elfatt_sd.evaluation.protocols import Protocol, load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.stages import evaluate
from elfatt_sd.evaluation.verify import unequal, verify_run
from elfatt_sd.files import sha256_of_file


def test_the_papers_table_runs_to_the_end(workplace: Path, own_cache: Path, tmp_path: Path) -> None:
    """`eval run eval/paper_table.toml` with its sizes overridden; what the toy's protocol measures is left out."""
    protocol = load_protocol(
        runs.ROOT / "eval" / "paper_table.toml",
        [
            f"model={workplace / 'sd15'}",
            f'extractors=["clip:{workplace / "clip"}"]',
            f"reference.source={workplace / 'val'}",
            "reference.count=12",
            *("dtype=float32", "device=cpu", "height=32", "width=32", "steps=2", "batch=4", "limit=2"),
            *("time.repeats=0", "memory.batches=[]"),
        ],
    )
    assert stages.evaluate(Run(tmp_path / "run", protocol), lambda line: None, show_progress=False) == {}
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["rows"]) == 17
    for row in results["rows"]:
        assert row["failed"] is None
        assert row["images"] == 2
        assert row["distances"]["FD-CLIP (ViT of width 32/8@32) (12 reference images)"]["value"] > 0
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
    protocol = dataclasses.replace(full_protocol, **changes, cells=full_protocol.cells[:2])
    with pytest.raises(ElfattError, match=f"--reuse {finished_run}"):
        stages.evaluate(Run(finished_run, protocol), lambda line: None, show_progress=False)
    monkeypatch.setattr(generate, "make_images", None)
    run_dir = tmp_path / "run"
    reuse = [Run.open(finished_run)]
    assert stages.evaluate(Run(run_dir, protocol), lambda line: None, reuse=reuse, show_progress=False) == {}
    for cell in protocol.cells:
        assert runs.tree(row_of(run_dir, cell).folder) == runs.tree(row_of(finished_run, cell).folder)
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


@pytest.mark.parametrize("family", ["unet", "pixart"])
def test_a_class_in_a_protocol_gets_a_row_for_each_setting(
    family: str, module: str, workplace: Path, shared_cache: None, in_process: None, tmp_path: Path
) -> None:
    """Timed, measured, scored, and in the report's table under their names."""
    model = workplace / "sd15"
    if family == "pixart":
        model = tmp_path / "pixart"
        tiny_transformers.pixart(tmp_path / "parts").save_pretrained(model)
    fast = '[[cells]]\nmethod = "elfatt-fast"\nblock_size = 4\nactive_fraction = 1\n'
    path = runs.write_protocol(tmp_path, model, runs.UNTOUCHED + OWN + fast)
    protocol = load_protocol(path, runs.full_overrides(workplace))
    assert [cell.name for cell in protocol.cells[2:4]] == [f"someones_own-Values-factor{each}" for each in (0.5, 2.0)]
    assert [cell.config().phases[0].attention for cell in protocol.cells[2:4]] == [
        sys.modules["someones_own"].Values(factor) for factor in (0.5, 2.0)
    ]
    assert Protocol.from_dict(protocol.to_dict()).identity == protocol.identity
    run = Run(tmp_path / "run", protocol)
    with torch.random.fork_rng():
        assert stages.evaluate(run, lambda line: None, show_progress=False) == {}
    made = {tuple(made.sha256 for made in row.made_images()) for row in run.rows}
    assert len(made) == len(run.rows), "no method is without an effect"
    table = (tmp_path / "run" / "report" / "table.md").read_text()
    assert {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| own")} == {"0.5", "2"}


all_three = pytest.mark.skipif(
    not hasattr(diffusers, "QwenImagePipeline") or not hasattr(diffusers, "WanPipeline"),
    reason="this version of diffusers has not all three",
)


class Case(NamedTuple):
    """A protocol, how its model is made, and its size."""

    write: Callable[[Path], Path]
    height: int
    width: int
    frames: int = 1


CASES = {
    "flux": Case(tiny_transformers.write_flux, 32, 32),
    "qwen_image": Case(tiny_transformers.write_qwen_image, 64, 64),
    "wan": Case(tiny_transformers.write_wan, 64, 48, 5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def weights(folder: Path) -> list[str]:
    """The protocols' metrics with tiny_transformers weights."""
    alexnet, clip = write_classifier(folder / "alexnet.pth", "alexnet"), write_clip(folder / "clip")
    given = [{"metric": "clip-score", "weights": str(clip)}, {"metric": "lpips", "weights": str(alexnet)}]
    given.append({"metric": "own_metrics:brightness", "better": "higher"})
    tables = ", ".join(
        "{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in each.items()) + "}" for each in given
    )
    return [f"metrics=[{tables}]"]


def specification(name: str, model: Path, overrides: list[str]) -> Protocol:
    case = CASES[name]
    size = [f"height={case.height}", f"width={case.width}", f"frames={case.frames}"]
    quick = ["steps=5", "batch=2", "classes=4", "dtype=float32", "device=cpu", "time.repeats=1", "memory.steps=5"]
    quick.append("memory.batches=[1, 2]")
    return load_protocol(name, [f"model={model}", *size, *quick, *overrides])


class Finished(NamedTuple):
    """A run that went to its end."""

    case: Case
    run: Run
    rows: dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=CASES)
def finished(request: pytest.FixtureRequest, folder: Path, weights: list[str]) -> Finished:
    case = CASES[request.param]
    run = Run(folder / f"run-{request.param}", specification(request.param, case.write(folder), weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELFATT_SD_CACHE", str(folder / "cache"))
        patch.setattr(measure, "run_worker", measure.measure_peaks)
        assert evaluate(run, lambda line: None, show_progress=False) == {}
    results = json.loads((run.folder / "results.json").read_text())
    return Finished(case, run, {row["cell"]: row for row in results["rows"]})


@all_three
def test_every_row_has_every_figure(finished: Finished) -> None:
    _, run, rows = finished
    scores = json.loads((run.folder / "scores.json").read_text())["rows"]
    assert [row.name for row in run.finished] == list(rows) == [cell.name for cell in run.protocol.cells]
    for name, row in rows.items():
        assert row["images"] == row["classes"] == 4
        assert row["distances"] == {}
        assert row["time"]["end_to_end"]["seconds_per_image"] > 0
        assert row["memory"]["peaks_gib"]
        metrics = row["metrics"]
        assert len(metrics) == (2 if name == "sd" else 3)
        for metric, found in metrics.items():
            assert found["interval"] is None, "four classes are too few"
            low, high = scores[name]["metrics"][metric]["interval"]
            assert low <= found["value"] <= high
            assert ("difference" in found) == (name != "sd" and not metric.startswith("LPIPS"))
        if name != "sd":
            psnr = row["paired"]["psnr"]
            assert psnr["identical"] + sum(value is not None for value in psnr["pictures"]) == 4, "one for each clip"
            assert len(row["paired"]["ssim"]["pictures"]) == 4
    cost = {name: row["cost"] for name, row in rows.items()}
    assert cost["sd"]["density"] == cost["null"]["density"] == 1
    assert all(each["reason"] is None and each["density"] > 0 for each in cost.values())
    assert cost["sd"]["multiply_adds"] == cost["null"]["multiply_adds"] > 0
    assert len({each["density"] for each in cost.values()}) > 2


@all_three
def test_files_hold_what_the_pipeline_made(finished: Finished) -> None:
    case, run, _ = finished
    images = Images.of_row(run.baseline, case.frames)
    pipe = load_protocol_pipeline(run.protocol)
    with torch.no_grad():
        made = make_images(pipe, run.protocol, [each.text for each in run.prompts[:2]], [0, 1])
    made = made.reshape(2, case.frames, 3, case.height, case.width)
    stacks = torch.stack([stack for stack, _ in zip(images.stacks(), range(2), strict=False)])
    assert stacks.shape == made.shape
    assert ((made * 255).round() - stacks).abs().max() <= 0.51
    if case.frames > 1:
        assert (stacks[:, 0] != stacks[:, -1]).any(), "the clip moves"


@all_three
def test_an_image_depends_on_its_seed_alone_and_on_guidance(finished: Finished) -> None:
    """Qwen-Image is guided only with a negative prompt; Flux is given the scale, if it was trained for that."""
    _, run, _ = finished
    pipe, texts = load_protocol_pipeline(run.protocol), [each.text for each in run.prompts[:2]]
    other = dataclasses.replace(run.protocol, guidance=1.0)
    with torch.no_grad():
        both = make_images(pipe, run.protocol, [texts[0]] * 2, [5, 6])
        alone, unguided = (make_images(pipe, each, texts[:1], [6]) for each in (run.protocol, other))
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=2e-3)
    assert not torch.equal(both[0], both[1])
    assert torch.equal(alone, unguided) == (run.protocol.name == "flux"), "whose model is not distilled here"


@all_three
def test_the_report_shows_images_and_clips(finished: Finished) -> None:
    case, run, rows = finished
    page = (run.folder / "report" / "index.html").read_text()
    found = re.findall(r'<button[^>]*data-index="0"[^>]*><img src="data:image/webp;base64,([^"]+)"', page)
    assert len(found) == len(rows) - 1, "all rows but the null row, side by side"
    for uri in found:
        with Image.open(io.BytesIO(base64.b64decode(uri))) as shown:
            assert shown.size == (case.width, case.height)
            assert getattr(shown, "n_frames", 1) == case.frames
    assert "Further metrics" in page and "Attention density" in page


@all_three
def test_a_second_call_does_nothing_and_an_edited_metric_is_found(
    finished: Finished, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(folder / "cache"))
    lines: list[str] = []
    assert evaluate(finished.run, lines.append, show_progress=False) == {}
    assert {"score: done before", "time: done before", "memory: done before", "report: done before"} <= set(lines)
    shutil.copytree(finished.run.folder, tmp_path / "run")
    path = tmp_path / "run" / "scores.json"
    data = json.loads(path.read_text())
    data["rows"]["agent"]["metrics"]["brightness"]["value"] += 1
    path.write_text(json.dumps(data))
    scores, *others = verify_run(Run.open(tmp_path / "run"))
    assert "rows.agent.metrics.brightness.value" in scores and all("results.json" in line for line in others)


@all_three
def test_metrics_of_clips_are_means_over_frames(finished: Finished) -> None:
    case, run, rows = finished
    images = Images.of_row(run.row("agent"), case.frames)
    expected = np.mean([stack.double().mean().item() for stack in images.stacks()])
    assert rows["agent"]["metrics"]["brightness"]["value"] == pytest.approx(expected)
    mine, other = (torch.stack(list(Images.of_row(run.row(name), case.frames).stacks())) for name in ("agent", "sd"))
    errors = (mine.double() - other.double()).square().flatten(1).mean(1)
    decibels = (10 * torch.log10(255**2 / errors)).tolist()
    kept = rows["agent"]["paired"]["psnr"]["pictures"]
    assert [value or math.inf for value in kept] == pytest.approx(decibels, abs=1e-5)


@all_three
@pytest.mark.parametrize(("name", "frames"), [("flux", 5), ("wan", 4)])
def test_frames_that_a_pipeline_does_not_make(folder: Path, tmp_path: Path, name: str, frames: int) -> None:
    protocol = specification(name, CASES[name].write(tmp_path), ["metrics=[]", f"frames={frames}"])
    with pytest.raises(ElfattError, match=f"frames={frames}"):
        check_size(protocol, load_protocol_pipeline(protocol))
