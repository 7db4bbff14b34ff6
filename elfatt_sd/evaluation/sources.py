"""Where pictures lie: folders, archives read in place, shards and tables.

All are a list of entries and one way to read them; nothing is unpacked. The fingerprint of a folder is the names, sizes
and modification times of its files; that of an archive is its own name, size and modification time. A file that is
altered with both kept is not noticed.
"""

from __future__ import annotations

import functools
import io
import os
import re
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.optional import need

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
ACCEPTED = (
    "a folder of pictures, an uncompressed .tar, a .zip, a folder of .tar shards or their pattern (val-*.tar, "
    "val-{000..049}.tar), .parquet, or statistics with mu and sigma in an .npz"
)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True)
class Entry:
    """One picture.

    Attributes:
        name: what messages call it.
        where: what `Source.read` needs to find it.
        group: its class, as its folder, `.cls` member or label column says; empty where nothing does.
    """

    name: str
    where: Any
    group: str = ""


@dataclass(frozen=True)
class Source:
    """Pictures in a fixed order.

    Attributes:
        entries: the pictures.
        fingerprint: plain data that changes when the pictures do.
        read: returns the encoded bytes of an entry; safe to call from several threads.
    """

    entries: Sequence[Entry]
    fingerprint: Any
    read: Callable[[Entry], bytes]


def open_source(source: str | Path, per_class: int = 0) -> Source:
    """List the pictures of a source.

    Args:
        source: what `ACCEPTED` names.
        per_class: keep only the first so many of each class, in order of names; 0 keeps all.

    Raises:
        ElfattError: it does not exist, is of another kind, holds no picture, or lacks the classes that are asked for.
    """
    path = Path(source)
    found = _open(path)
    if not found.entries:
        raise ElfattError(f"reference {path} holds no picture; accepted: {ACCEPTED}.")
    return _first_of_each_class(path, found, per_class) if per_class else found


def _open(path: Path) -> Source:
    files = _matching(path)
    if not files and path.is_dir():
        shards = sorted(path.glob("*.tar")) or sorted(path.glob("*.parquet"))
        return _archives(path, shards) if shards else _folder(path)
    return _archives(path, files)


def _matching(path: Path) -> list[Path]:
    """The file itself, or the files that a pattern such as `val-*.tar` or `val-{000..049}.tar` names."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return []
    found = {name: _files(Path(name)) for name in _expanded(str(path))}
    missing = [name for name, files in found.items() if not files]
    if len(missing) == len(found):
        raise ElfattError(f"reference {path} does not exist; accepted: {ACCEPTED}.")
    if missing:
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ElfattError(f"reference {path} lacks {len(missing)} of {len(found)} files: {named}.")
    return sorted({file for files in found.values() for file in files})


def _expanded(name: str) -> list[str]:
    """The names that braces stand for, as in shells and WebDataset: `{000..049}` or `{train,val}`."""
    braces = _RANGE.search(name)
    if braces is None:
        return [name]
    first, last, choices = braces.groups()
    if choices is None:
        width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
        low, high = sorted((int(first), int(last)))
        values = [f"{number:0{width}}" for number in range(low, high + 1)]
    else:
        values = choices.split(",")
    ends = _expanded(name[braces.end() :])
    return [name[: braces.start()] + value + end for value in values for end in ends]


def _files(path: Path) -> list[Path]:
    """The file, or those that match where its name is a pattern."""
    if path.is_file():
        return [path]
    is_pattern = bool(set("*?[") & set(path.name)) and path.parent.is_dir()
    return [file for file in path.parent.glob(path.name) if file.is_file()] if is_pattern else []


def _archives(path: Path, files: Sequence[Path]) -> Source:
    kinds = {file.suffix.lower() for file in files}
    openers = {".tar": _tars, ".zip": _zips, ".parquet": _tables}
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in openers:
        raise ElfattError(f"reference {path} is of kind {', '.join(sorted(kinds))}; accepted: {ACCEPTED}.")
    return openers[kind](files)


def _stamp(name: str, path: Path) -> list[Any]:
    try:
        status = path.stat()
    except OSError:  # such as a link to nowhere, which is named when it is read
        return [name, None, None]
    return [name, status.st_size, status.st_mtime_ns]


def _is_picture(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith("._") and "__MACOSX" not in path.parts


def _parent(name: str) -> str:
    return PurePosixPath(name).parent.name


def _folder(folder: Path) -> Source:
    try:
        names = sorted(path.relative_to(folder).as_posix() for path in _pictures_below(folder))
    except OSError as error:
        raise ElfattError(f"reference {folder}: {error.filename} cannot be read ({error.strerror}).") from error
    entries = [Entry(name, folder / name, _parent(name)) for name in names]
    return Source(entries, [_stamp(name, folder / name) for name in names], lambda entry: entry.where.read_bytes())


def _pictures_below(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Pictures in a folder and in all below it, linked ones too, except where a link leads back to a folder above."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as found:
        for item in found:
            if item.is_dir():
                yield from _pictures_below(folder / item.name, above | {here})
            elif _is_picture(item.name):
                yield folder / item.name


def _tars(files: Sequence[Path]) -> Source:
    """Pictures of tar archives by their place in the file; a `.cls` beside a picture (WebDataset) names its class."""
    entries = [
        entry for file in files for entry in _tar_entries(file, prefix=f"{file.name}/" if len(files) > 1 else "")
    ]
    return Source(entries, ["by name", *(_stamp(file.name, file) for file in files)], _read_slice)


def _tar_entries(file: Path, prefix: str) -> list[Entry]:
    found: list[tuple[str, tuple[Path, int, int]]] = []
    classes: dict[str, str] = {}
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                place = (file, member.offset_data, member.size)
                if member.isfile() and _is_picture(member.name):
                    found.append((member.name, place))
                elif member.isfile() and member.name.endswith(".cls"):
                    classes[_key(member.name)] = _read_slice(Entry(member.name, place)).decode().strip()
    except (tarfile.TarError, OSError) as error:
        raise ElfattError(f"reference {file} cannot be read ({error}); accepted: an uncompressed .tar.") from error
    found.sort()  # tar keeps files in the order in which it met them
    return [Entry(prefix + name, place, classes.get(_key(name), _parent(name))) for name, place in found]


def _key(name: str) -> str:
    """WebDataset's key of a member: its name up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _read_slice(entry: Entry) -> bytes:
    path, offset, size = entry.where
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _zips(files: Sequence[Path]) -> Source:
    archives = {file: _open_zip(file) for file in files}
    entries = [
        Entry(name, (file, name), _parent(name))
        for file, archive in archives.items()
        for name in sorted(archive.namelist())
        if _is_picture(name)
    ]
    lock = threading.Lock()

    def read(entry: Entry) -> bytes:
        file, name = entry.where
        with lock:
            return archives[file].read(name)

    return Source(entries, [_stamp(file.name, file) for file in files], read)


