"""Runs over schedules: which one a call goes on with, also where several are interleaved or change their thread."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

KEPT = 8  # runs of one thread that may go on, as of requests that a server interleaves


class Run:
    """A run over a schedule, as far as its steps follow each other one by one."""

    def __init__(self, schedule: Any = None, first: int = -1) -> None:
        # the storage of the timesteps, by which they are known as long as anybody holds them; None for a call on no
        # schedule
        self.schedule = None if schedule is None else StorageWeakRef(schedule.untyped_storage())  # type: ignore[no-untyped-call]
        self._address = 0 if schedule is None else address(schedule)
        # first: step that it began with
        # step: its latest step
        self.first = self.step = first
        self.steps = 0  # of its schedule
        # a weak reference to the one whose schedule it is; None where no scheduler has it
        self.scheduler: weakref.ref[Any] | None = None
        self.unit: int | None = None  # which of `timesteps.other_units` its pipeline hands over; None for timesteps
        # calls: of its latest step
        # calls_before: of the step before
        self.calls = self.calls_before = 0
        # its latest timestep, where the scheduler's counter told its step, and its place in memory
        self.copy: tuple[torch.Tensor, tuple[int, ...]] | None = None
        self.former: Run | None = None  # a run over the same schedule that this one has broken into, and that may go on
        self.strange: object = None  # a schedule on which a value of this thread was in no unit that is known
        # what denoisers keep from step to step, by denoiser
        self.kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # GiB that the differences among it may take, where the user gives none; None until some are planned
        self.limit: float | None = None

    @property
    def may_go_on(self) -> bool:
        return self.schedule is not None and not self.schedule.expired()  # type: ignore[no-untyped-call]

    def is_over(self, schedule: Any) -> bool:
        return self.may_go_on and self._address == address(schedule)

    def goes_on(self, schedule: Any, step: int) -> bool:
        return self.is_over(schedule) and self.step <= step <= self.step + 1

    def advance(self, step: int) -> None:
        """Count a call; a run that goes on by itself forgets the one that it has broken into."""
        if step != self.step:
            self.former = None
            self.calls_before, self.calls = self.calls, 0
        self.step = step
        self.calls += 1


class Runs:
    """The runs of each thread, one for each schedule, the latest last."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[threading.Thread, list[Run]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def threads(self) -> int:
        """Number of threads that have any."""
        return len(self._of)

    @property
    def _mine(self) -> list[Run]:
        with self._lock:
            return self._of.setdefault(threading.current_thread(), [Run()])

    @property
    def latest(self) -> Run:
        """The run of this thread's latest call on a schedule."""
        return self._mine[-1]

    def over(self, schedule: Any) -> Run:
        return next((run for run in reversed(self._mine) if run.is_over(schedule)), self.latest)

    def follow(self, schedule: Any, step: int) -> Run:
        run = self.over(schedule)
        if not run.goes_on(schedule, step):
            run = self._taken_over(schedule, step) or _begun(run if run.is_over(schedule) else None, schedule, step)
        others = [other for other in self._mine if other.may_go_on and not other.is_over(schedule)]
        self._mine[:] = [*others[1 - KEPT :], run]
        return run

    def _taken_over(self, schedule: Any, step: int) -> Run | None:
        """Take the run that goes on with a step from another thread, as an executor hands steps to any of them."""
        with self._lock:
            for runs in self._of.values():
                run = next((run for run in runs if run.is_over(schedule) and run.step + 1 == step), None)
                if run is not None:
                    runs[:] = [other for other in runs if other is not run] or [Run()]
                    return run
        return None


def _begun(before: Run | None, schedule: Any, step: int) -> Run:
    former = None if before is None else before.former
    if former is not None and former.step + 1 == step:
        return former
    run = Run(schedule, step)
    if before is not None:
        run.former = before if before.step < before.steps - 1 else None  # it is not at its end
        before.former = None
    return run


def address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()  # type: ignore[no-any-return]
