"""Where in the denoising run a call is: units of timesteps, runs over schedules, and the lookup."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elfatt_sd.devices import written
from elfatt_sd.families.base import FRACTION, RISING

KEPT = 8  # runs of one thread that may go on, as of requests that a server interleaves
_PASSED_OVER = ("elfatt_sd", "torch")  # packages whose functions hold no scheduler of their own
_MOST_ENTRIES = 256  # of a container that are looked at
_PLAIN = {int, float, str, bool, type(None), torch.Tensor, FunctionType, BuiltinFunctionType, MethodType, type}
_TRAIN_STEPS = 1000  # of a schedule that is not known
_SHORTEST = 3  # steps that make a tensor without a scheduler a schedule
_LARGEST_NOISE = 100.0  # level of the noise in latents: what is above is a timestep
_CLOSE = 1e-4  # relative difference of two values that are the same


class Run:
    """A run over a schedule, as far as its steps follow each other one by one."""

    scheduler: weakref.ref[Any] | None = None  # the one whose schedule it is; None where no scheduler has it
    steps = 0  # of its schedule
    calls = calls_before = 0  # of its latest step, and of the step before
    copy: tuple[torch.Tensor, tuple[int, ...]] | None = None  # latest timestep on a device, and its place in memory
    limit: float | None = None  # GiB that kept differences may take, where the user gives none; None until one is

    def __init__(self, schedule: Any = None, first: int = -1) -> None:
        # the storage of the timesteps, by which they are known as long as anybody holds them
        self.schedule = None if schedule is None else StorageWeakRef(schedule.untyped_storage())  # type: ignore[no-untyped-call]
        self._address = 0 if schedule is None else address(schedule)
        self.first = self.step = first  # the step that it began with, and its latest one
        self.kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the `Memory` of each denoiser

    @property
    def may_go_on(self) -> bool:
        return self.schedule is not None and not self.schedule.expired()  # type: ignore[no-untyped-call]

    def is_over(self, schedule: Any) -> bool:
        return self.may_go_on and self._address == address(schedule)

    def goes_on(self, schedule: Any, step: int) -> bool:
        return self.is_over(schedule) and self.step <= step <= self.step + 1


def address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()  # type: ignore[no-any-return]


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
    """A position, and how it was found."""

    position: Position  # of the call
    schedule: torch.Tensor | None = None  # a tensor in the storage of the schedule
    scheduler: Any = None  # whose schedule it is; None where no scheduler has it
    copy: torch.Tensor | None = None  # the timestep, where the scheduler's counter told its step


class Schedule:
    """Follows the runs of one pipeline, of all its denoisers, in each thread.

    Pipelines around one denoiser have schedulers of their own. A timestep is looked up on those of the functions that
    lead to the call, from the innermost outwards, and on the patched pipeline's at last.
    """

    def __init__(self, find_scheduler: Callable[[], Any]) -> None:
        self._find_scheduler = find_scheduler
        self._runs: weakref.WeakKeyDictionary[threading.Thread, list[Run]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._values: tuple[object, list[float]] = None, []  # of a schedule on a device, read once

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule, (self._find_scheduler,)

    @property
    def run(self) -> Run:
        """The run that the latest call of this thread on a schedule belongs to."""
        return self._mine[-1]

    @property
    def _mine(self) -> list[Run]:
        """The runs of this thread, one for each schedule, the latest last."""
        with self._lock:
            return self._runs.setdefault(threading.current_thread(), [Run()])

    def _run_over(self, schedule: Any) -> Run:
        return next((run for run in reversed(self._mine) if run.is_over(schedule)), self.run)

    def locate(self, timestep: torch.Tensor | float, unit: int | None = None) -> Position | None:
        """Return the step and the number of steps that a denoiser's timestep is of; None where no schedule has it."""
        found = self._from_view(timestep, unit)
        if found is None and not _on_device(timestep):
            found = self._from_value(timestep, unit)
        elif found is None and not torch.is_grad_enabled():  # in training, it is drawn
            found = self._from_copy(timestep, unit)
        if found is None:
            return None
        self._follow(found)
        return found.position

    def _known(self) -> Iterator[list[tuple[Any, torch.Tensor]]]:
        for held in itertools.chain(schedulers_of_callers(), [[self._find_scheduler()]]):
            yield [(scheduler, steps) for scheduler in held if (steps := _timesteps(scheduler)) is not None]

    def _from_view(self, timestep: torch.Tensor | float, unit: int | None) -> _Found | None:
        """Read the index off the storage that a timestep is a view of."""
        if not isinstance(timestep, torch.Tensor) or (timestep.numel() > 1 and any(timestep.stride())):
            return None
        length = timestep.untyped_storage().nbytes() // timestep.element_size()
        if length < 2 and not _on_device(timestep):  # a value alone; a schedule of one step is found by it
            return None
        run, step = self._run_over(timestep), int(timestep.storage_offset())
        scheduler = run.scheduler() if run.scheduler is not None and run.is_over(timestep) else None
        own = _timesteps(scheduler)
        if own is None or address(own) != address(timestep):
            if run.goes_on(timestep, step):  # nothing is read any more
                return _Found(Position(step, run.steps), timestep)
            # it may well be no view
            known = itertools.chain.from_iterable(itertools.islice(self._known(), 1 if length < 2 else None))
            scheduler, own = next((pair for pair in known if address(pair[1]) == address(timestep)), (None, None))
        if own is not None:
            step, between = divmod(step - int(own.storage_offset()), own.stride(0))
            if between or not 0 <= step < len(own):
                return None
            if run.goes_on(own, step):
                return _Found(Position(step, len(own)), own, scheduler)
            return _Found(_position(step, self._on_host(own)), own, scheduler)
        if length >= _SHORTEST and not timestep.is_meta:
            values = self._on_host(timestep.new_empty(0).set_(timestep.untyped_storage()))
            length = _schedule_length([1 - value for value in values] if unit == RISING else values)
        return _Found(Position(step, length), timestep) if length >= _SHORTEST and step < length else None

    def _on_host(self, timesteps: torch.Tensor) -> list[float]:
        if timesteps.device.type == "cpu":
            return timesteps.tolist()
        if self._values[0] != (state := written(timesteps)):
            self._values = state, timesteps.tolist()
        return self._values[1]

    def _from_value(self, timestep: Any, unit: int | None) -> _Found | None:
        """Look a value up on the schedules that are known; find the place of one that is on none."""
        value = _value(timestep)
        if value is None:
            return None
        half = isinstance(timestep, torch.Tensor) and timestep.dtype in (torch.float16, torch.bfloat16)
        rounding = torch.finfo(timestep.dtype).eps if half else 0.0
        best, agrees = None, -1
        for group in self._known():
            for scheduler, timesteps in group:
                found = self._on_schedule(value, rounding, scheduler, timesteps, unit)
                if found is not None and (more := self._agreement(found)) > agrees:
                    best, agrees = found, more
            if agrees > 1:  # it is this function's
                break
        if best is not None:
            return best
        # its place among all timesteps that a model was trained on, from the noisiest one
        steps = _train_steps(next((scheduler for group in self._known() for scheduler, _ in group), None))
        if unit is not None:  # a fraction of the run
            value = steps * (value if unit == FRACTION else 1 - value)
        known = unit is not None or isinstance(value, int) or value > _LARGEST_NOISE
        if not known or not 0 <= value < steps + (unit is not None):
            return _Found(BEYOND)
        return _Found(Position(int(steps - 1 - value) if value < steps - 1 else 0, steps, scheduled=False))

    def _on_schedule(
        self, value: float, rounding: float, scheduler: Any, timesteps: torch.Tensor, unit: int | None
    ) -> _Found | None:
        known, run = self._on_host(timesteps), self._run_over(timesteps)
        levels, whole = known, _train_steps(scheduler) if max(known) > 2 else 1
        if unit is not None:
            levels = [level / whole if unit == FRACTION else 1 - level / whole for level in known]
        cut, close = isinstance(value, int) and value > 1, max(_CLOSE, rounding)  # a level without its fraction
        steps = [
            step
            for step, level in enumerate(levels)
            if math.isclose(level, value, rel_tol=close, abs_tol=_CLOSE / 10) or (cut and int(level) == value)
        ]
        if not steps:
            return None
        counted = _counted(scheduler, timesteps) if rounding and len(steps) > 1 else None
        if counted in steps:
            step = counted
        elif run.is_over(timesteps) and run.step in steps and run.calls < run.calls_before:
            step = run.step
        else:
            step = next((step for step in steps if run.is_over(timesteps) and step > run.step), steps[0])
        return _Found(_position(step, known, _is_set(scheduler, timesteps)), timesteps, scheduler)

    def _agreement(self, found: _Found) -> int:
        """Tell how well a step agrees with what its scheduler has come to: 3 by its count, 2 by its run, 1 not."""
        step, schedule, scheduler = found.position.step, found.schedule, found.scheduler
        if schedule is None or not _is_set(scheduler, schedule):
            return 0
        if _counted(scheduler, schedule) == step:
            return 3
        steps_by_itself = getattr(scheduler, "step_index", None) is not None
        return 2 if not steps_by_itself and self._run_over(schedule).goes_on(schedule, step) else 1

    def _from_copy(self, timestep: Any, unit: int | None) -> _Found | None:
        for group in self._known():
            on = [pair for pair in group if _is_set(*pair) and _counted(*pair) is not None]
            run = self._run_over(on[0][1]) if len(on) == 1 else None
            if run is not None and run.copy is not None and run.is_over(on[0][1]):
                (scheduler, timesteps), counted = on[0], _counted(*on[0])
                if counted == run.step + (run.copy[1] != _place_in_memory(timestep)):
                    return _Found(Position(counted, len(timesteps)), timesteps, scheduler, timestep)
            if on:
                break
        if all(_counted(*pair) is None for group in self._known() for pair in group):
            return None
        found = self._from_value(timestep, unit)
        if found is None or found.schedule is None or not found.position.scheduled:
            return found
        begins = _counted(found.scheduler, found.schedule) == found.position.step
        return found._replace(copy=timestep) if begins else found

    def _follow(self, found: _Found) -> None:
        (step, steps, scheduled), schedule = found.position, found.schedule
        if not scheduled:  # a preview between two steps does not end their run
            return
        run = self._run_over(schedule)
        if not run.goes_on(schedule, step):
            run = self._next_run(schedule, step)
        others = [other for other in self._mine if other.may_go_on and not other.is_over(schedule)]
        self._mine[:] = [*others[1 - KEPT :], run]
        if step != run.step:
            run.calls_before, run.calls = run.calls, 0
        run.step, run.steps = step, steps
        run.calls += 1
        run.copy = None if found.copy is None else (found.copy, _place_in_memory(found.copy))
        run.scheduler = None if found.scheduler is None else weakref.ref(found.scheduler)

    def _next_run(self, schedule: Any, step: int) -> Run:
        """Return the run that goes on with a step: of another thread, or a new one."""
        with self._lock:  # an executor hands steps to any of its threads
            for runs in self._runs.values():
                run = next((run for run in runs if run.is_over(schedule) and run.step + 1 == step), None)
                if run is not None:
                    runs[:] = [other for other in runs if other is not run] or [Run()]
                    return run
        return Run(schedule, step)


