"""Moments of features, streamed and stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draws import normal

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.statistics import FeatureStatistics, load_moments


def test_statistics_are_mean_and_unbiased_covariance() -> None:
    features = 3 + normal(50, 6, 0)
    found = FeatureStatistics.of(features)
    torch.testing.assert_close(found.mean, features.mean(0))
    torch.testing.assert_close(found.covariance, torch.cov(features.T))


def test_streaming_equals_batch() -> None:
    features = 1000 + normal(101, 5, 1)  # an offset that a sum of squares would lose digits to
    whole = FeatureStatistics.of(features)
    streamed = FeatureStatistics(5)
    for start in range(0, 101, 7):
        streamed.update(features[start : start + 7])
    assert streamed.count == 101
    torch.testing.assert_close(streamed.mean, whole.mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(streamed.covariance, whole.covariance, rtol=1e-9, atol=1e-9)


def test_float32_features_get_float64_statistics() -> None:
    features = (1000 + normal(2000, 3, 2)).float()
    expected = torch.cov(features.double().T)
    torch.testing.assert_close(FeatureStatistics.of(features).covariance, expected, rtol=1e-9, atol=1e-9)


def test_statistics_survive_the_disk(tmp_path: Path) -> None:
    before = FeatureStatistics.of(normal(20, 4, 3))
    before.save(tmp_path / "a.npz")
    after = FeatureStatistics.load(tmp_path / "a.npz")
    assert after.count == 20
    assert torch.equal(after.mean, before.mean)
    torch.testing.assert_close(after.covariance, before.covariance, rtol=1e-15, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_moments_of_other_tools(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", mu=np.zeros(3, np.float32), sigma=np.eye(3))
    mean, covariance, count = load_moments(tmp_path / "other.npz")
    assert (mean.dtype, covariance.shape, count) == (torch.float64, (3, 3), None)
    np.savez(tmp_path / "bad.npz", mu=np.zeros(3), sigma=np.eye(4))
    np.savez(tmp_path / "nan.npz", mu=np.full(3, np.nan), sigma=np.eye(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name, reason in (
        ("bad", r"\(4, 4\)"),
        ("nan", "NaN"),
        ("text", "cannot be read"),
        ("missing", "cannot be read"),
    ):
        with pytest.raises(ElfattError, match=reason):
            load_moments(tmp_path / f"{name}.npz")


def test_one_picture_has_no_covariance() -> None:
    with pytest.raises(ElfattError, match="at least 2"):
        _ = FeatureStatistics.of(normal(1, 3, 0)).covariance
