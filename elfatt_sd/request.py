"""What to draw, checked without PyTorch: what is wrong is told at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elfatt_sd import checks
from elfatt_sd.config import ElfattError, PatchConfig

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "dpm++-single": "DPMSolverSinglestepScheduler",
    "dpm2": "KDPM2DiscreteScheduler",
    "dpm2-a": "KDPM2AncestralDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
    "deis": "DEISMultistepScheduler",
    "lcm": "LCMScheduler",
    "tcd": "TCDScheduler",
}
LARGEST_FILE = 2**26  # bytes of a file of prompts


@dataclass(frozen=True)
class Request:
    """What to draw."""

    prompts: tuple[str, ...]  # one or more
    config: PatchConfig  # the method
    autotune: bool = False  # as for `apply_patch`
    model: str = "toy"  # as `load_pipeline` takes it; for the record
    steps: int | None = None  # denoising steps; None takes the model's own
    guidance: float | None = None  # classifier-free guidance scale; None takes the model's own
    seed: int = 0  # of the first image of each prompt; the next ones count up
    num_images: int = 1  # images for each prompt
    height: int | None = None  # in pixels; None is the model's own
    width: int | None = None  # in pixels; None is the model's own
    compare: bool = False  # draw every image twice, untouched and patched, side by side
    negative_prompt: str | None = None  # what guidance leads away from
    scheduler: str | None = None  # a name in `SCHEDULERS`, or one of their classes; None keeps the model's own

    def __post_init__(self) -> None:
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise ElfattError("there is an empty prompt, or none; give at least one, such as 'a red star'.")
        checks.whole("num_images", self.num_images, 1)
        check_run(self.steps, self.guidance, self.seed, self.height, self.width)
        if self.scheduler is not None:
            scheduler_class(self.scheduler)
        if self.compare and not self.config.active:
            raise ElfattError(f"method={self.config.method!r} changes nothing to compare with; give another method.")


def check_run(steps: int | None, guidance: float | None, seed: int, height: int | None, width: int | None) -> None:
    """Check what a run of a pipeline is given; None is the model's own."""
    if steps is not None:
        checks.whole("steps", steps, 1)
    if not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise ElfattError(f"seed={seed!r} is not accepted; give a whole number from 0 to 2^63 - 1.")
    if guidance is not None and not (isinstance(guidance, int | float) and 0 <= guidance < math.inf):
        raise ElfattError(f"guidance={guidance!r} is not accepted; give a number of at least 0.")
    check_sizes(height, width)


def check_sizes(height: int | None, width: int | None) -> None:
    """Check the sides of an image; None is the model's own."""
    for name, pixels in (("height", height), ("width", width)):
        if pixels is not None and (not isinstance(pixels, int) or pixels <= 0 or pixels % 8):
            raise ElfattError(f"{name}={pixels!r} is not accepted; give a positive multiple of 8.")


def scheduler_class(name: str) -> str:
    """Return the name of diffusers' class that a scheduler's name stands for."""
    found = SCHEDULERS.get(name.lower(), name)
    if found not in SCHEDULERS.values():
        accepted = ", ".join(SCHEDULERS)
        raise ElfattError(f"scheduler={name!r} is not known; accepted: {accepted}, or one of their classes' names.")
    return found


def check_quoted(prompts: Sequence[str], command: str) -> None:
    """Refuse prompts that look like the words of one, without quotes."""
    if sum(len(prompt.split()) == 1 for prompt in prompts) < 2:
        return
    raise ElfattError(
        f"{len(prompts)} prompts, some of one word, look like one without quotes; give "
        f'{command} "{" ".join(prompts)}", or --each to draw every one of them (or --prompt-file, one a line).'
    )


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read prompts from a text file, one a line; blank lines do not count."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        lines = content.decode("utf-8-sig").splitlines()  # editors on Windows put a BOM first
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ElfattError(f"prompt_file={str(path)!r} cannot be read ({reason}); give a text file.") from error
    if len(content) > LARGEST_FILE:
        size = f"{LARGEST_FILE // 2**20} MiB"
        raise ElfattError(f"prompt_file={str(path)!r} is larger than {size}; give a text file with one prompt a line.")
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ElfattError(f"prompt_file={str(path)!r} is empty; give a text file with one prompt a line.")
    return prompts
