"""Moments, intervals and distances on data whose answer is known, and how often intervals and verdicts are right."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch
from support.runs import normal, spread
from torch import Tensor
from torchmetrics.image.kid import poly_mmd

from benchmarks import coverage
from benchmarks.coverage import frechet_distance
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import frechet, statistics
from elfatt_sd.evaluation.frechet import Target, frechet_figures
from elfatt_sd.evaluation.statistics import ClassEstimate, kernel_distance, left_out, moments, share_interval, verdict
from elfatt_sd.measure import student_quantile

FIGURES = ("published", "least", "most")
RUNS = 60


def test_moments_in_pieces_are_mean_and_covariance() -> None:
    features = (1000 + normal(2000, 5, 1)).float()  # an offset that a sum of squares would lose digits to
    for pieces in ([features], features.split(7), [features[:0], *features.split(999), features[:0]]):
        mean, covariance = moments(*pieces)
        torch.testing.assert_close(mean, features.double().mean(0), rtol=1e-13, atol=0)
        torch.testing.assert_close(covariance, torch.cov(features.double().T), rtol=1e-9, atol=1e-9)


def test_standard_errors_and_intervals_over_classes() -> None:
    values = torch.tensor([1.0, 3.0, 2.0, 6.0, 4.0, 8.0])
    expected = torch.tensor([2.0, 4.0, 6.0]).std().item() / 3**0.5
    found = ClassEstimate.mean(values, [0, 0, 1, 1, 2, 2])
    assert (found.value, found.standard_error()) == (4, pytest.approx(expected))
    low, high = found.interval() or (0, 0)
    assert (high - low) / 2 == pytest.approx(4.302653 * expected, rel=1e-6)
    assert ClassEstimate.mean(values, [0] * 6).interval() is None
    # of two jackknifes the larger one counts, and each kind of a difference is that of the two figures
    without = left_out(torch.tensor([0.9, 1.0, 1.1]))
    slopes = torch.tensor([[0.01, 0.0, -0.01], [0.3, 0.0, -0.3]])
    one, other = (ClassEstimate(1.0, torch.stack((slope, without))) for slope in slopes)
    assert one.standard_error() == pytest.approx((2 / 3 * 0.02) ** 0.5)
    assert other.standard_error() == pytest.approx((0.18 * 3 / 2) ** 0.5)
    assert (one - one).standard_error() == 0
    assert (other - one).standard_error() == pytest.approx(0.29 * 3**0.5)


def test_quantiles_and_degrees_of_freedom() -> None:
    """Few classes of a heavy tail that make the error are few degrees; equal moves are as many as there are classes."""
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 10: 2.2281, 30: 2.0423, 999: 1.9623}
    for freedom, expected in table.items():
        assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=5e-3)
    for moves, freedom in (([1.0, -1.0] + [0.0] * 8, 2), ([3.0] + [0.0] * 9, 1), ([1.0, -1.0] * 5, 9)):
        figure = ClassEstimate(0.0, torch.tensor([moves]).double())
        for heavy, degrees in ((True, freedom), (False, 9)):
            _, high = figure.interval(heavy=heavy) or (0.0, 0.0)
            assert high == pytest.approx(student_quantile(0.975, degrees) * (figure.standard_error() or 0.0))
    assert ClassEstimate(1.0, torch.zeros(1, 5).double()).interval(heavy=True) == (1.0, 1.0)


def test_verdicts() -> None:
    """Classes of different sizes count as fewer: one of half the images decides what the others say."""
    enough = statistics.FEWEST_CLASSES
    assert verdict((-2.0, -1.0), enough) == verdict((0.1, 0.2), enough, lower_is_better=False) == statistics.BETTER
    assert verdict((1.0, 2.0), enough) == verdict((-0.2, -0.1), enough, lower_is_better=False) == statistics.WORSE
    assert verdict((-1.0, 1.0), enough) == verdict(None, enough) == statistics.NO_DIFFERENCE
    for interval in ((-2.0, -1.0), (1.0, 2.0), (-1.0, 1.0), None):
        assert verdict(interval, enough - 1) == statistics.TOO_FEW
    groups = ([1, 1, 2, 2, 3, 3], torch.arange(64), [0] * 33 + list(range(1, 32)), [5] * 9)
    assert [statistics.even_classes(each) for each in groups] == [3, 64, 4, 1]


def test_interval_of_a_share() -> None:
    published = pytest.approx((0.2553, 0.3662), abs=2e-3)  # Newcombe 1998, table I: 81 of 263
    shares = torch.tensor([1.0] * 81 + [0.0] * 182)
    assert share_interval(shares, range(263)) == published
    twice = share_interval(shares.repeat_interleave(2), torch.arange(526) // 2)
    assert twice == published, "a second picture that tells nothing new"
    assert share_interval(torch.ones(20), range(20), 4) == pytest.approx((20 / (20 + 2.0930**2), 1.0), abs=1e-4)
    assert (share_interval(torch.zeros(20), range(20)) or (1,))[0] == 0
    # at most as many trials as judgements, and hundreds of pictures of six classes, all right, are six
    almost = torch.tensor([0.75] * 39 + [1.0])
    low, high = share_interval(almost, range(40), 4) or (0, 0)
    share, weight = almost.mean().item(), 2.0227**2 / 160
    assert (low + high) / 2 == pytest.approx((share + weight / 2) / (1 + weight), abs=1e-4)
    low, _ = share_interval(torch.ones(600), torch.arange(600) // 100) or (0, 0)
    assert 1 - low == pytest.approx(2.5706**2 / (6 + 2.5706**2), abs=1e-3)
    assert share_interval(torch.tensor([1.0, 0.0] * 50), [0] * 100) is None


def test_kernel_distances_are_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces the same, in blocks the mean over them; CMMD is that of unit features under exp(-|x - y|^2 / 200)."""
    one, two = normal(30, 6, 21), 0.2 + normal(25, 6, 22)

    def by_definition(x: Tensor, y: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> float:
        within = [
            (kernel(each, each).sum() - kernel(each, each).trace()) / len(each) / (len(each) - 1) for each in (x, y)
        ]
        return float(within[0] + within[1] - 2 * kernel(x, y).mean())

    found = kernel_distance(one, two, range(30))
    assert found.value == pytest.approx(by_definition(one, two, lambda x, y: (x @ y.T / 6 + 1) ** 3), rel=1e-12)
    units = (torch.nn.functional.normalize(each, dim=1) for each in (one, two))
    expected = 1000 * by_definition(*units, lambda x, y: torch.exp(-torch.cdist(x, y).square() / 200))
    assert statistics.cmmd(one, two, range(30)).value == pytest.approx(expected, rel=1e-4)
    assert kernel_distance(one[:25], two, range(25)).value == pytest.approx(poly_mmd(one[:25], two).item(), rel=1e-9)
    monkeypatch.setattr(statistics, "ROWS_AT_ONCE", 8)
    pieces = kernel_distance(one, two, range(30))
    assert pieces.value == pytest.approx(found.value, rel=1e-12)
    torch.testing.assert_close(pieces.moves, found.moves, rtol=1e-10, atol=1e-14)
    images, reference = normal(300, 5, 24), 0.5 + normal(280, 5, 25)
    whole = kernel_distance(images, reference, range(300))
    monkeypatch.setattr(statistics, "KERNEL_SAMPLE", 100)
    parts = [kernel_distance(images[start::3], reference, range(100)) for start in range(3)]
    found = kernel_distance(images, reference, range(300))
    assert found.value == pytest.approx(sum(part.value for part in parts) / 3)
    assert found.value == pytest.approx(whole.value, rel=0.05)
    assert found.standard_error() == pytest.approx(whole.standard_error(), rel=0.1)


def published(features: Tensor, mean: Tensor, covariance: Tensor) -> float:
    return frechet_figures(features, Target(mean, covariance), range(len(features))).published.value


def high_precision_distance(features: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """The definition, tr (S1 S2)^(1/2) from the eigenvalues of the product, with 60 digits."""
    with mpmath.workdps(60):
        rows, theirs = mpmath.matrix(features.tolist()), mpmath.matrix(mean[None].tolist())
        count, dimension = rows.rows, rows.cols
        centre = mpmath.matrix([[mpmath.fsum(rows[:, j]) / count for j in range(dimension)]])
        centred = rows - mpmath.ones(count, 1) * centre
        own, known = centred.T * centred / (count - 1), mpmath.matrix(covariance.tolist())
        roots = mpmath.fsum(mpmath.re(mpmath.sqrt(value)) for value in mpmath.eig(own * known)[0])
        traces = mpmath.fsum(own[j, j] + known[j, j] for j in range(dimension))
        return float(mpmath.fsum(x**2 for x in centre - theirs) + traces - 2 * roots)


@pytest.mark.parametrize(("count", "dimension"), [(6, 14), (20, 8)])
def test_distance_against_a_high_precision_reference(count: int, dimension: int) -> None:
    features = normal(count, dimension, 6) * spread(dimension)
    mean, covariance = moments(0.3 + normal(100, dimension, 7) @ normal(dimension, dimension, 8) / 3)
    expected = high_precision_distance(features, mean, covariance)
    assert published(features, mean, covariance) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(*moments(features), mean, covariance) == pytest.approx(expected, rel=1e-7)
    own, variance = moments(features)
    assert abs(frechet_distance(own, variance, own, variance)) < 1e-9 * variance.trace()
    assert abs(published(features, own, variance)) < 1e-9 * variance.trace()


def test_features_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    features, reference = normal(4096, 16, 28).float(), normal(32, 16, 29)
    target, classes = Target(*moments(reference)), torch.arange(4096) // 2
    whole = frechet_figures(features, target, classes)
    for module in (statistics, frechet):
        monkeypatch.setattr(module, "ROWS", 64)
    monkeypatch.setattr(frechet, "ELEMENTS", 2048)
    pieces = frechet_figures(features, target, classes)
    for part in FIGURES:
        torch.testing.assert_close(getattr(pieces, part).moves, getattr(whole, part).moves, rtol=1e-7, atol=1e-10)
        assert getattr(pieces, part).value == pytest.approx(getattr(whole, part).value, rel=1e-9)


@pytest.mark.parametrize(("count", "dimension"), [(24, 40), (80, 20)])
def test_what_moves_a_distance(count: int, dimension: int) -> None:
    """The derivative in a picture's weight, n - 1 scaling with all weights; exactly, the distance without a class."""
    features = normal(count, dimension, 14) * spread(dimension)
    target = Target(*moments(0.2 + normal(300, dimension, 15) * spread(dimension)))
    for size in (1, 3, 8):  # classes of 8 take an eigenproblem each where features are few
        classes = torch.arange(count) // size
        slope, found = frechet_figures(features, target, classes).published.moves
        rest = [features[classes != number] for number in range(len(found))]
        expected = left_out(torch.tensor([published(each, target.mean, target.covariance) for each in rest]).double())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        assert abs(slope.sum()) < 1e-9

        def weighted(number: int, step: float, classes: Tensor = classes) -> float:
            weights = 1 + step * (classes == number).double()
            centre = (weights[:, None] * features).sum(0) / weights.sum()
            centred = features - centre
            own = centred.T @ (weights[:, None] * centred) / weights.sum() * (count / (count - 1))
            return frechet_distance(centre, own, target.mean, target.covariance)

        for number in (0, len(slope) // 2, len(slope) - 1):
            derivative = (weighted(number, 1e-4) - weighted(number, -1e-4)) / 2e-4
            assert derivative == pytest.approx(slope[number].item(), rel=1e-3, abs=1e-5)


def test_intervals_of_light_and_heavy_tails() -> None:
    """Of light ones they are those of two jackknifes, to the last digit, as published; heavy ones still tell."""
    target = Target(*moments(normal(500, 12, 36)))
    one, two = (frechet_figures(normal(90, 12, seed), target, range(90)) for seed in (37, 38))
    assert max(one.kurtosis, two.kurtosis) < 6 and one.least.moves.shape == (2, 90)
    ends = [(getattr(one, end) - getattr(two, end)).interval() or (0, 0) for end in ("least", "most")]
    assert one.limit_difference(two)[1] == (min(low for low, _ in ends), max(high for _, high in ends))
    target = Target(*moments(normal(5000, 16, 34).exp()))
    one, two = (frechet_figures(normal(400, 16, 35).exp() + shift, target, range(400)) for shift in (0.5, 0.0))
    assert max(one.kurtosis, two.kurtosis) > frechet.HEAVY
    assert (one.limit_difference(two)[1] or (0, 0))[0] > 0
    # fewer images than features, and eigenvalues over fourteen orders of magnitude: directions are lost to rounding
    scale = torch.logspace(0, -7, 64, dtype=torch.float64)
    target = Target(*moments(normal(200, 64, 30) * scale))
    one, two = (frechet_figures(normal(32, 64, 31) * scale * size, target, torch.arange(32)) for size in (0.3, 1.0))
    value, interval = one.limit_difference(two)
    assert interval is not None and 0 < interval[0] < value < interval[1] < 3 * value


def test_few_images_one_class_and_images_that_are_all_alike() -> None:
    """A method may draw one image, whatever it is asked for."""
    target = Target(*moments(normal(50, 6, 19)))
    for features, classes in ((normal(20, 6, 20), [0] * 20), (normal(2, 6, 21), [0, 0])):
        found = frechet_figures(features, target, classes)
        assert found.published.interval() is None and found.limit_difference(found) == (0, None)
    with pytest.raises(ElfattError, match="at least 2"):
        moments(normal(1, 3, 0))
    mean, covariance = torch.arange(16).double(), torch.diag(torch.arange(1.0, 17)).double()
    known = (1 - mean).square().sum().item() + covariance.trace().item()
    for count in (5, 40):
        given = (torch.ones(count, 16), normal(count, 16, 0))
        alike, others = (frechet_figures(each, Target(mean, covariance), range(count)) for each in given)
        assert [getattr(alike, name).value for name in FIGURES] == pytest.approx([known] * 3, rel=1e-9)
        value, interval = alike.limit_difference(others)
        assert interval is not None and interval[0] <= value <= interval[1]


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


@pytest.mark.parametrize(
    ("tail", "ratio", "correlation"),
    [("spikes", 3, 0.9), ("one spiky", 1.25, 0.5), ("log-normal", 3, 0.9), ("far images", 3, 0.9)],
)
def test_heavy_tails_make_no_false_verdicts(tail: str, ratio: float, correlation: float) -> None:
    """Nothing differs, and of 120 runs 6 may get a verdict. By the interval of light tails 8 to 62 do."""
    assert coverage.covered(coverage.Setting(tail, ratio, correlation, 0.0, 1.0), 120).wrong <= 6 / 120


@pytest.mark.parametrize("blocks", [1, 10])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_intervals_of_kernel_distances_cover(blocks: int, correlation: float) -> None:
    """Where images are compared with a tenth of them, too; centred features would not show what goes wrong there."""
    rates = coverage.covered_kernel(coverage.KernelSetting(blocks, correlation, 0.1), RUNS, count=300)
    assert min(rates.distance, rates.difference) >= 52 / RUNS
    assert rates.wrong <= 8 / RUNS


def test_few_classes_miss_rare_damage() -> None:
    """Of which the accuracy's own interval knows; without the rule on few classes, the worse method would be better."""
    settings = (coverage.FewSetting(count, 0.1) for count in (5, statistics.FEWEST_CLASSES, 100))
    few, fewest, enough = (coverage.covered_few(each, RUNS) for each in settings)
    assert min(few.accuracy, fewest.accuracy, enough.accuracy) >= 52 / RUNS
    assert few.accuracy_difference < 40 / RUNS < 52 / RUNS <= enough.accuracy_difference
    assert few.better_as_published > 10 / RUNS > enough.better_as_published
    assert fewest.better <= 6 / RUNS  # a rate of 5 %, and two standard deviations of chance
