"""Draw images: what is asked for, and the pipeline that does it."""

from __future__ import annotations

import itertools
import json
import math
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import elfatt_sd
from elfatt_sd import errors as checks
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import memory_counters
from elfatt_sd.drawing.pictures import psnr, side_by_side
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
from elfatt_sd.loading import scheduler_like
from elfatt_sd.measure import Spread, busy, ratios, times_as_fast
from elfatt_sd.patch import apply_patch, plan, restored, warn_if_slower

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


OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class PeakMemory:
    """A peak of memory and what it counts; `size` in bytes, None where the system does not tell."""

    size: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.what}: {'not measured' if self.size is None else f'{self.size / 1e9:.2f} GB'}"


class Drawn(Protocol):
    """What the command line shows of an image that is done."""

    @property
    def picture(self) -> Image.Image:
        """The image."""

    @property
    def name(self) -> str:
        """What to call it."""

    @property
    def fault(self) -> str:
        """What is wrong with it, in a sentence; empty otherwise."""

    def summary(self) -> str:
        """Return what to print."""


@dataclass(frozen=True)
class Result:
    """One finished file."""

    path: Path  # the PNG
    picture: Image.Image  # what the method drew
    seconds: float  # prompt to image, with the method
    memory: PeakMemory  # peak while it was drawn
    untouched: tuple[float, ...] = ()  # prompt to image without the method, before and after it, where both were drawn
    psnr_db: float | None = None  # of the method's image against the untouched one, where both were drawn
    unchanged: str = ""  # what to say where both are identical; empty otherwise
    fault: str = ""  # which image is none, and why; empty otherwise

    @property
    def name(self) -> str:
        """What to call it."""
        return str(self.path)

    def summary(self) -> str:
        """Return its path and how long it took, for people."""
        if not self.untouched:
            return f"{self.path}\n  {self.seconds:.2f} s"
        times = f"untouched {self.untouched_seconds:.2f} s, patched {self.seconds:.2f} s"
        if self.fault or self.unchanged:
            return f"{self.path}\n  {self.unchanged or 'not compared'} ({times})"
        speed = Spread.over(ratios(self.untouched, [self.seconds] * 2)).words()
        told = f"\n  {text}" if (text := busy([self.untouched])) else ""
        return (
            f"{self.path}\n  {times}: {speed} times as fast (between two untouched runs, after a warm-up); "
            f"PSNR {self.psnr_db:.1f} dB{told}"
        )

    def without_picture(self) -> Result:
        return replace(self, picture=Image.new("RGB", (1, 1)))

    @property
    def untouched_seconds(self) -> float | None:
        """Prompt to image without the method, as the mean of before and after."""
        return mean(self.untouched) if self.untouched else None


