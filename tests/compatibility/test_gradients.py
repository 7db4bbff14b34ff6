"""Gradients flow through patched models, also with checkpoints of their blocks."""

from __future__ import annotations

import copy
import functools
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import ALL_KEYS, generator, recorded, with_effect
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import elfatt_sd
from elfatt_sd.config import METHODS, PatchConfig, Phase
from elfatt_sd.errors import ElfattError


@pytest.fixture(scope="module")
def unet() -> Any:
    return tiny.unet().double()


def inputs(moved: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample, moved by so many columns, and text."""
    sample = torch.randn(2, 4, 16, 16, generator=generator(), dtype=torch.float64).roll(moved, 3)
    return sample, torch.randn(2, 3, tiny.TEXT_WIDTH, generator=generator(), dtype=torch.float64)


def gradients(unet: Any, timestep: Any = 900, moved: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients of a UNet's mean square by its input and by its weights."""
    sample, text = inputs(moved)
    sample.requires_grad_()
    unet.zero_grad(set_to_none=True)
    unet(sample, timestep, text).sample.square().mean().backward()
    assert sample.grad is not None
    return sample.grad, {name: weight.grad for name, weight in unet.named_parameters() if weight.grad is not None}


def assert_same(one: Any, other: Any) -> None:
    assert torch.allclose(one[0], other[0], atol=1e-10)
    assert one[1].keys() == other[1].keys()
    assert all(torch.allclose(one[1][name], other[1][name], atol=1e-10) for name in one[1])


@pytest.mark.parametrize("step", [0, 800])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_reaches_every_weight(unet: Any, method: str, step: int) -> None:
    timestep = torch.arange(999, -1, -1)[step]
    untouched = gradients(unet, timestep)
    elfatt_sd.apply_patch(unet, method, **with_effect(method, block_size=32, agents=8, agent_ratio=0.7))
    patched = gradients(unet, timestep)
    elfatt_sd.remove_patch(unet)
    assert patched[1].keys() == untouched[1].keys()
    assert all(gradient.isfinite().all() for gradient in [patched[0], *patched[1].values()])
    phase = PatchConfig.preset(method).phase_at(step, 1000)
    exact = phase.exact or phase.residual_steps > 1  # of which the first call is exact
    assert torch.equal(patched[0], untouched[0]) == exact


@pytest.mark.parametrize("order", ["raster", "windows", "curve", "strided", "spread"])
def test_one_block_has_the_exact_gradients(unet: Any, order: str) -> None:
    """A block that holds every token is exact attention, in any order."""
    untouched = gradients(unet)
    elfatt_sd.apply_patch(unet, PatchConfig("one block", (Phase(1.0, "block", block_size=256, block_order=order),)))
    patched = gradients(unet)
    elfatt_sd.remove_patch(unet)
    assert_same(patched, untouched)


@pytest.mark.parametrize("method", ["tome", "elfatt"])
def test_gradients_match_finite_differences(unet: Any, method: str) -> None:
    elfatt_sd.apply_patch(unet, method, **with_effect(method, block_size=32, agents=8))
    direction = torch.randn(1, 4, 16, 16, generator=generator(), dtype=torch.float64)
    sample = torch.randn(1, 4, 16, 16, generator=generator(), dtype=torch.float64) * 2
    text = torch.randn(1, 3, tiny.TEXT_WIDTH, generator=generator(), dtype=torch.float64)

    def value(step: torch.Tensor) -> torch.Tensor:
        return unet(sample + step * direction, 900, text).sample.square().sum()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(value(step), step)
    with torch.no_grad():
        small = torch.tensor(1e-6, dtype=torch.float64)
        difference = (value(small) - value(-small)) / (2 * small)
    elfatt_sd.remove_patch(unet)
    assert torch.allclose(slope, difference, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=2),)),
        PatchConfig("matched", (Phase(1.0, ratio=0.5),), reuse_steps=2),
    ],
    ids=lambda config: config.method,
)
def test_what_steps_share_with_checkpointing(config: PatchConfig) -> None:
    """What is computed once more is what was computed: anew in the first step, with what it kept in the next."""
    unet = tiny.unet().double().train()
    found = []
    for checkpointing in (False, True):
        elfatt_sd.apply_patch(unet, config)
        timesteps = torch.arange(903, 895, -1)[-4:]
        if checkpointing:
            unet.enable_gradient_checkpointing()
        sample, text = inputs()
        with torch.no_grad():  # what the first of two steps keeps for the other
            unet(sample, timesteps[0], text)
        found.append([gradients(unet, timestep, moved=1) for timestep in timesteps[1:3]])
    for plain, checkpointed in zip(*found, strict=True):
        assert_same(checkpointed, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_gradients_through_a_whole_run(whole: bool, reentrant: bool) -> None:
    """A reentrant checkpoint computes first without gradients; its input tells that it will be repeated."""
    unet = tiny.unet().double().train()
    if not whole and len(inspect.signature(unet.enable_gradient_checkpointing).parameters) == 0:
        pytest.skip("this diffusers takes no checkpoint function")
    elfatt_sd.apply_patch(unet, "elfatt-quality", block_size=16)
    once_more = functools.partial(checkpoint, use_reentrant=reentrant)

    def run(checkpointing: bool) -> Any:
        scheduler = tiny.ddim()
        scheduler.set_timesteps(6)
        start, text = inputs()
        image = start.requires_grad_()
        unet.zero_grad(set_to_none=True)
        if checkpointing and not whole:
            unet.enable_gradient_checkpointing(once_more)
        for timestep in scheduler.timesteps:
            call: Any = lambda given, timestep=timestep: unet(given, timestep, text).sample  # noqa: E731
            noise = once_more(call, image) if checkpointing and whole else call(image)
            image = scheduler.step(noise, timestep, image).prev_sample
        image.square().mean().backward()
        return start.grad, {name: weight.grad for name, weight in unet.named_parameters() if weight.grad is not None}

    assert_same(run(True), run(False))


def test_threads_with_checkpoints_of_one_model() -> None:
    unet = tiny.unet().double().train()
    elfatt_sd.apply_patch(unet, "elfatt", block_size=16, agents=8)
    unet.enable_gradient_checkpointing()
    sample, text = inputs()

    def slope(index: int) -> torch.Tensor:
        given = (sample.detach() + index).requires_grad_()
        loss = unet(given, 990 - 200 * index, text).sample.square().mean()
        return torch.autograd.grad(loss, given)[0]

    alone = [slope(index) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(map(torch.allclose, pool.map(slope, range(4)), alone))


STEPS = torch.arange(999, -1, -1)


@pytest.mark.parametrize(
    "config",
    [
        PatchConfig.preset("agent", agent_ratio=0.7),
        PatchConfig("two phases", (Phase(0.5, ratio=0.5), Phase(1.0, "block", block_size=32))),
        PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=2),)),
        PatchConfig("drawn", (Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8, block_order="spread"),)),
    ],
    ids=lambda config: config.method,
)
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_calls_between_a_checkpoint_and_its_gradients(config: PatchConfig, whole: bool) -> None:
    """As in the loss of two timesteps at once, or with a sample image in between."""
    unet = tiny.unet().double().train()
    elfatt_sd.apply_patch(unet, config)

    def run(checkpointing: bool, between: bool) -> Any:
        sample, text = inputs()
        sample.requires_grad_()
        unet.zero_grad(set_to_none=True)
        call: Any = lambda x, t: unet(x, t, text).sample  # noqa: E731
        if checkpointing and whole:
            call = lambda x, t: checkpoint(lambda y: unet(y, t, text).sample, x, use_reentrant=False)  # noqa: E731
        elif checkpointing:
            unet.enable_gradient_checkpointing()
        loss = sum(call(sample * scale, STEPS[step]).square().mean() for step, scale in ((100, 1), (101, 2)))
        if between:
            with torch.no_grad():
                unet(sample.detach() + 1, STEPS[800], text)
        loss.backward()
        unet.disable_gradient_checkpointing()
        assert sample.grad is not None
        return sample.grad, {name: weight.grad for name, weight in unet.named_parameters() if weight.grad is not None}

    plain = run(False, False)
    assert_same(run(True, False), plain)
    assert_same(run(True, True), plain)


