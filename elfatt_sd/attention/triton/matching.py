"""The destination that each source is most similar to, with a running maximum: no similarity matrix in memory.

What is computed is `merging.most_similar`: the greatest cosine similarity, and its place among the destinations; of
equal ones the first. Tokens are read where they are, and normalised in the kernel.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = {"BS": 64, "BD": 64, "BC": 32}
OPTIONS = {"num_warps": 4, "num_stages": 2}


@triton.jit  # type: ignore[untyped-decorator]
def kernel(metric, sources, destinations, similarity, nearest, batch_stride, token_stride, channel_stride, source_count,
           destination_count, channels, tiny, BS: tl.constexpr, BD: tl.constexpr,
           BC: tl.constexpr):  # fmt: skip
    """Find the nearest destination of a block of sources: program `(block, batch)`."""
    batch = tl.program_id(1)
    metric += batch.to(tl.int64) * batch_stride
    index, channel = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, BC)
    inside = index < source_count
    own = metric + tl.load(sources + index, mask=inside, other=0).to(tl.int64)[:, None] * token_stride
    most, place = tl.full([BS], -float("inf"), tl.float32), tl.zeros([BS], tl.int32)
    for begin in range(0, destination_count, BD):
        other_index = begin + tl.arange(0, BD)
        other_inside = other_index < destination_count
        row = tl.load(destinations + other_index, mask=other_inside, other=0).to(tl.int64)
        other = metric + row[None, :] * token_stride
        products = tl.zeros([BS, BD], tl.float32)
        own_square, other_square = tl.zeros([BS], tl.float32), tl.zeros([BD], tl.float32)
        for start in range(0, channels, BC):
            of = start + channel
            x = tl.load(own + of[None, :] * channel_stride, mask=inside[:, None] & (of < channels)[None, :], other=0.0)
            y = tl.load(other + of[:, None] * channel_stride, mask=(of < channels)[:, None] & other_inside[None, :], other=0.0)  # fmt: skip  # noqa: E501
            products += tl.dot(x, y, input_precision="ieee")
            own_square += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
            other_square += tl.sum(y.to(tl.float32) * y.to(tl.float32), 0)
        lengths = tl.maximum(tl.sqrt(own_square), tiny)[:, None] * tl.maximum(tl.sqrt(other_square), tiny)[None, :]
        cosine = tl.where(other_inside[None, :], products / lengths, -float("inf"))
        best = tl.max(cosine, 1)
        first = tl.min(tl.where(cosine == best[:, None], other_index[None, :], destination_count), 1)
        place = tl.where(best > most, first, place)
        most = tl.maximum(most, best)
    at = batch.to(tl.int64) * source_count + index
    tl.store(similarity + at, most.to(similarity.dtype.element_ty), mask=inside)
    tl.store(nearest + at, place.to(tl.int64), mask=inside)


def most_similar(metric: Tensor, sources: Tensor, destinations: Tensor) -> tuple[Tensor, Tensor]:
    """Find each source's most similar destination."""
    shape = len(metric), len(sources)
    similarity = torch.empty(shape, dtype=metric.dtype, device=metric.device)
    nearest = torch.empty(shape, dtype=torch.int64, device=metric.device)
    grid = (-(-len(sources) // SIZES["BS"]), len(metric))
    launch: Any = kernel[grid]
    numbers = (*metric.stride(), len(sources), len(destinations), metric.shape[2], torch.finfo(torch.float32).tiny)
    launch(metric, sources, destinations, similarity, nearest, *numbers, **SIZES, **OPTIONS)
    return similarity, nearest
