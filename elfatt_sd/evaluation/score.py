"""Score the images of a run: distances to the reference, changes against the untouched pipeline, accuracy on the toy.

Features are kept under `RUN/scores`, named by the hash of what they were computed from; those of one or two rows are in
memory at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.devices import accelerators
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.evaluation import statistics
from elfatt_sd.evaluation.extraction import Images, by_first, extract, process_state, read_chunk
from elfatt_sd.evaluation.features import Extractor, load_extractor, toy_attributes
from elfatt_sd.evaluation.frechet import FrechetFigures, Target, frechet_figures
from elfatt_sd.evaluation.metrics import AT_ONCE, Batch, Better, ImageMetric, load_metrics
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.records import SCORES_FORMAT
from elfatt_sd.evaluation.reference import Reference, build_reference, check_reference
from elfatt_sd.evaluation.run import SCORES_FILE, RunFolder, clear_disk_errors
from elfatt_sd.files import cache_folder, sha256_of_data, write_json
from elfatt_sd.loading import pick_device
from elfatt_sd.measure import Progress

MOST_CHANGED = 16
DIGITS = 6  # of what is written of each image
_LARGEST = 1e100  # of a metric; squares of larger numbers overflow
SIGMA = 1.5  # pixels
REACH = 5  # pixels from the middle of the window to its edge
K1, K2 = 0.01, 0.03


def score_run(
    run: RunFolder,
    extractors: Sequence[Extractor] | None = None,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Score all finished rows of a run and write `scores.json`.

    Under `accelerate launch` the processes share the networks' work, and the first one does the rest.
    """
    need("a score", "torchmetrics")
    if not run.baseline.finished:
        raise ElfattError(f"row {run.baseline.name!r}, the baseline, has no images yet; generate them first.")
    protocol, place = run.protocol, folder or run.folder
    rows = {row.name: Images.of_row(row, protocol.frames, len(run.prompts)) for row in run.finished}
    extractors = load_extractors(protocol) if extractors is None else extractors
    references = build_references(protocol, extractors, progress=progress)
    scales = [Scale(*pair, place / "scores") for pair in zip(extractors, references, strict=True)]
    for scale in scales:
        for images in rows.values():
            scale.extract(images, progress)

    def finish() -> None:
        metrics = load_metrics(protocol.metrics, network_device(protocol), [prompt.text for prompt in run.prompts])
        scorer = Scorer(protocol, metrics, scales, progress)
        measured = {name: scorer.measure(images) for name, images in rows.items()}
        baseline = measured[run.baseline.name]
        data = {
            "format": SCORES_FORMAT,
            "identity": run.record.identity,
            "references": {
                scale.distance_name: {**scale.reference.description, "features": scale.extractor.dimension}
                for scale in scales
            },
            "rows": {name: scorer.score(row, None if row is baseline else baseline) for name, row in measured.items()},
        }
        write_json(place / SCORES_FILE, data)

    by_first(finish)


def load_extractors(protocol: Protocol) -> list[Extractor]:
    device = network_device(protocol)
    weights = Path(protocol.inception_weights) if protocol.inception_weights else None
    digest = protocol.inception_sha256 or None
    extractors = [load_extractor(spec, weights=weights, sha256=digest, device=device) for spec in protocol.extractors]
    names = [extractor.distance_name for extractor in extractors]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ElfattError(f"extractors={list(protocol.extractors)!r} give {twice} twice; give one of each kind.")
    return extractors


def network_device(protocol: Protocol) -> str:
    if protocol.device != "auto":
        with contextlib.suppress(ElfattError):  # scores need not the run's own, which this machine may not have
            pick_device(protocol.device)
            return protocol.device
    state = process_state()
    return str(state.device) if state.num_processes > 1 else "cuda" if "cuda" in accelerators() else "cpu"


def build_references(
    protocol: Protocol, extractors: Sequence[Extractor] | None = None, *, progress: Progress | None = None
) -> list[Reference]:
    """Compute a protocol's reference for each extractor, or take it from the cache."""
    chosen = load_extractors(protocol) if extractors is None else extractors
    place, wanted, classes = cache_folder(), protocol.reference, _classes(protocol)
    with clear_disk_errors(place):
        return [build_reference(wanted, each, classes, cache_dir=place, progress=progress) for each in chosen]


