"""UNets: every kind of pipeline is patched and put back, UNets of other makes, runs of few steps."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import (
    ACTIVE,
    FIRST,
    STEPS,
    TWO_PHASES,
    check_patch,
    generator,
    layer_calls,
    like,
    patched_layers,
    picture,
    recorded,
    runner,
)

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families.shapes import SHAPES, empty_unet


@pytest.fixture(scope="module")
def sd15(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


Make = Callable[[Any, Path], Any]  # of a small Stable Diffusion 1.5 and a folder
LATER: dict[str, Any] = {"strength": 0.75, "num_inference_steps": 8}
MASKED = {"mask_image": picture(channels=1).round(), "height": 32, "width": 32}
MASKED_64 = {"mask_image": picture(64, 64, 1).round(), "height": 64, "width": 64}
IMAGE, IMAGE_64 = {"image": picture()}, {"image": picture(64, 64)}


def plain(pipe: Any, folder: Path) -> Any:
    return pipe


def kind(name: str, **unet: Any) -> Make:
    """Another kind of pipeline, with the same UNet or one of its own."""

    def make(pipe: Any, folder: Path) -> Any:
        return like(getattr(diffusers, name), pipe, **({"unet": tiny.unet(**unet)} if unet else {}))

    return make


def sdxl(name: str) -> Make:
    def make(pipe: Any, folder: Path) -> Any:
        return like(getattr(diffusers, name), tiny.sdxl(folder), feature_extractor=None, add_watermarker=False)

    return make


def refiner(pipe: Any, folder: Path) -> Any:
    parts = tiny.sdxl_parts(folder, refiner=True)
    given = {"requires_aesthetics_score": True, "add_watermarker": False}
    return tiny.quiet(diffusers.StableDiffusionXLImg2ImgPipeline(**parts, **given))


def upscaler(pipe: Any, folder: Path) -> Any:
    """The finest level has no self-attention."""
    parts = tiny.sd15_parts(folder, in_channels=7, only_cross_attention=(True, False, False), num_class_embeds=1000)
    parts |= {"low_res_scheduler": diffusers.DDPMScheduler(), "scheduler": tiny.ddim()}
    parts["vae"].register_to_config(scaling_factor=0.08333)
    return tiny.quiet(diffusers.StableDiffusionUpscalePipeline(**parts))


def unconditional(pipe: Any, folder: Path) -> Any:
    return tiny.quiet(diffusers.DDIMPipeline(picture_unet(), tiny.ddim()))


TO_IMAGE, INPAINT = "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"
# How it is made, what it is given, and calls of the UNet in each of the two phases.
PIPELINES: dict[str, tuple[Make, dict[str, Any], tuple[int, int]]] = {
    "guidance": (plain, {"guidance_scale": 7.5}, (2, 2)),
    "no guidance, three images": (plain, {"guidance_scale": 1.0, "num_images_per_prompt": 3}, (2, 2)),
    "guidance, five images": (plain, {"guidance_scale": 7.5, "num_images_per_prompt": 5}, (2, 2)),
    "pixels": (plain, {"output_type": "pt"}, (2, 2)),
    "17x9": (kind(TO_IMAGE), {"image": picture(34, 18), "strength": 1.0}, (2, 2)),  # odd on some level
    "11x23": (kind(TO_IMAGE), {"image": picture(22, 46), "strength": 1.0}, (2, 2)),
    "19x19": (kind(TO_IMAGE), {"image": picture(38, 38), "strength": 1.0}, (2, 2)),
    "image to image": (kind(TO_IMAGE), {**IMAGE, **LATER}, (2, 4)),
    "inpainting": (kind(INPAINT), {**IMAGE, **MASKED}, (2, 2)),
    "inpainting, nine channels": (kind(INPAINT, in_channels=9), {**IMAGE, **MASKED}, (2, 2)),
    "pix2pix, a batch of three": (kind("StableDiffusionInstructPix2PixPipeline", in_channels=8), IMAGE, (2, 2)),
    "SDXL, image to image": (sdxl("StableDiffusionXLImg2ImgPipeline"), {**IMAGE_64, **LATER}, (2, 4)),
    "SDXL, inpainting": (sdxl("StableDiffusionXLInpaintPipeline"), {**IMAGE_64, **MASKED_64, **LATER}, (2, 4)),
    "SDXL refiner": (refiner, {**IMAGE_64, "strength": 0.5, "num_inference_steps": 8}, (0, 4)),
    "upscaler": (upscaler, {"image": picture(16, 16)}, (2, 2)),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(sd15: Any, folder: Path, name: str) -> None:
    make, given, calls = PIPELINES[name]
    pipe = make(sd15, folder)
    check_patch(pipe, runner(pipe, **given), layers={"unet": 3}, calls=calls)


def test_unconditional_pipeline(folder: Path) -> None:
    pipe = unconditional(None, folder)

    def run() -> torch.Tensor:
        return torch.as_tensor(
            pipe(generator=generator(), num_inference_steps=4, output_type="numpy", return_dict=False)[0]
        )

    check_patch(pipe, run, layers={"unet": 3})


def test_odd_grids_below_the_finest_level(sd15: Any) -> None:
    """17x9 has 9x5 below it: rounded up, as the convolutions do."""
    pipe = like(diffusers.StableDiffusionImg2ImgPipeline, sd15)
    elfatt_sd.apply_patch(pipe, PatchConfig("all", (FIRST,), levels=2))
    with recorded() as calls:
        assert runner(pipe, image=picture(34, 18), strength=1.0)().isfinite().all()
    elfatt_sd.remove_patch(pipe)
    assert len(calls) == 6
    assert set(calls.values()) == {2}


def test_several_prompts_of_one_batch_are_independent(sd15: Any) -> None:
    """A picture is the same, alone or beside another."""
    elfatt_sd.apply_patch(sd15, "elfatt", block_size=16, agents=8)
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    both = sd15(["a cat", "a dog"], generator=seeds, **STEPS).images
    alone = sd15("a dog", generator=torch.Generator().manual_seed(2), **STEPS).images
    elfatt_sd.remove_patch(sd15)
    assert torch.allclose(both[1], alone[0], atol=1e-4)


def test_sd2_splits_channels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from elfatt_sd.attention import softmax as attention

    seen = set()
    agent_attention = attention.agent_attention

    def spy(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.add(tuple(q.shape[2:]))
        return agent_attention(q, *args, **kwargs)

    monkeypatch.setattr(attention, "agent_attention", spy)
    pipe = tiny.sd2(folder)
    pipe.scheduler = tiny.ddim()
    check_patch(pipe, runner(pipe), layers={"unet": 3})
    assert seen == {(5, 4)}  # all five heads, half of their eight channels


def test_sdxl_patches_the_level_that_holds_the_tokens(folder: Path) -> None:
    pipe = tiny.sdxl(folder)
    check_patch(pipe, runner(pipe), layers={"unet": 3})
    plan = elfatt_sd.plan(pipe, "elfatt", height=64, width=64)
    patched = [layer for layer in plan.layers if layer.patched]
    assert [(layer.downsample, layer.height, layer.width) for layer in patched] == [(2, 16, 16)] * 3
    assert len(plan.layers) > len(patched)
    with pytest.raises(ElfattError, match=r"max_downsample=1; this UNet has some at 2, 4\. Give"):
        elfatt_sd.apply_patch(pipe, "tome", max_downsample=1)
    assert patched_layers(pipe) == {"unet": []}


@pytest.mark.parametrize(
    ("name", "layers", "patched", "count"),
    [("sd15", 16, (4096, 320, 8), 5), ("sd21", 16, (9216, 320, 5), 5), ("sdxl", 70, (4096, 640, 10), 10)],
)
def test_the_layers_of_the_real_models(name: str, layers: int, patched: tuple[int, int, int], count: int) -> None:
    """The published configurations, without their weights: tokens, channels and heads of what is patched."""
    sd21 = {"sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20)}
    plan = elfatt_sd.plan(empty_unet({**SHAPES["sd15"], **sd21} if name == "sd21" else SHAPES[name]), "elfatt")
    assert len(plan.layers) == layers
    chosen = [(layer.tokens, layer.channels, layer.heads) for layer in plan.layers if layer.patched]
    assert chosen == [patched] * count


ONE_BLOCK = PatchConfig("one block", (Phase(1.0, "block", block_size=4096, block_order="windows"),), levels=8)


def picture_unet(**changes: Any) -> Any:
    """A UNet without text, whose attention takes pictures `[batch, channels, height, width]` and normalises them."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "norm_num_groups": 4,
        "attention_head_dim": 8,
        "down_block_types": ("AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D"),
    }
    return diffusers.UNet2DModel(**{**config, **changes}).eval()


