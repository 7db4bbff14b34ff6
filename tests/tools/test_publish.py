"""Published results: what is kept of a run, and pages that are filled from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import runs

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report import charts, load_results, write_report, written_tables
from tools import publish as tool
from tools.pages.__main__ import main as fill
from tools.pages.blocks import MISSING
from tools.pages.evaluation import fill_page
from tools.publish import MOST_BYTES, publish

ROOT = Path(__file__).parents[2]
TEXT = """# Page

before

<!-- eval toy_full difference -->
old
<!-- end -->

after
<!-- eval none -->
<!-- end -->
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    runs.build_run(folder, images=2, size=32)
    return folder


@pytest.fixture(scope="module")
def published(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert publish(load_results(run), folder) == folder / "toy_full"
    return folder


def test_what_is_kept(run: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {path.name for path in (published / "toy_full").iterdir()}
    assert {"results.json", "index.html", "table.md", "table.csv", "table.tex"} < names
    assert json.loads((published / "toy_full" / "results.json").read_text()) == json.loads(
        (run / "results.json").read_text()
    )
    assert {"difference.png", "memory.png", "closeness.png"} < names
    monkeypatch.setattr("elfatt_sd.evaluation.report.page.render_page", None)
    monkeypatch.setattr(charts, "_makers", lambda results: [charts.differences])
    assert not (publish(load_results(run), tmp_path, page=False) / "index.html").exists(), "nor is it made"


@pytest.fixture
def two_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all plots, which take seconds, two are drawn."""
    monkeypatch.setattr(charts, "_makers", lambda results: [charts.differences, charts.memory_regression])


@pytest.mark.usefixtures("two_plots")
def test_what_is_published_is_of_one_piece(tmp_path: Path) -> None:
    """The results changed after the report was written, and a plot has nothing to show any more."""
    results = runs.build_run(tmp_path / "run", images=2, size=32)
    write_report(load_results(tmp_path / "run"))
    target = publish(load_results(tmp_path / "run"), tmp_path / "results")
    (target / "README.md").write_text("by hand")
    assert {"memory.png", "index.html"} < {path.name for path in target.iterdir()}
    for row in results["rows"]:
        row["memory"] = None
    results["rows"][2]["label"] = "Renamed"
    runs.save(tmp_path / "run", results)
    assert publish(load_results(tmp_path / "run"), tmp_path / "results", page=False) == target
    left = {path.name for path in target.iterdir()}
    assert "memory.png" not in left and "index.html" not in left
    assert {"README.md", "difference.png"} < left
    for name, text in written_tables(load_results(target)).items():
        assert (target / name).read_text(encoding="utf-8") == text
        assert "Renamed" in text


def test_a_page_is_filled(published: Path) -> None:
    text, plots = fill_page(TEXT, published, published.parent)
    assert text.startswith("# Page\n\nbefore\n\n<!-- eval toy_full difference -->\n| Method |")
    assert "old" not in text
    assert "ELFATT-SD" in text
    assert f"![difference]({published.name}/toy_full/difference.png)" in text
    machine = "2 cores of AMD EPYC, 2 threads, torch 2.15.0"
    assert f"Protocol `toy_full` (4f1d0c6e5b): 64 images a row, 25 steps, {machine}" in text
    assert f"after\n<!-- eval none -->\n{MISSING}\n<!-- end -->\n" in text
    assert fill_page(text, published, published.parent) == (text, plots)
    assert plots == {}


def test_what_is_committed_is_small() -> None:
    for folder in (ROOT / "eval" / "results").glob("*/"):
        assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES, folder.name


def test_what_is_wrong_is_named(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match="has no marker '<!-- eval NAME -->'"):
        fill_page("# Page\n", published, published)
    with pytest.raises(ElfattError, match=r"plot 'nothing' .* does not exist; there are: .*difference"):
        fill_page("<!-- eval toy_full nothing -->\n<!-- end -->", published, published)
    with pytest.raises(ElfattError, match=r"results.json does not exist; `elfatt-sd eval score"):
        publish(load_results(tmp_path), published)


@pytest.mark.usefixtures("two_plots")
def test_commands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    assert tool.main([str(run), "--out", str(results)]) == 0
    said = capsys.readouterr()
    assert "toy_full (" in said.out and said.err == ""
    monkeypatch.setattr(tool, "MOST_BYTES", 1000)
    assert tool.main([str(run), "--out", str(results)]) == 0
    assert "--no-page" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "no-run"), "--out", str(results)]) == 2
    page.write_text(TEXT)
    words = ["eval", str(page), "--results"]
    assert fill([*words, str(results), "--check"]) == 1
    assert page.read_text() == TEXT
    assert fill([*words, str(results)]) == 0
    assert fill([*words, str(results), "--check"]) == 0
    filled = page.read_text()
    assert fill([*words, str(tmp_path / "mistyped")]) == 2
    assert page.read_text() == filled
    assert fill(["eval", str(tmp_path / "none.md")]) == 2
    assert "none.md cannot be read" in capsys.readouterr().err


PAGES = ["README.md", "docs/quality.md", "docs/transformers.md", "docs/tuning.md", "eval/results/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_in_step(page: str) -> None:
    path = ROOT / page
    filled = fill_page(path.read_text(), ROOT / "eval" / "results", path.parent)[0]
    assert filled == path.read_text(), f"python -m tools.pages eval {page} mends it"


def test_the_page_on_quality_is_short() -> None:
    """At most six rows for a question: `rows` sees to that."""
    text = (ROOT / "docs" / "quality.md").read_text()
    assert len(text.splitlines()) <= 250
    assert "<!-- eval" not in text


def test_all_results_name_every_study() -> None:
    text = (ROOT / "eval" / "results" / "README.md").read_text()
    studies = {path.stem for path in (ROOT / "eval").glob("study_*.toml")}
    others = {"toy_full", "tuned_toy", "finalists_transformer"}
    assert set(re.findall(r"<!-- eval ([\w-]+)", text)) == studies | others
    larger = {"study_large", "study_transformer", "study_weights", "study_first_block"}
    for named in re.findall(r"<!-- pareto \w+ ([^>]*) -->", text):
        assert set(named.split()) == studies - larger, "all of one model and size"


@pytest.mark.parametrize("name", ["../x", "..", "/tmp/x", "a/b", ".hidden", "x\0y"])
def test_a_name_leads_nowhere_else(run: Path, tmp_path: Path, name: str) -> None:
    data = json.loads((run / "results.json").read_text())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(json.dumps(data | {"name": name}))
    (tmp_path / "x.png").touch()
    with pytest.raises(ElfattError, match="cannot be that of a folder"):
        publish(load_results(tmp_path / "run"), tmp_path / "all" / "results")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.png"]


def test_a_folder_of_something_else_is_kept(run: Path, tmp_path: Path) -> None:
    (tmp_path / "toy_full").mkdir()
    (tmp_path / "toy_full" / "mine.png").touch()
    with pytest.raises(ElfattError, match="holds something else than published results"):
        publish(load_results(run), tmp_path)
    assert [path.name for path in (tmp_path / "toy_full").iterdir()] == ["mine.png"]


@pytest.mark.parametrize(
    "marker",
    [
        "eval toy_full ../../x",
        "compare toy_full ../x/sd sd",
        "pareto closeness ../x",
        "eval toy_full /etc/x",
    ],
)
def test_names_on_a_page_lead_nowhere_else(published: Path, tmp_path: Path, marker: str) -> None:
    text = f"<!-- eval toy_full -->\n<!-- end -->\n<!-- {marker} -->\n<!-- end -->\n"
    with pytest.raises(ElfattError, match="accepted: a plain file name"):
        fill_page(text, published, tmp_path)
