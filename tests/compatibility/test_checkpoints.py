"""Transformers of every family are trained with a patch and checkpoints of their blocks."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_transformers
from support.checks import ALL_KEYS, recorded
from torch.utils.checkpoint import checkpoint

import elfatt_sd
from elfatt_sd import PatchConfig, Phase

NEAR = Phase(1.0, "cell_spread", cell=4, block_size=8)
TWO = PatchConfig("two", (Phase(0.5, "block", block_size=8), NEAR))
JOINT = ("sd3", "qwen_image", "z_image", "wan", "ltx_video", "hunyuan_video", "hunyuan_video_15", "cogvideox")
OTHERS: dict[str, Any] = {
    "flux": lambda folder: tiny_transformers.flux(folder),
    "chroma": lambda folder: tiny_transformers.chroma(folder),
    "flux2": lambda folder: tiny_transformers.flux2(),
    "pixart": lambda folder: tiny_transformers.pixart(folder),
}
YOUNG = {  # than the oldest diffusers
    "chroma": "ChromaTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "hunyuan_video_15": "HunyuanVideo15Transformer3DModel",
    "qwen_image": "QwenImageTransformer2DModel",
    "wan": "WanTransformer3DModel",
    "z_image": "ZImageTransformer2DModel",
}


def drawn(name: str, folder: Path) -> tuple[Any, list[Any]]:
    """A pipeline, and what its transformer was given by name in each call of a run."""
    if not hasattr(diffusers, YOUNG.get(name, "UNet2DConditionModel")):
        pytest.skip("this diffusers does not have it")
    given: list[Any] = []
    if name in JOINT:
        pipe, run = getattr(tiny_transformers, name)()
    else:
        pipe = OTHERS[name](folder)
        text: dict[str, Any] = {"prompt": "a b", "max_sequence_length": 16}
        if name == "flux2":
            text = {"prompt_embeds": tiny_transformers.embeds(width=tiny_transformers.TEXT_WIDTH)}
        if name == "pixart":
            text["use_resolution_binning"] = False
        run = functools.partial(pipe, num_inference_steps=3, output_type="latent", height=32, width=48, **text)

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        named = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        given.append(copy.deepcopy({key: value for key, value in named.items() if key != "self"}))
        if name == "chroma":  # whose checkpoints leave the mask out, also without a patch
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


def gradients(model: Any, student: list[Any], teacher: Any = (), call: Any = None) -> torch.Tensor:
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
@pytest.mark.parametrize("name", [*JOINT, *OTHERS])
def test_every_family_is_trained_with_checkpoints(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two steps with a phase each, a teacher in between: a block is computed once more in the phase that it had."""
    pipe, given = drawn(name, tmp_path)
    model = pipe.transformer.to(dtype).train()
    calls = cast(given, dtype)
    student, teacher = [calls[0], calls[-1]], calls[1:2]
    untouched = gradients(model, student)
    elfatt_sd.apply_patch(pipe, TWO)
    expected, rounding = gradients(model, student, teacher), 1e-5 if dtype == torch.float32 else 1e-2
    assert distance(untouched, expected) > 1e-4
    takes_function = "gradient_checkpointing_func" in inspect.signature(model.enable_gradient_checkpointing).parameters
    for reentrant in (False, True) if takes_function else (None,):
        once_more = functools.partial(checkpoint, use_reentrant=reentrant)
        model.enable_gradient_checkpointing(*(() if reentrant is None else (once_more,)))
        assert distance(gradients(model, student, teacher), expected) < rounding


@pytest.mark.parametrize("attention", ALL_KEYS)
@pytest.mark.parametrize("name", [*JOINT, *OTHERS])
def test_all_keys_with_checkpoints_have_the_exact_gradients(name: str, attention: str, tmp_path: Path) -> None:
    """As diffusers' own test of checkpointing compares a model with its copy."""
    pipe, given = drawn(name, tmp_path)
    model = pipe.transformer.train()
    expected = gradients(model, given[:1])
    elfatt_sd.apply_patch(model, PatchConfig("all", (ALL_KEYS[attention],)))
    model.enable_gradient_checkpointing()
    with recorded() as calls:
        found = gradients(model, given[:1])
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
    pipe, given = drawn("wan", Path())
    model = pipe.transformer.train()
    latents = given[0]["hidden_states"].requires_grad_()
    student = [given[0], {**given[-1], "hidden_states": latents}]
    elfatt_sd.apply_patch(pipe, TWO)
    expected = gradients(model, student, given[1:2])
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

    assert distance(gradients(model, student, given[1:2], call), expected) < 1e-5
