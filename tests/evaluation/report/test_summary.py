"""What a report says in sentences: the headline, the findings, and what they rest on."""

import copy
import json
import re

import pytest
from support.runs import Page, save, told_of

from elfatt_sd.evaluation.report import charts, load_results, write_report
from elfatt_sd.evaluation.report.charts import PAPER, Palette
from elfatt_sd.evaluation.report.data import Estimate, Results
from elfatt_sd.evaluation.report.plots import distance_over_time
from elfatt_sd.evaluation.report.published import comparability, comparable_words
from elfatt_sd.evaluation.report.summary import findings, headline, recommended
from elfatt_sd.evaluation.report.tables import main_table, more_table, study_table
from elfatt_sd.evaluation.report.writers import terminal_summary, to_markdown
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, TOO_FEW


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
    assert headline(shown).startswith(f"{start}, not shown to be worse in FD-toy, KD-toy and accuracy, PSNR")
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
    assert "; the null row, untouched again: 1.20 times" in told_of(results, "Fastest")
    few = headline(Results(speed(results, [(2.0, 2.1, 2.2)] * 9, rounds=2)))
    assert few.startswith(
        "No setting is shown to be faster by 2 rounds of timing (5 are needed). ToMe-SD 0.1: 2.10 times"
    )
    for row in results["rows"]:
        row["time"] = None
    assert headline(Results(results)) == "Time was not measured."
    assert recommended(Results(results)).role == "method"


def test_four_findings(results):
    """On verdicts, chance, speed and what is missing."""
    speed(results, [(1.5, 1.6, 1.7)])
    results["rows"][1]["distances"]["FD-toy"]["difference"]["verdict"] = "worse"
    results["protocol"]["limit"] = 8
    results["environment"]["timing"] = {"note": "only 2 repeats; take 5 or more", "environment": {"device": "GPU"}}
    results["reference"]["FD-toy"]["unreadable"] = ["a.png (truncated)", "b.png (truncated)"]
    for row in results["rows"]:
        row["time"] = (row["time"] or {}) | {"attention_kernels": ["native"]}
    results["rows"][2]["time"]["attention_kernels"] = ["flash-attn"]
    judged, chance, fast, missing = findings(Results(results))
    said = [row["distances"]["FD-toy"]["difference"]["verdict"] for row in shown_rows(results)]
    worse, same = said.count("worse"), said.count("no difference shown")
    assert worse > 1 and same > 1, "the fake run must show several verdicts"
    assert judged == (
        f"By FD-toy, of 8 settings: {worse} worse and {same} without a difference shown (paired 95 % intervals)."
    )
    assert chance.startswith("The null row, the same pipeline with other seeds, differs by +0.21 [")
    assert chance.endswith(" It was judged different in FD-toy, so every verdict needs more images.")
    assert fast.startswith("Fastest by the median, end to end on GPU: ToMe-SD 0.1, 1.60 times (1.50")
    assert fast.endswith(" Rows attend with different kernels: flash-attn and native.")
    assert missing == (
        "A quick look: every row was limited to 8 images and time to 5 rounds. Time: only 2 repeats; take 5 or more. "
        "2 reference images could not be read. Failed: Agent-SD 0.5."
    )


def test_a_speedup_is_claimed_beyond_the_spread_alone(results):
    assert told_of(speed(results, [(1.05, 1.1, 1.2)]), "highest median|Fastest").startswith("Fastest")
    for ratios in ((0.97, 1.04, 1.1), (1.01, 1.03, 1.06)):  # across 1; within what the null row does
        assert "None is shown to be faster" in told_of(speed(results, [ratios]), "highest median|Fastest")
    few = told_of(speed(results, [(1.5, 1.6, 1.7)], rounds=2), "highest median|Fastest")
    assert few.startswith("None is shown to be faster")


def test_many_comparisons_warn_of_chance_verdicts(sweep):
    assert "of 38 that do not differ, about 2 would get a verdict" in told_of(sweep, "By FD-toy")