def test_a_checkpoint_that_cannot_be_followed_is_refused() -> None:
    """Inside a block, nothing tells which call is computed once more."""
    unet = tiny.unet().double().train()
    elfatt_sd.apply_patch(unet, "tome")
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    attend = block.attn1.forward
    block.attn1.forward = lambda x, **given: checkpoint(attend, x * 1, use_reentrant=False)
    sample, text = inputs()
    loss = unet(sample, 900, text).sample.sum()
    with torch.no_grad():
        unet(sample, 10, text)
    with pytest.raises(ElfattError, match="once more"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*jit.script")  # of torch.func itself
def test_transforms_of_torch_func() -> None:
    """As consistency training differentiates; in forward mode, PyTorch has neither fused attention nor merging."""
    unet = elfatt_sd.apply_patch(tiny.unet().double(), "elfatt", ratio=0)
    sample, text = inputs()

    def call(sample: torch.Tensor) -> torch.Tensor:
        return unet(sample[None], torch.tensor(990), text[:1]).sample[0]  # type: ignore[no-any-return]

    with torch.no_grad():
        expected = call(sample[0])
    with sdpa_kernel(SDPBackend.MATH):
        value, slope = torch.func.jvp(call, (sample[0],), (sample[1],))
    gradient = torch.func.grad(lambda given: (call(given) * expected).sum())(sample[0])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close((gradient * sample[1]).sum(), (slope * expected).sum())


NEAR = Phase(1.0, "cell_spread", cell=4, block_size=8)
TWO = PatchConfig("two", (Phase(0.5, "block", block_size=8), NEAR))
NAMES = tuple(tiny_transformers.FAMILIES)


def drawn(name: str) -> tuple[Any, list[Any]]:
    """A pipeline, and what its transformer was given by name in each call of a run."""
    given: list[Any] = []
    pipe, run = tiny_transformers.made(name)

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        named = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        given.append(copy.deepcopy({key: value for key, value in named.items() if key != "self"}))
        if name == "Chroma":  # whose checkpoints leave the mask out, also without a patch
            given[-1]["attention_mask"] = None
        given[-1]["return_dict"] = False

    with pipe.transformer.register_forward_pre_hook(keep, with_kwargs=True), torch.no_grad():
        run()
    return pipe, given


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(each, dtype) for key, each in value.items()}
    return type(value)(cast(each, dtype) for each in value) if isinstance(value, list | tuple) else value


