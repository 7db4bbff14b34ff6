"""The tables and sentences of a report: every figure, in every form, as in print, and what may be claimed."""

import copy
import re

import pytest
from support.runs import Page, save

from elfatt_sd.evaluation.records import Estimate
from elfatt_sd.evaluation.report.charts import PAPER, differences
from elfatt_sd.evaluation.report.data import Results, load_results, shortened
from elfatt_sd.evaluation.report.page import write_report
from elfatt_sd.evaluation.report.tables import (
    decimals_for,
    findings,
    fixed,
    headline,
    main_table,
    more_table,
    recommended,
    to_markdown,
    told_apart,
    written_tables,
)
from elfatt_sd.evaluation.statistics import TOO_FEW

NONE = "no difference shown"


def columns(table):
    """The entries of a table by the titles of their columns."""
    return {title: [line.entries[place] for line in table.lines] for place, title in enumerate(table.titles)}


def methods(results):
    return [row for row in results["rows"] if row["role"] == "method" and not row["failed"]]


def distances(results):
    """Those of all rows that have any, by their names."""
    return [(name, each) for row in results["rows"] for name, each in (row["distances"] or {}).items()]


def verdicts(results, *said):
    """Give the distances of methods these verdicts, in order."""
    for row, verdict in zip(methods(results), said, strict=False):
        for distance in row["distances"].values():
            distance["difference"]["verdict"] = verdict
    return Results.of(results)


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


def test_tables_are_unchanged(results, sweep, snapshot):
    """As CSV and Markdown, with all sentences."""
    assert written_tables(Results.of(results)) == snapshot
    assert to_markdown(main_table(Results.of(sweep))) == snapshot


def test_numbers_are_as_in_print_with_the_decimals_that_are_known(results):
    """Distances begin at zero."""
    minus = "\N{MINUS SIGN}"
    known = {(-0.41, 2, True): f"{minus}0.41", (0.412, 2, True): "+0.41", (-0.0004, 2, True): f"{minus}0.00"}
    known |= {(-0.001, 2, False): "0.00", (0.0, 1, True): "0.0"}
    assert {given: fixed(*given[:2], sign=given[2]) for given in known} == known
    estimates = [[Estimate(18.4, (16.8, 20.0))], [Estimate(2e-7, (1e-7, 3e-7))], [Estimate(0.707), None], []]
    assert [decimals_for(each) for each in estimates] == [1, 7, 3, 2]
    for name, distance in distances(results):
        few = {"value": 7.0, "interval": [-5.0, 19.0]}
        distance |= few if name == "FD-toy" else {"value": -123_922.0, "interval": [-400_000.0, 150_000.0]}
    shown = Results.of(results)
    assert columns(main_table(shown))["FD-toy ↓"][0].note == "[0.0, 19.0]"
    entry = columns(more_table(shown))["KD-toy ↓"][0]
    assert (entry.text, entry.note) == (f"{minus}123922", f"[{minus}400000, 150000]")


def test_what_no_row_differs_in_is_said_once(results):
    """Where only one row has a figure, it stays."""
    everything = main_table(verdicts(results, *[NONE] * 9))
    left, said = told_apart(everything)
    assert said == f"The same in all rows: Verdict: {NONE}."
    assert columns(left) == {title: each for title, each in columns(everything).items() if title != "Verdict"}
    for row in results["rows"]:
        row |= {"memory": None, "settings": {"ratio": 0.5}}
    said = f"The same in all rows: Ratio: 0.5; Verdict: {NONE}. Not measured: GiB/img."
    assert told_apart(main_table(Results.of(results)))[1] == said
    results["rows"] = results["rows"][:3:2]
    assert {"Verdict", "PSNR, dB"} <= set(told_apart(main_table(Results.of(results)))[0].titles)


def test_what_was_not_measured_says_so_and_why(results):
    row, reason = results["rows"][-1], "out of memory at batch 8"
    row |= dict.fromkeys(("distances", "paired", "accuracy", "most_changed", "time", "memory", "settings", "images"))
    entries = main_table(Results.of(results)).lines[-1].entries
    assert [entry.text for entry in entries[2:9]] == ["not measured"] * 7
    results["rows"][-2]["memory"]["note"] = reason
    row |= {"time": {"failed": reason}, "memory": {"failed": reason, "batches": []}}
    found = columns(main_table(Results.of(results)))
    assert found["GiB/img"][-2].note.startswith("[") and found["GiB/img"][-2].remark == reason
    assert found["GiB/img"][-1].text == found["s/img"][-1].text == reason


