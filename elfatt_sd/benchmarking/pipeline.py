"""A whole pipeline with guidance, from prompt to images."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elfatt_sd.benchmarking.models import make_pipeline
from elfatt_sd.benchmarking.names import FLOOR, PEER, UNPATCHED
from elfatt_sd.benchmarking.record import Record, Results, Session
from elfatt_sd.benchmarking.variants import (
    Size,
    Variant,
    as_size,
    fitted_methods,
    fitting,
    height_and_width,
    resolve_methods,
    whole,
)
from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.running import dimensions_of, exact_size, look_at, warn_if_too_large
from elfatt_sd.families import copy_structure, main_denoiser, step_denoisers
from elfatt_sd.loading import pick_device, pick_dtype
from elfatt_sd.measure import peak_memory


def pipeline(
    model: str = "toy",
    *,
    sizes: Sequence[Size] = (),
    methods: Iterable[str | PatchConfig] | None = None,
    batch: int = 1,
    repeats: int = 5,
    steps: int = 25,
    memory: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    variant: str | None = None,
    session: Session | None = None,
    **settings: Any,
) -> Results:
    """Time a whole pipeline with guidance, from text (or its embedding, with random weights) to images."""
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    chosen = resolve_methods(methods, **settings)
    pipe, inputs = make_pipeline(model, place, precision, batch, variant)
    pipe.set_progress_bar_config(disable=True)
    denoiser = main_denoiser(pipe)
    lineup = fitting(whole(fitted_methods(chosen, denoiser, named=methods is not None)), denoiser)
    twins = {name: twin(pipe, variant) for name, variant in lineup.variants.items()}
    asked: dict[str, Any] = {"model": model, "dtype": str(precision).removeprefix("torch."), "steps": steps}
    asked |= {"variants": lineup.described(), **({"variant": variant} if variant else {})}
    record = Record(session, "pipeline", place, asked, **lineup.details((UNPATCHED, PEER)))
    sizes = sizes or (as_size(*dimensions_of(pipe).own),)
    for size in sizes:
        warn_if_too_large(pipe, *height_and_width(size), rows=2, batch=batch)
    measured = [name for name, variant in lineup.variants.items() if memory and variant.kind != FLOOR]
    record.announce(len(sizes) * (repeats * len(twins) + len(measured)))
    for size in sizes:
        calls = {name: functools.partial(_run, each, inputs, size, steps) for name, each in twins.items()}
        few = min(steps, 5)
        warm_up = {name: functools.partial(_look, name, each, inputs, size, few) for name, each in twins.items()}
        key = {"size": size, "batch": batch}
        record.time(key, calls, repeats, warm_up=warm_up)
        for name in measured:
            record.keep_peak(key, name, batch, functools.partial(peak_memory, calls[name], place))
    return record.results


def twin(pipe: Any, variant: Variant) -> Any:
    other = copy.copy(pipe)
    for name, denoiser in step_denoisers(pipe).items():
        setattr(other, name, copy_structure(denoiser))
    return variant.install(other)


def _look(name: str, pipe: Any, inputs: dict[str, Any], size: Size, steps: int) -> None:
    """Run a pipeline, and warn where it draws no image."""
    if fault := look_at(pipe, _run(pipe, inputs, size, steps))[1]:
        warnings.warn(f"elfatt-sd: {name}: the image {fault}", stacklevel=2)


def _run(pipe: Any, inputs: dict[str, Any], size: Size, steps: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    given = {**inputs, **exact_size(pipe, *height_and_width(size)), "generator": generator}
    return pipe(**given, num_inference_steps=steps, output_type="pt")
