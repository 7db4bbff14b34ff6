"""Draw images: what is asked for, what a pipeline of any kind takes, and the run that draws."""

from __future__ import annotations

import itertools
import json
import math
import platform
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

import elfatt_sd
from elfatt_sd import errors as checks
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import device_name, memory_counters, memory_of
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_layers, main_denoiser, unwrap
from elfatt_sd.families.shapes import Dimensions
from elfatt_sd.files import atomic_file, write_json
from elfatt_sd.loading import make_scheduler, scheduler_class
from elfatt_sd.measure import PeakMeter, Stopwatch
from elfatt_sd.patch import decided, plan, warn_if_slower
from elfatt_sd.plans import default_of, frames_to_one, taken
from elfatt_sd.runtime.denoiser import OWNER
from elfatt_sd.runtime.layer import around_forward
from elfatt_sd.toy import EMBEDDED

Pixels = npt.NDArray[np.floating[Any]]
_UNET, _TRANSFORMER = 40, 12  # tensors of the first level, or of a block's width, that are held at once
_DECODER = 4.5  # tensors of the decoder's second level, at the size of the image
_FRAME_BYTES = 3 * 4  # of a pixel of a clip that is decoded
_HOPELESS = 4  # times the memory of a machine, above which an image is not begun


@dataclass(frozen=True)
class Request:
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
    image: Path | None = None  # what drawing begins with; None begins with noise
    strength: float | None = None  # how far to go from the image, to 1; None takes the pipeline's own
    lora: Sequence[str] | None = None  # as `read_lora` takes them; for the record
    explain: bool = False  # whether what a layer does is asked for as well

    def __post_init__(self) -> None:
        if not self.prompts or not all(isinstance(each, str) and each.strip() for each in self.prompts):
            raise ElfattError("there is an empty prompt, or none; give at least one, such as 'a red star'.")
        checks.whole("num_images", self.num_images, 1)
        check_run(self.steps, self.guidance, self.seed, self.height, self.width)
        read_image(self.image, self.strength)
        if self.scheduler is not None:
            scheduler_class(self.scheduler)
        for wanted, what in ((self.compare, "compare with"), (self.explain, "explain")):
            if wanted and not self.config.active:
                said = f"the pipeline stays untouched (method={self.config.method!r}), which is nothing to {what}"
                raise ElfattError(f"{said}; give another method, such as elfatt-fast.")


def check_run(steps: int | None, guidance: float | None, seed: int, height: int | None, width: int | None) -> None:
    if steps is not None:
        checks.whole("steps", steps, 1)
    if not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise ElfattError(f"seed={seed!r} is not accepted; give a whole number from 0 to 2^63 - 1.")
    if guidance is not None and not (isinstance(guidance, int | float) and 0 <= guidance < math.inf):
        raise ElfattError(f"guidance={guidance!r} is not accepted; give a number of at least 0.")
    check_sizes(height, width)