def score_inputs(protocol: Protocol, extractors: Sequence[Extractor] | None = None) -> dict[str, str]:
    """Return what scores depend on besides the images: hashes of extractors with their references, and of metrics."""
    extractors = load_extractors(protocol) if extractors is None else extractors
    asked = any(choice.metric == "cmmd" for choice in protocol.metrics)
    if asked and not any(extractor.name == "clip" for extractor in extractors):
        raise ElfattError("metric 'cmmd' needs CLIP's features; give extractors=['clip:DIR'] and a reference.")
    if asked and protocol.reference.source.endswith(".npz"):
        raise ElfattError("metric 'cmmd' needs reference images; statistics (.npz) are not enough.")
    metrics = load_metrics(protocol.metrics, network_device(protocol))
    wanted, classes = protocol.reference, _classes(protocol)
    found = {each.distance_name: check_reference(wanted, each, classes)[1] for each in extractors}
    return found | {f"metric {each.name}": each.identity for each in metrics}


def _classes(protocol: Protocol) -> list[int]:
    return [prompt.class_index for prompt in run_prompts(protocol)] if protocol.of_toy else []


@dataclass(frozen=True)
class Known:
    estimate: statistics.ClassEstimate
    better: Better = "lower"
    limit: FrechetFigures | None = None  # of a Frechet distance: what it is with infinitely many images
    interval: statistics.Interval | None = None  # where it is not that of the estimate
    compares: bool = False  # a difference to the untouched pipeline itself: it has an interval and no verdict

    def published(self, other: Known | None, classes: int, *, metric: bool) -> dict[str, Any]:
        """Return the figure as it is published, and its paired difference to that of the untouched pipeline.

        The difference of a Frechet distance is that of infinitely many images. Metrics say which values are better.
        """
        found: dict[str, Any] = {"value": self.estimate.value, "interval": self.interval or self.estimate.interval()}
        found |= {"better": self.better} if metric else {}
        found |= {"compares": True} if self.compares else {}
        if other is not None:
            moved = self.estimate - other.estimate
            value, interval = moved.value, moved.interval()
            if self.limit and other.limit:
                value, interval = self.limit.limit_difference(other.limit)
            said = statistics.verdict(interval, classes, lower_is_better=self.better == "lower")
            found["difference"] = {"value": value, "interval": interval, **({"verdict": said} if self.better else {})}
            found["difference"] |= {"images": "infinite"} if self.limit else {}
        return found


@dataclass(frozen=True)
class Measured:
    """What is known of a row by itself."""

    images: Images
    # by `distances`, `accuracy` (of the toy, by attribute) or `metrics` (but for those that compare), and their names
    figures: dict[tuple[str, str], Known]


