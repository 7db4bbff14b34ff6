"""Which step a value is: copies, other units, values on no schedule, loops of ones own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import IDS, SCHEDULERS, place, scheduler, steps

from elfatt_sd.families.base import FRACTION, RISING
from elfatt_sd.runtime import schedule as module
from elfatt_sd.runtime.schedule import BEYOND, Position, Schedule

Found = list[Position | None]
DDIM, EULER, HEUN = "DDIMScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler"


def set_up(name: str = EULER, steps: int = 10, **extra: Any) -> Any:
    chosen = scheduler(name, extra)
    chosen.set_timesteps(steps)
    return chosen


def of(chosen: Any) -> Schedule:
    return Schedule(lambda: chosen)


def locate(schedule: Schedule, values: Iterable[Any], unit: int | None = None) -> Found:
    return [schedule.locate(value, unit) for value in values]


def runs() -> Iterator[tuple[str, Any, Iterable[Any], Found, int | None]]:
    """A name, a pipeline's own scheduler, values that are handed over in two runs, their places in each, their unit."""
    own = set_up("PNDMScheduler", 5, skip_prk_steps=True, steps_offset=1)
    yield "one value twice", own, map(int, own.timesteps), steps(6), None
    own = set_up(HEUN, 6)
    yield "two calls a step", own, (int(each) for each in own.timesteps for _ in range(2)), steps(11, calls=2), None
    for name in (DDIM, EULER, HEUN):  # a loop of ones own, on a scheduler that is never stepped
        yield f"noise levels, {name}", set_up(name), (14.2, 9.1, 5.0, 2.3, 0.9, 0.2), [BEYOND] * 6, None
    own = diffusers.DDIMInverseScheduler(**tiny.SD15_SCHEDULE)
    own.set_timesteps(10)
    backwards: Found = [Position(9 - step, 10, False) for step in range(10)]
    for name, values in (("tensors", own.timesteps), ("numbers", map(int, own.timesteps))):
        yield f"rising {name}", own, values, backwards, None
    # what a loop of ones own does before and between the timesteps that a scheduler is left
    for name, kept, beside in (("the end", slice(4, None), 2), ("every second one", slice(None, None, 2), 1)):
        own = set_up(DDIM)
        every, own.timesteps = own.timesteps, own.timesteps[kept]
        found = [*steps(len(own.timesteps)), place(int(every[beside]))]
        yield f"a part, {name}", own, [*own.timesteps, every[beside]], found, None
    even, flow = torch.linspace(999, 1, 10), torch.linspace(1, 0.1, 10)
    for name, values in {
        "even": even,
        "whole": even.long(),
        "align-your-steps": torch.tensor([999, 850, 736, 645, 545, 455, 343, 233, 124, 24]),
        "few": torch.tensor([999, 749, 499, 249]),
        "a shifted flow": 12 * flow / (1 + 11 * flow) * 1000,
        "fractions": torch.linspace(1, 0, 11)[:-1],
    }.items():
        yield f"{name}, without a scheduler", None, values, steps(len(values)), None
    for unit, values in ((FRACTION, flow), (RISING, 1 - flow)):
        yield f"unit {unit}, without a scheduler", None, (value.expand(2) for value in values), steps(10), unit


@pytest.mark.parametrize("name", [name for name, *_ in runs()])
def test_where_every_value_of_a_run_is(name: str) -> None:
    # no other schedulers may be held here: those of callers are looked at
    own, values, expected, unit = next(rest for other, *rest in runs() if other == name)
    schedule, values = of(own), list(values)
    for _ in range(2):
        assert locate(schedule, values, unit) == expected


