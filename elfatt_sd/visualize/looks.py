"""What is seen in one layer and step: plain arrays, and the pure functions that make them of tensors.

Shapes: N tokens of the grid, M tokens that attention is given (fewer where tokens merge), H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elfatt_sd.attention.ordering import Grid
from elfatt_sd.devices import standard_normal
from elfatt_sd.errors import ElfattError

if TYPE_CHECKING:
    from elfatt_sd.attention.joint import Keys


@dataclass(frozen=True)
class Asked:
    """What to look at; see `watch`."""

    layer: str | None = None  # path of a layer, or a pattern; None takes the first one on the finest grid
    step: int | None = None  # from 1; None takes one of each phase
    # the point of the image whose query is followed, fractions of width and height
    at: tuple[float, float] = (0.5, 0.5)

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise ElfattError(f"step={self.step} is not accepted; give a whole number of at least 1.")
        if len(self.at) != 2 or not all(0 <= part <= 1 for part in self.at):
            raise ElfattError(f"at={self.at!r} is not accepted; give two fractions from 0 to 1, such as 0.5,0.5.")

    @classmethod
    def read(cls, layer: str | None, step: int | None, at: str) -> Self:
        """Build it from options; `at` is `X,Y`."""
        try:
            point = tuple(map(float, at.split(",")))
        except ValueError:
            point = ()
        return cls(layer, step, point)  # type: ignore[arg-type]


MOST_SETS = 512  # of keys: where queries see more different ones, these are not told apart
_SAME = 1e-4  # relative difference up to which two queries see the same keys
Labels = NDArray[np.int64]
Weights = NDArray[np.float64]
Attend = Callable[[Tensor, Tensor, Tensor, "Keys | None"], Tensor]


@dataclass(frozen=True)
class Grouping:
    """Tokens that have something in common.

    Attributes:
        what: they are, in a few words.
        labels: number `[N]` of each token's group.
    """

    what: str
    labels: Labels

    @property
    def sizes(self) -> Labels:
        """Number `[N]` of tokens in each token's group."""
        return np.bincount(self.labels)[self.labels]

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(np.unique(self.labels))


@dataclass(frozen=True)
class Heads:
    """Heads in which queries see the same keys.

    Attributes:
        numbers: of the heads, from 0.
        same_keys: number `[N]` of the set of keys that each query sees; None where all see the same, or there are more
            than `MOST_SETS` sets.
        weights: the query's weight `[N]` on each key, mean over the heads; it sums to 1 with that of the text.
        exact: what exact attention gives these heads, likewise.
        text: the query's weight on text and reference images.
        exact_text: what exact attention gives it.
    """

    numbers: tuple[int, ...]
    same_keys: Labels | None
    weights: Weights
    exact: Weights
    text: float = 0.0
    exact_text: float = 0.0

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Which keys `[N]` the query sees."""
        return np.not_equal(self.weights, 0)

    @property
    def name(self) -> str:
        """Which heads, in words; numbers begin with 1."""
        first, last = self.numbers[0] + 1, self.numbers[-1] + 1
        if last - first + 1 == len(self.numbers):
            return f"head {first}" if first == last else f"heads {first} to {last}"
        return f"heads {', '.join(str(number + 1) for number in self.numbers)}"


@dataclass(frozen=True)
class Look:
    """One self-attention layer in one step of a run.

    Attributes:
        method: name of the method.
        what: the layer does in this step, in words.
        layer: its path in the denoiser.
        step: from 0.
        steps: of the run.
        grid: of the layer's tokens.
        query: place of the query in the grid, row by row.
        heads: what the query sees, by groups of heads; empty where nothing is computed.
        merged: which tokens merge into one; None if none do.
        agents: which tokens are averaged into each agent, for each kind of agents.
        error: norm `[N]` of what the layer returned minus its exact output, for the same input, divided by the root
            mean square over tokens of the exact output's norm.
        relative_error: norm of that difference divided by the norm of the exact output, over all tokens.
    """

    method: str
    what: str
    layer: str
    step: int
    steps: int
    grid: Grid
    query: int
    heads: tuple[Heads, ...]
    merged: Grouping | None
    agents: tuple[Grouping, ...]
    error: Weights
    relative_error: float


def token_at(grid: Grid, at: tuple[float, float]) -> int:
    """Return the token at a point of the image, in the first frame of a video."""
    column, row = (min(int(part * size), size - 1) for part, size in zip(at, (grid.columns, grid.rows), strict=True))
    return row * grid.columns + column


def errors(given: Tensor, exact: Tensor) -> tuple[Weights, float]:
    """Compare a layer's output with the exact one."""
    given, exact = (each.cpu().double() for each in (given, exact))  # MPS has no float64
    difference = (given - exact).norm(dim=-1).numpy()
    scale = float(exact.norm()) or 1.0
    return difference * len(difference) ** 0.5 / scale, float(np.linalg.norm(difference)) / scale


