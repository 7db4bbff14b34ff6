"""Where in the denoising run a call is, resolved on the host without touching the device.

Pipelines iterate over `scheduler.timesteps`. Each timestep that they hand to the UNet is a view into that tensor, so
its storage offset is the index of the call, on any device and for any scheduler. That also holds where a timestep
occurs twice, where a step takes two calls, and where image-to-image starts inside the schedule.

A timestep that is not such a view is looked up by value: among the timesteps, or among the other values that pipelines
pass (noise levels, their logarithms, fractions of the run). A value that is on no schedule has a place by its noise
level, but belongs to no run: nothing is carried over from another call. The scheduler's own counter places only
timesteps that the device alone knows, in a run whose beginning was seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch

from elfatt_sd import timesteps as units
from elfatt_sd.config import ElfattError
from elfatt_sd.devices import beneath_transforms, written
from elfatt_sd.runs import Run, Runs, address


class Position(NamedTuple):
    """Index of a step in the schedule, and the number of steps of the whole schedule.

    `scheduled` tells whether the call is one of a run over a schedule; if not, the step is the place of its noise level
    among all that the model was trained on.
    """

    step: int
    steps: int
    scheduled: bool = True


ANYWHERE = Position(0, 1, scheduled=False)  # for a method to which the step does not matter
BEYOND = Position(1, 1, scheduled=False)  # of a value in a unit that is not known: past the last phase


class _Found(NamedTuple):
    """A position, and how it was found.

    Attributes:
        position: of the call.
        schedule: a tensor in the storage of the schedule.
        unit: which of `timesteps.other_units` it is in; None for timesteps.
        copy: the timestep, where the scheduler's counter told its step.
    """

    position: Position
    schedule: torch.Tensor | None = None
    unit: int | None = None
    copy: torch.Tensor | None = None


class SchedulerFinder:
    """Looks up a pipeline's scheduler again, without keeping the pipeline alive.

    Pickled, it keeps the scheduler alone, as the pipeline would add its other models to the file of a UNet.

    Args:
        pipe: the pipeline, or a bare UNet, which has none.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = weakref.ref(pipe)

    def __call__(self) -> Any:
        """Return the scheduler in use now, or None."""
        return getattr(self._pipe(), "scheduler", None)

    def __deepcopy__(self, copied: dict[int, Any]) -> SchedulerFinder:
        """Look into the copy of the pipeline, if that is being copied."""
        pipe = self._pipe()
        return self if pipe is None else SchedulerFinder(copied.get(id(pipe), pipe))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the scheduler alone."""
        return _KeptScheduler, (self(),)


@dataclass
class _KeptScheduler:
    """What a `SchedulerFinder` is after pickling."""

    scheduler: Any

    def __call__(self) -> Any:
        return self.scheduler


class Schedule:
    """Follows the runs of one pipeline, in each thread.

    Args:
        find_scheduler: returns the scheduler in use now, or None for a bare UNet.
        trained_on_noise_levels: whether the model takes noise levels, which have no place without a scheduler.
    """

    def __init__(self, find_scheduler: Callable[[], Any], trained_on_noise_levels: bool = False) -> None:
        self._find_scheduler = find_scheduler
        self._noise_levels = trained_on_noise_levels
        self.runs = Runs()
        self._values: tuple[object, list[float]] = None, []  # of a schedule on a device, read once

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without the runs, which are those of this object's threads."""
        return Schedule, (self._find_scheduler, self._noise_levels)

    @property
    def run(self) -> Run:
        """The run that the latest call of this thread on a schedule belongs to."""
        return self.runs.latest

    def locate(self, timestep: torch.Tensor | float, unit: int | None = None) -> Position | None:
        """Return the position of a call.

        Args:
            timestep: what the model is called with: a number, or a tensor of one value or of one value per image.
            unit: which of `timesteps.other_units` its family takes; None where it takes timesteps, or what it takes is
                to be found out.

        Returns:
            The position; `BEYOND` for a value in a unit that is not known; None for what only the device knows, or what
            differs within the batch.
        """
        if isinstance(timestep, torch.Tensor):
            timestep = beneath_transforms(timestep)
        scheduler = self._find_scheduler()
        timesteps = _timesteps(scheduler)
        found = self._from_view(timestep, timesteps, scheduler)
        if found is None and not _on_device(timestep):
            found = self._from_value(timestep, timesteps, scheduler, unit)
        elif found is None and timesteps is not None and not torch.is_grad_enabled():  # in training, it is drawn
            found = self._from_copy(timestep, timesteps, scheduler, unit)
        if found is None:
            return None
        self._follow(found)
        return found.position

    def _from_view(
        self, timestep: torch.Tensor | float, timesteps: torch.Tensor | None, scheduler: Any
    ) -> _Found | None:
        """Read the index off the storage that a timestep is a view of."""
        if not isinstance(timestep, torch.Tensor) or (timestep.numel() > 1 and any(timestep.stride())):
            return None
        step, run = int(timestep.storage_offset()), self.runs.over(timestep)
        if timesteps is not None and address(timestep) == address(timesteps):
            step, between = divmod(step - int(timesteps.storage_offset()), timesteps.stride(0))
            if between or not 0 <= step < len(timesteps):
                return None
            if run.goes_on(timesteps, step):  # nothing is read any more
                return _Found(Position(step, len(timesteps)), timesteps, run.unit)
            return _Found(_position(step, self._on_host(timesteps)), timesteps)
        if run.goes_on(timestep, step):
            return _Found(Position(step, run.steps), timestep)
        length = timestep.untyped_storage().nbytes() // timestep.element_size()
        if length >= units.SHORTEST and not timestep.is_meta:
            values = self._on_host(timestep.new_empty(0).set_(timestep.untyped_storage()))
            length = units.schedule_length(values, scheduler)
        return _Found(Position(step, length), timestep) if length >= units.SHORTEST and step < length else None

    def _on_host(self, timesteps: torch.Tensor) -> list[float]:
        """Return the values of a schedule; one on a device is read once."""
        if timesteps.device.type == "cpu":
            return timesteps.tolist()
        if self._values[0] != (state := written(timesteps)):
            self._values = state, timesteps.tolist()
        return self._values[1]

    def _from_value(
        self, timestep: Any, timesteps: torch.Tensor | None, scheduler: Any, unit: int | None
    ) -> _Found | None:
        """Look a value up on the schedule; find the place of one that is not on it."""
        value = _value(timestep)
        if value is None:
            return None
        if timesteps is not None:
            found = self._on_schedule(value, units.rounding(timestep), timesteps, scheduler, unit)
            if found is not None:
                return found
        if unit is not None:  # a fraction of the run
            whole = units.train_steps(scheduler)
            value = whole * (value if unit == units.FRACTION else 1 - value)
        place = None if self._noise_levels else units.place(value, scheduler)
        if place is None:
            self.run.strange = timesteps
            return _Found(BEYOND)
        return _Found(Position(place, units.train_steps(scheduler), scheduled=False))

    def _on_schedule(
        self, value: float, rounding: float, timesteps: torch.Tensor, scheduler: Any, unit: int | None
    ) -> _Found | None:
        """Look a value up in all units, first in the one of the run that goes on; an `int` is a timestep."""
        known, run = self._on_host(timesteps), self.runs.over(timesteps)
        own = run.unit if run.is_over(timesteps) else None
        others = () if isinstance(value, int) else enumerate(units.other_units(scheduler, known))
        strange = run.strange is timesteps and own is None  # what now is in one of those, is so by chance
        levels: dict[int | None, Sequence[float]] = {None: known, **(dict(others) if not strange else {})}
        if unit is not None:
            levels = {unit: list(units.other_units(scheduler, known))[unit]}
        for one in sorted(levels, key=lambda one: one != own):
            steps = units.matches(levels[one], value, rounding)
            counted = _counted(scheduler, timesteps) if rounding and len(steps) > 1 else None
            step = counted if counted in steps else self._choose(steps, timesteps)
            if step is not None:
                live = getattr(scheduler, "num_inference_steps", len(known)) is not None
                return _Found(_position(step, known, live), timesteps, one)
        if unit is not None:
            return None
        near = units.nearest(levels[own], value) if own in levels and own is not None else None
        return None if near is None else _Found(_position(near, known, live=False))

    def _choose(self, steps: Sequence[int], timesteps: torch.Tensor) -> int | None:
        """Return the step of a value that occurs at several: the one that the run is in, or has come to."""
        run = self.runs.over(timesteps)
        if not steps or not run.is_over(timesteps):
            return steps[0] if steps else None
        if run.step in steps and run.calls < run.calls_before:
            return run.step
        return next((step for step in steps if step > run.step), steps[0])

    def _from_copy(self, timestep: Any, timesteps: torch.Tensor, scheduler: Any, unit: int | None) -> _Found | None:
        """Return the scheduler's own count of its steps, in a run that began by it; what is not such a step, is read.

        A copy on a device is read where a run begins, and where a step has another copy, as it may be another value.
        """
        counted, run = _counted(scheduler, timesteps), self.runs.over(timesteps)
        if counted is None:
            return None
        same = run.copy is not None and run.copy[1] == _place_in_memory(timestep)
        if run.copy is not None and run.is_over(timesteps) and counted == run.step + (not same):
            return _Found(Position(counted, len(timesteps)), timesteps, run.unit, timestep)
        found = self._from_value(timestep, timesteps, scheduler, unit)
        begins = found is not None and found.position.scheduled and found.position.step == counted
        return found._replace(copy=timestep) if found is not None and begins else found

    def _follow(self, found: _Found) -> None:
        """Let a run of this thread go on with a call, or begin another one."""
        position = found.position
        if not position.scheduled:  # a preview between two steps does not end their run
            return
        run = self.runs.follow(found.schedule, position.step)
        run.advance(position.step)
        run.steps, run.unit = position.steps, found.unit
        run.copy = None if found.copy is None else (found.copy, _place_in_memory(found.copy))


