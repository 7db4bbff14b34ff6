"""Functions that tests give as metrics, and random weight files with the layout of published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from torch import Tensor, nn


def brightness(images: Tensor, prompts: list[str]) -> Tensor:
    return images.flatten(1).double().mean(1)


def moved(images: Tensor, prompts: list[str], untouched: Tensor) -> list[float]:
    return (images.double() - untouched.double()).abs().flatten(1).mean(1).tolist()  # type: ignore[no-any-return]


def maybe_moved(images: Tensor, prompts: list[str], untouched: Tensor | None = None) -> list[float]:
    return [] if untouched is None else moved(images, prompts, untouched)


def scaled(images: Tensor, prompts: list[str], scale: float = 2.0, *, more: float = 0.0) -> Tensor:
    return brightness(images, prompts) * scale + more


def one_number(images: Tensor, prompts: list[str]) -> float:
    return 1.0


def broken(images: Tensor, prompts: list[str]) -> Tensor:
    raise RuntimeError("no\nway")


def endless(images: Tensor, prompts: list[str]) -> list[float]:
    return [float("inf")] * len(prompts)


def needs_a_word(images: Tensor, prompts: list[str], *, scale: float) -> Tensor:
    return brightness(images, prompts) * scale


def write_classifier(path: Path, name: str) -> Path:
    """The convolutions of torchvision's `alexnet`, `vgg16` or `squeezenet1_1`, in a file like torchvision's."""
    models: Any = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    if name == "vgg16":  # the whole has 138 million weights
        vgg = pytest.importorskip("torchvision.models.vgg")
        layers: nn.Module = vgg.make_layers(vgg.cfgs["D"], batch_norm=False)
    else:
        layers = getattr(models, name)(weights=None).features
    torch.save({f"features.{key}": value for key, value in layers.state_dict().items()}, path)
    return path


def write_clip(folder: Path) -> Path:
    """A whole CLIP model of a few thousand weights, with tokenizer and preprocessing."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    vision, text = tiny.image_encoder().config.to_dict(), tiny.text_config().to_dict()
    # the projection has another size than the picture part's own settings say, as some are published
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).eval().save_pretrained(folder)
    tiny.tokenizer(folder / "tokenizer").save_pretrained(folder)
    tiny.image_processor().save_pretrained(folder)
    return folder
