"""The renderer draws what labels say, and the weights in the package draw what they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline

import elfatt_sd
from elfatt_sd.toy import EMBEDDED, GUIDANCE, TOY, renderer
from elfatt_sd.toy.features import CLASSIFIER_FILE, load_feature_extractor
from elfatt_sd.toy.renderer import (
    ATTRIBUTES,
    CLASS_PROMPTS,
    CLASSES,
    class_labels,
    describe,
    render_parameters,
    sample_parameters,
    sample_prompts,
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


def scenes(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return sample_parameters(count, torch.Generator().manual_seed(seed))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_they_are_small_standard_directories_without_pickles(transformer: Any, tmp_path: Path) -> None:
    assert size(TOY) <= 12_000_000 and sum(size(each.folder) for each in EMBEDDED.values()) <= 24_000_000
    assert size(CLASSIFIER_FILE.parent) <= 1_000_000
    for each in EMBEDDED.values():
        assert not [path for path in each.folder.rglob("*") if path.suffix in {".bin", ".pt", ".ckpt", ".pkl"}]
    assert type(transformer) is type(FluxPipeline.from_pretrained(EMBEDDED["toy-dit"].folder))
    quality.save_sheet(torch.cat(list(quality.renders(64, 1, 128))), tmp_path / "sheet.png")
    assert 10_000 < size(tmp_path) < 600_000


def test_they_have_the_layers_that_methods_are_made_for_and_load_in_half_precision(pipeline: Any) -> None:
    layers = [layer for name, layer in pipeline.unet.named_modules() if name.endswith("attn1")]
    assert len(layers) == 13 and pipeline.unet.config.sample_size == 64
    assert all(layer.heads % 2 == 0 and layer.to_q.out_features // layer.heads % 8 == 0 for layer in layers)
    with pytest.warns(UserWarning, match="many times slower"):
        half = elfatt_sd.load_pipeline("toy", device="cpu", dtype="float16")
    assert {part.dtype for part in (half.unet, half.vae, half.text_encoder)} == {torch.float16}
    images = 2 * render_parameters(*scenes(2, 11)) - 1
    with torch.inference_mode():
        restored = pipeline.vae.decode(pipeline.vae.encode(images).latent_dist.mean).sample
    error = (restored.clamp(-1, 1) - images).square().mean((1, 2, 3))
    assert (10 * torch.log10(4 / error)).mean() > 31, "the autoencoder restores renders"


def test_every_word_is_one_token(pipeline):
    tokenizer = pipeline.tokenizer
    for word in renderer.VOCABULARY:
        ids = tokenizer(word).input_ids
        assert len(ids) == 3
        assert tokenizer.decode(ids[1:-1]).strip() == word
    assert tokenizer.model_max_length == TOKENS
    assert tokenizer.unk_token_id not in tokenizer("a striped zebra, ümlaut").input_ids[1:-1]
    assert renderer.unknown_words("A red zebra, on a striped RED zebra!") == ["zebra"]
    assert not any(renderer.unknown_words(prompt) for prompt in ("", "a high quality photograph.", *CLASS_PROMPTS))


def test_the_classifier_reads_held_out_renders_and_its_distance_grows_with_damage(classifier):
    accuracy = quality.classifier_accuracy(classifier, 256)
    assert set(accuracy) == set(ATTRIBUTES) and min(accuracy.values()) >= 0.98, accuracy
    images = quality.to_bytes(render_parameters(*scenes(5, 2)))
    together = classifier(images)
    assert (together.shape, together.dtype) == ((5, 64), torch.float32)
    alone = torch.cat([classifier(images[i : i + 1]) for i in range(5)])
    for found in (alone, classifier(images.float() / 255)):
        torch.testing.assert_close(found, together, rtol=1e-4, atol=1e-5)
    images = torch.cat(list(quality.renders(96, 1, 256)))
    same, mild, heavy = (classifier(each) for each in (images, images.clamp(20, 235), 255 - images))
    assert abs(quality.distance(same, same)) < 1e-6 < quality.distance(same, mild) < quality.distance(same, heavy)


@pytest.mark.parametrize(("name", "count", "least"), [("pipeline", 3, 0.9), ("transformer", 1, 0.75)])
def test_images_are_as_asked(request: pytest.FixtureRequest, classifier, name: str, count: int, least: float) -> None:
    classes, unet = quality.draw_classes(count, 1), name == "pipeline"
    settings = {"num_inference_steps": 6 if unet else 4, "guidance_scale": GUIDANCE if unet else 1.0}
    prompts = [renderer.describe(*labels) for labels in classes]
    made = quality.generate(request.getfixturevalue(name), prompts, 0, count, **settings)
    hits = quality.predicted(classifier, quality.shrink(torch.cat(list(made)))) == class_labels(classes)
    assert hits.double().mean() >= least
    assert hits[:, 1:].double().mean() >= least  # all but the shape


def test_pictures_do_not_depend_on_their_batch_and_labels_are_drawn_equally_often():
    labels, geometry = scenes(4000, 1)
    images = render_parameters(labels[:12], geometry[:12], 64)
    assert (images.shape, images.dtype) == ((12, 3, 64, 64), torch.float32)
    assert images.min() >= 0 and images.max() <= 1
    alone = [render_parameters(labels[place, None], geometry[place, None], 64) for place in range(12)]
    torch.testing.assert_close(torch.cat(alone), images)
    for column, values in zip(labels.T, ATTRIBUTES.values(), strict=True):
        shares = torch.bincount(column, minlength=len(values)) / len(labels)
        assert (shares * len(values) - 1).abs().max() < 0.25
    assert (labels[:, 1] != labels[:, 3]).all()
    assert describe("star", "red", "striped", "blue") == "a red star on a striped blue background"
    prompts = [CLASS_PROMPTS[CLASSES.index(each)] for each in CLASSES if class_labels([each]).equal(labels[:1])]
    assert sample_prompts(2, 1)[:1] == prompts
    assert describe("star", "orange", "plain", "blue").startswith("an orange star")
    assert len(set(CLASS_PROMPTS)) == len(CLASSES) == 6 * 4 * 8 * 7  # the colours of object and background differ
