"""Where in the denoising run a call is, resolved on the host without touching the device.

Pipelines iterate over `scheduler.timesteps`; each timestep they hand to the UNet is a view into that tensor, so its
storage offset *is* the index of the call, on any device, for any scheduler (also where a timestep occurs twice, where
a step takes two calls, or where image-to-image starts inside the schedule).

What is no such view is looked up by its value: among the timesteps, or among what else pipelines hand over (noise
levels, their logarithms, fractions of the run). A value that is on no schedule has a place by its noise level, but
belongs to no run: nothing is carried over from another call.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elfatt_sd.config import ElfattError

TRAIN_STEPS = 1000  # of a schedule that is not known, for timesteps that are plain numbers
SHORTEST = 3  # steps that make a tensor without a scheduler a schedule
_CLOSE = 1e-4  # relative difference of two values that are the same


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


class Run:
    """A run over a schedule, as far as its steps follow each other one by one.

    Attributes:
        first: step that it began with.
        step: its latest step.
        parametrisation: which of `_parametrisations` its pipeline hands over; None for timesteps.
        kept: what denoisers keep from step to step, by denoiser.
    """

    def __init__(self, schedule: object = None, first: int = -1) -> None:
        """Begin a run.

        Args:
            schedule: the storage of the timesteps, held so that its address stays taken; None for a call on no
                schedule.
            first: its first step.
        """
        self.schedule = schedule
        self.first = self.step = first
        self.parametrisation: int | None = None
        self.kept: dict[int, Any] = {}

    def is_over(self, schedule: object) -> bool:
        """Tell whether it is a run over a schedule."""
        return self.schedule is not None and _address(self.schedule) == _address(schedule)

    def goes_on(self, schedule: object, step: int) -> bool:
        """Tell whether a call belongs to it: of the same schedule, in the same step or the next one."""
        return self.is_over(schedule) and self.step <= step <= self.step + 1


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
    """Follows the runs of one pipeline, one in each thread.

    Args:
        find_scheduler: returns the scheduler in use now, or None for a bare UNet.
        trained_on_noise_levels: whether the model takes noise levels, which have no place without a scheduler.
    """

    def __init__(self, find_scheduler: Callable[[], Any], trained_on_noise_levels: bool = False) -> None:
        self._find_scheduler = find_scheduler
        self._noise_levels = trained_on_noise_levels
        self._runs: weakref.WeakKeyDictionary[threading.Thread, Run] = weakref.WeakKeyDictionary()
        self._values: tuple[object, list[float]] | None = None  # of a schedule on a device, read once

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without the runs, which are those of this object's threads."""
        return Schedule, (self._find_scheduler, self._noise_levels)

    @property
    def run(self) -> Run:
        """The run that the latest call of this thread on a schedule belongs to."""
        return self._runs.setdefault(threading.current_thread(), Run())

    def locate(self, timestep: torch.Tensor | float) -> Position | None:
        """Return the position of a call.

        Args:
            timestep: what the UNet is called with: a number, or a tensor of one value or of one value per image.

        Returns:
            The position; `BEYOND` for a value in a unit that is not known; None for what only the device knows, or what
            differs within the batch.
        """
        scheduler = self._find_scheduler()
        timesteps = _timesteps(scheduler)
        position, schedule = self._from_view(timestep, timesteps)
        if position is None:
            value = _host_value(timestep)
            schedule = timesteps
            if value is not None:
                position = self._from_value(value, timesteps, scheduler) or BEYOND
            elif _may_be_a_copy(timestep):
                position = _from_counter(scheduler, timesteps)
        self._follow(position, schedule)
        return position

    def _from_view(
        self, timestep: torch.Tensor | float, timesteps: torch.Tensor | None
    ) -> tuple[Position | None, torch.Tensor | None]:
        """Read the index off the storage that a timestep is a view of; return that storage's tensor, too."""
        if not isinstance(timestep, torch.Tensor) or (timestep.numel() > 1 and any(timestep.stride())):
            return None, None
        if timesteps is not None and _address(timestep) == _address(timesteps):
            return Position(int(timestep.storage_offset() - timesteps.storage_offset()), len(timesteps)), timesteps
        size = timestep.untyped_storage().nbytes() // timestep.element_size()
        if size < SHORTEST or not (self.run.goes_on(timestep, int(timestep.storage_offset())) or self._falls(timestep)):
            return None, None
        return Position(int(timestep.storage_offset()), size), timestep

    def _falls(self, timestep: torch.Tensor) -> bool:
        """Tell whether the tensor that a timestep is a view of is a schedule: its values only fall, or only rise."""
        if timestep.device.type == "meta":
            return True
        values = self._on_host(timestep.new_empty(0).set_(timestep.untyped_storage()))
        return values in (sorted(values), sorted(values, reverse=True)) and values[0] != values[-1]

    def _on_host(self, timesteps: torch.Tensor) -> list[float]:
        """Return the values of a schedule; one on a device is read once."""
        if timesteps.device.type == "cpu":
            return timesteps.tolist()
        if self._values is None or self._values[0] is not timesteps:
            self._values = timesteps, timesteps.tolist()
        return self._values[1]

    def _from_value(self, value: float, timesteps: torch.Tensor | None, scheduler: Any) -> Position | None:
        if timesteps is None:
            return _place(value, TRAIN_STEPS) if value.is_integer() and not self._noise_levels else None
        known = self._on_host(timesteps)
        run, others = self._run_over(timesteps), list(_parametrisations(scheduler, known))
        if run.parametrisation is not None:
            step = self._match(others[run.parametrisation], value, timesteps)
            return Position(_nearest(others[run.parametrisation], value) if step is None else step, len(known))
        step = self._match(known, value, timesteps)
        if step is not None:
            live = getattr(scheduler, "num_inference_steps", len(known)) is not None
            return Position(step, len(known), scheduled=live)
        place = _place(value, _train_steps(scheduler)) if max(known) > 1 else None
        if place is not None and value.is_integer():  # on no schedule, as in training
            return place
        for number, levels in enumerate(others):
            step = self._match(levels, value, timesteps)
            if step is not None:
                run.parametrisation = number
                return Position(step, len(known))
        counted = _from_counter(scheduler, timesteps)
        counted = counted and counted._replace(scheduled=False)  # it may be that of a run which was broken off
        return place or counted if getattr(scheduler, "step_index", None) is None else counted or place

    def _match(self, levels: Sequence[float], value: float, timesteps: torch.Tensor) -> int | None:
        """Return the step of a value, of several the one that follows the latest call of the run."""
        matches = [step for step, level in enumerate(levels) if math.isclose(level, value, rel_tol=_CLOSE)]
        following = self.run.step + 1 if self.run.is_over(timesteps) else 0
        return next((step for step in matches if step >= following), matches[0]) if matches else None

    def _run_over(self, schedule: torch.Tensor) -> Run:
        """Return the run over a schedule that this thread is in, which may be about to begin."""
        if not self.run.is_over(schedule):
            self._runs[threading.current_thread()] = Run(schedule)
        return self.run

    def _follow(self, position: Position | None, schedule: torch.Tensor | None) -> None:
        """Let the run of this thread go on with a call, or begin another one."""
        run = self.run
        if position is None or not position.scheduled:  # a preview between two steps does not end their run
            return
        if run.goes_on(schedule, position.step):
            run.step = position.step
            run.first = position.step if run.first < 0 else run.first
        else:
            begun = Run(schedule, position.step)
            begun.parametrisation = run.parametrisation if run.is_over(schedule) else None
            self._runs[threading.current_thread()] = begun


