"""Write trained parts as a diffusers directory that old and new libraries load, with its classifier and model card."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.toy import models
from tools.toy.card import RECORD, training_folder, write_card

DIFFUSERS_VERSION = "0.32.1"  # the oldest release whose settings these files use


def export(
    sizes: models.Sizes,
    parts: dict[str, nn.Module],
    others: dict[str, nn.Module],
    training: dict[str, Any],
    out: Path,
    seed: int,
    device: str,
) -> Path:
    """Write `out/pipeline`, `out/weights-classifier` and `out/weights-training`, the last with the training record.

    Args:
        sizes: the networks' sizes.
        parts: trained `vae`, `unet` and `text_encoder`.
        others: what is not part of the pipeline: the `classifier`, and what further `training` needs.
        training: for the record: the `stages`, what `train` returned by name, and `notes` in words.
        out: the folder to write into.
        seed: the recipe's seed, for the record.
        device: where training ran, for the record.

    Returns:
        The pipeline's folder.
    """
    folder, settings = out / "pipeline", models.configurations(sizes)
    common = {"_diffusers_version": DIFFUSERS_VERSION}
    for name, kind in (("unet", "UNet2DConditionModel"), ("vae", "AutoencoderKL")):
        models.write_json(folder / name / "config.json", {"_class_name": kind, **common, **settings[name]})
        save_half(parts[name].state_dict(), folder / name / "diffusion_pytorch_model.safetensors")
    scheduler = {"_class_name": "PNDMScheduler", **common, **settings["scheduler"]}
    models.write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    save_text_encoder(parts["text_encoder"], settings["text_encoder"], folder / "text_encoder")
    models.save_tokenizer(folder / "tokenizer")
    models.write_json(folder / "model_index.json", {**pipeline_index(), **common})
    for name, module in others.items():
        save_half(module.state_dict(), out / f"weights-{name}" / f"{name}.safetensors")
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    record = {**environment(), "device": device, "seed": seed, "parameters": counts, **training}
    (training_folder(folder) / RECORD).write_text(
        json.dumps(record) + "\n", encoding="utf-8"
    )  # long curves, in one line
    write_card(folder, record)
    return folder


def pipeline_index() -> dict[str, Any]:
    """The content of `model_index.json`, without the version."""
    return {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def save_text_encoder(model: nn.Module, settings: dict[str, Any], folder: Path) -> None:
    """Write the text encoder under the names that every transformers release reads, with `text_model.` in front."""
    config = {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        "hidden_act": "quick_gelu",
        "torch_dtype": "float32",
        **settings,
    }
    models.write_json(folder / "config.json", config)
    state = {"text_model." + name.removeprefix("text_model."): value for name, value in model.state_dict().items()}
    state.pop("text_model.embeddings.position_ids", None)
    save_half(state, folder / "model.safetensors")


def save_half(state: dict[str, Tensor], path: Path) -> None:
    """Write a state in float16."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().half().contiguous() for name, value in state.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def load_half(module: nn.Module, folder: Path) -> None:
    """Load what `save_half` wrote as the only safetensors file of a folder.

    Raises:
        ElfattError: if there is no such file.
    """
    from safetensors.torch import load_file

    from elfatt_sd.errors import ElfattError

    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ElfattError(f"{folder} holds {len(files)} safetensors files; accepted is a folder that this recipe wrote")
    state = {name: value.float() for name, value in load_file(files[0]).items()}
    if not any(name.startswith("text_model.") for name in module.state_dict()):
        state = {name.removeprefix("text_model."): value for name, value in state.items()}
    module.load_state_dict(state)


def load_record(folder: Path) -> dict[str, Any]:
    """The training record of a pipeline's folder; empty if there is none."""
    path = training_folder(folder) / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def environment() -> dict[str, Any]:
    """Date, machine and versions for the record."""
    cores = f"{os.cpu_count()} {platform.machine()} cores"
    machine = f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else cores
    packages = {name: version(name) for name in ("torch", "diffusers", "transformers", "safetensors")}
    return {"date": datetime.date.today().isoformat(), "machine": machine, "packages": packages}
