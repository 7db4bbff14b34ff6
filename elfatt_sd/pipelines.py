"""Load a pipeline from the package, a directory, the hub or a single file.

What can be checked without PyTorch is checked before PyTorch is imported.
"""

from __future__ import annotations

import json
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elfatt_sd.config import ElfattError, ElfattFailure
from elfatt_sd.sizes import SHAPE_NAMES
from elfatt_sd.toy import EMBEDDED

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]

_EMBEDDED = " or ".join(map(repr, EMBEDDED))
_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
INDEX = "model_index.json"
_PICKLES = {".ckpt", ".pt", ".pth", ".bin"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")
_VARIANT = re.compile(r"\.([\w-]+?)(?:-\d{5}-of-\d{5})?\.safetensors")  # of model.fp16.safetensors: fp16

# Single files: the first convolution of their UNet tells by its input channels what the pipeline hands it.
_FIRST = "model.diffusion_model.input_blocks.0.0.weight"
_SD_KINDS = {
    4: "StableDiffusionPipeline",
    5: "StableDiffusionDepth2ImgPipeline",
    7: "StableDiffusionUpscalePipeline",
    8: "StableDiffusionInstructPix2PixPipeline",
    9: "StableDiffusionInpaintPipeline",
}
_SDXL_KINDS = {
    4: "StableDiffusionXLPipeline",
    8: "StableDiffusionXLInstructPix2PixPipeline",
    9: "StableDiffusionXLInpaintPipeline",
}
_REFINER_KINDS = {4: "StableDiffusionXLImg2ImgPipeline"}
_CONFIGS = {  # the hub's configurations of kinds that diffusers does not tell from text to image
    "StableDiffusionInstructPix2PixPipeline": "timbrooks/instruct-pix2pix",
    "StableDiffusionXLInstructPix2PixPipeline": "diffusers/sdxl-instructpix2pix-768",
}
_OTHER_MODELS = {  # part of a weight's name in files that have such a convolution too: what they hold
    ".time_stack.": "Stable Video Diffusion",
    "cc_projection.": "Zero123",
    "control_model.": "a ControlNet with its model",
}
_PARTS = {  # part of a weight's name in other files: what they hold
    "lora": "a LoRA; load it into a pipeline with pipe.load_lora_weights",
    "control_model.": "a ControlNet",
    "motion_modules.": "a motion module of AnimateDiff",
    "down_blocks.": "one part of a diffusers model; give its directory",
    "encoder.down.": "an autoencoder alone",
}


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
        device: `auto` (CUDA, then MPS, then the CPU) or a torch device.
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
    options = {_dtype_keyword(): picked, **options}
    if isinstance(source, Path) and source.is_file():
        return _from_file(source, options).to(place)
    return _from_pretrained(source, allow_pickle, {"variant": variant, **options}).to(place)


def check_names(device: str, dtype: str | torch.dtype) -> None:
    """Check that a device and a dtype have names that are known; whether they are on this machine is seen later.

    Raises:
        ElfattError: one of them is not known.
    """
    if not _DEVICE.fullmatch(str(device)):
        raise ElfattError(f"device={str(device)!r} is not known; accepted: auto, cpu, cuda, cuda:N, mps, xpu.")
    if str(dtype).removeprefix("torch.") not in ("auto", *_DTYPES):
        raise ElfattError(f"dtype={str(dtype)!r} is not known; accepted: auto, {', '.join(_DTYPES)}.")


def check_model(
    model: str | Path, *, allow_pickle: bool = False, variant: str | None = None, given: Collection[str] = ()
) -> Path | str:
    """Check what can be known of a model before it is loaded.

    Args:
        model: as for `load_pipeline`.
        allow_pickle: as for `load_pipeline`.
        variant: as for `load_pipeline`.
        given: names of parts that need not be there.

    Returns:
        The directory or file, or a hub id.

    Raises:
        ElfattError: the model is not there, cannot be what `load_pipeline` takes, or lacks a part.
    """
    path = EMBEDDED[str(model)].folder if str(model) in EMBEDDED else Path(model)
    if path.suffix.lower() in _PICKLES and not allow_pickle:
        raise ElfattError(
            f"model={str(model)!r} is a pickle, which can run any code when it is loaded; convert it to .safetensors, "
            "or allow it with allow_pickle=True (--allow-pickle)."
        )
    if path.is_dir():
        _check_directory(path, given, allow_pickle, variant)
        return path
    if path.is_file():
        _check_file(path, variant)
        return path
    if _HUB_ID.fullmatch(str(model)):
        return str(model)
    if str(model) in SHAPE_NAMES:
        raise ElfattError(
            f"model={str(model)!r} is a shape without weights, for elfatt-sd bench and patch; give {_EMBEDDED}, a "
            "diffusers directory, a .safetensors file, or a hub id."
        )
    raise ElfattError(
        f"model={str(model)!r} does not exist; give {_EMBEDDED}, a diffusers directory, a .safetensors file, or a "
        "hub id such as 'owner/name'."
    )


def pick_device(device: str) -> torch.device:
    """Return the torch device that a name stands for.

    Raises:
        ElfattError: the device is not known or not there.
    """
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
    """Return the torch dtype that a name stands for on a device.

    Raises:
        ElfattError: the dtype is not known, or the device does not have it.
    """
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


def _check_directory(path: Path, given: Collection[str], allow_pickle: bool, variant: str | None) -> None:
    wanted = [name for name in _parts(path) if name not in given]
    missing = [name for name in wanted if not (path / name).is_dir()]
    if missing:
        raise ElfattError(f"model={str(path)!r} lacks a part: {', '.join(missing)} (named in its {INDEX}).")
    pickled = [name for name in wanted if _only_pickles(path / name)]
    if pickled and not allow_pickle:
        raise ElfattError(
            f"model={str(path)!r} has no .safetensors weights in {', '.join(pickled)}; convert it, or allow pickles "
            "with allow_pickle=True (--allow-pickle)."
        )
    _check_variant(path, {name: set(_variants(path / name)) for name in wanted}, variant)


def _check_variant(path: Path, found: dict[str, set[str]], variant: str | None) -> None:
    """Check that the weights of every part have the variant, or are plain where there is none of it."""
    named = sorted(set().union(*found.values()) - {""})
    if variant is not None and found and variant not in named and any(found.values()):
        there = ", ".join(map(repr, named)) or "weights without a variant alone"
        raise ElfattError(f"variant={variant!r} is not in model={str(path)!r}; there is: {there}.")
    lacking = [name for name, kinds in found.items() if kinds and not kinds & {"", variant}]
    if lacking:
        raise ElfattError(
            f"model={str(path)!r} has weights of a variant alone in {', '.join(lacking)}; "
            f"give variant={named[0]!r} (--variant {named[0]})."
        )


def _variants(part: Path) -> Iterator[str]:
    """Yield the variants of the weights in a part's folder; the empty one for weights without."""
    for file in part.glob("*.safetensors"):
        found = _VARIANT.search(file.name)
        yield found[1] if found else ""


def _parts(path: Path) -> list[str]:
    """Return the names of the parts that a pipeline directory says it has."""
    return [name for name, kind in _index(path).items() if isinstance(kind, list) and kind and kind[0]]


def _kind_of_directory(path: Path) -> str | None:
    """Return the class of pipeline that a directory holds; None where it holds none."""
    return str(_index(path)["_class_name"]) if (path / INDEX).is_file() else None


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
    if not isinstance(parts.get("_class_name"), str):
        raise ElfattError(f"{index} names no pipeline (its _class_name); give a diffusers pipeline directory.")
    return parts


def _only_pickles(part: Path) -> bool:
    suffixes = {file.suffix for file in part.iterdir()}
    return bool(suffixes & _PICKLES) and ".safetensors" not in suffixes


def _check_file(path: Path, variant: str | None) -> None:
    suffix = path.suffix.lower()
    if suffix != ".safetensors" and suffix not in _PICKLES:
        raise ElfattError(f"model={str(path)!r} is not a checkpoint; give a .safetensors file.")
    if variant is not None:
        raise ElfattError(f"variant={variant!r} is for a directory or a hub id, and model={str(path)!r} is one file.")
    if suffix == ".safetensors":
        _single_file_kind(path, _header(path))


def _from_file(path: Path, options: dict[str, Any]) -> Any:
    import diffusers

    shapes = _header(path) if path.suffix.lower() == ".safetensors" else _pickled_shapes(path)
    kind = _single_file_kind(path, shapes)
    pipeline = getattr(diffusers, kind)
    if not hasattr(pipeline, "from_single_file"):
        raise ElfattError(
            f"model={str(path)!r} is the single file of a {kind}, which this diffusers loads from a directory alone; "
            "convert it to a diffusers directory."
        )
    beside = _kind_of_directory(path.parent)
    if not options.keys() & {"config", "original_config"}:
        if beside == kind:
            options["config"] = str(path.parent)
        elif kind in _CONFIGS:
            options["config"] = _CONFIGS[kind]
    try:
        return _load(path, pipeline.from_single_file, str(path), **options)
    except ElfattFailure as error:
        wanted = options.get("config") or _hub_configuration(shapes)
        other = f" ({beside} is that beside it)" if beside else ""
        raise ElfattFailure(
            f"model={str(path)!r} needs the configuration of {wanted!r}, a {kind}{other}, which is not on this "
            f"machine, and the hub cannot be reached ({_short(_root(error))}); put its {INDEX} and the folders named "
            "there beside the file, or give config=DIRECTORY in Python."
        ) from error


def _hub_configuration(shapes: Shapes) -> str:
    """Return the repository whose configuration diffusers takes for a single file."""
    from diffusers.loaders import single_file_utils

    infer: Any = single_file_utils.fetch_diffusers_config
    return str(
        infer({name: SimpleNamespace(shape=shape) for name, shape in shapes.items()})["pretrained_model_name_or_path"]
    )


def _header(path: Path) -> Shapes:
    """Return the shapes of the weights in a `.safetensors` file: a length in 8 bytes, JSON, and then the data.

    Raises:
        ElfattError: it is no such file, or its end is missing.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError("its header is damaged")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        if max((entry["data_offsets"][1] for entry in entries.values()), default=0) > size - 8 - length:
            raise ValueError("its end is missing")
        return {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ElfattError(f"model={str(path)!r} is not a readable .safetensors file: {_short(error)}") from error


def _pickled_shapes(path: Path) -> Shapes:
    """Return the shapes of the weights in a pickle, which is allowed to run code by now."""
    import torch

    weights = _load(path, torch.load, path, map_location="meta", weights_only=False)
    weights = weights.get("state_dict", weights) if isinstance(weights, dict) else {}
    return {name: tuple(weight.shape) for name, weight in weights.items() if hasattr(weight, "shape")}


def _single_file_kind(path: Path, shapes: Shapes) -> str:
    """Return the class of pipeline that a checkpoint is of, by its text encoders and by what its UNet takes."""
    signs = _OTHER_MODELS if _FIRST in shapes else _PARTS
    other = next((what for part, what in signs.items() if any(part in name for name in shapes)), None)
    if other or _FIRST not in shapes:
        known = f"it is {other}" if other else f"no weights under {_FIRST.removesuffix('.weight')!r}"
        raise ElfattError(f"model={str(path)!r} is not a Stable Diffusion checkpoint ({known}).")
    channels = shapes[_FIRST][1]
    if any(name.startswith("conditioner.embedders.1.") for name in shapes):
        family, kinds = "SDXL", _SDXL_KINDS
    elif any(name.startswith("conditioner.embedders.0.model.") for name in shapes):
        family, kinds = "the SDXL refiner", _REFINER_KINDS
    else:
        family, kinds = "Stable Diffusion", _SD_KINDS
    if channels not in kinds:
        accepted = ", ".join(map(str, kinds))
        raise ElfattError(
            f"model={str(path)!r} is of {family}, and its UNet takes {channels} channels, which no known pipeline "
            f"hands it; accepted: {accepted}."
        )
    return kinds[channels]


def _from_pretrained(model: str | Path, allow_pickle: bool, options: dict[str, Any]) -> Any:
    from diffusers import DiffusionPipeline

    safe = None if allow_pickle else True
    source = "" if isinstance(model, Path) else " from the hub, and there is no such directory here"
    load = DiffusionPipeline.from_pretrained
    try:
        return _load(model, load, model, source=source, use_safetensors=safe, **options)
    except ElfattError as error:
        if source and options.get("variant") is None and "no file named" in str(error):
            remedy = "if its weights are *.fp16.safetensors alone, give variant='fp16' (--variant fp16)"
            raise ElfattError(f"{error}; {remedy}.") from error
        raise


def _load(model: str | Path, load: Callable[..., Any], *args: Any, source: str = "", **options: Any) -> Any:
    """Call a loader of diffusers, which raises errors of any kind for a model that is damaged or not there."""
    try:
        return load(*args, **options)
    except Exception as error:
        kind = ElfattFailure if _unreachable(error) else ElfattError
        if kind is ElfattFailure:
            source = source.replace("the hub", "the hub, which cannot be reached")
        reason = _short(error.__cause__ or error)
        raise kind(f"model={str(model)!r} could not be loaded{source}: {reason}") from error


_NOT_REACHED = {"ConnectionError", "TransportError", "Timeout", "TimeoutError", "gaierror", "OfflineModeIsEnabled"}
_REACHED = {"RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "RemoteEntryNotFoundError"}


def _unreachable(error: BaseException) -> bool:
    """Tell whether a loader failed since the hub could not be asked, by the classes of an error and its causes."""
    chain = list(_causes(error))
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    statuses = [getattr(getattr(each, "response", None), "status_code", 0) for each in chain]
    return bool(names & _NOT_REACHED or max(statuses) >= 500) and not names & _REACHED


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from, the first cause last."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _root(error: BaseException) -> BaseException:
    return list(_causes(error))[-1]


def _dtype_keyword() -> str:
    """Return the name of the loaders' dtype argument: diffusers 0.42 renamed it."""
    import diffusers

    renamed = tuple(int(part) for part in diffusers.__version__.split(".")[:2]) >= (0, 42)
    return "dtype" if renamed else "torch_dtype"


def _short(error: BaseException) -> str:
    """Return an error's message as one line of bearable length."""
    return textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__
