"""Which step a value is: copies, other units, values on no schedule, loops of ones own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from support import tiny_pipelines as tiny
from support.checks import IDS, SCHEDULERS, place, scheduler

from elfatt_sd.families import base as units
from elfatt_sd.runtime import schedule as module
from elfatt_sd.runtime.schedule import BEYOND, Position, Schedule


def set_up(name: str = "EulerDiscreteScheduler", steps: int = 10, **extra: Any) -> Any:
    chosen = scheduler(name, extra)
    chosen.set_timesteps(steps)
    return chosen


def of(chosen: Any) -> Schedule:
    return Schedule(lambda: chosen)


def steps(count: int, first: int = 0, calls: int = 1) -> list[Position]:
    return [Position(step, count) for step in range(first, count) for _ in range(calls)]


def locate(schedule: Schedule, values: Iterable[Any], unit: int | None = None) -> list[Position | None]:
    return [schedule.locate(value, unit) for value in values]


def test_copied_timesteps_are_found_by_value_in_order() -> None:
    """Also where one value occurs twice, and where a step takes two calls."""
    chosen = set_up("PNDMScheduler", 5, skip_prk_steps=True, steps_offset=1)
    schedule = of(chosen)
    for _ in range(2):
        assert locate(schedule, map(int, chosen.timesteps)) == steps(6)
    chosen = set_up("HeunDiscreteScheduler", 6)
    schedule = of(chosen)
    for _ in range(2):
        assert locate(schedule, [int(each) for each in chosen.timesteps for _ in range(2)]) == steps(11, calls=2)


def test_a_timestep_on_no_schedule_has_the_place_of_its_noise_level() -> None:
    """As in training, or in score distillation; whatever step the scheduler has come to; in another unit, none."""
    for value in (0.3, -1.25, 1.15, 14.6, 1000, 1e9, math.nan, math.inf):
        assert of(None).locate(value) == BEYOND
    assert Schedule(lambda: None, trained_on_noise_levels=True).locate(437) == BEYOND
    names = ("DDIMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler")
    for name, index in itertools.product(names, (None, 3, 10)):  # none yet, that of a run broken off, the end
        chosen = set_up(name, steps_offset=1)
        chosen._step_index = index
        found = locate(of(chosen), (437, torch.tensor([437, 437]), 5, 5000))
        assert found == [place(437), place(437), place(5), BEYOND]


UNITS: dict[str, Callable[[Any, int], Any]] = {
    "fraction": lambda chosen, i: chosen.timesteps[i].item() / 1000,
    "from the end": lambda chosen, i: 1 - chosen.timesteps[i].item() / 1000,
    "noise level": lambda chosen, i: chosen.sigmas[i].item(),
    "quarter of its logarithm": lambda chosen, i: torch.log(chosen.sigmas[i]) * 0.25,
    "a batch of it": lambda chosen, i: torch.full((2,), chosen.sigmas[i].item()),
}


@pytest.mark.parametrize("unit", UNITS)
def test_other_parametrisations_are_known(unit: str) -> None:
    chosen = set_up(steps=20)
    schedule = of(chosen)
    for _ in range(2):
        assert locate(schedule, (UNITS[unit](chosen, i) for i in range(20))) == steps(20)


def test_a_loop_between_timesteps_stays_in_timesteps_to_its_end() -> None:
    """As k-diffusion's samplers work them out of noise levels; the last ones could be noise levels as well."""
    chosen = set_up()
    level, schedule = float(chosen.sigmas[6]), of(chosen)
    values = (910.3, 437.26, 31.2, 12.4, level, 0.7)
    for _ in range(2):
        *found, last = locate(schedule, (*values, 0.0))
        assert found == [place(value) for value in values]
        assert last is not None and last != BEYOND
    assert schedule.locate(-0.7) == BEYOND
    assert schedule.locate(14.2) == BEYOND, "another loop, which may be in noise levels"
    assert of(chosen).locate(level) == Position(6, 10)


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "EulerDiscreteScheduler", "IPNDMScheduler"])
@pytest.mark.parametrize("value", [0.0123, -3.7, 437.26, torch.tensor(437.26), 437, 437.0])
def test_the_counter_of_a_run_that_was_broken_off_places_nothing(name: str, value: Any) -> None:
    """Its own timesteps come before; a value on no schedule has its place, or none."""
    chosen: Any = scheduler(name, {}) if name != "IPNDMScheduler" else diffusers.IPNDMScheduler()
    chosen.set_timesteps(10)
    schedule = of(chosen)
    for timestep in chosen.timesteps[:4]:
        schedule.locate(timestep)
        chosen.step(torch.zeros(1), timestep, torch.zeros(1))
    found = schedule.locate(value)
    assert chosen.step_index == 4
    assert found in (BEYOND, Position(562, 1000, False), Position(561, 1000, False)), "not the fifth of ten steps"
    assert (found == BEYOND) is bool(value < 1)
    assert schedule.locate(chosen.timesteps[4]) == Position(4, 10), "it can go on"
    assert schedule.run.first == 0


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler"])
def test_loops_in_noise_levels(name: str) -> None:
    """Ones own has no place, on a scheduler that is never stepped; the scheduler's end where the last step leads."""
    chosen = set_up(name)
    assert {*locate(of(chosen), (14.2, 9.1, 5.0, 2.3, 0.9, 0.2))} == {BEYOND}
    if name != "DDIMScheduler":
        assert locate(of(chosen), chosen.sigmas[:-1]) == steps(len(chosen.timesteps))


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
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    made = Copies()
    monkeypatch.setattr(module, "_value", made.value)
    return made


