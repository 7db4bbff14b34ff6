"""Pipelines of every kind are drawn with: with a UNet or a transformer, with `callback_on_step_end` or without."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
from support import tiny_pipelines, tiny_transformers
from support.checks import like

from elfatt_sd import ElfattError, PatchConfig
from elfatt_sd.drawing.compare import try_methods
from elfatt_sd.drawing.running import (
    check_text_to_image,
    dimensions_of,
    guidance_options,
    rows_of,
    taken,
    tell_cut_prompts,
    watched,
)
from elfatt_sd.drawing.studio import Request, Studio


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_transformers.pixart(tmp_path_factory.mktemp("pixart"))


def test_pixart_is_drawn_and_tells_its_steps(pixart: Any, tmp_path: Path, library_chatter: None) -> None:
    """It has no `callback_on_step_end`."""
    seen: list[tuple[int, int]] = []
    config = PatchConfig.preset("elfatt-fast", active_fraction=1)
    request = Request(("a b",), config, steps=3, height=48, width=64)
    (result,) = Studio(pixart, request, tmp_path, lambda *step: seen.append(step)).results()
    assert result.picture.size == (64, 48)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert json.loads(result.path.with_suffix(".json").read_text())["height"] == 48


@pytest.mark.parametrize("kind", ["FluxPipeline", "FluxKontextPipeline"])
def test_flux_is_drawn_at_the_size_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    """Kontext would draw its own number of pixels, and takes an image that it can do without."""
    if not hasattr(diffusers, kind):
        pytest.skip("this diffusers does not have it")
    pipe = tiny_transformers.flux(tmp_path, getattr(diffusers, kind), vae=tiny_transformers.vae())
    config = PatchConfig.preset("elfatt-fast", active_fraction=1)
    negative = "b" if "negative_prompt" in taken(pipe) else None  # not in diffusers 0.32
    request = Request(("a b",), config, steps=2, height=128, width=160, negative_prompt=negative)
    (result,) = Studio(pipe, request, tmp_path).results()
    assert result.picture.size == (160, 128)
    assert dimensions_of(pipe).multiple == 4
    with pytest.raises(ElfattError, match=r"scheduler='euler' does not fit .*FlowMatchEuler.*; leave it out"):
        Studio(pipe, dataclasses.replace(request, scheduler="euler"), tmp_path)
    with pytest.raises(ElfattError, match=r"Img2ImgPipeline needs more than a prompt \(image\)"):
        check_text_to_image(like(diffusers.FluxImg2ImgPipeline, pipe))


@pytest.mark.parametrize("side", ["height", "width"])
@pytest.mark.parametrize("name", ["sd15", "sdxl", "pixart", "flux"])
def test_one_side_alone_is_kept_to(tmp_path: Path, name: str, side: str, library_chatter: None) -> None:
    """Stable Diffusion's pipeline draws its own size where it is given one side."""
    makers = {"sd15": tiny_pipelines.sd15, "sdxl": tiny_pipelines.sdxl, "pixart": tiny_transformers.pixart}
    pipe = makers[name](tmp_path) if name in makers else tiny_transformers.flux(tmp_path, vae=tiny_transformers.vae())
    own = dimensions_of(pipe).own
    other = dataclasses.replace(Request(("a b",), PatchConfig.preset("sd"), steps=2), **{side: 2 * own[0]})
    (result,) = Studio(pipe, other, tmp_path / "out").results()
    assert result.picture.size == ((own[1], 2 * own[0]) if side == "height" else (2 * own[0], own[0]))


def test_every_method_is_tried_on_pixart(pixart: Any, library_chatter: None) -> None:
    trial = try_methods(pixart, "a b", methods=("elfatt",), rounds=1, steps=2)
    assert [row.label for row in trial.rows] == ["untouched", "elfatt"]
    assert trial.rows[0].picture.size == (64, 64)


@pytest.mark.parametrize("name", ["pndm", "heun", "dpm2", "euler", "ddim"])
def test_steps_are_counted_as_they_were_asked_for(pipe: Any, tmp_path: Path, name: str) -> None:
    """Some schedulers call the denoiser twice in a step, or once more than they are asked for."""
    seen: list[int] = []
    request = Request(("a",), PatchConfig.preset("sd"), steps=5, scheduler=name)
    list(Studio(pipe, request, tmp_path, lambda step, steps: seen.append(step)).results())
    assert seen == sorted(seen) and set(seen) <= {0, 1, 2, 3, 4, 5} and seen[-1] == 5
    assert "step" not in vars(pipe.scheduler)


