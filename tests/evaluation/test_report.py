"""The report: its figures are those of the results, its page stands alone, and nothing that is missing breaks it."""

import copy
import csv
import errno
import io
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from fake_run import FAILED, NO_MEMORY, build_run, build_sweep, picture, prompt, save
from matplotlib.text import Text
from PIL import Image

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.intervals import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.evaluation.report import charts, load_results, page, plots, write_report
from elfatt_sd.evaluation.report.ablation import ablation
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.palette import PAPER, Palette
from elfatt_sd.evaluation.report.pictures import Pictures
from elfatt_sd.evaluation.report.plots import draw_plots
from elfatt_sd.evaluation.report.published import comparability, comparable_words
from elfatt_sd.evaluation.report.scatter import Spot, closeness_over_time, distance_over_time, front
from elfatt_sd.evaluation.report.summary import findings, headline, recommended, scope
from elfatt_sd.evaluation.report.tables import main_table, more_table, study_table
from elfatt_sd.evaluation.report.terminal import terminal_summary
from elfatt_sd.evaluation.report.text import decimals_for, fixed, unit_for
from elfatt_sd.evaluation.report.values import Estimate, shortened
from elfatt_sd.evaluation.report.writers import tex_escape, to_csv, to_latex, to_markdown
from elfatt_sd.evaluation.run import RunFailure, clear_disk_errors

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{ & | _x % {{ 7 * 7 }} \N{SNOWMAN}"


class Page(HTMLParser):
    """Collects elements, their attributes, the cells of each table and all text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.text, self.tables, self.inside = [], "", [], None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.inside = tag

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.text += data
            if self.tables and self.tables[-1] and self.tables[-1][-1]:
                self.tables[-1][-1][-1] += f" {data.strip()}"

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = None

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    results = build_run(folder)
    return folder, results, Page(write_report(load_results(folder)))


@pytest.fixture
def results(run):
    return copy.deepcopy(run[1])


@pytest.fixture(scope="module")
def sweep_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return folder, build_sweep(folder)


@pytest.fixture
def sweep(sweep_run):
    return copy.deepcopy(sweep_run[1])


@pytest.fixture(scope="module")
def sweep_plots(sweep_run):
    """The plots of the sweep by their names."""
    shown = Results(sweep_run[1])
    return {plot.name: plot for plot in draw_plots(shown, Palette(shown))[0]}


@pytest.fixture
def one_plot(monkeypatch):
    """Of all plots, which take seconds, one is drawn: for reports whose words are looked at."""
    monkeypatch.setattr(plots, "_makers", lambda results: [charts.closeness])


def test_page_shows_each_figure_of_the_table(run):
    _, results, page = run
    lines = {row["cell"]: line for row, line in zip(results["rows"], page.tables[0][2:], strict=True)}
    for row in results["rows"]:
        shown = " ".join(lines[row["cell"]])
        if row["failed"]:
            assert row["failed"] in shown and "not measured" not in shown
            continue
        distance = row["distances"]["FD-toy"]
        assert f"{distance['value']:.1f}" in shown
        assert f"{row['time']['end_to_end']['seconds_per_image']:.2f}" in shown
        if row["role"] == "method":
            assert f"{abs(distance['difference']['value']):.2f}" in shown
            assert distance["difference"]["verdict"] in shown
            psnr = row["paired"]["psnr"]
            assert f"{psnr['mean']:.2f} [{psnr['interval'][0]:.2f}, {psnr['interval'][1]:.2f}]" in shown
            assert f"{row['accuracy']['mean']['value']:.3f}" in shown
            assert f"{row['time']['end_to_end']['ratio']['median']:.2f}×" in shown  # noqa: RUF001
        if row["memory"]:
            assert f"{row['memory']['gib_per_image']:.2f}" in shown
    assert "not measured" in " ".join(lines[NO_MEMORY])
    published = lines["elfatt-0.5"][-3:]
    assert [text.split()[0] for text in published] == ["30.4", "0.707", "0.70"]
    assert f"{0.768 / 0.707:.2f}" in published[1]
    assert [text.strip() for text in lines["sd"][-3:]] == ["31.0", "0.768", "0.80"]
    assert [text.strip() for text in lines["sd-null"][-3:]] == ["—"] * 3


def test_headline_counts_the_verdicts(run):
    _, results, page = run
    said = [row["distances"]["FD-toy"]["difference"]["verdict"] for row in results["rows"][2:] if not row["failed"]]
    worse, same = said.count("worse"), said.count("no difference shown")
    assert worse > 1 and same > 1, "the fake run must show several verdicts"
    told = scope(Results(results))
    assert told == (
        "9 settings of ToMe-SD, Agent-SD and ELFATT-SD on 64 pictures each (toy): "
        f"by FD-toy, {worse} are worse than the untouched pipeline, {same} show no difference and 1 failed."
    )
    assert told in page.text and headline(Results(results)) in page.text


def verdicts(results, *said):
    """Give the methods these verdicts, in order."""
    methods = [row for row in results["rows"] if row["role"] == "method" and not row["failed"]]
    for row, verdict in zip(methods, said, strict=False):
        for distance in row["distances"].values():
            distance["difference"]["verdict"] = verdict
    return Results(results)


def test_headline_names_the_fastest_that_is_not_worse(results):
    none, too_few = "no difference shown", "too few classes to tell"
    speed(results, [(1.4, 1.5, 1.6), (1.8, 1.9, 2.0)] + [(0.7, 0.8, 0.9)] * 7)
    shown = verdicts(results, none, "worse", *[none] * 7)
    start = "ToMe-SD 0.1: 1.50 times as fast as the untouched pipeline (1.40–1.60)"  # noqa: RUF001
    assert headline(shown).startswith(f"{start}, not shown to be worse in FD-toy and KD-toy, PSNR")
    assert recommended(shown).name == "ToMe-SD 0.1"
    assert len(headline(shown)) < 160
    assert ", better in FD-toy and KD-toy," in headline(verdicts(results, "better"))
    assert headline(verdicts(results, "worse")).startswith("No setting is shown to be faster without being worse. ToMe")
    told = headline(verdicts(results, *[too_few] * 9))
    assert told.startswith("ToMe-SD 0.3: 1.90 times") and "not judged: the classes are too few" in told
    speed(results, [(0.7, 0.8, 0.9)] * 9)
    assert headline(Results(results)).startswith("No setting is shown to be faster. ")


def test_headline_says_the_noise_and_what_is_missing(results):
    speed(results, [(2.0, 2.1, 2.2)] * 9, null=(1.1, 1.2, 1.3))
    assert headline(verdicts(results, *["no difference shown"] * 9)).endswith(
        "; untouched timed again: 1.20 times (1.10–1.30)."  # noqa: RUF001
    )
    assert "timed again (the null row): 1.20 times" in told_of(results, "Fastest")
    told = headline(Results(speed(results, [(2.0, 2.1, 2.2)] * 9, rounds=2)))
    assert "2.10 times as fast as" in told and "2 rounds of timing are too few to claim it" in told
    assert headline(Results(speed(results, [(0.7, 0.8, 0.9)] * 9, rounds=2))).startswith("No setting is shown to be fa")
    for row in results["rows"]:
        row["time"] = None
    assert headline(Results(results)).startswith("Time was not measured. Quality: by FD-toy")
    assert recommended(Results(results)).role == "method"


def test_terminal_has_headline_limits_and_table(results):
    results["protocol"] |= {"limit": 2, "time": {"repeats": 2}, "memory": {"batches": [1, 2]}}
    results["rows"][3]["label"] = "a method with a name that is as long as a line of the terminal, or nearly so"
    text = terminal_summary(Results(results))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith(headline(Results(results))[:60])
    flat = " ".join(text.split())
    assert "limited to 2 pictures, time to 2 rounds and memory to batches of 1 and 2." in flat
    assert "failed: picture 7 is black" in text and "(null row)" in text and "worse" in text
    assert terminal_summary(Results({**results, "rows": []}))


def test_distances_begin_at_zero_and_have_a_readable_unit(results):
    for row in filter(lambda row: row["distances"], results["rows"]):
        row["distances"]["FD-toy"] |= {"value": 7.0, "interval": [-5.0, 19.0]}
        row["distances"]["KD-toy"] |= {"value": -123_922.0, "interval": [-400_000.0, 150_000.0]}
    shown = Results(results)
    texts = {column.title: [line.entries for line in main_table(shown).lines] for column in main_table(shown).columns}
    assert any(entry.note == "[0.0, 19.0]" for line in texts["FD-toy ↓"] for entry in line)
    more = more_table(shown)
    place = [column.title for column in more.columns].index("KD-toy (×10³) ↓") - more.heads  # noqa: RUF001
    entry = more.lines[0].entries[place]
    assert (entry.text, entry.note) == ("−124", "[−400, 150]")  # noqa: RUF001
    assert unit_for([Estimate(0.0004, 0.0002, 0.0006)]) == -6 and unit_for([Estimate(30.0, 29.0, 31.0)]) == 0


def test_findings_name_the_fastest_the_null_row_and_failures(results):
    told = " ".join(findings(Results(results)))
    timed = [row for row in results["rows"] if row["role"] == "method" and row["time"]]
    best = max(timed, key=lambda row: row["time"]["end_to_end"]["ratio"]["median"])
    assert (
        f"{best['label']} {best['settings']['ratio']}, {best['time']['end_to_end']['ratio']['median']:.2f} times"
        in told
    )
    assert "The null row, the same pipeline with other seeds, differs by +0.21" in told
    assert "picture 7 is black" in told and "64 pictures a row" not in told
    results["rows"][1]["distances"]["FD-toy"]["difference"]["verdict"] = "worse"
    results["protocol"]["limit"] = 8
    results["environment"]["timing"] = {"note": "only 2 repeats; take 5 or more", "environment": {"device": "GPU"}}
    told = " ".join(findings(Results(results)))
    assert "needs more pictures" in told and "limited to 8 pictures" in told and "only 2 repeats" in told
    assert "Fastest by the median, end to end on GPU" in told


def told_of(results, word):
    """The sentence on time or memory."""
    return next(sentence for sentence in findings(Results(results)) if word in sentence)


def speed(results, ratios, null=(0.98, 1.0, 1.02), rounds=5):
    """Give the methods these speed-ups: lowest, median, highest."""
    given = iter(ratios)
    for row in results["rows"]:
        if row["time"]:
            low, median, high = null if row["role"] != "method" else next(given, (0.8, 0.9, 0.99))
            values = row["time"]["end_to_end"]["values"][:rounds]
            ratio = {"median": median, "low": low, "high": high}
            row["time"] = {"end_to_end": {"seconds_per_image": 3.0, "values": values, "ratio": ratio}}
    return results


def test_a_speedup_is_claimed_beyond_the_spread_alone(results):
    told = told_of(speed(results, [(1.05, 1.1, 1.2)]), "untouched (")
    assert told.startswith("Fastest by the median, end to end")
    assert "1.10 times as fast as untouched (1.05–1.20)" in told  # noqa: RUF001
    for ratios in ((0.97, 1.04, 1.1), (1.01, 1.03, 1.06)):  # across 1; within what the null row does
        told = told_of(speed(results, [ratios]), "untouched (")
        assert told.startswith("No setting is shown to be faster") and "Fastest" not in told
    assert "7 settings are slower than untouched" not in told
    slower = told_of(speed(results, [(0.8, 0.9, 0.97)] * 2 + [(0.8, 0.9, 0.99)] * 6), "untouched (")
    assert "No setting is shown to be faster" in slower and "2 settings are slower than untouched." in slower


def test_few_rounds_claim_no_speedup(results):
    told = told_of(speed(results, [(1.5, 1.6, 1.7)], rounds=2), "rounds")
    assert told.startswith("Too few rounds of timing") and "(2)" in told and "Fastest" not in told


def line_of(row, slope, half):
    ends = None if half is None else [slope - half, slope + half]
    row["memory"] |= {"gib_per_image": slope, "interval": ends}


def test_less_memory_is_claimed_beyond_the_fit_error_alone(results):
    rows = [row for row in results["rows"] if row["memory"]]
    for row in rows:
        line_of(row, 0.12, 0.001)
    line_of(rows[0], 0.11, 0.001)
    told = told_of(results, "VmHWM")
    assert told.startswith("No setting is shown to take less memory") and "Least memory" not in told
    assert "settings take more than untouched." in told and "untouched 0.1100 [0.1090, 0.1110]" in told
    line_of(rows[-1], 0.10, 0.02)
    assert told_of(results, "VmHWM").startswith("No setting is shown to take less memory")
    line_of(rows[-1], 0.10, None)
    assert "0.1000 (no interval) GiB per image" in told_of(results, "No setting is shown to take less memory")
    line_of(rows[-1], 0.10, 0.004)
    told = told_of(results, "Least memory")
    assert "ELFATT-SD 0.5, 0.1000 [0.0960, 0.1040] GiB per image, untouched 0.1100 [0.1090, 0.1110]" in told
    rows[0]["memory"] = None
    assert "Memory of the untouched pipeline was not measured; the least of the others" in " ".join(
        findings(Results(results))
    )


def test_memory_of_different_kinds_is_not_compared(results):
    results["rows"][-1]["memory"]["kind"] = "CUDA allocated"
    assert told_of(results, "VmHWM") == "Memory was measured as CUDA allocated and VmHWM, which cannot be compared."


@pytest.mark.usefixtures("one_plot")
def test_no_verdict_is_given_from_few_classes(tmp_path, results):
    for row in results["rows"]:
        row |= {"images": 5, "classes": 5}
        if row["distances"] and row["role"] != "baseline":
            for distance in row["distances"].values():
                distance["difference"]["verdict"] = TOO_FEW
    save(tmp_path, results)
    page = Page(write_report(load_results(tmp_path)))
    assert "no verdict, since the classes are too few" in scope(Results(results))
    told = " ".join(findings(Results(results)))
    assert f"No verdicts from 5 classes: an interval over fewer than {FEWEST_CLASSES} classes" in told
    for word in ("better than", "worse than", "Better:", "Worse:"):
        assert word not in told + scope(Results(results))
    assert sum(item.get("class") == "few" for item in page.all("td")) == 2 * 9, "distance and kernel distance"
    for name in ("table.csv", "table.md", "table.tex"):
        text = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert text.count(TOO_FEW) >= 9
        assert not re.search(r"\b(better|worse)\b", text)
    (marks,) = charts.differences(Results(results), Palette(Results(results))).figure.axes
    assert {line.get_markerfacecolor() for line in marks.lines if line.get_marker() in "os^dD"} == {PAPER}


def test_a_singular_covariance_is_told(results):
    assert "features of FD-toy" not in " ".join(findings(Results(results)))
    results["reference"]["FD-toy"]["features"] = 64
    assert "64 pictures a row are no more than the 64 features of FD-toy" in told_of(results, "KD-toy, among the other")


def test_a_kernel_verdict_that_disagrees_is_named(results):
    """A row that either distance calls worse is not recommended as one that is not worse."""
    shown = verdicts(results, *["no difference shown"] * 9)
    first = headline(shown).split(":")[0]
    for row in results["rows"]:
        if row["role"] == "method" and not row["failed"]:
            row["distances"]["KD-toy"]["difference"]["verdict"] = "worse"
    shown = Results(results)
    assert headline(shown).startswith(f"No setting is shown to be faster without being worse. {first}")
    assert ", not shown to be worse in FD-toy, but worse in KD-toy" in headline(shown)
    assert "; KD-toy disagrees on" in scope(shown)
    assert any(told.startswith("KD-toy disagrees with FD-toy") for told in findings(shown))


def test_a_difference_of_infinitely_many_images_says_so(results):
    """And where a plot sets it off against the untouched pipeline's value, it is not mixed with the row's own."""
    titles = [column.title for column in main_table(Results(results)).columns]
    assert "Difference" in titles
    for row in results["rows"]:
        for distance in (row["distances"] or {}).values():
            if "difference" in distance:
                distance["difference"] |= {"images": "infinite", "value": 5.0, "interval": [4.0, 6.0]}
    shown = Results(results)
    assert "Difference, extrapolated" in [column.title for column in main_table(shown).columns]
    base, row = shown.baseline.distance("FD-toy").value, shown.methods[0]
    assert shown.paired_distance(row) == Estimate(base + 5, base + 4, base + 6)


def test_many_comparisons_warn_of_chance_verdicts(sweep):
    assert "of 38 rows that do not differ, about 2 would get one" in told_of(sweep, "verdicts rest on")


def test_csv_holds_every_figure_unrounded(run):
    folder, results, _ = run
    with (folder / "report" / "table.csv").open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    assert [record["cell"] for record in records] == [row["cell"] for row in results["rows"]]
    for record, row in zip(records, results["rows"], strict=True):
        assert record["protocol"] == "toy_full"
        if row["failed"]:
            assert record["failed"] == row["failed"] and record["FD-toy"] == ""
            continue
        for name, distance in row["distances"].items():
            assert float(record[name]) == distance["value"]
            assert [float(record[f"{name} {end}"]) for end in ("low", "high")] == distance["interval"]
            if row["role"] != "baseline":
                assert float(record[f"{name} difference"]) == distance["difference"]["value"]
                assert record[f"{name} verdict"] == distance["difference"]["verdict"]
        assert float(record["end_to_end seconds_per_image"]) == row["time"]["end_to_end"]["seconds_per_image"]
        for measure in ("psnr", "ssim", "cosine") if row["paired"] else ():
            found = row["paired"][measure]
            shown = [float(record[f"{measure}{what}"]) for what in ("", " low", " high", " median")]
            assert shown == [found["mean"], *found["interval"], found["median"]]
            assert float(record[f"{measure} quartile 3"]) == found["quartiles"][1]
            assert float(record[f"{measure} lowest"]) == found["lowest"]
        assert record["gib_per_image"] == ("" if row["memory"] is None else str(row["memory"]["gib_per_image"]))
        vae = "" if row["memory"] is None else str(row["memory"]["stages"]["vae"]["gib_per_image"])
        assert (record["vae gib_per_image"], record["reserved gib_per_image"]) == (vae, "")
        assert record["memory kind"] == ("VmHWM" if row["memory"] else "")
        assert float(record["accuracy shape"]) == row["accuracy"]["shape"]["value"]
        assert record["setting_ratio"] == str(row["settings"].get("ratio", ""))
    assert records[-1]["published FID"] == "30.4"


def markdown_tables(text):
    """Cells of each table; a pipe after a backslash is text."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()] for block in blocks]


def test_markdown_is_a_table_with_the_same_verdicts(run):
    folder, results, _ = run
    main, more = markdown_tables((folder / "report" / "table.md").read_text(encoding="utf-8"))
    for table in (main, more):
        assert {len(line) for line in table} == {len(table[0])}
        assert len(table) == len(results["rows"]) + 2
    verdict = [cell.strip() for cell in main[0]].index("Verdict")
    for line, row in zip(main[2:], results["rows"], strict=True):
        if row["role"] == "method" and not row["failed"]:
            assert line[verdict].strip() == row["distances"]["FD-toy"]["difference"]["verdict"]


def latex_rows(text):
    """Rows of the tabular as lists of cells, spanning cells counted as often as they span; checks the braces."""
    bare = re.sub(r"\\[\\{}&%$#_]", lambda match: "\n" if match[0] == r"\\" else "", text)
    depth = 0
    for char in bare:
        depth += (char == "{") - (char == "}")
        assert depth >= 0
    assert depth == 0 and bare.count("$") % 2 == 0
    body = bare[bare.index("\\toprule") : bare.index("\\bottomrule")]
    body = re.sub(r"\\(toprule|midrule|cmidrule\(lr\)\{[\d-]+\})", "", body)
    rows = [line.split("&") for line in body.splitlines() if "&" in line]
    spans = [[re.search(r"\\multicolumn\{(\d+)\}", cell) for cell in row] for row in rows]
    return [sum(int(span[1]) if span else 1 for span in row) for row in spans]


def test_latex_is_a_booktabs_table(run):
    folder, results, _ = run
    text = (folder / "report" / "table.tex").read_text(encoding="utf-8")
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1]
    assert set(latex_rows(text)) == {len(columns)}
    assert len(latex_rows(text)) == len(results["rows"]) + 2
    assert text.count("\\begin{") == text.count("\\end{")
    assert all(rule in text for rule in ("\\toprule", "\\midrule", "\\bottomrule", "toy\\_full"))
    assert text.isascii() or not re.search("[−×–—↓↑·∞]", text)  # noqa: RUF001


