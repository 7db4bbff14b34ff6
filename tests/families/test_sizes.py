"""Sizes that a model can draw, from its configuration."""

from __future__ import annotations

from typing import Any

import pytest

from elfatt_sd.errors import ElfattError
from elfatt_sd.families.sizes import Dimensions

WAN_VAE = {"base_dim": 96, "dim_mult": [1, 2, 4, 4], "z_dim": 16}
SD15 = Dimensions.of(
    {"sample_size": 64, "block_out_channels": [320, 640, 1280, 1280]}, {"block_out_channels": [128, 256, 512, 512]}
)


def test_what_a_configuration_says() -> None:
    assert Dimensions((512, 512), 8, least=64, multiple=8) == SD15
    assert Dimensions.of({"sample_size": (4, 8), "block_out_channels": [8]}, None).own == (32, 64)
    assert SD15.size(None, 768) == (512, 768)


def test_a_height_and_a_width_have_names_of_their_own() -> None:
    config = {"num_attention_heads": 48, "attention_head_dim": 64, "patch_size": 2, "in_channels": 16}
    assert Dimensions.of({**config, "sample_height": 60, "sample_width": 90}, VAE16).own == (480, 720)
    with pytest.raises(LookupError, match="sample_size"):
        Dimensions.of(config, VAE16)


def test_sides_that_the_levels_cannot_halve_are_refused() -> None:
    SD15.check(64, None)
    with pytest.raises(ElfattError, match="width=56 is not accepted; this model needs at least 64, and is"):
        SD15.check(512, 56)


def test_small_images_are_pointed_out() -> None:
    assert "made for images of 512x512; expect poor ones at 64x512" in SD15.small(64, None)
    assert SD15.small(256, 1024) == SD15.small(None, None) == ""


VAE16 = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 16}


@pytest.mark.parametrize(
    ("config", "vae", "multiple", "factor"),
    [
        ({"patch_size": 2, "in_channels": 4, "sample_size": 128}, {**VAE16, "latent_channels": 4}, 16, 8),  # PixArt
        ({"patch_size": 2, "in_channels": 16, "sample_size": 128}, VAE16, 16, 8),  # Stable Diffusion 3
        ({"patch_size": 1, "in_channels": 64}, VAE16, 16, 8),  # Flux: the pipeline cuts the patches
        ({"patch_size": 2, "in_channels": 64}, WAN_VAE, 16, 8),  # Qwen
        ({"patch_size": [1, 2, 2], "in_channels": 16}, WAN_VAE, 16, 8),
        (
            {"patch_size": 1, "in_channels": 32},
            {"decoder_block_out_channels": [128] * 6, "latent_channels": 32},
            32,
            32,
        ),
    ],
)
def test_transformers(config: dict[str, Any], vae: dict[str, Any], multiple: int, factor: int) -> None:
    found = Dimensions.of({"num_attention_heads": 24, "attention_head_dim": 128, **config}, vae, own=(1024, 1024))
    assert (found.factor, found.multiple, found.least) == (factor, multiple, multiple)
    with pytest.raises(ElfattError, match=f"width=1032 is not accepted; this model needs a multiple of {multiple}"):
        found.check(1024, 1032)
