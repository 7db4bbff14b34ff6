"""Attention to a stratified random sample of the image. Pure tensors.

Every query sees the same number of keys, one from each compact cell of the grid, so its cost does not grow with the
image. Keys and values are projected for the sampled tokens alone. Queries are dealt to groups by their position
modulo the number of groups, which is a view that turns groups into heads; `ordering.lattice_order` puts the queries
in an order that spreads each group over the image. A relative is ToDo (arXiv:2402.13573), where all queries share
a fixed coarse grid of keys and values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from elfatt_sd.attention import softmax_attention


def sampled_attention(q: Tensor, k: Tensor, v: Tensor, groups: int, **kernel: Any) -> Tensor:
    """Softmax attention of each group of queries to its own sample: `softmax(s q_n K_g^T) V_g`, `g = n mod groups`.

    Args:
        q: queries `[batch, tokens, heads, head_dim]`; a copy is made where the groups do not divide them.
        k: keys `[batch, samples * groups, heads, head_dim]`; those of group g are at g, g + groups, ...
        v: values, shaped as the keys.
        groups: divides the keys.
        **kernel: `scale`, `fp32_logits`, `backend` of `softmax_attention`.

    Returns:
        As the queries.
    """
    batch, tokens, heads, size = q.shape
    missing = -tokens % groups
    padded = functional.pad(q, (0, 0, 0, 0, 0, missing)) if missing else q
    grouped = (batch, -1, groups * heads, size)
    mixed = softmax_attention(*(x.reshape(grouped) for x in (padded, k, v)), **kernel).reshape(padded.shape)
    return mixed[:, :tokens]
