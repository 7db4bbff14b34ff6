"""Draw images with a pipeline as it is, or with a configuration, and keep the untouched ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from elfatt_sd.config import ElfattError, ElfattFailure, PatchConfig
from elfatt_sd.devices import is_out_of_memory
from elfatt_sd.patch import apply_patch, restored
from elfatt_sd.pictures import Pixels
from elfatt_sd.planning import input_grid
from elfatt_sd.running import Shot, dimensions_of, draw, exact_size, guidance_options, taken
from elfatt_sd.tuning.asked import Measure
from elfatt_sd.tuning.playback import Playback

OnStep = Callable[[int, int], None]


class Sample(NamedTuple):
    """What one image is drawn of."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Drawn:
    """An image, or the frames of a clip; the seconds from prompt to image, and the peak of memory in bytes."""

    frames: tuple[Image.Image, ...]
    seconds: float
    peak: int | None = None

    def same(self, other: Drawn) -> bool:
        return [each.tobytes() for each in self.frames] == [each.tobytes() for each in other.frames]


class Deviation(NamedTuple):
    """How far an image is from the untouched one, in squares of values from 0 to 255."""

    mse: float  # mean squared error of pixels before they are rounded
    rounded: float  # that of the 8-bit images


@dataclass(frozen=True)
class Settings:
    """How the pipeline is called."""

    steps: int  # denoising steps
    guidance: float | None = None  # the scale; None where the pipeline has none
    height: int | None = None  # in pixels; None is the model's own
    width: int | None = None  # in pixels; None is the model's own
    frames: int | None = None  # of a clip; None is the pipeline's own
    negative_prompt: str | None = None  # what guidance leads away from
    inputs: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the call, such as an image

    def check(self, pipe: Any) -> None:
        """Refuse a size that a pipeline cannot draw; warn of frames where it makes no clips."""
        if self.height is not None or self.width is not None:
            dimensions_of(pipe).check(self.height, self.width)
        if "num_frames" in taken(pipe):
            input_grid(pipe, self.height, self.width, self.frames)
        elif self.frames is not None:
            text = f"elfatt-sd: frames={self.frames} has no effect on a {type(pipe).__name__}, which makes no clips."
            warnings.warn(text, stacklevel=3)

    def arguments(self, pipe: Any) -> dict[str, Any]:
        clips = {"num_frames": self.frames} if self.frames is not None and "num_frames" in taken(pipe) else {}
        given = guidance_options(pipe, self.guidance, self.negative_prompt)
        return {**given, **clips, **exact_size(pipe, self.height, self.width), **self.inputs}


class Runs:
    """Runs of one pipeline."""

    def __init__(self, pipe: Any, settings: Settings, on_step: OnStep = lambda step, steps: None) -> None:
        self.pipe = pipe
        self.settings = settings
        self.on_step = on_step
        self.device = torch.device(pipe.device)
        self.steps_done = 0  # of all runs, to say what tuning cost
        self._playbacks: dict[Sample, Playback | None] = {}  # None where that is not possible
        self._pixels: dict[Sample, Pixels] = {}  # of the images that were recorded

    def draw(self, sample: Sample, config: PatchConfig | None = None) -> Drawn:
        """Draw one image."""
        return _kept(self._shot(sample, config))

    def draw_as_is(self, sample: Sample) -> Drawn:
        """Draw one image with whatever is in the pipeline."""
        return _kept(self._shot_as_is(sample))

    def draw_recorded(self, sample: Sample) -> Drawn:
        """Draw one image with the pipeline as it is, and keep what the denoiser gives for `deviation`."""
        playback = Playback(self.pipe)
        with playback.recording() if playback.possible else contextlib.nullcontext():
            shot = self._shot(sample, None, playback.end_step)
        self._playbacks[sample] = playback if playback.possible else None
        self._pixels[sample] = shot.pixels
        return _kept(shot)

    def deviation(self, step: int, sample: Sample, config: PatchConfig) -> Deviation:
        """Return how far an image goes that is drawn with a patch which is exact before a step.

        What is known until then is not computed. An image that was not recorded is drawn once more, to record it.
        """
        pixels = self._shot_from(step, sample, config).pixels
        untouched = self._pixels[sample].astype(np.float64)
        errors = untouched - pixels, untouched.round() - pixels.round()
        return Deviation(*(float(np.mean(each**2)) for each in errors))

    def pace(self) -> float:
        """Return the seconds of an untouched image's last step, which tell how fast the machine is at the moment.

        The image is the first that was recorded; where none was, the machine counts as equally fast at all times.
        """
        for sample, playback in self._playbacks.items():
            if playback is not None:
                return self._played(playback, playback.steps - 1, sample, None).seconds
        return 1.0

    def _shot(
        self, sample: Sample, config: PatchConfig | None = None, end_step: Callable[[], None] = lambda: None
    ) -> Shot:
        with restored(self.pipe):
            if config is not None:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".* expected to be slower")  # that is what is measured here
                    apply_patch(self.pipe, config)
            return self._shot_as_is(sample, end_step)

    def _shot_from(self, step: int, sample: Sample, config: PatchConfig) -> Shot:
        if sample not in self._playbacks:
            self.draw_recorded(sample)
        playback = self._playbacks[sample]
        return self._shot(sample, config) if playback is None else self._played(playback, step, sample, config)

    def _played(self, playback: Playback, step: int, sample: Sample, config: PatchConfig | None) -> Shot:
        """Draw an image of which some steps are not computed, and do not count as done."""
        self.steps_done -= step
        with _eager(), playback.playing(step):
            return self._shot(sample, config)

    def _shot_as_is(self, sample: Sample, end_step: Callable[[], None] = lambda: None) -> Shot:
        """Draw one image with whatever is in the pipeline; `end_step` is called after every step of the scheduler."""
        settings = self.settings

        def tell(step: int, steps: int) -> None:
            self.steps_done += 1
            end_step()
            self.on_step(step, steps)

        with _memory():
            shot = draw(self.pipe, *sample, settings.steps, settings.arguments(self.pipe), tell)
        if shot.fault:
            raise ElfattError(f"the image of {sample.prompt!r}, seed {sample.seed}, {shot.fault}.")
        return shot

    @property
    def threads(self) -> int:
        """Threads that a CPU computes with."""
        return torch.get_num_threads()


def _eager() -> contextlib.AbstractContextManager[None]:
    """Compile nothing for a run whose time does not matter."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Say in one line that memory ran out."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ElfattFailure(
            "memory ran out while an image was drawn; give a smaller height and width, or memory=GiB, with which "
            "steps share nothing."
        ) from error


def _kept(shot: Shot) -> Drawn:
    return Drawn(shot.frames, shot.seconds, shot.peak)


def closeness(measure: Measure, untouched: Drawn, other: Drawn) -> float:
    values = [measure.between(one, two) for one, two in zip(untouched.frames, other.frames, strict=True)]
    return float(np.mean(values))
