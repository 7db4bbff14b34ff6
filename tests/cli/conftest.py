"""A model for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from support import tiny_pipelines as tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1.5 in miniature, as a directory."""
    folder = tmp_path_factory.mktemp("model")
    tiny.sd15(folder / "parts").save_pretrained(folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA for `model`, alone in its folder."""
    unet = tiny.unet()
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    weights = {f"unet.{name}": torch.ones(each.shape) for name, each in get_peft_model_state_dict(unet).items()}
    path = tmp_path_factory.mktemp("lora") / "style.safetensors"
    save_file(weights, path)
    return path
