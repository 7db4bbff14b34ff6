"""Models small enough for a test."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from elfatt_sd import benchmarking
from elfatt_sd.benchmarking import Model, fill
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families.shapes import Shape, empty_model

_SMALL: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 2,
    "cross_attention_dim": 16,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
_SMALL_XL: dict[str, Any] = {
    **_SMALL,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}
SMALL, SMALL_XL = (Shape("UNet2DConditionModel", config, {}, channels=4) for config in (_SMALL, _SMALL_XL))


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> None:
    """What earlier tests imported and compiled is passed over; see `pytest_collection_finish`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model() -> Model:
    """A UNet with two levels, seven self-attention layers and random weights."""
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
