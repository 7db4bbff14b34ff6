"""What calls and steps keep for one another: matchings, differences, within a limit of memory, and draws in buffers."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import COLUMNS, ROWS, generator, inputs, like, recorded, runner
from torch import Tensor

import elfatt_sd
import elfatt_sd.runtime.processor as processor_module
from elfatt_sd.benchmarking.variants import patched_layers
from elfatt_sd.config import LayerPhases, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import Given, find_layers, main_denoiser
from elfatt_sd.families.base import PlainProjections
from elfatt_sd.methods import Blocks, Draws, Prepared
from elfatt_sd.phases import EXACT, Kept
from elfatt_sd.runtime import denoiser, memory
from elfatt_sd.runtime.denoiser import KEPT_CALLS
from elfatt_sd.runtime.memory import GIB, Residual, RunDraws, copies_of, kept_bytes
from elfatt_sd.runtime.schedule import Position, Run


def begun(config: Any = None, steps: int = 6) -> tuple[Any, Tensor, tuple[Tensor, Tensor], Any]:
    """A patched UNet, the timesteps of a run, its input and text, and its first layer."""
    scheduler, config = tiny.ddim(), config or PatchConfig("corrected", (SAMPLED,))
    scheduler.set_timesteps(steps)
    unet = elfatt_sd.apply_patch(tiny.unet(), config)
    return unet, scheduler.timesteps, inputs(torch.float32), find_layers(unet)[0].attention


@torch.no_grad()
def test_a_matching_is_reused_within_its_phase_alone() -> None:
    """Also where a phase begins amid the steps that share a matching."""
    phases = (Phase(0.25, "softmax", ratio=0.2, stride=4), Phase(1.0, "softmax", ratio=0.5))
    unet, timesteps, (sample, text), attention = begun(PatchConfig("two", phases, reuse_steps=4), 4)
    merged = list[int]()
    attention.to_q.register_forward_hook(lambda _, given, result: merged.append(result.shape[1]))
    for timestep in timesteps:
        unet(sample, timestep, text)
    assert merged == [256 - 51, 128, 128, 128]


SAMPLED = Phase(1.0, "sampled", block_size=16, residual_steps=3)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(2,), (2, 2, 1)], ids=["whole", "parts"])
@pytest.mark.parametrize(
    "phase",
    [
        SAMPLED,
        Phase(1.0, "block", block_size=16, block_order="spread", residual_steps=3),
        Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8, residual_steps=3),
    ],
    ids=lambda phase: phase.attention.name,
)
def test_a_shared_difference_is_that_of_the_first_step(phase: Phase, sizes: tuple[int, ...]) -> None:
    """After the exact first step, the approximation changes with its input, the difference does not; in parts, too."""
    _, _, (sample, _), attention = begun(PatchConfig("corrected", (phase,)))
    layer, run, noise = attention.elfatt_state, Run(), generator()
    draws, differences = [], list[Tensor]()
    for step in range(3):
        layer.patch.begin(Position(step, 6), run, Given.latent(sample, 0))
        for part, size in enumerate(sizes):
            tokens = torch.randn(size, ROWS * COLUMNS, attention.query_dim, generator=noise)
            result = attention(tokens)
            own = processor_module.approximate(PlainProjections(attention, tokens), layer.state, phase, tokens)
            layer.state.candidates = None  # as a processor leaves it
            if step == 0:
                differences.append(AttnProcessor2_0()(attention, tokens) - own)
                assert differences[part].abs().max() > 1e-3, "else this test could not fail"
            torch.testing.assert_close(result, own + differences[part], atol=1e-5, rtol=0)
        parts = (*(layer.state.split or ()), *vars(layer.state.prepared).values())
        draws.append([each for each in parts if isinstance(each, Tensor)])
    for kinds in zip(*draws, strict=True):
        assert all(drawn is kinds[0] or torch.equal(drawn, kinds[0]) for drawn in kinds)


@torch.no_grad()
def test_differences_are_measured_anew() -> None:
    """In every group of steps, in another run, at another size or batch; each layer once, and not for no other step."""
    unet, timesteps, (sample, text), _ = begun(steps=7)
    keys = list[int]()
    for layer in filter(lambda layer: layer.downsample == 1, find_layers(unet)):
        layer.attention.to_k.register_forward_hook(lambda _, given, result: keys.append(result.shape[1]))

    def measured(steps: Any, sample: Tensor = sample, text: Tensor = text) -> list[int]:
        found = []
        for timestep in steps:
            keys.clear()
            unet(sample, timestep, text)
            sampled = keys.count(32)
            found.append(keys.count(sample.shape[2] * COLUMNS))
            assert sampled == (0 if timestep == timesteps[-1] else 3), "the last step's difference is of no use"
        return found

    assert measured(timesteps) == [3, 0, 0, 3, 0, 0, 3]
    assert measured(timesteps[:2]) == [3, 0]
    assert measured(timesteps[:2]) == [3, 0], "a run that was broken off leaves nothing"
    assert measured(timesteps[1:2], sample[:, :, :8]) == [3]
    assert measured(timesteps[1:3], sample[:1], text[:1]) == [3, 0]


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [PatchConfig("corrected", (SAMPLED,)), PatchConfig("matched", (Phase(1.0, ratio=0.5),), reuse_steps=3)],
    ids=lambda config: config.method,
)
def test_calls_of_one_step_keep_their_own(config: PatchConfig) -> None:
    """A panorama calls the UNet once for each view; guidance may call it once with the prompt and once without."""
    (unet, timesteps, (sample, text), _), noise = begun(config), generator()
    views = [(sample, text), (sample, torch.zeros_like(text))]
    views += [(torch.randn(2, 4, rows, 16, generator=noise), text) for rows in (16, 8)]
    alone = [[unet(view, timestep, each).sample for timestep in timesteps] for view, each in views]
    for step, timestep in enumerate(timesteps):
        for (view, each), expected in zip(views, alone, strict=True):
            assert torch.equal(unet(view, timestep, each).sample, expected[step])


def test_calls_on_no_schedule_share_nothing() -> None:
    """They may be those of score distillation, or a preview within a run: each is exact, and that is said once."""
    unet, timesteps, (sample, text), _ = begun()
    exact = {number: tiny.unet()(sample, number, text).sample for number in (960, 100)}
    alone = [unet(sample, timestep, text).sample for timestep in timesteps]
    with pytest.warns(UserWarning, match="on no schedule: they are exact") as warned:
        for timestep, expected in zip(timesteps, alone, strict=True):
            assert torch.equal(unet(sample, timestep, text).sample, expected)
            for number, found in exact.items():
                torch.testing.assert_close(unet(sample, number, text).sample, found, atol=1e-5, rtol=0)
    assert len(warned) == 1


@torch.no_grad()
def test_a_call_that_is_repeated_takes_nothing_over() -> None:
    """As in a loop of the user's own; and what such calls keep does not grow for ever."""
    unet, timesteps, (sample, text), attention = begun()
    exact = unet(sample, timesteps[0], text).sample
    for _ in range(KEPT_CALLS + 3):
        assert torch.equal(unet(sample, timesteps[0], text).sample, exact)
    assert {len(each.kept) for each in attention.elfatt_state.patch.latest.memory.residuals.values()} == {KEPT_CALLS}
    assert not torch.equal(unet(sample, timesteps[1], text).sample, exact)


