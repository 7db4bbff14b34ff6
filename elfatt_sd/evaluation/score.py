"""Score the images of a run: distances to the reference, changes against the untouched pipeline, accuracy on the toy.

Everything is streamed: features lie in memory-mapped files, so memory does not grow with the number of images. What
was computed once is kept under `RUN/scores`, named by the hash of what it was computed from.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.devices import accelerators, has_float64
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.evaluation.extraction import Images, extract, quiet_pillow
from elfatt_sd.evaluation.features import Extractor, ToyExtractor, load_extractor
from elfatt_sd.evaluation.frechet import FrechetFigures, Target, frechet_figures
from elfatt_sd.evaluation.metrics.scores import Scorer, check_feature_metrics, load_metrics
from elfatt_sd.evaluation.processes import by_first, process_state, scoring_device
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.records import SCORES_FORMAT
from elfatt_sd.evaluation.reference import Reference, build_reference, check_reference
from elfatt_sd.evaluation.run import SCORES_FILE, Run, clear_disk_errors
from elfatt_sd.evaluation.statistics import (
    Estimate,
    Interval,
    as_list,
    batches,
    even_classes,
    figure_as_dict,
    is_finite,
    kernel_distance,
    kernel_within,
    read_array,
    share_interval,
    verdict,
)
from elfatt_sd.files import atomic_file, cache_folder, sha256_of_data, write_json
from elfatt_sd.progress import Progress

Array = np.ndarray[Any, Any]
Distance = FrechetFigures | Estimate  # of Frechet, or of a kernel
PAIRS_FORMAT = 4  # of what is kept of pairs
MOST_CHANGED = 16
DIGITS = 6  # of what is kept of each image
PAIR_BATCH = 8
_ROUNDING = 1e-6
SIGMA = 1.5  # pixels
REACH = 5  # pixels from the middle of the window to its edge
K1, K2 = 0.01, 0.03


def score_run(
    run: Run,
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
    place = folder or run.folder
    rows = {row.name: Images.of_row(row, run.protocol.frames, len(run.prompts)) for row in run.finished}
    scales = [
        Scale(extractor, _reference(run.protocol, extractor, progress), place / "scores")
        for extractor in (load_extractors(run.protocol) if extractors is None else extractors)
    ]
    for scale in scales:
        for images in rows.values():
            scale.extract(images, progress)

    def finish() -> None:
        cache, toy, baseline = place / "scores", run.protocol.of_toy, rows[run.baseline.name]
        device = network_device(run.protocol)
        metrics = load_metrics(run.protocol.metrics, device)
        scorer = Scorer(run.protocol.metrics, metrics, scales, cache, device, progress)
        data = {
            "format": SCORES_FORMAT,
            "identity": run.record.identity,
            "references": {
                scale.distance_name: {**scale.reference.description, "features": scale.extractor.dimension}
                for scale in scales
            },
            "rows": {name: score_cell(images, baseline, scorer, toy) for name, images in rows.items()},
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


def build_references(protocol: Protocol, *, progress: Progress | None = None) -> list[Reference]:
    """Compute a protocol's reference for each extractor, or take it from the cache."""
    return [_reference(protocol, extractor, progress) for extractor in load_extractors(protocol)]


def score_inputs(protocol: Protocol, extractors: Sequence[Extractor]) -> dict[str, str]:
    """Return what scores depend on besides the images: hashes of extractors with their references, and of metrics."""
    check_feature_metrics(protocol.metrics, extractors)
    metrics = load_metrics(protocol.metrics, network_device(protocol))
    wanted, classes = protocol.reference, _classes(protocol)
    found = {each.distance_name: check_reference(wanted, each, classes) for each in extractors}
    return found | {f"metric {each.name}": each.identity for each in metrics}


def _reference(protocol: Protocol, extractor: Extractor, progress: Progress | None) -> Reference:
    place = cache_folder()
    with clear_disk_errors(place):
        return build_reference(protocol.reference, extractor, _classes(protocol), cache_dir=place, progress=progress)


def _classes(protocol: Protocol) -> list[int]:
    """Classes that renders of the toy have to have."""
    return [prompt.class_index for prompt in run_prompts(protocol)] if protocol.of_toy else []


def score_cell(images: Images, baseline: Images, scorer: Scorer, toy: bool = False) -> dict[str, Any]:
    if list(images.classes) != list(baseline.classes):
        raise ElfattError(f"rows {images.name!r} and {baseline.name!r} are not of the same prompts.")
    other = None if images.name == baseline.name else baseline
    scales, place = scorer.scales, torch.device(scorer.device)
    changes = pair_changes(images, other, scorer.cache, place, scorer.progress) if other else None
    metrics = {"metrics": scorer.score(images, other)} if scorer.wanted else {}
    return {
        "images": len(images.paths),
        "classes": len(set(images.classes)),
        "distances": _distances(images, other, scales),
        "paired": _paired(images, baseline, changes, scales) if changes is not None else None,
        "accuracy": _accuracy(images, other, scales) if toy else None,
        "most_changed": most_changed(changes) if changes is not None else [],
        **metrics,
    }


