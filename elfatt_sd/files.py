"""Files that are either whole or not there, hashes of what went into a result, and where both are kept for reuse."""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from elfatt_sd.errors import ElfattError, ElfattFailure

_NAME = re.compile(r"[\w=+-][\w.=+-]*(?<!\.)")
_RESERVED = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)  # on Windows, whatever the suffix
_LEAST = 4096  # bytes that a folder has room for
_LONGEST_NAME = 160  # bytes; file systems take 255, and names get endings
_PLAIN_LIST = re.compile(r"\[\n\s+([^][{}\"]+?)\n\s+\]")  # of numbers; a line break stands in no JSON string
_SYSTEMS = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found"))
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_hidden(name: str) -> bool:
    """Tell a file or folder that is nobody's own: hidden, or left behind by a system, a NAS or an editor."""
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


def link(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


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
    """Write a file atomically."""
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
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def sha256_of_data(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()  # of file names that are not UTF-8


def sha256_of_code(sources: Iterable[str]) -> str:
    return sha256_of_data([ast.unparse(_without_texts(ast.parse(source))) for source in sources])


def _without_texts(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            texts = [x for x in body if isinstance(x, ast.Expr) and isinstance(getattr(x.value, "value", None), str)]
            kept = [line for line in body if line not in texts and not isinstance(line, ast.Pass)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def check_writable(folder: Path, given: str | None = None) -> None:
    """Check that files can be written to a folder, and leave nothing behind."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
        with tempfile.TemporaryDirectory(prefix=".elfatt-sd-", dir=there) as probe:  # processes may check at a time
            place = Path(probe, folder.absolute().relative_to(there))
            place.mkdir(parents=True, exist_ok=True)
            (place / "probe").write_bytes(bytes(_LEAST))
    except OSError as error:
        given = given or f"out={str(folder)!r}"
        kind = ElfattFailure if is_full(error) else ElfattError
        raise kind(f"{given} cannot be written ({error.strerror}); give a folder that can.") from error


def nearest_existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def cache_folder() -> Path:
    chosen = os.environ.get("ELFATT_SD_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elfatt-sd"
