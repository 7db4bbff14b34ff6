"""What a metric is: a number for every image, from the image, its prompt and the untouched pipeline's image.

Legend for shapes: n images, f frames of each (1, or more of a clip), h x w pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from elfatt_sd.files import sha256_of_data

Better = Literal["", "higher", "lower"]


@dataclass(frozen=True)
class Batch:
    """Some images of a row."""

    images: Tensor  # uint8 `[n, f, 3, h, w]`
    prompts: Sequence[str]  # n texts
    # the baseline's images of the same latents, shaped alike; None unless the metric compares
    untouched: Tensor | None = None

    def frames(self) -> Tensor:
        """All frames, `[n * f, 3, h, w]`."""
        return self.images.flatten(0, 1)

    def by_image(self, values: Tensor) -> Tensor:
        """Average one value per frame, `[n * f]`, over the frames of each image: `[n]`."""
        return values.reshape(len(self.prompts), -1).mean(1)


@dataclass(frozen=True)
class ImageMetric:
    """A metric that gives a number for every image."""

    name: str  # in tables
    measure: Callable[[Batch], Tensor]  # turns a `Batch` into n numbers
    description: dict[str, Any] = field(default_factory=dict)  # everything that the numbers depend on, as plain data
    # which values are better; empty where neither is, as for what compares with the untouched image
    better: Better = ""
    compares: bool = False  # whether it takes the untouched pipeline's images
    per_call: int = 8  # images that it is given at once
    # told of all prompts before the first images, so that it can say at once what it does not read
    reads: Callable[[Sequence[str]], None] = lambda prompts: None

    @property
    def identity(self) -> str:
        """Hash of all that decides the numbers besides the images."""
        return sha256_of_data([self.name, self.description, self.better, self.compares])
