"""The tables and sentences of a report: every figure, in every form, as in print, and what may be claimed."""

import copy
import csv
import io
import re

import pytest
from support.runs import Page, latex_rows, markdown_tables, save, told_of

from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report import charts, load_results, write_report, written_tables
from elfatt_sd.evaluation.report.charts import PAPER, Palette, distance_over
from elfatt_sd.evaluation.report.data import Results, comparability, comparable_words, shortened
from elfatt_sd.evaluation.report.summary import findings, headline, recommended, terminal_summary
from elfatt_sd.evaluation.report.tables import (
    decimals_for,
    fixed,
    main_table,
    more_table,
    study_table,
    tex_escape,
    to_csv,
    to_latex,
    to_markdown,
    unit_for,
)
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW


def columns(table):
    """The entries of a table by the titles of their columns."""
    lines = [[*line.heads, *line.entries] for line in table.lines]
    return {column.title: list(cells) for column, *cells in zip(table.columns, *lines, strict=False)}


def test_tables_are_unchanged(results, sweep, snapshot):
    """As CSV, Markdown and LaTeX, with all sentences."""
    shown = Results(results)
    assert written_tables(shown) | {"study": to_markdown(study_table(shown))} == snapshot
    assert to_markdown(main_table(Results(sweep))) == snapshot


def test_csv_holds_every_figure_unrounded(results):
    records = list(csv.DictReader(io.StringIO(to_csv(Results(results)))))
    for record, row in zip(records, results["rows"], strict=True):
        assert record["cell"] == row["cell"]
        for name, distance in (row["distances"] or {}).items():
            shown = [float(record[f"{name}{what}"]) for what in ("", " low", " high")]
            assert shown == [distance["value"], *distance["interval"]]
        for measure in ("psnr", "ssim", "cosine") if row["paired"] else ():
            found = row["paired"][measure]
            shown = [float(record[f"{measure}{what}"]) for what in ("", " low", " high", " median", " quartile 3")]
            assert shown == [found["mean"], *found["interval"], found["median"], found["quartiles"][1]]


def test_markdown_and_latex_are_whole_tables(results):
    texts = written_tables(Results(results))
    for table in markdown_tables(texts["table.md"]):
        assert {len(line) for line in table} == {len(table[0])} and len(table) == len(results["rows"]) + 2
    text = texts["table.tex"]
    assert set(latex_rows(text)) == {len(re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1])}
    assert len(latex_rows(text)) == len(results["rows"]) + 2 and text.isascii()
    assert tex_escape("a_b & 5 % of [x] (×10⁻³)") == r"a\_b \& 5 \% of {[}x{]} ($\times$10$^-$$^3$)"  # noqa: RUF001


def test_distances_begin_at_zero_and_have_a_readable_unit(results):
    for row in filter(lambda row: row["distances"], results["rows"]):
        row["distances"]["FD-toy"] |= {"value": 7.0, "interval": [-5.0, 19.0]}
        row["distances"]["KD-toy"] |= {"value": -123_922.0, "interval": [-400_000.0, 150_000.0]}
    shown = Results(results)
    assert columns(main_table(shown))["FD-toy ↓"][0].note == "[0.0, 19.0]"
    entry = columns(more_table(shown))["KD-toy (×10³) ↓"][0]  # noqa: RUF001
    assert (entry.text, entry.note) == ("−124", "[−400, 150]")  # noqa: RUF001
    assert unit_for([Estimate(0.0004, 0.0002, 0.0006)]) == -6 and unit_for([Estimate(30.0, 29.0, 31.0)]) == 0


def test_a_missing_value_is_not_measured(results, sweep):
    row = results["rows"][-1]
    row |= dict.fromkeys(("distances", "paired", "accuracy", "most_changed", "time", "memory", "settings", "images"))
    shown = Results(results)
    line = main_table(shown).lines[-1]
    assert [entry.text for entry in line.entries] == ["not measured"] * len(line.entries)
    for table in (main_table(shown), more_table(shown)):
        assert "not measured" in to_markdown(table).splitlines()[-1]
        latex_rows(to_latex(table, "caption", "label"))
    for each in sweep["rows"]:
        each["time"] = None
    found = columns(main_table(Results(sweep)))
    assert found["s/img"][5].text == found["GiB/img"][5].text == "not measured"