def test_no_difference_outlives_its_run() -> None:
    """What decodes the latents finds the memory free; gradients do not reach back to an earlier step."""
    (unet, timesteps, (sample, text), attention), held = begun(), list[int]()
    for timestep in timesteps:
        unet(sample, timestep, text).sample.sum().backward()
        layers = attention.elfatt_state.patch.layers
        kept = [one.values for layer in layers for one in layer.latest.residuals.values()]
        assert not any(tensor.requires_grad for tensor in kept)
        held.append(len(kept))
    assert held == [3, 3, 3, 3, 3, 0]


# Where differences are kept, within a limit of memory, and which calls and rows share them.

SHARED = PatchConfig("shared", (Phase(1.0, "sampled", keys=16, residual_steps=2),))
LATE = PatchConfig("late", (Phase(0.5), Phase(1.0, "sampled", keys=16, residual_steps=2)))
GUIDED = PatchConfig("guided", (Phase(1.0, "sampled", keys=16, residual_steps=2, residual_guidance=True),))
ONE = kept_bytes([(72, 24)] * 2, torch.float32, "device") / GIB  # of one call of the small Wan


@pytest.fixture
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder)


@pytest.mark.parametrize("where", get_args(Kept))
def test_differences_come_back_from_where_they_are_kept(pipe: Any, where: Any) -> None:
    """8 bits lose a sixteenth of a token's largest value at most, and less than the approximation does."""
    narrow = where == "fp8"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        difference = torch.randn(2, 5, 64, generator=generator()).to(dtype)
        difference[0, 0], difference[0, 1] = 0.0, 100 * difference[0, 1]
        kept = Residual.keep(difference, where)
        back, largest = kept.restore(), difference.abs().amax(-1, keepdim=True).float()
        assert (back.dtype, back.device, kept.values.element_size()) == (
            dtype,
            difference.device,
            1 if narrow else dtype.itemsize,
        )
        assert ((back - difference).float().abs() <= narrow * (largest / 16 + 1e-6)).all()
    untouched, images = runner(pipe)(), []
    for each in ("device", where):
        with elfatt_sd.patched(pipe, SHARED, residuals=each) as plan:
            images.append(runner(pipe)())
    assert torch.equal(*images) is not narrow
    assert (images[1] - images[0]).norm() < (images[0] - untouched).norm()
    patched = [layer for layer in plan.layers if layer.patched]
    assert plan.kept_bytes == sum(layer.tokens * (layer.channels * (2 - narrow) + 4 * narrow) for layer in patched)
    assert ("in 8 bits, kept on the device" if narrow else f"in 16 bits, kept on the {where}") in str(plan)


