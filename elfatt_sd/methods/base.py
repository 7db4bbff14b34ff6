"""What an attention is: its own settings, what it draws, what it computes, what that costs, and how it is told.

Shapes: `tokens` is `[batch, tokens, channels]`; q, k, v and what `attend` returns are
`[batch, tokens, heads, head_dim]`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from elfatt_sd import errors
from elfatt_sd.attention.joint import Keys
from elfatt_sd.attention.ordering import Grid
from elfatt_sd.errors import ElfattError

LEAST_KEYS = 32  # of a query, in what `elfatt_sd.tune` tries


@dataclass(frozen=True)
class Merge:
    """Token merging before attention (ToMe for Stable Diffusion, Bolya and Hoffman, arXiv:2303.17604).

    The most similar tokens, by cosine similarity, are replaced by their mean; the output is copied back to all of them.

    Attributes:
        ratio: fraction of the tokens that are merged; 0 merges nothing.
        stride: one destination token for each `stride x stride` cell of the grid.
    """

    ratio: float = dataclasses.field(default=0.0, metadata={"open_high": True})
    stride: int = dataclasses.field(default=2, metadata={"low": 2, "high": 64})

    def __post_init__(self) -> None:
        errors.fields(self)

    def most(self, grid: Grid) -> int:
        """Return how many tokens can be merged at most: all but the destinations; none where there is none."""
        destinations = self.destinations(grid)
        return grid.tokens - destinations if destinations else 0

    def destinations(self, grid: Grid) -> int:
        """Return the number of destination tokens."""
        return (grid.rows // self.stride) * (grid.columns // self.stride)

    def merged(self, grid: Grid, ratio: float | None = None) -> int:
        """Return how many tokens are merged away, at its own ratio or at another one."""
        return min(self.most(grid), int(grid.tokens * (self.ratio if ratio is None else ratio)))

    def kept(self, grid: Grid) -> int:
        """Return how many tokens attention sees."""
        return grid.tokens - self.merged(grid)


class Size(NamedTuple):
    """A layer's size, for its cost."""

    grid: Grid  # of all its tokens
    tokens: int  # those that attention sees, after merging
    channels: int  # over all heads
    context: int = 0  # tokens of text or of reference images that are attended to as well

    def projections(self, queries: float, keys: float) -> float:
        """Return the multiply-adds of four projections: of queries and outputs, of keys and values."""
        return 2 * (queries + keys) * self.channels**2

    def attention(self, keys: float) -> int:
        """Return those of attention itself, where every token sees so many keys, and the context."""
        return round(2 * self.tokens * (keys + self.context) * self.channels)