def test_page_stands_alone(run):
    folder, _, page = run
    references = [
        value for _, attributes in page.elements for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    ]  # fmt: skip
    assert references and all(value.startswith(("data:", "#")) for value in references)
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
    assert "http://" not in text and "https://" not in text
    policy = next(item["content"] for item in page.all("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    anchors = {value[1:] for value in references if value.startswith("#")}
    assert anchors <= set(ids)


def test_page_is_accessible(run):
    _, _, page = run
    assert all(attributes.get("alt") is not None for attributes in page.all("img"))
    assert all(attributes["alt"] for attributes in page.all("img") if "src" in attributes)
    assert page.all("html")[0]["lang"] == "en" and len(page.all("h1")) == 1
    assert all(attributes.get("scope") for attributes in page.all("th"))
    plots = [item for item in page.all("div") if item.get("role") == "img"]
    assert len(plots) == 11 and all("ELFATT-SD 0.5: " in item["aria-label"] for item in plots)


def test_plots_are_written_as_png_too(run):
    folder, _, page = run
    names = {path.stem for path in (folder / "report").glob("*.png")}
    assert names == {
        "difference", "distance_time", "distance_unet_time", "distance_memory", "accuracy_time", "closeness",
        "closeness_time",
        "ablation_ratio", "memory", "timing_end_to_end", "timing_unet",
    }  # fmt: skip
    assert len(page.all("svg")) == len(names)
    for name in names:
        with Image.open(folder / "report" / f"{name}.png") as image:
            assert image.width > 900 and image.convert("L").getextrema()[0] < 100


def test_a_method_has_one_colour_everywhere(run):
    folder, results, _ = run
    shown = Results(results)
    palette = Palette(shown)
    styles = {row.label: palette.style(row) for row in shown.methods}
    assert len({style.colour for style in styles.values()}) == len({style.marker for style in styles.values()}) == 3
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert all(f"var({style.variable})" in svg for style in styles.values())
        assert not any(style.colour in svg for style in styles.values()), "a fixed colour would not follow dark mode"


def test_pictures_are_those_of_the_same_latent(run):
    _, results, page = run
    buttons = [item for item in page.all("button") if "data-cell" in item]
    columns = list(dict.fromkeys(item["data-index"] for item in buttons))
    assert len(columns) == 6 and "sd-null" not in {item["data-cell"] for item in buttons}
    finished = [row["cell"] for row in results["rows"] if not row["failed"] and row["role"] != "null"]
    for cell in finished:
        assert [item["data-index"] for item in buttons if item["data-cell"] == cell] == columns
    assert [item["data-index"] for item in buttons if item["data-cell"] == FAILED] == [c for c in columns if int(c) < 8]
    assert all(prompt(int(index)) in page.text for index in columns)


def test_page_image_looks_like_the_original(run):
    folder, results, _ = run
    pictures = Pictures(Results(results, folder))
    first = pictures.grid(page.DETAILS[0])[0][0]
    _, content = first.uri.split("base64,")
    import base64

    small = Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")
    original = picture(first.index, 0.0, 128)
    difference = [abs(a - b) for a, b in zip(small.tobytes(), original.tobytes(), strict=True)]
    assert sum(difference) / len(difference) < 8


def test_most_changed_pairs_follow_the_results(run):
    folder, results, _ = run
    found = Pictures(Results(results, folder)).most_changed(page.DETAILS[0])
    assert [row.cell for row, _ in found] == [
        row["cell"] for row in results["rows"] if row["role"] == "method" and not row["failed"]
    ]
    for row, pairs in found:
        assert [(before.index, after.index) for before, after in pairs] == [(3, 3), (7, 7), (1, 1)]
        assert all(before.row.role == "baseline" and after.row is row for before, after in pairs)


def test_hostile_text_stays_text(tmp_path):
    results = build_run(tmp_path, images=8, size=32)
    for row in results["rows"][2:5]:
        row["label"] = HOSTILE
    results["rows"][7]["failed"] = results["name"] = results["description"] = HOSTILE
    names = ('"><script>alert(3)</script>', "../../../escaped", "..-..-..-escaped")
    for place, row in enumerate(results["rows"][2:6]):
        row |= {"label": HOSTILE, "method": "tome"}
        row["settings"] = {name: "changed" if place == number else "same" for number, name in enumerate(names)}
    results["environment"][HOSTILE] = HOSTILE
    results["protocol"]["model"] = results["protocol"][HOSTILE] = HOSTILE
    results["published"]["rows"][0]["label"] = results["published"]["source"] = HOSTILE
    save(tmp_path, results)
    manifest = tmp_path / "cells" / "sd" / "manifest.jsonl"
    records = [json.loads(line) | {"prompt": HOSTILE} for line in manifest.read_text().splitlines()]
    manifest.write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = Page(write_report(load_results(tmp_path)))
    assert len(shown.all("script")) == 1
    assert not [name for _, attributes in shown.elements for name in attributes if name.startswith("on")]
    assert all(attributes.get("src", "data:").startswith("data:") for attributes in shown.all("img"))
    assert shown.text.count("{{ 7 * 7 }}") >= 8 and "49" not in headline(Results(results))
    assert any(attributes.get("title") == HOSTILE for attributes in shown.all("span"))
    plots = {path.name for path in (tmp_path / "report").glob("ablation*.png")}
    assert plots == {
        "ablation_ratio.png", "ablation_---script-alert-3---script-.png", "ablation_---------escaped.png",
        "ablation_---------escaped-2.png",
    }  # fmt: skip
    assert not list(tmp_path.parent.glob("*escaped*"))
    ids = [attributes["id"] for _, attributes in shown.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    text = (tmp_path / "report" / "table.tex").read_text(encoding="utf-8")
    assert len(set(latex_rows(text))) == 1
    for table in markdown_tables((tmp_path / "report" / "table.md").read_text(encoding="utf-8")):
        assert {len(line) for line in table} == {len(table[0])}
    assert "<script" not in (tmp_path / "report" / "table.md").read_text(encoding="utf-8")


def test_a_cell_outside_the_run_gives_no_picture(tmp_path):
    results = build_run(tmp_path / "run", images=2, size=32)
    (tmp_path / "secret" / "images").mkdir(parents=True)
    picture(0, 0).save(tmp_path / "secret" / "images" / "00000.png")
    results["rows"][3]["cell"] = "../../secret"
    cells = {row.cell for row in Pictures(Results(results, tmp_path / "run")).rows}
    assert "sd" in cells and "../../secret" not in cells


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [{}]},
        {"rows": [{"cell": "a", "failed": "out of memory"}]},
        {"published": None, "environment": None, "protocol": None, "description": None, "name": None},
        {"published": {"source": None, "rows": [{"label": "SD"}, {"label": "X", "FID": "many"}]}},
    ],
)
def test_missing_parts_are_no_error(tmp_path, results, change):
    save(tmp_path, results | change)  # a run without pictures
    shown = Page(write_report(load_results(tmp_path)))
    assert "A number means nothing without its protocol" in shown.text
    assert not shown.all("img")


