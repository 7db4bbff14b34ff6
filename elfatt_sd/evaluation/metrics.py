"""Further metrics of a run, besides distances, PSNR and SSIM: what a protocol's `[[metrics]]` ask for.

Most give a number for every image: networks (LPIPS, DISTS, CLIP models), and functions of one's own,
`package.module:function`. Those `OF_FEATURES` have no number for an image, but a figure of all of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.devices import plain_defaults
from elfatt_sd.drawing.studio import tell_cut
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.evaluation import features as vision
from elfatt_sd.evaluation.features import exact_float32
from elfatt_sd.files import refused, sha256_of_code, sha256_of_data, sha256_of_file
from elfatt_sd.methods.base import in_one_line

Better = Literal["", "higher", "lower"]
# What can be asked for by name, and what `weights` is for each; those with "" need none.
KINDS = {
    "lpips": "torchvision's file of AlexNet, VGG16 or SqueezeNet 1.1",
    "dists": "torchvision's file of VGG16",
    "clip-score": "the directory of a CLIP model",
    "pickscore": "the directory of PickScore",
    "hpsv2": "the directory of HPS v2, converted to a CLIP model of transformers",
    "cmmd": "",
}
OF_FEATURES = ("cmmd",)
_TITLES = {"clip-score": "CLIPScore", "pickscore": "PickScore", "hpsv2": "HPSv2"}
# Figures that a report has already: distances, and what compares with the untouched image.
_TAKEN = re.compile(r"(FID|KID|FD|KD|PSNR|SSIM|cosine|accuracy)\b.*|cell|label|method|role|images|classes|failed", re.I)
AT_ONCE = 8  # images, and frames that go through a network together
# The name of each network, a weight that only it has, and how the hash of torchvision's file begins.
_NETWORKS = {
    "alex": ("AlexNet", "features.10.weight", "7be5be79"),
    "vgg": ("VGG16", "features.28.weight", "397923af"),
    "squeeze": ("SqueezeNet", "features.3.squeeze.weight", "b8a52dc0"),
}


@dataclass(frozen=True)
class Batch:
    images: Tensor  # uint8 `[n, f, 3, h, w]`
    prompts: Sequence[str]  # n texts
    # the baseline's images of the same latents, shaped alike; None unless the metric compares
    untouched: Tensor | None = None

    def by_image(self, values: Tensor) -> Tensor:
        """Average one value per frame, `[n * f]`, over the frames of each image: `[n]`."""
        return values.reshape(len(self.prompts), -1).mean(1)


@dataclass(frozen=True)
class ImageMetric:
    """A metric that gives a number for every image."""

    name: str  # in tables
    measure: Callable[[Batch], Tensor]  # turns a `Batch` into numbers of n images
    description: dict[str, Any] = field(default_factory=dict)  # everything that the numbers depend on, as plain data
    # which values are better; empty where neither is, as for what compares with the untouched image
    better: Better = ""
    compares: bool = False  # whether it takes the untouched pipeline's images

    @property
    def identity(self) -> str:
        return sha256_of_data([self.name, self.description, self.better, self.compares])


@dataclass(frozen=True)
class MetricChoice:
    metric: str  # one of `KINDS`, or `package.module:function`, a function of one's own
    weights: str = ""  # file or directory of its weights; `KINDS` says of what
    name: str = ""  # of a function's metric in tables; empty takes the function's
    better: Better = ""  # of a function's metric, which values are better; empty gives no verdict

    def __post_init__(self) -> None:
        own = ":" in self.metric
        if not own and self.metric not in KINDS:
            raise refused(f"metric={self.metric!r}", f"{', '.join(KINDS)}, or package.module:function")
        wanted = "" if own else KINDS[self.metric]
        if bool(wanted) != bool(self.weights):
            accepted = f"weights, {wanted}" if wanted else "none: what a function needs, it loads itself"
            raise refused(f"weights={self.weights!r} of metric {self.metric!r}", accepted)
        for key, value in (("name", self.name), ("better", self.better)):
            if value and not own:
                raise refused(f"{key}={value!r} of metric {self.metric!r}", "a value for package.module:function only")


@plain_defaults()
def load_metrics(choices: Sequence[MetricChoice], device: str, prompts: Sequence[str] = ()) -> list[ImageMetric]:
    """Load the metrics of single images, and warn of prompts that they will cut off."""
    metrics = []
    for choice in choices:
        if ":" in choice.metric:
            metrics.append(load_own(choice))
        elif choice.metric in ("lpips", "dists"):
            metrics.append(load_closeness(choice.metric, Path(choice.weights), device))
        elif choice.metric not in OF_FEATURES:
            metrics.append(load_alignment(choice.metric, Path(choice.weights), device, prompts))
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ElfattError(f"metrics give {twice!r} twice; leave one out, or give a function's another name.")
    return metrics


def load_own(choice: MetricChoice) -> ImageMetric:
    """Import a function that gives a number for every image.

    It is called as `function(images, prompts)` or, where it has a parameter `untouched`, `function(images, prompts,
    untouched)`, which then has no value for the untouched pipeline itself. Other parameters are left at their defaults.
    `images` are uint8 `[n, 3, h, w]`, of clips `[n, f, 3, h, w]`; `prompts` n texts;
    `untouched` the baseline's images of the same latents. It returns n numbers.
    """
    module, _, attribute = choice.metric.partition(":")
    kinds = "function(images, prompts) or function(images, prompts, untouched)"
    with in_one_line(f"metric={choice.metric!r} cannot be imported as {kinds}"):
        function = getattr(importlib.import_module(module), attribute)
        signature = inspect.signature(function)
        compares = "untouched" in signature.parameters
        signature.bind(None, None, **({"untouched": None} if compares else {}))
        code = sha256_of_code([inspect.getsource(inspect.getmodule(function) or sys.modules[module])])
    name = choice.name or str(getattr(function, "__name__", choice.metric))
    if _TAKEN.fullmatch(name):
        raise ElfattError(f"name={name!r} of metric {choice.metric!r} is that of another figure; give another name.")

    def measure(batch: Batch) -> Tensor:
        given = {"images": batch.images}
        if compares and batch.untouched is not None:
            given["untouched"] = batch.untouched
        given = {name: each[:, 0] if each.shape[1] == 1 else each for name, each in given.items()}
        with in_one_line(f"metric={choice.metric!r} failed; mend the function"):
            values = torch.as_tensor(function(given.pop("images"), list(batch.prompts), **given), device="cpu")
        if values.shape != (len(batch.prompts),):
            what = f"metric={choice.metric!r} with numbers of the shape {tuple(values.shape)}"
            raise refused(what, f"one for each of {len(batch.prompts)} images")
        return values.detach().cpu()

    return ImageMetric(name, measure, {"function": choice.metric, "code_sha256": code}, choice.better, compares)


def load_alignment(kind: str, folder: Path, device: str, prompts: Sequence[str]) -> ImageMetric:
    """Load CLIPScore, PickScore or HPS v2: the cosine of each frame with its prompt, scaled."""
    from transformers import AutoTokenizer, CLIPModel

    who = f"metric {kind!r}: {folder}"
    config = vision.read_config(folder, who, ("clip",), "the directory of a CLIP model")
    model = vision.read_model(folder, who, CLIPModel, config).eval().requires_grad_(False).to(device)
    with in_one_line(f"{who} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    seen = config.vision_config
    recipe = vision.read_recipe("clip", folder, seen.image_size)
    shape = vision.model_title(seen, seen.image_size) if seen.hidden_size in vision.SIZES else recipe["sha256"][:8]
    title = f"CLIPScore ({shape})" if kind == "clip-score" else _TITLES[kind]
    scale = float(model.logit_scale.detach().exp()) if kind == "pickscore" else 100.0
    longest = model.config.text_config.max_position_embeddings
    tell_cut(f"prompts of {title}", prompts, longest - tokenizer.num_special_tokens_to_add(), tokenizer)

    @torch.no_grad()
    def measure(batch: Batch) -> Tensor:
        options = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
        tokens = tokenizer(list(batch.prompts), **options)
        given = {key: tokens[key].to(device) for key in ("input_ids", "attention_mask")}
        parts = torch.split(batch.images.flatten(0, 1), AT_ONCE)
        with exact_float32(torch.device(device)):
            texts = functional.normalize(model.text_projection(model.text_model(**given).pooler_output), dim=1)
            pixels = (vision.to_input(part.to(device), "clip", recipe) for part in parts)
            found = [model.visual_projection(model.vision_model(pixel_values=each).pooler_output) for each in pixels]
        frames = functional.normalize(torch.cat(found), dim=1)
        cosine = (frames * texts.repeat_interleave(len(frames) // len(texts), 0)).sum(1)
        return batch.by_image((scale * cosine).clamp(min=0.0 if kind == "clip-score" else -scale))

    return ImageMetric(title, measure, {"model": shape, **recipe}, better="higher")


def load_closeness(kind: str, path: Path, device: str) -> ImageMetric:
    """Load LPIPS (Zhang et al. 2018) or DISTS (Ding et al. 2020) as torchmetrics has them, on torchvision's weights.

    The small weights on top, which make a classifier a metric, come with torchmetrics. Other weights than the published
    ones stand in the name.
    """
    need(f"metric {kind!r}", "torchmetrics", "torchvision")
    networks = _NETWORKS if kind == "lpips" else {"vgg": _NETWORKS["vgg"]}
    with in_one_line(f"weights {path} cannot be loaded"):
        weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)  # runs no code in it
        net = next((net for net, (_, key, _) in networks.items() if key in weights), None)
    if net is None:
        raise ElfattError(f"weights {path} are of no network of {kind.upper()}; give {KINDS[kind]}.")
    network: Any
    if kind == "lpips":
        from torchmetrics.functional.image.lpips import _LPIPS

        network = _LPIPS(pretrained=True, net=net, pnet_rand=True)  # type: ignore[arg-type]
        compare, classifier = functools.partial(network, normalize=True), network.net
    else:
        from torchmetrics.functional.image import dists
        from torchvision.models.vgg import cfgs, make_layers

        untrained = SimpleNamespace(features=make_layers(cfgs["D"], batch_norm=False))
        module: Any = dists
        published, module.vgg16 = module.vgg16, lambda weights: untrained  # which would be downloaded
        try:
            compare = classifier = network = module.DISTSNetwork()
        finally:
            module.vgg16 = published
    places = [name for name, _ in classifier.named_parameters() if name not in ("alpha", "beta")]
    with in_one_line(f"weights {path} cannot be loaded"):  # a classifier's `features.N`, where the network has this N
        parts = {name: 2 if name.startswith("slices") else 1 for name in places}  # of `slices.0.N`; of `slice1.N`
        found = {name: weights[f"features.{name.split('.', skipped)[-1]}"] for name, skipped in parts.items()}
        classifier.load_state_dict(found, strict=False)
    network.to(device).requires_grad_(False).eval()
    digest, (title, _, known) = sha256_of_file(path), networks[net]
    name = f"{kind.upper()} ({title})" if digest.startswith(known) else f"{kind.upper()} ({title}, {digest[:8]})"

    @torch.no_grad()
    def measure(batch: Batch) -> Tensor:
        assert batch.untouched is not None
        both = (torch.split(side.flatten(0, 1), AT_ONCE) for side in (batch.images, batch.untouched))
        with exact_float32(torch.device(device)):
            pairs = ([part.to(device).float() / 255 for part in pair] for pair in zip(*both, strict=True))
            parts = [compare(*pair).reshape(-1) for pair in pairs]
        return batch.by_image(torch.cat(parts))

    return ImageMetric(name, measure, {"sha256": digest}, compares=True)
