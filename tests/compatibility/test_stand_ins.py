"""Where somebody else stands in the place of attention, as guiders of diffusers do, a layer stays exact and says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import ALL_KEYS, generator, recorded
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import find_layers

hooks = pytest.importorskip("diffusers.hooks")  # younger than the oldest diffusers
smoothed = pytest.importorskip("diffusers.hooks.smoothed_energy_guidance_utils")

Run = Callable[..., torch.Tensor]
NEAR = PatchConfig("near", (Phase(1.0, "cell_spread", cell=4, block_size=4),))
MERGED = PatchConfig("merged", (Phase(1.0, ratio=0.5),))
MIXED = PatchConfig("mixed", (Phase(1.0, "elfatt", ratio=0.3, block_size=16, agents=8, block_order="spread"),))


def unet() -> tuple[Any, Run]:
    model = tiny.unet()
    given = torch.randn(2, 4, 16, 16, generator=generator()), 900, torch.zeros(2, 7, tiny.TEXT_WIDTH)

    @torch.no_grad()
    def run() -> torch.Tensor:
        made: torch.Tensor = model(*given).sample
        return made

    return model, run


def family(name: str) -> Callable[[], tuple[Any, Run]]:
    def made() -> tuple[Any, Run]:
        pipe, run = tiny_transformers.made(name)
        return pipe.transformer, run

    return made


class Values(TorchFunctionMode):
    """The values in the place of self-attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        if func is functional.scaled_dot_product_attention and named["query"].shape == named["value"].shape:
            return named["value"]
        return func(*args, **(kwargs or {}))


def stacks(model: Any) -> list[str]:
    """Where the blocks of the layers that can be patched lie."""
    return sorted({layer.name.rsplit(".", 2)[0] for layer in find_layers(model)})


def skipped_scores(model: Any) -> AbstractContextManager[Any]:
    asked = {"indices": [0, 1], "skip_attention": False, "skip_attention_scores": True, "skip_ff": False}
    for path in stacks(model):
        hooks.apply_layer_skip(model, hooks.LayerSkipConfig(fqn=path, **asked))
    return nullcontext()


def mode(model: Any) -> AbstractContextManager[Any]:
    return Values()


def blurred_queries(model: Any) -> AbstractContextManager[Any]:
    for path in stacks(model):
        config = smoothed.SmoothedEnergyGuidanceConfig(indices=[0, 1], fqn=path)
        smoothed._apply_smoothed_energy_guidance_hook(model, config, blur_sigma=1.0)
    return nullcontext()


SKIP = "AttentionScoreSkipFunctionMode stands in the place"
BLUR = "diffusers' smoothed_energy_guidance_hook is at its to_q"
CASES: dict[str, Any] = {
    "unet": (unet, MIXED, skipped_scores, SKIP),
    "qwen_image": (family("Qwen-Image"), NEAR, skipped_scores, SKIP),
    "z_image": (family("Z-Image"), NEAR, skipped_scores, SKIP),
    "unet, mode": (unet, MIXED, mode, "Values stands in the place"),
    "sd3, mode": (family("Stable Diffusion 3"), NEAR, mode, "Values stands in the place"),
    "wan, mode": (family("Wan"), NEAR, mode, "Values stands in the place"),
    "pixart, mode": (family("PixArt"), MERGED, mode, "Values stands in the place"),
    "unet, blurred": (unet, MIXED, blurred_queries, BLUR),
    "pixart, blurred": (family("PixArt"), MERGED, blurred_queries, BLUR),
}


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_layers_are_exact_where_another_stands_in(case: str, patch_first: bool) -> None:
    make, config, put, why = CASES[case]
    model, run = make()
    plain = run()
    with put(model):
        expected = run()
    assert not torch.equal(expected, plain)
    model, run = make()
    if patch_first:
        elfatt_sd.apply_patch(model, config)
        context = put(model)
    else:
        context = put(model)
        elfatt_sd.apply_patch(model, config)
    with context, recorded() as calls, pytest.warns(UserWarning, match=rf"patched layers stay exact.*: {why}"):
        found = run()
    assert torch.equal(found, expected)
    assert not calls
    with context:
        run()  # warnings are errors here


def test_only_the_layer_is_exact_that_another_stands_in() -> None:
    """As with perturbed-attention guidance: hooks come and go from call to call."""
    model, run = family("Qwen-Image")()
    elfatt_sd.apply_patch(model, NEAR)
    approximated = run()
    asked = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}
    hooks.apply_layer_skip(model, hooks.LayerSkipConfig(indices=[1], fqn="transformer_blocks", **asked))
    with recorded() as calls, pytest.warns(UserWarning, match="1 of 2 patched layers stay exact"):
        run()
    assert {key[0] for key in calls} == {id(model.transformer_blocks[0].attn)}
    hooks.HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[1].attn).remove_hook("layer_skip_hook")
    assert torch.equal(run(), approximated)


def test_blurred_queries_of_text_and_image_are_approximated() -> None:
    """Where tokens are neither merged nor ordered before the projections, a hook sees what it would without a patch."""
    model, run = family("Qwen-Image")()
    blurred_queries(model)
    expected = run()
    elfatt_sd.apply_patch(model, PatchConfig("all", (ALL_KEYS["cell_spread"],)))
    with recorded() as calls:
        torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-4)
    assert calls
