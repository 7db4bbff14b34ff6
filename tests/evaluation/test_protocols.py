"""Protocols and their prompts: what is read, what is refused by name, what makes two runs the same; whole runs."""

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

import diffusers
import pytest
import torch
from own_metrics import write_classifier, write_clip
from PIL import Image
from support import runs, tiny_transformers
from support import tiny_pipelines as tiny

from elfatt_sd.config import METHODS, PRESETS
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.generate import check_size, image_environment, load_protocol_pipeline
from elfatt_sd.evaluation.prompts import PROMPT_LISTS, PromptFile, load_labels, read_prompts, run_prompts, spread
from elfatt_sd.evaluation.protocols import NULL_SEED_OFFSET, Protocol, decisive, differences, load_protocol
from elfatt_sd.evaluation.records import same_images
from elfatt_sd.evaluation.run import RunFolder
from elfatt_sd.evaluation.stages import evaluate
from elfatt_sd.files import sha256_of_data
from elfatt_sd.toy.renderer import CLASS_PROMPTS


def load(folder: Path, *overrides: str, cells: str = runs.CELLS) -> Protocol:
    return runs.small_protocol(folder, Path("model"), *overrides, cells=cells)


def through_json(protocol: Protocol) -> Protocol:
    return Protocol.from_dict(json.loads(json.dumps(protocol.to_dict())))


def test_printed_rows_are_those_of_the_paper() -> None:
    protocol = load_protocol("paper_table")
    assert load_protocol("toy_full").published == protocol.published
    printed = {(row["label"], row.get("ratio")) for row in protocol.published["rows"]}
    assert printed == {(cell.label, cell.settings.get("ratio")) for cell in protocol.cells if cell.role != "null"}
    protocol = load_protocol("block_size")
    sizes = [cell.settings["block_size"] for cell in protocol.cells if cell.method == "elfatt"]
    assert [row["block_size"] for row in protocol.to_dict()["published"]["rows"]] == sizes


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
    protocol = load(tmp_path, cells=runs.CELLS + LISTS + '[[cells]]\nname = "again"\nmethod = "sd"\nrole = "null"\n')
    assert [cell.seed_offset for cell in protocol.cells] == [0, NULL_SEED_OFFSET, *[0] * 14, 2 * NULL_SEED_OFFSET]
    assert [cell.name for cell in protocol.cells[4:12]] == [
        *(f"elfatt-ratio{ratio}-block_size{size}" for ratio in (0.1, 0.2) for size in (32, 64)),
        *(f"late-levels2-until{until}-block_size{size}" for until in (0.1, 0.2) for size in (32, 56)),
    ]
    for cell in protocol.cells[8:12]:
        first, second = cell.config().phases
        assert first.exact and not second.exact and cell.config().levels == 2
        assert cell.swept == {"until": first.until, "block_size": second.block_size}
        assert cell.shown == {"levels": 2, **cell.swept}
    twice = protocol.cells[12:16]
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
        "time.repeats=few": ("time.repeats='few'", "expected `int`"),
        "guidance=nan": ("guidance=nan", "expected `float` >= 0.0"),
        "height=33": ("height=33", "multiple of 8"),
        "template=no label": ("template='no label'", "{label}"),
        "memory.batches=[2]": ("[2]", "two or more"),
        "steps": ("'steps'", "key=value"),
        "name=../../x": ("name='../../x'", "letters, digits, _ and -"),
        "reference.size=8": ("size=8 with resize='none'", "both, or neither"),
        "reference.filter=mitchell": ("mitchell", "lanczos"),
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
        'phases = ["all"]': ("phases", "expected `object"),
        "phases = [{ until = 1.0 }]\nswept = { until = 1.0 }": ("'swept'", "phases"),
        'method = "sd"\nrole = "null"\nname = "same"\nseed_offset = 9': ("'seed_offset'", "peer_settings"),
    },
    "line": {
        "steps = " + "9" * 5000: ("not valid TOML",),
        "a = " + "[" * 5000: ("not valid TOML",),
        "steps = = 3": ("small.toml is not valid TOML",),
        "time = 'often'": ("time='often'", "expected `object"),
        "memory.batches = 4": ("memory.batches=4", "expected `array`"),
    },
}


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for kind, text in [(kind, text) for kind, table in WRONG.items() for text in table]:
        cells = f"{runs.CELLS}\n[[cells]]\n{text}\n" if kind == "cell" else runs.CELLS
        path = runs.write_protocol(tmp_path, Path("model"), cells)
        if kind == "line":
            lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{text.split()[0]} =")]
            path.write_text("\n".join([text, *lines]))
        with pytest.raises(ElfattError) as error:
            load_protocol(path, [text] if kind == "override" else [], 2 if kind == "line" else None)
        said = str(error.value)
        assert "\n" not in said and [part for part in WRONG[kind][text] if part not in said] == [], said
    with pytest.raises(ElfattError, match=r"'nonsense' does not exist.*paper_table"):
        load_protocol("nonsense")
    with pytest.raises(ElfattError, match="0 cells of role 'baseline'"):
        load(tmp_path, cells='[[cells]]\nmethod = "tome"\n')


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def test_labels_of_imagenet_of_the_toy_and_of_files(tmp_path: Path) -> None:
    names = load_labels("imagenet1k")
    assert len({name.lower() for name in names}) == len(names) == 1000
    chosen = [names[place] for place in (0, 134, 517, 999)]
    assert chosen == ["tench", "crane bird", "construction crane", "toilet tissue"]
    assert {"maillot", "crane", "sunglass", "Cardigan"}.isdisjoint(names)
    assert load_labels("toy") == list(CLASS_PROMPTS)
    assert load_labels(write(tmp_path, "labels.txt", "a cat\n\n  a dog \n")) == ["a cat", "a dog"]
    assert load_labels(write(tmp_path, "labels.csv", '\ufeffwnid,name\nn1,"lynx, spotted"\n')) == ["lynx, spotted"]
    texts = [each.text for each in run_prompts(load(tmp_path, "template=an {label}."))]
    assert texts == [f"an {label}." for label in runs.LABELS]
    for template, reason in (("{lable}", "'lable'"), ("{label", "not accepted"), ("{}", "Replacement index 0")):
        with pytest.raises(ElfattError, match=reason):
            run_prompts(load(tmp_path, f"template={{label}} {template}"))


