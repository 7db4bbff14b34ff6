"""The page of a report stands alone, and says what is missing or wrong."""

import errno
import json
import re

import pytest
from support.runs import NO_MEMORY, Page, build_run, latex_rows, markdown_tables, save

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report import load_results, write_report
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.summary import headline
from elfatt_sd.evaluation.report.writers import terminal_summary
from elfatt_sd.evaluation.run import RunFailure, clear_disk_errors

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{ & | _x % {{ 7 * 7 }} \N{SNOWMAN}"


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


def test_the_words_of_the_page_are_unchanged(run, snapshot):
    """Made-up figures on a made-up machine."""
    assert "\n".join(line.strip() for line in run[2].text.splitlines() if line.strip()) == snapshot


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
    assert len(plots) == 10 and all("ELFATT-SD 0.5: " in item["aria-label"] for item in plots)


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
    assert not list(tmp_path.parent.glob("*escaped*"))
    ids = [attributes["id"] for _, attributes in shown.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    text = (tmp_path / "report" / "table.tex").read_text(encoding="utf-8")
    assert len(set(latex_rows(text))) == 1
    for table in markdown_tables((tmp_path / "report" / "table.md").read_text(encoding="utf-8")):
        assert {len(line) for line in table} == {len(table[0])}
    assert "<script" not in (tmp_path / "report" / "table.md").read_text(encoding="utf-8")


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
    assert "No published table belongs" in shown.text or "Compare the direction" in shown.text
    assert not shown.all("img")


def test_a_run_that_measured_nothing_says_so(tmp_path, results):
    for row in results["rows"]:
        row |= dict.fromkeys(("distances", "paired", "accuracy", "time", "memory"))
    save(tmp_path, results)
    shown = Page(write_report(load_results(tmp_path)))
    assert not shown.all("svg")
    for sentence in ("no distance was measured", "time was not measured", "memory was not measured"):
        assert sentence in shown.text
    assert "nan" not in shown.text.lower().split() and "None" not in shown.text.split()


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


@pytest.mark.usefixtures("one_plot")
def test_pages_and_tables_hold_no_control_characters(tmp_path):
    results = build_run(tmp_path, images=1, size=16)
    odd = "a\x00b\x1bc\x7fd\ufffee\u202ef\u2066g\u200fh\u061c"
    results |= {"name": odd, "description": odd, "environment": {"device": odd}}
    for row in results["rows"]:
        row |= {"label": f"{row['label']} {odd}", "settings": {**row["settings"], odd: odd}}
    save(tmp_path, results)
    write_report(load_results(tmp_path))
    found = {
        name: (tmp_path / "report" / name).read_text(encoding="utf-8")
        for name in ("index.html", "table.md", "table.tex", "table.csv")
    }
    for name, content in {**found, "terminal": terminal_summary(load_results(tmp_path))}.items():
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\u061c\u200f\u202e\u2066]", content), name


@pytest.mark.usefixtures("one_plot")
def test_a_full_disk_is_a_failure_and_no_wrong_use(tmp_path, results, monkeypatch):
    save(tmp_path, results)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elfatt_sd.files.os.fsync", full)
    with pytest.raises(RunFailure, match="no space left on the disk of"), clear_disk_errors(tmp_path):
        write_report(load_results(tmp_path))
    assert not list((tmp_path / "report").iterdir())