@pytest.mark.parametrize("wrong", [None, [], "text", float("nan"), {"value": None}, {"value": "x", "median": []}])
def test_a_missing_or_wrong_value_is_not_measured(results, wrong):
    row = results["rows"][-1]
    for key in ("distances", "paired", "accuracy", "most_changed", "time", "memory", "settings", "images"):
        row[key] = wrong
    shown = Results(results)
    line = main_table(shown).lines[-1]
    assert [entry.text for entry in line.entries] == ["not measured"] * len(line.entries)
    for table in (main_table(shown), more_table(shown)):
        assert "not measured" in to_markdown(table).splitlines()[-1]
        latex_rows(to_latex(table, "caption", "label"))
    assert to_csv(shown) and headline(shown) and findings(shown)


def test_a_run_that_measured_nothing_says_so(tmp_path, results):
    for row in results["rows"]:
        row |= dict.fromkeys(("distances", "paired", "accuracy", "time", "memory"))
    save(tmp_path, results)
    shown = Page(write_report(load_results(tmp_path)))
    assert not shown.all("svg")
    for sentence in ("no distance was measured", "time was not measured", "memory was not measured", "no verdict"):
        assert sentence in shown.text
    assert "nan" not in shown.text.lower().split() and "None" not in shown.text.split()


