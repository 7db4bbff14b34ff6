"""What is checked before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest

from elfatt_sd.cli.preflight import check_sizes, check_steps
from elfatt_sd.errors import ElfattError
from elfatt_sd.families.shapes import TRANSFORMERS
from elfatt_sd.families.sizes import TRANSFORMER_NAMES


@pytest.mark.parametrize("name", TRANSFORMER_NAMES)
def test_sizes_are_checked_against_the_shape_of_a_transformer(name: str, library_chatter: None) -> None:
    if not hasattr(diffusers, TRANSFORMERS[name].kind):
        pytest.skip("this diffusers does not have it")
    check_sizes(name, [(256, 256)])
    with pytest.raises(ElfattError, match="height=4 is not accepted"):
        check_sizes(name, [(4, 256)])


def test_sizes_are_checked_against_a_directory() -> None:
    with pytest.raises(ElfattError, match="height=8 is not accepted; this model needs at least 32"):
        check_sizes("toy", [(256, 256), (8, None)])
    check_sizes("sd15", [(512, 512)])
    check_sizes("owner/name", [(8, 8)])  # of which nothing is known yet


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sample_size": 64}'])
def test_a_configuration_that_tells_nothing_is_left_to_the_loader(text: str, tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(text)
    check_sizes(tmp_path, [(8, 8)])


def test_a_transformers_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    config = '{"sample_size": 64, "patch_size": 2, "num_attention_heads": 16, "attention_head_dim": 72}'
    (tmp_path / "transformer" / "config.json").write_text(config)
    with pytest.raises(ElfattError, match="height=520 is not accepted; this model needs a multiple of 16"):
        check_sizes(tmp_path, [(520, None)])


def test_more_steps_than_timesteps_are_refused(tmp_path: Path) -> None:
    check_steps("toy", 1000)
    check_steps(str(tmp_path), 10**6)  # nothing is known of it
    with pytest.raises(ElfattError, match="steps=1001 is not accepted; give a whole number from 1 to 1000"):
        check_steps("toy", 1001)
