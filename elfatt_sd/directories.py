"""A model in a directory: its parts, and whether their weights are there."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError
from elfatt_sd.files import visible

INDEX = "model_index.json"
PICKLES = {".ckpt", ".pt", ".pth", ".bin"}
_WITH_VOCABULARY = ("CLIPTokenizer", "T5Tokenizer", "Qwen2Tokenizer")  # others, such as ByT5's, have none
_VOCABULARY = ("vocab.json", "vocab.txt", "tokenizer.json", "vocab.jsonl", ".model", ".tiktoken")
_VARIANT = re.compile(r"\.([\w-]+?)(?:-\d{5}-of-\d{5})?\.safetensors")  # of model.fp16.safetensors: fp16


def check_directory(path: Path, given: Collection[str], allow_pickle: bool, variant: str | None) -> None:
    """Check that a directory has all parts, with weights of the variant that may be loaded."""
    wanted = [name for name in _parts(path) if name not in given]
    missing = [name for name in wanted if not (path / name).is_dir()]
    if missing:
        raise ElfattError(f"model={str(path)!r} lacks a part: {', '.join(missing)} (named in its {INDEX}).")
    if wordless := [name for name in wanted if _lacks_words(path / name, str(_index(path)[name][-1]))]:
        raise ElfattError(f"model={str(path)!r} has no vocabulary in {', '.join(wordless)}.")
    pickled = [name for name in wanted if _only_pickles(path / name)]
    if pickled and not allow_pickle:
        raise ElfattError(
            f"model={str(path)!r} has no .safetensors weights in {', '.join(pickled)}; convert it, or allow pickles "
            "with allow_pickle=True (--allow-pickle)."
        )
    _check_variant(path, {name: set(_variants(path / name)) for name in wanted}, variant)


def _lacks_words(part: Path, kind: str) -> bool:
    return kind.startswith(_WITH_VOCABULARY) and not any(
        file.name.endswith(_VOCABULARY) for file in visible(part.iterdir())
    )


def _check_variant(path: Path, found: dict[str, set[str]], variant: str | None) -> None:
    """Check that the weights of every part have the variant, or are plain where there is none of it."""
    named = sorted(set().union(*found.values()) - {""})
    if variant is not None and found and variant not in named and any(found.values()):
        there = ", ".join(map(repr, named)) or "weights without a variant alone"
        raise ElfattError(f"variant={variant!r} is not in model={str(path)!r}; there is: {there}.")
    lacking = [name for name, kinds in found.items() if kinds and not kinds & {"", variant}]
    if lacking:
        raise ElfattError(
            f"model={str(path)!r} has weights of a variant alone in {', '.join(lacking)}; "
            f"give variant={named[0]!r} (--variant {named[0]})."
        )


def _variants(part: Path) -> Iterator[str]:
    for file in visible(part.glob("*.safetensors")):
        found = _VARIANT.search(file.name)
        yield found[1] if found else ""


def _parts(path: Path) -> list[str]:
    return [name for name, kind in _index(path).items() if isinstance(kind, list) and kind and kind[0]]


def kind_of_directory(path: Path) -> str | None:
    return str(_index(path)["_class_name"]) if (path / INDEX).is_file() else None


def _index(path: Path) -> dict[str, Any]:
    """Read the index of a pipeline directory."""
    index = path / INDEX
    if not index.is_file():
        raise ElfattError(f"model={str(path)!r} has no {INDEX}; give a diffusers pipeline directory.")
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, dict) or not isinstance(parts.get("_class_name"), str):
        raise ElfattError(f"{index} names no pipeline (its _class_name); the model directory is damaged.")
    return parts


def _only_pickles(part: Path) -> bool:
    suffixes = {file.suffix for file in visible(part.iterdir())}
    return bool(suffixes & PICKLES) and ".safetensors" not in suffixes
