"""The page of a report: it stands alone, shows the images, says what is missing, and works in a real browser."""

import base64
import errno
import html
import io
import json
import re
import shutil
import subprocess

import pytest
from PIL import Image
from support.runs import FAILED, Page, build_run, build_sweep, latex_rows, markdown_tables, picture, prompt, save

from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.evaluation.report import load_results, page, write_report
from elfatt_sd.evaluation.report.charts import Palette, draw_plots
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.page import Pictures
from elfatt_sd.evaluation.report.summary import headline, terminal_summary
from elfatt_sd.evaluation.run import clear_disk_errors

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{ & | _x % {{ 7 * 7 }} \N{SNOWMAN}"


def test_the_words_of_the_page_are_unchanged(run, snapshot):
    """Made-up figures on a made-up machine."""
    assert "\n".join(line.strip() for line in run[2].text.splitlines() if line.strip()) == snapshot


def test_page_stands_alone(run):
    folder, _, shown = run
    references = [
        value for _, attributes in shown.elements for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    ]  # fmt: skip
    assert references and all(value.startswith(("data:", "#")) for value in references)
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert len(text.encode()) <= page.MAX_BYTES <= 5e6
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    policy = next(item["content"] for item in shown.all("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    ids = [attributes["id"] for _, attributes in shown.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) and {value[1:] for value in references if value.startswith("#")} <= set(ids)


def test_page_is_accessible(run):
    _, _, shown = run
    assert all(attributes.get("alt") is not None for attributes in shown.all("img"))
    assert all(attributes["alt"] for attributes in shown.all("img") if "src" in attributes)
    assert shown.all("html")[0]["lang"] == "en" and len(shown.all("h1")) == 1
    assert all(attributes.get("scope") for attributes in shown.all("th"))
    plots = [item for item in shown.all("div") if item.get("role") == "img"]
    assert len(plots) == 10 and all("ELFATT-SD 0.5: " in item["aria-label"] for item in plots)


@pytest.mark.usefixtures("one_plot")
def test_hostile_text_stays_text(tmp_path):
    results = build_run(tmp_path, images=8, size=32)
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
    assert not list(tmp_path.parent.glob("*escaped*"))
    tex, markdown = ((tmp_path / "report" / f"table.{kind}").read_text(encoding="utf-8") for kind in ("tex", "md"))
    assert len(set(latex_rows(tex))) == 1 and "<script" not in markdown
    for table in markdown_tables(markdown):
        assert {len(line) for line in table} == {len(table[0])}


@pytest.mark.usefixtures("one_plot")
def test_pages_and_tables_hold_no_control_characters(tmp_path):
    results = build_run(tmp_path, images=1, size=16)
    odd = "a\x00b\x1bc\x7fd\ufffee\u202ef\u2066g\u200fh\u061c"
    results |= {"name": odd, "description": odd, "environment": {"device": odd}}
    for row in results["rows"]:
        row |= {"label": f"{row['label']} {odd}", "settings": {**row["settings"], odd: odd}}
    save(tmp_path, results)
    files = [path for path in write_report(load_results(tmp_path)).parent.iterdir() if path.suffix != ".png"]
    found = [path.read_text(encoding="utf-8") for path in files]
    for content in [*found, terminal_summary(load_results(tmp_path))]:
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\u061c\u200f\u202e\u2066]", content)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [{}]},
        {"rows": [{"cell": "a", "failed": "out of memory"}]},
        {"published": {"source": None, "rows": [{"label": "SD"}, {"label": "X", "FID": "many"}]}, "rows": [{}]},
        dict.fromkeys(("published", "environment", "protocol", "description", "name")),
    ],
)
@pytest.mark.usefixtures("one_plot")
def test_missing_parts_are_no_error(tmp_path, results, change):
    save(tmp_path, results | change)  # a run without pictures
    shown = Page(write_report(load_results(tmp_path)))
    assert "No published table belongs" in shown.text or "Compare the direction" in shown.text
    assert not shown.all("img")


def test_a_run_that_measured_nothing_says_so(tmp_path, results):
    """And a plot that is no longer drawn is removed; what others put there stays."""
    (tmp_path / "report").mkdir()
    for name in ("memory.png", "notes.txt"):
        (tmp_path / "report" / name).write_text("old")
    for row in results["rows"]:
        row |= dict.fromkeys(("distances", "paired", "accuracy", "time", "memory"))
    save(tmp_path, results)
    shown = Page(write_report(load_results(tmp_path)))
    assert not shown.all("svg")
    for sentence in ("no distance was measured", "time was not measured", "memory was not measured"):
        assert sentence in shown.text
    assert "nan" not in shown.text.lower().split() and "None" not in shown.text.split()
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "notes.txt", "index.html", "table.csv", "table.md", "table.tex",
    }  # fmt: skip


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
def test_a_report_that_cannot_be_written_gives_one_clear_line(tmp_path, results, monkeypatch):
    save(tmp_path, results)
    (tmp_path / "report").write_text("a file stands here")
    with pytest.raises(ElfattError, match="cannot be written to"):
        write_report(load_results(tmp_path))
    assert (tmp_path / "report").read_text() == "a file stands here"
    (tmp_path / "report").unlink()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elfatt_sd.files.os.fsync", full)
    with pytest.raises(ElfattFailure, match="no space left on the disk of"), clear_disk_errors(tmp_path):
        write_report(load_results(tmp_path))
    assert not list((tmp_path / "report").iterdir())