def test_prompts_of_lines_and_tables(tmp_path: Path) -> None:
    """A prompt may hold other marks that end lines; forms of one character make no other cluster."""
    lines = '\ufeffa cat\r\n\r\n  two\u2028dogs, a "b" \nA  cat\na cafe\u0301\na caf\u00e9\na cafe'
    found = read_prompts(PromptFile(write(tmp_path, "p.txt", lines)))
    assert found[:3] == [(0, "a cat"), (1, 'two\u2028dogs, a "b"'), (0, "A  cat")]
    assert [cluster for cluster, _ in found[3:]] == [2, 2, 3]
    rows = 'Category,Prompts\nbirds,"an owl,\nat night"\ncats,a lynx\nbirds,a wren\n'
    source = PromptFile(write(tmp_path, "drawbench.csv", rows), cluster="Category")
    assert read_prompts(source) == [(0, "an owl,\nat night"), (1, "a lynx"), (0, "a wren")]
    tabs = write(tmp_path, "parti.tsv", "Prompt\tNote\tlong\na cat\tx\ta small cat\n")
    assert read_prompts(PromptFile(tabs)) == [(0, "a cat")]
    assert read_prompts(PromptFile(tabs, column="long")) == [(0, "a small cat")]
    for name in PROMPT_LISTS:
        listed = read_prompts(PromptFile(name))
        assert len({cluster for cluster, _ in listed}) == len(listed) >= 30, "enough for verdicts"
        assert len({cluster for cluster, _ in read_prompts(PromptFile(name, cluster="category"))}) < len(listed)


LABELS: list[tuple[str, str | bytes, str]] = [
    ("blank.txt", "\n  \n", "empty"),
    ("twice.txt", "cat\ncat\n", "'cat' twice"),
    ("column.csv", "title\ncat\n", "no column 'name', but title"),
    ("", "", "accepted: imagenet1k, toy"),
]
FILES: list[tuple[str, str | bytes, dict[str, str], str]] = [
    ("a.txt", " \n\n", {}, "is empty"),
    ("a.txt", "é".encode("latin-1"), {}, "UTF-8"),
    ("a.txt", "a cat\n".encode("utf-16-le"), {}, "NUL"),
    ("a.txt", "a\n", {"cluster": "x"}, "has no column 'x', but prompt"),
    ("a.csv", "", {}, "is empty"),
    ("a.csv", "title\na\n", {}, "has no column 'prompt', but title"),
    ("a.csv", "prompt,kind\na\n", {"cluster": "kind"}, "line 2 has nothing in column 'kind'"),
    ("a.csv", "prompt,kind\n,x\n", {}, "line 2 has nothing in column 'prompt'"),
    ("a.csv", "prompt\na,b\n", {}, "line 2 has more fields"),
    ("a.csv", 'prompt\n"a"b\n', {}, "damaged"),
    ("a.jsonl", '{"prompt": "a"}\n', {}, "is JSON, which is not read; give a text file, .csv or .tsv"),
    ("", "", {}, "No such file"),
]


