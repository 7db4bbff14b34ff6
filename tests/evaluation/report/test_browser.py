"""The page in a real browser: its script runs without an error, the slider works, nothing overflows or is fetched."""

import html
import json
import re
import shutil
import subprocess

import pytest
from support.runs import FAILED, build_run, build_sweep

from elfatt_sd.evaluation.report import load_results, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")

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
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    build_run(folder, size=64)
    return write_report(load_results(folder))


@pytest.fixture(scope="module")
def told(report, tmp_path_factory):
    return probe(tmp_path_factory.mktemp("light"), report, "--window-size=1280,900")


@pytest.fixture(scope="module")
def told_narrow_dark(report, tmp_path_factory):
    options = ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    return probe(tmp_path_factory.mktemp("dark"), report, *options)


def test_page_runs_without_errors_and_fetches_nothing(told):
    assert told["problems"] == [] and told["requests"] == [] and told["images"] == 0


def test_slider_moves_by_its_range_control(told):
    assert told["shown"] and told["start"]["at"] == "50%" and told["moved"]["at"] == "75%"
    assert told["start"]["clip"] != told["moved"]["clip"]
    assert told["moved"]["value"] == "75 % SD (Baseline)"
    assert told["tab"] == 0, "reachable by keyboard; a range input answers to the arrow keys"


def test_slider_changes_method_and_picture(told):
    start, method, other = told["start"], told["method"], told["picture"]
    assert (start["left"], start["right"]) == ("SD (Baseline)", "ELFATT-SD 0.3") and start["before"] != start["after"]
    assert method["right"] == "ToMe-SD 0.5" and method["after"] != start["after"]
    assert method["before"] == start["before"], "another method leaves the untouched picture alone"
    assert other["before"] != method["before"] and other["after"] != method["after"]
    assert "Left: SD (Baseline); right: ToMe-SD 0.5" in other["text"]


def test_slider_says_which_picture_is_missing(told):
    assert told["missing"]["hidden"] and "There is no image of Agent-SD 0.5." in told["missing"]["text"]


def test_a_picture_of_the_grid_opens_in_the_slider(told):
    assert told["clicked"]["right"] == "Agent-SD 0.3" and told["clicked"]["text"].startswith("no. ")
    assert not told["clicked"]["hidden"] and told["focus"] == "compare-range"


def luminance(colour):
    """Relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_plots_are_readable_in_light_and_dark(told, told_narrow_dark):
    assert luminance(told["background"]) > 0.9 and luminance(told_narrow_dark["background"]) < 0.05
    for seen in (told, told_narrow_dark):
        assert contrast(seen["ink"], seen["background"]) > 7
        assert contrast(seen["marker"], seen["background"]) > 3


def test_narrow_page_does_not_overflow(told, told_narrow_dark):
    assert told["overflow"] <= 0 and told_narrow_dark["overflow"] <= 0
    assert told_narrow_dark["problems"] == []


@pytest.mark.parametrize("width", [1280, 500])
def test_a_table_of_forty_long_names_stays_readable(tmp_path, width):
    build_sweep(tmp_path / "run")
    told = probe(tmp_path, write_report(load_results(tmp_path / "run")), f"--window-size={width},900", script=LAYOUT)
    assert told["problems"] == [] and told["overflow"] <= 0 and told["rows"] == 40
    assert told["tallest"] < 130, "a name takes some lines, not a column of single words"
    assert told["verdict"] < 0, "the verdict is on the screen"
    if width > 704:
        assert told["label"] < 0.5, "the names, which stay in view, leave room for figures"