def test_a_failing_run_leaves_the_scheduler_as_it_was(pipe: Any) -> None:
    pipe.scheduler.step = own = pipe.scheduler.step
    with pytest.raises(KeyError), watched(pipe, 3, lambda step, steps: None):
        raise KeyError
    assert pipe.scheduler.step is own


def test_sides_that_the_patches_cannot_tile_are_refused(pixart: Any, tmp_path: Path) -> None:
    request = Request(("a b",), PatchConfig.preset("sd"), height=64, width=64)
    Studio(pixart, request, tmp_path)
    dimensions = dimensions_of(pixart)
    assert (dimensions.own, dimensions.factor, dimensions.multiple) == ((64, 64), 2, 4)
    with pytest.raises(ElfattError, match="height=66 is not accepted; this model needs a multiple of 4"):
        dimensions.check(66, 64)


def test_what_needs_more_than_a_prompt_says_what(pipe: Any, pixart: Any) -> None:
    check_text_to_image(pipe)
    check_text_to_image(pixart)
    with pytest.raises(ElfattError, match=r"AttendAndExcitePipeline needs more than a prompt \(token_indices\); give"):
        check_text_to_image(like(diffusers.StableDiffusionAttendAndExcitePipeline, pipe))
    with pytest.raises(ElfattError, match=r"Img2ImgPipeline needs more than a prompt \(image\)"):
        check_text_to_image(like(diffusers.StableDiffusionImg2ImgPipeline, pipe))


def test_videos_are_named_as_such(pipe: Any) -> None:
    class Video(SimpleNamespace):
        def __call__(self, prompt: Any = None, height: Any = None, width: Any = None, num_frames: int = 16) -> None: ...

    with pytest.raises(ElfattError, match="Video makes videos; give a text-to-image model, or patch it in Python"):
        check_text_to_image(Video(unet=pipe.unet))


def test_guidance_by_the_name_that_a_pipeline_has() -> None:
    class Flux:
        def __call__(self, guidance_scale: Any, true_cfg_scale: Any, negative_prompt: Any) -> None: ...

    class Alone:
        def __call__(self, prompt: Any) -> None: ...

    assert guidance_options(Flux(), 3.5, None) == {"guidance_scale": 3.5}
    assert guidance_options(Flux(), 3.5, "b") == {"guidance_scale": 3.5, "true_cfg_scale": 3.5, "negative_prompt": "b"}
    assert guidance_options(Alone(), 3.5, "b") == {}


def test_rows_of_a_call(pipe: Any, pixart: Any) -> None:
    assert [rows_of(pipe, scale) for scale in (1, 7.5)] == [rows_of(pixart, scale) for scale in (1, 7.5)] == [1, 2]


def test_the_longest_text_encoder_counts(pipe: Any) -> None:
    words = "a " * 100
    with pytest.warns(UserWarning, match="1 of 2 prompts are cut off: the text encoder takes 75 tokens, and"):
        tell_cut_prompts(pipe, [words, "b", words])

    class Two(SimpleNamespace):
        def __call__(self, prompt: Any, max_sequence_length: int = 90) -> None: ...

    roomy = copy.deepcopy(pipe.tokenizer)
    roomy.model_max_length = 512
    with pytest.warns(UserWarning, match="takes 88 tokens"):
        tell_cut_prompts(Two(tokenizer=pipe.tokenizer, tokenizer_2=roomy), [words])
    tell_cut_prompts(Two(tokenizer=pipe.tokenizer, tokenizer_2=roomy), ["a " * 80])


def test_guidance_that_a_model_does_not_take_is_told(tmp_path: Path) -> None:
    pipe = tiny_transformers.flux(tmp_path, vae=tiny_transformers.vae())
    if "true_cfg_scale" not in taken(pipe):
        pytest.skip("this diffusers gives every Flux its scale")
    request = Request(("a b",), PatchConfig.preset("sd"), guidance=9.0, steps=2, height=128, width=160)
    with pytest.warns(UserWarning, match="guidance=9 has no effect on this model without a negative_prompt"):
        Studio(pipe, request, tmp_path)
    Studio(pipe, dataclasses.replace(request, negative_prompt="b"), tmp_path)
