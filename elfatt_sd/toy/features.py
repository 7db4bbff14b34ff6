"""A small classifier of an image's four attributes; its penultimate features carry the Frechet distance `FD-toy`."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.devices import plain_defaults
from elfatt_sd.toy.renderer import ATTRIBUTES

CLASSIFIER_FILE = Path(__file__).parent / "weights-classifier" / "classifier.safetensors"
FEATURES = 64


class ToyClassifier(nn.Module):
    """Convolutions with group normalisation (so that no image depends on its batch), pooled to 64 features."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64, 96, 128)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        layers += [nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.neck = nn.Linear(2 * 128, FEATURES)
        self.heads = nn.ModuleDict({name: nn.Linear(FEATURES, len(values)) for name, values in ATTRIBUTES.items()})

    def forward(self, images: Tensor) -> Tensor:
        """Penultimate features `[n, 64]` of images in [0, 1], or of uint8."""
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        return self.features(functional.avg_pool2d(pixels, 2))

    def features(self, pixels: Tensor) -> Tensor:
        """Features `[n, 64]` of images of half the side, in [0, 1]."""
        maps = self.body(2 * pixels - 1)
        pooled = torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], 1)
        return functional.silu(self.neck(pooled)).float()

    def scores(self, features: Tensor) -> dict[str, Tensor]:
        """Scores `[n, values]` per attribute from features `[n, 64]`."""
        return {name: head(features) for name, head in self.heads.items()}


@plain_defaults()
def load_feature_extractor(device: str | torch.device = "cpu", path: str | Path = CLASSIFIER_FILE) -> ToyClassifier:
    """The trained classifier, in evaluation mode and float32."""
    from safetensors.torch import load_file

    model = ToyClassifier()
    model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return model.requires_grad_(False).eval().to(device)
