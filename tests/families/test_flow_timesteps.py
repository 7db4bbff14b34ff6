"""Steps of flow-matching pipelines, which hand over scaled, turned, expanded and rounded timesteps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from elfatt_sd.families import timesteps as units
from elfatt_sd.runtime.schedule import Position, Schedule

Handed = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
# How pipelines hand a timestep over, and the unit that their family says.
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