@pytest.mark.parametrize("size", [(16, 16), (10, 26)])
@pytest.mark.parametrize("norm", [{}, {"resnet_time_scale_shift": "scale_shift"}, {"mid_block_scale_factor": 2.0}])
def test_one_block_is_exact_with_group_norm_and_residual(size: tuple[int, int], norm: dict[str, Any]) -> None:
    unet = picture_unet(**norm)
    sample = torch.randn(3, 3, *size, generator=generator())
    with torch.no_grad():
        exact = unet(sample, 500).sample
        elfatt_sd.apply_patch(unet, ONE_BLOCK)
        with recorded() as calls:
            patched = unet(sample, 500).sample
    assert len(layer_calls(unet, calls)) == 7  # of both levels and the middle
    assert torch.allclose(patched, exact, atol=1e-5)


@pytest.mark.parametrize(
    "make", [tiny.unet, lambda: tiny.unet(attention_head_dim=1), lambda: tiny.unet(upcast_attention=True)]
)
def test_one_block_is_exact_in_a_text_unet(make: Any) -> None:
    unet = make()
    sample = torch.randn(3, 4, 16, 16, generator=generator())
    text = torch.randn(3, 5, tiny.TEXT_WIDTH, generator=generator())
    with torch.no_grad():
        exact = unet(sample, 500, text).sample
        elfatt_sd.apply_patch(unet, ONE_BLOCK)
        assert torch.allclose(unet(sample, 500, text).sample, exact, atol=1e-5)


