"""Draw images: what is asked for, and the pipeline that does it."""

from __future__ import annotations

import itertools
import json
import math
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import elfatt_sd
from elfatt_sd import errors as checks
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import memory_counters
from elfatt_sd.drawing.running import (
    Shot,
    check_steps,
    check_text_to_image,
    dimensions_of,
    draw,
    exact_size,
    guidance_options,
    guides,
    own_settings,
    rows_of,
    taken,
    tell_cut_prompts,
    warn_if_too_large,
)
from elfatt_sd.errors import ElfattError
from elfatt_sd.files import atomic_file, write_json
from elfatt_sd.loading import make_scheduler, scheduler_class
from elfatt_sd.patch import apply_patch, plan, restored, warn_if_slower


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
    scheduler: str | None = None  # see `loading.SCHEDULERS`; None keeps the model's own

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


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read prompts from a text file, one a line; blank lines do not count."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # editors on Windows put a BOM first
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ElfattError(f"prompt_file={str(path)!r} cannot be read ({reason}); give a text file.") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ElfattError(f"prompt_file={str(path)!r} is empty; give a text file with one prompt a line.")
    return prompts


OnStep = Callable[[int, int], None]
OnImage = Callable[[str, str], None]  # what was drawn, and what is wrong with it; the second is empty otherwise


@dataclass(frozen=True)
class Result:
    """One finished file."""

    path: Path  # the PNG
    seconds: float  # from prompt to image, of the method
    memory: str  # peak while it was drawn, in words
    fault: str  # what is wrong with it, in a sentence; empty otherwise
    figures: str = ""  # of the comparison with the untouched image, in words; empty where there is none
    psnr_db: float | None = None  # to the untouched image; None where that was not drawn, or is identical

    def summary(self) -> str:
        return f"{self.path}\n  {self.figures or f'{self.seconds:.2f} s'}"


