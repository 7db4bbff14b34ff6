"""Precision, recall, density and coverage against their definitions, and their intervals against simulation."""

from __future__ import annotations

import pytest
import torch
from support.runs import normal
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.metrics.neighbours import NEIGHBOURS, neighbour_figures
from elfatt_sd.evaluation.statistics import Estimate


def by_definition(images: Tensor, known: Tensor) -> dict[str, float]:
    """The four figures by loops over all pairs."""

    def radius(point: int, points: Tensor) -> Tensor:
        far = (points - points[point]).norm(dim=1)
        return far[torch.arange(len(points)) != point].sort().values[NEIGHBOURS - 1]

    of_known = torch.stack([radius(place, known) for place in range(len(known))])
    of_images = torch.stack([radius(place, images) for place in range(len(images))])
    far = torch.stack([(known - image).norm(dim=1) for image in images])
    return {
        "Precision": (far <= of_known).any(1).double().mean().item(),
        "Recall": (far <= of_images[:, None]).any(0).double().mean().item(),
        "Density": (far <= of_known).double().sum(1).mean().item() / NEIGHBOURS,
        "Coverage": (far <= of_known).any(0).double().mean().item(),
    }


def features(seed: int, count: int = 60, shift: float = 0.6) -> tuple[Tensor, Tensor]:
    return normal(count, 3, seed) + shift, normal(50, 3, seed + 1000)


def test_values_are_those_of_the_definitions() -> None:
    images, known = features(0)
    found = neighbour_figures(images, known, range(len(images)))
    expected = by_definition(images, known)
    assert {name: each.value for name, each in found.items()} == pytest.approx(expected)
    assert all(0 < value < 2 for value in expected.values())


@pytest.mark.parametrize("each", [1, 2, 7])
def test_moves_are_those_without_each_class(each: int) -> None:
    images, known = features(1)
    groups = torch.arange(len(images)) // each
    found = neighbour_figures(images, known, groups)
    classes = groups.unique()
    for name in ("Recall", "Coverage"):
        without = torch.stack(
            [torch.tensor(by_definition(images[groups != left], known)[name], dtype=torch.float64) for left in classes]
        )
        expected = (without.mean() - without) * (len(classes) - 1) / len(classes)
        torch.testing.assert_close(found[name].moves[0], expected, rtol=0, atol=1e-12)


def test_the_order_of_images_is_no_matter() -> None:
    images, known = features(2)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    groups = torch.arange(len(images)) % 20
    before, after = neighbour_figures(images, known, groups), neighbour_figures(images[order], known, groups[order])
    for name, figure in before.items():
        assert after[name].value == pytest.approx(figure.value)
        assert after[name].standard_error() == pytest.approx(figure.standard_error())


def test_intervals_of_paired_differences_cover() -> None:
    """Two methods of the same latents; the truth is the mean over many draws. Jackknives of such figures are wide."""
    known, names = normal(300, 4, 10_000), ("Recall", "Density", "Coverage")
    runs: dict[str, list[Estimate]] = {name: [] for name in names}
    for seed in range(40):
        images = normal(200, 4, seed)
        first, second = (neighbour_figures(each, known, range(200)) for each in (images * 0.75 + 0.2, images * 0.6))
        for name in names:
            runs[name].append(first[name] - second[name])
    for name, found in runs.items():
        truth = sum(each.value for each in found) / len(found)
        intervals = [each.interval() for each in found]
        assert sum(ends is not None and ends[0] <= truth <= ends[1] for ends in intervals) >= 37, name


def test_too_few_images() -> None:
    with pytest.raises(ElfattError, match=f"more than {NEIGHBOURS}"):
        neighbour_figures(normal(NEIGHBOURS, 2, 0), normal(50, 2, 1), range(NEIGHBOURS))
