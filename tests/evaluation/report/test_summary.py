"""What a report says in sentences: the headline, the findings, and what they rest on."""

import copy
import json
import re

import pytest
from fake_run import save
from report_pages import Page, told_of

from elfatt_sd.evaluation.intervals import FEWEST_CLASSES, TOO_FEW
from elfatt_sd.evaluation.report import charts, load_results, write_report
from elfatt_sd.evaluation.report.ablation import ablation
from elfatt_sd.evaluation.report.data import Results
from elfatt_sd.evaluation.report.palette import PAPER, Palette
from elfatt_sd.evaluation.report.published import comparability, comparable_words
from elfatt_sd.evaluation.report.scatter import distance_over_time
from elfatt_sd.evaluation.report.summary import findings, headline, recommended, scope
from elfatt_sd.evaluation.report.tables import main_table, more_table, study_table
from elfatt_sd.evaluation.report.terminal import terminal_summary
from elfatt_sd.evaluation.report.values import Estimate
from elfatt_sd.evaluation.report.writers import to_markdown


def test_headline_counts_the_verdicts(run):
    _, results, page = run
    said = [row["distances"]["FD-toy"]["difference"]["verdict"] for row in results["rows"][2:] if not row["failed"]]
    worse, same = said.count("worse"), said.count("no difference shown")
    assert worse > 1 and same > 1, "the fake run must show several verdicts"
    told = scope(Results(results))
    assert told == (
        "9 settings of ToMe-SD, Agent-SD and ELFATT-SD on 64 images each (toy): "
        f"by FD-toy, {worse} are worse than the untouched pipeline, {same} show no difference and 1 failed."
    )
    assert told in page.text and headline(Results(results)) in page.text


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
    assert "timed again (the null row): 1.20 times" in told_of(results, "Fastest")
    told = headline(Results(speed(results, [(2.0, 2.1, 2.2)] * 9, rounds=2)))
    assert "2.10 times as fast as" in told and "2 rounds of timing are too few to claim it" in told
    assert headline(Results(speed(results, [(0.7, 0.8, 0.9)] * 9, rounds=2))).startswith("No setting is shown to be fa")
    for row in results["rows"]:
        row["time"] = None
    assert headline(Results(results)).startswith("Time was not measured. Quality: by FD-toy")
    assert recommended(Results(results)).role == "method"


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


def test_findings_name_the_fastest_the_null_row_and_failures(results):
    told = " ".join(findings(Results(results)))
    timed = [row for row in results["rows"] if row["role"] == "method" and row["time"]]
    best = max(timed, key=lambda row: row["time"]["end_to_end"]["ratio"]["median"])
    assert (
        f"{best['label']} {best['settings']['ratio']}, {best['time']['end_to_end']['ratio']['median']:.2f} times"
        in told
    )
    assert "The null row, the same pipeline with other seeds, differs by +0.21" in told
    assert "picture 7 is black" in told and "64 images a row" not in told
    results["rows"][1]["distances"]["FD-toy"]["difference"]["verdict"] = "worse"
    results["protocol"]["limit"] = 8
    results["environment"]["timing"] = {"note": "only 2 repeats; take 5 or more", "environment": {"device": "GPU"}}
    told = " ".join(findings(Results(results)))
    assert "needs more images" in told and "limited to 8 images" in told and "only 2 repeats" in told
    assert "Fastest by the median, end to end on GPU" in told


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


def test_a_speedup_is_claimed_beyond_the_spread_alone(results):
    told = told_of(speed(results, [(1.05, 1.1, 1.2)]), "untouched (")
    assert told.startswith("Fastest by the median, end to end")
    assert "1.10 times as fast as untouched (1.05–1.20)" in told  # noqa: RUF001
    for ratios in ((0.97, 1.04, 1.1), (1.01, 1.03, 1.06)):  # across 1; within what the null row does
        told = told_of(speed(results, [ratios]), "untouched (")
        assert told.startswith("No setting is shown to be faster") and "Fastest" not in told
    assert "7 settings are slower than untouched" not in told
    slower = told_of(speed(results, [(0.8, 0.9, 0.97)] * 2 + [(0.8, 0.9, 0.99)] * 6), "untouched (")
    assert "No setting is shown to be faster" in slower and "2 settings are slower than untouched." in slower


def test_few_rounds_claim_no_speedup(results):
    told = told_of(speed(results, [(1.5, 1.6, 1.7)], rounds=2), "rounds")
    assert told.startswith("Too few rounds of timing") and "(2)" in told and "Fastest" not in told


