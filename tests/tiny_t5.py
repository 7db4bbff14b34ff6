"""A T5 tokenizer and text encoder of a few random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, T5Config, T5EncoderModel


def tokenizer(folder: Path, words: Sequence[str], length: int) -> Any:
    """A tokenizer that knows some pieces of words, of at most `length` tokens."""
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


def text_encoder(words: int, width: int) -> T5EncoderModel:
    """An encoder of one layer."""
    torch.manual_seed(2)
    sizes = {"vocab_size": words, "d_model": width, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(**sizes)).eval()
