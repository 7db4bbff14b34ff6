"""How queries and keys of groups lie in a sequence: what tells sampled attention from that of cells."""

from __future__ import annotations

import math
from typing import NamedTuple


class Arrangement(NamedTuple):
    """Query i of group g is at the place `g * group + i * step` of an order; key j at `g * key_group + j * step`."""

    groups: int  # number of groups
    queries: int  # of each group at the most; places past the tokens are left out
    keys: int  # of each group
    group: int  # from one group's first query to the next one's
    key_group: int  # likewise for keys
    step: int  # from one query or key to the next
    # number of cells, where a query has seen its own: key j is of the cell `j mod cells`, as is query i; 0 for none
    cells: int = 0
    larger: int = 0  # cells with one token more
    log_larger: float = 0.0  # added to the logits of their keys

    @classmethod
    def sampled(cls, tokens: int, keys: int, groups: int) -> Arrangement:
        """Queries and keys are dealt to groups in turn; see `sampled.sampled_attention`."""
        return cls(groups, -(-tokens // groups), keys // groups, 1, 1, groups)

    @classmethod
    def cells_of(cls, tokens: int, cells: int, groups: int, weighted: bool) -> Arrangement:
        """Groups are runs of rows of a matrix `[places, cells]`; see `joint.cell_joint_attention`."""
        places, larger = divmod(tokens, cells)
        keys = places // groups * cells
        log_larger = math.log1p(1 / places) if weighted else 0.0
        return cls(groups, keys, keys, keys, keys, 1, cells, larger, log_larger)
