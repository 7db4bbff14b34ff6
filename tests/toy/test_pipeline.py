"""The weights in the package: a plain diffusers directory that draws what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.toy import GUIDANCE, TOY
from elfatt_sd.toy.features import CLASSIFIER_FILE, load_feature_extractor
from elfatt_sd.toy.renderer import ATTRIBUTES, VOCABULARY, class_labels, describe, render, sample_scenes
from tools.toy import quality
from tools.toy.models import TOKENS


@pytest.fixture(scope="module")
def pipeline():
    return StableDiffusionPipeline.from_pretrained(TOY)


@pytest.fixture(scope="module")
def classifier():
    return load_feature_extractor()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_files_are_small():
    assert size(TOY) <= 12_000_000
    assert size(CLASSIFIER_FILE.parent) <= 1_000_000


def test_it_is_a_standard_directory_without_pickles():
    index = json.loads((TOY / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert not [path for path in TOY.rglob("*") if path.suffix in {".bin", ".pt", ".ckpt", ".pkl"}]


def test_the_finest_grid_has_4096_tokens_and_even_heads(pipeline):
    assert pipeline.unet.config.sample_size == 64
    assert pipeline.unet.config.sample_size * pipeline.vae_scale_factor == 256
    layers = [layer for name, layer in pipeline.unet.named_modules() if name.endswith("attn1")]
    assert len(layers) == 13
    assert all(layer.heads % 2 == 0 and layer.to_q.out_features // layer.heads % 8 == 0 for layer in layers)


def test_parts_are_float32_unless_asked_otherwise(pipeline):
    assert {part.dtype for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder)} == {torch.float32}
    with pytest.warns(UserWarning, match="many times slower"):
        half = elfatt_sd.load_pipeline("toy", device="cpu", dtype="float16")
    assert {part.dtype for part in (half.unet, half.vae, half.text_encoder)} == {torch.float16}


def test_every_word_is_one_token(pipeline):
    tokenizer = pipeline.tokenizer
    for word in VOCABULARY:
        ids = tokenizer(word).input_ids
        assert len(ids) == 3
        assert tokenizer.decode(ids[1:-1]).strip() == word
    assert tokenizer.model_max_length == TOKENS
    assert tokenizer.unk_token_id not in tokenizer("a striped zebra, ümlaut").input_ids[1:-1]


def test_the_text_encoder_tells_words_apart(pipeline):
    prompts = ["a red star on a plain blue background", "a blue star on a plain red background"]
    ids = pipeline.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    states = pipeline.text_encoder(ids)[0]
    assert (states[0] - states[1]).abs().max() > 0.1


def test_the_classifier_reads_held_out_renders(classifier):
    accuracy = quality.classifier_accuracy(classifier, 512)
    assert set(accuracy) == set(ATTRIBUTES)
    assert min(accuracy.values()) >= 0.98, accuracy


def test_features_do_not_depend_on_the_batch(classifier):
    images = quality.to_bytes(render(sample_scenes(5, 2)))
    together = classifier(images)
    assert together.shape == (5, 64)
    assert together.dtype == torch.float32
    for i in range(5):
        torch.testing.assert_close(classifier(images[i : i + 1])[0], together[i], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(classifier(images.float() / 255), together, rtol=1e-4, atol=1e-5)


def test_a_missing_classifier_is_named(tmp_path):
    with pytest.raises(ElfattError, match="no classifier at"):
        load_feature_extractor(path=tmp_path / "none.safetensors")


def test_the_autoencoder_restores_renders(pipeline):
    images = 2 * render(sample_scenes(4, 11)) - 1
    with torch.inference_mode():
        restored = pipeline.vae.decode(pipeline.vae.encode(images).latent_dist.mean).sample
    error = (restored.clamp(-1, 1) - images).square().mean((1, 2, 3))
    assert (10 * torch.log10(4 / error)).mean() > 31


@pytest.fixture(scope="module")
def hits(pipeline, classifier):
    """Which attributes of six pictures are right, `[6, 4]`."""
    classes = quality.draw_classes(6, 1)
    prompts = [describe(*labels) for labels in classes]
    made = quality.generate(pipeline, prompts, 0, 3, num_inference_steps=15, guidance_scale=GUIDANCE)
    return quality.predicted(classifier, torch.cat(list(made))) == class_labels(classes)


def test_pictures_show_what_was_asked_for(hits):
    assert hits.double().mean() >= 0.9
    assert hits[:, 1:].double().mean() >= 0.9  # all but the shape


def test_the_same_seed_draws_the_same_picture(pipeline):
    settings = {"num_inference_steps": 2, "guidance_scale": GUIDANCE}
    first, second = (next(quality.generate(pipeline, ["a red star"], 5, 1, **settings)) for _ in range(2))
    assert torch.equal(first, second)


def test_the_distance_is_zero_to_itself_and_grows_with_damage(classifier):
    images = torch.cat(list(quality.renders(96, 1, 256)))
    features = classifier(images)
    mild, heavy = classifier(images.clamp(20, 235)), classifier(255 - images)
    assert abs(quality.distance(features, features)) < 1e-6
    assert 0 < quality.distance(features, mild) < quality.distance(features, heavy)


def test_the_sheet_is_small(tmp_path):
    images = torch.cat(list(quality.renders(64, 1, 128)))
    quality.save_sheet(images, tmp_path / "sheet.png")
    assert 10_000 < (tmp_path / "sheet.png").stat().st_size < 600_000
