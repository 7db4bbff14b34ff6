"""Attention to one's own compact cell, exactly, and to a stratified sample of the rest. Pure tensors.

Tokens in the order `spread` (`ordering.block_permutation`) are in cell order (`ordering.cell_order`): a matrix
`[blocks, cells]`, whose rows are groups of one token of every cell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elfatt_sd.errors import ElfattError
from elfatt_sd.joint import cell_joint_attention


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
    tokens = q.shape[1]
    if blocks < 1 or tokens % blocks:
        raise ElfattError(f"blocks={blocks!r} is not accepted; give a divisor of the {tokens} tokens.")
    cells, dtype = tokens // blocks, q.dtype
    if fp32_logits:
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            return cell_spread_attention(q, k, v, blocks, scale=scale).to(dtype)
    return cell_joint_attention(q, k, v, cells, blocks, scale=scale)
