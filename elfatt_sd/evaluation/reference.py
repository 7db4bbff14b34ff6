"""Statistics of the reference images: computed once, in bounded memory, and kept in a cache; or renders, or moments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import PIL
import torch

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.extraction import (
    DECODING,
    Extracted,
    Pixels,
    SourceImages,
    check_exists,
    extract,
    is_rendered,
    left_out_words,
    open_source,
)
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.processes import by_first, check_shared, gathered, together
from elfatt_sd.evaluation.prompts import MOST_IMAGES
from elfatt_sd.evaluation.protocols import Reference as Wanted
from elfatt_sd.evaluation.records import read_data
from elfatt_sd.evaluation.statistics import (
    KERNEL_SAMPLE,
    FeatureStatistics,
    check_covariance,
    is_finite,
    load_moments,
    read_array,
)
from elfatt_sd.files import folder_lock, refused, sha256_of_code, sha256_of_data, sha256_of_file, write_json
from elfatt_sd.progress import Progress

RENDER_SEED = 0x5EED_0F_4EAD  # renders of the reference; training draws from hashes, evaluation from small seeds
FORMAT = 1
FULL_COUNT = 50_000  # images of ImageNet's validation set; any other number shows in the metric's name
UNKNOWN_COUNT = FULL_COUNT  # only scales sums where another tool's file gives no count; distances do not depend on it
FILTERS = ("bicubic", "bilinear", "lanczos", "box", "nearest")
RESIZES = ("none", "crop", "stretch")


@dataclass(frozen=True)
class Reference:
    """What images are compared with."""

    statistics: FeatureStatistics  # mean and covariance of the features
    # float32 features `[m, d]` of evenly spaced images, memory-mapped, for the kernel distance; None where only moments
    # are known
    sample: np.ndarray[Any, Any] | None
    count: int | None  # number of images; None where another tool's file does not tell
    unreadable: list[str]  # name and reason of each image that could not be read
    identity: str  # hash of the files and of all preprocessing
    # what distances to it carry in their name, such as " (12 reference images)"; empty for `FULL_COUNT` images, and for
    # as many renders as the protocol names
    metric_suffix: str
    description: dict[str, Any] = field(default_factory=dict)  # where it comes from, as plain data for the report

    def __post_init__(self) -> None:
        if not self.statistics.covariance.any():
            source = self.description.get("source", "")
            raise ElfattError(f"reference {source} has one image over and over; accepted are images that differ.")


@dataclass(frozen=True)
class Preprocessing:
    """What happens to a decoded image before the extractor: Pillow's resampling, which always antialiases."""

    size: int = 0  # side of the square in pixels; 0 for `resize="none"`
    # `crop` brings the shorter side to `size` and takes the centre, `stretch` changes the proportions, `none` does
    # nothing
    resize: str = "none"
    filter: str = "bicubic"  # Pillow's resampling filter

    def __post_init__(self) -> None:
        for name, accepted in (("resize", RESIZES), ("filter", FILTERS)):
            if getattr(self, name) not in accepted:
                raise ElfattError(f"{name}={getattr(self, name)!r} is not known; accepted: {', '.join(accepted)}.")
        if (self.size > 0) != (self.resize != "none"):
            raise refused(f"size={self.size} with resize={self.resize!r}", "both, or neither")

    def __call__(self, picture: Any) -> Pixels:
        if self.resize != "none" and picture.size != (self.size, self.size):
            from PIL import Image, ImageOps

            method = Image.Resampling[self.filter.upper()]
            scale = ImageOps.fit if self.resize == "crop" else Image.Image.resize
            picture = scale(picture, (self.size, self.size), method)
        return np.array(picture)


