"""Where images lie: folders and parquet files.

Both are a list of entries and one way to read them. Their fingerprint is the names, sizes and modification times of the
files. A file that is altered with both kept is not noticed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.entries import BESIDE, Entry, Source, check_size, ends, is_litter, parent, sorted_out, stamp
from elfatt_sd.evaluation.parquet import tables
from elfatt_sd.files import is_hidden, read_plain, visible

_MOST_PATHS = 64  # that lead to one folder; links between folders multiply
_NAMED = 3  # names that a sentence has of what is left out
ACCEPTED = (
    "a folder of images, a .parquet file or a folder of them, or statistics with mu and sigma in an .npz; unpack "
    "archives first"
)


def open_source(source: str | Path, per_class: int = 0) -> Source:
    """List the images of a source."""
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
        return _shards(path, shards) if shards else _folder(path)
    if path.suffix.lower() != ".parquet":
        raise ElfattError(f"reference {path} is a file of another kind; accepted: {ACCEPTED}.")
    return tables([path])


def _check_exists(path: Path) -> None:
    if not (os.path.isfile(path) or os.path.isdir(path)):  # which take any name
        raise ElfattError(f"reference {path} does not exist; accepted: {ACCEPTED}.")


def _shards(folder: Path, shards: Sequence[Path]) -> Source:
    """The tables of a folder; what else lies there is left out."""
    others = sorted(item.name for item in folder.iterdir() if item not in shards)
    return replace(tables(shards), left_out=[name for name in others if not is_litter(name) and not ends(name, BESIDE)])


def _folder(folder: Path) -> Source:
    try:
        files = [(path.relative_to(folder).as_posix(), path) for path in _files_below(folder, Counter())]
    except OSError as error:
        raise ElfattError(f"reference {folder}: {error.filename} cannot be read ({error.strerror}).") from error
    images, left_out = sorted_out(files)
    entries = [Entry(name, path, parent(name)) for name, path in images]
    fingerprint = [stamp(name, path) for name, path in images]
    return Source(entries, fingerprint, _read_file, left_out)


def _read_file(entry: Entry) -> bytes:
    check_size(entry.where.stat().st_size)
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