def exact_weights(q: Tensor, k: Tensor, context: Keys | None = None) -> tuple[Weights, Weights]:
    """Return the weights of exact attention, `softmax(q k^T / sqrt(D))`."""
    keys = k if context is None else torch.cat([k, context.k[0]])
    logits = torch.einsum("hd,nhd->hn", q, keys) * q.shape[-1] ** -0.5
    if context is not None and context.mask is not None:
        mask = context.mask[:1]
        logits[:, len(k) :] += mask.to(q.dtype).log() if mask.dtype == torch.bool else mask
    weights = logits.cpu().double().softmax(-1).numpy()
    return weights[:, : len(k)], weights[:, len(k) :].sum(-1)


def weights_of(attend: Attend, q: Tensor, k: Tensor, context: Keys | None, query: int) -> tuple[Weights, Weights]:
    """Return the weights with which an attention mixes values into one query's output.

    Any attention is linear in the values: one that is 1 at one token and 0 elsewhere becomes that token's weight. The
    channels of a head are mixed alike, so that a call tells the weights of as many tokens.
    """
    (_, tokens, heads, size), nothing = q.shape, torch.zeros_like(q)
    text = None if context is None else context._replace(v=torch.zeros_like(context.v))
    image: list[Tensor] = []
    for start in range(0, tokens, size):
        places = torch.arange(start, min(start + size, tokens), device=q.device)
        ones = nothing.clone()
        ones[0, places, :, places - start] = 1
        image.append(attend(q, k, ones, text)[0, query, :, : len(places)])
    on_text = q.new_zeros(heads)
    if text is not None:
        on_text = attend(q, k, nothing, text._replace(v=torch.ones_like(text.v)))[0, query].mean(-1)
    return torch.cat(image, -1).cpu().double().numpy(), on_text.cpu().double().numpy()


def same_keys(attend: Attend, shape: Sequence[int], context: Keys | None, like: Tensor) -> list[Labels | None]:
    """Tell which queries see the same keys: with equal logits, these have the same mean of random values."""
    zeros, generator = like.new_zeros(tuple(shape)), torch.Generator().manual_seed(0)
    random = standard_normal(tuple(shape), generator).to(like)
    text = None if context is None else context._replace(k=torch.zeros_like(context.k), v=torch.zeros_like(context.v))
    ones = None if text is None else text._replace(v=torch.ones_like(text.v))
    with torch.no_grad():
        own = attend(zeros, zeros, torch.ones_like(zeros), ones) - 1  # values that are added to their token's output
        means = attend(zeros, zeros, random, text) - own * random
    return [_alike(means[0, :, head].cpu().double().numpy()) for head in range(means.shape[2])]


def _alike(rows: Weights) -> Labels | None:
    """Number equal rows `[M, D]`; None where too many differ."""
    tolerance = _SAME * (rows.std() or 1.0)
    labels = np.full(len(rows), -1)
    for number in range(MOST_SETS + 1):
        left = np.flatnonzero(labels < 0)
        if not len(left):
            return labels
        near = np.abs(rows[left] - rows[left[0]]).max(axis=1) <= tolerance
        labels[left[near]] = number
    return None


def head_groups(labels: Sequence[Labels | None]) -> list[tuple[int, ...]]:
    """Return the heads whose queries see the same sets of keys, together."""
    groups: dict[bytes, list[int]] = {}
    for head, each in enumerate(labels):
        groups.setdefault(b"" if each is None else each.tobytes(), []).append(head)
    return [tuple(heads) for heads in groups.values()]
