"""Pipelines of every kind are drawn with: with a UNet or a transformer, with `callback_on_step_end` or without."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
from PIL import Image
from support import tiny_transformers
from support.checks import like

from elfatt_sd import ElfattError, PatchConfig
from elfatt_sd.drawing import studio
from elfatt_sd.drawing.studio import (
    Request,
    Result,
    Studio,
    check_text_to_image,
    dimensions_of,
    free_name,
    guidance_options,
    rows_of,
    taken,
    tell_cut_prompts,
    warn_if_too_large,
)

GIB = 2**30
PLAIN, FAST = PatchConfig.preset("sd"), PatchConfig.preset("elfatt-fast", active_fraction=1)


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_transformers.pixart(tmp_path_factory.mktemp("pixart"))


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_transformers.flux(tmp_path_factory.mktemp("flux"), vae=tiny_transformers.vae())


def record(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.path.with_suffix(".json").read_text())
    return found


@pytest.mark.parametrize("kind", ["PixArtAlphaPipeline", "FluxPipeline", "FluxKontextPipeline"])
def test_a_transformer_is_drawn_at_the_size_that_is_asked_for(
    kind: str, tmp_path: Path, pixart: Any, library_chatter: None
) -> None:
    """PixArt has no `callback_on_step_end`; Kontext would draw its own number of pixels, or take an image."""
    if not hasattr(diffusers, kind):
        pytest.skip("this diffusers does not have it")
    pipe, size, seen = pixart, (48, 64), list[tuple[int, int]]()
    if kind.startswith("Flux"):
        pipe = tiny_transformers.flux(tmp_path, getattr(diffusers, kind), vae=tiny_transformers.vae())
        size = (128, 160)
    negative = "b" if "negative_prompt" in taken(pipe) else None  # not by Flux in diffusers 0.32
    request = Request(("a b",), FAST, steps=3, height=size[0], width=size[1], negative_prompt=negative)
    (result,) = Studio(pipe, request, tmp_path, lambda *step: seen.append(step)).results()
    assert (record(result)["height"], record(result)["width"], seen) == (*size, [(1, 3), (2, 3), (3, 3)])
    assert dimensions_of(pipe).multiple == 4
    if pipe is pixart:
        assert (dimensions_of(pipe).own, dimensions_of(pipe).factor) == ((64, 64), 2)
    else:
        with pytest.raises(ElfattError, match=r"scheduler='euler' does not fit .*FlowMatchEuler.*; leave it out"):
            Studio(pipe, dataclasses.replace(request, scheduler="euler"), tmp_path)


@pytest.mark.parametrize(("name", "side"), [("pipe", "height"), ("pipe", "width"), ("flux", "width")])
def test_one_side_alone_is_kept_to(tmp_path: Path, name: str, side: str, request: pytest.FixtureRequest) -> None:
    """Stable Diffusion's pipeline draws its own size where it is given one side."""
    pipe = request.getfixturevalue(name)
    own = dimensions_of(pipe).own
    expected = {"height": own[0], "width": own[1], side: own[0] + 8}
    asked = dataclasses.replace(Request(("a b",), PLAIN, steps=1), **{side: own[0] + 8})
    (result,) = Studio(pipe, asked, tmp_path / "out").results()
    assert record(result) | expected == record(result)


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")
def test_steps_are_counted_as_they_were_asked_for(pipe: Any, tmp_path: Path) -> None:
    """Some schedulers call the denoiser twice in a step, or once more; a failing run leaves them as they were."""
    Image.radial_gradient("L").resize((32, 32)).save(tmp_path / "photo.png")
    begun: dict[str, Any] = {"image": tmp_path / "photo.png", "strength": 0.6}
    for name, given in itertools.product(("pndm", "heun", "dpm2", "euler", "ddim"), ({}, begun)):
        seen: list[int] = []
        request = Request(("a",), PLAIN, steps=5, scheduler=name, **given)
        list(Studio(pipe, request, tmp_path, lambda step, steps, seen=seen: seen.append(step)).results())
        assert seen == sorted(seen) and set(seen) <= {0, 1, 2, 3, 4, 5} and seen[-1] == (3 if given else 5)
        assert "step" not in vars(pipe.scheduler)
    pipe.scheduler.step = own = pipe.scheduler.step
    with pytest.raises(ZeroDivisionError):
        studio.draw(pipe, "a", 0, 3, {}, lambda step, steps: 1 // 0)
    assert pipe.scheduler.step is own


class Video(SimpleNamespace):
    def __call__(self, prompt: Any = None, height: Any = None, width: Any = None, num_frames: int = 16) -> None: ...


def test_what_needs_more_than_a_prompt_is_refused(pipe: Any, pixart: Any, flux: Any) -> None:
    for fine in (pipe, pixart, flux):
        check_text_to_image(fine)
    excite = like(diffusers.StableDiffusionAttendAndExcitePipeline, pipe)
    for other, says in (
        (excite, "AttendAndExcitePipeline needs more than a prompt; give"),
        (like(diffusers.StableDiffusionImg2ImgPipeline, pipe), "Img2ImgPipeline needs more than a prompt"),
        (Video(unet=pipe.unet), "Video makes videos; give a text-to-image model, or patch it in Python"),
    ):
        with pytest.raises(ElfattError, match=says):
            check_text_to_image(other)


def test_guidance_by_the_name_that_a_pipeline_has(flux: Any, pipe: Any, tmp_path: Path) -> None:
    class Flux:
        def __call__(self, guidance_scale: Any, true_cfg_scale: Any, negative_prompt: Any) -> None: ...

    class Alone:
        def __call__(self, prompt: Any) -> None: ...

    assert guidance_options(Flux(), 3.5, None) == {"guidance_scale": 3.5}
    assert guidance_options(Flux(), 3.5, "b") == {"guidance_scale": 3.5, "true_cfg_scale": 3.5, "negative_prompt": "b"}
    assert guidance_options(Alone(), 3.5, "b") == {}
    assert [rows_of(pipe, scale) for scale in (1, 7.5)] == [1, 2]
    for name, expected in {"toy": (25, 3), "toy-dit": (12, 1), "owner/another": (50, 7.5)}.items():
        studio = Studio(pipe, Request(("a b",), PLAIN, model=name), tmp_path)
        assert (studio.steps, studio.guidance) == expected
    if "true_cfg_scale" in taken(flux):  # diffusers 0.32 gives every Flux its scale
        request = Request(("a b",), PLAIN, guidance=9.0, steps=2, height=128, width=160)
        with pytest.warns(UserWarning, match="guidance=9 has no effect on this model without a negative_prompt"):
            Studio(flux, request, tmp_path)
        Studio(flux, dataclasses.replace(request, negative_prompt="b"), tmp_path)
    tuned = PatchConfig("tuned", FAST.phases, levels=2, origin={"negative_prompt": ""})
    with pytest.warns(UserWarning, match="here: negative prompt 'b'. What was promised"):
        [*Studio(pipe, Request(("a b",), tuned, steps=2, negative_prompt="b"), tmp_path).results()]


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


def test_an_image_to_begin_with_is_seen_as_a_viewer_shows_it(tmp_path: Path) -> None:
    Image.new("LA", (8, 8), (0, 0)).save(tmp_path / "clear.png")
    assert studio.read_image(tmp_path / "clear.png", None).getpixel((0, 0)) == (255, 255, 255)
    Image.new("I;16", (8, 8), 300).save(tmp_path / "depth.png")
    with pytest.raises(ElfattError, match=r"cannot be read \(not an image of 8 bits\)"):
        studio.read_image(tmp_path / "depth.png", None)


def test_names_are_safe_and_short(tmp_path: Path) -> None:
    assert free_name(tmp_path, "../../etc: Ünï/\\*?").name == "0001-etc-ünï.png"
    assert free_name(tmp_path, "???").name == "0001-picture.png"
    assert len(free_name(tmp_path, "word " * 100).name) < 80


def test_what_cannot_fit_is_warned_of(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(pipe: Any, *size: int | None, **options: Any) -> float:
        """The GiB that are told where nothing is free."""
        with pytest.warns(UserWarning, match=r"needs about ([\d.,]+) GiB") as told:
            warn_if_too_large(pipe, *size, rows=2, **options)
        return float(str(told[0].message).split("about ")[1].split()[0].replace(",", ""))

    monkeypatch.setattr(studio, "memory_of", lambda device: (1e9 * GIB, -1.0))
    small, large, many = needs(pipe, 8192, 8192), needs(pipe, 16384, 16384), needs(pipe, 8192, 8192, batch=4)
    assert large == pytest.approx(4 * small, rel=0.01) and many == pytest.approx(4 * small, rel=0.01)
    clips, _ = tiny_transformers.wan()
    clips.vae = None
    short, long = (needs(clips, 9600, 6400, frames=frames) for frames in (41, 81))
    assert long == pytest.approx(2 * short, rel=0.1)
    assert needs(clips, 9600, 6400) == long, "81 are the pipeline's own"
    monkeypatch.setattr(studio, "memory_of", lambda device: (200 * GIB, 1 * GIB))
    warn_if_too_large(pipe, None, None, rows=2)
    with pytest.warns(UserWarning, match=r"a batch of 500 at 1024x1024 .* 1\.0 are free on cpu: it may fail"):
        warn_if_too_large(pipe, 1024, 1024, rows=2, batch=500)
    with pytest.raises(ElfattError, match=r"an image of 100000x.* are free on cpu; give a smaller one"):
        warn_if_too_large(pipe, 1_000_000, 100_000, rows=2)