@dataclass(eq=False)
class Draws:
    """Random numbers of one layer in one step. They depend on `(seed, step, layer)` alone and move no global state."""

    seed: int
    step: int  # the first of those that draw the same
    layer: int
    device: torch.device
    shared: int = 1  # number of steps that draw the same; 0 is all of them
    ahead: Any = None  # `runtime.memory.RunDraws`, with what is drawn for later steps too; None is this step alone
    anew: bool = False  # whether what was prepared holds for one step alone

    def __post_init__(self) -> None:
        self.step = self.step // self.shared * self.shared if self.shared else 0

    @property
    def once(self) -> Draws:
        """The same numbers in all steps of a run."""
        return Draws(self.seed, 0, self.layer, self.device, 0, self.ahead)

    def at(self, step: int) -> Draws:
        """The numbers of another step."""
        return Draws(self.seed, step, self.layer, self.device, self.shared)

    def uniform(self, what: str, count: int) -> Tensor:
        """Return `count` numbers in [0, 1), on the CPU; other words in `what` give other numbers."""
        key = f"{self.seed}/{self.step}/{self.layer}/{what}".encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big"))
        return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")

    def upload(self, drawn: Tensor) -> Tensor:
        """Move a tensor from the CPU to the layer's device, without waiting for it."""
        if self.device.type == "cuda":
            return drawn.pin_memory().to(self.device, non_blocking=True)
        return drawn.to(self.device)

    def made(self, what: str, count: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return on the layer's device what `make` makes on the CPU of random numbers: `[..., n]` of `[..., count]`.

        Where a run's draws are made ahead, this is a buffer that is filled again in every step, and what is prepared
        with it is kept: it must not depend on the values.
        """
        if self.ahead is None:
            return self.upload(make(self.uniform(what, count)))
        made: Tensor = self.ahead.made(self, what, count, make)
        return made


@dataclass
class Prepared:
    """What an attention works out once for a step and a layer; subclasses add what they need.

    Attributes:
        order: grid positions `[tokens]`: `attend` is given the tokens in this order; None leaves them as they are.
        inverse: the place of every token in that order.
        sorts_merged: whether merged tokens are sorted by the place of their position in that order, and otherwise
            left in the order of the merge, by similarity.
    """

    order: Tensor | None = None
    inverse: Tensor | None = None
    sorts_merged: bool = False

    def order_for(self, backend: str) -> Tensor | None:
        """Return the order in which `attend` wants tokens with a backend; a kernel may read them where they are."""
        return self.order


class Layer(Protocol):
    """A layer in one call, as an attention sees it."""

    @property
    def kernel(self) -> dict[str, Any]:
        """Options of `attention.softmax.softmax_attention`: `fp32_logits` and `backend`, as the user chose."""

    @property
    def context(self) -> Keys | None:
        """Keys of text or of reference images, which are to be attended to exactly; None where there are none."""

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v; k and v of the tokens at the places `keys` `[keys]` alone, where they are given."""

    def queries(self, tokens: Tensor) -> Tensor:
        """Return q."""

    def merged(self, ratio: float) -> Tensor:
        """Return all tokens of the layer, merged at a ratio of the attention's own."""


@dataclass(frozen=True)
class Attention:
    """An attention: a frozen dataclass whose fields are its settings, each with a default value that JSON can hold.

    A subclass gives `name`, `attend` and `cost`; `prepare` if it draws or orders anything. `docs/your-own-attention.md`
    shows one, `elfatt_sd.register` makes it known, and `elfatt_sd.methods.conformance.check` tells what it breaks.

    Attributes:
        name: how it is called in configurations, on the command line and in tables.
        exact: whether it is the untouched model's attention.
        merges: whether tokens may be merged before it.
        needs_sums: whether it needs log-sum-exps, which backends of diffusers' dispatcher do not hand out.
        empty: whether it computes nothing, so that it makes sense with `residual_steps` alone.
        joint: whether it attends to `Layer.context` as well, so that layers which join image and text can have it.
        aliases: other names of its fields as settings.
    """

    name: ClassVar[str] = ""
    exact: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    needs_sums: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    empty: ClassVar[bool] = False
    aliases: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        errors.fields(self)

    def prepare(self, grid: Grid, draws: Draws) -> Prepared | None:
        """Work out what holds for a whole step of a layer.

        Args:
            grid: of the layer's tokens, before merging.
            draws: the only source of what is random.

        Returns:
            What `attend` is given, such as the order of the tokens; None where there is nothing to work out.
        """
        return None

    def attend(self, layer: Layer, tokens: Tensor, prepared: Any) -> Tensor:
        """Return every token's mix of values, `[batch, tokens, heads, head_dim]`, in the dtype of the queries.

        Args:
            layer: projects the tokens.
            tokens: `[batch, tokens, channels]`, merged and in the order that `prepare` asked for.
            prepared: what `prepare` returned.
        """
        raise NotImplementedError(f"{type(self).__name__}.attend is missing")

    def cost(self, size: Size) -> float:
        """Return the multiply-adds for one image: of the projections, and of attention itself."""
        raise NotImplementedError(f"{type(self).__name__}.cost is missing")

    @classmethod
    def choices(cls, tokens: int) -> list[Self]:
        """Return the settings that `elfatt_sd.tune` tries, from the fastest to the closest.

        Args:
            tokens: of the layer's image.
        """
        return [cls()]

    def fit(self, grid: Grid, merge: Merge) -> Self:
        """Return it with the numbers that a grid really gets, for plans and costs.

        Args:
            grid: of the layer's tokens.
            merge: what is merged before.
        """
        return self

    def words(self, fitted: Sequence[Self]) -> str:
        """Say what it does, in a few words.

        Args:
            fitted: what `fit` returned for the grids that it works on; where they cannot give what was asked for, both
                are said.
        """
        settings = [self.said(fitted, field.name, f"{field.name} #") for field in dataclasses.fields(self)]
        return f"{self.name} ({', '.join(settings)})" if settings else self.name

    def pools(self, tokens: int) -> Sequence[int]:
        """Return how many tokens in a row are averaged into each agent; nothing without agents.

        Args:
            tokens: that `attend` is given.
        """
        return ()

    @property
    def matches(self) -> bool:
        """Whether it looks for similar tokens of its own, besides those that are merged before it."""
        return False

    def accepts(self, merge: Merge) -> None:
        """Raise an `ElfattError` where it does not go with what is merged before it."""
        if merge.ratio > 0 and not self.merges:
            raise ElfattError(f"ratio={merge.ratio!r} is not accepted with attention={self.name!r}; give ratio=0.")

    @classmethod
    def settings(cls) -> list[str]:
        """Return the names of its settings, and their aliases."""
        return [*(field.name for field in dataclasses.fields(cls)), *cls.aliases]

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy with those of some settings changed that are its own."""
        own = {field.name for field in dataclasses.fields(self)}
        changes = {self.aliases[name]: value for name, value in settings.items() if name in self.aliases}
        changes |= {name: value for name, value in settings.items() if name in own}
        given = ", ".join(f"{name}={value!r}" for name, value in changes.items()) or "its defaults"
        with in_one_line(f"attention {self.name!r} does not accept {given}"):
            return dataclasses.replace(self, **changes)

    def said(self, fitted: Sequence[Self], name: str, words: str, number: str = "{}", more: str = "") -> str:
        """Put the number of a setting into words, at their `#`; brackets have what was asked for if grids get another.

        `fitted` is that of `words`; `more` is to be said in brackets as well.
        """
        asked, got = number.format(getattr(self, name)), span(fitted, name, number)
        brackets = ", ".join(filter(None, [f"{asked} asked" * (got != asked), more]))
        return words.replace("#", got) + f" ({brackets})" * bool(brackets)

    def __str__(self) -> str:
        """Say what it does, in a few words."""
        return self.words([self])


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turn what somebody's code raises, but our errors and those of memory, into an error that says what failed."""
    try:
        yield
    except ElfattError:
        raise
    except (Exception, SystemExit) as error:
        if errors.is_out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ElfattError(f"{what} ({' '.join(reason.split())[:300]}).") from error


def span(fitted: Sequence[Any], name: str, number: str = "{}") -> str:
    """Return the smallest and the largest value of an attribute as text; one of them where they are equal."""
    values = [getattr(each, name) for each in fitted]
    low, high = number.format(min(values)), number.format(max(values))
    return low if low == high else f"{low} to {high}"
