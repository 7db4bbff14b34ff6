"""Transformers in their pipelines for other tasks, with ControlNets and reference images, through their own calls."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from PIL import Image
from support import checks, tiny_pipelines, tiny_transformers
from support.checks import picture, recorded
from support.tiny_transformers import calling, embeds, made, pipeline, runner, several, transformer

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import family_of, find_layers
from elfatt_sd.methods import Grid

Given = dict[str, Any]
TEXT = tiny_transformers.TEXT


def image(height: int, width: int) -> Any:
    return Image.effect_noise((width, height), 60).convert("RGB")


def hunyuan_vae() -> Any:
    sizes: Given = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
    sizes |= {f"{way}_block_types": (f"HunyuanVideo{way.title()}Block3D",) * 4 for way in ("down", "up")}
    return transformer("AutoencoderKLHunyuanVideo", **sizes)


def ltx_vae() -> Any:
    sizes: Given = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
    sizes |= {"spatio_temporal_scaling": (True, True, False, False)}
    sizes |= {f"decoder_{name}": size for name, size in sizes.items()}
    sizes |= {"upsample_factor": (1,) * 4, "upsample_residual": (False,) * 4, "decoder_inject_noise": (False,) * 5}
    return transformer("AutoencoderKLLTXVideo", **sizes, latent_channels=4, patch_size=1, decoder_causal=False)


SIZE: dict[str, int] = {"height": 32, "width": 48}  # 8x12 tokens with a VAE that halves the sides
LARGE: dict[str, int] = {"height": 96, "width": 64}  # 6x4 tokens
SMALL: dict[str, int] = {"height": 24, "width": 16}  # the same, with a VAE that halves the sides
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
FIRST = picture(**LARGE)  # that a video begins with
OWN: dict[str, tuple[str, Given, Callable[[Path], Given]]] = {  # by the beginning of a pipeline's name:
    # the family, what its pipelines are given, and their parts
    "Flux2": ("Flux.2", SIZE, lambda _: {"vae": tiny_transformers._flux2_vae()}),
    "Flux": ("Flux.1", SIZE, lambda _: {"vae": tiny_transformers.vae()}),
    "Chroma": ("Chroma", SIZE, lambda _: {"vae": tiny_transformers.vae()}),
    "QwenImage": (
        *("Qwen-Image", LARGE),
        lambda folder: (
            {"vae": tiny_transformers._vae("AutoencoderKLQwenImage")}
            | {"text_encoder": tiny_transformers.pixart_text(folder / "words")["text_encoder"]}
        ),
    ),
    "ZImage": ("Z-Image", SMALL, lambda _: {"vae": tiny_transformers.vae()}),
    "StableDiffusion3": (  # older versions ask for the length of texts
        *("Stable Diffusion 3", SMALL),
        lambda folder: {"vae": tiny_transformers.vae(), "tokenizer": tiny_pipelines.tokenizer(folder / "clip")},
    ),
    "Wan": ("Wan", {}, lambda _: {"vae": tiny_transformers._vae("AutoencoderKLWan")}),
    "LTX": ("LTX-Video", {"height": 32, "width": 32, "num_frames": 9}, lambda _: {"vae": ltx_vae()}),  # 3x8x8 tokens
    "HunyuanVideo": ("HunyuanVideo", {}, lambda _: {"vae": hunyuan_vae()}),
}


class Row(NamedTuple):
    """A pipeline, and what a patch does there."""

    name: str  # of its class, without `Pipeline`
    given: Given | None = None  # besides `OWN`
    # how often each layer is approximated in the first half of four steps; where it begins at a given image, in the
    # fifth and sixth of eight steps
    calls: tuple[int, ...] = (2, 2)
    config: Given | None = None  # of the transformer
    parts: Callable[[], Given] = dict  # besides `OWN`
    plan: dict[str, int] | None = None  # its size
    counted: bool = True  # whether the plan knows what a call costs
    # tokens before the image's, its grid, and tokens in all: with references, which are no part of the grid
    place: tuple[int, Grid, int] | None = None

    @property
    def begins(self) -> bool:
        """Whether it begins at a given image, in the middle of its steps."""
        return self.name.endswith(("Img2Img", "VideoToVideo"))


def net(name: str, **config: Any) -> Callable[[], Given]:
    return lambda: {"controlnet": transformer(name, **config)}


def z_net(refiner: str | None) -> Callable[[], Given]:
    config = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 4, "dim": 32}
    config |= {"n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "add_control_noise_refiner": refiner}
    return net("ZImageControlNetModel", **config)


def flux_nets() -> Given:
    return {"controlnet": diffusers.FluxMultiControlNetModel([tiny_transformers.controlnet() for _ in range(2)])}


qwen_net = functools.partial(transformer, "QwenImageControlNetModel")
CONTROL, SCALES = {"control_image": picture(**SMALL)}, {"controlnet_conditioning_scale": [1.0, 0.5]}
TWICE = {"control_image": [picture(**SIZE)] * 2, **SCALES}
SHORT = torch.tensor([[1.0] * 7, [1.0] * 4 + [0.0] * 3])  # masks of two prompts
TWO = {"prompt_embeds": embeds(width=8).repeat(2, 1, 1), "prompt_attention_mask": SHORT}
TWO |= {"negative_prompt_embeds": embeds(1, width=8).repeat(2, 1, 1), "negative_prompt_attention_mask": SHORT.flip(0)}
# Of Qwen-Image, and of Z-Image.
PADDED = {"prompt_embeds": embeds().repeat(2, 1, 1), "prompt_embeds_mask": SHORT.flip(0).long()}
PADDED |= {"negative_prompt_embeds": embeds(1).repeat(2, 1, 1), "negative_prompt_embeds_mask": SHORT.long()}
LENGTHS = {"prompt_embeds": [embeds()[0], embeds(2, 40)[0]], "negative_prompt_embeds": [embeds(1, 70)[0], embeds(1)[0]]}
GUIDED = {"guidance_scale": 3.0, "negative_prompt_embeds": embeds(1, width=8)}
KONTEXT = {"image": picture(**SIZE), "_auto_resize": False, "max_area": 32 * 48}
EDITED, BEGUN = {"image": image(96, 64)}, {"image": FIRST}
LAYERED = {**EDITED, "prompt": "a", "layers": 2, "output_type": "pt"}  # it cannot return latents
LAYERED |= {"height": ..., "width": ...}  # it takes none
LAYERS = {"use_layer3d_rope": True, "use_additional_t_cond": True}
SEEN = {"in_channels": 12, "image_dim": 32, "added_kv_proj_dim": 24}
VIDEO = {"video": picture(**LARGE).repeat(9, 1, 1, 1)[None], "num_frames": ...}
CORNER, OTHER = FIRST[..., :32, :32], FIRST[..., 32:64, :32]
BOTH_ENDS = {"image": [CORNER, OTHER], "video": [None] * 2, "frame_index": [0, 8]}
ROWS = {
    "Flux, image to image": Row("FluxImg2Img", {"image": picture(**SIZE)}, plan=SIZE),
    "Flux, Kontext": Row("FluxKontext", KONTEXT, plan=SIZE, place=(TEXT, Grid.image(8, 12), 96 + 96)),
    "Flux, distilled": Row("Flux", {"guidance_scale": 2.0}, config={"guidance_embeds": True}, plan=SIZE),
    "Flux, its mode a token": Row(
        "FluxControlNet",
        {"control_image": picture(**SIZE), "control_mode": 1},
        (2,) * 4,
        parts=lambda: {"controlnet": tiny_transformers.controlnet(num_mode=2)},
        plan=SIZE,
    ),
    "Flux, two ControlNets": Row("FluxControlNet", {**TWICE, "control_mode": [0, 0]}, (2,) * 6, parts=flux_nets),
    "Chroma, two prompts": Row("ChromaImg2Img", {**TWO, "image": picture(**SIZE)}, (4, 4)),
    "Flux.2, references": Row(
        "Flux2", {"image": [image(64, 64), image(64, 80)]}, place=(TEXT, Grid.image(8, 12), 96 + 16 * 16 + 16 * 20)
    ),
    "Flux.2 klein": Row("Flux2Klein", GUIDED, (4, 4), parts=lambda: {"is_distilled": False}),
    "Qwen-Image, texts of two lengths": Row("QwenImage", PADDED, (4, 4)),
    "Qwen-Image, edit": Row("QwenImageEdit", EDITED, (4, 4), place=(TEXT, Grid.image(6, 4), 24 + 24)),
    "Qwen-Image, edit at time 0": Row("QwenImageEdit", EDITED, (4, 4), {"zero_cond_t": True}),
    "Qwen-Image, edit of two": Row(
        "QwenImageEditPlus", {"image": [image(32, 48)] * 2}, (4, 4), place=(TEXT, Grid.image(6, 4), 24 + 2 * 6)
    ),
    "Qwen-Image, layers": Row(
        *("QwenImageLayered", LAYERED, (4, 4), LAYERS),
        plan={**LARGE, "frames": 3},
        place=(TEXT, Grid(3, 6, 4), (3 + 1) * 24),
    ),
    # one call of the ControlNet in a step, for each of its images
    "Qwen-Image, ControlNet": Row(
        "QwenImageControlNet",
        {"control_image": picture(**LARGE)},
        (2, 4, 4),
        parts=lambda: {"controlnet": qwen_net()},
        plan=LARGE,
    ),
    "Qwen-Image, two images": Row(
        "QwenImageControlNet",
        {"control_image": [picture(**LARGE)] * 2, **SCALES},
        (4, 4, 4),
        parts=lambda: {"controlnet": diffusers.QwenImageMultiControlNetModel([qwen_net()])},
    ),
    "Z-Image, texts of two lengths": Row("ZImage", LENGTHS),
    "Z-Image, image to image": Row("ZImageImg2Img", {"image": picture(**SMALL)}),
    "SD 3, image to image": Row("StableDiffusion3Img2Img", {"image": picture(**SMALL)}, (2, 2, 2)),
    "Wan 2.1, image": Row(
        "WanImageToVideo",
        BEGUN,
        (4, 4),
        SEEN,
        lambda: {"image_encoder": tiny_pipelines.image_encoder(), "image_processor": tiny_pipelines.image_processor()},
    ),
    "Wan 2.2 5B, image": Row("WanImageToVideo", BEGUN, (4, 4), parts=lambda: {"expand_timesteps": True}),
    "Wan, video": Row(
        "WanVideoToVideo", VIDEO, (4, 4), parts=lambda: {"scheduler": diffusers.UniPCMultistepScheduler(**FLOW)}
    ),
    # tokens of given frames have another timestep; those of later frames come before the video's
    "LTX, image": Row("LTXImageToVideo", {"image": CORNER}),
    "LTX, first frame": Row("LTXCondition", {"image": CORNER}),
    "LTX, first and last frame": Row("LTXCondition", BOTH_ENDS, place=(64, Grid(3, 8, 8), 4 * 64)),
    # blocks change the tokens of the first frame in another way
    "HunyuanVideo, image replaces": Row(
        "HunyuanVideoImageToVideo", BEGUN, config={"guidance_embeds": True, "image_condition_type": "token_replace"}
    ),
}
for size in ((96, 64), (128, 64), (144, 80)):  # the image has 24, 32 or 45 tokens, and is padded to 32 or 64
    ROWS[f"Z-Image, turbo {size}"] = Row("ZImage", {"guidance_scale": 0.0, **dict(zip(LARGE, size, strict=True))})
for refiner, calls in ((None, 2), ("control_layers", 4), ("control_noise_refiner", 2)):
    # those that refine the image with its layers over image and text call them twice; its plan reads what is padding
    ROWS[f"Z-Image, ControlNet {refiner}"] = Row(
        "ZImageControlNet", CONTROL, (2, 2, calls, calls), None, z_net(refiner), SMALL, counted=False
    )
for changes, layers in (({}, 4), ({"dual_attention_layers": (0,)}, 5), ({"extra_conditioning_channels": 0}, 4)):
    own = net("SD3ControlNetModel", **changes)
    ROWS[f"SD 3, ControlNet {changes}"] = Row("StableDiffusion3ControlNet", CONTROL, (2,) * layers, None, own, SMALL)


@pytest.fixture(autouse=True)
def sizes_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images to be edited keep their size."""
    for name, size in (("edit", (64, 96, None)), ("edit_plus", (48, 32)), ("layered", (64, 96))):
        try:
            module = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}")
        except ImportError:  # younger than the oldest diffusers
            continue
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, size=size: size)


