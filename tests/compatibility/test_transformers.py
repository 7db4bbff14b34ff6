"""What diffusers offers around a transformer, most of it on Flux: a patch that sees all keys changes nothing of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.transformers import transformer_flux
from support import checks, tiny_transformers
from support.checks import generator, recorded

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase

CPU = torch.device("cpu")
STEPS = 6
ALL = PatchConfig("all", (checks.ALL_KEYS["cell_spread"],))
FEW = PatchConfig("few", (Phase(1.0, "cell_spread", block_size=8),))
Feature = Callable[[Any], Any]
Make = Callable[[], tuple[Any, checks.Run]]


@pytest.fixture(autouse=True)
def backend_of_the_process() -> Iterator[None]:
    """`set_attention_backend` sets it for all models: with "_native_math", threads switch each other's kernels off."""
    name = "diffusers.models.attention_dispatch"  # younger than the oldest diffusers
    known = importlib.util.find_spec(name) is not None
    with importlib.import_module(name).attention_backend("native") if known else contextlib.nullcontext():
        yield


def lora(pipe: Any) -> None:
    weights, own = {}, generator()
    for block, names in (
        ("transformer_blocks", ("to_q", "to_v", "add_k_proj")),
        ("single_transformer_blocks", ("to_k",)),
    ):
        for name in names:
            place = f"transformer.{block}.0.attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(4, 32, generator=own) / 4
            weights[f"{place}.lora_B.weight"] = torch.randn(32, 4, generator=own) / 4
    pipe.load_lora_weights(weights, adapter_name="one")


def fused_lora(pipe: Any) -> None:
    lora(pipe)
    pipe.fuse_lora()


def adapter(pipe: Any) -> None:
    """A LoRA for projections of any family."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    names = ["to_q", "to_v", "to_out.0"]
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, target_modules=names))


def fused_projections(pipe: Any) -> None:
    pipe.transformer.fuse_qkv_projections()


def casting(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def blocks_offloaded(pipe: Any) -> None:
    pipe.transformer.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=1)


def leaves_offloaded(pipe: Any) -> None:
    pipe.transformer.enable_group_offload(CPU, CPU, offload_type="leaf_level")


def backend(pipe: Any) -> None:
    pipe.transformer.set_attention_backend("_native_math")


def quantised(pipe: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(pipe.transformer, torchao.Int8WeightOnlyConfig())


def first_block_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=10.0))


def mag_cache(pipe: Any) -> None:
    config = diffusers.MagCacheConfig(mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS, max_skip_steps=1)
    pipe.transformer.enable_cache(config)


def taylorseer(pipe: Any) -> None:
    config = diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, max_order=1)
    pipe.transformer.enable_cache(config)


def pyramid(pipe: Any) -> None:
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 2000),
        current_timestep_callback=lambda: pipe._current_timestep,
        spatial_attention_block_identifiers=("transformer_blocks",),
    )
    pipe.transformer.enable_cache(config)


# What a transformer has to have for it; the classes that a cache comes with.
WEIGHTS: dict[Feature, str] = {
    lora: "",
    fused_lora: "",
    fused_projections: "",
    casting: "enable_layerwise_casting",
    blocks_offloaded: "enable_group_offload",
    leaves_offloaded: "enable_group_offload",
    quantised: "",
    backend: "set_attention_backend",
}
CACHES: dict[Feature, str] = {
    first_block_cache: "FirstBlockCacheConfig",
    mag_cache: "MagCacheConfig",
    taylorseer: "TaylorSeerCacheConfig",
    pyramid: "PyramidAttentionBroadcastConfig",
}


def flux() -> tuple[Any, checks.Run]:
    """Flux with two blocks of each kind."""
    config = {"num_layers": 2, "num_single_layers": 2}
    return tiny_transformers.flux_run(config=config, num_inference_steps=STEPS)


def skip_without(name: str) -> None:
    if not hasattr(diffusers, name):
        pytest.skip("this diffusers does not have it")


def check(made: Make, feature: Feature, patch_first: bool, config: PatchConfig, **options: Any) -> int:
    """Patch a pipeline with all keys, with a feature that is switched on before or after it; it draws what it draws.

    Returns:
        Approximated calls of layers.
    """
    plain, run = made()
    untouched = run(**options)
    feature(plain)
    expected = run(**options)
    pipe, run = made()
    if not patch_first:
        feature(pipe)
    elfatt_sd.apply_patch(pipe, config)
    if patch_first:
        feature(pipe)
    with recorded() as calls:
        found = run(**options)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    elfatt_sd.apply_patch(pipe, FEW)
    few = run(**options)
    assert not torch.equal(few, expected)
    assert torch.equal(run(**options), few)
    elfatt_sd.remove_patch(pipe)
    assert torch.equal(run(**options), expected)
    if feature in CACHES:
        assert not torch.equal(expected, untouched)
        pipe.transformer.disable_cache()
        assert torch.equal(run(**options), untouched)
    return sum(calls.values())


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("feature", WEIGHTS, ids=lambda feature: feature.__name__)
def test_weights(feature: Feature, patch_first: bool) -> None:
    if WEIGHTS[feature] and not hasattr(diffusers.FluxTransformer2DModel, WEIGHTS[feature]):
        pytest.skip("this diffusers does not have it")
    assert check(flux, feature, patch_first, ALL) == 4 * STEPS


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("feature", CACHES, ids=lambda feature: feature.__name__)
def test_caches(feature: Feature, patch_first: bool) -> None:
    """A call that a cache spares is neither approximated nor missed."""
    skip_without(CACHES[feature])
    assert 0 < check(flux, feature, patch_first, ALL) < 4 * STEPS
    shared = PatchConfig("shared", (dataclasses.replace(ALL.phases[0], residual_steps=3),))
    check(flux, feature, patch_first, shared)


@pytest.mark.parametrize("feature", [first_block_cache, mag_cache, taylorseer], ids=lambda feature: feature.__name__)
def test_caches_of_two_calls(feature: Feature) -> None:
    skip_without(CACHES[feature])
    text = tiny_transformers.embeds(1, width=tiny_transformers.TEXT_WIDTH)
    negative = {"negative_prompt_embeds": text, "negative_pooled_prompt_embeds": torch.ones(1, 32)}
    negative["true_cfg_scale"] = 2.0
    assert 0 < check(flux, feature, True, ALL, **negative) < 2 * 4 * STEPS


@pytest.mark.parametrize(
    "feature",
    [adapter, fused_projections, casting, blocks_offloaded, quantised, first_block_cache, mag_cache],
    ids=lambda feature: feature.__name__,
)
@pytest.mark.parametrize("family", ["qwen_image", "wan"])
def test_other_families(family: str, feature: Feature) -> None:
    """Their layers are called in another way: one of text and image, the other with cross-attention to text."""
    skip_without({"qwen_image": "QwenImagePipeline", "wan": "WanPipeline"}[family])
    made = getattr(tiny_transformers, family)
    for patch_first in (True, False):
        calls = check(made, feature, patch_first, ALL, num_inference_steps=STEPS)
        assert 0 < calls < 4 * STEPS if feature in CACHES else calls == 4 * STEPS


IP_ADAPTER: Any = getattr(transformer_flux, "FluxIPAdapterAttnProcessor", None)
IP_ADAPTER = IP_ADAPTER or attention_processor.FluxIPAdapterJointAttnProcessor2_0  # of older versions


def set_ip_adapter(pipe: Any) -> None:
    """An IP-Adapter's processors in the first kind of blocks, as `load_ip_adapter` sets them."""
    torch.manual_seed(5)
    for block in pipe.transformer.transformer_blocks:
        block.attn.set_processor(IP_ADAPTER(32, 8))


