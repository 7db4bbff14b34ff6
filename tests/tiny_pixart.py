"""A PixArt pipeline of a few thousand random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_pipelines as tiny
import torch
from diffusers import DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
from transformers import AutoTokenizer, T5Config, T5EncoderModel

TEXT_WIDTH = 8


def transformer(**changes: Any) -> PixArtTransformer2DModel:
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


def tokenizer(folder: Path) -> Any:
    """A T5 tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", "▁a", "▁b"]
    made = Tokenizer(models.Unigram([(word, 0.0) for word in words], unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = '{"tokenizer_class": "T5TokenizerFast", "model_max_length": 16, "extra_ids": 0, "pad_token": "<pad>", '
    settings += '"eos_token": "</s>", "unk_token": "<unk>"}'
    (folder / "tokenizer_config.json").write_text(settings)
    return AutoTokenizer.from_pretrained(folder)


def text_encoder() -> T5EncoderModel:
    torch.manual_seed(2)
    sizes = {"vocab_size": 5, "d_model": TEXT_WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(**sizes)).eval()


def pixart(folder: Path) -> PixArtAlphaPipeline:
    pipe = PixArtAlphaPipeline(
        tokenizer=tokenizer(folder / "tokenizer"),
        text_encoder=text_encoder(),
        vae=tiny.vae(),
        transformer=transformer(),
        scheduler=DDIMScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
    )
    return tiny.quiet(pipe)  # type: ignore[no-any-return]
