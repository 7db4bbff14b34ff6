"""Which call of a run is which step: every scheduler, through pipelines and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import IDS, SCHEDULERS, like, scheduler

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.schedule import Position, Schedule

Recorded = list[tuple[Position, str]]
TWO_PHASES = PatchConfig("two", (Phase(0.2, "block", block_size=64), Phase(1.0, "softmax", ratio=0.5)))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Positions and attentions of all UNet calls, as the patch sees them."""
    calls: Recorded = []
    begin = Patch.begin

    def record(self: Patch, position: Position, *args: Any, **kwargs: Any) -> None:
        begin(self, position, *args, **kwargs)
        assert self.latest is not None
        calls.append((position, next(iter(self.latest.phases.values())).attention.name))

    monkeypatch.setattr(Patch, "begin", record)
    return calls


def steps(first: int, count: int, blocks: int) -> Recorded:
    """The calls of a run of which the first ones are in the first phase."""
    return [(Position(index, count), "block" if index < blocks else "softmax") for index in range(first, count)]


@pytest.mark.parametrize(("name", "extra"), SCHEDULERS, ids=IDS)
@pytest.mark.parametrize("count", [1, 7])
def test_every_call_has_its_index(pipe: Any, recorded: Recorded, name: str, extra: dict[str, Any], count: int) -> None:
    pipe.scheduler = scheduler(name, extra)
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    for _ in range(2):
        pipe("a", num_inference_steps=count, guidance_scale=1.0, output_type="latent")
    calls = len(pipe.scheduler.timesteps)
    assert recorded == 2 * steps(0, calls, -(-calls * 2 // 10))  # the first 20 %, rounded up


# With PNDM, two calls share the second timestep; with Heun, each step but the last one takes two.
@pytest.mark.parametrize(
    ("name", "calls", "blocks"),
    [("DDIMScheduler", 20, 4), ("PNDMScheduler", 21, 5), ("HeunDiscreteScheduler", 39, 8)],
)
@pytest.mark.parametrize("strength", [0.2, 0.9])
def test_image_to_image_starts_inside_the_schedule(
    pipe: Any, recorded: Recorded, strength: float, name: str, calls: int, blocks: int
) -> None:
    other = like(diffusers.StableDiffusionImg2ImgPipeline, pipe)
    other.scheduler = scheduler(name, dict(SCHEDULERS)[name])
    elfatt_sd.apply_patch(other, TWO_PHASES)
    picture = torch.zeros(1, 3, 16, 16)
    other("a", image=picture, strength=strength, num_inference_steps=20, output_type="latent")
    first = (20 - int(20 * strength)) * (2 if calls == 39 else 1)
    assert recorded == steps(first, calls, blocks)


def test_sdxl_base_and_refiner_share_one_schedule(folder: Path, recorded: Recorded) -> None:
    base, parts = tiny.sdxl(folder), tiny.sdxl_parts(folder, refiner=True)
    refiner = tiny.quiet(diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True))
    elfatt_sd.apply_patch(base, TWO_PHASES)
    elfatt_sd.apply_patch(refiner, TWO_PHASES)
    latents = base("a", num_inference_steps=10, denoising_end=0.8, output_type="latent").images
    refiner("a", image=latents, num_inference_steps=10, denoising_start=0.8, output_type="latent")
    assert recorded == steps(0, 10, 2)


def call(unet: Any, timestep: Any, batch: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return unet(torch.zeros(batch, 4, 8, 8), timestep, torch.zeros(batch, 3, tiny.TEXT_WIDTH)).sample  # type: ignore[no-any-return]


def test_a_bare_unet_in_a_loop_of_ones_own(pipe: Any, recorded: Recorded) -> None:
    chosen = scheduler("DDIMScheduler", {})
    chosen.set_timesteps(10)
    elfatt_sd.apply_patch(pipe.unet, TWO_PHASES)
    for timestep in chosen.timesteps:
        call(pipe.unet, timestep.expand(2))
    assert recorded == steps(0, 10, 2)
    recorded.clear()
    for number in (999, 800, 799, 500, 0, torch.tensor(900), torch.tensor([900, 900])):
        call(pipe.unet, number)
    assert [attention for _, attention in recorded] == ["block"] * 2 + ["softmax"] * 3 + ["block"] * 2
    with pytest.raises(ElfattError, match=r"scheduler\.timesteps"):  # a step that is not known, where it matters
        call(pipe.unet, torch.tensor([10, 900]))
    elfatt_sd.apply_patch(pipe.unet, "tome")
    assert call(pipe.unet, torch.tensor([10, 900])).isfinite().all()


def test_runs_are_told_apart() -> None:
    chosen = scheduler("DDIMScheduler", {})
    schedule, seen = Schedule(lambda: chosen), []
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