@dataclass
class Studio:
    """A pipeline, what to draw with it, and where to."""

    pipe: Any  # a text-to-image pipeline
    request: Request  # what to draw
    folder: Path  # where the files go; it is made when the first one is written
    # called after every denoising step with the step's number, from 1, and how many there are
    on_step: OnStep = field(default=lambda step, steps: None)

    def __post_init__(self) -> None:
        check_text_to_image(self.pipe)
        request = self.request
        own_steps, own_guidance = own_settings(self.pipe, request.model)
        self.steps = own_steps if request.steps is None else request.steps
        self.guidance = own_guidance if request.guidance is None else request.guidance
        check_steps(self.pipe, self.steps)
        if request.scheduler is not None:
            self.pipe.scheduler = make_scheduler(request.scheduler, self.pipe.scheduler)
        if request.negative_prompt is not None:
            self._check_negative_prompt()
        elif request.guidance is not None and not guides(self.pipe):
            text = f"guidance={request.guidance:g} has no effect on this model without a negative_prompt."
            warnings.warn(text, stacklevel=3)
        dimensions = dimensions_of(self.pipe)
        dimensions.check(request.height, request.width)
        if text := dimensions.small(request.height, request.width):
            warnings.warn(text, stacklevel=3)
        warn_if_too_large(self.pipe, request.height, request.width, rows=rows_of(self.pipe, self.guidance))
        tell_cut_prompts(self.pipe, (*request.prompts, request.negative_prompt or ""))
        self.pipe.set_progress_bar_config(disable=True)

    def _check_negative_prompt(self) -> None:
        if "negative_prompt" not in taken(self.pipe):
            raise ElfattError(f"negative_prompt is not accepted; {type(self.pipe).__name__} has none.")
        if self.guidance is not None and self.guidance <= 1:
            warnings.warn(f"negative_prompt has no effect with guidance={self.guidance:g}.", stacklevel=3)

    def results(self) -> Iterator[Result]:
        """Draw, write and yield one image after the other; what is written stays, whatever happens later."""
        request = self.request
        seeds = range(request.seed, request.seed + request.num_images)
        asked = list(itertools.product(request.prompts, seeds))
        if request.compare:
            yield from self._compared(asked)
        else:
            with self.patched():
                yield from itertools.starmap(self._single, asked)

    def _compared(self, asked: Sequence[tuple[str, int]]) -> Iterator[Result]:
        """Draw each patched image between two untouched ones: its own, and the next one's or, at the end, its own."""
        self._warm_up_both()
        before = self.draw(*asked[0])
        for (prompt, seed), following in zip(asked, (*asked[1:], asked[-1]), strict=True):
            with self.patched():
                own = self.draw(prompt, seed)
            after = self.draw(*following)
            yield self._compare(prompt, seed, own, before, after.seconds)
            before = after

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Have the pipeline patched within a `with` block."""
        with restored(self.pipe):
            request = self.request
            apply_patch(self.pipe, request.config, autotune=request.autotune)
            if (request.height or request.width) and not request.autotune:
                warn_if_slower(plan(self.pipe, request.config, height=request.height, width=request.width))
            yield

    def warm_up(self) -> None:
        """Run the pipeline as it is for two steps, so that what comes next does not pay for a first call."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is said of so short a run does not hold for the whole one
            self._draw(self.request.prompts[0], self.request.seed, min(2, self.steps), lambda step, steps: None)

    def _warm_up_both(self) -> None:
        self.warm_up()
        with self.patched():
            self.warm_up()

    def _single(self, prompt: str, seed: int) -> Result:
        shot = self.draw(prompt, seed)
        picture, record = shot.frames[0], self._record(prompt, seed, shot)
        path = write_image(free_name(self.folder, prompt), picture, record)
        return Result(path, picture, shot.seconds, self._memory(shot), fault=shot.fault and f"the image {shot.fault}")

    def _compare(self, prompt: str, seed: int, after: Shot, before: Shot, again: float) -> Result:
        untouched, pictures = (before.seconds, again), [before.frames[0], after.frames[0]]
        method, decibel = self.request.config.method, psnr(*pictures)
        ratio = mean(untouched) / after.seconds
        speed = times_as_fast(f"{ratio:.2f}", bool(busy([untouched])))
        unchanged, details = "", f"{speed}, PSNR {decibel:.1f} dB"
        fault = fault_of_pair(before, after)
        if fault:
            details = "not compared: no image"
        elif not math.isfinite(decibel):
            calls = len(self.pipe.scheduler.timesteps)
            unchanged = why_unchanged(self.request.config, calls)
            details = "identical: it changed nothing in this run"
        captions = [(f"untouched, {mean(untouched):.2f} s", ""), (f"{method}, {after.seconds:.2f} s", details)]
        sheet = side_by_side(pictures, captions, title=prompt)
        record = self._record(prompt, seed, after) | {
            "untouched_seconds": mean(untouched),
            "speed_ratio": ratio,
            "speed_ratios": list(ratios(untouched, [after.seconds] * 2)),
            "psnr_db": None if fault or unchanged else decibel,
            "identical": bool(unchanged),
            "timing": "one run between two untouched ones, after a warm-up of two steps",
        }
        path = write_image(free_name(self.folder, prompt), sheet, record)
        return Result(path, pictures[1], after.seconds, self._memory(after), untouched, decibel, unchanged, fault)

    def draw(self, prompt: str, seed: int) -> Shot:
        """Draw one image with the pipeline as it is."""
        return self._draw(prompt, seed, self.steps, self.on_step)

    def _draw(self, prompt: str, seed: int, steps: int, on_step: OnStep) -> Shot:
        given = guidance_options(self.pipe, self.guidance, self.request.negative_prompt)
        given |= exact_size(self.pipe, self.request.height, self.request.width)
        return draw(self.pipe, prompt, seed, steps, given, on_step)

    def record(self, prompt: str, seed: int, picture: Image.Image) -> dict[str, Any]:
        """Return what an image depends on, as plain data."""
        request = self.request
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
            "height": picture.height,
            "width": picture.width,
            "scheduler": type(self.pipe.scheduler).__name__,
            "device": str(self.pipe.device),
            "dtype": str(self.pipe.dtype).removeprefix("torch."),
            "versions": versions(),
        }

    def _record(self, prompt: str, seed: int, shot: Shot) -> dict[str, Any]:
        memory = self._memory(shot)
        measured = {"seconds": shot.seconds, "peak_memory_bytes": memory.size, "peak_memory": memory.what}
        return self.record(prompt, seed, shot.frames[0]) | measured

    def _memory(self, shot: Shot) -> PeakMemory:
        return PeakMemory(shot.peak, peak_in_words(torch.device(self.pipe.device)))


