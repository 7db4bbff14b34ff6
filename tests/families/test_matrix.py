"""Families x properties: a small random pipeline of each family through its own `__call__`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import accelerate
import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import checks, tiny_pipelines, tiny_transformers
from support.checks import recorded
from support.transformer_rows import qwen_controlnet, sd3_controlnet

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.families import FAMILIES, Given, family_of
from elfatt_sd.families.base import FRACTION, RISING
from elfatt_sd.methods import Grid


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
    checks.check_methods(pipe, run)


@every_family
def test_steps(name: str) -> None:
    pipe, run = made(name)
    checks.check_steps(pipe, run, CASES[name].layers, CASES[name].calls, counts=(1, 4, 28))


@every_joint_family
def test_texts_of_another_length(name: str) -> None:
    checks.check_texts(*made(name))


@every_joint_family
def test_a_grid_smaller_than_a_cell_is_exact(name: str) -> None:
    """The presets' cells have 256 tokens: all keys are seen."""
    pipe, run = made(name)
    for size in ({}, {"height": 32, "width": 32}):
        untouched = run(**size)
        for preset in ("elfatt-fast", "elfatt-quality"):
            with elfatt_sd.patched(pipe, preset), recorded() as calls:
                torch.testing.assert_close(run(**size), untouched, atol=1e-5, rtol=1e-4)
            assert calls, preset


@every_family
def test_plan_and_autotune(name: str) -> None:
    """HunyuanVideo 1.5 and the first version of HunyuanVideo read their masks, which a plan without weights cannot."""
    pipe, run = made(name)
    case, first = CASES[name], not hasattr(diffusers, "WanPipeline")
    reads = name == "HunyuanVideo 1.5" or (first and name == "HunyuanVideo")
    checks.check_plan(pipe, case.tokens, case.layers, counted=not reads, **case.size)
    assert json.loads(json.dumps(elfatt_sd.plan(pipe, **case.size).to_dict()))["layers"]
    if name in JOINT:
        checks.check_autotune(pipe, run, **case.size)


def a_call(net: Any, run: checks.Run) -> Callable[[Any], torch.Tensor]:
    """Return what calls a module, or its `forward`, as a pipeline calls its denoiser."""
    given: list[Any] = []
    hook = net.register_forward_pre_hook(lambda *call: given.append(call[1:]), with_kwargs=True)
    run(num_inference_steps=1)
    hook.remove()

    @torch.no_grad()
    def call(function: Any) -> torch.Tensor:
        args, kwargs = given[0]
        output = function(*args, **kwargs)
        while not isinstance(output, torch.Tensor):
            output = output[0]
        return output

    return call


@every_joint_family
def test_forward_by_name(name: str) -> None:
    """By its name, in copies and in wrappers it is a call like any other; past the patch it is exact, which is said."""
    pipe, run = made(name)
    net, call = pipe.transformer, a_call(pipe.transformer, run)
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


def offloaded(net: Any) -> Callable[[], None]:
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    return lambda: accelerate.hooks.remove_hook_from_submodules(net)


def cached(net: Any) -> Callable[[], None]:
    hooks = pytest.importorskip("diffusers.hooks")  # younger than the oldest diffusers
    net.enable_cache(hooks.FirstBlockCacheConfig(threshold=1e-9))
    return lambda: net.disable_cache()  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", [offloaded, cached])
@pytest.mark.parametrize("order", ["patch first", "removed first", "patch last"])
def test_what_else_wraps_a_forward(wrap: Callable[[Any], Callable[[], None]], order: str) -> None:
    """Hooks of accelerate and of diffusers, whoever comes and goes first."""
    pipe, run = made("Flux.1")
    net, call = pipe.transformer, a_call(pipe.transformer, run)
    exact = call(net)
    with elfatt_sd.patched(net, FEW):
        expected = call(net)
    unwrap = wrap(net) if order == "patch last" else None
    elfatt_sd.apply_patch(net, FEW)
    unwrap = unwrap or wrap(net)
    with net.cache_context("one") if wrap is cached else contextlib.nullcontext():
        torch.testing.assert_close(call(net), expected)
    if order != "removed first":
        unwrap()
        assert torch.equal(call(net), expected)
    elfatt_sd.remove_patch(net)
    if order == "removed first":
        unwrap()
    assert torch.equal(call(net), exact) and torch.equal(call(net.forward), exact)
    assert not [value for value in vars(net).values() if type(value).__module__.startswith("elfatt_sd")]


