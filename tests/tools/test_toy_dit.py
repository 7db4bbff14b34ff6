"""The recipe of the embedded transformer: a tiny run to a pipeline that draws, its tokenizer, and its padding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import FluxPipeline
from safetensors.torch import load_file
from support.checks import check_killed_run, check_same

from elfatt_sd.toy.renderer import ATTRIBUTES, CLASS_PROMPTS
from tools.toy import quality, training
from tools.toy import recipe as first
from tools.toy_dit import card, denoiser, export, models, preview, recipe, snapshot

TINY = ["--config", "tiny", "--device", "cpu"]
PROMPT = "a red star on a striped blue background"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("toy_dit")
    recipe.main(["--out", str(out), *TINY])
    return out


@pytest.fixture(scope="module")
def pipeline(trained) -> Any:
    pipe: Any = FluxPipeline.from_pretrained(trained / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    models.save_tokenizer(folder)
    return transformers.T5TokenizerFast.from_pretrained(folder)


def weights(out: Path) -> dict[str, torch.Tensor]:
    files = [path for name in export.PARTS for path in out.glob(f"pipeline/{name}/*.safetensors")]
    return {f"{path.parent.name}.{name}": value for path in files for name, value in load_file(path).items()}


def test_a_tiny_run_exports_a_pipeline_that_draws(trained, pipeline):
    side = 8 * models.TINY.grid
    image = pipeline(PROMPT, height=side, width=side, num_inference_steps=2, output_type="np").images
    assert image.shape == (1, side, side, 3)
    assert {value.dtype for value in weights(trained).values()} == {torch.float16}
    assert list(export.load_record(trained / "pipeline")["stages"]) == list(recipe.STAGES)
    assert "| finish | 6 | 4 |" in (trained / "pipeline" / "README.md").read_text()


def test_a_measurement_goes_on_and_says_how_many_images_it_has(pipeline, tmp_path, monkeypatch):
    side, made = 8 * models.TINY.grid, []
    call = type(pipeline).__call__

    def small(pipe, prompts, **settings):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(prompts)
        return call(pipe, prompts, height=side, width=side, **settings)

    monkeypatch.setattr(type(pipeline), "__call__", small)
    figures, images = quality.measure(pipeline, 5, 1, 1.0, 0, 1, tmp_path, reference=64)
    assert (figures["count"], figures["asked"], len(images)) == (3, 5, 3)
    assert "The first 3 images of 5" in card.describe_quality(figures)
    made.clear()
    figures, more = quality.measure(pipeline, 5, 1, 1.0, 0, 1, tmp_path, reference=64)
    assert (figures["count"], len(made)) == (5, 2)
    assert torch.equal(more[:3], images)
    assert "5 images of 1 steps" in card.describe_quality(figures)


def test_a_plain_call_has_4096_image_tokens(pipeline):
    sizes = []
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda _module, _args, given: sizes.append(given["hidden_states"].shape[1]), with_kwargs=True
    )
    pipeline(PROMPT, num_inference_steps=1, max_sequence_length=16, output_type="latent")
    hook.remove()
    assert sizes == [4096]


def test_the_loaded_weights_are_the_trained_ones(trained, pipeline):
    saved = weights(trained)
    for name in export.PARTS:
        for key, value in getattr(pipeline, name).state_dict().items():
            prefix = "text_model." if name == "text_encoder" and not key.startswith("text_model.") else ""
            assert torch.equal(value, saved[f"{name}.{prefix}{key}"].float()), key


def test_a_killed_run_goes_on_to_the_same_weights(trained, tmp_path):
    """Killed without warning in the second stage, after its first checkpoints."""
    check_killed_run("tools.toy_dit.recipe", recipe.main, TINY, tmp_path, "outline.pt")
    check_same(weights(trained), weights(tmp_path))


def test_a_finished_run_is_not_run_again(trained, monkeypatch):
    before = weights(trained)
    monkeypatch.setattr(training, "_steps", lambda *_: pytest.fail("trained again"))
    recipe.main(["--out", str(trained), *TINY])
    check_same(before, weights(trained))


def test_training_goes_on_from_exported_weights(trained, tmp_path):
    recipe.main(["--out", str(tmp_path), *TINY, "--resume-from", str(trained / "pipeline"), "--stages", "finish"])
    before, after = weights(trained), weights(tmp_path)
    moved = [(after[name].float() - value.float()).abs().max() for name, value in before.items()]
    assert 0 < max(moved) < 0.2
    assert list(export.load_record(tmp_path / "pipeline")["stages"]) == [*recipe.STAGES, "finish (2)"]


def test_every_word_is_one_token_and_prompts_come_back(tokenizer):
    for prompt in CLASS_PROMPTS[::97]:
        ids = tokenizer(prompt).input_ids
        assert len(ids) == len(prompt.split()) + 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
    assert models.PIECES.index(models.UNKNOWN) in tokenizer("a walrus").input_ids
    assert len(tokenizer) == len(models.PIECES)


def test_all_wordings_are_known_and_leave_room(tokenizer):
    texts = [text for labels in itertools.product(*ATTRIBUTES.values()) for text in first.wordings(*labels)]
    ids = tokenizer(texts[:200]).input_ids
    assert not any(models.PIECES.index(models.UNKNOWN) in row for row in ids)
    longest = max(map(len, tokenizer([max(texts, key=lambda text: len(text.split()))]).input_ids))
    assert longest + models.FULL.layers * models.REACH < denoiser.SLOTS


def test_padding_changes_no_prompt_token_and_is_constant(pipeline):
    ids = pipeline.tokenizer_2([PROMPT], padding="max_length", max_length=512, return_tensors="pt").input_ids
    encoder, length = pipeline.text_encoder_2, int((ids != 0).sum())
    with torch.no_grad():
        long, short = encoder(ids)[0], encoder(ids[:, :length])[0]
    torch.testing.assert_close(long[:, :length], short)
    reach = length + models.TINY.layers * models.REACH
    torch.testing.assert_close(long[:, reach:], long[:, -1:].expand_as(long[:, reach:]))


@pytest.mark.parametrize("length", [denoiser.SLOTS, 77, 512])
def test_one_padding_token_stands_for_all_in_training(pipeline, length):
    """Training attention equals that of the pipeline on all its text tokens."""
    trainer, grid = denoiser.Denoiser(models.TINY).eval(), models.TINY.grid
    for name in export.PARTS:
        getattr(trainer, name).load_state_dict(getattr(pipeline, name).state_dict())
    context, pooled, text_ids = pipeline.encode_prompt(PROMPT, prompt_2=None, max_sequence_length=length)
    latents, times = (
        torch.randn(1, 4, 2 * grid, 2 * grid, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0.6]),
    )
    tokens = pipeline.tokenizer_2([PROMPT], padding="max_length", max_length=denoiser.SLOTS, return_tensors="pt")
    clip_tokens = pipeline.tokenizer([PROMPT], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = pipeline.transformer(
            denoiser.pack(latents), context, pooled, times, denoiser.positions(grid, grid), text_ids, return_dict=False
        )[0]
        found = trainer(latents, times, tokens.input_ids, clip_tokens, length - denoiser.SLOTS)
    assert expected.std() > 1e-3
    torch.testing.assert_close(found, denoiser.unpack(expected), rtol=1e-4, atol=1e-5)


def test_latents_are_packed_as_the_pipeline_does():
    latents = torch.randn(2, 4, 6, 6)
    packed = FluxPipeline._pack_latents(latents, 2, 4, 6, 6)
    assert torch.equal(denoiser.pack(latents), packed)
    assert torch.equal(denoiser.unpack(packed), latents)


def test_positions_are_the_cells_centres():
    fine = FluxPipeline._prepare_latent_image_ids(1, 8, 8, torch.device("cpu"), torch.float32)
    assert torch.equal(denoiser.positions(8, 8), fine)
    coarse = fine.view(2, 4, 2, 4, 3).mean((1, 3)).view(4, 3)
    torch.testing.assert_close(denoiser.positions(2, 8), coarse)


def test_coarse_grids_have_all_text_and_share_the_image():
    grids = denoiser.coarse_grids(3, 8, 4, torch.Generator().manual_seed(0))
    assert grids.shape == (4, 3 + 16)
    assert grids[:, :3].tolist() == [[0, 1, 2]] * 4
    assert sorted(grids[:, 3:].flatten().tolist()) == list(range(3, 67))
    rows = (grids[:, 3:] - 3) // 8
    assert all(len(set(row.tolist())) == 4 for row in rows)


@pytest.mark.parametrize("most", [1, 100])
def test_a_bias_counts_a_key_several_times(monkeypatch, most):
    monkeypatch.setattr(denoiser, "MATRIX_KEYS", most)
    query, key, value = torch.randn(3, 2, 5, 4, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    counts = torch.tensor([1, 3, 1, 7, 2])
    many = [x.repeat_interleave(counts, 1) for x in (key, value)]
    found = denoiser.attend(query, key, value, counts.log())
    torch.testing.assert_close(found, denoiser.attend(query, *many, None))


def test_a_time_means_the_same_noise_on_all_grids():
    """Averaged over 4x4 tokens, noise is a quarter as large."""
    times = torch.tensor([0.1, 0.5, 0.9])
    coarse = recipe.shift(times, 1 / 4)
    torch.testing.assert_close(coarse / (1 - coarse), times / (1 - times) / 4)


def test_padding_is_mostly_that_of_a_plain_call():
    drawn = [recipe.draw_padding(torch.Generator().manual_seed(seed)) for seed in range(200)]
    most = models.LENGTH - denoiser.SLOTS
    assert 0.4 < sum(number == most for number in drawn) / 200 < 0.6
    assert min(drawn) == 0 and all(0 <= number <= most for number in drawn)


def test_a_preview_classifies_a_checkpoint(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models, "FULL", models.TINY)
    checkpoint = trained / "checkpoints" / "layout.pt"
    preview.main([str(checkpoint), "--out", str(tmp_path), "--coarse", "2", "--count", "2", "--steps", "2"])
    assert (tmp_path / "layout-2.png").is_file()
    assert "'shape'" in capsys.readouterr().out


def test_training_goes_on_from_a_snapshot(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "FULL", models.TINY)
    snapshot.main([str(trained / "checkpoints" / "outline.pt"), "--out", str(tmp_path / "snapshot")])
    saved = torch.load(trained / "checkpoints" / "outline.pt", weights_only=True)["average"]
    found = load_file(tmp_path / "snapshot" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value, saved[f"transformer.{name}"].half()) for name, value in found.items())
    resumed = ["--resume-from", str(tmp_path / "snapshot"), "--stages", "outline"]
    recipe.main(["--out", str(tmp_path / "run"), *TINY, *resumed])
    assert list(export.load_record(tmp_path / "run" / "pipeline")["stages"]) == ["outline", "outline (2)"]


def test_large_images_are_averaged_for_the_classifier():
    images = torch.randint(256, (1, 3, 512, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shrunk = quality.shrink(images)
    assert shrunk.shape == (1, 3, 256, 256)
    assert abs(int(shrunk[0, 1, 2, 3]) - images[0, 1, 4:6, 6:8].double().mean()) <= 0.5
    assert quality.shrink(shrunk) is shrunk
