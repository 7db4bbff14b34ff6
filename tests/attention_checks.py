"""Queries, keys and values, and every approximation of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elfatt_sd.attention.softmax import (
    agent_attention,
    block_attention,
    elfatt_attention,
    pool_agents,
    softmax_attention,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


LENGTHS = [1, 2, 7, 64, 100, 227, 257]


def qkv(tokens: int, heads: int = 4, size: int = 8, batch: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(3, batch, tokens, heads, size, generator=generator).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)


def approximations(q: Tensor, k: Tensor, v: Tensor, **kernel: Any) -> dict[str, Tensor]:
    return {
        "softmax": softmax_attention(q, k, v, **kernel),
        "block": block_attention(q, k, v, 30, **kernel),
        "agent": agent_attention(q, k, v, pool_agents(q, 6), value_shortcut=0.1, **kernel),
        "heads": elfatt_attention(q, k, v, agents=6, block_size=30, split="heads", **kernel),
        "channels": elfatt_attention(q, k, v, agents=6, block_size=30, split="channels", **kernel),
    }
