"""The renderer draws what labels say, and the weights in the package draw what they are asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_layers
from elfatt_sd.toy import EMBEDDED, GUIDANCE, TOY, renderer
from elfatt_sd.toy.features import CLASSIFIER_FILE, load_feature_extractor
from elfatt_sd.toy.renderer import (
    ATTRIBUTES,
    CLASS_PROMPTS,
    CLASSES,
    COLORS,
    VOCABULARY,
    Scene,
    class_labels,
    describe,
    render,
    sample_scenes,
)
from tools.toy import quality
from tools.toy.models import TOKENS


@pytest.fixture(scope="module")
def pipeline():
    return StableDiffusionPipeline.from_pretrained(TOY)


@pytest.fixture(scope="module")
def transformer() -> Any:
    return elfatt_sd.load_pipeline("toy-dit", device="cpu")


@pytest.fixture(scope="module")
def classifier():
    return load_feature_extractor()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_they_are_small_standard_directories_without_pickles(transformer: Any, tmp_path: Path) -> None:
    assert size(TOY) <= 12_000_000 and sum(size(each.folder) for each in EMBEDDED.values()) <= 24_000_000
    assert size(CLASSIFIER_FILE.parent) <= 1_000_000
    for name, kind in (("toy", "StableDiffusionPipeline"), ("toy-dit", "FluxPipeline")):
        folder = EMBEDDED[name].folder
        assert json.loads((folder / "model_index.json").read_text())["_class_name"] == kind
        assert not [path for path in folder.rglob("*") if path.suffix in {".bin", ".pt", ".ckpt", ".pkl"}]
    plain: Any = FluxPipeline.from_pretrained(EMBEDDED["toy-dit"].folder)
    assert type(transformer) is type(plain)
    quality.save_sheet(torch.cat(list(quality.renders(64, 1, 128))), tmp_path / "sheet.png")
    assert 10_000 < size(tmp_path) < 600_000


def test_the_finest_grids_have_4096_tokens_and_even_heads(pipeline, transformer) -> None:
    assert pipeline.unet.config.sample_size == 64
    assert pipeline.unet.config.sample_size * pipeline.vae_scale_factor == 256
    layers = [layer for name, layer in pipeline.unet.named_modules() if name.endswith("attn1")]
    assert len(layers) == 13
    assert all(layer.heads % 2 == 0 and layer.to_q.out_features // layer.heads % 8 == 0 for layer in layers)
    plan = elfatt_sd.plan(transformer, "elfatt-fast")
    assert {layer.tokens for layer in plan.layers} == {4096}
    assert len(plan.layers) == len(find_layers(transformer.transformer)) == 7


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
    with pytest.raises(ElfattError, match="no classifier at"):
        load_feature_extractor(path=Path("none.safetensors"))


def test_the_autoencoder_restores_renders(pipeline):
    images = 2 * render(sample_scenes(4, 11)) - 1
    with torch.inference_mode():
        restored = pipeline.vae.decode(pipeline.vae.encode(images).latent_dist.mean).sample
    error = (restored.clamp(-1, 1) - images).square().mean((1, 2, 3))
    assert (10 * torch.log10(4 / error)).mean() > 31


def test_images_show_what_was_asked_for(pipeline, classifier):
    """And the same seed draws the same image."""
    classes = quality.draw_classes(4, 1)
    prompts = [describe(*labels) for labels in classes]
    made = quality.generate(pipeline, prompts, 0, 2, num_inference_steps=10, guidance_scale=GUIDANCE)
    hits = quality.predicted(classifier, torch.cat(list(made))) == class_labels(classes)
    assert hits.double().mean() >= 0.9
    assert hits[:, 1:].double().mean() >= 0.9  # all but the shape
    settings = {"num_inference_steps": 2, "guidance_scale": GUIDANCE}
    first, second = (next(quality.generate(pipeline, ["a red star"], 5, 1, **settings)) for _ in range(2))
    assert torch.equal(first, second)


def test_the_transformer_shows_what_was_asked_for(transformer, classifier) -> None:
    classes = quality.draw_classes(1, 1)
    made = quality.generate(transformer, [describe(*classes[0])], 0, 1, num_inference_steps=8, guidance_scale=1.0)
    images = quality.shrink(torch.cat(list(made)))
    hits = quality.predicted(classifier, images) == class_labels(classes)
    assert hits.double().mean() >= 0.75


def test_the_distance_is_zero_to_itself_and_grows_with_damage(classifier):
    images = torch.cat(list(quality.renders(96, 1, 256)))
    features = classifier(images)
    mild, heavy = classifier(images.clamp(20, 235)), classifier(255 - images)
    assert abs(quality.distance(features, features)) < 1e-6
    assert 0 < quality.distance(features, mild) < quality.distance(features, heavy)


def test_pictures_are_in_range_and_do_not_depend_on_their_batch():
    scenes = sample_scenes(12, 0)
    images = render(scenes, 64)
    assert images.shape == (12, 3, 64, 64)
    assert images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    assert render([], 32).shape == (0, 3, 32, 32)
    for i, scene in enumerate(scenes):
        torch.testing.assert_close(render([scene], 64)[0], images[i])


def test_every_label_is_drawn_about_equally_often():
    labels = renderer.scene_labels(sample_scenes(4000, 1))
    for column, values in zip(labels.T, ATTRIBUTES.values(), strict=True):
        shares = torch.bincount(column, minlength=len(values)) / len(labels)
        assert (shares * len(values) - 1).abs().max() < 0.25
    assert (labels[:, 1] != labels[:, 3]).all()


def test_the_object_has_its_colour_and_place():
    for shape in renderer.SHAPES:
        scene = Scene(shape, "red", "plain", "blue", x=0.4, y=0.6)
        image = render([scene], 100)[0]
        torch.testing.assert_close(image[:, 60, 40], torch.tensor(COLORS["red"]))
        torch.testing.assert_close(image[:, 2, 2], torch.tensor(COLORS["blue"]))
        red = (image[0] > 0.5).float().mean().item()
        assert 0.05 < red < 0.35


@pytest.mark.parametrize(
    ("pattern", "share"), [("plain", 0.0), ("striped", 0.5), ("checkered", 0.5), ("dotted", 0.283)]
)
def test_a_pattern_has_its_share_of_the_second_tone(pattern, share):
    scene = Scene("circle", "red", pattern, "blue", radius=1e-4, period=0.25)
    pale = (render([scene], 256)[0, 0] - COLORS["blue"][0]) / (renderer.PALE * (1 - COLORS["blue"][0]))
    assert abs(pale.mean().item() - share) < 0.01


def test_captions_name_all_four_labels():
    scene = Scene("star", "red", "striped", "blue")
    assert renderer.caption(scene) == "a red star on a striped blue background"
    assert renderer.caption(dataclasses.replace(scene, color="orange")).startswith("an orange star")


def test_classes_are_all_combinations_of_two_colours():
    assert len(set(CLASS_PROMPTS)) == len(CLASS_PROMPTS) == len(CLASSES)
    assert len(CLASSES) == len(renderer.SHAPES) * len(renderer.PATTERNS) * len(COLORS) * (len(COLORS) - 1)
    assert "a red star on a striped blue background" in CLASS_PROMPTS
    assert not any(color == background for _, color, _, background in CLASSES)


def test_unknown_words():
    assert renderer.unknown_words("A red zebra, on a striped RED zebra!") == ["zebra"]
    assert renderer.unknown_words("") == []
    assert not any(renderer.unknown_words(prompt) for prompt in CLASS_PROMPTS)
    assert not renderer.unknown_words("a high quality photograph of a red star.")