@dataclass(frozen=True)
class Scorer:
    """Scores rows by themselves and against the baseline."""

    protocol: Protocol
    metrics: Sequence[ImageMetric]
    scales: Sequence[Scale]
    progress: Progress | None = None

    def measure(self, images: Images) -> Measured:
        figures = self._means(images)
        for scale in self.scales:
            figures |= scale.measure(images, {choice.metric for choice in self.protocol.metrics})
        toy = [scale for scale in self.scales if self.protocol.of_toy and scale.extractor.name == "toy"]
        for scale in toy:  # fraction of images that show what their prompt says, per attribute and as the mean of all
            from elfatt_sd.toy.renderer import CLASSES, class_labels

            seen = toy_attributes(scale.extractor, scale.features(images))
            wanted = class_labels([CLASSES[number] for number in images.classes]).unbind(1)
            right = {name: (found == each).double() for (name, found), each in zip(seen.items(), wanted, strict=True)}
            for name, values in {**right, "mean": torch.stack(list(right.values())).mean(0)}.items():
                interval = statistics.share_interval(values, images.classes, len(right) if name == "mean" else 1)
                mean = statistics.ClassEstimate.mean(values, images.classes)
                figures["accuracy", name] = Known(mean, "higher", interval=interval)
        return Measured(images, figures)

    def score(self, row: Measured, baseline: Measured | None) -> dict[str, Any]:
        """Return what `scores.json` has of a row; without a baseline, of the baseline itself."""
        images, paired, lowest, figures = row.images, None, [], row.figures
        if baseline:
            changes = self.values(pair_changes(torch.device(network_device(self.protocol))), images, baseline.images)
            paired = self._paired(row, baseline, changes)
            order = torch.argsort(changes[:, 0], stable=True)[:MOST_CHANGED].tolist()
            lowest = [index for index in order if changes[index, 0].isfinite()]  # identical ones are left out
            figures = self._means(images, baseline.images) | figures
        classes = statistics.even_classes(images.classes)
        parts: dict[str, dict[str, Any]] = {"distances": {}, "accuracy": {}, "metrics": {}}
        for (part, name), known in figures.items():
            other = baseline.figures.get((part, name)) if baseline else None
            parts[part][name] = known.published(other, classes, metric=part == "metrics")
        return {
            "images": len(images.paths),
            "classes": len(set(images.classes)),
            "distances": parts["distances"],
            "paired": paired,
            "accuracy": parts["accuracy"] or None,
            "most_changed": lowest,
            **({"metrics": parts["metrics"]} if self.protocol.metrics else {}),
        }

    def _paired(self, row: Measured, baseline: Measured, changes: Tensor) -> dict[str, Any]:
        """Summaries of the changes, and PSNR and SSIM of each image, by which rows can be compared with each other.

        PSNR is over the images that differ. The cosine is that of the first extractor's features.
        """
        images, differing = row.images, changes[:, 0].isfinite()
        classes = torch.as_tensor(images.classes, device="cpu")
        decibels, similarities = ([round(value, DIGITS) for value in each] for each in changes.t().tolist())
        found: dict[str, Any] = {
            "classes": list(images.classes),
            "psnr": {
                **_summary(changes[differing, 0], classes[differing], 0.0, math.inf),
                "unit": "dB",
                "identical": int((~differing).sum()),
                "pictures": [value if math.isfinite(value) else None for value in decibels],
            },
            "ssim": {**_summary(changes[:, 1], classes, -1.0, 1.0), "pictures": similarities},
        }
        for scale in self.scales[:1]:
            sides = (torch.split(scale.features(each), statistics.ROWS) for each in (images, baseline.images))
            pairs = ((mine.double(), other.double()) for mine, other in zip(*sides, strict=True))
            cosine = torch.cat([functional.cosine_similarity(*pair, dim=1) for pair in pairs])
            each = cosine.view(len(images.paths), -1).mean(1)
            found["cosine"] = {**_summary(each, classes, -1.0, 1.0), "extractor": scale.extractor.name}
        return found

    def _means(self, images: Images, baseline: Images | None = None) -> dict[tuple[str, str], Known]:
        """The means of the metrics that compare with a baseline, or without one of those that do not."""
        found = {}
        for metric in self.metrics:
            if metric.compares == (baseline is not None):
                mean = statistics.ClassEstimate.mean(self.values(metric, images, baseline), images.classes)
                found["metrics", metric.name] = Known(mean, metric.better, compares=metric.compares)
        return found

    def values(self, metric: ImageMetric, images: Images, baseline: Images | None = None) -> Tensor:
        """Return float64 numbers of single images; the last of each must be finite, as a PSNR need not be."""
        found, sides = list[Tensor](), [each.stacks() for each in (images, baseline) if each is not None]
        for start in range(0, len(images.texts), AT_ONCE):
            prompts = images.texts[start : start + AT_ONCE]
            ours, *others = (torch.stack([next(side) for _ in prompts]) for side in sides)
            found.append(metric.measure(Batch(ours, prompts, *others)).cpu())
            if self.progress:
                self.progress(f"{images.name}, {metric.name}", start + len(prompts), len(images.texts))
        values = torch.cat(found).double()
        for index, value in enumerate(values.reshape(len(values), -1)[:, -1].tolist()):
            if not abs(value) < _LARGEST:
                said = f"metric {metric.name!r} of image {index} of row {images.name!r} is {value}"
                raise ElfattError(f"{said}; accepted are numbers between -{_LARGEST:g} and {_LARGEST:g}.")
        return values


