"""Several schedulers around one patched transformer, which is handed fractions of the run: the caller's one counts."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines, tiny_transformers
from support.checks import picture

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families.timesteps import FRACTION, RISING
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.schedule import BEYOND, Position, Schedule

SHARED = PatchConfig("shared", (Phase(0.25), Phase(1.0, "cell_spread", cell=4, block_size=4, residual_steps=3)))
TEXT = tiny_transformers.embeds(width=8)
GIVEN: dict[str, Any] = {"prompt_embeds": TEXT, "pooled_prompt_embeds": torch.zeros(1, 32), "height": 96, "width": 64}
DYNAMIC = {"shift": 1.0, "use_dynamic_shifting": True, "base_shift": 1.15, "max_shift": 1.16}


def flux(**options: Any) -> tuple[Any, Any]:
    pipe = tiny_transformers.pipeline(
        "FluxPipeline", tiny_transformers.flux_transformer(), scheduler=tiny_transformers.flow_scheduler(**DYNAMIC)
    )
    return pipe, tiny_transformers.runner(pipe, **{**GIVEN, **options})


def wan_by_token(**options: Any) -> tuple[Any, Any]:
    """As with a first frame that is given: a copy of the timestep for each token."""
    pipe, _ = tiny_transformers.wan()
    given = {
        "prompt_embeds": tiny_transformers.embeds(),
        "num_frames": 9,
        "height": 96,
        "width": 64,
        "guidance_scale": 1.0,
    }
    pipe = tiny_transformers.pipeline("WanPipeline", pipe.transformer, expand_timesteps=True)
    return pipe, tiny_transformers.runner(pipe, **{**given, **options})


CASES: dict[str, tuple[Callable[..., tuple[Any, Any]], str, int]] = {  # how it is made, its class, calls of a step
    "Flux.1": (flux, "FluxPipeline", 1),
    "Qwen-Image": (tiny_transformers.qwen_image, "QwenImagePipeline", 2),
    "Z-Image": (tiny_transformers.z_image, "ZImagePipeline", 1),
    "Wan, by token": (wan_by_token, "WanPipeline", 1),
    "HunyuanVideo": (tiny_transformers.hunyuan_video, "HunyuanVideoPipeline", 1),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, Any, int]:
    make, kind, calls = CASES[request.param]
    if not hasattr(diffusers, kind):
        pytest.skip(f"this version of diffusers has no {kind}")
    return *make(), calls


@contextlib.contextmanager
def positions() -> Iterator[list[Position]]:
    """Return the positions of all calls while the block runs."""
    found: list[Position] = []
    begin = Patch.begin

    def record(self: Patch, position: Position, *given: Any) -> None:
        found.append(position)
        begin(self, position, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Patch, "begin", record)
        yield found


def run_of(pipe: Any, run: Any) -> Any:
    return tiny_transformers.runner(pipe, **run.given)


def steps(count: int, calls: int = 1, first: int = 0) -> list[Position]:
    return [Position(step, count) for step in range(first, count) for _ in range(calls)]


@pytest.mark.parametrize("drew", [False, True], ids=["fresh", "after the first drew"])
def test_a_second_pipeline_with_another_shift(case: Any, drew: bool) -> None:
    pipe, run, calls = case
    second = copy.copy(pipe)
    second.scheduler = tiny_transformers.flow_scheduler(shift=7.0)
    with elfatt_sd.patched(second, SHARED):
        own = run_of(second, run)(num_inference_steps=9)
    with elfatt_sd.patched(pipe, SHARED):
        if drew:
            run(num_inference_steps=5)
        with positions() as found:
            made = run_of(second, run)(num_inference_steps=9)
        assert found == steps(9, calls)
        assert torch.equal(made, own)
        pipe.scheduler = tiny_transformers.flow_scheduler(shift=2.0)
        with positions() as found:
            run(num_inference_steps=7)
        assert found == steps(7, calls)


@pytest.mark.parametrize("wrapped", ["bare", "PEFT", "copy"])
def test_a_transformer_without_its_pipeline(case: Any, wrapped: str) -> None:
    pipe, run, calls = case
    if wrapped == "PEFT":
        peft = pytest.importorskip("peft")
        names = [name for name, part in pipe.transformer.named_modules() if isinstance(part, torch.nn.Linear)]
        config = peft.LoraConfig(r=2, target_modules=names[-1:])
        elfatt_sd.apply_patch(peft.get_peft_model(pipe.transformer, config), SHARED)
    else:
        elfatt_sd.apply_patch(pipe.transformer, SHARED)
    if wrapped == "copy":
        pipe = copy.deepcopy(pipe)
    for count in (8, 5):
        with positions() as found:
            run_of(pipe, run)(num_inference_steps=count)
        assert found == steps(count, calls)


def test_image_to_image_with_another_shift(tmp_path: Path) -> None:
    pipe = tiny_transformers.flux(tmp_path)
    pipe.vae.register_to_config(shift_factor=0.1)
    elfatt_sd.apply_patch(pipe, SHARED)
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    other.scheduler = tiny_transformers.flow_scheduler(shift=9.0)
    pipe("a b", num_inference_steps=4, height=32, width=32, output_type="latent")
    given = {"prompt": "a b", "image": picture(), "strength": 0.5, "height": 32, "width": 32}
    with positions() as found:
        other(num_inference_steps=8, output_type="latent", **given)
    assert found == steps(8, first=4)


def test_threads_get_the_images_that_they_get_alone(case: Any) -> None:
    pipe, run, _ = case
    pipes = [copy.copy(pipe) for _ in range(3)]
    for index, each in enumerate(pipes):
        each.scheduler = tiny_transformers.flow_scheduler(shift=(3.0, 3.0, 8.0)[index])
    elfatt_sd.apply_patch(pipe, SHARED)
    alone = [run_of(each, run)(num_inference_steps=6 + index // 2) for index, each in enumerate(pipes)]
    found: dict[int, torch.Tensor] = {}
    ready = threading.Barrier(3)

    def draw(index: int) -> None:
        ready.wait()
        found[index] = run_of(pipes[index], run)(num_inference_steps=6 + index // 2)

    threads = [threading.Thread(target=draw, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], alone[index]) for index in range(3))


def call(transformer: Any, image: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Call a transformer of Flux as its pipeline does."""
    tokens, ids = image.shape[1], torch.zeros(image.shape[1], 3)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // 4, torch.arange(tokens) % 4
    text = {"encoder_hidden_states": TEXT, "pooled_projections": torch.zeros(1, 32), "txt_ids": torch.zeros(7, 3)}
    with torch.no_grad():
        return transformer(image, timestep=timestep.expand(1) / 1000, img_ids=ids, **text).sample


