"""Which step a value is: copies, other units, values on no schedule, loops of ones own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from support import tiny_pipelines as tiny
from support.checks import IDS, SCHEDULERS, place, scheduler

from elfatt_sd.families import timesteps as units
from elfatt_sd.runtime import schedule as module
from elfatt_sd.runtime.schedule import BEYOND, Position, Schedule


def test_copied_timesteps_are_found_by_value_in_order() -> None:
    chosen = scheduler("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1})
    chosen.set_timesteps(5)
    schedule = Schedule(lambda: chosen)
    for _ in range(2):
        located = [schedule.locate(int(timestep)) for timestep in chosen.timesteps]
        assert located == [Position(index, 6) for index in range(6)]  # one value occurs twice


def test_a_timestep_on_no_schedule_has_the_place_of_its_noise_level() -> None:
    """As in training, or in score distillation; whatever step the scheduler has come to."""
    for name in ("DDIMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler"):
        chosen: Any = scheduler(name, {"steps_offset": 1})
        chosen.set_timesteps(10)
        for index in (None, 3, 10):  # none yet, that of a run that was broken off, the end
            chosen._step_index = index
            schedule = Schedule(lambda chosen=chosen: chosen)
            found = [schedule.locate(value) for value in (437, torch.tensor([437, 437]), 5)]
            assert found == [Position(562, 1000, False)] * 2 + [Position(994, 1000, False)]
            assert schedule.locate(5000) == BEYOND


@pytest.mark.parametrize("value", [0.3, -1.25, 1.15, 14.6, 1000, 1e9, math.nan, math.inf])
def test_a_value_in_an_unknown_unit_is_beyond_the_last_phase(value: float) -> None:
    assert Schedule(lambda: None).locate(value) == BEYOND
    assert Schedule(lambda: None, trained_on_noise_levels=True).locate(437) == BEYOND


@pytest.mark.parametrize(
    "unit",
    [
        lambda chosen, i: chosen.timesteps[i].item() / 1000,
        lambda chosen, i: 1 - chosen.timesteps[i].item() / 1000,
        lambda chosen, i: chosen.sigmas[i].item(),
        lambda chosen, i: torch.log(chosen.sigmas[i]) * 0.25,
        lambda chosen, i: torch.full((2,), chosen.sigmas[i].item()),
    ],
    ids=["fraction", "from the end", "noise level", "quarter of its logarithm", "a batch of it"],
)
def test_other_parametrisations_are_known(unit: Any) -> None:
    chosen = scheduler("EulerDiscreteScheduler", {})
    chosen.set_timesteps(20)
    schedule = Schedule(lambda: chosen)
    for _ in range(2):
        assert [schedule.locate(unit(chosen, i)) for i in range(20)] == [Position(i, 20) for i in range(20)]


def test_timesteps_between_those_of_a_scheduler_that_does_not_count() -> None:
    """As k-diffusion's samplers work them out of noise levels."""
    chosen = scheduler("EulerDiscreteScheduler", {})
    chosen.set_timesteps(10)
    schedule = Schedule(lambda: chosen)
    assert [schedule.locate(value) for value in (910.3, 437.26)] == [
        Position(88, 1000, False),
        Position(561, 1000, False),
    ]
    assert schedule.locate(-0.7) == BEYOND
    assert schedule.locate(14.2) == BEYOND, "a timestep, or a noise level"


def test_random_timesteps_are_no_schedule() -> None:
    """Views of a batch of timesteps that was drawn for training."""
    drawn = torch.tensor([437, 12, 990, 3])
    schedule = Schedule(lambda: None)
    assert [schedule.locate(timestep) for timestep in drawn] == [
        Position(999 - int(value), 1000, False) for value in drawn
    ]


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "EulerDiscreteScheduler", "IPNDMScheduler"])
@pytest.mark.parametrize("value", [0.0123, -3.7, 437.26, torch.tensor(437.26), 437, 437.0])
def test_the_counter_of_a_run_that_was_broken_off_places_nothing(name: str, value: Any) -> None:
    """Its own timesteps come before; a value on no schedule has its place, or none."""
    chosen: Any = scheduler(name, {}) if name != "IPNDMScheduler" else diffusers.IPNDMScheduler()
    chosen.set_timesteps(10)
    schedule = Schedule(lambda: chosen)
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
def test_a_loop_in_noise_levels_of_ones_own_has_no_place(name: str) -> None:
    """On a scheduler that is never stepped, and so would stay at its first step."""
    chosen = scheduler(name, {})
    chosen.set_timesteps(10)
    schedule = Schedule(lambda: chosen)
    assert {schedule.locate(sigma) for sigma in (14.2, 9.1, 5.0, 2.3, 0.9, 0.2)} == {BEYOND}


