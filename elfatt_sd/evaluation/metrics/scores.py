"""Load a protocol's metrics, and score rows with them: means with intervals, paired differences, verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.devices import plain_defaults
from elfatt_sd.drawing.running import tell_cut
from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import features as vision
from elfatt_sd.evaluation.features import Extractor, exact_float32
from elfatt_sd.evaluation.metrics.base import Batch, Better, ImageMetric, MetricChoice
from elfatt_sd.evaluation.metrics.neighbours import neighbour_figures
from elfatt_sd.evaluation.sources import quiet_pillow
from elfatt_sd.evaluation.statistics import (
    Estimate,
    even_classes,
    figure_as_dict,
    gaussian,
    is_finite,
    kernel_distance,
    read_array,
    take,
    verdict,
)
from elfatt_sd.files import atomic_file, sha256_of_data
from elfatt_sd.progress import Progress

if TYPE_CHECKING:
    from elfatt_sd.evaluation.extraction import Images
    from elfatt_sd.evaluation.score import Scale

_TITLES = {"clip-score": "CLIPScore", "pickscore": "PickScore", "hpsv2": "HPSv2"}


def load_alignment(kind: str, folder: Path, device: str) -> ImageMetric:
    """Load one of the three."""
    from transformers import AutoTokenizer, CLIPModel

    who = f"metric {kind!r}: {folder}"
    config = vision.read_config(folder, who, ("clip",), "the directory of a CLIP model")
    model = vision.read_model(folder, who, CLIPModel, config).eval().requires_grad_(False)
    with vision.loading(who):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    seen = config.vision_config
    recipe = vision.read_recipe("clip", folder, seen.image_size)
    named = seen.hidden_size in vision.SIZES
    shape = vision.model_title(seen, seen.image_size) if named else recipe["sha256"][:8]
    title = f"CLIPScore ({shape})" if kind == "clip-score" else _TITLES[kind]
    cosine = _Cosine(title, model.to(device), tokenizer, recipe, device)
    described = {"model": shape, **recipe}
    return ImageMetric(title, _scaled(kind, cosine, model), described, better="higher", reads=cosine.reads)


def _scaled(kind: str, cosine: Callable[[Batch], Tensor], model: Any) -> Callable[[Batch], Tensor]:
    scale = float(model.logit_scale.detach().exp()) if kind == "pickscore" else 100.0
    least = 0.0 if kind == "clip-score" else -scale

    def measure(batch: Batch) -> Tensor:
        return batch.by_image((scale * cosine(batch)).clamp(min=least))

    return measure


class _Cosine:
    """The cosine of each frame with its prompt."""

    def __init__(self, title: str, model: Any, tokenizer: Any, recipe: dict[str, Any], device: str) -> None:
        self.title, self.model, self.tokenizer, self.recipe = title, model, tokenizer, recipe
        self.device = torch.device(device)
        self.limit = model.config.text_config.max_position_embeddings
        self._read: set[str] = set()

    def reads(self, prompts: Sequence[str]) -> None:
        """Warn of prompts that are cut off, unless that was said of them before."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._read]
        self._read.update(new)
        if new:
            room = self.limit - self.tokenizer.num_special_tokens_to_add()
            tell_cut(f"prompts of {self.title}", new, room, self.tokenizer)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        self.reads(batch.prompts)
        with exact_float32(self.device):
            texts = functional.normalize(self._texts(list(batch.prompts)), dim=1)
            frames = torch.cat([self._frames(part) for part in torch.split(batch.frames(), 8)])
        each = len(frames) // len(texts)
        return (functional.normalize(frames, dim=1) * texts.repeat_interleave(each, 0)).sum(1)

    def _texts(self, prompts: list[str]) -> Tensor:
        options = {"padding": True, "truncation": True, "max_length": self.limit, "return_tensors": "pt"}
        tokens = self.tokenizer(prompts, **options)
        given = {key: tokens[key].to(self.device) for key in ("input_ids", "attention_mask")}
        found: Tensor = self.model.text_projection(self.model.text_model(**given).pooler_output)
        return found

    def _frames(self, frames: Tensor) -> Tensor:
        pixels = vision.to_input(frames.to(self.device), "clip", self.recipe)
        found: Tensor = self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output)
        return found


OF_FEATURES = ("prdc", "cmmd")
_LARGEST = 1e100  # of a metric; squares of larger numbers overflow
_CMMD_SCALE = 1000  # as Jayasumana et al. 2024 have it


@plain_defaults()
def load_metrics(choices: Sequence[MetricChoice], device: str) -> list[ImageMetric]:
    """Load the metrics that give a number for every image."""
    metrics = [_load(choice, device) for choice in choices if choice.metric not in OF_FEATURES]
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ElfattError(f"metrics give {twice!r} twice; leave one out, or give a function's another name.")
    return metrics


def _load(choice: MetricChoice, device: str) -> ImageMetric:
    weights = Path(choice.weights)
    if ":" in choice.metric:
        from elfatt_sd.evaluation.metrics.own import load_own

        return load_own(choice)
    if choice.metric in ("lpips", "dists"):
        from elfatt_sd.evaluation.metrics.closeness import load_dists, load_lpips

        return (load_lpips if choice.metric == "lpips" else load_dists)(weights, device)

    return load_alignment(choice.metric, weights, device)


def check_feature_metrics(choices: Sequence[MetricChoice], extractors: Sequence[Extractor]) -> None:
    """Check that there are features for the metrics that need some."""
    for choice in choices:
        if choice.metric == "prdc" and not extractors:
            raise ElfattError("metric 'prdc' needs features; give an extractor and a reference.")
        if choice.metric == "cmmd" and not any(extractor.name == "clip" for extractor in extractors):
            raise ElfattError("metric 'cmmd' needs CLIP's features; give extractors=['clip:DIR'] and a reference.")


