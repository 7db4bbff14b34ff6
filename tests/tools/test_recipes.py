"""The recipes of the embedded pipelines: tiny runs to pipelines that draw, the same after a kill, and their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline
from safetensors.torch import load_file

from tools.toy import export, recipe, training
from tools.toy_dit import denoiser
from tools.toy_dit import export as dit_export
from tools.toy_dit import models as dit_models
from tools.toy_dit import recipe as dit_recipe

TINY = ["--config", "tiny", "--device", "cpu"]
PROMPT = "a red star on a striped blue background"
RECIPES = {
    "toy": (recipe, export, StableDiffusionPipeline, 64),
    "toy-dit": (dit_recipe, dit_export, FluxPipeline, 8 * dit_models.TINY.grid),
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def weights(out: Path) -> dict[str, torch.Tensor]:
    files = sorted(out.glob("pipeline/*/*.safetensors"))
    return {f"{path.parent.name}.{name}": value for path in files for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a recipe's tiny run."""

    @functools.cache
    def run(name: str) -> Path:
        out = tmp_path_factory.mktemp(name)
        RECIPES[name][0].main(["--out", str(out), *TINY])
        return out

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_a_tiny_run_exports_a_pipeline_that_draws(name: str, trained: Callable[[str], Path]) -> None:
    own, exported, kind, side = RECIPES[name]
    pipe = kind.from_pretrained(trained(name) / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    image = pipe(PROMPT, height=side, width=side, num_inference_steps=2, output_type="np").images
    assert image.shape == (1, side, side, 3)
    assert {value.dtype for value in weights(trained(name)).values()} == {torch.float16}
    assert list(exported.load_record(trained(name) / "pipeline")["stages"]) == list(own.STAGES)
    assert "| finish | " in (trained(name) / "pipeline" / "README.md").read_text()


def test_a_stopped_run_goes_on_and_a_finished_one_is_not_run_again(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped with the checkpoint of its first step; files are written whole or not at all."""
    before, words, write = weights(trained("toy-dit")), ["--out", str(tmp_path), *TINY], training._checkpoint

    def stop(*given: Any) -> None:
        write(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(training, "_checkpoint", stop)
        dit_recipe.main([*words, "--save-every", "0"])
    assert not export.load_record(tmp_path / "pipeline")
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(training, "_steps", lambda *_: pytest.fail("trained again"))
        dit_recipe.main(words)
        found = weights(tmp_path)
        assert before.keys() == found.keys() and all(torch.equal(found[name], before[name]) for name in before)


@pytest.mark.parametrize("length", [denoiser.SLOTS, 512])
def test_one_padding_token_stands_for_all_in_training(trained: Callable[[str], Path], length: int) -> None:
    """Padding changes no prompt token and is constant; training attention equals that of the pipeline on all tokens."""
    pipeline: Any = FluxPipeline.from_pretrained(trained("toy-dit") / "pipeline")
    ids = pipeline.tokenizer_2([PROMPT], padding="max_length", max_length=length, return_tensors="pt").input_ids
    encoder, own = pipeline.text_encoder_2, int((ids != 0).sum())
    with torch.no_grad():
        long, short = encoder(ids)[0], encoder(ids[:, :own])[0]
    torch.testing.assert_close(long[:, :own], short)
    reach = own + dit_models.TINY.layers * dit_models.REACH
    torch.testing.assert_close(long[:, reach:], long[:, -1:].expand_as(long[:, reach:]))
    trainer, grid = denoiser.Denoiser(dit_models.TINY).eval(), dit_models.TINY.grid
    for name in dit_export.PARTS:
        getattr(trainer, name).load_state_dict(getattr(pipeline, name).state_dict())
    context, pooled, text_ids = pipeline.encode_prompt(PROMPT, prompt_2=None, max_sequence_length=length)
    latents, times = torch.randn(1, 4, 2 * grid, 2 * grid, generator=seeded()), torch.tensor([0.6])
    tokens = pipeline.tokenizer_2([PROMPT], padding="max_length", max_length=denoiser.SLOTS, return_tensors="pt")
    clip_tokens = pipeline.tokenizer([PROMPT], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = pipeline.transformer(
            denoiser.pack(latents), context, pooled, times, denoiser.positions(grid, grid), text_ids, return_dict=False
        )[0]
        found = trainer(latents, times, tokens.input_ids, clip_tokens, length - denoiser.SLOTS)
    assert expected.std() > 1e-3
    torch.testing.assert_close(found, denoiser.unpack(expected), rtol=1e-4, atol=1e-5)
