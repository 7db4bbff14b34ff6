"""What stands in the place of planned attention is named, stays exact or is refused: other packages, guiders, steps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import tomesd
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers import transformer_flux
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import ACTIVE, ALL_KEYS, TWO_PHASES, all_layers, generator, like, recorded
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.families import find_layers, main_denoiser

ALL = PatchConfig("all", (ALL_KEYS["cell_spread"],))
NEAR = PatchConfig("near", (Phase(1.0, "cell_spread", cell=4, block_size=4),))
MERGED = PatchConfig("merged", (Phase(1.0, ratio=0.5),))
MIXED = PatchConfig("mixed", (Phase(1.0, "elfatt", ratio=0.3, block_size=16, agents=8, block_order="spread"),))
Make = Callable[[Path], tuple[Any, Callable[[], torch.Tensor]]]


def draw(pipe: Any, **options: Any) -> Any:
    torch.manual_seed(0)  # for those that draw from it
    return pipe("a", **{"num_inference_steps": 3, "output_type": "latent", "generator": generator(), **options})[0]


def unet(folder: Path) -> Any:
    model, sample = tiny.unet(), torch.randn(1, 4, 16, 16, generator=generator())
    return model, torch.no_grad()(lambda: model(sample, 999, torch.ones(1, 7, tiny.TEXT_WIDTH)).sample)


def sd15(folder: Path) -> Any:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    return pipe, lambda: draw(pipe)


def perturbed(folder: Path) -> Any:
    """Perturbed-attention guidance sets its processors in every call, and takes them out again."""
    pipe = like(diffusers.StableDiffusionPAGPipeline, sd15(folder)[0], pag_applied_layers=["down"])
    return pipe, lambda: draw(pipe, guidance_scale=3.0)


def of(family: str) -> Make:
    return lambda folder: tiny_transformers.made(family)


# What stands in the way, until its block ends.


@contextlib.contextmanager
def replaced(target: Any, what: Callable[[Any], Any]) -> Iterator[None]:
    """Whose modules have another `forward`."""
    modules = [module for name, module in target.named_modules() if name.endswith("attn1")]
    for module in modules:
        module.forward = what(module)
    yield
    for module in modules:
        del module.forward


def tiled(attention: Any) -> Any:
    """HyperTile: the tokens of a layer in tiles of the batch."""
    inner = attention.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch, tokens, channels = x.shape
        if tokens < 256:
            return inner(x, *args, **kwargs)
        return inner(x.reshape(batch * 4, tokens // 4, channels), *args, **kwargs).reshape(batch, tokens, channels)

    return forward


@contextlib.contextmanager
def tome(pipe: Any) -> Iterator[None]:
    tomesd.apply_patch(pipe)
    yield
    tomesd.remove_patch(pipe)


class Values(TorchFunctionMode):
    """The values in the place of self-attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        if func is functional.scaled_dot_product_attention and named["query"].shape == named["value"].shape:
            return named["value"]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooked(target: Any, put: Callable[[Any, Any, str], None]) -> Iterator[None]:
    """A hook of diffusers at blocks of layers that can be patched: as with guiders, it comes and goes."""
    hooks, model = pytest.importorskip("diffusers.hooks"), main_denoiser(target)  # younger than the oldest diffusers
    for path in sorted({layer.name.rsplit(".", 2)[0] for layer in find_layers(model)}):
        put(hooks, model, path)
    yield
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for name in [] if registry is None else list(registry.hooks):
            registry.remove_hook(name, recurse=False)


def skipped_scores(*indices: int) -> Any:
    def put(hooks: Any, model: Any, path: str) -> None:
        asked = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}
        hooks.apply_layer_skip(model, hooks.LayerSkipConfig(fqn=path, indices=list(indices), **asked))

    return lambda target: hooked(target, put)


def blurred_queries(target: Any) -> Any:
    def put(hooks: Any, model: Any, path: str) -> None:
        smoothed = pytest.importorskip("diffusers.hooks.smoothed_energy_guidance_utils")
        config = smoothed.SmoothedEnergyGuidanceConfig(indices=[0, 1], fqn=path)
        smoothed._apply_smoothed_energy_guidance_hook(model, config, blur_sigma=1.0)

    return hooked(target, put)


IP_ADAPTER: Any = getattr(transformer_flux, "FluxIPAdapterAttnProcessor", None)
IP_ADAPTER = IP_ADAPTER or attention_processor.FluxIPAdapterJointAttnProcessor2_0  # of older versions


@contextlib.contextmanager
def ip_adapter(pipe: Any) -> Iterator[None]:
    """Its processors in the first kind of blocks, as `load_ip_adapter` sets them."""
    torch.manual_seed(5)
    before = dict(pipe.transformer.attn_processors)
    for block in pipe.transformer.transformer_blocks:
        block.attn.set_processor(IP_ADAPTER(32, 8))
    yield
    pipe.transformer.set_attn_processor(before)


