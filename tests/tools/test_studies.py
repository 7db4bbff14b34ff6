"""Published results and the pages on studies: what is kept of a run, its rows against others, trade-offs and plots."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from support import runs

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report import charts, load_results, write_report, written_tables
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.tables import TIMES, TO
from elfatt_sd.evaluation.run import FORMAT, RESULTS_FILE
from elfatt_sd.files import write_json
from tools import publish as tool
from tools.pages.__main__ import main as fill
from tools.pages.blocks import MISSING
from tools.pages.compare import compare_rows
from tools.pages.evaluation import fill_page
from tools.pages.headline import draw_headline, headline_table
from tools.pages.pareto import draw_pareto
from tools.pages.short import short_study, study_table
from tools.publish import MOST_BYTES, publish

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
END = "<!-- end -->\n"
TEXT = f"# Page\n\nbefore\n\n<!-- eval toy_full difference -->\nold\n{END}\nafter\n<!-- eval none -->\n{END}"


@pytest.fixture(scope="module", autouse=True)
def two_plots() -> Any:
    """Of all plots, which take seconds, two are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_makers", lambda results: [charts.differences, charts.memory])
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    runs.build_run(folder, images=2, size=32)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_published_is_of_one_piece(run: Path, tmp_path: Path) -> None:
    """The results changed after the report was written, and a plot has nothing to show any more."""
    target = publish(load_results(run), tmp_path)
    assert target == tmp_path / "toy_full"
    assert json.loads((target / "results.json").read_text()) == json.loads((run / "results.json").read_text())
    tables = {"table.md", "table.csv", "table.tex", "difference.png"}
    assert names(target) == {"results.json", "index.html", "memory.png"} | tables
    (target / "README.md").write_text("by hand")
    results = json.loads((run / "results.json").read_text())
    for row in results["rows"]:
        row["memory"] = None
    results["rows"][2]["label"] = "Renamed"
    runs.save(tmp_path / "run", results)
    write_report(load_results(tmp_path / "run"))
    assert publish(load_results(tmp_path / "run"), tmp_path, page=False) == target
    assert names(target) == {"results.json", "README.md"} | tables
    for name, text in written_tables(load_results(target)).items():
        assert (target / name).read_text(encoding="utf-8") == text and "Renamed" in text


@pytest.mark.parametrize("name", ["../x", "/tmp/x", ".hidden", "nul"])
def test_a_name_leads_nowhere_else(run: Path, tmp_path: Path, name: str) -> None:
    runs.save(tmp_path / "run", json.loads((run / "results.json").read_text()) | {"name": name})
    with pytest.raises(ElfattError, match="cannot be that of a folder"):
        publish(load_results(tmp_path / "run"), tmp_path / "all" / "results")
    assert names(tmp_path) == {"run"}
    (tmp_path / "all" / "toy_full").mkdir(parents=True)
    (tmp_path / "all" / "toy_full" / "mine.png").touch()
    with pytest.raises(ElfattError, match="holds something else than published results"):
        publish(load_results(run), tmp_path / "all")
    assert names(tmp_path / "all" / "toy_full") == {"mine.png"}
    for marker in (f"eval toy_full {name}", f"compare toy_full {name}/sd sd", f"pareto closeness {name}"):
        if name.startswith(".."):
            with pytest.raises(ElfattError, match="accepted: a plain file name"):
                fill_page(f"<!-- {marker} -->\n{END}", RESULTS, tmp_path)


