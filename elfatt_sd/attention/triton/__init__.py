"""Triton kernels, `attention_backend="triton"`: sampled keys, cells with samples, matching. Not timed on a GPU yet."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from elfatt_sd.errors import ElfattError

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "triton"
_DTYPES = ("torch.float16", "torch.bfloat16", "torch.float32")


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_there() -> None:
    """Check that kernels can run on this machine."""
    from elfatt_sd.devices import accelerators

    if importlib.util.find_spec("triton") is None:
        raise ElfattError("attention_backend='triton' needs triton, which is not installed: pip install triton.")
    if not (interpreted() or "cuda" in accelerators()):
        raise ElfattError("attention_backend='triton' needs a GPU with CUDA; leave it out, or give 'native'.")


def take(backend: str, *tensors: Tensor) -> bool:
    """Tell whether a backend is Triton, and takes such tensors; for others, and for gradients, PyTorch attends."""
    if backend != BACKEND:
        return False
    import torch

    return all(
        (each.is_cuda or interpreted())
        and str(each.dtype) in _DTYPES
        and not (torch.is_grad_enabled() and each.requires_grad)
        for each in tensors
    )
