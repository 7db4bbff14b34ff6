"""A metric of one's own: `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.metrics.base import Batch, ImageMetric, MetricChoice
from elfatt_sd.files import sha256_of_code

# Figures that a report has already: distances, and what compares with the untouched image.
_TAKEN = re.compile(r"(FID|KID|FD|KD|PSNR|SSIM|cosine|accuracy)\b.*|cell|label|method|role|images|classes|failed", re.I)
_WANTED = "function(images, prompts) or function(images, prompts, untouched)"


def load_own(choice: MetricChoice) -> ImageMetric:
    """Import a function that gives a number for every image.

    It is called as `function(images, prompts)` or, where it has a third parameter, `function(images, prompts,
    untouched)`, which then has no value for the untouched pipeline itself. Parameters with a default are left at it,
    but for one named `untouched`. `images` are uint8 `[n, 3, h, w]`, of clips
    `[n, f, 3, h, w]`; `prompts` n texts; `untouched` the baseline's images of the same latents. It returns n numbers.
    """
    function = _imported(choice.metric)
    count = _arguments(choice.metric, function)
    name = choice.name or str(getattr(function, "__name__", choice.metric))

    if _TAKEN.fullmatch(name):
        raise ElfattError(f"name={name!r} of metric {choice.metric!r} is that of another figure; give another name.")

    def measure(batch: Batch) -> Tensor:
        return _called(choice.metric, function, batch, count == 3)

    description = {"function": choice.metric, "code_sha256": _code(function)}
    return ImageMetric(name, measure, description, better=choice.better, compares=count == 3)


def _arguments(metric: str, function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ElfattError(f"metric={metric!r} tells no parameters; give a {_WANTED}.") from error
    wanted = [each for each in parameters if each.default is each.empty or each.name == "untouched"]
    by_place = all(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in wanted)
    if not by_place or len(wanted) not in (2, 3):
        said = ", ".join(str(each) for each in wanted)
        raise ElfattError(f"metric={metric!r} takes ({said}); give a {_WANTED}.")
    return len(wanted)


def _imported(metric: str) -> Callable[..., Any]:
    module, _, name = metric.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise ElfattError(f"metric={metric!r} cannot be imported ({type(error).__name__}: {error}).") from error
    if not callable(found):
        raise ElfattError(f"metric={metric!r} is a {type(found).__name__}; give a {_WANTED}.")
    return found  # type: ignore[no-any-return]


def _code(function: Callable[..., Any]) -> str:
    try:
        module = inspect.getmodule(function)
        return sha256_of_code([inspect.getsource(module)]) if module else ""
    except (OSError, TypeError, SyntaxError):
        return ""


def _called(metric: str, function: Callable[..., Any], batch: Batch, compares: bool) -> Tensor:
    def given(images: Tensor) -> Tensor:
        return images[:, 0] if images.shape[1] == 1 else images

    more = [given(batch.untouched)] if compares and batch.untouched is not None else []
    try:
        values = torch.as_tensor(function(given(batch.images), list(batch.prompts), *more), device="cpu")
    except (Exception, SystemExit) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ElfattError(f"metric={metric!r} failed ({type(error).__name__}: {reason}); mend the function.") from error
    if values.shape != (len(batch.prompts),):
        wanted = f"one number for each of {len(batch.prompts)} images"
        raise ElfattError(f"metric={metric!r} returned the shape {tuple(values.shape)}; give {wanted}.")
    if values.is_complex():
        raise ElfattError(f"metric={metric!r} returned complex numbers; give real ones.")
    return values.detach().cpu()