@pytest.mark.usefixtures("one_plot")
def test_unreadable_pictures_leave_a_gap(tmp_path):
    build_run(tmp_path, images=4, size=32)
    folder = tmp_path / "cells" / "tome-0.1" / "images"
    (folder / "00000.png").unlink()
    for index in range(1, 4):
        shutil.copy(folder.parents[1] / "sd" / "images" / f"{index:05d}.png", folder)
    shown = Page(write_report(load_results(tmp_path)))
    assert shown.text.count("no picture") == 1
    assert shown.text.count("altered after generation") == 5, "three in the grid, two of the most changed"


@pytest.mark.usefixtures("one_plot")
def test_a_damaged_list_of_pictures_is_told(tmp_path):
    build_run(tmp_path, images=2, size=32)
    (tmp_path / "cells" / "sd" / "manifest.jsonl").write_text("not json\n")
    with pytest.raises(ElfattError, match=r"manifest\.jsonl, line 1 is damaged"):
        write_report(load_results(tmp_path))


def lowest_psnr(table):
    place = [column.title for column in table.columns].index("Lowest PSNR, dB") - table.heads
    return [line.entries[place].text for line in table.lines]


def test_the_picture_that_is_changed_most_has_a_column(results):
    psnr = [row["paired"] and row["paired"]["psnr"] for row in results["rows"]]
    for table in (more_table, study_table):
        texts = lowest_psnr(table(Results(results)))
        nothing = ["reference" if row["role"] == "baseline" else "not measured" for row in results["rows"]]
        assert texts == [f"{found['lowest']:.1f}" if found else text for found, text in zip(psnr, nothing, strict=True)]
    for found in filter(None, psnr):
        del found["lowest"]
    older = study_table(Results(results))
    assert "Lowest PSNR, dB" not in [column.title for column in older.columns]