def test_labels_and_prompts_that_are_refused(tmp_path: Path) -> None:
    for name, content, reason in LABELS:
        with pytest.raises(ElfattError, match=reason):
            load_labels(write(tmp_path, name, content) if name else "imagenet22k")
    for name, content, options, reason in FILES:
        with pytest.raises(ElfattError, match=reason) as raised:
            read_prompts(PromptFile(write(tmp_path, name, content) if name else "absent.txt", **options))
        assert "\n" not in str(raised.value)


def test_prompts_and_clusters_are_part_of_the_run(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, "prompts.csv", "prompt,kind\nan owl,bird\na wren,bird\na lynx,cat\na puma,cat\n")

    def of_file(*more: str) -> Protocol:
        return runs.small_protocol(tmp_path, model, f"prompts.file={file}", *more)

    plain, clustered = of_file(), of_file("prompts.cluster=kind")
    found = run_prompts(of_file("prompts.cluster=kind", "images_per_class=2", "classes=3"))
    assert [each.index for each in found] == list(range(6))
    assert [each.text for each in found[::2]] == [each.text for each in found[1::2]]
    assert {each.class_index for each in found} == {0, 1}
    assert [each.class_index for each in run_prompts(plain)] == [0, 1, 2, 3]
    assert len(run_prompts(of_file("limit=2"))) == 2
    assert plain.identity != clustered.identity
    assert Protocol.from_dict(plain.to_dict()) == plain
    pipe = load_protocol_pipeline(plain)
    before, other = image_environment(plain, pipe), image_environment(clustered, pipe)
    Path(file).write_text(Path(file).read_text().replace("lynx", "bobcat"))
    after = image_environment(plain, pipe)
    for now in (other, after):
        assert any("prompts_sha256" in line for line in same_images(before, now, plain.cells))


def test_spread_is_even_and_not_in_step_with_the_list() -> None:
    values = list(range(1792))
    chosen = spread(values, 256)
    assert chosen == spread(values, 256)
    assert [value // 7 for value in chosen] == list(range(256))
    assert len({value % 7 for value in chosen}) == 7
    assert spread(values, 0) == spread(values, 5000) == values


TINY = ("dtype=float32", "device=cpu", "batch=2", "limit=2")
WRITERS: dict[str, tuple[str, Callable[[Path], Path]]] = {  # of models that not every version of diffusers has
    "flux": ("FluxPipeline", tiny_transformers.write_flux),
    "qwen_image": ("QwenImagePipeline", tiny_transformers.write_qwen_image),
    "wan": ("WanPipeline", tiny_transformers.write_wan),
}
SIDES = {"toy": 64, "qwen_image": 64}
EXACT = {"toy": ["elfatt-quality"], "flux": ["elfatt-quality"], "qwen_image": ["elfatt", "elfatt-quality"]}
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
@pytest.mark.parametrize("name", ["toy", "sdxl", "tome2023", "flux", "qwen_image", "own"])
def test_protocols_run_to_the_end(name: str, workplace: Path, tmp_path: Path) -> None:
    """On a model of their kind, against a folder with a folder for each class, resized as they say."""
    protocol = with_model(name, tmp_path, workplace, "time.repeats=0", "memory.batches=[]")
    run = RunFolder(tmp_path / "run", protocol)
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
    if name in WRITERS:
        with pytest.raises(ElfattError, match="frames=5"):
            check_size(dataclasses.replace(protocol, frames=5), load_protocol_pipeline(protocol))


def test_clips_have_figures_and_are_shown(workplace: Path, own_cache: Path, in_process: None, tmp_path: Path) -> None:
    """Metrics are means over frames, and the page shows clips side by side."""
    alexnet, clip = write_classifier(tmp_path / "alexnet.pth", "alexnet"), write_clip(tmp_path / "clip")
    metrics = f'{{metric="clip-score", weights="{clip}"}}, {{metric="lpips", weights="{alexnet}"}}, '
    metrics += '{metric="own_metrics:brightness", better="higher"}'
    quick = ["height=64", "width=48", "frames=5", "limit=0", "classes=4", "time.repeats=1"]
    quick += ["memory.steps=2", "memory.batches=[1, 2]", f"metrics=[{metrics}]"]
    run = RunFolder(tmp_path / "run", with_model("wan", tmp_path, workplace, *quick))
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
        assert (row["cost"]["density"] == 1) == (name in ("sd", "null"))
    mine, other = (torch.stack(list(Images.of_row(run.row(name), 5).stacks())) for name in ("agent", "sd"))
    assert (other[:, 0] != other[:, -1]).any(), "the clip moves"
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
        check_size(dataclasses.replace(run.protocol, frames=4), load_protocol_pipeline(run.protocol))
