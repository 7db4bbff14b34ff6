"""Runs of a pipeline and what is kept of them: playback, files, images with their time, and what they say."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import shutil
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.pictures import Pixels
from elfatt_sd.drawing.running import Shot, dimensions_of, draw, exact_size, guidance_options, taken
from elfatt_sd.errors import ElfattError, ElfattFailure, is_out_of_memory
from elfatt_sd.families import step_denoisers
from elfatt_sd.files import atomic_file, cache_folder, write_json
from elfatt_sd.patch import apply_patch, restored
from elfatt_sd.plans import input_grid
from elfatt_sd.runtime.layer import around_forward
from elfatt_sd.tuning.budget import Measure

OnStep = Callable[[int, int], None]
Read = TypeVar("Read")


class Playback:
    """The denoiser's outputs in one run, kept on the host."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._modules = list(step_denoisers(pipe).values())
        self._outputs: list[Any] = []
        self.ends: list[int] = []  # after each step, the number of calls so far

    def end_step(self) -> None:
        self.ends.append(len(self._outputs))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the outputs of the run within the `with` block."""

        def keep(compute: Callable[[], Any]) -> Any:
            output = compute()
            self._outputs.append(_copied(output, torch.device("cpu")))
            return output

        with self._around(keep):
            yield

    @contextlib.contextmanager
    def playing(self, steps: int) -> Iterator[None]:
        """Give the kept outputs in the first steps of the run within the `with` block, and compute the others."""
        calls, known = itertools.count(), self.ends[steps - 1] if steps else 0
        device = self._pipe._execution_device

        def play(compute: Callable[[], Any]) -> Any:
            number = next(calls)
            return _copied(self._outputs[number], device) if number < known else compute()

        with self._around(play):
            yield

    @contextlib.contextmanager
    def _around(self, around: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for module in self._modules:
                undo.callback(around_forward(module, around))
            yield


def _copied(output: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda each: each.detach().to(device, copy=True), output)


class Store:
    """A folder for one model, size, device and set of versions; where it cannot be written, a warning says so once."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
        self.folder = cache_folder() / "tune" / digest
        self._warned = False
        with self._writing():
            write_json(self.folder / "key.json", dict(key))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Go on where a file cannot be written."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                text = f"{error.filename}: {error.strerror}; what tuning measures is not kept for the next run"
                warnings.warn(f"elfatt-sd: {text}. ELFATT_SD_CACHE names another folder.", stacklevel=4)
            self._warned = True

    def known(self, name: str, make: Callable[[], Any], read: Callable[[Any], Read]) -> Read:
        """Return what is kept under a name; it is made and kept if it is not there, or is damaged."""
        path = self.folder / f"{name}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, LookupError):
            return read(json.loads(path.read_text(encoding="utf-8")))
        made = make()
        with self._writing():
            write_json(path, made)
        return read(made)

    def drawn(self, sample: Sample, make: Callable[[], Drawn]) -> Drawn:
        """Return the untouched image of a sample; it is made and kept if it is not there."""
        name = hashlib.sha256(f"{sample.seed}/{sample.prompt}".encode()).hexdigest()[:20]
        folder = self.folder / "images" / name
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            frames = []
            for number in range(facts["frames"]):
                with Image.open(folder / f"{number}.png") as image:
                    frames.append(image.convert("RGB"))
            return Drawn(tuple(frames), facts["seconds"], facts["peak"])
        made = make()
        with self._writing():
            for number, frame in enumerate(made.frames):
                with atomic_file(folder / f"{number}.png") as file:
                    frame.save(file, format="PNG")
            write_json(folder / "facts.json", {"frames": len(made.frames), "seconds": made.seconds, "peak": made.peak})
        return made

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@torch.no_grad()
def fingerprint(module: nn.Module) -> str:
    """Return a hash that changes with the weights of a model: of a few values of every one of them."""
    digest = hashlib.sha256(type(module).__name__.encode())
    for name, weight in module.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        if weight.device.type != "meta":
            some = weight.detach().flatten()[:: max(1, weight.numel() // 8)][:8]
            digest.update(str(some.float().tolist()).encode())
    return digest.hexdigest()[:20]


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
        return _kept(self._shot(sample, config))

    def draw_as_is(self, sample: Sample) -> Drawn:
        """Draw one image with whatever is in the pipeline."""
        return _kept(self._shot_as_is(sample))

    def draw_recorded(self, sample: Sample) -> Drawn:
        """Draw one image with the pipeline as it is, and keep what the denoiser gives for `deviation`.

        What a denoiser that was compiled in place gives cannot be kept.
        """
        possible = not any(module._compiled_call_impl for module in step_denoisers(self.pipe).values())
        playback = Playback(self.pipe)
        with playback.recording() if possible else contextlib.nullcontext():
            shot = self._shot(sample, None, playback.end_step)
        self._playbacks[sample] = playback if possible else None
        self._pixels[sample] = shot.pixels
        return _kept(shot)

    def draw_from(self, step: int, sample: Sample, config: PatchConfig | None) -> Shot:
        """Draw an image with a patch that is exact before a step; what is known until then is not computed.

        An image that was not recorded is drawn once more, to record it. Steps that are not computed do not count.
        """
        if sample not in self._playbacks:
            self.draw_recorded(sample)
        playback = self._playbacks[sample]
        if playback is None:
            return self._shot(sample, config)
        self.steps_done -= step
        eager = torch.compiler.set_stance("force_eager")  # compiling would take longer than it saves
        with eager, playback.playing(step):
            return self._shot(sample, config)

    def deviation(self, step: int, sample: Sample, config: PatchConfig) -> Deviation:
        """Return how far an image goes that is drawn with a patch which is exact before a step."""
        pixels = self.draw_from(step, sample, config).pixels
        untouched = self._pixels[sample].astype(np.float64)
        errors = untouched - pixels, untouched.round() - pixels.round()
        return Deviation(*(float(np.mean(each**2)) for each in errors))

    def pace(self) -> float:
        """Return the seconds of an untouched image's last step, which tell how fast the machine is at the moment.

        The image is the first that was recorded; where none was, the machine counts as equally fast at all times.
        """
        for sample, playback in self._playbacks.items():
            if playback is not None:
                return self.draw_from(len(playback.ends) - 1, sample, None).seconds
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

    def _shot_as_is(self, sample: Sample, end_step: Callable[[], None] = lambda: None) -> Shot:
        """Draw one image with whatever is in the pipeline; `end_step` is called after every step of the scheduler."""
        settings = self.settings

        def tell(step: int, steps: int) -> None:
            self.steps_done += 1
            end_step()
            self.on_step(step, steps)

        try:
            shot = draw(self.pipe, *sample, settings.steps, settings.arguments(self.pipe), tell)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ElfattFailure(
                "memory ran out while an image was drawn; give a smaller height and width, or memory=GiB, with which "
                "steps share nothing."
            ) from error
        if shot.fault:
            raise ElfattError(f"the image of {sample.prompt!r}, seed {sample.seed}, {shot.fault}.")
        return shot


def _kept(shot: Shot) -> Drawn:
    return Drawn(shot.frames, shot.seconds, shot.peak)


def closeness(measure: Measure, untouched: Drawn, other: Drawn) -> float:
    values = [measure.between(one, two) for one, two in zip(untouched.frames, other.frames, strict=True)]
    return float(np.mean(values))


@dataclass(frozen=True)
class Point:
    """A configuration that was run."""

    name: str  # of it, for tables and plots
    config: PatchConfig  # it
    predicted: float | None  # its predicted PSNR in dB; None for what was not chosen by prediction
    closeness: tuple[float, ...]  # to the untouched image, by image
    speed: tuple[float, ...]  # times as fast as the untouched pipeline, by run
    busy: str = ""  # what to say where these are not to be trusted; empty otherwise

    @property
    def mean(self) -> float:
        return statistics.fmean(self.closeness)

    @property
    def times(self) -> float:
        return statistics.median(self.speed)


@dataclass
class Proof:
    """What the held-out images say of a configuration."""

    point: Point  # the configuration, with its closeness and speed
    samples: Sequence[Sample]  # the held-out images
    untouched: list[Drawn] = field(default_factory=list)  # them, drawn by the untouched pipeline
    tuned: list[Drawn] = field(default_factory=list)  # them, drawn with the configuration
    higher: bool = True  # whether a higher closeness is closer

    def interval(self) -> float:
        from elfatt_sd.evaluation.statistics import student_quantile

        values = self.point.closeness
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return math.inf
        return student_quantile(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))

    @property
    def peak(self) -> int:
        """Highest memory use, in bytes."""
        return max((drawn.peak or 0 for drawn in self.tuned), default=0)

    @property
    def worst(self) -> int:
        """Number of the image that is farthest from the untouched one."""
        far = min if self.higher else max
        return far(range(len(self.samples)), key=self.point.closeness.__getitem__)