@dataclass
class Studio:
    """A pipeline, what to draw with it, and where to."""

    pipe: Any  # a text-to-image pipeline
    request: Request  # what to draw
    folder: Path  # where the files go; it is made when the first one is written
    # called after every denoising step with the step's number, from 1, and how many there are
    on_step: OnStep = lambda step, steps: None

    def __post_init__(self) -> None:
        request, pipe = self.request, self.pipe
        check_text_to_image(pipe)
        own_steps, own_guidance = own_settings(pipe, request.model)
        self.steps = own_steps if request.steps is None else request.steps
        self.guidance = own_guidance if request.guidance is None else request.guidance
        check_steps(pipe, self.steps)
        if request.scheduler is not None:
            pipe.scheduler = make_scheduler(request.scheduler, pipe.scheduler)
        if request.negative_prompt is not None:
            if "negative_prompt" not in taken(pipe):
                raise ElfattError(f"negative_prompt is not accepted; {type(pipe).__name__} has none.")
            if self.guidance is not None and self.guidance <= 1:
                warnings.warn(f"negative_prompt has no effect with guidance={self.guidance:g}.", stacklevel=3)
        elif request.guidance is not None and not guides(pipe):
            text = f"guidance={request.guidance:g} has no effect on this model without a negative_prompt."
            warnings.warn(text, stacklevel=3)
        height, width = request.height, request.width
        dimensions = dimensions_of(pipe)
        dimensions.check(height, width)
        if text := dimensions.small(height, width):
            warnings.warn(text, stacklevel=3)
        warn_if_too_large(pipe, height, width, rows=rows_of(pipe, self.guidance))
        if request.config.active and (height or width) and not request.autotune:
            warn_if_slower(plan(pipe, request.config, height=height, width=width))
        tell_cut_prompts(pipe, (*request.prompts, request.negative_prompt or ""))
        pipe.set_progress_bar_config(disable=True)
        self._options = guidance_options(pipe, self.guidance, request.negative_prompt)
        self._options |= exact_size(pipe, height, width)

    def shots(self) -> Iterator[tuple[str, int]]:
        """Yield the prompt and the seed of each image."""
        request = self.request
        return itertools.product(request.prompts, range(request.seed, request.seed + request.num_images))

    def results(self) -> Iterator[Result]:
        """Draw, write and yield one image after the other; what is written stays, whatever happens later."""
        with self.patched():
            for prompt, seed in self.shots():
                shot = self.draw(prompt, seed)
                path = write_image(free_name(self.folder, prompt), shot.frames[0], self.record(prompt, seed, shot))
                yield Result(path, shot.seconds, self.memory(shot), shot.fault and f"the image {shot.fault}")

    @contextmanager
    def patched(self, config: PatchConfig | None = None) -> Iterator[None]:
        """Have the pipeline patched within a `with` block, as the request says if nothing else is given."""
        with restored(self.pipe):
            apply_patch(self.pipe, config or self.request.config, autotune=self.request.autotune)
            yield

    def warm_up(self) -> None:
        """Run the pipeline as it is for two steps, so that what comes next does not pay for a first call."""
        prompt, seed = next(self.shots())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is said of so short a run does not hold for the whole one
            draw(self.pipe, prompt, seed, min(2, self.steps), self._options, lambda step, steps: None)

    def draw(self, prompt: str, seed: int) -> Shot:
        """Draw one image with the pipeline as it is."""
        return draw(self.pipe, prompt, seed, self.steps, self._options, self.on_step)

    def record(self, prompt: str, seed: int, shot: Shot) -> dict[str, Any]:
        """Return what an image depends on, and what it took, as plain data."""
        request, pipe = self.request, self.pipe
        height, width = shot.pixels.shape[1:3]
        return {
            "prompt": prompt,
            "seed": seed,
            "method": request.config.method,
            "config": request.config.to_dict(),
            "autotune": request.autotune,
            "model": request.model,
            "steps": self.steps,
            "guidance": self.guidance,
            "negative_prompt": request.negative_prompt,
            "height": height,
            "width": width,
            "scheduler": type(pipe.scheduler).__name__,
            "device": str(pipe.device),
            "dtype": str(pipe.dtype).removeprefix("torch."),
            "versions": versions(),
            "seconds": shot.seconds,
            "peak_memory_bytes": shot.peak,
            "peak_memory": peak_in_words(torch.device(pipe.device)),
        }

    def memory(self, shot: Shot) -> str:
        size = "not measured" if shot.peak is None else f"{shot.peak / 1e9:.2f} GB"
        return f"{peak_in_words(torch.device(self.pipe.device))}: {size}"


def write_image(path: Path, picture: Image.Image, record: dict[str, Any]) -> Path:
    """Write a PNG with a record inside, and the record as JSON next to it; both or none."""
    info = PngInfo()
    info.add_text("Software", f"elfatt-sd {elfatt_sd.__version__}")
    for name, value in record.items():
        text = value if isinstance(value, str) else json.dumps(value)
        info.add_text(name, text) if text.isascii() else info.add_itxt(name, text)
    with atomic_file(path) as file:
        picture.save(file, format="PNG", pnginfo=info)
        write_json(path.with_suffix(".json"), record)
    return path


def peak_in_words(device: torch.device) -> str:
    if memory_counters(device) is not None:
        return f"peak memory allocated by PyTorch on {device.type.upper()}"
    return "peak memory of the whole process since its start" if device.type == "cpu" else "peak memory"


def free_name(folder: Path, prompt: str) -> Path:
    taken = [int(match[1]) for path in folder.glob("[0-9]*") if (match := re.match(r"(\d+)-", path.name))]
    words = "-".join(re.findall(r"\w+", prompt.lower()))[:60].rstrip("-") or "picture"
    return folder / f"{max(taken, default=0) + 1:04d}-{words}.png"


def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("diffusers", "transformers")}
    own = {"elfatt-sd": elfatt_sd.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return own | libraries
