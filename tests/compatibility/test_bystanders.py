"""What keeps a planned layer exact is named: other patches, copies of parts, calls that no hook sees."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tomesd
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import generator, recorded

import elfatt_sd
from elfatt_sd.config import METHODS

ACTIVE = [method for method in METHODS if method != "sd"]
FIRST = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"


def call(unet: Any, timestep: Any = 999, function: Any = None) -> torch.Tensor:
    sample = torch.randn(1, 4, 16, 16, generator=generator())
    text = torch.randn(1, 7, tiny.TEXT_WIDTH, generator=generator())
    with torch.no_grad():
        return (function or unet)(sample, timestep, text).sample


def draw(pipe: Any, **options: Any) -> Any:
    return pipe("a", num_inference_steps=5, output_type="latent", generator=generator(), **options)[0]


def tiled(attention: Any) -> Any:
    """HyperTile: the tokens of a layer in tiles of the batch."""
    inner = attention.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch, tokens, channels = x.shape
        if tokens < 256:
            return inner(x, *args, **kwargs)
        cut = inner(x.reshape(batch * 4, tokens // 4, channels), *args, **kwargs)
        return cut.reshape(batch, tokens, channels)

    return forward


def bypassing(attention: Any) -> Any:
    return lambda x, *args, **kwargs: x


@pytest.mark.parametrize(
    ("replace", "why"),
    [(tiled, "it was given 64 tokens in place of 16x16"), (bypassing, "its attention processor was never called")],
)
def test_a_replaced_forward_is_named_once(replace: Any, why: str) -> None:
    unet = tiny.unet()
    for name, module in unet.named_modules():
        if name.endswith("attn1"):
            module.forward = replace(module)
    elfatt_sd.apply_patch(unet, "elfatt")
    with pytest.warns(UserWarning, match=rf"3 of 3 patched layers stay exact, the first is {FIRST}: {why}.*HyperTile"):
        call(unet)
    call(unet)  # warnings are errors here


@pytest.mark.parametrize("first", ["tomesd", "elfatt"])
def test_tomesd_is_named(folder: Path, first: str) -> None:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    patches: list[Any] = [lambda: tomesd.apply_patch(pipe), lambda: elfatt_sd.apply_patch(pipe, "elfatt")]
    for patch in patches if first == "tomesd" else reversed(patches):
        patch()
    with (
        recorded() as calls,
        pytest.warns(UserWarning, match=r"patched layers stay exact.*tomesd\.remove_patch\(pipe\)"),
    ):
        draw(pipe)
    assert not calls


def test_skipped_blocks_are_no_fault(folder: Path) -> None:
    """As with DeepCache: in some steps a layer is not called, in others it is."""
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    elfatt_sd.apply_patch(pipe, "elfatt-fast", levels=1)
    block = pipe.unet.up_blocks[2].attentions[0]
    steps, forward = [], block.forward

    def skipping(x: Any, **given: Any) -> Any:
        steps.append(None)
        return (x,) if len(steps) in (2, 3) else forward(x, **given)

    block.forward = skipping
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(pipe, guidance_scale=3)


def test_the_patch_of_a_pipeline_does_not_follow_into_a_copy_of_its_parts(folder: Path) -> None:
    pipe = tiny.sd15(folder, scheduler=tiny.ddim())
    elfatt_sd.apply_patch(pipe, "elfatt")
    with pytest.warns(UserWarning, match="the copy has no patch"):
        moving = diffusers.AnimateDiffPipeline.from_pipe(pipe, motion_adapter=tiny.motion_adapter())
    tiny.quiet(moving)
    elfatt_sd.apply_patch(moving, "elfatt")
    with recorded() as calls:
        draw(moving, num_frames=2)
    assert calls


def test_saving_is_no_copy(folder: Path, tmp_path: Path) -> None:
    pipe = tiny.sd15(folder)
    elfatt_sd.apply_patch(pipe, "elfatt")
    pipe.unet.save_pretrained(tmp_path)
    assert pipe.unet.state_dict().keys() == tiny.unet().state_dict().keys()


@pytest.mark.parametrize("method", [method for method in ACTIVE if method != "elfatt-quality"])
def test_forward_by_name_is_a_call_like_any_other(method: str) -> None:
    unet = tiny.unet()
    exact = call(unet, 10)
    elfatt_sd.apply_patch(unet, method)
    assert not torch.equal(call(unet, 10, unet.forward), exact)
    expected = {timestep: call(unet, timestep) for timestep in (999, 10)}
    for timestep in (10, 999, 10):
        assert torch.equal(call(unet, timestep, unet.forward), expected[timestep])
        assert torch.equal(call(unet, 1009 - timestep), expected[1009 - timestep])


def test_a_controlnet_called_by_forward() -> None:
    unet = tiny.unet()
    net = tiny.controlnet(unet)
    elfatt_sd.apply_patch(net, "tome")
    given = {"controlnet_cond": torch.randn(1, 3, 32, 32, generator=generator()), "return_dict": False}
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, tiny.TEXT_WIDTH)
    with torch.no_grad():
        hooked = net(sample, 500, text, **given)[1]
        named = net.forward(sample, 500, text, **given)[1]
        elfatt_sd.remove_patch(net)
        exact = net(sample, 500, text, **given)[1]
    assert torch.equal(hooked, named) and not torch.equal(hooked, exact)


def test_class_labels_that_are_embedded_like_timesteps() -> None:
    """They go through the module that the timestep goes through, in the same call."""
    unet = tiny.unet(class_embed_type="timestep")
    elfatt_sd.apply_patch(unet, "elfatt")
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, tiny.TEXT_WIDTH)
    labels = torch.tensor([990])
    with torch.no_grad():
        hooked = [unet(sample, timestep, text, class_labels=labels).sample for timestep in (999, 10)]
        named = [unet.forward(sample, timestep, text, class_labels=labels).sample for timestep in (999, 10)]
        for timestep, expected in ((999, {"elfatt"}), (10, {"softmax"})):
            with recorded() as calls:
                unet(sample, timestep, text, class_labels=labels)
            assert {attention for _, attention in calls} == expected
    assert torch.equal(hooked[0], named[0]) and torch.equal(hooked[1], named[1])


def draw_pixart(pipe: Any) -> torch.Tensor:
    sizes = {"height": 64, "width": 64, "use_resolution_binning": False, "clean_caption": False}
    return draw(pipe, **sizes)


def some_caches() -> dict[str, Any]:
    hooks = pytest.importorskip("diffusers.hooks")  # younger than the oldest diffusers
    steps = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (-1, 1001)}
    steps |= {"current_timestep_callback": lambda: 500}
    broadcast = diffusers.PyramidAttentionBroadcastConfig(**steps)
    magnitude = hooks.MagCacheConfig(num_inference_steps=5, mag_ratios=[1.0] * 5)
    return {
        "PyramidAttentionBroadcast": lambda model: hooks.apply_pyramid_attention_broadcast(model, broadcast),
        "MagCache": lambda model: hooks.apply_mag_cache(model, magnitude),
    }


@pytest.mark.parametrize("first", ["cache", "patch"])
@pytest.mark.parametrize("name", ["PyramidAttentionBroadcast", "MagCache"])
def test_diffusers_caches_work_beside_a_patch(tmp_path: Path, name: str, first: str) -> None:
    cache = some_caches()[name]
    pipe = tiny_transformers.pixart(tmp_path)
    if first == "cache":
        cache(pipe.transformer)
    elfatt_sd.apply_patch(pipe, "elfatt", active_fraction=1, block_size=16)
    if first == "patch":
        cache(pipe.transformer)
    with recorded() as calls:
        assert draw_pixart(pipe).isfinite().all()  # warnings are errors here
    assert 0 < sum(calls.values()) < 10  # of two layers in five steps
