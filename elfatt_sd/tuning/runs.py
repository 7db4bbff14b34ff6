"""Runs of a pipeline and what is kept of them: playback, files, images with their time."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import memory_counters
from elfatt_sd.drawing.studio import Pixels, Shot, begin_of, dimensions_of, draw, exact_size, guidance_options
from elfatt_sd.errors import ElfattError, ElfattFailure, is_out_of_memory
from elfatt_sd.families import step_denoisers
from elfatt_sd.files import cache_folder, write_json
from elfatt_sd.measure import Progress
from elfatt_sd.patch import apply_patch, restored
from elfatt_sd.plans import input_grid, taken
from elfatt_sd.runtime.layer import around_forward
from elfatt_sd.toy import EMBEDDED


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

    def to_dict(self) -> dict[str, Any]:
        frames = [base64.b64encode(png(each)).decode() for each in self.frames]
        return {"frames": frames, "seconds": self.seconds, "peak": self.peak}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Drawn:
        files = (io.BytesIO(base64.b64decode(each)) for each in data["frames"])
        return cls(tuple(Image.open(file).convert("RGB") for file in files), data["seconds"], data["peak"])


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


@dataclass(frozen=True)
class DrawSettings:
    steps: int  # denoising steps
    guidance: float | None = None  # the scale; None where the pipeline has none
    height: int | None = None  # in pixels; None is the model's own
    width: int | None = None  # in pixels; None is the model's own
    frames: int | None = None  # of a clip; None is the pipeline's own
    negative_prompt: str | None = None  # what guidance leads away from
    inputs: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the call, such as an image

    def check(self, pipe: Any) -> None:
        """Refuse a size that a pipeline cannot draw; warn of frames where it makes no clips."""
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


class _Recorded(NamedTuple):
    """What a run of the untouched pipeline gave."""

    outputs: list[Any]  # of the denoiser, on the host; none where it was compiled in place
    ends: list[int]  # after each step, the number of outputs so far
    pixels: Pixels


def _copied(output: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda each: each.detach().to(device, copy=True), output)


class Store:
    """A folder for one model, size, device and set of versions; where it cannot be written, a warning says so once."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        self.folder = cache_folder() / "tune" / short_hash(key)
        self._warned = False

    def known(self, name: str, make: Callable[[], Any] | None, read: Callable[[Any], Any]) -> Any:
        """Return what is kept under a name; it is made and kept if it is not there, or is damaged."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, LookupError):
            return read(json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8")))
        if make is None:
            return None
        made = make()
        try:
            write_json(self.folder / f"{name}.json", made)
        except OSError as error:
            if not self._warned:
                text = f"{error.filename}: {error.strerror}; what tuning measures is not kept for the next run"
                warnings.warn(f"elfatt-sd: {text}. ELFATT_SD_CACHE names another folder.", stacklevel=4)
            self._warned = True
        return read(made)

    def drawn(self, sample: Sample, make: Callable[[], Drawn] | None = None) -> Any:
        """Return the untouched image of a sample, in the same way; None where it is not there and nothing makes it."""
        return self.known(f"image-{short_hash(sample)}", make and (lambda: make().to_dict()), Drawn.from_dict)


def short_hash(data: Any, digits: int = 20) -> str:
    """Return a hash of plain data; of other values, it takes their text."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def embedded_name(pipe: Any) -> str:
    """Return the name of a pipeline of this package; empty for another one."""
    where = str(getattr(pipe.config, "_name_or_path", ""))
    return next((name for name, each in EMBEDDED.items() if where == str(each.folder)), "")


