"""Chroma: Flux with masked text, through its pipelines' own `__call__`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import generator, picture

import elfatt_sd

pytestmark = pytest.mark.skipif(not hasattr(diffusers, "ChromaPipeline"), reason="this diffusers has no Chroma")
PROMPTS: dict[str, Any] = {"prompt": ["a b", "b a a b"], "negative_prompt": ["b", "a"]}
runner = functools.partial(tiny_transformers.runner, height=32, width=48, max_sequence_length=12)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_transformers.chroma(tmp_path_factory.mktemp("chroma"))


@pytest.fixture
def chroma(made: Any) -> Iterator[Any]:
    yield made
    elfatt_sd.remove_patch(made)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_all_keys_are_the_original(chroma: Any, guidance: float) -> None:
    checks.check_all_keys(chroma, runner(chroma, guidance_scale=guidance, **PROMPTS))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masked_text(chroma: Any, dtype: torch.dtype) -> None:
    """A mask of true and false leaves keys out; that of the pipeline itself is added to the logits."""
    width = chroma.transformer.config.joint_attention_dim
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]]).to(dtype)

    def text(filler: float) -> dict[str, torch.Tensor]:
        embeddings = torch.rand(1, 6, width, generator=generator())
        embeddings[:, 3:] = filler
        own = {"prompt_embeds": embeddings, "prompt_attention_mask": mask}
        return own | {f"negative_{name}": tensor for name, tensor in own.items()}

    checks.check_all_keys(chroma, runner(chroma, **text(0.5)))
    if dtype == torch.bool:
        for phase in checks.FEW_KEYS.values():
            with elfatt_sd.patched(chroma, elfatt_sd.PatchConfig("few", (phase,))):
                torch.testing.assert_close(runner(chroma, **text(0.5))(), runner(chroma, **text(-7.0))())


def test_image_to_image(chroma: Any) -> None:
    pipe = diffusers.ChromaImg2ImgPipeline(**chroma.components)
    pipe.set_progress_bar_config(disable=True)
    image = picture(32, 48).expand(2, -1, -1, -1)
    run = runner(pipe, image=image, strength=0.5, num_inference_steps=4, **PROMPTS)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