class Copies:
    """Timesteps that only a device knows, and what was read of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[Any] = []
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}
        original = module._value
        monkeypatch.setattr(
            module, "_value", lambda given: self._look(given) if id(given) in self._known else original(given)
        )

    def _look(self, given: torch.Tensor) -> Any:
        self.read.append(self._known[id(given)][1])
        return self.read[-1]

    def of(self, value: Any, place: int = 0) -> torch.Tensor:
        """Return a copy, one of two places in memory."""
        copy = torch.empty(2, device="meta")[place]
        self._known[id(copy)] = copy, value
        return copy


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


@torch.no_grad()
def test_a_copy_on_the_device_is_of_the_schedulers_step(copies: Copies) -> None:
    """Where the scheduler counts, and a run is going on; a step may take several calls. The first copy is read."""
    chosen: Any = scheduler("EulerDiscreteScheduler", {})
    chosen.set_timesteps(5)
    schedule, located = Schedule(lambda: chosen), []
    for index, timestep in enumerate(chosen.timesteps.tolist()):
        chosen._step_index = index or None
        copy = copies.of(timestep, index % 2)
        located += [schedule.locate(copy) for _ in range(2)]
        located.append(schedule.locate(-0.123))  # of its own making
    assert located == [place for i in range(5) for place in (Position(i, 5), Position(i, 5), BEYOND)]
    assert copies.read == [chosen.timesteps[0]]
    chosen._step_index = 5
    assert schedule.locate(copies.of(1.0)) is None, "the run is over"
    assert Schedule(lambda: scheduler("DDIMScheduler", {})).locate(copies.of(1)) is None
    chosen._step_index = 2
    with torch.enable_grad():
        assert schedule.locate(copies.of(1.0)) is None, "in training"


@torch.no_grad()
def test_a_copy_in_a_buffer_is_read_where_the_scheduler_does_not_count(copies: Copies) -> None:
    """A loop of ones own that does not call the scheduler's step."""
    chosen: Any = scheduler("EulerDiscreteScheduler", {})
    chosen.set_timesteps(5)
    schedule, buffer, located = Schedule(lambda: chosen), copies.of(None), []
    for timestep in chosen.timesteps.tolist():
        buffer.zero_()  # writes it, as far as PyTorch knows
        copies._known[id(buffer)] = buffer, timestep
        located += [schedule.locate(buffer) for _ in range(2)]
    assert [each and each.step for each in located] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@torch.no_grad()
def test_a_copy_on_the_device_that_is_not_of_the_counted_step(copies: Copies) -> None:
    """After a run that was broken off, beside one that goes on, or on a scheduler that is never stepped."""
    chosen: Any = scheduler("EulerDiscreteScheduler", {})
    chosen.set_timesteps(5)
    values = chosen.timesteps.tolist()
    schedule = Schedule(lambda: chosen)
    assert [schedule.locate(copies.of(value, i % 2)) for i, value in enumerate(values)] == [
        Position(i, 5) for i in range(5)
    ]
    schedule = Schedule(lambda: chosen)
    for timestep in chosen.timesteps[:3]:
        schedule.locate(timestep)
    chosen._step_index = 3
    assert schedule.locate(copies.of(437)) == Position(562, 1000, False)
    assert schedule.locate(copies.of(None)) is None, "another for each image"
    assert schedule.locate(chosen.timesteps[3]) == Position(3, 5) and schedule.run.first == 0


