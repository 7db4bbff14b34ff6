"""The embedded pipelines: small, really trained models that draw shapes on patterned backgrounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROMPT = "a red star on a striped blue background"  # what is drawn where nobody gives a prompt
STEPS = 25
GUIDANCE = 3.0  # the guidance scale at which the images of `toy` are best


@dataclass(frozen=True)
class Embedded:
    """A pipeline in this package."""

    folder: Path  # a diffusers directory
    steps: int  # denoising steps that are enough
    guidance: float  # the guidance scale at which its images are best


_HERE = Path(__file__).parent
EMBEDDED = {
    "toy": Embedded(_HERE / "weights", STEPS, GUIDANCE),  # a Stable Diffusion
    "toy-dit": Embedded(_HERE / "weights-dit", 12, 1.0),  # a Flux, which needs no guidance
}
TOY = EMBEDDED["toy"].folder
