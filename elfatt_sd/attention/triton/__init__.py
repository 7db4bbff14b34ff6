"""Triton kernels, `attention_backend="triton"`: sampled keys, cells with samples, matching. Not timed on a GPU yet."""

from __future__ import annotations

import torch
from torch import Tensor

from elfatt_sd.devices import interprets_triton

BACKEND = "triton"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def take(backend: str, *tensors: Tensor) -> bool:
    """Tell whether a backend is Triton, and takes such tensors; for others, and for gradients, PyTorch attends."""
    return backend == BACKEND and all(
        (each.is_cuda or interprets_triton())
        and each.dtype in _DTYPES
        and not (torch.is_grad_enabled() and each.requires_grad)
        for each in tensors
    )