@pytest.mark.parametrize("patch_first", [True, False])
def test_ip_adapters_are_left_alone(patch_first: bool) -> None:
    """Their layers stay exact, and are named; the others are patched."""
    image = {"joint_attention_kwargs": {"ip_hidden_states": [torch.rand(1, 4, 8, generator=generator())]}}
    plain, draw = flux()
    set_ip_adapter(plain)
    expected = draw(**image)
    pipe, draw = flux()
    if patch_first:
        elfatt_sd.apply_patch(pipe, ALL)
        set_ip_adapter(pipe)
        with pytest.warns(UserWarning, match=r"2 patched layers now have another .* \(FluxIPAdapter"):
            draw(**image)
    else:
        set_ip_adapter(pipe)
        with pytest.warns(UserWarning, match=r"2 layers are left alone.* FluxIPAdapter"):
            elfatt_sd.apply_patch(pipe, ALL)
    with recorded() as calls:
        found = draw(**image)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert sum(calls.values()) == 2 * STEPS
    elfatt_sd.remove_patch(pipe)
    assert torch.equal(draw(**image), expected)


def test_ip_adapters_can_be_taken_over() -> None:
    """The image's own tokens are approximated; those of the adapter's image are seen exactly."""
    image = {"joint_attention_kwargs": {"ip_hidden_states": [torch.rand(1, 4, 8, generator=generator())]}}
    pipe, draw = flux()
    set_ip_adapter(pipe)
    expected = draw(**image)
    elfatt_sd.apply_patch(pipe, ALL, take_over=[IP_ADAPTER.__name__])
    with recorded() as calls:
        found = draw(**image)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert sum(calls.values()) == 4 * STEPS


class OwnProduct:
    """A processor that computes attention by itself."""

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, **others: Any) -> Any:
        return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)


class OwnName(OwnProduct):
    """One that calls the function by another name than the one that can be exchanged."""

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, **others: Any) -> Any:
        q = hidden_states.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return super().__call__(attn, hidden_states, encoder_hidden_states)


def a_function(attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, **others: Any) -> Any:
    return OwnProduct()(attn, hidden_states, encoder_hidden_states)


@pytest.mark.parametrize("processor", [OwnProduct(), OwnName(), a_function], ids=lambda each: type(each).__name__)
def test_processors_without_a_known_function_are_left_alone_or_refused(processor: Any) -> None:
    (pipe, _), name = flux(), type(processor).__name__
    pipe.transformer.set_attn_processor(processor)
    with pytest.warns(UserWarning, match=rf"4 layers are left alone.*{name}, is not known to be plain attention\.$"):
        elfatt_sd.apply_patch(pipe, ALL)
    elfatt_sd.remove_patch(pipe)
    with pytest.raises(ElfattError, match=rf"take_over='{name}' is not accepted; it calls neither .* Leave it out"):
        elfatt_sd.apply_patch(pipe, ALL, take_over=[name])
    assert not elfatt_sd.is_patched(pipe)
