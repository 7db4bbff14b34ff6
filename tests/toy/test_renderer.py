"""The renderer: what is drawn is what the labels say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elfatt_sd.toy import renderer
from elfatt_sd.toy.renderer import ATTRIBUTES, CLASS_PROMPTS, CLASSES, COLORS, Scene, render, sample_scenes


def test_same_seed_same_scenes():
    assert sample_scenes(20, 3) == sample_scenes(20, 3)
    assert sample_scenes(20, 3) != sample_scenes(20, 4)


def test_pictures_are_in_range_and_do_not_depend_on_their_batch():
    scenes = sample_scenes(12, 0)
    images = render(scenes, 64)
    assert images.shape == (12, 3, 64, 64)
    assert images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
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


def test_a_pattern_keeps_its_phase_across_the_picture():
    scene = Scene("circle", "red", "striped", "blue", radius=1e-4, period=0.25)
    image = render([scene], 128)
    torch.testing.assert_close(image[..., :32], image[..., 96:])


def test_outlines_are_anti_aliased():
    scene = Scene("circle", "red", "plain", "blue")
    fine, coarse = render([scene], 256), render([scene], 64)
    average = torch.nn.functional.avg_pool2d(fine, 4)
    assert (average - coarse).abs().mean() < 0.002
    assert (average - coarse).abs().max() < 0.15


def test_no_scenes_give_no_pictures():
    assert render([], 32).shape == (0, 3, 32, 32)


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


def test_there_are_enough_labels():
    assert len(renderer.SHAPES) >= 6
    assert len(COLORS) == 8
    assert renderer.PATTERNS == ("plain", "striped", "checkered", "dotted")
