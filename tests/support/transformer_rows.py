"""Tiny pipelines of transformers for other tasks, with ControlNets and reference images: one row each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from support import checks, tiny_pipelines, tiny_transformers
from support.checks import generator, picture

Made = tuple[Any, checks.Run]
WIDTH, TEXT = tiny_transformers.WIDTH, tiny_transformers.TEXT


class Row(NamedTuple):
    """A pipeline: how it is made, its class, and what a patch does there."""

    make: Callable[[Path], Made]
    kind: str
    # how often each layer is approximated in the first half of four steps; with `begins`, in the fifth and sixth of
    # eight steps, where the run begins
    calls: tuple[int, ...] = (2, 2)
    begins: bool = False
    plan: dict[str, int] | None = None  # its size
    counted: bool = True  # whether the plan knows what a call costs


def image(height: int, width: int) -> Any:
    from PIL import Image

    return Image.effect_noise((width, height), 60).convert("RGB")


def from_its_middle(run: checks.Run, **given: Any) -> checks.Run:
    return lambda **options: run(**{"strength": 0.5, "num_inference_steps": 8, **given, **options})


# Flux, Chroma and Flux.2; with a VAE that halves the sides.

SIZE: dict[str, Any] = {"height": 32, "width": 48}
IMAGE, CONTROL = {"image": picture(**SIZE)}, {"control_image": picture(**SIZE, channels=3)}
MASK = {"mask_image": (torch.arange(48) < 20).float().expand(1, 1, 32, 48)}
EDIT = {"_auto_resize": False, "max_area": 32 * 48}
CHANNELS, FILL = {"in_channels": 32, "out_channels": 16}, {"in_channels": 48, "out_channels": 16}


def flux(kind: str, transformer: dict[str, Any], given: dict[str, Any], **parts: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        own = {name: part() for name, part in parts.items()}
        if "ControlNet" in kind:
            own = {"controlnet": tiny_transformers.controlnet(), **own}
        model = tiny_transformers.flux_transformer(**transformer)
        vae = tiny_transformers.vae()
        pipe = tiny_transformers.flux(folder, getattr(diffusers, kind), transformer=model, vae=vae, **own)
        run = tiny_transformers.runner(pipe, prompt="a b", max_sequence_length=16, **SIZE, **given)
        return pipe, from_its_middle(run) if begins(kind) else run

    return make


def begins(kind: str) -> bool:
    return "Kontext" not in kind and ("Img2Img" in kind or "Inpaint" in kind)


FLUX: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("FluxImg2ImgPipeline", {}, IMAGE),
    ("FluxInpaintPipeline", {}, {**IMAGE, **MASK}),
    ("FluxFillPipeline", FILL, {**IMAGE, **MASK}),
    ("FluxControlPipeline", CHANNELS, CONTROL),
    ("FluxControlImg2ImgPipeline", CHANNELS, {**CONTROL, **IMAGE}),
    ("FluxControlInpaintPipeline", CHANNELS, {**CONTROL, **IMAGE, **MASK}),
    ("FluxKontextPipeline", {}, {**IMAGE, **EDIT}),
    ("FluxKontextInpaintPipeline", {}, {**IMAGE, **MASK, **EDIT}),
    ("FluxControlNetPipeline", {}, CONTROL),
    ("FluxControlNetImg2ImgPipeline", {}, {**CONTROL, **IMAGE}),
    ("FluxControlNetInpaintPipeline", {}, {**CONTROL, **IMAGE, **MASK}),
]


def two_controlnets() -> Any:
    return diffusers.FluxMultiControlNetModel([tiny_transformers.controlnet(), tiny_transformers.controlnet()])


TWICE = {"control_image": [CONTROL["control_image"]] * 2, "controlnet_conditioning_scale": [1.0, 0.5]}
NET = "FluxControlNetPipeline"
ROWS = {
    kind: Row(flux(kind, *own), kind, (2,) * (4 if "ControlNet" in kind else 2), begins(kind), SIZE)
    for kind, *own in FLUX
}
ROWS |= {
    "Flux, true guidance": Row(
        flux("FluxPipeline", {}, {"negative_prompt": "b", "true_cfg_scale": 2.0}), "FluxPipeline", (4, 4)
    ),
    "Flux, distilled guidance": Row(
        flux("FluxPipeline", {"guidance_embeds": True}, {"guidance_scale": 2.0}), "FluxPipeline", plan=SIZE
    ),
    "Flux, a token for the mode": Row(
        flux(NET, {}, {**CONTROL, "control_mode": 1}, controlnet=lambda: tiny_transformers.controlnet(num_mode=2)),
        NET,
        (2,) * 4,
        plan=SIZE,
    ),
    "Flux, two ControlNets": Row(
        flux(NET, {}, {**TWICE, "control_mode": [0, 0]}, controlnet=two_controlnets), NET, (2,) * 6
    ),
}


def chroma(kind: str, **given: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        pipe = tiny_transformers.chroma(folder, getattr(diffusers, kind))
        texts = {"prompt": ["a b", "b a a b"], "negative_prompt": ["b", "a"], "max_sequence_length": 12}
        run = tiny_transformers.runner(pipe, **texts, height=32, width=48, **given)
        return pipe, from_its_middle(run) if begins(kind) else run

    return make


def flux2(kind: str, distilled: bool | None = None, **given: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        parts = {} if distilled is None else {"is_distilled": distilled}
        pipe = tiny_transformers.flux2(getattr(diffusers, kind), **parts)
        run = tiny_transformers.runner(pipe, **{"prompt_embeds": text(1), **SIZE, **given})
        return pipe, from_its_middle(run) if begins(kind) else run

    return make


def text(batch: int) -> torch.Tensor:
    return torch.rand(batch, 12, 8, generator=generator())


KLEIN = "Flux2KleinPipeline"
ROWS |= {
    "Chroma, two prompts": Row(chroma("ChromaPipeline"), "ChromaPipeline", (4, 4)),
    "Chroma, no guidance": Row(chroma("ChromaPipeline", guidance_scale=1.0), "ChromaPipeline"),
    "Chroma, image to image": Row(
        chroma("ChromaImg2ImgPipeline", image=picture(32, 48).expand(2, -1, -1, -1)),
        "ChromaImg2ImgPipeline",
        (4, 4),
        True,
    ),
    "Flux.2, two prompts": Row(flux2("Flux2Pipeline", prompt_embeds=text(2)), "Flux2Pipeline"),
    "Flux.2, references": Row(flux2("Flux2Pipeline", image=[image(64, 64), image(64, 80)]), "Flux2Pipeline"),
    "Flux.2 klein": Row(flux2(KLEIN, False, guidance_scale=3.0, negative_prompt_embeds=text(1) - 0.5), KLEIN, (4, 4)),
    "Flux.2 klein, a reference": Row(flux2(KLEIN, False, guidance_scale=1.0, image=image(64, 64)), KLEIN),
    "Flux.2 klein, inpainting": Row(
        flux2("Flux2KleinInpaintPipeline", True, **IMAGE, **MASK), "Flux2KleinInpaintPipeline", begins=True
    ),
}

# Qwen-Image, Z-Image and Stable Diffusion 3; with VAEs of factor 8 or 2.

LARGE: dict[str, Any] = {"height": 96, "width": 64}
SMALL: dict[str, Any] = {"height": 24, "width": 16}


def narrow_mask(width: int, height: int, upto: int) -> torch.Tensor:
    return (torch.arange(width) < upto).float().expand(1, 1, height, width)


def qwen(
    kind: str, given: dict[str, Any], config: dict[str, Any] | None = None, **parts: Any
) -> Callable[[Path], Made]:
    """With the options of the pipeline without images."""

    def make(folder: Path) -> Made:
        plain, run = tiny_transformers.qwen_image(config=config)
        own = {
            "vae": tiny_transformers._vae("AutoencoderKLQwenImage"),
            **{name: part() for name, part in parts.items()},
        }
        own |= {"text_encoder": tiny_transformers.pixart_text_encoder(), "transformer": plain.transformer}
        pipe = tiny_transformers.pipeline(kind, **own)
        run = tiny_transformers.runner(pipe, **{**run.given, **given})  # type: ignore[attr-defined]
        return pipe, from_its_middle(run) if begins(kind) and "Edit" not in kind else run

    return make


def qwen_controlnet(**changes: Any) -> Any:
    config = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16}
    config |= {"num_attention_heads": 2, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 6, 6)}
    return tiny_transformers.transformer("QwenImageControlNetModel", **{**config, **changes})


EDITED, CONTROLLED = "QwenImageEditPipeline", "QwenImageControlNetPipeline"
ROWS |= {
    "Qwen-Image, no guidance": Row(
        lambda folder: tiny_transformers.qwen_image(
            true_cfg_scale=1.0, negative_prompt_embeds=None, negative_prompt_embeds_mask=None
        ),
        "QwenImagePipeline",
    ),
    "Qwen-Image, image to image": Row(
        qwen("QwenImageImg2ImgPipeline", {"image": picture(**LARGE)}), "QwenImageImg2ImgPipeline", (4, 4), True
    ),
    "Qwen-Image, inpainting": Row(
        qwen("QwenImageInpaintPipeline", {"image": picture(**LARGE), "mask_image": narrow_mask(64, 96, 20)}),
        "QwenImageInpaintPipeline",
        (4, 4),
        True,
    ),
    "Qwen-Image, edit": Row(qwen(EDITED, {"image": image(96, 64)}), EDITED, (4, 4)),
    "Qwen-Image, edit at time 0": Row(qwen(EDITED, {"image": image(96, 64)}, {"zero_cond_t": True}), EDITED, (4, 4)),
    "Qwen-Image, edit of two": Row(
        qwen("QwenImageEditPlusPipeline", {"image": [image(32, 48), image(32, 48)]}),
        "QwenImageEditPlusPipeline",
        (4, 4),
    ),
    "Qwen-Image, edit a part": Row(
        qwen("QwenImageEditInpaintPipeline", {"image": image(96, 64), "mask_image": image(96, 64), "strength": 1.0}),
        "QwenImageEditInpaintPipeline",
        (4, 4),
    ),
    # one call of the ControlNet in a step, for each of its images
    "Qwen-Image, ControlNet": Row(
        qwen(CONTROLLED, {"control_image": picture(**LARGE)}, controlnet=qwen_controlnet),
        CONTROLLED,
        (2, 4, 4),
        plan=LARGE,
    ),
    "Qwen-Image, two images": Row(
        qwen(
            CONTROLLED,
            {"control_image": [picture(**LARGE)] * 2, "controlnet_conditioning_scale": [1.0, 0.5]},
            controlnet=lambda: diffusers.QwenImageMultiControlNetModel([qwen_controlnet()]),
        ),
        CONTROLLED,
        (4, 4, 4),
    ),
}


def z_image(kind: str, given: dict[str, Any], refiner: str | None = None) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        plain, run = tiny_transformers.z_image()
        parts: dict[str, Any] = {"vae": tiny_transformers.vae()}
        if "ControlNet" in kind:
            config = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 4}
            config |= {"dim": 32, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
            config |= {"add_control_noise_refiner": refiner}
            parts["controlnet"] = tiny_transformers.transformer("ZImageControlNetModel", **config)
        pipe = tiny_transformers.pipeline(kind, plain.transformer, **parts)
        draw = tiny_transformers.runner(pipe, **{**run.given, **SMALL, **given})  # type: ignore[attr-defined]
        draw = from_its_middle(draw) if begins(kind) else draw

        def seeded(**options: Any) -> torch.Tensor:
            torch.manual_seed(0)
            return draw(**options)

        seeded.given = run.given  # type: ignore[attr-defined]
        return pipe, seeded

    return make


def turbo(height: int, width: int) -> Row:
    """The image has 24, 32 or 45 tokens, and is padded to 32 or 64."""
    return Row(
        lambda folder: tiny_transformers.z_image(guidance_scale=0.0, height=height, width=width), "ZImagePipeline"
    )


PICTURE, SMALL_MASK = {"image": picture(**SMALL)}, {"mask_image": narrow_mask(16, 24, 6)}
ROWS |= {f"Z-Image, turbo {size}": turbo(*size) for size in ((96, 64), (128, 64), (144, 80))}
ROWS |= {
    "Z-Image, two images": Row(lambda folder: tiny_transformers.z_image(num_images_per_prompt=2), "ZImagePipeline"),
    "Z-Image, image to image": Row(z_image("ZImageImg2ImgPipeline", PICTURE), "ZImageImg2ImgPipeline", begins=True),
    "Z-Image, inpainting": Row(
        z_image("ZImageInpaintPipeline", {**PICTURE, **SMALL_MASK}), "ZImageInpaintPipeline", begins=True
    ),
}
for refiner, calls in ((None, 2), ("control_layers", 4), ("control_noise_refiner", 2)):
    # its layers over image and text; those that refine the image with the same layers call them twice
    ROWS[f"Z-Image, ControlNet {refiner}"] = Row(
        z_image("ZImageControlNetPipeline", {"control_image": picture(**SMALL)}, refiner),
        "ZImageControlNetPipeline",
        (2, 2, calls, calls),
        plan=SMALL,
        counted=False,  # it reads which tokens are padding
    )


def sd3_controlnet(**changes: Any) -> Any:
    config = {"sample_size": 32, "patch_size": 2, "in_channels": 4, "num_layers": 1, "attention_head_dim": 8}
    config |= {"num_attention_heads": 2, "pooled_projection_dim": 8, "caption_projection_dim": 16}
    config |= {"pos_embed_max_size": 16, "joint_attention_dim": WIDTH}
    return tiny_transformers.transformer("SD3ControlNetModel", **{**config, **changes})


def sd3(kind: str, given: dict[str, Any], nets: Any = None, channels: int = 4, **parts: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        plain, run = tiny_transformers.sd3(in_channels=channels, out_channels=channels)
        vae = diffusers.AutoencoderKL.from_config(
            {**tiny_transformers.vae().config, "latent_channels": channels}
        ).eval()
        vae.register_to_config(shift_factor=0.1)
        own = {"vae": vae, **parts}
        own["tokenizer"] = tiny_pipelines.tokenizer(folder / "clip")  # whose length older versions ask for
        own |= {"controlnet": nets()} if nets else {}
        pipe = tiny_transformers.pipeline(kind, plain.transformer, **own)
        draw = tiny_transformers.runner(pipe, **{**run.given, **SMALL, **given})  # type: ignore[attr-defined]
        draw = from_its_middle(draw) if begins(kind) else draw

        def seeded(**options: Any) -> torch.Tensor:
            torch.manual_seed(0)  # the pipeline samples the control image's latent from it
            return draw(**options)

        return pipe, seeded

    return make


NET3, TOLD = "StableDiffusion3ControlNetPipeline", {"control_image": picture(**SMALL)}
ROWS |= {
    f"SD 3, {name}": Row(
        sd3(f"StableDiffusion3{name}Pipeline", given, channels=16), f"StableDiffusion3{name}Pipeline", (2, 2, 2), True
    )
    for name, given in (("Img2Img", PICTURE), ("Inpaint", {**PICTURE, **SMALL_MASK}))
}
ROWS |= {
    f"SD 3, ControlNet {changes}": Row(
        sd3(NET3, TOLD, lambda changes=changes: sd3_controlnet(**changes)), NET3, (2,) * layers, plan=SMALL
    )
    for changes, layers in (({}, 4), ({"dual_attention_layers": (0,)}, 5), ({"extra_conditioning_channels": 0}, 4))
}
ROWS["SD 3, two ControlNets"] = Row(
    sd3(
        NET3,
        {"control_image": [picture(**SMALL)] * 2, "controlnet_conditioning_scale": [1.0, 0.5]},
        lambda: diffusers.SD3MultiControlNetModel([sd3_controlnet(), sd3_controlnet()]),
    ),
    NET3,
    (2,) * 5,
)

# Videos that begin with a given image, or are made of another one.

FIRST = torch.rand(1, 3, 96, 64, generator=generator())
TEXTS = {"prompt_embeds": tiny_transformers.embeds(), "negative_prompt_embeds": tiny_transformers.embeds(1)}
CLIP: dict[str, Any] = {"height": 96, "width": 64, "num_frames": 9, "guidance_scale": 3.0}


def vae(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, name)(**config).eval()


def wan(kind: str, *transformers: Any, **parts: Any) -> Any:
    config = {"base_dim": 3, "dim_mult": [1] * 4, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return tiny_transformers.pipeline(kind, *transformers, vae=vae("AutoencoderKLWan", z_dim=16, **config), **parts)


def wan_image(more: int = 0, seen: bool = False, channels: int = 36, **parts: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        config = {"in_channels": channels, "out_channels": 16}
        config |= {"image_dim": 6, "added_kv_proj_dim": 24} if seen else {}  # what an encoder sees in the image
        models = [tiny_transformers.wan_transformer(**config) for _ in range(1 + more)]
        pipe = wan("WanImageToVideoPipeline", *models, **parts)
        if seen:
            known = torch.rand(1, 5, 6, generator=generator())
            pipe.encode_image = lambda *_: known
        return pipe, tiny_transformers.runner(pipe, image=FIRST, **TEXTS, **CLIP)

    return make


def wan_video(folder: Path) -> Made:
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    model = tiny_transformers.wan_transformer(in_channels=16, out_channels=16)
    pipe = wan("WanVideoToVideoPipeline", model, scheduler=diffusers.UniPCMultistepScheduler(**flow))
    given = {"video": torch.rand(1, 9, 3, 96, 64, generator=generator()), "height": 96, "width": 64}
    return pipe, from_its_middle(tiny_transformers.runner(pipe, guidance_scale=3.0, **TEXTS, **given))


def ltx(kind: str, *frames: int, **given: Any) -> Callable[[Path], Made]:
    """3x8x8 tokens; those of the given frames have another timestep; those of later frames come before the video's."""

    def make(folder: Path) -> Made:
        sizes = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
        sizes |= {"spatio_temporal_scaling": (True, True, False, False)}
        sizes |= {f"decoder_{name}": size for name, size in sizes.items()}
        config = {"latent_channels": 8, "patch_size": 1, "decoder_inject_noise": (False,) * 5}
        config |= {"upsample_factor": (1,) * 4, "upsample_residual": (False,) * 4}
        encoder = vae("AutoencoderKLLTXVideo", **sizes, **config, encoder_causal=True, decoder_causal=False)
        model = {"in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 8}
        model |= {"cross_attention_dim": 16, "num_layers": 2, "caption_channels": WIDTH}
        transformer = tiny_transformers.transformer("LTXVideoTransformer3DModel", **model)
        pipe = tiny_transformers.pipeline(kind, transformer, vae=encoder)
        mask = torch.ones(1, TEXT, dtype=torch.long)
        own = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask, "image": FIRST[..., :32, :32]}
        if frames:
            own["image"] = [FIRST[..., 32 * index : 32 * index + 32, :32] for index in range(len(frames))]
            own |= {"video": [None] * len(frames), "frame_index": list(frames)}
        size = {"height": 32, "width": 32, "num_frames": 9}
        return pipe, tiny_transformers.runner(pipe, guidance_scale=3.0, **TEXTS, **own, **size)

    return make