def test_a_timestep_on_no_schedule_has_the_place_of_its_noise_level() -> None:
    """As in training, or in score distillation; whatever step the scheduler has come to; in another unit, none."""
    for value in (0.3, -1.25, 1.15, 14.6, 1000, 1e9, math.nan, math.inf):
        assert of(None).locate(value) == BEYOND
    names = (DDIM, "DPMSolverMultistepScheduler", EULER, "UniPCMultistepScheduler", "IPNDMScheduler")
    for name, index in itertools.product(names, (None, 4, 10)):  # none yet, that of a run broken off, the end
        chosen = diffusers.IPNDMScheduler() if name.startswith("IPNDM") else scheduler(name, {"steps_offset": 1})
        chosen.set_timesteps(10)
        schedule, chosen._step_index = of(chosen), index
        before = chosen.timesteps[: index or 0]
        assert locate(schedule, before) == steps(10)[: len(before)]
        found = locate(schedule, (437, torch.tensor([437, 437]), 437.26, torch.tensor(437.26), 5, 5000, 0.0123, -3.7))
        assert found == [*[place(437)] * 2, *[place(437.26)] * 2, place(5), *[BEYOND] * 3]
        assert index != 4 or schedule.locate(chosen.timesteps[4]) == Position(4, 10), "it can go on"
    chosen = flow(8)
    between = float(chosen.timesteps[2] + chosen.timesteps[3]) / 2000
    beside = of(chosen).locate(torch.tensor([between]), FRACTION)
    assert beside is not None and not beside.scheduled


class Copies:
    """Timesteps that only a device knows, and what was read of them."""

    def __init__(self) -> None:
        self.read: list[Any] = []
        self.known: dict[int, tuple[torch.Tensor, Any]] = {}
        self.plain = module._value

    def value(self, given: Any) -> Any:
        if id(given) not in self.known:
            return self.plain(given)
        self.read.append(self.known[id(given)][1])
        return self.read[-1]

    def of(self, value: Any, place: int = 0) -> torch.Tensor:
        """Return a copy, one of two places in memory."""
        copy = torch.empty(2, device="meta")[place]
        self.known[id(copy)] = copy, value
        return copy


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    made = Copies()
    monkeypatch.setattr(module, "_value", made.value)
    with torch.no_grad():
        yield made


def test_a_copy_on_the_device_is_of_the_schedulers_step(copies: Copies) -> None:
    """Where the scheduler counts, and a run is going on; a step may take several calls. The first copy is read."""
    chosen = set_up(steps=5)
    schedule, located = of(chosen), []
    for index, timestep in enumerate(chosen.timesteps.tolist()):
        chosen._step_index = index or None
        copy = copies.of(timestep, index % 2)
        located += locate(schedule, (copy, copy, -0.123))  # the last of its own making
    assert located == [place for i in range(5) for place in (Position(i, 5), Position(i, 5), BEYOND)]
    assert copies.read == [chosen.timesteps[0]]
    chosen._step_index = 5
    assert schedule.locate(copies.of(1.0)) is None, "the run is over"
    assert of(scheduler(DDIM, {})).locate(copies.of(1)) is None
    chosen._step_index = 2
    with torch.enable_grad():
        assert schedule.locate(copies.of(1.0)) is None, "in training"


def test_a_copy_that_is_not_of_the_counted_step_is_read(copies: Copies) -> None:
    """In a loop that does not call the scheduler's step, one buffer or several; after a run that was broken off."""
    chosen = set_up(steps=5)
    values, buffer, schedule, located = chosen.timesteps.tolist(), copies.of(None), of(chosen), []
    for timestep in values:
        buffer.zero_()  # writes it, as far as PyTorch knows
        copies.known[id(buffer)] = buffer, timestep
        located += locate(schedule, (buffer, buffer))
    assert [each and each.step for each in located] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert locate(of(chosen), (copies.of(value, i % 2) for i, value in enumerate(values))) == steps(5)
    schedule = of(chosen)
    locate(schedule, chosen.timesteps[:3])
    chosen._step_index = 3
    assert schedule.locate(copies.of(437)) == place(437)
    assert schedule.locate(copies.of(None)) is None, "another for each image"
    assert schedule.locate(chosen.timesteps[3]) == Position(3, 5) and schedule.run.first == 0


