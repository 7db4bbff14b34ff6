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
from support.checks import generator, picture, recorded
from support.tiny_transformers import embeds, made, pipeline, runner, transformer

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import family_of, find_layers
from elfatt_sd.methods import Grid

Made = tuple[Any, checks.Run]
How = Callable[[str, Path], Made]  # of the class of a pipeline
Given = dict[str, Any]
TEXT = tiny_transformers.TEXT


class Row(NamedTuple):
    """A pipeline: its class, how it is made, and what a patch does there."""

    kind: str
    how: How
    # how often each layer is approximated in the first half of four steps; where it begins at a given image, in the
    # fifth and sixth of eight steps
    calls: tuple[int, ...] = (2, 2)
    plan: dict[str, int] | None = None  # its size
    counted: bool = True  # whether the plan knows what a call costs

    @property
    def begins(self) -> bool:
        """Whether it begins at a given image, in the middle of its steps."""
        edits = "Kontext" in self.kind or "Edit" in self.kind
        return not edits and any(task in self.kind for task in ("Img2Img", "Inpaint", "VideoToVideo"))

    def make(self, folder: Path) -> Made:
        pipe, run = self.how(self.kind, folder)

        def seeded(**options: Any) -> torch.Tensor:
            torch.manual_seed(0)  # some sample an image's latent from it
            middle = {"strength": 0.5, "num_inference_steps": 8} if self.begins else {}
            return run(**{**middle, **options})

        seeded.given = run.given
        return pipe, seeded


def image(height: int, width: int) -> Any:
    return Image.effect_noise((width, height), 60).convert("RGB")


def mask(height: int, width: int, upto: int) -> torch.Tensor:
    return (torch.arange(width) < upto).float().expand(1, 1, height, width)


def of(family: str, given: Given, parts: Callable[[Path], Given], config: Given | None = None, **own: Any) -> How:
    """Another kind of a family's pipeline, given what that is given and more."""

    def how(kind: str, folder: Path) -> Made:
        plain, run = made(family, config=config)
        pipe = pipeline(kind, plain.transformer, **parts(folder), **{name: part() for name, part in own.items()})
        return pipe, runner(pipe, **{**run.given, **given})

    return how


qwen_controlnet = functools.partial(transformer, "QwenImageControlNetModel")
sd3_controlnet = functools.partial(transformer, "SD3ControlNetModel")

# Flux, Chroma and Flux.2; with a VAE that halves the sides.

SIZE: dict[str, int] = {"height": 32, "width": 48}
IMAGE, CONTROL = {"image": picture(**SIZE)}, {"control_image": picture(**SIZE)}
MASK = {"mask_image": mask(32, 48, 20)}
EDIT = {"_auto_resize": False, "max_area": 32 * 48}
CHANNELS, FILL = {"in_channels": 32, "out_channels": 16}, {"in_channels": 48, "out_channels": 16}


def flux(config: Given, given: Given, net: Callable[[], Any] = tiny_transformers.controlnet) -> How:
    def how(kind: str, folder: Path) -> Made:
        own = {"controlnet": net} if "ControlNet" in kind else {}
        return of("Flux.1", {**SIZE, **given}, lambda _: {"vae": tiny_transformers.vae()}, config, **own)(kind, folder)

    return how


def true_guidance(kind: str, folder: Path) -> Made:
    """With text encoders: the oldest diffusers guides by no embeddings."""
    pipe, texts = tiny_transformers.flux(folder), {"prompt": "a b", "negative_prompt": "b", "max_sequence_length": 16}
    return pipe, runner(pipe, **texts, true_cfg_scale=2.0, **SIZE)


def two_controlnets() -> Any:
    return diffusers.FluxMultiControlNetModel([tiny_transformers.controlnet(), tiny_transformers.controlnet()])


