"""Goals are read off the rows that they speak of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.pages.goals import goals_table


def ratio(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def call(method: str, floor: float, untouched: float, tomesd: float, peak: int) -> dict[str, Any]:
    """A row of `elfatt-fast`: exact steps, and its own phase."""
    speed = {"untouched": ratio(untouched), "tomesd": ratio(tomesd)}
    own = {"variant": f"{method}/1", "steps": 40, "seconds": 1.0, "speed": speed}
    return {
        "size": 512,
        "method": method,
        "rounds": 5,
        "peak_bytes": peak,
        "parts": [{"variant": "untouched", "steps": 10}, {**own, "floor": {"name": "floor", **ratio(floor)}}],
    }


def config(levels: int, block_size: int, residual_steps: int = 1) -> dict[str, Any]:
    phase = {"block_size": block_size, "residual_steps": residual_steps}
    return {"config": {"levels": levels, "reuse_steps": 1, "phases": [phase]}}


def group(bystanders: float | None = 0.01, **key: Any) -> dict[str, Any]:
    return {"key": key, "sittings": [{"bystanders": 0.0}, {"bystanders": bystanders}]}


def change(folder: Path, name: str, **changes: Any) -> None:
    """Change a file's first level, or every row of it."""
    path = folder / f"{name}.json"
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row |= changes.get("rows", {})
    path.write_text(json.dumps(data | {key: value for key, value in changes.items() if key != "rows"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"method": "untouched", "peak_bytes": 100},
        {"method": "tomesd", "peak_bytes": 500},
        call("elfatt-fast", 1.05, 1.6, 1.2, 90),
        call("elfatt-fast:levels=2", 1.2, 3.4, 2.1, 104),
        call("elfatt-fast:block_size=512,levels=2", 1.09, 3.6, 2.2, 80),
        call("elfatt-fast:residual_steps=8", 1.3, 3.6, 2.2, 130),
    ]
    variants = {
        "untouched": config(1, 128),
        "elfatt-fast/1": config(1, 128),
        "elfatt-fast:levels=2/1": config(2, 128),
        "elfatt-fast:block_size=512,levels=2/1": config(2, 512),
        "elfatt-fast:residual_steps=8/1": config(2, 128, 8),
    }
    unet = {"settings": {"variants": variants}, "rows": rows, "groups": [group(size=512)]}
    merging = [
        {"tokens": tokens, "dtype": "float32", "method": "ours", "rounds": 5, "speed": {"tomesd": ratio(2.0)}}
        for tokens in (4096, 16384)
    ]
    layer = [
        {"tokens": tokens, "part": part, "method": "elfatt", "rounds": 5, "speed": {"softmax": ratio(speed)}}
        for tokens, part, speed in ((4096, "attention", 99.0), (4096, "layer", 10.0), (16384, "layer", 16.0))
    ]
    exponents = {"attention": {"elfatt": ratio(9.0)}, "layer": {"elfatt": ratio(1.1)}}
    groups = [group(tokens=4096, part="layer"), group(tokens=16384, part="layer")]
    growth = {"rows": layer, "groups": groups, "exponents": exponents}
    without = [{"method": "untouched", "peak_bytes": 100}, call("elfatt-fast", 1.08, 1.6, 1.2, 103)]
    flux = {"settings": {"variants": variants}, "rows": without, "groups": [group(size=2048)]}
    files = {"merging": {"rows": merging}, "growth": growth, "unet-512": unet, "unet-1024": unet, "flux-2048": flux}
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def lines(table: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()[2:]]
    return {what: rest for what, *rest in cells}


def test_what_was_measured_stands_beside_what_is_asked(folder: Path) -> None:
    table = lines(goals_table(folder))
    merging = table["merging 4096 tokens, float32: fraction of tomesd's time"]
    assert merging == ["at most 0.6", "0.500", "`ours`", "met"]
    assert table["merging 4096 tokens, bfloat16: fraction of tomesd's time"][1].startswith("not measured yet")
    layer = "ELFATT's layer without merging"
    assert table[f"{layer}, 4096 tokens: fraction of fused softmax's time"][1:] == ["0.100", "`elfatt`", "met"]
    assert table[f"{layer}, 16384 tokens: fraction of fused softmax's time"][1:] == ["0.062", "`elfatt`", "**missed**"]
    assert table[f"{layer}: exponent of the growth with the tokens"][1:] == ["1.100", "`elfatt`", "met"]


def test_a_call_is_that_of_the_levels_and_blocks_asked_for(folder: Path) -> None:
    """At 512 one level and blocks of 128; at 1024 the better of those with two levels, which is named."""
    table = lines(goals_table(folder))
    small, large = "elfatt-fast, 512x512, one level, 128 keys: ", "elfatt-fast, 1024x1024, two levels: "
    assert table[small + "times its floor's time"] == ["at most 1.06", "1.050", "`elfatt-fast`", "met"]
    assert table[small + "times as fast as tomesd"] == ["at least 1.15", "1.200", "`elfatt-fast`", "met"]
    best = "`elfatt-fast:block_size=512,levels=2`"
    assert table[large + "times its floor's time"] == ["at most 1.1", "1.090", best, "met"]
    assert table[large + "times as fast as untouched"] == ["at least 3.5", "3.600", best, "met"]


def test_a_transformer_is_compared_with_the_untouched_call_alone(folder: Path) -> None:
    table = lines(goals_table(folder))
    flux = "Flux, 2048x2048, 16,896 tokens"
    assert table[f"elfatt-fast, {flux}: times its floor's time"] == ["at most 1.1", "1.080", "`elfatt-fast`", "met"]
    assert table[f"elfatt-fast, {flux}: times as fast as untouched"][-1] == "**missed**"
    assert not any("tomesd" in what for what in table if "Flux" in what)
    peak = table[f"peak memory, {flux}: greatest fraction of the untouched call's"]
    assert peak == ["at most 1.02", "1.030", "`elfatt-fast`", "**missed**"]
    assert table["elfatt-fast, Wan 1.3B, 480p, 32,760 tokens: times its floor's time"][1].startswith("not measured yet")


def test_few_rounds_and_a_busy_machine_decide_nothing(folder: Path) -> None:
    change(folder, "merging", rows={"rounds": 3})
    change(folder, "growth", groups=[group(0.3, tokens=16384, part="layer"), group(0.9, tokens=4096, part="other")])
    change(folder, "unet-512", rows={"rounds": 1}, groups=[group(0.06, size=512)])
    table = lines(goals_table(folder))
    assert table["merging 4096 tokens, float32: fraction of tomesd's time"][-1] == "only 3 rounds"
    layer = "ELFATT's layer without merging"
    assert table[f"{layer}, 4096 tokens: fraction of fused softmax's time"][-1] == "met"
    assert table[f"{layer}, 16384 tokens: fraction of fused softmax's time"][-1] == "machine busy (30%)"
    assert table[f"{layer}: exponent of the growth with the tokens"][-1] == "machine busy (30%)"
    small = "elfatt-fast, 512x512, one level, 128 keys: "
    assert table[small + "times as fast as tomesd"][-1] == "only 1 round, machine busy (6%)"
    assert table["elfatt-fast, 1024x1024, two levels: times its floor's time"][-1] == "met"


def test_a_median_that_some_rounds_contradict_is_told(folder: Path) -> None:
    shares = {"median": 2.0, "min": 1.6, "max": 4.0}
    change(folder, "merging", rows={"speed": {"tomesd": shares}})
    row = lines(goals_table(folder))["merging 4096 tokens, float32: fraction of tomesd's time"]
    assert row[1:] == ["0.500 (0.250 to 0.625)", "`ours`", "met by the median, not in every round"]
    change(folder, "merging", rows={"speed": {"tomesd": {**shares, "median": 1.62}}})
    row = lines(goals_table(folder))["merging 4096 tokens, float32: fraction of tomesd's time"]
    assert row[-1] == "**missed** by the median, not in every round"


def test_a_round_below_the_floor_is_noise(folder: Path) -> None:
    """No call is faster than the same without attention."""
    data = json.loads((folder / "unet-512.json").read_text())
    floor = data["rows"][2]["parts"][1]["floor"]
    what = "elfatt-fast, 512x512, one level, 128 keys: times its floor's time"
    for least, said in ((0.98, "met"), (0.9, "met; noisy, a round at 0.90 of its floor")):
        floor["min"] = least
        (folder / "unet-512.json").write_text(json.dumps(data))
        assert lines(goals_table(folder))[what][-1] == said


def test_what_the_floor_itself_does_not_reach_is_told(folder: Path) -> None:
    data = json.loads((folder / "unet-512.json").read_text())
    speed = {"untouched": ratio(1.4), "tomesd": ratio(1.15)}
    data["rows"].append({"method": "floor", "rounds": 5, "peak_bytes": None, "speed": speed})
    data["rows"][2]["parts"][1]["speed"]["untouched"] = ratio(1.3)
    (folder / "unet-512.json").write_text(json.dumps(data))
    table = lines(goals_table(folder))
    what = "elfatt-fast, 512x512, one level, 128 keys: times as fast as"
    assert table[f"{what} untouched"][-1] == "**missed**; its floor is 1.40 times as fast"
    assert table[f"{what} tomesd"][-1] == "met"


def test_what_mergings_floor_does_not_reach_is_told(folder: Path) -> None:
    data = json.loads((folder / "merging.json").read_text())
    for tokens, speed in ((4096, 2.0), (16384, 1.25)):
        floor = {"tokens": tokens, "dtype": "float32", "method": "floor: similarities", "rounds": 5}
        data["rows"].append({**floor, "speed": {"tomesd": ratio(speed)}})
    data["rows"][1]["speed"] = {"tomesd": ratio(1.1)}
    (folder / "merging.json").write_text(json.dumps(data))
    table = lines(goals_table(folder))
    assert table["merging 4096 tokens, float32: fraction of tomesd's time"][-1] == "met"
    assert table["merging 16384 tokens, float32: fraction of tomesd's time"][-1] == "**missed**; its floor takes 0.80"


@pytest.mark.parametrize("keeps", [1, 2])
def test_kept_matchings_have_a_line_of_their_own(folder: Path, keeps: int) -> None:
    data = json.loads((folder / "unet-512.json").read_text())
    data["settings"]["variants"]["elfatt-fast:levels=2/1"]["config"]["reuse_steps"] = keeps
    (folder / "unet-512.json").write_text(json.dumps(data))
    row = lines(goals_table(folder))["peak memory, 512x512: greatest fraction of the untouched call's"]
    assert row[2] == ("`elfatt-fast:levels=2`" if keeps == 1 else "`elfatt-fast`")
    own = "peak memory, 512x512, with `reuse_steps`: greatest fraction of the untouched call's"
    assert lines(goals_table(folder)).get(own, [""] * 3)[2] == ("`elfatt-fast:levels=2`" if keeps == 2 else "")


def test_what_took_too_long_to_be_measured_is_no_goal(folder: Path) -> None:
    change(folder, "growth", rows={"speed": {}})
    row = lines(goals_table(folder))["ELFATT's layer without merging, 4096 tokens: fraction of fused softmax's time"]
    assert row[1].startswith("not measured yet")


def test_what_others_took_may_be_unknown(folder: Path) -> None:
    change(folder, "unet-512", groups=[group(None, size=512)])
    table = lines(goals_table(folder))
    assert table["elfatt-fast, 512x512, one level, 128 keys: times as fast as tomesd"][-1] == "met"


def test_the_worst_of_our_methods_counts_for_memory_at_every_size(folder: Path) -> None:
    (folder / "unet-2048.json").write_text((folder / "unet-512.json").read_text())
    table = lines(goals_table(folder))
    for size in ("512x512", "1024x1024", "2048x2048"):
        row = table[f"peak memory, {size}: greatest fraction of the untouched call's"]
        assert row == ["at most 1.005", "1.040", "`elfatt-fast:levels=2`", "**missed**"]
        row = table[f"peak memory, {size}, with `residual_steps`: greatest fraction of the untouched call's"]
        assert row == ["at most 1.005", "1.300", "`elfatt-fast:residual_steps=8`", "**missed**"]
    assert table["peak memory, SDXL's shape, 1024x1024: greatest fraction of the untouched call's"][1].startswith("not")


@pytest.mark.parametrize("untouched", [{"peak_bytes": None}, {"method": "other", "peak_bytes": None}])
def test_without_the_untouched_peak_memory_is_not_judged(folder: Path, untouched: dict[str, Any]) -> None:
    data = json.loads((folder / "unet-512.json").read_text())
    data["rows"][0] |= untouched
    (folder / "unet-512.json").write_text(json.dumps(data))
    row = lines(goals_table(folder))["peak memory, 512x512: greatest fraction of the untouched call's"]
    assert row[1].startswith("not measured yet")


def test_without_results_all_that_is_asked_is_said(tmp_path: Path) -> None:
    table = lines(goals_table(tmp_path))
    assert all(row[1].startswith("not measured yet") for row in table.values())
    merging = {
        f"merging {tokens} tokens, {dtype}: fraction of tomesd's time": "at most 0.6"
        for tokens in (4096, 16384)
        for dtype in ("float32", "bfloat16")
    }
    layer = "ELFATT's layer without merging"
    small, large = "elfatt-fast, 512x512, one level, 128 keys", "elfatt-fast, 1024x1024, two levels"
    calls = {
        f"{small}: times its floor's time": "at most 1.06",
        f"{small}: times as fast as untouched": "at least 1.5",
        f"{small}: times as fast as tomesd": "at least 1.15",
        f"{large}: times its floor's time": "at most 1.1",
        f"{large}: times as fast as untouched": "at least 3.5",
        f"{large}: times as fast as tomesd": "at least 2",
    }
    memory = {
        f"peak memory, {size}: greatest fraction of the untouched call's": "at most 1.005"
        for size in ("512x512", "1024x1024", "2048x2048", "SDXL's shape, 1024x1024")
    }
    for model, speed in (("Flux, 2048x2048, 16,896 tokens", "1.7"), ("Wan 1.3B, 480p, 32,760 tokens", "3")):
        calls |= {f"elfatt-fast, {model}: times its floor's time": "at most 1.1"}
        calls |= {f"elfatt-fast, {model}: times as fast as untouched": f"at least {speed}"}
        memory |= {f"peak memory, {model}: greatest fraction of the untouched call's": "at most 1.02"}
    assert {what: row[0] for what, row in table.items()} == {
        **merging,
        f"{layer}, 4096 tokens: fraction of fused softmax's time": "at most 0.15",
        f"{layer}, 16384 tokens: fraction of fused softmax's time": "at most 0.05",
        f"{layer}: exponent of the growth with the tokens": "at most 1.15",
        **calls,
        **memory,
    }