def test_identical_pictures_are_called_identical(results):
    most, some, all_ = (results["rows"][place]["paired"]["psnr"] for place in (-1, -2, -3))
    most["identical"], some["identical"] = 61, 3
    all_ |= dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest")) | {"identical": 64}
    shown = Results(results)
    psnr = [line.entries[-1] for line in main_table(shown).lines[-3:]]
    assert [entry.text for entry in psnr] == ["identical", f"{some['mean']:.2f}", "identical"]
    low, high = some["interval"]
    small = [entry.small for entry in psnr]
    assert small == ["(64 of 64)", f"[{low:.2f}, {high:.2f}], 3 of 64 identical", "(61 of 64)"]
    lowest = [entry.text for entry in columns(study_table(shown))["Lowest PSNR, dB"][-3:]]
    assert lowest == ["identical", f"{some['lowest']:.1f}", f"{most['lowest']:.1f}"]
    assert [row.psnr is None for row in shown.rows[-3:]] == [True, False, True], "which have no place in plots"


def test_pictures_that_became_others_are_counted(results):
    """Below 20 dB little is left of the untouched picture. Older results do not have the lowest."""
    results["rows"][2]["paired"]["psnr"]["pictures"][:3] = [19.99, 20.0, None]
    notes = [entry.note for entry in columns(study_table(Results(results)))["Lowest PSNR, dB"]]
    assert notes[1] == "(64 below 20)" and notes[2] == "(1 below 20)" and not any(notes[3:5])
    for row in filter(lambda row: row["paired"], results["rows"]):
        del row["paired"]["psnr"]["lowest"]
    assert "Lowest PSNR, dB" not in columns(study_table(Results(results)))


@pytest.mark.usefixtures("one_plot")
def test_a_lost_attribute_shows_and_a_higher_accuracy_is_better(tmp_path, results):
    """The interval of the share alone does not tell: the verdict is of the paired difference."""
    results["rows"][2]["accuracy"]["mean"]["difference"]["verdict"] = "better"
    results["rows"][2]["distances"]["FD-toy"]["difference"]["verdict"] = "worse"
    results["rows"][3]["accuracy"]["mean"]["difference"]["verdict"] = "worse"
    remarks = [entry.remark for entry in columns(study_table(Results(results)))["Accuracy ↑"]]
    assert remarks[2:4] == ["better", "worse"] and not any(remarks[:2] + remarks[4:])
    save(tmp_path, results)
    tables = Page(write_report(load_results(tmp_path))).tables
    cells = {" ".join(cell.split()) for table in tables for line in table for cell in line}
    assert {cell for cell in cells if re.fullmatch(r"\S (better|worse)", cell)} == {"✓ better", "✗ worse"}


def test_settings_that_vary_have_their_column(results):
    rows = [row for row in results["rows"] if row["role"] != "method" or row["method"] == "elfatt"]
    for row, size in zip(rows[2:], (512, 32, 128), strict=True):
        row["settings"] = {"ratio": 0.5, "block_size": size, "block_order": "sequence"}
    results["rows"] = rows
    results["published"] = {"source": "tabSDa1", "rows": [{"label": "ELFATT-SD", "block_size": 32, "FID": 30.8}]}
    table = main_table(Results(results))
    assert [column.title for column in table.columns][:3] == ["Method", "Ratio", "Block size"]
    found = {line.row.cell: line.published[0].text for line in table.lines}
    assert found == {"sd": "—", "sd-null": "—", "elfatt-0.1": "—", "elfatt-0.3": "30.8", "elfatt-0.5": "—"}


