"""Attention to one's own compact cell, exactly, and to a stratified sample of the rest. Pure tensors.

Tokens in the order `spread` (`ordering.block_permutation`) are a matrix `[blocks, cells]`: a row is a block, one token
of every cell; a column is a cell, one token of every block. Both are views, so neither part needs a copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elfatt_sd.attention import GRID_FREE, GRID_LIMIT, block_attention
from elfatt_sd.errors import ElfattError


def cell_spread_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: int, *, scale: float | None = None, fp32_logits: bool = False
) -> Tensor:
    """Attend to the own cell and, through the own block, to all other cells.

    The block holds one token of each other cell, at random; it stands for the `blocks` tokens of its cell, so its
    logit gets `+ log(blocks)`. The query's own token counts once, in its cell. The two softmaxes are joined by their
    log-sum-exps, which fused kernels give.

    Args:
        q: queries `[batch, tokens, heads, head_dim]` in the order `spread`.
        k: keys, shaped as the queries.
        v: values, shaped as the queries.
        blocks: number of blocks, which is the number of tokens in a cell; it divides the tokens.
        scale: None is `head_dim ** -0.5`.
        fp32_logits: compute in float32 and round the result alone.

    Returns:
        As the queries.

    Raises:
        ElfattError: the blocks do not divide the tokens.
    """
    batch, tokens, heads, size = q.shape
    if blocks < 1 or tokens % blocks:
        raise ElfattError(f"blocks={blocks!r} is not accepted; give a divisor of the {tokens} tokens.")
    cells, dtype = tokens // blocks, q.dtype
    if fp32_logits:
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            return cell_spread_attention(q, k, v, blocks, scale=scale).to(dtype)
    if blocks == 1 or cells == 1:  # one block, or one cell, holds everything
        return block_attention(q, k, v, tokens, scale=scale).to(dtype)
    as_cells = (batch, blocks, cells * heads, size)
    near, near_sum = _attend([x.reshape(as_cells) for x in (q, k, v)], scale, None)
    own = torch.full((cells,), -math.inf, dtype=q.dtype, device=q.device).diag().nan_to_num(nan=0.0, neginf=-math.inf)
    as_blocks = (batch * blocks, cells, heads, size)
    far, far_sum = _attend([x.reshape(as_blocks) for x in (q, k, v)], scale, own)
    weight = torch.sigmoid(far_sum.view(q.shape[:3]) + math.log(blocks) - near_sum.view(q.shape[:3]))
    return torch.lerp(near.reshape(q.shape), far.reshape(q.shape), weight.unsqueeze(3).to(q.dtype)).to(dtype)


def _attend(qkv: list[Tensor], scale: float | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend inside batch and head.

    Args:
        qkv: queries, keys and values `[batch, tokens, heads, head_dim]`.
        scale: of the logits.
        bias: `[tokens, tokens]`, added to the logits.

    Returns:
        The result, shaped as the queries, and the log-sum-exp `[batch, tokens, heads]` in float32 at least.
    """
    if len(qkv[0]) > GRID_LIMIT and qkv[0].device.type not in GRID_FREE:
        parts = [
            _attend(list(part), scale, bias) for part in zip(*(torch.split(x, GRID_LIMIT) for x in qkv), strict=True)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([total for _, total in parts])
    q, k, v = (x.transpose(1, 2) for x in qkv)
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
    fused = {"cpu": _fused_cpu, "cuda": _fused_cuda}.get(q.device.type)
    if learning or fused is None or q.dtype == torch.float64:  # the log-sum-exp of fused kernels has no gradient
        precision = torch.promote_types(q.dtype, torch.float32)
        logits = q.to(precision) @ k.to(precision).transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        logits = logits if bias is None else logits + bias
        out, total = logits.softmax(dim=3).to(v.dtype) @ v, logits.logsumexp(dim=3)
    else:
        out, total = fused(q, k, v, bias, scale)
    return out.transpose(1, 2), total[:, :, : q.shape[2]].transpose(1, 2).contiguous()


def _fused_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    return out


def _fused_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if ampere and bias is None and q.dtype != torch.float32 and q.shape[3] % 8 == 0:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
        return out[0], out[1]
    if bias is not None:  # the kernel wants rows that start at multiples of 16 bytes
        room = -bias.shape[1] % 16
        bias = torch.nn.functional.pad(bias, (0, room))[:, : bias.shape[1]].expand(*q.shape[:2], -1, -1)
    out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out[0], out[1]
