"""Locks on folders, which keep processes from each other; the system frees the lock of a process that died."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.files import is_full, read_plain

LOCK_FILE, HOLDER_FILE = ".lock", ".locked-by"  # no process can read the first one on Windows while it is held


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, which is made."""
    lock, holder = FileLock(folder / LOCK_FILE), folder / HOLDER_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=wait)
        holder.unlink(missing_ok=True)  # a link would lead elsewhere
        holder.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
    except Timeout as error:
        raise ElfattError(f"{folder} is in use by {_named(holder)}; wait for it, or give another folder.") from error
    except OSError as error:
        lock.release()
        kind = ElfattFailure if is_full(error) else ElfattError
        raise kind(f"{folder} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _named(holder: Path) -> str:
    try:
        return read_plain(holder).decode(errors="replace").strip() or "another process"
    except OSError:
        return "another process"