@torch.no_grad()
def test_copies_on_the_device_of_two_schedulers(copies: Copies) -> None:
    """Read at their beginning where a function holds one of them, and in every step where it holds both."""
    one, other = (scheduler("EulerDiscreteScheduler", {}) for _ in range(2))
    one.set_timesteps(5)
    other.set_timesteps(7)
    schedule = Schedule(lambda: None)

    def copy_of(chosen: Any, step: int) -> Any:
        chosen._step_index = step
        return copies.of(chosen.timesteps[step].item(), step % 2)

    def turn(chosen: Any, step: int) -> Position | None:
        return schedule.locate(copy_of(chosen, step))

    assert [turn(each, step) for step in range(5) for each in (one, other)] == [
        Position(step, count) for step in range(5) for count in (5, 7)
    ]
    assert len(copies.read) == 2
    for step in range(5):
        assert schedule.locate(copy_of(one, step)) == Position(step, 5)
        one._step_index = step + 1
        assert schedule.locate(copy_of(other, step)) == Position(step, 7)
    assert len(copies.read) == 2 + 9, "but for the last one, where the other scheduler is at its end"


def test_the_device_is_read_once_a_run_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = scheduler("DDIMScheduler", {})
    chosen.set_timesteps(4)
    schedule = Schedule(lambda: chosen)

    def forbidden(*args: Any) -> Any:
        raise AssertionError("a value was read off the device")

    first, *others = chosen.timesteps.unbind()
    assert schedule.locate(first) == Position(0, 4)
    for name in ("item", "tolist", "__int__", "__float__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    assert [schedule.locate(timestep) for timestep in others] == [Position(i, 4) for i in range(1, 4)]


@pytest.mark.parametrize(
    "timesteps",
    [
        torch.arange(1000),
        torch.tensor([3, 12, 437, 990]),
        torch.tensor([990, 437, 12, 3, 2, 1]),
        torch.tensor([600, 400, 200, 100]),
        torch.tensor([14.2, 9.1, 5.0, 2.3, 0.9, 0.2]),
        torch.tensor([990, 990, 990]),
        torch.tensor([999, 998, 3]),
    ],
    ids=["rising", "sorted", "uneven", "begins at less noise", "noise levels", "one value", "one wide step"],
)
def test_what_is_no_schedule(timesteps: torch.Tensor) -> None:
    """As batches drawn for training, sorted or not."""
    schedule = Schedule(lambda: None)
    for timestep in timesteps[:6]:
        value = timestep.item()
        assert schedule.locate(timestep) == (BEYOND if value < 20 and type(value) is float else place(value))
    assert schedule.run.first < 0, "no run began"


@pytest.mark.parametrize(("name", "extra"), SCHEDULERS, ids=IDS)
@pytest.mark.parametrize("steps", [4, 7, 50])
@pytest.mark.parametrize("patched_with", ["DDIMScheduler", None])
def test_the_timesteps_of_another_scheduler_are_a_schedule(
    name: str, extra: dict[str, Any], steps: int, patched_with: str | None
) -> None:
    """As those of a second pipeline around the same UNet; also from the middle on, as for image to image."""
    own = scheduler(patched_with, {}) if patched_with else None
    other = scheduler(name, extra)
    other.set_timesteps(steps)
    schedule = Schedule(lambda: own)
    for first in (0, len(other.timesteps) // 2):
        calls = range(first, len(other.timesteps))
        found = [schedule.locate(timestep) for timestep in other.timesteps[first:]]
        assert found == [Position(index, len(other.timesteps)) for index in calls]


@pytest.mark.parametrize(
    ("timesteps", "steps"),
    [
        (torch.linspace(999, 0, 10), 10),
        (torch.linspace(999, 1, 10).long(), 10),
        (torch.linspace(1, 0, 11), 10),
        (torch.tensor([999, 850, 736, 645, 545, 455, 343, 233, 124, 24]), 10),
        (torch.tensor([999, 749, 499, 249]), 4),
        (12 * torch.linspace(1, 0.1, 10) / (1 + 11 * torch.linspace(1, 0.1, 10)) * 1000, 10),
    ],
    ids=["even", "whole", "fractions that lead to 0", "align your steps", "few steps", "shifted flow"],
)
def test_schedules_of_ones_own(timesteps: torch.Tensor, steps: int) -> None:
    schedule = Schedule(lambda: None)
    assert [schedule.locate(timestep) for timestep in timesteps[:steps]] == [Position(i, steps) for i in range(steps)]


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "HeunDiscreteScheduler"])
def test_a_loop_over_the_schedulers_noise_levels(name: str) -> None:
    """The zero at their end is where the last step leads."""
    chosen = scheduler(name, {})
    chosen.set_timesteps(10)
    calls = len(chosen.timesteps)
    schedule = Schedule(lambda: chosen)
    assert [schedule.locate(sigma) for sigma in chosen.sigmas[:-1]] == [Position(i, calls) for i in range(calls)]


