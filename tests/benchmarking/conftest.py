"""Models small enough for a test."""

from __future__ import annotations

import pytest
import torch
from support import tiny_pipelines as tiny

from elfatt_sd import benchmarking
from elfatt_sd.benchmarking import Model, fill
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families.shapes import Shape, empty_model

_XL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64}
SMALL, SMALL_XL = (Shape("UNet2DConditionModel", {**tiny.unet().config, **more}, {}, channels=4) for more in ({}, _XL))


@pytest.fixture(scope="session")
def model() -> Model:
    """A UNet with seven self-attention layers on three levels and random weights."""
    return Model(fill(empty_model(SMALL), torch.device("cpu"), torch.float32), 8)


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named shapes are small ones."""
    monkeypatch.setattr(benchmarking, "SHAPES", {"sd15": SMALL, "sdxl": SMALL_XL})
    small = {"block_out_channels": (8,) * 4, "norm_num_groups": 4, "layers_per_block": 1}
    monkeypatch.setattr(benchmarking, "VAE", benchmarking.VAE | small)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 32 channels."""
    monkeypatch.setattr(benchmarking, "CHANNELS", 32)
    monkeypatch.setattr(benchmarking, "HEADS", 4)


@pytest.fixture
def methods() -> list[PatchConfig]:
    """Merging, two phases, and exact early steps with two levels."""
    return [
        PatchConfig.preset("tome"),
        PatchConfig.preset("elfatt", block_size=32, agents=8),
        PatchConfig("fast", (Phase(0.2), Phase(1.0, "block", block_order="spread", block_size=32)), levels=2),
    ]
