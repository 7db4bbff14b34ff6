"""Pipelines with diffusion transformers of a few thousand random weights."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
)
from support import tiny_pipelines as tiny
from support.checks import generator
from transformers import AutoTokenizer, T5Config, T5EncoderModel

# A T5 t5_tokenizer and text encoder of a few random weights.


def t5_tokenizer(folder: Path, words: Sequence[str], length: int) -> Any:
    """A t5_tokenizer that knows some pieces of words, of at most `length` tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = ["<pad>", "</s>", "<unk>", *words]
    made = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = f'{{"tokenizer_class": "T5TokenizerFast", "model_max_length": {length}, "extra_ids": 0, '
    settings += '"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}'
    (folder / "tokenizer_config.json").write_text(settings)
    return AutoTokenizer.from_pretrained(folder)


def t5_text_encoder(words: int, width: int) -> T5EncoderModel:
    """An encoder of one layer."""
    torch.manual_seed(2)
    sizes = {"vocab_size": words, "d_model": width, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(**sizes)).eval()


# A PixArt pipeline of a few thousand random weights.

TEXT_WIDTH = 8


def pixart_transformer(**changes: Any) -> PixArtTransformer2DModel:
    """Two blocks of two heads, patches of 2x2 latents."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "in_channels": 4,
        "out_channels": 8,
        "cross_attention_dim": 16,
        "caption_channels": TEXT_WIDTH,
        "sample_size": 32,
        "patch_size": 2,
        "use_additional_conditions": False,
    }
    made = PixArtTransformer2DModel(**{**config, **changes}).eval()
    torch.nn.init.normal_(made.proj_out.weight, std=0.2)
    return made


def pixart_tokenizer(folder: Path) -> Any:
    """A T5 pixart_tokenizer of a few words."""
    return t5_tokenizer(folder, ("▁a", "▁b"), length=16)


def pixart_text_encoder() -> T5EncoderModel:
    return t5_text_encoder(5, TEXT_WIDTH)


def pixart(folder: Path) -> PixArtAlphaPipeline:
    pipe = PixArtAlphaPipeline(
        tokenizer=pixart_tokenizer(folder / "tokenizer"),
        text_encoder=pixart_text_encoder(),
        vae=tiny.vae(),
        transformer=pixart_transformer(),
        scheduler=DDIMScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
    )
    return tiny.quiet(pipe)  # type: ignore[no-any-return]


def flux_transformer(**changes: Any) -> FluxTransformer2DModel:
    """One block of each kind, two heads of 16 channels."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH,
        "pooled_projection_dim": tiny.TEXT_WIDTH,
        "axes_dims_rope": (4, 6, 6),
    }
    return FluxTransformer2DModel(**{**config, **changes}).eval()


def flow_scheduler(**changes: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **changes})


def flux(folder: Path, kind: Any = FluxPipeline, **parts: Any) -> Any:
    """A Flux pipeline, or one of its kinds."""
    given = {
        "scheduler": flow_scheduler(),
        "vae": tiny.vae(),
        "text_encoder": tiny.text_encoder(),
        "tokenizer": tiny.tokenizer(folder / "tokenizer"),
        "text_encoder_2": pixart_text_encoder(),
        "tokenizer_2": pixart_tokenizer(folder / "tokenizer_2"),
        "transformer": flux_transformer(),
    }
    return tiny.quiet(kind(**{**given, **parts}))


# Pipelines of Flux's relatives with a few thousand random weights: Chroma, Flux.2, and Flux's ControlNet.

_BLOCKS: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
}


def vae() -> Any:
    """A VAE that takes images as well."""
    made = tiny.vae()
    made.register_to_config(shift_factor=0.1)
    return made


def controlnet(**changes: Any) -> Any:
    """A ControlNet of Flux with an effect."""
    from diffusers import FluxControlNetModel

    torch.manual_seed(3)
    text = {"joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": tiny.TEXT_WIDTH}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own import
        net = FluxControlNetModel(**{**_BLOCKS, **text, "axes_dims_rope": (4, 6, 6), **changes}).eval()
    with torch.no_grad():
        for layer in [*net.controlnet_blocks, *net.controlnet_single_blocks, net.controlnet_x_embedder]:
            layer.weight.normal_(0, 0.3)
    return net


def chroma_transformer() -> Any:
    from diffusers import ChromaTransformer2DModel

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own import
        return ChromaTransformer2DModel(
            **_BLOCKS,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ).eval()