def check_limit(pipe: Any, run: Callable[[], Any], config: PatchConfig, needed: float) -> None:
    """A run goes with a limit of the GiB that it needs, and is refused before its first step with less."""
    steps: list[int] = []
    elfatt_sd.apply_patch(pipe, config, residual_limit=1.001 * needed)
    run()
    elfatt_sd.apply_patch(pipe, config, residual_limit=0.999 * needed)
    handle = main_denoiser(pipe).register_forward_hook(lambda *_: steps.append(1))
    with pytest.raises(ElfattError, match=r"would keep [\d.]+ MiB on cpu, more than the .*residual_limit"):
        run()
    handle.remove()
    assert len(steps) <= 1, "of the step's first call"


@pytest.mark.parametrize("clip", [False, True])
def test_too_much_is_refused_in_the_first_step(pipe: Any, clip: bool) -> None:
    """Also for a phase that comes later. Every frame of a clip is a row; rows with the prompt may stand for others."""
    if clip:
        pipe = like(diffusers.AnimateDiffPipeline, pipe, motion_adapter=tiny.motion_adapter())
    run = runner(pipe, num_inference_steps=6, **({"num_frames": 3} if clip else {}))
    frames, plan = 3 if clip else 1, elfatt_sd.plan(pipe, SHARED, frames=3 if clip else None)
    layers = [layer for layer in plan.layers if layer.patched]
    of_one = kept_bytes([(layer.tokens, layer.channels) for layer in layers], torch.float32, "device") / GIB
    for config, rows in ((SHARED, 2 * frames), (LATE, 2 * frames), (GUIDED, frames)):
        check_limit(pipe, run, config, rows * of_one)