def _distances(images: Images, baseline: Images | None, scales: Sequence[Scale]) -> dict[str, Any]:
    """Distances as they are published; the difference of a Frechet distance is that of infinitely many images."""
    rows: dict[str, Any] = {}
    classes = even_classes(images.classes)
    for scale in scales:
        others = scale.distances(baseline) if baseline else {}
        for name, figure in scale.distances(images).items():
            other, own = others.get(name), figure.published if isinstance(figure, FrechetFigures) else figure
            rows[name] = figure_as_dict(own.value, own.interval())
            if isinstance(figure, FrechetFigures) and isinstance(other, FrechetFigures):
                value, interval = figure.limit_difference(other)
                rows[name]["difference"] = {**_judged(value, interval, classes), "images": "infinite"}
            elif isinstance(figure, Estimate) and isinstance(other, Estimate):
                rows[name]["difference"] = _difference(figure, other, classes)
    return rows


def _difference(figure: Estimate, other: Estimate, classes: int, *, lower_is_better: bool = True) -> dict[str, Any]:
    difference = figure - other
    return _judged(difference.value, difference.interval(), classes, lower_is_better)


def _judged(value: float, interval: Interval | None, classes: int, lower_is_better: bool = True) -> dict[str, Any]:
    return {
        **figure_as_dict(value, interval),
        "verdict": verdict(interval, classes, lower_is_better=lower_is_better),
    }


def _paired(images: Images, baseline: Images, changes: Tensor, scales: Sequence[Scale]) -> dict[str, Any]:
    """Closeness of each image; the cosine is that of the first extractor's features, where there is one."""
    found = paired(images, changes)
    for scale in scales[:1]:
        pairs = zip(batches(scale.features(images)), batches(scale.features(baseline)), strict=True)
        cosine = torch.cat([functional.cosine_similarity(mine, other, dim=1) for mine, other in pairs])
        each, classes = cosine.view(len(images.paths), -1).mean(1), torch.as_tensor(images.classes, device="cpu")
        found["cosine"] = {**_summary(each, classes, -1.0, 1.0), "extractor": scale.extractor.name}
    return found


def _accuracy(images: Images, baseline: Images | None, scales: Sequence[Scale]) -> dict[str, Any] | None:
    """Fraction of images that show what their prompt says, per attribute and as the mean of all."""
    scale = next((scale for scale in scales if scale.right(images)), None)
    if scale is None:
        return None
    sides = (scale.right(side) for side in (images, baseline) if side)
    right, *before = ({**each, "mean": torch.stack(list(each.values())).mean(0)} for each in sides)
    rows: dict[str, Any] = {}
    for name, values in right.items():
        figure = Estimate.mean(values, images.classes)
        parts = len(right) - 1 if name == "mean" else 1
        rows[name] = {"value": figure.value, "interval": as_list(share_interval(values, images.classes, parts))}
        for other in before:
            untouched, classes = Estimate.mean(other[name], images.classes), even_classes(images.classes)
            rows[name]["difference"] = _difference(figure, untouched, classes, lower_is_better=False)
    return rows


class Scale:
    """An extractor with its reference: what rows are measured on."""

    def __init__(self, extractor: Extractor, reference: Reference, cache: Path) -> None:
        self.extractor, self.reference, self.cache = extractor, reference, cache
        self.distance_name = extractor.distance_name + reference.metric_suffix
        self.kernel_name = extractor.kernel_name + reference.metric_suffix
        self._known: dict[str, dict[str, Distance]] = {}
        self._right: dict[str, dict[str, Tensor]] = {}

    def extract(self, images: Images, progress: Progress | None = None) -> None:
        path = self._path(images)
        if by_first(lambda: (found := self._read(images)) is not None and is_finite(found)):
            return
        parts = path.with_suffix(".parts")
        chunks = extract(images.pictures(), self.extractor, parts, progress=progress, name=images.name)

        def join() -> None:
            unreadable = [name for _, names in chunks for name in names]
            if not unreadable:
                chunks.join(path)
            shutil.rmtree(parts, ignore_errors=True)  # with what a killed process left half-written there
            if unreadable:  # which is not kept, as it can be put back
                raise ElfattError(f"row {images.name!r}: image {unreadable[0]} cannot be read; put it back.")

        by_first(join)

    def features(self, images: Images) -> Array:
        """Features `[n * frames, d]` of a row, memory-mapped float32."""
        found = self._read(images)
        if found is None:
            raise ElfattError(f"{self._path(images)} is damaged; score the run again.")
        return found

    def _read(self, images: Images) -> Array | None:
        found = read_array(self._path(images), self.extractor.dimension)
        return found if found is not None and len(found) == len(images.frame_classes) else None

    def _path(self, images: Images) -> Path:
        key = sha256_of_data([images.identity, self.extractor.identity])
        return self.cache / f"{images.name}-{self.extractor.name}-{key[:16]}.npy"

    def distances(self, images: Images) -> dict[str, Distance]:
        """The Frechet distance and, where the reference has features, the kernel distance; computed once per row."""
        if images.name not in self._known:
            features = self.features(images)
            classes = images.frame_classes
            self._known[images.name] = {self.distance_name: frechet_figures(features, self._target, classes)}
            if self.reference.sample is not None:
                self._known[images.name][self.kernel_name] = kernel_distance(
                    features, self.reference.sample, classes, within=self._within
                )
        return self._known[images.name]

    @cached_property
    def _target(self) -> Target:
        return Target(self.reference.statistics.mean, self.reference.statistics.covariance)

    @cached_property
    def _within(self) -> float | None:
        return None if self.reference.sample is None else kernel_within(self.reference.sample)

    def right(self, images: Images) -> dict[str, Tensor]:
        """Whether each image shows its prompt's attributes: `[n]` of 0 or 1, per attribute; computed once per row.

        Empty where the extractor does not read attributes.
        """
        if images.name not in self._right and isinstance(self.extractor, ToyExtractor):
            from elfatt_sd.toy.renderer import CLASSES, class_labels

            seen = self.extractor.classify(torch.from_numpy(np.array(self.features(images))))
            wanted = class_labels([CLASSES[number] for number in images.classes]).unbind(1)
            pairs = zip(seen.items(), wanted, strict=True)
            self._right[images.name] = {name: (found == each).to(torch.float64) for (name, found), each in pairs}
        return self._right.get(images.name, {})