class Scale:
    """An extractor with its reference: what rows are measured on."""

    def __init__(self, extractor: Extractor, reference: Reference, cache: Path) -> None:
        self.extractor, self.reference, self.cache = extractor, reference, cache
        self.distance_name = extractor.distance_name + reference.metric_suffix
        # what distances need of the reference, whatever the row
        self.target = Target(reference.mean, reference.covariance)
        self.within = None if reference.sample is None else statistics.kernel_within(reference.sample)
        self.chunks = dict[str, list[Path]]()  # the files of features of each row

    def extract(self, images: Images, progress: Progress | None = None) -> None:
        """Compute the features of a row, or take those that are kept; all processes must call this."""
        key = sha256_of_data([images.identity, self.extractor.identity])[:16]
        folder = self.cache / f"{images.name}-{self.extractor.name}-{key}"
        self.chunks[images.name] = extract(images.source(), self.extractor, folder, progress=progress, name=images.name)

    def features(self, images: Images) -> Tensor:
        """Features `[n * frames, d]` of a row."""
        return torch.cat([read_chunk(path)[0] for path in self.chunks[images.name]])

    def measure(self, images: Images, wanted: Collection[str]) -> dict[tuple[str, str], Known]:
        """Return the Frechet distance and, where the reference has features, kernel distance and wanted metrics."""
        features, extractor = self.features(images), self.extractor
        classes = [number for number in images.classes for _ in range(images.frames)]
        figures = frechet_figures(features, self.target, classes)
        found = {("distances", self.distance_name): Known(figures.published, limit=figures)}
        sample, recipe = self.reference.sample, extractor.preprocessing
        if sample is None:
            return found
        title = extractor.kernel_name + self.reference.metric_suffix
        found["distances", title] = Known(statistics.kernel_distance(features, sample, classes, within=self.within))
        if "cmmd" in wanted and extractor.name == "clip":
            published = (recipe.get("crop"), extractor.dimension) == (336, 768)
            name = "CMMD" if published else f"CMMD ({str(recipe.get('sha256'))[:8]})"
            found["metrics", name] = Known(statistics.cmmd(features, sample, classes))
        return found


def pair_changes(device: torch.device) -> ImageMetric:
    """PSNR (dB) and SSIM `[n, 2]` of each image to the baseline's of the same index.

    The PSNR is infinite where an image equals the baseline's in every pixel, and only there. That of a clip is over
    all its frames at once; its SSIM is the mean over frames.
    """
    from torchmetrics.functional.image import peak_signal_noise_ratio

    place = device if device.type == "cuda" else torch.device("cpu")  # others have no float64

    def measure(batch: Batch) -> Tensor:
        assert batch.untouched is not None
        mine, other = (side.to(place).double() for side in (batch.images, batch.untouched))
        decibels = peak_signal_noise_ratio(mine, other, data_range=255.0, reduction="none", dim=(1, 2, 3, 4))
        # in float32, equal flat images would be 0.999 alike
        frames = structural_similarity(mine.flatten(0, 1), other.flatten(0, 1), data_range=255.0)
        return torch.stack((decibels, batch.by_image(frames)), 1)

    return ImageMetric("PSNR and SSIM", measure, compares=True)


def _summary(values: Tensor, classes: Tensor, low: float, high: float) -> dict[str, Any]:
    """The mean of one number per image with its 95 % interval, median, quartiles and lowest; None without images."""
    if not len(values):
        return dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest"))
    mean = statistics.ClassEstimate.mean(values, classes)
    ends = mean.interval()
    quartiles = torch.quantile(values, values.new_tensor([0.25, 0.5, 0.75])).tolist()
    return {
        "mean": mean.value,
        "interval": None if ends is None else [max(ends[0], low), min(max(ends[1], low), high)],
        "median": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
        "lowest": values.min().item(),
    }


def structural_similarity(first: Tensor, second: Tensor, data_range: float) -> Tensor:
    """Return the SSIM of each pair of images, the mean over pixels and channels; edges are reflected."""
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    x, y = (functional.pad(pictures, (REACH,) * 4, mode="reflect") for pictures in (first, second))
    mean_x, mean_y, square_x, square_y, product = (_blurred(part) for part in (x, y, x * x, y * y, x * y))
    variances = (square_x - mean_x**2).clamp(min=0) + (square_y - mean_y**2).clamp(min=0)
    covariance = product - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return (luminance * (2 * covariance + c2) / (variances + c2)).mean((1, 2, 3))


def _blurred(pictures: Tensor) -> Tensor:
    """Average under a Gaussian window, where the whole of it lies inside."""
    taps = [math.exp(-0.5 * (place / SIGMA) ** 2) for place in range(-REACH, REACH + 1)]
    middle, *sides = (tap / sum(taps) for tap in taps[REACH:])
    for axis in (-1, -2):
        size = pictures.shape[axis] - 2 * REACH
        blurred = pictures.narrow(axis, REACH, size) * middle
        for place, tap in enumerate(sides, 1):
            pair = pictures.narrow(axis, REACH - place, size) + pictures.narrow(axis, REACH + place, size)
            blurred = blurred.add_(pair, alpha=tap)
        pictures = blurred
    return pictures
