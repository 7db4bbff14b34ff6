"""Pages on speed show what the files hold, keep what people wrote, and judge what was measured by what is asked."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.merging import merging
from elfatt_sd import benchmarking
from elfatt_sd.benchmarking.record import Session
from elfatt_sd.benchmarking.report import save
from elfatt_sd.benchmarking.variants import resolve_methods
from elfatt_sd.cli import app
from elfatt_sd.errors import ElfattError
from elfatt_sd.files import write_json
from tools.pages.__main__ import main as fill
from tools.pages.bench import fill_page, render
from tools.pages.blocks import MISSING
from tools.pages.goals import goals_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "README.md"
SHORT = ROOT / "docs" / "performance.md"
TEXT = "# Title\n\n<!-- bench merging -->\nold\n<!-- end -->\n\nProse.\n\n<!-- bench other -->\n<!-- end -->\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    session = Session(command="python -m benchmarks.merging")
    made = merging(tokens=[64], channels=16, repeats=2, device="cpu", dtypes=["float32"], session=session)
    write_json(folder / "merging.json", made)
    save(made, folder / "merging.json")
    return folder


def test_tables_replace_what_stands_between_the_markers(results: Path, tmp_path: Path) -> None:
    page = fill_page(TEXT, results, tmp_path)
    assert page.startswith("# Title\n\n<!-- bench merging -->\n64 tokens, batch 2, float32:\n\n| method | time |")
    assert (results / "merging.md").read_text() in page
    assert "old" not in page
    assert "![merging](results/merging.png)" in page
    assert "2 interleaved rounds" in page
    assert "Made by `python -m benchmarks.merging` at commit" in page
    assert f"Prose.\n\n<!-- bench other -->\n{MISSING}\n<!-- end -->" in page
    assert fill_page(page, results, tmp_path) == page


def test_a_suite_shows_all_its_parts(results: Path, tmp_path: Path) -> None:
    part = json.loads((results / "merging.json").read_text())
    goals = [
        {"part": "first", "method": "elfatt", "what": "times as fast", "gain": gain, "goal": 1.09, "rounds": rounds}
        for gain, rounds in ((1.2, 7), (1.0, 7), (1.2, 3))
    ]
    suite = {
        "parts": {"first": part, "second": part},
        "goals": goals,
        "memory_slope": {"sd15 512": {"untouched": 0.5, "tome": 0.25}, "sdxl 1024": {"tome": 1.0}},
        "peaks": {"first": {"method": "tome", "share": 1.002}},
        "errors": {"third": "ElfattError: flash\nis not there"},
    }
    (results / "other.json").write_text(json.dumps(suite))
    render(results)
    page = fill_page(TEXT, results, tmp_path)
    assert page.index("### first") < page.index("### second")
    for name in ("first", "second"):
        assert f"![merging](results/other/{name}.png)" in page
        assert (results / "other" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "| first | tome | 1.002 |" in page
    verdicts = [line.split(" | ")[-1] for line in page.splitlines() if line.startswith("| first | elfatt |")]
    assert verdicts == ["met |", "**missed** |", "only 3 rounds |"]
    assert (
        "| method | sd15 512 | sdxl 1024 |\n|---|---|---|\n| untouched | 0.500 |  |\n| tome | 0.250 | 1.000 |" in page
    )
    assert "- third: ElfattError: flash is not there" in page


def test_what_is_wrong_is_named(results: Path, tmp_path: Path) -> None:
    """A page without markers, a file of something else or a damaged one, a part that leads elsewhere."""
    part = json.loads((results / "merging.json").read_text())
    with pytest.raises(ElfattError, match="has no marker"):
        fill_page("# Title\n", results, tmp_path)
    (results / "other.json").write_text("{}")
    with pytest.raises(ElfattError, match=r"other.json holds no results"):
        fill_page(TEXT, results, tmp_path)
    (results / "other.json").write_text(json.dumps({"parts": {"../../x": part}}))
    with pytest.raises(ElfattError, match="accepted: a plain file name"):
        render(results)
    (results / "merging.json").write_text("{")
    for read in (lambda: render(results), lambda: fill_page(TEXT, results, tmp_path)):
        with pytest.raises(ElfattError, match=r"merging\.json is damaged"):
            read()


def test_the_command_fills_and_checks_the_page(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    words = ["bench", str(page), "--results"]
    assert fill([*words, str(results), "--check"]) == 1
    assert page.read_text() == TEXT
    (results / "merging.md").unlink()
    plot = (results / "merging.png").read_bytes()
    (results / "merging.png").write_bytes(b"old")
    assert fill([*words, str(results)]) == 0
    assert "64 tokens, batch 2, float32:" in page.read_text()
    assert (results / "merging.md").read_text() in page.read_text()
    assert (results / "merging.png").read_bytes() == plot
    assert fill([*words, str(results), "--check"]) == 0
    filled = page.read_text()
    assert fill([*words, str(tmp_path / "mistyped")]) == 2
    assert "mistyped' is not a folder" in capsys.readouterr().err
    assert page.read_text() == filled


@pytest.mark.parametrize(
    "page", [PAGE, SHORT, ROOT / "docs" / "transformers.md", ROOT / "tools" / "goals.md"], ids=lambda page: page.stem
)
def test_a_committed_page_is_in_step_with_the_committed_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    words = f"python -m tools.pages bench {page.relative_to(ROOT)}"
    assert fill_page(text, RESULTS, page.parent) == text, f"{words} mends it"


def test_a_few_rows_in_the_columns_that_vary(results: Path, tmp_path: Path) -> None:
    page = fill_page("<!-- bench merging ours tomesd -->\n<!-- end -->\n", results, tmp_path)
    head, _, first, second, _, plot, _, origin, _ = page.splitlines()[1:10]
    assert head.startswith("| method | time | times as fast as tomesd |")
    assert (first.split(" | ")[0], second.split(" | ")[0]) == ("| tomesd", "| ours")
    assert plot == "![merging](results/merging.png)"
    assert origin.startswith("[All rows](results/merging.md); ")
    with pytest.raises(ElfattError, match=r"rows=.'other'. are not accepted; accepted: at most 6 of .*ours"):
        fill_page("<!-- bench merging other -->\n<!-- end -->\n", results, tmp_path)
    with pytest.raises(ElfattError, match="at most 6"):
        fill_page(f"<!-- bench merging{' ours' * 7} -->\n<!-- end -->\n", results, tmp_path)


def commands() -> list[str]:
    """The commands that make the committed results, as benchmarks/README.md gives them."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^elfatt-sd bench (?!report).*$", text, re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_every_published_command_can_be_parsed(command: str, monkeypatch: Any, tmp_path: Path) -> None:
    """Options exist, methods are known, and the file's name has its place on the page."""
    seen: dict[str, Any] = {}
    for name in ("layer", "pipeline", "unet"):
        monkeypatch.setattr(benchmarking, name, lambda **options: seen.update(options))
    words = shlex.split(command)[1:]
    words[words.index("--out") + 1] = str(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    if "methods" in seen:
        assert resolve_methods(seen["methods"])
    assert len(seen.get("methods") or ()) == words.count("--method")
    assert seen.get("compile", False) == ("--compile" in words) and seen.get("autotune", False) == (
        "--autotune" in words
    )
    assert (seen.get("memory", True) in ([], False)) == ("--no-memory" in words)
    assert len(seen.get("sizes", seen.get("tokens"))) == words.count("--size") + words.count("--tokens")
    assert f"<!-- bench {seen['session'].name or words[1]} -->" in PAGE.read_text(encoding="utf-8")


def test_every_place_on_the_page_has_its_command() -> None:
    text = SHORT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert re.findall(r"<!-- bench [\w-]+ -->", text) == [], "readers have some rows of each"
    names = re.findall(r"<!-- bench ([\w-]+) -->", PAGE.read_text(encoding="utf-8"))
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    made = set[str]()
    for command in commands() + re.findall(r"^python (?:-m )?benchmarks.*$", text, re.MULTILINE):
        words = shlex.split(command)
        kind = words[2] if words[1] in ("-m", "bench") else words[1]
        made.add(words[words.index("--name") + 1] if "--name" in words else re.sub(r"^benchmarks.|\.py$", "", kind))
    assert set(names) <= made
    assert len(names) == len(set(names))


def test_a_part_of_a_suite_has_a_place_of_its_own(results: Path, tmp_path: Path) -> None:
    part = json.loads((results / "merging.json").read_text())
    (results / "suite.json").write_text(json.dumps({"parts": {"a part": part, "another": part}}))
    render(results)
    places = ("suite/a-part ours", "suite/a-part", "suite/no-part ours")
    page = fill_page("".join(f"<!-- bench {place} -->\n<!-- end -->\n" for place in places), results, tmp_path)
    few, whole, missing = page.split("<!-- end -->\n")[:3]
    assert few.count("| ours |") == 1 and "[All rows](results/suite.md)" in few
    assert "### a part" in whole and "tomesd" in whole
    for text in (few, whole):
        assert "![merging](results/suite/a-part.png)" in text and "another" not in text
    assert MISSING in missing


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
    change(folder, "unet-512", rows={"rounds": 5}, groups=[group(None, size=512)])
    assert lines(goals_table(folder))[small + "times as fast as tomesd"][-1] == "met", "what others took is unknown"


def test_a_median_that_some_rounds_contradict_is_told(folder: Path) -> None:
    shares = {"median": 2.0, "min": 1.6, "max": 4.0}
    change(folder, "merging", rows={"speed": {"tomesd": shares}})
    row = lines(goals_table(folder))["merging 4096 tokens, float32: fraction of tomesd's time"]
    assert row[1:] == ["0.500 (0.250 to 0.625)", "`ours`", "met by the median, not in every round"]
    change(folder, "merging", rows={"speed": {"tomesd": {**shares, "median": 1.62}}})
    row = lines(goals_table(folder))["merging 4096 tokens, float32: fraction of tomesd's time"]
    assert row[-1] == "**missed** by the median, not in every round"


def test_what_the_floor_itself_does_not_reach_is_told(folder: Path) -> None:
    data = json.loads((folder / "unet-512.json").read_text())
    speed = {"untouched": ratio(1.4), "tomesd": ratio(1.15)}
    data["rows"].append({"method": "floor", "rounds": 5, "peak_bytes": None, "speed": speed})
    own = data["rows"][2]["parts"][1]
    own["speed"]["untouched"] = ratio(1.3)
    (folder / "unet-512.json").write_text(json.dumps(data))
    table = lines(goals_table(folder))
    what = "elfatt-fast, 512x512, one level, 128 keys: times as fast as"
    assert table[f"{what} untouched"][-1] == "**missed**; its floor is 1.40 times as fast"
    assert table[f"{what} tomesd"][-1] == "met"
    own["floor"]["min"] = 0.9  # no call is faster than the same without attention
    (folder / "unet-512.json").write_text(json.dumps(data))
    what = "elfatt-fast, 512x512, one level, 128 keys: times its floor's time"
    assert lines(goals_table(folder))[what][-1] == "met; noisy, a round at 0.90 of its floor"


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
def test_what_was_not_measured_is_not_judged(folder: Path, untouched: dict[str, Any], tmp_path: Path) -> None:
    data = json.loads((folder / "unet-512.json").read_text())
    data["rows"][0] |= untouched
    (folder / "unet-512.json").write_text(json.dumps(data))
    change(folder, "growth", rows={"speed": {}})  # it took too long
    table = lines(goals_table(folder))
    assert table["peak memory, 512x512: greatest fraction of the untouched call's"][1].startswith("not measured yet")
    layer = "ELFATT's layer without merging, 4096 tokens: fraction of fused softmax's time"
    assert table[layer][1].startswith("not measured yet")
    (tmp_path / "empty").mkdir()
    empty = lines(goals_table(tmp_path / "empty"))
    assert len(empty) == 23 and all(row[1].startswith("not measured yet") for row in empty.values())