def test_commands_publish_and_fill_a_page(
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
    assert fill([*words, str(results), "--check"]) == 1 and page.read_text() == TEXT
    assert fill([*words, str(results)]) == fill([*words, str(results), "--check"]) == 0
    filled = page.read_text()
    assert fill([*words, str(tmp_path / "mistyped")]) == fill(["eval", str(tmp_path / "none.md")]) == 2
    assert "none.md cannot be read" in capsys.readouterr().err and page.read_text() == filled
    assert filled.startswith("# Page\n\nbefore\n\n<!-- eval toy_full difference -->\n| Method |")
    assert "old" not in filled and "ELFATT-SD" in filled and "![difference](results/toy_full/difference.png)" in filled
    machine = "2 cores of AMD EPYC, 2 threads, torch 2.15.0"
    assert f"Protocol `toy_full` (4f1d0c6e5b): 64 images a row, 25 steps, {machine}" in filled
    assert filled.endswith(f"after\n<!-- eval none -->\n{MISSING}\n{END}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Page\n", "has no marker '<!-- eval NAME -->'"),
        ("<!-- eval toy_full nothing -->\n", r"plot 'nothing' .* does not exist; there are: .*difference"),
        ("<!-- headline plot study_presets/none -->\n", "row 'none' of study_presets does not exist; there are: sd,"),
        ("<!-- headline plot study_large/tome -->\n", "of study_large has no closeness or no time"),
    ],
)
def test_what_is_wrong_on_a_page_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=message):
        fill_page(text + END * ("<!--" in text), RESULTS, tmp_path)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/quality.md", "docs/transformers.md", "docs/tuning.md", "eval/results/README.md"]
)
def test_the_page_is_in_step(page: str) -> None:
    path = ROOT / page
    filled = fill_page(path.read_text(), RESULTS, path.parent)[0]
    assert filled == path.read_text(), f"python -m tools.pages eval {page} mends it"


def test_all_results_are_small_and_on_a_page_that_is_short_for_readers() -> None:
    """At most six rows for a question: `rows` sees to that."""
    for folder in RESULTS.glob("*/"):
        assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES, folder.name
    text = (ROOT / "docs" / "quality.md").read_text()
    assert len(text.splitlines()) <= 250 and "<!-- eval" not in text
    text = (RESULTS / "README.md").read_text()
    studies = {path.stem for path in (ROOT / "eval").glob("study_*.toml")}
    others = {"toy_full", "tuned_toy", "finalists_transformer"}
    assert set(re.findall(r"<!-- eval ([\w-]+)", text)) == studies | others
    larger = {"study_large", "study_transformer", "study_weights", "study_first_block"}
    for named in re.findall(r"<!-- pareto \w+ ([^>]*) -->", text):
        assert set(named.split()) == studies - larger, "all of one model and size"


T_QUANTILE = 3.182446  # of Student's t with 3 degrees of freedom, at 97.5 %
FIRST, SECOND = [40.0, 30.0, 20.0, 45.0], [39.0, 28.5, 19.5, 46.0]
UNTOUCHED = {"cell": "sd", "method": "sd", "label": "SD", "role": "baseline"}


def row(cell: str, psnr: list[float | None] | None, ssim: list[float] | None = None, **fields: Any) -> dict[str, Any]:
    paired: dict[str, Any] = {"psnr": {"mean": 30.0, "identical": 0}, "ssim": {"mean": 0.9}}
    if psnr is not None:
        paired["classes"] = list(range(len(psnr)))
        paired["psnr"]["pictures"] = psnr
        paired["ssim"]["pictures"] = ssim or [0.9] * len(psnr)
    return {"cell": cell, "label": cell.upper(), "method": "custom", "paired": paired, **fields}


def timed(label: str, speed: float | None, psnr: float, **fields: Any) -> dict[str, Any]:
    ratio = {"median": speed, "low": 0.9 * speed, "high": 1.1 * speed} if speed else None
    paired = {"psnr": {"mean": psnr, "interval": [psnr - 1, psnr + 1], "identical": 0}}
    time = ratio and {"unet": {"seconds_per_image": 1.0, "ratio": ratio}}
    made = {"cell": label, "label": label, "method": "custom", "images": 64, "paired": paired, "time": time}
    return {**made, **fields}


def data(*rows: dict[str, Any], name: str = "study", **protocol: Any) -> dict[str, Any]:
    settings = {"model": "toy", "steps": 25, "height": 256, "width": 256, **protocol}
    return {"format": FORMAT, "name": name, "protocol": settings, "rows": [UNTOUCHED, *rows]}