FLUX: dict[str, tuple[Given, Given]] = {
    "Img2Img": ({}, IMAGE),
    "Inpaint": ({}, {**IMAGE, **MASK}),
    "Fill": (FILL, {**IMAGE, **MASK}),
    "Control": (CHANNELS, CONTROL),
    "Kontext": ({}, {**IMAGE, **EDIT}),
    "ControlNet": ({}, CONTROL),
    "ControlNetImg2Img": ({}, {**CONTROL, **IMAGE}),
}
TWICE = {"control_image": [CONTROL["control_image"]] * 2, "controlnet_conditioning_scale": [1.0, 0.5]}
ROWS = {
    f"Flux{name}Pipeline": Row(f"Flux{name}Pipeline", flux(*own), (2,) * (4 if "ControlNet" in name else 2), SIZE)
    for name, own in FLUX.items()
}
MODE = flux({}, {**CONTROL, "control_mode": 1}, lambda: tiny_transformers.controlnet(num_mode=2))
ROWS |= {
    "Flux, true guidance": Row("FluxPipeline", true_guidance, (4, 4)),
    "Flux, distilled guidance": Row(
        "FluxPipeline", flux({"guidance_embeds": True}, {"guidance_scale": 2.0}), plan=SIZE
    ),
    "Flux, a token for the mode": Row("FluxControlNetPipeline", MODE, (2,) * 4, SIZE),
    "Flux, two ControlNets": Row(
        "FluxControlNetPipeline", flux({}, {**TWICE, "control_mode": [0, 0]}, two_controlnets), (2,) * 6
    ),
}


def flux2(distilled: bool | None = None, **given: Any) -> How:
    own = {} if distilled is None else {"is_distilled": lambda: distilled}
    return of("Flux.2", {**SIZE, **given}, lambda _: {"vae": tiny_transformers._flux2_vae()}, **own)


SHORT = torch.tensor([[1.0] * 7, [1.0] * 4 + [0.0] * 3])  # of two prompts
TWO = {"prompt_embeds": embeds(width=8).repeat(2, 1, 1), "prompt_attention_mask": SHORT}
TWO |= {"negative_prompt_embeds": embeds(1, width=8).repeat(2, 1, 1), "negative_prompt_attention_mask": SHORT.flip(0)}
CHROMA = of("Chroma", {**SIZE, **TWO, **IMAGE}, lambda _: {"vae": tiny_transformers.vae()})
KLEIN, GUIDED = "Flux2KleinPipeline", {"guidance_scale": 3.0, "negative_prompt_embeds": embeds(1, width=8)}
ROWS |= {
    "Chroma, image to image, two prompts": Row("ChromaImg2ImgPipeline", CHROMA, (4, 4)),
    "Flux.2, two prompts": Row("Flux2Pipeline", flux2(prompt_embeds=TWO["prompt_embeds"])),
    "Flux.2, references": Row("Flux2Pipeline", flux2(image=[image(64, 64), image(64, 80)])),
    "Flux.2 klein": Row(KLEIN, flux2(False, **GUIDED), (4, 4)),
    "Flux.2 klein, a reference": Row(KLEIN, flux2(False, guidance_scale=1.0, image=image(64, 64))),
    "Flux.2 klein, inpainting": Row("Flux2KleinInpaintPipeline", flux2(True, **IMAGE, **MASK)),
}

# Qwen-Image, Z-Image and Stable Diffusion 3; with VAEs of factor 8 or 2.

LARGE: dict[str, int] = {"height": 96, "width": 64}
SMALL: dict[str, int] = {"height": 24, "width": 16}
PICTURE, SMALL_MASK = {"image": picture(**SMALL)}, {"mask_image": mask(24, 16, 6)}


def qwen_image(given: Given, config: Given | None = None, **own: Any) -> How:
    def parts(folder: Path) -> Given:
        encoder = tiny_transformers.pixart_text(folder / "words")["text_encoder"]
        return {"vae": tiny_transformers._vae("AutoencoderKLQwenImage"), "text_encoder": encoder}

    return of("Qwen-Image", given, parts, config, **own)


