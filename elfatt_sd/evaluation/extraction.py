"""Images of a reference and of rows: where they lie, how they are decoded, and their features, chunk by chunk.

At the end: how the processes of a launch share that work, and what one of them does for all.

A chunk is kept once it is whole: memory is bounded, and a killed run goes on. Chunks and batches are cut at fixed
places, so the numbers do not depend on interruptions or on the number of processes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import io
import itertools
import json
import os
import platform
import re
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.drawing.studio import as_rgb
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.evaluation.features import Extractor
from elfatt_sd.files import atomic_file, is_hidden, read_plain, sha256_of_data, visible, write_file
from elfatt_sd.loading import pick_device
from elfatt_sd.measure import Lines, Progress
from elfatt_sd.methods.base import in_one_line

if TYPE_CHECKING:
    from elfatt_sd.evaluation.run import RowFolder

Value = TypeVar("Value")
DECODING = 4  # goes up when the same file gives other pixels, or none
THREADS, READ_AHEAD = 4, 16  # that read and decode; images that they decode before one is used
CHUNK = 1024  # images that are committed together
BATCH = 32  # images that go through the network together
LARGEST_BATCH = 100_000_000  # bytes of its images
Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # `[h, w, 3]`
Decoded = Pixels | str  # an image, or its name and what is wrong with it
_END_OF_JPEG = b"\xff\xd9"
SUFFIXES = re.compile(
    r"\.(apng|avif|bmp|dib|gif|hei[cf]|j2k|jfif|jp2|jpe?g?|jpf|jpx|jxl|p[bgnp]m|pcx|png|qoi|sgi|tga|tiff?|webp)"
)
_BYTES = re.compile(r"(large_)?binary|struct<.*bytes: (large_)?binary.*>")
_COLUMNS = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")  # of tables with more bytes than these
ACCEPTED = (
    "a folder of images, a .parquet file or a folder of them, or statistics with mu and sigma in an .npz; unpack "
    "archives first"
)


@dataclass(frozen=True)
class Entry:
    name: str  # what messages call it
    where: Any  # what `Source.read` needs to find it
    group: str = ""  # its class, as its folder or label column says; empty where nothing does


@dataclass(frozen=True)
class Source:
    """Images in a fixed order."""

    entries: Sequence[Entry]
    fingerprint: Any  # plain data that changes when the images do: names, sizes and times of files
    read: Callable[[Entry], Any]  # returns the image of an entry; safe to call from several threads
    frames: int = 1  # of each; clips have several, which lie below each other

    def load(self, places: range) -> Iterator[Decoded]:
        def one(entry: Entry) -> Decoded:
            try:
                return np.array(self.read(entry))
            except (ElfattError, MemoryError):
                raise
            except Exception as error:  # Pillow raises many kinds for damaged files
                if isinstance(error, OSError) and error.errno:  # of the disk, which may pass
                    remedy = "put that right, and give the same command again"
                    raise ElfattError(f"{entry.name} cannot be read ({error.strerror}); {remedy}.") from error
                return f"{entry.name} ({error})"

        with ThreadPoolExecutor(THREADS) as pool:
            ahead: deque[Any] = deque()
            for place in places:
                ahead.append(pool.submit(one, self.entries[place]))
                if len(ahead) > READ_AHEAD:
                    yield ahead.popleft().result()
            yield from (each.result() for each in ahead)


def open_source(source: str | Path, per_class: int = 0) -> Source:
    path = Path(source)
    if path.is_dir():
        shards = visible(path.glob("*.parquet"))
        found = _tables(shards) if shards else _folder(path)
    elif path.suffix.lower() == ".parquet":
        found = _tables([path])
    else:
        raise ElfattError(f"reference {path} is a file of another kind; accepted: {ACCEPTED}.")
    if not found.entries:
        raise ElfattError(f"reference {path} holds no image; accepted: {ACCEPTED}.")
    if not per_class:
        return found
    groups = {entry.group for entry in found.entries}
    if "" in groups or len(groups) < 2:
        remedy = "give one folder per class, or tables with labels"
        raise ElfattError(f"reference {path} has no classes, which per_class={per_class} needs; {remedy}.")
    seen = defaultdict[str, Iterator[int]](itertools.count)
    return replace(found, entries=[entry for entry in found.entries if next(seen[entry.group]) < per_class])


def check_exists(source: str) -> None:
    """Check that a reference is given, and that its files are there, whatever they hold."""
    if not source:
        raise ElfattError("reference.source is missing; give --reference with a folder, .parquet or .npz.")
    if source != "toy" and not os.path.exists(source):
        raise ElfattError(f"reference {source} does not exist; accepted: {ACCEPTED}.")


def _folder(folder: Path) -> Source:
    """List the images in a folder and in all below it that can be read, linked ones too, without what is hidden."""
    found, seen = list[tuple[str, Path]](), set[str]()

    def stop(error: OSError) -> None:
        raise ElfattError(f"reference folder {error.filename} cannot be read: {error.strerror}.") from error

    for place, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link may lead back, or several to one folder
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        shown = [Path(place, name) for name in files if not is_hidden(name)]
        images = [path for path in shown if SUFFIXES.fullmatch(path.suffix.lower()) and path.is_file()]
        found += [(path.relative_to(folder).as_posix(), path) for path in images]
    found.sort()
    entries = [Entry(name, path, Path(name).parent.name) for name, path in found]
    return Source(entries, [_stamp(*each) for each in found], lambda entry: decode(read_plain(entry.where)))


def _stamp(name: str, path: Path) -> list[Any]:
    status = path.stat()
    return [name, status.st_size, status.st_mtime_ns]


def _tables(files: Sequence[Path]) -> Source:
    need("a .parquet reference", "pyarrow")
    import pyarrow.parquet as parquet

    entries = list[Entry]()
    for file in files:
        with in_one_line(f"reference {file} cannot be read; accepted: a .parquet file"):
            table = parquet.ParquetFile(file)
            schema = table.schema_arrow
            label = next((name for name in ("label", "cls", "class") if name in schema.names), None)
            sizes = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
            groups = table.read([label])[label].to_pylist() if label else [""] * sum(sizes)
        found = [field.name for field in schema if _BYTES.fullmatch(str(field.type))]
        named = [name for name in found if name.lower() in _COLUMNS] or found
        if len(named) != 1:
            what = f"bytes in the columns {', '.join(named)}" if named else f"no bytes in {', '.join(schema.names)}"
            raise ElfattError(f"reference {file} has {what}; accepted: one column, or one named {', '.join(_COLUMNS)}.")
        places = [(table, named[0], number, row) for number, size in enumerate(sizes) for row in range(size)]
        entries += map(Entry, (f"{file.name}:{index}" for index in range(len(places))), places, map(str, groups))
    lock = threading.Lock()

    @functools.lru_cache(maxsize=1)
    def row_group(table: Any, column: str, number: int) -> Any:
        return table.read_row_group(number, columns=[column]).column(0)

    def read(entry: Entry) -> Any:
        *group, row = entry.where
        with lock:
            value = row_group(*group)[row].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not content:
            raise OSError("the row holds no bytes")
        return decode(bytes(content))

    return Source(entries, [_stamp(file.name, file) for file in files], read)


def decode(content: bytes) -> Any:
    """Decode an image of any mode to an 8-bit RGB `PIL.Image`, turned upright as its EXIF data says.

    Transparent pixels are laid over white. Colour profiles are not applied.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:  # whose own words are an address in memory
        raise OSError("no image of a known kind" if content else "the file is empty") from error
    with opened:
        if opened.format in ("EPS", "WMF"):  # Pillow would let another program draw them
            raise OSError(f"a drawing ({opened.format}), which has no pixels of its own")
        broken = content.endswith(bytes(16)) and not content.rstrip(b"\0").endswith(_END_OF_JPEG)
        if broken and opened.format in ("JPEG", "MPO"):  # zeros are decoded as grey, with no error
            raise OSError("image file is truncated: a broken download that ends in zeros")
        frames = getattr(opened, "n_frames", 1)
        if frames > 1 and opened.format != "MPO":  # of a camera: its other frames are smaller copies
            raise OSError(f"{frames} frames or pages; accepted: one image a file")
        return as_rgb(opened)