def cells(table: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [[text.replace("\\", "").replace("\N{MINUS SIGN}", "-") for text in line] for line in lines]


def test_the_mean_of_the_differences_and_its_interval() -> None:
    """Means of 33.75 and 33.25 with intervals of about 10 dB hide what each picture shows."""
    table = compare_rows(Results(data(row("a", FIRST), row("b-0.5", SECOND))), ["a", "b-0.5", "b-0.5", "a"])
    titles, rule, there, back = cells(table)
    assert titles == ["Row", "Against", "PSNR, dB", "SSIM", "Closer by PSNR"]
    assert rule == [":---", ":---", "---:", "---:", "---:"]
    assert (there[:2], there[-1]) == (["A", "B-0.5"], "3 of 4")
    assert (back[:2], back[-1]) == (["B-0.5", "A"], "1 of 4")
    each = [one - other for one, other in zip(FIRST, SECOND, strict=True)]
    half = T_QUANTILE * statistics.stdev(each) / 2
    value, low, high = (float(text) for text in re.sub(r"[\[\],]", "", there[2]).split())
    assert (value, low, high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=0.06)
    assert back[2].startswith("-0.5")


def test_speed_is_compared_within_rounds_of_one_run() -> None:
    both = [
        row(name, psnr, time={"unet": {"values": values}})
        for name, psnr, values in (("a", FIRST, [1.0, 2.0, 4.0]), ("b", SECOND, [2.0, 6.0, 4.0]))
    ]
    table = cells(compare_rows(Results(data(*both)), ["a", "b"]))
    assert (table[0][-1], table[2][-1]) == ("Times as fast", "2.00 (1.00 to 3.00)")
    other = Results(data(*both, name="other"))
    assert cells(compare_rows(Results(data(*both)), ["a", "other/b"], [other]))[0][-1] == "Closer by PSNR"
    assert cells(compare_rows(Results(data(both[0], row("b", SECOND))), ["a", "b"]))[0][-1] == "Closer by PSNR"


def test_identical_pictures_have_no_psnr() -> None:
    """Their SSIM is one."""
    some, none = row("a", [None, 30.0, 20.0], [1.0, 0.9, 0.8]), row("c", [None, None, None], [1.0, 1.0, 1.0])
    line = cells(compare_rows(Results(data(some, row("b", [1.0, 28.0, 19.0], [0.7, 0.6, 0.5]))), ["a", "b"]))[2]
    assert line[2].startswith("+1.5 [") and line[3].startswith("+0.30") and line[4] == "3 of 3"
    table = cells(compare_rows(Results(data(some, none)), ["a", "c", "c", "a", "c", "c"]))
    assert [line[2::2] for line in table[2:]] == [["—", "0 of 3"], ["—", "2 of 3"], ["identical", "0 of 3"]]


FEWER = row("a", SECOND[:3])
MIXED = row("a", SECOND)
MIXED["paired"]["classes"] = [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("names", "other", "message"),
    [
        (["a"], None, "cannot be paired; there are: sd, a, old"),
        (["a", "absent"], None, "cannot be paired; there are: sd, a, old"),
        (["a", "old"], None, "no figures of each image; score the run again"),
        (["a", "second/b"], {}, "cannot be paired; there are: sd, a, old, second/sd, second/a"),
        (["a", "second/a"], {"steps": 50}, "runs with different steps have nothing in common: study 25, second 50"),
        (["a", "second/a"], FEWER, "are not of the same prompts"),
        (["a", "second/a"], MIXED, "are not of the same prompts"),
    ],
)
def test_what_cannot_be_compared_is_named(names: list[str], other: dict[str, Any] | None, message: str) -> None:
    """Pictures of other prompts or another pipeline are refused."""
    rows, protocol = ([other], {}) if other and "paired" in other else ([row("a", SECOND)], other or {})
    others = [] if other is None else [Results(data(*rows, name="second", **protocol))]
    with pytest.raises(ElfattError, match=message):
        compare_rows(Results(data(row("a", FIRST), row("old", None))), names, others)


@pytest.fixture
def studies() -> list[dict[str, Any]]:
    """`fast` and `close` are best in one figure, `middle` lies above their line, `worse` is beaten by all."""
    first = [timed("fast", 2.0, 20.0), timed("worse", 1.1, 15.0), timed("null", 3.0, 50.0, role="null")]
    second = [timed("close", 1.25, 40.0), timed("middle", 1.6, 30.0), timed("untimed", None, 60.0)]
    second.append(timed("preset", 1.2, 16.0, method="elfatt"))
    return [data(*first, name="study_a"), data(*second, name="study_b")]


def test_a_page_holds_comparisons_and_trade_offs(studies: list[dict[str, Any]], tmp_path: Path) -> None:
    """Names of rows have dots; a run that is not there yet is no error."""
    markers = ["eval none", "compare study a b-0.5", "compare none a b", "compare study a none/b"]
    markers += ["compare study a more/b-0.5", "pareto pareto_closeness study_a study_b study_c"]
    page, plots = fill_page("".join(f"<!-- {marker} -->\nold\n{END}" for marker in markers), tmp_path, tmp_path)
    assert page.count(MISSING) == 6 and plots == {}
    more = data(row("b-0.5", SECOND), name="more")
    for results in (data(row("a", FIRST), row("b-0.5", SECOND)), more, *studies):
        write_json(tmp_path / results["name"] / RESULTS_FILE, results)
    page, plots = fill_page(page, tmp_path, tmp_path)
    assert "| A | B-0.5 | +0.5" in page and "| A | B-0.5 (more) | +0.5" in page and "old" not in page
    assert list(plots) == [tmp_path / "pareto_closeness.png"]
    assert plots[tmp_path / "pareto_closeness.png"].startswith(b"\x89PNG")
    assert "(pareto_closeness.png)" in page and "Not in it yet: `study_c`." in page and "| fast |" in page
    assert page.count(MISSING) == 3 and fill_page(page, tmp_path, tmp_path) == (page, plots)


def test_rows_that_no_other_beats_are_named(studies: list[dict[str, Any]]) -> None:
    """From the fastest to the slowest; a preset is named wherever it lies. Two threads may speed up one part more."""
    chart, table = draw_pareto([Results(run) for run in studies])
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [(line[1], line[2], line[-1]) for line in lines] == [
        ("fast", "study\\_a", "no"),
        ("middle", "study\\_b", "no"),
        ("close", "study\\_b", "no"),
        ("preset", "study\\_b", "yes"),
    ]
    assert lines[0][0] == "1" and lines[0][3:5] == ["64", f"2.00 (1.80{TO}2.20)"]
    assert sorted(text.get_text() for text in chart.figure.axes[0].texts) == ["1", "2", "3", "4"]
    assert len(chart.points) == 5 and chart.points[0].startswith("fast: 0.50, ")
    threads = [{**run, "environment": {"cpu_threads": count}} for run, count in zip(studies, (1, 2), strict=True)]
    assert "threads" not in draw_pareto([Results(threads[0]), Results(threads[0])])[0].caption
    said = draw_pareto([Results(each) for each in (*threads, threads[1])])[0].caption
    assert said.endswith("Timed with different numbers of threads: `study_a` with 1, the others with 2.")
    with pytest.raises(ElfattError, match="different steps have nothing in common: study_a 25, large 50"):
        draw_pareto([Results(studies[0]), Results(data(name="large", steps=50))])
    with pytest.raises(ElfattError, match="no row of empty has both UNet time and closeness"):
        draw_pareto([Results(data(name="empty"))])


PHASE = {"attention": "softmax", "ratio": 0.0, "block_order": "sequence", "second_order": None}
PHASE |= {"residual_steps": 1, "agent_share": 0.5}


@pytest.mark.parametrize(
    ("phase", "kind", "shared"),
    [
        ({"attention": "sampled", "residual_steps": 4}, "sampled keys", True),
        ({"attention": "block", "block_order": "spread"}, "spread blocks", False),
        ({"attention": "block", "block_order": "spread", "second_order": "windows"}, "other blocks", False),
        ({"attention": "cell_spread", "block_order": "spread"}, "spread blocks", False),
        ({"ratio": 0.5}, "merging (ToMe)", False),
        ({"attention": "elfatt"}, "ELFATT", False),
        ({"attention": "elfatt", "agent_share": 1.0}, "agents", False),
        ({}, "unknown", False),
    ],
)
def test_a_mark_tells_the_kind_of_approximation(
    studies: list[dict[str, Any]], phase: dict[str, Any], kind: str, shared: bool
) -> None:
    """The phases are those of the row, where exact steps and merging beside another kind do not count."""
    phases = [PHASE, PHASE | {"ratio": 0.5}, PHASE | phase] if phase.get("attention") else [PHASE, PHASE | phase]
    studies[0]["protocol"]["cells"] = [{"name": "fast", "config": {"phases": phases}}, {"name": "worse"}]
    chart = draw_pareto([Results(run) for run in studies])[0]
    labels = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert {*labels} == {"unknown", kind}
    mark = next(line for line in chart.figure.axes[0].lines if list(line.get_xdata()) == [0.5])
    assert mark.get_label() == kind
    assert (mark.get_markerfacecolor() == mark.get_color()) is not shared
    assert ("Hollow" in chart.caption) is shared


def titles(table: str) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")]


def test_some_rows_of_a_run_in_the_columns_that_vary(run: Path) -> None:
    """The accuracy is the same in all rows, and no difference in distance is shown; verdicts that differ are."""
    table = short_study(load_results(RESULTS / "toy_full"), ["elfatt-fast", "elfatt-quality"])
    assert titles(table) == ["Method", "PSNR, dB", "Lowest PSNR, dB", "SSIM", "UNet, s/img"]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| ELFATT-SD fast", "| ELFATT-SD quality"]
    table = short_study(load_results(RESULTS / "study_transformer"), ["few-keys", "no-cell"])
    assert {"Block size", "Feature cosine"} & {*titles(table)} == set()
    assert {"FD-toy difference, extrapolated", "Verdict", "Accuracy ↑"} <= {*titles(table)}
    for cells, message in ((["tome-all"] * 7, "at most 6 of"), (["tome"], r"rows=.'tome'. are not accepted")):
        with pytest.raises(ElfattError, match=message):
            short_study(load_results(RESULTS / "study_steps"), cells)
    results = json.loads((run / "results.json").read_text())
    for place, verdict in ((2, "better"), (3, "worse")):  # the interval of the share alone does not tell
        results["rows"][place]["accuracy"]["mean"]["difference"]["verdict"] = verdict
    made = study_table(Results(results))
    place = [column.title for column in made.columns].index("Accuracy ↑")
    assert [line.entries[place].remark for line in made.lines[1:5]] == ["", "better", "worse", ""]


def test_the_headline_is_readable_on_a_narrow_page(tmp_path: Path) -> None:
    """What was not measured is an empty cell."""
    page, plots = fill_page(f"<!-- headline plot study_presets/tome study_presets/agent -->\n{END}", RESULTS, tmp_path)
    assert [path.name for path in plots] == ["plot.png"] and f"| `tome` | 36.0 dB | 1.56{TIMES} | 1.34{TIMES} |" in page
    rows = [timed(name, speed, psnr, method=name) for name, speed, psnr in (("elfatt", 1.7, 35.0), ("agent", 1.6, 35))]
    rows += [timed("elfatt-fast", 2.0, 41.0, method="elfatt-fast"), timed("untimed", None, 30.0, method="untimed")]
    results = Results({"format": FORMAT, "name": "study_a", "protocol": {"model": "toy"}, "rows": rows})
    figure = draw_headline([(results, row) for row in results.rows[:3]]).figure
    (axes,) = figure.axes
    legend = figure.legends[0].get_texts()
    assert [text.get_text() for text in legend] == ["elfatt", "agent", "elfatt-fast"]
    words = [*legend, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
    pixels = 400 / figure.get_size_inches()[0] / 72
    assert min(text.get_fontsize() for text in words) * pixels > 10
    figure.draw_without_rendering()
    for label in (axes.xaxis.label, axes.yaxis.label):
        box = label.get_window_extent()
        assert figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max)
    measured = {"rows": [{"method": "elfatt", "speed": {"untouched": {"median": 1.37, "min": 1.2, "max": 1.6}}}]}
    (tmp_path / "unet-512.json").write_text(json.dumps(measured))
    lines = headline_table([(results, row) for row in results.rows], tmp_path).splitlines()
    found = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert found["`elfatt`"] == ["35.0 dB", f"1.70{TIMES}", f"1.37{TIMES}", "", ""]
    assert found["`agent`"][2:] == ["", "", ""] and found["`untimed`"][1] == ""
