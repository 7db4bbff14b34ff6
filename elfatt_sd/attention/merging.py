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

from elfatt_sd.attention.ordering import inverse_permutation

# The similarity matrix is made in chunks, which stay in cache on a CPU, and are small and fill the device on a GPU: the
# elements of a chunk, and the fewest rows that keep the matrix product fast.
_CHUNK = {"cpu": (1 << 21, 512), "gpu": (1 << 27, 128)}
_FOLD = 16
BAGS = ("cpu", "cuda", "meta")  # devices that average bags of rows


class Split(NamedTuple):
    """Which tokens of a grid are destinations, and which are sources."""

    places: Tensor  # grid positions `[N]` of the sources and then of the destinations, each in raster order
    slot: Tensor  # place `[N]` of each grid token among these
    sources: int  # number of sources

    @classmethod
    def of(cls, places: Tensor, destinations: int) -> Split:
        """Take apart what `split_grid` made."""
        place, slot = places.chunk(2)
        return cls(place, slot, len(place) - destinations)


class Candidates(NamedTuple):
    """Each source token and the destination that it is most similar to, before it is settled how many are merged."""

    similarity: Tensor  # cosine similarity `[B, sources]`
    nearest: Tensor  # index `[B, sources]` among the destinations
    split: Split  # which tokens these are


class Matching:
    """Groups of tokens that are merged into one each; int32, as layers and steps may keep them.

    `rows` `[B, N]` is each token's group in the flattened `[B * M]` merged tokens; `positions` `[B, M]` that of each
    merged token in the grid: its own where it stands alone, else its destination's.
    """

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self.positions = positions.int()
        self._rows = rows.int().flatten()
        self._members: tuple[Tensor, Tensor] | None = None

    @property
    def groups(self) -> Tensor:
        """Index `[B, N]` of the merged token that each grid token belongs to."""
        return self._rows.view(self.positions.shape[0], -1) - _rows_like(self.positions)[:, :1]

    @property
    def sizes(self) -> Tensor:
        """Number `[B, M]` of grid tokens in each group, in float32."""
        counts = torch.zeros(self.positions.numel(), dtype=torch.float32, device=self.positions.device)
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
        if x.device.type in BAGS:
            if self._members is None:  # the tokens sorted by group, and the start of each group in that list
                ordered, order = self._rows.sort()
                starts = torch.searchsorted(ordered, _numbers(batch * merged, x.device), out_int32=True)
                self._members = order.int(), starts
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
        """Return the same merge with merged token `permutation[:, i]` at place i, `[B, M]`."""
        groups = inverse_permutation(permutation).gather(1, self.groups.long())
        return Matching(groups + _rows_like(permutation)[:, :1], self.positions.gather(1, permutation))


@torch.no_grad()
def find_candidates(metric: Tensor, split: Split) -> Candidates:
    """Find the destination that each source is most similar to (cosine) in `[B, N, C]`: the part of ToMe that costs."""
    places = split.places.long()
    sources, destinations = places[: split.sources], places[split.sources :]
    return Candidates(*most_similar(metric, sources, destinations), split)


@torch.no_grad()
def match_candidates(candidates: Candidates, ratio: float) -> Matching | None:
    """Merge the most similar of the sources: this fraction of the tokens in [0, 1), at most all; None for none.

    The merged sequence is `[sources that stay, by falling similarity, destinations]`, as in ToMe for Stable Diffusion
    (Bolya and Hoffman, 2023).
    """
    similarity, nearest, (places, slot, sources) = candidates
    merged_away = min(sources, int(len(slot) * ratio))
    if merged_away == 0:
        return None
    staying = sources - merged_away
    stay = similarity.topk(staying, dim=1, largest=False).indices.flip(1)
    positions = torch.cat([places[:sources][stay], places[sources:].expand(len(stay), -1)], dim=1)
    rows = _rows_like(positions).long()
    of_sources = (nearest + rows[:, staying : staying + 1]).scatter_(1, stay, rows[:, :staying])
    return Matching(torch.cat([of_sources, rows[:, staying:]], dim=1).index_select(1, slot), positions)


