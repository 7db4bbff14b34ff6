"""Threads with pipelines and schedulers of their own around one UNet, as servers have them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import generator, like

import elfatt_sd
from elfatt_sd.config import METHODS
from elfatt_sd.errors import ElfattError
from elfatt_sd.runtime.schedule import KEPT

ACTIVE = [method for method in METHODS if method != "sd"]
SIZES = [(32, 32), (48, 32)]


def other(pipe: Any) -> Any:
    """A pipeline around the same models; transformers' fast tokenizers keep the padding of their latest call."""
    own = {name: copy.deepcopy(getattr(pipe, name)) for name in ("scheduler", "tokenizer")}
    return like(diffusers.StableDiffusionPipeline, pipe, **own)


def draw(pipe: Any, index: int, steps: int = 9) -> torch.Tensor:
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
    alone = [draw(pipe, index) for index, pipe in enumerate(pipes)]
    found: list[list[torch.Tensor]] = [[], []]
    errors = in_threads(2, lambda index: found[index].extend(draw(pipes[index], index) for _ in range(3)))
    assert not errors
    for index in range(2):
        assert all(torch.equal(image, alone[index]) for image in found[index])


def test_threads_with_different_numbers_of_steps(folder: Path) -> None:
    first = tiny.sd15(folder, scheduler=tiny.ddim())
    pipes = [first, other(first)]
    elfatt_sd.apply_patch(first, "elfatt-quality", block_size=32)
    alone = [draw(pipe, index, 5 + 4 * index) for index, pipe in enumerate(pipes)]
    found: dict[int, torch.Tensor] = {}
    errors = in_threads(2, lambda index: found.update({index: draw(pipes[index], index, 5 + 4 * index)}))
    assert not errors
    assert all(torch.equal(found[index], alone[index]) for index in range(2))


def denoised(unet: Any, scheduler: Any, index: int) -> Iterator[torch.Tensor]:
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
    alone = [list(denoised(unet, tiny.ddim(), index))[-1] for index in range(3)]
    runs = [denoised(unet, scheduler, index) for index, scheduler in enumerate(schedulers)]
    found = {}
    for index in order:
        found[index] = next(runs[index])
    assert all(torch.equal(found[index], alone[index]) for index in range(3))


def test_a_run_goes_on_in_another_thread() -> None:
    """As an executor of a server hands each step to any of its threads."""
    unet = elfatt_sd.apply_patch(tiny.unet(sample_size=8), "elfatt-quality", block_size=16)
    alone = list(denoised(unet, tiny.ddim(), 0))[-1]
    run = denoised(unet, tiny.ddim(), 0)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        images = [pool.submit(next, run).result() for pool in (one, other, other, one, other, one, one, other)]
    assert torch.equal(images[-1], alone)


def test_runs_that_nobody_goes_on_with_are_let_go() -> None:
    unet = elfatt_sd.apply_patch(tiny.unet(sample_size=8), "elfatt-quality", block_size=16)
    runs, scheduler = unet.elfatt_patch.schedule, tiny.ddim()
    for _ in range(3):
        next(denoised(unet, scheduler, 0))  # and is interrupted
    assert len(runs._mine) == 1
    kept = [denoised(unet, tiny.ddim(), index) for index in range(KEPT + 2)]
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
    assert not in_threads(1, lambda index: draw(pipe, index))
    patch = pipe.unet.elfatt_patch
    assert patch.threads == 0
    assert patch.schedule.threads == 0
