"""Merged tokens keep the rotation of their destination."""

from __future__ import annotations

import pytest
import torch

from elfatt_sd.merging import match_tokens
from elfatt_sd.rotary import merged_rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_rows_of_destinations(dtype: torch.dtype, first: int, last: int) -> None:
    metric = torch.randn(2, 24, 5, generator=torch.Generator().manual_seed(0))
    matching = match_tokens(metric, 4, 6, 0.5, 2)
    assert matching is not None
    rows = torch.randn(first + 24 + last, 4, dtype=dtype)
    chosen = merged_rotation(rows, matching.positions, first, last)
    for image in range(2):
        wanted = torch.cat(
            [rows[:first], rows[first : first + 24][matching.positions[image].long()], rows[first + 24 :]]
        )
        assert torch.equal(chosen[image], wanted)
    assert torch.equal(merged_rotation(rows.expand(2, -1, -1), matching.positions, first, last), chosen)


def test_nothing_merged_is_nothing_moved() -> None:
    rows = torch.randn(7, 4)
    assert torch.equal(merged_rotation(rows, torch.arange(4).expand(1, -1), first=2, last=1)[0], rows)
