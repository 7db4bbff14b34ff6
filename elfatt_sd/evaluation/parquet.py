"""Images in parquet files: a column of bytes, or of structures with a field `bytes`."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.entries import Entry, Source, stamp
from elfatt_sd.optional import need

_BYTES = re.compile(r"(large_)?binary|struct<.*bytes: (large_)?binary.*>")
_COLUMNS = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")  # of tables with more bytes than these


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # pyarrow raises many kinds for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ElfattError(f"reference {file} cannot be read ({reason}); accepted: a .parquet file.") from error


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
