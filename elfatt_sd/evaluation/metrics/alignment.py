"""How well an image shows its prompt, and how people would like it: CLIPScore, PickScore and HPS v2.

All three are the cosine of a text's and an image's embedding under a CLIP model of transformers:

    CLIPScore = 100 max(cos, 0)   (Hessel et al. 2021, with 100 for their 2.5, as torchmetrics has it)
    PickScore = exp(logit scale) cos   (Kirstain et al. 2023)
    HPS v2    = 100 cos   (Wu et al. 2023)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.evaluation import vision
from elfatt_sd.evaluation.features import exact_float32
from elfatt_sd.evaluation.metrics.base import Batch, ImageMetric
from elfatt_sd.running import tell_cut

_TITLES = {"clip-score": "CLIPScore", "pickscore": "PickScore", "hpsv2": "HPSv2"}


def load_alignment(kind: str, folder: Path, device: str) -> ImageMetric:
    """Load one of the three."""
    from transformers import AutoTokenizer, CLIPModel

    who = f"metric {kind!r}: {folder}"
    config = vision.read_config(folder, who, ("clip",), "the directory of a CLIP model")
    model = vision.read_model(folder, who, CLIPModel, config).eval().requires_grad_(False)
    with vision.loading(who):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    seen = config.vision_config
    recipe = vision.read_recipe("clip", folder, seen.image_size)
    named = seen.hidden_size in vision.SIZES
    shape = vision.model_title(seen, seen.image_size) if named else recipe["sha256"][:8]
    title = f"CLIPScore ({shape})" if kind == "clip-score" else _TITLES[kind]
    cosine = _Cosine(title, model.to(device), tokenizer, recipe, device)
    described = {"model": shape, **recipe}
    return ImageMetric(title, _scaled(kind, cosine, model), described, better="higher", reads=cosine.reads)


def _scaled(kind: str, cosine: Callable[[Batch], Tensor], model: Any) -> Callable[[Batch], Tensor]:
    scale = float(model.logit_scale.detach().exp()) if kind == "pickscore" else 100.0
    least = 0.0 if kind == "clip-score" else -scale

    def measure(batch: Batch) -> Tensor:
        return batch.by_image((scale * cosine(batch)).clamp(min=least))

    return measure


class _Cosine:
    """The cosine of each frame with its prompt."""

    def __init__(self, title: str, model: Any, tokenizer: Any, recipe: dict[str, Any], device: str) -> None:
        self.title, self.model, self.tokenizer, self.recipe = title, model, tokenizer, recipe
        self.device = torch.device(device)
        self.limit = model.config.text_config.max_position_embeddings
        self._read: set[str] = set()

    def reads(self, prompts: Sequence[str]) -> None:
        """Warn of prompts that are cut off, unless that was said of them before."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._read]
        self._read.update(new)
        if new:
            room = self.limit - self.tokenizer.num_special_tokens_to_add()
            tell_cut(f"prompts of {self.title}", new, room, self.tokenizer)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        self.reads(batch.prompts)
        with exact_float32(self.device):
            texts = functional.normalize(self._texts(list(batch.prompts)), dim=1)
            frames = torch.cat([self._frames(part) for part in torch.split(batch.frames(), 8)])
        each = len(frames) // len(texts)
        return (functional.normalize(frames, dim=1) * texts.repeat_interleave(each, 0)).sum(1)

    def _texts(self, prompts: list[str]) -> Tensor:
        options = {"padding": True, "truncation": True, "max_length": self.limit, "return_tensors": "pt"}
        tokens = self.tokenizer(prompts, **options)
        given = {key: tokens[key].to(self.device) for key in ("input_ids", "attention_mask")}
        found: Tensor = self.model.text_projection(self.model.text_model(**given).pooler_output)
        return found

    def _frames(self, frames: Tensor) -> Tensor:
        pixels = vision.to_input(frames.to(self.device), "clip", self.recipe)
        found: Tensor = self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output)
        return found
