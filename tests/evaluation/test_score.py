"""Scores of a run whose pictures are renders, so that what changed is known; SSIM; and how often intervals cover."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.runs import CLASSES, SCORED, counting, protocol, row_of, write_run
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from benchmarks import coverage, scoring
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction, score
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.features import Extractor, ToyExtractor, load_extractor
from elfatt_sd.evaluation.frechet import frechet_distance
from elfatt_sd.evaluation.metrics.scores import Scorer
from elfatt_sd.evaluation.protocols import Protocol, Reference
from elfatt_sd.evaluation.run import Run
from elfatt_sd.evaluation.score import Scale, build_references, score_run, structural_similarity
from elfatt_sd.evaluation.statistics import BETTER, NO_DIFFERENCE, TOO_FEW, WORSE, FeatureStatistics, student_quantile


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(cache))


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELFATT_SD_CACHE", str(cache))
        run_dir = write_run(tmp_path_factory.mktemp("runs") / "run", protocol(), stride=1)
        score_run(Run.open(run_dir))
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is scored quickly."""
    counting(monkeypatch)
    return write_run(tmp_path / "run", protocol())


@pytest.fixture(scope="module")
def scores(scored: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((scored / "scores.json").read_text())
    return data


def test_distance_is_that_of_the_statistics(scored: Path, scores: dict[str, Any]) -> None:
    extractor = load_extractor("toy")
    images = Images.of_row(row_of(scored, SCORED[3]))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in images.paths])
    own = FeatureStatistics.of(extractor(pixels))
    (reference,) = build_references(protocol())
    theirs = reference.statistics
    expected = frechet_distance(own.mean, own.covariance, theirs.mean, theirs.covariance)
    assert scores["rows"]["dark"]["distances"]["FD-toy"]["value"] == pytest.approx(expected, rel=1e-3)


def test_verdicts_say_what_was_done(scores: dict[str, Any]) -> None:
    verdicts = {
        name: row["distances"]["FD-toy"].get("difference", {}).get("verdict") for name, row in scores["rows"].items()
    }
    assert verdicts == {"sd": None, "null": NO_DIFFERENCE, "tome": NO_DIFFERENCE, "dark": WORSE}
    dark, untouched = (scores["rows"][name]["distances"] for name in ("dark", "sd"))
    assert dark["FD-toy"]["difference"]["images"] == "infinite", "which is not the difference of the two values"
    assert dark["KD-toy"]["difference"]["value"] == pytest.approx(
        dark["KD-toy"]["value"] - untouched["KD-toy"]["value"]
    )
    assert "images" not in dark["KD-toy"]["difference"]
    for row in scores["rows"].values():
        assert (row["images"], list(row["distances"])) == (CLASSES, ["FD-toy", "KD-toy"])
        assert all(each["interval"][0] <= each["value"] <= each["interval"][1] for each in row["distances"].values())


def test_changes_of_pairs(scored: Path, scores: dict[str, Any]) -> None:
    rows = scores["rows"]
    assert rows["sd"]["paired"] is None
    tome = rows["tome"]["paired"]
    assert (tome["psnr"]["identical"], tome["psnr"]["unit"]) == (CLASSES - 3, "dB")
    assert rows["tome"]["most_changed"] == [2, 5, 7]
    assert len(rows["dark"]["most_changed"]) == score.MOST_CHANGED
    assert rows["null"]["paired"]["psnr"]["median"] < 25
    assert rows["null"]["paired"]["ssim"]["median"] < 0.9 < tome["ssim"]["mean"] < 1
    assert tome["cosine"]["mean"] > rows["dark"]["paired"]["cosine"]["mean"]
    ours, theirs = (
        np.array(Image.open(row_of(scored, cell).image_file(2))).astype(float) for cell in (SCORED[2], SCORED[0])
    )
    row, baseline = (Images.of_row(row_of(scored, cell)) for cell in (SCORED[2], SCORED[0]))
    before = list(warnings.filters)
    changes = score.pair_changes(row, baseline, scored / "anew", torch.device("cpu"))
    assert warnings.filters == before, "what is told later, such as of layers that are not patched, is told"
    assert changes[2, 0] == pytest.approx(10 * np.log10(255**2 / ((ours - theirs) ** 2).mean()), rel=1e-5)
    assert changes[7, 0] == pytest.approx(10 * np.log10(255**2 * ours.size), rel=1e-5), "above 100 dB, yet a change"
    for measure, values, most in (("psnr", changes[[2, 5, 7], 0], math.inf), ("ssim", changes[:, 1], 1.0)):
        half = student_quantile(0.975, len(values) - 1) * values.std().item() / len(values) ** 0.5
        middle = values.mean().item()
        assert tome[measure]["mean"] == pytest.approx(middle)
        assert tome[measure]["lowest"] == min(values.tolist())
        assert tome[measure]["interval"] == pytest.approx([max(middle - half, 0), min(middle + half, most)])
        kept = [value for value in tome[measure]["pictures"] if value is not None]
        assert kept == pytest.approx(values.tolist(), abs=1e-6)
    assert tome["classes"] == list(row.classes)
    assert [tome["psnr"]["pictures"].index(value) for value in tome["psnr"]["pictures"] if value] == [2, 5, 7]
    low, high = tome["cosine"]["interval"]
    assert low < tome["cosine"]["mean"] < high


