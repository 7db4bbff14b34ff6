"""The benchmarks of scoring, at a small size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import coverage, scoring

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
