"""Precision, recall, density and coverage of features (Kynkaanniemi et al. 2019; Naeem et al. 2020).

With r(x) the distance of x to its k-th neighbour within its own set, over images x and reference images y:

    precision = mean over x of [some y has |x - y| <= r(y)]
    density   = mean over x of the number of y with |x - y| <= r(y), divided by k
    recall    = mean over y of [some x has |x - y| <= r(x)]
    coverage  = mean over y of [some x has |x - y| <= r(y)]

Legend for shapes: n images, m reference images, d features, g classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.statistics import Estimate, Features, Groups, take

NEIGHBOURS = 5  # as Naeem et al. have it
ROWS = 512  # of a piece of the matrix of distances


def neighbour_figures(features: Features, reference: Features, groups: Groups) -> dict[str, Estimate]:
    """Return the four figures, and how far each class of images moves them; the reference is taken as given.

    Precision and density are means over images. Recall and coverage are not: their moves are what they lose or gain
    without each class, its images neither there nor neighbours of others.
    """
    check_enough(min(len(features), len(reference)))
    images, known = take(features, slice(None)).float(), take(reference, slice(None)).float()
    classes, place = torch.unique(torch.as_tensor(groups, device="cpu"), return_inverse=True)
    radii = _radii(known)
    counts = torch.zeros(len(images), dtype=torch.float64, device="cpu")
    covered, recalled = (_Reached(len(classes), len(known)) for _ in range(2))
    own = _OwnRadii(images, place)
    for rows in torch.split(torch.arange(len(images), device="cpu"), ROWS):
        far = torch.cdist(images[rows], known)
        inside = far <= radii
        counts[rows] = inside.sum(1).double()
        covered.add(inside, place[rows])
        recalled.add(far <= own.radii[rows, None], place[rows])
        for row, without, radius in own.wider(rows):
            recalled.gain(without, far[row - rows[0]] <= radius)
    return {
        "Precision": Estimate.mean((counts > 0).double(), groups),
        "Recall": recalled.figure(),
        "Density": Estimate.mean(counts / NEIGHBOURS, groups),
        "Coverage": covered.figure(),
    }


def check_enough(count: int) -> None:
    """Refuse a set that has not more images than neighbours."""
    if count <= NEIGHBOURS:
        raise ElfattError(f"metric 'prdc' needs more than {NEIGHBOURS} images and reference images; there are {count}.")


def _radii(points: Tensor) -> Tensor:
    """Distance `[n]` of each point to its k-th neighbour among the others."""
    parts = [
        torch.cdist(part, points).topk(NEIGHBOURS + 1, largest=False).values[:, -1]
        for part in torch.split(points, ROWS)
    ]
    return torch.cat(parts)


class _OwnRadii:
    """The radius of every image, and what it is without a class that some of its neighbours are of."""

    def __init__(self, images: Tensor, place: Tensor) -> None:
        largest = int(torch.bincount(place).max())
        count = min(NEIGHBOURS + 1 + largest, len(images))  # of one class, no more are left out
        found = [
            torch.cdist(part, images).topk(count, largest=False, sorted=True) for part in torch.split(images, ROWS)
        ]
        self.far = torch.cat([each.values for each in found])
        self.classes = place[torch.cat([each.indices for each in found])]
        self.place = place
        self.radii = self.far[:, NEIGHBOURS]  # the first is the image itself

    def wider(self, rows: Tensor) -> list[tuple[int, int, float]]:
        found = []
        for row in rows.tolist():
            others = self.classes[row, 1:]
            for without in set(others[:NEIGHBOURS].tolist()) - {int(self.place[row])}:
                left = self.far[row, 1:][others != without]
                if len(left) >= NEIGHBOURS:
                    found.append((row, without, left[NEIGHBOURS - 1].item()))
        return found


class _Reached:
    """Which reference images some image reaches, and which are reached without each class."""

    def __init__(self, classes: int, count: int) -> None:
        self.by = torch.zeros(classes, count, dtype=torch.bool, device="cpu")
        self.gained = torch.zeros(classes, count, dtype=torch.bool, device="cpu")

    def add(self, inside: Tensor, place: Tensor) -> None:
        """Note what some images reach: `[rows, m]`, with the class of each."""
        for row, number in zip(inside, place.tolist(), strict=True):
            self.by[number] |= row

    def gain(self, without: int, inside: Tensor) -> None:
        """Note what an image reaches once a class is left out: `[m]`."""
        self.gained[without] |= inside

    def figure(self) -> Estimate:
        """The fraction that is reached, and by how much each class moves it."""
        times = self.by.sum(0)
        value = (times > 0).double().mean().item()
        without = torch.stack(
            [((times > own.int()) | more).double().mean() for own, more in zip(self.by, self.gained, strict=True)]
        )
        count = len(without)
        return Estimate(value, ((without.mean() - without) * ((count - 1) / count))[None])