def noise(seed: int) -> torch.Tensor:
    return torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(seed))


def denoised(transformer: Any, scheduler: Any, seed: int, count: int = 8) -> Iterator[torch.Tensor]:
    """The images of a loop of one's own, one a step, as a server hands them on."""
    scheduler.set_timesteps(count)
    image = noise(seed)
    for timestep in scheduler.timesteps:
        image = scheduler.step(call(transformer, image, timestep), timestep, image).prev_sample
        yield image


@pytest.mark.parametrize(
    "order",
    [[0, 1, 2] * 8, [0] * 3 + [1] * 5 + [2] * 8 + [0] * 5 + [1] * 3, [0, 1, 1, 0, 2, 0, 1, 2, 2] * 2 + [0, 1, 2] * 2],
)
def test_equal_schedules_of_one_thread(order: list[int]) -> None:
    """Their values tell nothing; whose they are, the callers do."""
    transformer = elfatt_sd.apply_patch(tiny_transformers.flux_transformer(), SHARED)
    last = {seed: order.count(seed) - 1 for seed in range(3)}
    alone = [list(denoised(transformer, tiny_transformers.flow_scheduler(), seed))[last[seed]] for seed in range(3)]
    runs = [denoised(transformer, tiny_transformers.flow_scheduler(), seed) for seed in range(3)]
    found = {}
    for seed in order:
        found[seed] = next(runs[seed])
    assert all(torch.equal(found[seed], alone[seed]) for seed in range(3))


