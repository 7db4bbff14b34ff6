"""Published results and the pages that show them: what is kept of a run, rows against others, plots, goals."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest
from support import runs
from typer.testing import CliRunner

from benchmarks.merging import merging
from elfatt_sd import benchmarking
from elfatt_sd.benchmarking.record import Session
from elfatt_sd.benchmarking.report import save
from elfatt_sd.benchmarking.variants import resolve_methods
from elfatt_sd.cli import app
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report import charts, load_results, write_report, written_tables
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.tables import TIMES, TO
from elfatt_sd.evaluation.run import FORMAT, RESULTS_FILE
from elfatt_sd.files import write_json
from tools import publish as tool
from tools.pages import bench
from tools.pages.__main__ import main as fill
from tools.pages.blocks import MISSING
from tools.pages.compare import compare_rows
from tools.pages.evaluation import fill_page
from tools.pages.goals import goals_table
from tools.pages.headline import draw_headline
from tools.pages.pareto import draw_pareto
from tools.pages.short import study_table
from tools.publish import MOST_BYTES, publish

ROOT = Path(__file__).parents[2]
RESULTS, BENCHMARKS = ROOT / "eval" / "results", ROOT / "benchmarks" / "results"
COMMANDS = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
END = "<!-- end -->\n"


def page_of(*markers: str) -> str:
    return "".join(f"<!-- {marker} -->\nold\n{END}" for marker in markers)


def cells(table: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [[text.replace("\\", "").replace("\N{MINUS SIGN}", "-") for text in line] for line in lines]


# The committed pages.

PAGES = {"eval": ["README.md", "docs/quality.md", "docs/transformers.md", "docs/tuning.md", "eval/results/README.md"]}
PAGES["bench"] = ["benchmarks/results/README.md", "docs/performance.md", "docs/transformers.md", "tools/goals.md"]


@pytest.mark.parametrize(("kind", "page"), [(kind, page) for kind in PAGES for page in PAGES[kind]])
def test_a_committed_page_is_in_step_with_the_committed_results(kind: str, page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    filled = (
        fill_page(text, RESULTS, path.parent)[0] if kind == "eval" else bench.fill_page(text, BENCHMARKS, path.parent)
    )
    assert filled == text, f"python -m tools.pages {kind} {page} mends it"


def test_all_results_are_small_and_on_a_page_and_pages_for_readers_are_short() -> None:
    for folder in RESULTS.glob("*/"):
        assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES, folder.name
    for name, lines, whole in (("quality", 250, "<!-- eval"), ("performance", 150, r"<!-- bench [\w-]+ -->")):
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= lines and not re.search(whole, text), "readers have some rows of each"
    text = (RESULTS / "README.md").read_text()
    studies = {path.stem for path in (ROOT / "eval").glob("study_*.toml")}
    others = {"toy_full", "tuned_toy", "finalists_transformer"}
    assert set(re.findall(r"<!-- eval ([\w-]+)", text)) == studies | others
    larger = {"study_large", "study_transformer", "study_weights", "study_first_block"}
    for named in re.findall(r"<!-- pareto \w+ ([^>]*) -->", text):
        assert set(named.split()) == studies - larger, "all of one model and size"


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
    assert f"<!-- bench {seen['session'].name or words[1]} -->" in (BENCHMARKS / "README.md").read_text()


def test_every_place_on_the_page_has_its_command() -> None:
    names = re.findall(r"<!-- bench ([\w-]+) -->", (BENCHMARKS / "README.md").read_text(encoding="utf-8"))
    made = set()
    for command in PUBLISHED + re.findall(r"^python (?:-m )?benchmarks.*$", COMMANDS, re.MULTILINE):
        words = shlex.split(command)
        kind = words[2] if words[1] in ("-m", "bench") else words[1]
        made.add(words[words.index("--name") + 1] if "--name" in words else re.sub(r"^benchmarks.|\.py$", "", kind))
    assert set(names) <= made and len(names) == len(set(names))


# What is published of a run.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a run. Of all plots, which take seconds, two are drawn."""
    folder = tmp_path_factory.mktemp("run")
    runs.build_run(folder, images=2, size=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "PLOTS", [charts.differences, charts.PLOTS[3]])
        yield folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_published_is_of_one_piece(run: Path, tmp_path: Path) -> None:
    """The results changed after the report was written, and a plot has nothing to show any more."""
    target = publish(load_results(run), tmp_path)
    assert json.loads((target / "results.json").read_text()) == json.loads((run / "results.json").read_text())
    tables = {"table.md", "table.csv", "table.tex", "difference.png"}
    assert names(target) == {"results.json", "index.html", "distance_memory.png"} | tables
    (target / "README.md").write_text("by hand")
    results = json.loads((run / "results.json").read_text())
    for row in results["rows"]:
        row["memory"] = None
    results["rows"][2]["label"] = "Renamed"
    runs.save(tmp_path / "run", results)
    write_report(load_results(tmp_path / "run"))
    assert publish(load_results(tmp_path / "run"), tmp_path, page=False) == target == tmp_path / "toy_full"
    assert names(target) == {"results.json", "README.md"} | tables
    for name, text in written_tables(load_results(target)).items():
        assert (target / name).read_text(encoding="utf-8") == text and "Renamed" in text


