"""Exact attention to one part of the keys, and parts joined by their log-sum-exps. Pure tensors.

`softmax(q [k1; k2]^T) [v1; v2] = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2)`, where o is what a part's own softmax gives and
l the logarithm of the sum of its exponentials, which fused kernels return. Parts need no common copy, and no mask.

Shapes: B batch, Q queries, K keys, H heads, D head size. q is `[B, Q, H, D]`, k and v are `[B, K, H, D]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from elfatt_sd.attention import GRID_FREE, GRID_LIMIT


class Part(NamedTuple):
    """What queries gather from one part of the keys.

    Attributes:
        mixed: the part's own softmax times its values, `[B, Q, H, D]`.
        total: log-sum-exp `[B, Q, H]` of its logits, in float32 at least.
    """

    mixed: Tensor
    total: Tensor

    def weighted(self, log_weight: Tensor | float) -> Part:
        """Let every key stand for `exp(log_weight)` of them."""
        return Part(self.mixed, self.total + log_weight)

    def joined(self, other: Part) -> Part:
        """Return the softmax over the keys of both."""
        weight = torch.sigmoid(other.total - self.total).unsqueeze(3).to(self.mixed.dtype)
        return Part(torch.lerp(self.mixed, other.mixed, weight), torch.logaddexp(self.total, other.total))

    def view(self, shape: tuple[int, ...] | torch.Size) -> Part:
        """Return the same queries arranged as `[B, Q, H, D]` of another shape."""
        return Part(self.mixed.reshape(shape), self.total.reshape(shape[:3]))


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, bias: Tensor | None = None) -> Part:
    """Attend to one part of the keys through a fused kernel; with gradients, through plain operations.

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: of the logits; None is `head_dim ** -0.5`.
        bias: added to the logits, `[B or 1, 1, Q or 1, K]`, in the queries' dtype. Its entries are finite
            (`excluded`): the kernels' log-sum-exps of a row of `-inf` are not.
    """
    for dim in (0, 2):  # CUDA's kernels put batch and heads in grid dimensions that have a limit
        if q.shape[dim] > GRID_LIMIT and q.device.type not in GRID_FREE:
            return _attend_in_turns(q, k, v, scale, bias, dim)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))  # the kernels' own calls do not check it
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    fused = {"cpu": _fused_cpu, "cuda": _fused_cuda}.get(q.device.type)
    if learning or fused is None or q.dtype == torch.float64:  # the log-sum-exp of fused kernels has no gradient
        fused = _unfused
    mixed, total = fused(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, scale)
    return Part(mixed.transpose(1, 2), total[:, :, : q.shape[1]].transpose(1, 2).contiguous())


def key_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a mask of keys `[B, K]`, True where one counts or what is added to its logits, into the bias of `attend`."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask.to(dtype).clamp(min=excluded(dtype))[:, None, None, :]
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, excluded(dtype))[:, None, None, :]


def excluded(dtype: torch.dtype) -> float:
    """Return the bias that excludes a key; finite, so that a part without any key weighs nothing and is not NaN."""
    return torch.finfo(dtype).min / 2


def _attend_in_turns(q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None, dim: int) -> Part:
    pieces = list(zip(*(torch.split(x, GRID_LIMIT, dim) for x in (q, k, v)), strict=True))
    biases = [bias] * len(pieces)
    if bias is not None and dim == 0:
        biases = list(torch.split(bias.expand(len(q), -1, -1, -1), GRID_LIMIT))
    parts = [attend(*piece, scale=scale, bias=own) for piece, own in zip(pieces, biases, strict=True)]
    return Part(torch.cat([part.mixed for part in parts], dim), torch.cat([part.total for part in parts], dim))


def _unfused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    precision = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(precision) @ k.to(precision).transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    logits = logits if bias is None else logits + bias
    return logits.softmax(dim=3).to(v.dtype) @ v, logits.logsumexp(dim=3)


def _fused_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    return out


def _fused_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if ampere and bias is None and q.dtype != torch.float32 and q.shape[3] % 8 == 0 and q.shape[3] <= 256:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
        return out[0], out[1]
    if bias is not None:  # the kernel wants rows that start at multiples of 16 bytes
        room = -bias.shape[3] % 16
        bias = functional.pad(bias, (0, room))[..., : bias.shape[3]].expand(*q.shape[:2], q.shape[2], -1)
    out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out[0], out[1]
