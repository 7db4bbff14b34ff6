"""Which metrics a protocol asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from elfatt_sd.files import refused, sha256_of_data

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


# What can be asked for by name, and what `weights` is for each; those with "" need none.
KINDS = {
    "lpips": "torchvision's file of AlexNet, VGG16 or SqueezeNet 1.1",
    "dists": "torchvision's file of VGG16",
    "clip-score": "the directory of a CLIP model",
    "pickscore": "the directory of PickScore",
    "hpsv2": "the directory of HPS v2, converted to a CLIP model of transformers",
    "prdc": "",
    "cmmd": "",
}
_LEAST_SIDE = {"lpips": 32}  # pixels of an image, of which the network's deepest layer has one left
_REWARDS = "image-reward", "imagereward"


@dataclass(frozen=True)
class MetricChoice:
    """A metric."""

    metric: str  # one of `KINDS`, or `package.module:function`, a function of one's own
    weights: str = ""  # file or directory of its weights; `KINDS` says of what
    name: str = ""  # of a function's metric in tables; empty takes the function's
    # of a function's metric, which values are better: `higher` or `lower`; empty gives no verdict
    better: Literal["", "higher", "lower"] = ""

    def __post_init__(self) -> None:
        own = ":" in self.metric
        if self.metric.lower() in _REWARDS:
            accepted = "a package.module:function that calls it, since its weights are of no transformers model"
            raise refused(f"metric={self.metric!r}", accepted)
        if not own and self.metric not in KINDS:
            raise refused(f"metric={self.metric!r}", f"{', '.join(KINDS)}, or package.module:function")
        wanted = "" if own else KINDS[self.metric]
        if bool(wanted) != bool(self.weights):
            accepted = f"weights, {wanted}" if wanted else "none: what a function needs, it loads itself"
            raise refused(f"weights={self.weights!r} of metric {self.metric!r}", accepted)
        for key, value in (("name", self.name), ("better", self.better)):
            if value and not own:
                raise refused(f"{key}={value!r} of metric {self.metric!r}", "a value for package.module:function only")


def check_side(metric: str, height: int, width: int) -> None:
    """Refuse images that are too small for a metric's network."""
    least = _LEAST_SIDE.get(metric, 1)
    if min(height, width) < least:
        raise refused(f"metric={metric!r} of images of {height}x{width} pixels", f"{least} pixels or more on each side")
