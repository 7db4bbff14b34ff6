"""Gradients flow through patched models, also with checkpoints, whose parts are computed once more as they were."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import ALL_KEYS, inputs, recorded, with_effect
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import elfatt_sd
from elfatt_sd.config import METHODS, PatchConfig, Phase
from elfatt_sd.errors import ElfattError

STEPS = torch.arange(999, -1, -1)


@pytest.fixture(scope="module")
def unet() -> Any:
    return tiny.unet().double()


def small() -> Any:
    return tiny.unet(**tiny.ONE_LEVEL).double().train()


def flat(model: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """The gradients by a model's weights and by its inputs, zero where there is none."""
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in (*inputs, *model.parameters())]
    return torch.cat([each.flatten().double() for each in gradients])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("step", [0, 800])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_reaches_every_weight(unet: Any, method: str, step: int) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        sample, text = inputs()
        unet.zero_grad(set_to_none=True)
        unet(sample.requires_grad_(), STEPS[step], text).sample.square().mean().backward()
        named = {"sample": sample, **dict(unet.named_parameters())}
        return {name: each.grad for name, each in named.items() if each.grad is not None}

    untouched = gradients()
    with elfatt_sd.patched(unet, method, **with_effect(method, block_size=32, agents=8, agent_ratio=0.7)):
        patched = gradients()
    assert patched.keys() == untouched.keys()
    assert all(gradient.isfinite().all() for gradient in patched.values())
    phase = PatchConfig.preset(method).phase_at(step, 1000)
    exact = phase.exact or phase.residual_steps > 1  # of which the first call is exact
    assert torch.equal(patched["sample"], untouched["sample"]) == exact


CONFIGS = {
    "agent, then blocks": PatchConfig("two", (*PatchConfig.preset("agent").phases[:1], Phase(1.0, "block"))),
    "corrected": PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=2),)),
    "matched": PatchConfig("matched", (Phase(1.0, ratio=0.5),), reuse_steps=2),
    "drawn": PatchConfig("own", (Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8, block_order="spread"),)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", ["blocks", "whole"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_with_checkpoints(name: str, around: str, reentrant: bool) -> None:
    """What is computed once more is what was computed: anew in one step, with what it kept in the next."""
    # a reentrant one computes first without gradients; its input tells that it will be repeated
    unet = elfatt_sd.apply_patch(small(), CONFIGS[name])
    once_more = functools.partial(checkpoint, use_reentrant=reentrant)
    if around == "blocks" and reentrant and not inspect.signature(unet.enable_gradient_checkpointing).parameters:
        pytest.skip("this diffusers takes no checkpoint function")

    def run(checkpointing: bool, between: bool) -> torch.Tensor:
        scheduler = tiny.ddim()
        scheduler.set_timesteps(4)
        image, text = inputs(side=8)
        unet.zero_grad(set_to_none=True)
        unet.disable_gradient_checkpointing()
        if checkpointing and around == "blocks":
            unet.enable_gradient_checkpointing(*([once_more] if reentrant else []))
        with torch.no_grad():  # what this step keeps is for the next one
            image = scheduler.step(unet(image, scheduler.timesteps[0], text).sample, scheduler.timesteps[0], image)[0]
        start = image = image.roll(1, 3).requires_grad_()
        for timestep in scheduler.timesteps[1:]:
            call: Any = lambda given, timestep=timestep: unet(given, timestep, text).sample  # noqa: E731
            noise = once_more(call, image) if checkpointing and around == "whole" else call(image)
            image = scheduler.step(noise, timestep, image)[0]
        if between:
            with torch.no_grad():
                unet(start.detach() + 1, STEPS[800], text)
        image.square().mean().backward()
        return flat(unet, start)

    plain = run(False, False)
    for between in (False, True):  # calls between a checkpoint and its gradients, as in the loss of two timesteps
        torch.testing.assert_close(run(True, between), plain, atol=1e-10, rtol=1e-5)


def test_a_checkpoint_that_cannot_be_followed_is_refused() -> None:
    """Inside a block, nothing tells which call is computed once more."""
    unet = elfatt_sd.apply_patch(small(), "tome")
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    attend = attention.forward
    attention.forward = lambda x, **given: checkpoint(attend, x * 1, use_reentrant=False)
    sample, text = inputs(side=8)
    loss = unet(sample, 900, text).sample.sum()
    with torch.no_grad():
        unet(sample, 10, text)
    with pytest.raises(ElfattError, match="once more"):
        loss.backward()


TWO = PatchConfig("two", (Phase(0.5, "block", block_size=8), Phase(1.0, "cell_spread", cell=4, block_size=8)))


def drawn(name: str) -> tuple[Any, list[Any]]:
    """A pipeline in training, and what its transformer was given by name in each call of a run."""
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
    pipe.transformer.train()
    return pipe, given


def gradient_of(model: Any, student: list[Any], teacher: Any = ()) -> torch.Tensor:
    """The gradient of a loss of several calls, with a teacher's calls before the backward pass."""
    model.zero_grad(set_to_none=True)
    outputs = [model(**given)[0] for given in student]
    with torch.no_grad():
        for given in teacher:
            model(**given)
    torch.stack([each.float().square().mean() for each in tree_leaves(outputs)]).sum().backward()
    return flat(model)


@pytest.mark.parametrize("name", tiny_transformers.FAMILIES)
def test_every_family_is_trained_with_checkpoints(name: str) -> None:
    """What sees all keys has exact gradients; a block is computed again in its phase, in two steps, after a teacher."""
    pipe, given = drawn(name)
    model = pipe.transformer
    exact = gradient_of(model, given[:1])
    model.enable_gradient_checkpointing()
    for phase in ALL_KEYS.values():
        with elfatt_sd.patched(model, PatchConfig("all", (phase,))), recorded() as calls:
            assert distance(gradient_of(model, given[:1]), exact) < 1e-4
        assert calls
    takes_function = "gradient_checkpointing_func" in inspect.signature(model.enable_gradient_checkpointing).parameters
    for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        cast = lambda x, dtype=dtype: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
        calls = tree_map_only(torch.Tensor, cast, given)
        student, teacher = [calls[0], calls[-1]], calls[1:2]
        model.to(dtype).disable_gradient_checkpointing()
        untouched = gradient_of(model, student)
        elfatt_sd.apply_patch(pipe, TWO)
        expected = gradient_of(model, student, teacher)
        assert distance(untouched, expected) > 1e-4
        for reentrant in (False, True) if takes_function else (None,):
            once_more = functools.partial(checkpoint, use_reentrant=reentrant)
            model.enable_gradient_checkpointing(*(() if reentrant is None else (once_more,)))
            assert distance(gradient_of(model, student, teacher), expected) < rounding
        elfatt_sd.remove_patch(pipe)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the teacher's calls
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_several_blocks(reentrant: bool) -> None:
    """Both calls are given the same latents."""
    pipe, given = drawn("Wan")
    model, together = pipe.transformer, torch.nn.Module()
    student = [given[0], {**given[-1], "hidden_states": given[0]["hidden_states"].requires_grad_()}]
    elfatt_sd.apply_patch(pipe, TWO)
    expected, blocks = gradient_of(model, student, given[1:2]), model.blocks

    def in_turn(x: torch.Tensor, *others: Any) -> Any:
        return functools.reduce(lambda x, block: block(x, *others), blocks, x)

    together.blocks, together.forward = blocks, functools.partial(checkpoint, in_turn, use_reentrant=reentrant)
    model.blocks = torch.nn.ModuleList([together])
    assert distance(gradient_of(model, student, given[1:2]), expected) < 1e-5
