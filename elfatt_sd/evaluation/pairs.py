"""How far each image of a row is from the untouched pipeline's of the same latent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.devices import has_float64
from elfatt_sd.evaluation.extraction import quiet_pillow
from elfatt_sd.evaluation.intervals import Estimate
from elfatt_sd.evaluation.row_images import Images
from elfatt_sd.evaluation.similarity import structural_similarity
from elfatt_sd.evaluation.statistics import read_array
from elfatt_sd.files import atomic_file, sha256_of_data
from elfatt_sd.progress import Progress

FORMAT = 4  # of what is kept
MOST_CHANGED = 16
DIGITS = 6  # of what is kept of each image
PAIR_BATCH = 8
_ROUNDING = 1e-6


def pair_changes(
    images: Images, baseline: Images, cache: Path, device: torch.device, progress: Progress | None = None
) -> Tensor:
    """PSNR (dB) and SSIM `[n, 2]` of each image to the baseline's of the same index; kept in the cache.

    The PSNR is infinite where an image equals the baseline's in every pixel, and only there. That of a clip is over
    all its frames at once; its SSIM is the mean over frames.
    """
    path = cache / f"{images.name}-pairs-{sha256_of_data([FORMAT, images.identity, baseline.identity])[:16]}.npy"
    known = read_array(path, 2, dtype="float64")
    if known is not None and len(known) == len(images.paths) and _is_possible(known):
        return torch.from_numpy(np.array(known))
    with quiet_pillow():
        rows = torch.cat(list(_changes(images, baseline, device, progress)))
    with atomic_file(path) as file:
        np.save(file, rows.numpy())
    return rows


def _is_possible(known: np.ndarray[Any, Any]) -> bool:
    decibels, similarities = known.T
    return bool((decibels >= 0).all() and (np.abs(similarities) <= 1 + _ROUNDING).all())


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


def cosines(images: Images, cosine: Tensor, extractor: str) -> dict[str, Any]:
    """Summary of the cosine `[n]` between each image's features and the untouched one's."""
    return {**_summary(cosine, torch.as_tensor(images.classes, device="cpu"), -1.0, 1.0), "extractor": extractor}


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
