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
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.decoding import decode as decode
from elfatt_sd.evaluation.decoding import is_image
from elfatt_sd.optional import need

# Of what is meant as an image, whether it can be read or not; of what never is one; and what systems leave behind.
SUFFIXES = re.compile(
    r"\.(apng|avif|bmp|dib|gif|hei[cf]|j2k|jfif|jp2|jpe?g?|jpf|jpx|jxl|p[bgnp]m|pcx|png|qoi|sgi|tga|tiff?|webp)"
)
BESIDE = re.compile(r"\.(caption|cls|csv|jsonl?|md|np[yz]|tsv|txt|xml|ya?ml)")
_LITTER = frozenset((".ds_store", "thumbs.db", "desktop.ini", "__macosx"))
_NAMED = 3  # left-out files that a sentence names
ACCEPTED = (
    "a folder of pictures, an uncompressed .tar, a .zip, a folder of .tar shards or their pattern (val-*.tar, "
    "val-{000..049}.tar), .parquet, or statistics with mu and sigma in an .npz"
)
Place = TypeVar("Place")
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
        left_out: names of files that are no images; without what tells of an image, such as `a.txt` beside `a.png`.
    """

    entries: Sequence[Entry]
    fingerprint: Any
    read: Callable[[Entry], bytes]
    left_out: Sequence[str] = ()


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
        words = left_out_words(found.left_out)
        raise ElfattError(f"reference {path} holds no picture{words and f' ({words})'}; accepted: {ACCEPTED}.")
    return _first_of_each_class(path, found, per_class) if per_class else found


def check_exists(source: str) -> None:
    """Check that the files of a reference are there, whatever they hold.

    Raises:
        ElfattError: one of them is not.
    """
    if source and source != "toy" and source.partition(":")[0] != "renders":
        _matching(Path(source))


def left_out_words(names: Sequence[str]) -> str:
    """Say how many files are left out and name the first; empty where there are none."""
    if not names:
        return ""
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names)} file{'s are' if len(names) > 1 else ' is'} left out as no image: {named}"


def _open(path: Path) -> Source:
    files = _matching(path)
    if not files and path.is_dir():
        shards = sorted(path.glob("*.tar")) or sorted(path.glob("*.parquet"))
        return _shards(path, shards) if shards else _folder(path)
    return _archives(path, files)


def _shards(folder: Path, shards: Sequence[Path]) -> Source:
    """The shards of a folder; what else lies there is left out."""
    found = _archives(folder, shards)
    beside = sorted(item.name for item in folder.iterdir() if item not in shards)
    left_out = [name for name in beside if not _is_litter(name) and not _ends(name, BESIDE)]
    return replace(found, left_out=[*left_out, *found.left_out])


def _matching(path: Path) -> list[Path]:
    """The file itself, or the files that a pattern such as `val-*.tar` or `val-{000..049}.tar` names."""
    if os.path.isfile(path):  # which takes any name
        return [path]
    if os.path.isdir(path):
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
    if os.path.isfile(path):
        return [path]
    is_pattern = bool(set("*?[") & set(path.name)) and os.path.isdir(path.parent)
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


def _is_litter(name: str) -> bool:
    """Tell what systems leave behind, which nobody misses."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or any(part.lower() in _LITTER for part in path.parts)


def _sorted_out(
    files: Iterable[tuple[str, Place]], open_file: Callable[[Place], IO[bytes] | None]
) -> tuple[list[tuple[str, Place]], list[str]]:
    """Tell images from other files, by their suffix and otherwise by their content.

    Args:
        files: names and places.
        open_file: gives the content at a place; None where there is no plain file.

    Returns:
        The images by name, and the names of what is left out.
    """
    images: list[tuple[str, Place]] = []
    others: list[str] = []
    for name, place in sorted(files, key=lambda file: file[0]):
        if _is_litter(name):
            continue
        if _ends(name, SUFFIXES) or (not _ends(name, BESIDE) and _holds_image(place, open_file)):
            images.append((name, place))
        else:
            others.append(name)
    keys = {_key(name) for name, _ in images}
    return images, [name for name in others if _key(name) not in keys or not _ends(name, BESIDE)]


