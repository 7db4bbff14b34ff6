"""Protocols: what is accepted, what is refused by name, and what makes two runs the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support import runs

from elfatt_sd.attention.ordering import partition
from elfatt_sd.config import PRESETS
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import NULL_SEED_OFFSET, Protocol, decisive, differences, load_protocol
from elfatt_sd.files import sha256_of_data

EVAL = Path(__file__).parents[2] / "eval"
SHIPPED = sorted(EVAL.glob("*.toml"))


def load(folder: Path, *overrides: str, cells: str = runs.CELLS) -> Protocol:
    return runs.small_protocol(folder, Path("model"), *overrides, cells=cells)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_protocols_load_and_survive_json(path: Path) -> None:
    protocol = load_protocol(path)
    assert protocol.name == path.stem
    assert protocol.description
    again = Protocol.from_dict(json.loads(json.dumps(protocol.to_dict())))
    assert again == protocol
    assert again.identity == protocol.identity


def test_block_sizes_cut_as_many_blocks_as_in_the_paper() -> None:
    """Its sizes 32, 56, 81, 128, 227 and 512 are floor(2048 / k^2) of k^2 blocks."""
    protocol = load_protocol("block_size")
    sizes = [cell.settings["block_size"] for cell in protocol.cells if cell.method == "elfatt"]
    assert [partition(2048, size)[0] for size in sizes] == [64, 36, 25, 16, 9, 4]
    assert [row["block_size"] for row in protocol.to_dict()["published"]["rows"]] == sizes


def test_the_papers_table_is_complete() -> None:
    protocol = load_protocol("paper_table")
    assert [cell.label for cell in protocol.cells].count("ELFATT-SD") == 5
    for label in ("Agent-SD", "ELFATT-SD", "ToMe-SD"):
        assert [cell.settings["ratio"] for cell in protocol.cells if cell.label == label] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert load_protocol("toy_full").published == protocol.published
    printed = {(row["label"], row.get("ratio")) for row in protocol.published["rows"]}
    ours = {(cell.label, cell.settings.get("ratio")) for cell in protocol.cells if cell.role != "null"}
    assert printed == ours
    assert (protocol.steps, protocol.guidance, protocol.images_per_class, protocol.batch) == (50, 7.5, 2, 48)


def test_settings_with_several_values_become_rows(tmp_path: Path) -> None:
    """And the null row has other seeds."""
    cells = runs.CELLS + '[[cells]]\nmethod = "elfatt"\nratio = [0.1, 0.2]\nblock_size = [32, 64]\n'
    protocol = load(tmp_path, cells=cells)
    names = [f"elfatt-ratio{ratio}-block_size{size}" for ratio in (0.1, 0.2) for size in (32, 64)]
    assert [cell.name for cell in protocol.cells[-4:]] == names
    assert [cell.seed_offset for cell in protocol.cells] == [0, NULL_SEED_OFFSET, *[0] * 6]


LATE = """
[[cells]]
name = "late"
label = "blocks in the last part"
"""


def test_settings_of_a_custom_method_become_rows_too(tmp_path: Path) -> None:
    own = f"""{LATE}
phases = [{{ until = 0.2 }}, {{ until = 0.6, attention = "block" }}, {{ until = 1.0, attention = "elfatt" }}]
block_size = [32, 56]
agents = [16, 64]
ratio = 0.3
levels = 2
"""
    cells = load(tmp_path, cells=runs.CELLS + own).cells[-4:]
    assert [cell.name for cell in cells] == [
        f"late-block_size{size}-agents{agents}-ratio0.3-levels2" for size in (32, 56) for agents in (16, 64)
    ]
    for cell in cells:
        first, *patched = cell.config().phases
        assert first.exact, "a setting leaves exact phases exact"
        assert {phase.block_size for phase in patched} == {cell.settings["block_size"]}
        assert {phase.ratio for phase in patched} == {0.3}
        assert cell.config().levels == 2


def test_lists_inside_phases_become_rows(tmp_path: Path) -> None:
    own = f"""{LATE}
