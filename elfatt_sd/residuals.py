"""Differences that steps share (`Phase.residual_steps`): how they are kept, and how much memory that takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from elfatt_sd.devices import memory_of
from elfatt_sd.errors import ElfattError
from elfatt_sd.settings import Kept

GIB = 2**30
_SHARE = 0.5  # of the free memory that may be used where no limit is given
_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max


class Residual(NamedTuple):
    """A difference, as it is kept."""

    values: Tensor  # `[batch, tokens, ...]`, on the layer's device, on the host, or in 8 bits
    scale: Tensor | None  # of each token's 8-bit values; None where they are kept as they are
    device: torch.device  # of the layer
    dtype: torch.dtype  # of the layer

    @classmethod
    def keep(cls, difference: Tensor, where: Kept, room: Residual | None = None) -> Residual:
        """Keep a difference on the `device`, on the `host`, or in 8-bit floating point (`fp8`) on the device."""
        if room is not None and room._fits(difference):
            return room._filled(cls.keep(difference, where))
        device, dtype = difference.device, difference.dtype
        if where == "host":
            return cls(difference.to("cpu"), None, device, dtype)
        if where == "fp8":
            scale = (
                difference.abs().amax(-1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
            )
            return cls((difference.float() / scale).to(_FP8), scale, device, dtype)
        return cls(difference, None, device, dtype)

    @classmethod
    def room(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, where: Kept) -> Residual | None:
        """Return an empty one, to be filled in each group of steps; None on the host, where graphs have no memory.

        Compiled code may write into it: it is not an output of a CUDA graph, which the next replay overwrites.
        """
        if where == "host":
            return None
        from torch._dynamo import mark_static_address  # not imported for this where nothing is compiled

        with torch.inference_mode(False):
            values = torch.zeros(shape, dtype=_FP8 if where == "fp8" else dtype, device=device)
            scale = torch.zeros((*shape[:-1], 1), dtype=torch.float32, device=device) if where == "fp8" else None
        for tensor in (values,) if scale is None else (values, scale):
            mark_static_address(tensor, guard=False)
        return cls(values, scale, device, dtype)

    def _fits(self, difference: Tensor) -> bool:
        own = self.values.shape, self.dtype, self.device
        return own == (difference.shape, difference.dtype, difference.device)

    def _filled(self, kept: Residual) -> Residual:
        self.values.copy_(kept.values)
        if self.scale is not None and kept.scale is not None:
            self.scale.copy_(kept.scale)
        return self

    def copied(self) -> Residual:
        return self._replace(values=self.values.clone(), scale=None if self.scale is None else self.scale.clone())

    def restore(self) -> Tensor:
        if self.scale is None:
            return self.values.to(self.device, non_blocking=True)
        return (self.values.float() * self.scale).to(self.dtype)


def add_difference(output: Tensor, difference: Tensor) -> Tensor:
    """Add a difference to all rows of an output, of which there may be several times as many."""
    if len(output) == len(difference):
        return output + difference
    return (output.reshape(-1, *difference.shape) + difference).reshape(output.shape)


def kept_bytes(sizes: Iterable[tuple[int, int]], batch: int, dtype: torch.dtype, where: Kept) -> float:
    """Return the memory that differences of one call take."""
    each = 1 if where == "fp8" else dtype.itemsize
    return float(sum(batch * tokens * (channels * each + 4 * (where == "fp8")) for tokens, channels in sizes))


def readable(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size > GIB / 2 else f"{size / 2**20:.3g} MiB"


def free_for_differences(where: Kept, device: torch.device) -> float:
    return math.inf if device.type == "meta" else _SHARE * memory_of(_place(where, device))[1] / GIB


def _place(where: Kept, device: torch.device) -> torch.device:
    return torch.device("cpu") if where == "host" else device


def check_memory(needed: float, where: Kept, limit: float, device: torch.device) -> None:
    """Refuse what would take too much memory."""
    if device.type == "meta":
        return
    place = _place(where, device)
    if needed > limit * GIB:
        same = ("host",) if place.type == device.type == "cpu" else ()
        others = ", ".join(f"residuals={other!r}" for other in ("host", "fp8") if other not in (where, *same))
        raise ElfattError(
            f"residual_steps would keep {readable(needed)} on {place.type}, more than the {readable(limit * GIB)} "
            f"that it may take; give residual_steps=1, {others}, or a larger residual_limit (in GiB)."
        )
