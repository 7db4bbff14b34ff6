"""Pipelines with diffusion transformers of a few thousand random weights: every family, as data."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import generator
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, T5Config, T5EncoderModel

from elfatt_sd.families import family_of
from elfatt_sd.methods import Grid

TEXT, WIDTH = 7, 12  # tokens and channels of the embeddings of text
TEXT_WIDTH = 8  # of PixArt's and Flux's

# Two blocks, or one of each kind; two heads.
_HEADS = {"num_attention_heads": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
_ROTARY = {"axes_dims_rope": (4, 6, 6)}
_FLUX = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
_FLUX |= {"num_attention_heads": 2, "joint_attention_dim": TEXT_WIDTH}
_POOLED = {"pooled_projection_dim": tiny.TEXT_WIDTH}
_SD3 = {"sample_size": 32, "patch_size": 2, "in_channels": 4, "attention_head_dim": 8, "num_attention_heads": 2}
_SD3 |= {"joint_attention_dim": WIDTH, "caption_projection_dim": 16, "pooled_projection_dim": 8}
_SD3 |= {"pos_embed_max_size": 16}
_QWEN = {**_HEADS, **_ROTARY, "patch_size": 2, "in_channels": 16, "attention_head_dim": 16}
_QWEN |= {"joint_attention_dim": WIDTH}
CONFIGS: dict[str, dict[str, Any]] = {
    "PixArtTransformer2DModel": _HEADS
    | {"out_channels": 8, "attention_head_dim": 8, "cross_attention_dim": 16, "sample_size": 32, "patch_size": 2}
    | {"caption_channels": TEXT_WIDTH, "use_additional_conditions": False},
    "FluxTransformer2DModel": _FLUX | _ROTARY | _POOLED,
    "FluxControlNetModel": _FLUX | _ROTARY | _POOLED,
    "ChromaTransformer2DModel": _FLUX
    | _ROTARY
    | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
    "Flux2Transformer2DModel": _FLUX | {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16},
    # its first block has a second attention over the image
    "SD3Transformer2DModel": _SD3 | {"out_channels": 4, "num_layers": 2, "dual_attention_layers": (0,)},
    "SD3ControlNetModel": _SD3 | {"num_layers": 1},
    "QwenImageTransformer2DModel": _QWEN,
    "QwenImageControlNetModel": _QWEN | {"num_layers": 1},
    # two main blocks and one of each refiner
    "ZImageTransformer2DModel": {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 32}
    | {"n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": WIDTH}
    | {"axes_dims": [4, 6, 6], "axes_lens": [256, 64, 64]},
    "WanTransformer3DModel": _HEADS
    | {"patch_size": (1, 2, 2), "attention_head_dim": 12, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 16}
    | {"rope_max_seq_len": 32},
    "LTXVideoTransformer3DModel": _HEADS
    | {"attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": WIDTH},
    "HunyuanVideoTransformer3DModel": _HEADS
    | {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "attention_head_dim": 10, "patch_size": 2}
    | {"patch_size_t": 1, "text_embed_dim": WIDTH, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
    "HunyuanVideo15Transformer3DModel": _HEADS
    | {"in_channels": 9, "attention_head_dim": 16, "num_refiner_layers": 1, "text_embed_dim": WIDTH}
    | {"text_embed_2_dim": 10, "image_embed_dim": 8, "rope_axes_dim": (4, 6, 6), "task_type": "t2v"},
    "CogVideoXTransformer3DModel": _HEADS
    | {"attention_head_dim": 16, "time_embed_dim": 8, "text_embed_dim": WIDTH, "sample_width": 8, "sample_height": 12}
    | {"sample_frames": 9, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": TEXT}
    | {"use_rotary_positional_embeddings": True},
}


def _model(name: str, seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own imports
        return getattr(diffusers, name)(**{**CONFIGS.get(name, {}), **config}).eval()


def transformer(name: str, **config: Any) -> Any:
    made = _model(name, **config)
    for parameter in made.parameters():  # what begins at zero would hide an attention
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def pixart_transformer(**changes: Any) -> Any:
    made = _model("PixArtTransformer2DModel", **changes)
    torch.nn.init.normal_(made.proj_out.weight, std=0.2)
    return made


flux_transformer = functools.partial(_model, "FluxTransformer2DModel")
wan_transformer = functools.partial(transformer, "WanTransformer3DModel")


def controlnet(**changes: Any) -> Any:
    """A ControlNet of Flux with an effect."""
    net = _model("FluxControlNetModel", 3, **changes)
    with torch.no_grad():
        for layer in [*net.controlnet_blocks, *net.controlnet_single_blocks, net.controlnet_x_embedder]:
            layer.weight.normal_(0, 0.3)
    return net


def flow_scheduler(**changes: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **changes})


def ddim() -> Any:
    return diffusers.DDIMScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02)


def pipeline(name: str, *transformers: Any, scheduler: Any = None, **parts: Any) -> Any:
    """A pipeline with these transformers; every other part is left out."""
    kind = getattr(diffusers, name)
    names = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    parts = {"scheduler": scheduler or flow_scheduler(), **parts}
    parts |= dict(zip(("transformer", "transformer_2"), transformers, strict=False))
    options = ("boundary_ratio", "expand_timesteps", "is_distilled")
    return tiny.quiet(kind(**{name: parts.get(name) for name in names if name in parts or name not in options}))


def runner(pipe: Any, **fixed: Any) -> Callable[..., torch.Tensor]:
    def run(**options: Any) -> torch.Tensor:
        given = {"num_inference_steps": 3, "output_type": "latent", **fixed, **options}
        made: torch.Tensor = pipe(generator=generator(), return_dict=False, **given)[0]
        return made

    run.given = fixed
    return run


def calling(model: Any, given: dict[str, Any] | None = None) -> Callable[[], torch.Tensor]:
    """Return what calls a bare model, by default with two rows of 6x4 tokens, and joins all that it returns."""
    arguments = given or family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)

    def call() -> torch.Tensor:
        leaves = tree_leaves(model(**arguments, return_dict=False))
        return torch.cat([each.flatten() for each in leaves if each is not None])

    return torch.no_grad()(call)


# Families in their pipelines: no text encoder and, but for some, no VAE; for latents of embeddings.


def embeds(seed: int = 0, tokens: int = TEXT, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))


def _texts(made: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """What is told of a prompt, and of a negative one."""
    return made(0) | {f"negative_{name}": given for name, given in made(1).items()}


class Sizes(torch.nn.Module):
    """As much of a VAE of videos as the first versions of LTX's pipeline, and HunyuanVideo 1.5, ask for."""

    device, dtype, config = torch.device("cpu"), torch.float32, SimpleNamespace(latent_channels=4)

    def __init__(self, space: int, time: int) -> None:
        super().__init__()
        self.spatial_compression_ratio, self.temporal_compression_ratio = space, time