def test_a_compiled_forward_is_said_to_be_exact() -> None:
    pipe, run = made("Flux.1")
    net, call = pipe.transformer, a_call(pipe.transformer, run)
    exact = call(net)
    with elfatt_sd.patched(net, FEW), pytest.warns(UserWarning, match="compile the model or its blocks"):
        torch.testing.assert_close(call(torch.compile(net.forward, backend="eager")), exact)


# What each family tells of a call of a bare model: the unit of its timestep, and the tokens of text before its own.


def z_image_controlnet() -> Any:
    """One that has got its transformer's embeddings."""
    config = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 4}
    net = tiny_transformers.transformer(
        "ZImageControlNetModel", **config, dim=32, n_refiner_layers=1, n_heads=2, n_kv_heads=2
    )
    return diffusers.ZImageControlNetModel.from_transformer(net, tiny_transformers.z_image()[0].transformer)


def of(name: str) -> Callable[[], Any]:
    return lambda: tiny_transformers.made(name)[0].transformer


MODELS: dict[str, tuple[Callable[[], Any], int | None, int]] = {
    "UNet": (tiny_pipelines.unet, None, 0),
    "PixArt": (of("PixArt"), None, 0),
    "StableDiffusion3": (of("Stable Diffusion 3"), None, 0),
    "SD3ControlNet": (sd3_controlnet, None, 0),
    "Flux": (of("Flux.1"), FRACTION, 512),
    "FluxControlNet": (tiny_transformers.controlnet, FRACTION, 512),
    "Chroma": (of("Chroma"), FRACTION, 512),
    "Flux2": (of("Flux.2"), FRACTION, 512),
    "QwenImage": (of("Qwen-Image"), FRACTION, 256),
    "QwenImageControlNet": (qwen_controlnet, FRACTION, 256),
    "ZImage": (of("Z-Image"), RISING, 0),
    "ZImageControlNet": (z_image_controlnet, RISING, 0),
    "Wan": (of("Wan"), None, 0),
    "LTXVideo": (of("LTX-Video"), None, 0),
    "HunyuanVideo": (of("HunyuanVideo"), None, 0),
    "HunyuanVideo15": (of("HunyuanVideo 1.5"), None, 0),
    "CogVideoX": (of("CogVideoX"), None, 7),
}


@torch.no_grad()
@pytest.mark.parametrize("name", [type(family).__name__ for family in FAMILIES])
def test_bare_models(name: str) -> None:
    """What a call was given; a `residual_limit` that nothing fits in is refused; a call is in the phase of its step."""
    make, unit, before = MODELS[name]
    try:
        model = make()
    except (AttributeError, ImportError):
        pytest.skip(f"this version of diffusers has no model of {name}")
    family = family_of(model)
    grid = family.grid(model, Grid(3, 12, 8) if family.latent(model).frames > 1 else Grid.image(12, 8))
    found = family.call(model, (), family.arguments(model, grid, 3, torch.rand))
    assert (found.unit, found.before, found.frames, found.rows, found.grid) == (unit, before, 1, 3, grid)
    assert not (found.partial or found.compiled or found.differentiated)
    named = family.arguments(model, grid, 1, torch.rand)
    later = Phase(1.0, "cell_spread", cell=4, block_size=4, residual_steps=2)
    elfatt_sd.apply_patch(model, PatchConfig("limited", (later,), residual_limit=1e-9))
    with pytest.raises(ElfattError, match="more than the"):
        model(**named)
    for phases, approximated in (((0.7, 0.73), True), ((0.73, 0.75), False)):  # the step is 720 of 1000
        exact, few = (Phase(phases[0]), Phase(phases[1], "cell_spread", cell=4, block_size=4))
        elfatt_sd.apply_patch(model, PatchConfig("late", (exact, few)))
        with recorded() as calls:
            model(**named)
        assert bool(calls) is approximated


def test_frames_of_a_clip_are_rows() -> None:
    moved = diffusers.UNetMotionModel.from_unet2d(tiny_pipelines.unet(), tiny_pipelines.motion_adapter())
    found = family_of(moved).call(moved, (torch.rand(2, 4, 5, 8, 6), 999), {})
    assert (found.unit, found.frames, found.rows, found.grid) == (None, 5, 10, Grid.image(8, 6))
    with pytest.raises(TypeError, match="positional"):  # what is told goes by name
        Given(torch.rand(1, 4), 0, Grid.image(2, 2), 7, FRACTION)
