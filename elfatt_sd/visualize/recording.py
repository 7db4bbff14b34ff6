"""Watch layers of a patched run: what they are given is attended to again, exactly and in pieces that can be seen."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.attention.ordering import order_merged
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import Attention, Draws, Grid, Prepared
from elfatt_sd.patch import patches_of
from elfatt_sd.phases import EXACT, Phase
from elfatt_sd.plans import describe
from elfatt_sd.runtime.call import LayerCall
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.exact_run import image_of
from elfatt_sd.runtime.layer import PatchedLayer, after_forward
from elfatt_sd.visualize.looks import (
    Asked,
    Grouping,
    Heads,
    Labels,
    Look,
    errors,
    exact_weights,
    head_groups,
    same_keys,
    token_at,
    weights_of,
)

if TYPE_CHECKING:
    from elfatt_sd.attention.joint import Keys

ROW = -1  # of a batch: with guidance, the one with the prompt


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
    finest = min((each.layer.downsample for each in patch.layers), default=1)
    return [each for each in patch.layers if each.layer.downsample == finest][:1]


@dataclass
class _Seen:
    """What was seen inside one call of an attention, as long as it goes on."""

    state: LayerCall
    phase: Phase
    query: int
    heads: tuple[Heads, ...] = ()
    merged: Labels | None = None
    agents: list[Grouping] = field(default_factory=list)


class _Watcher:
    """Watches one layer; see `watch`."""

    def __init__(self, patch: Patch, layer: PatchedLayer, asked: Asked, looks: list[Look]) -> None:
        self._patch, self._layer, self._asked, self._looks = patch, layer, asked, looks
        self._block_input: Tensor | None = None
        self._done: set[int] = set()

    def install(self, undo: contextlib.ExitStack) -> None:
        """Watch, until the stack is closed."""
        if self._layer.layer.norm is not None:
            undo.callback(self._layer.layer.norm.register_forward_pre_hook(self._keep).remove)
        undo.callback(after_forward(self._layer.layer.attention, self._after))

    def _keep(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._block_input = args[0]

    def _after(self, again: Callable[[], Any], output: Any) -> None:
        """Look, once in a wanted step."""
        state = self._layer.state
        if state is None or not self._wanted(state) or state.outcome != "done":
            return
        self._done.add(state.call.step)
        with torch.no_grad():
            self._looks.append(self._look(state, again, output))

    def _wanted(self, state: LayerCall) -> bool:
        if state.call.step in self._done or state.phase.exact:
            return False
        return state.call.step in self._steps(self._patch.schedule.run.steps)

    def _steps(self, steps: int) -> set[int]:
        if self._asked.step is not None:
            return {self._asked.step - 1}
        by_phase: dict[Phase, list[int]] = {}
        for step in range(steps):
            phase = self._layer.config.phase_at(step, steps)
            if not phase.exact and step % phase.residual_steps == phase.residual_steps - 1:
                by_phase.setdefault(phase, []).append(step)
        return {each[len(each) // 2] for each in by_phase.values()}

    def _look(self, state: LayerCall, again: Callable[[], Any], output: Any) -> Look:
        phase, turn = state.phase, state.calls
        seen = _Seen(state, phase, token_at(state.grid, self._asked.at))
        state.phase = EXACT
        exact = image_of(again(), state)[ROW].float()
        if not phase.attention.empty:
            state.phase = Phase(1.0, _Watched(phase.attention, seen), merge=phase.merge)
            state.block_input = self._block_input
            again()
        state.phase, state.calls, state.outcome = phase, turn, "done"
        error, relative = errors(image_of(output, state)[ROW].float(), exact)
        return Look(
            method=state.call.config.method,
            what=describe(phase, [state.grid]),
            layer=state.layer.name,
            step=state.call.step,
            steps=self._patch.schedule.run.steps,
            grid=state.grid,
            query=seen.query,
            heads=seen.heads,
            merged=None if seen.merged is None else Grouping("merge into one", seen.merged),
            agents=tuple(seen.agents),
            error=error,
            relative_error=relative,
        )


@dataclass(frozen=True)
class _Watched(Attention):
    """An attention that does what another one does, and notes what it sees."""

    name: ClassVar[str] = "watched"
    joint: ClassVar[bool] = True

    inner: Attention = dataclasses.field(default_factory=Attention)
    seen: Any = None

    @property
    def matches(self) -> bool:
        """As the other one."""
        return self.inner.matches

    def prepare(self, grid: Grid, draws: Draws) -> Prepared | None:
        """As the other one."""
        return self.inner.prepare(grid, draws)

    def attend(self, layer: Any, tokens: Tensor, prepared: Any) -> Tensor:
        """Attend as the other one, and then once more in pieces."""
        _see(self.seen, self.inner, layer, tokens, prepared)
        return self.inner.attend(layer, tokens, prepared)


class _Layer:
    """A layer in one call, as an attention sees it, of one image and with given queries, keys and values."""

    def __init__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, context: Keys | None, ratios: list[float]) -> None:
        self.kernel = {**layer.kernel, "backend": "native"}
        self.context = context
        self._layer, self._q, self._k, self._v, self._ratios = layer, q, k, v, ratios
        self._merged: Tensor | None = None

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if keys is None:
            return self._q, self._k, self._v
        return self._q, self._k.index_select(1, keys), self._v.index_select(1, keys)

    def queries(self, tokens: Tensor) -> Tensor:
        return self._layer.queries(tokens).float() if tokens is self._merged else self._q

    def merged(self, ratio: float) -> Tensor:
        self._ratios.append(ratio)
        self._merged = self._layer.merged(ratio)[ROW:]
        return self._merged


def _see(seen: _Seen, attention: Attention, layer: Any, tokens: Tensor, prepared: Any) -> None:
    """Find out what an attention does with the tokens that it is given."""
    state, ratios = seen.state, list[float]()
    q, k, _ = (x[ROW:].float() for x in layer.project(tokens))
    context = layer.context and layer.context._replace(
        k=layer.context.k[ROW:].float(),
        v=layer.context.v[ROW:].float(),
        mask=None if layer.context.mask is None else layer.context.mask[ROW:],
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
        return attention.attend(_Layer(layer, q, k, v, context, ratios), tokens[ROW:], prepared)

    place = _places(seen, prepared)
    sizes = np.bincount(place)
    weights, on_text = weights_of(attend, q, k, context, int(place[seen.query]))
    exact, exact_text = exact_weights(q[0, int(place[seen.query])], k[0], context)
    sets = same_keys(attend, q.shape, context, q)
    heads = []
    for numbers in head_groups(sets):
        own, of = sets[numbers[0]], list(numbers)
        heads.append(
            Heads(
                numbers,
                None if own is None or own.max() == 0 else own[place],
                (weights[of].mean(0) / sizes)[place],
                (exact[of].mean(0) / sizes)[place],
                float(on_text[of].mean()),
                float(exact_text[of].mean()),
            )
        )
    seen.heads = tuple(heads)
    seen.merged = None if len(sizes) == state.grid.tokens else place
    seen.agents = _agents(seen, attention, q.shape[1], place, ratios)


def _places(seen: _Seen, prepared: Prepared | None) -> Labels:
    state, merge = seen.state, seen.phase.merge
    order = None if prepared is None else prepared.order
    matching = _matching(state, merge.ratio)
    if matching is not None:
        if prepared is not None and prepared.sorts_merged:
            matching = matching.reordered(order_merged(order, matching.positions))
        return matching.groups[ROW].cpu().numpy().astype(np.int64)  # type: ignore[no-any-return]
    if order is None:
        return np.arange(state.grid.tokens)
    assert prepared is not None and prepared.inverse is not None
    return prepared.inverse.cpu().numpy().astype(np.int64)


def _matching(state: LayerCall, ratio: float) -> Any:
    rows = 1 if state.candidates is None else len(state.candidates.nearest)
    return state.matching(torch.empty(rows, state.grid.tokens, 0, dtype=torch.float32, device="cpu"), ratio)


def _agents(seen: _Seen, attention: Attention, tokens: int, place: Labels, ratios: list[float]) -> list[Grouping]:
    pools = attention.pools(tokens)
    found = [Grouping("are averaged into one agent", np.repeat(np.arange(len(pools)), pools)[place])] if pools else []
    for ratio in dict.fromkeys(ratios):
        matching = _matching(seen.state, ratio)
        if matching is not None:
            groups = matching.groups[ROW].cpu().numpy().astype(np.int64)
            found.append(Grouping("merge into one agent", groups))
    return found
