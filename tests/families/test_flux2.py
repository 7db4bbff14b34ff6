"""Flux.2: small random pipelines through their own `__call__`, with and without reference images."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import generator

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.methods import Grid

pytestmark = pytest.mark.skipif(
    not hasattr(diffusers, "Flux2KleinKVPipeline"), reason="this diffusers has no Flux.2 klein"
)


@pytest.fixture(scope="module")
def made() -> Any:
    return tiny_transformers.flux2()


@pytest.fixture
def flux2(made: Any) -> Iterator[Any]:
    yield made
    elfatt_sd.remove_patch(made)


def text(batch: int, tokens: int = 12) -> torch.Tensor:
    return torch.rand(batch, tokens, 8, generator=generator())


runner = functools.partial(tiny_transformers.runner, prompt_embeds=text(1), height=32, width=48)


def reference(height: int, width: int) -> Any:
    from PIL import Image

    return Image.effect_noise((width, height), 60).convert("RGB")


def test_two_prompts(flux2: Any) -> None:
    checks.check_all_keys(flux2, runner(flux2, prompt_embeds=text(2)))


def test_references_are_exact_keys(flux2: Any) -> None:
    run = runner(flux2, image=[reference(64, 64), reference(64, 80)])
    checks.check_all_keys(flux2, run)
    checks.check_methods(flux2, run)
    elfatt_sd.apply_patch(flux2, PatchConfig("few", (Phase(1.0, "sampled", keys=8),)))
    run(num_inference_steps=1)
    call = flux2.transformer.elfatt_patch.latest
    assert call.given.grid == Grid.image(8, 12)
    assert (call.given.before, call.given.sample.shape[1]) == (12, 96 + 16 * 16 + 16 * 20)


@pytest.fixture
def klein(made: Any) -> Iterator[Any]:
    pipe = diffusers.Flux2KleinPipeline(**made.components, is_distilled=False)
    pipe.set_progress_bar_config(disable=True)
    yield pipe
    elfatt_sd.remove_patch(pipe)


def test_klein_with_guidance(klein: Any) -> None:
    run = runner(klein, guidance_scale=3.0, negative_prompt_embeds=text(1) - 0.5)
    checks.check_all_keys(klein, run)
    checks.check_steps(klein, run, layers=2, calls=2, counts=(4,))
    checks.check_methods(klein, runner(klein, guidance_scale=1.0, image=reference(64, 64)))


def test_inpainting(made: Any) -> None:
    pipe = diffusers.Flux2KleinInpaintPipeline(**made.components, is_distilled=True)
    pipe.set_progress_bar_config(disable=True)
    mask = torch.zeros(1, 1, 32, 48)
    mask[..., :24] = 1
    image = torch.rand(1, 3, 32, 48, generator=generator())
    run = runner(pipe, image=image, mask_image=mask, strength=0.7, num_inference_steps=5)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)


def test_cached_keys_are_refused() -> None:
    parts = tiny_transformers.flux2().components
    pipe = diffusers.Flux2KleinKVPipeline(**parts)
    with pytest.raises(ElfattError, match="Flux2KVAttnProcessor keeps keys and values of reference images"):
        elfatt_sd.apply_patch(pipe)
    assert not elfatt_sd.is_patched(pipe)


def test_cached_keys_after_the_patch_are_refused() -> None:
    """In every call, until the patch is taken out: then the pipeline draws what it draws without one."""
    image = reference(64, 64)

    def draw(transformer: Any) -> torch.Tensor:
        pipe = diffusers.Flux2KleinKVPipeline(**{**parts, "transformer": transformer})
        pipe.set_progress_bar_config(disable=True)
        return runner(pipe, image=image)()

    parts = tiny_transformers.flux2().components
    expected = draw(copy.deepcopy(parts["transformer"]))
    first = elfatt_sd.apply_patch(diffusers.Flux2KleinPipeline(**parts), "elfatt")
    for _ in range(2):
        with pytest.raises(ElfattError, match=r"kv_cache_mode='extract' keeps keys and values.*remove_patch\(pipe\)"):
            draw(parts["transformer"])
    elfatt_sd.remove_patch(first)
    assert torch.equal(draw(parts["transformer"]), expected)