def test_a_short_name_has_whole_words_and_keeps_its_end():
    """There stands what tells rows apart."""
    long = "sampled keys from the first step on, difference shared by"
    tail = "a setting that is longer than there is room, groups 1"
    known = {
        (
            "26 · sampled keys, other numbers",
            "block size 128, groups 1",
            34,
        ): "26 · sam… block size 128, groups 1",
        (long, "residual steps 4, block size 128", 60): "sampled keys from the… residual steps 4, block size 128",
        ("ToMe 0.5, one matching for all layers of a step", "", 30): "ToMe 0.5, one… of a step",
    }
    assert {given: shortened(*given) for given in known} == known
    assert shortened("sampled keys", tail, 20).endswith(", groups 1")
    assert all(len(shortened(long, each, width)) <= width for each in ("", "agents 4", tail) for width in range(20, 60))


def test_rows_of_one_name_are_told_apart(results):
    results["rows"][4]["settings"] = results["rows"][3]["settings"] = results["rows"][2]["settings"]
    names = [row.name for row in Results(results).rows]
    assert len(set(names)) == len(names) and "ToMe-SD 0.1 (tome-0.3)" in names


def test_numbers_are_written_as_in_print_with_the_decimals_that_are_known():
    minus = "\N{MINUS SIGN}"
    known = {(-0.41, 2, True): f"{minus}0.41", (0.412, 2, True): "+0.41", (-0.0004, 2, True): f"{minus}0.00"}
    known |= {(-0.001, 2, False): "0.00", (0.0, 1, True): "0.0"}
    assert {given: fixed(*given[:2], sign=given[2]) for given in known} == known
    estimates = [[Estimate(18.4, 16.8, 20.0)], [Estimate(0.0121, 0.0114, 0.0128)], [Estimate(0.707), None]]
    assert [decimals_for(each) for each in (*estimates, [Estimate(3.12)], [])] == [1, 5, 3, 2, 2]


def test_what_is_known_of_memory_is_told(results):
    results["rows"][0]["memory"]["reserved"] = {"gib_per_image": 0.75}
    results["rows"][-2]["memory"]["note"] = reason = "out of memory at batch 8"
    results["rows"][-1] |= {"time": {"failed": reason}, "memory": {"failed": reason, "batches": []}}
    shown = Results(results)
    entries = columns(more_table(shown))["Reserved, GiB/img"]
    assert [entry.text for entry in entries[:2]] == ["0.750", "not measured"]
    slopes = columns(main_table(shown))["GiB/img"]
    assert slopes[-2].note.startswith("[") and slopes[-2].remark == slopes[-1].text == reason


def test_an_extrapolated_difference_says_so(results):
    """And where a plot sets it off against the untouched pipeline's value, it is not mixed with the row's own."""
    for row in results["rows"]:
        for distance in (row["distances"] or {}).values():
            if "difference" in distance:
                distance["difference"] |= {"images": "infinite", "value": 5.0, "interval": [4.0, 6.0]}
    shown = Results(results)
    assert "Difference, extrapolated" in columns(main_table(shown))
    base = shown.baseline.distances["FD-toy"].value
    assert shown.paired_distance(shown.methods[0]) == Estimate(base + 5, base + 4, base + 6)


def test_a_published_figure_is_that_of_the_same_program(results):
    def published(**settings):
        data = copy.deepcopy(results)
        data["rows"][4]["settings"] |= settings
        return main_table(Results(data)).lines[4].published[0].text

    assert published() == published(stride=2) == "30.9"
    assert published(stride=4) == published(no_such_setting=1) == "—"
    results["rows"][4]["method"] = "custom"
    assert published() == "30.9" and published(until=0.2) == "—"