def gradient_of(model: Any, student: list[Any], teacher: Any = (), call: Any = None) -> torch.Tensor:
    """The gradient of a loss of several calls, with a teacher's calls before the backward pass."""
    model.zero_grad(set_to_none=True)
    outputs = [(call or model)(**given)[0] for given in student]
    with torch.no_grad():
        for given in teacher:
            model(**given)
    made = [each for output in outputs for each in (output if isinstance(output, list) else [output])]
    torch.stack([each.float().square().mean() for each in made]).sum().backward()
    weights = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return torch.cat([each.flatten().float() for each in weights])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_trained_with_checkpoints(name: str, dtype: torch.dtype) -> None:
    """Two steps with a phase each, a teacher in between: a block is computed once more in the phase that it had."""
    pipe, given = drawn(name)
    model = pipe.transformer.to(dtype).train()
    calls = cast(given, dtype)
    student, teacher = [calls[0], calls[-1]], calls[1:2]
    untouched = gradient_of(model, student)
    elfatt_sd.apply_patch(pipe, TWO)
    expected, rounding = gradient_of(model, student, teacher), 1e-5 if dtype == torch.float32 else 1e-2
    assert distance(untouched, expected) > 1e-4
    takes_function = "gradient_checkpointing_func" in inspect.signature(model.enable_gradient_checkpointing).parameters
    for reentrant in (False, True) if takes_function else (None,):
        once_more = functools.partial(checkpoint, use_reentrant=reentrant)
        model.enable_gradient_checkpointing(*(() if reentrant is None else (once_more,)))
        assert distance(gradient_of(model, student, teacher), expected) < rounding


@pytest.mark.parametrize("attention", ALL_KEYS)
@pytest.mark.parametrize("name", NAMES)
def test_all_keys_with_checkpoints_have_the_exact_gradients(name: str, attention: str) -> None:
    """As diffusers' own test of checkpointing compares a model with its copy."""
    pipe, given = drawn(name)
    model = pipe.transformer.train()
    expected = gradient_of(model, given[:1])
    elfatt_sd.apply_patch(model, PatchConfig("all", (ALL_KEYS[attention],)))
    model.enable_gradient_checkpointing()
    with recorded() as calls:
        found = gradient_of(model, given[:1])
    assert calls
    assert distance(found, expected) < 1e-4


class Together(torch.nn.Module):
    """Blocks of Wan in one checkpoint."""

    def __init__(self, blocks: Any, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = blocks, reentrant

    def forward(self, hidden_states: torch.Tensor, *others: Any) -> Any:
        def run(x: torch.Tensor, *others: Any) -> Any:
            return functools.reduce(lambda x, block: block(x, *others), self.blocks, x)

        return checkpoint(run, hidden_states, *others, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the teacher's calls
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", ["blocks", "nested", "attention", "whole"])
def test_checkpoints_of_ones_own(around: str, reentrant: bool) -> None:
    """Around several blocks, the attention alone, or the whole model, which has the same latents in both calls."""
    pipe, given = drawn("Wan")
    model = pipe.transformer.train()
    latents = given[0]["hidden_states"].requires_grad_()
    student = [given[0], {**given[-1], "hidden_states": latents}]
    elfatt_sd.apply_patch(pipe, TWO)
    expected = gradient_of(model, student, given[1:2])
    call: Any = None
    if around in ("blocks", "nested"):
        if around == "nested":
            model.enable_gradient_checkpointing()
        model.blocks = torch.nn.ModuleList([Together(model.blocks, reentrant)])
    elif around == "attention":
        for block in model.blocks:
            attend = block.attn1
            block.attn1 = torch.nn.Module()
            block.attn1.add_module("inner", attend)
            block.attn1.forward = functools.partial(checkpoint, attend, use_reentrant=reentrant)
    else:

        def call(hidden_states: torch.Tensor, **others: Any) -> Any:
            run = lambda x: model(hidden_states=x, **others)  # noqa: E731
            return checkpoint(run, hidden_states, use_reentrant=reentrant)

    assert distance(gradient_of(model, student, given[1:2], call), expected) < 1e-5
