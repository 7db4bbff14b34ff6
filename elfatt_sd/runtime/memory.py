"""What is kept from step to step: differences, draws of several steps, matchings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elfatt_sd.attention.merging import Split, split_grid
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import memory_of
from elfatt_sd.errors import ElfattError
from elfatt_sd.families.cuts import History
from elfatt_sd.methods import Draws, Grid, Merge
from elfatt_sd.phases import Kept
from elfatt_sd.runtime.schedule import Run

GIB = 2**30
_SHARE = 0.5  # of the free memory that may be used where no limit is given
_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_CPU = torch.device("cpu")
MOST_STEPS, MOST_BYTES = 64, 1 << 25  # that are drawn at once, on the host
AT_ONCE = ("cpu",)  # devices that need no such buffer: what is drawn is there already
_ALIGNED = 4  # elements: views begin at multiples of 16 bytes, as compiled code wants them


class Residual(NamedTuple):
    """A difference, as it is kept."""

    values: Tensor  # `[batch, tokens, ...]`, on the layer's device, on the host, or in 8 bits
    scale: Tensor | None  # of each token's 8-bit values; None where they are kept as they are
    device: torch.device  # of the layer
    dtype: torch.dtype  # of the layer

    @classmethod
    def keep(cls, difference: Tensor, where: Kept, buffer: Residual | None = None) -> Residual:
        """Keep a difference on the `device`, on the `host`, or in 8-bit floating point (`fp8`) on the device."""
        device, dtype = difference.device, difference.dtype
        if where == "host":
            kept = cls(difference.to("cpu"), None, device, dtype)
        elif where == "fp8":
            largest = difference.abs().amax(-1, keepdim=True).float()
            scale = largest.clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
            kept = cls((difference.float() / scale).to(_FP8), scale, device, dtype)
        else:
            kept = cls(difference, None, device, dtype)
        shape = difference.shape
        if buffer is None or not (buffer.values.shape, buffer.dtype, buffer.device) == (shape, dtype, device):  # noqa: SIM201
            return kept
        buffer.values.copy_(kept.values)
        if buffer.scale is not None and kept.scale is not None:
            buffer.scale.copy_(kept.scale)
        return buffer

    @classmethod
    def buffer(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, where: Kept) -> Residual | None:
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


def kept_bytes(sizes: Iterable[tuple[int, int]], dtype: torch.dtype, where: Kept) -> float:
    """Bytes of differences of these numbers of tokens and channels; in 8 bits, each token has a scale."""
    each, scale = (1, 4) if where == "fp8" else (dtype.itemsize, 0)
    return float(sum(tokens * (channels * each + scale) for tokens, channels in sizes))


def readable(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size > GIB / 2 else f"{size / 2**20:.3g} MiB"


def check_differences(run: Run, config: PatchConfig, device: torch.device) -> None:
    """Refuse differences that take too much memory, of all calls of a step and of all denoisers of a run."""
    needed, limit, where = sum(memory.needed for memory in run.kept.values()), config.residual_limit, config.residuals
    if not needed or device.type == "meta":
        return
    place = _CPU if where == "host" else device
    if limit is None:
        limit = run.limit = run.limit or _SHARE * memory_of(place)[1] / GIB
    if needed > limit * GIB:
        raise ElfattError(
            f"residual_steps and reuse would keep {readable(needed)} on {place.type}, more than the "
            f"{readable(limit * GIB)} that they may take; give residual_steps=1 and no reuse, residuals='fp8' or, on a "
            "GPU, 'host', or a larger residual_limit (in GiB)."
        )


@dataclass(eq=False)
class RunDraws:
    """What the layers of a denoiser draw in the steps of one phase.

    First every layer asks for what it draws (`made`), on the CPU; once `allocate` was called, the same requests are
    answered by views, and `fill` writes what a step draws into them.
    """

    _devices: dict[int, torch.device]
    _end: int
    prepared: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # with the views, by the layer's index
    allocated: bool = False
    # what a layer draws, see `Draws.made`, and what that made once
    _requests: dict[tuple[int, str], tuple[Draws, str, int, Callable[[Tensor], Tensor], Tensor]] = field(
        default_factory=dict
    )
    _views: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _places: dict[tuple[torch.device, torch.dtype], dict[tuple[int, str], slice]] = field(default_factory=dict)
    _buffers: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    # on the host, `[steps, numbers]`
    _rows: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    _steps: range = range(0)
    _now: int = -1

    def made(self, draws: Draws, what: str, count: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        key = draws.layer, what
        if key in self._views:
            return self._views[key]
        row = make(draws.uniform(what, count))
        self._requests[key] = draws, what, count, make, row
        return row

    def allocate(self) -> None:
        self.allocated = True
        for key, (*_, row) in self._requests.items():
            places = self._places.setdefault((self._devices[key[0]], row.dtype), {})
            start = max((-(-place.stop // _ALIGNED) * _ALIGNED for place in places.values()), default=0)
            places[key] = slice(start, start + len(row))
        with torch.inference_mode(False):  # they are filled within and without
            for (device, dtype), places in self._places.items():
                size = max(place.stop for place in places.values())
                self._buffers[device, dtype] = buffer = torch.zeros(size, dtype=dtype, device=device)
                self._views |= {key: buffer[place] for key, place in places.items()}

    def device_of(self, layer: int) -> torch.device:
        return self._devices[layer] if self.allocated else _CPU

    def fill(self, step: int) -> None:
        if step == self._now or not self._buffers:
            return
        if step not in self._steps:
            self._make(step)
        for place, buffer in self._buffers.items():
            buffer.copy_(self._rows[place][step - self._steps.start], non_blocking=True)
        self._now = step

    def _make(self, first: int) -> None:
        """Draw for as many steps from one on as `MOST_BYTES` allows."""
        each = sum(len(buffer) * buffer.element_size() for buffer in self._buffers.values())
        most = max(1, min(MOST_STEPS, MOST_BYTES // each))
        self._steps = steps = range(first, max(first + 1, min(self._end, first + most)))
        with torch.inference_mode(False):
            for where, places in self._places.items():
                rows = torch.zeros(len(steps), len(self._buffers[where]), dtype=where[1], device="cpu")
                for key, place in places.items():
                    own, what, numbers, make, _ = self._requests[key]
                    draws = {at.step: at for at in map(own.at, steps)}  # steps that share their draws have them once
                    made = make(torch.stack([at.uniform(what, numbers) for at in draws.values()]))
                    rows[:, place] = made[[list(draws).index(own.at(step).step) for step in steps]]
                self._rows[where] = rows.pin_memory() if where[0].type == "cuda" else rows


def split_of(merge: Merge, grid: Grid, draws: Draws | None, device: torch.device) -> Split | None:
    """Split a layer's grid in merge destinations and what may be merged into them."""
    cells = merge.destinations(grid)
    if merge.most(grid) == 0:
        return None
    if draws is None:
        return Split.of(split_grid(grid.rows, grid.columns, merge.stride, device=device), cells)

    def places(noise: Tensor) -> Tensor:
        return split_grid(grid.rows, grid.columns, merge.stride, (noise * merge.stride**2).long())

    return Split.of(draws.made("destinations", cells, places), cells)