def test_rising_timesteps_have_the_place_of_their_noise_level() -> None:
    """Of the pipeline's own scheduler or of another one; what leads to the noise is no run."""
    inverse = diffusers.DDIMInverseScheduler(**tiny.SD15_SCHEDULE)
    inverse.set_timesteps(10)
    schedule = Schedule(lambda: inverse)
    backwards = [Position(9 - index, 10, False) for index in range(10)]
    assert [schedule.locate(timestep) for timestep in inverse.timesteps] == backwards
    assert [schedule.locate(int(timestep)) for timestep in inverse.timesteps] == backwards
    forward = scheduler("DDIMScheduler", {})
    forward.set_timesteps(10)
    schedule = Schedule(lambda: forward)
    found = [schedule.locate(timestep) for timestep in inverse.timesteps]
    assert not any(position and position.step < 500 for position in found[:3] if position and position.steps == 1000)
    assert schedule.run.step <= 0 or len({*found}) == 10


@pytest.mark.parametrize("first", [0, 4])
def test_a_preview_at_another_step_does_not_end_the_run(first: int) -> None:
    chosen = scheduler("DDIMScheduler", {})
    chosen.set_timesteps(10)
    schedule = Schedule(lambda: chosen)
    runs = []
    for timestep in chosen.timesteps[first:]:
        schedule.locate(timestep)
        runs.append(schedule.run)
        schedule.locate(chosen.timesteps[-1])
    assert len(set(runs)) == 1
    assert schedule.run.former is None, "what it kept is let go"


def test_a_run_of_the_scheduler_beside_one_of_another() -> None:
    """A value on no schedule leaves both as they are."""
    chosen, other = scheduler("DDIMScheduler", {}), scheduler("DDIMScheduler", {})
    chosen.set_timesteps(10)
    other.set_timesteps(20)
    schedule = Schedule(lambda: chosen)
    runs = []
    for timestep in other.timesteps:
        schedule.locate(timestep)
        runs.append(schedule.run)
        schedule.locate(437)
    assert len(set(runs)) == 1


