"""Protocols: what is accepted, what is refused by name, and what makes two runs the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support import runs

from elfatt_sd.attention.ordering import partition
from elfatt_sd.config import PRESETS
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import NULL_SEED_OFFSET, Protocol, decisive, differences, load_protocol
from elfatt_sd.files import sha256_of_data

SHIPPED = sorted((runs.ROOT / "eval").glob("*.toml"))


def load(folder: Path, *overrides: str, cells: str = runs.CELLS) -> Protocol:
    return runs.small_protocol(folder, Path("model"), *overrides, cells=cells)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_protocols_load_and_survive_json(path: Path) -> None:
    protocol = load_protocol(path)
    assert protocol.name == path.stem and protocol.description
    again = Protocol.from_dict(json.loads(json.dumps(protocol.to_dict())))
    assert (again, again.identity) == (protocol, protocol.identity)


def test_rows_and_block_sizes_are_those_of_the_paper() -> None:
    """Its sizes 32, 56, 81, 128, 227 and 512 are floor(2048 / k^2) of k^2 blocks."""
    protocol = load_protocol("block_size")
    sizes = [cell.settings["block_size"] for cell in protocol.cells if cell.method == "elfatt"]
    assert [partition(2048, size)[0] for size in sizes] == [64, 36, 25, 16, 9, 4]
    assert [row["block_size"] for row in protocol.to_dict()["published"]["rows"]] == sizes
    protocol = load_protocol("paper_table")
    for label in ("Agent-SD", "ELFATT-SD", "ToMe-SD"):
        assert [cell.settings["ratio"] for cell in protocol.cells if cell.label == label] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert load_protocol("toy_full").published == protocol.published
    printed = {(row["label"], row.get("ratio")) for row in protocol.published["rows"]}
    assert printed == {(cell.label, cell.settings.get("ratio")) for cell in protocol.cells if cell.role != "null"}
    assert (protocol.steps, protocol.guidance, protocol.images_per_class, protocol.batch) == (50, 7.5, 2, 48)


LATE = '[[cells]]\nname = "late"\nlabel = "blocks in the last part"\n'


def test_settings_with_several_values_become_rows(tmp_path: Path) -> None:
    """Of a method, and of a custom one, whose exact phases stay exact; the null row has other seeds."""
    custom = """
