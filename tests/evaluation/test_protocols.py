"""Protocols: what is accepted, what is refused by name, what makes two runs the same; and those of `eval/` to the end.

The latter with small random networks.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from own_metrics import write_classifier, write_clip
from PIL import Image
from support import runs, tiny_transformers
from support import tiny_pipelines as tiny

from elfatt_sd.attention.ordering import partition
from elfatt_sd.config import METHODS, PRESETS
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.images import check_size, load_protocol_pipeline, make_images
from elfatt_sd.evaluation.protocols import NULL_SEED_OFFSET, Protocol, decisive, differences, load_protocol
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.stages import evaluate
from elfatt_sd.files import sha256_of_data

SHIPPED = sorted((runs.ROOT / "eval").glob("*.toml"))


def load(folder: Path, *overrides: str, cells: str = runs.CELLS) -> Protocol:
    return runs.small_protocol(folder, Path("model"), *overrides, cells=cells)


def through_json(protocol: Protocol) -> Protocol:
    return Protocol.from_dict(json.loads(json.dumps(protocol.to_dict())))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_protocols_load_and_survive_json(path: Path) -> None:
    protocol = load_protocol(path)
    assert protocol.name == path.stem and protocol.description
    again = through_json(protocol)
    assert (again, again.identity) == (protocol, protocol.identity)


def test_rows_and_block_sizes_are_those_of_the_paper() -> None:
    """Its sizes 32, 56, 81, 128, 227 and 512 are floor(2048 / k^2) of k^2 blocks."""
    protocol = load_protocol("block_size")
    sizes = [cell.settings["block_size"] for cell in protocol.cells if cell.method == "elfatt"]
    assert [partition(2048, size)[0] for size in sizes] == [64, 36, 25, 16, 9, 4]
    assert [row["block_size"] for row in protocol.to_dict()["published"]["rows"]] == sizes
    protocol = load_protocol("paper_table")
    assert load_protocol("toy_full").published == protocol.published
    printed = {(row["label"], row.get("ratio")) for row in protocol.published["rows"]}
    assert printed == {(cell.label, cell.settings.get("ratio")) for cell in protocol.cells if cell.role != "null"}
    assert len(printed) == 16 and {ratio for _, ratio in printed} == {None, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert (protocol.steps, protocol.guidance, protocol.images_per_class, protocol.batch) == (50, 7.5, 2, 48)


LISTS = """
[[cells]]
method = "elfatt"
ratio = [0.1, 0.2]
block_size = [32, 64]

[[cells]]
name = "late"
label = "blocks in the last part"
phases = [{ until = [0.1, 0.2] }, { until = 1.0, attention = "block", block_size = [32, 56], ratio = 0.3 }]
levels = 2

