"""The tables of a report: every figure, in every form, as it is written in print."""

import csv
import io
import re

import pytest
from support.runs import Page, latex_rows, lowest_psnr, markdown_tables, save

from elfatt_sd.evaluation.report import load_results, write_report
from elfatt_sd.evaluation.report.data import Estimate, Results, shortened
from elfatt_sd.evaluation.report.summary import findings, headline
from elfatt_sd.evaluation.report.tables import decimals_for, fixed, main_table, more_table, study_table, unit_for
from elfatt_sd.evaluation.report.writers import tex_escape, to_csv, to_latex, to_markdown


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


def test_latex_is_a_booktabs_table(run):
    folder, results, _ = run
    text = (folder / "report" / "table.tex").read_text(encoding="utf-8")
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1]
    assert set(latex_rows(text)) == {len(columns)}
    assert len(latex_rows(text)) == len(results["rows"]) + 2
    assert text.count("\\begin{") == text.count("\\end{")
    assert all(rule in text for rule in ("\\toprule", "\\midrule", "\\bottomrule", "toy\\_full"))
    assert text.isascii()
    assert tex_escape("a_b & 5 % of [x] (×10⁻³)") == r"a\_b \& 5 \% of {[}x{]} ($\times$10$^-$$^3$)"  # noqa: RUF001


def test_a_missing_value_is_not_measured(results):
    row = results["rows"][-1]
    for key in ("distances", "paired", "accuracy", "most_changed", "time", "memory", "settings", "images"):
        row[key] = None
    shown = Results(results)
    line = main_table(shown).lines[-1]
    assert [entry.text for entry in line.entries] == ["not measured"] * len(line.entries)
    for table in (main_table(shown), more_table(shown)):
        assert "not measured" in to_markdown(table).splitlines()[-1]
        latex_rows(to_latex(table, "caption", "label"))
    assert to_csv(shown) and headline(shown) and findings(shown)


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


def test_settings_that_vary_have_their_column(results):
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


@pytest.mark.parametrize(
    ("value", "decimals", "sign", "text"),
    [
        (-0.41, 2, True, "\N{MINUS SIGN}0.41"),
        (0.412, 2, True, "+0.41"),
        (-0.0004, 2, True, "\N{MINUS SIGN}0.00"),
        (-0.001, 2, False, "0.00"),
        (0.0, 1, True, "0.0"),
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
