"""Load a pipeline: toy, folder, hub or single file; device, dtype and scheduler."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from elfatt_sd.devices import accelerators
from elfatt_sd.errors import ElfattError, ElfattFailure, causes, is_unreachable, need, shortened
from elfatt_sd.families.shapes import SHAPE_NAMES
from elfatt_sd.files import HUB_ID, visible
from elfatt_sd.toy import EMBEDDED

INDEX = "model_index.json"
PICKLES = {".ckpt", ".pt", ".pth", ".bin"}
_WITH_VOCABULARY = ("CLIPTokenizer", "T5Tokenizer", "Qwen2Tokenizer")  # others, such as ByT5's, have none
_VOCABULARY = ("vocab.json", "vocab.txt", "tokenizer.json", "vocab.jsonl", ".model", ".tiktoken")


def check_directory(path: Path, given: Collection[str], variant: str | None) -> None:
    """Check that a directory has all parts, tokenizers their vocabulary, and weights of the variant."""
    model = f"model={str(path)!r}"
    for name, kind in _index(path).items():
        if not (isinstance(kind, list) and kind and kind[0]) or name in given:
            continue
        if not (path / name).is_dir():
            raise ElfattError(f"{model} lacks a part: {name} (named in its {INDEX}).")
        files = visible((path / name).iterdir())
        if str(kind[-1]).startswith(_WITH_VOCABULARY) and not any(file.name.endswith(_VOCABULARY) for file in files):
            raise ElfattError(f"{model} has no vocabulary in {name}.")  # it would draw nonsense
    if variant is not None and not any(f".{variant}" in file.stem for file in visible(path.glob("*/*"))):
        raise ElfattError(f"variant={variant!r} is not in {model}; leave it out, or give another one.")


def _index(path: Path) -> dict[str, Any]:
    index = path / INDEX
    if not index.is_file():
        raise ElfattError(f"model={str(path)!r} has no {INDEX}; give a diffusers pipeline directory.")
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, dict) or not isinstance(parts.get("_class_name"), str):
        raise ElfattError(f"{index} names no pipeline (its _class_name); the model directory is damaged.")
    return parts


SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "dpm++-single": "DPMSolverSinglestepScheduler",
    "dpm2": "KDPM2DiscreteScheduler",
    "dpm2-a": "KDPM2AncestralDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
    "deis": "DEISMultistepScheduler",
    "lcm": "LCMScheduler",
    "tcd": "TCDScheduler",
}
_STEPS = 10  # of a trial; with fewer, some schedulers begin far below the highest timestep


def scheduler_class(name: str) -> Any:
    """Return diffusers' class that a name in `SCHEDULERS` stands for, or that has the name itself."""
    import diffusers

    kind = getattr(diffusers, SCHEDULERS.get(name.lower(), name), None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        accepted = ", ".join(SCHEDULERS)
        raise ElfattError(f"scheduler={name!r} is not known; accepted: {accepted}, or a scheduler class of diffusers.")
    return kind


def make_scheduler(name: str, own: Any) -> Any:
    """Return a scheduler by its name, with the settings of a model's own."""
    kind, reason = scheduler_class(name), ""
    try:
        made = kind.from_config(own.config, **({"skip_prk_steps": True} if kind.__name__ == "PNDMScheduler" else {}))
        begins, wanted = (_begins(copy.deepcopy(each)) for each in (made, own))
        if _predicted(made) != _predicted(own):
            reason = f"it takes the model's {_predicted(own)} for {_predicted(made)}"
        elif not wanted / 2 <= begins <= wanted * 2:
            reason = f"its first timestep is {begins:g} where the model's is {wanted:g}"
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"it fails with the model's settings ({shortened(error)})"
    if reason:
        raise ElfattError(f"scheduler={name!r} does not fit the model's {type(own).__name__}: {reason}; leave it out.")
    return made


def _begins(scheduler: Any) -> float:
    """Do the first step of a run, and return its timestep; whatever fails is raised."""
    set_steps(scheduler, min(_STEPS, scheduler.config.get("num_train_timesteps") or _STEPS))
    first, sample = scheduler.timesteps[0], torch.zeros(1, 3, 8, 8, dtype=torch.float32, device="cpu")
    with torch.random.fork_rng(devices=[]):
        scheduler.step(sample, first, sample)
    return float(first)


def set_steps(scheduler: Any, count: int) -> None:
    scheduler.set_timesteps(count, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))


def _predicted(scheduler: Any) -> str:
    declared = inspect.signature(type(scheduler).__init__).parameters  # other settings are kept without an effect
    settings = {name: value for name, value in scheduler.config.items() if name in declared}
    if hasattr(scheduler, "scale_noise") or settings.get("use_flow_sigmas"):
        return "flow_prediction"
    return str(settings.get("prediction_type", "something else"))


