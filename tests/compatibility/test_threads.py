"""Several schedulers and threads around one patched model: each run is counted by its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from support import checks
from support import tiny_pipelines as tiny
from support.checks import counting, like, steps
from support.tiny_transformers import flow_scheduler, flux_transformer, made, runner

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import family_of, main_denoiser, unwrap
from elfatt_sd.methods import Grid
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.schedule import KEPT, Position

SHARED = PatchConfig("shared", (Phase(0.25), Phase(1.0, "cell_spread", cell=4, block_size=4, residual_steps=3)))
DYNAMIC = {"shift": 1.0, "use_dynamic_shifting": True, "base_shift": 1.15, "max_shift": 1.16}
# Calls of a transformer in a step. Wan is given a timestep for each token, as with a first frame that is given.
CALLS = {"Flux.1": 1, "Qwen-Image": 2, "Wan": 1}


def case(name: str) -> tuple[Any, Callable[[Any], Any]]:
    """A pipeline of a family, and what draws with a pipeline like it."""
    pipe, run = made(name, **({"guidance_scale": 1.0} if name == "Wan" else {}))
    if name == "Wan":
        pipe.register_to_config(expand_timesteps=True)
    if name == "Flux.1":
        pipe.scheduler = flow_scheduler(**DYNAMIC)
    return pipe, lambda pipe: runner(pipe, **run.given)


def shifted(pipe: Any, shift: float) -> Any:
    """A pipeline around the same models with a scheduler of its own."""
    other = copy.copy(pipe)
    other.scheduler = flow_scheduler(shift=shift)
    return other


@contextlib.contextmanager
def positions() -> Iterator[list[Position]]:
    """The positions of all calls while the block runs."""
    with pytest.MonkeyPatch.context() as patched:
        yield counting(patched, Patch, "begin", lambda patch, position, *_: position)


@pytest.mark.parametrize(("name", "target"), [("Flux.1", "module"), ("Qwen-Image", "pipeline"), ("Wan", "copy")])
def test_each_run_is_counted_by_the_scheduler_that_draws(name: str, target: str) -> None:
    """Whatever was patched, and whichever of two pipelines around the model draws first."""
    pipe, of = case(name)
    with elfatt_sd.patched(shifted(pipe, 7.0), SHARED):
        own = of(shifted(pipe, 7.0))(num_inference_steps=9)
    elfatt_sd.apply_patch(pipe if target == "pipeline" else pipe.transformer, SHARED)
    if target == "copy":
        pipe = copy.deepcopy(pipe)
    second = shifted(pipe, 7.0)
    for each, count in ((second, 9), (pipe, 8), (second, 9), (pipe, 5), (shifted(pipe, 2.0), 7)):
        with positions() as found:
            image = of(each)(num_inference_steps=count)
        assert found == steps(count, calls=CALLS[name])
        assert each is not second or torch.equal(image, own)


# Threads.


def at_once(draws: list[Callable[[], Any]]) -> list[Any]:
    ready = threading.Barrier(len(draws))

    def run(draw: Callable[[], Any]) -> Any:
        ready.wait()
        return draw()

    with ThreadPoolExecutor(len(draws)) as pool:
        return list(pool.map(run, draws))


@pytest.mark.parametrize("name", [*CALLS, "elfatt", "elfatt-quality"])
def test_threads_get_the_images_that_they_get_alone(folder: Path, name: str) -> None:
    """And leave nothing behind. transformers' fast tokenizers keep the padding of their latest call."""
    if name in CALLS:
        pipe, of = case(name)
        elfatt_sd.apply_patch(pipe, SHARED)
        each = [(shifted(pipe, shift), 6 + index // 2) for index, shift in enumerate((3.0, 3.0, 8.0))]
        draws = [functools.partial(of(one), num_inference_steps=count) for one, count in each]
    else:
        pipe = tiny.sd15(folder)
        elfatt_sd.apply_patch(pipe, name)
        own = {part: copy.deepcopy(getattr(pipe, part)) for part in ("scheduler", "tokenizer")}
        given = {"num_inference_steps": 6, "guidance_scale": 3.0, "width": 32}
        other = like(diffusers.StableDiffusionPipeline, pipe, **own)
        draws = [checks.runner(pipe, "a", height=32, **given), checks.runner(other, "b", height=48, **given)]
    alone = [draw() for draw in draws]
    for _ in range(2):
        assert all(map(torch.equal, at_once(draws), alone))
    gc.collect()
    patch = main_denoiser(pipe).elfatt_patch
    assert (len(patch._calls), len(patch.schedule._runs)) == (0, 1)


@torch.no_grad()
def call(model: Any, image: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Call a UNet, or a transformer of Flux as its pipeline does."""
    name, grid = ("sample", Grid.image(8, 8)) if hasattr(model, "conv_in") else ("hidden_states", Grid.image(6, 4))
    given = family_of(model).arguments(unwrap(model), grid, 1, torch.ones)
    time = timestep if name == "sample" else timestep.expand(1) / 1000
    return model(**{**given, name: image, "timestep": time}).sample  # type: ignore[no-any-return]


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (1, 24, 16), generator=torch.Generator().manual_seed(seed))


def denoised(model: Any, scheduler: Any, seed: int) -> Iterator[torch.Tensor]:
    """The images of a loop of one's own, one a step, as a server hands them on."""
    scheduler.set_timesteps(8)
    image = noise(seed, 1, 4, 8, 8) if hasattr(model, "conv_in") else noise(seed)
    for timestep in scheduler.timesteps:
        image = scheduler.step(call(model, image, timestep), timestep, image).prev_sample
        yield image


def patched_unet() -> Any:
    return elfatt_sd.apply_patch(tiny.unet(sample_size=8), "elfatt-quality", block_size=16)


def patched_flux() -> Any:
    return elfatt_sd.apply_patch(flux_transformer(), SHARED)


@pytest.mark.parametrize(
    ("make", "scheduler", "shared"),
    [(patched_flux, flow_scheduler, False), (patched_unet, tiny.ddim, False), (patched_unet, tiny.ddim, True)],
    ids=["Flux.1", "UNet", "UNet, one scheduler"],
)
def test_runs_of_one_thread_go_on_wherever_they_are_interrupted(make: Any, scheduler: Any, shared: bool) -> None:
    """As tasks of an event loop. The values of equal schedules tell nothing; whose they are, the callers do."""
    model, one = make(), scheduler()
    alone = [list(denoised(model, scheduler(), seed))[-1] for seed in range(3)]
    late = [0] * 3 + [1] * 5 + [2] * 8 + [0] * 5 + [1] * 3
    for order in ([0, 1, 2] * 8, late, [0, 1, 1, 0, 2, 0, 1, 2, 2] * 2 + [0, 1, 2] * 2):
        runs = [denoised(model, one if shared else scheduler(), seed) for seed in range(3)]
        found = {seed: next(runs[seed]) for seed in order}
        assert all(torch.equal(found[seed], alone[seed]) for seed in range(3))


def test_a_run_goes_on_in_another_thread() -> None:
    """As an executor of a server hands each step to any of its threads."""
    unet = patched_unet()
    alone, run = list(denoised(unet, tiny.ddim(), 0))[-1], denoised(unet, tiny.ddim(), 0)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        images = [pool.submit(next, run).result() for pool in (one, other, other, one, other, one, one, other)]
    assert torch.equal(images[-1], alone)


def test_runs_that_nobody_goes_on_with_are_let_go() -> None:
    unet, scheduler = patched_unet(), tiny.ddim()
    for _ in range(3):
        next(denoised(unet, scheduler, 0))  # and is interrupted
    assert len(unet.elfatt_patch.schedule._mine) == 1
    kept = [denoised(unet, tiny.ddim(), index) for index in range(KEPT + 2)]
    assert all(next(run) is not None for run in kept)
    assert len(unet.elfatt_patch.schedule._mine) == KEPT


def test_threads_that_share_a_compiled_model_are_told_so(fresh_compiler: None) -> None:
    """Compiled code cannot ask for its thread: an error, never a wrong image."""
    unet = elfatt_sd.apply_patch(tiny.unet(**tiny.ONE_LAYER), "elfatt")
    unet.compile(backend="eager")
    inside, outside = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread().name == "slow":
            inside.set()
            outside.wait(60)

    unet.register_forward_pre_hook(torch.compiler.disable(wait))
    given = noise(0, 1, 4, 8, 8), torch.tensor(999)
    slow = threading.Thread(target=call, args=(unet, *given), name="slow")
    slow.start()
    inside.wait(60)
    try:
        with pytest.raises(ElfattError, match="two threads call a compiled and patched model at once"):
            call(unet, *given)
    finally:
        outside.set()
        slow.join()
    assert call(unet, *given).isfinite().all()


# Loops of one's own: where the scheduler is found.


def test_a_function_in_between_that_holds_another_scheduler() -> None:
    """At some distance: the one whose count agrees is meant, although the other one has the same values."""

    def serve(server: Any, timestep: torch.Tensor) -> torch.Tensor:
        return call(server.pipe.transformer, noise(0), timestep)

    pipe, of = case("Flux.1")
    pipe.scheduler = flow_scheduler()
    server = SimpleNamespace(pipe=pipe)
    elfatt_sd.apply_patch(pipe, SHARED)
    for _ in range(2):
        own = copy.deepcopy(pipe.scheduler)
        own.set_timesteps(6)
        with positions() as found:
            for timestep in own.timesteps:
                own.step(serve(server, timestep), timestep, noise(0))
        assert found == steps(6)
        of(pipe)(num_inference_steps=6)


OF_THE_MODULE = [flow_scheduler()]


def test_schedulers_that_are_never_stepped() -> None:
    """In a list, in an object; or in the module, of another thread."""
    transformer = patched_flux()

    def loop(held: Any, count: int) -> None:
        inside = held if isinstance(held, list) else (held if isinstance(held, dict) else vars(held)).values()
        next(iter(inside)).set_timesteps(count)
        for value in next(iter(inside)).timesteps.tolist():
            call(transformer, noise(0), torch.tensor(value))

    for held in ([flow_scheduler()], {"flow": flow_scheduler()}, SimpleNamespace(it=flow_scheduler(), more=())):
        for count in (6, 4):
            with positions() as found:
                loop(held, count)
            assert found == steps(count)
    with positions() as found:
        at_once([functools.partial(loop, OF_THE_MODULE, 5)])
    assert found == steps(5)


@pytest.mark.parametrize("method", ["elfatt-fast", "elfatt-quality"])
def test_a_value_on_no_schedule_is_not_placed_in_silence(method: str) -> None:
    transformer = elfatt_sd.apply_patch(flux_transformer(), method)
    with pytest.warns(UserWarning, match="on no schedule.*holds the scheduler"), positions() as found:
        for value in (1000.0, 700.5, 300.5, 20.5, 0.5):
            call(transformer, noise(0), torch.tensor(value))
    assert [tuple(position) for position in found] == [(step, 1000, False) for step in (0, 298, 698, 978, 998)]


def test_what_a_caller_holds_is_let_go() -> None:
    """Up to Python 3.12, a look at variables keeps what they held; and what `locals()` gave is the caller's own."""
    transformer, own = patched_flux(), flow_scheduler()
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