def test_all_calls_of_a_step_count() -> None:
    """Wan calls its transformer once more for guidance; a limit is that of both, and a second transformer counts."""
    pipe, run = tiny_transformers.wan()
    for guidance, config, calls in ((1.0, LATE, 1), (3.0, LATE, 2), (3.0, GUIDED, 1)):
        check_limit(pipe, functools.partial(run, num_inference_steps=8, guidance_scale=guidance), config, calls * ONE)
    pipe, run = tiny_transformers.wan(second=True)
    elfatt_sd.apply_patch(pipe, SHARED, residuals="host")
    kept, patch = list[bool](), pipe.transformer.elfatt_patch
    pipe.transformer_2.register_forward_hook(lambda *_: kept.append(bool(patch.schedule.run.kept[patch].residuals)))
    run(num_inference_steps=12)
    assert kept[0] and not any(kept[2:]), "both are held in the step of the change alone"
    elfatt_sd.apply_patch(pipe, SHARED, residual_limit=2.01 * ONE)
    with pytest.raises(ElfattError, match="residual_steps and reuse would keep"):
        run(num_inference_steps=12)


@pytest.mark.parametrize("family", ["unet", "wan"])
def test_guidance_shares_what_is_measured_with_the_prompt(pipe: Any, family: str) -> None:
    """Where it is measured, what has the prompt is exact; what has none, or is a second call, takes it over."""
    run, found, images = runner(pipe), list[Tensor](), {}
    if family == "wan":
        pipe, run = tiny_transformers.wan()
        run = functools.partial(run, num_inference_steps=4, guidance_scale=3.0)
    main_denoiser(pipe).register_forward_hook(lambda module, given, output: found.append(output[0]))
    all_keys = {"keys": 256, "groups": 1}
    for name, config in {"untouched": PatchConfig("sd"), "shared": SHARED, "guided": GUIDED, "all": GUIDED}.items():
        found.clear()
        with elfatt_sd.patched(pipe, config, **(all_keys if name == "all" else {})):
            images[name] = run()
        images[f"{name}, step 0"] = found[0] if family == "unet" else torch.cat([found[1], found[0]])
    (without, given), (alike, exact) = images["guided, step 0"].chunk(2), images["untouched, step 0"].chunk(2)
    torch.testing.assert_close(given, exact, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(without, alike, atol=1e-4)
    torch.testing.assert_close(images["shared, step 0"], images["untouched, step 0"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(images["all"], images["untouched"], atol=1e-5, rtol=1e-4)
    errors = {name: float((images[name] - images["untouched"]).norm()) for name in ("shared", "guided")}
    assert 0 < errors["guided"] < 4 * errors["shared"], "nearly as close, for half of the exact attention"


def test_rows_of_the_same_latents_are_seen() -> None:
    """One image may stand for several."""
    latents = torch.randn(2, 4, 8, 8, generator=generator())
    batches = [torch.cat([latents] * count) for count in (1, 2, 3)]
    batches += [torch.cat([latents, latents.flip(0)]), latents[:1], latents[:1].expand(4, -1, -1, -1)]
    batches.append(latents[:1].repeat(6, 1, 1, 1))  # three prompts of one seed
    assert list(map(copies_of, batches)) == [1, 2, 3, 1, 1, 1, 2]


def test_nothing_is_shared_where_latents_differ(pipe: Any) -> None:
    """Nor where a layer splits its input: a part has not the rows without the prompt first and those with it last."""
    given: list[dict[str, Any]] = [{"guidance_scale": 1.0}, {"prompt": ["a", "b"], "guidance_scale": 1.0}, {}]
    for options in given:
        for module in [part for name, part in pipe.unet.named_modules() if name.endswith(".attn1") and not options]:
            whole = module.forward
            module.forward = lambda tokens, whole=whole, **named: torch.cat(
                [whole(part, **named) for part in tokens.chunk(len(tokens))]
            )
        found = []
        for config in (SHARED, GUIDED):
            with elfatt_sd.patched(pipe, config):
                found.append(runner(pipe, **options)())
        assert torch.equal(*found)


def test_latents_in_a_buffer_are_not_those_of_the_call_before(pipe: Any) -> None:
    """Two images in two calls of each step, handed over in the same memory or not."""
    latents = torch.randn(2, 1, 4, 16, 16, generator=generator())
    text, buffer, found = torch.randn(1, 7, tiny.TEXT_WIDTH), torch.empty(1, 4, 16, 16), list[list[Tensor]]()
    for own in (True, False):
        with torch.no_grad(), elfatt_sd.patched(pipe.unet, GUIDED):
            calls = itertools.product(torch.arange(999, -1, -250), latents)
            given = ((each if own else buffer.copy_(each), timestep) for timestep, each in calls)
            found.append([pipe.unet(*each, text).sample for each in given])
    assert all(map(torch.equal, *found))


# Layers with phases of their own.

CALLS = 5  # of the UNet for the four steps of PNDM
KEYS = Phase(1.0, "sampled", keys=8)
BLOCKS = Phase(0.5, "block", block_size=16, block_order="windows")


def own(*phases: tuple[str, tuple[Phase, ...]]) -> PatchConfig:
    return PatchConfig("own", per_layer=tuple(LayerPhases(*each) for each in phases))


def test_each_layer_has_its_own_phases(pipe: Any) -> None:
    """The first pattern counts; one that names no layer is refused. The same phases by layer are the same latents."""
    first, *others = [layer for layer in find_layers(pipe.unet) if layer.downsample == 1]
    late = (Phase(0.5), Phase(1.0, "block", block_size=16, block_order="windows"))
    config = PatchConfig("own", levels=1, per_layer=(LayerPhases(first.name, (KEYS,)), LayerPhases("*", late)))
    with elfatt_sd.patched(pipe, config), recorded() as calls:
        runner(pipe)()
    assert calls.pop((id(first.attention), "sampled")) == CALLS
    assert {calls[id(each.attention), "block"] for each in others} == set(calls.values()) == {2}
    for phases in ((BLOCKS, KEYS), (Phase(1.0, "sampled", keys=8, residual_steps=2),)):
        with elfatt_sd.patched(pipe, PatchConfig("whole", phases)) as plan:
            expected = runner(pipe)()
        with elfatt_sd.patched(pipe, own(*((each.name, phases) for each in plan.layers if each.patched))) as same:
            assert torch.equal(runner(pipe)(), expected)
        reasons = [[layer.reason for layer in each.layers if layer.patched] for each in (same, plan)]
        assert reasons[0] == reasons[1]
    with pytest.raises(ElfattError, match=r"^no self-attention layer matches layers='nowhere\.\*'; this UNet has "):
        elfatt_sd.apply_patch(pipe, own(("nowhere.*", (KEYS,))))
    elfatt_sd.apply_patch(pipe, own(("*", (EXACT,))))
    assert not elfatt_sd.is_patched(pipe), "exact phases alone change nothing"


@pytest.mark.parametrize("family", ["unet", "sd3"])
def test_the_output_of_an_earlier_step_is_used_again(pipe: Any, family: str) -> None:
    """In every second step the layer is not called for attention at all."""
    pipe, run = (pipe, runner(pipe)) if family == "unet" else tiny_transformers.sd3()
    layer, projected, untouched = find_layers(main_denoiser(pipe))[0], Counter[str](), run()
    handle = layer.attention.to_q.register_forward_hook(lambda *_: projected.update(["q"]))
    with elfatt_sd.patched(pipe, own((layer.name, (Phase(1.0, "reuse", residual_steps=2),)))):
        assert not torch.equal(run(), untouched)
    handle.remove()
    assert family != "unet" or projected.total() == 3
    assert torch.equal(run(), untouched)


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
    **{config.method: config.with_settings(levels=2) for config in map(PatchConfig.preset, ("agent", "elfatt"))},
    "tome, fixed": PatchConfig.preset("tome", use_rand=False),
    "tome, reused": PatchConfig.preset("tome", reuse_steps=4),
    "sampled, corrected": PatchConfig("own", (Phase(1.0, "sampled", keys=16, residual_steps=3),)),
    "one draw": PatchConfig("own", (Phase(1.0, "sampled", keys=16, groups=3, redraw=False),)),
    "two phases": PatchConfig("own", (Phase(0.5, "sampled", keys=16, lattice=False), Phase(1.0, ratio=0.3))),
    "spread": PatchConfig("own", (Phase(1.0, "block", block_size=24, block_order="spread", second_order="curve"),)),
    "cells": PatchConfig("own", (Phase(1.0, "cell_spread", block_size=16, cell=8),)),
    "somebody else's": PatchConfig("own", (Phase(1.0, Own(block_size=16)),)),
}


def outputs(config: PatchConfig, first: int = 0) -> list[Tensor]:
    """Call a UNet in every step, twice in each: for one picture and for a smaller one."""
    unet, timesteps, (sample, text), _ = begun(config)
    with torch.no_grad():
        calls = itertools.product(timesteps[first:], (16, 8))
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
    tome = PatchConfig.preset("tome", levels=2)
    wanted, times = outputs(tome), force(20000)  # two steps of three layers of 256 tokens, four of 128
    assert all(map(torch.equal, outputs(tome), wanted))
    assert 1 < max(times) < STEPS and sum(times) == 2 * STEPS


def test_a_step_is_one_copy_into_buffers_that_stay(force: Any) -> None:
    """Compiled code and CUDA graphs find the same tensors in every step, at places that are aligned."""
    force()
    unet, timesteps, *_ = begun(PatchConfig.preset("elfatt-fast", block_size=16))
    seen, values = set(), set()
    with torch.no_grad():
        for timestep in timesteps[2:]:
            unet(torch.zeros(1, 4, 16, 16), timestep, torch.zeros(1, 3, tiny.TEXT_WIDTH))
            keys = [layer.patch.latest.states[layer.index].prepared.keys for layer in patched_layers(unet)]
            seen.add(tuple((id(each), each.data_ptr()) for each in keys))
            values.add(tuple(tuple(each.tolist()) for each in keys))
    assert (len(seen), len(values)) == (1, STEPS - 2)
    first = keys[0].untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == first and each.data_ptr() % 16 == 0 for each in keys)


def test_with_gradients_every_step_has_its_own(force: Any) -> None:
    """A backward pass reads what a step drew, maybe after other steps."""
    times, (unet, timesteps, *_) = force(), begun(PatchConfig.preset("tome"))
    sample = torch.zeros(1, 4, 16, 16, requires_grad=True)
    made = [unet(sample, timestep, torch.zeros(1, 3, tiny.TEXT_WIDTH)).sample.sum() for timestep in timesteps[:2]]
    torch.stack(made).sum().backward()  # type: ignore[no-untyped-call]
    assert sample.grad is not None and not times


@torch.no_grad()
def test_a_model_that_moves_within_a_run_draws_on_its_new_device(force: Any) -> None:
    force()
    unet, timesteps, *_ = begun(PatchConfig.preset("tome"))
    for timestep, device in zip(timesteps, ("cpu", "cpu", "meta"), strict=False):
        given = [torch.zeros(*shape, device=device) for shape in ((1, 4, 16, 16), (1, 3, tiny.TEXT_WIDTH))]
        assert unet.to(device)(given[0], timestep, given[1]).sample.device.type == device