def _ends(name: str, suffixes: re.Pattern[str]) -> bool:
    return suffixes.fullmatch(PurePosixPath(name).suffix.lower()) is not None


def _holds_image(place: Place, open_file: Callable[[Place], IO[bytes] | None]) -> bool:
    try:
        file = open_file(place)
    except OSError:
        return False
    if file is None:
        return False
    with file:
        return is_image(file)


def _parent(name: str) -> str:
    return PurePosixPath(name).parent.name


def _folder(folder: Path) -> Source:
    try:
        files = [(path.relative_to(folder).as_posix(), path) for path in _files_below(folder)]
    except OSError as error:
        raise ElfattError(f"reference {folder}: {error.filename} cannot be read ({error.strerror}).") from error
    images, left_out = _sorted_out(files, lambda path: path.open("rb") if path.is_file() else None)
    entries = [Entry(name, path, _parent(name)) for name, path in images]
    fingerprint = [_stamp(name, path) for name, path in images]
    return Source(entries, fingerprint, lambda entry: entry.where.read_bytes(), left_out)


def _files_below(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Files in a folder and in all below it, linked ones too, except where a link leads back to a folder above."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as found:
        for item in found:
            if item.is_dir():
                yield from _files_below(folder / item.name, above | {here})
            else:
                yield folder / item.name


def _tars(files: Sequence[Path]) -> Source:
    """Pictures of tar archives by their place in the file; a `.cls` beside a picture (WebDataset) names its class."""
    entries: list[Entry] = []
    left_out: list[str] = []
    for file in files:
        found, others = _tar_entries(file, prefix=f"{file.name}/" if len(files) > 1 else "")
        entries += found
        left_out += others
    return Source(entries, ["by name", *(_stamp(file.name, file) for file in files)], _read_slice, left_out)


def _tar_entries(file: Path, prefix: str) -> tuple[list[Entry], list[str]]:
    found: list[tuple[str, tuple[Path, int, int]]] = []
    links: list[str] = []
    classes: dict[str, str] = {}
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                place = (file, member.offset_data, member.size)
                if member.isfile():
                    found.append((member.name, place))
                    if member.name.endswith(".cls"):
                        classes[_key(member.name)] = _read_slice(Entry(member.name, place)).decode().strip()
                elif not member.isdir():
                    links.append(member.name)
    except (tarfile.TarError, OSError) as error:
        raise ElfattError(f"reference {file} cannot be read ({error}); accepted: an uncompressed .tar.") from error
    # tar keeps files in the order in which it met them
    images, others = _sorted_out(sorted(found), lambda place: io.BytesIO(_read_slice(Entry("", place))))
    entries = [Entry(prefix + name, place, classes.get(_key(name), _parent(name))) for name, place in images]
    return entries, [prefix + name for name in (*others, *links)]


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
    entries: list[Entry] = []
    left_out: list[str] = []
    for file, archive in archives.items():
        members = [(member.filename, member.filename) for member in archive.infolist() if not member.is_dir()]
        images, others = _sorted_out(members, lambda name, archive=archive: _open_member(archive, name))  # type: ignore[misc]
        entries += [Entry(name, (file, name), _parent(name)) for name, _ in images]
        left_out += others
    lock = threading.Lock()

    def read(entry: Entry) -> bytes:
        file, name = entry.where
        with lock:
            return archives[file].read(name)

    return Source(entries, [_stamp(file.name, file) for file in files], read, left_out)


def _open_member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    try:
        return io.BytesIO(archive.read(name))
    except (
        RuntimeError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:  # a password, a compression, damage
        raise OSError(str(error)) from error


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
    return replace(source, entries=kept)