def test_what_departs_from_the_published_protocol_is_named(results):
    """An FID alone does not make the paper's protocol, nor does another reference make its FID."""

    def words(source, distance, **protocol):
        data = json.loads(json.dumps(results).replace("FD-toy", distance))
        data["published"]["source"] = source
        data["protocol"] |= protocol
        return comparable_words(Results(data))

    paper = {"steps": 50, "guidance": 7.5, "width": 512, "height": 512, "dtype": "float16", "scheduler": "PLMS"}
    for row in results["rows"]:
        row["images"] = 2000
    usual = "FID (pytorch-fid)"
    for source, distance in (
        ("tabSD", usual),
        ("Token Merging for Fast Stable Diffusion", f"{usual} (5000 reference images, cropped to 512)"),
    ):
        assert words(source, distance, **paper).startswith("Compare the direction of differences")
        assert f"distance FID (12 reference images) in place of {distance}." in words(
            source, "FID (12 reference images)", **paper
        )
    for row in results["rows"]:
        row["images"] = 8
    told = words("tabSD", usual, **paper | {"steps": 2, "prompts": {"file": "mine.txt"}})
    assert told.startswith(
        "This is not the published protocol: steps 2 in place of 50, prompts mine.txt in place of those of the labels, "
        "images per row 8 in place of 2000. Compare"
    )
    results["published"] = None
    assert comparable_words(Results(results)).startswith("No published table belongs to this protocol")


def test_terminal_has_headline_limits_and_table(results):
    results["protocol"] |= {"limit": 2, "time": {"repeats": 2}, "memory": {"batches": [1, 2]}}
    results["rows"][3]["label"] = "a method with a name that is as long as a line of the terminal, or nearly so"
    text = terminal_summary(Results(results))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith(headline(Results(results))[:60])
    flat = " ".join(text.split())
    assert "limited to 2 images, time to 2 rounds and memory to batches of 1 and 2." in flat
    assert "failed: picture 7 is black" in text and "(null row)" in text and "worse" in text
    assert terminal_summary(Results({**results, "rows": []}))


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


@pytest.mark.usefixtures("one_plot")
def test_no_verdict_is_given_from_few_classes(tmp_path, results):
    for row in results["rows"]:
        row |= {"images": 5, "classes": 5}
        if row["distances"] and row["role"] != "baseline":
            for distance in row["distances"].values():
                distance["difference"]["verdict"] = TOO_FEW
    save(tmp_path, results)
    page = Page(write_report(load_results(tmp_path)))
    told = " ".join(findings(Results(results)))
    assert "No verdicts, and no intervals but that of accuracy: an interval over fewer than 30 classes" in told
    assert "By FD-toy" not in told
    assert sum(item.get("class") == "few" for item in page.all("td")) == 2 * 9, "distance and kernel distance"
    for name in ("table.csv", "table.md", "table.tex"):
        text = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert text.count(TOO_FEW) >= 9
        assert not re.search(r"\b(better|worse)\b", text)
    (marks,) = charts.differences(Results(results), Palette(Results(results))).figure.axes
    assert {line.get_markerfacecolor() for line in marks.lines if line.get_marker() in "os^dD"} == {PAPER}


def test_a_kernel_verdict_that_disagrees_is_named(results):
    """A row that either distance calls worse is not recommended as one that is not worse."""
    shown = verdicts(results, *["no difference shown"] * 9)
    first = headline(shown).split(":")[0]
    for row in results["rows"]:
        if row["role"] == "method" and not row["failed"]:
            row["distances"]["KD-toy"]["difference"]["verdict"] = "worse"
    shown = Results(results)
    assert headline(shown).startswith(f"No setting is shown to be faster without being worse. {first}")
    assert ", not shown to be worse in FD-toy and accuracy, but worse in KD-toy" in headline(shown)


def shown_rows(results):
    return [row for row in results["rows"] if row["role"] == "method" and not row["failed"]]


def test_a_row_that_is_worse_in_anything_is_not_recommended(results):
    """No gain in one figure makes up for a loss in another: accuracy, a second extractor's distance, a metric."""
    speed(results, [(1.8, 1.9, 2.0), (1.4, 1.5, 1.6)] + [(0.7, 0.8, 0.9)] * 7)
    assert recommended(verdicts(results, *["better"] * 9)).name == "ToMe-SD 0.1"

    def check(worst):
        said = headline(Results(results))
        assert said.startswith("ToMe-SD 0.3: 1.50 times") and recommended(Results(results)).name == "ToMe-SD 0.3"
        worst["verdict"] = "better"

    fastest, *_ = shown_rows(results)
    fastest["accuracy"]["mean"]["difference"]["verdict"] = "worse"
    check(fastest["accuracy"]["mean"]["difference"])
    for row in shown_rows(results):
        row["distances"]["FD-CLIP"] = copy.deepcopy(row["distances"]["FD-toy"])
    fastest["distances"]["FD-CLIP"]["difference"]["verdict"] = "worse"
    check(fastest["distances"]["FD-CLIP"]["difference"])
    fastest["metrics"] = {"CLIPScore": {"value": 1.0, "difference": {"value": -1.0, "verdict": "worse"}}}
    check(fastest["metrics"]["CLIPScore"]["difference"])