def test_pictures_that_became_others_are_counted(results):
    """Below 20 dB little is left of the untouched picture."""
    paired = results["rows"][2]["paired"]["psnr"]
    paired["pictures"][:3] = [19.99, 20.0, None]
    notes = [line.entries[1].note for line in study_table(Results(results)).lines]
    assert notes[1] == "(64 below 20)" and notes[2] == "(1 below 20)" and not any(notes[3:5])


def test_every_picture_is_drawn(results):
    results["rows"][2]["paired"]["psnr"]["pictures"][5] = None
    shown = Results(results)
    chart = charts.closeness(shown, Palette(shown))
    rows = [row for row in shown.rows if row.psnr is not None]
    lines = chart.figure.axes[0].lines
    assert [list(line.get_xdata()) for line in lines[::2]] == [
        [value for value in row.each("psnr") if value is not None] for row in rows
    ]
    assert [line.get_xdata()[0] for line in lines[1::2]] == [row.psnr.value for row in rows]
    segments = [tuple(drawn.get_segments()[0][:, 0]) for drawn in chart.figure.axes[0].collections]
    assert segments == [row.psnr.ends for row in rows]
    assert (
        chart.points[1].startswith("ToMe-SD 0.1: ") and f"lowest {min(rows[1].each('psnr')[:5]):.1f}" in chart.points[1]
    )
    for row in results["rows"]:
        row["paired"] = None
    assert (
        charts.closeness(Results(results), Palette(shown)) == "Closeness to the untouched pictures: no row has a PSNR."
    )


def test_identical_pictures_are_called_identical(results):
    most, some, all_ = (results["rows"][place]["paired"]["psnr"] for place in (-1, -2, -3))
    most["identical"], some["identical"] = 61, 3
    all_ |= dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest")) | {"identical": 64}
    shown = Results(results)
    psnr = [line.entries[-1] for line in main_table(shown).lines[-3:]]
    assert [entry.text for entry in psnr] == ["identical", f"{some['mean']:.2f}", "identical"]
    low, high = some["interval"]
    assert [entry.small for entry in psnr] == [
        "(64 of 64)",
        f"[{low:.2f}, {high:.2f}], 3 of 64 identical",
        "(61 of 64)",
    ]
    assert f"{low:.2f}, {high:.2f}\\], 3 of 64 identical |" in to_markdown(main_table(shown))
    assert lowest_psnr(study_table(shown))[-3:] == ["identical", f"{some['lowest']:.1f}", f"{most['lowest']:.1f}"]
    assert [record["psnr identical"] for record in csv.DictReader(io.StringIO(to_csv(shown)))][-3:] == ["64", "3", "61"]
    plots = {plot.name: plot.alt for plot in draw_plots(shown, Palette(shown))[0]}
    assert "ELFATT-SD 0.5:" not in plots["closeness_time"] and "ELFATT-SD 0.3:" in plots["closeness_time"]
    assert "ELFATT-SD 0.5: PSNR" not in plots["ablation_ratio"] and "ELFATT-SD 0.3: PSNR" in plots["ablation_ratio"]


def test_a_published_figure_is_that_of_the_same_program(results):
    def published(**settings):
        data = copy.deepcopy(results)
        data["rows"][4]["settings"] |= settings
        return main_table(Results(data)).lines[4].published[0].text

    assert published() == published(stride=2) == "30.9"
    assert published(stride=4) == published(no_such_setting=1) == "—"
    results["rows"][4]["method"] = "custom"
    assert published() == "30.9" and published(until=0.2) == "—"


@pytest.mark.usefixtures("one_plot")
def test_a_higher_accuracy_is_better_without_an_arrow_down(tmp_path, results):
    results["rows"][2]["accuracy"]["mean"]["difference"]["verdict"] = "better"
    results["rows"][2]["distances"]["FD-toy"]["difference"]["verdict"] = "worse"
    save(tmp_path, results)
    cells = [
        " ".join(cell.split())
        for table in Page(write_report(load_results(tmp_path))).tables
        for line in table
        for cell in line
    ]
    assert {cell for cell in cells if re.fullmatch(r"\S (better|worse)", cell)} == {"✓ better", "✗ worse"}


def test_a_lost_attribute_shows_beside_the_accuracy_of_a_study(results):
    """The interval of the share alone does not tell: the verdict is of the paired difference."""
    for row in results["rows"][1:]:
        if row["accuracy"]:
            row["accuracy"]["mean"]["difference"]["verdict"] = "no difference shown"
    results["rows"][3]["accuracy"]["mean"]["difference"]["verdict"] = "worse"
    table = study_table(Results(results))
    place = [column.title for column in table.columns].index("Accuracy ↑") - table.heads
    remarks = [line.entries[place].remark for line in table.lines]
    assert remarks[3] == "worse" and not any(remarks[:3] + remarks[4:])


def test_an_arrow_marks_an_interval_that_goes_on(results):
    def arrows(low, high):
        for row in filter(lambda row: row["distances"], results["rows"][1:]):
            row["distances"]["FD-toy"]["difference"]["interval"] = [-1.0, 1.0]
        results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.0, "interval": [low, high]}
        axes = charts.differences(Results(results), Palette(Results(results))).figure.axes[0]
        return [line.get_marker() for line in axes.lines if line.get_marker() in ("<", ">")]

    assert results["rows"][1]["role"] == "null"
    assert arrows(-0.5, 0.5) == []
    assert arrows(-50.0, 0.5) == ["<"]
    assert arrows(-50.0, 50.0) == ["<", ">"]


