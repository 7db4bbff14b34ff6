"""UNets of other makes: attention blocks over pictures, single prompts, a pipeline without text."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import FIRST, TWO_PHASES, check_patch, generator, layer_calls, recorded

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase

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


def test_unconditional_pipeline() -> None:
    pipe = tiny.quiet(diffusers.DDIMPipeline(picture_unet(), tiny.ddim()))

    def run() -> torch.Tensor:
        return torch.as_tensor(
            pipe(generator=generator(), num_inference_steps=4, output_type="numpy", return_dict=False)[0]
        )

    check_patch(pipe, run, layers={"unet": 3})


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