class Scorer:
    """Scores rows with all metrics of a protocol, and keeps what it computed."""

    def __init__(
        self,
        choices: Sequence[MetricChoice],
        metrics: Sequence[ImageMetric],
        scales: Sequence[Scale],
        cache: Path,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        self.wanted, self.metrics, self.scales = {choice.metric for choice in choices}, metrics, scales
        self.cache, self.device, self.progress = cache, device, progress
        self._figures: dict[str, dict[str, tuple[Estimate, Better]]] = {}

    def score(self, images: Images, baseline: Images | None) -> dict[str, Any]:
        """Return, by the metric's name, `value`, `interval`, `better` and, where there is a baseline, `difference`.

        What compares with the untouched images is a difference itself: it has an interval, no verdict, and no value
        for the baseline. Values of single images are in `pictures`, where there are such.
        """
        found: dict[str, Any] = {}
        for metric in self.metrics:
            if metric.compares and baseline is not None:
                values = self._values(metric, images, baseline)
                estimate = Estimate.mean(values, images.classes)
                found[metric.name] = _summary(estimate, metric.better, values)
        others = self._own(baseline) if baseline is not None else {}
        for name, (estimate, better) in self._own(images).items():
            found[name] = _summary(estimate, better, None)
            if name in others:
                difference = estimate - others[name][0]
                classes = even_classes(images.classes)
                said = verdict(difference.interval(), classes, lower_is_better=better == "lower")
                found[name]["difference"] = figure_as_dict(difference.value, difference.interval())
                found[name]["difference"] |= {"verdict": said} if better else {}
        return found

    def _own(self, images: Images) -> dict[str, tuple[Estimate, Better]]:
        if images.name not in self._figures:
            figures: dict[str, tuple[Estimate, Better]] = {}
            for metric in self.metrics:
                if not metric.compares:
                    values = self._values(metric, images, None)
                    figures[metric.name] = Estimate.mean(values, images.classes), metric.better
            for scale in self.scales:
                figures |= self._of_features(images, scale)
            self._figures[images.name] = figures
        return self._figures[images.name]

    def _of_features(self, images: Images, scale: Scale) -> dict[str, tuple[Estimate, Better]]:
        figures: dict[str, tuple[Estimate, Better]] = {}
        sample = scale.reference.sample
        if sample is None:
            return figures
        features, where = scale.features(images), scale.extractor.distance_name.removeprefix("FD-")
        where = where.replace("FID", "Inception", 1)
        if "prdc" in self.wanted:
            found = neighbour_figures(features, sample, images.frame_classes)
            figures |= {f"{name} ({where})": (estimate, "higher") for name, estimate in found.items()}
        if "cmmd" in self.wanted and scale.extractor.name == "clip":
            figures[_cmmd_name(scale.extractor)] = _cmmd(features, sample, images.frame_classes), "lower"
        return figures

    def _values(self, metric: ImageMetric, images: Images, baseline: Images | None) -> Tensor:
        """One number for each image, `[n]` float64; kept in the cache."""
        parts = [metric.identity, images.identity, list(images.texts), baseline.identity if baseline else ""]
        path = self.cache / f"{images.name}-metric-{sha256_of_data(parts)[:16]}.npy"
        known = read_array(path, dtype="float64")
        if known is not None and len(known) == len(images.paths) and is_finite(known):
            return torch.from_numpy(np.array(known))
        metric.reads(images.texts)
        with quiet_pillow():
            values = torch.cat(list(self._measured(metric, images, baseline))).double()
        odd = next((index for index, value in enumerate(values.tolist()) if not abs(value) < _LARGEST), None)
        if odd is not None:
            said = f"metric {metric.name!r} of image {odd} of row {images.name!r} is {values[odd]}"
            raise ElfattError(f"{said}; accepted are numbers between -{_LARGEST:g} and {_LARGEST:g}.")
        with atomic_file(path) as file:
            np.save(file, values.numpy())
        return values

    def _measured(self, metric: ImageMetric, images: Images, baseline: Images | None) -> Iterator[Tensor]:
        sides = [images.stacks()] + ([baseline.stacks()] if baseline else [])
        texts, done = iter(images.texts), 0
        while prompts := list(itertools.islice(texts, metric.per_call)):
            ours, *others = (torch.stack(list(itertools.islice(side, len(prompts)))) for side in sides)
            yield metric.measure(Batch(ours, prompts, *others)).cpu()
            done += len(prompts)
            if self.progress:
                self.progress(f"{images.name}, {metric.name}", done, len(images.texts))


def _summary(estimate: Estimate, better: Better, values: Tensor | None) -> dict[str, Any]:
    found = {**figure_as_dict(estimate.value, estimate.interval()), "better": better}
    return found if values is None else {**found, "compares": True}


def _cmmd_name(extractor: Extractor) -> str:
    shape = (extractor.preprocessing.get("crop"), extractor.dimension)
    return "CMMD" if shape == (336, 768) else f"CMMD ({str(extractor.preprocessing.get('sha256'))[:8]})"


def _cmmd(features: Any, reference: Any, groups: Sequence[int]) -> Estimate:
    """1000 times the squared maximum mean discrepancy of unit features under a Gaussian kernel of width 10."""
    found, known = (functional.normalize(take(each, slice(None)), dim=1) for each in (features, reference))
    return kernel_distance(found, known, groups, kernel=gaussian).times(_CMMD_SCALE)