LARGE_PICTURE, LARGE_MASK = {"image": picture(**LARGE)}, {"mask_image": mask(96, 64, 20)}
TOLD = {"control_image": picture(**LARGE)}
TOLD_TWICE = {"control_image": [picture(**LARGE)] * 2, "controlnet_conditioning_scale": [1.0, 0.5]}
PART = {"image": image(96, 64), "mask_image": image(96, 64), "strength": 1.0}
ROWS |= {
    f"Qwen-Image, {name}": Row(f"QwenImage{kind}Pipeline", qwen_image(given, config), (4, 4))
    for name, kind, given, config in (
        ("image to image", "Img2Img", LARGE_PICTURE, None),
        ("inpainting", "Inpaint", {**LARGE_PICTURE, **LARGE_MASK}, None),
        ("edit", "Edit", {"image": image(96, 64)}, None),
        ("edit at time 0", "Edit", {"image": image(96, 64)}, {"zero_cond_t": True}),
        ("edit of two", "EditPlus", {"image": [image(32, 48), image(32, 48)]}, None),
        ("edit a part", "EditInpaint", PART, None),
    )
}
ROWS |= {
    # one call of the ControlNet in a step, for each of its images
    "Qwen-Image, ControlNet": Row(
        "QwenImageControlNetPipeline", qwen_image(TOLD, controlnet=qwen_controlnet), (2, 4, 4), LARGE
    ),
    "Qwen-Image, two images": Row(
        "QwenImageControlNetPipeline",
        qwen_image(TOLD_TWICE, controlnet=lambda: diffusers.QwenImageMultiControlNetModel([qwen_controlnet()])),
        (4, 4, 4),
    ),
}


def layered(kind: str, folder: Path) -> Made:
    """All layers to be made are frames of one grid; the image that is taken apart is seen exactly."""
    latents: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        latents.append(given["latents"])
        return {}

    pipe, plain = qwen_image({}, {"use_layer3d_rope": True, "use_additional_t_cond": True})(kind, folder)
    own = {name: value for name, value in plain.given.items() if name not in LARGE}  # type: ignore[attr-defined]
    draw = runner(pipe, **own, prompt="a", image=image(96, 64), layers=2, callback_on_step_end=keep)

    def run(**options: Any) -> torch.Tensor:
        draw(**options, output_type="pt")  # it cannot return latents
        return latents[-1]

    run.given = own
    return pipe, run


ROWS["Qwen-Image, layers"] = Row("QwenImageLayeredPipeline", layered, (4, 4), {**LARGE, "frames": 3})


def z_image(given: Given, **own: Any) -> How:
    return of("Z-Image", {**SMALL, **given}, lambda folder: {"vae": tiny_transformers.vae()}, **own)