def test_a_callback_that_draws_with_another_pipeline() -> None:
    pipe, run = flux()
    other = copy.copy(pipe)
    other.scheduler = tiny_transformers.flow_scheduler()
    elfatt_sd.apply_patch(pipe, SHARED)
    alone = run(num_inference_steps=8)

    def preview(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        run_of(other, run)(num_inference_steps=8)
        return kwargs

    assert torch.equal(run(num_inference_steps=8, callback_on_step_end=preview), alone)


class Server:
    """Holds its pipeline at some distance; a method of it calls the transformer."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def call(self, image: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return call(self.pipe.transformer, image, timestep)


def test_a_function_in_between_that_holds_another_scheduler() -> None:
    """The one whose count agrees is meant, although the other one has the same values."""
    pipe, run = flux()
    pipe.scheduler = tiny_transformers.flow_scheduler()
    server = Server(pipe)
    elfatt_sd.apply_patch(pipe, SHARED)
    for _ in range(2):
        own = copy.deepcopy(pipe.scheduler)
        own.set_timesteps(6)
        with positions() as found:
            for timestep in own.timesteps:
                own.step(server.call(noise(0), timestep), timestep, noise(0))
        assert found == steps(6)
        run(num_inference_steps=6)


def test_steps_of_ones_own_and_containers() -> None:
    """Loops that never step their scheduler, and that hold it in a list, in an object, or in the module."""
    transformer = elfatt_sd.apply_patch(tiny_transformers.flux_transformer(), SHARED)
    for hold in (lambda own: [own], lambda own: {"flow": own}, lambda own: SimpleNamespace(own=own, others=())):
        held: Any = hold(tiny_transformers.flow_scheduler())
        for count in (6, 4):
            (own,) = (held if isinstance(held, list) else [*(held if isinstance(held, dict) else vars(held)).values()])[
                :1
            ]
            own.set_timesteps(count)
            values = own.timesteps.tolist()
            del own
            with positions() as found:
                for value in values:
                    call(transformer, noise(0), torch.tensor(value))
            assert found == steps(count)


OF_THE_MODULE = tiny_transformers.flow_scheduler()


def test_a_scheduler_of_the_module_in_another_thread() -> None:
    transformer = elfatt_sd.apply_patch(tiny_transformers.flux_transformer(), SHARED)

    def loop() -> None:
        OF_THE_MODULE.set_timesteps(5)
        for timestep in OF_THE_MODULE.timesteps:
            call(transformer, noise(0), timestep)

    with positions() as found:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    assert found == steps(5)


@pytest.mark.parametrize("method", ["elfatt-fast", "elfatt-quality"])
def test_a_value_on_no_schedule_is_not_placed_in_silence(method: str) -> None:
    transformer = elfatt_sd.apply_patch(tiny_transformers.flux_transformer(), method)
    with pytest.warns(UserWarning, match="on no schedule.*holds the scheduler"), positions() as found:
        for value in (1000.0, 700.5, 300.5, 20.5, 0.5):
            call(transformer, noise(0), torch.tensor(value))
    assert [(position.step, position.scheduled) for position in found] == [
        (place, False) for place in (0, 298, 698, 978, 998)
    ]


def test_what_a_caller_holds_is_let_go() -> None:
    """Up to Python 3.12, a look at variables keeps what they held; and what `locals()` gave is the caller's own."""
    transformer, own = (
        elfatt_sd.apply_patch(tiny_transformers.flux_transformer(), SHARED),
        tiny_transformers.flow_scheduler(),
    )
    kept = locals()
    own.set_timesteps(4)

    def loop() -> bool:
        mine, large = copy.deepcopy(own), torch.zeros(3)
        for timestep in mine.timesteps:
            call(transformer, noise(0), timestep)
        seen = weakref.ref(large)
        del large
        gc.collect()
        return seen() is None

    assert loop()
    assert kept["transformer"] is transformer


@pytest.mark.parametrize("unit", [FRACTION, RISING])
def test_a_tensor_of_fractions_is_a_schedule(unit: int) -> None:
    values = torch.linspace(1, 0, 11)[:-1].clone()
    handed = values if unit == FRACTION else 1 - values
    schedule = Schedule(lambda: None)
    assert [schedule.locate(value.expand(2), unit) for value in handed] == steps(10)


def test_a_loop_between_timesteps_stays_in_timesteps_to_its_end() -> None:
    """As k-diffusion's samplers work them out of noise levels; the last ones could be noise levels as well."""
    chosen: Any = diffusers.EulerDiscreteScheduler(**tiny_pipelines.SD15_SCHEDULE)
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
    never, own = tiny_transformers.flow_scheduler(), tiny_transformers.flow_scheduler()
    own.set_timesteps(4)
    schedule = Schedule(lambda: never)
    assert schedule.locate(torch.tensor([1.0]), FRACTION) == Position(0, 4)
    del own
    assert schedule.locate(torch.tensor([1.0]), FRACTION) == Position(0, 1000, False)