def _position(step: int, timesteps: Sequence[float], live: bool = True) -> Position:
    """Return the position of a step; one that leads to the noise has the place of its noise level, in no run."""
    if units.rises(timesteps):
        return Position(len(timesteps) - 1 - step, len(timesteps), scheduled=False)
    return Position(step, len(timesteps), scheduled=live)


def _timesteps(scheduler: Any) -> torch.Tensor | None:
    timesteps = getattr(scheduler, "timesteps", None)
    return timesteps if isinstance(timesteps, torch.Tensor) and timesteps.ndim == 1 and len(timesteps) else None


def _place_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where a tensor is, and how often it was written, if it counts that."""
    return address(tensor), int(tensor.storage_offset()), 0 if tensor.is_inference() else tensor._version


def _on_device(timestep: torch.Tensor | float) -> bool:
    return isinstance(timestep, torch.Tensor) and timestep.device.type != "cpu"


def _counted(scheduler: Any, timesteps: torch.Tensor) -> int | None:
    """Return the scheduler's count of its steps; None where it does not count, or a run is over."""
    if not hasattr(scheduler, "step_index"):
        return None
    begin = getattr(scheduler, "begin_index", None) or 0
    step = begin if scheduler.step_index is None else int(scheduler.step_index)
    return step if step < len(timesteps) else None


def _value(timestep: torch.Tensor | float) -> float | None:
    """Return the value of a timestep, an `int` if it is of such a type; None if it is not the same for the batch."""
    if isinstance(timestep, torch.Tensor):
        values = set() if timestep.is_meta else set(timestep.flatten().tolist())
        return values.pop() if len(values) == 1 else None
    return int(timestep) if isinstance(timestep, Integral) else float(timestep)


def unknown_position(phases: int) -> ElfattError:
    """Return the error for a call whose place in the run cannot be known."""
    needs = f"has {phases} phases" if phases > 1 else "keeps something from step to step"
    return ElfattError(
        f"the denoising step of this call is not known, and the patch {needs}; iterate over "
        "scheduler.timesteps, or give the timestep as a whole number that is the same for the whole batch."
    )
