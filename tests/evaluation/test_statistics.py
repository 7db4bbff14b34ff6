"""Moments, files of features, intervals and kernel distances, on data whose answer is known."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import normal
from torchmetrics.image.kid import poly_mmd

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import statistics
from elfatt_sd.evaluation.extraction import _read_chunk
from elfatt_sd.evaluation.statistics import (
    BETTER,
    FEWEST_CLASSES,
    NO_DIFFERENCE,
    TOO_FEW,
    WORSE,
    Estimate,
    FeatureStatistics,
    even_classes,
    is_finite,
    kernel_distance,
    load_moments,
    read_array,
    share_interval,
    student_quantile,
    verdict,
    wilson_interval,
)


def test_streamed_statistics_are_mean_and_unbiased_covariance() -> None:
    features = (1000 + normal(2000, 5, 1)).float()  # an offset that a sum of squares would lose digits to
    streamed = FeatureStatistics(5)
    for start in range(0, 2000, 7):
        streamed.update(features[start : start + 7])
    assert streamed.count == 2000
    for found in (streamed, FeatureStatistics.of(features)):
        torch.testing.assert_close(found.mean, features.double().mean(0), rtol=1e-13, atol=0)
        torch.testing.assert_close(found.covariance, torch.cov(features.double().T), rtol=1e-9, atol=1e-9)


def test_statistics_survive_the_disk(tmp_path: Path) -> None:
    before = FeatureStatistics.of(normal(20, 4, 3))
    before.save(tmp_path / "a.npz")
    after = FeatureStatistics.load(tmp_path / "a.npz")
    assert after.count == 20
    assert torch.equal(after.mean, before.mean)
    torch.testing.assert_close(after.covariance, before.covariance, rtol=1e-15, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_moments_of_other_tools(tmp_path: Path) -> None:
    """Some without a count; `test_reference.py` has what is refused of those that could be read."""
    np.savez(tmp_path / "other.npz", mu=np.zeros(3, np.float32), sigma=np.eye(3))
    mean, covariance, count = load_moments(tmp_path / "other.npz")
    assert (mean.dtype, covariance.shape, count) == (torch.float64, (3, 3), None)
    np.savez(tmp_path / "bad.npz", mu=np.zeros(3), sigma=np.eye(4))
    (tmp_path / "text.npz").write_text("no archive")
    for name, reason in (("bad", r"\(4, 4\)"), ("text", "is not an archive of arrays"), ("missing", "cannot be read")):
        with pytest.raises(ElfattError, match=reason):
            load_moments(tmp_path / f"{name}.npz")


@pytest.mark.parametrize(
    "header",
    ["(" * 5000, "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4294967296)}", "7"],
)
def test_a_header_that_lies_is_a_damaged_file(tmp_path: Path, header: str) -> None:
    """Of moments it is told; chunks and features are made again."""
    array, archive = tmp_path / "a.npy", tmp_path / "a.npz"
    array.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + b"\0" * 64)
    with zipfile.ZipFile(archive, "w") as file:
        for member in ("mu", "sigma", "count", "features", "unreadable"):
            file.writestr(f"{member}.npy", array.read_bytes())
    assert read_array(array, 4) is None
    assert _read_chunk(archive) is None
    with pytest.raises(ElfattError, match=r"a\.npz cannot be read"):
        load_moments(archive)


def test_features_that_no_distance_can_take_are_made_again(tmp_path: Path) -> None:
    """In another order, their sums would round otherwise, and a run that goes on give other figures."""
    rows = normal(3, 4, 0).float().numpy()
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "columns.npy", np.asfortranarray(rows))
    assert read_array(tmp_path / "rows.npy", 4) is not None
    assert read_array(tmp_path / "columns.npy", 4) is None
    assert is_finite(rows)
    for odd in (np.nan, np.inf, -np.inf, 1e30):
        rows[2, 1] = odd
        assert not is_finite(rows)


def test_standard_error_of_a_mean_over_classes() -> None:
    values = torch.tensor([1.0, 3.0, 2.0, 6.0, 4.0, 8.0])
    classes = [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([2.0, 4.0, 6.0]).std().item() / 3**0.5
    found = Estimate.mean(values, classes)
    assert found.value == 4
    assert found.standard_error() == pytest.approx(expected)
    low, high = found.interval() or (0, 0)
    assert (high - low) / 2 == pytest.approx(4.302653 * expected, rel=1e-6)
    assert found.interval(least=3.5) == (3.5, high)
    assert Estimate.mean(values, [0] * 6).interval() is None


def test_the_larger_jackknife_counts() -> None:
    """Each kind of the difference is that of the two figures."""
    one = Estimate.jackknife(1.0, torch.tensor([0.9, 1.0, 1.1]), torch.tensor([0.01, 0.0, -0.01]))
    assert one.standard_error() == pytest.approx((2 / 3 * 0.02) ** 0.5)
    other = Estimate.jackknife(1.0, torch.tensor([0.9, 1.0, 1.1]), torch.tensor([0.3, 0.0, -0.3]))
    assert other.standard_error() == pytest.approx((0.18 * 3 / 2) ** 0.5)
    assert (one - one).standard_error() == 0
    assert (other - one).standard_error() == pytest.approx(0.29 * 3**0.5)


def test_verdicts() -> None:
    enough = FEWEST_CLASSES
    assert verdict((-2.0, -1.0), enough) == BETTER
    assert verdict((1.0, 2.0), enough) == WORSE
    assert verdict((-1.0, 1.0), enough) == verdict(None, enough) == NO_DIFFERENCE
    assert verdict((0.1, 0.2), enough, lower_is_better=False) == BETTER
    assert verdict((-0.2, -0.1), enough, lower_is_better=False) == WORSE
    for interval in ((-2.0, -1.0), (1.0, 2.0), (-1.0, 1.0), None):
        assert verdict(interval, enough - 1) == TOO_FEW


def test_classes_of_different_sizes_count_as_fewer() -> None:
    """One class of half the images decides what the others say."""
    assert even_classes([1, 1, 2, 2, 3, 3]) == 3
    assert even_classes(torch.arange(64)) == 64
    assert even_classes([0] * 33 + list(range(1, 32))) == 4
    assert even_classes([5] * 9) == 1


def test_quantiles_of_student_against_tables() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 10: 2.2281, 30: 2.0423, 999: 1.9623}
    for freedom, expected in table.items():
        assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=5e-3)


def test_few_classes_that_make_the_error_are_few_degrees_of_freedom() -> None:
    """Where tails are heavy; equal moves are as many as there are classes."""
    for moves, freedom in (([1.0, -1.0] + [0.0] * 8, 2), ([3.0] + [0.0] * 9, 1), ([1.0, -1.0] * 5, 9)):
        figure = Estimate(0.0, torch.tensor([moves]).double())
        error = figure.standard_error() or 0.0
        for heavy, expected in ((True, freedom), (False, 9)):
            _, high = figure.interval(heavy=heavy) or (0.0, 0.0)
            assert high == pytest.approx(student_quantile(0.975, expected) * error)
    still = Estimate(1.0, torch.zeros(1, 5).double())
    assert still.interval(heavy=True) == (1.0, 1.0)


def test_wilson_interval_against_published_values() -> None:
    low, high = wilson_interval(81, 263)  # Newcombe 1998, table I
    assert (low, high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))
    assert wilson_interval(20, 20)[1] == 1.0
    assert wilson_interval(0, 20)[0] == 0.0
    assert wilson_interval(20, 20)[0] == pytest.approx(0.8389, abs=1e-4)


def test_interval_of_a_share() -> None:
    shares = torch.tensor([1.0] * 81 + [0.0] * 182)
    assert share_interval(shares, range(263)) == pytest.approx(wilson_interval(81, 263), abs=2e-3)
    twice = share_interval(shares.repeat_interleave(2), torch.arange(526) // 2)
    assert twice == pytest.approx(wilson_interval(81, 263), abs=2e-3), "a second picture that tells nothing new"
    assert share_interval(torch.full((2,), 0.75), [0, 1], 4) == pytest.approx(wilson_interval(1.5, 2, 12.7062))
    assert share_interval(torch.ones(20), range(20), 4) == pytest.approx(wilson_interval(20, 20, 2.0930), abs=1e-4)
    almost = torch.tensor([0.75] * 39 + [1.0])
    expected = wilson_interval(almost.mean().item() * 160, 160, 2.0227)
    assert share_interval(almost, range(40), 4) == pytest.approx(expected, abs=1e-4)
    # hundreds of pictures of six classes, all right: that the next class is, too, six trials say
    low, _ = share_interval(torch.ones(600), torch.arange(600) // 100) or (0, 0)
    assert 1 - low == pytest.approx(2.5706**2 / (6 + 2.5706**2), abs=1e-3)
    assert share_interval(torch.tensor([1.0, 0.0] * 50), [0] * 100) is None


def test_interval_of_a_share_covers() -> None:
    """Means of four independent judgements each; of 300 intervals of 95 %, 285 contain the truth on average."""
    generator = torch.Generator().manual_seed(31)
    covered = 0
    for _ in range(300):
        shares = (torch.rand(40, 4, generator=generator) < 0.93).double().mean(1)
        interval = share_interval(shares, range(40), 4)
        assert interval is not None
        covered += interval[0] <= 0.93 <= interval[1]
    assert covered >= 274


def test_of_few_classes_only_the_interval_of_a_share_holds_where_damage_is_rare() -> None:
    """One image a class; a method spoils one in ten. So reports show no other interval of fewer than 30 classes."""
    generator = torch.Generator().manual_seed(1)
    for count, shown in ((5, 0.418), (10, 0.645), (20, 0.870), (FEWEST_CLASSES, 0.952)):
        held = {"share": 0, "difference": 0, "psnr": 0}
        for _ in range(500):
            good = (torch.rand(count, generator=generator) >= 0.1).double()
            psnr = 20 + 20 * good + 3 * torch.randn(count, generator=generator)
            damage = Estimate.mean(good, range(count)) - Estimate.mean(torch.ones(count), range(count))
            found = {
                "share": (share_interval(good, range(count)), 0.9),
                "difference": (damage.interval(), -0.1),
                "psnr": (Estimate.mean(psnr, range(count)).interval(), 38),
            }
            for name, (ends, truth) in found.items():
                held[name] += ends is not None and ends[0] <= truth <= ends[1]
        assert held["share"] > 0.94 * 500
        assert abs(held["difference"] / 500 - shown) < 0.07
        assert count == FEWEST_CLASSES or held["psnr"] < 0.92 * 500


def test_kernel_distance_against_torchmetrics_and_the_definition() -> None:
    one, two = normal(30, 6, 21), 0.2 + normal(25, 6, 22)
    kernel = (one @ two.T / 6 + 1) ** 3
    own, other = ((side @ side.T / 6 + 1) ** 3 for side in (one, two))
    within = [(matrix.sum() - matrix.trace()) / (len(matrix) * (len(matrix) - 1)) for matrix in (own, other)]
    found = kernel_distance(one, two, range(30))
    assert found.value == pytest.approx((within[0] + within[1] - 2 * kernel.mean()).item(), rel=1e-12)
    assert kernel_distance(one[:25], two, range(25)).value == pytest.approx(poly_mmd(one[:25], two).item(), rel=1e-9)


def test_kernel_distance_is_unbiased_and_its_interval_covers() -> None:
    reference = normal(400, 5, 23)
    found = [kernel_distance(normal(60, 5, 100 + seed), reference, range(60)) for seed in range(150)]
    values = torch.tensor([estimate.value for estimate in found])
    assert abs(values.mean()) < 4 * values.std() / 150**0.5 + 0.01  # the reference's own noise remains
    covered = sum(low <= values.mean() <= high for low, high in (each.interval() for each in found))  # type: ignore[misc]
    assert covered >= 128


def test_many_images_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is the mean of those of the blocks; every image moves it as far as it moves its own block."""
    images, reference = normal(300, 5, 24), 0.5 + normal(280, 5, 25)
    whole = kernel_distance(images, reference, range(300))
    monkeypatch.setattr(statistics, "KERNEL_SAMPLE", 100)
    parts = [kernel_distance(images[start::3], reference, range(100)) for start in range(3)]
    found = kernel_distance(images, reference, range(300))
    assert found.value == pytest.approx(sum(part.value for part in parts) / 3)
    assert found.value == pytest.approx(whole.value, rel=0.05)
    error = whole.standard_error()
    assert error is not None
    assert found.standard_error() == pytest.approx(error, rel=0.1)


def test_pieces_of_the_kernel_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images, reference = normal(70, 5, 26), normal(50, 5, 27)
    whole = kernel_distance(images, reference, range(70))
    monkeypatch.setattr(statistics, "ROWS", 16)
    pieces = kernel_distance(images, reference, range(70))
    assert pieces.value == pytest.approx(whole.value, rel=1e-12)
    torch.testing.assert_close(pieces.moves, whole.moves, rtol=1e-10, atol=1e-14)


def test_one_image_has_no_figure() -> None:
    with pytest.raises(ElfattError, match="at least 2"):
        kernel_distance(normal(1, 5, 28), normal(20, 5, 29), [0])
    with pytest.raises(ElfattError, match="at least 2"):
        _ = FeatureStatistics.of(normal(1, 3, 0)).covariance
