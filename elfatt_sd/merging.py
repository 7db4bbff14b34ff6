"""Token merging (ToMe): which tokens are merged, and the merge and unmerge themselves. Pure tensors.

Shapes: B batch, N tokens of the grid, M tokens after merging, C channels.
"""

from __future__ import annotations

import copy
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from elfatt_sd.devices import memory_of

# The similarity matrix is made in chunks, that stay in cache on a CPU and small beside the model on a GPU: elements of
# a chunk at the least, and the fewest rows that keep the matrix product fast; and the fraction of a GPU's memory.
_CHUNK = {"cpu": (1 << 21, 512), "gpu": (1 << 25, 128)}
_FRACTION = 1 / 64
_FOLD = 16


class Candidates(NamedTuple):
    """Each source token and the destination that it is most similar to, before it is settled how many are merged.

    Attributes:
        similarity: cosine similarity `[B, sources]`.
        nearest: index `[B, sources]` among the destinations.
        sources: grid positions `[sources]`, in raster order.
        destinations: grid positions `[destinations]`, in raster order.
        slot: place `[N]` of each grid token in `[sources, destinations]`.
    """

    similarity: Tensor
    nearest: Tensor
    sources: Tensor
    destinations: Tensor
    slot: Tensor


class Matching:
    """Groups of tokens that are merged into one each. Its indices are int32: layers and steps may keep them.

    Attributes:
        positions: grid position `[B, M]` of each merged token: its own where it stands alone, else its destination's.
    """

    def __init__(self, groups: Tensor, positions: Tensor) -> None:
        """Store which tokens are merged.

        Args:
            groups: index `[B, N]` of the merged token that each grid token belongs to.
            positions: see the attributes.
        """
        self.positions = positions.int()
        self._rows = (groups.int() + self._first_rows()).flatten()  # of each token's group in the flattened `[B * M]`
        self._members: tuple[Tensor, Tensor] | None = None

    @property
    def groups(self) -> Tensor:
        """Index `[B, N]` of the merged token that each grid token belongs to."""
        return self._rows.view(self.positions.shape[0], -1) - self._first_rows()

    @property
    def sizes(self) -> Tensor:
        """Number `[B, M]` of grid tokens in each group, in float32."""
        counts = torch.zeros(self.positions.numel(), device=self.positions.device)
        return counts.index_add_(0, self._rows, torch.ones_like(self._rows, dtype=counts.dtype)).view(
            self.positions.shape
        )

    def merge(self, x: Tensor) -> Tensor:
        """Average every group: `[B, N, C]` to `[B, M, C]`."""
        batch, tokens, channels = x.shape
        merged = self.positions.shape[1]
        rows = x.reshape(batch * tokens, channels)
        if x.dtype == torch.float16 and x.device.type == "cpu":
            rows = rows.float()  # on a CPU the sum before the mean is rounded to the dtype, where it can overflow
        if has_bags(x.device.type):
            if self._members is None:
                self._members = _members(self._rows, batch * merged)
            order, starts = self._members
            means = F.embedding_bag(order, rows, starts, mode="mean")
        else:
            zeros = rows.new_zeros(batch * merged, channels)
            means = zeros.index_add_(0, self._rows, rows) / self.sizes.view(-1, 1).to(rows.dtype)
        return means.view(batch, merged, channels).to(x.dtype)

    def unmerge(self, y: Tensor) -> Tensor:
        """Give every token its group's value: `[B, M, C]` to `[B, N, C]`."""
        batch, merged, channels = y.shape
        return y.reshape(batch * merged, channels).index_select(0, self._rows).view(batch, -1, channels)

    def copied(self) -> Matching:
        """Return a copy in memory of its own."""
        twin = copy.copy(self)
        twin.positions, twin._rows = self.positions.clone(), self._rows.clone()
        if self._members is not None:
            twin._members = self._members[0].clone(), self._members[1].clone()
        return twin

    def reordered(self, permutation: Tensor) -> Matching:
        """Return the same merge with the merged sequence permuted.

        Args:
            permutation: `[B, M]`; token i of the new sequence is token `permutation[:, i]` of this one.
        """
        new_place = torch.empty_like(permutation).scatter_(1, permutation, _arange_like(permutation))
        return Matching(new_place.gather(1, self.groups.long()), self.positions.gather(1, permutation))

    def _first_rows(self) -> Tensor:
        """First row `[B, 1]` of each batch entry in the flattened `[B * M]` merged tokens."""
        batch, merged = self.positions.shape
        return torch.arange(batch, device=self.positions.device, dtype=torch.int32)[:, None] * merged