def test_the_conditions_are_those_of_the_run(results):
    def told(what, timing=None):
        data = results | {"environment": results["environment"] | {"timing": timing}}
        return next(here for name, here, _ in comparability(Results(data)) if name == what)

    other = results["environment"] | {"cpu_threads": 1}
    assert told("Hardware") == "2 cores of AMD EPYC, 2 threads"
    assert told("Hardware", {"environment": other}) == "2 cores of AMD EPYC, 1 thread"
    gpu = {"device": "NVIDIA H200", "cuda": {"runtime": "12.4"}}
    assert told("Hardware", {"environment": other | gpu}) == "NVIDIA H200"
    results["protocol"]["reference"] = {"source": "val", "count": 5000, "per_class": 5, "resize": "crop", "size": 512}
    assert told("Reference") == "val, 5000 images, the first 5 of each class, resized and cropped to 512 x 512"


def test_what_departs_from_the_published_protocol_is_named(results):
    """An FID alone does not make the paper's protocol, nor does another reference make its FID."""
    usual, merging = "FID (pytorch-fid)", "Token Merging for Fast Stable Diffusion"
    for row in results["rows"]:
        row["images"] = 2000

    def words(source, distance, **protocol):
        data = copy.deepcopy(results)
        data["published"]["source"] = source
        for row in filter(lambda row: row["distances"], data["rows"]):
            row["distances"] = {distance: row["distances"]["FD-toy"]}
        data["protocol"] |= {"steps": 50, "guidance": 7.5, "width": 512, "height": 512, "dtype": "float16"}
        data["protocol"] |= {"scheduler": "PLMS", **protocol}
        return comparable_words(Results(data))

    for source, distance in (("tabSD", usual), (merging, f"{usual} (5000 reference images, cropped to 512)")):
        assert words(source, distance).startswith("Compare the direction of differences")
        assert f"distance FID (12) in place of {distance}." in words(source, "FID (12)")
    results["rows"][0]["images"] = 8
    said = words("tabSD", usual, steps=2, prompts={"file": "mine.txt"})
    for part in ("steps 2 in place of 50", "prompts mine.txt in place of", "images per row 8 in place of 2000"):
        assert part in said
    results["published"] = None
    assert comparable_words(Results(results)).startswith("No published table belongs to this protocol")


NONE = "no difference shown"


def shown_rows(results):
    return [row for row in results["rows"] if row["role"] == "method" and not row["failed"]]


def verdicts(results, *said):
    """Give the methods these verdicts, in order."""
    for row, verdict in zip(shown_rows(results), said, strict=False):
        for distance in row["distances"].values():
            distance["difference"]["verdict"] = verdict
    return Results(results)


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


def test_headline_names_the_fastest_that_is_not_worse(results):
    speed(results, [(1.4, 1.5, 1.6), (1.8, 1.9, 2.0)] + [(0.7, 0.8, 0.9)] * 7)
    shown = verdicts(results, NONE, "worse", *[NONE] * 7)
    start = "ToMe-SD 0.1: 1.50 times as fast as the untouched pipeline (1.40–1.60)"  # noqa: RUF001
    assert headline(shown).startswith(f"{start}, not shown to be worse in FD-toy, KD-toy and accuracy, PSNR")
    assert recommended(shown).name == "ToMe-SD 0.1"
    assert len(headline(shown)) < 160
    assert ", better in FD-toy and KD-toy," in headline(verdicts(results, "better"))
    assert headline(verdicts(results, "worse")).startswith("No setting is shown to be faster without being worse. ToMe")
    said = headline(verdicts(results, *[TOO_FEW] * 9))
    assert said.startswith("ToMe-SD 0.3: 1.90 times") and "not judged: the classes are too few" in said
    speed(results, [(0.7, 0.8, 0.9)] * 9)
    assert headline(Results(results)).startswith("No setting is shown to be faster. ")


def test_headline_says_the_noise_and_what_is_missing(results):
    speed(results, [(2.0, 2.1, 2.2)] * 9, null=(1.1, 1.2, 1.3))
    noise = "; untouched timed again: 1.20 times (1.10–1.30)."  # noqa: RUF001
    assert headline(verdicts(results, *[NONE] * 9)).endswith(noise)
    few = headline(Results(speed(results, [(2.0, 2.1, 2.2)] * 9, rounds=2)))
    assert few.startswith("No setting is shown to be faster by 2 rounds of timing (5 are needed). ToMe-SD 0.1: 2.10")
    for row in results["rows"]:
        row["time"] = None
    assert headline(Results(results)) == "Time was not measured."
    assert recommended(Results(results)).role == "method"