def test_guidance_in_two_calls_with_copied_timesteps() -> None:
    """Each of a repeated timestep's steps takes as many calls as the step before it."""
    chosen = scheduler("HeunDiscreteScheduler", {})
    chosen.set_timesteps(6)
    schedule = Schedule(lambda: chosen)
    for _ in range(2):
        found = [schedule.locate(int(timestep)) for timestep in chosen.timesteps for _ in range(2)]
        assert found == [Position(index // 2, 11) for index in range(22)]


def test_a_scheduler_with_part_of_its_timesteps() -> None:
    """Those of a loop of one's own before and between them are on no schedule of it."""
    chosen: Any = scheduler("DDIMScheduler", {})
    chosen.set_timesteps(10)
    every = chosen.timesteps
    schedule = Schedule(lambda: chosen)
    chosen.timesteps = every[4:]
    assert [schedule.locate(timestep) for timestep in every[4:]] == [Position(index, 6) for index in range(6)]
    assert schedule.locate(every[2]) == place(int(every[2]))
    chosen.timesteps = every[::2]
    assert [schedule.locate(timestep) for timestep in every[::2]] == [Position(index, 5) for index in range(5)]
    assert schedule.locate(every[1]) == place(int(every[1]))


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


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def follow(
    chosen: Any, handed: Handed, dtype: torch.dtype, unit: int | None, calls: int = 1, first: int = 0
) -> list[Position | None]:
    """Run a scheduler as a pipeline does, and return where each call is thought to be."""
    schedule = Schedule(lambda: chosen)
    sample, found = torch.zeros(1, 2), []
    for t in chosen.timesteps[first:]:
        for _ in range(calls):
            found.append(schedule.locate(handed(t, dtype), unit))
        sample = chosen.step(torch.zeros(1, 2), t, sample).prev_sample
    return found


@pytest.mark.parametrize("kind", HANDED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("steps", "shift"), [(1, 3.0), (4, 1.0), (8, 3.0), (28, 3.0), (50, 1.0), (50, 12.0)])
@pytest.mark.parametrize("calls", [1, 2])
def test_every_call_has_its_step(kind: str, dtype: torch.dtype, steps: int, shift: float, calls: int) -> None:
    handed, unit = HANDED[kind]
    chosen = FlowMatchEulerDiscreteScheduler(shift=shift)
    for _ in range(2):
        chosen.set_timesteps(steps)
        found = follow(chosen, handed, dtype, unit, calls)
        assert found == [Position(step, steps) for step in range(steps) for _ in range(calls)]


@pytest.mark.parametrize("kind", HANDED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_image_to_image_begins_inside(kind: str, dtype: torch.dtype) -> None:
    handed, unit = HANDED[kind]
    chosen = FlowMatchEulerDiscreteScheduler(shift=3.0)
    chosen.set_timesteps(50)
    chosen.set_begin_index(30)
    found = follow(chosen, handed, dtype, unit, first=30)
    assert found == [Position(step, 50) for step in range(30, 50)]


@pytest.mark.parametrize("kind", HANDED)
def test_after_a_run_that_was_broken_off(kind: str) -> None:
    handed, unit = HANDED[kind]
    chosen = FlowMatchEulerDiscreteScheduler(shift=12.0)
    chosen.set_timesteps(50)
    schedule = Schedule(lambda: chosen)
    for t in chosen.timesteps[:9]:
        schedule.locate(handed(t, torch.bfloat16), unit)
        chosen.step(torch.zeros(1, 2), t, torch.zeros(1, 2))
    chosen.set_timesteps(50)
    found = follow(chosen, handed, torch.bfloat16, unit)
    assert found == [Position(step, 50) for step in range(50)]


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_schedulers_of_flows(name: str, dtype: torch.dtype) -> None:
    """Wan's own, whose timesteps are whole numbers."""
    chosen = getattr(diffusers, name)(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    chosen.set_timesteps(30)
    for handed, unit in HANDED.values():
        chosen.set_timesteps(30)
        assert follow(chosen, handed, dtype, unit, 2) == [Position(step, 30) for step in range(30) for _ in range(2)]


def test_a_value_between_two_steps_shares_nothing() -> None:
    """Training, or a preview at a noise level of one's own."""
    chosen = FlowMatchEulerDiscreteScheduler(shift=3.0)
    chosen.set_timesteps(8)
    between = float(chosen.timesteps[2] + chosen.timesteps[3]) / 2000
    found = Schedule(lambda: chosen).locate(torch.tensor([between]), units.FRACTION)
    assert found is not None
    assert not found.scheduled


@pytest.mark.parametrize("unit", [units.FRACTION, units.RISING])
def test_a_tensor_of_fractions_is_a_schedule(unit: int) -> None:
    values = torch.linspace(1, 0, 11)[:-1].clone()
    handed = values if unit == units.FRACTION else 1 - values
    schedule = Schedule(lambda: None)
    assert [schedule.locate(value.expand(2), unit) for value in handed] == [Position(step, 10) for step in range(10)]


def test_a_loop_between_timesteps_stays_in_timesteps_to_its_end() -> None:
    """As k-diffusion's samplers work them out of noise levels; the last ones could be noise levels as well."""
    chosen: Any = scheduler("EulerDiscreteScheduler", {})
    chosen.set_timesteps(10)
    level = float(chosen.sigmas[6])
    schedule = Schedule(lambda: chosen)
    for _ in range(2):
        found = [schedule.locate(value) for value in (910.3, 437.26, 31.2, 12.4, level, 0.7, 0.0)]
        assert found[:-1] == [
            Position(int(999 - value), 1000, False) for value in (910.3, 437.26, 31.2, 12.4, level, 0.7)
        ]
        assert found[-1] is not None and found[-1] != BEYOND
    assert schedule.locate(14.2) == BEYOND, "another loop, which may be in noise levels"
    assert Schedule(lambda: chosen).locate(level) == Position(6, 10)


def test_ranks_of_a_scheduler_that_was_never_set() -> None:
    """It has all timesteps of the training, and none of a run."""
    never, own = FlowMatchEulerDiscreteScheduler(shift=3.0), FlowMatchEulerDiscreteScheduler(shift=3.0)
    own.set_timesteps(4)
    schedule = Schedule(lambda: never)
    assert schedule.locate(torch.tensor([1.0]), units.FRACTION) == Position(0, 4)
    del own
    assert schedule.locate(torch.tensor([1.0]), units.FRACTION) == Position(0, 1000, False)
