"""A model in one file: what kind of pipeline it is, by its weights, and how it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elfatt_sd.config import ElfattError, ElfattFailure
from elfatt_sd.directories import INDEX, kind_of_directory
from elfatt_sd.loaders import call_loader, first_cause, shortened

if TYPE_CHECKING:
    pass


Shapes = dict[str, tuple[int, ...]]
# Single files: the first convolution of their UNet tells by its input channels what the pipeline hands it.
_NO_WEIGHTS = {  # first bytes of what is saved in the place of weights
    b"version ": "it is a pointer of Git LFS; run git lfs pull where it comes from",
    b"<!DOCTYP": "it is a web page; download the file itself",
    b"<html": "it is a web page; download the file itself",
    b"GGUF": "it is a GGUF file, which is not known here",
    b"PK\3\4": "it is a pickle or a zip archive",
}
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
_LORA = "a LoRA; load it into a pipeline with pipe.load_lora_weights"
_EMBEDDING = "a textual inversion; load it into a pipeline with pipe.load_textual_inversion"
_TRANSFORMER = "a transformer alone; give the directory of a pipeline that has it"
_PARTS = {  # part of a weight's name in other files: what they hold
    "lora": _LORA,
    ".lokr_": _LORA,
    ".hada_": _LORA,
    ".dora_scale": _LORA,
    "ip_adapter.": "an IP-Adapter; load it into a pipeline with pipe.load_ip_adapter",
    "emb_params": _EMBEDDING,
    "clip_l": _EMBEDDING,
    "double_blocks.": _TRANSFORMER,
    "joint_blocks.": _TRANSFORMER,
    "patch_embedding.": _TRANSFORMER,
    "x_embedder.": _TRANSFORMER,
    "text_model.": "a text encoder alone",
    "control_model.": "a ControlNet",
    "motion_modules.": "a motion module of AnimateDiff",
    "down_blocks.": "one part of a diffusers model; give its directory",
    "encoder.down.": "an autoencoder alone",
}


def load_file(path: Path, options: dict[str, Any]) -> Any:
    """Load a pipeline from one file; its configuration is next to it, or comes from the hub.

    Raises:
        ElfattError: it is not the file of a known pipeline, or it is damaged.
        ElfattFailure: its configuration is not here, and the hub cannot be reached.
    """
    import diffusers

    shapes = weight_shapes(path) if path.suffix.lower() == ".safetensors" else _pickled_shapes(path)
    kind = kind_of_file(path, shapes)
    pipeline = getattr(diffusers, kind)
    if not hasattr(pipeline, "from_single_file"):
        raise ElfattError(
            f"model={str(path)!r} is the single file of a {kind}, which this diffusers loads from a directory alone; "
            "convert it to a diffusers directory."
        )
    beside = kind_of_directory(path.parent)
    if not options.keys() & {"config", "original_config"}:
        if beside == kind:
            options["config"] = str(path.parent)
        elif kind in _CONFIGS:
            options["config"] = _CONFIGS[kind]
    try:
        return call_loader(path, pipeline.from_single_file, str(path), **options)
    except ElfattFailure as error:
        wanted = options.get("config") or _hub_configuration(shapes)
        other = f" (its folder holds a {beside})" if beside else ""
        raise ElfattFailure(
            f"model={str(path)!r} needs the configuration of {wanted!r}, a {kind}{other}, which is not on this "
            f"machine, and the hub cannot be reached ({shortened(first_cause(error))}); put its {INDEX} and the "
            "folders named there next to the file, or give config=DIRECTORY in Python."
        ) from error


def _hub_configuration(shapes: Shapes) -> str:
    """Return the repository whose configuration diffusers takes for a single file."""
    from diffusers.loaders import single_file_utils

    infer: Any = single_file_utils.fetch_diffusers_config
    return str(
        infer({name: SimpleNamespace(shape=shape) for name, shape in shapes.items()})["pretrained_model_name_or_path"]
    )


def weight_shapes(path: Path) -> Shapes:
    """Return the shapes of the weights in a `.safetensors` file: a length in 8 bytes, JSON, and then the data.

    Raises:
        ElfattError: it is not such a file, or its end is missing.
    """
    try:
        with open(path, "rb") as file:
            start, size = file.read(8), path.stat().st_size
            if other := next((what for sign, what in _NO_WEIGHTS.items() if start.startswith(sign)), ""):
                raise ValueError(other)
            length = int.from_bytes(start, "little")
            if not 2 <= length <= size - 8:
                raise ValueError("its header is damaged")
            header = file.read(length)
        ends, shapes = _read_header(header)
        if max(ends, default=0) > size - 8 - length:
            raise ValueError("its end is missing")
        return shapes
    except (OSError, ValueError) as error:
        raise ElfattError(f"model={str(path)!r} is not a readable .safetensors file: {shortened(error)}") from error


def _read_header(header: bytes) -> tuple[list[int], Shapes]:
    """Return where the weights end, and their shapes.

    Raises:
        ValueError: it is damaged.
    """
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
        return [int(entry["data_offsets"][1]) for entry in entries.values()], shapes
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its header is damaged") from error


def _pickled_shapes(path: Path) -> Shapes:
    """Return the shapes of the weights in a pickle, which is allowed to run code by now."""
    import torch

    weights = call_loader(path, torch.load, path, map_location="meta", weights_only=False)
    weights = weights.get("state_dict", weights) if isinstance(weights, dict) else {}
    return {name: tuple(weight.shape) for name, weight in weights.items() if hasattr(weight, "shape")}


def kind_of_file(path: Path, shapes: Shapes) -> str:
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