def check_sizes(height: int | None, width: int | None) -> None:
    for name, pixels in (("height", height), ("width", width)):
        if pixels is not None and (not isinstance(pixels, int) or pixels <= 0 or pixels % 8):
            raise ElfattError(f"{name}={pixels!r} is not accepted; give a positive multiple of 8.")


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return an image upright, as its EXIF data says, in RGB of 8 bits; transparent pixels are laid over white.

    Raises:
        OSError: it has more than 8 bits.
    """
    if picture.mode.startswith(("F", "I")):
        raise OSError(f"samples of more than 8 bits (mode {picture.mode}); accepted: 8 bits")
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def read_image(path: Path | None, strength: float | None) -> Any:
    """Read an image to begin with, if there is one, and check how far to go from it."""
    if strength is not None and not (path and 0 < strength <= 1):
        given = f"strength={strength:g} is not accepted; give a number above 0, at most 1"
        raise ElfattError(given + (", and an image." if path is None else "."))
    if path is None:
        return None
    try:
        with Image.open(path) as file:
            return as_rgb(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or "not an image of 8 bits"
        raise ElfattError(f"image={str(path)!r} cannot be read ({reason}); give a PNG, a JPEG or the like.") from error


OnStep = Callable[[int, int], None]
OnImage = Callable[[str, str], None]  # what was drawn, and what is wrong with it; the second is empty otherwise


@dataclass(frozen=True)
class Result:
    path: Path  # the PNG
    seconds: float  # from prompt to image, of the method
    memory: str  # peak while it was drawn, in words
    fault: str  # what is wrong with it, in a sentence; empty otherwise
    figures: str = ""  # of the comparison with the untouched image, in words; empty where there is none
    psnr_db: float | None = None  # to the untouched image; None where that was not drawn, or is identical
    pair: Any = None  # of the comparison, `compare.Pair`


@dataclass
class Studio:
    pipe: Any  # a text-to-image pipeline
    request: Request  # what to draw
    folder: Path  # where the files go; it is made when the first one is written
    # called after every denoising step with the step's number, from 1, and how many there are
    on_step: OnStep = lambda step, steps: None

    def __post_init__(self) -> None:
        request, pipe = self.request, self.pipe
        if request.image is None:
            check_text_to_image(pipe)
        own_steps, own_guidance = own_settings(pipe, request.model)
        self.steps = own_steps if request.steps is None else request.steps
        self.guidance = own_guidance if request.guidance is None else request.guidance
        check_steps(pipe, self.steps)
        inputs, height, width = dict[str, Any](), request.height, request.width
        if request.image is not None:
            pipe, inputs, (height, width) = begin_with(pipe, request.image, request.strength, self.steps, height, width)
            self.pipe = pipe
        if request.scheduler is not None:
            pipe.scheduler = make_scheduler(request.scheduler, pipe.scheduler)
        if request.negative_prompt is not None:
            if "negative_prompt" not in taken(pipe):
                raise ElfattError(f"negative_prompt is not accepted; {type(pipe).__name__} has none.")
            if self.guidance is not None and self.guidance <= 1:
                warnings.warn(f"negative_prompt has no effect with guidance={self.guidance:g}.", stacklevel=3)
        elif request.guidance is not None:
            config: Any = unwrap(main_denoiser(pipe)).config
            embeds = config.get("guidance_embeds", True)  # a scale, in Flux
            if not (embeds if "true_cfg_scale" in taken(pipe) else "guidance_scale" in taken(pipe)):
                text = f"guidance={request.guidance:g} has no effect on this model without a negative_prompt."
                warnings.warn(text, stacklevel=3)
        dimensions = dimensions_of(pipe)
        dimensions.check(height, width)
        if text := dimensions.small(height, width):
            warnings.warn(text, stacklevel=3)
        warn_if_too_large(pipe, height, width, rows=rows_of(pipe, self.guidance, request.negative_prompt))
        config = decided(pipe, request.config, (), (height, width, None), self.steps)
        self.request = request = replace(request, config=config)
        if request.config.active and (height or width) and not request.autotune:
            warn_if_slower(plan(pipe, request.config, height=height, width=width))
        tell_cut_prompts(pipe, (*request.prompts, request.negative_prompt or ""))
        pipe.set_progress_bar_config(disable=True)
        self._options = guidance_options(pipe, self.guidance, request.negative_prompt)
        self._options |= exact_size(pipe, height, width) | inputs

    def shots(self) -> Iterator[tuple[str, int]]:
        request = self.request
        return itertools.product(request.prompts, range(request.seed, request.seed + request.num_images))

    def results(self) -> Iterator[Result]:
        """Draw, write and yield one image after the other; what is written stays, whatever happens later."""
        with self.patched():
            for prompt, seed in self.shots():
                shot = self.draw(prompt, seed)
                path = write_image(free_name(self.folder, prompt), shot.frames[0], self.record(prompt, seed, shot))
                yield Result(path, shot.seconds, self.memory(shot), shot.fault and f"the image {shot.fault}")

    def patched(self, config: PatchConfig | None = None) -> AbstractContextManager[Any]:
        """Have the pipeline patched within a `with` block, as the request says if nothing else is given."""
        return elfatt_sd.patched(self.pipe, config or self.request.config, autotune=self.request.autotune)

    def warm_up(self) -> None:
        """Run the pipeline as it is for two steps, so that what comes next does not pay for a first call."""
        (prompt, seed), steps = next(self.shots()), math.ceil(2 / self._options.get("strength", 1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is said of so short a run does not hold for the whole one
            draw(self.pipe, prompt, seed, min(steps, self.steps), self._options, lambda step, steps: None)

    def draw(self, prompt: str, seed: int) -> Shot:
        """Draw one image with the pipeline as it is."""
        if (owner := vars(self.pipe).get(OWNER)) is not None:
            owner.here |= {"negative_prompt": self.request.negative_prompt or "", "guidance": self.guidance}
        return draw(self.pipe, prompt, seed, self.steps, self._options, self.on_step)

    def record(self, prompt: str, seed: int, shot: Shot) -> dict[str, Any]:
        """Return what an image depends on, and what it took, as plain data."""
        request, pipe = self.request, self.pipe
        height, width = shot.pixels.shape[1:3]
        return {
            "prompt": prompt,
            "seed": seed,
            "method": request.config.method,
            "config": request.config.to_dict(origin=True),
            "autotune": request.autotune,
            "model": request.model,
            "steps": self.steps,
            "guidance": self.guidance,
            "negative_prompt": request.negative_prompt,
            "height": height,
            "width": width,
            "scheduler": type(pipe.scheduler).__name__,
            "image": None if request.image is None else str(request.image),
            "strength": self._options.get("strength"),
            "lora": None if request.lora is None else list(request.lora),
            "device": str(pipe._execution_device),
            "machine": device_name(pipe._execution_device),
            "dtype": str(pipe.dtype).removeprefix("torch."),
            "versions": versions(),
            "seconds": shot.seconds,
            "peak_memory_bytes": shot.peak,
            "peak_memory": peak_in_words(pipe._execution_device),
        }

    def memory(self, shot: Shot) -> str:
        size = "not measured" if shot.peak is None else f"{shot.peak / 1e9:.2f} GB"
        return f"{peak_in_words(self.pipe._execution_device)}: {size}"


def write_image(path: Path, picture: Image.Image, record: dict[str, Any]) -> Path:
    """Write a PNG with a record inside, and the record as JSON next to it; both or none."""
    info = PngInfo()
    info.add_text("Software", f"elfatt-sd {elfatt_sd.__version__}")
    for name, value in record.items():
        text = value.encode(errors="backslashreplace").decode() if isinstance(value, str) else json.dumps(value)
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
    words = "-".join(re.findall(r"\w+", prompt.lower()))[:60].encode()[:120].decode(errors="ignore")
    return folder / f"{max(taken, default=0) + 1:04d}-{words.rstrip('-') or 'picture'}.png"


def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("diffusers", "transformers")}
    own = {"elfatt-sd": elfatt_sd.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return own | libraries


# A pipeline of any kind: what its call takes, and a run of it.


def warn_if_too_large(
    pipe: Any, height: int | None, width: int | None, *, rows: int, batch: int = 1, frames: int | None = None
) -> None:
    """Warn of images or clips that are estimated to need more memory than is free, and refuse a hopeless one."""
    dimensions, each = dimensions_of(pipe), pipe.dtype.itemsize
    height, width = dimensions.size(height, width)
    clip = frames or default_of(pipe, "num_frames") or 1
    length = (clip - 1) // frames_to_one(pipe) + 1  # of the latent
    denoiser = main_denoiser(pipe)
    config: Any = unwrap(denoiser).config
    levels = config.get("block_out_channels")
    held = _UNET * levels[0] if levels else _TRANSFORMER * find_layers(denoiser)[0].channels
    denoising = held * (height // dimensions.multiple) * (width // dimensions.multiple) * length * rows * batch * each
    vae: Any = getattr(pipe, "vae", None)
    decoding, given = 0.0, vae.config if hasattr(vae, "decoder") else {}
    widths = given.get("block_out_channels") or given.get("decoder_block_out_channels")
    if widths := widths or [given["base_dim"] * times for times in given.get("dim_mult") or ()]:
        tile = getattr(vae, "tile_sample_min_size", None) or getattr(vae, "tile_sample_min_height", None)
        pixels = min(height * width, tile**2 if tile and getattr(vae, "use_tiling", False) else height * width)
        decoding = _DECODER * widths[min(1, len(widths) - 1)] * pixels * batch
        decoding *= 4 if hasattr(pipe, "upcast_vae") else each
    need, device = max(denoising, decoding, _FRAME_BYTES * height * width * clip * batch), pipe._execution_device
    most, free = memory_of(device)
    if need > free:
        what = f"a batch of {batch} at" if batch > 1 else "an image of"
        said = f"{what} {width}x{height} needs about {need / 2**30:,.1f} GiB of memory (estimated), and "
        said += f"{free / 2**30:,.1f} are free on {device.type}"
        if device.type == "cpu" and batch == 1 and need > _HOPELESS * most:  # the machine would go down
            raise ElfattError(f"{said}; give a smaller one.")
        warnings.warn(f"{said}: it may fail.", stacklevel=3)


def exact_size(pipe: Any, height: int | None, width: int | None) -> dict[str, Any]:
    """Return what makes a pipeline draw a size: PixArt's choose one of a list otherwise, Kontext's one of its area."""
    if (height is None) != (width is None):  # some pipelines draw their own size then
        height, width = dimensions_of(pipe).size(height, width)
    given: dict[str, Any] = {"height": height, "width": width, "use_resolution_binning": False}
    if height is not None and width is not None:
        given["max_area"] = height * width
    return {name: value for name, value in given.items() if value is not None and name in taken(pipe)}


def dimensions_of(pipe: Any) -> Dimensions:
    factor = int(getattr(pipe, "vae_scale_factor", 0) or getattr(pipe, "vae_scale_factor_spatial", 8))
    side: Any = getattr(pipe, "default_sample_size", None)
    height, width = (side * factor if isinstance(side, int) else default_of(pipe, name) for name in ("height", "width"))
    return Dimensions.of(unwrap(main_denoiser(pipe)), factor, (height, width) if height and width else None)


def own_settings(pipe: Any, model: str) -> tuple[int, float | None]:
    """Return the denoising steps and the guidance scale of a pipeline, where nobody gives others."""
    if model in EMBEDDED:
        return EMBEDDED[model].steps, EMBEDDED[model].guidance
    return default_of(pipe, "num_inference_steps"), default_of(pipe, "guidance_scale")


def check_steps(pipe: Any, steps: int) -> None:
    most = pipe.scheduler.config.get("num_train_timesteps") or steps
    if steps > most:
        raise ElfattError(f"steps={steps} is not accepted; give a whole number from 1 to {most}.")


def guidance_options(pipe: Any, guidance: float | None, negative_prompt: str | Sequence[str] | None) -> dict[str, Any]:
    given = {"guidance_scale": guidance, "negative_prompt": negative_prompt}
    if negative_prompt is not None:
        given["true_cfg_scale"] = guidance
    return {name: value for name, value in given.items() if value is not None and name in taken(pipe)}


def rows_of(pipe: Any, guidance: float | None, negative_prompt: str | None = None) -> int:
    config: Any = unwrap(main_denoiser(pipe)).config
    guided = negative_prompt is not None if "true_cfg_scale" in taken(pipe) else not config.get("guidance_embeds")
    return 2 if guided and guidance is not None and guidance > 1 else 1


class Shot(NamedTuple):
    pixels: Pixels  # `[frames, height, width, 3]` from 0 to 255, before they are rounded
    seconds: float  # from prompt to image
    peak: int | None  # of memory meanwhile, in bytes; None where the system does not tell
    fault: str  # what is wrong with it; see `fault_of`

    @property
    def frames(self) -> tuple[Image.Image, ...]:
        return tuple(map(Image.fromarray, np.nan_to_num(self.pixels).round().astype(np.uint8)))


def draw(pipe: Any, prompt: str, seed: int, steps: int, given: dict[str, Any], on_step: OnStep) -> Shot:
    """Draw one image, or clip, with a pipeline as it is, and look whether it is one."""
    device, generator = pipe._execution_device, torch.Generator().manual_seed(seed)
    meter, scheduler, calls = PeakMeter(device), pipe.scheduler, 0

    def tell(step: Callable[[], Any]) -> Any:  # not every pipeline has `callback_on_step_end`
        nonlocal calls
        output, known = step(), len(scheduler.timesteps)
        calls, expected = calls + 1, getattr(pipe, "_num_timesteps", None) or known
        done = max(1, round(steps * expected / known))  # of the steps, where drawing begins with an image
        on_step(min(done, round(calls * done / expected)), done)
        return output

    with torch.no_grad(), ExitStack() as undo, Stopwatch(device) as watch:
        undo.callback(around_forward(scheduler, tell, "step"))
        output = pipe(prompt=prompt, num_inference_steps=steps, generator=generator, output_type="np", **given)
    made = getattr(output, "frames", None)
    made = output.images if made is None else made
    arrays = made.movedim(-3, -1).float().cpu().numpy() if isinstance(made, torch.Tensor) else np.asarray(made)
    if arrays.dtype.kind != "f" or arrays.ndim not in (4, 5) or arrays.shape[-1] != 3:
        raise ElfattError(f"{type(pipe).__name__} gives {arrays.dtype} {list(arrays.shape)}; give one of RGB images.")
    pixels: Pixels = (arrays.clip(0, 1) * 255).reshape(-1, *arrays.shape[-3:])
    flagged = getattr(output, "nsfw_content_detected", None)
    return Shot(pixels, watch.seconds, meter.read(), fault_of(pixels, bool(flagged and any(flagged))))


def begin_of(pipe: Any) -> int:
    """Return the step of its schedule that a pipeline began with: with an image, not the first one."""
    if getattr(pipe, "_denoising_end", None):  # of an SDXL, which leaves the last steps to its refiner
        return getattr(pipe.scheduler, "begin_index", None) or 0
    steps = len(pipe.scheduler.timesteps)
    return steps - (getattr(pipe, "_num_timesteps", None) or steps)


def fault_of(pixels: Pixels, flagged: bool = False) -> str:
    """Return what is wrong with an image that no working pipeline makes, as the end of a sentence; empty otherwise."""
    if not np.isfinite(pixels).all():
        return "is not finite (NaN or infinity): give dtype float32 or bfloat16"
    low, high = (each(pixels.reshape(-1, 3).round(), axis=0) for each in (np.min, np.max))
    if (low < high).any():
        return ""
    cause = "the safety checker" if flagged else "an overflow (give dtype float32 or bfloat16), or a safety checker"
    return f"is {'of one colour' if high.any() else 'black'}: {cause}"


def begin_with(
    pipe: Any, path: Path, strength: float | None, steps: int, height: int | None, width: int | None
) -> tuple[Any, dict[str, Any], tuple[int, int]]:
    """Return a pipeline around the same models that begins with an image, what its call takes, and the size.

    The image is cut and resized to the size that is asked for, or to the nearest to its own that the model can draw.
    """
    from diffusers import AutoPipelineForImage2Image

    kind = type(pipe).__name__
    try:
        made = AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError as error:
        raise ElfattError(f"image is not accepted: diffusers has no image-to-image pipeline for {kind}.") from error
    check_text_to_image(made, {"image"})
    config: Any = unwrap(main_denoiser(pipe)).config
    if config.get("in_channels", 0) > (config.get("out_channels") or math.inf):
        raise ElfattError("image is not accepted: this model wants a mask with it; draw with it in Python.")
    image, own_strength = read_image(path, strength), default_of(made, "strength")
    if strength is not None and own_strength is None:
        raise ElfattError(f"strength={strength:g} is not accepted; {type(made).__name__} has none.")
    inputs = {"strength": own_strength if strength is None else strength} if own_strength else {}
    if int(steps * inputs.get("strength", 1)) < 1:
        raise ElfattError(f"strength={inputs['strength']:g} leaves no step of {steps}; give at least {1 / steps:.3g}.")
    multiple, pairs = math.lcm(8, dimensions_of(made).multiple), [*zip((width, height), image.size, strict=True)]
    scale = max((asked / side for asked, side in pairs if asked), default=1.0)
    size = [asked or round(side * scale) // multiple * multiple for asked, side in pairs]
    dimensions_of(made).check(height, width)
    if min(size) < (least := dimensions_of(made).least):
        said = "image={!r} has {}x{} pixels; give at least {} a side, or height and width."
        raise ElfattError(said.format(str(path), *image.size, least))
    if size != [*image.size]:
        warnings.warn("the image of {}x{} is cut and resized to {}x{}.".format(*image.size, *size), stacklevel=3)
        image = ImageOps.fit(image, (size[0], size[1]))
    return made, {**inputs, "image": image}, (size[1], size[0])


def check_text_to_image(pipe: Any, given: Collection[str] = ("height", "width")) -> None:
    """Refuse a pipeline that does not make images of a prompt, and of what else is given."""
    main_denoiser(pipe)  # refuses others
    kind, takes = type(pipe).__name__, taken(pipe)
    needed = {name for name, each in takes.items() if each.default is each.empty and each.kind < each.VAR_POSITIONAL}
    more = needed - {"prompt", *given} or not {"prompt", "num_inference_steps", *given} <= takes.keys()
    if more or "num_frames" in takes:
        does = "makes videos" if "num_frames" in takes else "needs more than a prompt"
        in_python = "give a text-to-image model, or patch it in Python with elfatt_sd.apply_patch(pipe)."
        raise ElfattError(f"{kind} {does}; {in_python}")


def tell_cut_prompts(pipe: Any, prompts: Iterable[str]) -> None:
    """Warn of prompts that are longer than a pipeline's text encoders take."""
    rooms = []
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        tokenizer: Any = getattr(pipe, name, None)
        if hasattr(tokenizer, "model_max_length"):
            longest = int(tokenizer.model_max_length)
            longest = min(longest, default_of(pipe, "max_sequence_length") or longest)
            rooms.append((longest - int(tokenizer.num_special_tokens_to_add()), tokenizer))
    if rooms:  # what another one cuts off, the one with the most room still reads
        tell_cut("prompts", prompts, *max(rooms, key=lambda pair: pair[0]))


def tell_cut(what: str, texts: Iterable[str], room: int, tokenizer: Any) -> None:
    """Warn, once for all, of texts that have more tokens than a text encoder takes."""
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    found = [tokenizer(text, **options).input_ids for text in dict.fromkeys(texts) if text]
    if cut := [tokens for tokens in found if len(tokens) > room]:
        lost = textwrap.shorten(tokenizer.decode(cut[0][room:]).strip(), 120, placeholder=" ...")
        warnings.warn(
            f"elfatt-sd: {len(cut)} of {len(found)} {what} are cut off: the text encoder takes {room} tokens, and the "
            f"first of them has {len(cut[0])}, without {lost!r}",
            stacklevel=3,
        )
