"""See inside a patched run: what a layer is given is attended to again, exactly and in pieces that can be seen.

Shapes: N tokens of the grid, M tokens that attention is given (fewer where tokens merge), H heads, D head size.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elfatt_sd.attention.ordering import Grid, order_merged
from elfatt_sd.devices import standard_normal
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import Attention, Draws, Prepared
from elfatt_sd.patch import patches_of
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.plans import describe
from elfatt_sd.runtime.call import LayerCall
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.exact_run import image_of
from elfatt_sd.runtime.layer import PatchedLayer, after_forward

if TYPE_CHECKING:
    from elfatt_sd.attention.joint import Keys

MOST_SETS = 512  # of keys: where queries see more different ones, these are not told apart
ROW = -1  # of a batch: with guidance, the one with the prompt
_SAME = 1e-4  # relative difference up to which two queries see the same keys
Labels = NDArray[np.int64]
Weights = NDArray[np.float64]
Attend = Callable[[Tensor, Tensor, Tensor, "Keys | None"], Tensor]


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


@contextlib.contextmanager
def watch(
    pipe: Any, layer: str | None = None, step: int | None = None, at: tuple[float, float] = (0.5, 0.5)
) -> Iterator[list[Look]]:
    """Watch layers of a patched pipeline while it runs within the `with` block; its images stay the same.

    A watched layer computes its attention several times, so that a run is slower and takes more memory.

    Args:
        pipe: the pipeline, or a bare denoiser, with a patch.
        layer: path of a patched layer in its denoiser, or a pattern with `*`, which may match several; by default the
            first one on the finest grid.
        step: from 1; by default the middle of the approximated steps of each phase.
        at: the point of the image whose query is followed: fractions of width and height, from the top left corner.

    Yields:
        a list to which a `Look` is added for each watched layer and step of the first image.

    Raises:
        ElfattError: there is no patch, no patched layer of that name, or a point outside the image; at the end of the
            block also if no watched step was approximated.
    """
    found = patches_of(pipe)
    if not found:
        raise ElfattError("the pipeline has no patch to look at; call elfatt_sd.apply_patch(pipe, method) first.")
    asked = Asked(layer, step, at)
    looks: list[Look] = []
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        looked_at = list(found.values())[: None if layer else 1]
        watched = [(patch, each) for patch in looked_at for each in _chosen(patch, layer)]
        if not watched:
            names = ", ".join(each.layer.name for patch in found.values() for each in patch.layers[:3])
            raise ElfattError(f"layer={layer!r} matches no patched layer; there are {names or 'none'}, ...")
        for patch, each in watched:
            _Watcher(patch, each, asked, looks).install(undo)
        yield looks
    if not looks:
        raise ElfattError("no watched layer was approximated in a watched step; give another step, or more steps.")


def _chosen(patch: Patch, layer: str | None) -> list[PatchedLayer]:
    if layer is not None:
        return [each for each in patch.layers if fnmatch.fnmatchcase(each.layer.name, layer)]
    return sorted(patch.layers, key=lambda each: each.layer.downsample)[:1]


@dataclass
class _Seen:
    """What was seen inside one call of an attention."""

    state: LayerCall
    phase: Phase
    query: int
    heads: list[Heads] = field(default_factory=list)
    merged: Grouping | None = None
    agents: list[Grouping] = field(default_factory=list)


@dataclass
class _Watcher:
    """Watches one layer; see `watch`."""

    patch: Patch
    layer: PatchedLayer
    asked: Asked
    looks: list[Look]
    block_input: Tensor | None = None
    done: set[int] = field(default_factory=set)

    def install(self, undo: contextlib.ExitStack) -> None:
        """Watch, until the stack is closed."""

        def keep(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            self.block_input = args[0]

        if self.layer.layer.norm is not None:
            undo.callback(self.layer.layer.norm.register_forward_pre_hook(keep).remove)
        undo.callback(after_forward(self.layer.layer.attention, self._after))

    def _after(self, again: Callable[[], Any], output: Any) -> None:
        """Look, once in a wanted step."""
        state = self.layer.state
        if state is None or state.phase.exact or state.outcome != "done":
            return
        if state.call.step in self._steps() - self.done:
            self.done.add(state.call.step)
            with torch.no_grad():
                self.looks.append(self._look(state, again, output))

    def _steps(self) -> set[int]:
        if self.asked.step is not None:
            return {self.asked.step - 1}
        by_phase: dict[Phase, list[int]] = {}
        for step in range(self.patch.schedule.run.steps):
            phase = self.layer.config.phase_at(step, self.patch.schedule.run.steps)
            if not phase.exact and step % phase.residual_steps == phase.residual_steps - 1:
                by_phase.setdefault(phase, []).append(step)
        return {each[len(each) // 2] for each in by_phase.values()}

    def _look(self, state: LayerCall, again: Callable[[], Any], output: Any) -> Look:
        phase, turn, grid = state.phase, state.calls, state.grid
        places = zip(self.asked.at, (grid.columns, grid.rows), strict=True)
        column, row = (min(int(part * size), size - 1) for part, size in places)  # in the first frame of a video
        seen = _Seen(state, phase, row * grid.columns + column)
        state.phase = EXACT
        exact = image_of(again(), state)[ROW].float()
        if not phase.attention.empty:
            state.phase = Phase(1.0, _Watched(phase.attention, seen), merge=phase.merge)
            state.block_input = self.block_input
            again()
        state.phase, state.calls, state.outcome = phase, turn, "done"
        error, relative = errors(image_of(output, state)[ROW].float(), exact)
        return Look(
            method=state.call.config.method,
            what=describe(phase, [grid]),
            layer=state.layer.name,
            step=state.call.step,
            steps=self.patch.schedule.run.steps,
            grid=grid,
            query=seen.query,
            heads=tuple(seen.heads),
            merged=seen.merged,
            agents=tuple(seen.agents),
            error=error,
            relative_error=relative,
        )


@dataclass(frozen=True)
class _Watched(Attention):
    """An attention that does what another one does, and notes what it sees."""

    name: ClassVar[str] = "watched"
    joint: ClassVar[bool] = True

    inner: Attention = field(default_factory=Attention)
    seen: Any = None

    @property
    def matches(self) -> bool:
        return self.inner.matches

    def prepare(self, grid: Grid, draws: Draws) -> Prepared | None:
        return self.inner.prepare(grid, draws)

    def attend(self, layer: Any, tokens: Tensor, prepared: Any) -> Tensor:
        _see(self.seen, self.inner, layer, tokens, prepared)
        return self.inner.attend(layer, tokens, prepared)


class _Layer:
    """A layer in one call, as an attention sees it, of one image and with given queries, keys and values."""

    def __init__(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, context: Keys | None, merge_ratios: list[float]
    ) -> None:
        self.kernel = {**layer.kernel, "backend": "native"}
        self.context = context
        self._layer, self._q, self._k, self._v, self._merge_ratios = layer, q, k, v, merge_ratios
        self._merged: Tensor | None = None

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if keys is None:
            return self._q, self._k, self._v
        return self._q, self._k.index_select(1, keys), self._v.index_select(1, keys)

    def queries(self, tokens: Tensor) -> Tensor:
        return self._layer.queries(tokens).float() if tokens is self._merged else self._q

    def merged(self, ratio: float) -> Tensor:
        self._merge_ratios.append(ratio)
        self._merged = self._layer.merged(ratio)[ROW:]
        return self._merged


def _see(seen: _Seen, attention: Attention, layer: Any, tokens: Tensor, prepared: Prepared | None) -> None:
    """Find out what an attention does with the tokens that it is given."""
    grid, merge_ratios = seen.state.grid, list[float]()
    q, k, _ = (x[ROW:].float() for x in layer.project(tokens))
    context = layer.context and layer.context._replace(
        k=layer.context.k[ROW:].float(),
        v=layer.context.v[ROW:].float(),
        mask=None if layer.context.mask is None else layer.context.mask[ROW:],
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
        return attention.attend(_Layer(layer, q, k, v, context, merge_ratios), tokens[ROW:], prepared)

    place = _places(seen, prepared)
    sizes, query = np.bincount(place), int(place[seen.query])
    weights, on_text = weights_of(attend, q, k, context, query)
    exact, exact_text = exact_weights(q[0, query], k[0], context)
    sets = same_keys(attend, q.shape, context, q)
    for numbers in head_groups(sets):
        own, of = sets[numbers[0]], list(numbers)
        found, right = ((each[of].mean(0) / sizes)[place] for each in (weights, exact))
        text, right_text = float(on_text[of].mean()), float(exact_text[of].mean())
        keys = None if own is None or own.max() == 0 else own[place]
        seen.heads.append(Heads(numbers, keys, found, right, text, right_text))
    if len(sizes) < grid.tokens:
        seen.merged = Grouping("merge into one", place)
    if pools := attention.pools(q.shape[1]):
        groups = np.repeat(np.arange(len(pools)), pools)[place]
        seen.agents.append(Grouping("are averaged into one agent", groups))
    for ratio in dict.fromkeys(merge_ratios):
        if (matching := _matching(seen.state, ratio)) is not None:
            seen.agents.append(Grouping("merge into one agent", _numbers(matching.groups[ROW])))


def _places(seen: _Seen, prepared: Prepared | None) -> Labels:
    """Return the place `[N]` that each token of the grid has among those that attention is given."""
    matching, order = _matching(seen.state, seen.phase.merge.ratio), None if prepared is None else prepared.order
    if matching is not None:
        if prepared is not None and prepared.sorts_merged:
            matching = matching.reordered(order_merged(order, matching.positions))
        return _numbers(matching.groups[ROW])
    if prepared is None or prepared.inverse is None:
        return np.arange(seen.state.grid.tokens)
    return _numbers(prepared.inverse)


def _matching(state: LayerCall, ratio: float) -> Any:
    rows = 1 if state.candidates is None else len(state.candidates.nearest)
    return state.matching(torch.empty(rows, state.grid.tokens, 0, dtype=torch.float32, device="cpu"), ratio)


def _numbers(values: Tensor) -> Labels:
    return np.asarray(values.cpu(), dtype=np.int64)


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
