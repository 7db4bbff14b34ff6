"""What tuning is asked for: closeness, speed, memory, and by which measure two images are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from elfatt_sd import errors as checks
from elfatt_sd.errors import ElfattError

if TYPE_CHECKING:
    from PIL import Image


Metric = Literal["psnr", "ssim", "lpips", "dists"]
Compare = Callable[["Image.Image", "Image.Image"], float]
METRICS: tuple[Metric, ...] = get_args(Metric)
DISTANCES = ("lpips", "dists")  # of which a lower value is closer
_RANGES = {"psnr": (0.0, 100.0), "ssim": (-1.0, 1.0)}  # distances have no greatest value


@dataclass(frozen=True)
class Budget:
    """What the settings have to keep to."""

    # to the untouched image of the same seed, at least (at most, for a measure of distance); a mean over images, in the
    # measure's unit
    closeness: float | None = None
    speed: float | None = None  # times as fast as the untouched pipeline, at least
    memory: float | None = None  # GiB at the peak of an image, at most; of the process on a CPU

    def __post_init__(self) -> None:
        if self.closeness is None and self.speed is None:
            raise ElfattError("there is no budget; give closeness (35 dB PSNR, for instance), or speed (1.5), or both.")
        limits = {"closeness": (-math.inf, math.inf), "speed": (1.0, 100.0), "memory": (0.0, 10**6)}
        for name, (least, most) in limits.items():
            if (value := getattr(self, name)) is not None:
                checks.real(name, value, least, most)

    def words(self, measure: Measure) -> str:
        """Return it for people."""
        parts = []
        if self.closeness is not None:
            parts.append(f"{measure.words(self.closeness)} at {'least' if measure.higher else 'most'}")
        if self.speed is not None:
            parts.append(f"{self.speed:g} times as fast at least")
        if self.memory is not None:
            parts.append(f"{self.memory:g} GiB at most")
        return ", ".join(parts)


def check_wanted(
    budget: Budget, metric: Metric | Compare, prompts: Sequence[str] | None, images: int, frames: int | None
) -> None:
    """Check that two images can be as close as wanted, and what the images of tuning are; None is the model's own."""
    closeness = budget.closeness
    if not callable(metric):
        checks.choice("metric", metric, METRICS)
        least, most = _RANGES.get(metric, (0.0, math.inf))
        if closeness is not None and not least <= closeness <= most:
            span = f"{least:g} at least" if closeness < least else f"{most:g} at most"
            near = " (in dB; 8-bit images that are not identical end near 60 to 90)" * (metric == "psnr")
            raise ElfattError(f"closeness={closeness:g} is not accepted; metric={metric!r} gives {span}{near}.")
    words = () if isinstance(prompts, str) else (prompts or ())
    written = all(isinstance(prompt, str) and prompt.strip() for prompt in words)
    if prompts is not None and (not written or len(set(words)) < 2):
        raise ElfattError("prompts: give two or more different ones: the first serve the search, the others the proof.")
    checks.whole("images", images, 2)
    if frames is not None:
        checks.whole("frames", frames, 1)


@dataclass(frozen=True)
class Measure:
    """How far two images are apart."""

    name: str  # of the measure
    compare: Compare  # gives a number for an untouched image and another one of its size
    higher: bool = True  # whether a higher number is closer
    unit: str = ""  # of the number
    digits: int = 2  # after the point, for people

    @property
    def best(self) -> float:
        """The value of two equal images; infinity where the measure has no greatest one."""
        return {"SSIM": 1.0}.get(self.name, math.inf) if self.higher else 0.0

    def between(self, untouched: Image.Image, other: Image.Image) -> float:
        try:
            value = float(self.compare(untouched, other))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ElfattError(f"metric {self.name!r} cannot compare two images ({reason}).") from error
        if math.isnan(value):
            raise ElfattError(f"metric {self.name!r} gives nan for two images; give one that always gives a number.")
        return value

    def words(self, value: float) -> str:
        if math.isinf(value):
            return "identical"
        return f"{self.name} {value:.{self.digits}f}{' ' * bool(self.unit)}{self.unit}"

    def keeps(self, value: float, asked: float) -> bool:
        return value >= asked if self.higher else value <= asked


def measure_named(metric: Metric | Compare, weights: Any = None, device: str = "cpu") -> Measure:
    if callable(metric):
        return Measure(getattr(metric, "__name__", "closeness"), metric)
    if metric in DISTANCES and weights is None:
        raise ElfattError(f"metric={metric!r} needs weights; give torchvision's file of the network as weights.")
    if metric == "psnr":
        from elfatt_sd.drawing.pictures import psnr

        return Measure("PSNR", psnr, unit="dB", digits=1)
    if metric == "ssim":
        from elfatt_sd.evaluation.score import structural_similarity

        def ssim(first: Image.Image, second: Image.Image) -> float:
            one, other = (_tensor(image).double() for image in (first, second))
            return float(structural_similarity(one, other, 255.0))

        return Measure("SSIM", ssim, digits=3)
    from elfatt_sd.evaluation.metrics import Batch, load_closeness

    network = load_closeness(metric, Path(weights), device)

    def compare(first: Image.Image, second: Image.Image) -> float:
        return float(network.measure(Batch(_tensor(second)[None], ("",), _tensor(first)[None])))

    return Measure(network.name, compare, higher=False, digits=3)


def _tensor(image: Image.Image) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
