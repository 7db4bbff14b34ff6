"""Load a pipeline from the package, a directory, the hub or a single file."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elfatt_sd.config import ElfattError

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
TOY = Path(__file__).parent / "toy" / "weights"
INDEX = "model_index.json"
_PICKLES = {".ckpt", ".pt", ".pth", ".bin"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load_pipeline(
    model: str | Path = "toy",
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    allow_pickle: bool = False,
    **options: Any,
) -> Any:
    """Load a text-to-image pipeline.

    Args:
        model: `toy` (the pipeline in this package), a diffusers directory, a `.safetensors` checkpoint, or a hub id.
            A checkpoint says nothing about the configuration of its parts: it comes from the folder of the file, if a
            `model_index.json` of the same kind lies there, or else from the hub (or from `config=`, see diffusers).
        device: `auto` (CUDA, then MPS, then the CPU) or a torch device.
        dtype: `auto` (float16 on an accelerator, float32 on the CPU), `float32`, `float16` or `bfloat16`.
        allow_pickle: load pickled weights too; they can run any code.
        **options: passed on to diffusers.

    Returns:
        The diffusers pipeline, on the device.

    Raises:
        ElfattError: device, dtype or model that is not there, a pickle, or a directory that lacks a part.
    """
    place = pick_device(device)
    options = {_dtype_keyword(): pick_dtype(dtype, place), **options}
    if str(model) == "toy":
        model = TOY
    path = Path(model)
    if path.suffix.lower() in _PICKLES and not allow_pickle:
        raise ElfattError(
            f"model={str(model)!r} is a pickle, which can run any code when it is loaded; convert it to .safetensors, "
            "or allow it with allow_pickle=True (--allow-pickle)."
        )
    if path.is_dir():
        pipe = _from_directory(path, options, allow_pickle)
    elif path.is_file():
        pipe = _from_file(path, options)
    elif _HUB_ID.fullmatch(str(model)):
        pipe = _from_pretrained(str(model), allow_pickle, options)
    else:
        raise ElfattError(
            f"model={str(model)!r} does not exist; give 'toy', a diffusers directory, a .safetensors file, or a hub id "
            "such as 'owner/name'."
        )
    return pipe.to(place)


def pick_device(device: str) -> torch.device:
    """Return the torch device that a name stands for.

    Raises:
        ElfattError: the device is not known or not there.
    """
    mps = torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ElfattError(f"device={device!r} is not known; accepted: auto, cpu, cuda, cuda:N, mps.") from error
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(mps)}.get(place.type, 0)
    if (place.index or 0) >= there:
        raise ElfattError(f"device={device!r} is not on this machine; there is: {_devices()}.")
    return place


def _devices() -> str:
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ", ".join(["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])])


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the torch dtype that a name stands for on a device.

    Raises:
        ElfattError: the dtype is not known, or the device does not have it.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype)
    if found not in _DTYPES.values() or found is None:
        raise ElfattError(f"dtype={str(dtype)!r} is not known; accepted: auto, {', '.join(_DTYPES)}.")
    if found == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ElfattError(f"dtype={str(dtype)!r} is not there on {torch.cuda.get_device_name(device)}; give float16.")
    return found


def _from_directory(path: Path, options: dict[str, Any], allow_pickle: bool) -> Any:
    wanted = [name for name in _parts(path) if name not in options]
    missing = [name for name in wanted if not (path / name).is_dir()]
    if missing:
        raise ElfattError(f"model={str(path)!r} lacks a part: {', '.join(missing)} (named in its {INDEX}).")
    pickled = [name for name in wanted if _only_pickles(path / name)]
    if pickled and not allow_pickle:
        raise ElfattError(
            f"model={str(path)!r} has no .safetensors weights in {', '.join(pickled)}; convert it, or allow pickles "
            "with allow_pickle=True (--allow-pickle)."
        )
    return _from_pretrained(path, allow_pickle, options)


def _parts(path: Path) -> list[str]:
    """Return the names of the parts that a pipeline directory says it has."""
    return [name for name, kind in _index(path).items() if isinstance(kind, list) and kind and kind[0]]


def _kind_of_directory(path: Path) -> str | None:
    """Return the class of pipeline that a directory holds; None where it holds none."""
    return _index(path).get("_class_name") if (path / INDEX).is_file() else None


def _index(path: Path) -> dict[str, Any]:
    """Read the index of a pipeline directory."""
    index = path / INDEX
    if not index.is_file():
        raise ElfattError(f"model={str(path)!r} has no {INDEX}; give a diffusers pipeline directory.")
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ElfattError(f"{index} is not valid JSON ({error}); the model directory is damaged.") from error
    if not isinstance(parts, dict):
        raise ElfattError(f"{index} holds a {type(parts).__name__}, not an object; the model directory is damaged.")
    return parts


def _only_pickles(part: Path) -> bool:
    suffixes = {file.suffix for file in part.iterdir()}
    return bool(suffixes & _PICKLES) and ".safetensors" not in suffixes


def _from_file(path: Path, options: dict[str, Any]) -> Any:
    import diffusers

    suffix = path.suffix.lower()
    if suffix != ".safetensors" and suffix not in _PICKLES:
        raise ElfattError(f"model={str(path)!r} is not a checkpoint; give a .safetensors file.")
    kind = _single_file_kind(path) if suffix == ".safetensors" else "StableDiffusionPipeline"
    if not options.keys() & {"config", "original_config"} and _kind_of_directory(path.parent) == kind:
        options["config"] = str(path.parent)
    return _load(path, getattr(diffusers, kind).from_single_file, str(path), **options)


def _single_file_kind(path: Path) -> str:
    """Tell SD, SDXL and the SDXL refiner apart by the text encoders that a checkpoint holds."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as weights:
            names = set(weights.keys())
    except (SafetensorError, OSError) as error:
        raise ElfattError(f"model={str(path)!r} is not a readable .safetensors file: {_short(error)}") from error
    if any(name.startswith("conditioner.embedders.1.") for name in names):
        return "StableDiffusionXLPipeline"
    if any(name.startswith("conditioner.embedders.0.model.") for name in names):
        return "StableDiffusionXLImg2ImgPipeline"
    if any(name.startswith("model.diffusion_model.") for name in names):
        return "StableDiffusionPipeline"
    raise ElfattError(
        f"model={str(path)!r} is not a Stable Diffusion checkpoint (no weights under 'model.diffusion_model.')."
    )


def _from_pretrained(model: str | Path, allow_pickle: bool, options: dict[str, Any]) -> Any:
    from diffusers import DiffusionPipeline

    safe = None if allow_pickle else True
    source = "" if isinstance(model, Path) else " from the hub, and there is no such directory here"
    return _load(model, DiffusionPipeline.from_pretrained, model, source=source, use_safetensors=safe, **options)


def _load(model: str | Path, load: Callable[..., Any], *args: Any, source: str = "", **options: Any) -> Any:
    """Call a loader of diffusers, which raises errors of any kind for a model that is damaged or not there."""
    try:
        return load(*args, **options)
    except Exception as error:
        reason = _short(error.__cause__ or error)
        raise ElfattError(f"model={str(model)!r} could not be loaded{source}: {reason}") from error


def _dtype_keyword() -> str:
    """Return the name of the loaders' dtype argument: diffusers 0.42 renamed it."""
    import diffusers

    renamed = tuple(int(part) for part in diffusers.__version__.split(".")[:2]) >= (0, 42)
    return "dtype" if renamed else "torch_dtype"


def _short(error: BaseException) -> str:
    """Return an error's message as one line of bearable length."""
    return textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__
