"""How far each picture of a row is from the untouched pipeline's of the same latent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.extraction import quiet_pillow
from elfatt_sd.evaluation.intervals import Estimate
from elfatt_sd.evaluation.row_images import Images
from elfatt_sd.evaluation.similarity import structural_similarity
from elfatt_sd.evaluation.statistics import read_array
from elfatt_sd.files import atomic_file, sha256_of_data
from elfatt_sd.progress import Progress

FORMAT = 4  # of what is kept
MOST_CHANGED = 16
DIGITS = 6  # of what is kept of each picture
PAIR_BATCH = 8


def pair_changes(
    images: Images, baseline: Images, cache: Path, device: torch.device, progress: Progress | None = None
) -> Tensor:
    """PSNR (dB) and SSIM `[n, 2]` of each picture to the baseline's of the same index; kept in the cache.

    The PSNR is infinite where a picture equals the baseline's in every pixel, and only there.

    Args:
        images: a row's pictures.
        baseline: the untouched pipeline's.
        cache: folder for what was computed.
        device: where to compute, in float64.
        progress: called with what is looked at, the number of pictures compared, and their total.
    """
    path = cache / f"{images.name}-pairs-{sha256_of_data([FORMAT, images.identity, baseline.identity])[:16]}.npy"
    known = read_array(path, 2, "float64")
    if known is not None and len(known) == len(images.paths):
        return torch.from_numpy(np.array(known))
    with quiet_pillow():
        rows = torch.cat(list(_changes(images, baseline, device, progress)))
    with atomic_file(path) as file:
        np.save(file, rows.numpy())
    return rows


def _changes(images: Images, baseline: Images, device: torch.device, progress: Progress | None) -> Iterator[Tensor]:
    from torchmetrics.functional.image import peak_signal_noise_ratio

    count = len(images.paths)
    ours, theirs = (_tensors(side.pictures().load(0, count)) for side in (images, baseline))
    for start in range(0, count, PAIR_BATCH):
        size = min(PAIR_BATCH, count - start)
        mine, other = (torch.stack([next(side) for _ in range(size)]).to(device) for side in (ours, theirs))
        decibels = peak_signal_noise_ratio(mine, other, data_range=255.0, reduction="none", dim=(1, 2, 3))
        similarity = structural_similarity(mine, other, data_range=255.0)
        yield torch.stack((decibels, similarity), 1).to("cpu", torch.float64)
        if progress:
            progress(f"{images.name}, PSNR and SSIM", start + size, count)


def _tensors(pictures: Iterator[np.ndarray[Any, Any] | str]) -> Iterator[Tensor]:
    for picture in pictures:
        if isinstance(picture, str):
            raise ElfattError(f"picture {picture} cannot be read.")
        yield torch.from_numpy(picture).permute(2, 0, 1).double()  # float32 finds equal flat pictures 0.999 alike


def paired(images: Images, changes: Tensor, cosine: Tensor, extractor: str) -> dict[str, Any]:
    """Summaries of the changes, and PSNR and SSIM of each picture, by which rows can be compared with each other.

    PSNR is over the pictures that differ, the cosine that of the features of an extractor.
    """
    differing = changes[:, 0].isfinite()
    classes = torch.as_tensor(images.classes)
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
        "cosine": {**_summary(cosine, classes, -1.0, 1.0), "extractor": extractor},
    }


def _summary(values: Tensor, classes: Tensor, low: float, high: float) -> dict[str, Any]:
    """The mean of one number per picture with its 95 % interval, median, quartiles and lowest; None without pictures.

    No interval leaves the numbers' own bounds.
    """
    if not len(values):
        return dict.fromkeys(("mean", "interval", "median", "quartiles", "lowest"))
    mean = Estimate.mean(values, classes)
    ends = mean.interval(least=low)
    quartiles = torch.quantile(values, torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype)).tolist()
    return {
        "mean": mean.value,
        "interval": None if ends is None else [ends[0], min(ends[1], high)],
        "median": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
        "lowest": values.min().item(),
    }


def most_changed(changes: Tensor) -> list[int]:
    """Indices of the pictures with the lowest PSNR, lowest first; identical ones are left out."""
    order = torch.argsort(changes[:, 0], stable=True)[:MOST_CHANGED].tolist()
    return [index for index in order if changes[index, 0].isfinite()]