def test_the_machine_is_that_of_the_timing(results):
    def machine(timing=None):
        data = results | {"environment": results["environment"] | {"timing": timing}}
        return next(here for what, here, _ in comparability(Results(data)) if what == "Hardware")

    assert machine() == "2 cores of AMD EPYC, 2 threads"
    other = results["environment"] | {"cpu_threads": 1}
    assert machine({"environment": other}) == "2 cores of AMD EPYC, 1 thread"
    assert machine({"environment": other | {"device": "NVIDIA H200", "cuda": {"runtime": "12.4"}}}) == "NVIDIA H200"


def test_a_null_row_is_called_wider_only_where_it_is(results):
    def caption():
        return charts.differences(Results(results), Palette(Results(results))).caption

    assert "it is wider than those of the methods" in caption()
    results["rows"][1]["distances"]["FD-toy"]["difference"]["interval"] = [0.1, 0.3]
    assert "Shaded: the interval of the null row" in caption() and "wider" not in caption()


def test_plots_that_are_no_longer_drawn_are_removed(tmp_path, results):
    save(tmp_path, results)
    write_report(load_results(tmp_path))
    (tmp_path / "report" / "notes.txt").write_text("by hand")
    for row in results["rows"]:
        row["memory"] = None
    save(tmp_path, results)
    write_report(load_results(tmp_path))
    left = {path.name for path in (tmp_path / "report").iterdir()}
    assert "memory.png" not in left and "distance_memory.png" not in left
    assert {"notes.txt", "index.html", "table.csv", "difference.png"} < left


def test_settings_that_vary_have_their_column_and_plot(results):
    rows = [row for row in results["rows"] if row["role"] != "method" or row["method"] == "elfatt"]
    for row, size in zip(rows[2:], (512, 32, 128), strict=True):
        row["settings"] = {"ratio": 0.5, "block_size": size, "block_order": "sequence"}
    results["rows"] = rows
    results["published"] = {"source": "tabSDa1", "rows": [{"label": "ELFATT-SD", "block_size": 32, "FID": 30.8}]}
    shown = Results(results)
    assert shown.varied == ["ratio", "block_size"]
    assert [column.title for column in main_table(shown).columns][:3] == ["Method", "Ratio", "Block size"]
    found = {line.row.cell: line.published[0].text for line in main_table(shown).lines}
    assert found == {"sd": "—", "sd-null": "—", "elfatt-0.1": "—", "elfatt-0.3": "30.8", "elfatt-0.5": "—"}
    plots, missing = draw_plots(shown, Palette(shown))
    svg = next(plot.svg for plot in plots if plot.name == "ablation_block_size")
    texts = "|".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    assert "|32|128|512|" in texts, "values in order, not as the protocol lists them"
    assert any("Ratio" in line for line in missing)


def test_an_ablation_has_a_line_for_each_set_of_other_settings(sweep_plots):
    ablations = {name: plot for name, plot in sweep_plots.items() if name.startswith("ablation")}
    assert set(ablations) == {"ablation_ratio", "ablation_block_size", "ablation_until"}
    sizes = re.findall(r"<text[^>]*>([^<]*)</text>", ablations["ablation_block_size"].svg)
    lines = [text for text in sizes if "ratio 0" in text]
    assert lines == ["ELFATT with blocks… ratio 0.3", "ELFATT with blocks… ratio 0.5"]
    for measure in ("FD-toy", "Accuracy", "PSNR, dB", "UNet, s/img"):
        assert measure in sizes and f": {measure} " in ablations["ablation_block_size"].alt
    assert "from step" not in ablations["ablation_block_size"].alt, "a row without the setting has no place"


def test_forty_rows_are_numbered_and_told_apart(sweep, sweep_plots):
    shown = Results(sweep)
    assert len(shown.rows) == 40 and shown.crowded
    names = [row.short(34) for row in shown.rows]
    assert len(set(names)) == 40 and all(len(name) <= 34 for name in names)
    assert names[22].startswith("23 · ELFATT") and names[22].endswith("… 0.3, block size 32")
    styles = {Palette(shown).style(row) for row in shown.methods}
    assert len(styles) == len({row.label for row in shown.methods}) == 22, "a style of its own for each method"
    assert "38 settings of 22 methods on 64 pictures each" in scope(shown)
    assert all(len(sentence) < 400 for sentence in findings(shown))
    told = told_of(sweep, "verdicts rest on")
    assert told.startswith("Worse: rows ") and " to " in told and "No difference shown" not in told.split(";")[0]
    assert main_table(shown).lines[4].heads[0].text.startswith("5 · blocks of a stratified")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", sweep_plots["distance_unet_time"].svg)
    assert {str(number) for number in range(3, 41)} <= set(texts)


def test_the_published_fid_has_the_reference_of_its_protocol(results):
    def words(source, distance):
        data = json.loads(json.dumps(results).replace("FD-toy", distance))
        data["published"]["source"] = source
        return comparable_words(Results(data))

    results["protocol"] |= {"steps": 50, "guidance": 7.5, "width": 512, "height": 512, "dtype": "float16"}
    results["protocol"]["scheduler"] = "PLMS"
    for row in results["rows"]:
        row["images"] = 2000
    for source, distance in (
        ("tabSD", "FID (pytorch-fid)"),
        ("Token Merging for Fast Stable Diffusion", "FID (pytorch-fid) (5000 reference images, cropped to 512)"),
    ):
        assert "not values" in words(source, distance)
        assert "not the published FID" in words(source, "FID (12 reference images)")


def test_what_departs_from_the_published_protocol_is_named(results):
    """An FID alone does not make the paper's protocol."""
    data = json.loads(json.dumps(results).replace("FD-toy", "FID (pytorch-fid)"))
    data["published"]["source"] = "tabSDa2"
    data["protocol"] |= {"steps": 2, "guidance": 7.5, "width": 512, "height": 512, "dtype": "bfloat16"}
    data["protocol"]["scheduler"] = "PLMS"
    for row in data["rows"]:
        row["images"] = 8
    words = comparable_words(Results(data))
    assert "not the published protocol: steps 2 in place of 50, pictures per row 8 in place of 2000." in words
    assert "Even under the paper's protocol" not in words


def test_different_kernels_are_named(results):
    for row in results["rows"]:
        row["time"] = (row["time"] or {}) | {"attention_kernels": ["native"]}
    assert not any("kernels" in sentence for sentence in findings(Results(results)))
    results["rows"][2]["time"]["attention_kernels"] = ["flash-attn"]
    told = next(sentence for sentence in findings(Results(results)) if "kernels" in sentence)
    assert "native in SD (Baseline), " in told and told.endswith("flash-attn in ToMe-SD 0.1.")


def test_how_the_reference_was_resized_is_told(results):
    results["published"]["source"] = "tabSD"
    results["protocol"]["reference"] = {"source": "val", "count": 5000, "per_class": 5, "resize": "crop", "size": 512}
    told = next(here for what, here, _ in comparability(Results(results)) if what == "Reference")
    assert told == "val, 5000 images, the first 5 of each class, resized and cropped to 512 x 512"


def test_numbers_beside_points_do_not_cover_each_other(sweep):
    shown = Results(sweep)
    figure = distance_over_time(shown, Palette(shown), "unet").figure
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text().isdecimal()]
    assert len(boxes) == 40
    crossing = [(one, two) for place, one in enumerate(boxes) for two in boxes[:place] if one.overlaps(two)]
    assert len(crossing) <= 2
    assert all(axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) for box in boxes)


