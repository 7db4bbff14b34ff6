"""How different an image looks from the untouched pipeline's: LPIPS and DISTS, as torchmetrics has them.

The networks' weights are torchvision's files of ImageNet classifiers. The small weights on top of them, which make a
classifier a metric, come with torchmetrics.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.errors import ElfattError, need
from elfatt_sd.evaluation.features import exact_float32
from elfatt_sd.evaluation.metrics.base import Batch, ImageMetric
from elfatt_sd.files import sha256_of_file

# The name of each network, a weight that only it has, and how the hash of torchvision's file begins.
_NETWORKS = {
    "alex": ("AlexNet", "features.10.weight", "7be5be79"),
    "vgg": ("VGG16", "features.28.weight", "397923af"),
    "squeeze": ("SqueezeNet", "features.3.squeeze.weight", "b8a52dc0"),
}
_BLOCKS = ((1, 0, 4), (2, 5, 9), (3, 10, 16), (4, 17, 23), (5, 24, 30))  # of VGG16: number, first layer, end


def load_lpips(path: Path, device: str) -> ImageMetric:
    """Load LPIPS (Zhang et al. 2018) on the network that a file holds."""
    need("metric 'lpips'", "torchmetrics", "torchvision")
    from torchmetrics.functional.image.lpips import _LPIPS

    weights = _read(path)
    net = next((net for net, (_, key, _) in _NETWORKS.items() if key in weights), None)
    if net is None:
        raise ElfattError(
            f"weights {path} are of no network of LPIPS; give torchvision's AlexNet, VGG16 or SqueezeNet 1.1."
        )
    network = _LPIPS(pretrained=True, net=net, pnet_rand=True)  # type: ignore[arg-type]
    _fill(network.net, weights, path)
    network = network.to(device)
    title, _, known = _NETWORKS[net]
    compare = functools.partial(network, normalize=True)
    return _metric(f"LPIPS ({title})", known, path, compare, device)


def load_dists(path: Path, device: str) -> ImageMetric:
    """Load DISTS (Ding et al. 2020)."""
    need("metric 'dists'", "torchmetrics", "torchvision")
    from torchmetrics.functional.image import dists

    weights = _read(path)
    title, key, known = _NETWORKS["vgg"]
    if key not in weights:
        raise ElfattError(f"weights {path} are not VGG16's; give torchvision's file.")
    network = _dists_network(dists)
    _fill(network, weights, path)
    network = network.to(device).requires_grad_(False).eval()
    return _metric(f"DISTS ({title})", known, path, network, device)


def _dists_network(dists: Any) -> Any:
    from torchvision.models.vgg import cfgs, make_layers

    network = dists.DISTSNetwork.__new__(dists.DISTSNetwork)
    nn.Module.__init__(network)
    layers, channels = make_layers(cfgs["D"], batch_norm=False), (64, 128, 256, 512)
    for number, first, end in _BLOCKS:
        block = nn.Sequential()
        if number > 1:  # in place of the classifier's largest value
            block.add_module(str(first - 1), dists.L2pooling(channels=channels[number - 2]))
        for place in range(first, end):
            block.add_module(str(place), layers[place])
        network.add_module(f"stage{number}", block)
    for name, values in (("mean", (0.485, 0.456, 0.406)), ("std", (0.229, 0.224, 0.225))):
        network.register_buffer(name, torch.tensor(values, dtype=torch.float32, device="cpu").view(1, -1, 1, 1))
    network.chns = [3, *channels, 512]
    learnt = torch.load(dists._PATH_WEIGHT_DISTS, map_location="cpu", weights_only=True)
    for name in ("alpha", "beta"):
        network.register_parameter(name, nn.Parameter(learnt[name]))
    return network


def _read(path: Path) -> Mapping[str, Tensor]:
    """Read a file of tensors by name; no code in it is run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
            raise TypeError(type(found).__name__)
    except Exception as error:
        raise ElfattError(f"weights {path} are not a file of tensors by name ({type(error).__name__}).") from error
    return found


def _fill(network: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Put a classifier's layers, `features.N`, where the metric's network has the same N."""
    for name, parameter in network.named_parameters():
        place = name.split(".", 2 if name.startswith("slices") else 1)[-1]  # behind `slice1.`, `stage1.` or `slices.0.`
        if name in ("alpha", "beta"):
            continue
        found = weights.get(f"features.{place}")
        if found is None or found.shape != parameter.shape:
            shape = "no" if found is None else f"a {tuple(found.shape)}"
            raise ElfattError(f"weights {path} have {shape} 'features.{place}'; wanted is {tuple(parameter.shape)}.")
        if not (found.is_floating_point() and not found.is_meta and found.isfinite().all()):
            raise ElfattError(f"weights {path} have 'features.{place}' that is not of finite numbers.")
        with torch.no_grad():
            parameter.copy_(found)


def _metric(name: str, known: str, path: Path, compare: Any, device: str) -> ImageMetric:
    """Make a metric that compares frame by frame; other weights than the published ones stand in its name."""
    digest = sha256_of_file(path)
    title = name if digest.startswith(known) else f"{name.removesuffix(')')}, {digest[:8]})"

    @torch.no_grad()
    def measure(batch: Batch) -> Tensor:
        if batch.untouched is None:
            raise ValueError(f"{title} compares with the untouched images")
        both = (torch.split(frames, 8) for frames in (batch.frames(), batch.untouched.flatten(0, 1)))
        with exact_float32(torch.device(device)):
            pairs = (
                [part.to(device).float() / 255 for part in pair] for pair in zip(*both, strict=True)
            )  # 8 at a time
            parts = [compare(*pair).reshape(-1) for pair in pairs]
        return batch.by_image(torch.cat(parts))

    return ImageMetric(title, measure, {"sha256": digest}, compares=True)
