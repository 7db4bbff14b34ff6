"""What the embedded diffusion transformer consists of: sizes, networks, and a T5 tokenizer for the renderer's words.

The autoencoder and the CLIP tokenizer are those of the first embedded pipeline. So is the CLIP text encoder's size.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elfatt_sd.toy.renderer import VOCABULARY
from tools.toy import models as first

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
PIECES = (PAD, END, UNKNOWN, "▁", *(f"▁{word}" for word in VOCABULARY), ".", ",")
LENGTH = 512  # text tokens of a plain call of FluxPipeline
HEAD = 40  # channels of an attention head, as in Stable Diffusion 1.5
ROTARY = (8, 16, 16)  # of them for a token's index, row and column
TEXT_HEAD = 32  # channels of an attention head of the text encoder
BUCKETS = 32  # of relative positions in T5; it tells distances up to BUCKETS / 4 - 1 apart
REACH = BUCKETS // 4 - 1  # how many tokens back one layer of the text encoder looks
FORBIDDEN = -10_000.0  # added to a score: its weight underflows to exactly 0
SHIFT = 5.0  # of the timesteps towards noise, at 64x64 tokens


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the networks.

    Attributes:
        heads: attention heads of the transformer, of `HEAD` channels each; an even number, as real ones have.
        joint: blocks with separate weights for text and image.
        single: blocks with common weights.
        text: width of the text encoder.
        layers: layers of the text encoder.
        grid: rows and columns of image tokens; the latent side is twice that, the image's side 8 times.
    """

    heads: int = 4
    joint: int = 2
    single: int = 5
    text: int = 128
    layers: int = 2
    grid: int = 64


FULL = Sizes()
TINY = Sizes(heads=2, joint=1, single=1, text=32, layers=1, grid=8)


def configurations(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """The arguments of the transformer, the text encoders' configurations and the scheduler, by component."""
    return {
        "text_encoder": first.configurations(first.FULL)["text_encoder"],
        "transformer": {
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": sizes.joint,
            "num_single_layers": sizes.single,
            "attention_head_dim": HEAD,
            "num_attention_heads": sizes.heads,
            "joint_attention_dim": sizes.text,
            "pooled_projection_dim": first.FULL.text,
            "guidance_embeds": False,
            "axes_dims_rope": list(ROTARY),
        },
        "text_encoder_2": {
            "vocab_size": len(PIECES),
            "d_model": sizes.text,
            "d_kv": TEXT_HEAD,
            "d_ff": 2 * sizes.text,
            "num_layers": sizes.layers,
            "num_heads": sizes.text // TEXT_HEAD,
            "relative_attention_num_buckets": BUCKETS,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": 0.0,
            "is_encoder_decoder": False,
            "use_cache": False,
            "tie_word_embeddings": False,
            "pad_token_id": PIECES.index(PAD),
            "eos_token_id": PIECES.index(END),
        },
        "scheduler": {"num_train_timesteps": 1000, "shift": SHIFT, "use_dynamic_shifting": False},
    }


def build(component: str, sizes: Sizes) -> Any:
    """A new, untrained component of the pipeline."""
    import diffusers
    import transformers

    if component == "text_encoder":
        return first.build(component, first.FULL)
    arguments = configurations(sizes)[component]
    if component == "text_encoder_2":
        encoder = transformers.T5EncoderModel(transformers.T5Config(**arguments))
        look_back(encoder)
        return encoder
    kinds = {"transformer": "FluxTransformer2DModel", "scheduler": "FlowMatchEulerDiscreteScheduler"}
    built = getattr(diffusers, kinds[component])(**arguments)
    if component == "transformer":
        start_as_identity(built)
    return built


def start_as_identity(transformer: nn.Module) -> None:
    """Give a transformer the initial weights of DiT: blocks add nothing yet, and the output is 0."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            modulation = ".linear" in name and "norm" in name
            if modulation or name == "proj_out":
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


@torch.no_grad()
def look_back(encoder: Any) -> None:
    """Let every token of a T5 encoder see itself and the `REACH` tokens before it, and nothing else.

    `FluxPipeline` pads prompts and masks nothing. With this no padding changes a prompt's tokens, and all padding
    beyond `REACH` tokens a layer is one constant vector, so that training needs it only once (see `Denoiser`).
    """
    bias = encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    bias.weight[REACH + 1 :] = FORBIDDEN


def save_tokenizer(folder: Path) -> None:
    """Write the files that `T5TokenizerFast.from_pretrained(folder)` reads; every word of `VOCABULARY` is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    scores = [(piece, -1.0 if piece.startswith("▁") else 0.0) for piece in PIECES]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=PIECES.index(UNKNOWN)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, PIECES.index(END))]
    )
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "unk_token": UNKNOWN, "pad_token": PAD}
    settings = {**special, "tokenizer_class": "T5TokenizerFast", "model_max_length": LENGTH, "extra_ids": 0}
    first.write_json(folder / "special_tokens_map.json", special)
    first.write_json(folder / "tokenizer_config.json", settings)