def call_loader(
    model: str | Path, load: Callable[..., Any], *args: Any, source: str = "", what: str = "model", **options: Any
) -> Any:
    """Call a loader of diffusers, which raises errors of any kind for a model that is damaged or not there."""
    importing = logging.getLogger("transformers.utils.import_utils")
    importing.addFilter(_concerns_us)
    try:
        return load(*args, **options)
    except Exception as error:
        failed: type[ElfattError] = ElfattError
        if is_unreachable(error):
            failed, source = ElfattFailure, source.replace("the hub", "the hub, which cannot be reached")
        reason = shortened(error.__cause__ or error)
        if "no file named" in reason:
            reason = (
                f"{reason.rstrip('.')}; give variant='fp16' (--variant fp16) where its weights are *.fp16.safetensors "
                "alone, or allow pickles with allow_pickle=True (--allow-pickle)."
            )
        raise failed(f"{what}={str(model)!r} could not be loaded{source}: {reason}") from error
    finally:
        importing.removeFilter(_concerns_us)


def _concerns_us(record: logging.LogRecord) -> bool:
    """Tell what transformers says of its imports from what diffusers imports without need."""
    return "requires torchvision" not in record.getMessage()


# The first convolution of a UNet, which tells by its input channels what the pipeline hands it.
_FIRST = "model.diffusion_model.input_blocks.0.0.weight"
_KINDS = {  # pipelines by those channels, for each prefix by which a text encoder tells the family
    "conditioner.embedders.1.": {4: "StableDiffusionXLPipeline", 9: "StableDiffusionXLInpaintPipeline"},
    "conditioner.embedders.0.model.": {4: "StableDiffusionXLImg2ImgPipeline"},  # the refiner
    "": {4: "StableDiffusionPipeline", 7: "StableDiffusionUpscalePipeline", 9: "StableDiffusionInpaintPipeline"},
}


def load_file(path: Path, options: dict[str, Any]) -> Any:
    """Load a pipeline from one file; its configuration is next to it, or comes from the hub."""
    import diffusers

    kind = kind_of_file(path)
    beside = (path.parent / INDEX).is_file() and _index(path.parent)["_class_name"] == kind
    if beside and not options.keys() & {"config", "original_config"}:
        options["config"] = str(path.parent)
    try:
        return call_loader(path, lambda: getattr(diffusers, kind).from_single_file(str(path), **options))
    except ElfattFailure as error:
        raise ElfattFailure(
            f"model={str(path)!r} needs the configuration of a {kind}, which is not on this machine, and the hub "
            f"cannot be reached ({shortened(list(causes(error))[-1])}); put its {INDEX} and the folders named there "
            "next to the file, or give config=DIRECTORY in Python."
        ) from error


def kind_of_file(path: Path) -> str:
    """Return the class of pipeline that a checkpoint is of, by its text encoders and by what its UNet takes."""
    if path.suffix.lower() == ".safetensors":
        try:
            with safe_open(path, framework="np") as file:
                names = list(file.keys())
                channels = file.get_slice(_FIRST).get_shape()[1] if _FIRST in names else 0
        except (OSError, SafetensorError) as error:
            raise ElfattError(f"model={str(path)!r} is not a readable .safetensors file: {shortened(error)}") from error
    else:
        weights = call_loader(path, torch.load, path, map_location="meta", weights_only=False)
        names = weights.get("state_dict", weights) if isinstance(weights, dict) else {}
        channels = names[_FIRST].shape[1] if _FIRST in names else 0
    if not channels:
        raise ElfattError(f"model={str(path)!r} is not a Stable Diffusion checkpoint: it has no {_FIRST!r}.")
    kinds = next(_KINDS[prefix] for prefix in _KINDS if any(name.startswith(prefix) for name in names))
    if channels not in kinds:
        accepted = ", ".join(f"{number} ({kind})" for number, kind in kinds.items())
        raise ElfattError(
            f"model={str(path)!r} has a UNet that takes {channels} channels, which no known pipeline hands it; "
            f"accepted: {accepted}."
        )
    return kinds[channels]


def read_lora(given: str) -> tuple[str, str | None, float]:
    """Read `PATH[:SCALE]` before anything is loaded: a folder or a repository of the hub, the file in it, the scale."""
    need("a LoRA", "peft")
    path, colon, scale = given.rpartition(":")
    if not colon or os.path.exists(given) or re.search(r"[/\\]", scale):  # the colon of a Windows drive
        path, scale = given, "1"
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", scale):
        raise ElfattError(f"lora={given!r} has the scale {scale!r}; give a number, as in style.safetensors:0.8.")
    files = sorted(Path(path).glob("*.safetensors")) if os.path.isdir(path) else [Path(path)]
    if len(files) == 1 and os.path.isfile(files[0]):
        with contextlib.suppress(OSError, SafetensorError), safe_open(files[0], "np") as file:
            if any("lora" in name.lower() for name in list(file.keys())):
                return str(files[0].parent), files[0].name, float(scale)
    elif (hub := _HUB_LORA.fullmatch(path)) and not os.path.isdir(path):
        return hub[1], hub[2], float(scale)
    raise ElfattError(
        f"lora={given!r} is not there, or is not a LoRA; give a .safetensors file whose weights have 'lora' in their "
        "names, a folder with one such file, or a hub id. A scale may follow, as in style.safetensors:0.8."
    )