def test_gligen_attention_over_boxes_is_untouched() -> None:
    unet = tiny.unet(attention_type="gated")
    before = dict(unet.attn_processors)
    fusers = {name for name in before if ".fuser." in name}
    sample = torch.randn(1, 4, 16, 16, generator=generator())
    text = torch.randn(1, 5, tiny.TEXT_WIDTH, generator=generator())
    boxes = {
        "boxes": torch.rand(1, 2, 4, generator=generator()),
        "masks": torch.ones(1, 2),
        "positive_embeddings": torch.rand(1, 2, tiny.TEXT_WIDTH, generator=generator()),
    }
    elfatt_sd.apply_patch(unet, PatchConfig("first", (FIRST,)))
    with torch.no_grad(), recorded() as calls:
        assert unet(sample, 500, text, cross_attention_kwargs={"gligen": boxes}).sample.isfinite().all()
    assert fusers
    assert all(unet.attn_processors[name] is before[name] for name in fusers)
    assert len(calls) == 3


def test_video_unet_attends_over_frames_as_before() -> None:
    torch.manual_seed(0)
    unet = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8,
        in_channels=8,
        block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        layers_per_block=1,
        cross_attention_dim=tiny.TEXT_WIDTH,
        num_attention_heads=2,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
    ).eval()
    before = dict(unet.attn_processors)
    video = torch.randn(1, 3, 8, 8, 8, generator=generator())
    text, ids = torch.randn(1, 1, tiny.TEXT_WIDTH, generator=generator()), torch.ones(1, 3)
    elfatt_sd.apply_patch(unet, PatchConfig("first", (FIRST,)))
    with torch.no_grad(), recorded() as calls:
        assert unet(video, 500, text, added_time_ids=ids).sample.isfinite().all()
    assert len(calls) == 3
    assert all(unet.attn_processors[name] is found for name, found in before.items() if "temporal" in name)


@pytest.mark.filterwarnings("ignore:elfatt-sd. .* stays exact")
def test_an_attention_mask_leaves_the_layer_as_it_was() -> None:
    unet = tiny.unet()
    sample = torch.randn(1, 4, 16, 16, generator=generator())
    text = torch.randn(1, 5, tiny.TEXT_WIDTH, generator=generator())
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    tokens = torch.randn(1, 256, 16, generator=generator())
    mask = torch.zeros(1, 1, 256)
    mask[..., 128:] = -10000.0
    with torch.no_grad():
        untouched = attention(tokens, attention_mask=mask)
        elfatt_sd.apply_patch(unet, TWO_PHASES)
        unet(sample, 900, text)
        assert torch.equal(attention(tokens, attention_mask=mask), untouched)
        assert not torch.allclose(attention(tokens), untouched, atol=1e-3)


def euler() -> Any:
    return diffusers.EulerDiscreteScheduler(**tiny.SD15_SCHEDULE, steps_offset=1, timestep_spacing="trailing")


def draw(pipe: Any, steps: int, **options: Any) -> torch.Tensor:
    given = {"guidance_scale": 0.0, "generator": generator(), "output_type": "pt", **options}
    return pipe("a", num_inference_steps=steps, **given).images


@pytest.mark.parametrize("steps", [1, 2, 4])
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
