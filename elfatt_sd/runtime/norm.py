"""A Triton GroupNorm, with SiLU behind it, of images whose channels lie last: PyTorch's gives channels first on CUDA.

Triton is there for Linux alone. Not timed on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = {"BR": 64, "BC": 64}  # rows (pixels) in a run, and channels, of one program
RUNS = 32  # of which a program joins the means at once
OPTIONS = {"num_warps": 8, "num_stages": 2}


@triton.jit  # type: ignore[untyped-decorator]
def run_kernel(x, means, squares, rows, channels, BR: tl.constexpr, BC: tl.constexpr):
    """Find each channel's mean in a run of rows, and its sum of squares from that: program `(run, channels, image)`."""
    run, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, channel = run * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    at = (image * rows + row[:, None]) * channels + channel[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / tl.minimum(rows - run * BR, BR).to(tl.float32)
    apart = tl.where(inside, values - mean[None, :], 0.0)
    out = (image * tl.num_programs(0) + run) * channels + channel
    tl.store(means + out, mean, mask=channel < channels)
    tl.store(squares + out, tl.sum(apart * apart, 0), mask=channel < channels)


@triton.jit  # type: ignore[untyped-decorator]
def group_kernel(means, squares, mean_of, scale_of, rows, channels, runs, size, eps, BR: tl.constexpr,
                 BK: tl.constexpr, BG: tl.constexpr):  # fmt: skip
    """Join the runs of a group's channels: program `(group, image)`."""
    group, image, channel = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BG)
    whole = (rows * size).to(tl.float32)
    near = tl.load(means + image * runs * channels + group * size)  # so near the mean that squares lose nothing
    moved, total = tl.zeros([BK, BG], tl.float32), tl.zeros([BK, BG], tl.float32)
    for begin in range(0, runs, BK):
        run = begin + tl.arange(0, BK)
        inside = (run < runs)[:, None] & (channel < size)[None, :]
        at = (image * runs + run[:, None]) * channels + group * size + channel[None, :]
        count = tl.minimum(rows - run * BR, BR).to(tl.float32)[:, None]
        apart = tl.where(inside, tl.load(means + at, mask=inside, other=0.0) - near, 0.0)
        moved += apart * count
        total += tl.load(squares + at, mask=inside, other=0.0) + apart * apart * count
    step = tl.sum(tl.sum(moved, 1), 0) / whole
    place = image * tl.num_programs(0) + group
    tl.store(mean_of + place, near + step)
    tl.store(scale_of + place, 1 / tl.sqrt(tl.sum(tl.sum(total, 1), 0) / whole - step * step + eps))


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(x, out, weight, bias, mean_of, scale_of, rows, channels, groups, size, SILU: tl.constexpr,
                BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Normalise a run of rows: program `(run, channels, image)`."""
    image = tl.program_id(2).to(tl.int64)
    row, channel = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < channels
    inside = (row < rows)[:, None] & known[None, :]
    at = (image * rows + row[:, None]) * channels + channel[None, :]
    place = image * groups + channel // size
    scale = tl.load(scale_of + place, mask=known, other=0.0) * tl.load(weight + channel, mask=known, other=0.0)
    moved = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - tl.load(mean_of + place, mask=known, other=0.0)
    made = moved * scale[None, :] + tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    if SILU:
        made = made * tl.sigmoid(made)
    tl.store(out + at, made.to(out.dtype.element_ty), mask=inside)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool) -> Tensor:
    """Normalise groups of channels of `[batch, channels, height, width]` with channels last; sums are in float32."""
    batch, channels, height, width = x.shape
    rows, size, runs = height * width, channels // groups, -(-height * width // SIZES["BR"])
    out = torch.empty_like(x)
    means, squares = torch.empty(2, batch, runs, channels, dtype=torch.float32, device=x.device)
    mean_of, scale_of = torch.empty(2, batch, groups, dtype=torch.float32, device=x.device)
    grid = (runs, -(-channels // SIZES["BC"]), batch)
    begin: Any = run_kernel[grid]
    join: Any = group_kernel[(groups, batch)]
    end: Any = norm_kernel[grid]
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton starts on the current device
        begin(x, means, squares, rows, channels, **SIZES, **OPTIONS)
        join(means, squares, mean_of, scale_of, rows, channels, runs, size, eps, **joined(size), **OPTIONS)
        end(x, out, weight, bias, mean_of, scale_of, rows, channels, groups, size, SILU=silu, **SIZES, **OPTIONS)
    return out


def joined(size: int) -> dict[str, int]:
    return {"BR": SIZES["BR"], "BK": RUNS, "BG": 1 << (size - 1).bit_length()}
