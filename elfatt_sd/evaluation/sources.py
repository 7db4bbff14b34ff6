"""Where images lie, folders and parquet files, and how they are decoded.

Both are a list of entries and one way to read them. Their fingerprint is the names, sizes and modification times of the
files. A file that is altered with both kept is not noticed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from elfatt_sd.errors import ElfattError, need
from elfatt_sd.files import is_hidden, read_plain, visible

DECODING = 4  # goes up when the same file gives other pixels, or none
_SCAN, _END = b"\xda", b"\xff\xd9"  # of JPEG: the mark that data follow, and that of the end
_DRAWINGS = ("EPS", "WMF")  # another program would draw them
# Of what is meant as an image, whether it can be read or not; of what never is one; and what nobody misses.
SUFFIXES = re.compile(
    r"\.(apng|avif|bmp|dib|gif|hei[cf]|j2k|jfif|jp2|jpe?g?|jpf|jpx|jxl|p[bgnp]m|pcx|png|qoi|sgi|tga|tiff?|webp)"
)
BESIDE = re.compile(r"\.(caption|cls|csv|jsonl?|md|np[yz]|tsv|txt|xml|ya?ml)")
_LITTER = frozenset((".ds_store", "thumbs.db", "desktop.ini", "__macosx"))
LARGEST = 1 << 30  # bytes of an image's file: one with holes can have more than there is memory
_BYTES = re.compile(r"(large_)?binary|struct<.*bytes: (large_)?binary.*>")
_COLUMNS = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")  # of tables with more bytes than these
_MOST_PATHS = 64  # that lead to one folder; links between folders multiply
_NAMED = 3  # names that a sentence has of what is left out
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

    entries: Sequence[Entry]  # the images
    fingerprint: Any  # plain data that changes when the images do
    read: Callable[[Entry], bytes]  # returns the encoded bytes of an entry; safe to call from several threads
    # names of what is hidden or no image; without what tells of an image, such as `a.txt` next to `a.png`
    left_out: Sequence[str] = ()


def open_source(source: str | Path, per_class: int = 0) -> Source:
    path = Path(source)
    found = _open(path)
    if not found.entries:
        words = left_out_words(found.left_out)
        raise ElfattError(f"reference {path} holds no image{words and f' ({words})'}; accepted: {ACCEPTED}.")
    return _first_of_each_class(path, found, per_class) if per_class else found


def check_exists(source: str) -> None:
    """Check that the files of a reference are there, whatever they hold."""
    if source and source != "toy" and source.partition(":")[0] != "renders":
        _check_exists(Path(source))


def left_out_words(names: Sequence[str]) -> str:
    """Say how much is left out and name the first; empty where there is none."""
    if not names:
        return ""
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names)} left out (hidden, or no image): {named}"


def _open(path: Path) -> Source:
    _check_exists(path)
    if not os.path.isfile(path):
        shards = visible(path.glob("*.parquet"))
        if not shards:
            return _folder(path)
        others = sorted(item.name for item in path.iterdir() if item not in shards)
        left_out = [name for name in others if not is_litter(name) and not ends(name, BESIDE)]
        return replace(tables(shards), left_out=left_out)
    if path.suffix.lower() != ".parquet":
        raise ElfattError(f"reference {path} is a file of another kind; accepted: {ACCEPTED}.")
    return tables([path])


def _check_exists(path: Path) -> None:
    if not (os.path.isfile(path) or os.path.isdir(path)):  # which take any name
        raise ElfattError(f"reference {path} does not exist; accepted: {ACCEPTED}.")


def _first_of_each_class(path: Path, source: Source, per_class: int) -> Source:
    groups = {entry.group for entry in source.entries}
    if "" in groups or len(groups) < 2:
        raise ElfattError(
            f"reference {path} has no classes, which per_class={per_class} needs; give one folder per class, "
            "or tables with labels."
        )
    seen: Counter[str] = Counter()
    kept = []
    for entry in source.entries:
        seen[entry.group] += 1
        if seen[entry.group] <= per_class:
            kept.append(entry)
    return replace(source, entries=kept)


def _folder(folder: Path) -> Source:
    try:
        files = [(path.relative_to(folder).as_posix(), path) for path in _files_below(folder, Counter())]
    except OSError as error:
        raise ElfattError(f"reference {folder}: {error.filename} cannot be read ({error.strerror}).") from error
    images, left_out = sorted_out(files)
    entries = [Entry(name, path, PurePosixPath(name).parent.name) for name, path in images]
    fingerprint = [stamp(name, path) for name, path in images]
    return Source(entries, fingerprint, _read_file, left_out)


def _read_file(entry: Entry) -> bytes:
    size = entry.where.stat().st_size
    if size > LARGEST:  # more than memory should be spent on
        raise OSError(f"{size / 2**30:.0f} GiB; accepted: at most {LARGEST / 2**30:.0f} GiB an image")
    return read_plain(entry.where)


def _files_below(
    folder: Path, paths: Counter[tuple[int, int]], above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[Path]:
    """Files in a folder and in all below it, linked ones too, except where a link leads back to a folder above."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    paths[here] += 1
    if paths[here] > _MOST_PATHS:
        raise ElfattError(f"reference: links lead to {folder} by more than {_MOST_PATHS} paths; give a folder without.")
    with os.scandir(folder) as found:
        for item in found:
            if _is_folder(item) and not is_hidden(item.name):
                yield from _files_below(folder / item.name, paths, above | {here})
            else:
                yield folder / item.name


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:
        return False