class Family(NamedTuple):
    """The class of a pipeline, that of its transformer, what a call is given, and the pipeline's other parts."""

    kind: str
    model: str
    given: dict[str, Any]
    parts: Callable[[], dict[str, Any]] = dict
    make: Callable[..., Any] = transformer


_ONES = torch.ones(1, TEXT, dtype=torch.long)
_GUIDED = {"guidance_scale": 3.0}
_IMAGE = {"height": 96, "width": 64}  # 6x4 tokens
_SMALL = {"height": 24, "width": 16}  # 6x4 tokens with a VAE that halves the sides
_VIDEO = {**_IMAGE, "num_frames": 9}  # 3x6x4 tokens
_EMBEDDED = _texts(lambda seed: {"prompt_embeds": embeds(seed)})
_PADDED = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
_TABLE = {
    "PixArt": Family(
        "PixArtAlphaPipeline",
        "PixArtTransformer2DModel",
        _texts(lambda seed: {"prompt_embeds": embeds(seed, width=TEXT_WIDTH), "prompt_attention_mask": _ONES.float()})
        | {**_SMALL, **_GUIDED, "negative_prompt": None, "use_resolution_binning": False},
        lambda: {"vae": tiny.vae(), "scheduler": ddim()},
        lambda name, **config: pixart_transformer(**config),
    ),
    "Stable Diffusion 3": Family(
        "StableDiffusion3Pipeline",
        "SD3Transformer2DModel",
        _texts(lambda seed: {"prompt_embeds": embeds(seed), "pooled_prompt_embeds": torch.full((1, 8), float(seed))})
        | {**_IMAGE, **_GUIDED},
    ),
    "Qwen-Image": Family(  # two calls a step
        "QwenImagePipeline",
        "QwenImageTransformer2DModel",
        _texts(lambda seed: {"prompt_embeds": embeds(seed), "prompt_embeds_mask": _ONES})
        | {**_IMAGE, "true_cfg_scale": 3.0},
    ),
    "Flux.1": Family(
        "FluxPipeline",
        "FluxTransformer2DModel",
        {"prompt_embeds": embeds(width=TEXT_WIDTH), "pooled_prompt_embeds": torch.zeros(1, 32), **_IMAGE},
        make=_model,
    ),
    "Chroma": Family(  # two calls a step
        "ChromaPipeline",
        "ChromaTransformer2DModel",
        _texts(lambda _: {"prompt_embeds": embeds(width=TEXT_WIDTH), "prompt_attention_mask": _ONES.float()}) | _IMAGE,
        make=_model,
    ),
    "Flux.2": Family(
        "Flux2Pipeline",
        "Flux2Transformer2DModel",
        {"prompt_embeds": embeds(width=TEXT_WIDTH), **_SMALL},
        lambda: {"vae": _flux2_vae()},
        _model,
    ),
    "Z-Image": Family(  # the image's tokens are padded to 32
        "ZImagePipeline",
        "ZImageTransformer2DModel",
        _texts(lambda seed: {"prompt_embeds": [embeds(seed)[0]]}) | {**_IMAGE, **_GUIDED},
    ),
    "Wan": Family("WanPipeline", "WanTransformer3DModel", {**_EMBEDDED, **_VIDEO, **_GUIDED}),  # two calls a step
    "LTX-Video": Family(
        "LTXPipeline",
        "LTXVideoTransformer3DModel",
        _texts(lambda seed: {"prompt_embeds": embeds(seed), "prompt_attention_mask": _ONES})
        | {"num_frames": 17, "height": 192, "width": 128, **_GUIDED},
        lambda: {"vae": Sizes(32, 8)},
    ),
    "HunyuanVideo": Family(  # and seven tokens of text, of which three are padding
        "HunyuanVideoPipeline",
        "HunyuanVideoTransformer3DModel",
        {"prompt_embeds": embeds(), "prompt_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]])}
        | {"pooled_prompt_embeds": torch.zeros(1, 8), **_VIDEO},
    ),
    "HunyuanVideo 1.5": Family(  # text of two encoders, some of it padding; two calls a step
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15Transformer3DModel",
        _texts(
            lambda seed: (
                {"prompt_embeds": embeds(seed), "prompt_embeds_mask": _PADDED}
                | {"prompt_embeds_2": embeds(seed, width=10), "prompt_embeds_mask_2": _PADDED}
            )
        )
        | _VIDEO,
        lambda: {"vae": Sizes(16, 4), "guider": diffusers.ClassifierFreeGuidance(**_GUIDED)},
    ),
    "CogVideoX": Family(
        "CogVideoXPipeline",
        "CogVideoXTransformer3DModel",
        {**_EMBEDDED, **_VIDEO, **_GUIDED},
        lambda: {"scheduler": diffusers.CogVideoXDDIMScheduler(num_train_timesteps=1000)},
    ),
}


FAMILIES = list(_TABLE)


def several(length: int, encoded: bool = False) -> dict[str, Any]:
    """Two rows of Z-Image Omni: a text for an image that is given, and one of a length for an image to be made."""
    rows = [[torch.rand(4, 1, 8, 6), torch.rand(4, 1, 12, 8)]] * 2
    texts = [[embeds(0, 5)[0], embeds(1, tokens)[0]] for tokens in (7, length)]
    seen = [[torch.rand(3, 2, 6), None]] * 2 if encoded else [None] * 2  # by an encoder
    given = {"image_noise_mask": [[0, 1]] * 2, "siglip_feats": seen}
    return {"x": rows, "t": torch.tensor([0.3, 0.3]), "cap_feats": texts, **given}


def made(
    name: str, *, config: dict[str, Any] | None = None, second: bool = False, **options: Any
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """A pipeline of a family, and what runs it; with a second transformer, that takes over at 0.8 of the noise."""
    row = _TABLE[name]
    if not hasattr(diffusers, row.kind):
        pytest.skip(f"this version of diffusers has no {row.kind}")
    models = [row.make(row.model, **(config or {})) for _ in range(1 + second)]
    pipe = pipeline(row.kind, *models, **row.parts(), **({"boundary_ratio": 0.8} if second else {}))
    return pipe, runner(pipe, **{**copy.deepcopy(row.given), **options})


def sd3(**changes: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    return made("Stable Diffusion 3", config=changes)


qwen_image = functools.partial(made, "Qwen-Image")
wan = functools.partial(made, "Wan")


# Whole pipelines with text encoders and decoders.


def t5(folder: Path, words: Sequence[str], length: int, width: int, which: str = "") -> dict[str, Any]:
    """A T5 tokenizer that knows some pieces of words, of at most `length` tokens, and an encoder of one layer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = ["<pad>", "</s>", "<unk>", *words]
    made = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = f'{{"tokenizer_class": "T5TokenizerFast", "model_max_length": {length}, "extra_ids": 0, '
    settings += '"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}'
    (folder / "tokenizer_config.json").write_text(settings)
    torch.manual_seed(2)
    sizes = {"vocab_size": len(pieces), "d_model": width, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    encoder = T5EncoderModel(T5Config(**sizes)).eval()
    return {f"tokenizer{which}": AutoTokenizer.from_pretrained(folder), f"text_encoder{which}": encoder}


def pixart_text(folder: Path, which: str = "") -> dict[str, Any]:
    return t5(folder / f"tokenizer{which}", ("▁a", "▁b"), 16, TEXT_WIDTH, which)


def vae() -> Any:
    """A VAE that takes images as well."""
    made = tiny.vae()
    made.register_to_config(shift_factor=0.1)
    return made


def _vae(name: str) -> Any:
    """A decoder with factor 8 on each side, and 4 in time."""
    sizes: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return _model(name, 1, **sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)


def _flux2_vae() -> Any:
    sizes: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4}
    sizes |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return _model("AutoencoderKLFlux2", **sizes, layers_per_block=1, sample_size=32)


def pixart(folder: Path) -> Any:
    parts = {"vae": tiny.vae(), "scheduler": ddim(), **pixart_text(folder)}
    return pipeline("PixArtAlphaPipeline", pixart_transformer(), **parts)


def flux(folder: Path, kind: Any = diffusers.FluxPipeline, **parts: Any) -> Any:
    """A Flux pipeline, or one of its kinds."""
    given = {"vae": tiny.vae(), "text_encoder": tiny.text_encoder(), "tokenizer": tiny.tokenizer(folder / "tokenizer")}
    given |= {"transformer": flux_transformer(), **pixart_text(folder, "_2")}
    return pipeline(kind.__name__, **{**given, **parts})


def _spelling(folder: Path, name: str, *transformers: Any, **parts: Any) -> Any:
    """A pipeline whose T5 spells."""
    letters = ("▁", *(chr(code) for code in range(33, 127)))
    return pipeline(name, *transformers, **t5(folder / "words", letters, 512, WIDTH), **parts)


def wan22(folder: Path) -> Any:
    """Two transformers, of which the second takes over at 0.8 of the noise."""
    parts = {"boundary_ratio": 0.8, "vae": _vae("AutoencoderKLWan")}
    return _spelling(folder, "WanPipeline", wan_transformer(), wan_transformer(), **parts)


def write_flux(folder: Path) -> Path:
    flux(folder, vae=vae()).save_pretrained(folder / "flux")
    return folder / "flux"


def _write(name: str, model: str, decoder: str, folder: Path) -> Path:
    _spelling(folder, name, transformer(model), vae=_vae(decoder)).save_pretrained(folder / name)
    return folder / name


write_wan = functools.partial(_write, "WanPipeline", "WanTransformer3DModel", "AutoencoderKLWan")
write_qwen_image = functools.partial(
    _write, "QwenImagePipeline", "QwenImageTransformer2DModel", "AutoencoderKLQwenImage"
)