def test_pictures_are_those_of_the_same_latent(run):
    folder, results, shown = run
    buttons = [item for item in shown.all("button") if "data-cell" in item]
    columns = list(dict.fromkeys(item["data-index"] for item in buttons))
    assert len(columns) == 6 and "sd-null" not in {item["data-cell"] for item in buttons}
    finished = [row["cell"] for row in results["rows"] if not row["failed"] and row["role"] != "null"]
    for cell in finished:
        assert [item["data-index"] for item in buttons if item["data-cell"] == cell] == columns
    assert [item["data-index"] for item in buttons if item["data-cell"] == FAILED] == [c for c in columns if int(c) < 8]
    assert all(prompt(int(index)) in shown.text for index in columns)
    first = Pictures(Results(results, folder)).grid(page.DETAILS[0])[0][0]
    small = Image.open(io.BytesIO(base64.b64decode(first.uri.split("base64,")[1]))).convert("RGB")
    original = picture(first.index, 0.0, 128)
    difference = [abs(a - b) for a, b in zip(small.tobytes(), original.tobytes(), strict=True)]
    assert sum(difference) / len(difference) < 8


def test_most_changed_pairs_follow_the_results(run):
    folder, results, _ = run
    found = Pictures(Results(results, folder)).most_changed(page.DETAILS[0])
    methods = [row["cell"] for row in results["rows"] if row["role"] == "method" and not row["failed"]]
    assert [row.cell for row, _ in found] == methods
    for row, pairs in found:
        assert [(before.index, after.index) for before, after in pairs] == [(3, 3), (7, 7), (1, 1)]
        assert all(before.row.role == "baseline" and after.row is row for before, after in pairs)


@pytest.mark.usefixtures("one_plot")
def test_pictures_that_are_not_the_runs_leave_a_gap(tmp_path):
    """Deleted, altered, of another folder, of other frames; a damaged list is told."""
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
    results["protocol"]["frames"] = 7
    pictures = Pictures(Results(results, tmp_path / "run"))
    assert "../../secret" not in {row.cell for row in pictures.rows}
    assert pictures.grid(page.DETAILS[-2])[0][0].gap == "no 7 frames"
    (tmp_path / "run" / "cells" / "sd" / "manifest.jsonl").write_text("not json\n")
    with pytest.raises(ElfattError, match=r"manifest\.jsonl, line 1 is damaged"):
        write_report(load_results(tmp_path / "run"))


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


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")

WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(`error: ${event.message}`));
addEventListener("securitypolicyviolation", (event) => problems.push(`blocked: ${event.blockedURI}`));
</script>"""

PROBE = """<script>
addEventListener("load", () => {
  const id = (name) => document.getElementById(name);
  const told = {};
  const state = () => ({
    at: id("compare-stage").style.getPropertyValue("--at"),
    clip: getComputedStyle(id("compare-before")).clipPath,
    left: id("compare-left-tag").textContent, right: id("compare-right-tag").textContent,
    before: id("compare-before").src, after: id("compare-after").src,
    hidden: id("compare-before").hidden || id("compare-after").hidden,
    value: id("compare-range").getAttribute("aria-valuetext"), text: id("compare-text").textContent,
  });
  const set = (name, value, kind) => {
    id(name).value = value;
    id(name).dispatchEvent(new Event(kind, { bubbles: true }));
  };
  told.shown = !id("compare").hidden;
  told.start = state();
  id("compare-range").stepUp(25);
  id("compare-range").dispatchEvent(new Event("input", { bubbles: true }));
  told.moved = state();
  set("compare-right", "tome-0.5", "change");
  told.method = state();
  set("compare-index", id("compare-index").options[2].value, "change");
  told.picture = state();
  set("compare-right", "FAILED", "change");
  set("compare-index", id("compare-index").options[5].value, "change");
  told.missing = state();
  document.querySelector('.grid button[data-cell="agent-0.3"]').click();
  told.clicked = state();
  told.focus = document.activeElement.id;
  told.tab = id("compare-range").tabIndex;
  told.images = [...document.images].filter((image) => image.src && !image.naturalWidth).length;
  told.overflow = document.documentElement.scrollWidth - innerWidth;
  told.background = getComputedStyle(document.body).backgroundColor;
  told.ink = getComputedStyle(document.querySelector("svg text")).fill;
  told.marker = getComputedStyle(document.querySelector("svg use")).fill;
  const fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  told.requests = fetched.filter((name) => !name.startsWith("data:"));
  told.problems = problems;
  const result = document.createElement("pre");
  result.id = "probe-result";
  result.textContent = JSON.stringify(told);
  document.body.append(result);
});
</script>"""


def browse(folder, path, *options):
    """Load a page from disk without a display; returns the document as the browser has it in the end."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        f"--user-data-dir={folder}", "--virtual-time-budget=5000", *options, "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


