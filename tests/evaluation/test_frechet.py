"""Frechet distances and their intervals on data whose answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from support.runs import moments, normal, spread
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import frechet, statistics
from elfatt_sd.evaluation.frechet import Target, frechet_distance, frechet_figures
from elfatt_sd.evaluation.statistics import FEWEST_CLASSES, kernel_distance, left_out

FIGURES = ("published", "least", "most")


def published(features: Tensor, mean: Tensor, covariance: Tensor) -> float:
    return frechet_figures(features, Target(mean, covariance), range(len(features))).published.value


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
    assert published(features, mean, covariance) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(*moments(features), mean, covariance) == pytest.approx(expected, rel=1e-7)
    own, variance = moments(features)
    assert abs(frechet_distance(own, variance, own, variance)) < 1e-9 * variance.trace()
    assert abs(published(features, own, variance)) < 1e-9 * variance.trace()


def test_memory_mapped_features_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = normal(50, 6, 11).float()
    np.save(tmp_path / "features.npy", features.numpy())
    target, classes = Target(*moments(normal(100, 6, 12))), torch.arange(50) // 2
    whole = frechet_figures(features, target, classes)
    for module in (statistics, frechet):
        monkeypatch.setattr(module, "ROWS", 16)
    monkeypatch.setattr(frechet, "ELEMENTS", 16)
    pieces = frechet_figures(np.load(tmp_path / "features.npy", mmap_mode="r"), target, classes)
    for part in FIGURES:
        torch.testing.assert_close(getattr(pieces, part).moves, getattr(whole, part).moves, rtol=1e-7, atol=1e-10)
        assert getattr(pieces, part).value == pytest.approx(getattr(whole, part).value, rel=1e-9)


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
    slope = frechet_figures(features, Target(mean, covariance), range(count)).published.moves[0]
    assert abs(slope.sum()) < 1e-9
    step = 1e-4
    for image in (0, count // 2, count - 1):
        change = torch.zeros(count, dtype=torch.float64)
        change[image] = step
        ones = torch.ones(count, dtype=torch.float64)
        up, down = (weighted_distance(features, ones + sign * change, mean, covariance) for sign in (1, -1))
        assert (up - down) / (2 * step) == pytest.approx(slope[image].item(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("count", "dimension"), [(24, 40), (80, 20)])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_distance_without_a_class_is_exact(count: int, dimension: int, size: int) -> None:
    """Against the distance of the images that remain; classes of 8 take an eigenproblem each where features are few."""
    features = normal(count, dimension, 14) * spread(dimension)
    target = Target(*moments(0.2 + normal(300, dimension, 15) * spread(dimension)))
    classes = torch.arange(count) // size
    found = frechet_figures(features, target, classes).published.moves[1]
    groups = [classes != number for number in range(len(found))]
    without = torch.tensor([published(features[kept], target.mean, target.covariance) for kept in groups])
    expected = (without.mean() - without) * (len(without) - 1) / len(without)
    torch.testing.assert_close(found, expected.double(), rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("count", "dimension"), [(100, 400), (100, 100), (300, 100)])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_limit_is_that_of_infinitely_many_images(count: int, dimension: int, heavy: bool) -> None:
    """A method that loses 3 % of its variety is worse; by the published distance it looks better with few images."""
    generator, scale = torch.Generator().manual_seed(22), spread(dimension)
    target = Target(torch.zeros(dimension), torch.diag(scale**2))
    differences, least, most = [], [], []
    for _ in range(40):
        features = torch.randn(count, dimension, generator=generator, dtype=torch.float64) * scale
        if heavy:  # Student's t with 6 degrees of freedom for all features of an image
            squares = torch.randn(count, 6, generator=generator, dtype=torch.float64).square().sum(1, keepdim=True)
            features *= (4 / squares).sqrt()
        after, before = (frechet_figures(each, target, range(count)) for each in (0.97 * features, features))
        differences.append(after.published.value - before.published.value)
        least.append(before.least.value)
        most.append(before.most.value)
    bias = sum(differences) / 40
    assert bias < 0
    room = 5 * torch.tensor(most).std().item() / 40**0.5 + 0.02 * scale.square().sum().item()
    assert sum(least) / 40 < room
    assert sum(most) / 40 > -room
    if count >= dimension:
        assert abs(sum(least) / 40) < room


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
    target = Target(torch.full((dimension,), 0.05), torch.diag(scale**2))

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
        one, two = (frechet_figures(features, target, classes).published for features in (other * scale, before))
        interval = (one - two).interval()
        assert interval is not None
        differences.append(one.value - two.value)
        intervals.append(interval)
        widths.append(interval[1] - interval[0])
        unpaired.append(((one.standard_error() or 0) ** 2 + (two.standard_error() or 0) ** 2) ** 0.5 * 4)
    truth = sum(differences) / len(differences)
    covered = sum(low <= truth <= high for low, high in intervals)
    assert covered >= 178
    deviation = torch.tensor(differences).std().item()
    assert sum(widths) / len(widths) < 1.6 * 4 * deviation
    if not null:
        assert sum(widths) < 0.6 * sum(unpaired)


def test_the_fewest_classes_are_those_that_do_not_miss_rare_damage() -> None:
    """A method that sharpens all pictures a little and breaks one in ten: it is worse, and must not be called better.

    Wrong verdicts of 200 simulated runs, by the number of images, one a class; and those on the published distance.
    """
    generator = torch.Generator().manual_seed(29)
    target = Target(torch.zeros(8), torch.eye(8))

    def wrong(count: int) -> tuple[float, float]:
        differences, better, published_better = [], 0, 0
        for _ in range(200):
            before = 1.2 * torch.randn(count, 8, generator=generator, dtype=torch.float64)
            broken = (torch.rand(count, 1, generator=generator) < 0.1).double()
            after = 0.95 * before + 2 * broken
            one, two = (frechet_figures(features, target, range(count)) for features in (after, before))
            value, interval = one.limit_difference(two)
            assert interval is not None
            differences.append(value)
            better += interval[1] < 0
            published_better += ((one.published - two.published).interval() or interval)[1] < 0
        assert sum(differences) > 0
        return better / 200, published_better / 200

    assert max(wrong(FEWEST_CLASSES)) <= 0.08  # a rate of 5 %, and two standard deviations of chance
    few, published_few = wrong(5)
    assert few <= 0.08
    assert published_few > 0.25


def test_directions_lost_to_rounding_leave_the_interval_finite() -> None:
    """Fewer images than features, and eigenvalues over fourteen orders of magnitude."""
    scale = torch.logspace(0, -7, 64, dtype=torch.float64)
    target = Target(*moments(normal(200, 64, 30) * scale))
    one, two = (frechet_figures(normal(32, 64, 31) * scale * size, target, torch.arange(32)) for size in (0.3, 1.0))
    value, interval = one.limit_difference(two)
    assert interval is not None
    assert 0 < interval[0] < value < interval[1] < 3 * value


HEAVY = {
    "log-normal": lambda z, u: z.exp(),
    "spikes": lambda z, u: z * (u < 0.03),
    "one spiky": lambda z, u: torch.cat((z[:, :1] * (u[:, :1] < 0.03) * 6, z[:, 1:]), 1),
    "far images": lambda z, u: z * torch.where(u[:, :1] < 0.02, 10, 1),
}


@pytest.mark.parametrize("tail", HEAVY)
@pytest.mark.parametrize(("count", "correlation"), [(96, 0.9), (40, 0.5)])
def test_heavy_tails_make_no_false_verdicts(tail: str, count: int, correlation: float) -> None:
    """Nothing differs, and of 120 runs 6 may get a verdict. By the interval of light tails over 18 do with spikes."""
    generator = torch.Generator().manual_seed(33)
    scale = spread(32)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        normal = torch.randn(count, 32, generator=generator, dtype=torch.float64)
        return normal, torch.rand(count, 32, generator=generator, dtype=torch.float64)

    target = Target(*moments(HEAVY[tail](*draw(20_000)) * scale))
    false, of_light_tails = 0, 0
    for _ in range(120):
        before, rare = draw(count)
        other, others = draw(count)
        after = correlation * before + (1 - correlation**2) ** 0.5 * other
        one, two = (
            frechet_figures(HEAVY[tail](*each) * scale, target, range(count))
            for each in ((after, others), (before, rare))
        )
        interval, light = one.limit_difference(two)[1], (one.most - two.most).interval()
        assert interval is not None
        assert light is not None
        false += not interval[0] <= 0 <= interval[1]
        of_light_tails += not light[0] <= 0 <= light[1]
    assert false <= 6
    if "spik" in tail:
        assert of_light_tails > 18


def test_heavy_tails_still_show_a_large_difference() -> None:
    target = Target(*moments(normal(5000, 16, 34).exp()))
    one, two = (frechet_figures(normal(400, 16, 35).exp() + shift, target, range(400)) for shift in (0.5, 0.0))
    assert max(one.kurtosis, two.kurtosis) > frechet.HEAVY
    assert (one.limit_difference(two)[1] or (0, 0))[0] > 0


def test_light_tails_keep_the_interval_of_two_jackknifes() -> None:
    """To the last digit: published figures have it."""
    target = Target(*moments(normal(500, 12, 36)))
    one, two = (frechet_figures(normal(90, 12, seed), target, range(90)) for seed in (37, 38))
    assert max(one.kurtosis, two.kurtosis) < 6
    ends = [(getattr(one, end) - getattr(two, end)).interval() or (0, 0) for end in ("least", "most")]
    assert one.limit_difference(two)[1] == (min(low for low, _ in ends), max(high for _, high in ends))
    assert one.least.moves.shape == (2, 90)


@pytest.mark.parametrize(("count", "dimension", "size"), [(48, 12, 1), (120, 12, 4), (60, 96, 2)])
def test_refits_are_those_of_images_without_each_class(count: int, dimension: int, size: int) -> None:
    """Nearly, as a weighted mean stands for a weight. The other jackknife keeps the relation of scales as it is."""
    features = (normal(count, dimension, 39) / 2).exp() * spread(dimension)
    target = Target(*moments((normal(900, dimension, 40) / 2).exp() * spread(dimension)))
    classes = torch.arange(count) // size
    found = frechet_figures(features, target, classes)
    others = [classes != number for number in range(count // size)]
    again = [frechet_figures(features[kept], target, classes[kept]) for kept in others]
    for place, end in enumerate(("least", "most")):
        exact = left_out(torch.tensor([getattr(each, end).value for each in again], dtype=torch.float64))
        mine, fixed = found.refits[place], getattr(found, end).moves[1]
        assert torch.corrcoef(torch.stack((mine, exact)))[0, 1] > 0.9
        assert (mine - exact).norm() < 0.75 * (fixed - exact).norm()


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


def test_no_matrix_grows_with_the_number_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for each picture; apart from that nothing is larger than a piece of the file and its kernel."""
    for module in (statistics, frechet):
        monkeypatch.setattr(module, "ROWS", 64)
    monkeypatch.setattr(frechet, "ELEMENTS", 2048)
    monkeypatch.setattr(statistics, "KERNEL_SAMPLE", 32)
    count = 4096
    np.save(tmp_path / "features.npy", normal(count, 16, 28).float().numpy())
    features = np.load(tmp_path / "features.npy", mmap_mode="r")
    reference = normal(32, 16, 29)
    mean, covariance = moments(reference)
    with Largest() as largest:
        frechet_figures(features, Target(mean, covariance), torch.arange(count) // 2)
        kernel_distance(features, reference, torch.arange(count) // 2)
    scales = 64  # at most; of every class one number for each
    assert largest.elements <= max(64 * 32, count * scales)


def test_too_few_or_other_features() -> None:
    target = Target(*moments(normal(50, 6, 19)))
    for features, classes in ((normal(20, 6, 20), [0] * 20), (normal(2, 6, 21), [0, 0])):
        found = frechet_figures(features, target, classes)
        assert found.published.interval() is None
        assert found.limit_difference(found) == (0, None)
    with pytest.raises(ElfattError, match="4 columns, the reference 6"):
        frechet_figures(normal(10, 4, 27), target, range(10))


@pytest.mark.parametrize("count", [5, 40])
def test_images_that_are_all_alike_have_a_distance(count: int) -> None:
    """Such as those of a method that draws one image, whatever it is asked for."""
    mean, covariance = torch.arange(16).double(), torch.diag(torch.arange(1.0, 17)).double()
    target, groups = Target(mean, covariance), range(count)
    alike, others = (frechet_figures(each, target, groups) for each in (torch.ones(count, 16), normal(count, 16, 0)))
    known = (1 - mean).square().sum().item() + covariance.trace().item()
    assert [getattr(alike, name).value for name in FIGURES] == pytest.approx([known] * 3, rel=1e-9)
    value, interval = alike.limit_difference(others)
    assert interval is not None
    assert interval[0] <= value <= interval[1]