def sorted_out(files: Iterable[tuple[str, Path]]) -> tuple[list[tuple[str, Path]], list[str]]:
    """Tell images from other files, by their suffix and otherwise by their content; what is hidden is left out."""
    images: list[tuple[str, Path]] = []
    others: list[str] = []
    for name, path in sorted(files):
        if is_litter(name):
            continue
        if any(map(is_hidden, PurePosixPath(name).parts)):
            others.append(name)
        elif ends(name, SUFFIXES) or (not ends(name, BESIDE) and _holds_image(path)):
            images.append((name, path))
        else:
            others.append(name)
    keys = {_key(name) for name, _ in images}
    return images, [name for name in others if _key(name) not in keys or not ends(name, BESIDE)]


def is_litter(name: str) -> bool:
    """Tell what systems leave behind, which nobody misses."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or any(part.lower() in _LITTER for part in path.parts)


def ends(name: str, suffixes: re.Pattern[str]) -> bool:
    return suffixes.fullmatch(PurePosixPath(name).suffix.lower()) is not None


def _holds_image(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return is_image(file)
    except OSError:
        return False


def _key(name: str) -> str:
    """What `a.png` and `a.txt` have in common: the name up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def stamp(name: str, path: Path) -> list[Any]:
    try:
        status = path.stat()
    except OSError:  # such as a link to nowhere, which is named when it is read
        return [name, None, None]
    return [name, status.st_size, status.st_mtime_ns]


def tables(files: Sequence[Path]) -> Source:
    """List the images of tables; each is read when it is wanted."""
    need("a .parquet reference", "pyarrow")
    import pyarrow.parquet as parquet

    tables = {file: _open_table(parquet, file) for file in files}
    entries = [entry for file, (table, column) in tables.items() for entry in _table_entries(file, table, column)]
    lock = threading.Lock()

    @functools.lru_cache(maxsize=1)
    def row_group(file: Path, number: int) -> Any:
        table, column = tables[file]
        return table.read_row_group(number, columns=[column]).column(0)

    def read(entry: Entry) -> bytes:
        file, number, row = entry.where
        with lock:
            value = row_group(file, number)[row].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not content:
            raise OSError("the row holds no bytes")
        return bytes(content)

    return Source(entries, [stamp(file.name, file) for file in files], read)


def _open_table(parquet: Any, file: Path) -> tuple[Any, str]:
    with _reading(file):
        table = parquet.ParquetFile(file)
    found = [field.name for field in table.schema_arrow if _BYTES.fullmatch(str(field.type))]
    named = [name for name in found if name.lower() in _COLUMNS]
    if len(named or found) == 1:
        return table, (named or found)[0]
    if found:
        accepted = ", ".join(_COLUMNS)
        raise ElfattError(
            f"reference {file} has bytes in {', '.join(named or found)}; accepted: one column, or one by the name of "
            f"{accepted}."
        )
    names = ", ".join(table.schema_arrow.names)
    raise ElfattError(f"reference {file} has columns {names}; one must hold the bytes of images.")


def _table_entries(file: Path, table: Any, column: str) -> list[Entry]:
    label = next((name for name in ("label", "cls", "class") if name in table.schema_arrow.names), None)
    entries: list[Entry] = []
    for number in range(table.num_row_groups):
        count = table.metadata.row_group(number).num_rows
        with _reading(file):
            groups = table.read_row_group(number, columns=[label]).column(0).to_pylist() if label else [""] * count
        start = len(entries)
        entries += [Entry(f"{file.name}:{start + row}", (file, number, row), str(groups[row])) for row in range(count)]
    return entries


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # pyarrow raises many kinds for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ElfattError(f"reference {file} cannot be read ({reason}); accepted: a .parquet file.") from error


def decode(content: bytes) -> Any:
    """Decode an image of any mode to an 8-bit RGB `PIL.Image`, turned upright as its EXIF data says.

    Transparent pixels are laid over white. Colour profiles are not applied.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:  # whose own words are an address in memory
        raise OSError("no image of a known kind" if content else "the file is empty") from error
    with opened:
        if opened.format in _DRAWINGS:
            raise OSError(f"a drawing ({opened.format}), which has no pixels of its own")
        if opened.format in ("JPEG", "MPO"):
            _check_end(content)
        frames = getattr(opened, "n_frames", 1)
        if frames > 1 and opened.format != "MPO":  # of a camera: its other frames are smaller copies
            raise OSError(f"{frames} frames or pages; accepted: one image a file")
        if opened.mode.startswith(("F", "I")):
            raise OSError(f"samples of more than 8 bits (mode {opened.mode}); accepted: 8 bits")
        picture = ImageOps.exif_transpose(opened)
        if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        return picture.convert("RGB")


def _check_end(content: bytes) -> None:
    """Refuse a JPEG without an end: zeros after a broken download are decoded as grey, with no error."""
    place = 2
    while content[place : place + 1] == b"\xff" and content[place + 1 : place + 2] != _SCAN:
        filler = content[place + 1 : place + 2] == b"\xff"
        place += 1 if filler else 2 + int.from_bytes(content[place + 2 : place + 4])
    if content.find(_END, place) < 0:
        raise OSError("image file is truncated: it has no end")


def is_image(file: IO[bytes]) -> bool:
    """Tell whether a file is of a kind that Pillow knows; only its head is read."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(file) as opened:
                return opened.format not in _DRAWINGS
        except Image.DecompressionBombError:
            return True
        except Exception:  # Pillow raises many kinds for damaged files
            return False


def pixels_of(content: bytes) -> int:
    """Return the number of pixels that an image says it has; 0 for what is none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as opened:
            return int(opened.width * opened.height)
    except Exception:  # said when it is decoded
        return 0


@contextlib.contextmanager
def quiet_pillow() -> Iterator[None]:
    """Do not tell what Pillow warns of: odd EXIF data and large images. Not for generators, which may interleave."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield
