"""What is kept from step to step: differences, within a limit of memory, and draws in buffers, forced on the CPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import generator, inputs, like, runner

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.benchmarking.variants import patched_layers
from elfatt_sd.config import METHODS
from elfatt_sd.methods import Blocks, Draws, Prepared
from elfatt_sd.phases import KEPT
from elfatt_sd.runtime import denoiser, memory
from elfatt_sd.runtime.memory import GIB, Residual, RunDraws, check_differences, copies_of, kept_bytes
from elfatt_sd.runtime.schedule import Run

SHARED = PatchConfig("shared", (Phase(1.0, "sampled", keys=16, residual_steps=2),))
LATE = PatchConfig("late", (Phase(0.5), Phase(1.0, "sampled", keys=16, residual_steps=2)))
GUIDED = PatchConfig("guided", (Phase(1.0, "sampled", keys=16, residual_steps=2, residual_guidance=True),))
WAN = pytest.mark.skipif(not hasattr(diffusers, "WanPipeline"), reason="this version of diffusers has no Wan")
ONE = kept_bytes([(72, 24)] * 2, torch.float32, "device") / GIB  # of one call of the small Wan


@pytest.fixture
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder)


@pytest.mark.parametrize("where", KEPT)
def test_differences_come_back_from_where_they_are_kept(pipe: Any, where: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        difference = torch.randn(2, 5, 64, generator=generator()).to(dtype)
        difference[0, 0], difference[0, 1] = 0.0, 100 * difference[0, 1]
        kept = Residual.keep(difference, where)
        back = kept.restore()
        assert (back.dtype, back.device) == (dtype, difference.device)
        if where == "fp8":
            assert kept.values.element_size() == 1
            largest = difference.abs().amax(-1, keepdim=True).float()
            assert ((back - difference).float().abs() <= largest / 16 + 1e-6).all()
        else:
            assert torch.equal(back, difference)
    run = runner(pipe)
    untouched, images = run(), {}
    for each in ("device", where):
        with elfatt_sd.patched(pipe, SHARED, residuals=each) as plan:
            images[each] = run()
    assert torch.equal(images[where], images["device"]) == (where != "fp8")
    error, rounding = (images["device"] - untouched).norm(), (images[where] - images["device"]).norm()
    assert rounding < error, "8 bits cost less than the approximation"
    narrow, patched = where == "fp8", [layer for layer in plan.layers if layer.patched]
    assert plan.kept_bytes == sum(layer.tokens * (layer.channels * (2 - narrow) + 4 * narrow) for layer in patched)
    assert ("in 8 bits, kept on the device" if narrow else f"in 16 bits, kept on the {where}") in str(plan)


@pytest.mark.parametrize(
    ("device", "limit", "says"),
    [
        ("cuda", 3.0, ""),
        ("cuda", 2.0, r"keep 2\.67 GiB on cuda, more than the 2\.00 GiB.*residual_steps=1, .*'fp8'.*'host'"),
    ],
)
def test_the_limit_of_a_large_model(device: str, limit: float, says: str) -> None:
    """Flux at 1024x1024 has 57 layers of 4096 tokens and 3072 channels; two rows in 16 bits."""
    run, held, key = Run(), memory.Memory(), denoiser.Owner()
    held.place(0, (2,))
    held.needs[0, 2] = kept_bytes([(2 * 4096, 3072)] * 57, torch.bfloat16, "device")
    assert kept_bytes([(2 * 4096, 3072)] * 57, torch.bfloat16, "fp8") < 0.51 * held.needed
    run.kept[key] = held
    config = PatchConfig.preset("elfatt-quality", residual_limit=limit)
    with pytest.raises(ElfattError, match=says) if says else contextlib.nullcontext():
        check_differences(run, config, torch.device(device))


def check_limit(pipe: Any, run: Callable[[], Any], config: PatchConfig, needed: float) -> None:
    """A run goes with a limit of the GiB that it needs, and is refused before its first step with less."""
    steps: list[int] = []
    elfatt_sd.apply_patch(pipe, config, residual_limit=1.001 * needed)
    run()
    elfatt_sd.apply_patch(pipe, config, residual_limit=0.999 * needed)
    handle = (pipe.unet if hasattr(pipe, "unet") else pipe.transformer).register_forward_hook(
        lambda *_: steps.append(1)
    )
    with pytest.raises(
        ElfattError, match=r"residual_steps would keep [\d.]+ MiB on cpu, more than the .*residual_limit"
    ):
        run()
    handle.remove()
    assert len(steps) <= 1, "of the step's first call"


@pytest.mark.parametrize("clip", [False, True])
def test_too_much_is_refused_in_the_first_step(pipe: Any, clip: bool) -> None:
    """Also for a phase that comes later. Every frame of a clip is a row; rows with the prompt may stand for others."""
    if clip:
        pipe = like(diffusers.AnimateDiffPipeline, pipe, motion_adapter=tiny.motion_adapter())
    run = runner(pipe, num_inference_steps=6, **({"num_frames": 3} if clip else {}))
    frames, layers = 3 if clip else 1, [layer for layer in elfatt_sd.plan(pipe, SHARED).layers if layer.patched]
    of_one = kept_bytes([(layer.tokens, layer.channels) for layer in layers], torch.float32, "device") / GIB
    for config, rows in ((SHARED, 2 * frames), (LATE, 2 * frames), (GUIDED, frames)):
        check_limit(pipe, run, config, rows * of_one)


@WAN
def test_all_calls_of_a_step_count() -> None:
    """Wan calls its transformer once more for guidance; a limit is that of both, and a second transformer counts."""
    pipe, run = tiny_transformers.wan()
    for guidance, config, calls in ((1.0, LATE, 1), (3.0, LATE, 2), (3.0, GUIDED, 1)):
        check_limit(
            pipe, lambda guidance=guidance: run(num_inference_steps=8, guidance_scale=guidance), config, calls * ONE
        )
    pipe, run = tiny_transformers.wan(second=True)
    elfatt_sd.apply_patch(pipe, SHARED, residuals="host")
    kept: list[bool] = []

    def see(*_: Any) -> None:
        patch = pipe.transformer.elfatt_patch
        kept.append(bool(patch.schedule.run.kept[patch].residuals))

    pipe.transformer_2.register_forward_hook(see)
    run(num_inference_steps=12)
    assert kept[0] and not any(kept[2:]), "both are held in the step of the change alone"
    elfatt_sd.apply_patch(pipe, SHARED, residual_limit=2.01 * ONE)
    with pytest.raises(ElfattError, match="residual_steps would keep"):
        run(num_inference_steps=12)


def test_rows_of_the_same_latents_are_seen() -> None:
    latents = torch.randn(2, 4, 8, 8, generator=generator())
    assert [copies_of(torch.cat([latents] * count)) for count in (1, 2, 3)] == [1, 2, 3]
    assert copies_of(torch.cat([latents, latents.flip(0)])) == 1
    assert copies_of(latents[:1]) == 1
    assert copies_of(latents[:1].expand(4, -1, -1, -1)) == 1, "one image that stands for several"


def test_guidance_shares_what_is_measured_with_the_prompt(pipe: Any) -> None:
    """In the step that measures, rows with the prompt are exact; those without are corrected by the same difference."""
    found, images, run = list[torch.Tensor](), {}, runner(pipe)
    pipe.unet.register_forward_hook(lambda module, given, output: found.append(output[0]))
    for name, config in {"untouched": PatchConfig("sd"), "shared": SHARED, "guided": GUIDED}.items():
        found.clear()
        with elfatt_sd.patched(pipe, config):
            images[name] = run()
        images[f"{name}, step 0"] = found[0]
    (without, given), (alike, exact) = images["guided, step 0"].chunk(2), images["untouched, step 0"].chunk(2)
    torch.testing.assert_close(given, exact, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(without, alike, atol=1e-4)
    torch.testing.assert_close(images["shared, step 0"], images["untouched, step 0"])
    errors = {name: float((images[name] - images["untouched"]).norm()) for name in ("shared", "guided")}
    assert 0 < errors["guided"] < 4 * errors["shared"], "nearly as close, for half of the exact attention"


@WAN
def test_guidance_in_two_calls_shares_a_difference() -> None:
    """Wan's second call of a step adds what the first one measured."""
    pipe, run = tiny_transformers.wan()
    given = {"num_inference_steps": 4, "guidance_scale": 3.0}
    untouched, found = run(**given), list[torch.Tensor]()
    for config, settings in ((GUIDED, {}), (SHARED, {}), (GUIDED, {"keys": 72, "groups": 1})):
        with elfatt_sd.patched(pipe, config, **settings):
            found.append(run(**given))
    guided, shared, all_keys = found
    torch.testing.assert_close(all_keys, untouched, atol=1e-5, rtol=1e-4)
    assert not torch.equal(guided, shared)
    assert float((guided - untouched).norm()) < 4 * float((shared - untouched).norm())