def z_controlnet(refiner: str | None) -> Any:
    config = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 4, "dim": 32}
    config |= {"n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "add_control_noise_refiner": refiner}
    return transformer("ZImageControlNetModel", **config)


def turbo(**given: Any) -> Row:
    return Row("ZImagePipeline", lambda kind, folder: made("Z-Image", **given))


# The image has 24, 32 or 45 tokens, and is padded to 32 or 64.
SIZES = {size: dict(zip(("height", "width"), size, strict=True)) for size in ((96, 64), (128, 64), (144, 80))}
ROWS |= {f"Z-Image, turbo {name}": turbo(guidance_scale=0.0, **size) for name, size in SIZES.items()}
ROWS |= {
    "Z-Image, two images": turbo(num_images_per_prompt=2),
    "Z-Image, image to image": Row("ZImageImg2ImgPipeline", z_image(PICTURE)),
    "Z-Image, inpainting": Row("ZImageInpaintPipeline", z_image({**PICTURE, **SMALL_MASK})),
}
for refiner, calls in ((None, 2), ("control_layers", 4), ("control_noise_refiner", 2)):
    # its layers over image and text; those that refine the image with the same layers call them twice. Its plan reads
    # which tokens are padding
    how = z_image({"control_image": picture(**SMALL)}, controlnet=lambda refiner=refiner: z_controlnet(refiner))
    row = Row("ZImageControlNetPipeline", how, (2, 2, calls, calls), SMALL, counted=False)
    ROWS[f"Z-Image, ControlNet {refiner}"] = row


def stable_diffusion_3(given: Given, channels: int = 4, net: Any = None) -> How:
    def parts(folder: Path) -> Given:
        config = {**tiny_transformers.vae().config, "latent_channels": channels}
        own = {"vae": diffusers.AutoencoderKL.from_config(config).eval()}
        own["vae"].register_to_config(shift_factor=0.1)
        own["tokenizer"] = tiny_pipelines.tokenizer(folder / "clip")  # whose length older versions ask for
        return own | ({"controlnet": net()} if net else {})

    config = {"in_channels": channels, "out_channels": channels}
    return of("Stable Diffusion 3", {**SMALL, **given}, parts, config)


NET3, TOLD3 = "StableDiffusion3ControlNetPipeline", {"control_image": picture(**SMALL)}
TWICE3 = {"control_image": [picture(**SMALL)] * 2, "controlnet_conditioning_scale": [1.0, 0.5]}
ROWS |= {
    f"SD 3, {name}": Row(f"StableDiffusion3{name}Pipeline", stable_diffusion_3(given, 16), (2, 2, 2))
    for name, given in (("Img2Img", PICTURE), ("Inpaint", {**PICTURE, **SMALL_MASK}))
}
for changes, layers in (({}, 4), ({"dual_attention_layers": (0,)}, 5), ({"extra_conditioning_channels": 0}, 4)):
    how = stable_diffusion_3(TOLD3, net=lambda changes=changes: sd3_controlnet(**changes))
    ROWS[f"SD 3, ControlNet {changes}"] = Row(NET3, how, (2,) * layers, SMALL)
TWO_NETS = stable_diffusion_3(
    TWICE3, net=lambda: diffusers.SD3MultiControlNetModel([sd3_controlnet(), sd3_controlnet()])
)
ROWS["SD 3, two ControlNets"] = Row(NET3, TWO_NETS, (2,) * 5)

# Videos that begin with a given image, or are made of another one.

FIRST = torch.rand(1, 3, 96, 64, generator=generator())
TEXTS = {"prompt_embeds": embeds(), "negative_prompt_embeds": embeds(1), "guidance_scale": 3.0}
CLIP: Given = {"height": 96, "width": 64, "num_frames": 9}


def vae(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, name)(**config).eval()


def wan_vae() -> Any:
    config = {"base_dim": 3, "dim_mult": [1] * 4, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return vae("AutoencoderKLWan", z_dim=16, **config)


def wan_image(more: int = 0, seen: bool = False, channels: int = 36, **parts: Any) -> How:
    def how(kind: str, folder: Path) -> Made:
        config = {"in_channels": channels, "out_channels": 16}
        config |= {"image_dim": 6, "added_kv_proj_dim": 24} if seen else {}  # what an encoder sees in the image
        models = [tiny_transformers.wan_transformer(**config) for _ in range(1 + more)]
        pipe = pipeline(kind, *models, vae=wan_vae(), **parts)
        if seen:
            known = torch.rand(1, 5, 6, generator=generator())
            pipe.encode_image = lambda *_: known
        return pipe, runner(pipe, image=FIRST, **TEXTS, **CLIP)

    return how


def wan_video(kind: str, folder: Path) -> Made:
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    model = tiny_transformers.wan_transformer(in_channels=16, out_channels=16)
    pipe = pipeline(kind, model, vae=wan_vae(), scheduler=diffusers.UniPCMultistepScheduler(**flow))
    return pipe, runner(pipe, video=torch.rand(1, 9, 3, 96, 64, generator=generator()), **LARGE, **TEXTS)


def ltx(*frames: int) -> How:
    """3x8x8 tokens; those of the given frames have another timestep; those of later frames come before the video's."""

    def parts(folder: Path) -> Given:
        sizes: Given = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
        sizes |= {"spatio_temporal_scaling": (True, True, False, False)}
        sizes |= {f"decoder_{name}": size for name, size in sizes.items()}
        sizes |= {"latent_channels": 8, "patch_size": 1, "decoder_inject_noise": (False,) * 5}
        sizes |= {"upsample_factor": (1,) * 4, "upsample_residual": (False,) * 4}
        return {"vae": vae("AutoencoderKLLTXVideo", **sizes, encoder_causal=True, decoder_causal=False)}

    given: Given = {"image": FIRST[..., :32, :32], "height": 32, "width": 32, "num_frames": 9}
    if frames:
        given["image"] = [FIRST[..., 32 * index : 32 * index + 32, :32] for index in range(len(frames))]
        given |= {"video": [None] * len(frames), "frame_index": list(frames)}
    return of("LTX-Video", given, parts, {"in_channels": 8, "out_channels": 8})


def cogvideox_image(kind: str, folder: Path) -> Made:
    config: Given = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1}
    config |= {f"{way}_block_types": (f"CogVideoX{way.title()}Block3D",) * 4 for way in ("down", "up")}
    encoder = vae("AutoencoderKLCogVideoX", **config, norm_num_groups=2, temporal_compression_ratio=4)
    scheduler = diffusers.CogVideoXDDIMScheduler(num_train_timesteps=1000)
    parts = {"vae": encoder, "scheduler": scheduler}
    return of("CogVideoX", {"image": FIRST}, lambda _: parts, {"in_channels": 8})(kind, folder)


def hunyuan_image(replaces: bool) -> How:
    """With `token_replace`, blocks change the tokens of the first frame in another way."""

    def parts(folder: Path) -> Given:
        config: Given = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1}
        config |= {f"{way}_block_types": (f"HunyuanVideo{way.title()}Block3D",) * 4 for way in ("down", "up")}
        return {"vae": vae("AutoencoderKLHunyuanVideo", **config, norm_num_groups=4)}

    config = {"in_channels": 4 if replaces else 9, "guidance_embeds": replaces}
    config["image_condition_type"] = "token_replace" if replaces else "latent_concat"
    return of("HunyuanVideo", {"image": FIRST}, parts, config)


