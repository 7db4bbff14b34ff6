"""The page shows what the files hold, keeps what people wrote, and the committed one is in step."""

from __future__ import annotations

import itertools
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

ROOT = Path(__file__).parents[3]
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


def test_a_page_without_markers_and_a_foreign_file_are_refused(results: Path, tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match="has no marker"):
        fill_page("# Title\n", results, tmp_path)
    (results / "other.json").write_text("{}")
    with pytest.raises(ElfattError, match=r"other.json holds no results"):
        fill_page(TEXT, results, tmp_path)


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


def test_the_page_for_readers_is_short() -> None:
    text = SHORT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert re.findall(r"<!-- bench [\w-]+ -->", text) == [], "some rows of each"


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
    for flag in ("compile", "autotune"):
        assert seen.get(flag, False) == (f"--{flag}" in words)
    assert (seen.get("memory", True) in ([], False)) == ("--no-memory" in words)
    given = list(itertools.pairwise(words))
    single = {"--repeats", "--max-seconds", "--batch", "--dtype", "--model"}
    for flag, value in given:
        if flag in single:
            option = seen[flag.removeprefix("--").replace("-", "_")]
            assert option == type(option)(value)
    for flag, option in {"--size": "sizes", "--tokens": "tokens", "--memory-batch": "memory"}.items():
        if flag in words:
            assert seen[option] == [int(value) if value.isdigit() else value for word, value in given if word == flag]
    assert len(seen.get("methods") or ()) == words.count("--method")
    session = seen["session"]
    assert f"<!-- bench {session.name or words[1]} -->" in PAGE.read_text(encoding="utf-8")


def test_every_place_on_the_page_has_its_command() -> None:
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


def test_a_part_leads_nowhere_else(results: Path) -> None:
    part = json.loads((results / "merging.json").read_text())
    (results / "suite.json").write_text(json.dumps({"parts": {"../../x": part}}))
    with pytest.raises(ElfattError, match="accepted: a plain file name"):
        render(results)


def test_a_damaged_file_is_named(results: Path, tmp_path: Path) -> None:
    (results / "merging.json").write_text("{")
    with pytest.raises(ElfattError, match=r"merging\.json is damaged"):
        render(results)
    with pytest.raises(ElfattError, match=r"merging\.json is damaged"):
        fill_page(TEXT, results, tmp_path)