@pytest.mark.parametrize("given", [{"guidance_scale": 1.0}, {"prompt": ["a", "b"], "guidance_scale": 1.0}, "split"])
def test_nothing_is_shared_where_latents_differ(pipe: Any, given: Any) -> None:
    """Nor where a layer splits its input: a part has not the rows without the prompt first and those with it last."""
    for module in [part for name, part in pipe.unet.named_modules() if name.endswith(".attn1") and given == "split"]:
        whole = module.forward
        module.forward = lambda tokens, whole=whole, **named: torch.cat(
            [whole(part, **named) for part in tokens.chunk(len(tokens))]
        )
    found = []
    for config in (SHARED, GUIDED):
        with elfatt_sd.patched(pipe, config):
            found.append(runner(pipe, **({} if given == "split" else given))())
    assert torch.equal(*found)


def test_latents_in_a_buffer_are_not_those_of_the_call_before(pipe: Any) -> None:
    """Two images in two calls of each step, handed over in the same memory or not."""
    latents = torch.randn(2, 1, 4, 16, 16, generator=generator())
    text, buffer = torch.randn(1, 7, tiny.TEXT_WIDTH), torch.empty(1, 4, 16, 16)
    found: list[list[torch.Tensor]] = []
    for own in (True, False):
        with torch.no_grad(), elfatt_sd.patched(pipe.unet, GUIDED):
            calls = itertools.product(torch.arange(999, -1, -250), latents)
            given = ((each if own else buffer.copy_(each), timestep) for timestep, each in calls)
            found.append([pipe.unet(*each, text).sample for each in given])
    assert all(map(torch.equal, *found))