def split_grid(
    height: int, width: int, stride: int, choice: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Split a grid in sources and destinations, both in raster order; see `Split.of`.

    One token of every `stride x stride` cell is a destination; tokens beyond the last whole cell are sources.
    `choice` `[..., cells]` in `[0, stride ** 2)` tells which token of each cell is its destination, for the whole
    batch; None takes the first. The result is int32 `[..., 2 N]`: the positions of the sources, those of the
    destinations, and the place of each token among these.
    """
    device = device if choice is None else choice.device
    tokens, rows, columns = height * width, height // stride, width // stride
    corner = (torch.arange(rows, device=device)[:, None] * width + torch.arange(columns, device=device)) * stride
    destinations = corner.flatten()
    if choice is not None:
        destinations = destinations + choice // stride * width + choice % stride
    shape = (*destinations.shape[:-1], tokens)
    is_destination = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(-1, destinations, True)
    before = is_destination.cumsum(-1, dtype=torch.int32)  # destinations up to and including each token
    every = torch.arange(tokens, dtype=torch.int32, device=device).expand(shape)
    slot = torch.where(is_destination, before + (tokens - rows * columns - 1), every - before)
    return torch.cat([torch.empty_like(slot).scatter_(-1, slot.long(), every), slot], -1)


def most_similar(metric: Tensor, sources: Tensor, destinations: Tensor) -> tuple[Tensor, Tensor]:
    """Find each source's most similar destination: the cosine similarity and the index, both `[B, sources]`."""
    # Not index_select: it copies the whole of a tensor that is not contiguous, as Stable Diffusion 1.5's here.
    keys = _normalise_(metric[:, destinations]).transpose(1, 2)
    similarity, nearest = [], []
    for some in torch.split(sources, rows_at_once(len(metric), len(destinations), metric.device)):
        values, place = _row_maximum(_normalise_(metric[:, some]) @ keys)
        similarity.append(values)
        nearest.append(place)
    return tuple(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in (similarity, nearest))  # type: ignore[return-value]


def rows_at_once(batch: int, destinations: int, device: torch.device) -> int:
    """Return how many sources are compared with all destinations in one product."""
    elements, least_rows = _CHUNK["cpu" if device.type == "cpu" else "gpu"]
    return max(least_rows, elements // (destinations * batch))


def _row_maximum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return maximum and its index over the last dimension of `[B, rows, columns]`."""
    batch, rows, columns = scores.shape
    if scores.device.type != "cpu" or columns % _FOLD:
        largest = scores.max(dim=2)
        return largest.values, largest.indices
    # On a CPU, `amax` runs on vectors and `max` with indices does not: fold the columns before searching the index.
    folded = scores.view(batch, rows, _FOLD, columns // _FOLD)
    values, place = folded.amax(dim=2).max(dim=2)
    fold = folded.gather(3, place[:, :, None, None].expand(-1, -1, _FOLD, 1)).squeeze(3).argmax(dim=2)
    return values, fold * (columns // _FOLD) + place


def _normalise_(x: Tensor) -> Tensor:
    """Divide by the L2 norm, in place; a zero vector stays zero."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.div_(norm.clamp_min(torch.finfo(x.dtype).tiny))


def _rows_like(positions: Tensor) -> Tensor:
    """Return the place of every merged token among those of the batch, in the shape `[B, M]` of their positions."""
    return _numbers(positions.numel(), positions.device).view(positions.shape)


def _numbers(count: int, device: torch.device) -> Tensor:
    """Return 0, 1, 2, ..., int32; read only."""
    compiling = torch.compiler.is_compiling()
    return torch.arange(count, dtype=torch.int32, device=device) if compiling else _kept_numbers(count, device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept may be used where gradients are wanted
def _kept_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)
