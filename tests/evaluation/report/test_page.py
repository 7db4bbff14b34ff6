"""The page of a report: it stands alone, shows plots and images, says what is missing, and works in a real browser."""

import base64
import html
import io
import json
import re
import shutil
import subprocess

import pytest
from PIL import Image
from support.runs import Page, build_run, latex_rows, markdown_tables, picture, save

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report import charts, load_results, page, write_report
from elfatt_sd.evaluation.report.charts import Palette, Spot, closeness_over_time, distance_over, draw_plots, front
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.page import Pictures
from elfatt_sd.evaluation.report.summary import headline

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{ & | _x % {{ 7 * 7 }} \N{SNOWMAN}"
CONTROLS = "a\x00b\x1bc\x7fd\ufffee\u202ef\u2066g\u200fh\u061c"


def drawn(draw, results, *options):
    shown = Results.of(results)
    return draw(shown, Palette(shown), *options)


def text_of(folder, name="index.html"):
    return (folder / "report" / name).read_text(encoding="utf-8")


def test_the_words_of_page_and_plots_are_unchanged(run, sweep, snapshot):
    """Made-up figures on a made-up machine; titles, captions and every figure of the plots of a sweep."""
    assert "\n".join(line.strip() for line in run[2].text.splitlines() if line.strip()) == snapshot
    for results in (run[1], sweep):
        plots, missing = drawn(draw_plots, results)
        assert [*([plot.name, plot.caption, plot.alt] for plot in plots), missing] == snapshot


def test_the_page_stands_alone_and_is_accessible(run):
    """And a method has one colour everywhere, which follows dark mode. A second report has the same bytes."""
    folder, results, shown = run
    names = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    references = [each[name] for _, each in shown.elements for name in names if name in each]
    assert references and all(value.startswith(("data:", "#")) for value in references)
    text = text_of(folder)
    assert len(text.encode()) <= page.MAX_BYTES <= 5e6
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    policy = next(item["content"] for item in shown.all("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    ids = [item["id"] for _, item in shown.elements if "id" in item]
    assert len(ids) == len(set(ids)) and {value[1:] for value in references if value.startswith("#")} <= set(ids)
    assert all(attributes["alt"] for attributes in shown.all("img") if "src" in attributes)
    assert shown.all("html")[0]["lang"] == "en" and len(shown.all("h1")) == 1
    assert all(attributes.get("scope") for attributes in shown.all("th"))
    plots = [item for item in shown.all("div") if item.get("role") == "img"]
    paths = list((folder / "report").glob("*.png"))
    assert len(plots) == len(paths) == 6 and all("ELFATT-SD 0.5: " in item["aria-label"] for item in plots)
    for path in paths:
        with Image.open(path) as image:
            assert image.width > 900 and image.convert("L").getextrema()[0] < 100
    styles = {row.label: Palette(Results.of(results)).style(row) for row in Results.of(results).methods}
    assert len({style.colour for style in styles.values()}) == len({style.marker for style in styles.values()}) == 3
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert all(f"var({style.variable})" in svg and style.colour not in svg for style in styles.values())
    before = {path.name: path.read_bytes() for path in (folder / "report").iterdir()}
    write_report(load_results(folder))
    assert {path.name: path.read_bytes() for path in (folder / "report").iterdir()} == before


@pytest.mark.usefixtures("one_plot")
def test_hostile_text_stays_text_without_control_characters(tmp_path):
    results = build_run(tmp_path, images=8, size=32)
    results["rows"][7]["failed"] = results["name"] = results["description"] = HOSTILE + CONTROLS
    names = ('"><script>alert(3)</script>', "../../../escaped", "..-..-..-escaped")
    for place, row in enumerate(results["rows"][2:6]):
        row |= {"label": HOSTILE, "method": "tome"}
        row["settings"] = {name: "changed" if place == number else "same" for number, name in enumerate(names)}
    results["environment"][HOSTILE] = HOSTILE + CONTROLS
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
    assert shown.text.count("{{ 7 * 7 }}") >= 8 and "49" not in headline(Results.of(results))
    assert any(attributes.get("title") == HOSTILE for attributes in shown.all("span"))
    assert not list(tmp_path.parent.glob("*escaped*"))
    texts = {name: text_of(tmp_path, name) for name in ("index.html", "table.csv", "table.md", "table.tex")}
    assert len(set(latex_rows(texts["table.tex"]))) == 1 and "<script" not in texts["table.md"]
    for table in markdown_tables(texts["table.md"]):
        assert {len(line) for line in table} == {len(table[0])}
    for content in texts.values():
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\u061c\u200f\u202e\u2066]", content)


MEASURED = dict.fromkeys(("distances", "paired", "accuracy", "time", "memory"))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [{}]},
        {"rows": [{"cell": "a", "failed": "out of memory"}, {"cell": "b", "label": "B", **MEASURED}]},
        {"published": {"source": None, "rows": [{"label": "SD"}, {"label": "X", "FID": "many"}]}, "rows": [{}]},
        dict.fromkeys(("published", "environment", "protocol", "description", "name")) | {"rows": [MEASURED]},
    ],
)
def test_missing_parts_are_no_error_and_told(tmp_path, results, change):
    save(tmp_path, results | change)  # a run without pictures
    shown = Page(write_report(load_results(tmp_path)))
    assert "No published table belongs" in shown.text or "Compare the direction" in shown.text
    assert not shown.all("img") and not shown.all("svg")
    for sentence in ("no distance was measured", "Time was not measured", "no row has both"):
        assert sentence in shown.text
    assert "nan" not in shown.text.lower().split() and "None" not in shown.text.split()