def row_of(name: str, folder: Path) -> tuple[Any, checks.Run]:
    row = ROWS[name]
    if not hasattr(diffusers, kind := f"{row.name}Pipeline"):
        pytest.skip(f"this version of diffusers has no {kind}")
    family, given, parts = next(own for start, own in OWN.items() if row.name.startswith(start))
    middle = {"strength": 0.5, "num_inference_steps": 8} if row.begins else {}
    plain, run = made(family, config=row.config)
    pipe = pipeline(kind, plain.transformer, **{**parts(folder), **row.parts()})
    given = {**run.given, **given, **(row.given or {}), **middle}
    run = runner(pipe, **{name: value for name, value in given.items() if value is not ...})

    def seeded(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)  # some sample an image's latent from it
        found: Any = run(**options)
        return torch.cat([*found]) if isinstance(found, list) else found

    return pipe, seeded


@pytest.mark.parametrize("name", ROWS)
def test_pipelines(folder: Path, name: str) -> None:
    """All keys are the original, each method acts and is taken back, and phases follow the true step."""
    row = ROWS[name]
    pipe, run = row_of(name, folder)
    family, places = family_of(pipe.transformer), list[tuple[int, Grid, int]]()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        given = family.call(module, args, kwargs)
        places.append((given.before, given.grid, given.sample.shape[1]))

    with pipe.transformer.register_forward_pre_hook(look, with_kwargs=True):
        checks.check_all_keys(pipe, run)
    assert row.place is None or {*places} == {row.place}
    checks.check_methods(pipe, run, merges=row.name.startswith("StableDiffusion3"))
    config = PatchConfig("first", (Phase(0.75 if row.begins else 0.5, "cell_spread", block_size=4),))
    with elfatt_sd.patched(pipe, config):
        for _ in range(2):
            with recorded() as seen:
                run(num_inference_steps=8 if row.begins else 4)
            assert sorted(seen.values()) == sorted(row.calls)
    if row.plan is not None:
        tokens = 96 if row.plan is SIZE else 24 * row.plan.get("frames", 1)
        checks.check_plan(pipe, tokens, len(row.calls), counted=row.counted, **row.plan)