def _open_zip(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:
        raise ElfattError(f"reference {file} cannot be read ({error}); accepted: a .zip archive.") from error


def _tables(files: Sequence[Path]) -> Source:
    """Pictures of parquet files: a column of bytes, or of structures with a field `bytes`."""
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

    return Source(entries, [_stamp(file.name, file) for file in files], read)


def _open_table(parquet: Any, file: Path) -> tuple[Any, str]:
    try:
        table = parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise ElfattError(f"reference {file} cannot be read ({error}); accepted: a .parquet file.") from error
    for field in table.schema_arrow:
        if re.fullmatch(r"(large_)?binary|struct<.*bytes: (large_)?binary.*>", str(field.type)):
            return table, field.name
    names = ", ".join(table.schema_arrow.names)
    raise ElfattError(f"reference {file} has columns {names}; one must hold the bytes of pictures.")


def _table_entries(file: Path, table: Any, column: str) -> list[Entry]:
    label = next((name for name in ("label", "cls", "class") if name in table.schema_arrow.names), None)
    entries: list[Entry] = []
    for number in range(table.num_row_groups):
        count = table.metadata.row_group(number).num_rows
        groups = table.read_row_group(number, columns=[label]).column(0).to_pylist() if label else [""] * count
        start = len(entries)
        entries += [Entry(f"{file.name}:{start + row}", (file, number, row), str(groups[row])) for row in range(count)]
    return entries


def _first_of_each_class(path: Path, source: Source, per_class: int) -> Source:
    groups = {entry.group for entry in source.entries}
    if "" in groups or len(groups) < 2:
        raise ElfattError(
            f"reference {path} has no classes, which per_class={per_class} needs; give one folder per class, in an "
            "archive too, or shards or tables with labels."
        )
    seen: Counter[str] = Counter()
    kept = []
    for entry in source.entries:
        seen[entry.group] += 1
        if seen[entry.group] <= per_class:
            kept.append(entry)
    return Source(kept, source.fingerprint, source.read)


def decode(content: bytes) -> Any:
    """Decode a picture of any mode to an 8-bit RGB `PIL.Image`, turned upright as its EXIF data says.

    Transparent pixels are laid over white; 16-bit grey keeps its upper 8 bits.

    Raises:
        OSError: it is no picture or is truncated; errors of other kinds of damage pass as they are.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:  # whose own words are an address in memory
        raise OSError("no picture of a known kind" if content else "the file is empty") from error
    with opened:
        picture = ImageOps.exif_transpose(opened)
        if picture.mode == "I;16":
            picture = picture.point(lambda value: value / 256, "L")
        elif picture.mode == "I" or picture.mode.startswith("I;16"):
            picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        return picture.convert("RGB")