def _position(step: int, timesteps: Sequence[float], live: bool = True) -> Position:
    if timesteps[0] < timesteps[-1]:  # they lead to the noise
        return Position(len(timesteps) - 1 - step, len(timesteps), scheduled=False)
    return Position(step, len(timesteps), scheduled=live)


def _timesteps(scheduler: Any) -> torch.Tensor | None:
    timesteps = getattr(scheduler, "timesteps", None)
    return timesteps if isinstance(timesteps, torch.Tensor) and timesteps.ndim == 1 and len(timesteps) else None


def _place_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    return address(tensor), int(tensor.storage_offset()), 0 if tensor.is_inference() else tensor._version


def _is_set(scheduler: Any, timesteps: torch.Tensor) -> bool:
    unset = None if len(timesteps) == _train_steps(scheduler) else len(timesteps)
    return getattr(scheduler, "num_inference_steps", unset) is not None


def _on_device(timestep: torch.Tensor | float) -> bool:
    return isinstance(timestep, torch.Tensor) and timestep.device.type != "cpu"


def _counted(scheduler: Any, timesteps: torch.Tensor) -> int | None:
    if not hasattr(scheduler, "step_index"):
        return None
    begin = getattr(scheduler, "begin_index", None) or 0
    step = begin if scheduler.step_index is None else int(scheduler.step_index)
    return step if step < len(timesteps) else None