LAYOUT = """<script>
addEventListener("load", () => {
  const heights = [...document.querySelectorAll("#table tbody th")].map((row) => row.getBoundingClientRect().height);
  const told = { problems, rows: heights.length, tallest: Math.max(...heights) };
  told.overflow = document.documentElement.scrollWidth - innerWidth;
  const label = document.querySelector("#table tbody th").getBoundingClientRect().width;
  told.label = label / document.querySelector("#table .scroll").getBoundingClientRect().width;
  const verdicts = [...document.querySelectorAll("#table td .verdict")];
  told.verdict = Math.max(...verdicts.map((cell) => cell.getBoundingClientRect().right)) - innerWidth;
  const result = document.createElement("pre");
  result.id = "probe-result";
  result.textContent = JSON.stringify(told);
  document.body.append(result);
});
</script>"""


def probe(folder, report, *options, script=PROBE):
    """Open a copy of the report that watches for errors, runs a script and tells what it saw."""
    text = report.read_text(encoding="utf-8")
    assert text.count("<head>") == text.count("</body>") == 1
    watched = text.replace("<head>", f"<head>{WATCH}").replace("</body>", script.replace("FAILED", FAILED) + "</body>")
    copy = folder / "watched.html"
    copy.write_text(watched, encoding="utf-8")
    document = browse(folder / "profile", copy, *options)
    found = re.search(r'<pre id="probe-result">(.*?)</pre>', document, flags=re.DOTALL)
    assert found, "the page's load event did not come to its end"
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a wide light page tells, and a narrow dark one."""
    folder = tmp_path_factory.mktemp("run")
    build_run(folder, size=64)
    report = write_report(load_results(folder))
    light = probe(tmp_path_factory.mktemp("light"), report, "--window-size=1280,900")
    dark = ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    return light, probe(tmp_path_factory.mktemp("dark"), report, *dark)


@in_browser
def test_page_runs_without_errors_and_fetches_nothing(seen):
    for told in seen:
        assert told["problems"] == told["requests"] == [] and told["images"] == 0 and told["overflow"] <= 0


@in_browser
def test_slider_moves_and_changes_method_and_picture(seen):
    told = seen[0]
    start, method, other = told["start"], told["method"], told["picture"]
    assert told["shown"] and start["at"] == "50%" and told["moved"]["at"] == "75%"
    assert start["clip"] != told["moved"]["clip"] and told["moved"]["value"] == "75 % SD (Baseline)"
    assert told["tab"] == 0, "reachable by keyboard; a range input answers to the arrow keys"
    assert (start["left"], start["right"]) == ("SD (Baseline)", "ELFATT-SD 0.3") and start["before"] != start["after"]
    assert method["right"] == "ToMe-SD 0.5" and method["after"] != start["after"]
    assert method["before"] == start["before"], "another method leaves the untouched picture alone"
    assert other["before"] != method["before"] and other["after"] != method["after"]
    assert "Left: SD (Baseline); right: ToMe-SD 0.5" in other["text"]
    assert told["missing"]["hidden"] and "There is no image of Agent-SD 0.5." in told["missing"]["text"]
    assert told["clicked"]["right"] == "Agent-SD 0.3" and told["clicked"]["text"].startswith("no. ")
    assert not told["clicked"]["hidden"] and told["focus"] == "compare-range"


def luminance(colour):
    """Relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@in_browser
def test_plots_are_readable_in_light_and_dark(seen):
    light, dark = (luminance(told["background"]) for told in seen)
    assert light > 0.9 and dark < 0.05
    for told, paper in zip(seen, (light, dark), strict=True):
        for part, least in (("ink", 7), ("marker", 3)):
            low, high = sorted((luminance(told[part]), paper))
            assert (high + 0.05) / (low + 0.05) > least, part


@in_browser
@pytest.mark.parametrize("width", [1280, 500])
def test_a_table_of_forty_long_names_stays_readable(tmp_path, width):
    build_sweep(tmp_path / "run")
    told = probe(tmp_path, write_report(load_results(tmp_path / "run")), f"--window-size={width},900", script=LAYOUT)
    assert told["problems"] == [] and told["overflow"] <= 0 and told["rows"] == 40
    assert told["tallest"] < 130, "a name takes some lines, not a column of single words"
    assert told["verdict"] < 0, "the verdict is on the screen"
    assert width < 704 or told["label"] < 0.5, "the names, which stay in view, leave room for figures"
