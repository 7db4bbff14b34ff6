"""A model in one file: what kind of pipeline it is, by its weights, and how it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError, ElfattFailure
from elfatt_sd.directories import INDEX, kind_of_directory
from elfatt_sd.loaders import call_loader, first_cause, shortened

Shapes = dict[str, tuple[int, ...]]
# The first convolution of a UNet, which tells by its input channels what the pipeline hands it.
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


def load_file(path: Path, options: dict[str, Any]) -> Any:
    """Load a pipeline from one file; its configuration is next to it, or comes from the hub."""
    import diffusers

    shapes = weight_shapes(path) if path.suffix.lower() == ".safetensors" else _pickled_shapes(path)
    kind = kind_of_file(path, shapes)
    if not options.keys() & {"config", "original_config"}:
        if kind_of_directory(path.parent) == kind:
            options["config"] = str(path.parent)
        elif kind in _CONFIGS:
            options["config"] = _CONFIGS[kind]
    try:
        return call_loader(path, lambda: getattr(diffusers, kind).from_single_file(str(path), **options))
    except ElfattFailure as error:
        raise ElfattFailure(
            f"model={str(path)!r} needs the configuration of a {kind}, which is not on this machine, and the hub "
            f"cannot be reached ({shortened(first_cause(error))}); put its {INDEX} and the folders named there next to "
            "the file, or give config=DIRECTORY in Python."
        ) from error


def weight_shapes(path: Path) -> Shapes:
    """Return the shapes of the weights in a `.safetensors` file; its data is not read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ElfattError(f"model={str(path)!r} is not a readable .safetensors file: {shortened(error)}") from error


def _pickled_shapes(path: Path) -> Shapes:
    import torch

    weights = call_loader(path, torch.load, path, map_location="meta", weights_only=False)
    weights = weights.get("state_dict", weights) if isinstance(weights, dict) else {}
    return {name: tuple(weight.shape) for name, weight in weights.items() if hasattr(weight, "shape")}


def kind_of_file(path: Path, shapes: Shapes) -> str:
    """Return the class of pipeline that a checkpoint is of, by its text encoders and by what its UNet takes."""
    if _FIRST not in shapes:
        raise ElfattError(f"model={str(path)!r} is not a Stable Diffusion checkpoint: it has no {_FIRST!r}.")
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
