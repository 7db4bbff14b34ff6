"""UNet pipelines of a few thousand random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

SD15_SCHEDULE: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TEXT_WIDTH = 32
CLIP = {"hidden_size": TEXT_WIDTH, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 4}


def tokenizer(folder: Path) -> transformers.CLIPTokenizer:
    """A CLIP tokenizer that spells: one token for every printable character."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def text_config(**changes: Any) -> transformers.CLIPTextConfig:
    """A one-layer CLIP text encoder for `tokenizer`."""
    tokens = {"vocab_size": 190, "bos_token_id": 188, "eos_token_id": 189, "pad_token_id": 189}
    return transformers.CLIPTextConfig(**CLIP, **tokens, max_position_embeddings=77, **changes)


def vae() -> diffusers.AutoencoderKL:
    """A VAE with factor 2 on each side."""
    torch.manual_seed(1)
    config: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4}
    config |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers.AutoencoderKL(**config, sample_size=32).eval()


def unet(**changes: Any) -> diffusers.UNet2DConditionModel:
    """A UNet like that of SD 1.5: two levels with transformers, a third without; `attention_head_dim` counts heads."""
    torch.manual_seed(0)
    config: dict[str, Any] = {"block_out_channels": (16, 32, 32), "layers_per_block": 1, "sample_size": 16}
    config |= {"norm_num_groups": 4, "cross_attention_dim": TEXT_WIDTH, "attention_head_dim": 2}
    config |= {"down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")}
    config |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")}
    return diffusers.UNet2DConditionModel(**{**config, **changes}).eval()


# Of UNets with attention on one level alone; with one such layer.
ONE_LEVEL: dict[str, Any] = {"sample_size": 8, "block_out_channels": (8,), "mid_block_type": None}
ONE_LEVEL |= {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
ONE_LAYER = {**ONE_LEVEL, "up_block_types": ("UpBlock2D",)}


def text_encoder() -> transformers.CLIPTextModel:
    torch.manual_seed(2)
    return transformers.CLIPTextModel(text_config()).eval()


def sd15_parts(folder: Path, **unet_changes: Any) -> dict[str, Any]:
    """The parts of a Stable Diffusion 1.5 pipeline; its own scheduler is PNDM."""
    scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1, **SD15_SCHEDULE)
    parts = {"unet": unet(**unet_changes), "vae": vae(), "text_encoder": text_encoder(), "scheduler": scheduler}
    return {**parts, "tokenizer": tokenizer(folder / "tokenizer"), "safety_checker": None, "feature_extractor": None}


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sd15(folder: Path, *, scheduler: Any = None, **unet_changes: Any) -> diffusers.StableDiffusionPipeline:
    """Stable Diffusion 1.5 in miniature; its own scheduler is PNDM."""
    parts = sd15_parts(folder, **unet_changes)
    parts["scheduler"] = scheduler or parts["scheduler"]
    return quiet(diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False))


def sdxl_parts(folder: Path, *, refiner: bool = False) -> dict[str, Any]:
    """The parts of an SDXL pipeline: no attention on the finest grid."""
    torch.manual_seed(2)
    projecting = text_config(projection_dim=32)
    config: dict[str, Any] = {"sample_size": 32, "attention_head_dim": (2, 4, 4), "use_linear_projection": True}
    config |= {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")}
    config |= {"up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")}
    config |= {"transformer_layers_per_block": (1, 1, 2), "addition_embed_type": "text_time"}
    config |= {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 8 * (5 if refiner else 6) + 32}
    model = unet(**config, cross_attention_dim=32 if refiner else 64)
    first = None if refiner else transformers.CLIPTextModel(text_config(projection_dim=32)).eval()
    return {
        "unet": model,
        "vae": vae(),
        "scheduler": diffusers.EulerDiscreteScheduler(**SD15_SCHEDULE, steps_offset=1, timestep_spacing="leading"),
        "text_encoder": first,
        "tokenizer": None if refiner else tokenizer(folder / "tokenizer"),
        "text_encoder_2": transformers.CLIPTextModelWithProjection(projecting).eval(),
        "tokenizer_2": tokenizer(folder / "tokenizer_2"),
    }


def sdxl(folder: Path) -> diffusers.StableDiffusionXLPipeline:
    """SDXL in miniature."""
    return quiet(diffusers.StableDiffusionXLPipeline(**sdxl_parts(folder), add_watermarker=False))


def controlnet(model: diffusers.UNet2DConditionModel) -> diffusers.ControlNetModel:
    """A ControlNet for a UNet, with an effect; its picture is twice the latent, as the VAE here needs."""
    torch.manual_seed(3)
    copied = ("in_channels", "down_block_types", "block_out_channels", "layers_per_block", "norm_num_groups")
    net = diffusers.ControlNetModel(
        **{name: model.config[name] for name in (*copied, "cross_attention_dim", "attention_head_dim")},
        conditioning_embedding_out_channels=(8, 8),
    ).eval()
    with torch.no_grad():
        for layer in [*net.controlnet_down_blocks, net.controlnet_mid_block, net.controlnet_cond_embedding.conv_out]:
            layer.weight.normal_(0, 0.1)
    return net


def t2i_adapter() -> diffusers.T2IAdapter:
    """A T2I adapter whose features fit `unet()`."""
    torch.manual_seed(4)
    config = {"in_channels": 3, "channels": [16, 32, 32], "num_res_blocks": 1, "downscale_factor": 2}
    return diffusers.T2IAdapter(**config, adapter_type="full_adapter").eval()


def motion_adapter() -> diffusers.MotionAdapter:
    """A motion adapter for `unet()`."""
    torch.manual_seed(5)
    names = ("layers_per_block", "norm_num_groups", "num_attention_heads", "max_seq_length")
    config = {f"motion_{name}": value for name, value in zip(names, (1, 4, 2, 8), strict=True)}
    return diffusers.MotionAdapter(block_out_channels=(16, 32, 32), use_motion_mid_block=False, **config).eval()


def ddim() -> diffusers.DDIMScheduler:
    return diffusers.DDIMScheduler(**SD15_SCHEDULE, clip_sample=False, steps_offset=1)


def image_encoder() -> transformers.CLIPVisionModelWithProjection:
    """A CLIP image encoder for IP-Adapters."""
    torch.manual_seed(6)
    config = transformers.CLIPVisionConfig(**CLIP, projection_dim=32, image_size=32, patch_size=8)
    return transformers.CLIPVisionModelWithProjection(config).eval()


def image_processor() -> transformers.CLIPImageProcessor:
    return transformers.CLIPImageProcessor(crop_size=32, size=32)


def ip_adapter(model: diffusers.UNet2DConditionModel) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of an IP-Adapter with four picture tokens, for a UNet and `image_encoder()`."""
    width, generator = 4 * TEXT_WIDTH, torch.Generator().manual_seed(7)

    def weights(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    crossing = [name for name in model.attn_processors if name.endswith("attn2.processor")]
    layers = {}
    for index, name in enumerate(crossing):
        inner = model.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * index + 1}.{part}.weight"] = weights(inner, TEXT_WIDTH)
    projection = {"proj.weight": weights(width, 32), "proj.bias": torch.zeros(width)}
    projection |= {"norm.weight": torch.ones(TEXT_WIDTH), "norm.bias": torch.zeros(TEXT_WIDTH)}
    return {"image_proj": projection, "ip_adapter": layers}
