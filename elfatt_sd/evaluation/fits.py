"""Whether the batches of a protocol fit into the memory of a machine: those of its images, timing and memory."""

from __future__ import annotations

from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.preflight import check_sizes_fit


def check_batches_fit(protocol: Protocol, pipe: Any = None) -> None:
    """Refuse a protocol with a batch that is estimated not to fit.

    Raises:
        ElfattError: it is refused; the message is the first of `misfits`.
    """
    for reason in misfits(protocol, pipe):
        raise ElfattError(reason)


def misfits(protocol: Protocol, pipe: Any = None) -> list[str]:
    """Return a line for each setting whose largest batch is estimated not to fit; warn where one is near.

    Args:
        protocol: whose batches they are.
        pipe: its pipeline, loaded. Without, only the CPU counts, as far as a directory tells; PyTorch is not needed.
    """
    found: dict[str, str] = {}  # what is wrong with the size would be so with every batch
    for setting, batch in _batches(protocol, pipe).items():
        try:
            if pipe is None:
                _check_early(protocol, batch)
            else:
                _check_loaded(pipe, protocol, batch)
        except ElfattError as error:
            found.setdefault(str(error), "" if setting == "batch" else f"{setting}={batch}: ")
    return [start + reason for reason, start in found.items()]


def _batches(protocol: Protocol, pipe: Any) -> dict[str, int]:
    """Return the batches to check by their settings.

    Those of timing and memory may run out of a GPU's memory, which is reported as a result. A CPU's takes the
    machine down.
    """
    found = {"batch": protocol.batch}
    if pipe is None or pipe.device.type == "cpu":
        found |= {"time.batch": protocol.time.batch} if protocol.time else {}
        found |= {"memory.batches": max(protocol.memory.batches)} if protocol.memory else {}
    return {setting: batch for setting, batch in found.items() if setting == "batch" or batch > protocol.batch}


def _check_early(protocol: Protocol, batch: int) -> None:
    sizes, rows = [(protocol.height, protocol.width)], 1 + (protocol.guidance > 1)
    check_sizes_fit(protocol.model, protocol.device, protocol.dtype, sizes, rows * batch, batch)


def _check_loaded(pipe: Any, protocol: Protocol, batch: int) -> None:
    """Refuse a batch beyond the memory of a pipeline's device, or a size or frames that the model cannot draw."""
    from elfatt_sd.budget import check_fits
    from elfatt_sd.evaluation.images import makes_clips
    from elfatt_sd.planning import input_grid
    from elfatt_sd.running import dimensions_of, rows_of

    dimensions_of(pipe).check(protocol.height, protocol.width)
    if makes_clips(pipe):
        input_grid(pipe, protocol.height, protocol.width, protocol.frames)
    elif protocol.frames > 1:
        raise ElfattError(f"frames={protocol.frames} is not accepted; {type(pipe).__name__} makes images, of 1 frame.")
    rows = rows_of(pipe, protocol.guidance)
    work = {"steps": protocol.steps, "images": 0, "frames": protocol.frames}  # a dry run tells the time
    check_fits(pipe, protocol.height, protocol.width, **work, rows=rows, batch=batch)