def test_pictures_are_those_of_the_same_latent_and_the_most_changed(run):
    folder, results, shown = run
    buttons = [item for item in shown.all("button") if "data-cell" in item]
    columns = list(dict.fromkeys(item["data-index"] for item in buttons))
    assert len(columns) == 6 and "sd-null" not in {item["data-cell"] for item in buttons}
    finished = [row["cell"] for row in results["rows"] if not row["failed"] and row["role"] != "null"]
    for cell in finished:
        assert [item["data-index"] for item in buttons if item["data-cell"] == cell] == columns
    pictures = Pictures(Results.of(results, folder))
    first = pictures.grid(page.EDGES[0])[0][0]
    small = Image.open(io.BytesIO(base64.b64decode(first.uri.split("base64,")[1]))).convert("RGB")
    original = picture(first.index, 0.0, 128)
    difference = [abs(a - b) for a, b in zip(small.tobytes(), original.tobytes(), strict=True)]
    assert sum(difference) / len(difference) < 8
    found = pictures.most_changed(page.EDGES[0])
    assert ["sd", *(row.cell for row, _ in found)] == finished
    for row, pairs in found:
        assert [(before.index, after.index) for before, after in pairs] == [(3, 3), (7, 7), (1, 1)]
        assert all(before.row.role == "baseline" and after.row is row for before, after in pairs)


@pytest.mark.usefixtures("one_plot")
def test_pictures_that_are_not_the_runs_leave_a_gap(tmp_path):
    """Deleted, altered, of another folder; a damaged list is told."""
    results, folder = build_run(tmp_path / "run", images=4, size=32), tmp_path / "run" / "cells" / "tome-0.1" / "images"
    (folder / "00000.png").unlink()
    for index in range(1, 4):
        shutil.copy(folder.parents[1] / "sd" / "images" / f"{index:05d}.png", folder)
    shown = Page(write_report(load_results(tmp_path / "run")))
    assert shown.text.count("no image") == 1
    assert shown.text.count("altered after generation") == 5, "three in the grid, two of the most changed"
    (tmp_path / "secret" / "images").mkdir(parents=True)
    picture(0, 0).save(tmp_path / "secret" / "images" / "00000.png")
    results["rows"][3]["cell"] = "../../secret"
    assert "../../secret" not in {row.cell for row in Pictures(Results.of(results, tmp_path / "run")).made}
    (tmp_path / "run" / "cells" / "sd" / "manifest.jsonl").write_text("not json\n")
    with pytest.raises(ElfattError, match=r"manifest\.jsonl, line 1 is damaged"):
        write_report(load_results(tmp_path / "run"))


