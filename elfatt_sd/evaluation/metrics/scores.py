"""Load a protocol's metrics, and score rows with them: means with intervals, paired differences, verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
from elfatt_sd.evaluation.extraction import Images, quiet_pillow
from elfatt_sd.evaluation.features import Extractor, exact_float32
from elfatt_sd.evaluation.metrics.base import Batch, Better, ImageMetric, MetricChoice, load_own
from elfatt_sd.evaluation.statistics import (
    Estimate,
    Features,
    Groups,
    even_classes,
    figure_as_dict,
    gaussian,
    is_finite,
    kernel_distance,
    left_out,
    read_array,
    take,
    verdict,
)
from elfatt_sd.files import atomic_file, sha256_of_data
from elfatt_sd.progress import Progress

if TYPE_CHECKING:
    from elfatt_sd.evaluation.score import Scale

_TITLES = {"clip-score": "CLIPScore", "pickscore": "PickScore", "hpsv2": "HPSv2"}
OF_FEATURES = ("prdc", "cmmd")
NEIGHBOURS = 5  # as Naeem et al. have it
ROWS = 512  # of a piece of the matrix of distances
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
    if ":" in choice.metric:
        return load_own(choice)
    if choice.metric in ("lpips", "dists"):
        from elfatt_sd.evaluation.metrics.closeness import load_dists, load_lpips

        return (load_lpips if choice.metric == "lpips" else load_dists)(Path(choice.weights), device)
    return load_alignment(choice.metric, Path(choice.weights), device)


def load_alignment(kind: str, folder: Path, device: str) -> ImageMetric:
    """Load CLIPScore, PickScore or HPS v2: the cosine of each frame with its prompt, scaled."""
    from transformers import AutoTokenizer, CLIPModel

    who = f"metric {kind!r}: {folder}"
    config = vision.read_config(folder, who, ("clip",), "the directory of a CLIP model")
    model = vision.read_model(folder, who, CLIPModel, config).eval().requires_grad_(False).to(device)
    with vision.loading(who):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    seen = config.vision_config
    recipe = vision.read_recipe("clip", folder, seen.image_size)
    named = seen.hidden_size in vision.SIZES
    shape = vision.model_title(seen, seen.image_size) if named else recipe["sha256"][:8]
    title = f"CLIPScore ({shape})" if kind == "clip-score" else _TITLES[kind]
    scale = float(model.logit_scale.detach().exp()) if kind == "pickscore" else 100.0
    longest = model.config.text_config.max_position_embeddings
    known: set[str] = set()  # prompts that were looked at: all rows have the same

    def reads(prompts: Sequence[str]) -> None:
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        known.update(new)
        tell_cut(f"prompts of {title}", new, longest - tokenizer.num_special_tokens_to_add(), tokenizer)

    @torch.no_grad()
    def measure(batch: Batch) -> Tensor:
        options = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
        tokens = tokenizer(list(batch.prompts), **options)
        given = {key: tokens[key].to(device) for key in ("input_ids", "attention_mask")}
        with exact_float32(torch.device(device)):
            texts = functional.normalize(model.text_projection(model.text_model(**given).pooler_output), dim=1)
            pixels = (vision.to_input(part.to(device), "clip", recipe) for part in torch.split(batch.frames(), 8))
            found = [model.visual_projection(model.vision_model(pixel_values=each).pooler_output) for each in pixels]
        frames = functional.normalize(torch.cat(found), dim=1)
        cosine = (frames * texts.repeat_interleave(len(frames) // len(texts), 0)).sum(1)
        return batch.by_image((scale * cosine).clamp(min=0.0 if kind == "clip-score" else -scale))

    return ImageMetric(title, measure, {"model": shape, **recipe}, better="higher", reads=reads)


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
            recipe = scale.extractor.preprocessing
            published = (recipe.get("crop"), scale.extractor.dimension) == (336, 768)
            name = "CMMD" if published else f"CMMD ({str(recipe.get('sha256'))[:8]})"
            figures[name] = _cmmd(features, sample, images.frame_classes), "lower"
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


def _cmmd(features: Any, reference: Any, groups: Sequence[int]) -> Estimate:
    """1000 times the squared maximum mean discrepancy of unit features under a Gaussian kernel of width 10."""
    found, known = (functional.normalize(take(each, slice(None)), dim=1) for each in (features, reference))
    distance = kernel_distance(found, known, groups, kernel=gaussian)
    return Estimate(distance.value * _CMMD_SCALE, distance.moves * _CMMD_SCALE)


# Kynkaanniemi et al. 2019; Naeem et al. 2020. With r(x) the distance of x to its k-th neighbour within its own set,
# over images x and reference images y:
#     precision = mean over x of [some y has |x - y| <= r(y)]
#     density   = mean over x of the number of y with |x - y| <= r(y), divided by k
#     recall    = mean over y of [some x has |x - y| <= r(x)]
#     coverage  = mean over y of [some x has |x - y| <= r(y)]
# Precision and density are means over images. Recall and coverage are not: their moves are what they lose or gain
# without each class, its images neither there nor neighbours of others.
def neighbour_figures(features: Features, reference: Features, groups: Groups) -> dict[str, Estimate]:
    """Return precision, recall, density and coverage, and how far each class of images moves them."""
    check_enough(min(len(features), len(reference)))
    images, known = take(features, slice(None)).float(), take(reference, slice(None)).float()
    classes, place = torch.unique(torch.as_tensor(groups, device="cpu"), return_inverse=True)
    radii = _nearest(known, NEIGHBOURS + 1)[0][:, -1]
    # of one class, no more are left out; the first neighbour is the image itself
    own, indices = _nearest(images, min(NEIGHBOURS + 1 + int(torch.bincount(place).max()), len(images)))
    own_radii, own_classes = own[:, NEIGHBOURS], place[indices[:, 1:]]
    counts = torch.zeros(len(images), dtype=torch.float64, device="cpu")
    covered, recalled = (_Reached(len(classes), len(known)) for _ in range(2))
    for rows in torch.split(torch.arange(len(images), device="cpu"), ROWS):
        far = torch.cdist(images[rows], known)
        inside = far <= radii
        counts[rows] = inside.sum(1).double()
        covered.add(inside, place[rows])
        recalled.add(far <= own_radii[rows, None], place[rows])
        for row, distances in zip(rows.tolist(), far, strict=True):
            # without a class that some of its neighbours are of, an image's own radius is wider
            for without in set(own_classes[row, :NEIGHBOURS].tolist()) - {int(place[row])}:
                left = own[row, 1:][own_classes[row] != without]
                if len(left) >= NEIGHBOURS:
                    recalled.gained[without] |= distances <= left[NEIGHBOURS - 1].item()
    return {
        "Precision": Estimate.mean((counts > 0).double(), groups),
        "Recall": recalled.figure(),
        "Density": Estimate.mean(counts / NEIGHBOURS, groups),
        "Coverage": covered.figure(),
    }


def check_enough(count: int) -> None:
    """Refuse a set that has not more images than neighbours."""
    if count <= NEIGHBOURS:
        raise ElfattError(f"metric 'prdc' needs more than {NEIGHBOURS} images and reference images; there are {count}.")


def _nearest(points: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Distances and indices `[n, count]` of the nearest of all points to each, itself the first."""
    found = [torch.cdist(part, points).topk(count, largest=False) for part in torch.split(points, ROWS)]
    return torch.cat([each.values for each in found]), torch.cat([each.indices for each in found])


class _Reached:
    """Which reference images some image reaches, and which are reached without each class."""

    def __init__(self, classes: int, count: int) -> None:
        self.by = torch.zeros(classes, count, dtype=torch.bool, device="cpu")
        self.gained = torch.zeros(classes, count, dtype=torch.bool, device="cpu")

    def add(self, inside: Tensor, place: Tensor) -> None:
        """Note what some images reach: `[rows, m]`, with the class of each."""
        for row, number in zip(inside, place.tolist(), strict=True):
            self.by[number] |= row

    def figure(self) -> Estimate:
        """The fraction that is reached, and by how much each class moves it."""
        times = self.by.sum(0)
        value = (times > 0).double().mean().item()
        without = torch.stack(
            [((times > own.int()) | more).double().mean() for own, more in zip(self.by, self.gained, strict=True)]
        )
        return Estimate(value, left_out(without)[None])