def write_image(path: Path, picture: Image.Image, record: dict[str, Any]) -> Path:
    """Write a PNG with a record inside, and the record as JSON next to it; both or none."""
    info = PngInfo()
    info.add_text("Software", f"elfatt-sd {elfatt_sd.__version__}")
    for name, value in record.items():
        text = value if isinstance(value, str) else json.dumps(value)
        info.add_text(name, text) if text.isascii() else info.add_itxt(name, text)
    beside = path.with_suffix(".json")
    write_json(beside, record)
    try:
        with atomic_file(path) as file:
            picture.save(file, format="PNG", pnginfo=info)
    except BaseException:
        beside.unlink()
        raise
    return path


def peak_in_words(device: torch.device) -> str:
    if memory_counters(device) is not None:
        return f"peak memory allocated by PyTorch on {device.type.upper()}"
    return "peak memory of the whole process since its start" if device.type == "cpu" else "peak memory"


def make_scheduler(name: str, own: Any) -> Any:
    """Return a scheduler with the settings of a model's own."""
    import diffusers

    def make(short: str) -> Any:
        kind = getattr(diffusers, scheduler_class(short))
        return scheduler_like(own, kind, **({"skip_prk_steps": True} if kind is diffusers.PNDMScheduler else {}))

    def fits(short: str) -> bool:
        with suppress(ElfattError):
            return make(short) is not None
        return False

    try:
        return make(name)
    except ElfattError as error:
        fitting = ", ".join(filter(fits, SCHEDULERS))
        remedy = f"accepted: {fitting}" if fitting else "leave it out, as no other does"
        raise ElfattError(
            f"scheduler={name!r} does not fit the model's {type(own).__name__}: {error}; {remedy}."
        ) from error


def fault_of_pair(untouched: Shot, patched: Shot) -> str:
    """Say which of two images is none, so that they cannot be compared; empty otherwise."""
    faults = {"the untouched image": untouched.fault, "the patched image": patched.fault}
    return next((f"{name} {fault}" for name, fault in faults.items() if fault), "")


def why_unchanged(config: PatchConfig, calls: int) -> str:
    """Return what to say of a method whose image is identical to the untouched one."""
    text = f"identical: {config.method} changed nothing in this run"
    return text if config.approximates(0, calls) else f"{text}, of which it approximates no step; give more steps"


def free_name(folder: Path, prompt: str) -> Path:
    taken = [int(match[1]) for path in folder.glob("[0-9]*") if (match := re.match(r"(\d+)-", path.name))]
    words = "-".join(re.findall(r"\w+", prompt.lower()))[:60].rstrip("-") or "picture"
    return folder / f"{max(taken, default=0) + 1:04d}-{words}.png"


def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("diffusers", "transformers")}
    own = {"elfatt-sd": elfatt_sd.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return own | libraries
