"""Videos that begin with a given image, or are made of another one: small random pipelines through their own calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import generator, recorded

import elfatt_sd
from elfatt_sd.families import family_of
from elfatt_sd.methods import Attention, Grid

IMAGE = torch.rand(1, 3, 96, 64, generator=generator())
TEXT = {"prompt_embeds": tiny_transformers.embeds(), "negative_prompt_embeds": tiny_transformers.embeds(1)}
SIZE: dict[str, Any] = {"height": 96, "width": 64, "num_frames": 9}


def vae(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, name)(**config).eval()


def wan(pipeline: str, *transformers: Any, **parts: Any) -> Any:
    config = {"base_dim": 3, "dim_mult": [1] * 4, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return tiny_transformers.pipeline(pipeline, *transformers, vae=vae("AutoencoderKLWan", z_dim=16, **config), **parts)


def wan_image(more: int = 0, channels: int = 36, **parts: Any) -> tuple[Any, checks.Run]:
    models = [tiny_transformers.wan_transformer(in_channels=channels, out_channels=16) for _ in range(1 + more)]
    pipe = wan("WanImageToVideoPipeline", *models, **parts)
    return pipe, tiny_transformers.runner(pipe, image=IMAGE, guidance_scale=3.0, **TEXT, **SIZE)


def wan_21() -> tuple[Any, checks.Run]:
    """Cross-attention to what an encoder sees in the image, beside that to text."""
    model = tiny_transformers.wan_transformer(in_channels=36, out_channels=16, image_dim=6, added_kv_proj_dim=24)
    pipe = wan("WanImageToVideoPipeline", model)
    seen = torch.rand(1, 5, 6, generator=generator())
    pipe.encode_image = lambda *_: seen
    return pipe, tiny_transformers.runner(pipe, image=IMAGE, guidance_scale=3.0, **TEXT, **SIZE)


def wan_22() -> tuple[Any, checks.Run]:
    return wan_image(1, boundary_ratio=0.8)


def wan_22_5b() -> tuple[Any, checks.Run]:
    """A timestep for each token: those of the given frame have 0."""
    return wan_image(channels=16, expand_timesteps=True)


def ltx(pipeline: str, **given: Any) -> tuple[Any, checks.Run]:
    """3x8x8 tokens; those of the given frames have another timestep."""
    sizes = {
        "block_out_channels": (8,) * 4,
        "layers_per_block": (1,) * 5,
        "spatio_temporal_scaling": (True, True, False, False),
    }
    sizes |= {f"decoder_{name}": size for name, size in sizes.items()}
    config = {"latent_channels": 8, "patch_size": 1, "decoder_inject_noise": (False,) * 5, "upsample_factor": (1,) * 4}
    config |= {"upsample_residual": (False,) * 4, "encoder_causal": True, "decoder_causal": False}
    encoder = vae("AutoencoderKLLTXVideo", **sizes, **config)
    model = {"in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 8}
    model |= {"cross_attention_dim": 16, "num_layers": 2, "caption_channels": tiny_transformers.WIDTH}
    pipe = tiny_transformers.pipeline(
        pipeline, tiny_transformers.transformer("LTXVideoTransformer3DModel", **model), vae=encoder
    )
    mask = torch.ones(1, tiny_transformers.TEXT, dtype=torch.long)
    masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
    size = {"height": 32, "width": 32, "num_frames": 9}
    return pipe, tiny_transformers.runner(pipe, guidance_scale=3.0, **TEXT, **masks, **size, **given)


def ltx_image() -> tuple[Any, checks.Run]:
    return ltx("LTXImageToVideoPipeline", image=IMAGE[..., :32, :32])


def ltx_condition(*frames: int) -> tuple[Any, checks.Run]:
    """Images for some frames; those of later frames are tokens before the video's."""
    pictures = [IMAGE[..., 32 * index : 32 * index + 32, :32] for index in range(len(frames))]
    return ltx("LTXConditionPipeline", image=pictures, video=[None] * len(frames), frame_index=list(frames))


def ltx_first() -> tuple[Any, checks.Run]:
    return ltx_condition(0)


def ltx_first_and_last() -> tuple[Any, checks.Run]:
    return ltx_condition(0, 8)


def cogvideox_image() -> tuple[Any, checks.Run]:
    config: dict[str, Any] = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1}
    config |= {f"{way}_block_types": (f"CogVideoX{way.title()}Block3D",) * 4 for way in ("down", "up")}
    encoder = vae("AutoencoderKLCogVideoX", **config, norm_num_groups=2, temporal_compression_ratio=4)
    base, _ = tiny_transformers.cogvideox()
    model = tiny_transformers.transformer(
        "CogVideoXTransformer3DModel", **{**base.transformer.config, "in_channels": 8}
    )
    pipe = tiny_transformers.pipeline("CogVideoXImageToVideoPipeline", model, vae=encoder, scheduler=base.scheduler)
    return pipe, tiny_transformers.runner(pipe, image=IMAGE, guidance_scale=3.0, **TEXT, **SIZE)