[[cells]]
name = "twice"
label = "the same setting of two phases"
phases = [
    { until = 0.5, attention = "block", block_size = [32, 56] },
    { until = 1.0, attention = "block", block_size = [32, 56] },
]
"""


def test_lists_of_values_become_rows(tmp_path: Path) -> None:
    """Of settings and of phases, whose exact ones stay exact; the null row has other seeds."""
    protocol = load(tmp_path, cells=runs.CELLS + LISTS)
    assert [cell.seed_offset for cell in protocol.cells] == [0, NULL_SEED_OFFSET, *[0] * 14]
    sizes, late, twice = protocol.cells[4:8], protocol.cells[8:12], protocol.cells[12:]
    assert [cell.name for cell in sizes] == [
        f"elfatt-ratio{ratio}-block_size{size}" for ratio in (0.1, 0.2) for size in (32, 64)
    ]
    assert [cell.name for cell in late] == [
        f"late-levels2-until{until}-block_size{size}" for until in (0.1, 0.2) for size in (32, 56)
    ]
    for cell in late:
        first, second = cell.config().phases
        assert first.exact and not second.exact and cell.config().levels == 2
        assert cell.swept == {"until": first.until, "block_size": second.block_size}
        assert cell.shown == {"levels": 2, **cell.swept}
    assert [[*cell.swept.items()] for cell in twice] == [
        [("phase1_block_size", first), ("phase2_block_size", second)] for first in (32, 56) for second in (32, 56)
    ]
    assert len({cell.config() for cell in twice}) == 4
    assert through_json(protocol).identity == protocol.identity


def test_what_changes_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load(tmp_path)
    changed = load(tmp_path, "steps=9", "time.repeats=3", "template=a photo of a {label}", "reference.source=/data/val")
    assert (changed.steps, changed.template, changed.reference.source) == (9, "a photo of a {label}", "/data/val")
    assert changed.time is not None and changed.time.repeats == 3
    listed = differences(plain.to_dict(), changed.to_dict())
    assert "steps: 4 there, 9 here" in listed and "reference.source:  there, /data/val here" in listed
    for override in ("steps=9", "reference.count=7", "variant=fp16"):
        assert load(tmp_path, override).identity != plain.identity, override
    # words, what the metric's name says, and what measures nothing
    for override in ("description=other words", "reference.allow_count=true", "time.repeats=0", "memory.batches=[]"):
        assert load(tmp_path, override).identity == plain.identity, override
    older = {key: value for key, value in plain.to_dict().items() if key != "variant"}
    assert sha256_of_data(decisive(older)) == plain.identity == Protocol.from_dict(older).identity
    cells = runs.CELLS.replace("agents = 8\n", "")
    plain = load(tmp_path, cells=cells)
    data, identity, preset = plain.to_dict(), plain.identity, PRESETS["elfatt"]
    phases = (preset.phases[0].with_settings({"agents": 65}), *preset.phases[1:])
    monkeypatch.setitem(PRESETS, "elfatt", dataclasses.replace(preset, phases=phases))
    now = load(tmp_path, cells=cells)
    assert now.identity != identity, "what presets resolve to counts"
    assert any("agents" in line for line in differences(data, now.to_dict()))


def test_a_limit_is_a_quick_look_at_time_and_memory_too(tmp_path: Path) -> None:
    defaults = runs.write_protocol(tmp_path, Path("model"), f"{runs.CELLS}\n[time]\n[memory]\n")
    for name, batch, batches in (("toy", 1, (1, 2)), ("paper_table", 2, None), (defaults, 2, (1, 2))):
        quick = load_protocol(name, limit=2)
        assert quick.time is not None and quick.memory is not None
        assert (quick.limit, quick.time.repeats, quick.time.batch, quick.memory.steps) == (2, 2, batch, 2)
        assert quick.memory.batches == batches if batches else len(quick.memory.batches) == 2
    asked = load_protocol("toy", ["time.repeats=7", "memory.batches=[]"], limit=2)
    assert asked.time is not None and (asked.time.repeats, asked.memory) == (7, None)


WRONG: dict[str, dict[str, tuple[str, ...]]] = {  # what is wrong, and what the message says
    "override": {
        "stepz=3": ("'stepz'", "steps"),
        "time.repeat=3": ("'time.repeat'", "repeats"),
        "time.repeats=few": ("time.repeats='few'", "whole number"),
        "guidance=nan": ("guidance=nan", "a number of at least 0"),
        "height=33": ("height=33", "multiple of 8"),
        "template=no label": ("template='no label'", "{label}"),
        "template=\udcff{label}": ("UTF-8",),
        "memory.batches=[2]": ("[2]", "two or more"),
        "steps": ("'steps'", "key=value"),
        "cells=[]": ("'cells=[]'", "rows are changed in the protocol's file"),
        "name=../../x": ("name='../../x'", "letters, digits, _ and -"),
    },
    "cell": {
        'method = "elfat"': ("elfat", "tome"),
        'method = "tome"\nration = 0.5': ("'ration'", "ratio"),
        'method = "tome"\nratio = []': ("ratio=[]", "at least one"),
        'method = "tome"\nrole = "null"': ("'null'", "untouched"),
        'method = "sd"': ("'method'", "untouched"),
        'method = "sd"\nrole = "baseline"\nname = "second"': ("2 cells", "exactly one"),
        'method = "tome"\npeer = "turbo"': ("turbo", "tomesd"),
        'method = "tome"\npeer = "tgate"': ("tome", "tgate", "takes the patch's place"),
        'peer = "deepcache"\npeer_settings = { interval = 2 }': ("interval", "cache_interval"),
        'method = "tome"\npeer_settings = { cache_interval = 2 }': ("peer_settings", "together with a peer"),
        'peer = "deepcache"\nrole = "baseline"\nname = "second"': ("baseline",),
        'method = "tome"\nname = "TOMESD-ratio0.5"': ("given twice",),  # one folder on some systems
        'method = "tome"\nname = "../out"': ("../out", "letters"),
        "phases = [{ untill = 1.0 }]": ("untill'", "until"),
        "phases = [{ until = [] }]": ("until=[]", "at least one"),
        'phases = ["all"]': ("phases", "a table"),
        "phases = [{ until = 1.0 }]\nswept = { until = 1.0 }": ("'swept'", "phases"),
        'method = "tome"\nseed_offset = 9': ("seed_offset=9", "0 for all others"),
        'method = "sd"\nrole = "null"\nname = "same"\nseed_offset = 0': ("seed_offset=0", "number of images"),
    },
    "line": {
        "steps = " + "9" * 5000: ("not valid TOML",),
        "a = " + "[" * 5000: ("not valid TOML",),
        "steps = = 3": ("small.toml is not valid TOML",),
        "published.rows = [{ label = 'a', FID = inf }]": ("finite numbers",),
        "time = 'often'": ("time='often'", "a table"),
        "memory.batches = 4": ("memory.batches=4", "a list"),
        "published.sorce = 'tabSD'": ("key 'published.sorce' is not known; accepted: source, rows",),
        "published.rows = [{ labl = 'SD' }]": ("each with a label",),
        "published.rows = [{ label = 'SD', fid = 31 }]": ("key 'published.rows[SD].fid' is not known", "label, FID"),
    },
}


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, table in WRONG.items() for text in table], ids=lambda text: text[:60]
)
def test_what_is_wrong_is_named(tmp_path: Path, kind: str, text: str) -> None:
    cells = f"{runs.CELLS}\n[[cells]]\n{text}\n" if kind == "cell" else runs.CELLS
    path = runs.write_protocol(tmp_path, Path("model"), cells)
    if kind == "line":
        key = text.partition(" ")[0]
        lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
        path.write_text("\n".join([text, *lines]))
    with pytest.raises(ElfattError) as error:
        load_protocol(path, [text] if kind == "override" else [], 2 if kind == "line" else None)
    assert "\n" not in str(error.value)
    assert [part for part in WRONG[kind][text] if part not in str(error.value)] == [], error.value


def test_a_missing_file_or_baseline_is_named(tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=r"'nonsense' does not exist.*paper_table"):
        load_protocol("nonsense")
    with pytest.raises(ElfattError, match="0 cells of role 'baseline'"):
        load(tmp_path, cells='[[cells]]\nmethod = "tome"\n')


UNTIMED = ("time.repeats=0", "memory.batches=[]")
TINY = ("dtype=float32", "device=cpu", "batch=2", "limit=2")
WRITERS: dict[str, tuple[str, Callable[[Path], Path]]] = {  # of models that not every version of diffusers has
    "flux": ("FluxPipeline", tiny_transformers.write_flux),
    "qwen_image": ("QwenImagePipeline", tiny_transformers.write_qwen_image),
    "wan": ("WanPipeline", tiny_transformers.write_wan),
}
SIDES = {"toy": 64, "qwen_image": 64}
EXACT = {"toy": ["elfatt-quality"], "qwen_image": ["elfatt", "elfatt-quality"]}
OWN = """
[[cells]]
label = "own"
method = "someones_own:Values"
factor = [0.5, 2.0]