def test_a_name_leads_nowhere_else_and_foreign_files_stay(run: Path, tmp_path: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    for name in ("../x", "/tmp/x", ".hidden", "nul"):
        with pytest.raises(ElfattError, match="cannot be that of a folder"):
            publish(Results(results | {"name": name}), tmp_path / "all" / "results")
    assert names(tmp_path) == set()
    (tmp_path / "all" / "toy_full").mkdir(parents=True)
    (tmp_path / "all" / "toy_full" / "mine.png").touch()
    with pytest.raises(ElfattError, match="holds something else than published results"):
        publish(load_results(run), tmp_path / "all")
    assert names(tmp_path / "all" / "toy_full") == {"mine.png"}


def test_commands_publish_and_fill_a_page(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    assert tool.main([str(run), "--out", str(results)]) == 0
    said = capsys.readouterr()
    assert "toy_full (" in said.out and said.err == ""
    monkeypatch.setattr(tool, "MOST_BYTES", 1000)
    assert tool.main([str(run), "--out", str(results)]) == 0 and "--no-page" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "no-run"), "--out", str(results)]) == 2
    text = f"# Page\n\nbefore\n\n{page_of('eval toy_full difference')}\nafter\n{page_of('eval none')}"
    page.write_text(text)
    words = ["eval", str(page), "--results"]
    assert fill([*words, str(results), "--check"]) == 1 and page.read_text() == text
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
    ("marker", "message"),
    [
        ("", "has no marker '<!-- eval NAME -->'"),
        ("eval toy_full nothing", r"plot 'nothing' .* does not exist; there are: .*difference"),
        ("headline plot study_presets/none", "row 'none' of study_presets does not exist; there are: sd,"),
        ("headline plot study_large/tome", "of study_large has no closeness or no time"),
        ("eval toy_full ../x", "accepted: a plain file name"),
        ("compare toy_full ../x/sd sd", "accepted: a plain file name"),
        ("pareto closeness ../x", "accepted: a plain file name"),
        (f"rows study_steps closeness{' tome-all' * 7}", "at most 6 of"),
        ("rows study_steps closeness tome", r"rows=.'tome'. are not accepted"),
    ],
)
def test_what_is_wrong_on_a_page_is_named(marker: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ElfattError, match=message):
        fill_page(page_of(marker) if marker else "# Page\n", RESULTS, tmp_path)


# Rows of studies.

FIRST, SECOND = [40.0, 30.0, 20.0, 45.0], [39.0, 28.5, 19.5, 46.0]


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
    untouched = {"cell": "sd", "method": "sd", "label": "SD", "role": "baseline"}
    return {"format": FORMAT, "name": name, "protocol": settings, "rows": [untouched, *rows]}


