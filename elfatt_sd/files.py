"""Files written whole or not at all, locks, hashes, and JSON to and from Structs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import re
import stat
import tempfile
import types
import typing
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from elfatt_sd.errors import ElfattError, ElfattFailure

Shape = TypeVar("Shape")
LOCK_FILE = ".lock"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(r"[\w=+-][\w.=+-]*(?<!\.)")
_RESERVED = re.compile(r"(con|prn|aux|nul|(com|lpt)\d)(\..*)?", re.IGNORECASE)  # on Windows, whatever the suffix
_LONGEST_NAME = 160  # bytes; file systems take 255, and names get endings
_PLAIN_LIST = re.compile(r"\[\n\s+([^][{}\"]+?)\n\s+\]")  # of numbers; a line break stands in no JSON string
_SYSTEMS = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found"))
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST = 120  # characters of a value that a message repeats


def is_hidden(name: str) -> bool:  # or left behind by a system, a NAS or an editor
    return name.startswith(".") or name.lower() in _SYSTEMS


def visible(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if not is_hidden(path.name))


def is_plain_name(name: str) -> bool:
    fits = len(name.encode(errors="replace")) <= _LONGEST_NAME
    return fits and bool(_NAME.fullmatch(name)) and not _RESERVED.fullmatch(name)


def place_of(folder: Path, name: str, ending: str = "") -> Path:
    """Return the place in a folder that a name stands for, which a page or a file gives."""
    if not is_plain_name(name):
        raise ElfattError(f"name {name!r} is not accepted for a place in {folder}; accepted: a plain file name.")
    return folder / f"{name}{ending}"


def read_plain(path: Path) -> bytes:
    """Return the content of a file; a folder, a pipe or a device is none, and might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return path.read_bytes()


def one_folder(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its place only when the block ends well (write, fsync, rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # a full disk does not say what it had no room for
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, data: Any) -> None:
    """Write plain data atomically, keys in the order given, lists of numbers on one line, without NaN or infinity.

    Bytes of file names that are not UTF-8 are written as their escapes, which stay text when they are read back.
    """
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    text = _PLAIN_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    text = _SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text)
    write_file(path, text.encode() + b"\n")


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_data(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()  # of file names that are not UTF-8


def sha256_of_code(sources: Iterable[str]) -> str:
    """Hash what code does: docstrings, comments and layout do not count."""
    trees = [ast.parse(source) for source in sources]
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [line for line in body if not isinstance(line, ast.Pass)]
            for line in kept.copy():
                if isinstance(line, ast.Expr) and isinstance(getattr(line.value, "value", None), str):
                    kept.remove(line)
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return sha256_of_data([*map(ast.unparse, trees)])


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def check_writable(folder: Path, given: str | None = None) -> None:
    """Check that files can be written to a folder, and leave nothing behind."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
        with tempfile.TemporaryDirectory(prefix=".elfatt-sd-", dir=there) as probe:  # processes may check at a time
            place = Path(probe, folder.absolute().relative_to(there))
            place.mkdir(parents=True, exist_ok=True)
            (place / "probe").write_bytes(bytes(4096))
    except OSError as error:
        kind = ElfattFailure if is_full(error) else ElfattError
        named = given or f"out={str(folder)!r}"
        raise kind(f"{named} cannot be written ({error.strerror}); give a folder that can.") from error


def cache_folder() -> Path:
    if chosen := os.environ.get("ELFATT_SD_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elfatt-sd"


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, which is made."""
    lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=wait)
    except Timeout as error:
        raise ElfattError(f"{folder} is in use by another process; wait for it, or give another folder.") from error
    except OSError as error:
        kind = ElfattFailure if is_full(error) else ElfattError
        raise kind(f"{folder} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        lock.release()


def refused(what: str, accepted: str) -> ElfattError:
    return ElfattError(f"{what} is not accepted; accepted: {accepted}.")


def known_keys(prefix: str, data: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = sorted(map(str, set(data) - set(known)))
    if unknown:
        raise ElfattError(f"key {prefix + unknown[0]!r} is not known; accepted: {', '.join(known)}.")


def checked(data: Any, shape: type[Shape]) -> Shape:
    """Build a value of a type from plain data; lists become tuples where the type says so."""
    for place, table, fields in _tables(data, shape):
        known_keys(f"{place}." if place else "", table, fields)
    try:
        return msgspec.convert(data, shape)
    except UnicodeEncodeError as error:
        raise refused(ascii(error.object), "text in UTF-8") from error
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ElfattError):  # of a `__post_init__`
            raise error.__cause__ from error
        raise _explained(str(error), data, shape) from error


def read_json(path: Path, remedy: str) -> Any:
    """Return the content of a JSON file, None where there is no file.

    It is read strictly: no NaN, no infinity, no number beyond float, no half of a surrogate pair.
    """
    try:
        data = msgspec.json.decode(read_plain(path))
        if data is None:
            raise ValueError("it holds nothing, null")
        return data
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ElfattError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ElfattError(f"{path} is damaged ({error}); {remedy}.") from error


def read_typed(path: Path, shape: type[Shape], remedy: str) -> Shape | None:
    """Return what a JSON file holds as a value of a type, None where there is no file."""
    data = read_json(path, remedy)
    return None if data is None else check_file(path, data, shape, remedy)


def check_file(path: Path | str, data: Any, shape: type[Shape], remedy: str) -> Shape:
    try:
        return checked(data, shape)
    except ElfattError as error:
        raise ElfattError(f"{path}: {str(error).removesuffix('.')}; {remedy}.") from error


def _tables(data: Any, hint: Any, place: str = "") -> Iterator[tuple[str, Mapping[str, Any], Collection[str]]]:
    """Find the tables for which a type has a dataclass, whose unknown keys msgspec would pass over."""
    hint = _bare(hint)
    if dataclasses.is_dataclass(hint) and isinstance(data, Mapping):
        hints = typing.get_type_hints(hint, include_extras=True)
        yield place, data, hints
        for name, value in data.items():
            yield from _tables(value, hints.get(name, Any), f"{place}.{name}" if place else name)
    elif typing.get_origin(hint) is tuple and isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _tables(value, typing.get_args(hint)[0], f"{place}[{index}]")


def _bare(hint: Any) -> Any:
    if typing.get_origin(hint) is typing.Annotated:
        return _bare(typing.get_args(hint)[0])
    if isinstance(hint, types.UnionType):
        return _bare(next(part for part in typing.get_args(hint) if part is not type(None)))
    return hint


def _explained(message: str, data: Any, hint: Any) -> ElfattError:
    """Name the value in which msgspec found something, with its words; and all choices, where it is one of some."""
    found, _, place = message.partition(" - at `$")
    place = place.rstrip("`").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", found):
        return ElfattError(f"key {'.'.join(filter(None, [place, missing[1]]))!r} is missing; it is required.")
    place = place.partition("[...]")[0]  # msgspec does not name the key of a dict
    for key in re.findall(r"[^.\[\]]+", place):
        hint = _bare(hint)
        if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
            hint = typing.get_type_hints(hint, include_extras=True)[key]
        else:
            hint = (*typing.get_args(hint), Any)[typing.get_origin(hint) is dict]
        data = data[int(key) if isinstance(data, list | tuple) else key]
    value, hint = repr(data), _bare(hint)
    value = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
    if typing.get_origin(hint) is typing.Literal:
        return refused(f"{place}={value}", ", ".join(map(str, typing.get_args(hint))))
    return ElfattError(f"{place or 'the content'}={value} is not accepted; {found[0].lower()}{found[1:]}.")
