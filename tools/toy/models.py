"""What the embedded pipeline consists of: sizes, networks, and a CLIP tokenizer for the renderer's words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.toy.renderer import VOCABULARY

START, END = "<|startoftext|>", "<|endoftext|>"
TOKENS = 24
CENTER = 0.3  # the code's zero, in images of range [-1, 1]: about their mean
SCALING = 1.75  # latents times this have unit variance
FRAME = ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the networks.

    Attributes:
        picture: side of the images in pixels; the latent side is a quarter of it.
        unet: channels of the four levels, each with attention.
        heads: attention heads of the four levels.
        vae: channels of the three levels of the autoencoder.
        text: width of the text encoder.
        groups: groups of every group normalisation.
    """

    picture: int = 256
    unet: tuple[int, int, int, int] = (32, 48, 64, 96)
    heads: tuple[int, int, int, int] = (2, 2, 4, 4)
    vae: tuple[int, int, int] = (32, 48, 64)
    text: int = 96
    groups: int = 8


FULL = Sizes()
TINY = Sizes(picture=64, unet=(16, 16, 32, 32), heads=(2, 2, 4, 4), vae=(8, 8, 16), text=32, groups=4)


def configurations(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """The arguments of the UNet, the autoencoder, the text encoder's configuration and the scheduler, by component."""
    levels, stages = len(sizes.unet), len(sizes.vae)
    return {
        "unet": {
            "sample_size": sizes.picture // 4,
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 1,
            "block_out_channels": list(sizes.unet),
            "down_block_types": ["CrossAttnDownBlock2D"] * levels,
            "up_block_types": ["CrossAttnUpBlock2D"] * levels,
            "attention_head_dim": list(sizes.heads),  # diffusers' name for the number of heads
            "cross_attention_dim": sizes.text,
            "norm_num_groups": sizes.groups,
        },
        "vae": {
            "sample_size": sizes.picture,
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "layers_per_block": 1,
            "block_out_channels": list(sizes.vae),
            "down_block_types": ["DownEncoderBlock2D"] * stages,
            "up_block_types": ["UpDecoderBlock2D"] * stages,
            "norm_num_groups": sizes.groups,
            "mid_block_add_attention": False,
            "scaling_factor": SCALING,
        },
        "text_encoder": {
            "vocab_size": len(vocabulary_files()[0]),
            "hidden_size": sizes.text,
            "intermediate_size": 2 * sizes.text,
            "projection_dim": sizes.text,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": TOKENS,
            "bos_token_id": vocabulary_files()[0][START],
            "eos_token_id": vocabulary_files()[0][END],
            "pad_token_id": vocabulary_files()[0][END],
        },
        "scheduler": {
            "num_train_timesteps": 1000,
            "beta_schedule": "scaled_linear",
            "beta_start": 0.00085,
            "beta_end": 0.02,  # with SD 1.5's 0.012, flat backgrounds still shine through the noise of the first step
            "prediction_type": "v_prediction",
            "skip_prk_steps": True,
            "set_alpha_to_one": False,
            "steps_offset": 1,
            "clip_sample": False,  # PNDM has no such setting, but DDIM and DDPM made from this one would clip latents
        },
    }


def build(component: str, sizes: Sizes) -> Any:
    """A new, untrained component of the pipeline."""
    import diffusers
    import transformers

    arguments = configurations(sizes)[component]
    if component == "text_encoder":
        return transformers.CLIPTextModel(transformers.CLIPTextConfig(**arguments))
    kinds = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": "PNDMScheduler"}
    return getattr(diffusers, kinds[component]).from_config(arguments)


def encode_code(images: Tensor) -> Tensor:
    """The code that the autoencoder is taught: colour averages, seen along four directions of a tight frame.

    A fixed code needs no autoencoder while the UNet trains: a render of a quarter of the side is the average already.

    Args:
        images: `[n, 3, h, w]` in [-1, 1], already averaged to the latent grid.

    Returns:
        unscaled latents `[n, 4, h, w]`.
    """
    frame = torch.tensor(FRAME, dtype=images.dtype, device=images.device) / 2
    return torch.einsum("kc,nchw->nkhw", frame, images - CENTER)


def vocabulary_files() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level vocabulary and merges, in CLIP's manner, under which every word of `VOCABULARY` is one token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    merges: list[tuple[str, str]] = []
    for word in VOCABULARY:
        while len(pieces := _byte_pair_encode(word, merges)) > 1:
            merges.append((pieces[0], pieces[1]))
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *(a + b for a, b in merges), START, END]
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}, merges


def _byte_pair_encode(word: str, merges: list[tuple[str, str]]) -> list[str]:
    pieces = [*word[:-1], word[-1] + "</w>"]
    for a, b in merges:
        i = 0
        while i < len(pieces) - 1:
            if (pieces[i], pieces[i + 1]) == (a, b):
                pieces[i : i + 2] = [a + b]
            i += 1
    return pieces


def save_tokenizer(folder: Path) -> None:
    """Write the files that `CLIPTokenizer.from_pretrained(folder)` reads."""
    vocabulary, merges = vocabulary_files()
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    settings = {**special, "tokenizer_class": "CLIPTokenizer", "model_max_length": TOKENS, "do_lower_case": True}
    write_json(folder / "vocab.json", vocabulary)
    write_json(folder / "special_tokens_map.json", special)
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: Any) -> None:
    """Write indented UTF-8 JSON, making the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
