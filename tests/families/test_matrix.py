"""Families x properties: a small random pipeline of each family through its own `__call__`."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import checks, tiny_pipelines, tiny_transformers
from support.checks import recorded
from torch.utils._pytree import tree_leaves

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import main_denoiser


def sd15() -> tuple[Any, checks.Run]:
    parts = {"unet": tiny_pipelines.unet(), "vae": tiny_pipelines.vae(), "scheduler": tiny_pipelines.ddim()}
    pipe = tiny_transformers.pipeline("StableDiffusionPipeline", **parts)
    given = {"prompt_embeds": tiny_transformers.embeds(width=32), "height": 32, "width": 32, "guidance_scale": 3.0}
    return pipe, tiny_transformers.runner(pipe, negative_prompt_embeds=tiny_transformers.embeds(1, width=32), **given)


class Case(NamedTuple):
    """A family: its layers' tokens, the size to plan, its patched layers, and calls of its transformer in a step."""

    tokens: int
    size: dict[str, int]
    layers: int = 2
    calls: int = 1


IMAGE, VIDEO = {"height": 96, "width": 64}, {"height": 96, "width": 64, "frames": 9}
SMALL = {"height": 24, "width": 16}  # with a VAE that halves the sides
CASES = {
    "Stable Diffusion 1.5": Case(256, {"height": 32, "width": 32}, layers=3),
    "PixArt": Case(24, SMALL),
    "Stable Diffusion 3": Case(24, IMAGE, layers=3),
    "Qwen-Image": Case(24, IMAGE, calls=2),
    "Flux.1": Case(24, IMAGE),
    "Chroma": Case(24, IMAGE, calls=2),
    "Flux.2": Case(24, SMALL),
    "Z-Image": Case(24, IMAGE),
    "Wan": Case(72, VIDEO, calls=2),
    "LTX-Video": Case(72, {"height": 192, "width": 128, "frames": 17}),
    "HunyuanVideo": Case(72, VIDEO),
    "HunyuanVideo 1.5": Case(72, VIDEO, calls=2),
    "CogVideoX": Case(72, VIDEO),
}
MERGING = ("Stable Diffusion 1.5", "PixArt", "Stable Diffusion 3")  # without rotary positions
JOINT = [name for name in CASES if name not in ("Stable Diffusion 1.5", "PixArt")]
FEW = PatchConfig("few", (Phase(1.0, "cell_spread", block_size=8),))
every_family = pytest.mark.parametrize("name", CASES)
every_joint_family = pytest.mark.parametrize("name", JOINT)


def made(name: str) -> tuple[Any, checks.Run]:
    return sd15() if name not in tiny_transformers.FAMILIES else tiny_transformers.made(name)


@every_family
def test_all_keys_methods_and_removal(name: str) -> None:
    pipe, run = made(name)
    checks.check_all_keys(pipe, run)
    if name in JOINT:  # a grid of a few tokens
        checks.check_all_keys(pipe, functools.partial(run, height=32, width=32))
    checks.check_methods(pipe, run, merges=name in MERGING)


@every_family
def test_steps(name: str) -> None:
    pipe, run = made(name)
    checks.check_steps(pipe, run, CASES[name].layers, CASES[name].calls, counts=(1, 4, 12))


@every_joint_family
def test_texts_of_another_length(name: str) -> None:
    """A call with longer texts is patched as well, and leaves nothing to the calls after it."""

    def longer(text: Any) -> Any:
        return [longer(row[None])[0] for row in text] if isinstance(text, list) else torch.cat([text, text[:, :4]], 1)

    pipe, run = made(name)
    given: dict[str, Any] = run.given  # type: ignore[attr-defined]
    texts = {name: longer(given[name]) for name in given if "prompt" in name and "pooled" not in name}
    untouched = run(**texts)
    with elfatt_sd.patched(pipe, PatchConfig("all", (checks.ALL_KEYS["cell_spread"],))):
        torch.testing.assert_close(run(**texts), untouched, atol=1e-5, rtol=1e-4)
    with elfatt_sd.patched(pipe, PatchConfig("few", (Phase(1.0, "cell_spread", block_size=8, residual_steps=2),))):
        before = run()
        with recorded() as calls:
            assert not torch.equal(run(**texts), untouched)
        assert calls
        assert torch.equal(run(), before)
    assert torch.equal(run(**texts), untouched)


@every_family
def test_plan_and_autotune(name: str) -> None:
    """Every layer's attention is timed, with shared differences too; only what is faster is patched."""
    pipe, run = made(name)
    case, first = CASES[name], not hasattr(diffusers, "WanPipeline")
    # these read their masks, which a plan without weights cannot
    reads = name == "HunyuanVideo 1.5" or (first and name == "HunyuanVideo")
    checks.check_plan(pipe, case.tokens, case.layers, counted=not reads, **case.size)
    assert json.loads(json.dumps(elfatt_sd.plan(pipe, **case.size).to_dict()))["layers"]
    timed = (checks.FEW_KEYS["cell_spread"], Phase(1.0, "sampled", keys=8, residual_steps=2))
    for phase in timed if name in JOINT else ():
        config = PatchConfig("few", (phase,))
        plan = elfatt_sd.plan(pipe, config, autotune=True, **case.size)
        assert all("of the untouched time, measured here" in layer.reason for layer in plan.layers), str(plan)
        with elfatt_sd.patched(pipe, config, autotune=True):
            run()


