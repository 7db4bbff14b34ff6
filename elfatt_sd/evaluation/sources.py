"""Where images lie: folders, archives read in place, shards and tables.

All are a list of entries and one way to read them; nothing is unpacked. The fingerprint of a folder is the names, sizes
and modification times of its files; that of an archive is its own name, size and modification time. A file that is
altered with both kept is not noticed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.archives import tables, tars, zips
from elfatt_sd.evaluation.entries import BESIDE, Entry, Source, check_size, ends, is_litter, parent, sorted_out, stamp
from elfatt_sd.files import is_hidden, read_plain, visible

_MOST_SHARDS = 100_000
_MOST_PATHS = 64  # that lead to one folder; links between folders multiply
_NAMED = 3  # names that a sentence has of what is left out
ACCEPTED = (
    "a folder of images, an uncompressed .tar, a .zip, a folder of .tar shards or their pattern (val-*.tar, "
    "val-{000..049}.tar), .parquet, or statistics with mu and sigma in an .npz"
)
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}|\{([^{}]*,[^{}]*)\}")


def open_source(source: str | Path, per_class: int = 0) -> Source:
    """List the images of a source.

    Args:
        source: what `ACCEPTED` names.
        per_class: keep only the first so many of each class, in order of names; 0 keeps all.

    Raises:
        ElfattError: it does not exist, is of another kind, holds no image, or lacks the classes that are asked for.
    """
    path = Path(source)
    found = _open(path)
    if not found.entries:
        words = left_out_words(found.left_out)
        raise ElfattError(f"reference {path} holds no image{words and f' ({words})'}; accepted: {ACCEPTED}.")
    return _first_of_each_class(path, found, per_class) if per_class else found


def check_exists(source: str) -> None:
    """Check that the files of a reference are there, whatever they hold.

    Raises:
        ElfattError: one of them is not.
    """
    if source and source != "toy" and source.partition(":")[0] != "renders":
        _matching(Path(source))


def left_out_words(names: Sequence[str]) -> str:
    """Say how much is left out and name the first; empty where there is none."""
    if not names:
        return ""
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names)} left out (hidden, or no image): {named}"


def _open(path: Path) -> Source:
    files = _matching(path)
    if not files and path.is_dir():
        shards = visible(path.glob("*.tar")) or visible(path.glob("*.parquet"))
        return _shards(path, shards) if shards else _folder(path)
    return _archives(path, files)


def _shards(folder: Path, shards: Sequence[Path]) -> Source:
    """The shards of a folder; what else lies there is left out."""
    found = _archives(folder, shards)
    beside = sorted(item.name for item in folder.iterdir() if item not in shards)
    left_out = [name for name in beside if not is_litter(name) and not ends(name, BESIDE)]
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
        values: Sequence[str | int] = range(low, high + 1)
    else:
        values, width = choices.split(","), 0
    ends = _expanded(name[braces.end() :])
    if len(values) * len(ends) > _MOST_SHARDS:
        raise ElfattError(f"reference {name} names {len(values) * len(ends)} files; accepted: at most {_MOST_SHARDS}.")
    return [f"{name[: braces.start()]}{value:0{width}}{end}" for value in values for end in ends]


def _files(path: Path) -> list[Path]:
    """The file, or those that match where its name is a pattern."""
    if os.path.isfile(path):
        return [path]
    is_pattern = bool(set("*?[") & set(path.name)) and os.path.isdir(path.parent)
    return [file for file in visible(path.parent.glob(path.name)) if file.is_file()] if is_pattern else []


def _archives(path: Path, files: Sequence[Path]) -> Source:
    kinds = {file.suffix.lower() for file in files}
    openers = {".tar": tars, ".zip": zips, ".parquet": tables}
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in openers:
        raise ElfattError(f"reference {path} is of kind {', '.join(sorted(kinds))}; accepted: {ACCEPTED}.")
    return openers[kind](files)


def _folder(folder: Path) -> Source:
    try:
        files = [(path.relative_to(folder).as_posix(), path) for path in _files_below(folder, Counter())]
    except OSError as error:
        raise ElfattError(f"reference {folder}: {error.filename} cannot be read ({error.strerror}).") from error
    images, left_out = sorted_out(files, lambda path: path.open("rb") if path.is_file() else None)
    entries = [Entry(name, path, parent(name)) for name, path in images]
    fingerprint = [stamp(name, path) for name, path in images]
    return Source(entries, fingerprint, _read_file, left_out)


def _read_file(entry: Entry) -> bytes:
    check_size(entry.where.stat().st_size)
    return read_plain(entry.where)


def _files_below(
    folder: Path, paths: Counter[tuple[int, int]], above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[Path]:
    """Files in a folder and in all below it, linked ones too, except where a link leads back to a folder above.

    A hidden folder stands for what is in it.
    """
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
    """Tell whether an item is a folder; a link that leads to itself is a file that cannot be read."""
    try:
        return item.is_dir()
    except OSError:
        return False


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
