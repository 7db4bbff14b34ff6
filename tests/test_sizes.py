"""Sizes that a model can draw, from its configuration."""

from __future__ import annotations

import pytest

from elfatt_sd.config import ElfattError
from elfatt_sd.sizes import Dimensions

SD15 = Dimensions.of(
    {"sample_size": 64, "block_out_channels": [320, 640, 1280, 1280]}, {"block_out_channels": [128, 256, 512, 512]}
)


def test_what_a_configuration_says() -> None:
    assert Dimensions((512, 512), factor=8, levels=4, channels=320, decoder_channels=256) == SD15
    assert Dimensions.of({"sample_size": (4, 8), "block_out_channels": [8]}, None).own == (32, 64)
    assert SD15.size(None, 768) == (512, 768)


def test_sides_that_the_levels_cannot_halve_are_refused() -> None:
    SD15.check(64, None)
    with pytest.raises(ElfattError, match="width=56 is not accepted; this model needs at least 64, and is"):
        SD15.check(512, 56)


def test_small_images_are_pointed_out() -> None:
    assert "made for images of 512x512; expect poor ones at 64x512" in SD15.small(64, None)
    assert SD15.small(256, 1024) == SD15.small(None, None) == ""


def test_memory_grows_with_the_image_and_the_batch() -> None:
    small, large = SD15.memory((512, 512), 2, 4), SD15.memory((1024, 1024), 2, 4)
    assert large == 4 * small
    assert SD15.memory((512, 512), 16, 4) > small
