"""Score the images of a run: distances to the reference, changes against the untouched pipeline, accuracy on the toy.

Everything is streamed: features lie in memory-mapped files, so memory does not grow with the number of images. What
was computed once is kept under `RUN/scores`, named by the hash of what it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.config import ElfattError
from elfatt_sd.devices import accelerators
from elfatt_sd.evaluation.extraction import Preprocessing
from elfatt_sd.evaluation.features import Extractor, load_extractor
from elfatt_sd.evaluation.frechet import FrechetFigures
from elfatt_sd.evaluation.intervals import (
    Estimate,
    Interval,
    as_list,
    even_classes,
    figure_as_dict,
    share_interval,
    verdict,
)
from elfatt_sd.evaluation.metrics.scores import Scorer, check_feature_metrics, load_metrics
from elfatt_sd.evaluation.pairs import cosines, most_changed, pair_changes, paired
from elfatt_sd.evaluation.processes import by_first, process_state, scoring_device
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.records import SCORES_FORMAT
from elfatt_sd.evaluation.reference import Reference, Wanted, build_reference, check_reference
from elfatt_sd.evaluation.row_images import Images
from elfatt_sd.evaluation.run import SCORES_FILE, Run, clear_disk_errors
from elfatt_sd.evaluation.scales import Distance, Scale
from elfatt_sd.evaluation.statistics import batches
from elfatt_sd.files import cache_folder, write_json
from elfatt_sd.optional import need
from elfatt_sd.progress import Progress


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
    """Load a protocol's extractors where its networks run."""
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
    wanted = wanted_reference(protocol)
    found = {each.distance_name: check_reference(wanted, each) for each in extractors}
    return found | {f"metric {each.name}": each.identity for each in metrics}


def _reference(protocol: Protocol, extractor: Extractor, progress: Progress | None) -> Reference:
    wanted, place = wanted_reference(protocol), cache_folder()
    with clear_disk_errors(place):
        return build_reference(wanted, extractor, cache_dir=place, progress=progress)


def wanted_reference(protocol: Protocol) -> Wanted:
    given = protocol.reference
    preprocessing = Preprocessing(given.size, given.resize, given.filter)
    classes = [prompt.class_index for prompt in run_prompts(protocol)] if protocol.of_toy else ()
    return Wanted(given.source, preprocessing, given.count, given.allow_count, given.per_class, classes)


def score_cell(images: Images, baseline: Images, scorer: Scorer, toy: bool = False) -> dict[str, Any]:
    """Score one row."""
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
    rows = {}
    for scale in scales:
        own = scale.distances(images)
        others = scale.distances(baseline) if baseline else {}
        for name, figure in own.items():
            rows[name] = _distance(figure, others.get(name), even_classes(images.classes))
    return rows


def _distance(figure: Distance, other: Distance | None, classes: int) -> dict[str, Any]:
    """A distance as it is published; its paired difference is that of infinitely many images, and says so."""
    if not isinstance(figure, FrechetFigures):
        found = figure_as_dict(figure.value, figure.interval())
        return {**found, "difference": _difference(figure, other, classes)} if isinstance(other, Estimate) else found
    found = figure_as_dict(figure.published.value, figure.published.interval())
    if isinstance(other, FrechetFigures):
        value, interval = figure.limit_difference(other)
        found["difference"] = {**_judged(value, interval, classes), "images": "infinite"}
    return found


def _difference(figure: Estimate, other: Estimate, classes: int, *, lower_is_better: bool = True) -> dict[str, Any]:
    difference = figure - other
    return _judged(difference.value, difference.interval(), classes, lower_is_better=lower_is_better)


def _judged(value: float, interval: Interval | None, classes: int, *, lower_is_better: bool = True) -> dict[str, Any]:
    said = verdict(interval, classes, lower_is_better=lower_is_better)
    return {**figure_as_dict(value, interval), "verdict": said}


def _paired(images: Images, baseline: Images, changes: Tensor, scales: Sequence[Scale]) -> dict[str, Any]:
    """Closeness of each image; the cosine is that of the first extractor's features, where there is one."""
    found = paired(images, changes)
    for scale in scales[:1]:
        pairs = zip(batches(scale.features(images)), batches(scale.features(baseline)), strict=True)
        cosine = torch.cat([functional.cosine_similarity(mine, other, dim=1) for mine, other in pairs])
        found["cosine"] = cosines(images, cosine.view(len(images.paths), -1).mean(1), scale.extractor.name)
    return found


def _accuracy(images: Images, baseline: Images | None, scales: Sequence[Scale]) -> dict[str, Any] | None:
    """Fraction of images that show what their prompt says, per attribute and as the mean of all."""
    scale = next((scale for scale in scales if scale.right(images)), None)
    if scale is None:
        return None
    right = scale.right(images)
    other, classes = scale.right(baseline) if baseline else None, even_classes(images.classes)
    rows: dict[str, Any] = {}
    for name, values in {**right, "mean": torch.stack(list(right.values())).mean(0)}.items():
        figure = Estimate.mean(values, images.classes)
        parts = 1 if name in right else len(right)
        rows[name] = {"value": figure.value, "interval": as_list(share_interval(values, images.classes, parts))}
        if other is not None:
            known = other[name] if name in other else torch.stack(list(other.values())).mean(0)
            before = Estimate.mean(known, images.classes)
            rows[name]["difference"] = _difference(figure, before, classes, lower_is_better=False)
    return rows