phases = [{{ until = [0.1, 0.2] }}, {{ until = 1.0, attention = "block", block_size = [32, 56], ratio = 0.3 }}]
use_rand = false
"""
    protocol = load(tmp_path, cells=runs.CELLS + own)
    cells = protocol.cells[-4:]
    assert [cell.name for cell in cells] == [
        f"late-use_randFalse-until{until}-block_size{size}" for until in (0.1, 0.2) for size in (32, 56)
    ]
    for cell in cells:
        first, second = cell.config().phases
        assert cell.swept == {"until": first.until, "block_size": second.block_size}
        assert cell.settings == {"use_rand": False}
        assert cell.shown == {"use_rand": False, "until": first.until, "block_size": second.block_size}
    assert Protocol.from_dict(json.loads(json.dumps(protocol.to_dict()))).identity == protocol.identity
    blocks = 'attention = "block", block_size = [32, 56]'
    own = f"{LATE}\nphases = [{{ until = 0.5, {blocks} }}, {{ until = 1.0, {blocks} }}]\n"
    cells = load(tmp_path, cells=runs.CELLS + own).cells[-4:]
    assert [dict(cell.swept) for cell in cells] == [
        {"phase1_block_size": first, "phase2_block_size": second} for first in (32, 56) for second in (32, 56)
    ]
    assert len({cell.config() for cell in cells}) == 4


def test_what_changes_the_identity(tmp_path: Path) -> None:
    plain = load(tmp_path)
    changed = load(tmp_path, "steps=9", "time.repeats=3", "template=a photo of a {label}", "reference.source=/data/val")
    assert (changed.steps, changed.template, changed.reference.source) == (9, "a photo of a {label}", "/data/val")
    assert changed.time is not None and changed.time.repeats == 3
    assert "steps: 4 there, 9 here" in differences(plain.to_dict(), changed.to_dict())
    for override in ("steps=9", "reference.count=7", "variant=fp16"):
        assert load(tmp_path, override).identity != plain.identity, override
    # words, what the metric's name says, and what measures nothing
    kept = ("description=other words", "reference.allow_count=true", "time.repeats=0", "memory.batches=[]")
    for override in kept:
        assert load(tmp_path, override).identity == plain.identity, override
    both = load(tmp_path, "time.repeats=3", "memory.batches=[1, 2]")
    assert both.time is not None and both.memory is not None
    without = load(tmp_path, "time.repeats=3", "memory.batches=[1, 2]", *kept[2:])
    assert (without.time, without.memory) == (None, None)
    older = {key: value for key, value in plain.to_dict().items() if key != "variant"}
    assert sha256_of_data(decisive(older)) == plain.identity == Protocol.from_dict(older).identity


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ({"sorce": "tabSD"}, "key 'published.sorce' is not known; accepted: source, rows"),
        ({"rows": [{"labl": "SD"}]}, "each with a label"),
        ({"rows": [{"label": "SD", "fid": 31}]}, r"key 'published.rows\[SD\].fid' is not known; accepted: label, FID"),
    ],
    ids=str,
)
def test_printed_figures_have_known_names(tmp_path: Path, published: dict[str, Any], message: str) -> None:
    with pytest.raises(ElfattError, match=message):
        dataclasses.replace(load(tmp_path), published=published)


def test_the_identity_covers_what_presets_resolve_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(tmp_path)
    preset = PRESETS["elfatt"]
    phases = (preset.phases[0].with_settings({"agents": 65}), *preset.phases[1:])
    monkeypatch.setitem(PRESETS, "elfatt", dataclasses.replace(preset, phases=phases))
    cells = runs.CELLS.replace("agents = 8\n", "")
    now = load(tmp_path, cells=cells)
    assert now.identity != before.identity
    assert any("agents" in line for line in differences(before.to_dict(), now.to_dict()))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("stepz=3", ("'stepz'", "steps")),
        ("time.repeat=3", ("'time.repeat'", "repeats")),
        ("steps=many", ("steps='many'", "whole number")),
        ("steps=true", ("steps=True", "whole number")),
        ("steps=0", ("steps=0", "at least 1")),
        ("guidance=x", ("guidance='x'", "a number")),
        ("guidance=nan", ("guidance=nan", "a number of at least 0")),
        ("guidance=inf", ("guidance=inf", "a number")),
        ("seed=-1", ("seed=-1", "at least 0")),
        ("seed=9223372036854775808", ("seed=9223372036854775808", "at most 9223372036854775807")),
        ("height=33", ("height=33", "multiple of 8")),
        ("extractors=toy", ("extractors='toy'", "a list")),
        ("name=aux", ("name='aux'", "letters, digits")),
        ("extractors=[1]", ("extractors[0]=1", "text")),
        ("template=no label", ("template='no label'", "{label}")),
        ("time.scopes=['all']", ("all", "end_to_end, unet")),
        ("memory.batches=[2]", ("[2]", "two or more")),
        ("time=3", ("time=3", "a table")),
        ("steps", ("'steps'", "key=value")),
        ("cells=[]", ("'cells=[]'", "rows are changed in the protocol's file")),
        ("name=../../x", ("name='../../x'", "letters, digits, _ and -")),
        ("name=two words", ("name='two words'", "letters, digits, _ and -")),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, override: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ElfattError) as error:
        load(tmp_path, override)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("cell", "parts"),
    [
        ('method = "elfat"', ("elfat", "tome")),
        ('method = "tome"\nratio = 1.5', ("ratio=1.5", "less than 1")),
        ('method = "tome"\nration = 0.5', ("'ration'", "ratio")),
        ('method = "tome"\nrole = "control"', ("'control'", "baseline, null, method")),
        ('method = "tome"\nrole = "null"', ("'null'", "untouched")),
        ('method = "sd"', ("'method'", "untouched")),
        ('method = "sd"\nrole = "baseline"\nname = "second"', ("2 cells", "exactly one")),
        ('method = "tome"\npeer = "turbo"', ("turbo", "tomesd")),
        ('method = "tome"\npeer = "tgate"', ("tome", "tgate", "takes the patch's place")),
        ('peer = "deepcache"\npeer_settings = { interval = 2 }', ("interval", "cache_interval")),
        ('method = "tome"\npeer_settings = { cache_interval = 2 }', ("peer_settings", "together with a peer")),
        ('peer = "deepcache"\nrole = "baseline"\nname = "second"', ("baseline",)),
        ('method = "elfatt"\npeer = "tomesd"\nblock_size = 4', ("block_size", "ratio")),
        ('method = "tome"\npeer = "tomesd"\nratio = 0.5', ("tomesd-ratio0.5", "given twice")),
        ('method = "tome"\nname = "../out"', ("../out", "letters")),
        ("phases = [{ untill = 1.0 }]", ("untill'", "until")),
        ("phases = [{ until = [] }]", ("until=[]", "at least one")),
        ("phases = [{ until = [0.5, 2.0] }]", ("until=2.0", "from 0 to 1")),
        ('phases = ["all"]', ("phases", "a table")),
        ('phases = [{ until = 1.0 }]\nblock_size = "many"', ("block_size='many'", "whole number")),
        ("phases = [{ until = 1.0 }]\nswept = { until = 1.0 }", ("'swept'", "phases")),
        ('method = "tome"\nratio = []', ("ratio=[]", "at least one")),
        ('method = "tome"\nseed_offset = 9', ("seed_offset=9", "0 for all others")),
        ('method = "sd"\nrole = "null"\nname = "same"\nseed_offset = 0', ("seed_offset=0", "number of images")),
        ('method = "sd"\nrole = "null"\nname = "less"\nseed_offset = -9', ("seed_offset=-9", "number of images")),
    ],
)
def test_wrong_cells_are_named(tmp_path: Path, cell: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ElfattError) as error:
        load(tmp_path, cells=f"{runs.CELLS}\n[[cells]]\n{cell}\n")
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=r"'nonsense' does not exist.*paper_table"):
        load_protocol("nonsense")
    with pytest.raises(ElfattError, match="0 cells of role 'baseline'"):
        load(tmp_path, cells='[[cells]]\nmethod = "tome"\n')


def test_a_limit_is_a_quick_look_at_time_and_memory_too() -> None:
    quick = load_protocol("toy", limit=2)
    assert quick.time is not None and quick.memory is not None
    assert (quick.limit, quick.time.repeats, quick.time.batch) == (2, 2, 1)
    assert (quick.memory.batches, quick.memory.steps) == ((1, 2), 2)
    paper = load_protocol("paper_table", limit=2)
    assert paper.time is not None and paper.memory is not None
    assert (paper.time.batch, len(paper.memory.batches), paper.memory.steps) == (2, 2, 2)
    asked = load_protocol("toy", ["time.repeats=7", "memory.batches=[]"], limit=2)
    assert asked.time is not None and (asked.time.repeats, asked.memory) == (7, None)
    with pytest.raises(ElfattError, match=r"time\.repeats='few'"):
        load_protocol("toy", ["time.repeats=few"], limit=2)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("guidance = nan", "guidance=nan"),
        ("seed = 2020-01-01", "seed=datetime.date"),
        ("steps = " + "9" * 5000, "not valid TOML"),
        ("images_per_class = 9223372036854775807", "images_per_class=9223372036854775807"),
        ("published.rows = [{ label = 'a', FID = inf }]", r"published\.rows\[0\]\.FID=inf"),
        ("published.rows = [{ label = 'a', FID = 12:00:00 }]", r"published\.rows\[0\]\.FID=12:00:00"),
        ("a = " + "[" * 5000, "not valid TOML"),
        ("steps = = 3", r"odd\.toml is not valid TOML"),
    ],
)
def test_what_no_file_of_a_run_can_hold_is_refused(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f"{line}\n{runs.UNTOUCHED}")
    with pytest.raises(ElfattError, match=named) as error:
        load_protocol(path)
    assert "\n" not in str(error.value)


def test_what_some_systems_take_for_one_or_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    cells = "".join(f'[[cells]]\nname = "{name}"\nlabel = "x"\nmethod = "tome"\n' for name in ("ガ", "ｶﾞ"))
    path.write_text(runs.UNTOUCHED + cells, encoding="utf-8")
    with pytest.raises(ElfattError, match="given twice"):
        load_protocol(path)
    path.write_text(runs.UNTOUCHED)
    with pytest.raises(ElfattError, match=r"template=\\udcff\{label\} is not accepted; accepted: text in UTF-8"):
        load_protocol(path, ["template=\udcff{label}"])