def test_rows_are_compared_image_by_image_and_speed_within_rounds_of_one_run() -> None:
    """Means of 33.75 and 33.25 with intervals of about 10 dB hide what each picture shows."""
    values = ([1.0, 2.0, 4.0], [2.0, 6.0, 4.0])
    both = [
        row(name, psnr, time={"unet": {"values": taken}})
        for name, psnr, taken in zip(("a", "b-0.5"), (FIRST, SECOND), values, strict=True)
    ]
    titles, rule, there, back = cells(compare_rows(Results(data(*both)), ["a", "b-0.5", "b-0.5", "a"]))
    assert titles == ["Row", "Against", "PSNR, dB", "SSIM", "Closer by PSNR", "Times as fast"]
    assert rule == [":---", ":---", "---:", "---:", "---:", "---:"]
    assert (there[:2], there[4:]) == (["A", "B-0.5"], ["3 of 4", "2.00 (1.00 to 3.00)"])
    assert back[2].startswith("-0.5") and back[4] == "1 of 4"
    each = [one - other for one, other in zip(FIRST, SECOND, strict=True)]
    half = 3.182446 * statistics.stdev(each) / 2  # of Student's t with 3 degrees of freedom, at 97.5 %
    found = [float(text) for text in re.sub(r"[\[\],]", "", there[2]).split()]
    assert found == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=0.06)
    other = Results(data(*both, name="other"))
    for untimed in (
        compare_rows(Results(data(*both)), ["a", "other/b-0.5"], [other]),
        compare_rows(Results(data(both[0], row("b", SECOND))), ["a", "b"]),
    ):
        assert cells(untimed)[0][-1] == "Closer by PSNR"
    # identical pictures have no PSNR; their SSIM is one
    some, none = row("a", [None, 30.0, 20.0], [1.0, 0.9, 0.8]), row("c", [None, None, None], [1.0, 1.0, 1.0])
    line = cells(compare_rows(Results(data(some, row("b", [1.0, 28.0, 19.0], [0.7, 0.6, 0.5]))), ["a", "b"]))[2]
    assert line[2].startswith("+1.5 [") and line[3].startswith("+0.30") and line[4] == "3 of 3"
    table = cells(compare_rows(Results(data(some, none)), ["a", "c", "c", "a", "c", "c"]))
    assert [line[2::2] for line in table[2:]] == [["—", "0 of 3"], ["—", "2 of 3"], ["identical", "0 of 3"]]


