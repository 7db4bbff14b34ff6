"""Where in the denoising run a call is, resolved on the host without touching the device.

Pipelines iterate over `scheduler.timesteps`; each timestep they hand to the UNet is a view into that tensor, so its
storage offset *is* the index of the call, on any device, for any scheduler (also where a timestep occurs twice, where
a step takes two calls, or where image-to-image starts inside the schedule).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elfatt_sd.config import ElfattError

TRAIN_STEPS = 1000  # of a schedule that is not known, for timesteps that are plain numbers


class Position(NamedTuple):
    """Index of a step in the schedule, and the number of steps of the whole schedule.

    `turn` is the number of the step among those that the run takes, where that is not its index: without a scheduler.
    """

    step: int
    steps: int
    turn: int | None = None


class SchedulerFinder:
    """Looks up a pipeline's scheduler anew, without keeping the pipeline alive.

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
    """Follows the runs of one pipeline.

    Args:
        find_scheduler: returns the scheduler in use now, or None for a bare UNet.
    """

    def __init__(self, find_scheduler: Callable[[], Any]) -> None:
        self._find_scheduler = find_scheduler
        self._run: torch.Tensor | None = None  # holds the storage of the current run, so that its address stays taken
        self._last = -1
        self._turn = -1
        self.runs = 0

    def locate(self, timestep: torch.Tensor | float) -> Position | None:
        """Return the position of a call, or None when only the device knows it.

        Args:
            timestep: what the UNet is called with: a number, or a tensor of one value or of one value per picture.
        """
        timesteps = self._timesteps()
        position = _from_view(timestep, timesteps)
        if position is not None:
            self._follow(position, timestep)
            return position
        position = self._from_value(timestep, timesteps)
        self._follow(position, timesteps)
        return position if position is None or timesteps is not None else position._replace(turn=self._turn)

    def _timesteps(self) -> torch.Tensor | None:
        timesteps = getattr(self._find_scheduler(), "timesteps", None)
        return timesteps if isinstance(timesteps, torch.Tensor) and timesteps.ndim == 1 and len(timesteps) else None

    def _from_value(self, timestep: torch.Tensor | float, timesteps: torch.Tensor | None) -> Position | None:
        value = _host_value(timestep)
        if timesteps is None:
            return None if value is None else Position(max(int(TRAIN_STEPS - 1 - value), 0), TRAIN_STEPS)
        following = self._last + 1 if self._same_run(timesteps) else 0
        counted = getattr(self._find_scheduler(), "step_index", None)
        if value is None or timesteps.device.type != "cpu":  # a copy on the device: count the steps, or else the calls
            return Position(min(following if counted is None else counted, len(timesteps) - 1), len(timesteps))
        matches = [step for step, known in enumerate(timesteps.tolist()) if known == value]
        later = [step for step in matches if step >= following]
        nearest = min(int((timesteps >= value).sum()), len(timesteps) - 1)
        step = later[0] if later else matches[0] if matches else nearest if counted is None else counted
        return Position(step, len(timesteps))

    def _same_run(self, schedule: object) -> bool:
        if not isinstance(schedule, torch.Tensor) or self._run is None:
            return schedule is self._run
        return _address(self._run) == _address(schedule)

    def _follow(self, position: Position | None, schedule: torch.Tensor | float | None) -> None:
        """Count a new run when the schedule is another one or starts again."""
        step = -1 if position is None else position.step
        run = schedule if isinstance(schedule, torch.Tensor) else None
        if self.runs == 0 or step < self._last or not self._same_run(run):
            self.runs += 1
            self._turn = 0
        elif step > self._last:
            self._turn += 1
        self._run, self._last = run, step


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _from_view(timestep: torch.Tensor | float, timesteps: torch.Tensor | None) -> Position | None:
    """Read the index off the storage that a timestep is a view of."""
    if not isinstance(timestep, torch.Tensor) or (timestep.numel() > 1 and any(timestep.stride())):
        return None
    if timesteps is not None and _address(timestep) == _address(timesteps):
        return Position(int(timestep.storage_offset() - timesteps.storage_offset()), len(timesteps))
    size = timestep.untyped_storage().nbytes() // timestep.element_size()
    return Position(int(timestep.storage_offset()), size) if size > 1 else None


def _host_value(timestep: torch.Tensor | float) -> float | None:
    """Return the value of a timestep if the host has it and it is the same for the whole batch."""
    if not isinstance(timestep, torch.Tensor):
        return float(timestep)
    if timestep.device.type != "cpu":
        return None
    values = set(timestep.flatten().tolist())
    return float(values.pop()) if len(values) == 1 else None


def unknown_position(phases: int) -> ElfattError:
    """Return the error for a call whose place in the run cannot be known."""
    needs = f"has {phases} phases" if phases > 1 else "keeps something from step to step"
    return ElfattError(
        f"the denoising step of this call is not known, and the patch {needs}; iterate over "
        "scheduler.timesteps, or give the timestep as a number that is the same for the whole batch."
    )
