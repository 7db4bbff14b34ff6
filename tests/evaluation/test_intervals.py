"""Intervals over classes, and what verdicts follow from them."""

from __future__ import annotations

import pytest
import torch

from elfatt_sd.evaluation.statistics import (
    BETTER,
    FEWEST_CLASSES,
    NO_DIFFERENCE,
    TOO_FEW,
    WORSE,
    Estimate,
    even_classes,
    share_interval,
    student_quantile,
    verdict,
    wilson_interval,
)


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


def test_a_large_class_makes_no_false_verdicts() -> None:
    """Of images that resemble each other; counted by their number alone, such classes misjudge a quarter of runs."""
    classes = torch.tensor([0] * 33 + list(range(1, 32)))
    generator = torch.Generator().manual_seed(0)
    said, naive = [], []
    for _ in range(200):
        shared = torch.randn(32, generator=generator, dtype=torch.float64)[classes]
        noise = torch.randn(64, generator=generator, dtype=torch.float64)
        estimate = Estimate.mean((shared + noise) / 2**0.5, classes)
        said.append(verdict(estimate.interval(), even_classes(classes)))
        naive.append(verdict(estimate.interval(), estimate.classes))
    assert set(said) == {TOO_FEW}
    assert sum(each != NO_DIFFERENCE for each in naive) > 30


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
