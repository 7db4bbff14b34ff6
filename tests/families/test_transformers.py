"""Each family of transformers: a small random pipeline through its own `__call__`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import accelerate
import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import checks, tiny_transformers
from support.checks import recorded

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import family_of, find_denoisers
from elfatt_sd.methods import Grid


def flux() -> tuple[Any, checks.Run]:
    pipe = tiny_transformers.pipeline("FluxPipeline", tiny_transformers.flux_transformer())
    return pipe, tiny_transformers.runner(
        pipe, prompt_embeds=TEXT, pooled_prompt_embeds=torch.zeros(1, 32), height=96, width=64
    )


def chroma() -> tuple[Any, checks.Run]:
    pipe = tiny_transformers.pipeline("ChromaPipeline", tiny_transformers.chroma_transformer())
    given = {"prompt_embeds": TEXT, "prompt_attention_mask": torch.ones(TEXT.shape[:2])}
    given |= {f"negative_{name}": tensor for name, tensor in given.items()}
    return pipe, tiny_transformers.runner(pipe, height=96, width=64, **given)


def flux2() -> tuple[Any, checks.Run]:
    pipe = tiny_transformers.flux2()
    return pipe, tiny_transformers.runner(pipe, prompt_embeds=TEXT, height=24, width=16)


class Case(NamedTuple):
    """A family: how it is made, its pipeline, its layers' tokens, and calls of its transformer in a step."""

    make: Callable[..., tuple[Any, checks.Run]]
    pipeline: str
    tokens: int
    size: dict[str, int]
    layers: int = 2
    calls: int = 1


FEW = PatchConfig("few", (Phase(1.0, "cell_spread", block_size=8),))
TEXT = tiny_transformers.embeds(width=8)
IMAGE, VIDEO = {"height": 96, "width": 64}, {"height": 96, "width": 64, "frames": 9}
CASES = {
    "Stable Diffusion 3": Case(tiny_transformers.sd3, "StableDiffusion3Pipeline", 24, IMAGE, layers=3),
    "Qwen-Image": Case(tiny_transformers.qwen_image, "QwenImagePipeline", 24, IMAGE, calls=2),
    "Flux.1": Case(flux, "FluxPipeline", 24, IMAGE),
    "Chroma": Case(chroma, "ChromaPipeline", 24, IMAGE, calls=2),
    "Flux.2": Case(flux2, "Flux2Pipeline", 24, {"height": 24, "width": 16}),
    "Z-Image": Case(tiny_transformers.z_image, "ZImagePipeline", 24, IMAGE),
    "Wan": Case(tiny_transformers.wan, "WanPipeline", 72, VIDEO, calls=2),
    "LTX-Video": Case(tiny_transformers.ltx_video, "LTXPipeline", 72, {"height": 192, "width": 128, "frames": 17}),
    "HunyuanVideo": Case(tiny_transformers.hunyuan_video, "HunyuanVideoPipeline", 72, VIDEO),
    "HunyuanVideo 1.5": Case(tiny_transformers.hunyuan_video_15, "HunyuanVideo15Pipeline", 72, VIDEO, calls=2),
    "CogVideoX": Case(tiny_transformers.cogvideox, "CogVideoXPipeline", 72, VIDEO),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    case = CASES[request.param]
    if not hasattr(diffusers, case.pipeline):
        pytest.skip(f"this version of diffusers has no {case.pipeline}")
    return case


def test_all_keys_are_the_original(case: Case) -> None:
    checks.check_all_keys(*case.make())


def test_methods_and_removal(case: Case) -> None:
    checks.check_methods(*case.make())


def test_steps(case: Case) -> None:
    pipe, run = case.make()
    checks.check_steps(pipe, run, case.layers, case.calls, counts=(1, 4, 28, 50))


def test_texts_of_another_length(case: Case) -> None:
    checks.check_texts(*case.make())


@pytest.mark.parametrize("size", [{}, {"height": 32, "width": 32}], ids=["usual", "smallest"])
def test_a_grid_smaller_than_a_cell_is_exact(case: Case, size: dict[str, int]) -> None:
    """The presets' cells have 256 tokens: all keys are seen."""
    pipe, run = case.make()
    untouched = run(**size)
    for preset in ("elfatt-fast", "elfatt-quality"):
        with elfatt_sd.patched(pipe, preset), recorded() as calls:
            found = run(**size)
        assert calls, preset
        torch.testing.assert_close(found, untouched, atol=1e-5, rtol=1e-4)


def test_plan(case: Case) -> None:
    """HunyuanVideo 1.5 and the first version of HunyuanVideo read their masks, which a plan without weights cannot."""
    pipe, _ = case.make()
    reads = {"HunyuanVideo15Pipeline"} | (set() if hasattr(diffusers, "WanPipeline") else {"HunyuanVideoPipeline"})
    counted = case.pipeline not in reads
    checks.check_plan(pipe, case.tokens, case.layers, counted=counted, **case.size)


def a_call(pipe: Any, run: checks.Run) -> Callable[[Any], torch.Tensor]:
    """Return what calls a module, or its `forward`, as a pipeline calls its transformer."""
    given: list[Any] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda *call: given.append(call[1:]), with_kwargs=True)
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