def line_of(row, slope, half):
    ends = None if half is None else [slope - half, slope + half]
    row["memory"] |= {"gib_per_image": slope, "interval": ends}


def test_less_memory_is_claimed_beyond_the_fit_error_alone(results):
    rows = [row for row in results["rows"] if row["memory"]]
    for row in rows:
        line_of(row, 0.12, 0.001)
    line_of(rows[0], 0.11, 0.001)
    told = told_of(results, "VmHWM")
    assert told.startswith("No setting is shown to take less memory") and "Least memory" not in told
    assert "settings take more than untouched." in told and "untouched 0.1100 [0.1090, 0.1110]" in told
    line_of(rows[-1], 0.10, 0.02)
    assert told_of(results, "VmHWM").startswith("No setting is shown to take less memory")
    line_of(rows[-1], 0.10, None)
    assert "0.1000 (no interval) GiB per image" in told_of(results, "No setting is shown to take less memory")
    line_of(rows[-1], 0.10, 0.004)
    told = told_of(results, "Least memory")
    assert "ELFATT-SD 0.5, 0.1000 [0.0960, 0.1040] GiB per image, untouched 0.1100 [0.1090, 0.1110]" in told
    rows[0]["memory"] = None
    assert "Memory of the untouched pipeline was not measured; the least of the others" in " ".join(
        findings(Results(results))
    )


def test_memory_of_different_kinds_is_not_compared(results):
    results["rows"][-1]["memory"]["kind"] = "CUDA allocated"
    assert told_of(results, "VmHWM") == "Memory was measured as CUDA allocated and VmHWM, which cannot be compared."


@pytest.mark.usefixtures("one_plot")
def test_no_verdict_is_given_from_few_classes(tmp_path, results):
    for row in results["rows"]:
        row |= {"images": 5, "classes": 5}
        if row["distances"] and row["role"] != "baseline":
            for distance in row["distances"].values():
                distance["difference"]["verdict"] = TOO_FEW
    save(tmp_path, results)
    page = Page(write_report(load_results(tmp_path)))
    assert "no verdict, since the classes are too few" in scope(Results(results))
    told = " ".join(findings(Results(results)))
    assert "No verdicts from 5 classes, and no intervals but that of accuracy: an interval over fewer" in told
    for word in ("better than", "worse than", "Better:", "Worse:"):
        assert word not in told + scope(Results(results))
    assert sum(item.get("class") == "few" for item in page.all("td")) == 2 * 9, "distance and kernel distance"
    for name in ("table.csv", "table.md", "table.tex"):
        text = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert text.count(TOO_FEW) >= 9
        assert not re.search(r"\b(better|worse)\b", text)
    (marks,) = charts.differences(Results(results), Palette(Results(results))).figure.axes
    assert {line.get_markerfacecolor() for line in marks.lines if line.get_marker() in "os^dD"} == {PAPER}


def test_a_singular_covariance_is_told(results):
    assert "features of FD-toy" not in " ".join(findings(Results(results)))
    results["reference"]["FD-toy"]["features"] = 64
    assert "64 images a row are no more than the 64 features of FD-toy" in told_of(results, "KD-toy, among the other")


def test_a_reference_that_says_little_is_named(results):
    results["reference"]["FD-toy"] |= {"features": 64, "count": 64}
    assert told_of(results, "64 reference images are no more than the 64 features of FD-toy")
    results["rows"][0]["distances"]["FD-toy"]["value"] = -7e-15
    assert told_of(results, "The reference is the images of SD (Baseline): no distance to it, and no verdict")


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
    assert "; KD-toy disagrees on" in scope(shown)
    assert any(told.startswith("KD-toy disagrees with FD-toy") for told in findings(shown))


def shown_rows(results):
    return [row for row in results["rows"] if row["role"] == "method" and not row["failed"]]