def test_four_findings(results, snapshot):
    """On verdicts, chance, speed and what is missing; images that could not be read are named."""
    speed(results, [(1.5, 1.6, 1.7)])
    results["rows"][1]["distances"]["FD-toy"]["difference"]["verdict"] = "worse"
    results["protocol"]["limit"] = 8
    results["environment"]["timing"] = {"note": "only 2 repeats; take 5 or more", "environment": {"device": "GPU"}}
    results["reference"]["FD-toy"]["unreadable"] = ["a.png (truncated)", "b.png (truncated)"]
    for row in results["rows"]:
        row["time"] = (row["time"] or {}) | {"attention_kernels": ["native"]}
    results["rows"][2]["time"]["attention_kernels"] = ["flash-attn"]
    assert findings(Results(results)) == snapshot
    results["rows"] = [row for row in results["rows"] if row["role"] != "null"]
    assert "There is no null row" in findings(Results(results))[1]


def test_a_speedup_is_claimed_beyond_the_spread_alone(results):
    for rounds, ratios, claimed in (
        (5, (1.05, 1.1, 1.2), True),
        (5, (0.97, 1.04, 1.1), False),  # across 1
        (5, (1.01, 1.03, 1.06), False),  # within what the null row does
        (2, (1.5, 1.6, 1.7), False),
    ):
        said = told_of(speed(results, [ratios], rounds=rounds), "highest median|Fastest")
        assert said.startswith("Fastest" if claimed else "None is shown to be faster")


def test_a_row_that_is_worse_in_anything_is_not_recommended(results):
    """No gain in one figure makes up for a loss in another: accuracy, any distance, a metric."""
    speed(results, [(1.8, 1.9, 2.0), (1.4, 1.5, 1.6)] + [(0.7, 0.8, 0.9)] * 7)
    assert recommended(verdicts(results, *["better"] * 9)).name == "ToMe-SD 0.1"
    for row in shown_rows(results):
        row["distances"]["FD-CLIP"] = copy.deepcopy(row["distances"]["FD-toy"])
    fastest, *_ = shown_rows(results)
    fastest["metrics"] = {"CLIPScore": {"value": 1.0, "difference": {"value": -1.0, "verdict": "better"}}}
    named = [fastest["accuracy"]["mean"], fastest["metrics"]["CLIPScore"], *fastest["distances"].values()]
    for figure in named:
        worst = figure["difference"]
        before, worst["verdict"] = worst["verdict"], "worse"
        shown = Results(results)
        assert headline(shown).startswith("ToMe-SD 0.3: 1.50 times") and recommended(shown).name == "ToMe-SD 0.3"
        worst["verdict"] = before


def test_a_verdict_that_disagrees_is_named(results):
    speed(results, [(1.4, 1.5, 1.6)] * 9)
    verdicts(results, *[NONE] * 9)
    for row in shown_rows(results):
        row["distances"]["KD-toy"]["difference"]["verdict"] = "worse"
    said = headline(Results(results))
    assert said.startswith("No setting is shown to be faster without being worse. ToMe-SD 0.1")
    assert ", not shown to be worse in FD-toy and accuracy, but worse in KD-toy" in said


@pytest.mark.usefixtures("one_plot")
def test_no_verdict_is_given_from_few_classes(tmp_path, results):
    for row in results["rows"]:
        row |= {"images": 5, "classes": 5}
    verdicts(results, *[TOO_FEW] * 9)
    for distance in results["rows"][1]["distances"].values():
        distance["difference"]["verdict"] = TOO_FEW
    save(tmp_path, results)
    page = Page(write_report(load_results(tmp_path)))
    said = " ".join(findings(Results(results)))
    assert "No verdicts, and no intervals but that of accuracy: an interval over fewer than 30 classes" in said
    assert "By FD-toy" not in said
    assert sum(item.get("class") == "few" for item in page.all("td")) == 2 * 9, "distance and kernel distance"
    for name in ("table.csv", "table.md", "table.tex"):
        text = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert text.count(TOO_FEW) >= 9
        assert not re.search(r"\b(better|worse)\b", text)
    (marks,) = charts.differences(Results(results), Palette(Results(results))).figure.axes
    assert {line.get_markerfacecolor() for line in marks.lines if line.get_marker() in "os^dD"} == {PAPER}


