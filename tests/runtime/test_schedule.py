"""Which call of a run is which step: every scheduler, through pipelines and by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import IDS, SCHEDULERS, scheduler

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.schedule import Position, Schedule


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Position, str]]:
    """Positions and phases of all UNet calls, as the patch sees them."""
    calls: list[tuple[Position, str]] = []
    begin = Patch.begin

    def record(self: Patch, position: Position, *args: Any, **kwargs: Any) -> None:
        begin(self, position, *args, **kwargs)
        calls.append((position, next(iter(self.latest.phases.values())).attention.name))

    monkeypatch.setattr(Patch, "begin", record)
    return calls


TWO_PHASES = PatchConfig("two", (Phase(0.2, "block", block_size=64), Phase(1.0, "softmax", ratio=0.5)))


def run(pipe: Any, steps: int, **options: Any) -> None:
    pipe("a", num_inference_steps=steps, guidance_scale=1.0, output_type="latent", **options)


@pytest.mark.parametrize(("name", "extra"), SCHEDULERS, ids=IDS)
@pytest.mark.parametrize("steps", [1, 7])
def test_every_call_has_its_index(pipe: Any, recorded: Any, name: str, extra: dict[str, Any], steps: int) -> None:
    pipe.scheduler = scheduler(name, extra)
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    run(pipe, steps)
    run(pipe, steps)
    calls = len(pipe.scheduler.timesteps)
    once = [Position(index, calls) for index in range(calls)]
    assert [position for position, _ in recorded] == once * 2
    early = [attention for _, attention in recorded].count("block")
    assert early == 2 * -(-calls * 2 // 10)  # the first 20 %, rounded up


@pytest.mark.parametrize(("name", "extra"), SCHEDULERS, ids=IDS)
def test_fifty_steps(name: str, extra: dict[str, Any]) -> None:
    chosen = scheduler(name, extra)
    schedule = Schedule(lambda: chosen)
    chosen.set_timesteps(50)
    positions = [schedule.locate(timestep) for timestep in chosen.timesteps]
    calls = {"PNDMScheduler": 51, "HeunDiscreteScheduler": 99, "KDPM2DiscreteScheduler": 99}.get(name, 50)
    assert positions == [Position(index, calls) for index in range(calls)]
    elfatt = [PatchConfig.preset("elfatt").phase_at(*position[:2]).attention.name for position in positions if position]
    agent = [PatchConfig.preset("agent").phase_at(*position[:2]).attention.name for position in positions if position]
    assert elfatt.count("elfatt") == {50: 10, 51: 11, 99: 20}[calls]  # of 51, two calls share the second timestep
    assert agent.count("agent") == {50: 20, 51: 21, 99: 40}[calls]


@pytest.mark.parametrize("name", ["DDIMScheduler", "PNDMScheduler", "HeunDiscreteScheduler"])
@pytest.mark.parametrize("strength", [0.2, 0.9, 1.0])
def test_image_to_image_starts_inside_the_schedule(pipe: Any, recorded: Any, strength: float, name: str) -> None:
    other = tiny.quiet(diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False))
    other.scheduler = scheduler(name, dict(SCHEDULERS)[name])
    elfatt_sd.apply_patch(other, TWO_PHASES)
    picture = torch.zeros(1, 3, 16, 16)
    other("a", image=picture, strength=strength, num_inference_steps=20, output_type="latent")
    first, calls, early = 20 - int(20 * strength), 20, 4
    if name == "PNDMScheduler":
        calls, early = 21, 5
    elif name == "HeunDiscreteScheduler":  # two calls a step, but for the last one
        first, calls, early = 2 * first, 39, 8
    assert [position for position, _ in recorded] == [Position(index, calls) for index in range(first, calls)]
    assert [attention for _, attention in recorded].count("block") == max(0, early - first)


def test_a_pipeline_that_shares_the_unet_is_followed_too(pipe: Any, recorded: Any) -> None:
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    other = tiny.quiet(diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False))
    other.scheduler = scheduler("EulerDiscreteScheduler", {})
    other("a", image=torch.zeros(1, 3, 16, 16), strength=0.5, num_inference_steps=10, output_type="latent")
    assert [position for position, _ in recorded] == [Position(index, 10) for index in range(5, 10)]


def test_sdxl_base_and_refiner_share_one_schedule(folder: Path, recorded: Any) -> None:
    base = tiny.sdxl(folder)
    refiner = tiny.quiet(
        diffusers.StableDiffusionXLImg2ImgPipeline(
            **tiny.sdxl_parts(folder, refiner=True), requires_aesthetics_score=True
        )
    )
    elfatt_sd.apply_patch(base, TWO_PHASES)
    elfatt_sd.apply_patch(refiner, TWO_PHASES)
    latents = base("a", num_inference_steps=10, denoising_end=0.8, output_type="latent").images
    base_steps = [position for position, _ in recorded]
    assert [attention for _, attention in recorded] == ["block"] * 2 + ["softmax"] * 6
    recorded.clear()
    refiner("a", image=latents, num_inference_steps=10, denoising_start=0.8, output_type="latent")
    refiner_steps = [position for position, _ in recorded]
    assert base_steps == [Position(index, 10) for index in range(8)]
    assert refiner_steps == [Position(index, 10) for index in range(8, 10)]
    assert {attention for _, attention in recorded} == {"softmax"}


def test_after_an_exception_a_new_run_starts_at_the_beginning(pipe: Any, recorded: Any) -> None:
    """Also with another scheduler."""
    pipe.scheduler = scheduler("DDIMScheduler", {})
    elfatt_sd.apply_patch(pipe, TWO_PHASES)

    def stop(pipe: Any, step: int, timestep: Any, kwargs: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return kwargs

    with pytest.raises(KeyboardInterrupt):
        run(pipe, 10, callback_on_step_end=stop)
    for name, calls in (("DDIMScheduler", 6), ("HeunDiscreteScheduler", 11)):
        recorded.clear()
        pipe.scheduler = scheduler(name, {})
        run(pipe, 6)
        assert [position for position, _ in recorded] == [Position(index, calls) for index in range(calls)]


def call(unet: Any, timestep: Any, batch: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return unet(torch.zeros(batch, 4, 8, 8), timestep, torch.zeros(batch, 3, tiny.TEXT_WIDTH)).sample


def test_a_bare_unet_in_a_loop_of_ones_own(pipe: Any, recorded: Any) -> None:
    chosen = scheduler("DDIMScheduler", {})
    chosen.set_timesteps(10)
    elfatt_sd.apply_patch(pipe.unet, TWO_PHASES)
    for timestep in chosen.timesteps:
        call(pipe.unet, timestep)
        call(pipe.unet, timestep.expand(2), batch=2)
    assert [position for position, _ in recorded] == [Position(index // 2, 10) for index in range(20)]


def test_a_bare_unet_with_plain_numbers(pipe: Any, recorded: Any) -> None:
    elfatt_sd.apply_patch(pipe.unet, TWO_PHASES)
    for timestep in (999, 800, 799, 500, 0, torch.tensor(900), torch.tensor([900, 900])):
        call(pipe.unet, timestep, batch=2)
    assert [attention for _, attention in recorded] == ["block"] * 2 + ["softmax"] * 3 + ["block"] * 2
    with pytest.raises(ElfattError, match=r"scheduler\.timesteps"):  # a step that is not known, where it matters
        call(pipe.unet, torch.tensor([10, 900]), batch=2)
    elfatt_sd.apply_patch(pipe.unet, "tome")
    assert call(pipe.unet, torch.tensor([10, 900]), batch=2).isfinite().all()


def test_runs_are_told_apart() -> None:
    chosen = scheduler("DDIMScheduler", {})
    schedule = Schedule(lambda: chosen)
    seen = []
    for _ in range(2):
        chosen.set_timesteps(3)
        for timestep in chosen.timesteps:
            schedule.locate(timestep)
            schedule.locate(timestep)
            seen.append(schedule.run)
    for index in (0, 1, 2, 0, 2):  # the same schedule once more, and steps that do not follow each other
        schedule.locate(chosen.timesteps[index])
        seen.append(schedule.run)
    schedule.locate(437)
    seen.append(schedule.run)
    numbers = [list(dict.fromkeys(seen)).index(run) for run in seen]
    assert numbers == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4]


def test_runs_of_threads_are_their_own() -> None:
    chosen = scheduler("DDIMScheduler", {})
    chosen.set_timesteps(3)
    schedule = Schedule(lambda: chosen)
    schedule.locate(chosen.timesteps[0])
    mine, others = schedule.run, []

    def follow() -> None:
        schedule.locate(chosen.timesteps[0])
        others.append(schedule.run)

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join()
    schedule.locate(chosen.timesteps[1])
    assert schedule.run is mine and others[0] is not mine
