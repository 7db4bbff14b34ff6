"""Which metrics a protocol asks for, and metrics of one's own: `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.files import refused, sha256_of_code, sha256_of_data

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
# Figures that a report has already: distances, and what compares with the untouched image.
_TAKEN = re.compile(r"(FID|KID|FD|KD|PSNR|SSIM|cosine|accuracy)\b.*|cell|label|method|role|images|classes|failed", re.I)


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


def load_own(choice: MetricChoice) -> ImageMetric:
    """Import a function that gives a number for every image.

    It is called as `function(images, prompts)` or, where it has a third parameter, `function(images, prompts,
    untouched)`, which then has no value for the untouched pipeline itself. Parameters with a default are left at it,
    but for one named `untouched`. `images` are uint8 `[n, 3, h, w]`, of clips
    `[n, f, 3, h, w]`; `prompts` n texts; `untouched` the baseline's images of the same latents. It returns n numbers.
    """
    module, _, attribute = choice.metric.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        parameters = inspect.signature(function).parameters.values()
        source = inspect.getmodule(function)
    except (Exception, SystemExit) as error:
        raise ElfattError(f"metric={choice.metric!r} cannot be imported ({type(error).__name__}: {error}).") from error
    wanted = [each for each in parameters if each.default is each.empty or each.name == "untouched"]
    by_place = all(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in wanted)
    if not by_place or len(wanted) not in (2, 3):
        accepted = "function(images, prompts) or function(images, prompts, untouched)"
        raise refused(f"metric={choice.metric!r} with ({', '.join(map(str, wanted))})", accepted)
    name = choice.name or str(getattr(function, "__name__", choice.metric))
    if _TAKEN.fullmatch(name):
        raise ElfattError(f"name={name!r} of metric {choice.metric!r} is that of another figure; give another name.")
    try:
        code = sha256_of_code([inspect.getsource(source)]) if source else ""
    except (OSError, TypeError, SyntaxError):  # of a function that is not written in Python
        code = ""

    def measure(batch: Batch) -> Tensor:
        given = [batch.images] if batch.untouched is None or len(wanted) == 2 else [batch.images, batch.untouched]
        images, *untouched = (each[:, 0] if each.shape[1] == 1 else each for each in given)
        try:
            values = torch.as_tensor(function(images, list(batch.prompts), *untouched), device="cpu")
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise ElfattError(f"metric={choice.metric!r} failed ({reason}); mend the function.") from error
        if values.shape != (len(batch.prompts),) or values.is_complex():
            what = f"{'complex numbers' if values.is_complex() else 'numbers'} of the shape {tuple(values.shape)}"
            raise refused(
                f"metric={choice.metric!r} with {what}", f"a real one for each of {len(batch.prompts)} images"
            )
        return values.detach().cpu()

    described = {"function": choice.metric, "code_sha256": code}
    return ImageMetric(name, measure, described, better=choice.better, compares=len(wanted) == 3)