# What is drawn for several steps at once, as on a GPU.


@dataclass(frozen=True)
class Own(Blocks):
    """An attention of somebody else's, which may look at the numbers, and so prepares in every step."""

    name = "own blocks"

    def prepare(self, grid: Any, draws: Draws) -> Prepared:
        assert draws.ahead is None
        order = draws.upload(draws.uniform("own", grid.tokens)).argsort()
        return Prepared(order, order.argsort())


STEPS = 6
CONFIGS = {
    **{method: PatchConfig.preset(method, levels=2) for method in METHODS if method not in ("sd", "elfatt-quality")},
    "tome, fixed": PatchConfig.preset("tome", use_rand=False),
    "tome, reused": PatchConfig.preset("tome", reuse_steps=4),
    "sampled, corrected": PatchConfig("own", (Phase(1.0, "sampled", keys=16, residual_steps=3),)),
    "sampled, one draw": PatchConfig("own", (Phase(1.0, "sampled", keys=16, groups=3, redraw=False),)),
    "two phases": PatchConfig("own", (Phase(0.5, "sampled", keys=16, lattice=False), Phase(1.0, ratio=0.3))),
    "spread": PatchConfig("own", (Phase(1.0, "block", block_size=24, block_order="spread", second_order="curve"),)),
    "cells": PatchConfig("own", (Phase(1.0, "cell_spread", block_size=16, cell=8),)),
    "somebody else's": PatchConfig("own", (Phase(1.0, Own(block_size=16)),)),
}