def test_a_row_that_is_worse_in_anything_is_not_recommended(results):
    """No gain in one figure makes up for a loss in another: accuracy, a second extractor's distance, a metric."""
    speed(results, [(1.8, 1.9, 2.0), (1.4, 1.5, 1.6)] + [(0.7, 0.8, 0.9)] * 7)
    assert recommended(verdicts(results, *["better"] * 9)).name == "ToMe-SD 0.1"

    def check(worst, name):
        said = headline(Results(results))
        assert said.startswith("ToMe-SD 0.3: 1.50 times") and recommended(Results(results)).name == "ToMe-SD 0.3"
        assert any(told.startswith(f"{name} disagrees with FD-toy") for told in findings(Results(results)))
        worst["verdict"] = "better"

    fastest, *_ = shown_rows(results)
    fastest["accuracy"]["mean"]["difference"]["verdict"] = "worse"
    check(fastest["accuracy"]["mean"]["difference"], "accuracy")
    for row in shown_rows(results):
        row["distances"]["FD-CLIP"] = copy.deepcopy(row["distances"]["FD-toy"])
    fastest["distances"]["FD-CLIP"]["difference"]["verdict"] = "worse"
    check(fastest["distances"]["FD-CLIP"]["difference"], "FD-CLIP")
    fastest["metrics"] = {"CLIPScore": {"value": 1.0, "difference": {"value": -1.0, "verdict": "worse"}}}
    check(fastest["metrics"]["CLIPScore"]["difference"], "CLIPScore")


def test_without_distances_accuracy_judges(results):
    for row in results["rows"]:
        row["distances"] = None
    fewer = shown_rows(results)[0]["accuracy"]["mean"]["difference"]
    fewer["verdict"] = "worse"
    assert ": by accuracy, 1 is worse than the untouched pipeline" in scope(Results(results))
    assert not any("no null row" in told for told in findings(Results(results))), "there is one"


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
    texts += ablation(kept, palette, "ratio").points
    assert len(texts) > 7
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


def test_many_comparisons_warn_of_chance_verdicts(sweep):
    assert "of 38 rows that do not differ, about 2 would get one" in told_of(sweep, "verdicts rest on")


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


def test_the_published_fid_has_the_reference_of_its_protocol(results):
    def words(source, distance):
        data = json.loads(json.dumps(results).replace("FD-toy", distance))
        data["published"]["source"] = source
        return comparable_words(Results(data))

    results["protocol"] |= {"steps": 50, "guidance": 7.5, "width": 512, "height": 512, "dtype": "float16"}
    results["protocol"]["scheduler"] = "PLMS"
    for row in results["rows"]:
        row["images"] = 2000
    for source, distance in (
        ("tabSD", "FID (pytorch-fid)"),
        ("Token Merging for Fast Stable Diffusion", "FID (pytorch-fid) (5000 reference images, cropped to 512)"),
    ):
        assert "not values" in words(source, distance)
        assert "not the published FID" in words(source, "FID (12 reference images)")


def test_what_departs_from_the_published_protocol_is_named(results):
    """An FID alone does not make the paper's protocol."""
    data = json.loads(json.dumps(results).replace("FD-toy", "FID (pytorch-fid)"))
    data["published"]["source"] = "tabSDa2"
    data["protocol"] |= {"steps": 2, "guidance": 7.5, "width": 512, "height": 512, "dtype": "bfloat16"}
    data["protocol"]["scheduler"] = "PLMS"
    for row in data["rows"]:
        row["images"] = 8
    words = comparable_words(Results(data))
    assert "not the published protocol: steps 2 in place of 50, images per row 8 in place of 2000." in words
    assert "Even under the paper's protocol" not in words


def test_different_kernels_are_named(results):
    for row in results["rows"]:
        row["time"] = (row["time"] or {}) | {"attention_kernels": ["native"]}
    assert not any("kernels" in sentence for sentence in findings(Results(results)))
    results["rows"][2]["time"]["attention_kernels"] = ["flash-attn"]
    told = next(sentence for sentence in findings(Results(results)) if "kernels" in sentence)
    assert "native in SD (Baseline), " in told and told.endswith("flash-attn in ToMe-SD 0.1.")


def test_how_the_reference_was_resized_is_told(results):
    results["published"]["source"] = "tabSD"
    results["protocol"]["reference"] = {"source": "val", "count": 5000, "per_class": 5, "resize": "crop", "size": 512}
    told = next(here for what, here, _ in comparability(Results(results)) if what == "Reference")
    assert told == "val, 5000 images, the first 5 of each class, resized and cropped to 512 x 512"


def test_the_time_of_the_unet_alone_is_named(sweep):
    shown = Results(sweep)
    assert "UNet, s/img" in [column.title for column in main_table(shown).columns]
    assert "UNet, s/img" not in [column.title for column in more_table(shown).columns]
    assert "Fastest by the median, UNet alone" in " ".join(findings(shown))
