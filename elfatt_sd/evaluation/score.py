"""Score the images of a run: distances to the reference, changes against the untouched pipeline, accuracy on the toy.

Everything is streamed: features lie in memory-mapped files, so memory does not grow with the number of images. What
was computed once is kept under `RUN/scores`, named by the hash of what it was computed from.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.devices import accelerators, has_float64
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.evaluation.extraction import Images, by_first, extract, process_state, quiet_pillow, scoring_device
from elfatt_sd.evaluation.features import Extractor, load_extractor, toy_attributes
from elfatt_sd.evaluation.frechet import FrechetFigures, Target, frechet_figures
from elfatt_sd.evaluation.metrics import Better, ImageMetric, check_feature_metrics, load_metrics
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.records import SCORES_FORMAT
from elfatt_sd.evaluation.reference import Reference, build_reference, check_reference
from elfatt_sd.evaluation.run import SCORES_FILE, RunFolder, clear_disk_errors
from elfatt_sd.evaluation.statistics import (
    ClassEstimate,
    Interval,
    batches,
    cmmd,
    even_classes,
    is_finite,
    kernel_distance,
    kernel_within,
    neighbour_figures,
    read_array,
    share_interval,
    verdict,
)
from elfatt_sd.files import atomic_file, cache_folder, sha256_of_data, write_json
from elfatt_sd.measure import Progress

Array = np.ndarray[Any, Any]
PAIRS_FORMAT = 4  # of what is kept of pairs
MOST_CHANGED = 16
DIGITS = 6  # of what is kept of each image
PAIR_BATCH = 8
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
        metrics = load_metrics(protocol.metrics, network_device(protocol))
        scorer = Scorer(protocol, metrics, scales, place / "scores", progress)
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
    wanted = scoring_device(protocol.device)
    if wanted != "auto":
        return wanted
    state = process_state(wanted)
    several = state.num_processes > 1
    return str(state.device) if several else "cuda" if "cuda" in accelerators() else "cpu"


def build_references(
    protocol: Protocol, extractors: Sequence[Extractor] | None = None, *, progress: Progress | None = None
) -> list[Reference]:
    """Compute a protocol's reference for each extractor, or take it from the cache."""
    chosen = load_extractors(protocol) if extractors is None else extractors
    place, wanted, classes = cache_folder(), protocol.reference, _classes(protocol)
    with clear_disk_errors(place):
        return [build_reference(wanted, each, classes, cache_dir=place, progress=progress) for each in chosen]


def score_inputs(protocol: Protocol, extractors: Sequence[Extractor]) -> dict[str, str]:
    """Return what scores depend on besides the images: hashes of extractors with their references, and of metrics."""
    check_feature_metrics(protocol.metrics, extractors)
    metrics = load_metrics(protocol.metrics, network_device(protocol))
    wanted, classes = protocol.reference, _classes(protocol)
    found = {each.distance_name: check_reference(wanted, each, classes)[1] for each in extractors}
    return found | {f"metric {each.name}": each.identity for each in metrics}


def _classes(protocol: Protocol) -> list[int]:
    return [prompt.class_index for prompt in run_prompts(protocol)] if protocol.of_toy else []


@dataclass(frozen=True)
class Known:
    estimate: ClassEstimate
    better: Better = "lower"
    limit: FrechetFigures | None = None  # of a Frechet distance: what it is with infinitely many images
    interval: Interval | None = None  # where it is not that of the estimate
    compares: bool = False  # a difference to the untouched pipeline itself: it has an interval and no verdict


@dataclass(frozen=True)
class Measured:
    """What is known of a row by itself: figures by their names."""

    images: Images
    distances: dict[str, Known] = field(default_factory=dict)
    accuracy: dict[str, Known] = field(default_factory=dict)  # by attribute; only of the toy
    metrics: dict[str, Known] = field(default_factory=dict)  # but for those that compare