def match_tokens(
    metric: Tensor,
    height: int,
    width: int,
    ratio: float,
    stride: int,
    choice: Tensor | None = None,
) -> Matching | None:
    """Match the most similar tokens, as ToMe for Stable Diffusion (Bolya and Hoffman, 2023) does.

    One token of every `stride x stride` cell is a destination, all others are sources, those right of and below the
    last whole cell too. The `int(ratio * N)` sources that are most similar (cosine) to a destination are merged into
    it. The merged sequence is `[sources that stay, by falling similarity, destinations]`.

    Args:
        metric: as for `find_candidates`.
        height: as for `find_candidates`.
        width: as for `find_candidates`.
        ratio: as for `match_candidates`.
        stride: as for `find_candidates`.
        choice: as for `find_candidates`.

    Returns:
        The matching, or None where nothing is to be merged.
    """
    if int(height * width * ratio) == 0:
        return None
    candidates = find_candidates(metric, height, width, stride, choice)
    return None if candidates is None else match_candidates(candidates, ratio)


@torch.no_grad()
def find_candidates(
    metric: Tensor, height: int, width: int, stride: int, choice: Tensor | None = None
) -> Candidates | None:
    """Find the destination that each source is most similar to: the part of ToMe that costs.

    Args:
        metric: `[B, N, C]`, what the similarity is measured on.
        height: rows of the grid.
        width: columns of the grid; `N = height * width`.
        stride: side of a cell.
        choice: `[cells]` in `[0, stride ** 2)`: which token of each cell is its destination, for the whole batch;
            None takes the first.

    Returns:
        The candidates; None where the grid has no whole cell, or nothing but destinations.
    """
    cells = (height // stride) * (width // stride)
    if cells in (0, height * width):
        return None
    sources, destinations, slot = _split_grid(height, width, stride, choice, metric.device)
    return Candidates(*_most_similar(metric, sources, destinations), sources, destinations, slot)


@torch.no_grad()
def match_candidates(candidates: Candidates, ratio: float) -> Matching | None:
    """Merge the most similar of the sources.

    Args:
        candidates: what `find_candidates` found.
        ratio: share of the tokens that are merged away, in [0, 1); at most all sources are.

    Returns:
        The matching, or None where nothing is to be merged.
    """
    similarity, nearest, sources, destinations, slot = candidates
    merged_away = min(len(sources), int(len(slot) * ratio))
    if merged_away == 0:
        return None
    staying = len(sources) - merged_away
    stay = similarity.topk(staying, dim=1, largest=False).indices.flip(1)
    source_groups = (nearest + staying).scatter(1, stay, _arange_like(stay))
    destination_groups = torch.arange(staying, staying + len(destinations), device=slot.device)
    groups = torch.cat([source_groups, destination_groups.expand(len(stay), -1)], dim=1).index_select(1, slot)
    positions = torch.cat([sources[stay], destinations.expand(len(stay), -1)], dim=1)
    return Matching(groups, positions)


def _split_grid(
    height: int, width: int, stride: int, choice: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the grid in sources and destinations, both in raster order.

    Returns:
        The positions of the sources and of the destinations, and the place `[N]` of each token in
        `[sources, destinations]`.
    """
    tokens, rows, columns = height * width, height // stride, width // stride
    corner = (torch.arange(rows, device=device)[:, None] * width + torch.arange(columns, device=device)) * stride
    destinations = corner.flatten()
    if choice is not None:
        choice = choice.to(device)
        destinations = destinations + choice // stride * width + choice % stride
    is_destination = torch.zeros(tokens, dtype=torch.int64, device=device).index_fill_(0, destinations, 1)
    before = is_destination.cumsum(0)  # destinations up to and including each token
    everything = torch.arange(tokens, device=device)
    sources = tokens - rows * columns
    slot = torch.where(is_destination.bool(), sources + before - 1, everything - before)
    place = torch.empty_like(everything).scatter_(0, slot, everything)
    return place[:sources], place[sources:], slot


def _most_similar(metric: Tensor, sources: Tensor, destinations: Tensor) -> tuple[Tensor, Tensor]:
    """Find each source's most similar destination.

    Returns:
        The cosine similarity and the index among the destinations, both `[B, sources]`.
    """
    # Not index_select: it copies the whole of a tensor that is not contiguous, as Stable Diffusion 1.5's here.
    keys = _normalise_(metric[:, destinations]).transpose(1, 2)
    similarity, nearest = [], []
    for some in torch.split(sources, rows_at_once(len(metric), len(destinations), metric.device)):
        values, place = _row_maximum(_normalise_(metric[:, some]) @ keys)
        similarity.append(values)
        nearest.append(place)
    return torch.cat(similarity, dim=1), torch.cat(nearest, dim=1)


def rows_at_once(batch: int, destinations: int, device: torch.device) -> int:
    """Return how many sources are compared with all destinations in one product."""
    elements, least_rows = _CHUNK["cpu" if device.type == "cpu" else "gpu"]
    wanted: int = max(elements, _elements(device))
    return max(least_rows, wanted // (destinations * batch))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _elements(device: torch.device) -> int:
    """Return the elements of a chunk, in half precision, that are a small fraction of a GPU's memory.

    Of all its memory, not of what is free: the same call shall always compute the same.
    """
    return 0 if device.type in ("cpu", "meta") else int(_whole_memory(device) * _FRACTION / 2)


@functools.cache
def _whole_memory(device: torch.device) -> float:
    return memory_of(device)[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_bags(kind: str) -> bool:
    """Tell whether a kind of device knows how to average bags of rows, as MPS does since PyTorch 2.15."""
    return kind in ("cpu", "cuda", "meta") or _tried_bags(kind)


@functools.cache
def _tried_bags(kind: str) -> bool:
    zero = torch.zeros(1, dtype=torch.int32, device=kind)
    try:
        F.embedding_bag(zero, torch.zeros(1, 1, device=kind), zero, mode="mean")
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def _row_maximum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return maximum and its index over the last dimension of `[B, rows, columns]`.

    On a CPU, `amax` runs on vectors and `max` with indices does not: the columns are folded in `_FOLD` before the
    index is searched.
    """
    batch, rows, columns = scores.shape
    if scores.device.type != "cpu" or columns % _FOLD:
        largest = scores.max(dim=2)
        return largest.values, largest.indices
    folded = scores.view(batch, rows, _FOLD, columns // _FOLD)
    values, place = folded.amax(dim=2).max(dim=2)
    fold = folded.gather(3, place[:, :, None, None].expand(-1, -1, _FOLD, 1)).squeeze(3).argmax(dim=2)
    return values, fold * (columns // _FOLD) + place


def _normalise_(x: Tensor) -> Tensor:
    """Divide by the L2 norm, in place; a zero vector stays zero."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.div_(norm.clamp_min(torch.finfo(x.dtype).tiny))


def _members(rows: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """List the tokens group by group.

    Args:
        rows: the group `[B * N]` of every token of the batch.
        groups: their number.

    Returns:
        The tokens sorted by group, and the start of each group in that list.
    """
    ordered, order = rows.sort()
    every = torch.arange(groups, device=rows.device, dtype=torch.int32)
    return order.int(), torch.searchsorted(ordered, every, out_int32=True)


def _arange_like(index: Tensor) -> Tensor:
    """Return 0, 1, 2, ... along the last dimension, in the shape of `index`."""
    return torch.arange(index.shape[-1], device=index.device).expand_as(index)
