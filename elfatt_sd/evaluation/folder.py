"""The folder of a run: where things are, who may write there, and which protocol it belongs to."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.protocols import Cell, Protocol, differences
from elfatt_sd.files import write_json

RUN_FILE = "run.json"
LOCK_FILE = ".lock"
FORMAT = 1


class RunFailure(RuntimeError):
    """Work that failed although it was asked for rightly; the message is one line."""


def cell_dir(run_dir: Path, cell: Cell) -> Path:
    """Return the folder of a row."""
    return run_dir / "cells" / cell.name


def image_path(run_dir: Path, cell: Cell, index: int) -> Path:
    """Return the file of an image."""
    return cell_dir(run_dir, cell) / "images" / f"{index:05d}.png"


def manifest_path(run_dir: Path, cell: Cell) -> Path:
    """Return the list of a row's images with their hashes; it is there once all of them are."""
    return cell_dir(run_dir, cell) / "manifest.jsonl"


def batches_dir(run_dir: Path, cell: Cell) -> Path:
    """Return the folder of the lists of a row's batches, while the row is not finished."""
    return cell_dir(run_dir, cell) / "batches"


def first_steps_dir(run_dir: Path) -> Path:
    """Return the folder of what all rows' first steps have in common, while the run's images are made."""
    return run_dir / "first_steps"


def is_begun(run_dir: Path, cell: Cell) -> bool:
    """Tell whether any image of a row counts as made."""
    return manifest_path(run_dir, cell).is_file() or batches_dir(run_dir, cell).is_dir()


def failure_path(run_dir: Path, cell: Cell) -> Path:
    """Return the file that says why a row failed."""
    return cell_dir(run_dir, cell) / "failed.json"


def read_manifest(run_dir: Path, cell: Cell) -> list[dict[str, Any]]:
    """Return what was generated for a row: index, prompt, class, seed and hash of each image.

    Raises:
        ElfattError: the row is not finished, or its list is damaged.
    """
    path = manifest_path(run_dir, cell)
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise ElfattError(f"{path} does not exist; row {cell.name!r} is not generated yet.") from error
    except ValueError as error:
        raise ElfattError(f"{path} is damaged ({error}); delete it to generate row {cell.name!r} anew.") from error


def read_failure(run_dir: Path, cell: Cell) -> str | None:
    """Return why a row failed, or None."""
    data = read_json(failure_path(run_dir, cell))
    return None if data is None else str(data["reason"])


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, None where there is no file.

    Raises:
        ElfattError: the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ElfattError(f"{path} is damaged ({error}); delete it to make it anew.") from error


def load_run(run_dir: Path) -> Protocol:
    """Return the protocol of a run.

    Raises:
        ElfattError: the folder holds no run.
    """
    return Protocol.from_dict(run_data(run_dir)["protocol"])


def run_data(run_dir: Path) -> dict[str, Any]:
    """Return what `run.json` holds.

    Raises:
        ElfattError: there is none, or it is damaged or of another format.
    """
    data = read_run(run_dir)
    if data is None:
        raise ElfattError(f"{run_dir} holds no run ({RUN_FILE} is missing); give a folder that `eval run` has made.")
    return data


def read_run(run_dir: Path) -> dict[str, Any] | None:
    """Return what `run.json` holds, None where there is none.

    Raises:
        ElfattError: the file is damaged, or of another format.
    """
    data = read_json(run_dir / RUN_FILE)
    if data is not None and (not isinstance(data, dict) or data.get("format") != FORMAT):
        raise ElfattError(f"{run_dir / RUN_FILE} is not of format {FORMAT}; it was made by another version.")
    return data


def new_folder(run_dir: Path) -> str:
    """Say how to go on where a run's folder cannot be gone on with."""
    return f"give a new folder, and --reuse {run_dir} to take over the rows that stay the same"


def check_run(run_dir: Path, protocol: Protocol) -> None:
    """Refuse a folder that belongs to another protocol or to something else.

    Raises:
        ElfattError: the message lists what differs.
    """
    data = read_run(run_dir)
    if data is None:
        there = [path.name for path in run_dir.iterdir()] if run_dir.is_dir() else []
        strange = [name for name in there if name != LOCK_FILE and not name.endswith(".part")]
        if strange:
            raise ElfattError(f"{run_dir} is not empty and holds no run (there is {strange[0]!r}); give a new folder.")
        return
    now = protocol.to_dict()
    if data["identity"] != protocol.identity:
        listed = "; ".join(differences(data["protocol"], now)) or "the file was edited"
        raise ElfattError(f"{run_dir} holds a run of another specification ({listed}); {new_folder(run_dir)}.")
    if data["protocol"] != now:  # a description or a printed figure was mended
        write_json(run_dir / RUN_FILE, {**data, "protocol": now})


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Keep other processes from writing to a run's folder; the system frees the lock of a process that died.

    Raises:
        ElfattError: another process holds the lock, or the folder cannot be written.
    """
    import fcntl

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ElfattError(f"{run_dir} cannot be written: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 100, 0).decode(errors="replace").strip() or "another process"
            raise ElfattError(f"{run_dir} is in use by {holder}; wait for it, or give another folder.") from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def clear_disk_errors(run_dir: Path) -> Iterator[None]:
    """Turn a full disk into one clear line.

    Raises:
        RunFailure: no space is left.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunFailure(
            f"no space left on the disk of {run_dir}; finished work is kept: make room and give the same command again."
        ) from error
