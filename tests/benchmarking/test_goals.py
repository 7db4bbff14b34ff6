"""Goals are read off the rows that they speak of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elfatt_sd.benchmarking.goals import goals_table


def ratio(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def call(method: str, floor: float, untouched: float, tomesd: float, peak: int) -> dict[str, Any]:
    """A row of `elfatt-fast`: exact steps, and its own phase."""
    own = {"variant": f"{method}/1", "speed": {"untouched": ratio(untouched), "tomesd": ratio(tomesd)}}
    return {
        "method": method,
        "peak_bytes": peak,
        "parts": [{"variant": "untouched"}, {**own, "floor": {"name": "floor", **ratio(floor)}}],
    }


def config(levels: int, block_size: int) -> dict[str, Any]:
    return {"config": {"levels": levels, "phases": [{"block_size": block_size}]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"method": "untouched", "peak_bytes": 100},
        {"method": "tomesd", "peak_bytes": 500},
        call("elfatt-fast", 1.05, 1.6, 1.2, 90),
        call("elfatt-fast:levels=2", 1.2, 3.4, 2.1, 104),
        call("elfatt-fast:block_size=512,levels=2", 1.09, 3.6, 2.2, 80),
    ]
    variants = {
        "elfatt-fast/1": config(1, 128),
        "elfatt-fast:levels=2/1": config(2, 128),
        "elfatt-fast:block_size=512,levels=2/1": config(2, 512),
    }
    unet = {"settings": {"variants": variants}, "rows": rows}
    merging = [
        {"tokens": tokens, "dtype": "float32", "method": "ours", "speed": {"tomesd": ratio(2.0)}}
        for tokens in (4096, 16384)
    ]
    layer = [
        {"tokens": tokens, "part": part, "method": "elfatt", "speed": {"softmax": ratio(speed)}}
        for tokens, part, speed in ((4096, "attention", 99.0), (4096, "layer", 10.0), (16384, "layer", 16.0))
    ]
    growth = {"rows": layer, "exponents": {"attention": {"elfatt": 9.0}, "layer": {"elfatt": 1.1}}}
    files = {"merging": {"rows": merging}, "growth": growth, "unet-512": unet, "unet-1024": unet}
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def lines(table: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()[2:]]
    return {what: rest for what, *rest in cells}


def test_what_was_measured_stands_beside_what_is_asked(folder: Path) -> None:
    table = lines(goals_table(folder))
    assert table["merging 4096 tokens, float32: share of tomesd's time"] == ["at most 0.6", "0.500", "met"]
    assert table["merging 4096 tokens, bfloat16: share of tomesd's time"][1].startswith("not measured yet")
    assert table["elfatt's layer, 4096 tokens: share of fused softmax's time"][1:] == ["0.100", "met"]
    assert table["elfatt's layer, 16384 tokens: share of fused softmax's time"][1:] == ["0.062", "**missed**"]
    assert table["elfatt's layer: exponent of the growth with the tokens"][1:] == ["1.100", "met"]


def test_a_call_is_that_of_the_levels_and_blocks_asked_for(folder: Path) -> None:
    """At 512 one level and blocks of 128; at 1024 the better of those with two levels."""
    table = lines(goals_table(folder))
    small, large = "elfatt-fast, 512x512, one level, 128 keys: ", "elfatt-fast, 1024x1024, two levels: "
    assert table[small + "times its floor's time"] == ["at most 1.06", "1.050", "met"]
    assert table[small + "times as fast as tomesd"] == ["at least 1.15", "1.200", "met"]
    assert table[large + "times its floor's time"] == ["at most 1.1", "1.090", "met"]
    assert table[large + "times as fast as untouched"] == ["at least 3.5", "3.600", "met"]


def test_the_worst_of_our_methods_counts_for_memory(folder: Path) -> None:
    row = lines(goals_table(folder))["peak memory at 512x512: greatest share of the untouched call's"]
    assert row == ["at most 1.01", "1.040", "**missed**"]


def test_without_results_nothing_is_said(tmp_path: Path) -> None:
    table = goals_table(tmp_path).splitlines()[2:]
    assert len(table) == 15
    assert all("not measured yet" in line for line in table)
