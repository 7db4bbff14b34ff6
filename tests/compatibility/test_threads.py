"""Several schedulers and threads around one patched model: each run is counted by its own."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import generator, like, picture

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.config import METHODS
from elfatt_sd.errors import ElfattError
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.schedule import KEPT, Position

SHARED = PatchConfig("shared", (Phase(0.25), Phase(1.0, "cell_spread", cell=4, block_size=4, residual_steps=3)))
TEXT = tiny_transformers.embeds(width=8)
DYNAMIC = {"shift": 1.0, "use_dynamic_shifting": True, "base_shift": 1.15, "max_shift": 1.16}


def flux() -> tuple[Any, Any]:
    pipe, run = tiny_transformers.flux_run()
    pipe.scheduler = tiny_transformers.flow_scheduler(**DYNAMIC)
    return pipe, run


# Calls of a transformer in a step. Wan is given a timestep for each token, as with a first frame that is given.
CASES = {"Flux.1": 1, "Qwen-Image": 2, "Z-Image": 1, "Wan": 1, "HunyuanVideo": 1}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, Any, int]:
    pipe, run = tiny_transformers.made(request.param, **({"guidance_scale": 1.0} if request.param == "Wan" else {}))
    if request.param == "Wan":
        pipe.register_to_config(expand_timesteps=True)
    if request.param == "Flux.1":
        pipe.scheduler = tiny_transformers.flow_scheduler(**DYNAMIC)
    return pipe, run, CASES[request.param]


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


ACTIVE = [method for method in METHODS if method != "sd"]
SIZES = [(32, 32), (48, 32)]


def other(pipe: Any) -> Any:
    """A pipeline around the same models; transformers' fast tokenizers keep the padding of their latest call."""
    own = {name: copy.deepcopy(getattr(pipe, name)) for name in ("scheduler", "tokenizer")}
    return like(diffusers.StableDiffusionPipeline, pipe, **own)


def draw_with(pipe: Any, index: int, steps: int = 9) -> torch.Tensor:
    height, width = SIZES[index]
    size = {"height": height, "width": width}
    return pipe(
        "ab"[index], num_inference_steps=steps, guidance_scale=3.0, generator=generator(), output_type="pt", **size
    ).images


def in_threads(count: int, work: Any) -> list[Exception]:
    """Run `work(index)` in threads at once, and return what they raised."""
    errors: list[Exception] = []
    ready = threading.Barrier(count)

    def run(index: int) -> None:
        ready.wait()
        try:
            work(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("method", ACTIVE)
def test_each_thread_gets_the_image_that_it_gets_alone(folder: Path, method: str) -> None:
    first = tiny.sd15(folder)
    pipes = [first, other(first)]
    elfatt_sd.apply_patch(first, method)
    alone = [draw_with(pipe, index) for index, pipe in enumerate(pipes)]
    found: list[list[torch.Tensor]] = [[], []]
    errors = in_threads(2, lambda index: found[index].extend(draw_with(pipes[index], index) for _ in range(3)))
    assert not errors
    for index in range(2):
        assert all(torch.equal(image, alone[index]) for image in found[index])


def unet_images(unet: Any, scheduler: Any, index: int) -> Iterator[torch.Tensor]:
    """The images of a loop of one's own, one a step, as a server hands them on."""
    scheduler.set_timesteps(8)
    drawn = torch.Generator().manual_seed(index)
    image, text = torch.randn(2, 4, 8, 8, generator=drawn), torch.randn(2, 5, tiny.TEXT_WIDTH, generator=drawn)
    for timestep in scheduler.timesteps:
        with torch.no_grad():
            noise = unet(image, timestep, text).sample
        image = scheduler.step(noise, timestep, image).prev_sample
        yield image


@pytest.mark.parametrize("shared", [False, True], ids=["schedulers", "one scheduler"])
@pytest.mark.parametrize(
    "order", [[0, 1, 2] * 8, [0] * 3 + [1] * 5 + [2] * 8 + [0] * 5 + [1] * 3], ids=["turns", "late"]
)
def test_runs_of_one_thread_go_on_wherever_they_are_interrupted(order: list[int], shared: bool) -> None:
    """As tasks of an event loop, or a callback that draws another image."""
    unet = elfatt_sd.apply_patch(tiny.unet(sample_size=8), "elfatt-quality", block_size=16)
    schedulers = [tiny.ddim()] * 3 if shared else [tiny.ddim() for _ in range(3)]
    alone = [list(unet_images(unet, tiny.ddim(), index))[-1] for index in range(3)]
    runs = [unet_images(unet, scheduler, index) for index, scheduler in enumerate(schedulers)]
    found = {}
    for index in order:
        found[index] = next(runs[index])
    assert all(torch.equal(found[index], alone[index]) for index in range(3))


def test_a_run_goes_on_in_another_thread() -> None:
    """As an executor of a server hands each step to any of its threads."""
    unet = elfatt_sd.apply_patch(tiny.unet(sample_size=8), "elfatt-quality", block_size=16)
    alone = list(unet_images(unet, tiny.ddim(), 0))[-1]
    run = unet_images(unet, tiny.ddim(), 0)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        images = [pool.submit(next, run).result() for pool in (one, other, other, one, other, one, one, other)]
    assert torch.equal(images[-1], alone)


def test_runs_that_nobody_goes_on_with_are_let_go() -> None:
    unet = elfatt_sd.apply_patch(tiny.unet(sample_size=8), "elfatt-quality", block_size=16)
    runs, scheduler = unet.elfatt_patch.schedule, tiny.ddim()
    for _ in range(3):
        next(unet_images(unet, scheduler, 0))  # and is interrupted
    assert len(runs._mine) == 1
    kept = [unet_images(unet, tiny.ddim(), index) for index in range(KEPT + 2)]
    for run in kept:
        next(run)
    assert len(runs._mine) == KEPT


def test_threads_that_share_a_compiled_model_are_told_so() -> None:
    """Compiled code cannot ask for its thread: an error, never a wrong image."""
    torch._dynamo.reset()
    unet = tiny.unet(sample_size=8)
    elfatt_sd.apply_patch(unet, "elfatt")
    unet.compile(backend="eager")
    sample, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, tiny.TEXT_WIDTH)
    inside, outside = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread().name == "slow":
            inside.set()
            outside.wait(60)

    unet.register_forward_pre_hook(torch.compiler.disable(wait))
    slow = threading.Thread(target=lambda: unet(sample, 999, text), name="slow")
    slow.start()
    inside.wait(60)
    try:
        with pytest.raises(ElfattError, match="two threads call a compiled and patched model at once"):
            unet(sample, 999, text)
    finally:
        outside.set()
        slow.join()
    assert unet(sample, 999, text).sample.isfinite().all()
    torch._dynamo.reset()


def test_a_finished_thread_leaves_nothing(folder: Path) -> None:
    pipe = tiny.sd15(folder)
    elfatt_sd.apply_patch(pipe, "elfatt-quality")
    assert not in_threads(1, lambda index: draw_with(pipe, index))
    patch = pipe.unet.elfatt_patch
    assert not patch._calls
    assert not patch.schedule._runs
