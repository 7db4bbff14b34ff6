"""Draw pictures with a pipeline, time them, and write them with the settings that made them."""

from __future__ import annotations

import inspect
import json
import math
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import elfatt_sd
from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.evaluation.environment import read_high_water_mark
from elfatt_sd.files import atomic_file, write_json
from elfatt_sd.layers import find_denoisers
from elfatt_sd.patch import apply_patch, remove_patch
from elfatt_sd.pictures import psnr, side_by_side

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """What to draw.

    Attributes:
        prompts: one or more.
        config: the method.
        autotune: as for `apply_patch`.
        model: as `load_pipeline` takes it; for the record.
        steps: denoising steps.
        guidance: classifier-free guidance scale.
        seed: of the first picture of each prompt; the next ones count up.
        num_images: pictures for each prompt.
        height: in pixels; None is the model's own.
        width: in pixels; None is the model's own.
        compare: draw every picture twice, untouched and patched, side by side.
    """

    prompts: tuple[str, ...]
    config: PatchConfig
    autotune: bool = False
    model: str = "toy"
    steps: int = 50
    guidance: float = 7.5
    seed: int = 0
    num_images: int = 1
    height: int | None = None
    width: int | None = None
    compare: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ElfattError: a field is out of range; the message says what is accepted.
        """
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise ElfattError("there is an empty prompt, or none; give at least one, such as 'a red star'.")
        for name in ("steps", "num_images"):
            if getattr(self, name) < 1:
                raise ElfattError(f"{name}={getattr(self, name)} is not accepted; give a whole number of at least 1.")
        if not 0 <= self.seed < 2**63:
            raise ElfattError(f"seed={self.seed} is not accepted; give a whole number from 0 to 2^63 - 1.")
        if not math.isfinite(self.guidance) or self.guidance < 0:
            raise ElfattError(f"guidance={self.guidance} is not accepted; give a number of at least 0.")
        for name in ("height", "width"):
            pixels = getattr(self, name)
            if pixels is not None and (pixels <= 0 or pixels % 8):
                raise ElfattError(f"{name}={pixels} is not accepted; give a positive multiple of 8.")
        if self.compare and not self.config.active:
            raise ElfattError(f"method={self.config.method!r} changes nothing to compare with; give another method.")


@dataclass(frozen=True)
class PeakMemory:
    """A peak of memory and what it counts; `size` in bytes, None where the system does not tell."""

    size: int | None
    what: str

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.what}: {'not known' if self.size is None else f'{self.size / 1e9:.2f} GB'}"


@dataclass(frozen=True)
class Result:
    """One finished file.

    Attributes:
        path: the PNG.
        picture: what the method drew.
        seconds: prompt to picture, with the method.
        memory: peak while it was drawn.
        untouched_seconds: prompt to picture without the method, where both were drawn.
        psnr_db: of the method's picture against the untouched one, where both were drawn.
    """

    path: Path
    picture: Image.Image
    seconds: float
    memory: PeakMemory
    untouched_seconds: float | None = None
    psnr_db: float | None = None

    @property
    def speed_ratio(self) -> float | None:
        """How many times as fast as the untouched pipeline."""
        return None if self.untouched_seconds is None else self.untouched_seconds / self.seconds


@dataclass(frozen=True)
class _Shot:
    picture: Image.Image
    seconds: float
    memory: PeakMemory


@dataclass
class Studio:
    """A pipeline, what to draw with it, and where to.

    Attributes:
        pipe: a text-to-image pipeline.
        request: what to draw.
        folder: where the files go; it is made when the first one is written.
        on_step: called after every denoising step with the step's number, from 1, and how many there are.
    """

    pipe: Any
    request: Request
    folder: Path
    on_step: OnStep = field(default=lambda step, steps: None)

    def __post_init__(self) -> None:
        """Check that a prompt is all that the pipeline needs, and that its schedule has that many steps.

        Raises:
            ElfattError: it needs a picture or something else besides, or there are too many steps.
        """
        check_text_to_image(self.pipe)
        most = self.pipe.scheduler.config.get("num_train_timesteps", self.request.steps)
        if self.request.steps > most:
            raise ElfattError(f"steps={self.request.steps} is not accepted; give a whole number from 1 to {most}.")
        self.pipe.set_progress_bar_config(disable=True)

    def results(self) -> Iterator[Result]:
        """Draw, write and yield one picture after the other; what is written stays, whatever happens later."""
        request = self.request
        if request.compare:
            self._warm_up()
        else:
            apply_patch(self.pipe, request.config, autotune=request.autotune)
        try:
            for prompt in request.prompts:
                for seed in range(request.seed, request.seed + request.num_images):
                    yield self._compare(prompt, seed) if request.compare else self._single(prompt, seed)
        finally:
            remove_patch(self.pipe)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        apply_patch(self.pipe, self.request.config, autotune=self.request.autotune)
        try:
            yield
        finally:
            remove_patch(self.pipe)

    def _warm_up(self) -> None:
        """Run both ways for two steps, so that neither pays for the other's first call."""
        steps = min(2, self.request.steps)
        self._draw(self.request.prompts[0], self.request.seed, steps)
        with self._patched():
            self._draw(self.request.prompts[0], self.request.seed, steps)

    def _single(self, prompt: str, seed: int) -> Result:
        shot = self._draw(prompt, seed)
        path = self._write(shot.picture, prompt, self._record(prompt, seed, shot))
        return Result(path, shot.picture, shot.seconds, shot.memory)

    def _compare(self, prompt: str, seed: int) -> Result:
        before = self._draw(prompt, seed)
        with self._patched():
            after = self._draw(prompt, seed)
        ratio, decibel = before.seconds / after.seconds, psnr(before.picture, after.picture)
        captions = [
            (f"untouched, {before.seconds:.2f} s", ""),
            (
                f"{self.request.config.method}, {after.seconds:.2f} s",
                f"{ratio:.2f} times as fast, PSNR {decibel:.1f} dB",
            ),
        ]
        sheet = side_by_side([before.picture, after.picture], captions, title=prompt)
        record = self._record(prompt, seed, after) | {
            "untouched_seconds": before.seconds,
            "speed_ratio": ratio,
            "psnr_db": decibel if math.isfinite(decibel) else None,
            "timing": "one run each, in turn, after a warm-up of two steps",
        }
        path = self._write(sheet, prompt, record)
        return Result(path, after.picture, after.seconds, after.memory, before.seconds, decibel)

    def _draw(self, prompt: str, seed: int, steps: int | None = None) -> _Shot:
        def step_done(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self.on_step(index + 1, pipe.num_timesteps)
            return {}

        request, device = self.request, torch.device(self.pipe.device)
        sizes = {name: getattr(request, name) for name in ("height", "width") if getattr(request, name) is not None}
        watch = PeakWatch(device)
        start = time.perf_counter()
        output = self.pipe(
            prompt,
            num_inference_steps=steps or request.steps,
            guidance_scale=request.guidance,
            generator=torch.Generator().manual_seed(seed),
            callback_on_step_end=step_done,
            **sizes,
        )
        memory = watch.read()
        return _Shot(output.images[0], time.perf_counter() - start, memory)

    def _record(self, prompt: str, seed: int, shot: _Shot) -> dict[str, Any]:
        request = self.request
        return {
            "prompt": prompt,
            "seed": seed,
            "method": request.config.method,
            "config": request.config.to_dict(),
            "autotune": request.autotune,
            "model": request.model,
            "steps": request.steps,
            "guidance": request.guidance,
            "height": shot.picture.height,
            "width": shot.picture.width,
            "scheduler": type(self.pipe.scheduler).__name__,
            "device": str(self.pipe.device),
            "dtype": str(self.pipe.dtype).removeprefix("torch."),
            "seconds": shot.seconds,
            "peak_memory_bytes": shot.memory.size,
            "peak_memory": shot.memory.what,
            "versions": versions(),
        }

    def _write(self, picture: Image.Image, prompt: str, record: dict[str, Any]) -> Path:
        path = free_name(self.folder, prompt)
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


class PeakWatch:
    """Measures the peak of memory from its creation on: CUDA's allocations, or on the CPU the process's."""

    def __init__(self, device: torch.device) -> None:
        """Start watching.

        Args:
            device: where the pipeline runs.
        """
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> PeakMemory:
        """Wait for the device and return the peak."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return PeakMemory(torch.cuda.max_memory_allocated(self._device), "peak memory allocated by PyTorch on CUDA")
        return PeakMemory(read_high_water_mark(), "peak memory of the whole process since its start (VmHWM)")


def check_text_to_image(pipe: Any) -> None:
    """Check that a pipeline draws a picture from a prompt alone.

    Raises:
        ElfattError: it does not, or it has no UNet.
    """
    find_denoisers(pipe)
    takes = set(inspect.signature(pipe.__call__).parameters)
    alone = {"prompt", "height", "width", "callback_on_step_end"} <= takes
    if not alone or takes & {"image", "control_image", "mask_image", "num_frames"}:
        raise ElfattError(
            f"{type(pipe).__name__} needs more than a prompt; give a text-to-image model, or patch it in Python with "
            "elfatt_sd.apply_patch(pipe)."
        )


def check_writable(folder: Path, given: str | None = None) -> None:
    """Check that files can be written to a folder, and leave nothing behind.

    Args:
        folder: it need not exist.
        given: what the user gave, where that is not `out`.

    Raises:
        ElfattError: the folder cannot be made or written to.
    """
    made: list[Path] = []
    try:
        for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
            missing.mkdir()
            made.append(missing)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        given = given or f"out={str(folder)!r}"
        raise ElfattError(f"{given} cannot be written ({error.strerror}); give a folder that can.") from error
    finally:
        for place in reversed(made):
            place.rmdir()


def free_name(folder: Path, prompt: str) -> Path:
    """Return the next numbered name in a folder, `0001-a-red-star.png`; no file there has its number."""
    taken = [int(match[1]) for path in folder.glob("[0-9]*") if (match := re.match(r"(\d+)-", path.name))]
    words = "-".join(re.findall(r"\w+", prompt.lower()))[:60].rstrip("-") or "picture"
    return folder / f"{max(taken, default=0) + 1:04d}-{words}.png"


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read prompts from a text file, one a line; blank lines do not count.

    Raises:
        ElfattError: the file cannot be read, or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ElfattError(f"prompt_file={str(path)!r} cannot be read ({reason}); give a text file.") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ElfattError(f"prompt_file={str(path)!r} is empty; give a text file with one prompt a line.")
    return prompts


def versions() -> dict[str, str]:
    """Return the versions of what made a picture."""
    libraries = {name: version(name) for name in ("diffusers", "transformers")}
    own = {"elfatt-sd": elfatt_sd.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return own | libraries
