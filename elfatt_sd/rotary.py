"""Rotary embedding of merged tokens. Pure tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def merged_rotation(rows: Tensor, positions: Tensor, first: int = 0, last: int = 0) -> Tensor:
    """Give each merged token the rotation of its destination (`merging.Matching.positions`).

    Queries and keys are merged before they are rotated, so that those of one group are at one place.

    Args:
        rows: cosines or sines `[S, D]`, or complex rotations `[S, D / 2]`, of a whole sequence; `[B, S, ...]` if its
            images differ.
        positions: grid position `[B, M]` of each merged token.
        first: tokens before the image, which keep their rows.
        last: tokens after it, which keep theirs.

    Returns:
        `[B, first + M + last, ...]`.
    """
    batch, length = positions.shape[0], rows.shape[-2]
    kept = torch.arange(length, device=positions.device).expand(batch, -1)
    chosen = torch.cat([kept[:, :first], positions.long() + first, kept[:, length - last :]], dim=1)
    if rows.ndim == 2:
        return rows[chosen]
    return rows.gather(1, chosen.unsqueeze(2).expand(-1, -1, rows.shape[2]))
