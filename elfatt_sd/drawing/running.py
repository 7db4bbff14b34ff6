"""Run a text-to-image pipeline of any kind: what its call takes, and how far it is."""

from __future__ import annotations

import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from elfatt_sd.devices import memory_of
from elfatt_sd.drawing.pictures import Pixels, fault_of
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import main_denoiser, unwrap
from elfatt_sd.families.shapes import Dimensions, decoder_widths, transformer_width
from elfatt_sd.measure import PeakMeter, Stopwatch
from elfatt_sd.plans import frames_to_one
from elfatt_sd.toy import EMBEDDED

_UNET, _TRANSFORMER = 40, 12  # tensors of the first level, or of a block's width, that are held at once
_DECODER = 4.5  # tensors of the decoder's second level, at the size of the image
_FRAME_BYTES = 3 * 4  # of a pixel of a clip that is decoded


def warn_if_too_large(
    pipe: Any, height: int | None, width: int | None, *, rows: int, batch: int = 1, frames: int | None = None
) -> None:
    """Warn of images or clips that are estimated to need more memory than is free on their device."""
    dimensions, each = dimensions_of(pipe), pipe.dtype.itemsize
    height, width = dimensions.size(height, width)
    clip = frames or _default(pipe, "num_frames") or 1
    length = (clip - 1) // frames_to_one(pipe) + 1  # of the latent
    config: Any = unwrap(main_denoiser(pipe)).config
    channels = config.get("block_out_channels")
    held = _UNET * channels[0] if channels else _TRANSFORMER * transformer_width(config)
    tokens = (height // dimensions.multiple) * (width // dimensions.multiple)
    denoising = held * tokens * length * rows * batch * each
    vae: Any = getattr(pipe, "vae", None)
    decoding = 0.0
    if widths := decoder_widths(vae.config) if hasattr(vae, "decoder") else []:
        tile = getattr(vae, "tile_sample_min_size", None) or getattr(vae, "tile_sample_min_height", None)
        pixels = min(height * width, tile**2 if tile and getattr(vae, "use_tiling", False) else height * width)
        decoding = _DECODER * widths[min(1, len(widths) - 1)] * pixels * batch
        decoding *= 4 if hasattr(pipe, "upcast_vae") else each
    need, device = max(denoising, decoding, _FRAME_BYTES * height * width * clip * batch), torch.device(pipe.device)
    free = memory_of(device)[1]
    if need > free:
        what = f"a batch of {batch} at" if batch > 1 else "an image of"
        warnings.warn(
            f"{what} {width}x{height} needs about {need / 2**30:,.1f} GiB of memory (estimated), and "
            f"{free / 2**30:,.1f} are free on {device.type}: it may fail.",
            stacklevel=3,
        )


def taken(pipe: Any) -> dict[str, inspect.Parameter]:
    inputs = getattr(getattr(pipe, "blocks", None), "inputs", None)
    if inputs is None:
        return dict(inspect.signature(pipe.__call__).parameters)
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    defaults = {each.name: none if each.required else each.default for each in inputs if each.name}
    return {name: inspect.Parameter(name, kind, default=default) for name, default in defaults.items()}


def exact_size(pipe: Any, height: int | None, width: int | None) -> dict[str, Any]:
    """Return what makes a pipeline draw a size: PixArt's choose one of a list otherwise, Kontext's one of its area."""
    if (height is None) != (width is None):  # some pipelines draw their own size then
        height, width = dimensions_of(pipe).size(height, width)
    given: dict[str, Any] = {"height": height, "width": width, "use_resolution_binning": False}
    if height is not None and width is not None:
        given["max_area"] = height * width
    return {name: value for name, value in given.items() if value is not None and name in taken(pipe)}


def dimensions_of(pipe: Any) -> Dimensions:
    """Return the dimensions of a pipeline's images."""
    denoiser: Any = unwrap(main_denoiser(pipe))
    vae: Any = getattr(pipe, "vae", None)
    decoder = vae.config if hasattr(vae, "decoder") else None
    factor = int(getattr(pipe, "vae_scale_factor", 0) or getattr(pipe, "vae_scale_factor_spatial", 8))
    side: Any = getattr(pipe, "default_sample_size", None)
    height, width = (side * factor if isinstance(side, int) else _default(pipe, name) for name in ("height", "width"))
    return Dimensions.of(denoiser.config, decoder, factor, (height, width) if height and width else None)


def _default(pipe: Any, name: str) -> int | None:
    """Return the whole number that a pipeline's call has for an input that is not given; None where it has none."""
    value: Any = getattr(taken(pipe).get(name), "default", None)
    return value if isinstance(value, int) else None


def own_settings(pipe: Any, model: str) -> tuple[int, float | None]:
    """Return the denoising steps and the guidance scale of a pipeline, where nobody gives others."""
    if model in EMBEDDED:
        return EMBEDDED[model].steps, EMBEDDED[model].guidance
    defaults = {name: parameter.default for name, parameter in taken(pipe).items()}
    return defaults["num_inference_steps"], defaults.get("guidance_scale")


def check_steps(pipe: Any, steps: int) -> None:
    """Refuse steps that a pipeline's scheduler cannot take."""
    most = pipe.scheduler.config.get("num_train_timesteps") or steps
    if steps > most:
        raise ElfattError(f"steps={steps} is not accepted; give a whole number from 1 to {most}.")


def guidance_options(pipe: Any, guidance: float | None, negative_prompt: str | Sequence[str] | None) -> dict[str, Any]:
    """Return what sets the guidance of a pipeline."""
    given = {"guidance_scale": guidance, "negative_prompt": negative_prompt}
    if negative_prompt is not None:
        given["true_cfg_scale"] = guidance
    return {name: value for name, value in given.items() if value is not None and name in taken(pipe)}


def guides(pipe: Any) -> bool:
    """Tell whether a guidance scale changes anything without a negative prompt; in Flux, only if it is embedded."""
    config: Any = unwrap(main_denoiser(pipe)).config
    takes = taken(pipe)
    return bool(config.get("guidance_embeds", True)) if "true_cfg_scale" in takes else "guidance_scale" in takes


def rows_of(pipe: Any, guidance: float | None) -> int:
    config: Any = unwrap(main_denoiser(pipe)).config
    return 1 if guidance is None or guidance <= 1 or config.get("guidance_embeds") else 2


@contextmanager
def watched(pipe: Any, steps: int, on_step: Callable[[int, int], None]) -> Iterator[None]:
    """Tell of every denoising step within the `with` block; not every pipeline has `callback_on_step_end`."""
    scheduler, calls = pipe.scheduler, 0
    compute, own = scheduler.step, vars(scheduler).get("step")

    @functools.wraps(compute)  # pipelines look the names of its arguments up
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        output = compute(*args, **kwargs)
        calls += 1
        on_step(min(steps, round(calls * steps / len(scheduler.timesteps))), steps)
        return output

    scheduler.step = step
    try:
        yield
    finally:
        del scheduler.step
        if own is not None:  # another wrapper
            scheduler.step = own


class Shot(NamedTuple):
    """What a pipeline drew."""

    pixels: Pixels  # `[frames, height, width, 3]` from 0 to 255, before they are rounded
    seconds: float  # from prompt to image
    peak: int | None  # of memory meanwhile, in bytes; None where the system does not tell
    fault: str  # what is wrong with it; see `pictures.fault_of`

    @property
    def frames(self) -> tuple[Image.Image, ...]:
        """Its frames; an image has one."""
        return tuple(map(Image.fromarray, np.nan_to_num(self.pixels).round().astype(np.uint8)))


def draw(
    pipe: Any, prompt: str, seed: int, steps: int, given: dict[str, Any], on_step: Callable[[int, int], None]
) -> Shot:
    """Draw one image, or clip, with a pipeline as it is, and look whether it is one."""
    device, generator = torch.device(pipe.device), torch.Generator().manual_seed(seed)
    meter = PeakMeter(device)
    with torch.no_grad(), watched(pipe, steps, on_step), Stopwatch(device) as watch:
        output = pipe(prompt=prompt, num_inference_steps=steps, generator=generator, output_type="np", **given)
    pixels, fault = look_at(pipe, output)
    return Shot(pixels, watch.seconds, meter.read(), fault)


def look_at(pipe: Any, output: Any) -> tuple[Pixels, str]:
    """What a call of a pipeline gave, `[frames, height, width, 3]` from 0 to 255, and what is wrong with it."""
    made = getattr(output, "frames", None)
    made = output.images if made is None else made
    arrays = made.movedim(-3, -1).float().cpu().numpy() if isinstance(made, torch.Tensor) else np.asarray(made)
    if arrays.dtype.kind != "f" or arrays.ndim not in (4, 5) or arrays.shape[-1] != 3:
        raise ElfattError(f"{type(pipe).__name__} gives {arrays.dtype} {list(arrays.shape)}; give one of RGB images.")
    pixels: Pixels = (arrays.clip(0, 1) * 255).reshape(-1, *arrays.shape[-3:])
    flagged = getattr(output, "nsfw_content_detected", None)
    return pixels, fault_of(pixels, bool(flagged and any(flagged)))


def check_text_to_image(pipe: Any) -> None:
    """Check that a pipeline draws an image from a prompt alone."""
    main_denoiser(pipe)  # refuses others
    kind, takes = type(pipe).__name__, taken(pipe)
    in_python = "give a text-to-image model, or patch it in Python with elfatt_sd.apply_patch(pipe)."
    if "num_frames" in takes:
        raise ElfattError(f"{kind} makes videos; {in_python}")
    needed = {name for name, each in takes.items() if each.default is each.empty and each.kind < each.VAR_POSITIONAL}
    if needed - {"prompt"} or not {"prompt", "height", "width", "num_inference_steps"} <= takes.keys():
        raise ElfattError(f"{kind} needs more than a prompt; {in_python}")


def tell_cut_prompts(pipe: Any, prompts: Iterable[str]) -> None:
    """Warn of prompts that are longer than a pipeline's text encoders take."""
    rooms = []
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        tokenizer: Any = getattr(pipe, name, None)
        if hasattr(tokenizer, "model_max_length"):
            longest = int(tokenizer.model_max_length)
            longest = min(longest, _default(pipe, "max_sequence_length") or longest)
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