def test_the_page_keeps_below_its_size(run, monkeypatch):
    shown = Results.of(run[1], run[0])
    limit = len(page.render_page(shown, [], [], {}).encode()) - 100_000
    monkeypatch.setattr(page, "MAX_BYTES", limit)
    small = page.render_page(shown, [], [], {})
    assert 0 < len(small.encode()) <= limit and small.count("data:image/webp") > 20
    monkeypatch.setattr(page, "MAX_BYTES", 0)
    assert "data:image/webp" not in page.render_page(shown, [], [], {}), "the last resort is a page without pictures"


# Plots: their figures are in the snapshot, in words; here is where they are drawn.


def test_plots_show_every_picture_and_the_intervals_of_differences(results):
    """The distance of the methods is known less well than how it differs from the untouched pipeline's."""
    results["rows"][2]["paired"]["psnr"]["pictures"][5] = None
    rows = [row for row in Results.of(results).rows if row.psnr is not None]
    (axes,) = drawn(charts.closeness, results).figure.axes
    assert [list(line.get_xdata()) for line in axes.lines[::2]] == [
        [value for value in row.changes["psnr"].pictures if value is not None] for row in rows
    ]
    assert [line.get_xdata()[0] for line in axes.lines[1::2]] == [row.psnr.value for row in rows]
    assert [tuple(line.get_segments()[0][:, 0]) for line in axes.collections] == [row.psnr.ends for row in rows]
    for images in (None, "infinite"):
        for row in filter(lambda row: row["distances"], results["rows"]):
            distance = row["distances"]["FD-toy"]
            distance |= {"interval": [0.0, 900.0], "difference": distance.get("difference", {}) | {"images": images}}
        shown, chart = Results.of(results), drawn(distance_over, results, "unet")
        ends = sorted(tuple(line.get_segments()[0][:, 1]) for line in chart.figure.axes[0].collections)
        base = shown.baseline.figure("FD-toy").value
        found = [row.figure("FD-toy").difference.estimate for row in shown.methods if not row.failed]
        assert ends == sorted((base + each.low, base + each.high) for each in found)
        assert ("infinitely many images" in chart.caption) == bool(images)


def test_rows_are_told_apart_and_joined_if_they_differ_in_one_number(sweep):
    """Many rows have numbers beside their points; a legend names few methods."""
    shown = Results.of(sweep)
    styles = {Palette(shown).style(row) for row in shown.methods}
    assert len(styles) == len({row.label for row in shown.methods}) == 22, "a style of its own for each method"
    (axes,) = drawn(closeness_over_time, sweep).figure.axes
    assert {text.get_text() for text in axes.texts} == {str(number) for number in range(3, 41)}
    series = [(line.get_linestyle(), len(line.get_xdata())) for line in axes.lines if line.get_marker() != "None"]
    assert ("-", 6) in series and ("None", 12) in series, "joined are shares of steps, not ratios and block sizes"
    sweep["rows"] = sweep["rows"][:2] + sweep["rows"][22:]
    (legend,) = drawn(closeness_over_time, sweep).figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["ELFATT with…fifth of all steps", "ToMe, then exact"]


def test_the_stepped_line_joins_rows_that_none_beats_in_both():
    spots = [Spot(None, *place) for place in ((3, Estimate(1)), (1, Estimate(9)), (2, Estimate(5)), (2, Estimate(4)))]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=True)] == [(1, 9), (2, 4), (3, 1)]
    assert [(spot.across, spot.up.value) for spot in front(spots, low_is_better=False)] == [(1, 9)]


def test_a_wide_or_far_null_row_does_not_hide_the_methods(results):
    results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.3, "interval": [-90.0, 90.6]}
    low, high = drawn(charts.differences, results).figure.axes[0].get_xlim()
    found = [row.figure("FD-toy").difference.estimate for row in Results.of(results).methods if not row.failed]
    ends = [end for each in found for end in each.ends]
    assert -10 < low < min(ends) and max(ends) < high < 10
    assert not any("null row" in point for point in drawn(closeness_over_time, results).points)


