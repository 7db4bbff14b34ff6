"""Feature extractors: uint8 images in, float32 features out, and a description of all that happens between.

Legend for shapes: n images of h x w pixels, d features.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.config import ElfattError
from elfatt_sd.devices import plain_defaults
from elfatt_sd.evaluation import vision
from elfatt_sd.evaluation.statistics import LARGEST
from elfatt_sd.files import sha256_of_data, sha256_of_file
from elfatt_sd.optional import need

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
_VISION_NAMES = {"clip": "FD-CLIP", "dinov2": "FD-DINOv2"}
_MODEL_TYPES = {"clip": ("clip", "clip_vision_model"), "dinov2": ("dinov2", "dinov2_with_registers")}


class Extractor(nn.Module):
    """A network, how images get into it, and what a distance on its features is called."""

    def __init__(
        self, name: str, distance_name: str, dimension: int, network: nn.Module, preprocessing: dict[str, Any]
    ) -> None:
        super().__init__()
        self.name = name  # short name, for files
        # name of the Frechet distance, with the model or the way of its images; `FID` is the original Inception network
        # only
        self.distance_name = distance_name
        self.kernel_name = re.sub("^F(?=I?D)", "K", distance_name)  # name of the kernel distance
        self.dimension = dimension  # d
        # everything that the features depend on, as plain data; part of every hash
        self.preprocessing = {"extractor": name, **preprocessing}
        self.network = network.requires_grad_(False).eval().float()

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device

    @property
    def identity(self) -> str:
        """Hash of the preprocessing and the weights."""
        return sha256_of_data(self.preprocessing)

    def forward(self, images: Tensor) -> Tensor:
        """Compute features in float32: no autocast, no TF32."""
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
            raise ElfattError(f"images are {images.dtype} {tuple(images.shape)}; accepted is uint8 [n, 3, h, w].")
        with torch.no_grad(), exact_float32(self.device):
            features: Tensor = self._features(images.to(self.device))
        if not (features.abs() < LARGEST).all():  # so written, NaN is none of these
            said = f"gives NaN, or numbers of {LARGEST:g} and more"
            raise ElfattError(f"extractor {self.name} {said}; its weights or preprocessing are damaged.")
        return features.float()

    def _features(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(images)
        return features


class ToyExtractor(Extractor):
    """The toy pipeline's classifier, which also says what an image shows."""

    def __init__(self, network: nn.Module, sha256: str) -> None:
        resize = f"bicubic with antialiasing to {TOY_SIZE}x{TOY_SIZE} unless it is that already"
        super().__init__("toy", "FD-toy", 64, network, {"resize": resize, "scale": "[-1, 1]", "sha256": sha256})

    def _features(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(vision.resized(images, (TOY_SIZE, TOY_SIZE)) / 255)
        return features

    @torch.no_grad()
    def classify(self, features: Tensor) -> dict[str, Tensor]:
        """Read attributes from features `[n, 64]`: indices `[n]` for each of the renderer's `ATTRIBUTES`."""
        network: Any = self.network
        scores = network.scores(features.to(self.device, torch.float32))
        return {name: values.argmax(1).cpu() for name, values in scores.items()}


class InceptionExtractor(Extractor):
    """The Inception network of the original FID, with the preprocessing of a package of `INCEPTION_WAYS`."""

    def __init__(self, network: nn.Module, way: str, sha256: str) -> None:
        model = "FID" if sha256 == INCEPTION_SHA256 else f"FD-Inception-{sha256[:8]}"
        scale = "2 x / 255 - 1" if way == "pytorch-fid" else "(x - 128) / 128"
        recipe = {"resize": INCEPTION_WAYS[way], "scale": scale, "sha256": sha256}
        super().__init__("inception", f"{model} ({way})" if way != "torch-fidelity" else model, 2048, network, recipe)
        self.way = way

    def _features(self, images: Tensor) -> Tensor:
        if self.way == "torch-fidelity":
            return super()._features(images)
        pixels, size = images.float(), (INCEPTION_SIZE, INCEPTION_SIZE)
        if self.way == "pytorch-fid":
            pixels = 2 * functional.interpolate(pixels / 255, size=size, mode="bilinear", align_corners=False) - 1
        else:
            pixels = (vision.resized(pixels, size) - 128) / 128
        for name, layer in self.network.named_children():  # in the order of the pass, up to the class scores
            if name == "fc":
                break
            pixels = layer(pixels)
        return pixels.flatten(1)


class VisionExtractor(Extractor):
    """A vision transformer from a local directory, whose images are prepared as in Stein et al. 2023."""

    def __init__(self, kind: str, network: nn.Module, dimension: int, recipe: dict[str, Any]) -> None:
        part = "shorter side, then centre crop" if kind == "clip" else "the whole picture to a square"
        resize = f"bicubic with antialiasing: {part}, clamped to [0, 255]"
        distance_name = f"{_VISION_NAMES[kind]} ({recipe['model']})"
        super().__init__(kind, distance_name, dimension, network, {"resize": resize, **recipe})
        self.kind, self.recipe = kind, recipe

    def _features(self, images: Tensor) -> Tensor:
        output = self.network(pixel_values=vision.to_input(images, self.kind, self.recipe))
        features: Tensor = output.image_embeds if self.kind == "clip" else output.last_hidden_state[:, 0]
        return features


@plain_defaults()
def load_extractor(
    spec: str, *, weights: Path | None = None, sha256: str | None = None, device: str | torch.device = "cpu"
) -> Extractor:
    """Load an extractor."""
    kind, _, folder = spec.partition(":")
    if kind in ("clip", "dinov2") and folder:
        return _load_vision(kind, Path(folder)).to(device)
    if spec == "toy":
        return _load_toy().to(device)
    if spec == "inception" or (kind == "inception" and folder in INCEPTION_WAYS):
        return _load_inception(folder or "torch-fidelity", weights, sha256).to(device)
    raise ElfattError(f"extractor={spec!r} is not known; accepted: {', '.join(EXTRACTORS)}.")


def _load_inception(way: str, weights: Path | None, sha256: str | None) -> Extractor:
    need("extractor='inception'", "torch-fidelity", "torchmetrics")
    from torchmetrics.image.fid import NoTrainInceptionV3

    accepted = (sha256 or INCEPTION_SHA256).lower()
    path = weights if weights is not None else _cached_inception()
    if not os.path.isfile(path):
        raise ElfattError(f"Inception weights {path} do not exist; give the file published at {INCEPTION_URL}.")
    found = sha256_of_file(path)
    if found != accepted:
        others = "or other weights with inception_sha256, whose distance is not called FID"
        raise ElfattError(f"Inception weights {path} have sha256 {found}; accepted is {accepted}, {others}.")
    _check_tensors_only(path)
    try:
        network = NoTrainInceptionV3("inception-v3-compat", ["2048"], str(path), antialias=False)
    except RuntimeError as error:
        raise ElfattError(f"Inception weights {path} do not fit the network ({str(error).splitlines()[0]}).") from error
    return InceptionExtractor(network, way, found)


def _cached_inception() -> Path:
    """The published file in torch's cache, downloaded at the first use."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_URL.rpartition("/")[2]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(INCEPTION_URL, str(path), hash_prefix=INCEPTION_SHA256, progress=False)
        except (OSError, RuntimeError) as error:
            remedy = f"get {INCEPTION_URL} and give --inception-weights FILE"
            raise ElfattError(f"Inception weights cannot be fetched ({error}); {remedy}.") from error
    return path


def _check_tensors_only(path: Path) -> None:
    """Refuse a pickle that holds anything but tensors, before another package loads it without that check."""
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ElfattError(f"Inception weights {path} are not a file of tensors ({type(error).__name__}).") from error


def _load_toy() -> Extractor:
    from elfatt_sd.toy import features

    path = features.CLASSIFIER_FILE
    network = features.load_feature_extractor(path=path)
    return ToyExtractor(network, sha256_of_file(path))


def _load_vision(kind: str, folder: Path) -> Extractor:
    from transformers import AutoModel, CLIPVisionModelWithProjection

    who = f"extractor {kind}:{folder}"
    config = vision.read_config(folder, who, _MODEL_TYPES[kind], "a local directory of a transformers model")
    if config.model_type == "clip":  # text and images, which share the size of the projection
        config.vision_config.projection_dim = config.projection_dim
        config = config.vision_config
    network = vision.read_model(folder, who, CLIPVisionModelWithProjection if kind == "clip" else AutoModel, config)
    dimension = config.projection_dim if kind == "clip" else config.hidden_size
    recipe = vision.read_recipe(kind, folder, config.image_size)
    return VisionExtractor(kind, network, dimension, {"model": vision.model_title(config, recipe["crop"]), **recipe})


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
