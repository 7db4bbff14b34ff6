"""An extractor that needs no weights: quick, exact, and blind to the order of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elfatt_sd.evaluation.features import Extractor

DIMENSION = 12


class Regions(nn.Module):
    """The mean colour of the four quarters of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += len(images)
        return nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(1) / 255 * self.scale


def regions() -> Extractor:
    return Extractor("regions", "FD-regions", DIMENSION, Regions(), {"network": "means of quarters"})