def _value(timestep: torch.Tensor | float) -> float | None:
    if isinstance(timestep, torch.Tensor):
        values = set() if timestep.is_meta else set(timestep.flatten().tolist())
        return values.pop() if len(values) == 1 else None
    return int(timestep) if isinstance(timestep, Integral) else float(timestep)


def schedulers_of_callers() -> Iterator[list[Any]]:
    """Yield the schedulers that each function on the way to this call holds, from the innermost outwards.

    They are what its variables are, or what these hold, as pipelines, lists and other objects do.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PASSED_OVER:
            names, code = frame.f_locals, frame.f_code
            values = list(names.values())
            if code.co_flags & inspect.CO_OPTIMIZED:  # a function, not a module
                if isinstance(names, dict) and sys.getrefcount(names) <= 3:  # up to Python 3.12, the frame keeps a copy
                    names.clear()
                values += [frame.f_globals[name] for name in code.co_names if name in frame.f_globals]
            held = {id(found): found for value in values for found in _schedulers_in(value)}
            if held:
                yield list(held.values())
        frame = frame.f_back


def _schedulers_in(value: Any, depth: int = 2) -> Iterator[Any]:
    kind, parts = type(value), list[Any]()
    if kind in _PLAIN:
        return
    if hasattr(kind, "set_timesteps"):
        yield value
    elif not depth:
        return
    elif issubclass(kind, dict):
        parts = list(dict.values(value))
    elif issubclass(kind, list | tuple):
        parts = list(itertools.islice(value, _MOST_ENTRIES))
    elif not inspect.ismodule(value):
        with contextlib.suppress(AttributeError):
            held = object.__getattribute__(value, "__dict__")
            parts = list(held.values()) if type(held) is dict else []
    for each in parts[:_MOST_ENTRIES]:
        yield from _schedulers_in(each, depth - 1)


def _train_steps(scheduler: Any) -> int:
    return int(getattr(getattr(scheduler, "config", None), "num_train_timesteps", None) or _TRAIN_STEPS)


def _schedule_length(values: Sequence[float]) -> int:
    """Return the steps of a tensor that is not a scheduler's; 0 if it does not fall from the top of the noise.

    A zero at the end of fractions is where the last step leads, and no step.
    """
    top = 1.0 if values[0] < _SHORTEST else float(_TRAIN_STEPS)
    steps, slack = len(values) - (list(values).count(0) if top == 1 else 0), top / _TRAIN_STEPS  # for rounding
    lowest = (steps - 1) * (_TRAIN_STEPS // max(steps, 1)) - 1
    begins = lowest * slack <= values[0] <= top + slack
    falls = all(before - after > -slack for before, after in itertools.pairwise(values))
    return steps if begins and falls and values[-1] < values[0] else 0
