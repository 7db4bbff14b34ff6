"""Runs of one to four steps: Turbo, Lightning, LCM, image to image at low strength."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import generator, recorded

import elfatt_sd
from elfatt_sd.config import METHODS, PatchConfig, Phase

ACTIVE = [method for method in METHODS if method != "sd"]


def euler() -> Any:
    return diffusers.EulerDiscreteScheduler(**tiny.SD15_SCHEDULE, steps_offset=1, timestep_spacing="trailing")


def draw(pipe: Any, steps: int, **options: Any) -> torch.Tensor:
    given = {"guidance_scale": 0.0, "generator": generator(), "output_type": "pt", **options}
    return pipe("a", num_inference_steps=steps, **given).images


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ACTIVE)
def test_a_method_acts_or_says_that_it_does_not(folder: Path, method: str, steps: int) -> None:
    pipe = tiny.sd15(folder, sample_size=32, scheduler=euler())
    untouched = draw(pipe, steps)
    acts = steps > 1 or method not in ("elfatt-fast", "elfatt-quality")
    assert PatchConfig.preset(method).approximates(0, steps) is acts
    elfatt_sd.apply_patch(pipe, method)
    with recorded() as calls:
        if acts:
            assert not torch.equal(draw(pipe, steps), untouched)
        else:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", UserWarning)
                assert torch.equal(draw(pipe, steps), untouched)
                draw(pipe, steps)
            [message] = [str(given.message) for given in warned if "elfatt-sd" in str(given.message)]
            assert re.search(
                rf"{method} approximates no step of this run, which begins with step 1 of 1; give more steps", message
            )
    sampled = sum(count for (_, attention), count in calls.items() if attention == "sampled")
    assert bool(sampled) == (acts and method.startswith("elfatt-"))


@pytest.mark.parametrize(
    ("method", "settings"), [("elfatt-fast", {"active_fraction": 1}), ("elfatt-quality", {"residual_steps": 1})]
)
def test_the_remedy_acts_in_one_step(folder: Path, method: str, settings: dict[str, Any]) -> None:
    pipe = tiny.sd15(folder, sample_size=32, scheduler=euler())
    untouched = draw(pipe, 1)
    with elfatt_sd.patched(pipe, method, **settings):
        assert not torch.equal(draw(pipe, 1), untouched)


def test_image_to_image_at_low_strength_past_the_approximated_steps(folder: Path) -> None:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    other = tiny.quiet(diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False))
    early = PatchConfig("early", (Phase(0.3, ratio=0.5),))
    elfatt_sd.apply_patch(other, early)
    given: dict[str, Any] = {"image": torch.zeros(1, 3, 16, 16), "num_inference_steps": 10, "output_type": "latent"}
    says = "early approximates no step of this run, which begins with step 7 of 10; give more steps"
    with pytest.warns(UserWarning, match=says):
        other("a", strength=0.4, **given)
    other("a", strength=0.9, **given)
