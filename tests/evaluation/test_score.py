"""Scores of a run whose images are renders, so that what changed is known; `test_results.py` has the figures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.checks import stopped_at
from support.runs import CLASSES, SCORED, protocol, regions, row_of, write_run
from torchmetrics.functional.image import structural_similarity_index_measure

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction, score
from elfatt_sd.evaluation.extraction import Images
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.protocols import ReferenceChoice
from elfatt_sd.evaluation.run import RunFolder
from elfatt_sd.evaluation.score import Scorer, build_references, pair_changes, score_run, structural_similarity
from elfatt_sd.evaluation.statistics import moments
from elfatt_sd.measure import student_quantile


@pytest.fixture
def made(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Extractor]:
    """Extractors that are quick and count their pictures, in the order in which they are loaded."""
    made: list[Extractor] = []
    monkeypatch.setattr(score, "load_extractor", lambda spec, **_: made.append(regions()) or made[-1])
    return made


@pytest.fixture
def run_dir(tmp_path: Path, made: list[Extractor]) -> Path:
    return write_run(tmp_path / "run", protocol())


def test_changes_of_pairs(run_dir: Path) -> None:
    row, baseline = (Images.of_row(row_of(run_dir, SCORED[place])) for place in (2, 0))
    ours, theirs = (np.array(Image.open(each.paths[2])).astype(float) for each in (row, baseline))
    scorer = Scorer(protocol(), (), ())
    changes = scorer.values(pair_changes(torch.device("cpu")), row, baseline)
    assert changes[2, 0] == pytest.approx(10 * np.log10(255**2 / ((ours - theirs) ** 2).mean()), rel=1e-5)
    assert changes[7, 0] == pytest.approx(10 * np.log10(255**2 * ours.size), rel=1e-5), "a single value, yet a change"
    assert torch.equal(scorer.values(pair_changes(torch.device("meta")), row, baseline), changes)
    known, twin, untouched = (scorer.measure(each) for each in (row, dataclasses.replace(row, name="twin"), baseline))
    found = scorer.score(known, untouched)["paired"]
    assert found["classes"] == list(row.classes)
    for measure, values, most in (("psnr", changes[[2, 5, 7], 0], math.inf), ("ssim", changes[:, 1], 1.0)):
        half = student_quantile(0.975, len(values) - 1) * values.std().item() / len(values) ** 0.5
        middle, summary = values.mean().item(), found[measure]
        assert (summary["mean"], summary["lowest"]) == (pytest.approx(middle), min(values.tolist()))
        assert summary["interval"] == pytest.approx([max(middle - half, 0), min(middle + half, most)])
        assert list(filter(None, summary["pictures"])) == pytest.approx(values.tolist(), abs=1e-6)
    same = scorer.score(twin, known)
    nothing = dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest"))
    assert same["paired"]["psnr"] == {**nothing, "unit": "dB", "identical": CLASSES, "pictures": [None] * CLASSES}
    assert (same["paired"]["ssim"]["mean"], same["most_changed"]) == (pytest.approx(1, abs=1e-9), [])


def test_altered_pictures_are_named_unfinished_rows_left_out_and_the_baseline_needed(run_dir: Path) -> None:
    """Of a run from before a field was added, the identity stays, though its protocol now gives another."""
    run = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**run, "identity": "of an earlier version"}))
    row = row_of(run_dir, SCORED[2])
    victim, lines = row.image_file(7), row.manifest.read_bytes().splitlines(keepends=True)
    damages: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: Image.new("RGB", (256, 256), "red").save(victim), r"tome/images/00007\.png was altered"),
        (victim.unlink, r"tome/images/00007\.png cannot be read \(No such file"),
        (lambda: os.mkfifo(victim), r"00007\.png cannot be read \(it is not a plain file\); put that right"),
        (lambda: row.manifest.write_bytes(b"".join(lines[:3])), r"lists 3 images; accepted: 32; delete the file"),
    )
    for damage, said in damages:
        damage()
        with pytest.raises(ElfattError, match=said):
            score_run(RunFolder.open(run_dir))
    assert not (run_dir / "scores.json").exists()
    row.manifest.unlink()
    score_run(RunFolder.open(run_dir))
    scores = json.loads((run_dir / "scores.json").read_text())
    assert (list(scores["rows"]), scores["identity"]) == (["sd", "null", "dark"], "of an earlier version")
    assert scores["rows"]["dark"]["accuracy"] is None, "which only the toy's extractor reads"
    row_of(run_dir, SCORED[0]).manifest.unlink()
    with pytest.raises(ElfattError, match="baseline, has no images"):
        score_run(RunFolder.open(run_dir))


def test_a_reference_of_moments_gives_no_kernel_distance(tmp_path: Path, made: list[Extractor]) -> None:
    mean, covariance = moments(torch.rand(30, 12, generator=torch.Generator().manual_seed(0)))
    np.savez(tmp_path / "other.npz", mu=mean, sigma=covariance)
    run_dir = write_run(tmp_path / "run", protocol(reference=ReferenceChoice(str(tmp_path / "other.npz"))))
    score_run(RunFolder.open(run_dir))
    rows = json.loads((run_dir / "scores.json").read_text())["rows"]
    assert list(rows["sd"]["distances"]) == ["FD-regions (statistics of other.npz)"]
    with pytest.raises(ElfattError, match=r"\['clip:a', 'clip:b'\] give FD-regions twice; give one of each kind"):
        score.load_extractors(protocol(extractors=("clip:a", "clip:b")))


def test_a_killed_scoring_goes_on_alike(run_dir: Path, made: list[Extractor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 16)
    monkeypatch.setattr(extraction, "BATCH", 8)
    build_references(protocol())
    score_run(RunFolder.open(run_dir))
    whole, decoded = (run_dir / "scores.json").read_bytes(), itertools.count()
    score_run(RunFolder.open(run_dir))
    assert [int(each.network.calls) for each in made[1:]] == [4 * CLASSES, 0]  # type: ignore[arg-type]
    shutil.rmtree(run_dir / "scores")
    (run_dir / "scores.json").unlink()
    with stopped_at(extraction, "decode", lambda *_: next(decoded) == 2 * CLASSES):
        score_run(RunFolder.open(run_dir))
    for chunk in (run_dir / "scores").glob("sd-*/chunk-00001.npz"):
        chunk.write_bytes(b"half")
    score_run(RunFolder.open(run_dir))
    assert 0 < int(made[-1].network.calls) < 4 * CLASSES  # type: ignore[arg-type]
    assert (run_dir / "scores.json").read_bytes() == whole


def test_what_scores_depend_on(made: list[Extractor]) -> None:
    """The extractor and the reference, neither of which the run's own folder shows; nothing is computed for it."""
    specification = protocol()
    (extractor,) = score.load_extractors(specification)
    before = score.score_inputs(specification, [extractor])
    assert extractor.network.calls == 0
    assert before == {"FD-regions": build_references(specification)[0].identity}
    assert score.score_inputs(protocol(reference=ReferenceChoice("toy", count=65)), [extractor]) != before
    extractor.preprocessing["sha256"] = "of other weights"
    assert score.score_inputs(specification, [extractor]) != before


@pytest.mark.parametrize("shape", [(3, 3, 24, 40), (1, 3, 6, 7), (2, 1, 33, 16)], ids=str)
def test_structural_similarity_is_that_of_torchmetrics(shape: tuple[int, ...]) -> None:
    chance = torch.Generator().manual_seed(0)
    first, other = ((torch.rand(shape, generator=chance) * 255).round().double() for _ in range(2))
    first[..., : shape[-1] // 2] = 200  # flat in one half
    for noise in (1.0, 255.0):
        second = (first + noise / 255 * other).clamp(max=255).round()
        expected = structural_similarity_index_measure(first, second, data_range=255.0, reduction="none")
        ours = structural_similarity(first, second, data_range=255.0)
        assert ours.shape == shape[:1]
        torch.testing.assert_close(ours, torch.as_tensor(expected).reshape(-1), rtol=0, atol=1e-10)
    for level in (0.0, 17.0, 255.0):
        flat = torch.full(shape, level, dtype=torch.float64)
        torch.testing.assert_close(structural_similarity(flat, flat, 255.0), torch.ones(shape[0], dtype=torch.float64))
