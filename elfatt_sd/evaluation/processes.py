"""The processes of one launch: what one of them does for all, and where they must agree."""

from __future__ import annotations

import datetime
import os
import platform
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from elfatt_sd.errors import ElfattError
from elfatt_sd.loading import pick_device

Value = TypeVar("Value")


def process_state(device: str = "auto") -> Any:
    # The first process scores alone at the end, while the others wait: far longer than the usual ten minutes.
    return PartialState(cpu=pick_device(device).type == "cpu", timeout=datetime.timedelta(days=1))


def scoring_device(device: str) -> str:
    """Return the device that a run was made on, or `auto` where this machine has none: scores need not that one."""
    try:
        pick_device(device)
    except ElfattError:
        return "auto"
    return device


def is_first() -> bool:
    return bool(process_state().is_main_process)


def among_others() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave_processes() -> None:
    """Wait for the other processes of a launch and part from them."""
    if among_others():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def gathered(value: Value) -> list[Value]:
    found: list[Value] = gather_object([value]) if among_others() else [value]
    return found


def together(action: Callable[[], Value]) -> Value:
    """Do something in every process; where it fails in one, it fails in all. All processes must call this."""
    try:
        value = action()
    except Exception as error:
        gathered(str(error))
        raise
    reasons = [reason for reason in gathered(None) if reason is not None]
    if reasons:
        raise ElfattError(reasons[0])
    return value


def by_first(action: Callable[[], Value]) -> Value:
    """Do something in the first process alone and return in all what it returns there; see `together`."""
    first = is_first()
    value: Any = gathered(together(lambda: action() if first else None))[0]
    found: Value = value
    return found


def check_shared(folder: Path, what: str, remedy: str) -> None:
    """Refuse to go on where the processes of a launch do not all see the same folder; all of them must call this."""
    if not among_others():
        return

    def mark() -> str:
        name = f".seen-{secrets.token_hex(8)}.part"  # which no file system can have noted as absent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as error:
            raise ElfattError(f"{what} {folder} cannot be written: {error.strerror}; {remedy}.") from error
        return name

    marker = folder / by_first(mark)
    try:
        places = gathered((platform.node(), str(folder), os.path.isfile(marker)))
    finally:
        if is_first():
            marker.unlink(missing_ok=True)
    for number, (machine, place, shared) in enumerate(places):
        if not shared:
            first = f"{places[0][1]} of process 0 ({places[0][0]})"
            raise ElfattError(f"{what} {first} is not that of process {number} ({place} on {machine}); {remedy}.")