def with_an_image(folder: Path) -> Any:
    image = {"ip_hidden_states": [torch.rand(1, 4, 8, generator=generator())]}
    options = {"config": {"num_layers": 2, "num_single_layers": 2}, "num_inference_steps": 2}
    return tiny_transformers.made("Flux.1", joint_attention_kwargs=image, **options)


class Case(NamedTuple):
    """What is patched, what comes in the way, the method, what is said of it, and layers that stay approximated."""

    make: Make
    put: Callable[[Any], Any]
    config: Any
    says: str
    layers: int = 0


EXACT = "3 of 3 patched layers stay exact, the first is down_blocks.0.attentions.0.transformer_blocks.0.attn1: "
NEVER = EXACT + "its attention processor was never called"
SKIP = "patched layers stay exact.*: AttentionScoreSkipFunctionMode stands in the place"
MODE = "patched layers stay exact.*: Values stands in the place"
BLUR = "patched layers stay exact.*: diffusers' smoothed_energy_guidance_hook is at its to_q"
PAG = r"\(PAGCFGIdentitySelfAttnProcessor2_0\), the first is down.*; it is left there.*sets it in every call"
CASES = {
    "HyperTile": Case(unet, lambda it: replaced(it, tiled), "elfatt", EXACT + "it was given 64 tokens in place of 16x"),
    "a bypass": Case(unet, lambda it: replaced(it, lambda _: lambda x, **_: x), "elfatt", NEVER + ".*HyperTile"),
    "tomesd": Case(sd15, tome, "elfatt", r"patched layers stay exact.*tomesd\.remove_patch\(pipe\)"),
    "UNet": Case(unet, skipped_scores(0, 1), MIXED, SKIP),
    "Qwen-Image": Case(of("Qwen-Image"), skipped_scores(0, 1), NEAR, SKIP),
    "UNet, mode": Case(unet, lambda it: Values(), MIXED, MODE),
    "SD 3, mode": Case(of("Stable Diffusion 3"), lambda it: Values(), NEAR, MODE),
    "PixArt, mode": Case(of("PixArt"), lambda it: Values(), MERGED, MODE),
    "UNet, blurred": Case(unet, blurred_queries, MIXED, BLUR),
    "one layer": Case(of("Qwen-Image"), skipped_scores(1), ALL, "1 of 2 patched layers stay exact", 1),
    "perturbed attention": Case(perturbed, lambda it: contextlib.nullcontext(), ALL, PAG, 2),
    "IP-Adapter": Case(
        with_an_image, ip_adapter, ALL, r"2 (patched layers now have another|layers are left alone).*FluxIPAdapter", 2
    ),
}


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_stays_exact_is_named_once(folder: Path, name: str, patch_first: bool) -> None:
    make, put, config, says, layers = CASES[name]
    target, run = make(folder)
    plain = run()
    with put(target):
        expected = run()
    assert name == "perturbed attention" or not torch.equal(expected, plain)
    assert torch.equal(run(), plain), "it has gone"
    with contextlib.ExitStack() as stack, recorded() as calls, pytest.warns(UserWarning, match=says):
        if patch_first:
            elfatt_sd.apply_patch(target, config)
            approximated = run() if layers == 0 else None
            calls.clear()
            stack.enter_context(put(target))
        else:
            stack.enter_context(put(target))
            elfatt_sd.apply_patch(target, config)
        found = run()
        assert len(calls) == layers
        close = {"atol": 1e-4, "rtol": 1e-3} if layers else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(found, expected, **close)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
    if patch_first and approximated is not None:
        assert not torch.equal(approximated, plain) and torch.equal(run(), approximated)
    elfatt_sd.remove_patch(target)
    assert torch.equal(run(), plain)


@pytest.mark.parametrize(
    ("make", "put", "taken", "layers"),
    [(of("Qwen-Image"), blurred_queries, [], 2), (with_an_image, ip_adapter, [IP_ADAPTER.__name__], 4)],
)
def test_what_is_approximated_beside_others(folder: Path, make: Make, put: Any, taken: list[str], layers: int) -> None:
    """Queries that a hook blurs, where tokens are not ordered before it; the image's tokens beside an adapter's."""
    target, run = make(folder)
    with put(target):
        expected = run()
        elfatt_sd.apply_patch(target, ALL, take_over=taken)
        with recorded() as calls:
            torch.testing.assert_close(run(), expected, atol=1e-4, rtol=1e-3)
    assert len(calls) == layers