def chroma(folder: Path, kind: Any = None, **parts: Any) -> Any:
    """A Chroma pipeline, or one of its kinds."""
    from diffusers import ChromaPipeline

    given = {
        "scheduler": flow_scheduler(),
        "vae": vae(),
        "text_encoder": pixart_text_encoder(),
        "tokenizer": pixart_tokenizer(folder / "tokenizer"),
        "transformer": chroma_transformer(),
    }
    return tiny.quiet((kind or ChromaPipeline)(**{**given, **parts}))


def flux2(kind: Any = None, **parts: Any) -> Any:
    """A Flux.2 pipeline, or one of its kinds, that is given its text as embeddings."""
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline, Flux2Transformer2DModel

    torch.manual_seed(0)
    transformer = Flux2Transformer2DModel(
        **_BLOCKS,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        timestep_guidance_channels=16,
    ).eval()
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        sample_size=32,
    ).eval()
    given = {
        "scheduler": flow_scheduler(),
        "vae": vae,
        "text_encoder": None,
        "tokenizer": None,
        "transformer": transformer,
    }
    return tiny.quiet((kind or Flux2Pipeline)(**{**given, **parts}))


# Pipelines of every transformer family with random weights: no VAE and no text encoder, for latents of embeddings.

TEXT, WIDTH = 7, 12  # tokens and channels of the embeddings


def embeds(seed: int = 0, tokens: int = TEXT, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))


def transformer(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(diffusers, name)(**config).eval()
    for parameter in made.parameters():  # what begins at zero would hide an attention
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def pipeline(name: str, *transformers: Any, scheduler: Any = None, **parts: Any) -> Any:
    """A pipeline with these transformers; every other part is left out."""
    kind = getattr(diffusers, name)
    names = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    parts = {"scheduler": scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0), **parts}
    parts |= dict(zip(("transformer", "transformer_2"), transformers, strict=False))
    options = ("boundary_ratio", "expand_timesteps", "is_distilled")
    return tiny.quiet(kind(**{name: parts.get(name) for name in names if name in parts or name not in options}))


class Sizes(torch.nn.Module):
    """As much of a VAE of videos as the first versions of LTX's pipeline ask for."""

    spatial_compression_ratio, temporal_compression_ratio = 32, 8
    device, dtype = torch.device("cpu"), torch.float32


class Latents(Sizes):
    """As much as HunyuanVideo 1.5 asks for."""

    spatial_compression_ratio, temporal_compression_ratio = 16, 4
    config = SimpleNamespace(latent_channels=4)


def runner(pipe: Any, **fixed: Any) -> Callable[..., torch.Tensor]:
    def run(**options: Any) -> torch.Tensor:
        given = {"num_inference_steps": 3, "output_type": "latent", **fixed, **options}
        made: torch.Tensor = pipe(generator=generator(), return_dict=False, **given)[0]
        return made

    run.given = fixed  # type: ignore[attr-defined]
    return run


def sd3(**changes: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two blocks, the first with a second attention over the image; 6x4 tokens."""
    config = {"sample_size": 32, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    config |= {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": WIDTH}
    config |= {"caption_projection_dim": 16, "pooled_projection_dim": 8, "pos_embed_max_size": 16}
    model = transformer("SD3Transformer2DModel", **{**config, "dual_attention_layers": (0,), **changes})
    pipe = pipeline("StableDiffusion3Pipeline", model)
    given = {"prompt_embeds": embeds(), "negative_prompt_embeds": embeds(1), "height": 96, "width": 64}
    given |= {"pooled_prompt_embeds": torch.zeros(1, 8), "negative_pooled_prompt_embeds": torch.ones(1, 8)}
    return pipe, runner(pipe, guidance_scale=3.0, **given)


def qwen_image(*, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two blocks; 6x4 tokens; two calls a step."""
    changes = config or {}
    config = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16}
    config |= {"num_attention_heads": 2, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 6, 6)}
    pipe = pipeline("QwenImagePipeline", transformer("QwenImageTransformer2DModel", **config, **changes))
    given = {"prompt_embeds": embeds(), "prompt_embeds_mask": torch.ones(1, TEXT, dtype=torch.long)}
    given |= {"negative_prompt_embeds": embeds(1), "negative_prompt_embeds_mask": torch.ones(1, TEXT, dtype=torch.long)}
    return pipe, runner(pipe, height=96, width=64, **{**given, "true_cfg_scale": 3.0, **options})