@dataclass(frozen=True)
class Images:
    name: str  # the row's
    paths: Sequence[Path]  # their files, in the order of their indices
    sha256: Sequence[str]  # their hashes when they were generated
    classes: Sequence[int]  # class index of each
    texts: Sequence[str]  # prompt of each
    frames: int = 1  # of each; clips have several

    @classmethod
    def of_row(cls, row: RowFolder, frames: int = 1, count: int | None = None) -> Images:
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

    def source(self) -> Source:
        """Each file is checked against its hash when it is read."""

        def read(entry: Entry) -> Any:
            path, digest = entry.where
            content = read_plain(path)
            if hashlib.sha256(content).hexdigest() != digest:
                what = "was altered after generation (its sha256 is not the manifest's)"
                raise ElfattError(f"{path} {what}; put it back, or delete its row's manifest to remake it.")
            from PIL import Image

            Image.MAX_IMAGE_PIXELS = None  # a clip is one tall image
            return decode(content)

        entries = [Entry(str(path), (path, digest)) for path, digest in zip(self.paths, self.sha256, strict=True)]
        return Source(entries, self.identity, read, frames=self.frames)

    def stacks(self) -> Iterator[Tensor]:
        """Yield each image as uint8 `[frames, 3, h, w]`."""
        for image in self.source().load(range(len(self.paths))):
            assert not isinstance(image, str), image  # its hash is right
            yield torch.from_numpy(np.stack(np.split(image, self.frames))).permute(0, 3, 1, 2)