def cogvideox_image(folder: Path) -> Made:
    config: dict[str, Any] = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1}
    config |= {f"{way}_block_types": (f"CogVideoX{way.title()}Block3D",) * 4 for way in ("down", "up")}
    encoder = vae("AutoencoderKLCogVideoX", **config, norm_num_groups=2, temporal_compression_ratio=4)
    base, _ = tiny_transformers.cogvideox()
    own = {**base.transformer.config, "in_channels": 8}
    model = tiny_transformers.transformer("CogVideoXTransformer3DModel", **own)
    pipe = tiny_transformers.pipeline("CogVideoXImageToVideoPipeline", model, vae=encoder, scheduler=base.scheduler)
    return pipe, tiny_transformers.runner(pipe, image=FIRST, **TEXTS, **CLIP)


def hunyuan_image(kind: str) -> Callable[[Path], Made]:
    """With `token_replace`, blocks change the tokens of the first frame in another way."""

    def make(folder: Path) -> Made:
        config: dict[str, Any] = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1}
        config |= {f"{way}_block_types": (f"HunyuanVideo{way.title()}Block3D",) * 4 for way in ("down", "up")}
        encoder = vae("AutoencoderKLHunyuanVideo", **config, norm_num_groups=4)
        base, run = tiny_transformers.hunyuan_video()
        replaced = kind == "token_replace"
        own = {"image_condition_type": kind, "in_channels": 4 if replaced else 9, "guidance_embeds": replaced}
        own = {**base.transformer.config, **own}
        model = tiny_transformers.transformer("HunyuanVideoTransformer3DModel", **own)
        pipe = tiny_transformers.pipeline("HunyuanVideoImageToVideoPipeline", model, vae=encoder)
        return pipe, tiny_transformers.runner(pipe, **run.given, image=FIRST)  # type: ignore[attr-defined]

    return make


WAN, LTX, HUNYUAN = "WanImageToVideoPipeline", "LTXConditionPipeline", "HunyuanVideoImageToVideoPipeline"
ROWS |= {
    "Wan 2.1, image": Row(wan_image(seen=True), WAN, (4, 4)),
    # the second transformer takes over after the first half
    "Wan 2.2, image": Row(wan_image(1, boundary_ratio=0.8), WAN, (4, 4)),
    "Wan 2.2 5B, image": Row(wan_image(channels=16, expand_timesteps=True), WAN, (4, 4)),
    "Wan, video": Row(wan_video, "WanVideoToVideoPipeline", (4, 4), True),
    "LTX, image": Row(ltx("LTXImageToVideoPipeline"), "LTXImageToVideoPipeline"),
    "LTX, first frame": Row(ltx(LTX, 0), LTX),
    "LTX, first and last frame": Row(ltx(LTX, 0, 8), LTX),
    "CogVideoX, image": Row(cogvideox_image, "CogVideoXImageToVideoPipeline"),
    "HunyuanVideo, image replaces": Row(hunyuan_image("token_replace"), HUNYUAN),
    "HunyuanVideo, image joins": Row(hunyuan_image("latent_concat"), HUNYUAN),
}