def test_intervals_of_few_classes_are_not_shown(results):
    ends = {"interval": [0.1, 0.9]}
    row = results["rows"][2] | {"classes": 29, "metrics": {"lpips": {"value": 0.5} | ends}}
    row["distances"] = {"KD-toy": {"value": 0.5, "difference": {"value": 0.5, "verdict": TOO_FEW} | ends} | ends}
    row["accuracy"] = {"mean": {"value": 0.5, "difference": {"value": 0.5, "verdict": TOO_FEW} | ends} | ends}
    row["paired"] = {"psnr": {"mean": 40.0, "interval": [39.0, 41.0]}}
    uneven, enough = row | {"classes": 64}, row | {"classes": FEWEST_CLASSES}
    for part in ("distances", "accuracy"):
        enough[part] = {key: {**value, "difference": {"value": 0.5} | ends} for key, value in row[part].items()}
    for data, some in ((row, False), (uneven, False), (enough, True)):  # of 64 classes one has most images
        (found,) = Results({"rows": [data]}).rows
        figures = [found.distances["KD-toy"], found.distances["KD-toy"].difference, found.accuracy["mean"].difference]
        for figure in [*figures, found.metrics["lpips"], found.changes["psnr"]]:
            assert (figure.interval is not None) == some and figure.estimate.value > 0
        assert found.accuracy["mean"].interval == [0.1, 0.9]


def test_no_extrapolated_difference_of_few_classes_is_shown(tmp_path, results):
    """Of two images the extrapolation may say -2132: no table, file, sentence or plot repeats it."""
    for row in results["rows"]:
        for distance in (row["distances"] or {}).values():
            if "difference" in distance:
                distance["difference"] = {"value": -2132.0, "interval": [-5132.0, 868.0]}
                distance["difference"] |= {"verdict": TOO_FEW, "images": "infinite"}
    save(tmp_path, results)
    page, kept = write_report(load_results(tmp_path)), Results(results)
    texts = [path.read_text(encoding="utf-8") for path in page.parent.glob("*.*") if path.suffix != ".png"]
    texts += [terminal_summary(kept), " ".join(findings(kept)), to_markdown(study_table(kept))]
    assert len(texts) > 6 and TOO_FEW in "".join(texts)
    assert not any(number in text for text in texts for number in ("2132", "5132", "868.0", "+868"))
    palette = Palette(kept)
    for made in (charts.differences(kept, palette), distance_over(kept, palette, "end_to_end")):
        assert isinstance(made, str) and "the classes are too few" in made


def test_terminal_has_headline_limits_and_table(results, snapshot):
    results["protocol"] |= {"limit": 2, "time": {"repeats": 2}, "memory": {"batches": [1, 2]}}
    results["rows"][3]["label"] = "a method with a name that is as long as a line of the terminal, or nearly so"
    text = terminal_summary(Results(results))
    assert text == snapshot
    assert all(len(line) <= 80 for line in text.splitlines())
    assert terminal_summary(Results({**results, "rows": []}))


def test_the_time_of_the_unet_alone_is_named(sweep):
    shown = Results(sweep)
    assert "UNet, s/img" in [column.title for column in main_table(shown).columns]
    assert "UNet, s/img" not in [column.title for column in more_table(shown).columns]
    assert ", UNet alone on 2 cores" in " ".join(findings(shown))
    assert all(len(sentence) < 400 for sentence in findings(shown))
    assert "of 38 that do not differ, about 2 would get a verdict" in told_of(sweep, "By FD-toy")