def test_identical_and_lost_pictures_are_counted(results):
    """Below 20 dB little is left of the untouched picture."""
    results["rows"][2]["paired"]["psnr"]["pictures"][:3] = [19.99, 20.0, None]
    most, some, all_ = (results["rows"][place]["paired"]["psnr"] for place in (-1, -2, -3))
    most["identical"], some["identical"] = 61, 3
    all_ |= dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest")) | {"identical": 64}
    shown = Results.of(results)
    psnr = columns(main_table(shown))["PSNR, dB"][-3:]
    assert [entry.text for entry in psnr] == ["identical", f"{some['mean']:.2f}", "identical"]
    low, high = some["interval"]
    small = [entry.small for entry in psnr]
    assert small == ["(64 of 64)", f"[{low:.2f}, {high:.2f}], 3 of 64 identical", "(61 of 64)"]
    lowest = columns(more_table(shown))["Lowest PSNR, dB"]
    assert [entry.text for entry in lowest[-3:]] == ["identical", f"{some['lowest']:.1f}", f"{most['lowest']:.1f}"]
    assert [entry.note for entry in lowest[1:4]] == ["(64 below 20)", "(1 below 20)", ""]
    assert [row.psnr is None for row in shown.rows[-3:]] == [True, False, True], "which have no place in plots"


def test_rows_are_told_apart_and_settings_that_vary_have_their_column(results):
    results["rows"][4]["settings"] = results["rows"][3]["settings"] = results["rows"][2]["settings"]
    names = [row.name for row in Results.of(results).rows]
    assert len(set(names)) == len(names) and "ToMe-SD 0.1 (tome-0.3)" in names
    rows = [row for row in results["rows"] if row["role"] != "method" or row["method"] == "elfatt"]
    for row, size in zip(rows[2:], (512, 32, 128), strict=True):
        row["settings"] = {"ratio": 0.5, "block_size": size, "block_order": "sequence"}
    results["rows"] = rows
    assert list(columns(main_table(Results.of(results))))[:3] == ["Method", "Ratio", "Block size"]
    cut = [shortened("sampled keys, other numbers, groups 1", width) for width in (20, 37)]
    assert cut == ["sampled…groups 1", "sampled keys, other numbers, groups 1"]


def test_hardware_is_that_of_the_timing(results):
    one, said = results["environment"] | {"cpu_threads": 1}, "2 cores of AMD EPYC, "
    gpu = one | {"device": "NVIDIA H200", "cuda": {"runtime": "12.4"}}
    for timing, machine in ((None, f"{said}2 threads"), (one, f"{said}1 thread"), (gpu, "NVIDIA H200")):
        data = results | {"environment": results["environment"] | {"timing": timing and {"environment": timing}}}
        assert Results.of(data).hardware == machine


HALF, MORE = (1.4, 1.5, 1.6), (1.8, 1.9, 2.0)  # times as fast: lowest, median, highest
FIRST = "ToMe-SD 0.1: 1.50 times as fast as the untouched pipeline (1.40–1.60), "  # noqa: RUF001


@pytest.mark.parametrize(
    ("ratios", "given", "rounds", "start"),
    [
        ([HALF, MORE], [NONE, "worse"], 5, f"{FIRST}not shown to be worse in FD-toy, KD-toy and accuracy, PSNR"),
        ([HALF], ["better"], 5, f"{FIRST}better in FD-toy and KD-toy, not shown to be worse in accuracy, PSNR"),
        ([HALF], ["worse"], 5, "No setting is shown to be faster without being worse. ToMe-SD 0.1"),
        ([HALF, MORE], [TOO_FEW] * 9, 5, "ToMe-SD 0.3: 1.90 times"),
        ([(1.05, 1.1, 1.2)], [], 5, "ToMe-SD 0.1: 1.10 times"),
        ([(0.97, 1.04, 1.1)], [], 5, "No setting is shown to be faster. ToMe-SD 0.1"),  # across 1
        ([(1.01, 1.03, 1.06)], [], 5, "No setting is shown to be faster. ToMe-SD 0.1"),  # within the null row's
        ([HALF], [], 2, "No setting is shown to be faster by 2 rounds of timing (5 are needed). ToMe-SD 0.1: 1.50"),
    ],
)
def test_the_headline_names_the_fastest_that_is_not_worse(results, ratios, given, rounds, start):
    """A speed-up is claimed beyond the spread alone."""
    speed(results, ratios, rounds=rounds)
    shown = verdicts(results, *given)
    said = headline(shown)
    assert said.startswith(start) and recommended(shown).name in start
    assert ("not judged: the classes are too few" in said) == (TOO_FEW in given)
    for row in results["rows"]:
        row["time"] = None
    shown = Results.of(results)
    assert headline(shown) == "No method was timed." and recommended(shown).role == "method"