def test_the_device_is_read_once_a_run_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, (first, *others) = of(chosen := set_up(DDIM, 4)), chosen.timesteps.unbind()

    def forbidden(*args: Any) -> Any:
        raise AssertionError("a value was read off the device")

    assert schedule.locate(first) == Position(0, 4)
    for name in ("item", "tolist", "__int__", "__float__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    assert locate(schedule, others) == steps(4, first=1)


def test_what_is_no_schedule() -> None:
    """As batches drawn for training, sorted or not; noise levels; one value."""
    drawn = ([3, 12, 437, 990], [437, 12, 990, 3], [600, 400, 200, 100], [990] * 3)
    for values in (range(1000), *drawn, [14.2, 9.1, 5.0, 2.3, 0.9, 0.2]):
        schedule = of(None)
        for timestep in torch.tensor(values)[:6]:
            value = timestep.item()
            assert schedule.locate(timestep) == (BEYOND if type(value) is float else place(value))
        assert schedule.run.first < 0, "no run began"
    rising, schedule = [99, 199, 299, 399, 499, 599, 699, 799, 899, 999], of(set_up(DDIM))  # to the noise
    found = locate(schedule, torch.tensor(rising))
    assert not any(each and each.step < 500 for each in found[:3] if each and each.steps == 1000)
    assert schedule.run.step <= 0 or len({*found}) == 10


@pytest.mark.parametrize(("name", "extra"), SCHEDULERS, ids=IDS)
def test_the_timesteps_of_another_scheduler_are_a_schedule(name: str, extra: dict[str, Any]) -> None:
    """As those of a second pipeline around the same UNet; also from the middle on, as for image to image."""
    for count, own in itertools.product((4, 7, 50), (scheduler(DDIM, {}), None)):
        other, schedule = set_up(name, count, **extra), of(own)
        calls = len(other.timesteps)
        for first in (0, calls // 2):
            assert locate(schedule, other.timesteps[first:]) == steps(calls, first)


def test_a_value_on_no_schedule_does_not_end_a_run() -> None:
    """In the run of another scheduler."""
    chosen, other = set_up(DDIM), set_up(DDIM, 20)
    schedule, runs = of(chosen), set()
    for timestep in other.timesteps:
        schedule.locate(timestep)
        runs.add(schedule.run)
        schedule.locate(437)
    assert len(runs) == 1


# Flow-matching pipelines hand over scaled, turned, expanded and rounded timesteps.

Handed = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
HANDED: dict[str, tuple[Handed, int | None]] = {
    "fraction (Flux, Qwen-Image)": (lambda t, dtype: t.expand(2).to(dtype) / 1000, FRACTION),
    "what is left (Z-Image)": (lambda t, dtype: (1000 - t.expand(2)) / 1000, RISING),
    "what is left, rounded": (lambda t, dtype: ((1000 - t.expand(2)) / 1000).to(dtype), RISING),
    "view (Wan, LTX, SD 3)": (lambda t, dtype: t.expand(2), None),
    "copy (HunyuanVideo)": (lambda t, dtype: t.expand(2).to(dtype), None),
    "copies of one (Wan I2V)": (lambda t, dtype: t[None].repeat(2).to(dtype), None),
}


def flow(count: int, shift: float = 3.0) -> Any:
    chosen = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    chosen.set_timesteps(count)
    return chosen


@pytest.mark.parametrize(("handed", "unit"), HANDED.values(), ids=HANDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_call_of_a_flow_has_its_step(handed: Handed, unit: int | None, dtype: torch.dtype) -> None:
    """In one call a step or two; also where image to image begins inside, or another run was broken off before."""
    for (count, shift), calls in itertools.product(((1, 3), (4, 1), (8, 3), (28, 3), (50, 1), (50, 12)), (1, 2)):
        chosen = flow(count, shift)
        for first, last in ((0, 9), (0, None), (count // 2, None)):
            chosen.set_timesteps(count)
            chosen.set_begin_index(first)
            schedule, sample, found = of(chosen), torch.zeros(1, 2), Found()
            for t in chosen.timesteps[first:last]:
                found += locate(schedule, (handed(t, dtype) for _ in range(calls)), unit)
                sample = chosen.step(torch.zeros(1, 2), t, sample).prev_sample
            assert found == steps(count, first, calls)[: last and last * calls]
