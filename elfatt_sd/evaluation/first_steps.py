"""Make the exact first steps of a batch once for all rows that begin with them.

A method that is exact in the first 20 % of the steps calls the untouched UNet there with the same inputs that the
untouched row had. What the UNet returned is kept on disk by the first row that needs it, and given back in the others:
the images are the same, byte for byte. Times and memory are measured elsewhere, without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.evaluation.images import denoiser
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.files import read_plain, write_file

_DIGEST = hashlib.sha256().digest_size  # bytes before what is kept


def exact_calls(cell: Cell, steps: int) -> int:
    """Return how many of the first UNet calls of a row's images do just what the untouched pipeline does.

    Args:
        cell: the row.
        steps: denoising steps. A scheduler that calls the UNet more often has at least as many exact calls.

    Returns:
        A number from 0 to `steps`; 0 where steps share what they measure in exact ones (`residual_steps`), or where the
        row has other latents, another kernel or a peer's patch.
    """
    config = cell.config()
    residual = any(phase.residual_steps > 1 for phase in config.all_phases)
    if cell.role == "null" or cell.peer or residual or config.attention_backend != "auto":
        return 0
    exact = [not config.at(step, steps).active for step in range(steps)]
    return [*exact, False].index(False)


def kept_calls(protocol: Protocol, cell: Cell) -> int:
    """Return how many of a row's exact calls are worth keeping: no more than any row begins with but the untouched."""
    others = (exact_calls(other, protocol.steps) for other in protocol.cells if other.role == "method")
    return min(exact_calls(cell, protocol.steps), max(others, default=0))


def _keep(path: Path, outputs: list[Tensor]) -> None:
    content = io.BytesIO()  # of a disk that is full, torch.save itself tells in words of its own
    torch.save(outputs, content)
    write_file(path, hashlib.sha256(content.getvalue()).digest() + content.getvalue())


def _kept(path: Path) -> list[Tensor]:
    """Return the outputs that are kept; none where the file is damaged, for they can be made again."""
    try:
        content = read_plain(path)
    except OSError:
        return []
    digest, outputs = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(outputs).digest() != digest:  # one bit, which torch.load may not see, would change all rows
        return []
    found: list[Tensor] = torch.load(io.BytesIO(outputs), map_location="cpu", weights_only=True)
    return found


@contextlib.contextmanager
def first_steps(pipe: Any, path: Path, calls: int) -> Iterator[None]:
    """Give the denoiser's first outputs back from a file where it has them, and add to it what it has not.

    Args:
        pipe: a pipeline that is run once, for one batch, within the `with` block.
        path: the batch's file, written when the block ends without an error.
        calls: number of calls that may be given back, or kept; 0 leaves the pipeline alone.
    """
    if calls == 0:
        yield
        return
    known = _kept(path)
    outputs = list(known)
    network = denoiser(pipe)
    compute, own = network.forward, vars(network).get("forward")
    call = -1

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal call
        call += 1
        if call < min(calls, len(known)):
            return (known[call].to(network.device),)
        output = compute(*args, **kwargs)
        if call == len(outputs) < calls:
            outputs.append(output[0].cpu())
        return output

    network.forward = forward
    try:
        yield
    finally:
        del network.forward
        if own is not None:  # another wrapper, such as one that moves weights to the device
            network.forward = own
    if len(outputs) > len(known):
        _keep(path, outputs)