@torch.no_grad()
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
    assert of(scheduler("DDIMScheduler", {})).locate(copies.of(1)) is None
    chosen._step_index = 2
    with torch.enable_grad():
        assert schedule.locate(copies.of(1.0)) is None, "in training"


@torch.no_grad()
def test_a_copy_in_a_buffer_is_read_where_the_scheduler_does_not_count(copies: Copies) -> None:
    """A loop of ones own that does not call the scheduler's step."""
    chosen = set_up(steps=5)
    schedule, buffer, located = of(chosen), copies.of(None), []
    for timestep in chosen.timesteps.tolist():
        buffer.zero_()  # writes it, as far as PyTorch knows
        copies.known[id(buffer)] = buffer, timestep
        located += locate(schedule, (buffer, buffer))
    assert [each and each.step for each in located] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@torch.no_grad()
def test_a_copy_on_the_device_that_is_not_of_the_counted_step(copies: Copies) -> None:
    """After a run that was broken off, beside one that goes on, or on a scheduler that is never stepped."""
    chosen = set_up(steps=5)
    values = chosen.timesteps.tolist()
    assert locate(of(chosen), (copies.of(value, i % 2) for i, value in enumerate(values))) == steps(5)
    schedule = of(chosen)
    locate(schedule, chosen.timesteps[:3])
    chosen._step_index = 3
    assert schedule.locate(copies.of(437)) == place(437)
    assert schedule.locate(copies.of(None)) is None, "another for each image"
    assert schedule.locate(chosen.timesteps[3]) == Position(3, 5) and schedule.run.first == 0