@pytest.mark.parametrize("level", [36.0, 36.5])
def test_settings_beside_points_do_not_cover_each_other(results, level):
    """Three methods at one ratio in nearly one place, as ratio 0.5 is on the toy."""
    for place, row in enumerate(row for row in results["rows"] if row["time"]):
        row["time"]["end_to_end"]["seconds_per_image"] = 3.0 + 0.08 * place
        if row["paired"]:
            row["paired"]["psnr"] = {"mean": level + 0.3 * (place % 2), "interval": [35, 38], "identical": 0}
    shown = Results(results)
    figure = closeness_over_time(shown, Palette(shown)).figure
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]
    assert len(boxes) == 8, "every ratio but the failed row's"
    assert not any(one.overlaps(two) for place, one in enumerate(boxes) for two in boxes[:place])


def test_only_points_that_differ_in_one_number_are_joined(sweep):
    for row in sweep["rows"][3:5]:  # two block orders have no order
        row["label"] = "blocks of 128"
        row["settings"] = {**row["settings"], "block_order": row["cell"]}
    shown = Results(sweep)
    (axes,) = closeness_over_time(shown, Palette(shown)).figure.axes
    series = [line for line in axes.lines if line.get_marker() != "None"]
    joined = [len(line.get_xdata()) for line in series if line.get_linestyle() == "-"]
    apart = [len(line.get_xdata()) for line in series if line.get_linestyle() == "None"]
    assert joined == [6], "the shares of steps"
    assert sorted(apart)[-2:] == [2, 12], "two orders; ratios and block sizes"


def test_a_legend_names_few_methods_of_many_rows(sweep):
    """As in a study of few methods with many settings: rows have numbers beside their points."""
    sweep["rows"] = sweep["rows"][:2] + sweep["rows"][22:]
    shown = Results(sweep)
    assert shown.crowded
    (axes,) = closeness_over_time(shown, Palette(shown)).figure.axes
    assert all(text.get_text().isdecimal() for text in axes.texts)
    (legend,) = axes.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["ELFATT with blocks along a curve in the first fifth of all steps", "ToMe, then exact"]


def test_a_run_without_time_or_memory_says_so(sweep):
    for row in sweep["rows"]:
        row["time"] = None
    shown = Results(sweep)
    line = main_table(shown).lines[5]
    told = dict(zip([column.title for column in main_table(shown).columns], [*line.heads, *line.entries], strict=True))
    assert told["s/img"].text == told["GiB/img"].text == "not measured"
    assert {"Time was not measured.", "Memory was not measured."} <= set(findings(shown))


def test_the_time_of_the_unet_alone_is_named(sweep):
    shown = Results(sweep)
    assert "UNet, s/img" in [column.title for column in main_table(shown).columns]
    assert "UNet, s/img" not in [column.title for column in more_table(shown).columns]
    assert "Fastest by the median, UNet alone" in " ".join(findings(shown))


def test_the_stepped_line_joins_rows_that_none_beats_in_both(results):
    spots = [
        Spot(row, across, Estimate(up))
        for row, across, up in zip(
            Results(results).rows, (3.0, 1.0, 2.0, 2.0, 1.5), (1.0, 9.0, 5.0, 4.0, 9.0), strict=False
        )
    ]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=True)] == [(1, 9), (2, 4), (3, 1)]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=False)] == [(1, 9)]


def test_a_far_null_row_does_not_press_the_others_together(results):
    shown = Results(results)
    plots = {plot.name: plot for plot in draw_plots(shown, Palette(shown))[0]}
    null = results["rows"][1]["paired"]["psnr"]["mean"]
    assert f"The null row is far off this plot, at {null:.3g}." in plots["closeness_time"].caption
    assert "null row" not in plots["closeness_time"].alt
    assert "far off" not in plots["distance_time"].caption and "null row" in plots["distance_time"].alt


def test_a_wide_null_row_does_not_hide_the_methods(results):
    results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.3, "interval": [-90.0, 90.6]}
    shown = Results(results)
    low, high = charts.differences(shown, Palette(shown)).figure.axes[0].get_xlim()
    ends = [end for row in shown.methods if (found := row.difference("FD-toy")) for end in found.ends]
    assert -10 < low < min(ends) and max(ends) < high < 10
    low, high = distance_over_time(shown, Palette(shown), "unet").figure.axes[0].get_ylim()
    values = [found.value for row in shown.rows if (found := row.distance("FD-toy"))]
    assert min(values) - 10 < low < min(values) and max(values) < high < max(values) + 10


def test_the_interval_over_time_is_that_of_the_difference(results):
    """The distance of the methods is known less well than how it differs from the untouched pipeline's."""
    for row in results["rows"]:
        if row["distances"]:
            row["distances"]["FD-toy"]["interval"] = [0.0, 900.0]
    shown = Results(results)
    (axes,) = distance_over_time(shown, Palette(shown), "unet").figure.axes
    ends = sorted(tuple(line.get_segments()[0][:, 1]) for line in axes.collections)
    base = shown.baseline.distance("FD-toy").value
    differences = [found for row in shown.methods if (found := row.difference("FD-toy"))]
    assert ends == sorted((base + found.low, base + found.high) for found in differences)


def test_the_interval_over_a_setting_is_that_of_the_difference(sweep):
    shown = Results(sweep)
    axes = ablation(shown, Palette(shown), "until").figure.axes[0]
    drawn = sorted(tuple(line.get_segments()[0][:, 1]) for line in axes.collections)
    base = shown.baseline.distance("FD-toy").value
    found = [row.difference("FD-toy") for row in shown.methods if "until" in row.settings]
    assert drawn == sorted((base + each.low, base + each.high) for each in found)


def test_a_setting_with_names_is_not_joined_by_lines(sweep):
    for row in sweep["rows"]:
        if "until" in row["settings"]:
            row["settings"] = {"order": f"order {row['settings']['until']}"}
    shown = Results(sweep)
    names, sizes = (
        ablation(shown, Palette(shown), setting).figure.axes[0].lines[0] for setting in ("order", "block_size")
    )
    assert (names.get_linestyle(), sizes.get_linestyle()) == ("None", "-")


def test_a_short_name_keeps_its_end():
    """There stands what tells rows apart."""
    assert shortened("26 · sampled keys, other numbers of groups", "block size 128, groups 1", 34) == (
        "26 · sam… block size 128, groups 1"
    )
    assert shortened("sampled keys", "a setting that is longer than there is room, groups 1", 20).endswith(", groups 1")
    assert len(shortened("sampled keys", "a setting that is longer than there is room, groups 1", 20)) == 20


def test_a_short_name_has_whole_words():
    """Where a word is not so long that little would be left."""
    long = "sampled keys from the first step on, difference shared by"
    assert (
        shortened(long, "residual steps 4, block size 128", 60)
        == "sampled keys from the… residual steps 4, block size 128"
    )
    assert shortened("ToMe 0.5, one matching for all layers of a step", "", 30) == "ToMe 0.5, one… of a step"
    assert all(len(shortened(long, tail, width)) <= width for tail in ("", "agents 4") for width in range(10, 60))


def test_rows_of_one_name_are_told_apart(results):
    results["rows"][4]["settings"] = results["rows"][3]["settings"] = results["rows"][2]["settings"]
    names = [row.name for row in Results(results).rows]
    assert len(set(names)) == len(names) and "ToMe-SD 0.1 (tome-0.3)" in names


