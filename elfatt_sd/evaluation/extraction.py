"""Images of sources and of rows, and their features, in chunks that are committed one by one.

So memory is bounded, and a killed run goes on. Chunks and batches are cut at fixed places: the numbers do not depend on
interruptions or on the number of processes.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.evaluation.processes import process_state, together
from elfatt_sd.evaluation.run import Row
from elfatt_sd.evaluation.sources import Entry, Source, decode, pixels_of, quiet_pillow
from elfatt_sd.evaluation.statistics import DAMAGED, is_finite, load_plain
from elfatt_sd.files import atomic_file, read_plain, sha256_of_data, write_file
from elfatt_sd.progress import Lines, Progress

LARGE = 1 << 25  # pixels of an image of which one at a time is held: 100 MB of them, and several times that to decode
CHUNK = 1024  # images that are committed together
BATCH = 32  # images that go through the network together
Decoded = np.ndarray[Any, np.dtype[np.uint8]] | str  # an image `[h, w, 3]`, or its name and what is wrong
FILTERS = ("bicubic", "bilinear", "lanczos", "box", "nearest")
RESIZES = ("none", "crop", "stretch")
# What is wrong with a file for good: damaged, away, no plain file, a link to itself. Anything else may pass.
_LASTING = (None, errno.ENOENT, errno.EINVAL, errno.ELOOP)


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
            raise ElfattError(f"size={self.size} with resize={self.resize!r} is not accepted; give both, or neither.")

    def __call__(self, picture: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self.resize != "none":
            from PIL import Image, ImageOps

            method = Image.Resampling[self.filter.upper()]
            square = (self.size, self.size)
            if picture.size != square:
                crop = self.resize == "crop"
                picture = ImageOps.fit(picture, square, method) if crop else picture.resize(square, method)
        return np.array(picture)


class Pictures(Protocol):
    """Numbered images, each uint8 `[h, w, 3]`, or the reason why it cannot be had."""

    def __len__(self) -> int:
        """Return how many there are."""

    def load(self, start: int, stop: int) -> Iterator[Decoded]:
        """Yield the images of a range in order, with bounded look-ahead."""


class SourceImages:
    """Images of a source, decoded by a few threads."""

    def __init__(self, source: Source, preprocessing: Preprocessing, threads: int = 4) -> None:
        self.source, self.preprocessing, self.threads = source, preprocessing, threads
        self.left_out = source.left_out

    def __len__(self) -> int:
        return len(self.source.entries)

    def load(self, start: int, stop: int) -> Iterator[Decoded]:
        """Yield decoded images; for an unreadable one its name and what is wrong. Large ones are decoded one by one."""
        entries = self.source.entries[start:stop]
        ahead = 4 * self.threads
        with ThreadPoolExecutor(self.threads) as pool:
            futures = deque(pool.submit(self._load, entry, LARGE) for entry in entries[:ahead])
            for position in range(len(entries)):
                found = futures.popleft().result()
                yield found if found is not None else cast(Decoded, self._load(entries[position]))
                futures.extend(
                    pool.submit(self._load, entry, LARGE) for entry in entries[position + ahead : position + ahead + 1]
                )

    def _load(self, entry: Entry, most: float = math.inf) -> Decoded | None:
        try:
            content = self.source.read(entry)
            return None if pixels_of(content) > most else self.preprocessing(decode(content))
        except (ElfattError, MemoryError):
            raise
        except Exception as error:  # Pillow raises many kinds for damaged files
            if isinstance(error, OSError) and error.errno not in _LASTING:
                raise ElfattError(
                    f"{entry.name} cannot be read: {error.strerror}; give the same command again."
                ) from error
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            return f"{entry.name} ({reason})"


@dataclass(frozen=True)
class Images:
    name: str  # the row's
    paths: Sequence[Path]  # their files, in the order of their indices
    sha256: Sequence[str]  # their hashes when they were generated
    classes: Sequence[int]  # class index of each
    texts: Sequence[str]  # prompt of each
    frames: int = 1  # of each; clips have several, which lie below each other in their file

    @classmethod
    def of_row(cls, row: Row, frames: int = 1, count: int | None = None) -> Images:
        made = row.made_images()
        if count is not None and len(made) != count:
            remedy = f"delete the file to make row {row.name!r} again"
            raise ElfattError(f"{row.manifest} lists {len(made)} images; accepted: {count}; {remedy}.")
        paths = [row.image_file(each.index) for each in made]
        hashes, classes = [each.sha256 for each in made], [each.class_index for each in made]
        return cls(row.name, paths, hashes, classes, [each.prompt for each in made], frames)

    @property
    def identity(self) -> str:
        return sha256_of_data(list(self.sha256))

    @property
    def frame_classes(self) -> list[int]:
        return [number for number in self.classes for _ in range(self.frames)]

    def stacks(self) -> Iterator[Tensor]:
        """Yield each image as uint8 `[frames, 3, h, w]`."""
        stack: list[Tensor] = []
        for frame in self.pictures().load(0, len(self.paths) * self.frames):
            if isinstance(frame, str):
                raise ElfattError(f"image {frame} cannot be read.")
            stack.append(torch.from_numpy(frame).permute(2, 0, 1))
            if len(stack) == self.frames:
                yield torch.stack(stack)
                stack = []

    def pictures(self) -> Pictures:
        """All frames, decoded; each file is checked against its hash when it is read."""
        entries = [Entry(str(path), (path, digest)) for path, digest in zip(self.paths, self.sha256, strict=True)]
        files = SourceImages(Source(entries, self.identity, _read_checked), Preprocessing(), threads=2)
        return files if self.frames == 1 else Frames(files, self.frames)


@dataclass(frozen=True)
class Frames:
    """The frames of clips, clip after clip."""

    clips: Pictures  # each has its frames below each other
    count: int  # frames of each

    def __len__(self) -> int:
        return len(self.clips) * self.count

    def load(self, start: int, stop: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]] | str]:
        """Yield the frames of a range in order; of a clip that cannot be read, the reason for each."""
        first, last = start // self.count, -(-stop // self.count)
        for number, clip in enumerate(self.clips.load(first, last), first):
            whole = isinstance(clip, str) or clip.shape[0] % self.count == 0
            frames = np.split(clip, self.count) if whole and not isinstance(clip, str) else [clip] * self.count
            for place, frame in enumerate(frames, number * self.count):
                if start <= place < stop:
                    yield frame if whole else f"image {number} (no {self.count} frames)"


def _read_checked(entry: Entry) -> bytes:
    path, digest = entry.where
    try:
        content = read_plain(path)
    except FileNotFoundError as error:
        raise ElfattError(f"{path} was deleted after generation; delete its row's manifest to remake it.") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ElfattError(
            f"{path} was altered after generation (its sha256 is not the manifest's); put it back, or delete its row's "
            "manifest to remake it."
        )
    return content


def extract(
    pictures: Pictures, extractor: Extractor, folder: Path, *, progress: Progress | None = None, name: str = ""
) -> Extracted:
    """Compute features, chunk by chunk; chunks that are there are kept.

    Under `accelerate launch` every process takes its fraction of the chunks, and all return when all are there.
    """
    state = process_state()
    count = len(pictures)
    paths = [folder / f"chunk-{number:05d}.npz" for number in range(-(-count // CHUNK))]
    tell = functools.partial(progress, ", ".join(filter(None, (name, extractor.name)))) if progress else None

    def write_share() -> None:
        for number in range(state.process_index, len(paths), state.num_processes):
            start, stop = number * CHUNK, min((number + 1) * CHUNK, count)
            if not _is_of(_read_chunk(paths[number]), extractor, stop - start):
                _write_chunk(paths[number], *_extract_range(pictures, extractor, start, stop, tell))

    with quiet_pillow():
        together(write_share)
    return Extracted(paths)


@dataclass(frozen=True)
class Extracted:
    chunks: Sequence[Path]  # the files, in order; each holds `features` `[k, d]` and the unreadable images' names

    def __iter__(self) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.float32]], list[str]]]:
        for path in self.chunks:
            found = _read_chunk(path)
            if found is None:
                raise ElfattError(f"{path} is damaged; give the same command again.")
            yield found

    def join(self, path: Path, rows: Sequence[int] | None = None) -> int:
        """Write features as one float32 `.npy` file, without holding them in memory."""
        count = sum(len(features) for features, _ in self)
        kept = np.arange(count) if rows is None else np.asarray(rows)
        start = 0
        with atomic_file(path) as file:
            for number, (features, _) in enumerate(self):
                if number == 0:
                    shape = (len(kept), features.shape[1])
                    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                inside = kept[(kept >= start) & (kept < start + len(features))] - start
                file.write(np.ascontiguousarray(features[inside], dtype="<f4").tobytes())
                start += len(features)
        return len(kept)


def _extract_range(
    pictures: Pictures, extractor: Extractor, start: int, stop: int, tell: Callable[[int, int], None] | None
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], list[str]]:
    features: list[Tensor] = []
    unreadable: list[str] = []
    batch: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    for done, picture in enumerate(pictures.load(start, stop), start + 1):
        if isinstance(picture, str):
            unreadable.append(picture)
        else:
            batch.append(picture)
        whole = len(batch) == BATCH or sum(each.size for each in batch) > 3 * LARGE
        if whole or (done == stop and batch):
            features.append(_features(extractor, batch))
            batch = []
            if tell is not None:
                tell(done, len(pictures))
    empty = np.zeros((0, extractor.dimension), dtype=np.float32)
    return (torch.cat(features).numpy() if features else empty), unreadable


def _features(extractor: Extractor, batch: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]) -> Tensor:
    """Features `[n, d]` on the CPU; images of different sizes go through one by one."""
    images = [torch.from_numpy(picture).permute(2, 0, 1) for picture in batch]
    same = len({image.shape for image in images}) == 1
    groups = [torch.stack(images)] if same else [image[None] for image in images]
    return torch.cat([extractor(group).cpu() for group in groups])


def _read_chunk(path: Path) -> tuple[np.ndarray[Any, np.dtype[np.float32]], list[str]] | None:
    try:
        with load_plain(path) as data:
            features, unreadable = data["features"], json.loads(str(data["unreadable"]))
    except DAMAGED:
        return None
    named = isinstance(unreadable, list) and all(isinstance(name, str) for name in unreadable)
    return (features, unreadable) if features.ndim == 2 and features.dtype == np.float32 and named else None


def _is_of(found: tuple[np.ndarray[Any, Any], list[str]] | None, extractor: Extractor, count: int) -> bool:
    if found is None:
        return False
    features, unreadable = found
    return features.shape == (count - len(unreadable), extractor.dimension) and is_finite(features)


def _write_chunk(path: Path, features: np.ndarray[Any, Any], unreadable: list[str]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, features=features, unreadable=np.array(json.dumps(unreadable)))
    write_file(path, buffer.getvalue())


def every_minute(tell: Callable[[str], None]) -> Progress:
    return Lines(tell, "images", title="measuring: {},", at_once=False)