@pytest.mark.usefixtures("one_plot")
def test_intervals_of_few_classes_are_not_shown(results):
    ends = {"interval": [0.1, 0.9]}
    row = results["rows"][2] | {"classes": 29, "metrics": {"lpips": {"value": 0.5} | ends}}
    row["distances"] = {"KD-toy": {"value": 0.5, "difference": {"value": 0.5, "verdict": TOO_FEW} | ends} | ends}
    row["accuracy"] = {"mean": {"value": 0.5, "difference": {"value": 0.5, "verdict": TOO_FEW} | ends} | ends}
    row["paired"] = {"psnr": {"mean": 40.0, "interval": [39.0, 41.0]}}
    uneven, enough = row | {"classes": 64}, row | {"classes": FEWEST_CLASSES}
    for part in ("distances", "accuracy"):
        enough[part] = {key: {**value, "difference": {"value": 0.5} | ends} for key, value in row[part].items()}

    def shown(data):
        found = Results({"rows": [data]}).rows[0]
        differences = found.difference("KD-toy"), found.difference("mean", "accuracy")
        return [*differences, found.distance("KD-toy"), found.paired("psnr"), found.metric("lpips")], found.accuracy(
            "mean"
        )

    for data in (row, uneven):  # 64 classes, of which one has most images
        figures, accuracy = shown(data)
        assert [figure.ends for figure in figures] == [None] * 5 and figures[0].value == 0.5
        assert accuracy.ends == (0.1, 0.9)
    assert all(figure.ends for figure in shown(enough)[0])


def test_no_extrapolated_difference_of_few_classes_is_shown(tmp_path, results):
    """Of two images the extrapolation may say -2132: no table, file, sentence or plot repeats it."""
    for row in results["rows"]:
        for distance in (row["distances"] or {}).values():
            if "difference" in distance:
                distance["difference"] = {"value": -2132.0, "interval": [-5132.0, 868.0]}
                distance["difference"] |= {"verdict": TOO_FEW, "images": "infinite"}
    save(tmp_path, results)
    page = write_report(load_results(tmp_path))
    kept = Results(results)
    texts = [path.read_text(encoding="utf-8") for path in page.parent.glob("*.*") if path.suffix != ".png"]
    texts += [terminal_summary(kept), " ".join(findings(kept)), to_markdown(study_table(kept))]
    palette = Palette(kept)
    for made in (charts.differences(kept, palette), distance_over_time(kept, palette, "end_to_end")):
        assert isinstance(made, str) and "the classes are too few" in made
    assert len(texts) > 6
    for number in ("2132", "5132", "868.0", "+868"):
        assert not any(number in text for text in texts)
    assert TOO_FEW in texts[-1] + "".join(texts)


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


def test_a_published_figure_is_that_of_the_same_program(results):
    def published(**settings):
        data = copy.deepcopy(results)
        data["rows"][4]["settings"] |= settings
        return main_table(Results(data)).lines[4].published[0].text

    assert published() == published(stride=2) == "30.9"
    assert published(stride=4) == published(no_such_setting=1) == "—"
    results["rows"][4]["method"] = "custom"
    assert published() == "30.9" and published(until=0.2) == "—"


def test_the_machine_is_that_of_the_timing(results):
    def machine(timing=None):
        data = results | {"environment": results["environment"] | {"timing": timing}}
        return next(here for what, here, _ in comparability(Results(data)) if what == "Hardware")

    assert machine() == "2 cores of AMD EPYC, 2 threads"
    other = results["environment"] | {"cpu_threads": 1}
    assert machine({"environment": other}) == "2 cores of AMD EPYC, 1 thread"
    assert machine({"environment": other | {"device": "NVIDIA H200", "cuda": {"runtime": "12.4"}}}) == "NVIDIA H200"


def test_how_the_reference_was_resized_is_told(results):
    results["published"]["source"] = "tabSD"
    results["protocol"]["reference"] = {"source": "val", "count": 5000, "per_class": 5, "resize": "crop", "size": 512}
    told = next(here for what, here, _ in comparability(Results(results)) if what == "Reference")
    assert told == "val, 5000 images, the first 5 of each class, resized and cropped to 512 x 512"


def test_the_time_of_the_unet_alone_is_named(sweep):
    shown = Results(sweep)
    assert "UNet, s/img" in [column.title for column in main_table(shown).columns]
    assert "UNet, s/img" not in [column.title for column in more_table(shown).columns]
    assert ", UNet alone on 2 cores" in " ".join(findings(shown))