def test_the_device_is_read_once_a_run_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, (first, *others) = of(chosen := set_up("DDIMScheduler", 4)), chosen.timesteps.unbind()

    def forbidden(*args: Any) -> Any:
        raise AssertionError("a value was read off the device")

    assert schedule.locate(first) == Position(0, 4)
    for name in ("item", "tolist", "__int__", "__float__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    assert locate(schedule, others) == steps(4, first=1)


def test_what_is_no_schedule() -> None:
    """As batches drawn for training, sorted or not; noise levels; one value; one wide step."""
    drawn = ([3, 12, 437, 990], [437, 12, 990, 3], [990, 437, 12, 3, 2, 1], [600, 400, 200, 100], [990] * 3)
    for values in (range(1000), *drawn, [14.2, 9.1, 5.0, 2.3, 0.9, 0.2], [999, 998, 3]):
        schedule = of(None)
        for timestep in torch.tensor(values)[:6]:
            value = timestep.item()
            assert schedule.locate(timestep) == (BEYOND if type(value) is float else place(value))
        assert schedule.run.first < 0, "no run began"


@pytest.mark.parametrize(("name", "extra"), SCHEDULERS, ids=IDS)
def test_the_timesteps_of_another_scheduler_are_a_schedule(name: str, extra: dict[str, Any]) -> None:
    """As those of a second pipeline around the same UNet; also from the middle on, as for image to image."""
    for count, own in itertools.product((4, 7, 50), (scheduler("DDIMScheduler", {}), None)):
        other, schedule = set_up(name, count, **extra), of(own)
        calls = len(other.timesteps)
        for first in (0, calls // 2):
            assert locate(schedule, other.timesteps[first:]) == steps(calls, first)


def test_schedules_of_ones_own() -> None:
    """Even, of whole numbers, as align-your-steps has them, few, of a shifted flow; and fractions that lead to 0."""
    even, flows = torch.linspace(999, 1, 10), torch.linspace(1, 0.1, 10)
    known = torch.tensor([999, 850, 736, 645, 545, 455, 343, 233, 124, 24])
    own = (even, even.long(), known, torch.tensor([999, 749, 499, 249]), 12 * flows / (1 + 11 * flows) * 1000)
    for timesteps in (*own, torch.linspace(1, 0, 11)[:-1]):
        assert locate(of(None), timesteps) == steps(len(timesteps))


def test_rising_timesteps_have_the_place_of_their_noise_level() -> None:
    """Of the pipeline's own scheduler or of another one; what leads to the noise is no run."""
    inverse = diffusers.DDIMInverseScheduler(**tiny.SD15_SCHEDULE)
    inverse.set_timesteps(10)
    schedule = of(inverse)
    backwards = [Position(9 - index, 10, False) for index in range(10)]
    assert locate(schedule, inverse.timesteps) == locate(schedule, map(int, inverse.timesteps)) == backwards
    schedule = of(set_up("DDIMScheduler"))
    found = locate(schedule, inverse.timesteps)
    assert not any(position and position.step < 500 for position in found[:3] if position and position.steps == 1000)
    assert schedule.run.step <= 0 or len({*found}) == 10


@pytest.mark.parametrize(("first", "count", "beside"), [(0, 10, -1), (4, 10, -1), (0, 20, 437)])
def test_what_comes_between_does_not_end_a_run(first: int, count: int, beside: int) -> None:
    """A preview at another step; a value on no schedule, in the run of another scheduler."""
    chosen, other = set_up("DDIMScheduler"), set_up("DDIMScheduler", count)
    chosen = other if count == 10 else chosen
    schedule, runs = of(chosen), []
    for timestep in other.timesteps[first:]:
        schedule.locate(timestep)
        runs.append(schedule.run)
        schedule.locate(other.timesteps[-1] if beside < 0 else beside)
    assert len(set(runs)) == 1
    assert beside > 0 or schedule.run.former is None, "what it kept is let go"


def test_a_scheduler_with_part_of_its_timesteps() -> None:
    """Those of a loop of one's own before and between them are on no schedule of it."""
    chosen = set_up("DDIMScheduler")
    every, schedule = chosen.timesteps, of(chosen)
    for part, beside in ((every[4:], every[2]), (every[::2], every[1])):
        chosen.timesteps = part
        assert locate(schedule, part) == steps(len(part))
        assert schedule.locate(beside) == place(int(beside))


# Steps of flow-matching pipelines, which hand over scaled, turned, expanded and rounded timesteps.

Handed = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
HANDED: dict[str, tuple[Handed, int | None]] = {
    "fraction (Flux, Qwen-Image)": (lambda t, dtype: t.expand(2).to(dtype) / 1000, units.FRACTION),
    "what is left (Z-Image)": (lambda t, dtype: (1000 - t.expand(2)) / 1000, units.RISING),
    "what is left, rounded": (lambda t, dtype: ((1000 - t.expand(2)) / 1000).to(dtype), units.RISING),
    "view (Wan, LTX, SD 3)": (lambda t, dtype: t.expand(2), None),
    "copy (HunyuanVideo)": (lambda t, dtype: t.expand(2).to(dtype), None),
    "copies of one (Wan I2V)": (lambda t, dtype: t[None].repeat(2).to(dtype), None),
}


def flow(count: int, shift: float = 3.0) -> Any:
    chosen = FlowMatchEulerDiscreteScheduler(shift=shift)
    chosen.set_timesteps(count)
    return chosen


def follow(
    chosen: Any,
    handed: Handed,
    dtype: torch.dtype,
    unit: int | None,
    calls: int = 1,
    *,
    first: int = 0,
    count: int | None = None,
) -> list[Position | None]:
    """Run a scheduler as a pipeline does, and return where each call is thought to be."""
    schedule = of(chosen)
    sample, found = torch.zeros(1, 2), []
    for t in chosen.timesteps[first:count]:
        found += locate(schedule, (handed(t, dtype) for _ in range(calls)), unit)
        sample = chosen.step(torch.zeros(1, 2), t, sample).prev_sample
    return found


@pytest.mark.parametrize(("handed", "unit"), HANDED.values(), ids=HANDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_call_of_a_flow_has_its_step(handed: Handed, unit: int | None, dtype: torch.dtype) -> None:
    """Also where image to image begins inside, after a run that was broken off, and with Wan's own schedulers."""
    for (count, shift), calls in itertools.product(((1, 3), (4, 1), (8, 3), (28, 3), (50, 1), (50, 12)), (1, 2)):
        chosen = flow(count, shift)
        for _ in range(2):
            chosen.set_timesteps(count)
            assert follow(chosen, handed, dtype, unit, calls) == steps(count, calls=calls)
    chosen = flow(50)
    chosen.set_begin_index(30)
    assert follow(chosen, handed, dtype, unit, first=30) == steps(50, first=30)
    chosen = flow(50, 12.0)
    follow(chosen, handed, dtype, unit, count=9)
    chosen.set_timesteps(50)
    assert follow(chosen, handed, dtype, unit) == steps(50)
    for name in ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler"):  # whose timesteps are whole numbers
        given = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
        chosen = getattr(diffusers, name)(**given)
        chosen.set_timesteps(30)
        assert follow(chosen, handed, dtype, unit, 2) == steps(30, calls=2)


@pytest.mark.parametrize("unit", [units.FRACTION, units.RISING])
def test_fractions_without_a_scheduler_or_between_its_steps(unit: int) -> None:
    """A tensor of them is a schedule; one of training, or a preview at a noise level of one's own, shares nothing."""
    values = torch.linspace(1, 0, 11)[:-1].clone()
    handed = values if unit == units.FRACTION else 1 - values
    assert locate(of(None), (value.expand(2) for value in handed), unit) == steps(10)
    chosen = flow(8)
    between = float(chosen.timesteps[2] + chosen.timesteps[3]) / 2000
    found = of(chosen).locate(torch.tensor([between]), units.FRACTION)
    assert found is not None and not found.scheduled