@pytest.mark.usefixtures("one_plot")
def test_page_keeps_below_its_size(run, monkeypatch):
    folder, results, _ = run
    shown = Results(results, folder)
    drawn, missing = draw_plots(shown, Palette(shown))
    full = page.render_page(shown, Pictures(shown), drawn, missing, {})
    limit = len(full.encode()) - 100_000
    monkeypatch.setattr(page, "MAX_BYTES", limit)
    small = page.render_page(shown, Pictures(shown), drawn, missing, {})
    assert 0 < len(small.encode()) <= limit and small.count("data:image/webp") > 20
    assert page.DETAILS[-1].columns == page.DETAILS[-1].pairs == 0, "the last resort is a page without pictures"


def test_page_is_below_five_megabytes(run):
    folder, _, _ = run
    assert (folder / "report" / "index.html").stat().st_size <= 5e6
    assert page.MAX_BYTES <= 5e6


def test_report_is_the_same_every_time(run):
    folder, _, _ = run
    before = {path.name: path.read_bytes() for path in (folder / "report").iterdir()}
    write_report(load_results(folder))
    assert {path.name: path.read_bytes() for path in (folder / "report").iterdir()} == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "is damaged"),
        ("[]", "accepted: a table"),
        ('{"format": 2, "rows": []}', "format=2 is not accepted"),
        ('{"format": 1}', "key 'rows' is missing"),
        ('{"format": 1, "rows": [{}, 3]}', "rows[1]=3 is not accepted"),
        ('{"format": 1, "rows": [{"time": {"unet": {"values": ["x"]}}}]}', "rows[0].time.unet.values[0]='x'"),
        ('{"format": 1, "rows": [{"distances": {"FID": {"interval": [1]}}}]}', "distances.FID.interval=[1]"),
    ],
)
def test_results_that_are_none_give_one_clear_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ElfattError, match=re.escape(message)) as caught:
        write_report(load_results(tmp_path))
    assert "results.json" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "report").exists()


@pytest.mark.usefixtures("one_plot")
def test_a_folder_that_cannot_be_written_gives_one_clear_line(tmp_path, results):
    save(tmp_path, results)
    (tmp_path / "report").write_text("a file stands here")
    with pytest.raises(ElfattError, match="cannot be written to"):
        write_report(load_results(tmp_path))
    assert (tmp_path / "report").read_text() == "a file stands here"


@pytest.mark.parametrize(
    ("value", "decimals", "sign", "text"),
    [
        (-0.41, 2, True, "\N{MINUS SIGN}0.41"),
        (0.412, 2, True, "+0.41"),
        (-0.0004, 2, True, "\N{MINUS SIGN}0.00"),
        (-0.001, 2, False, "0.00"),
        (0.0, 1, True, "0.0"),
        (float("inf"), 1, False, "∞"),
    ],
)
def test_numbers_are_written_as_in_print(value, decimals, sign, text):
    assert fixed(value, decimals, sign=sign) == text


def test_decimals_follow_the_uncertainty():
    assert decimals_for([Estimate(18.4, 16.8, 20.0)]) == 1
    assert decimals_for([Estimate(0.0121, 0.0114, 0.0128)]) == 5
    assert decimals_for([Estimate(0.707), None]) == 3
    assert decimals_for([Estimate(3.12)]) == 2
    assert decimals_for([]) == 2


def test_memory_is_told_by_stage(results):
    titles = [column.title for column in more_table(Results(results)).columns]
    stages = [title for title in titles if title.endswith("GiB/img")]
    assert stages == ["Text, GiB/img", "UNet, GiB/img", "VAE, GiB/img"]
    results["rows"][0]["memory"]["reserved"] = {"gib_per_image": 0.75}
    table = more_table(Results(results))
    place = [column.title for column in table.columns].index("Reserved, GiB/img") - table.heads
    assert [line.entries[place].text for line in table.lines[:2]] == ["0.750", "not measured"]


def test_out_of_memory_is_a_result(results):
    reason = "out of memory at batch 48"
    results["rows"][-1] |= {"time": {"failed": reason}, "memory": {"failed": reason, "batches": []}}
    line = main_table(Results(results)).lines[-1]
    assert [entry.text for entry in line.entries].count(reason) == 2


def test_a_slope_from_fewer_batches_says_why(results):
    results["rows"][-1]["memory"]["note"] = "out of memory at batch 8"
    entry = main_table(Results(results)).lines[-1].entries[-2]
    assert entry.note.startswith("[") and entry.remark == "out of memory at batch 8"
    notes = [record["memory note"] for record in csv.DictReader(io.StringIO(to_csv(Results(results))))]
    assert notes == [""] * (len(notes) - 1) + ["out of memory at batch 8"]


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("=1+1", "'=1+1"), ("+cmd|x", "'+cmd|x"), ("-2+3", "'-2+3"), ("@SUM(A1)", "'@SUM(A1)"), (" =1", "' =1"),
        ("\uff1d1", "'\uff1d1"), ("\t=1", "'\t=1"), ("-0.5", "-0.5"), ("1e-5", "1e-5"), ("ratio=0.5", "ratio=0.5"),
    ],
)  # fmt: skip
def test_no_cell_of_the_csv_is_a_formula(results, text, safe):
    results["rows"][0] |= {"label": text, "settings": {text: text}}
    cells = list(csv.reader(io.StringIO(to_csv(Results(results)))))
    assert cells[1][cells[0].index("label")] == safe
    assert cells[1][cells[0].index(f"setting_{text}")] == safe


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("[1] *", "{[}1{]} {*}"), ("a|b", "a\\textbar{}b"), ("caf\xe9 \u0159 \xfc", "caf\\'{e} \\v{r} \\\"{u}"),
        ("\xdf\u0142", "\\ss{}\\l{}"), ("a\x00b\x1b\u200bc", "abc"), ("\u732b", "U+732B"), ("\ufb01", "fi"),
        ("\U0001f600", "U+1F600"), ("\ud800", ""), ("\u0301", "U+0301"), ("a\u2028b", "a b"),
    ],
)  # fmt: skip
def test_latex_is_ascii_that_every_engine_reads(text, tex):
    assert tex_escape(text) == tex
    assert tex_escape(text).isascii()


@pytest.mark.usefixtures("one_plot")
def test_pages_and_tables_hold_no_control_characters(tmp_path):
    results = build_run(tmp_path, images=1, size=16)
    odd = "a\x00b\x1bc\x7fd\ufffe"
    results |= {"name": odd, "description": odd, "environment": {"device": odd}}
    for row in results["rows"]:
        row |= {"label": f"{row['label']} {odd}", "settings": {**row["settings"], odd: odd}}
    save(tmp_path, results)
    write_report(load_results(tmp_path))
    for name in ("index.html", "table.md", "table.tex"):
        content = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe]", content), name


@pytest.mark.usefixtures("one_plot")
def test_a_full_disk_is_a_failure_and_no_wrong_use(tmp_path, results, monkeypatch):
    save(tmp_path, results)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elfatt_sd.files.os.fsync", full)
    with pytest.raises(RunFailure, match="no space left on the disk of"), clear_disk_errors(tmp_path):
        write_report(load_results(tmp_path))
    assert not list((tmp_path / "report").iterdir())
