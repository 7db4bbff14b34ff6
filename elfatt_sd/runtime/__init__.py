"""A patched run: where each call is, what its layers do, and what is kept from step to step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

BYPASSED = (
    "it is called without the hooks of its patched model, by which the step is known; call the model itself, not its "
    "forward or a part of it, and compile the model or its blocks"
)
_ITERATE = "Iterate over scheduler.timesteps in a function that holds the scheduler"
TEXTS = {
    "slower": "{method} is {slower}.",
    "left alone": "{count} layers are left alone, the first is {first}: {why}.{advice}",
    "other model": (
        "the {name} of this {pipe} came into it after apply_patch, and has no patch; call apply_patch again."
    ),
    "other origin": (
        "these settings were tuned for {origin}; here: {here}. What was promised does not hold here; tune again, or "
        "compare images."
    ),
    "autotune": "with autotune, {layer} is {decision}.",
    "bypassed": f"{{layer}} stays exact: {BYPASSED}.",
    "copied": (
        "the weights of a patched model are copied into another one, as AnimateDiffPipeline.from_pipe and "
        "ControlNetModel.from_unet do; the copy has no patch. Call apply_patch on the pipeline that it is in."
    ),
    "displaced": (
        "{count} patched layers now have another attention processor ({classes}), the first is {first}; it is left "
        "there, and they are not accelerated. If your code set it, call apply_patch again afterwards; if the pipeline "
        "sets it in every call, as with perturbed-attention guidance, only the others can be accelerated."
    ),
    "graphs": "CUDA graphs are not used in these calls: {why}.",
    "idle": (
        "{method} approximates no step of this run, which begins with step {first} of {steps}; give more steps, or "
        "settings that approximate in these, such as active_fraction=1 or residual_steps=1."
    ),
    "no reuse": (
        "no step of this run, which begins with step {first} of {steps}, takes over from earlier ones; give more steps "
        "or a longer stretch: with its first and last steps it is too short."
    ),
    "no grid": "the image tokens of this call are not a grid of rows and columns; they stay exact.",
    "no schedule": (
        "{method} adds in one step what it measured in another, and these calls are on no schedule: they are exact. "
        f"{_ITERATE}, or give residual_steps=1, and no reuse."
    ),
    "noise level": (
        "these calls are on no schedule of a scheduler that the calling functions hold; the phase of each is that of "
        f"its noise level, which is not its step where the schedule is shifted. {_ITERATE}."
    ),
    "other unit": (
        "the timestep of this call is on no schedule and in a unit that is not known (a noise level?), so that its "
        "attention is exact; iterate over a tensor of all timesteps, such as scheduler.timesteps."
    ),
    "nothing merged": (
        "no token of {grids} can be merged by {method}, whose attention is exact there; give a larger ratio, a smaller "
        "stride, or a larger image."
    ),
    "stays exact": (
        "{count} of {expected} patched layers stay exact, the first is {first}: {why}. If something else changes the "
        "tokens or bypasses the attention processors, as HyperTile, tomesd and some hooks of diffusers do, take that "
        "out (tomesd.remove_patch(pipe) for tomesd)."
    ),
}


def warn(kind: str, stacklevel: int = 3, **values: Any) -> None:
    warnings.warn(f"elfatt-sd: {TEXTS[kind].format(**values)}", stacklevel=stacklevel)


def origin_in_words(origin: Mapping[str, Any]) -> str:
    image = "" if origin.get("first") in (None, 1) else f", on an image from step {origin['first']} on"
    return "{} at {}, {} steps, {}".format(*map(origin.get, ("model", "size", "steps", "scheduler"))) + image


def other_than(origin: Mapping[str, Any], **here: Any) -> str:
    """Say what differs from what settings were tuned for; empty where nothing does."""
    said = {"weights": "another model, or other weights", "input": "a latent of {} in place of {}", "steps": "{} steps"}
    said |= {"negative_prompt": "negative prompt {!r}", "first": "an image from step {} on"}
    said |= {"first": "no image"} if here.get("first") == 1 else {}
    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, ValueError):  # of an image, in pixels
        (rows, columns), (own_rows, own_columns) = (map(int, each["input"].split("x")) for each in (here, origin))
        width, height = map(int, origin["size"].split("x"))
        said["input"] = f"{columns * width // own_columns}x{rows * height // own_rows}"
    other = {key: new for key, new in here.items() if new is not None and origin.get(key) not in (None, new)}
    return ", ".join(said.get(name, name + " {}").format(other[name], origin[name]) for name in other)