# In a browser.

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")
WATCH = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(`error: ${event.message}`));
addEventListener("securitypolicyviolation", (event) => problems.push(`blocked: ${event.blockedURI}`));
addEventListener("load", () => {
  const told = { problems, overflow: document.documentElement.scrollWidth - innerWidth };
  const id = (name) => document.getElementById(name);
  const state = () => ({
    at: id("compare-stage").style.getPropertyValue("--at"),
    clip: getComputedStyle(id("compare-before")).clipPath,
    names: [id("compare-left-tag").textContent, id("compare-right-tag").textContent],
    before: id("compare-before").src, after: id("compare-after").src,
    hidden: id("compare-before").hidden || id("compare-after").hidden, text: id("compare-text").textContent,
  });
  const set = (name, value, kind) => {
    id(name).value = value;
    id(name).dispatchEvent(new Event(kind, { bubbles: true }));
    return state();
  };
  told.start = state();
  told.moved = set("compare-range", 75, "input");
  told.method = set("compare-right", "tome-0.5", "change");
  told.picture = set("compare-index", id("compare-index").options[2].value, "change");
  set("compare-right", "tome-0.3", "change");
  told.missing = set("compare-index", id("compare-index").options[5].value, "change");
  document.querySelector('.grid button[data-cell="agent-0.3"]').click();
  told.clicked = state();
  told.focus = document.activeElement.id;
  told.images = [...document.images].filter((image) => image.src && !image.naturalWidth).length;
  told.colours = [getComputedStyle(document.body).backgroundColor,
                  getComputedStyle(document.querySelector("svg text")).fill];
  const fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  told.requests = fetched.filter((name) => !name.startsWith("data:"));
  const result = document.createElement("pre");
  result.id = "probe-result";
  result.textContent = JSON.stringify(told);
  document.body.append(result);
});
</script>"""


def watched(folder, report, *options):
    """Open a copy of the report without a display, use its slider, and tell errors and what is shown."""
    text = report.read_text(encoding="utf-8")
    assert text.count("<head>") == 1
    copy = folder / "watched.html"
    copy.write_text(text.replace("<head>", f"<head>{WATCH}"), encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", *options, "--dump-dom", copy.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search(r'<pre id="probe-result">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert done.returncode == 0 and found, f"the page's load event did not come to its end: {done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1]))


def luminance(colour):
    """Relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@in_browser
def test_the_page_works_light_and_dark(tmp_path_factory):
    """No errors, nothing fetched, plots are readable; the slider moves, and changes method and picture."""
    folder = tmp_path_factory.mktemp("run")
    build_run(folder, size=64)
    (folder / "cells" / "tome-0.3" / "images" / "00011.png").unlink()
    report = write_report(load_results(folder))
    dark = ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    told = watched(tmp_path_factory.mktemp("light"), report, "--window-size=1280,900")
    seen = (told, watched(tmp_path_factory.mktemp("dark"), report, *dark))
    (light, _), (black, _) = found = [[luminance(colour) for colour in each["colours"]] for each in seen]
    assert light > 0.9 and black < 0.05
    for each, contrast in zip(seen, found, strict=True):
        assert each["problems"] == each["requests"] == [] and each["images"] == 0 and each["overflow"] <= 0
        assert (max(contrast) + 0.05) / (min(contrast) + 0.05) > 7
    start, method, other = told["start"], told["method"], told["picture"]
    assert (start["at"], told["moved"]["at"]) == ("50%", "75%") and start["clip"] != told["moved"]["clip"]
    assert start["names"] == ["SD (Baseline)", "ELFATT-SD 0.3"] and start["before"] != start["after"]
    assert method["names"][1] == "ToMe-SD 0.5" and method["after"] != start["after"]
    assert method["before"] == start["before"], "another method leaves the untouched picture alone"
    assert other["before"] != method["before"] and other["after"] != method["after"]
    assert "Left: SD (Baseline); right: ToMe-SD 0.5" in other["text"]
    assert told["missing"]["hidden"] and "There is no image of ToMe-SD 0.3." in told["missing"]["text"]
    assert told["clicked"]["names"][1] == "Agent-SD 0.3" and not told["clicked"]["hidden"]
    assert told["focus"] == "compare-range", "a range input answers to the arrow keys"
