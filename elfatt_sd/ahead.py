"""What layers draw at random, made for many steps of a run at once, and moved to a GPU in one copy a step.

What the layers draw in a step lies side by side in one buffer, of which each layer has a view. Buffer and views stay
the same from step to step, also for a CUDA graph; a step only fills them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from elfatt_sd.merging import Split, split_grid
from elfatt_sd.methods import Draws, Grid, Merge

if TYPE_CHECKING:
    from elfatt_sd.layer_state import LayerState

MOST_STEPS, MOST_BYTES = 64, 1 << 25  # that are made at once, on the host
AT_ONCE = ("cpu",)  # devices that need no such buffer: what is drawn is there already
_ALIGNED = 4  # elements: views begin at multiples of 16 bytes, as compiled code wants them


class _Asked(NamedTuple):
    """What a layer draws; see `Draws.made`."""

    draws: Draws
    what: str
    numbers: int
    make: Callable[[Tensor], Tensor]
    length: int
    dtype: torch.dtype

    def rows(self, steps: range) -> Tensor:
        bases = [self.draws.at(step) for step in steps]
        several = {each.step: each for each in bases}  # steps that share their draws have them once
        places = {step: place for place, step in enumerate(several)}
        made = self.make(torch.stack([each.uniform(self.what, self.numbers) for each in several.values()]))
        return made[[places[each.step] for each in bases]] if len(several) < len(bases) else made


class RunDraws:
    """What the layers of a denoiser draw in the steps of one phase.

    First every layer asks for what it draws (`made`), on the CPU; once `allocate` was called, the same requests are
    answered by views, and `fill` writes what a step draws into them.
    """

    def __init__(self, devices: dict[int, torch.device], end: int) -> None:
        self._devices = devices
        self._kept: dict[int, tuple[Any, ...]] = {}  # what layers prepared with the views
        self._end = end
        self._asked: dict[tuple[int, str], _Asked] = {}
        self._views: dict[tuple[int, str], Tensor] = {}
        self._places: dict[tuple[torch.device, torch.dtype], dict[tuple[int, str], slice]] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._rows: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # on the host, `[steps, numbers]`
        self._steps = range(0)
        self._allocated = False
        self._now = -1

    def made(self, draws: Draws, what: str, count: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        key = draws.layer, what
        if key in self._views:
            return self._views[key]
        row = make(draws.uniform(what, count))
        self._asked[key] = _Asked(draws, what, count, make, len(row), row.dtype)
        return row

    def allocate(self) -> None:
        """Make the buffers for all that was asked for."""
        self._allocated = True
        for key, asked in self._asked.items():
            places = self._places.setdefault((self._devices[key[0]], asked.dtype), {})
            start = max((-(-place.stop // _ALIGNED) * _ALIGNED for place in places.values()), default=0)
            places[key] = slice(start, start + asked.length)
        with torch.inference_mode(False):  # they are filled within and without
            for (device, dtype), places in self._places.items():
                size = max(place.stop for place in places.values())
                self._buffers[device, dtype] = buffer = torch.zeros(size, dtype=dtype, device=device)
                self._views |= {key: buffer[place] for key, place in places.items()}

    def device_of(self, layer: int) -> torch.device:
        return self._devices[layer] if self._allocated else torch.device("cpu")

    def keep(self, state: LayerState) -> None:
        """Keep what a layer has prepared, for later steps; what it prepares to ask is not kept."""
        if self._allocated:
            self._kept[state.index] = state.grid, state.phase, state.split, state.prepared

    def give(self, state: LayerState) -> bool:
        """Give a layer what it prepared in an earlier step, if that is kept."""
        kept = self._kept.get(state.patched.index)
        if kept is not None:
            state.grid, state.phase, state.split, state.prepared = kept
        return kept is not None

    def fill(self, step: int) -> None:
        """Let the views hold what a step draws."""
        if step == self._now or not self._buffers:
            return
        if step not in self._steps:
            self._make(step)
        for place, buffer in self._buffers.items():
            buffer.copy_(self._rows[place][step - self._steps.start], non_blocking=True)
        self._now = step

    def _make(self, first: int) -> None:
        """Draw for as many steps from one on as there is room for."""
        each = sum(len(buffer) * buffer.element_size() for buffer in self._buffers.values())
        most = max(1, min(MOST_STEPS, MOST_BYTES // each))
        self._steps = steps = range(first, max(first + 1, min(self._end, first + most)))
        with torch.inference_mode(False):
            for where, places in self._places.items():
                rows = torch.zeros(len(steps), len(self._buffers[where]), dtype=where[1], device="cpu")
                for key, place in places.items():
                    rows[:, place] = self._asked[key].rows(steps)
                self._rows[where] = rows.pin_memory() if where[0].type == "cuda" else rows


def split_of(merge: Merge, grid: Grid, draws: Draws | None, device: torch.device) -> Split | None:
    """Split a layer's grid in merge destinations and what may be merged into them."""
    cells = merge.destinations(grid)
    if merge.most(grid) == 0:
        return None
    if draws is None:
        return Split.of(_fixed_split(grid.rows, grid.columns, merge.stride, device), cells)

    def places(noise: Tensor) -> Tensor:
        return split_grid(grid.rows, grid.columns, merge.stride, (noise * merge.stride**2).long())

    return Split.of(draws.made("destinations", cells, places), cells)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept may be used where gradients are wanted
def _fixed_split(rows: int, columns: int, stride: int, device: torch.device) -> Tensor:
    return split_grid(rows, columns, stride).to(device)