def test_pairs_are_compared_on_the_cpu_where_a_device_has_no_float64(
    scored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, baseline = (Images.of_row(row_of(scored, cell)) for cell in (SCORED[2], SCORED[0]))
    changes = score.pair_changes(row, baseline, scored / "on a CPU", torch.device("cpu"))
    monkeypatch.setattr(score, "has_float64", lambda device: False)
    assert torch.equal(score.pair_changes(row, baseline, scored / "elsewhere", torch.device("meta")), changes)


def test_better_is_said_and_pictures_that_are_all_the_same_have_no_psnr(scored: Path) -> None:
    """The untouched pictures against the dark ones as baseline, and against themselves."""
    (extractor,), (reference,) = score.load_extractors(protocol()), build_references(protocol())
    scale = Scale(extractor, reference, scored / "scores")
    untouched = Images.of_row(row_of(scored, SCORED[0]))
    scorer, dark = Scorer((), (), [scale], scored / "scores"), Images.of_row(row_of(scored, SCORED[3]))
    better = score.score_cell(untouched, dark, scorer, toy=True)
    for figure in (better["distances"]["FD-toy"], better["accuracy"]["mean"]):
        assert figure["difference"]["verdict"] == BETTER
    twin = dataclasses.replace(untouched, name="twin")
    scale.extract(twin)
    row = score.score_cell(twin, untouched, scorer)
    nothing = dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest"))
    assert row["paired"]["psnr"] == {**nothing, "unit": "dB", "identical": CLASSES, "pictures": [None] * CLASSES}
    assert row["paired"]["ssim"]["mean"] == pytest.approx(1, abs=1e-9)
    assert row["most_changed"] == []


def test_accuracy_of_attributes(scores: dict[str, Any]) -> None:
    """Renders are read right, and pictures at a third of their brightness worse."""
    good, bad = scores["rows"]["sd"]["accuracy"], scores["rows"]["dark"]["accuracy"]
    assert list(good) == ["shape", "color", "pattern", "background", "mean"]
    for name in good:
        low, high = good[name]["interval"]
        assert good[name]["value"] >= 0.95
        assert 0 <= low <= good[name]["value"] <= high <= 1
    assert bad["mean"]["value"] < 0.9
    assert bad["mean"]["difference"]["verdict"] == WORSE
    assert scores["rows"]["tome"]["accuracy"]["mean"]["difference"]["verdict"] == NO_DIFFERENCE


def test_few_classes_give_no_verdict_however_many_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    run_dir = write_run(tmp_path / "run", protocol(classes=4, images_per_class=CLASSES // 4))
    score_run(Run.open(run_dir))
    rows = json.loads((run_dir / "scores.json").read_text())["rows"]
    assert rows["dark"]["classes"] == 4
    for distance in rows["dark"]["distances"].values():
        low, _ = distance["difference"]["interval"]
        assert low > 0, "an interval there is, and it leaves out zero"
        assert distance["difference"]["verdict"] == TOO_FEW


def test_what_is_known_of_a_row_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline's too, although every other row is compared with it."""
    calls: list[str] = []
    for owner, name in ((score, "frechet_figures"), (score, "kernel_distance"), (ToyExtractor, "classify")):
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, noted)
    score_run(Run.open(write_run(tmp_path / "run", protocol(), stride=1)))
    assert {name: calls.count(name) for name in calls} == dict.fromkeys(calls, len(SCORED))
    assert len({*calls}) == 3


def test_altered_and_deleted_pictures_are_named(run_dir: Path) -> None:
    victim = row_of(run_dir, SCORED[2]).image_file(7)
    Image.new("RGB", (256, 256), "red").save(victim)
    with pytest.raises(ElfattError, match=r"tome/images/00007.png was altered"):
        score_run(Run.open(run_dir))
    victim.unlink()
    with pytest.raises(ElfattError, match=r"tome/images/00007.png was deleted"):
        score_run(Run.open(run_dir))
    assert not (run_dir / "scores.json").exists()


def test_unfinished_rows_are_left_out_and_the_baseline_is_needed(run_dir: Path) -> None:
    """Of a run from before a field was added, the identity stays, though its protocol now gives another."""
    run = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**run, "identity": "of an earlier version"}))
    row_of(run_dir, SCORED[2]).manifest.unlink()
    score_run(Run.open(run_dir))
    scores = json.loads((run_dir / "scores.json").read_text())
    assert (list(scores["rows"]), scores["identity"]) == (["sd", "null", "dark"], "of an earlier version")
    dark = scores["rows"]["dark"]
    assert (dark["accuracy"], list(dark["distances"])) == (None, ["FD-regions", "KD-regions"])
    row_of(run_dir, SCORED[0]).manifest.unlink()
    with pytest.raises(ElfattError, match="baseline, has no images"):
        score_run(Run.open(run_dir))


