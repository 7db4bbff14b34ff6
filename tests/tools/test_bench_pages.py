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
PAGE, SHORT = RESULTS / "README.md", ROOT / "docs" / "performance.md"
COMMANDS = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
END = "<!-- end -->\n"
TEXT = f"# Title\n\n<!-- bench merging -->\nold\n{END}\nProse.\n\n<!-- bench other -->\n{END}"


@pytest.fixture(scope="module")
def made() -> Any:
    session = Session(command="python -m benchmarks.merging")
    return merging(tokens=[64], channels=16, repeats=2, device="cpu", dtypes=["float32"], session=session)


@pytest.fixture
def results(made: Any, tmp_path: Path) -> Path:
    write_json(tmp_path / "results" / "merging.json", made)
    save(made, tmp_path / "results" / "merging.json")
    return tmp_path / "results"


def test_the_command_fills_and_checks_the_page(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, plot = tmp_path / "page.md", (results / "merging.png").read_bytes()
    page.write_text(TEXT)
    words = ["bench", str(page), "--results"]
    assert fill([*words, str(results), "--check"]) == 1 and page.read_text() == TEXT
    (results / "merging.md").unlink()
    (results / "merging.png").write_bytes(b"old")
    assert fill([*words, str(results)]) == fill([*words, str(results), "--check"]) == 0
    filled = page.read_text()
    assert filled.startswith("# Title\n\n<!-- bench merging -->\n64 tokens, batch 2, float32:\n\n| method | time |")
    parts = ["![merging](results/merging.png)", "2 interleaved rounds", "Made by `python -m benchmarks.merging` at"]
    parts += [(results / "merging.md").read_text(), f"Prose.\n\n<!-- bench other -->\n{MISSING}\n{END}"]
    assert all(part in filled for part in parts) and "old" not in filled
    assert (results / "merging.png").read_bytes() == plot
    assert fill([*words, str(tmp_path / "mistyped")]) == 2 and page.read_text() == filled
    assert "mistyped' is not a folder" in capsys.readouterr().err


def test_a_suite_shows_all_its_parts_or_one_of_them(made: Any, results: Path, tmp_path: Path) -> None:
    goal = {"part": "a part", "method": "elfatt", "what": "times as fast", "goal": 1.09}
    suite = {
        "parts": {"a part": made, "second": made},
        "goals": [goal | {"gain": gain, "rounds": rounds} for gain, rounds in ((1.2, 7), (1.0, 7), (1.2, 3))],
        "memory_slope": {"sd15 512": {"untouched": 0.5, "tome": 0.25}, "sdxl 1024": {"tome": 1.0}},
        "peaks": {"a part": {"method": "tome", "share": 1.002}},
        "errors": {"third": "ElfattError: flash\nis not there"},
    }
    (results / "other.json").write_text(json.dumps(suite))
    render(results)
    page = fill_page(TEXT, results, tmp_path)
    assert page.index("### a part") < page.index("### second")
    for name in ("a-part", "second"):
        assert f"![merging](results/other/{name}.png)" in page
        assert (results / "other" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "| a part | tome | 1.002 |" in page and "- third: ElfattError: flash is not there" in page
    verdicts = [line.split(" | ")[-1] for line in page.splitlines() if line.startswith("| a part | elfatt |")]
    assert verdicts == ["met |", "**missed** |", "only 3 rounds |"]
    slopes = "| method | sd15 512 | sdxl 1024 |\n|---|---|---|\n| untouched | 0.500 |  |\n| tome | 0.250 | 1.000 |"
    assert slopes in page
    places = ("other/a-part ours", "other/a-part", "other/no-part ours")
    page = fill_page("".join(f"<!-- bench {place} -->\n{END}" for place in places), results, tmp_path)
    few, whole, missing = page.split(END)[:3]
    assert few.count("| ours |") == 1 and "[All rows](results/other.md)" in few
    assert "### a part" in whole and "tomesd" in whole and MISSING in missing
    for text in (few, whole):
        assert "![merging](results/other/a-part.png)" in text and "second" not in text


def test_a_few_rows_in_the_columns_that_vary(results: Path, tmp_path: Path) -> None:
    page = fill_page(f"<!-- bench merging ours tomesd -->\n{END}", results, tmp_path)
    head, _, first, second, _, plot, _, origin, _ = page.splitlines()[1:10]
    assert head.startswith("| method | time | times as fast as tomesd |")
    assert (first.split(" | ")[0], second.split(" | ")[0]) == ("| tomesd", "| ours")
    assert plot == "![merging](results/merging.png)" and origin.startswith("[All rows](results/merging.md); ")


def test_what_is_wrong_is_named(made: Any, results: Path, tmp_path: Path) -> None:
    """A page without markers, no such rows, a file of something else or a damaged one, a part that leads elsewhere."""

    def wrong(text: str, message: str, **contents: Any) -> None:
        for name, content in contents.items():
            (results / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ElfattError, match=message):
            fill_page(text, results, tmp_path) if text else render(results)

    wrong("# Title\n", "has no marker")
    rows = r"rows=.'other'. are not accepted; accepted: at most 6 of .*ours"
    wrong(f"<!-- bench merging other -->\n{END}", rows)
    wrong(f"<!-- bench merging{' ours' * 7} -->\n{END}", "at most 6")
    wrong(TEXT, r"other.json holds no results", other={})
    wrong("", "accepted: a plain file name", other={"parts": {"../../x": made}})
    wrong("", r"merging\.json is damaged", merging="{")
    wrong(TEXT, r"merging\.json is damaged")


@pytest.mark.parametrize(
    "page", [PAGE, SHORT, ROOT / "docs" / "transformers.md", ROOT / "tools" / "goals.md"], ids=lambda page: page.stem
)
def test_a_committed_page_is_in_step_with_the_committed_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    words = f"python -m tools.pages bench {page.relative_to(ROOT)}"
    assert fill_page(text, RESULTS, page.parent) == text, f"{words} mends it"


PUBLISHED = re.findall(r"^elfatt-sd bench (?!report).*$", COMMANDS, re.MULTILINE)


@pytest.mark.parametrize("command", PUBLISHED)
def test_every_published_command_can_be_parsed(command: str, monkeypatch: Any, tmp_path: Path) -> None:
    """Options exist, methods are known, and the file's name has its place on the page."""
    seen: dict[str, Any] = {}
    for name in ("layer", "pipeline", "unet"):
        monkeypatch.setattr(benchmarking, name, lambda **options: seen.update(options))
    words = shlex.split(command)[1:]
    words[words.index("--out") + 1] = str(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "methods" not in seen or resolve_methods(seen["methods"])
    assert len(seen.get("methods") or ()) == words.count("--method")
    for option in ("compile", "autotune"):
        assert seen.get(option, False) == (f"--{option}" in words)
    assert (seen.get("memory", True) in ([], False)) == ("--no-memory" in words)
    assert len(seen.get("sizes", seen.get("tokens"))) == words.count("--size") + words.count("--tokens")
    assert f"<!-- bench {seen['session'].name or words[1]} -->" in PAGE.read_text(encoding="utf-8")


def test_every_place_on_the_page_has_its_command() -> None:
    text = SHORT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert re.findall(r"<!-- bench [\w-]+ -->", text) == [], "readers have some rows of each"
    names, made = re.findall(r"<!-- bench ([\w-]+) -->", PAGE.read_text(encoding="utf-8")), set[str]()
    for command in PUBLISHED + re.findall(r"^python (?:-m )?benchmarks.*$", COMMANDS, re.MULTILINE):
        words = shlex.split(command)
        kind = words[2] if words[1] in ("-m", "bench") else words[1]
        made.add(words[words.index("--name") + 1] if "--name" in words else re.sub(r"^benchmarks.|\.py$", "", kind))
    assert set(names) <= made and len(names) == len(set(names))


# Goals.


def ratio(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def call(method: str, floor: float, untouched: float, tomesd: float, peak: int) -> dict[str, Any]:
    """A row of `elfatt-fast`: exact steps, and its own phase."""
    speed = {"untouched": ratio(untouched), "tomesd": ratio(tomesd)}
    own = {"variant": f"{method}/1", "steps": 40, "seconds": 1.0, "speed": speed}
    parts = [{"variant": "untouched", "steps": 10}, {**own, "floor": {"name": "floor", **ratio(floor)}}]
    return {"size": 512, "method": method, "rounds": 5, "peak_bytes": peak, "parts": parts}


def config(levels: int, block_size: int, residual_steps: int = 1) -> dict[str, Any]:
    phase = {"block_size": block_size, "residual_steps": residual_steps}
    return {"config": {"levels": levels, "reuse_steps": 1, "phases": [phase]}}


def group(bystanders: float | None = 0.01, **key: Any) -> dict[str, Any]:
    return {"key": key, "sittings": [{"bystanders": 0.0}, {"bystanders": bystanders}]}


@pytest.fixture
def files() -> dict[str, dict[str, Any]]:
    """Results of benchmarks, by their names."""
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
    merged = {"dtype": "float32", "method": "ours", "rounds": 5, "speed": {"tomesd": ratio(2.0)}}
    layer = [
        {"tokens": tokens, "part": part, "method": "elfatt", "rounds": 5, "speed": {"softmax": ratio(speed)}}
        for tokens, part, speed in ((4096, "attention", 99.0), (4096, "layer", 10.0), (16384, "layer", 16.0))
    ]
    exponents = {"attention": {"elfatt": ratio(9.0)}, "layer": {"elfatt": ratio(1.1)}}
    groups = [group(tokens=tokens, part="layer") for tokens in (4096, 16384)]
    found = {
        "merging": {"rows": [merged | {"tokens": tokens} for tokens in (4096, 16384)]},
        "growth": {"rows": layer, "groups": groups, "exponents": exponents},
        **dict.fromkeys(("unet-512", "unet-1024", "unet-2048"), unet),
    }
    copied: dict[str, dict[str, Any]] = json.loads(json.dumps(found))
    return copied


def goals(folder: Path, files: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    cells = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")] for line in goals_table(folder).splitlines()[2:]
    ]
    return {what: rest for what, *rest in cells}


MERGING = "merging 4096 tokens, float32: fraction of tomesd's time"
LAYER = "ELFATT's layer without merging"
SMALL = "elfatt-fast, 512x512, one level, 128 keys: times "


def test_few_rounds_and_a_busy_machine_decide_nothing(files: Any, tmp_path: Path) -> None:
    for row in [*files["merging"]["rows"], *files["unet-512"]["rows"]]:
        row["rounds"] = 3 if "tokens" in row else 1
    files["growth"]["groups"] = [group(0.3, tokens=16384, part="layer"), group(0.9, tokens=4096, part="other")]
    files["unet-512"]["groups"] = [group(0.06, size=512)]
    table = goals(tmp_path, files)
    assert table[MERGING][-1] == "only 3 rounds"
    assert table[f"{LAYER}, 4096 tokens: fraction of fused softmax's time"][-1] == "met"
    assert table[f"{LAYER}, 16384 tokens: fraction of fused softmax's time"][-1] == "machine busy (30%)"
    assert table[f"{LAYER}: exponent of the growth with the tokens"][-1] == "machine busy (30%)"
    assert table[f"{SMALL}as fast as tomesd"][-1] == "only 1 round, machine busy (6%)"
    assert table["elfatt-fast, 1024x1024, two levels: times its floor's time"][-1] == "met"
    for row in files["unet-512"]["rows"]:
        row["rounds"] = 5
    files["unet-512"]["groups"] = [group(None, size=512)]
    assert goals(tmp_path, files)[f"{SMALL}as fast as tomesd"][-1] == "met", "what others took is unknown"


def test_what_rounds_contradict_and_a_floor_does_not_reach_is_told(files: Any, tmp_path: Path) -> None:
    files["merging"]["rows"][0]["speed"]["tomesd"] = shares = {"median": 2.0, "min": 1.6, "max": 4.0}
    speed = {"untouched": ratio(1.4), "tomesd": ratio(1.15)}
    files["unet-512"]["rows"].append({"method": "floor", "rounds": 5, "peak_bytes": None, "speed": speed})
    own = files["unet-512"]["rows"][2]["parts"][1]
    own["speed"]["untouched"] = ratio(1.3)
    table = goals(tmp_path, files)
    assert table[MERGING][1:] == ["0.500 (0.250 to 0.625)", "`ours`", "met by the median, not in every round"]
    assert table[f"{SMALL}as fast as untouched"][-1] == "**missed**; its floor is 1.40 times as fast"
    assert table[f"{SMALL}as fast as tomesd"][-1] == "met"
    shares["median"] = 1.62
    own["floor"]["min"] = 0.9  # no call is faster than the same without attention
    table = goals(tmp_path, files)
    assert table[MERGING][-1] == "**missed** by the median, not in every round"
    assert table[f"{SMALL}its floor's time"][-1] == "met; noisy, a round at 0.90 of its floor"


def test_the_worst_of_our_methods_counts_for_memory_at_every_size(files: Any, tmp_path: Path) -> None:
    """What was not measured is not judged."""
    table = goals(tmp_path, files)
    for size in ("512x512", "1024x1024", "2048x2048"):
        row = table[f"peak memory, {size}: greatest fraction of the untouched call's"]
        assert row == ["at most 1.005", "1.040", "`elfatt-fast:levels=2`", "**missed**"]
        row = table[f"peak memory, {size}, with `residual_steps`: greatest fraction of the untouched call's"]
        assert row == ["at most 1.005", "1.300", "`elfatt-fast:residual_steps=8`", "**missed**"]
    files["unet-512"]["rows"][0]["peak_bytes"] = None
    files["unet-1024"]["rows"][0] |= {"method": "other", "peak_bytes": None}
    files["growth"]["rows"][1]["speed"] = {}  # it took too long
    table = goals(tmp_path, files)
    missing = [f"peak memory, {size}: greatest fraction of the untouched call's" for size in ("512x512", "1024x1024")]
    missing += ["peak memory, SDXL's shape, 1024x1024: greatest fraction of the untouched call's"]
    missing += [f"{LAYER}, 4096 tokens: fraction of fused softmax's time"]
    assert all(table[what][1].startswith("not measured yet") for what in missing)
    (tmp_path / "empty").mkdir()
    empty = goals(tmp_path / "empty", {})
    assert len(empty) == 23 and all(row[1].startswith("not measured yet") for row in empty.values())