def build_reference(
    wanted: Wanted,
    extractor: Extractor,
    classes: Sequence[int] = (),  # for renders, in proportion to which they are drawn; all by default
    *,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Reference:
    """Compute the statistics of a reference, or take them from the cache.

    A killed computation goes on where it was and gives the same bits. Under `accelerate launch` the processes share the
    work, and the first one decides; two runs that need the same reference wait for each other.
    """
    if is_moments(wanted):
        return together(lambda: _from_moments(wanted, extractor))
    pictures, fingerprint = together(lambda: check_images(wanted, classes))
    identity = _identity(fingerprint, extractor)
    identities = gathered(identity)
    for number, other in enumerate(identities):
        if other != identities[0]:
            raise ElfattError(
                f"reference {wanted.source} is not the same in process {number} as in process 0 (names, sizes or "
                "times of its files, the extractor, or the versions of torch and Pillow); give a folder that all "
                "machines share, or copies that keep the times (rsync -a)."
            )
    check_shared(cache_dir, "cache", "set ELFATT_SD_CACHE to a folder that all machines share")
    folder = cache_dir / f"reference-{extractor.name}-{identity[:16]}"
    with contextlib.ExitStack() as held:
        by_first(lambda: held.enter_context(folder_lock(folder, wait=True)))  # the other processes wait for the first
        if not by_first(lambda: _kept(folder, extractor.dimension) is not None):
            chunks = extract(pictures, extractor, folder / "chunks", progress=progress, name="reference")
            recipe = {"size": wanted.size, "resize": wanted.resize, "filter": wanted.filter}
            description = {"source": wanted.source, "identity": identity, **recipe}
            by_first(lambda: _finish(folder, chunks, extractor, description))
    kept = _kept(folder, extractor.dimension)
    if kept is None:
        raise ElfattError(f"cache {folder} is damaged; give the same command to compute it again.")
    data, statistics, sample = kept
    count, unreadable = data["count"], data["unreadable"]
    if count != wanted.count and not wanted.allow_count and unreadable:
        raise ElfattError(
            f"reference {wanted.source}: {len(unreadable)} images cannot be read, first {unreadable[0]}, all in "
            f"{folder / 'reference.json'}; replace what cannot be read, or give --allow-count to go on with the other "
            f"{count}, which the metric's name will then say."
        )
    _check_count(wanted, count)
    description = {key: value for key, value in data.items() if key != "format"}
    if words := left_out_words(pictures.left_out):  # not in the cache: these files are no part of the identity
        description["left_out"] = words[2:-1]  # without its brackets
    suffix = _suffix(count, wanted.count if isinstance(pictures, Renders) else FULL_COUNT, data["resize"], data["size"])
    return Reference(statistics, sample, count, unreadable, identity, suffix, description)


def check_given(source: str) -> None:
    if not source:
        raise ElfattError("reference.source is missing; give --reference with a folder, .parquet or .npz.")
    check_exists(source)


def is_moments(wanted: Wanted) -> bool:
    return Path(wanted.source).suffix.lower() == ".npz"


def check_reference(wanted: Wanted, extractor: Extractor, classes: Sequence[int] = ()) -> str:
    """Check all that `build_reference` checks before it computes, and return the `identity` of what it gives."""
    if is_moments(wanted):
        return _from_moments(wanted, extractor).identity
    return _identity(check_images(wanted, classes)[1], extractor)


def check_images(wanted: Wanted, classes: Sequence[int] = ()) -> tuple[SourceImages | Renders, Any]:
    """Return the images, of which there are as many as there must be, and their fingerprint."""
    check_given(wanted.source)
    pictures: SourceImages | Renders
    if is_rendered(wanted.source):
        number = wanted.source.partition(":")[2]
        if number and not (re.fullmatch(r"[0-9]{1,8}", number) and 1 < int(number) <= MOST_IMAGES):
            accepted = f"renders:COUNT with a whole number from 2 to {MOST_IMAGES}"
            raise refused(f"reference {wanted.source!r}", accepted)
        pictures = Renders(int(number) if number else wanted.count, classes)
        fingerprint = pictures.fingerprint
    else:
        preprocessing = Preprocessing(wanted.size, wanted.resize, wanted.filter)
        found = open_source(wanted.source, wanted.per_class)
        pictures = SourceImages(found, preprocessing)
        plain = dataclasses.asdict(preprocessing)
        fingerprint = [found.fingerprint, wanted.per_class, plain, PIL.__version__, DECODING]
    _check_count(wanted, len(pictures), pictures.left_out)
    return pictures, fingerprint


def _identity(fingerprint: Any, extractor: Extractor) -> str:
    version = torch.__version__.partition("+")[0]
    return sha256_of_data([FORMAT, fingerprint, extractor.preprocessing, version])


def _check_count(wanted: Wanted, count: int, left_out: Sequence[str] = ()) -> None:
    """Refuse another number of images than the expected one, unless that is allowed."""
    if count != wanted.count and not wanted.allow_count:
        said = f"{count} images{left_out_words(left_out)}"
        remedy = f"give --allow-count to go on with {count}, which the metric's name will then say"
        raise ElfattError(f"reference {wanted.source} has {said}; accepted are {wanted.count}, or {remedy}.")


class Renders:
    """Held-out images of the toy's renderer, with the classes of the prompts."""

    BLOCK = 1 << 16
    left_out: Sequence[str] = ()

    def __init__(self, count: int, classes: Sequence[int]) -> None:
        from elfatt_sd.toy import renderer

        classes = list(classes) or list(range(len(renderer.CLASSES)))
        self.wanted = [classes[index % len(classes)] for index in range(count)]
        source = sha256_of_code([Path(renderer.__file__).read_text(encoding="utf-8")])
        self.fingerprint = ["renders", count, classes[:count], RENDER_SEED, source]

    def __len__(self) -> int:
        return len(self.wanted)

    def load(self, start: int, stop: int) -> Iterator[Pixels]:
        from elfatt_sd.toy.renderer import render_parameters

        labels, geometry = self.scenes
        for index in range(start, stop):
            picture = render_parameters(labels[index : index + 1], geometry[index : index + 1])[0]
            yield (picture.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()

    @functools.cached_property
    def scenes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and geometry, drawn from the renderer's own distribution; those of the wanted classes are kept."""
        from elfatt_sd.toy import renderer

        numbers = {labels: number for number, labels in enumerate(renderer.CLASSES)}
        open_places: dict[int, list[int]] = {}
        for place in reversed(range(len(self.wanted))):
            open_places.setdefault(self.wanted[place], []).append(place)
        labels = torch.zeros(len(self.wanted), len(renderer.ATTRIBUTES), dtype=torch.int64, device="cpu")
        geometry = torch.zeros(len(self.wanted), len(renderer.GEOMETRY), dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(RENDER_SEED)
        names = list(renderer.ATTRIBUTES.values())
        while open_places:
            drawn, numbers_drawn = renderer.sample_parameters(self.BLOCK, generator)
            for row, scene in enumerate(drawn.tolist()):
                number = numbers[tuple(values[index] for values, index in zip(names, scene, strict=True))]
                places = open_places.get(number)
                if places:
                    place = places.pop()
                    labels[place], geometry[place] = drawn[row], numbers_drawn[row]
                    if not places:
                        del open_places[number]
        return labels, geometry


def _suffix(count: int, full: int = FULL_COUNT, resize: str = "none", size: int = 0) -> str:
    """Say in a metric's name what of its reference is not as usual: the number of images, or a resize before."""
    parts = [] if count == full else [f"{count} reference images"]
    if resize != "none":
        how = {"crop": "cropped", "stretch": "stretched"}[resize]
        parts.append(f"{how} to {size}" if parts else f"reference {how} to {size}")
    return f" ({', '.join(parts)})" if parts else ""


def _finish(folder: Path, chunks: Extracted, extractor: Extractor, description: dict[str, Any]) -> None:
    """Turn chunks into statistics and the sample; the description is written last and completes the folder."""
    statistics = FeatureStatistics(extractor.dimension)
    unreadable: list[str] = []
    for features, names in chunks:
        statistics.update(torch.from_numpy(features))
        unreadable += names
    count = statistics.count
    if count < 2:
        first = f"; first: {unreadable[0]}" if unreadable else ""
        found = f"reference {description['source']} has {count} readable images"
        raise ElfattError(f"{found}; accepted are 2 or more{first}.")
    sample = min(count, KERNEL_SAMPLE)
    chunks.join(folder / "sample.npy", [index * count // sample for index in range(sample)])
    statistics.save(folder / "statistics.npz")
    data = {"format": FORMAT, **description, "count": count, "unreadable": unreadable}
    write_json(folder / "reference.json", {**data, "preprocessing": extractor.preprocessing})
    shutil.rmtree(folder / "chunks", ignore_errors=True)


class _Record(msgspec.Struct, frozen=True):
    """What `reference.json` holds that is read back."""

    count: Annotated[int, msgspec.Meta(ge=2)]
    unreadable: list[str]
    resize: str
    size: int


def _kept(folder: Path, dimension: int) -> tuple[dict[str, Any], FeatureStatistics, np.ndarray[Any, Any]] | None:
    """What the cache holds of a reference; None where that is not whole."""
    try:
        data = read_data(folder / "reference.json", _Record, "")
        if data is None:
            return None
        statistics = FeatureStatistics.load(folder / "statistics.npz")
    except ElfattError:
        return None
    sample = read_array(folder / "sample.npy", dimension)
    wanted = (dimension, data["count"], min(data["count"], KERNEL_SAMPLE))
    if sample is None or (len(statistics.mean), statistics.count, len(sample)) != wanted or not is_finite(sample):
        return None
    return data, statistics, sample


def _from_moments(wanted: Wanted, extractor: Extractor) -> Reference:
    """Take `mu` and `sigma` from a file of another tool, whose preprocessing is not known."""
    path = Path(wanted.source)
    check_exists(wanted.source)
    mean, covariance, count = load_moments(path)
    if len(mean) != extractor.dimension:
        needed = f"extractor {extractor.name} needs {extractor.dimension}"
        raise ElfattError(f"reference {path} has {len(mean)} features; {needed}.")
    if count is not None:
        _check_count(wanted, count)
    covariance = check_covariance(path, covariance, count)
    statistics = FeatureStatistics.from_moments(mean, covariance, count or UNKNOWN_COUNT)
    suffix = f" (statistics of {path.name})" if count is None else _suffix(count)
    digest = sha256_of_file(path)
    identity = sha256_of_data([FORMAT, digest, extractor.preprocessing])
    description: dict[str, Any] = {"source": str(path), "sha256": digest, "count": count, "identity": identity}
    description["unreadable"] = []
    return Reference(statistics, None, count, [], identity, suffix, description)