def a_call(net: Any, run: checks.Run) -> Callable[[Any], torch.Tensor]:
    """Return what calls a module, or its `forward`, as a pipeline calls its denoiser."""
    given: list[Any] = []
    with net.register_forward_pre_hook(lambda *call: given.append(call[1:]), with_kwargs=True):
        run(num_inference_steps=1)

    @torch.no_grad()
    def call(function: Any) -> torch.Tensor:
        args, kwargs = given[0]
        found: torch.Tensor = tree_leaves(function(*args, **kwargs))[0]
        return found

    return call


@every_family
def test_forward_by_name(name: str) -> None:
    """By its name, in copies and in wrappers it is a call like any other; past the patch it is exact, which is said."""
    pipe, run = made(name)
    net, call = main_denoiser(pipe), a_call(main_denoiser(pipe), run)
    exact, before, signature = call(net), list(vars(net)), inspect.signature(net.forward)
    with elfatt_sd.patched(net, FEW):
        expected = call(net)
        assert not torch.equal(expected, exact)
        for each in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert elfatt_sd.is_patched(each) and inspect.signature(each.forward) == signature
            assert torch.equal(call(each.forward), expected) and torch.equal(call(each), expected)
        with pytest.warns(UserWarning, match="stays exact: it is called without the hooks of its patched model"):
            assert torch.equal(call(functools.partial(type(net).forward, net)), exact)
    assert list(vars(net)) == before and torch.equal(call(net.forward), exact)
    wrapped = get_peft_model(net, LoraConfig(target_modules=["to_q"]))
    with elfatt_sd.patched(wrapped, FEW):
        assert torch.equal(call(wrapped), expected)


PHASES = {
    "first half": (Phase(0.5, "cell_spread", block_size=16),),
    "shared difference": (Phase(1.0, "cell_spread", block_size=16, cell=8, residual_steps=2),),
    "elfatt": (Phase(1.0, "elfatt", block_size=16, agents=8, block_order="windows"),),
    "sampled": (Phase(1.0, "sampled", keys=16),),
    "merged": (Phase(1.0, "elfatt", ratio=0.5, block_size=4, agents=4, block_order="windows", residual_steps=2),),
    "rounded": (
        Phase(0.5, attention_dtype="bfloat16"),
        Phase(1.0, "cell_spread", block_size=16, cell=8, residual_steps=2, attention_dtype="bfloat16"),
    ),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "phases", "order"),
    [
        ("Flux.1", "first half", "compile, patch"),
        ("Flux.1", "shared difference", "patch, blocks"),
        ("Flux.1", "elfatt", "blocks, patch"),
        ("Flux.1", "rounded", "patch, compile"),
        ("Qwen-Image", "sampled", "compile, patch"),
        ("Qwen-Image", "elfatt", "patch, blocks"),
        ("Stable Diffusion 3", "merged", "patch, compile"),
        ("Wan", "sampled", "patch, compile"),
        ("Wan", "first half", "blocks, patch"),
    ],
)
def test_compiled_is_eager(name: str, phases: str, order: str) -> None:
    """As a whole and block by block, without a break in the graph."""
    pipe, run = made(name)
    run = functools.partial(run, num_inference_steps=4)
    transformer, config = pipe.transformer, PatchConfig("own", PHASES[phases])
    with elfatt_sd.patched(pipe, config):
        eager = run()
    untouched = run()
    assert not torch.equal(eager, untouched)
    if order.startswith("patch"):
        elfatt_sd.apply_patch(pipe, config)
    if "blocks" not in order:
        pipe.transformer = torch.compile(transformer, backend="eager", fullgraph=True)
    elif hasattr(transformer, "compile_repeated_blocks"):
        transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    else:
        pytest.skip("this version of diffusers compiles no repeated blocks")
    if not order.startswith("patch"):
        elfatt_sd.apply_patch(pipe, config)
    for _ in range(2):
        torch.testing.assert_close(run(), eager, atol=1e-5, rtol=1e-4)
    elfatt_sd.remove_patch(pipe)
    torch.testing.assert_close(run(), untouched, atol=1e-5, rtol=1e-4)


def test_a_compiled_forward_is_said_to_be_exact() -> None:
    pipe, run = made("Flux.1")
    net, call = pipe.transformer, a_call(pipe.transformer, run)
    exact = call(net)
    with elfatt_sd.patched(net, FEW), pytest.warns(UserWarning, match="compile the model or its blocks"):
        torch.testing.assert_close(call(torch.compile(net.forward, backend="eager")), exact)
