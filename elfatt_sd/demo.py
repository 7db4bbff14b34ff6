"""Draw for a page what a method does: an image untouched and patched, their figures, and the plan."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from elfatt_sd.config import ElfattError, PatchConfig
from elfatt_sd.console import in_plain_words
from elfatt_sd.generation import OnStep, Studio, fault_of_pair, why_unchanged
from elfatt_sd.measuring.clock import ratios
from elfatt_sd.patch import plan
from elfatt_sd.pictures import psnr
from elfatt_sd.presets import method_named
from elfatt_sd.request import Request
from elfatt_sd.running import Shot


@dataclass(frozen=True)
class Pair:
    """What was drawn for one request."""

    untouched: Image.Image  # the image of the pipeline as it is
    patched: Image.Image  # the image with the method
    figures: str  # how many times as fast, and how close, in a sentence or two
    plan: str  # what was patched, in lines


@dataclass
class Demo:
    """Pipelines that are loaded when they are first asked for; one image is drawn at a time."""

    load: Callable[[str], Any]  # returns a pipeline by its name, as `load_pipeline` does
    _pipes: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(
        self,
        model: str,
        prompt: str,
        method: str,
        file: str | Path | None = None,
        steps: int | None = None,
        seed: int = 0,
        on_step: OnStep = lambda step, steps: None,
    ) -> Pair:
        """Draw an image untouched and patched, in turn, after a warm-up of two steps each."""
        config = method_named(method) if file is None else PatchConfig.load(file)
        request = Request((prompt,), config, model=model, steps=steps, seed=seed, compare=True)
        with self._lock:
            if model not in self._pipes:
                self._pipes[model] = self.load(model)
            return self._draw(self._pipes[model], request, on_step)

    def answer(
        self,
        model: str,
        prompt: str,
        method: str,
        file: str | None,
        steps: float | None,
        seed: float | None,
        on_step: OnStep,
    ) -> Pair:
        """Draw what the fields of a page ask for; see `draw`. An empty field is None."""
        if seed is None:
            raise ElfattError("there is no seed; give a whole number, such as 0.")
        whole = None if steps is None else int(steps)
        try:
            return self.draw(model, prompt, method, file or None, whole, int(seed), on_step)
        except Exception as error:
            raise ElfattError(in_plain_words(error)) from error

    def _draw(self, pipe: Any, request: Request, on_step: OnStep) -> Pair:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            before, after = self._shots(Studio(pipe, request, Path()), on_step)
        said = dict.fromkeys(str(warning.message) for warning in told if "elfatt-sd" in str(warning.message))
        pictures = before.frames[0], after.frames[0]
        decibel, ratio = psnr(*pictures), ratios([before.seconds], [after.seconds])[0]
        if fault := fault_of_pair(before, after):
            figures = f"Not compared: {fault}."
        elif math.isfinite(decibel):
            figures = f"{ratio:.2f} times as fast as untouched (one image each, in turn, after a warm-up); "
            figures += f"PSNR {decibel:.1f} dB."
        else:
            figures = why_unchanged(request.config, len(pipe.scheduler.timesteps))
        planned = plan(pipe, request.config, height=pictures[0].height, width=pictures[0].width)
        return Pair(*pictures, " ".join([figures, *said]), str(planned))

    def _shots(self, studio: Studio, on_step: OnStep) -> tuple[Shot, Shot]:
        """Draw untouched and patched, after a warm-up of each."""
        prompt, seed = studio.request.prompts[0], studio.request.seed
        studio.warm_up()
        with studio.patched():
            studio.warm_up()
        studio.on_step = lambda step, steps: on_step(step, 2 * steps)
        before = studio.draw(prompt, seed)
        with studio.patched():
            studio.on_step = lambda step, steps: on_step(steps + step, 2 * steps)
            return before, studio.draw(prompt, seed)
