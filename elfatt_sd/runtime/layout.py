"""Weights and activations of a denoiser with channels last, and norms that keep them so; taken back exactly."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.attention.softmax import TRITON, triton_takes


class Layout:
    """What was changed in a denoiser, and how it was before."""

    def __init__(self, module: Any) -> None:
        self._strides = [(weight, weight.stride()) for weight in module.parameters() if weight.ndim == 4]
        for weight, _ in self._strides:
            weight.data = weight.data.to(memory_format=torch.channels_last)
        # of blocks whose norms have SiLU behind them, and nothing in between: the block, its norms, name of the SiLU
        fused: list[tuple[Any, tuple[Any, ...], str]] = [
            (part, (part.norm1, part.norm2), "nonlinearity")
            for part in module.modules()
            if isinstance(part, ResnetBlock2D) and part.time_embedding_norm == "default"
        ]
        if hasattr(module, "conv_norm_out") and hasattr(module, "conv_act"):
            fused.append((module, (module.conv_norm_out,), "conv_act"))
        self._norms = [part for part in module.modules() if type(part) is nn.GroupNorm and part.affine]
        known = set(self._norms)
        fused = [each for each in fused if type(getattr(each[0], each[2])) is nn.SiLU and known.issuperset(each[1])]
        within = {norm for _, norms, _ in fused for norm in norms}
        self._silus = [(part, name, getattr(part, name)) for part, _, name in fused]
        for norm in self._norms:
            norm.forward = NormForward(norm, norm in within)  # type: ignore[method-assign, assignment]
        for part, name, _ in self._silus:
            setattr(part, name, _Done())

    def remove(self) -> None:
        for part, name, silu in self._silus:
            setattr(part, name, silu)
        for norm in self._norms:
            del norm.forward
        for weight, stride in self._strides:
            before = torch.empty_strided(weight.shape, stride, dtype=weight.dtype, device=weight.device)
            weight.data = before.copy_(weight.data)


class NormForward:
    """Stands in for the forward of a GroupNorm, perhaps with the SiLU behind it."""

    def __init__(self, norm: nn.GroupNorm, silu: bool) -> None:
        self.norm, self.silu = norm, silu
        self._is_there = importlib.util.find_spec("triton") is not None

    def __call__(self, given: Tensor) -> Tensor:
        norm = self.norm
        last = given.ndim == 4 and given.is_contiguous(memory_format=torch.channels_last)
        if self._is_there and last and triton_takes(TRITON, given, norm.weight, norm.bias):
            from elfatt_sd.runtime.norm import group_norm  # Triton is there for Linux alone

            return group_norm(given, norm.num_groups, norm.weight, norm.bias, norm.eps, self.silu)
        made = type(norm).forward(norm, given)
        return functional.silu(made) if self.silu else made


class _Done(nn.Module):
    """Stands in for a SiLU that norms have done; what is not an image, as the step's embedding, gets it here."""

    def forward(self, given: Tensor) -> Tensor:
        return given if given.ndim == 4 else functional.silu(given)
