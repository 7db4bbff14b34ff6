"""Write the trained diffusion transformer as a diffusers directory that old and new libraries load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from elfatt_sd.toy import TOY
from tools.toy.export import DIFFUSERS_VERSION, environment, save_half, save_text_encoder
from tools.toy.models import write_json
from tools.toy_dit import models
from tools.toy_dit.card import RECORD, write_card
from tools.toy_dit.denoiser import Denoiser

PARTS = ("transformer", "text_encoder", "text_encoder_2")  # that are trained
COMMON = {"_diffusers_version": DIFFUSERS_VERSION}


def export(sizes: models.Sizes, denoiser: Denoiser, training: dict[str, Any], out: Path) -> Path:
    """Write `out/pipeline` with its training record.

    Args:
        sizes: the networks' sizes.
        denoiser: the trained networks.
        training: for the record: device, seed, and what `train` returned by stage.
        out: the folder to write into.

    Returns:
        The pipeline's folder.
    """
    folder, settings = out / "pipeline", models.configurations(sizes)
    save_networks(sizes, denoiser, folder)
    kind = "FlowMatchEulerDiscreteScheduler"
    scheduler = {"_class_name": kind, **COMMON, **settings["scheduler"]}
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    models.save_tokenizer(folder / "tokenizer_2")
    copy_first(folder)
    write_json(folder / "model_index.json", {**pipeline_index(), **COMMON})
    counts = {name: sum(p.numel() for p in getattr(denoiser, name).parameters()) for name in PARTS}
    record = {**environment(), "parameters": counts, "grid": sizes.grid, "reach": models.REACH, **training}
    (folder / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")  # long curves, in one line
    write_card(folder)
    return folder


def save_networks(sizes: models.Sizes, denoiser: Denoiser, folder: Path) -> None:
    """Write the transformer and the text encoders, in float16."""
    settings = models.configurations(sizes)
    save_text_encoder(denoiser.text_encoder, settings["text_encoder"], folder / "text_encoder")
    transformer = {"_class_name": "FluxTransformer2DModel", **COMMON, **settings["transformer"]}
    write_json(folder / "transformer" / "config.json", transformer)
    save_half(denoiser.transformer.state_dict(), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    encoder = {"architectures": ["T5EncoderModel"], "model_type": "t5", "torch_dtype": "float32"}
    write_json(folder / "text_encoder_2" / "config.json", {**encoder, **settings["text_encoder_2"]})
    models.look_back(denoiser.text_encoder_2)
    save_half(denoiser.text_encoder_2.state_dict(), folder / "text_encoder_2" / "model.safetensors")


def copy_first(folder: Path) -> None:
    """Copy the autoencoder and the CLIP tokenizer of the first pipeline."""
    for name in ("vae", "tokenizer"):
        shutil.copytree(TOY / name, folder / name, dirs_exist_ok=True)
    config = json.loads((TOY / "vae" / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "vae" / "config.json", {**config, "shift_factor": 0.0})  # which FluxPipeline adds


def pipeline_index() -> dict[str, Any]:
    """The content of `model_index.json`, without the version."""
    return {
        "_class_name": "FluxPipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def load_record(folder: Path) -> dict[str, Any]:
    """The training record of a pipeline's folder; empty if there is none."""
    path = folder / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
