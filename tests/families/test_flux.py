"""Flux.1: a small random pipeline through its own `__call__`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import joint_checks as joint
import pytest
import tiny_transformers as tiny
import torch
from checks import generator

import elfatt_sd
from elfatt_sd.families import find_layers


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def flux(made: Any) -> Iterator[Any]:
    yield made
    elfatt_sd.remove_patch(made)


def runner(pipe: Any, **fixed: Any) -> joint.Run:
    def run(**options: Any) -> torch.Tensor:
        given = {"height": 32, "width": 48, "num_inference_steps": 3, "max_sequence_length": 16, **fixed, **options}
        made: torch.Tensor = pipe("a b", generator=generator(), output_type="latent", **given).images
        return made

    return run


def test_layers(flux: Any) -> None:
    names = [layer.name for layer in find_layers(flux.transformer)]
    assert names == ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]


def test_all_keys_are_the_original(flux: Any) -> None:
    joint.check_all_keys(flux, runner(flux))


def test_methods_and_removal(flux: Any) -> None:
    joint.check_methods(flux, runner(flux))


def test_steps(flux: Any) -> None:
    joint.check_steps(flux, runner(flux), layers=2)


def test_true_guidance_is_two_calls_of_a_step(flux: Any) -> None:
    run = runner(flux, negative_prompt="b", true_cfg_scale=2.0)
    joint.check_all_keys(flux, run)
    joint.check_steps(flux, run, layers=2, calls=2, counts=(4,))


def test_plan(flux: Any) -> None:
    joint.check_plan(flux, tokens=96, layers=2, height=32, width=48)
