"""Moments of features, streamed and stored."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import normal

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.extraction import _read_chunk
from elfatt_sd.evaluation.statistics import FeatureStatistics, is_finite, load_moments, read_array


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


def header(text: str) -> bytes:
    """An array's file with a header that says what it likes."""
    content = text.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(content)) + content + b"\0" * 64


def shaped(shape: str, kind: str = "'<f4'") -> str:
    return f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}"


HEADERS = {
    "never closed": "(" * 5000,
    "nested": "-" * 9000 + "1",
    "overflow": shaped("(4294967296, 4294967296, 4294967296)"),
    "beyond an index": shaped(f"({2**70},)"),
    "negative": shaped("(-1, 4)"),
    "code": shaped("(__import__('os'),)"),
    "kind": shaped("(4,)", "5"),
    "text": shaped("'x'"),
    "keys": "{}",
    "no table": "7",
    "nul": "\0" * 40,
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_a_damaged_file(tmp_path: Path, name: str) -> None:
    """Of moments it is told; chunks and features are made again."""
    array, archive = tmp_path / "a.npy", tmp_path / "a.npz"
    array.write_bytes(header(HEADERS[name]))
    with zipfile.ZipFile(archive, "w") as file:
        for member in ("mu", "sigma", "count", "features", "unreadable"):
            file.writestr(f"{member}.npy", array.read_bytes())
    assert read_array(array, 4) is None
    assert _read_chunk(archive) is None
    with pytest.raises(ElfattError, match=r"a\.npz cannot be read"):
        load_moments(archive)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_no_array(tmp_path: Path) -> None:
    """It would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    assert read_array(tmp_path / "pipe", 4) is None
    assert _read_chunk(tmp_path / "pipe") is None
    with pytest.raises(ElfattError, match="cannot be read"):
        load_moments(tmp_path / "pipe")


def test_features_in_another_order_are_made_again(tmp_path: Path) -> None:
    """Their sums would round otherwise, and a run that goes on give other figures."""
    rows = normal(3, 4, 0).float().numpy()
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "columns.npy", np.asfortranarray(rows))
    assert read_array(tmp_path / "rows.npy", 4) is not None
    assert read_array(tmp_path / "columns.npy", 4) is None


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e30])
def test_features_beyond_any_distance_are_not_taken(odd: float) -> None:
    features = np.ones((5, 3), np.float32)
    assert is_finite(features)
    features[4, 1] = odd
    assert not is_finite(features)


@pytest.mark.parametrize("names", ["[" * 100000, "{}", "[1]", "null", "x"])
def test_a_chunk_with_other_names_is_made_again(tmp_path: Path, names: str) -> None:
    content = io.BytesIO()
    np.savez(content, features=np.zeros((2, 3), np.float32), unreadable=np.array(names))
    (tmp_path / "a.npz").write_bytes(content.getvalue())
    assert _read_chunk(tmp_path / "a.npz") is None


@pytest.mark.parametrize(
    ("mean", "says"),
    [
        (np.full(2, 1j), "mu holds complex128"),
        (np.array(["1", "2"]), "mu holds <U1"),
        (np.zeros(2, "datetime64[D]"), "mu holds datetime64"),
        (np.zeros(2, [("a", "f8")]), "mu holds"),
        (np.zeros(2, bool), "mu holds bool"),
        (np.full(2, 1e200), "numbers too large"),
    ],
)
def test_what_is_no_real_number_is_refused(tmp_path: Path, mean: Any, says: str) -> None:
    np.savez(tmp_path / "a.npz", mu=mean, sigma=np.eye(2))
    with pytest.raises(ElfattError, match=says):
        load_moments(tmp_path / "a.npz")