def test_a_loss_in_any_figure_keeps_a_row_from_the_headline(results):
    """No gain in one makes up for a loss in another: accuracy, any distance, a metric."""
    speed(results, [MORE, HALF], null=(1.1, 1.2, 1.3))
    assert recommended(verdicts(results, *["better"] * 9)).name == "ToMe-SD 0.1"
    fastest, *_ = methods(results)
    fastest["distances"]["FD-CLIP"] = copy.deepcopy(fastest["distances"]["FD-toy"])
    fastest["metrics"] = {"CLIPScore": {"value": 1.0, "difference": {"value": -1.0, "verdict": "better"}}}
    figures = [fastest["accuracy"]["mean"], fastest["metrics"]["CLIPScore"], *fastest["distances"].values()]
    for worst in (figure["difference"] for figure in figures):
        before, worst["verdict"] = worst["verdict"], "worse"
        assert headline(Results.of(results)).startswith("ToMe-SD 0.3: 1.50 times")
        worst["verdict"] = before
    for row in methods(results):
        row["distances"]["KD-toy"]["difference"]["verdict"] = "worse"
    said = headline(Results.of(results))
    assert said.startswith("No setting is shown to be faster without being worse. ToMe-SD 0.1")
    assert ", better in FD-toy" in said and ", worse in KD-toy" in said


def test_four_findings(results, sweep, snapshot):
    """On verdicts, chance, speed and what is missing; images that could not be read are named."""
    speed(results, [(1.5, 1.6, 1.7)])
    results["rows"][1]["distances"]["FD-toy"]["difference"]["verdict"] = "worse"
    results["protocol"]["limit"] = results["rows"][0]["images"]
    results["environment"]["timing"] = {"environment": {"device": "GPU"}}
    results["reference"]["FD-toy"]["unreadable"] = ["a.png (truncated)", "b.png (truncated)"]
    assert [findings(Results.of(results)), findings(Results.of(sweep))] == snapshot
    results["rows"] = [row for row in results["rows"] if row["role"] != "null"]
    assert "There is no null row" in findings(Results.of(results))[1]


def test_no_verdict_and_no_extrapolated_difference_of_few_classes_is_shown(tmp_path, results):
    """Of two images the extrapolation may say -2132: no table, file, sentence or plot repeats it."""
    for row in results["rows"]:
        row |= {"images": 5, "classes": 5, "accuracy": None}
    for name, distance in distances(results):
        if "difference" in distance:
            distance["difference"] = {"value": -2132.0, "interval": [-5132.0, 868.0], "verdict": TOO_FEW}
            distance["difference"] |= {"images": "infinite"} if name == "FD-toy" else {"value": 1.0, "interval": None}
    save(tmp_path, results)
    page, shown = write_report(load_results(tmp_path)), Results.of(results)
    texts = [path.read_text(encoding="utf-8") for path in page.parent.glob("table.*")]
    assert all(text.count(TOO_FEW) >= 9 for text in texts) and len(texts) == 2
    texts += [page.read_text(encoding="utf-8"), headline(shown), *findings(shown)]
    assert not any(number in text for text in texts for number in ("2132", "5132", "868.0", "+868"))
    assert not any(re.search(r"\b(better|worse)\b", text) for text in [*texts[:2], *texts[3:]])
    said = Page(page).text
    assert f"Verdict: {TOO_FEW}" in said and f"KD-toy verdict: {TOO_FEW}" in said, "once, for all rows"
    assert findings(shown)[0].startswith("No verdicts, and no intervals: an interval over fewer than 30 classes")
    assert differences(shown) is None
    for _, distance in distances(results):
        distance.get("difference", {}).pop("images", None)
    (marks,) = differences(Results.of(results)).figure.axes
    assert {line.get_markerfacecolor() for line in marks.lines if line.get_marker() in "os^dD"} == {PAPER}


@pytest.mark.parametrize(
    ("classes", "verdict", "shown"), [(29, TOO_FEW, False), (64, TOO_FEW, False), (30, NONE, True)]
)
def test_intervals_of_few_classes_are_not_shown(classes, verdict, shown):
    """Also those of 64 classes, of which one has most images; that of an accuracy knows how few they are."""
    figure = {"value": 0.5, "interval": [0.1, 0.9]}
    judged = figure | {"difference": figure | {"verdict": verdict}}
    row = {"classes": classes, "metrics": {"lpips": figure}, "distances": {"KD-toy": judged}}
    row |= {"accuracy": {"mean": judged}, "paired": {"psnr": {"mean": 40.0, "interval": [39.0, 41.0]}}}
    (found,) = Results.of({"format": 1, "rows": [row]}).rows
    accuracy, distance = found.figure("accuracy mean"), found.figure("KD-toy")
    for each in (distance, distance.difference, accuracy.difference, found.figure("lpips"), found.changes["psnr"]):
        assert (each.interval is not None) == shown and each.estimate.value > 0
    assert accuracy.interval == [0.1, 0.9]
