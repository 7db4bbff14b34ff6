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
from support.runs import Page, build_run, markdown_tables, picture, save

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report.charts import (
    Spot,
    closeness,
    closeness_over_time,
    differences,
    draw_plots,
    front,
    styles,
)
from elfatt_sd.evaluation.report.data import Results, load_results
from elfatt_sd.evaluation.report.page import pictures_of, write_report
from elfatt_sd.evaluation.report.tables import headline

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{ & | _x % {{ 7 * 7 }} \N{SNOWMAN}"


def text_of(folder, name="index.html"):
    return (folder / "report" / name).read_text(encoding="utf-8")


def test_the_words_of_page_and_plots_are_unchanged(run, sweep, snapshot):
    """Made-up figures on a made-up machine; titles and captions of the plots of a sweep."""
    assert "\n".join(line.strip() for line in run[2].text.splitlines() if line.strip()) == snapshot
    for results in (run[1], sweep):
        assert [[plot.name, plot.title, plot.caption] for plot, _ in draw_plots(Results.of(results))] == snapshot


def test_the_page_stands_alone_and_is_accessible(run):
    """And a method has one colour everywhere. A second report has the same bytes."""
    folder, results, shown = run
    names = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    references = [each[name] for _, each in shown.elements for name in names if name in each]
    assert references and all(value.startswith(("data:", "#")) for value in references)
    text = text_of(folder)
    assert len(text.encode()) < 5e6
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    policy = next(item["content"] for item in shown.all("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    ids = [item["id"] for _, item in shown.elements if "id" in item]
    assert len(ids) == len(set(ids)) and {value[1:] for value in references if value.startswith("#")} <= set(ids)
    assert all(attributes["alt"] for attributes in shown.all("img") if "src" in attributes)
    assert shown.all("html")[0]["lang"] == "en" and len(shown.all("h1")) == 1
    assert all(attributes.get("scope") for attributes in shown.all("th"))
    paths = list((folder / "report").glob("*.png"))
    assert len(paths) == sum(item.get("src", "").startswith("data:image/png") for item in shown.all("img")) == 4
    for path in paths:
        with Image.open(path) as image:
            assert image.width > 900 and image.convert("L").getextrema()[0] < 100
    looks = {row.label: style for row, style in styles(Results.of(results)).items() if row.role == "method"}.values()
    assert len({style.colour for style in looks}) == len({style.marker for style in looks}) == 3
    assert all(f"color:{style.colour}" in text for style in looks)
    before = {path.name: path.read_bytes() for path in (folder / "report").iterdir()}
    write_report(load_results(folder))
    assert {path.name: path.read_bytes() for path in (folder / "report").iterdir()} == before


def test_hostile_text_stays_text(tmp_path):
    results = build_run(tmp_path, images=8, size=32)
    results["rows"][7]["failed"] = results["name"] = results["description"] = HOSTILE
    for place, row in enumerate(results["rows"][2:6]):
        row |= {"label": HOSTILE, "method": "tome", "settings": {"<i>": f"<b>{place}"}}
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
    assert shown.text.count("{{ 7 * 7 }}") >= 8 and "49" not in headline(Results.of(results))
    assert any(attributes.get("title") == HOSTILE for attributes in shown.all("span"))
    text = text_of(tmp_path, "table.md")
    assert "<script" not in text
    assert all(len({len(line) for line in table}) == 1 for table in markdown_tables(text))


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
    assert not shown.all("img") and "No method was timed" in shown.text
    assert "nan" not in shown.text.lower().split() and "None" not in shown.text.split()


def test_pictures_are_those_of_the_same_latent_and_the_most_changed(run):
    folder, results, shown = run
    buttons = [item for item in shown.all("button") if "data-cell" in item]
    columns = list(dict.fromkeys(item["data-index"] for item in buttons))
    assert len(columns) == 6 and "sd-null" not in {item["data-cell"] for item in buttons}
    finished = [row["cell"] for row in results["rows"] if not row["failed"] and row["role"] != "null"]
    for cell in finished:
        assert [item["data-index"] for item in buttons if item["data-cell"] == cell] == columns
    ((first, *_), *_), found = pictures_of(Results.of(results, folder))
    small = Image.open(io.BytesIO(base64.b64decode(first.uri.split("base64,")[1]))).convert("RGB")
    original = picture(first.index, 0.0, 128)
    difference = [abs(a - b) for a, b in zip(small.tobytes(), original.tobytes(), strict=True)]
    assert sum(difference) / len(difference) < 8
    assert ["sd", *(row.cell for row, _ in found)] == finished
    change = Image.open(io.BytesIO(base64.b64decode(found[-1][1][0][1].change.split("base64,")[1]))).convert("L")
    assert change.getextrema()[1] > 0 and not first.change, "of the method; untouched has none"
    for row, pairs in found:
        assert [(before.index, after.index) for before, after in pairs] == [(3, 3), (7, 7), (1, 1)]
        assert all(before.row.role == "baseline" and after.row is row for before, after in pairs)


def test_pictures_that_are_not_the_runs_leave_a_gap(tmp_path):
    """Deleted, damaged, of another folder; a damaged list is told."""
    results, folder = build_run(tmp_path / "run", images=4, size=32), tmp_path / "run" / "cells" / "tome-0.1" / "images"
    (folder / "00000.png").unlink()
    (folder / "00001.png").write_bytes(b"no image")
    shown = Page(write_report(load_results(tmp_path / "run")))
    assert shown.text.count("no image") == 3, "two in the grid, one of the most changed"
    (tmp_path / "secret" / "images").mkdir(parents=True)
    picture(0, 0).save(tmp_path / "secret" / "images" / "00000.png")
    results["rows"][3]["cell"] = "../../secret"
    rows, _ = pictures_of(Results.of(results, tmp_path / "run"))
    assert "../../secret" not in {pictures[0].row.cell for pictures in rows}
    (tmp_path / "run" / "cells" / "sd" / "manifest.jsonl").write_text("not json\n")
    with pytest.raises(ElfattError, match=r"manifest\.jsonl, line 1 is damaged"):
        write_report(load_results(tmp_path / "run"))


# Plots.


def test_plots_show_every_picture_and_the_intervals_of_differences(results):
    """And what was not measured has no plot."""
    results["rows"][2]["paired"]["psnr"]["pictures"][5] = None
    rows = [row for row in Results.of(results).rows if row.psnr is not None]
    (axes,) = closeness(Results.of(results)).figure.axes
    each = [[value for value in row.changes["psnr"].pictures if value is not None] for row in rows]
    assert [list(line.get_xdata()) for line in axes.lines[::2]] == each
    assert [line.get_xdata()[0] for line in axes.lines[1::2]] == [row.psnr.value for row in rows]
    assert [tuple(line.get_segments()[0][:, 0]) for line in axes.collections] == [row.psnr.ends for row in rows]
    (axes,) = closeness_over_time(Results.of(results)).figure.axes
    assert {tuple(line.get_segments()[0][:, 1]) for line in axes.collections} == {row.psnr.ends for row in rows[1:]}
    seconds = [row.timed["end_to_end"].seconds_per_image for row in rows[1:]]
    assert [place for line in axes.lines[:3] for place in line.get_xdata()] == seconds
    for images in (None, "infinite"):
        for row in filter(lambda row: row["distances"] and row["role"] != "baseline", results["rows"]):
            row["distances"]["FD-toy"]["difference"]["images"] = images
        shown, chart = Results.of(results), differences(Results.of(results))
        found = [row.figure("FD-toy").difference.estimate for row in shown.methods if not row.failed]
        (axes,) = chart.figure.axes
        assert [tuple(line.get_segments()[0][:, 0]) for line in axes.collections] == [each.ends for each in found]
        assert ("infinitely many images" in chart.caption) == bool(images)
    results["rows"][1]["distances"]["FD-toy"]["difference"] |= {"value": 0.3, "interval": [-90.0, 90.6]}
    low, high = differences(Results.of(results)).figure.axes[0].get_xlim()
    assert -10 < low < min(each.ends[0] for each in found) < max(each.ends[1] for each in found) < high < 10
    assert draw_plots(Results.of(results | {"rows": [{}]})) == []


def test_rows_are_told_apart_and_joined_if_they_differ_in_one_number(sweep):
    """Many rows have numbers beside their points; a legend names few methods."""
    shown = Results.of(sweep)
    looks = {style for row, style in styles(shown).items() if row.role == "method"}
    assert len(looks) == len({row.label for row in shown.methods}) == 22, "a style of its own for each method"
    (axes,) = closeness_over_time(shown).figure.axes
    assert {text.get_text() for text in axes.texts} == {str(number) for number in range(3, 41)}
    series = [(line.get_linestyle(), len(line.get_xdata())) for line in axes.lines if line.get_marker() != "None"]
    assert ("-", 6) in series and ("None", 12) in series, "joined are shares of steps, not ratios and block sizes"
    sweep["rows"] = sweep["rows"][:2] + sweep["rows"][22:]
    (legend,) = closeness_over_time(Results.of(sweep)).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ELFATT with…fifth of all steps", "ToMe, then exact"]


def test_the_stepped_line_joins_rows_that_none_beats_in_both():
    spots = [Spot(None, across, Estimate(up)) for across, up in ((3, 9), (1, 1), (2, 4), (2, 5), (4, 5))]
    assert [(spot.across, spot.up.value) for spot in front(spots)] == [(1, 1), (2, 5), (3, 9)]


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
    change: id("compare-change").hidden || id("compare-change").innerText,
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
  told.colours = [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color];
  told.plot = getComputedStyle(document.querySelector(".plots img")).filter;
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


@in_browser
def test_the_page_works_light_and_dark(tmp_path_factory):
    """No errors, nothing fetched, words are readable; the slider moves, and changes method and picture."""
    folder = tmp_path_factory.mktemp("run")
    build_run(folder, size=64)
    (folder / "cells" / "tome-0.3" / "images" / "00011.png").unlink()
    report = write_report(load_results(folder))
    dark = ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    told = watched(tmp_path_factory.mktemp("light"), report, "--window-size=1280,900")
    seen = (told, watched(tmp_path_factory.mktemp("dark"), report, *dark))
    paper_and_ink = ["rgb(255, 255, 255)", "rgb(28, 32, 36)"], ["rgb(21, 24, 27)", "rgb(228, 231, 234)"]
    for each, colours in zip(seen, paper_and_ink, strict=True):
        assert each["problems"] == [] and each["images"] == 0 and each["overflow"] <= 0
        assert each["colours"] == colours
    assert [each["plot"] for each in seen] == ["none", "invert(1) hue-rotate(180deg)"]
    assert told["missing"]["change"] is True and "untouched, 10 times as bright" in told["clicked"]["change"]
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
