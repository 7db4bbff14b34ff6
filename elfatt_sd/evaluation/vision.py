"""Vision transformers of transformers, CLIP and DINOv2, from local directories, and how images get into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from torch import Tensor
from torch.nn import functional

from elfatt_sd.config import ElfattError
from elfatt_sd.files import sha256_of_data, sha256_of_file, visible
from elfatt_sd.typed import read_typed, refused

SIZES = {384: "S", 768: "B", 1024: "L", 1280: "H", 1536: "g", 1664: "bigG"}  # by the width
_USUAL_EDGE, _LARGEST_EDGE = 224, 1024  # a batch of larger images fits few memories
Colour = Annotated[list[float], Meta(min_length=3, max_length=3)]  # red, green and blue


def read_config(folder: Path, who: str, types: Sequence[str], accepted: str) -> Any:
    """Read a model's configuration; `who` wants it and from where, as messages tell."""
    if not (folder / "config.json").is_file():
        raise ElfattError(f"{who} has no config.json; give {accepted}.")
    from transformers import AutoConfig

    with loading(who):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in types:
        raise ElfattError(f"{who} is of type {config.model_type}; accepted: {', '.join(types)}.")
    return config


def read_model(folder: Path, who: str, loader: Any, config: Any) -> Any:
    """Load a model's weights, all of which the folder holds, in float32."""
    options: dict[str, Any] = {"local_files_only": True, "torch_dtype": torch.float32, "output_loading_info": True}
    with loading(who):
        model, report = loader.from_pretrained(folder, config=config, **options)
    missing = sorted(report["missing_keys"])  # which transformers fills with random numbers
    if missing:
        raise ElfattError(f"{who} lacks {len(missing)} of its weights, first {missing[0]}.")
    return model


@contextlib.contextmanager
def loading(who: str) -> Iterator[None]:
    """Tell of what transformers raises within: it has many kinds for damaged files."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ElfattError(f"{who} cannot be loaded ({reason}).") from error


def model_title(config: Any, edge: int) -> str:
    """Name a vision transformer as its makers do: `ViT-L/14`, and `@336` where its images are not of 224 pixels."""
    size = SIZES.get(config.hidden_size)
    base = f"ViT-{size}/{config.patch_size}" if size else f"ViT of width {config.hidden_size}/{config.patch_size}"
    registers = "-reg" if getattr(config, "num_register_tokens", 0) else ""
    return base + registers + (f"@{edge}" if edge != _USUAL_EDGE else "")


class _Processor(Struct, frozen=True):
    """What `preprocessor_config.json` of transformers says."""

    crop_size: Any = None
    size: Any = None
    image_mean: Colour | None = None
    image_std: Annotated[list[Annotated[float, Meta(gt=0)]], Meta(min_length=3, max_length=3)] | None = None


def read_recipe(kind: str, folder: Path, image_size: int) -> dict[str, Any]:
    """Read the directory's own preprocessing; the model's usual one where it has none."""
    path = folder / "preprocessor_config.json"
    stored = read_typed(path, _Processor, "download the model again") or _Processor()
    if kind == "dinov2":
        image_size = min(image_size, _USUAL_EDGE)  # the model takes larger ones, the metric does not
    clip = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    mean, std = clip if kind == "clip" else ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    crop = _edge(path, stored.crop_size, image_size)
    if kind == "clip" and crop != image_size:
        raise refused(f"{path}: crop_size={crop}", f"{image_size}, the side of the model's images")
    return {
        "crop": crop,
        "shortest_edge": max(crop, _edge(path, stored.size, crop)),
        "mean": stored.image_mean or mean,
        "std": stored.image_std or std,
        "sha256": sha256_of_data({file.name: sha256_of_file(file) for file in _model_files(folder)}),
    }


def _edge(path: Path, size: Any, default: int) -> int:
    """A side in pixels from the forms in which transformers stores it."""
    if isinstance(size, dict):
        size = size.get("shortest_edge", size.get("height"))
    if size is None:
        return default
    if not isinstance(size, int) or not 0 < size <= _LARGEST_EDGE:
        raise refused(f"{path}: a size of {size!r}", f"pixels from 1 to {_LARGEST_EDGE}")
    return size


def _model_files(folder: Path) -> list[Path]:
    kinds = {".json", ".safetensors", ".bin"}
    return [path for path in visible(folder.iterdir()) if path.suffix in kinds and path.is_file()]


def to_input(images: Tensor, kind: str, recipe: dict[str, Any]) -> Tensor:
    """Prepare uint8 images: CLIP gets the centre of ones whose shorter side is resized, DINOv2 the whole image."""
    crop = recipe["crop"]
    if kind == "clip":
        height, width = images.shape[2:]
        ratio = recipe["shortest_edge"] / min(height, width)
        pixels = _centre_crop(resized(images, (round(height * ratio), round(width * ratio))), crop)
    else:
        pixels = resized(images, (crop, crop))
    mean, std = (torch.tensor(recipe[name], dtype=torch.float32, device=images.device) for name in ("mean", "std"))
    return (pixels / 255 - mean[:, None, None]) / std[:, None, None]


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(images.shape[2:]) == size:
        return images.float()
    return functional.interpolate(images.float(), size=size, mode="bicubic", antialias=True).clamp(0, 255)


def _centre_crop(images: Tensor, side: int) -> Tensor:
    top, left = ((length - side) // 2 for length in images.shape[2:])
    return images[:, :, top : top + side, left : left + side]
