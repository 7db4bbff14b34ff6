"""The images on a page: those of the same latents, and what is said where one is missing."""

import io
import shutil

import pytest
from PIL import Image
from support.runs import FAILED, Page, build_run, picture, prompt

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.report import load_results, page, write_report
from elfatt_sd.evaluation.report.charts import Palette
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.page import Pictures
from elfatt_sd.evaluation.report.plots import draw_plots


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


def test_a_cell_outside_the_run_gives_no_picture(tmp_path):
    results = build_run(tmp_path / "run", images=2, size=32)
    (tmp_path / "secret" / "images").mkdir(parents=True)
    picture(0, 0).save(tmp_path / "secret" / "images" / "00000.png")
    results["rows"][3]["cell"] = "../../secret"
    cells = {row.cell for row in Pictures(Results(results, tmp_path / "run")).rows}
    assert "sd" in cells and "../../secret" not in cells


@pytest.mark.usefixtures("one_plot")
def test_unreadable_pictures_leave_a_gap(tmp_path):
    build_run(tmp_path, images=4, size=32)
    folder = tmp_path / "cells" / "tome-0.1" / "images"
    (folder / "00000.png").unlink()
    for index in range(1, 4):
        shutil.copy(folder.parents[1] / "sd" / "images" / f"{index:05d}.png", folder)
    shown = Page(write_report(load_results(tmp_path)))
    assert shown.text.count("no image") == 1
    assert shown.text.count("altered after generation") == 5, "three in the grid, two of the most changed"


@pytest.mark.usefixtures("one_plot")
@pytest.mark.parametrize(("frames", "gap"), [(2**63, f"no {2**63} frames"), (7, "no 7 frames"), (2, "")])
@pytest.mark.parametrize("rate", [1e-300, 1e300, -1, 0])
def test_frames_and_rates_that_cannot_be_are_no_error(tmp_path, frames, gap, rate):
    results = build_run(tmp_path / "run", images=2, size=32)
    results["protocol"] |= {"frames": frames, "frame_rate": rate}
    shown = Pictures(Results(results, tmp_path / "run")).grid(page.DETAILS[-2])[0][0]
    assert (shown.gap, shown.uri is None) == (gap, bool(gap))


def test_a_damaged_list_of_pictures_is_told(tmp_path):
    build_run(tmp_path, images=2, size=32)
    (tmp_path / "cells" / "sd" / "manifest.jsonl").write_text("not json\n")
    with pytest.raises(ElfattError, match=r"manifest\.jsonl, line 1 is damaged"):
        write_report(load_results(tmp_path))


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