def load_loras(pipe: Any, loras: Mapping[str, tuple[str, str | None, float]]) -> None:
    """Load LoRAs, by what was given for each, with their scales."""
    kind, names = type(pipe).__name__, [f"lora_{number}" for number in range(len(loras))]
    for name, (given, (source, file, _)) in zip(names, loras.items(), strict=True):
        if not hasattr(pipe, "load_lora_weights"):
            raise ElfattError(f"lora={given!r} is not accepted; {kind} takes none.")
        options = {"weight_name": file, "adapter_name": name, "use_safetensors": True}
        where = f" into a {kind}" if os.path.isdir(source) else " from the hub, and there is no such file here"
        call_loader(given, pipe.load_lora_weights, source, source=where, what="lora", **options)
        if not any(name in adapters for adapters in pipe.get_list_adapters().values()):
            raise ElfattError(f"lora={given!r} fits no layer of {kind}; give one for this kind of model.")
    if loras:
        pipe.set_adapters(names, [scale for *_, scale in loras.values()])


_EMBEDDED = " or ".join(map(repr, EMBEDDED))
_DTYPES = {"float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16}
_DTYPES |= {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
_HUB_LORA = re.compile(r"([\w.-]+/(?![^/]*\.safetensors$)[\w.-]+)(?:/(.+))?")  # with a file in it, or without
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
    place = pick_device(device)
    picked = pick_dtype(dtype, place)
    source = check_model(model, allow_pickle=allow_pickle, variant=variant, given=options)
    if (place.type, str(picked)) == ("cpu", "torch.float16"):
        warnings.warn("dtype='float16' is many times slower than float32 on a CPU; give float32.", stacklevel=2)
    keyword = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 42) else "torch_dtype"
    options = {keyword: picked, **options}
    if isinstance(source, Path) and source.is_file():
        return load_file(source, options).to(place)
    from diffusers import DiffusionPipeline

    options |= {"use_safetensors": None if allow_pickle else True, "variant": variant}
    where = "" if isinstance(source, Path) else " from the hub, and there is no such directory here"
    return call_loader(source, DiffusionPipeline.from_pretrained, source, source=where, **options).to(place)


def check_model(
    model: str | Path, *, allow_pickle: bool = False, variant: str | None = None, given: Collection[str] = ()
) -> Path | str:
    """Check what can be known of a model before it is loaded."""
    if not isinstance(model, str | os.PathLike) or not str(model):
        raise ElfattError(f"model={model!r} is not accepted; give {_EMBEDDED}, a folder, a file, or a hub id.")
    path = EMBEDDED[str(model)].folder if str(model) in EMBEDDED else Path(model)
    if path.suffix.lower() in PICKLES and not allow_pickle:
        raise ElfattError(
            f"model={str(model)!r} is a pickle, which can run any code when it is loaded; convert it to .safetensors, "
            "or allow it with allow_pickle=True (--allow-pickle)."
        )
    if os.path.isdir(path):  # which takes any name
        check_directory(path, given, variant)
        return path
    if os.path.isfile(path):
        suffix = path.suffix.lower()
        if suffix != ".safetensors" and suffix not in PICKLES:
            raise ElfattError(f"model={str(path)!r} is not a checkpoint; give a .safetensors file, or a directory.")
        if variant is not None:
            raise ElfattError(f"variant={variant!r} is for a directory or a hub id; model={str(path)!r} is one file.")
        return path
    if HUB_ID.fullmatch(str(model)):
        return str(model)
    shape = str(model) in SHAPE_NAMES
    problem = "is a shape without weights, for elfatt-sd bench and patch" if shape else "does not exist"
    raise ElfattError(
        f"model={str(model)!r} {problem}; give {_EMBEDDED}, a diffusers directory, a .safetensors file, or a hub "
        "id such as 'owner/name'."
    )


def pick_device(device: str) -> torch.device:
    if not _DEVICE.fullmatch(str(device)):
        raise ElfattError(f"device={str(device)!r} is not known; accepted: auto, cpu, cuda, cuda:N, mps, xpu.")
    there = accelerators()
    if device == "auto":
        return torch.device(next(iter(there), "cpu"))
    place = torch.device(device)
    if (place.index or 0) >= {"cpu": 1, **there}.get(place.type, 0):
        names = ["cpu", *(f"{kind}:{index}" for kind, count in there.items() for index in range(count))]
        raise ElfattError(f"device={device!r} is not on this machine; there is: {', '.join(names)}.")
    return place


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ElfattError(f"dtype={str(dtype)!r} is not known; accepted: auto, {', '.join(_DTYPES)}.")
    return found