OMNI = functools.partial(transformer, "ZImageTransformer2DModel", siglip_feat_dim=6)
BARE: dict[str, tuple[str, Callable[[], Any], Given | None]] = {
    # of XLabs: it is given pixels, 16 to a token on each side
    "Flux, of XLabs": (
        "FluxControlNetModel",
        lambda: tiny_transformers.controlnet(conditioning_embedding_channels=4, patch_size=2),
        None,
    ),
    "Qwen-Image, inpainting": ("QwenImageControlNetModel", lambda: qwen_net(extra_condition_channels=4), None),
    # of 3.5 large: it is given tokens of the transformer's embedding, and sees no text
    "SD 3.5 large": (
        "SD3ControlNetModel",
        lambda: transformer("SD3ControlNetModel", joint_attention_dim=None, use_pos_embed=False),
        None,
    ),
    # the image to be made is approximated, the ones before it are exact keys
    "Z-Image Omni": ("ZImageOmniPipeline", OMNI, several(20)),
    "Z-Image Omni, images that are seen": ("ZImageOmniPipeline", OMNI, several(20, encoded=True)),
}


@pytest.mark.parametrize("name", BARE)
def test_models_without_a_pipeline(name: str) -> None:
    kind, make, given = BARE[name]
    if not hasattr(diffusers, kind):
        pytest.skip(f"this version of diffusers has no {kind}")
    model = make()
    run = calling(model, given)
    checks.check_all_keys(model, run)
    checks.check_methods(model, run)
    assert all(layer.text == 0 for layer in find_layers(model)) == (name == "SD 3.5 large")
    if given:
        found = family_of(model).call(model, (), given)
        assert (found.grid, found.before) == (Grid.image(6, 4), 32 + 32 + 32)


def moved(module: Any, args: Any, given: dict[str, Any]) -> Any:
    given["video_coords"] = given["video_coords"].roll(1, 2)
    return args, given


@pytest.mark.parametrize(
    ("row", "change", "says"),
    [
        ("first and last frame", None, "tokens besides those of 3x8x8, and 'values' sees none"),
        ("first frame", moved, "not a grid of rows and columns"),
    ],
)
def test_given_frames_that_keep_layers_exact(folder: Path, module: str, row: str, change: Any, says: str) -> None:
    """An attention that sees no tokens but the video's, or coordinates that are none of a grid: with a warning."""
    pipe, run = row_of(f"LTX, {row}", folder)
    if change is not None:
        pipe.transformer.register_forward_pre_hook(change, with_kwargs=True)
    untouched, method = run(), PatchConfig.preset(module if change is None else "elfatt")  # type: ignore[arg-type]
    with elfatt_sd.patched(pipe, method), recorded() as calls, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(run(), untouched)
    assert not calls
    assert any(says in str(each.message) for each in told)