@torch.no_grad()
def fingerprint(module: nn.Module) -> str:
    """Return a hash that changes with the weights of a model: of a few values of every one of them."""
    digest = hashlib.sha256(type(module).__name__.encode())
    for name, weight in module.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        if weight.device.type != "meta":
            digest.update(str(weight.detach().flatten()[:: max(1, weight.numel() // 8)][:8].float().tolist()).encode())
    digest.update(str([part.scaling for part in module.modules() if hasattr(part, "scaling")]).encode())  # of LoRAs
    return digest.hexdigest()[:20]


class Runs:
    """Runs of one pipeline, which nothing else has patched."""

    def __init__(self, pipe: Any, settings: DrawSettings, progress: Progress | None = None) -> None:
        self.pipe = pipe
        self.settings = settings
        self.device = torch.device(pipe._execution_device)
        self.counts_memory = memory_counters(self.device) is not None
        self._progress = progress
        self._steps_done = 0  # of all runs
        self._stage = ("", 0, 0.0)  # its name, the steps that were done before it, and the images that it draws
        self._recorded: dict[Sample, _Recorded] = {}

    def stage(self, name: str, images: float) -> None:
        """Begin a stage that draws so many images, of which the progress is told."""
        self._stage = name, self._steps_done, images

    def draw(self, sample: Sample, config: PatchConfig | None = None) -> Drawn:
        return self._drawn(self._shot(sample, config))

    def draw_recorded(self, sample: Sample) -> Drawn:
        """Draw one image untouched, and keep what the denoiser gives for `draw_from`."""
        outputs: list[Any] = []
        ends: list[int] = []

        def keep(compute: Callable[[], Any]) -> Any:
            outputs.append(_copied(output := compute(), torch.device("cpu")))
            return output

        compiled = any(module._compiled_call_impl for module in step_denoisers(self.pipe).values())
        with contextlib.nullcontext() if compiled else self._around(keep):
            shot = self._shot(sample, None, lambda: ends.append(len(outputs)))
        self._recorded[sample] = _Recorded(outputs, ends, shot.pixels)
        return self._drawn(shot)

    def _drawn(self, shot: Shot) -> Drawn:
        """Return an image with its peak of memory; that of a CPU's process is of all that it ran before."""
        return Drawn(shot.frames, shot.seconds, shot.peak if self.counts_memory else None)

    def draw_from(self, step: int, sample: Sample, config: PatchConfig | None) -> Shot:
        """Draw an image with a patch that is exact before a step; what is known until then is not computed.

        An image that was not recorded is drawn once more, to record it. Steps that are not computed do not count.
        """
        if sample not in self._recorded:
            self.draw_recorded(sample)
        outputs, ends, _ = self._recorded[sample]
        if not outputs:
            return self._shot(sample, config)
        before = max(0, step - begin_of(self.pipe))  # steps of the run
        self._steps_done -= before
        known, device = iter(outputs[: ends[before - 1] if before else 0]), self.pipe._execution_device

        def play(compute: Callable[[], Any]) -> Any:
            output = next(known, None)
            return compute() if output is None else _copied(output, device)

        eager = torch.compiler.set_stance("force_eager")  # compiling would take longer than it saves
        with eager, self._around(play):
            return self._shot(sample, config)

    @contextlib.contextmanager
    def _around(self, around: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
        """Call a function in place of the denoiser, with what computes its output."""
        with contextlib.ExitStack() as undo:
            for module in step_denoisers(self.pipe).values():
                undo.callback(around_forward(module, around))
            yield

    def deviation(self, step: int, sample: Sample, config: PatchConfig) -> float:
        """Return the mean squared error of an image, from 0 to 255, that is drawn with a patch exact before a step."""
        pixels = self.draw_from(step, sample, config).pixels
        return float(np.mean((self._recorded[sample].pixels.astype(np.float64) - pixels) ** 2))

    def pace(self) -> float:
        """Return the seconds of an untouched image's last step, which tell how fast the machine is at the moment.

        The image is the first that was recorded; where none could be, the machine counts as equally fast at all times.
        """
        for sample, recorded in self._recorded.items():
            if recorded.outputs:
                return self.draw_from(begin_of(self.pipe) + len(recorded.ends) - 1, sample, None).seconds
        return 1.0

    def _shot(self, sample: Sample, config: PatchConfig | None, end_step: Callable[[], None] = lambda: None) -> Shot:
        """Draw one image; `end_step` is called after every step of the scheduler."""

        def tell(step: int, steps: int) -> None:
            self._steps_done += 1
            end_step()
            name, before, images = self._stage
            done = max(0, self._steps_done - before)
            if self._progress is not None:
                self._progress(name, done, max(round(images * steps), done))

        with contextlib.ExitStack() as undo:
            if config is not None:
                undo.enter_context(restored(self.pipe))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".* expected to be slower")  # that is what is measured here
                    apply_patch(self.pipe, config)
            try:
                shot = draw(self.pipe, *sample, self.settings.steps, self.settings.arguments(self.pipe), tell)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise ElfattFailure(
                    "memory ran out while an image was drawn; give a smaller height and width, or on a GPU memory=GiB, "
                    "with which steps share nothing."
                ) from error
        if shot.fault:
            raise ElfattError(f"the image of {sample.prompt!r}, seed {sample.seed}, {shot.fault}.")
        return shot
