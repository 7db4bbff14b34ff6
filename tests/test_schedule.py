"""Which call of a run is which step: every scheduler, through pipelines and by hand."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_pipelines as tiny
import torch

import elfatt_sd
from elfatt_sd import schedule as module
from elfatt_sd.calls import Denoiser
from elfatt_sd.config import ElfattError, PatchConfig, Phase
from elfatt_sd.schedule import BEYOND, Position, Schedule

KARRAS = {"use_karras_sigmas": True}
SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {}),
    ("DDPMScheduler", {}),
    ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}),
    ("EulerDiscreteScheduler", {}),
    ("EulerDiscreteScheduler", KARRAS),
    ("EulerAncestralDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", KARRAS),
    ("KDPM2DiscreteScheduler", {}),
    ("KDPM2DiscreteScheduler", KARRAS),
    ("DPMSolverMultistepScheduler", {}),
    ("DPMSolverMultistepScheduler", KARRAS),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", **KARRAS}),
    ("UniPCMultistepScheduler", {}),
    ("UniPCMultistepScheduler", KARRAS),
    ("LCMScheduler", {}),
]
IDS = [name + "".join(f"-{value}" for value in extra.values()) for name, extra in SCHEDULERS]


def scheduler(name: str, extra: dict[str, Any]) -> Any:
    return getattr(diffusers, name)(**tiny.SD15_SCHEDULE, **extra)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Position, str]]:
    """Positions and phases of all UNet calls, as the patch sees them."""
    calls: list[tuple[Position, str]] = []
    begin = Denoiser.begin

    def record(self: Denoiser, position: Position, *args: Any, **kwargs: Any) -> None:
        begin(self, position, *args, **kwargs)
        calls.append((position, self.phase.attention.name))

    monkeypatch.setattr(Denoiser, "begin", record)
    return calls


TWO_PHASES = PatchConfig("two", (Phase(0.2, "block", block_size=64), Phase(1.0, "softmax", ratio=0.5)))


@pytest.fixture(scope="module")
def shared_pipe(folder: Path) -> Any:
    return tiny.sd15(folder, sample_size=8)


def run(pipe: Any, steps: int, **options: Any) -> None:
    pipe("a", num_inference_steps=steps, guidance_scale=1.0, output_type="latent", **options)


@pytest.mark.parametrize(("name", "extra"), SCHEDULERS, ids=IDS)
@pytest.mark.parametrize("steps", [1, 4, 7])
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


def test_plms_first_fifth_is_ten_steps() -> None:
    chosen = scheduler("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1})
    chosen.set_timesteps(50)
    config = PatchConfig.preset("elfatt")
    early = {
        int(timestep)
        for index, timestep in enumerate(chosen.timesteps)
        if config.phase_at(index, len(chosen.timesteps)).attention.name == "elfatt"
    }
    assert len(early) == 10


@pytest.mark.parametrize("name", ["DDIMScheduler", "PNDMScheduler", "HeunDiscreteScheduler"])
@pytest.mark.parametrize("strength", [0.2, 0.5, 0.9, 1.0])
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


@pytest.mark.parametrize(("strength", "first"), [(1.0, 0), (0.5, 2)])
def test_inpainting(pipe: Any, recorded: Any, strength: float, first: int) -> None:
    other = tiny.quiet(diffusers.StableDiffusionInpaintPipeline(**pipe.components, requires_safety_checker=False))
    elfatt_sd.apply_patch(other, TWO_PHASES)
    image, mask = torch.zeros(1, 3, 16, 16), torch.ones(1, 1, 16, 16)
    other.scheduler = scheduler("DDIMScheduler", {})
    run(other, 4, image=image, mask_image=mask, strength=strength, height=16, width=16)
    assert [position for position, _ in recorded] == [Position(index, 4) for index in range(first, 4)]
    assert [attention for _, attention in recorded].count("block") == (0 if first else 1)


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
    pipe.scheduler = scheduler("DDIMScheduler", {})
    elfatt_sd.apply_patch(pipe, TWO_PHASES)

    def stop(pipe: Any, step: int, timestep: Any, kwargs: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return kwargs

    with pytest.raises(KeyboardInterrupt):
        run(pipe, 10, callback_on_step_end=stop)
    recorded.clear()
    run(pipe, 5)
    assert [position for position, _ in recorded] == [Position(index, 5) for index in range(5)]


def test_scheduler_swapped_after_patching(pipe: Any, recorded: Any) -> None:
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    pipe.scheduler = scheduler("HeunDiscreteScheduler", {})
    run(pipe, 6)
    assert [position for position, _ in recorded] == [Position(index, 11) for index in range(11)]


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
    assert [attention for _, attention in recorded] == [
        "block",
        "block",
        "softmax",
        "softmax",
        "softmax",
        "block",
        "block",
    ]


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


def test_pipelines_that_hand_over_noise_levels(recorded: Any) -> None:
    """VE-SDE calls its model twice at each noise level, Karras-VE at two of them."""

    def unet(**more: Any) -> Any:
        torch.manual_seed(0)
        kinds = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        widths = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8}
        return diffusers.UNet2DModel(sample_size=16, **kinds, **widths, **more).eval()

    for made in (
        diffusers.ScoreSdeVePipeline(unet(time_embedding_type="fourier"), diffusers.ScoreSdeVeScheduler()),
        diffusers.KarrasVePipeline(unet(), diffusers.KarrasVeScheduler()),
    ):
        recorded.clear()
        pipe = tiny.quiet(made)
        elfatt_sd.apply_patch(pipe, TWO_PHASES)
        pipe(num_inference_steps=20, generator=torch.Generator().manual_seed(0), output_type="np")
        steps = [position.step for position, _ in recorded]
        assert steps == sorted(steps) and set(steps) == set(range(20))
        early = [attention for _, attention in recorded].count("block") / len(recorded)
        assert early == pytest.approx(0.2, abs=0.05)


def test_random_timesteps_are_no_schedule() -> None:
    """Views of a batch of timesteps that was drawn for training."""
    drawn = torch.tensor([437, 12, 990, 3])
    schedule = Schedule(lambda: None)
    assert [schedule.locate(timestep) for timestep in drawn] == [
        Position(999 - int(value), 1000, False) for value in drawn
    ]


def test_an_unknown_step_is_an_error_only_if_it_matters(pipe: Any) -> None:
    mixed = torch.tensor([10, 900])
    elfatt_sd.apply_patch(pipe.unet, "elfatt")
    with pytest.raises(ElfattError, match=r"scheduler\.timesteps"):
        call(pipe.unet, mixed, batch=2)
    elfatt_sd.apply_patch(pipe.unet, "tome")
    assert call(pipe.unet, mixed, batch=2).isfinite().all()


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
    chosen._step_index = 2
    with torch.enable_grad():
        assert schedule.locate(copies.of(1.0)) is None, "in training"
    assert Schedule(lambda: scheduler("DDIMScheduler", {})).locate(copies.of(1)) is None


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


def place(value: float) -> Position:
    return Position(int(999 - value), 1000, False)


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