def test_reference_of_moments_gives_no_kernel_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    statistics = FeatureStatistics.of(torch.rand(30, 12, generator=torch.Generator().manual_seed(0)))
    np.savez(tmp_path / "other.npz", mu=statistics.mean, sigma=statistics.covariance)
    run_dir = write_run(tmp_path / "run", protocol(reference=Reference(str(tmp_path / "other.npz"))))
    score_run(Run.open(run_dir))
    row = json.loads((run_dir / "scores.json").read_text())["rows"]["sd"]
    assert list(row["distances"]) == ["FD-regions (statistics of other.npz)"]


def test_two_extractors_of_one_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    with pytest.raises(ElfattError, match=r"\['clip:a', 'clip:b'\] give FD-regions twice; give one of each kind"):
        score.load_extractors(protocol(extractors=("clip:a", "clip:b")))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_a_killed_scoring_goes_on_and_gives_the_same_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counting(monkeypatch)
    monkeypatch.setattr(extraction, "CHUNK", 16)
    monkeypatch.setattr(extraction, "BATCH", 8)
    run_dir = write_run(tmp_path / "run", protocol())
    score_run(Run.open(run_dir))
    whole = (run_dir / "scores.json").read_bytes()
    for path in (run_dir / "scores").iterdir():
        path.unlink()
    (run_dir / "scores.json").unlink()
    seen: list[int] = []

    def kill(_: str, done: int, __: int) -> None:
        seen.append(done)
        if len(seen) == 8:
            raise Killed

    with pytest.raises(Killed):
        score_run(Run.open(run_dir), progress=kill)
    (parts,) = (run_dir / "scores").glob("*.parts")
    (parts / ".chunk-00001.npz.123.part").write_bytes(b"half")  # as SIGKILL leaves it, which no `finally` follows
    before = len(made)
    score_run(Run.open(run_dir))
    assert 0 < int(made[before].network.calls) < 4 * CLASSES  # type: ignore[arg-type]
    assert (run_dir / "scores.json").read_bytes() == whole
    assert not list((run_dir / "scores").rglob("*.part*"))


