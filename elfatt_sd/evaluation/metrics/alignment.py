"""How well an image shows its prompt, and how people would like it: CLIPScore, PickScore and HPS v2.

All three are the cosine of a text's and an image's embedding under a CLIP model of transformers:

    CLIPScore = 100 max(cos, 0)   (Hessel et al. 2021, with 100 for their 2.5, as torchmetrics has it)
    PickScore = exp(logit scale) cos   (Kirstain et al. 2023)
    HPS v2    = 100 cos   (Wu et al. 2023)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.features import _centre_crop, _resized, _vision_recipe, exact_float32
from elfatt_sd.evaluation.metrics.base import Batch, ImageMetric

_TITLES = {"clip-score": "CLIPScore", "pickscore": "PickScore", "hpsv2": "HPSv2"}
_SIZES = {768: "B", 1024: "L", 1280: "H", 1664: "bigG"}  # of vision transformers, by their width


def load_alignment(kind: str, folder: Path, device: str) -> ImageMetric:
    """Load one of the three.

    Args:
        kind: `clip-score`, `pickscore` or `hpsv2`.
        folder: a CLIP model of transformers, with its tokenizer.
        device: where to run.

    Raises:
        ElfattError: the folder holds no whole CLIP model with a tokenizer.
    """
    model, tokenizer = _load(kind, folder)
    vision = model.config.vision_config
    recipe = _vision_recipe("clip", folder, vision.image_size)
    size, digest = _SIZES.get(vision.hidden_size), recipe["sha256"]
    edge = "" if vision.image_size == 224 else f"@{vision.image_size}"
    shape = f"ViT-{size}/{vision.patch_size}{edge}" if size else digest[:8]
    title = f"CLIPScore ({shape})" if kind == "clip-score" else _TITLES[kind]
    cosine = _Cosine(model.to(device), tokenizer, recipe, device)
    return ImageMetric(title, _scaled(kind, cosine, model), {"model": shape, **recipe}, better="higher")


def _scaled(kind: str, cosine: Callable[[Batch], Tensor], model: Any) -> Callable[[Batch], Tensor]:
    scale = float(model.logit_scale.detach().exp()) if kind == "pickscore" else 100.0
    least = 0.0 if kind == "clip-score" else -scale

    def measure(batch: Batch) -> Tensor:
        return batch.by_image((scale * cosine(batch)).clamp(min=least))

    return measure


class _Cosine:
    """The cosine of each frame with its prompt."""

    def __init__(self, model: Any, tokenizer: Any, recipe: dict[str, Any], device: str) -> None:
        self.model, self.tokenizer, self.recipe, self.device = model, tokenizer, recipe, torch.device(device)
        self.mean, self.std = (
            torch.tensor(recipe[key], dtype=torch.float32, device=device)[:, None, None] for key in ("mean", "std")
        )

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Return `[n * f]`."""
        with exact_float32(self.device):
            texts = functional.normalize(self._texts(list(batch.prompts)), dim=1)
            frames = torch.cat([self._frames(part) for part in torch.split(batch.frames(), 8)])
        each = len(frames) // len(texts)
        return (functional.normalize(frames, dim=1) * texts.repeat_interleave(each, 0)).sum(1)

    def _texts(self, prompts: list[str]) -> Tensor:
        limit = self.model.config.text_config.max_position_embeddings
        options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
        tokens = self.tokenizer(prompts, **options)
        given = {key: tokens[key].to(self.device) for key in ("input_ids", "attention_mask")}
        found: Tensor = self.model.text_projection(self.model.text_model(**given).pooler_output)
        return found

    def _frames(self, frames: Tensor) -> Tensor:
        height, width = frames.shape[2:]
        ratio = self.recipe["shortest_edge"] / min(height, width)
        pixels = _resized(frames.to(self.device), (round(height * ratio), round(width * ratio)))
        pixels = (_centre_crop(pixels, self.recipe["crop"]) / 255 - self.mean) / self.std
        found: Tensor = self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output)
        return found


def _load(kind: str, folder: Path) -> tuple[Any, Any]:
    if not (folder / "config.json").is_file():
        raise ElfattError(f"metric {kind!r}: {folder} has no config.json; give the directory of a CLIP model.")
    from transformers import AutoConfig, AutoTokenizer, CLIPModel

    options: dict[str, Any] = {"local_files_only": True, "torch_dtype": torch.float32, "output_loading_info": True}
    loader: Any = CLIPModel
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type != "clip":
            raise ElfattError(f"metric {kind!r}: {folder} is of type {config.model_type}; accepted: clip.")
        model, report = loader.from_pretrained(folder, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ElfattError:
        raise
    except Exception as error:  # transformers raises many kinds for damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ElfattError(f"metric {kind!r}: {folder} cannot be loaded ({reason}).") from error
    missing = sorted(report["missing_keys"])  # which transformers fills with random numbers
    if missing:
        raise ElfattError(f"metric {kind!r}: {folder} lacks {len(missing)} of its weights, first {missing[0]}.")
    return model.eval().requires_grad_(False), tokenizer
