"""Images in archives and tables, read in place: .tar, .zip and .parquet."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.entries import Entry, Source, check_size, key, parent, sorted_out, stamp
from elfatt_sd.optional import need

_BYTES = re.compile(r"(large_)?binary|struct<.*bytes: (large_)?binary.*>")
_COLUMNS = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")  # of tables with more bytes than these
_PARQUET = "a .parquet file"
_LONGEST_CLASS = 1000  # bytes of a `.cls` member


@contextlib.contextmanager
def _reading(file: Path, accepted: str) -> Iterator[None]:
    """Tell of what readers of archives raise within: they have many kinds for damaged files."""
    try:
        yield
    except ElfattError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ElfattError(f"reference {file} cannot be read ({reason}); accepted: {accepted}.") from error


def tars(files: Sequence[Path]) -> Source:
    """Images of tar archives by their place in the file; a `.cls` next to an image (WebDataset) names its class."""
    entries: list[Entry] = []
    left_out: list[str] = []
    for file in files:
        found, others = _tar_entries(file, prefix=f"{file.name}/" if len(files) > 1 else "")
        entries += found
        left_out += others
    return Source(entries, ["by name", *(stamp(file.name, file) for file in files)], _read_slice, left_out)


def _tar_entries(file: Path, prefix: str) -> tuple[list[Entry], list[str]]:
    found: list[tuple[str, tuple[Path, int, int]]] = []
    links: list[str] = []
    classes: dict[str, str] = {}
    with _reading(file, "an uncompressed .tar"), tarfile.open(file, "r:") as archive:
        for member in archive:
            place = (file, member.offset_data, member.size)
            if member.isfile() and not member.issparse():
                found.append((member.name, place))
                if member.name.lower().endswith(".cls") and member.size <= _LONGEST_CLASS:
                    label = _read_slice(Entry(member.name, place)).decode(errors="backslashreplace")
                    classes[key(member.name)] = label.strip()
            elif not member.isdir():
                links.append(member.name)
        _check_end(file, archive.offset)
    # tar keeps files in the order in which it met them
    images, others = sorted_out(sorted(found), lambda place: io.BytesIO(_read_slice(Entry("", place))))
    entries = [Entry(prefix + name, place, classes.get(key(name), parent(name))) for name, place in images]
    return entries, [prefix + name for name in (*others, *links)]


def _check_end(file: Path, end: int) -> None:
    """Refuse an archive that was cut off, or goes on where it seems to end: what is missing or follows would be missed.

    Raises:
        ElfattError: it does.
    """
    if end >= file.stat().st_size:
        raise ElfattError(f"reference {file} has no mark of its end at byte {end}: it was cut off; copy it again.")
    with open(file, "rb") as content:
        content.seek(end)
        while piece := content.read(1 << 20):
            if piece.strip(b"\0"):
                raise ElfattError(
                    f"reference {file} goes on after its end at byte {end}: it is damaged there, or several archives "
                    "are joined in it; pack it again."
                )


def _read_slice(entry: Entry) -> bytes:
    path, offset, size = entry.where
    check_size(size)
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def zips(files: Sequence[Path]) -> Source:
    """Images of zip archives, by name."""
    archives = {file: _open_zip(file) for file in files}
    entries: list[Entry] = []
    left_out: list[str] = []
    for file, archive in archives.items():
        members = [(member.filename, member) for member in archive.infolist() if not member.filename.endswith("/")]
        images, others = sorted_out(members, lambda member, archive=archive: _open_member(archive, member))  # type: ignore[misc]
        entries += [Entry(name, (file, member), parent(name)) for name, member in images]
        left_out += others
    lock = threading.Lock()

    def read(entry: Entry) -> bytes:
        file, member = entry.where  # itself, as several can have one name
        check_size(member.file_size)
        with lock:
            return archives[file].read(member)

    return Source(entries, [stamp(file.name, file) for file in files], read, left_out)


def _open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    try:
        return archive.open(member)
    except (
        RuntimeError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:  # a password, a compression, damage
        raise OSError(str(error)) from error


def _open_zip(file: Path) -> zipfile.ZipFile:
    with _reading(file, "a .zip archive"):
        return zipfile.ZipFile(file)


def tables(files: Sequence[Path]) -> Source:
    """Images of parquet files: a column of bytes, or of structures with a field `bytes`."""
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
    with _reading(file, _PARQUET):
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
        with _reading(file, _PARQUET):
            groups = table.read_row_group(number, columns=[label]).column(0).to_pylist() if label else [""] * count
        start = len(entries)
        entries += [Entry(f"{file.name}:{start + row}", (file, number, row), str(groups[row])) for row in range(count)]
    return entries
