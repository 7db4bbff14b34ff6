"""ELFATT as a trainable attention for vision transformers; needs PyTorch alone."""

from __future__ import annotations

from elfatt_sd.nn.attention import ElfattAttention
from elfatt_sd.nn.backbone import Pyramid, pyramid
from elfatt_sd.nn.replace import replace_attention

__all__ = ["ElfattAttention", "Pyramid", "pyramid", "replace_attention"]
