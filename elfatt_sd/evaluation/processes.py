"""The processes of one launch: which is the first, and how they decide and fail together."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from elfatt_sd.config import ElfattError

Value = TypeVar("Value")


def process_state(device: str = "auto") -> Any:
    """Return accelerate's view of the processes of this run; one, unless `accelerate launch` started several."""
    from accelerate import PartialState

    from elfatt_sd.pipelines import pick_device

    # The first process scores alone at the end, while the others wait: far longer than the usual ten minutes.
    return PartialState(cpu=pick_device(device).type == "cpu", timeout=datetime.timedelta(days=1))


def is_first() -> bool:
    """Tell whether this is the first process of a launch, or the only one."""
    return bool(process_state().is_main_process)


def among_others() -> bool:
    """Tell whether there are other processes that this one has not left."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave_processes() -> None:
    """Wait for the other processes of a launch and part from them."""
    if among_others():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def gathered(value: Value) -> list[Value]:
    """Return the value that each process of the launch gives, in their order; all processes must call this."""
    if not among_others():
        return [value]
    from accelerate.utils import gather_object

    found: list[Value] = gather_object([value])
    return found


def together(action: Callable[[], Value]) -> Value:
    """Do something in every process; where it fails in one, it fails in all. All processes must call this.

    Raises:
        ElfattError: it failed in another process, whose reason is given; a process's own error passes as it is.
    """
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