WAN, LTX, HUNYUAN = "WanImageToVideoPipeline", "LTXConditionPipeline", "HunyuanVideoImageToVideoPipeline"
ROWS |= {
    "Wan 2.1, image": Row(WAN, wan_image(seen=True), (4, 4)),
    # the second transformer takes over after the first half
    "Wan 2.2, image": Row(WAN, wan_image(1, boundary_ratio=0.8), (4, 4)),
    "Wan 2.2 5B, image": Row(WAN, wan_image(channels=16, expand_timesteps=True), (4, 4)),
    "Wan, video": Row("WanVideoToVideoPipeline", wan_video, (4, 4)),
    "LTX, image": Row("LTXImageToVideoPipeline", ltx()),
    "LTX, first frame": Row(LTX, ltx(0)),
    "LTX, first and last frame": Row(LTX, ltx(0, 8)),
    "CogVideoX, image": Row("CogVideoXImageToVideoPipeline", cogvideox_image),
    "HunyuanVideo, image replaces": Row(HUNYUAN, hunyuan_image(True)),
    "HunyuanVideo, image joins": Row(HUNYUAN, hunyuan_image(False)),
}


@pytest.fixture(autouse=True)
def sizes_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images to be edited keep their size."""
    own = {"edit_plus": (48, 32), "layered": (64, 96)}
    for name in ("edit", "edit_plus", "edit_inpaint", "layered"):
        try:
            module = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}")
        except ImportError:  # younger than the oldest diffusers
            continue
        size = own.get(name, (64, 96, None))
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, size=size: size)


def row_of(name: str, folder: Path) -> Made:
    row = ROWS[name]
    if not hasattr(diffusers, row.kind):
        pytest.skip(f"this version of diffusers has no {row.kind}")
    return row.make(folder)


@pytest.mark.parametrize("name", ROWS)
def test_pipelines(folder: Path, name: str) -> None:
    """All keys are the original, each method acts and is taken back, and phases follow the true step."""
    row = ROWS[name]
    pipe, run = row_of(name, folder)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    config = PatchConfig("first", (Phase(0.75 if row.begins else 0.5, "cell_spread", block_size=4),))
    with elfatt_sd.patched(pipe, config):
        for _ in range(2):
            with recorded() as seen:
                run(num_inference_steps=8 if row.begins else 4)
            assert sorted(seen.values()) == sorted(row.calls)
    if row.plan is not None:
        tokens = 96 if row.plan is SIZE else 24 * row.plan.get("frames", 1)
        checks.check_plan(pipe, tokens, len(row.calls), counted=row.counted, **row.plan)


BARE: dict[str, Callable[[], Any]] = {
    # of XLabs: it is given pixels, 16 to a token on each side
    "FluxControlNetModel": lambda: tiny_transformers.controlnet(conditioning_embedding_channels=4, patch_size=2),
    "QwenImageControlNetModel": lambda: qwen_controlnet(extra_condition_channels=4),
    # of 3.5 large: it is given tokens of the transformer's embedding, and sees no text
    "SD3ControlNetModel": lambda: sd3_controlnet(joint_attention_dim=None, use_pos_embed=False),
}


@pytest.mark.parametrize("kind", BARE)
def test_controlnets_without_a_pipeline(kind: str) -> None:
    if not hasattr(diffusers, kind):
        pytest.skip(f"this version of diffusers has no {kind}")
    net = BARE[kind]()
    given = family_of(net).arguments(net, Grid.image(6, 4), 2, torch.rand)
    assert all(layer.text == 0 for layer in find_layers(net)) == (kind == "SD3ControlNetModel")

    def run() -> torch.Tensor:
        with torch.no_grad():
            samples = net(**given, return_dict=False)
        samples = [each for sample in samples for each in (sample if isinstance(sample, list | tuple) else [sample])]
        return torch.cat([each for each in samples if each is not None])

    checks.check_all_keys(net, run)
    checks.check_methods(net, run)


def given_in(pipe: Any, run: checks.Run) -> list[Any]:
    """What the transformer's calls of a run were given."""
    found, family = [], family_of(pipe.transformer)
    with pipe.transformer.register_forward_pre_hook(
        lambda module, args, given: found.append(family.call(module, args, given)), with_kwargs=True
    ):
        run()
    return found


REFERENCES = {  # tokens of text before the image's, its grid, and tokens in all
    "FluxKontextPipeline": (TEXT, Grid.image(8, 12), 96 + 96),
    "Flux.2, references": (TEXT, Grid.image(8, 12), 96 + 16 * 16 + 16 * 20),
    "Qwen-Image, edit": (TEXT, Grid.image(6, 4), 24 + 24),
    "Qwen-Image, edit of two": (TEXT, Grid.image(6, 4), 24 + 2 * 6),
    "Qwen-Image, edit a part": (TEXT, Grid.image(6, 4), 24 + 24),
    "Qwen-Image, layers": (TEXT, Grid(3, 6, 4), (3 + 1) * 24),
    "LTX, first and last frame": (64, Grid(3, 8, 8), 4 * 64),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_no_part_of_the_grid(folder: Path, name: str) -> None:
    before, grid, tokens = REFERENCES[name]
    for given in given_in(*row_of(name, folder)):
        assert (given.before, given.grid, given.sample.shape[1]) == (before, grid, tokens)


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