def extract(
    pictures: Source, extractor: Extractor, folder: Path, *, progress: Progress | None = None, name: str = ""
) -> list[Path]:
    """Compute features, chunk by chunk, and return the files of the chunks; those that are there are kept.

    Under `accelerate launch` every process takes its fraction of the chunks, and all return when all are there.
    """
    state, count = process_state(), len(pictures.entries)
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    paths = [folder / f"chunk-{number:05d}.npz" for number in range(len(chunks))]
    title = ", ".join(filter(None, (name, extractor.name)))

    def write_share() -> None:
        for number in range(state.process_index, len(paths), state.num_processes):
            with contextlib.suppress(ElfattError):
                features, unreadable = read_chunk(paths[number])
                if len(features) == (len(chunks[number]) - len(unreadable)) * pictures.frames:
                    continue
            features, unreadable = _extract_range(pictures, extractor, chunks[number], progress, title)
            with atomic_file(paths[number]) as file:
                np.savez(file, features=features.numpy(), unreadable=np.array(json.dumps(unreadable)))

    together(write_share)
    return paths


def _extract_range(
    pictures: Source, extractor: Extractor, places: range, progress: Progress | None, title: str
) -> tuple[Tensor, list[str]]:
    """Features of the readable images, and the names of the others; images of different sizes go one by one."""
    features = [torch.zeros(0, extractor.dimension, dtype=torch.float32, device="cpu")]
    unreadable, batch = list[str](), list[Tensor]()
    for done, picture in enumerate(pictures.load(places), places.start + 1):
        if isinstance(picture, str):
            unreadable.append(picture)
        else:
            batch += [torch.from_numpy(frame).permute(2, 0, 1) for frame in np.split(picture, pictures.frames)]
        if len(batch) >= BATCH or sum(image.numel() for image in batch) > LARGEST_BATCH or done == places.stop:
            same = len({image.shape for image in batch}) == 1
            groups = torch.split(torch.stack(batch), BATCH) if same else [image[None] for image in batch]
            features += [extractor(group).cpu() for group in groups]
            batch.clear()
            if progress is not None:
                progress(title, done, len(pictures.entries))
    return torch.cat(features), unreadable


def read_chunk(path: Path) -> tuple[Tensor, list[str]]:
    """Return the features `[k, d]` of a chunk and the names of images that cannot be read."""
    with in_one_line(f"{path} is missing or damaged; give the same command again"), np.load(path) as data:
        return torch.from_numpy(data["features"]), json.loads(str(data["unreadable"]))


def every_minute(tell: Callable[[str], None]) -> Progress:
    return Lines(tell, "images", title="measuring: {},")


def process_state(device: str = "auto") -> Any:
    """Return the state of this process; scores need not the device of the run, which this machine may not have."""
    from accelerate import PartialState  # which scripts that read results do without

    kind = pick_device("auto").type
    with contextlib.suppress(ElfattError):
        kind = pick_device(device).type
    # The first process scores alone at the end, while the others wait: far longer than the usual ten minutes.
    return PartialState(cpu=kind == "cpu", timeout=datetime.timedelta(days=1))


def is_first() -> bool:
    return bool(process_state().is_main_process)


def among_others() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave_processes() -> None:
    """Wait for the other processes of a launch and part from them."""
    if among_others():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def gathered(value: Value) -> list[Value]:
    from accelerate.utils import gather_object

    found: list[Value] = gather_object([value]) if among_others() else [value]
    return found


def together(action: Callable[[], Value]) -> Value:
    """Do something in every process; where it fails in one, it fails in all. All processes must call this."""
    try:
        value = action()
    except Exception as error:
        gathered(str(error))
        raise
    reasons = [reason for reason in gathered(None) if reason is not None]
    if reasons:
        raise ElfattError(reasons[0])
    return value


def by_first(action: Callable[[], Value]) -> Value:
    """Do something in the first process alone and return in all what it returns there; see `together`."""
    found: list[Any] = gathered(together(lambda: action() if is_first() else None))
    value: Value = found[0]
    return value


def check_shared(folder: Path, what: str, remedy: str) -> None:
    """Refuse to go on where the processes of a launch do not all see the same folder; all of them must call this."""
    if not among_others():
        return
    # a new name, which no file system can have noted as absent
    marker = folder / by_first(lambda: f".seen-{secrets.token_hex(8)}.part")
    by_first(lambda: write_file(marker, b""))
    places = gathered((marker.is_file(), f"{folder} on {platform.node()}"))
    by_first(marker.unlink)
    other = next((place for shared, place in places if not shared), None)
    if other:
        raise ElfattError(f"{what} {places[0][1]} is not that of another process, {other}; {remedy}.")
