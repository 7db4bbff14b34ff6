"""An extractor with its reference: what rows are measured on, and what was measured of each row."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.extraction import extract
from elfatt_sd.evaluation.features import Extractor, ToyExtractor
from elfatt_sd.evaluation.frechet import FrechetFigures, Target, frechet_figures
from elfatt_sd.evaluation.intervals import Estimate
from elfatt_sd.evaluation.kernel import kernel_distance, kernel_within
from elfatt_sd.evaluation.processes import by_first
from elfatt_sd.evaluation.reference import Reference
from elfatt_sd.evaluation.row_images import Images
from elfatt_sd.evaluation.statistics import is_finite, read_array
from elfatt_sd.files import sha256_of_data
from elfatt_sd.progress import Progress

Array = np.ndarray[Any, Any]
Distance = FrechetFigures | Estimate  # of Frechet, or of a kernel


class Scale:
    """An extractor with its reference: what rows are measured on."""

    def __init__(self, extractor: Extractor, reference: Reference, cache: Path) -> None:
        self.extractor, self.reference, self.cache = extractor, reference, cache
        self.distance_name = extractor.distance_name + reference.metric_suffix
        self.kernel_name = extractor.kernel_name + reference.metric_suffix
        self._known: dict[str, dict[str, Distance]] = {}
        self._right: dict[str, dict[str, Tensor]] = {}

    def extract(self, images: Images, progress: Progress | None = None) -> None:
        """Compute the features of a row unless they are there."""
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
            self._right[images.name] = _right(self.extractor, self.features(images), images.classes)
        return self._right.get(images.name, {})


def _right(extractor: ToyExtractor, features: Array, classes: Sequence[int]) -> dict[str, Tensor]:
    from elfatt_sd.toy.renderer import CLASSES, class_labels

    seen = extractor.classify(torch.from_numpy(np.array(features)))
    wanted = class_labels([CLASSES[number] for number in classes])
    return {name: (found == wanted[:, place]).to(torch.float64) for place, (name, found) in enumerate(seen.items())}