def z_image(*, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two main blocks and one of each refiner; 6x4 tokens, padded to 32."""
    changes = config or {}
    config = {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 32, "n_layers": 2}
    config |= {"n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": WIDTH, "axes_dims": [4, 6, 6]}
    model = transformer("ZImageTransformer2DModel", **{**config, "axes_lens": [256, 64, 64], **changes})
    pipe = pipeline("ZImagePipeline", model)
    given = {"prompt_embeds": [embeds()[0]], "negative_prompt_embeds": [embeds(1)[0]], "guidance_scale": 3.0}
    return pipe, runner(pipe, **{"height": 96, "width": 64, **given, **options})


def wan_transformer(**changes: Any) -> Any:
    config = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4}
    config |= {"out_channels": 4, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 16, "num_layers": 2}
    return transformer("WanTransformer3DModel", **{**config, "rope_max_seq_len": 32, **changes})


def wan(second: bool = False, **options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two blocks; 3x6x4 tokens; two calls a step; with a second transformer, that takes over at 0.8 of the noise."""
    if second:
        pipe = pipeline("WanPipeline", wan_transformer(), wan_transformer(), boundary_ratio=0.8)
    else:
        pipe = pipeline("WanPipeline", wan_transformer())
    given = {"prompt_embeds": embeds(), "negative_prompt_embeds": embeds(1), "num_frames": 9, "guidance_scale": 3.0}
    return pipe, runner(pipe, height=96, width=64, **{**given, **options})


def ltx_video(**options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two blocks; 3x6x4 tokens."""
    config = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8}
    config |= {"cross_attention_dim": 16, "num_layers": 2, "caption_channels": WIDTH}
    pipe = pipeline("LTXPipeline", transformer("LTXVideoTransformer3DModel", **config), vae=Sizes())
    mask = torch.ones(1, TEXT, dtype=torch.long)
    given = {"prompt_embeds": embeds(), "prompt_attention_mask": mask, "num_frames": 17, "guidance_scale": 3.0}
    given |= {"negative_prompt_embeds": embeds(1), "negative_prompt_attention_mask": mask}
    return pipe, runner(pipe, height=192, width=128, **{**given, **options})


def hunyuan_video(**options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """One block of each kind; 3x6x4 tokens and seven of text, of which three are padding."""
    config = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10}
    config |= {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1}
    config |= {"text_embed_dim": WIDTH, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)}
    pipe = pipeline("HunyuanVideoPipeline", transformer("HunyuanVideoTransformer3DModel", **config))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    given = {"prompt_embeds": embeds(), "prompt_attention_mask": mask, "pooled_prompt_embeds": torch.zeros(1, 8)}
    return pipe, runner(pipe, height=96, width=64, num_frames=9, **{**given, **options})


def hunyuan_video_15(**options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two blocks; 3x6x4 tokens, text of two encoders, some of it padding; two calls a step."""
    from diffusers import ClassifierFreeGuidance

    config = {"in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16}
    config |= {"num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": WIDTH, "text_embed_2_dim": 10}
    config |= {"image_embed_dim": 8, "rope_axes_dim": (4, 6, 6), "task_type": "t2v"}
    model = transformer("HunyuanVideo15Transformer3DModel", **config)
    pipe = pipeline("HunyuanVideo15Pipeline", model, vae=Latents(), guider=ClassifierFreeGuidance(guidance_scale=3.0))
    given = {"num_frames": 9, "height": 96, "width": 64}
    for seed, which in enumerate(("prompt", "negative_prompt")):
        mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
        given |= {f"{which}_embeds": embeds(seed), f"{which}_embeds_mask": mask}
        given |= {f"{which}_embeds_2": embeds(seed, width=10), f"{which}_embeds_mask_2": mask}
    return pipe, runner(pipe, **{**given, **options})


def cogvideox(**options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two blocks; 3x6x4 tokens."""
    config = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}
    config |= {"time_embed_dim": 8, "text_embed_dim": WIDTH, "num_layers": 2, "sample_width": 8, "sample_height": 12}
    config |= {"sample_frames": 9, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": TEXT}
    model = transformer("CogVideoXTransformer3DModel", **config, use_rotary_positional_embeddings=True)
    scheduler = diffusers.CogVideoXDDIMScheduler(num_train_timesteps=1000)
    pipe = pipeline("CogVideoXPipeline", model, scheduler=scheduler)
    given = {"prompt_embeds": embeds(), "negative_prompt_embeds": embeds(1), "num_frames": 9, "guidance_scale": 3.0}
    return pipe, runner(pipe, height=96, width=64, **{**given, **options})


def flux_run(*, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Flux that is given its text as embeddings; one block of each kind; 6x4 tokens."""
    pipe = pipeline("FluxPipeline", flux_transformer(**(config or {})))
    given = {"prompt_embeds": embeds(width=TEXT_WIDTH), "pooled_prompt_embeds": torch.zeros(1, 32)}
    return pipe, runner(pipe, height=96, width=64, **{**given, **options})


def chroma_run(**options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """The same of Chroma; two calls a step."""
    pipe = pipeline("ChromaPipeline", chroma_transformer())
    given = {"prompt_embeds": embeds(width=TEXT_WIDTH), "prompt_attention_mask": torch.ones(1, TEXT)}
    given |= {f"negative_{name}": tensor for name, tensor in given.items()}
    return pipe, runner(pipe, height=96, width=64, **{**given, **options})


def flux2_run(**options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    pipe = flux2()
    return pipe, runner(pipe, **{"prompt_embeds": embeds(width=TEXT_WIDTH), "height": 24, "width": 16, **options})


def pixart_run(**options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Two blocks; 6x4 tokens; guidance in one batch."""
    scheduler = DDIMScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02)
    pipe = pipeline("PixArtAlphaPipeline", pixart_transformer(), vae=tiny.vae(), scheduler=scheduler)
    mask = torch.ones(1, TEXT)
    given = {"prompt_embeds": embeds(width=TEXT_WIDTH), "prompt_attention_mask": mask, "guidance_scale": 3.0}
    given |= {"negative_prompt_embeds": embeds(1, width=TEXT_WIDTH), "negative_prompt_attention_mask": mask}
    given |= {"negative_prompt": None, "use_resolution_binning": False, "height": 24, "width": 16}
    return pipe, runner(pipe, **{**given, **options})


# Every family of transformers: how it is made, and the class of its pipeline, which an old diffusers may lack.
FAMILIES: dict[str, tuple[Callable[..., tuple[Any, Callable[..., torch.Tensor]]], str]] = {
    "PixArt": (pixart_run, "PixArtAlphaPipeline"),
    "Stable Diffusion 3": (sd3, "StableDiffusion3Pipeline"),
    "Qwen-Image": (qwen_image, "QwenImagePipeline"),
    "Flux.1": (flux_run, "FluxPipeline"),
    "Chroma": (chroma_run, "ChromaPipeline"),
    "Flux.2": (flux2_run, "Flux2Pipeline"),
    "Z-Image": (z_image, "ZImagePipeline"),
    "Wan": (wan, "WanPipeline"),
    "LTX-Video": (ltx_video, "LTXPipeline"),
    "HunyuanVideo": (hunyuan_video, "HunyuanVideoPipeline"),
    "HunyuanVideo 1.5": (hunyuan_video_15, "HunyuanVideo15Pipeline"),
    "CogVideoX": (cogvideox, "CogVideoXPipeline"),
}


def made(name: str, **options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """A pipeline of a family, and what runs it."""
    make, kind = FAMILIES[name]
    if not hasattr(diffusers, kind):
        pytest.skip(f"this version of diffusers has no {kind}")
    return make(**options)


# Whole pipelines with transformers, text encoders and decoders of a few thousand random weights, on disk.


def spelling_tokenizer(folder: Path) -> Any:
    """A T5 spelling_tokenizer that spells."""
    return t5_tokenizer(folder, ("▁", *(chr(code) for code in range(33, 127))), length=512)


def spelling_text_encoder() -> T5EncoderModel:
    return t5_text_encoder(100, WIDTH)


def _pipeline(folder: Path, name: str, *transformers: Any, **parts: Any) -> Any:
    parts |= {"text_encoder": spelling_text_encoder(), "tokenizer": spelling_tokenizer(folder / "words")}
    return pipeline(name, *transformers, **parts)


def _save(folder: Path, name: str, transformer: Any, vae: Any) -> Path:
    _pipeline(folder, name, transformer, vae=vae).save_pretrained(folder / name)
    return folder / name


def _vae(name: str) -> Any:
    """A decoder with factor 8 on each side, and 4 in time."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return getattr(diffusers, name)(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).eval()


def write_flux(folder: Path) -> Path:
    flux(folder, vae=vae()).save_pretrained(folder / "flux")
    return folder / "flux"


def write_qwen_image(folder: Path) -> Path:
    config = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16}
    config |= {"num_attention_heads": 2, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 6, 6)}
    made = transformer("QwenImageTransformer2DModel", **config)
    return _save(folder, "QwenImagePipeline", made, _vae("AutoencoderKLQwenImage"))


def write_wan(folder: Path) -> Path:
    return _save(folder, "WanPipeline", wan_transformer(), _vae("AutoencoderKLWan"))


def wan22(folder: Path) -> Any:
    """Two transformers, of which the second takes over at 0.8 of the noise."""
    transformers = wan_transformer(), wan_transformer()
    return _pipeline(folder, "WanPipeline", *transformers, boundary_ratio=0.8, vae=_vae("AutoencoderKLWan"))