def hunyuan_image(kind: str) -> tuple[Any, checks.Run]:
    config: dict[str, Any] = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1}
    config |= {f"{way}_block_types": (f"HunyuanVideo{way.title()}Block3D",) * 4 for way in ("down", "up")}
    encoder = vae("AutoencoderKLHunyuanVideo", **config, norm_num_groups=4)
    base, run = tiny_transformers.hunyuan_video()
    channels = 4 if kind == "token_replace" else 9
    own = {"image_condition_type": kind, "in_channels": channels, "guidance_embeds": kind == "token_replace"}
    model = tiny_transformers.transformer("HunyuanVideoTransformer3DModel", **{**base.transformer.config, **own})
    pipe = tiny_transformers.pipeline("HunyuanVideoImageToVideoPipeline", model, vae=encoder)
    return pipe, tiny_transformers.runner(pipe, **run.given, image=IMAGE)  # type: ignore[attr-defined]


def hunyuan_replaced() -> tuple[Any, checks.Run]:
    """Blocks that change the tokens of the first frame in another way."""
    return hunyuan_image("token_replace")


def hunyuan_joined() -> tuple[Any, checks.Run]:
    return hunyuan_image("latent_concat")


@dataclass(frozen=True)
class Values(Attention):
    """An attention that does not know of tokens besides those of the video."""

    name: ClassVar[str] = "values"

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        return layer.project(tokens)[2]

    def cost(self, size: Any) -> float:
        return size.projections(size.tokens, size.tokens)


class Case(NamedTuple):
    """How a pipeline is made, its class, calls of its transformer in a step, and patched layers of all transformers."""

    make: Callable[[], tuple[Any, checks.Run]]
    pipeline: str
    calls: int = 1
    layers: int = 2


CASES = [
    Case(wan_21, "WanImageToVideoPipeline", 2),
    Case(wan_22, "WanImageToVideoPipeline", 2),
    Case(wan_22_5b, "WanImageToVideoPipeline", 2),
    Case(ltx_image, "LTXImageToVideoPipeline"),
    Case(ltx_first, "LTXConditionPipeline"),
    Case(ltx_first_and_last, "LTXConditionPipeline"),
    Case(cogvideox_image, "CogVideoXImageToVideoPipeline"),
    Case(hunyuan_replaced, "HunyuanVideoImageToVideoPipeline"),
    Case(hunyuan_joined, "HunyuanVideoImageToVideoPipeline"),
]


def made(pipeline: str, make: Callable[[], tuple[Any, checks.Run]]) -> tuple[Any, checks.Run]:
    if not hasattr(diffusers, pipeline):
        pytest.skip(f"this version of diffusers has no {pipeline}")
    return make()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_videos_of_an_image(case: Case) -> None:
    pipe, run = made(case.pipeline, case.make)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, case.layers, case.calls, counts=(1, 4))


def test_a_video_of_a_video() -> None:
    """It begins at the fifth of eight steps."""

    def make() -> tuple[Any, checks.Run]:
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
        model = tiny_transformers.wan_transformer(in_channels=16, out_channels=16)
        pipe = wan("WanVideoToVideoPipeline", model, scheduler=diffusers.UniPCMultistepScheduler(**flow))
        clip = torch.rand(1, 9, 3, 96, 64, generator=generator())
        given = {"video": clip, "height": 96, "width": 64, "strength": 0.5, "num_inference_steps": 8}
        return pipe, tiny_transformers.runner(pipe, guidance_scale=3.0, **TEXT, **given)

    checks.check_image_to_image(*made("WanVideoToVideoPipeline", make), calls=2)


def test_tokens_of_given_frames_come_before_the_video() -> None:
    """They are exact keys; an attention that sees none of these leaves the layers exact, and says so."""
    pipe, run = made("LTXConditionPipeline", ltx_first_and_last)
    grids = []
    family = family_of(pipe.transformer)
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, given: grids.append(family.call(module, args, given)), with_kwargs=True
    )
    untouched = run()
    assert {(given.before, given.grid) for given in grids} == {(64, Grid(3, 8, 8))}
    elfatt_sd.apply_patch(pipe, Values())
    with recorded() as calls, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(run(), untouched)
    assert not calls
    assert any("tokens besides those of 3x8x8, and 'values' sees none" in str(each.message) for each in told)
    elfatt_sd.remove_patch(pipe)


def test_coordinates_that_are_none_of_a_grid() -> None:
    """The layers stay exact, with a warning."""
    pipe, run = made("LTXConditionPipeline", ltx_first)
    untouched = run()

    def moved(module: Any, args: Any, given: dict[str, Any]) -> Any:
        given["video_coords"] = given["video_coords"].roll(1, 2)
        return args, given

    handle = pipe.transformer.register_forward_pre_hook(moved, with_kwargs=True)
    turned = run()
    with elfatt_sd.patched(pipe, "elfatt"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(run(), turned)
    assert any("not a grid of rows and columns" in str(each.message) for each in told)
    handle.remove()
    assert torch.equal(run(), untouched)