MIXED = row("a", SECOND)
MIXED["paired"]["classes"] = [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("named", "other", "protocol", "message"),
    [
        (["a"], row("a", SECOND), {}, "cannot be paired; there are: sd, a, old, second/sd, second/a"),
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
    second = Results(data(other, name="second", **protocol))
    with pytest.raises(ElfattError, match=message):
        compare_rows(Results(data(row("a", FIRST), row("old", None))), named, [second])


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
    page, plots = fill_page(page_of(*markers), tmp_path, tmp_path)
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


def test_a_mark_tells_the_kind_of_approximation(studies: list[dict[str, Any]]) -> None:
    """The phases are those of the row, where exact steps and merging beside another kind do not count."""
    exact = {"attention": "softmax", "ratio": 0.0, "block_order": "sequence", "second_order": None}
    exact |= {"residual_steps": 1, "agent_share": 0.5}
    for kind, shared, phase in (
        ("sampled keys", True, {"attention": "sampled", "residual_steps": 4}),
        ("spread blocks", False, {"attention": "block", "block_order": "spread"}),
        ("other blocks", False, {"attention": "block", "block_order": "spread", "second_order": "windows"}),
        ("merging (ToMe)", False, {"ratio": 0.5}),
        ("agents", False, {"attention": "elfatt", "agent_share": 1.0}),
        ("unknown", False, {}),
    ):
        phases = [exact, *[exact | {"ratio": 0.5}] * ("attention" in phase), exact | phase]
        studies[0]["protocol"]["cells"] = [{"name": "fast", "config": {"phases": phases}}, {"name": "worse"}]
        chart = draw_pareto([Results(run) for run in studies])[0]
        mark = next(line for line in chart.figure.axes[0].lines if list(line.get_xdata()) == [0.5])
        assert (mark.get_label(), mark.get_markerfacecolor() != mark.get_color()) == (kind, shared)
        assert ("Hollow" in chart.caption) is shared
        assert {text.get_text() for text in chart.figure.legends[0].get_texts()} == {"unknown", kind}


def test_a_study_tells_verdicts_of_accuracy(run: Path) -> None:
    """The interval of the share alone does not."""
    results = json.loads((run / "results.json").read_text())
    for place, verdict in ((2, "better"), (3, "worse")):
        results["rows"][place]["accuracy"]["mean"]["difference"]["verdict"] = verdict
    made = study_table(Results(results))
    place = [column.title for column in made.columns].index("Accuracy ↑")
    assert [line.entries[place].remark for line in made.lines[1:5]] == ["", "better", "worse", ""]


def test_the_headline_is_readable_on_a_narrow_page(tmp_path: Path) -> None:
    """What was not measured is an empty cell."""
    rows = "study_presets/tome study_presets/elfatt-quality"
    page, plots = fill_page(page_of(f"headline plot {rows}"), RESULTS, tmp_path)
    assert [path.name for path in plots] == ["plot.png"]
    assert f"| `tome` | 36.0 dB | 1.56{TIMES} | 1.34{TIMES} |" in page and "|  |" in page
    results = load_results(RESULTS / "study_presets")
    figure = draw_headline([(results, row) for row in results.rows if row.role == "method"]).figure
    (axes,) = figure.axes
    words = [*figure.legends[0].get_texts(), axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
    pixels = 400 / figure.get_size_inches()[0] / 72
    assert min(text.get_fontsize() for text in words) * pixels > 10
    figure.draw_without_rendering()
    for label in (axes.xaxis.label, axes.yaxis.label):
        box = label.get_window_extent()
        assert figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max)


# Results of benchmarks.


@pytest.fixture(scope="module")
def made() -> Any:
    session = Session(command="python -m benchmarks.merging")
    return merging(tokens=[64], channels=16, repeats=2, device="cpu", dtypes=["float32"], session=session)


@pytest.fixture
def results(made: Any, tmp_path: Path) -> Path:
    write_json(tmp_path / "results" / "merging.json", made)
    save(made, tmp_path / "results" / "merging.json")
    return tmp_path / "results"


def test_the_command_fills_and_checks_a_page_of_benchmarks(results: Path, tmp_path: Path, capsys: Any) -> None:
    page, plot = tmp_path / "page.md", (results / "merging.png").read_bytes()
    text = f"# Title\n\n{page_of('bench merging')}\nProse.\n\n{page_of('bench other', 'bench merging ours tomesd')}"
    page.write_text(text)
    words = ["bench", str(page), "--results"]
    assert fill([*words, str(results), "--check"]) == 1 and page.read_text() == text
    (results / "merging.md").unlink()
    (results / "merging.png").write_bytes(b"old")
    assert fill([*words, str(results)]) == fill([*words, str(results), "--check"]) == 0
    filled = page.read_text()
    assert filled.startswith("# Title\n\n<!-- bench merging -->\n64 tokens, batch 2, float32:\n\n| method | time |")
    parts = ["![merging](results/merging.png)", "2 interleaved rounds", "Made by `python -m benchmarks.merging` at"]
    parts += [(results / "merging.md").read_text(), f"Prose.\n\n<!-- bench other -->\n{MISSING}\n{END}"]
    assert all(part in filled for part in parts) and "old" not in filled
    assert (results / "merging.png").read_bytes() == plot
    few = filled.partition("<!-- bench merging ours tomesd -->\n")[2].splitlines()
    assert few[0].startswith("| method | time | times as fast as tomesd |")
    assert [line.split(" | ")[0] for line in few[2:4]] == ["| tomesd", "| ours"]
    assert few[5] == parts[0] and few[7].startswith("[All rows](results/merging.md); ")
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
    bench.render(results)
    places = ("other", "other/a-part ours", "other/a-part", "other/no-part ours")
    page = bench.fill_page(page_of(*(f"bench {place}" for place in places)), results, tmp_path)
    whole, few, part, missing, _ = page.split(END)
    assert whole.index("### a part") < whole.index("### second")
    for name in ("a-part", "second"):
        assert f"![merging](results/other/{name}.png)" in whole
        assert (results / "other" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "| a part | tome | 1.002 |" in whole and "- third: ElfattError: flash is not there" in whole
    verdicts = [line.split(" | ")[-1] for line in whole.splitlines() if line.startswith("| a part | elfatt |")]
    assert verdicts == ["met |", "**missed** |", "only 3 rounds |"]
    slopes = "| method | sd15 512 | sdxl 1024 |\n|---|---|---|\n| untouched | 0.500 |  |\n| tome | 0.250 | 1.000 |"
    assert slopes in whole and MISSING in missing
    assert few.count("| ours |") == 1 and "[All rows](results/other.md)" in few
    assert "### a part" in part and "tomesd" in part
    assert all("![merging](results/other/a-part.png)" in text and "second" not in text for text in (few, part))


@pytest.mark.parametrize(
    ("marker", "contents", "message"),
    [
        ("", {}, "has no marker"),
        ("bench merging other", {}, r"rows=.'other'. are not accepted; accepted: at most 6 of .*ours"),
        (f"bench merging{' ours' * 7}", {}, "at most 6"),
        ("bench other", {"other": "{}"}, r"other.json holds no results"),
        ("bench merging", {"merging": "{"}, r"merging\.json is damaged"),
    ],
)
def test_what_is_wrong_with_a_page_of_benchmarks_is_named(
    marker: str, contents: dict[str, str], message: str, results: Path, made: Any, tmp_path: Path
) -> None:
    for name, content in contents.items():
        (results / f"{name}.json").write_text(content)
    with pytest.raises(ElfattError, match=message):
        bench.fill_page(page_of(marker) if marker else "# Title\n", results, tmp_path)
    (results / "away.json").write_text(json.dumps({"parts": {"../../x": made}}))
    (results / "merging.json").unlink()
    with pytest.raises(ElfattError, match="accepted: a plain file name"):
        bench.render(results)


def test_few_rounds_a_busy_machine_and_missing_figures_decide_no_goal(tmp_path: Path) -> None:
    """The committed table has what rounds contradict and a floor does not reach."""
    files = {path.stem: json.loads(path.read_text()) for path in BENCHMARKS.glob("*.json")}

    def goals() -> list[str]:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return goals_table(tmp_path).splitlines()[2:]

    for row in [*files["merging"]["rows"], *files["unet-512"]["rows"]]:
        row["rounds"] = 3 if "tokens" in row else 1
    for group in (*files["growth"]["groups"], *files["unet-512"]["groups"]):
        for sitting in group["sittings"]:
            sitting["bystanders"] = None if group["key"].get("tokens") == 4096 else 0.3
    files["unet-1024"]["rows"][0]["peak_bytes"] = None
    last = [line.split(" | ")[-1] for line in goals()]
    assert last[:4] == ["only 3 rounds |"] * 4
    assert last[4] == "met |", "what others took is unknown"
    assert last[5:7] == ["machine busy (30%) |"] * 2 and last[7:10] == ["only 1 round, machine busy (30%) |"] * 3
    missing = [line.split(" | ")[0] for line in goals() if "not measured yet" in line]
    assert missing == ["| peak memory, 1024x1024: greatest fraction of the untouched call's"]
    files = {"merging": {"rows": []}}
    for path in tmp_path.glob("*.json"):
        path.unlink()
    empty = goals()
    assert len(empty) == 23 and all("not measured yet" in line for line in empty)
