"""What a small UNet is given."""

from __future__ import annotations

import tiny_pipelines as tiny
import torch
from checks import generator
from torch import Tensor

ROWS = COLUMNS = 16


def inputs(dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Tensor, Tensor]:
    sample = torch.randn(batch, 4, ROWS, COLUMNS, generator=generator(), dtype=torch.float64)
    text = torch.randn(batch, 5, tiny.TEXT_WIDTH, generator=generator(), dtype=torch.float64)
    return sample.to(dtype), text.to(dtype)