[[cells]]
method = "elfatt-fast"
block_size = 4
active_fraction = 1
"""


def with_model(name: str, folder: Path, workplace: Path, *overrides: str) -> Protocol:
    """A protocol of `eval/` with a small model of its kind, or the small one with somebody's own method."""
    side = SIDES.get(name, 32)
    given = [*TINY, f"height={side}", f"width={side}", *overrides]
    if name == "toy":
        return load_protocol(name, [*given, "reference.count=8", "steps=2"])
    if name in WRITERS:
        pipeline, write = WRITERS[name]
        if not hasattr(diffusers, pipeline):
            pytest.skip(f"this version of diffusers has no {pipeline}")
        return load_protocol(name, [f"model={write(folder / 'model')}", "steps=5", "metrics=[]", *given])
    model = workplace / "sd15"
    if name == "sdxl":
        model = folder / "sdxl"
        tiny.sdxl(folder).save_pretrained(model)
    for index, picture in enumerate(sorted((workplace / "val").iterdir())):
        (folder / "val" / f"n{index % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, folder / "val" / f"n{index % 2}")
    given += [f"model={model}", "steps=2", f'extractors=["clip:{workplace / "clip"}"]', "reference.count=12"]
    given += [f"reference.source={folder / 'val'}"]
    given += ["reference.count=10", "reference.size=24"] if name == "tome2023" else []
    path = runs.write_protocol(folder, model, runs.UNTOUCHED + OWN) if name == "own" else name
    return load_protocol(path, given)


@pytest.mark.usefixtures("module", "own_cache")
@pytest.mark.parametrize("name", ["toy", "paper_table", "sdxl", "tome2023", "early_steps", "flux", "qwen_image", "own"])
def test_protocols_run_to_the_end(name: str, workplace: Path, tmp_path: Path) -> None:
    """On a model of their kind, against a folder with a folder for each class, resized as they say."""
    protocol = with_model(name, tmp_path, workplace, *UNTIMED)
    run = Run(tmp_path / "run", protocol)
    with torch.random.fork_rng():
        assert evaluate(run, lambda line: None, show_progress=False) == {}
    rows = json.loads((run.folder / "results.json").read_text())["rows"]
    assert [row["label"] for row in rows] == [cell.label for cell in protocol.cells]
    for row in rows:
        assert (row["failed"], row["images"]) == (None, 2)
        assert (row["paired"] is None) == (row["role"] == "baseline")
        assert len(row["distances"]) == 2 * len(protocol.extractors), "Frechet and kernel"
        assert all(figure["value"] > 0 for title, figure in row["distances"].items() if title.startswith("FD-"))
        counted = "toy" if name == "toy" else f"({protocol.reference.count} reference images"
        assert all(counted in title for title in row["distances"])
        assert name != "toy" or row["accuracy"]["mean"]["interval"]
    made = {row.name: row.image_file(0).read_bytes() for row in run.rows}
    unchanged = {cell.method for cell in protocol.cells if made[cell.name] == made["sd"]}
    # elfatt-fast samples 128 keys where there are no more; the others keep so few steps or tokens exact
    assert unchanged <= {"sd", "elfatt-fast", *EXACT.get(name, ())}
    table = (run.folder / "report" / "table.md").read_text()
    if name == "toy":
        assert {cell.method for cell in protocol.cells} == set(METHODS)
    if name == "own":
        names = [cell.name for cell in protocol.cells[2:4]]
        assert names == [f"someones_own-Values-factor{each}" for each in (0.5, 2.0)]
        assert through_json(protocol).identity == protocol.identity and len({*made.values()}) == len(made)
        assert {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| own")} == {"0.5", "2"}


def test_clips_have_every_figure_and_are_shown(
    workplace: Path, own_cache: Path, in_process: None, tmp_path: Path
) -> None:
    """Files hold what the pipeline made, metrics are means over frames, and the page shows clips side by side."""
    alexnet, clip = write_classifier(tmp_path / "alexnet.pth", "alexnet"), write_clip(tmp_path / "clip")
    metrics = f'{{metric="clip-score", weights="{clip}"}}, {{metric="lpips", weights="{alexnet}"}}, '
    metrics += '{metric="own_metrics:brightness", better="higher"}'
    quick = ["height=64", "width=48", "frames=5", "limit=0", "classes=4", "time.repeats=1"]
    quick += ["memory.steps=5", "memory.batches=[1, 2]", f"metrics=[{metrics}]"]
    run = Run(tmp_path / "run", with_model("wan", tmp_path, workplace, *quick))
    assert evaluate(run, lambda line: None, show_progress=False) == {}
    rows = {row["cell"]: row for row in json.loads((run.folder / "results.json").read_text())["rows"]}
    scores = json.loads((run.folder / "scores.json").read_text())["rows"]
    for name, row in rows.items():
        assert row["images"] == row["classes"] == 4 and row["distances"] == {}
        assert row["time"]["end_to_end"]["seconds_per_image"] > 0 and row["memory"]["peaks_gib"]
        assert len(row["metrics"]) == (2 if name == "sd" else 3)
        for metric, found in row["metrics"].items():
            low, high = scores[name]["metrics"][metric]["interval"]
            assert low <= found["value"] <= high and found["interval"] is None, "four classes are too few"
            assert ("difference" in found) == (name != "sd" and not metric.startswith("LPIPS"))
        assert row["cost"]["reason"] is None
        assert (row["cost"]["density"] == 1) == (name in ("sd", "null"))
    assert rows["sd"]["cost"]["multiply_adds"] == rows["null"]["cost"]["multiply_adds"] > 0

    mine, other = (torch.stack(list(Images.of_row(run.row(name), 5).stacks())) for name in ("agent", "sd"))
    pipe = load_protocol_pipeline(run.protocol)
    with torch.no_grad():
        made = make_images(pipe, run.protocol, [each.text for each in run.prompts[:2]], [0, 1])
    assert ((made.reshape(other[:2].shape) * 255).round() - other[:2]).abs().max() <= 0.51
    assert (other[:, 0] != other[:, -1]).any(), "the clip moves"
    expected = np.mean([stack.double().mean().item() for stack in mine])
    assert rows["agent"]["metrics"]["brightness"]["value"] == pytest.approx(expected)
    decibels = (10 * torch.log10(255**2 / (mine.double() - other.double()).square().flatten(1).mean(1))).tolist()
    kept = rows["agent"]["paired"]["psnr"]["pictures"]
    assert [value or math.inf for value in kept] == pytest.approx(decibels, abs=1e-5), "one for each clip"

    page = (run.folder / "report" / "index.html").read_text()
    shown = re.findall(r'<button[^>]*data-index="0"[^>]*><img src="data:image/webp;base64,([^"]+)"', page)
    assert len(shown) == len(rows) - 1, "all rows but the null row"
    for uri in shown:
        with Image.open(io.BytesIO(base64.b64decode(uri))) as picture:
            assert (picture.size, getattr(picture, "n_frames", 1)) == ((48, 64), 5)
    assert "Further metrics" in page and "Attention density" in page
    with pytest.raises(ElfattError, match="frames=4"):
        check_size(dataclasses.replace(run.protocol, frames=4), pipe)


@pytest.mark.parametrize("name", ["flux", "qwen_image"])
def test_an_image_depends_on_its_seed_and_on_guidance(name: str, workplace: Path, tmp_path: Path) -> None:
    """Qwen-Image is guided only with a negative prompt; Flux is given the scale, if it was trained for that."""
    protocol = with_model(name, tmp_path, workplace, *UNTIMED)
    pipe = load_protocol_pipeline(protocol)

    def images(seeds: list[int], **changes: Any) -> torch.Tensor:
        return make_images(pipe, dataclasses.replace(protocol, **changes), ["a cat", "a dog"][-len(seeds) :], seeds)

    with torch.no_grad():
        made, alone, unguided = images([0, 1]), images([1]), images([1], guidance=1.0)
    torch.testing.assert_close(made[1:], alone, rtol=0, atol=2e-3)
    assert not torch.equal(made[0], made[1])
    assert torch.equal(alone, unguided) == (name == "flux"), "whose model is not distilled here"
    with pytest.raises(ElfattError, match="frames=5"):
        check_size(dataclasses.replace(protocol, frames=5), pipe)
