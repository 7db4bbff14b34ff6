"""Published results and the pages that show them: what is kept of a run, rows against others, trade-offs, goals."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from support import runs

from benchmarks.merging import merging
from elfatt_sd.benchmarking.report import Session, save
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.evaluation.report.page import write_report
from elfatt_sd.evaluation.report.tables import written_tables
from elfatt_sd.evaluation.run import FORMAT
from elfatt_sd.files import write_json
from tools import publish as tool
from tools.pages import bench
from tools.pages.__main__ import main as fill
from tools.pages.blocks import MISSING
from tools.pages.compare import compare_rows
from tools.pages.evaluation import fill_page
from tools.pages.goals import goals_table
from tools.publish import publish

ROOT = Path(__file__).parents[2]
RESULTS, BENCHMARKS = ROOT / "eval" / "results", ROOT / "benchmarks" / "results"
END = "<!-- end -->\n"


def page_of(*markers: str) -> str:
    return "".join(f"<!-- {marker} -->\nold\n{END}" for marker in markers)


PAGES = {
    "eval": ["README.md", "docs/quality.md", "docs/transformers.md", "docs/tuning.md", "eval/results/README.md"],
    "bench": ["benchmarks/results/README.md", "docs/performance.md", "docs/transformers.md", "tools/goals.md"],
}


@pytest.mark.parametrize(("kind", "page"), [(kind, page) for kind in PAGES for page in PAGES[kind]])
def test_a_committed_page_is_in_step_with_the_committed_results(kind: str, page: str) -> None:
    text, start = (ROOT / page).read_text(encoding="utf-8"), (ROOT / page).parent
    filled = fill_page(text, RESULTS, start)[0] if kind == "eval" else bench.fill_page(text, BENCHMARKS, start)
    assert filled == text, f"python -m tools.pages {kind} {page} mends it"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run")
    runs.build_run(folder, images=2, size=32)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_published_is_of_one_piece_and_removes_nothing_else(run: Path, tmp_path: Path) -> None:
    """The results changed after the report was written, and a plot has nothing to show any more."""
    target, results = publish(load_results(run), tmp_path), json.loads((run / "results.json").read_text())
    assert json.loads((target / "results.json").read_text()) == results
    tables = {"table.md", "table.csv", "difference.png", "closeness.png"}
    assert names(target) == {"results.json", "index.html", "closeness_time.png", "distance_time.png"} | tables
    (target / "README.md").write_text("by hand")
    for row in results["rows"]:
        row["time"] = None
    results["rows"][2]["label"] = "Renamed"
    runs.save(tmp_path / "run", results)
    write_report(load_results(tmp_path / "run"))
    assert publish(load_results(tmp_path / "run"), tmp_path, page=False) == target == tmp_path / "toy_full"
    assert names(target) == {"results.json", "README.md"} | tables
    for name, text in written_tables(load_results(target)).items():
        assert (target / name).read_text(encoding="utf-8") == text and "Renamed" in text
    with pytest.raises(ElfattError, match="cannot be that of a folder"):
        publish(Results.of(results | {"name": "../x"}), tmp_path / "all" / "results")
    (tmp_path / "all" / "toy_full").mkdir(parents=True)
    (tmp_path / "all" / "toy_full" / "mine.png").touch()
    with pytest.raises(ElfattError, match="holds something else than published results"):
        publish(load_results(run), tmp_path / "all")
    assert names(tmp_path / "all" / "toy_full") == {"mine.png"} and names(tmp_path / "all") == {"toy_full"}


def test_commands_publish_and_fill_pages(run: Path, tmp_path: Path, capsys: Any) -> None:
    """What people write, and what is wrong, stays as it is; a result that is not there yet is no error."""
    published, measured, page = tmp_path / "results", tmp_path / "bench", tmp_path / "page.md"
    assert tool.main([str(run), "--out", str(published)]) == 0
    assert tool.main([str(tmp_path / "no-run"), "--out", str(published)]) == 2
    session = Session(command="python -m benchmarks.merging")
    made = merging(tokens=[64], channels=16, repeats=2, device="cpu", dtypes=["float32"], session=session)
    write_json(measured / "merging.json", made)
    write_json(measured / "suite.json", {"parts": {"a part": made, "second": made}})
    save(made, measured / "merging.json")
    plot = (measured / "merging.png").read_bytes()
    (measured / "merging.png").write_bytes(b"old")
    marks = ["eval toy_full difference", "eval none", "compare none a b", "pareto plot none"]
    marks += ["bench merging ours tomesd", "bench suite/a-part", "bench none", "bench suite/none ours"]
    page.write_text(f"# Page\n\nbefore\n\n{page_of(*marks)}\nafter\n")
    for kind, results in (("eval", published), ("bench", measured)):
        words = [kind, str(page), "--results"]
        before = page.read_text()
        assert fill([*words, str(results), "--check"]) == 1 and page.read_text() == before
        assert fill([*words, str(results)]) == fill([*words, str(results), "--check"]) == 0
        filled = page.read_text()
        assert fill([*words, str(tmp_path / "mistyped")]) == fill([kind, str(tmp_path / "none.md")]) == 2
        assert "none.md cannot be read" in capsys.readouterr().err and page.read_text() == filled
    assert filled.startswith("# Page\n\nbefore\n\n<!-- eval toy_full difference -->\n| Method |")
    assert filled.endswith("\nafter\n") and "old" not in filled and filled.count(MISSING) == 5
    assert "![difference](results/toy_full/difference.png)" in filled
    few, part = (filled.partition(f"<!-- {mark} -->\n")[2].partition(END)[0] for mark in marks[4:6])
    assert [line.split(" | ")[0] for line in few.splitlines()[2:4]] == ["| tomesd", "| ours"]
    assert "[All rows](bench/merging.md)" in few and "![merging](bench/merging.png)" in few
    assert "![merging](bench/suite/a-part.png)" in part and "| ours |" in part and "second" not in part
    assert (measured / "merging.png").read_bytes() == plot


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("", "has no marker '<!-- eval NAME -->'"),
        ("eval toy_full nothing", r"plot 'nothing' .* does not exist; there are: .*difference"),
        ("headline plot study_presets/none", "row 'none' of study_presets does not exist; there are: sd,"),
        ("headline plot study_large/tome", "of study_large has no closeness or no time"),
        ("pareto closeness ../x", "accepted: a plain file name"),
        ("rows study_steps closeness tome", r"rows=.'tome'. are not accepted"),
    ],
)
def test_what_is_wrong_on_a_page_is_named(marker: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=message):
        fill_page(page_of(marker) if marker else "# Page\n", RESULTS, tmp_path)


def cells(table: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [[text.replace("\\", "").replace("\N{MINUS SIGN}", "-") for text in line] for line in lines]


FIRST, SECOND = [40.0, 30.0, 20.0, 45.0], [39.0, 28.5, 19.5, 46.0]


def row(cell: str, psnr: list[float | None] | None, ssim: list[float] | None = None, **fields: Any) -> dict[str, Any]:
    paired: dict[str, Any] = {"psnr": {"mean": 30.0, "identical": 0}, "ssim": {"mean": 0.9}}
    if psnr is not None:
        paired["classes"] = list(range(len(psnr)))
        paired["psnr"]["pictures"] = psnr
        paired["ssim"]["pictures"] = ssim or [0.9] * len(psnr)
    return {"cell": cell, "label": cell.upper(), "method": "custom", "paired": paired, **fields}


def data(*rows: dict[str, Any], name: str = "study", **protocol: Any) -> dict[str, Any]:
    settings = {"model": "toy", "steps": 25, "height": 256, "width": 256, **protocol}
    untouched = {"cell": "sd", "method": "sd", "label": "SD", "role": "baseline"}
    return {"format": FORMAT, "name": name, "protocol": settings, "rows": [untouched, *rows]}


def test_rows_are_compared_image_by_image_and_speed_within_rounds_of_one_run() -> None:
    """Means of 33.75 and 33.25 with intervals of about 10 dB hide what each picture shows."""
    values = ([1.0, 2.0, 4.0], [2.0, 6.0, 4.0])
    both = [
        row(name, psnr, time={"unet": {"values": taken}})
        for name, psnr, taken in zip(("a", "b-0.5"), (FIRST, SECOND), values, strict=True)
    ]
    titles, _, there, back = cells(compare_rows(Results.of(data(*both)), ["a", "b-0.5", "b-0.5", "a"]))
    assert titles[-1] == "Times as fast" and (there[4], back[4]) == ("3 of 4", "1 of 4")
    assert (there[:2], there[5], back[2][:4]) == (["A", "B-0.5"], "2.00 (1.00 to 3.00)", "-0.5")
    each = [one - other for one, other in zip(FIRST, SECOND, strict=True)]
    half = 3.182446 * statistics.stdev(each) / 2  # of Student's t with 3 degrees of freedom, at 97.5 %
    found = [float(text) for text in re.sub(r"[\[\],]", "", there[2]).split()]
    assert found == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=0.06)
    other = Results.of(data(*both, name="other"))
    assert "Times as fast" not in compare_rows(Results.of(data(*both)), ["a", "other/b-0.5"], [other])
    # identical pictures have no PSNR; their SSIM is one
    some, none = row("a", [None, 30.0, 20.0], [1.0, 0.9, 0.8]), row("c", [None, None, None], [1.0, 1.0, 1.0])
    line = cells(compare_rows(Results.of(data(some, row("b", [1.0, 28.0, 19.0], [0.7, 0.6, 0.5]))), ["a", "b"]))[2]
    assert line[2].startswith("+1.5 [") and line[3].startswith("+0.30") and line[4] == "3 of 3"
    table = cells(compare_rows(Results.of(data(some, none)), ["a", "c", "c", "a", "c", "c"]))
    assert [line[2::2] for line in table[2:]] == [["—", "0 of 3"], ["—", "2 of 3"], ["identical", "0 of 3"]]


MIXED = row("a", SECOND)
MIXED["paired"]["classes"] = [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("named", "other", "protocol", "message"),
    [
        (["a", "old"], row("a", SECOND), {}, "no figures of each image; score the run again"),
        (["a", "second/b"], row("a", SECOND), {}, "cannot be paired; there are: sd, a, old, second/sd, second/a"),
        (["a", "second/a"], row("a", SECOND), {"steps": 50}, "with different steps have nothing in common: study 25, "),
        (["a", "second/a"], row("a", SECOND[:3]), {}, "are not of the same prompts"),
        (["a", "second/a"], MIXED, {}, "are not of the same prompts"),
    ],
)
def test_pictures_of_other_prompts_or_another_pipeline_are_not_compared(
    named: list[str], other: dict[str, Any], protocol: dict[str, Any], message: str
) -> None:
    second = Results.of(data(other, name="second", **protocol))
    with pytest.raises(ElfattError, match=message):
        compare_rows(Results.of(data(row("a", FIRST), row("old", None))), named, [second])


def test_few_rounds_a_busy_machine_and_missing_figures_decide_no_goal(tmp_path: Path) -> None:
    files = {path.stem: json.loads(path.read_text()) for path in BENCHMARKS.glob("*.json")}
    for row in files["merging"]["rows"]:
        row["rounds"] = 3
    for group in files["growth"]["groups"]:
        for sitting in group["sittings"]:
            sitting["bystanders"] = None if group["key"].get("tokens") == 4096 else 0.3
    files["unet-1024"]["rows"][0]["peak_bytes"] = None
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    lines = goals_table(tmp_path).splitlines()[2:]
    last = [line.split(" | ")[-1] for line in lines]
    assert last[:4] == ["only 3 rounds |"] * 4
    assert last[4:6] == ["met |", "machine busy (30%) |"], "what others took is unknown in the first"
    missing = [line.split(" | ")[0] for line in lines if "not measured yet" in line]
    assert missing == ["| peak memory, 1024x1024: greatest fraction of the untouched call's"]
