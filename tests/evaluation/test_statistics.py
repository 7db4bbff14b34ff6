"""Distances and intervals on data whose answer is known."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import poly_mmd

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation import statistics
from elfatt_sd.evaluation.score import torchmetrics_distance
from elfatt_sd.evaluation.statistics import (
    BETTER,
    FEWEST_CLASSES,
    NO_DIFFERENCE,
    TOO_FEW,
    WORSE,
    Estimate,
    FeatureStatistics,
    frechet_distance,
    frechet_estimate,
    kernel_distance,
    load_moments,
    share_interval,
    student_quantile,
    verdict,
    wilson_interval,
)


def normal(count: int, dimension: int, seed: int) -> Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(dimension: int) -> Tensor:
    """Standard deviations that fall off, as those of real features do."""
    return torch.arange(1, dimension + 1, dtype=torch.float64) ** -0.5


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    found = FeatureStatistics.of(features)
    return found.mean, found.covariance


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


def test_distance_of_gaussians_with_a_known_answer() -> None:
    mean1, mean2 = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.0, 0.0, 2.0])
    deviation1, deviation2 = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 2.0, 1.0])
    # commuting covariances: the sum of squared differences of means and of standard deviations
    turn = torch.linalg.qr(normal(3, 3, 4)).Q
    one, two = (turn @ torch.diag(deviation.double() ** 2) @ turn.T for deviation in (deviation1, deviation2))
    assert frechet_distance(mean1, one, mean2, two) == pytest.approx(9 + 9 + 0 + 4, rel=1e-12)


def test_distance_to_itself_is_zero() -> None:
    for count, dimension in ((300, 40), (30, 100)):
        features = 5 + normal(count, dimension, 5)
        mean, covariance = moments(features)
        assert abs(frechet_distance(mean, covariance, mean, covariance)) < 1e-9 * covariance.trace()
        assert abs(frechet_estimate(features, mean, covariance).value) < 1e-9 * covariance.trace()


def high_precision_distance(features: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """The definition, tr (S1 S2)^(1/2) from the eigenvalues of the product, with 60 digits."""
    with mpmath.workdps(60):
        rows = mpmath.matrix(features.tolist())
        count, dimension = rows.rows, rows.cols
        centre = [mpmath.fsum(rows[i, j] for i in range(count)) / count for j in range(dimension)]
        centred = mpmath.matrix(count, dimension)
        for i in range(count):
            for j in range(dimension):
                centred[i, j] = rows[i, j] - centre[j]
        own = centred.T * centred / (count - 1)
        values, _ = mpmath.eig(own * mpmath.matrix(covariance.tolist()))
        roots = mpmath.fsum(mpmath.re(mpmath.sqrt(value)) for value in values)
        traces = mpmath.fsum(own[j, j] + mpmath.mpf(covariance[j, j].item()) for j in range(dimension))
        shift = mpmath.fsum((centre[j] - mpmath.mpf(mean[j].item())) ** 2 for j in range(dimension))
        return float(shift + traces - 2 * roots)


@pytest.mark.parametrize(("count", "dimension"), [(6, 14), (20, 8)])
def test_distance_against_a_high_precision_reference(count: int, dimension: int) -> None:
    features = normal(count, dimension, 6) * spread(dimension)
    mean, covariance = moments(0.3 + normal(100, dimension, 7) @ normal(dimension, dimension, 8) / 3)
    expected = high_precision_distance(features, mean, covariance)
    assert frechet_estimate(features, mean, covariance).value == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(*moments(features), mean, covariance) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("count", "dimension"), [(60, 24), (20, 48), (48, 48)])
def test_agreement_with_torchmetrics(count: int, dimension: int) -> None:
    class Flat(torch.nn.Module):
        num_features = dimension

        def forward(self, images: Tensor) -> Tensor:
            return images.double() / 255

    pictures = [torch.randint(0, 256, (n, dimension), generator=torch.Generator().manual_seed(n)) for n in (200, count)]
    metric = FrechetInceptionDistance(feature=Flat()).set_dtype(torch.float64)
    metric.update(pictures[0], real=True)
    metric.update(pictures[1], real=False)
    mean, covariance = moments(pictures[0] / 255)
    features = pictures[1].double() / 255
    expected = metric.compute().item()
    # torchmetrics works with a defective product where there are fewer pictures than features
    assert frechet_estimate(features, mean, covariance).value == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert frechet_distance(*moments(features), mean, covariance) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_both_forms_of_the_estimate_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    features = normal(40, 30, 9) * spread(30)
    mean, covariance = moments(normal(200, 30, 10) * spread(30))
    by_features = frechet_estimate(features, mean, covariance)
    monkeypatch.setattr(statistics, "_root_by_features", statistics._root_by_pictures)
    by_pictures = frechet_estimate(features, mean, covariance)
    assert by_pictures.value == pytest.approx(by_features.value, rel=1e-12)
    torch.testing.assert_close(by_pictures.influence, by_features.influence, rtol=1e-8, atol=1e-10)


def test_memory_mapped_features_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = normal(50, 6, 11).float()
    np.save(tmp_path / "features.npy", features.numpy())
    mean, covariance = moments(normal(100, 6, 12))
    whole = frechet_estimate(features, mean, covariance)
    kernel = kernel_distance(features, normal(30, 6, 13))
    monkeypatch.setattr(statistics, "ROWS", 16)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    pieces = frechet_estimate(mapped, mean, covariance)
    assert pieces.value == pytest.approx(whole.value, rel=1e-12)
    torch.testing.assert_close(pieces.influence, whole.influence, rtol=1e-9, atol=1e-12)
    assert kernel_distance(mapped, normal(30, 6, 13)).value == pytest.approx(kernel.value, rel=1e-12)


def weighted_distance(features: Tensor, weights: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """Frechet distance when picture i counts weights[i] times (n - 1 scales with the total weight)."""
    total = weights.sum()
    count = len(features)
    centre = (weights[:, None] * features).sum(0) / total
    centred = features - centre
    own = centred.T @ (weights[:, None] * centred) / total * (count / (count - 1))
    return frechet_distance(centre, own, mean, covariance)


@pytest.mark.parametrize(("count", "dimension"), [(12, 30), (40, 10)])
def test_influence_is_the_derivative(count: int, dimension: int) -> None:
    features = normal(count, dimension, 14) * spread(dimension)
    mean, covariance = moments(0.2 + normal(300, dimension, 15) * spread(dimension))
    found = frechet_estimate(features, mean, covariance)
    assert abs(found.influence.sum()) < 1e-9
    step = 1e-4
    for picture in (0, count // 2, count - 1):
        change = torch.zeros(count, dtype=torch.float64)
        change[picture] = step
        ones = torch.ones(count, dtype=torch.float64)
        up, down = (weighted_distance(features, ones + sign * change, mean, covariance) for sign in (1, -1))
        # influence is per share of the total weight, of which one picture has 1/n
        assert (up - down) / (2 * step) * count == pytest.approx(found.influence[picture].item(), rel=1e-3, abs=1e-4)


def test_standard_error_of_a_mean_over_classes() -> None:
    values = torch.tensor([1.0, 3.0, 2.0, 6.0, 4.0, 8.0])
    classes = [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([2.0, 4.0, 6.0]).std().item() / 3**0.5
    found = Estimate.mean(values)
    assert found.value == 4
    assert found.standard_error(classes) == pytest.approx(expected)
    low, high = found.interval(classes) or (0, 0)
    assert (high - low) / 2 == pytest.approx(4.302653 * expected, rel=1e-6)
    assert found.interval([0] * 6) is None


@pytest.mark.parametrize(
    ("count", "dimension", "null"), [(120, 16, False), (60, 80, False), (60, 80, True)], ids=["n>d", "n<d", "null row"]
)
def test_interval_of_the_paired_difference_covers(count: int, dimension: int, null: bool) -> None:
    """Simulated runs: two pictures a class, a method that alters the baseline's features, or other seeds.

    Of 200 intervals of 95 %, 190 contain the expectation on average, with a standard deviation of 3; more are safe.
    An interval of two thirds of the width would contain 162, an unpaired one all and be far too wide.
    """
    generator = torch.Generator().manual_seed(16)
    scale, classes = spread(dimension), torch.arange(count) // 2
    mean, covariance = torch.full((dimension,), 0.05, dtype=torch.float64), torch.diag(scale**2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    differences, widths, unpaired, intervals = [], [], [], []
    for _ in range(200):
        shared = draw(count // 2, dimension).repeat_interleave(2, 0)
        before = (0.7 * shared + 0.7 * draw(count, dimension)) * scale
        other = (
            0.7 * shared + 0.7 * draw(count, dimension)
            if null
            else before / scale * 1.03 + 0.15 * draw(count, dimension)
        )
        one, two = (frechet_estimate(features, mean, covariance) for features in (other * scale, before))
        interval = (one - two).interval(classes)
        assert interval is not None
        differences.append(one.value - two.value)
        intervals.append(interval)
        widths.append(interval[1] - interval[0])
        unpaired.append(((one.standard_error(classes) or 0) ** 2 + (two.standard_error(classes) or 0) ** 2) ** 0.5 * 4)
    truth = sum(differences) / len(differences)
    covered = sum(low <= truth <= high for low, high in intervals)
    assert covered >= 178
    deviation = torch.tensor(differences).std().item()
    assert sum(widths) / len(widths) < 1.6 * 4 * deviation
    if not null:
        assert sum(widths) < 0.6 * sum(unpaired)


def test_interval_agrees_with_a_bootstrap_over_classes() -> None:
    count, dimension = 240, 12
    before = normal(count, dimension, 17)
    after = before * 1.05 + 0.2 * normal(count, dimension, 18)
    mean, covariance = moments(normal(3000, dimension, 19))
    classes = torch.arange(count) // 2
    error = (frechet_estimate(after, mean, covariance) - frechet_estimate(before, mean, covariance)).standard_error(
        classes
    )
    generator = torch.Generator().manual_seed(20)
    replicates = []
    for _ in range(300):
        chosen = torch.randint(count // 2, (count // 2,), generator=generator)
        rows = torch.stack([2 * chosen, 2 * chosen + 1], 1).flatten()
        one, two = (frechet_distance(*moments(side[rows]), mean, covariance) for side in (after, before))
        replicates.append(one - two)
    assert error == pytest.approx(torch.tensor(replicates).std().item(), rel=0.25)


def test_kernel_distance_against_torchmetrics_and_the_definition() -> None:
    one, two = normal(30, 6, 21), 0.2 + normal(25, 6, 22)
    kernel = (one @ two.T / 6 + 1) ** 3
    own, other = ((side @ side.T / 6 + 1) ** 3 for side in (one, two))
    within = [(matrix.sum() - matrix.trace()) / (len(matrix) * (len(matrix) - 1)) for matrix in (own, other)]
    found = kernel_distance(one, two)
    assert found.value == pytest.approx((within[0] + within[1] - 2 * kernel.mean()).item(), rel=1e-12)
    assert kernel_distance(one[:25], two).value == pytest.approx(poly_mmd(one[:25], two).item(), rel=1e-9)


def test_kernel_distance_is_unbiased_and_its_interval_covers() -> None:
    reference = normal(400, 5, 23)
    found = [kernel_distance(normal(60, 5, 100 + seed), reference) for seed in range(150)]
    values = torch.tensor([estimate.value for estimate in found])
    assert abs(values.mean()) < 4 * values.std() / 150**0.5 + 0.01  # the reference's own noise remains
    classes = range(60)
    covered = sum(low <= values.mean() <= high for low, high in (each.interval(classes) for each in found))  # type: ignore[misc]
    assert covered >= 128


def test_kernel_distance_of_many_pictures_uses_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = normal(300, 5, 24), 0.5 + normal(280, 5, 25)
    whole = kernel_distance(one, two)
    monkeypatch.setattr(statistics, "KERNEL_SAMPLE", 100)
    part = kernel_distance(one, two)
    assert part.value != whole.value
    assert part.value == pytest.approx(whole.value, rel=0.3)
    with pytest.raises(ElfattError, match="at least 2"):
        kernel_distance(one[:1], two)


def test_verdicts() -> None:
    enough = FEWEST_CLASSES
    assert verdict((-2.0, -1.0), enough) == BETTER
    assert verdict((1.0, 2.0), enough) == WORSE
    assert verdict((-1.0, 1.0), enough) == verdict(None, enough) == NO_DIFFERENCE
    assert verdict((0.1, 0.2), enough, lower_is_better=False) == BETTER
    assert verdict((-0.2, -0.1), enough, lower_is_better=False) == WORSE
    for interval in ((-2.0, -1.0), (1.0, 2.0), (-1.0, 1.0), None):
        assert verdict(interval, enough - 1) == TOO_FEW


def test_the_fewest_classes_are_those_that_do_not_miss_rare_damage() -> None:
    """A method that sharpens all pictures a little and breaks one in ten: it is worse, and must not be called better.

    Wrong verdicts of 400 simulated runs, by the number of pictures, one a class.
    """
    generator = torch.Generator().manual_seed(29)
    mean, covariance = torch.zeros(8, dtype=torch.float64), torch.eye(8, dtype=torch.float64)

    def wrong(count: int) -> float:
        differences, better = [], 0
        for _ in range(400):
            before = 1.2 * torch.randn(count, 8, generator=generator, dtype=torch.float64)
            broken = (torch.rand(count, 1, generator=generator) < 0.1).double()
            after = 0.95 * before + 2 * broken
            one, two = (frechet_estimate(features, mean, covariance) for features in (after, before))
            interval = (one - two).interval(range(count))
            assert interval is not None
            differences.append(one.value - two.value)
            better += interval[1] < 0
        assert sum(differences) > 0
        return better / 400

    assert wrong(FEWEST_CLASSES) <= 0.07  # a rate of 5 %, and two standard deviations of chance
    assert wrong(5) > 0.25


def test_quantiles_of_student_against_tables() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 10: 2.2281, 30: 2.0423, 999: 1.9623}
    for freedom, expected in table.items():
        assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=5e-3)


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


def test_interval_of_a_share_knows_how_few_classes_there_are() -> None:
    """Hundreds of pictures of six classes, all right: that the next class is, too, six trials say."""
    classes = torch.arange(600) // 100
    for shares, place in ((torch.ones(600), 0), (torch.zeros(600), 1)):
        interval = share_interval(shares, classes)
        assert interval is not None
        assert abs(interval[place] - shares[0]) == pytest.approx(2.5706**2 / (6 + 2.5706**2), abs=1e-3)
    means = torch.tensor([0.6, 0.7, 0.9], dtype=torch.float64)
    mean, error = means.mean().item(), means.std().item() / 3**0.5
    trials = mean * (1 - mean) / error**2
    found = share_interval(means.repeat_interleave(100), torch.arange(300) // 100)
    assert found == pytest.approx(wilson_interval(mean * trials, trials, 4.3027), abs=1e-4)
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


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@pytest.mark.parametrize("count", [512, 4096])
def test_no_matrix_grows_with_the_number_of_pictures(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number for each picture; apart from that nothing is larger than a piece of the file and its kernel."""
    monkeypatch.setattr(statistics, "ROWS", 64)
    monkeypatch.setattr(statistics, "KERNEL_SAMPLE", 32)
    np.save(tmp_path / "features.npy", normal(count, 16, 28).float().numpy())
    features = np.load(tmp_path / "features.npy", mmap_mode="r")
    reference = normal(32, 16, 29)
    mean, covariance = moments(reference)
    with Largest() as largest:
        frechet_estimate(features, mean, covariance).interval(torch.arange(count) // 2)
        kernel_distance(features, reference)
        torchmetrics_distance(features, FeatureStatistics.from_moments(mean, covariance, 32))
    assert largest.elements <= max(64 * 32, count)


def test_another_extractor_is_refused() -> None:
    mean, covariance = moments(normal(20, 5, 26))
    with pytest.raises(ElfattError, match="4 columns, the reference 5"):
        frechet_estimate(normal(10, 4, 27), mean, covariance)


def test_the_benchmark_of_scoring_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--counts", "40", "90", "--features", "8", "--reference", "120"]
    monkeypatch.setattr(sys, "argv", ["scoring.py", *words])
    runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "scoring.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "40 pictures of 8 features" in told
    assert "90 pictures of 8 features" in told