def test_features_are_computed_once_per_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counting(monkeypatch)
    run_dir = write_run(tmp_path / "run", protocol())
    build_references(protocol())
    told: list[list[tuple[str, int, int]]] = [[], []]
    for calls in told:
        score_run(Run.open(run_dir), progress=lambda *call, calls=calls: calls.append(call))  # type: ignore[misc]
    compared = [(f"{cell.name}, PSNR and SSIM", CLASSES, CLASSES) for cell in SCORED[1:]]
    assert [call for call in told[0] if "PSNR" in call[0] and call[1] == call[2]] == compared
    assert not told[1], "nothing is looked at twice"
    assert [int(extractor.network.calls) for extractor in made[1:]] == [4 * CLASSES, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", [np.nan, -np.inf, 2.0])
def test_kept_changes_that_cannot_be_are_computed_again(run_dir: Path, odd: float) -> None:
    build_references(protocol())
    score_run(Run.open(run_dir))
    scores = (run_dir / "scores.json").read_bytes()
    (kept,) = (run_dir / "scores").glob("tome-pairs-*.npy")
    changes = np.load(kept)
    changes[3, 1] = odd
    np.save(kept, changes)
    score_run(Run.open(run_dir))
    assert (run_dir / "scores.json").read_bytes() == scores


def test_what_scores_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extractor and the reference, neither of which the run's own folder shows."""
    made = counting(monkeypatch)

    def inputs(specification: Protocol) -> dict[str, str]:
        return score.score_inputs(specification, score.load_extractors(specification))

    pixels = np.zeros((8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(~pixels).save(tmp_path / "b.png")
    specification = protocol(reference=Reference(str(tmp_path), count=2))
    before = inputs(specification)
    assert inputs(specification) == before
    assert before == {"FD-regions": build_references(specification)[0].identity}
    Image.fromarray(pixels[:4]).save(tmp_path / "b.png")
    replaced = inputs(specification)
    assert replaced != before
    load = score.load_extractor

    def retrained(spec: str, **options: Any) -> Extractor:
        extractor = load(spec, **options)
        extractor.preprocessing["sha256"] = "of other weights"
        return extractor

    monkeypatch.setattr(score, "load_extractor", retrained)
    assert inputs(specification) not in (before, replaced)
    assert [int(extractor.network.calls) for extractor in made].count(0) == len(made) - 1  # type: ignore[arg-type]
    np.savez(tmp_path / "other.npz", mu=np.zeros(12), sigma=np.eye(12))
    moments = protocol(reference=Reference(str(tmp_path / "other.npz")))
    assert inputs(moments) == {"FD-regions": build_references(moments)[0].identity}


def pictures(seed: int, *shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 255).round().double()


@pytest.mark.parametrize("shape", [(3, 3, 24, 40), (1, 3, 6, 7), (2, 1, 33, 16)], ids=str)
@pytest.mark.parametrize("noise", [1.0, 255.0])
def test_values_are_those_of_torchmetrics(shape: tuple[int, ...], noise: float) -> None:
    first = pictures(0, *shape)
    first[..., : shape[-1] // 2] = 200  # flat in one half
    second = (first + noise / 255 * pictures(1, *shape)).clamp(max=255).round()
    expected = structural_similarity_index_measure(first, second, data_range=255.0, reduction="none")
    ours = structural_similarity(first, second, data_range=255.0)
    assert ours.shape == shape[:1]
    torch.testing.assert_close(ours, torch.as_tensor(expected).reshape(-1), rtol=0, atol=1e-10)


def test_equal_flat_pictures_are_alike() -> None:
    for level in (0.0, 17.0, 255.0):
        flat = torch.full((1, 3, 16, 16), level, dtype=torch.float64)
        torch.testing.assert_close(structural_similarity(flat, flat, 255.0), torch.ones(1, dtype=torch.float64))


RUNS = 60


def test_the_benchmark_of_scoring_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--counts", "40", "90", "--features", "8", "--reference", "120"]
    monkeypatch.setattr(sys, "argv", ["scoring.py", *words])
    scoring.main()
    told = capsys.readouterr().out
    assert "40 images of 8 features" in told
    assert "90 images of 8 features" in told


@pytest.mark.parametrize(
    "setting",
    [
        coverage.Setting("normal", 0.5, 0.99, 0.5, 0.97),
        coverage.Setting("normal", 1, 0.9, 0.0, 0.97),
        coverage.Setting("features", 2, 0.99, 0.0, 1.0),
        coverage.Setting("images", 2, 0.0, 0.0, 1.0),
        coverage.Setting("images", 4, 0.9, 0.5, 0.97),
    ],
    ids=str,
)
def test_intervals_of_frechet_distances_cover(setting: coverage.Setting) -> None:
    """Of 60 intervals of 95 %, 57 cover on average, with a standard deviation of 1.7."""
    rates = coverage.covered(setting, RUNS)
    assert min(rates.distance, rates.difference) >= 52 / RUNS
    assert rates.wrong <= 6 / RUNS


@pytest.mark.parametrize("blocks", [1, 10])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_intervals_of_kernel_distances_cover(blocks: int, correlation: float) -> None:
    """Where images are compared with a tenth of them, too; centred features would not show what goes wrong there."""
    rates = coverage.covered_kernel(coverage.KernelSetting(blocks, correlation, 0.1), RUNS, count=300)
    assert min(rates.distance, rates.difference) >= 52 / RUNS
    assert rates.wrong <= 8 / RUNS


def test_the_page_of_coverage_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "coverage.md"
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--runs", "2", "--every", "120", "--out", str(page)])
    coverage.main()
    text = page.read_text()
    assert "| normal | 0.25 | 0 | 0 | 1 |" in text
    assert "| 1 | 0 | 0.1 |" in text
    assert "| 5 | 0.05 |" in text


def test_few_classes_miss_rare_damage() -> None:
    """Of which the accuracy's own interval knows; without the rule on few classes, the worse method would be better."""
    few, enough = (coverage.covered_few(coverage.FewSetting(count, 0.1), RUNS) for count in (5, 100))
    assert min(few.accuracy, enough.accuracy) >= 52 / RUNS
    assert few.accuracy_difference < 40 / RUNS < 52 / RUNS <= enough.accuracy_difference
    assert few.better_as_published > 10 / RUNS > enough.better_as_published