def _nearest(levels: Sequence[float], value: float) -> int:
    """Return the step whose noise level is nearest, by ratio where all are positive."""
    scale = math.log if min(*levels, value) > 0 else float
    return min(range(len(levels)), key=lambda step: abs(scale(levels[step]) - scale(value)))


def _timesteps(scheduler: Any) -> torch.Tensor | None:
    timesteps = getattr(scheduler, "timesteps", None)
    return timesteps if isinstance(timesteps, torch.Tensor) and timesteps.ndim == 1 and len(timesteps) else None


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()  # type: ignore[no-any-return]


def _train_steps(scheduler: Any) -> int:
    return int(getattr(getattr(scheduler, "config", None), "num_train_timesteps", None) or TRAIN_STEPS)


def _place(value: float, train_steps: int) -> Position | None:
    """Return the place of a timestep among all that a model was trained on; None for what can be no timestep."""
    if not 0 <= value < train_steps or not (value.is_integer() or value > 1):
        return None
    return Position(int(train_steps - 1 - value), train_steps, scheduled=False)


def _parametrisations(scheduler: Any, timesteps: Sequence[float]) -> Iterator[Sequence[float]]:
    """Yield what some pipelines hand to their models in place of timesteps, each as a sequence over the steps."""
    steps = _train_steps(scheduler)
    yield [step / steps for step in timesteps]
    yield [1 - step / steps for step in timesteps]
    for name in ("sigmas", "schedule", "discrete_sigmas"):
        sigmas = getattr(scheduler, name, None)
        if isinstance(sigmas, torch.Tensor) and sigmas.ndim == 1 and len(sigmas) >= len(timesteps):
            falling = sorted(sigmas.tolist(), reverse=True)[: len(timesteps)]
            logarithms = [math.log(sigma) if sigma > 0 else -math.inf for sigma in falling]
            yield falling
            yield [sigma / 2 for sigma in falling]  # KarrasVePipeline
            yield [logarithm / 4 for logarithm in logarithms]  # EDM, and the latent upscaler
            yield logarithms


def _may_be_a_copy(timestep: torch.Tensor | float) -> bool:
    """Tell whether a timestep that only the device knows can be a copy of the scheduler's: in training it is drawn."""
    return isinstance(timestep, torch.Tensor) and timestep.device.type != "cpu" and not torch.is_grad_enabled()


def _from_counter(scheduler: Any, timesteps: torch.Tensor | None) -> Position | None:
    """Return the scheduler's own count of its steps, as long as a run is going on."""
    if timesteps is None or not hasattr(scheduler, "step_index"):
        return None
    begin = getattr(scheduler, "begin_index", None) or 0
    step = begin if scheduler.step_index is None else int(scheduler.step_index)
    return Position(step, len(timesteps)) if step < len(timesteps) else None


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
        "scheduler.timesteps, or give the timestep as a whole number that is the same for the whole batch."
    )
