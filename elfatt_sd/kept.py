"""What a denoiser keeps from step to step of a run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from elfatt_sd.ahead import RunDraws
from elfatt_sd.devices import beneath_transforms
from elfatt_sd.residuals import Residual, check_memory, free_for_differences
from elfatt_sd.surroundings import device_of

if TYPE_CHECKING:
    from elfatt_sd.calls import Call
    from elfatt_sd.config import PatchConfig
    from elfatt_sd.layer_state import LayerState
    from elfatt_sd.runs import Run


class Memory:
    """What one denoiser keeps from step to step of a run."""

    def __init__(self) -> None:
        self.matchings = Shelf()
        self.residuals: dict[int, Shelf] = {}  # by the layer's index
        self.ahead: dict[tuple[object, ...], RunDraws | None] = {}  # of the phase that goes on
        self.rooms: dict[object, Residual | None] = {}  # that compiled code fills with differences
        self.needs: dict[tuple[int, ...], float] = {}  # bytes of differences, by the place of a call
        self._firsts: list[
            tuple[tuple[int, ...], torch.Tensor]
        ] = []  # calls of this step that measure, and their input
        self._owned: dict[int, Any] = {}  # by id, what is in memory of its own
        self._step = -1
        self._calls: Counter[tuple[int, ...]] = Counter()  # of this step, by the shape of their input

    def place(self, step: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the place of a call among those of its step, and its shape."""
        if step != self._step:
            self._calls.clear()
            self._firsts.clear()
        self._step = step
        place = self._calls[shape], *shape
        self._calls[shape] += 1
        return place

    def same_latents(self, place: tuple[int, ...], sample: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """Return how often a call's rows repeat their latents, and the place of the step's first call with them.

        Both look at the values, which waits for the device.
        """
        first = next((known for known, other in self._firsts if _are_equal(other, sample)), place)
        if first == place:
            self._firsts.append((place, beneath_transforms(sample).detach().clone()))  # it may be a buffer
        return copies_of(sample), first

    @property
    def needed(self) -> float:
        """Bytes of differences that the calls of the latest step keep, now or in a later step."""
        return sum(need for (turn, *shape), need in self.needs.items() if turn < self._calls[tuple(shape)])

    def let_go(self, step: int) -> None:
        """Forget the differences of a denoiser whose last call was before the last step: another one has taken over."""
        if self._step < step - 1:
            for held in (self.residuals, self.needs, self.rooms, self._owned):
                held.clear()

    def room(self, state: LayerState, place: tuple[int, ...]) -> Residual | None:
        """Return the memory for a layer's difference in compiled code, the same in every group of steps."""
        layer, given = state.layer, state.call.given
        if state.phase.exact or torch.is_grad_enabled():
            return None
        rows = state.measured_rows
        key = place, state.index, state.grid, rows
        if key not in self.rooms:
            device = device_of(state.patched.parts, given.sample.device)
            of_heads = layer.joint and not state.phase.merge.ratio  # what is corrected is not projected yet
            sizes = (layer.heads, layer.channels // layer.heads) if of_heads else (layer.channels,)
            shape = (rows, state.grid.tokens, *sizes)
            self.rooms[key] = Residual.room(shape, given.sample.dtype, device, state.call.config.residuals)
        return self.rooms[key]

    def own(self, call: Call) -> None:
        """Copy what compiled code has kept in a call: a CUDA graph overwrites its outputs when it is replayed."""
        shelves: list[dict[Any, Any]] = [call.matchings, *(state.residuals for state in call.states.values())]
        owned: dict[int, Any] = {id(room): room for room in self.rooms.values()}
        self._owned |= owned
        for shelf in shelves:
            for key, kept in shelf.items():
                if kept is not None:
                    shelf[key] = kept = kept if id(kept) in self._owned else kept.copied()
                    owned[id(kept)] = kept
        self._owned = owned

    def repeat_step(self) -> None:
        """Let the next call stand for the first of its step, whatever was called before it."""
        self._step = -1


def copies_of(sample: torch.Tensor) -> int:
    """Return how often the rows of a batch repeat their latents, as guidance in one call does: 3, 2 or 1 times."""
    rows = len(sample)
    if rows > 1 and sample.stride(0) == 0:  # one of several images stands for all
        return 1
    for copies in (3, 2):
        first, *others = sample.chunk(copies) if rows % copies == 0 else (sample,)
        if others and all(_are_equal(first, other) for other in others):
            return copies
    return 1


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = map(beneath_transforms, (one, other))
    if one.is_meta or one.shape != other.shape or one.device != other.device:
        return False
    if one.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return torch.equal(one, other)


def check_differences(run: Run, config: PatchConfig, device: torch.device) -> None:
    """Refuse differences that take too much memory, of all calls of a step and of all denoisers of a run."""
    needed, limit = sum(memory.needed for memory in run.kept.values()), config.residual_limit
    if not needed:
        return
    if limit is None:
        limit = run.limit = run.limit or free_for_differences(config.residuals, device)
    check_memory(needed, config.residuals, limit, device)


class Shelf:
    """What the calls of a group of steps keep for each other, by their place in the step."""

    def __init__(self) -> None:
        self._group: object = None
        self._kept: dict[tuple[int, ...], dict[Any, Any]] = {}

    def take(self, group: object, place: tuple[int, ...], keep: bool) -> dict[Any, Any]:
        if group != self._group:
            self._kept.clear()
        self._group = group
        return self._kept.setdefault(place, {}) if keep else {}
