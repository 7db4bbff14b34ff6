"""The protocols of diffusion transformers, run to the end on tiny_transformers random models."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
import torch
from own_metrics import write_classifier, write_clip
from PIL import Image
from support import tiny_transformers

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import measure
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.images import check_size, load_protocol_pipeline, make_images
from elfatt_sd.evaluation.protocols import Protocol, load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.stages import evaluate
from elfatt_sd.evaluation.verify import verify_run

pytestmark = pytest.mark.skipif(
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
    assert rows["null"]["metrics"].keys() == rows["agent"]["metrics"].keys()


def test_density_and_multiply_adds(finished: Finished) -> None:
    cost = {name: row["cost"] for name, row in finished.rows.items()}
    assert cost["sd"]["density"] == cost["null"]["density"] == 1
    assert all(each["reason"] is None and each["density"] > 0 for each in cost.values())
    assert cost["sd"]["multiply_adds"] == cost["null"]["multiply_adds"] > 0
    assert len({each["density"] for each in cost.values()}) > 2


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


def test_an_image_depends_on_its_seed_alone(finished: Finished) -> None:
    _, run, _ = finished
    pipe, texts = load_protocol_pipeline(run.protocol), [each.text for each in run.prompts[:2]]
    with torch.no_grad():
        both = make_images(pipe, run.protocol, [texts[0]] * 2, [5, 6])
        alone = make_images(pipe, run.protocol, texts[:1], [6])
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=2e-3)
    assert not torch.equal(both[0], both[1])


def test_guidance_has_an_effect(finished: Finished) -> None:
    """Qwen-Image is guided only with a negative prompt; Flux is given the scale, if it was trained for that."""
    _, run, _ = finished
    if run.protocol.name == "flux":
        pytest.skip("the tiny_transformers model is not distilled")
    pipe = load_protocol_pipeline(run.protocol)
    other = dataclasses.replace(run.protocol, guidance=1.0)
    with torch.no_grad():
        made = [make_images(pipe, each, [run.prompts[0].text], [0]) for each in (run.protocol, other)]
    assert not torch.equal(*made)


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
    table = list(csv.DictReader(io.StringIO((run.folder / "report" / "table.csv").read_text())))
    lpips = next(key for key in table[0] if key.startswith("LPIPS") and key.endswith(")"))
    for line in table:
        expected = rows[line["cell"]]["metrics"].get(lpips, {}).get("value")
        assert line[lpips] == ("" if expected is None else str(expected))
        assert float(line["density"]) == rows[line["cell"]]["cost"]["density"]


def test_verify_and_a_second_call(finished: Finished, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(folder / "cache"))
    assert verify_run(finished.run) == []
    lines: list[str] = []
    assert evaluate(finished.run, lines.append, show_progress=False) == {}
    assert {"score: done before", "time: done before", "memory: done before", "report: done before"} <= set(lines)


def test_an_edited_metric_is_found(finished: Finished, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.run.folder, tmp_path / "run")
    path = tmp_path / "run" / "scores.json"
    data = json.loads(path.read_text())
    data["rows"]["agent"]["metrics"]["brightness"]["value"] += 1
    path.write_text(json.dumps(data))
    problems = verify_run(Run.open(tmp_path / "run"))
    assert any("rows.agent.metrics.brightness.value" in problem for problem in problems)


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


@pytest.mark.parametrize(("name", "frames"), [("flux", 5), ("wan", 4)])
def test_frames_that_a_pipeline_does_not_make(folder: Path, tmp_path: Path, name: str, frames: int) -> None:
    protocol = specification(name, CASES[name].write(tmp_path), ["metrics=[]", f"frames={frames}"])
    with pytest.raises(ElfattError, match=f"frames={frames}"):
        check_size(protocol, load_protocol_pipeline(protocol))