phases = [{ until = 0.2 }, { until = 0.6, attention = "block" }, { until = 1.0, attention = "elfatt" }]
block_size = [32, 56]
agents = [16, 64]
ratio = 0.3
levels = 2
"""
    methods = '[[cells]]\nmethod = "elfatt"\nratio = [0.1, 0.2]\nblock_size = [32, 64]\n'
    cells = load(tmp_path, cells=runs.CELLS + methods + LATE + custom).cells
    assert [cell.name for cell in cells[4:]] == [
        *(f"elfatt-ratio{ratio}-block_size{size}" for ratio in (0.1, 0.2) for size in (32, 64)),
        *(f"late-block_size{size}-agents{agents}-ratio0.3-levels2" for size in (32, 56) for agents in (16, 64)),
    ]
    assert [cell.seed_offset for cell in cells] == [0, NULL_SEED_OFFSET, *[0] * 10]
    for cell in cells[-4:]:
        first, *patched = cell.config().phases
        assert first.exact and cell.config().levels == 2
        assert {(phase.block_size, phase.ratio) for phase in patched} == {(cell.settings["block_size"], 0.3)}


def test_lists_inside_phases_become_rows(tmp_path: Path) -> None:
    phases = '[{ until = [0.1, 0.2] }, { until = 1.0, attention = "block", block_size = [32, 56], ratio = 0.3 }]'
    protocol = load(tmp_path, cells=f"{runs.CELLS}{LATE}phases = {phases}\nuse_rand = false\n")
    names = [f"late-use_randFalse-until{until}-block_size{size}" for until in (0.1, 0.2) for size in (32, 56)]
    assert [cell.name for cell in protocol.cells[-4:]] == names
    for cell in protocol.cells[-4:]:
        first, second = cell.config().phases
        assert cell.swept == {"until": first.until, "block_size": second.block_size}
        assert cell.shown == {"use_rand": False, **cell.swept}
    assert Protocol.from_dict(json.loads(json.dumps(protocol.to_dict()))).identity == protocol.identity
    blocks = 'attention = "block", block_size = [32, 56]'
    both = f"{LATE}phases = [{{ until = 0.5, {blocks} }}, {{ until = 1.0, {blocks} }}]\n"
    cells = load(tmp_path, cells=runs.CELLS + both).cells[-4:]
    assert [dict(cell.swept) for cell in cells] == [
        {"phase1_block_size": first, "phase2_block_size": second} for first in (32, 56) for second in (32, 56)
    ]
    assert len({cell.config() for cell in cells}) == 4


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
    kept = ("description=other words", "reference.allow_count=true", "time.repeats=0", "memory.batches=[]")
    for override in kept:
        assert load(tmp_path, override).identity == plain.identity, override
    without = load(tmp_path, "time.repeats=3", "memory.batches=[1, 2]", *kept[2:])
    assert (without.time, without.memory) == (None, None)
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


def test_a_limit_is_a_quick_look_at_time_and_memory_too() -> None:
    for name, limits in (("toy", (2, 2, 1, (1, 2), 2)), ("paper_table", (2, 2, 2, (1, 4), 2))):
        quick = load_protocol(name, limit=2)
        assert quick.time is not None and quick.memory is not None
        memory = quick.memory.batches if name == "toy" else limits[3]
        assert (quick.limit, quick.time.repeats, quick.time.batch, memory, quick.memory.steps) == limits
        assert len(quick.memory.batches) == 2
    asked = load_protocol("toy", ["time.repeats=7", "memory.batches=[]"], limit=2)
    assert asked.time is not None and (asked.time.repeats, asked.memory) == (7, None)


VALUES: dict[str, tuple[str, ...]] = {  # overrides, and what the message says
    "stepz=3": ("'stepz'", "steps"),
    "time.repeat=3": ("'time.repeat'", "repeats"),
    "time.repeats=few": ("time.repeats='few'", "whole number"),
    "steps=true": ("steps=True", "whole number"),
    "steps=0": ("steps=0", "at least 1"),
    "guidance=x": ("guidance='x'", "a number"),
    "guidance=nan": ("guidance=nan", "a number of at least 0"),
    "guidance=inf": ("guidance=inf", "a number"),
    "seed=9223372036854775808": ("seed=9223372036854775808", "at most 9223372036854775807"),
    "height=33": ("height=33", "multiple of 8"),
    "extractors=toy": ("extractors='toy'", "a list"),
    "extractors=[1]": ("extractors[0]=1", "text"),
    "template=no label": ("template='no label'", "{label}"),
    "template=\udcff{label}": ("UTF-8",),
    "time.scopes=['all']": ("all", "end_to_end, unet"),
    "memory.batches=[2]": ("[2]", "two or more"),
    "time=3": ("time=3", "a table"),
    "steps": ("'steps'", "key=value"),
    "cells=[]": ("'cells=[]'", "rows are changed in the protocol's file"),
    "name=aux": ("name='aux'", "letters, digits"),
    "name=../../x": ("name='../../x'", "letters, digits, _ and -"),
}
ROWS: dict[str, tuple[str, ...]] = {  # a cell more
    'method = "elfat"': ("elfat", "tome"),
    'method = "tome"\nratio = 1.5': ("ratio=1.5", "less than 1"),
    'method = "tome"\nration = 0.5': ("'ration'", "ratio"),
    'method = "tome"\nratio = []': ("ratio=[]", "at least one"),
    'method = "tome"\nrole = "control"': ("'control'", "baseline, null, method"),
    'method = "tome"\nrole = "null"': ("'null'", "untouched"),
    'method = "sd"': ("'method'", "untouched"),
    'method = "sd"\nrole = "baseline"\nname = "second"': ("2 cells", "exactly one"),
    'method = "tome"\npeer = "turbo"': ("turbo", "tomesd"),
    'method = "tome"\npeer = "tgate"': ("tome", "tgate", "takes the patch's place"),
    'peer = "deepcache"\npeer_settings = { interval = 2 }': ("interval", "cache_interval"),
    'method = "tome"\npeer_settings = { cache_interval = 2 }': ("peer_settings", "together with a peer"),
    'peer = "deepcache"\nrole = "baseline"\nname = "second"': ("baseline",),
    'method = "elfatt"\npeer = "tomesd"\nblock_size = 4': ("block_size", "ratio"),
    'method = "tome"\npeer = "tomesd"\nratio = 0.5': ("tomesd-ratio0.5", "given twice"),
    'method = "tome"\nname = "TOMESD-ratio0.5"': ("TOMESD-ratio0.5", "given twice"),  # one folder on some systems
    'method = "tome"\nname = "../out"': ("../out", "letters"),
    "phases = [{ untill = 1.0 }]": ("untill'", "until"),
    "phases = [{ until = [] }]": ("until=[]", "at least one"),
    "phases = [{ until = [0.5, 2.0] }]": ("until=2.0", "from 0 to 1"),
    'phases = ["all"]': ("phases", "a table"),
    'phases = [{ until = 1.0 }]\nblock_size = "many"': ("block_size='many'", "whole number"),
    "phases = [{ until = 1.0 }]\nswept = { until = 1.0 }": ("'swept'", "phases"),
    'method = "tome"\nseed_offset = 9': ("seed_offset=9", "0 for all others"),
    'method = "sd"\nrole = "null"\nname = "same"\nseed_offset = 0': ("seed_offset=0", "number of images"),
    'method = "sd"\nrole = "null"\nname = "less"\nseed_offset = -9': ("seed_offset=-9", "number of images"),
}
LINES: dict[str, tuple[str, ...]] = {  # a line of the file
    "seed = 2020-01-01": ("seed=datetime.date",),
    "steps = " + "9" * 5000: ("not valid TOML",),
    "a = " + "[" * 5000: ("not valid TOML",),
    "steps = = 3": ("small.toml is not valid TOML",),
    "images_per_class = 9223372036854775807": ("images_per_class=9223372036854775807",),
    "published.rows = [{ label = 'a', FID = inf }]": ("finite numbers",),
    "published.rows = [{ label = 'a', FID = 12:00:00 }]": ("finite numbers",),
    "published.sorce = 'tabSD'": ("key 'published.sorce' is not known; accepted: source, rows",),
    "published.rows = [{ labl = 'SD' }]": ("each with a label",),
    "published.rows = [{ label = 'SD', fid = 31 }]": ("key 'published.rows[SD].fid' is not known", "label, FID"),
}


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        (kind, text, parts)
        for kind, table in (("override", VALUES), ("cell", ROWS), ("line", LINES))
        for text, parts in table.items()
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(tmp_path: Path, kind: str, text: str, parts: tuple[str, ...]) -> None:
    cells = f"{runs.CELLS}\n[[cells]]\n{text}\n" if kind == "cell" else runs.CELLS
    path = runs.write_protocol(tmp_path, Path("model"), cells)
    if kind == "line":
        key = text.partition(" ")[0]
        lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
        path.write_text("\n".join([text, *lines]))
    with pytest.raises(ElfattError) as error:
        load_protocol(path, [text] if kind == "override" else [])
    assert "\n" not in str(error.value)
    assert [part for part in parts if part not in str(error.value)] == [], error.value


def test_a_missing_file_or_baseline_is_named(tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=r"'nonsense' does not exist.*paper_table"):
        load_protocol("nonsense")
    with pytest.raises(ElfattError, match="0 cells of role 'baseline'"):
        load(tmp_path, cells='[[cells]]\nmethod = "tome"\n')
