"""Whether methods compute on a device what they compute on a CPU in float32."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from elfatt_sd.benchmarking import Model, unet_call
from elfatt_sd.benchmarking.report import Results, Session
from elfatt_sd.benchmarking.variants import UNPATCHED, Variant, line_up, resolve_methods
from elfatt_sd.config import PatchConfig
from elfatt_sd.families import copy_structure
from elfatt_sd.phases import Backend

# Of the relative L2 difference: as many times that of the untouched model in the same dtype, and at least so much. With
# another rounding other tokens can be the most similar ones, which is no fault.
TIMES, LEAST = 4.0, 1e-3


def correctness(
    models: Mapping[str, Model],
    *,
    size: int,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    methods: Sequence[str | PatchConfig] | None = None,
    backends: Sequence[Backend] = ("auto",),
    session: Session | None = None,
) -> Results:
    """Compare a call of every phase of every method with the same call on a CPU in float32.

    Args:
        models: by name, on a CPU in float32.
        size: of the images in pixels.
        device: what is tried.
        dtypes: on the device.
        methods: as for `resolve_methods`; all presets and their variations by default.
        backends: what patched layers attend with on the device.
        session: where the results go.

    Returns:
        Machine, settings, and a row for each model, variant, dtype and backend: the relative L2 `error`, its `limit`,
        and whether it is `right`; `failed` is why a row has no error.
    """
    names = {"dtypes": [*map(_name, dtypes)], "backends": [*backends], "models": [*models], "size": size}
    record = (session or Session()).begin("correctness", device, names, bases=[])
    configs = resolve_methods(methods)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for name, model in models.items():
            lineup = line_up(configs, model.unet, by_phase=True, named=False)
            variants = {key: each for key, each in lineup.variants.items() if each.kind in ("patch", UNPATCHED)}
            common.keep_rows(record, {"model": name}, [*_rows(model, variants, size, device, dtypes, backends)])
    return record.results


def _rows(
    model: Model,
    variants: Mapping[str, Variant],
    size: int,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    backends: Sequence[Backend],
) -> Iterator[dict[str, Any]]:
    moved = {dtype: Model(_moved(model.unet, device, dtype), model.scale) for dtype in dtypes}
    limits = dict.fromkeys(dtypes, LEAST)
    for name, variant in variants.items():
        wanted = _output(model, variant, size)
        for dtype, there in moved.items():
            for backend in backends if variant.kind == "patch" else ("auto",):
                own = replace(variant, config=replace(variant.config, attention_backend=backend))
                error, failed = _error(there, own, size, wanted)
                if variant.kind == UNPATCHED and error is not None:
                    limits[dtype] = max(LEAST, TIMES * error)
                row = {"method": name, "dtype": _name(dtype), "backend": backend, "error": error, "failed": failed}
                yield row | {"limit": limits[dtype], "right": error is not None and error <= limits[dtype]}


def _moved(unet: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a copy elsewhere; of the module's class, as that of a model warns of precisions."""
    moved: nn.Module = nn.Module.to(copy.deepcopy(unet), device, dtype)
    return moved


def _error(model: Model, variant: Variant, size: int, wanted: Tensor) -> tuple[float | None, str | None]:
    """Return the relative L2 difference, or why there is none."""
    try:
        found = _output(model, variant, size)
    except Exception as error:  # of any kernel; the other rows are still of interest
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    difference = ((found - wanted).norm() / wanted.norm()).item()
    return (difference, None) if math.isfinite(difference) else (None, "not finite")


def _output(model: Model, variant: Variant, size: int) -> Tensor:
    """Call it twice: the second call has what the first kept for it."""
    call = unet_call(variant.install(copy_structure(model.unet)), model.inputs(size, 2))
    call()
    output: Tensor = call().float().cpu()
    return output


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