class WithWeights(torch.nn.Module):
    """As Custom Diffusion's: a module whose weights are the layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        return AttnProcessor2_0()(*given, **named) * self.scale


def test_the_weights_of_a_processor_that_is_taken_over_stay_the_models(folder: Path) -> None:
    pipe, run = sd15(folder)
    for layer in all_layers(pipe):
        layer.attention.set_processor(WithWeights())
    before, weights = dict(pipe.unet.attn_processors), list(pipe.unet.state_dict())
    elfatt_sd.apply_patch(pipe, TWO_PHASES, take_over=["WithWeights"])
    assert list(pipe.unet.state_dict()) == weights
    assert {parameter.dtype for parameter in pipe.unet.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    pipe.unet.float()
    with recorded() as calls:
        run()
    assert calls
    pipe.unet.set_attn_processor(dict(pipe.unet.attn_processors))
    elfatt_sd.remove_patch(pipe)
    assert all(found is before[name] for name, found in pipe.unet.attn_processors.items())
    assert list(pipe.unet.state_dict()) == weights


def test_what_cannot_be_taken_over_or_patched(folder: Path) -> None:
    """A processor of which nothing is known, one that keeps maps for the pipeline, and a model that is a function."""
    pipe, _ = of("Flux.1")(folder)
    pipe.transformer.set_attn_processor(lambda attn, hidden_states, **others: hidden_states)
    with pytest.raises(ElfattError, match=r"take_over='function' is not accepted; it calls neither .* Leave it out"):
        elfatt_sd.apply_patch(pipe, ALL, take_over=["function"])
    with pytest.raises(ElfattError, match="take_over=5"):
        elfatt_sd.apply_patch(pipe, ALL, take_over=5)  # type: ignore[arg-type]
    assert not elfatt_sd.is_patched(pipe)
    pipe = like(diffusers.StableDiffusionAttendAndExcitePipeline, sd15(folder)[0])
    elfatt_sd.apply_patch(pipe, "elfatt", take_over=["AttendExciteAttnProcessor"])
    with pytest.raises(ElfattError, match="AttendExciteAttnProcessor' is not accepted; it keeps the attention"):
        draw(pipe, token_indices=[1], max_iter_to_alter=2, height=32, width=32)
    object.__setattr__(pipe, "unet", lambda *args, **kwargs: None)
    for use in (elfatt_sd.apply_patch, elfatt_sd.plan):
        with pytest.raises(ElfattError, match="unet, which is a function and no module of PyTorch"):
            use(pipe)


def test_the_patch_of_a_pipeline_does_not_follow_into_a_copy_of_its_parts(folder: Path, tmp_path: Path) -> None:
    pipe, _ = sd15(folder)
    elfatt_sd.apply_patch(pipe, "elfatt")
    pipe.unet.save_pretrained(tmp_path)  # is no copy
    assert pipe.unet.state_dict().keys() == tiny.unet().state_dict().keys()
    with pytest.warns(UserWarning, match="the copy has no patch"):
        moving = diffusers.AnimateDiffPipeline.from_pipe(pipe, motion_adapter=tiny.motion_adapter())
    elfatt_sd.apply_patch(tiny.quiet(moving), "elfatt")
    with recorded() as calls:
        draw(moving, num_frames=2)
    assert calls


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("method", ACTIVE)
def test_a_run_of_one_step(folder: Path, method: str) -> None:
    """The method acts, or says that it does not; then its remedy acts."""
    euler = diffusers.EulerDiscreteScheduler(**tiny.SD15_SCHEDULE, steps_offset=1, timestep_spacing="trailing")
    pipe = tiny.sd15(folder, sample_size=32, scheduler=euler)
    untouched = draw(pipe, num_inference_steps=1)
    remedies = {"elfatt-fast": {"active_fraction": 1}, "elfatt-quality": {"residual_steps": 1}}
    if method in remedies:
        says = f"{method} approximates no step of this run, which begins with step 1 of 1; give more steps"
        with elfatt_sd.patched(pipe, method), pytest.warns(UserWarning, match=says) as warned:
            assert torch.equal(draw(pipe, num_inference_steps=1), untouched)
            draw(pipe, num_inference_steps=1)
        assert sum("elfatt-sd" in str(each.message) for each in warned) == 1
    elfatt_sd.apply_patch(pipe, method, **remedies.get(method, {}))
    assert not torch.equal(draw(pipe, num_inference_steps=1), untouched)


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor.* is deprecated:FutureWarning")  # diffusers' own
def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after a patch, also in a call whose step is exact; without a patch, diffusers divides the tokens."""
    if not hasattr(diffusers, "ContextParallelConfig"):
        pytest.skip("this version of diffusers has no context parallelism")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # which diffusers divides by
    # of two processes, of which the second is not there, and nobody waits for what it would send
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        pipe, run = tiny_transformers.made("Wan")
        before, whole = [layer.attention.processor for layer in all_layers(pipe)], run()
        elfatt_sd.apply_patch(pipe, PatchConfig("late", (Phase(0.9), Phase(1.0, "cell_spread", block_size=8))))
        pipe.transformer.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
        says = r"Transformer\w+ cannot be patched with context parallelism .* a part of the image's tokens\. Call .*\.$"
        with pytest.raises(ElfattError, match=says):
            run()
        elfatt_sd.remove_patch(pipe)
        assert run().shape == whole.shape
        for use in (elfatt_sd.apply_patch, elfatt_sd.plan):
            with pytest.raises(ElfattError, match=says):
                use(pipe)
        assert [layer.attention.processor for layer in all_layers(pipe)] == before
    finally:
        torch.distributed.destroy_process_group()
