"""Every family of UNet pipelines is patched and put back, through its own call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import FIRST, STEPS, check_patch, like, patched_layers, picture, recorded, runner

import elfatt_sd
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError


@pytest.fixture(scope="module")
def sd15(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


@pytest.mark.parametrize("guidance", [7.5, 1.0])
@pytest.mark.parametrize("images", [1, 2, 3, 5])
def test_sd15(sd15: Any, images: int, guidance: float) -> None:
    check_patch(sd15, runner(sd15, num_images_per_prompt=images, guidance_scale=guidance), layers={"unet": 3})


@pytest.mark.parametrize(("height", "width"), [(34, 18), (22, 46), (38, 38)])
def test_grids_that_are_odd_on_some_level(sd15: Any, height: int, width: int) -> None:
    pipe = like(diffusers.StableDiffusionImg2ImgPipeline, sd15)
    run = runner(pipe, image=picture(height, width), strength=1.0)
    assert check_patch(pipe, run, layers={"unet": 3}).shape[-2:] == (height // 2, width // 2)


def test_odd_grids_below_the_finest_level(sd15: Any) -> None:
    """17x9 has 9x5 below it: rounded up, as the convolutions do."""
    pipe = like(diffusers.StableDiffusionImg2ImgPipeline, sd15)
    elfatt_sd.apply_patch(pipe, PatchConfig("all", (FIRST,), levels=2))
    with recorded() as calls:
        assert runner(pipe, image=picture(34, 18), strength=1.0)().isfinite().all()
    elfatt_sd.remove_patch(pipe)
    assert len(calls) == 6
    assert set(calls.values()) == {2}


def test_pictures_are_decoded_too(sd15: Any) -> None:
    assert check_patch(sd15, runner(sd15, output_type="pt"), layers={"unet": 3}).shape == (1, 3, 32, 32)


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


SD: dict[str, Any] = {"sample_size": 64, "cross_attention_dim": 768}
SD2: dict[str, Any] = {
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


@pytest.mark.parametrize(
    ("config", "layers", "patched"),
    [(SD, 16, (4096, 320, 8)), (SD2, 16, (9216, 320, 5)), (SDXL, 70, (4096, 640, 10))],
    ids=["SD 1.5", "SD 2.1", "SDXL"],
)
def test_the_layers_of_the_real_models(config: dict[str, Any], layers: int, patched: tuple[int, int, int]) -> None:
    """The published configurations, without their weights: tokens, channels and heads of what is patched."""
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**config)
    plan = elfatt_sd.plan(unet, "elfatt")
    assert len(plan.layers) == layers
    chosen = [(layer.tokens, layer.channels, layer.heads) for layer in plan.layers if layer.patched]
    assert chosen == [patched] * (10 if config is SDXL else 5)


def test_sdxl_refiner(folder: Path) -> None:
    parts = tiny.sdxl_parts(folder, refiner=True)
    pipe = tiny.quiet(
        diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True, add_watermarker=False)
    )
    run = runner(pipe, image=picture(64, 64), strength=0.5, num_inference_steps=8)
    check_patch(pipe, run, layers={"unet": 3}, calls=(0, 4))


def test_sdxl_image_to_image_and_inpainting(folder: Path) -> None:
    base = tiny.sdxl(folder)
    for kind in (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline):
        kept = {
            name: part for name, part in base.components.items() if name not in ("image_encoder", "feature_extractor")
        }
        pipe = tiny.quiet(kind(**kept, add_watermarker=False))
        more = (
            {"mask_image": picture(64, 64, 1).round(), "height": 64, "width": 64} if "Inpaint" in kind.__name__ else {}
        )
        run = runner(pipe, image=picture(64, 64), strength=0.75, num_inference_steps=8, **more)
        check_patch(pipe, run, layers={"unet": 3}, calls=(2, 4))


def test_image_to_image(sd15: Any) -> None:
    pipe = like(diffusers.StableDiffusionImg2ImgPipeline, sd15)
    run = runner(pipe, image=picture(), strength=0.75, num_inference_steps=8)
    check_patch(pipe, run, layers={"unet": 3}, calls=(2, 4))


@pytest.mark.parametrize("channels", [4, 9])
def test_inpainting(sd15: Any, channels: int) -> None:
    model = sd15.unet if channels == 4 else tiny.unet(in_channels=9)
    pipe = like(diffusers.StableDiffusionInpaintPipeline, sd15, unet=model)
    run = runner(pipe, image=picture(), mask_image=picture(channels=1).round(), height=32, width=32)
    check_patch(pipe, run, layers={"unet": 3})


def test_instruct_pix2pix_with_its_batch_of_three(sd15: Any) -> None:
    pipe = like(diffusers.StableDiffusionInstructPix2PixPipeline, sd15, unet=tiny.unet(in_channels=8))
    batches = set()
    pipe.unet.register_forward_pre_hook(lambda module, inputs: batches.add(inputs[0].shape[0]))
    check_patch(pipe, runner(pipe, image=picture()), layers={"unet": 3})
    assert batches == {3}


def test_upscaler_keeps_levels_without_self_attention(folder: Path) -> None:
    parts = tiny.sd15_parts(folder, in_channels=7, only_cross_attention=(True, False, False), num_class_embeds=1000)
    parts |= {"low_res_scheduler": diffusers.DDPMScheduler(), "scheduler": tiny.ddim()}
    parts["vae"].register_to_config(scaling_factor=0.08333)
    pipe = tiny.quiet(diffusers.StableDiffusionUpscalePipeline(**parts))
    check_patch(pipe, runner(pipe, image=picture(16, 16)), layers={"unet": 3})
    assert {layer.downsample for layer in elfatt_sd.plan(pipe).layers} == {2, 4}
