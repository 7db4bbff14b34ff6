"""Load a pipeline from the package, a directory, the hub or a single file.

What can be checked without PyTorch is checked before PyTorch is imported.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elfatt_sd.config import ElfattError
from elfatt_sd.directories import PICKLES, check_directory
from elfatt_sd.loaders import call_loader, dtype_keyword
from elfatt_sd.single_files import kind_of_file, load_file, weight_shapes
from elfatt_sd.sizes import SHAPE_NAMES
from elfatt_sd.toy import EMBEDDED

if TYPE_CHECKING:
    import torch


_EMBEDDED = " or ".join(map(repr, EMBEDDED))
_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
_LONGEST_NAME = 240  # characters of a model that a message repeats
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")


def load_pipeline(
    model: str | Path = "toy",
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    allow_pickle: bool = False,
    variant: str | None = None,
    **options: Any,
) -> Any:
    """Load a pipeline.

    Args:
        model: `toy` or `toy-dit` (the pipelines in this package), a diffusers directory, a `.safetensors` checkpoint,
            or a hub id. A checkpoint says nothing about the configuration of its parts: it comes from the folder of the
            file, if a `model_index.json` of the same kind lies there, otherwise from the hub (or from `config=`, see
            diffusers).
        device: `auto` (CUDA, then XPU, then MPS, then the CPU) or a torch device.
        dtype: `auto` (float16 on an accelerator, float32 on the CPU), `float32`, `float16` or `bfloat16`.
        allow_pickle: load pickled weights too; they can run any code.
        variant: of the weights in a directory or on the hub: `fp16` loads `*.fp16.safetensors`.
        **options: passed on to diffusers.

    Returns:
        The diffusers pipeline, on the device.

    Raises:
        ElfattError: device, dtype or model that is not there, a pickle, or a directory that lacks a part.
        ElfattFailure: the hub cannot be reached.
    """
    check_names(device, dtype)
    source = check_model(model, allow_pickle=allow_pickle, variant=variant, given=options)
    place = pick_device(device)
    picked = pick_dtype(dtype, place)
    if (place.type, str(picked)) == ("cpu", "torch.float16"):
        warnings.warn("dtype='float16' is many times slower than float32 on a CPU; give float32.", stacklevel=2)
    options = {dtype_keyword(): picked, **options}
    if isinstance(source, Path) and source.is_file():
        return load_file(source, options).to(place)
    return _from_pretrained(source, allow_pickle, {"variant": variant, **options}).to(place)


def check_names(device: str, dtype: str | torch.dtype) -> None:
    """Check that a device and a dtype have names that are known; whether they are on this machine is seen later."""
    if not _DEVICE.fullmatch(str(device)):
        raise ElfattError(f"device={str(device)!r} is not known; accepted: auto, cpu, cuda, cuda:N, mps, xpu.")
    if str(dtype).removeprefix("torch.") not in ("auto", *_DTYPES):
        raise ElfattError(f"dtype={str(dtype)!r} is not known; accepted: auto, {', '.join(_DTYPES)}.")


def check_model(
    model: str | Path, *, allow_pickle: bool = False, variant: str | None = None, given: Collection[str] = ()
) -> Path | str:
    """Check what can be known of a model before it is loaded."""
    if not isinstance(model, str | os.PathLike):
        raise ElfattError(f"model={model!r} is not accepted; give a name or a path.")
    path = EMBEDDED[str(model)].folder if str(model) in EMBEDDED else Path(model)
    if path.suffix.lower() in PICKLES and not allow_pickle:
        raise ElfattError(
            f"model={str(model)!r} is a pickle, which can run any code when it is loaded; convert it to .safetensors, "
            "or allow it with allow_pickle=True (--allow-pickle)."
        )
    if os.path.isdir(path):  # which takes any name
        check_directory(path, given, allow_pickle, variant)
        return path
    if os.path.isfile(path):
        _check_file(path, variant)
        return path
    if _HUB_ID.fullmatch(str(model)):
        return str(model)
    if str(model) in SHAPE_NAMES:
        raise ElfattError(
            f"model={str(model)!r} is a shape without weights, for elfatt-sd bench and patch; give {_EMBEDDED}, a "
            "diffusers directory, a .safetensors file, or a hub id."
        )
    named = str(model)[:_LONGEST_NAME]
    raise ElfattError(
        f"model={named!r} does not exist; give {_EMBEDDED}, a diffusers directory, a .safetensors file, or a hub id "
        "such as 'owner/name'."
    )


def pick_device(device: str) -> torch.device:
    """Return the torch device that a name stands for."""
    import torch

    from elfatt_sd.devices import accelerators

    check_names(device, "auto")
    there = accelerators()
    if device == "auto":
        return torch.device(next(iter(there), "cpu"))
    place = torch.device(device)
    if (place.index or 0) >= {"cpu": 1, **there}.get(place.type, 0):
        raise ElfattError(f"device={device!r} is not on this machine; there is: {_devices()}.")
    return place


def _devices() -> str:
    from elfatt_sd.devices import accelerators

    found = (f"{kind}:{index}" for kind, count in accelerators().items() for index in range(count))
    return ", ".join(["cpu", *(name.removesuffix(":0") if name.startswith("mps") else name for name in found)])


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the torch dtype that a name stands for on a device."""
    import torch

    from elfatt_sd.devices import device_name

    check_names("auto", dtype)
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    found: torch.dtype = getattr(torch, _DTYPES[str(dtype).removeprefix("torch.")])
    supported = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    if found == torch.bfloat16 and supported is not None and not supported():
        raise ElfattError(f"dtype={str(dtype)!r} is not there on {device_name(device)}; give float16.")
    return found


def _check_file(path: Path, variant: str | None) -> None:
    suffix = path.suffix.lower()
    if suffix != ".safetensors" and suffix not in PICKLES:
        raise ElfattError(f"model={str(path)!r} is not a checkpoint; give a .safetensors file, or a directory.")
    if variant is not None:
        raise ElfattError(f"variant={variant!r} is for a directory or a hub id, and model={str(path)!r} is one file.")
    if suffix == ".safetensors":
        kind_of_file(path, weight_shapes(path))


def _from_pretrained(model: str | Path, allow_pickle: bool, options: dict[str, Any]) -> Any:
    from diffusers import DiffusionPipeline

    safe = None if allow_pickle else True
    source = "" if isinstance(model, Path) else " from the hub, and there is no such directory here"
    load = DiffusionPipeline.from_pretrained
    try:
        return call_loader(model, load, model, source=source, use_safetensors=safe, **options)
    except ElfattError as error:
        if source and options.get("variant") is None and "no file named" in str(error):
            remedy = "if its weights are *.fp16.safetensors alone, give variant='fp16' (--variant fp16)"
            raise ElfattError(f"{error}; {remedy}.") from error
        raise
