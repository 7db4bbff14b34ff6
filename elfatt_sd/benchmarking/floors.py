"""Layers left out: what no attention can beat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.families import SelfAttention
from elfatt_sd.families.joint import with_attention
from elfatt_sd.joint_processor import JointProcessor, joint_processor_for


class NoAttention:
    """A processor that leaves the layer out."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


def leave_out(layer: SelfAttention) -> None:
    """Let a layer that is as it was made give zeros."""
    layer.attention.set_processor(_no_joint_attention(layer.processor) if layer.joint else NoAttention())


def _no_joint_attention(original: Any) -> JointProcessor:
    processor = joint_processor_for(original)
    zeros = with_attention(type(original), _zeros)
    processor.apply = lambda attn, *args, **kwargs: zeros(original, attn, *args, **kwargs)  # type: ignore[method-assign]
    return processor


def _zeros(exact: Any, query: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(query)