@dataclass(frozen=True)
class Scorer:
    """Scores rows by themselves and against the baseline, and keeps numbers of single images in a folder."""

    protocol: Protocol
    metrics: Sequence[ImageMetric]
    scales: Sequence[Scale]
    cache: Path
    progress: Progress | None = None

    def measure(self, images: Images) -> Measured:
        own = (metric for metric in self.metrics if not metric.compares)
        row = Measured(images, metrics={metric.name: self._mean(metric, images) for metric in own})
        for scale in self.scales:
            scale.measure(row, {choice.metric for choice in self.protocol.metrics})
        toy = [scale for scale in self.scales if self.protocol.of_toy and scale.extractor.name == "toy"]
        for scale in toy:  # fraction of images that show what their prompt says, per attribute and as the mean of all
            from elfatt_sd.toy.renderer import CLASSES, class_labels

            seen = toy_attributes(scale.extractor, torch.from_numpy(np.array(scale.features(images))))
            wanted = class_labels([CLASSES[number] for number in images.classes]).unbind(1)
            right = {name: (found == each).double() for (name, found), each in zip(seen.items(), wanted, strict=True)}
            for name, values in {**right, "mean": torch.stack(list(right.values())).mean(0)}.items():
                interval = share_interval(values, images.classes, len(right) if name == "mean" else 1)
                row.accuracy[name] = Known(ClassEstimate.mean(values, images.classes), "higher", interval=interval)
        return row

    def score(self, row: Measured, baseline: Measured | None) -> dict[str, Any]:
        """Return what `scores.json` has of a row; without a baseline, of the baseline itself."""
        images, paired, lowest, metrics = row.images, None, [], row.metrics
        if baseline:
            device = torch.device(network_device(self.protocol))
            changes = pair_changes(images, baseline.images, self.cache, device, self.progress)
            paired = self._paired(row, baseline, changes)
            order = torch.argsort(changes[:, 0], stable=True)[:MOST_CHANGED].tolist()
            lowest = [index for index in order if changes[index, 0].isfinite()]  # identical ones are left out
            others = (metric for metric in self.metrics if metric.compares)
            metrics = {metric.name: self._mean(metric, images, baseline.images) for metric in others} | metrics
        figures = replace(row, metrics=metrics)
        compared = {part: _compared(figures, baseline, part) for part in ("distances", "accuracy", "metrics")}
        return {
            "images": len(images.paths),
            "classes": len(set(images.classes)),
            "distances": compared["distances"],
            "paired": paired,
            "accuracy": compared["accuracy"] or None,
            "most_changed": lowest,
            **({"metrics": compared["metrics"]} if self.protocol.metrics else {}),
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
            pairs = zip(batches(scale.features(images)), batches(scale.features(baseline.images)), strict=True)
            cosine = torch.cat([functional.cosine_similarity(mine, other, dim=1) for mine, other in pairs])
            each = cosine.view(len(images.paths), -1).mean(1)
            found["cosine"] = {**_summary(each, classes, -1.0, 1.0), "extractor": scale.extractor.name}
        return found

    def _mean(self, metric: ImageMetric, images: Images, baseline: Images | None = None) -> Known:
        """The mean of one number for each image, `[n]` float64; these are kept in the cache."""
        parts = [metric.identity, images.identity, list(images.texts), baseline.identity if baseline else ""]

        def compute() -> Tensor:
            values = torch.cat(list(metric.values(images, baseline, self.progress))).double()
            odd = next((index for index, value in enumerate(values.tolist()) if not abs(value) < _LARGEST), None)
            if odd is not None:
                said = f"metric {metric.name!r} of image {odd} of row {images.name!r} is {values[odd]}"
                raise ElfattError(f"{said}; accepted are numbers between -{_LARGEST:g} and {_LARGEST:g}.")
            return values

        path = self.cache / f"{images.name}-metric-{sha256_of_data(parts)[:16]}.npy"
        values = _kept(path, compute, len(images.paths))
        return Known(ClassEstimate.mean(values, images.classes), metric.better, compares=metric.compares)


def _kept(path: Path, compute: Callable[[], Tensor], *shape: int) -> Tensor:
    """Return float64 numbers `shape` of single images that a file keeps, or compute and keep them."""
    known = read_array(path, *shape[1:], dtype="float64")
    # the last column alone, as a PSNR may be infinite
    if known is not None and known.shape == shape and np.isfinite(known.reshape(len(known), -1)[:, -1]).all():
        return torch.from_numpy(np.array(known))
    with quiet_pillow():
        values = compute()
    with atomic_file(path) as file:
        np.save(file, values.numpy())
    return values


def _compared(row: Measured, baseline: Measured | None, part: str) -> dict[str, Any]:
    """Return figures as they are published, and their paired differences to the untouched pipeline with verdicts.

    The difference of a Frechet distance is that of infinitely many images. Metrics say which values are better.
    """
    rows: dict[str, Any] = {}
    figures: dict[str, Known] = getattr(row, part)
    for name, known in figures.items():
        estimate, better, limit = known.estimate, known.better, known.limit
        rows[name] = {"value": estimate.value, "interval": known.interval or estimate.interval()}
        rows[name] |= {"better": better} if part == "metrics" else {}
        if known.compares:
            rows[name]["compares"] = True
        elif baseline is not None:
            other: Known = getattr(baseline, part)[name]
            moved = estimate - other.estimate
            value, interval = moved.value, moved.interval()
            if limit and other.limit:
                value, interval = limit.limit_difference(other.limit)
            said = verdict(interval, even_classes(row.images.classes), lower_is_better=better == "lower")
            rows[name]["difference"] = {"value": value, "interval": interval, **({"verdict": said} if better else {})}
            rows[name]["difference"] |= {"images": "infinite"} if limit else {}
    return rows


class Scale:
    """An extractor with its reference: what rows are measured on."""

    def __init__(self, extractor: Extractor, reference: Reference, cache: Path) -> None:
        self.extractor, self.reference, self.cache = extractor, reference, cache
        self.distance_name = extractor.distance_name + reference.metric_suffix
        # what distances need of the reference, whatever the row
        self.target = Target(reference.mean, reference.covariance)
        self.within = None if reference.sample is None else kernel_within(reference.sample)

    def extract(self, images: Images, progress: Progress | None = None) -> None:
        path = self._path(images)
        if by_first(lambda: (found := self._read(images)) is not None and is_finite(found)):
            return
        parts = path.with_suffix(".parts")
        chunks = extract(images, self.extractor, parts, progress=progress, name=images.name)

        def join() -> None:
            chunks.join(path)
            shutil.rmtree(parts, ignore_errors=True)  # with what a killed process left half-written there

        by_first(join)

    def features(self, images: Images) -> Array:
        """Features `[n * frames, d]` of a row, memory-mapped float32."""
        found = self._read(images)
        if found is None:
            raise ElfattError(f"{self._path(images)} is damaged; score the run again.")
        return found

    def _read(self, images: Images) -> Array | None:
        found = read_array(self._path(images), self.extractor.dimension)
        return found if found is not None and len(found) == len(images) else None

    def _path(self, images: Images) -> Path:
        key = sha256_of_data([images.identity, self.extractor.identity])
        return self.cache / f"{images.name}-{self.extractor.name}-{key[:16]}.npy"

    def measure(self, row: Measured, wanted: Collection[str]) -> None:
        """Add the Frechet distance and, where the reference has features, the kernel distance and wanted metrics."""
        features, extractor = self.features(row.images), self.extractor
        classes = [number for number in row.images.classes for _ in range(row.images.frames)]
        figures = frechet_figures(features, self.target, classes)
        row.distances[self.distance_name] = Known(figures.published, limit=figures)
        sample, recipe = self.reference.sample, extractor.preprocessing
        if sample is None:
            return
        title = extractor.kernel_name + self.reference.metric_suffix
        row.distances[title] = Known(kernel_distance(features, sample, classes, within=self.within))
        if "prdc" in wanted:
            where = extractor.distance_name.removeprefix("FD-").replace("FID", "Inception", 1)
            for name, estimate in neighbour_figures(features, sample, classes).items():
                row.metrics[f"{name} ({where})"] = Known(estimate, "higher")
        if "cmmd" in wanted and extractor.name == "clip":
            published = (recipe.get("crop"), extractor.dimension) == (336, 768)
            name = "CMMD" if published else f"CMMD ({str(recipe.get('sha256'))[:8]})"
            row.metrics[name] = Known(cmmd(features, sample, classes))


def pair_changes(
    images: Images, baseline: Images, cache: Path, device: torch.device, progress: Progress | None = None
) -> Tensor:
    """PSNR (dB) and SSIM `[n, 2]` of each image to the baseline's of the same index; kept in the cache.

    The PSNR is infinite where an image equals the baseline's in every pixel, and only there. That of a clip is over
    all its frames at once; its SSIM is the mean over frames.
    """
    from torchmetrics.functional.image import peak_signal_noise_ratio

    count, place = len(images.paths), device if has_float64(device) else torch.device("cpu")

    def compute() -> Tensor:
        sides, rows = [images.stacks(), baseline.stacks()], []
        for start in range(0, count, PAIR_BATCH):
            size = min(PAIR_BATCH, count - start)
            mine, other = (torch.stack([next(side) for _ in range(size)]).to(place).double() for side in sides)
            decibels = peak_signal_noise_ratio(mine, other, data_range=255.0, reduction="none", dim=(1, 2, 3, 4))
            frames = structural_similarity(mine.flatten(0, 1), other.flatten(0, 1), data_range=255.0)
            similarity = frames.view(size, -1).mean(1)  # in float32, equal flat images would be 0.999 alike
            rows.append(torch.stack((decibels, similarity), 1).to("cpu", torch.float64))
            if progress:
                progress(f"{images.name}, PSNR and SSIM", start + size, count)
        return torch.cat(rows)

    key = sha256_of_data([PAIRS_FORMAT, images.identity, baseline.identity])[:16]
    return _kept(cache / f"{images.name}-pairs-{key}.npy", compute, count, 2)


def _summary(values: Tensor, classes: Tensor, low: float, high: float) -> dict[str, Any]:
    """The mean of one number per image with its 95 % interval, median, quartiles and lowest; None without images."""
    if not len(values):
        return dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest"))
    mean = ClassEstimate.mean(values, classes)
    ends = mean.interval(least=low)
    quartiles = torch.quantile(values, values.new_tensor([0.25, 0.5, 0.75])).tolist()
    return {
        "mean": mean.value,
        "interval": None if ends is None else [ends[0], min(ends[1], high)],
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