class ByPlace:
    """What the calls of a group of steps keep for each other, by their place in the step."""

    def __init__(self) -> None:
        self._group: object = None
        self.kept: dict[tuple[int, ...], dict[Any, Any]] = {}

    def take(self, group: object, place: tuple[int, ...], keep: bool) -> dict[Any, Any]:
        if group != self._group:
            self.kept.clear()
        self._group = group
        return self.kept.setdefault(place, {}) if keep else {}


class Memory:
    """What one denoiser keeps from step to step of a run."""

    def __init__(self) -> None:
        self.matchings = ByPlace()
        self.residuals: dict[int, ByPlace] = {}  # by the layer's index
        self.draws: dict[tuple[object, ...], RunDraws | None] = {}  # of the phase that goes on
        self.buffers: dict[object, Residual | None] = {}  # that compiled code fills with differences
        self.needs: dict[tuple[int, ...], float] = {}  # bytes of differences, by the place of a call
        self.history: dict[tuple[int, ...], History] = {}  # what steps take over from earlier ones, by a call's place
        self._firsts: list[tuple[tuple[int, ...], Tensor]] = []  # calls of this step that measure, and their input
        self._owned: dict[int, Any] = {}  # by id, what is in memory of its own
        self.whole = False  # whether the latest call could take nothing over
        self.step = -1
        self._calls: Counter[tuple[int, ...]] = Counter()  # of this step, by the shape of their input

    def place(self, step: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the place of a call among those of its step, and its shape."""
        if step != self.step:
            self._calls.clear()
            self._firsts.clear()
        self.step = step
        place = self._calls[shape], *shape
        self._calls[shape] += 1
        return place

    def same_latents(self, place: tuple[int, ...], sample: Tensor) -> tuple[int, tuple[int, ...]]:
        """Return how often a call's rows repeat their latents, and the place of the step's first call with them."""
        # both look at the values, which waits for the device
        first = next((known for known, other in self._firsts if _are_equal(other, sample)), place)
        if first == place:
            self._firsts.append((place, sample.detach().clone()))  # it may be a buffer
        return copies_of(sample), first

    @property
    def needed(self) -> float:
        """Bytes of differences that the calls of the latest step keep, now or in a later step."""
        return sum(need for (turn, *shape), need in self.needs.items() if turn < self._calls[tuple(shape)])

    def let_go(self, step: int) -> None:
        """Forget the differences of a denoiser whose last call was before the last step: another one has taken over."""
        if self.step < step - 1:
            for held in (self.residuals, self.needs, self.buffers, self._owned, self.history):
                held.clear()

    def own(self, kept: Iterable[dict[Any, Any]]) -> None:
        """Copy what compiled code has kept in a call: a CUDA graph overwrites its outputs when it is replayed."""
        owned: dict[int, Any] = {id(buffer): buffer for buffer in self.buffers.values()}
        self._owned |= owned
        for each in kept:
            for key, value in each.items():
                if value is not None:
                    each[key] = value = value if id(value) in self._owned else value.copied()
                    owned[id(value)] = value
        self._owned = owned


def copies_of(sample: Tensor) -> int:
    """Return how often the rows of a batch repeat their latents, as guidance in one call does: 3, 2 or 1 times."""
    rows = len(sample)
    if rows > 1 and sample.stride(0) == 0:  # one of several images stands for all
        return 1
    for copies in (2, 3):
        first, *others = sample.chunk(copies) if rows % copies == 0 else (sample,)
        if others and all(_are_equal(first, other) for other in others):
            return copies
    return 1


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or one.shape != other.shape or one.device != other.device:
        return False
    if one.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return torch.equal(one, other)