def outputs(config: PatchConfig, first: int = 0) -> list[torch.Tensor]:
    """Call a UNet in every step, twice in each: for one picture and for a smaller one."""
    unet, scheduler, (sample, text) = elfatt_sd.apply_patch(tiny.unet(), config), tiny.ddim(), inputs(torch.float32)
    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        calls = itertools.product(scheduler.timesteps[first:], (16, 8))
        return [unet(sample[:, :, :rows], timestep, text).sample for timestep, rows in calls]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let the CPU draw ahead as a GPU does, and count the steps of each time that it draws."""

    def forced(most_bytes: int = 1 << 20) -> list[int]:
        times, make = list[int](), RunDraws._make

        def count(self: RunDraws, first: int) -> None:
            make(self, first)
            times.append(len(self._steps))

        monkeypatch.setattr(denoiser, "AT_ONCE", ())
        monkeypatch.setattr(memory, "MOST_BYTES", most_bytes)
        monkeypatch.setattr(RunDraws, "_make", count)
        return times

    return forced


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bit_for_bit(force: Any, name: str) -> None:
    wanted, times = outputs(CONFIGS[name], 1), force()
    assert all(map(torch.equal, outputs(CONFIGS[name], 1), wanted))
    assert (name in ("tome, fixed", "somebody else's")) is not any(steps > 1 for steps in times)


def test_few_steps_at_once_where_they_take_memory(force: Any) -> None:
    wanted, times = outputs(CONFIGS["tome"]), force(20000)  # two steps of three layers of 256 tokens, four of 128
    assert all(map(torch.equal, outputs(CONFIGS["tome"]), wanted))
    assert 1 < max(times) < STEPS and sum(times) == 2 * STEPS


def test_a_step_is_one_copy_into_buffers_that_stay(force: Any) -> None:
    """Compiled code and CUDA graphs find the same tensors in every step, at places that are aligned."""
    force()
    unet, scheduler = elfatt_sd.apply_patch(tiny.unet(), "elfatt-fast", block_size=16), tiny.ddim()
    scheduler.set_timesteps(STEPS)
    seen, values = set(), set()
    with torch.no_grad():
        for timestep in scheduler.timesteps[2:]:
            unet(torch.zeros(1, 4, 16, 16), timestep, torch.zeros(1, 3, tiny.TEXT_WIDTH))
            keys = [layer.patch.latest.states[layer.index].prepared.keys for layer in patched_layers(unet)]
            seen.add(tuple((id(each), each.data_ptr()) for each in keys))
            values.add(tuple(tuple(each.tolist()) for each in keys))
    assert (len(seen), len(values)) == (1, STEPS - 2)
    first = keys[0].untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == first and each.data_ptr() % 16 == 0 for each in keys)


def test_with_gradients_every_step_has_its_own(force: Any) -> None:
    """A backward pass reads what a step drew, maybe after other steps."""
    times, unet, scheduler = force(), elfatt_sd.apply_patch(tiny.unet(), "tome"), tiny.ddim()
    scheduler.set_timesteps(2)
    sample = torch.zeros(1, 4, 16, 16, requires_grad=True)
    made = [unet(sample, timestep, torch.zeros(1, 3, tiny.TEXT_WIDTH)).sample.sum() for timestep in scheduler.timesteps]
    torch.stack(made).sum().backward()  # type: ignore[no-untyped-call]
    assert sample.grad is not None and not times


def test_a_model_that_moves_within_a_run_draws_on_its_new_device(force: Any) -> None:
    force()
    unet, scheduler = elfatt_sd.apply_patch(tiny.unet(), "tome"), tiny.ddim()
    scheduler.set_timesteps(STEPS)
    for timestep, device in zip(scheduler.timesteps, ("cpu", "cpu", "meta"), strict=False):
        unet.to(device)
        given = [torch.zeros(*shape, device=device) for shape in ((1, 4, 16, 16), (1, 3, tiny.TEXT_WIDTH))]
        with torch.no_grad():
            assert unet(given[0], timestep, given[1]).sample.device.type == device
