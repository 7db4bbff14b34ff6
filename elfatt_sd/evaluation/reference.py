"""Statistics of the reference images, whose features are computed once and kept in a cache; or renders, or moments."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import extraction
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.protocols import ReferenceChoice
from elfatt_sd.evaluation.statistics import KERNEL_SAMPLE, LARGEST, moments
from elfatt_sd.files import folder_lock, sha256_of_data, sha256_of_file
from elfatt_sd.measure import Progress
from elfatt_sd.methods.base import in_one_line

RENDER_SEED = 0x5EED_0F_4EAD  # renders of the reference; training draws from hashes, evaluation from small seeds
# of the renderer; another one when it draws other pixels. This one was a hash of its code.
RENDERS = "4b6eefcbe3b52af41dc77eab32f9bcb8a8ee25be950c6738071af2a0b048ce49"
BLOCK = 1 << 16  # renders that are drawn at a time
FORMAT = 1
COVARIANCE_ROUNDING = 1e-5  # by the largest value: of covariances that were kept in float32
MOMENTS = ".npz"
FULL_COUNT = 50_000  # images of ImageNet's validation set; any other number shows in the metric's name


@dataclass(frozen=True)
class Reference:
    mean: Tensor  # of the features, `[d]`
    covariance: Tensor  # of the features, `[d, d]`
    # float32 features `[m, d]` of evenly spaced images, for the kernel distance; None where only moments are known
    sample: Tensor | None
    identity: str  # hash of the files and of all preprocessing
    # what distances to it carry in their name, such as " (12 reference images)"; empty for `FULL_COUNT` and for renders
    metric_suffix: str
    # where it comes from, as plain data for the report: also the `count` of images, None where another tool's file does
    # not tell, and name and reason of each `unreadable` one
    description: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.covariance.any():
            source = self.description["source"]
            raise ElfattError(f"reference {source} has one image over and over; accepted are images that differ.")


def resized(picture: Any, size: int, resize: str, filter: str) -> Any:
    """Bring an image to a square: `crop` takes the centre, `stretch` changes the proportions, `none` does nothing."""
    if resize != "none" and picture.size != (size, size):
        from PIL import Image, ImageOps

        scale = ImageOps.fit if resize == "crop" else Image.Image.resize
        picture = scale(picture, (size, size), Image.Resampling[filter.upper()])  # which always antialiases
    return picture


def build_reference(
    wanted: ReferenceChoice,
    extractor: Extractor,
    classes: Sequence[int] = (),  # for renders, in proportion to which they are drawn; all by default
    *,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Reference:
    """Compute the statistics of a reference, on features that are in the cache once they are computed.

    A killed computation goes on where it was and gives the same bits. Under `accelerate launch` the processes share the
    work, and the first one decides; two runs that need the same reference wait for each other.
    """
    pictures, identity = extraction.together(lambda: check_reference(wanted, extractor, classes))
    if isinstance(pictures, Reference):
        return pictures
    if len(set(extraction.gathered(identity))) > 1:
        what = "names, sizes or times of its files, the extractor, or the versions of torch and Pillow"
        remedy = "give a folder that all machines share, or copies that keep the times (rsync -a)"
        raise ElfattError(f"reference {wanted.source} is not the same in all processes ({what}); {remedy}.")
    extraction.check_shared(cache_dir, "cache", "set ELFATT_SD_CACHE to a folder that all machines share")
    folder = cache_dir / f"reference-{extractor.name}-{identity[:16]}"
    with contextlib.ExitStack() as held:
        extraction.by_first(lambda: held.enter_context(folder_lock(folder, wait=True)))  # the others wait for it
        chunks = extraction.extract(pictures, extractor, folder / "chunks", progress=progress, name="reference")
    found, names = zip(*map(extraction.read_chunk, chunks), strict=True)
    features, unreadable = torch.cat(found), [name for each in names for name in each]
    count = len(features)
    _check_count(wanted, count, unreadable)
    sample = min(count, KERNEL_SAMPLE)
    unusual = [] if count == FULL_COUNT else [f"{count} reference images"]
    if wanted.resize != "none":
        how = {"crop": "cropped", "stretch": "stretched"}[wanted.resize]
        unusual.append(f"{'' if unusual else 'reference '}{how} to {wanted.size}")
    suffix = f" ({', '.join(unusual)})" if unusual and wanted.source != "toy" else ""
    description = {"source": wanted.source, "identity": identity, **_recipe(wanted), "count": count}
    description |= {"unreadable": unreadable, "preprocessing": extractor.preprocessing}
    rows = [index * count // sample for index in range(sample)]
    return Reference(*moments(*found), features[rows], identity, suffix, description)


def check_reference(
    wanted: ReferenceChoice, extractor: Extractor, classes: Sequence[int] = ()
) -> tuple[extraction.Source | Reference, str]:
    """Return the images, of which there are as many as there must be, and the hash of them and all preprocessing.

    Of a file of moments, which needs no images, return the reference itself.
    """
    extraction.check_exists(wanted.source)
    if wanted.source.lower().endswith(MOMENTS):
        reference = _from_moments(wanted, extractor)
        return reference, reference.identity
    if wanted.source == "toy":
        pictures = renders(wanted.count, classes)
        fingerprint = pictures.fingerprint
    else:
        recipe = _recipe(wanted)
        found = extraction.open_source(wanted.source, wanted.per_class)
        pictures = replace(found, read=lambda entry: resized(found.read(entry), **recipe))
        _check_count(wanted, len(pictures.entries))
        fingerprint = [pictures.fingerprint, wanted.per_class, recipe, PIL.__version__, extraction.DECODING]
    return pictures, sha256_of_data([FORMAT, fingerprint, extractor.preprocessing, torch.__version__.partition("+")[0]])


def _recipe(wanted: ReferenceChoice) -> dict[str, Any]:
    return {"size": wanted.size, "resize": wanted.resize, "filter": wanted.filter}


def _check_count(wanted: ReferenceChoice, count: int, unreadable: Sequence[str] = ()) -> None:
    if count < 2 or (count != wanted.count and not wanted.allow_count):
        lost = f", and {len(unreadable)} that cannot be read, first {unreadable[0]}" if unreadable else ""
        remedy = "give --allow-count to go on with any number from 2, which the metric's name will then say"
        found = f"reference {wanted.source} has {count} images{lost}"
        raise ElfattError(f"{found}; accepted are {wanted.count}, or {remedy}.")


def renders(count: int, classes: Sequence[int]) -> extraction.Source:
    """Held-out images of the toy's renderer, with the classes of the prompts."""
    from elfatt_sd.toy import renderer

    chosen = list(classes) or list(range(len(renderer.CLASSES)))
    wanted = tuple(chosen[index % len(chosen)] for index in range(count))
    lock = threading.Lock()

    def read(entry: extraction.Entry) -> extraction.Pixels:
        with lock:  # the first one draws all of them
            labels, geometry = scenes(wanted)
        place = entry.where
        picture = renderer.render_parameters(labels[place : place + 1], geometry[place : place + 1])[0]
        return (picture.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()

    fingerprint = ["renders", count, chosen[:count], RENDER_SEED, RENDERS]
    return extraction.Source([extraction.Entry(f"render {place}", place) for place in range(count)], fingerprint, read)


@functools.lru_cache(maxsize=1)
def scenes(wanted: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Labels and geometry, drawn from the renderer's own distribution; those of the wanted classes are kept."""
    from elfatt_sd.toy import renderer

    numbers = {tuple(each): number for number, each in enumerate(renderer.class_labels(renderer.CLASSES).tolist())}
    open_places: dict[int, list[int]] = {}
    for place in reversed(range(len(wanted))):
        open_places.setdefault(wanted[place], []).append(place)
    labels = torch.zeros(len(wanted), len(renderer.ATTRIBUTES), dtype=torch.int64, device="cpu")
    geometry = torch.zeros(len(wanted), len(renderer.GEOMETRY), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(RENDER_SEED)
    while any(open_places.values()):
        drawn = renderer.sample_parameters(BLOCK, generator)
        for row, scene in enumerate(drawn[0].tolist()):
            if places := open_places.get(numbers[tuple(scene)]):
                place = places.pop()
                labels[place], geometry[place] = drawn[0][row], drawn[1][row]
    return labels, geometry


def _from_moments(wanted: ReferenceChoice, extractor: Extractor) -> Reference:
    """Take `mu` and `sigma` from a file of another tool, whose preprocessing is not known."""
    path, size = Path(wanted.source), extractor.dimension
    with in_one_line(f"{path} cannot be read; accepted is an .npz file with mu and sigma"), np.load(path) as data:
        arrays = (data[key].astype(np.float64, casting="same_kind") for key in ("mu", "sigma"))
        mean, sigma = map(torch.from_numpy, arrays)
    covariance, wrong = sigma, ""
    if (mean.shape, sigma.shape) != ((size,), (size, size)):
        needed = f"extractor {extractor.name} needs ({size},) and ({size}, {size})"
        wrong = f"mu {tuple(mean.shape)} and sigma {tuple(sigma.shape)}; {needed}"
    elif not ((mean.abs() <= LARGEST).all() and (sigma.abs() <= LARGEST**2).all()):  # so written, NaN is neither
        wrong = "NaN, or numbers too large for a distance"
    else:
        covariance, rounding = (sigma + sigma.T) / 2, COVARIANCE_ROUNDING * sigma.abs().max()
        if (sigma - covariance).abs().max() > rounding or torch.linalg.eigvalsh(covariance)[0] < -rounding:
            wrong = "a sigma that is not a covariance: it is not symmetric, or has a negative eigenvalue"
    if wrong:
        raise ElfattError(f"reference {path} has {wrong}.")
    digest, unreadable = sha256_of_file(path), list[str]()
    identity = sha256_of_data([FORMAT, digest, extractor.preprocessing])
    description = {"source": str(path), "sha256": digest, "count": None, "identity": identity, "unreadable": unreadable}
    return Reference(mean, covariance, None, identity, f" (statistics of {path.name})", description)
