"""Feature extractors: uint8 images in, float32 features out, and a description of all that happens between.

Legend for shapes: n images of h x w pixels, d features.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.devices import plain_defaults
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.evaluation.statistics import LARGEST
from elfatt_sd.files import read_typed, refused, sha256_of_data, sha256_of_file, visible
from elfatt_sd.methods.base import in_one_line

SIZES = {384: "S", 768: "B", 1024: "L", 1280: "H", 1536: "g", 1664: "bigG"}  # of vision transformers, by the width
_USUAL_EDGE = 224
EXTRACTORS = ("inception", "inception:pytorch-fid", "inception:clean-fid", "toy", "clip:DIR", "dinov2:DIR")
# The network of the original FID, converted for PyTorch: published by pytorch-fid and torch-fidelity as the same file.
INCEPTION_URL = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
)
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
INCEPTION_SIZE, TOY_SIZE = 299, 256
# How images get into Inception, by the package that does it so; each has other values on the same images.
INCEPTION_WAYS = {
    "torch-fidelity": "bilinear to 299x299 as in TensorFlow 1 (no antialiasing), inside the network",
    "pytorch-fid": "bilinear to 299x299 between pixel centres (no antialiasing), as pytorch-fid",
    "clean-fid": "bicubic with antialiasing to 299x299, clamped to [0, 255], as clean-fid",
}
_MODEL_TYPES = {"clip": ("clip", "clip_vision_model"), "dinov2": ("dinov2", "dinov2_with_registers")}


class Extractor(nn.Module):
    """A network, how images get into it, and what a distance on its features is called."""

    def __init__(
        self,
        name: str,  # short name, for files
        # name of the Frechet distance, with the model or the way of its images; `FID` is the original Inception network
        # only
        distance_name: str,
        dimension: int,  # d
        network: nn.Module,
        preprocessing: dict[str, Any],  # everything that the features depend on, as plain data; part of every hash
        features: Callable[[Tensor], Tensor] | None = None,  # of uint8 images, where the network does not take these
    ) -> None:
        super().__init__()
        self.name, self.distance_name, self.dimension = name, distance_name, dimension
        self.kernel_name = re.sub("^F(?=I?D)", "K", distance_name)  # name of the kernel distance
        self.preprocessing = {"extractor": name, **preprocessing}
        self.network = network.requires_grad_(False).eval().float()
        self.of_images = features

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def identity(self) -> str:
        return sha256_of_data(self.preprocessing)

    def forward(self, images: Tensor) -> Tensor:
        """Compute features of uint8 images `[n, 3, h, w]` in float32: no autocast, no TF32."""
        with torch.no_grad(), exact_float32(self.device):
            features: Tensor = (self.of_images or self.network)(images.to(self.device))
        if not (features.abs() < LARGEST).all():  # so written, NaN is none of these
            said = f"gives NaN, or numbers of {LARGEST:g} and more"
            raise ElfattError(f"extractor {self.name} {said}; its weights or preprocessing are damaged.")
        return features.float()


@plain_defaults()
def load_extractor(
    spec: str, *, weights: Path | None = None, sha256: str | None = None, device: str | torch.device = "cpu"
) -> Extractor:
    kind, _, part = spec.partition(":")
    if kind in _MODEL_TYPES and part:
        return _load_vision(kind, Path(part)).to(device)
    if spec == "inception" or (kind == "inception" and part in INCEPTION_WAYS):
        return _load_inception(part or "torch-fidelity", weights, sha256).to(device)
    if spec != "toy":
        raise ElfattError(f"extractor={spec!r} is not known; accepted: {', '.join(EXTRACTORS)}.")
    from elfatt_sd.toy.features import CLASSIFIER_FILE, load_feature_extractor

    classifier, size = load_feature_extractor(path=CLASSIFIER_FILE), (TOY_SIZE, TOY_SIZE)
    resize = f"bicubic with antialiasing to {TOY_SIZE}x{TOY_SIZE} unless it is that already"
    recipe = {"resize": resize, "scale": "[-1, 1]", "sha256": sha256_of_file(CLASSIFIER_FILE)}
    toy = Extractor("toy", "FD-toy", 64, classifier, recipe, lambda images: classifier(resized(images, size) / 255))
    return toy.to(device)


def toy_attributes(extractor: Extractor, features: Tensor) -> dict[str, Tensor]:
    """Read attributes from the toy's features `[n, 64]`: indices `[n]` for each of the renderer's `ATTRIBUTES`."""
    network: Any = extractor.network
    with torch.no_grad():
        scores = network.scores(features.to(extractor.device).float())
    return {name: each.argmax(1).cpu() for name, each in scores.items()}


def _load_inception(way: str, weights: Path | None, sha256: str | None) -> Extractor:
    """The Inception network of the original FID, with the preprocessing of a package of `INCEPTION_WAYS`."""
    need("extractor='inception'", "torch-fidelity", "torchmetrics")
    from torchmetrics.image.fid import NoTrainInceptionV3

    accepted = (sha256 or INCEPTION_SHA256).lower()
    path = weights or Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_URL.rpartition("/")[2]
    if weights is None and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_one_line(f"Inception weights cannot be fetched; get {INCEPTION_URL} and give --inception-weights FILE"):
            torch.hub.download_url_to_file(INCEPTION_URL, str(path), hash_prefix=INCEPTION_SHA256, progress=False)
    if not path.is_file():
        raise ElfattError(f"Inception weights {path} do not exist; give the file published at {INCEPTION_URL}.")
    found = sha256_of_file(path)
    if found != accepted:
        others = "or other weights with inception_sha256, whose distance is not called FID"
        raise ElfattError(f"Inception weights {path} have sha256 {found}; accepted is {accepted}, {others}.")
    with in_one_line(f"Inception weights {path} cannot be loaded"):
        torch.load(path, map_location="cpu", weights_only=True)  # a pickle could run code where the network loads it
        network: nn.Module = NoTrainInceptionV3("inception-v3-compat", ["2048"], str(path), antialias=False)
    scale = "2 x / 255 - 1" if way == "pytorch-fid" else "(x - 128) / 128"
    name = "FID" if found == INCEPTION_SHA256 else f"FD-Inception-{found[:8]}"
    if way != "torch-fidelity":  # the layers in the order of the pass, up to the class scores
        layers = itertools.takewhile(lambda layer: layer[0] != "fc", network.named_children())
        network, name = nn.Sequential(*(layer for _, layer in layers), nn.Flatten()), f"{name} ({way})"

    def features(images: Tensor) -> Tensor:
        pixels, size = images, (INCEPTION_SIZE, INCEPTION_SIZE)
        if way == "clean-fid":
            pixels = (resized(images, size) - 128) / 128
        elif way == "pytorch-fid":
            pixels = functional.interpolate(images.float() / 255, size=size, mode="bilinear", align_corners=False)
            pixels = 2 * pixels - 1
        found: Tensor = network(pixels)
        return found

    recipe = {"resize": INCEPTION_WAYS[way], "scale": scale, "sha256": found}
    return Extractor("inception", name, 2048, network, recipe, features)


def _load_vision(kind: str, folder: Path) -> Extractor:
    """A vision transformer from a local directory, whose images are prepared as in Stein et al. 2023."""
    from transformers import AutoModel, CLIPVisionModelWithProjection

    who = f"extractor {kind}:{folder}"
    config = read_config(folder, who, _MODEL_TYPES[kind], "a local directory of a transformers model")
    if config.model_type == "clip":  # text and images, which share the size of the projection
        config.vision_config.projection_dim = config.projection_dim
        config = config.vision_config
    network = read_model(folder, who, CLIPVisionModelWithProjection if kind == "clip" else AutoModel, config)
    dimension = config.projection_dim if kind == "clip" else config.hidden_size
    recipe = read_recipe(kind, folder, config.image_size)
    model = model_title(config, recipe["crop"])
    part = "shorter side, then centre crop" if kind == "clip" else "the whole picture to a square"
    resize = f"bicubic with antialiasing: {part}, clamped to [0, 255]"

    def features(images: Tensor) -> Tensor:
        output = network(pixel_values=to_input(images, kind, recipe))
        found: Tensor = output.image_embeds if kind == "clip" else output.last_hidden_state[:, 0]
        return found

    title = f"{'FD-CLIP' if kind == 'clip' else 'FD-DINOv2'} ({model})"
    return Extractor(kind, title, dimension, network, {"resize": resize, "model": model, **recipe}, features)


@contextlib.contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Full float32 inside, whatever the surroundings have switched on."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with (
            torch.autocast(device.type, enabled=False),
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(images.shape[2:]) == size:
        return images.float()
    return functional.interpolate(images.float(), size=size, mode="bicubic", antialias=True).clamp(0, 255)


def to_input(images: Tensor, kind: str, recipe: dict[str, Any]) -> Tensor:
    """Prepare uint8 images: CLIP gets the centre of ones whose shorter side is resized, DINOv2 the whole image."""
    crop = recipe["crop"]
    if kind == "clip":
        height, width = images.shape[2:]
        ratio = recipe["shortest_edge"] / min(height, width)
        pixels = resized(images, (round(height * ratio), round(width * ratio)))
        top, left = ((length - crop) // 2 for length in pixels.shape[2:])
        pixels = pixels[:, :, top : top + crop, left : left + crop]
    else:
        pixels = resized(images, (crop, crop))
    mean, std = (torch.tensor(recipe[name], dtype=torch.float32, device=images.device) for name in ("mean", "std"))
    return (pixels / 255 - mean[:, None, None]) / std[:, None, None]


def model_title(config: Any, edge: int) -> str:
    """Name a vision transformer as its makers do: `ViT-L/14`, and `@336` where its images are not of 224 pixels."""
    size = SIZES.get(config.hidden_size)
    base = f"ViT-{size}/{config.patch_size}" if size else f"ViT of width {config.hidden_size}/{config.patch_size}"
    registers = "-reg" if getattr(config, "num_register_tokens", 0) else ""
    return base + registers + (f"@{edge}" if edge != _USUAL_EDGE else "")


def read_config(folder: Path, who: str, types: Sequence[str], accepted: str) -> Any:
    """Read a model's configuration; `who` wants it and from where, as messages tell."""
    if not (folder / "config.json").is_file():
        raise ElfattError(f"{who} has no config.json; give {accepted}.")
    from transformers import AutoConfig

    with in_one_line(f"{who} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in types:
        raise ElfattError(f"{who} is of type {config.model_type}; accepted: {', '.join(types)}.")
    return config


def read_model(folder: Path, who: str, loader: Any, config: Any) -> Any:
    options: dict[str, Any] = {"local_files_only": True, "torch_dtype": torch.float32, "output_loading_info": True}
    with in_one_line(f"{who} cannot be loaded"):
        model, report = loader.from_pretrained(folder, config=config, **options)
    missing = sorted(report["missing_keys"])  # which transformers fills with random numbers
    if missing:
        raise ElfattError(f"{who} lacks {len(missing)} of its weights, first {missing[0]}.")
    return model


def read_recipe(kind: str, folder: Path, image_size: int) -> dict[str, Any]:
    """Read the directory's own preprocessing; the model's usual one where it has none."""
    path = folder / "preprocessor_config.json"
    stored = read_typed(path, dict[str, Any], "download the model again") or {}
    sizes = (stored.get("crop_size"), stored.get("size"))  # in pixels, or by name
    edges = [size.get("shortest_edge") or size.get("height") if isinstance(size, dict) else size for size in sizes]
    if kind == "dinov2":
        image_size = min(image_size, _USUAL_EDGE)  # the model takes larger ones, the metric does not
    clip = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    mean, std = clip if kind == "clip" else ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    crop = edges[0] or image_size
    if kind == "clip" and crop != image_size:
        raise refused(f"{path}: crop_size={crop}", f"{image_size}, the side of the model's images")
    files = [file for file in visible(folder.iterdir()) if file.suffix in (".json", ".safetensors", ".bin")]
    return {
        "crop": crop,
        "shortest_edge": max(crop, edges[1] or crop),
        "mean": [*map(float, stored.get("image_mean") or mean)],
        "std": [*map(float, stored.get("image_std") or std)],
        "sha256": sha256_of_data({file.name: sha256_of_file(file) for file in files if file.is_file()}),
    }