def pair_changes(
    images: Images, baseline: Images, cache: Path, device: torch.device, progress: Progress | None = None
) -> Tensor:
    """PSNR (dB) and SSIM `[n, 2]` of each image to the baseline's of the same index; kept in the cache.

    The PSNR is infinite where an image equals the baseline's in every pixel, and only there. That of a clip is over
    all its frames at once; its SSIM is the mean over frames.
    """
    path = cache / f"{images.name}-pairs-{sha256_of_data([PAIRS_FORMAT, images.identity, baseline.identity])[:16]}.npy"
    known = read_array(path, 2, dtype="float64")
    if known is not None and len(known) == len(images.paths):
        decibels, similarities = known.T
        if (decibels >= 0).all() and (np.abs(similarities) <= 1 + _ROUNDING).all():
            return torch.from_numpy(np.array(known))
    with quiet_pillow():
        rows = torch.cat(list(_changes(images, baseline, device, progress)))
    with atomic_file(path) as file:
        np.save(file, rows.numpy())
    return rows


def _changes(images: Images, baseline: Images, device: torch.device, progress: Progress | None) -> Iterator[Tensor]:
    from torchmetrics.functional.image import peak_signal_noise_ratio

    count, device = len(images.paths), device if has_float64(device) else torch.device("cpu")
    ours, theirs = (side.stacks() for side in (images, baseline))
    for start in range(0, count, PAIR_BATCH):
        size = min(PAIR_BATCH, count - start)
        mine, other = (torch.stack([next(side) for _ in range(size)]).to(device).double() for side in (ours, theirs))
        decibels = peak_signal_noise_ratio(mine, other, data_range=255.0, reduction="none", dim=(1, 2, 3, 4))
        frames = structural_similarity(mine.flatten(0, 1), other.flatten(0, 1), data_range=255.0)
        similarity = frames.view(size, -1).mean(1)  # in float32, equal flat images would be 0.999 alike
        yield torch.stack((decibels, similarity), 1).to("cpu", torch.float64)
        if progress:
            progress(f"{images.name}, PSNR and SSIM", start + size, count)


def paired(images: Images, changes: Tensor) -> dict[str, Any]:
    """Summaries of the changes, and PSNR and SSIM of each image, by which rows can be compared with each other.

    PSNR is over the images that differ.
    """
    differing = changes[:, 0].isfinite()
    classes = torch.as_tensor(images.classes, device="cpu")
    decibels, similarities = ([round(value, DIGITS) for value in each] for each in changes.t().tolist())
    return {
        "classes": list(images.classes),
        "psnr": {
            **_summary(changes[differing, 0], classes[differing], 0.0, math.inf),
            "unit": "dB",
            "identical": int((~differing).sum()),
            "pictures": [value if math.isfinite(value) else None for value in decibels],
        },
        "ssim": {**_summary(changes[:, 1], classes, -1.0, 1.0), "pictures": similarities},
    }


def _summary(values: Tensor, classes: Tensor, low: float, high: float) -> dict[str, Any]:
    """The mean of one number per image with its 95 % interval, median, quartiles and lowest; None without images."""
    if not len(values):
        return dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest"))
    mean = Estimate.mean(values, classes)
    ends = mean.interval(least=low)
    quartiles = torch.quantile(values, values.new_tensor([0.25, 0.5, 0.75])).tolist()
    return {
        "mean": mean.value,
        "interval": None if ends is None else [ends[0], min(ends[1], high)],
        "median": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
        "lowest": values.min().item(),
    }


def most_changed(changes: Tensor) -> list[int]:
    """Indices of the images with the lowest PSNR, lowest first; identical ones are left out."""
    order = torch.argsort(changes[:, 0], stable=True)[:MOST_CHANGED].tolist()
    return [index for index in order if changes[index, 0].isfinite()]


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