def test_forward_by_name(case: Case) -> None:
    """By its name, in copies and in wrappers it is a call like any other; past the patch it is exact, which is said."""
    pipe, run = case.make()
    net, call = pipe.transformer, a_call(pipe, run)
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
    pipe, run = flux()
    net, call = pipe.transformer, a_call(pipe, run)
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
    pipe, run = flux()
    net, call = pipe.transformer, a_call(pipe, run)
    exact = call(net)
    with elfatt_sd.patched(net, FEW), pytest.warns(UserWarning, match="compile the model or its blocks"):
        torch.testing.assert_close(call(torch.compile(net.forward, backend="eager")), exact)


def test_autotune(case: Case) -> None:
    pipe, run = case.make()
    checks.check_autotune(pipe, run, **case.size)


@pytest.mark.skipif(not hasattr(diffusers, "WanPipeline"), reason="this version of diffusers has no Wan")
def test_wan_goes_on_in_a_second_transformer() -> None:
    pipe, run = tiny_transformers.wan(second=True)
    assert list(find_denoisers(pipe)) == ["transformer", "transformer_2"]
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4, 28))
    single, both = (elfatt_sd.plan(each, "elfatt-fast", **VIDEO) for each in (tiny_transformers.wan()[0], pipe))
    assert len(both.layers) == 2 * len(single.layers)
    assert both.multiply_adds_before == single.multiply_adds_before, "a step calls one of them"
    assert (both.call.before, both.call.after) == (single.call.before, single.call.after)
    for residual_steps in (2, 3):
        config = PatchConfig("shared", (Phase(1.0, "cell_spread", block_size=8, residual_steps=residual_steps),))
        with elfatt_sd.patched(pipe, config), recorded() as calls:
            assert torch.isfinite(run(num_inference_steps=8)).all()
        assert calls


@pytest.mark.skipif(not hasattr(diffusers, "WanPipeline"), reason="this version of diffusers has no Wan")
def test_wan_with_its_second_transformer_alone() -> None:
    both, run = tiny_transformers.wan(second=True)
    pipe = tiny_transformers.pipeline("WanPipeline", None, both.transformer_2, boundary_ratio=1.01)
    assert list(find_denoisers(pipe)) == ["transformer_2"]
    run = tiny_transformers.runner(pipe, **run.given)  # type: ignore[attr-defined]
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4,))
    assert {layer.denoiser for layer in elfatt_sd.plan(pipe, "elfatt-fast", **VIDEO).layers} == {"transformer_2"}


@pytest.mark.skipif(not hasattr(diffusers, "WanPipeline"), reason="this version of diffusers has no Wan")
def test_a_second_transformer_that_is_not_known_is_refused() -> None:
    pipe, _ = tiny_transformers.wan(second=True)
    pipe.transformer_2 = torch.nn.Linear(1, 1)
    before = dict(pipe.transformer.attn_processors)
    with pytest.raises(elfatt_sd.ElfattError, match="Linear cannot be patched"):
        elfatt_sd.apply_patch(pipe)
    assert pipe.transformer.attn_processors == before


@pytest.mark.skipif(not hasattr(diffusers, "WanPipeline"), reason="this version of diffusers has no Wan")
def test_wan_with_a_timestep_for_each_token() -> None:
    """TI2V-5B: tokens of a given first frame have timestep 0."""
    pipe, run = tiny_transformers.wan()
    pipe.register_to_config(expand_timesteps=True)
    checks.check_all_keys(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4,))


@pytest.mark.skipif(
    not hasattr(diffusers, "HunyuanVideo15Transformer3DModel"),
    reason="this version of diffusers has no HunyuanVideo 1.5",
)
def test_hunyuan_video_15_with_padded_text() -> None:
    """A call of the model alone: text of two encoders and of an image; its padding is moved to one end."""
    model = tiny_transformers.hunyuan_video_15()[0].transformer
    family = family_of(model)
    generator = torch.Generator().manual_seed(0)
    given = family.arguments(model, Grid(3, 6, 4), 1, lambda *size: torch.rand(size, generator=generator))
    given["encoder_attention_mask"][:, 9:] = 0
    given["encoder_attention_mask_2"][:, 5:] = 0

    def run() -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = model(**given, return_dict=False)[0]
        return made

    checks.check_all_keys(model, run)
    checks.check_methods(model, run)
