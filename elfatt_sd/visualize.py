"""See inside a patched run: which tokens merge, which keys a query saw, agents, blocks, and the error of a layer.

    elfatt_sd.apply_patch(pipe, "elfatt")
    with watch(pipe) as looks:
        image = pipe("a red star").images[0]
    for look in looks:
        draw(look, image).savefig(f"step-{look.step + 1}.png")

What a layer is given is attended to again, exactly and in pieces that can be seen. Everything is found through
`elfatt_sd.methods.Attention`, so that an attention of your own is shown as well.

Shapes: N tokens of the grid, M tokens that attention is given (fewer where tokens merge), H heads, D head size.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from elfatt_sd import errors as checks
from elfatt_sd.attention.joint import Keys, exact_attention
from elfatt_sd.attention.ordering import Grid, order_merged
from elfatt_sd.devices import standard_normal
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import Attention, Prepared
from elfatt_sd.patch import patches_of
from elfatt_sd.phases import EXACT, Phase, reused_steps
from elfatt_sd.plans import describe
from elfatt_sd.runtime.call import LayerCall, image_of
from elfatt_sd.runtime.denoiser import Patch
from elfatt_sd.runtime.joint_processor import Projected
from elfatt_sd.runtime.layer import PatchedLayer, after_forward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Grouping", "Heads", "Look", "draw", "watch"]

MOST_SETS = 512  # of keys: where queries see more different ones, these are not told apart
ROW = -1  # of a batch: with guidance, the one with the prompt
_SAME = 1e-4  # relative difference up to which two queries see the same keys
_COLUMNS, _PANEL = 5, 2.7  # panels in a row at most, and inches of one
_WASH = 0.55  # how much lighter the image is below what is drawn over it
_COVER = 0.78  # opacity of groups, which are drawn over the image
_GOLDEN = 0.6180339887  # of the hue circle: colours of groups with near numbers are far apart
Labels = NDArray[np.int64]
Weights = NDArray[np.float64]
Attend = Callable[[Tensor, Tensor, Tensor, Keys | None], Tensor]


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
    check_wanted(step, at)
    looks, watched = list[Look](), watched_layers(pipe, layer)
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        for patch, each in watched:
            undo.enter_context(_watch(patch, each, step, at, looks))
        yield looks
    if not looks:
        raise ElfattError("no watched layer was approximated in a watched step; give another step, or more steps.")


def watched_layers(pipe: Any, layer: str | None) -> list[tuple[Patch, PatchedLayer]]:
    """Return the layers that a pattern names, or the first one on the finest grid."""
    found = patches_of(pipe)
    if not found:
        raise ElfattError("the pipeline has no patch to look at; call elfatt_sd.apply_patch(pipe, method) first.")
    layers = [(patch, each) for patch in found.values() for each in patch.layers]
    if layer is None:
        return sorted(layers, key=lambda pair: pair[1].layer.downsample)[:1]
    watched = [pair for pair in layers if fnmatch.fnmatchcase(pair[1].layer.name, layer)]
    if not watched:
        names = ", ".join(each.layer.name for _, each in layers[:3])
        raise ElfattError(f"layer={layer!r} matches no patched layer; there are {names or 'none'}, ...")
    return watched


def check_wanted(step: int | None, at: Sequence[float]) -> None:
    if step is not None:
        checks.whole("step", step, 1)
    if len(at) != 2 or not all(0 <= part <= 1 for part in at):
        raise ElfattError(f"at={at!r} is not accepted; give two fractions from 0 to 1, such as 0.5,0.5.")


def _watch(
    patch: Patch, layer: PatchedLayer, step: int | None, at: Sequence[float], looks: list[Look]
) -> contextlib.ExitStack:
    """Look at a layer once in each wanted step, until what is returned is closed."""
    done, given, undo = set[int](), list[Tensor](), contextlib.ExitStack()

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        given[:] = args[:1]

    def after(again: Callable[[], Any], output: Any) -> None:
        state, steps = layer.state, patch.schedule.run.steps
        if state is None or state.phase.exact or state.outcome != "done":
            return
        by_phase = dict[Phase, list[int]]()
        for each, taken in [*enumerate(reused_steps(patch.config.reuse, steps))][max(0, patch.schedule.run.first) :]:
            phase = layer.config.phase_at(each, steps)
            if taken is None and not phase.exact and each % phase.residual_steps == phase.residual_steps - 1:
                by_phase.setdefault(phase, []).append(each)
        wanted = {each[len(each) // 2] for each in by_phase.values()} if step is None else {step - 1}
        if state.call.step in wanted - done:
            done.add(state.call.step)
            with torch.no_grad():
                looks.append(_look(state, steps, at, again, output, *given))

    undo.callback(after_forward(layer.layer.attention, after))
    if layer.layer.norm is not None:
        undo.callback(layer.layer.norm.register_forward_pre_hook(before).remove)
    return undo


def _look(
    state: LayerCall,
    steps: int,
    at: Sequence[float],
    again: Callable[[], Any],
    output: Any,
    block_input: Tensor | None = None,
) -> Look:
    phase, turn, grid = state.phase, state.calls, state.grid
    kind: Any = type(phase.attention)
    places = zip(at, (grid.columns, grid.rows), strict=True)
    column, row = (min(int(part * size), size - 1) for part, size in places)  # in the first frame of a video
    query, seen = row * grid.columns + column, dict[str, Any](heads=(), merged=None, agents=())
    state.phase = EXACT
    exact = image_of(again(), state)[ROW].float()
    if not phase.attention.empty:

        def attend(own: Attention, layer: Any, tokens: Tensor, prepared: Prepared | None) -> Tensor:
            seen.update(_seen(state, phase, query, layer, tokens, prepared))
            return phase.attention.attend(layer, tokens, prepared)

        watched = type(kind.__name__, (kind,), {"attend": attend})
        state.phase = Phase(1.0, watched(**vars(phase.attention)), merge=phase.merge)
        state.block_input, state.calls = block_input, turn - 1  # the call that was, for a matching that is reused
        again()
    state.phase, state.calls, state.outcome = phase, turn, "done"
    error, relative = errors(image_of(output, state)[ROW].float(), exact)
    about = state.call.config.method, describe(phase, [grid]), state.layer.name, state.call.step, steps
    return Look(*about, grid, query, **seen, error=error, relative_error=relative)


def _seen(
    state: LayerCall, phase: Phase, query: int, layer: Any, tokens: Tensor, prepared: Prepared | None
) -> dict[str, Any]:
    """Return what an attention does with the tokens that it is given, as fields of a `Look`."""
    attention, merged = phase.attention, dict[float, Tensor]()
    q, k, _ = (x.float() for x in layer.project(tokens))
    if prepared is not None and prepared.order is not None and prepared.order_for(layer.kernel["backend"]) is None:
        q, k = q[:, prepared.order], k[:, prepared.order]  # a kernel reads them where they are
    context = layer.context and layer.context._replace(k=layer.context.k.float(), v=layer.context.v.float())

    def merge(ratio: float) -> Tensor:
        return merged.setdefault(ratio, layer.merged(ratio))

    def attend(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
        own, given = copy.copy(layer), Projected(q, k, v)
        own.kernel, own.context = {**layer.kernel, "backend": "native"}, context
        own.project, own.merged = given.project, merge
        own.queries = lambda some: q if some is tokens else layer.queries(some).float()
        return attention.attend(own, tokens, prepared)

    def exactly(q: Tensor, k: Tensor, v: Tensor, context: Keys | None) -> Tensor:
        return exact_attention(q, [Keys(k, v), *([context] if context else [])])

    place = _places(state, phase, prepared, len(tokens))
    sizes, own_place = np.bincount(place), int(place[query])
    weights, on_text = weights_of(attend, q, k, context, own_place)
    exact, exact_text = weights_of(exactly, q[:, own_place : own_place + 1], k, context, 0)
    heads, sets, groups = [], same_keys(attend, q, context), dict[bytes, list[int]]()
    for head, labels in enumerate(sets):
        groups.setdefault(b"" if labels is None else labels.tobytes(), []).append(head)
    for of in groups.values():
        own = sets[of[0]]
        found, right = ((each[of].mean(0) / sizes)[place] for each in (weights, exact))
        text, right_text = float(on_text[of].mean()), float(exact_text[of].mean())
        keys = None if own is None or own.max() == 0 else own[place]
        heads.append(Heads(tuple(of), keys, found, right, text, right_text))
    agents = []
    if pools := attention.pools(q.shape[1]):
        agents.append(Grouping("are averaged into one agent", np.repeat(np.arange(len(pools)), pools)[place]))
    for ratio in merged:
        if (matching := _matching(state, ratio, len(tokens))) is not None:
            agents.append(Grouping("merge into one agent", _numbers(matching.groups[ROW])))
    into_one = Grouping("merge into one", place) if len(sizes) < state.grid.tokens else None
    return {"heads": tuple(heads), "merged": into_one, "agents": tuple(agents)}


def _places(state: LayerCall, phase: Phase, prepared: Prepared | None, rows: int) -> Labels:
    """Return the place `[N]` that each token of the grid has among those that attention is given."""
    matching = _matching(state, phase.merge.ratio, rows)
    if matching is not None and prepared is not None and prepared.sorts_merged:
        matching = matching.reordered(order_merged(prepared.order, matching.positions))
    if matching is not None:
        return _numbers(matching.groups[ROW])
    if prepared is None or prepared.inverse is None:
        return np.arange(state.grid.tokens)
    return _numbers(prepared.inverse)


def _matching(state: LayerCall, ratio: float, rows: int) -> Any:
    return state.matching(torch.empty(rows, state.grid.tokens, 0, dtype=torch.float32, device="cpu"), ratio)


def _numbers(values: Tensor) -> Labels:
    return np.asarray(values.cpu(), dtype=np.int64)


def errors(given: Tensor, exact: Tensor) -> tuple[Weights, float]:
    """Compare a layer's output with the exact one."""
    given, exact = (each.cpu().double() for each in (given, exact))  # MPS has no float64
    difference = (given - exact).norm(dim=-1).numpy()
    scale = float(exact.norm()) or 1.0
    return difference * len(difference) ** 0.5 / scale, float(np.linalg.norm(difference)) / scale


def weights_of(attend: Attend, q: Tensor, k: Tensor, context: Keys | None, query: int) -> tuple[Weights, Weights]:
    """Return the weights with which an attention mixes values into one query's output.

    Any attention is linear in the values: one that is 1 at one token and 0 elsewhere becomes that token's weight. The
    channels of a head are mixed alike, so that a call tells the weights of as many tokens.
    """
    (_, tokens, heads, size), nothing = k.shape, torch.zeros_like(k)
    text = None if context is None else context._replace(v=torch.zeros_like(context.v))
    image: list[Tensor] = []
    for start in range(0, tokens, size):
        places = torch.arange(start, min(start + size, tokens), device=q.device)
        ones = nothing.clone()
        ones[ROW, places, :, places - start] = 1
        image.append(attend(q, k, ones, text)[ROW, query, :, : len(places)])
    on_text = q.new_zeros(heads)
    if text is not None:
        on_text = attend(q, k, nothing, text._replace(v=torch.ones_like(text.v)))[ROW, query].mean(-1)
    return torch.cat(image, -1).cpu().double().numpy(), on_text.cpu().double().numpy()


def same_keys(attend: Attend, q: Tensor, context: Keys | None) -> list[Labels | None]:
    """Number the sets of keys that queries see, by head: with equal logits, they have the same mean of random values.

    None where too many differ.
    """
    zeros, generator = torch.zeros_like(q), torch.Generator().manual_seed(0)
    random = standard_normal(tuple(q.shape), generator).to(q)
    text = None if context is None else context._replace(k=torch.zeros_like(context.k), v=torch.zeros_like(context.v))
    ones = None if text is None else text._replace(v=torch.ones_like(text.v))
    own = attend(zeros, zeros, torch.ones_like(zeros), ones) - 1  # values that are added to their token's output
    means = attend(zeros, zeros, random, text) - own * random
    found: list[Labels | None] = []
    for rows in means[ROW].transpose(0, 1).cpu().double().numpy():
        tolerance, labels = _SAME * (rows.std() or 1.0), np.full(len(rows), -1)
        for number in range(MOST_SETS):
            if not (left := np.flatnonzero(labels < 0)).size:
                break
            labels[left[np.abs(rows[left] - rows[left[0]]).max(axis=1) <= tolerance]] = number
        found.append(None if (labels < 0).any() else labels)
    return found


def draw(look: Look, image: Image.Image | None = None) -> Figure:
    """Draw a look, one panel for each thing that is seen in it.

    Args:
        look: what `watch` saw.
        image: the finished image, which lies below; None draws the grid alone.

    Returns:
        a figure of matplotlib; `savefig` writes it.

    Raises:
        ElfattError: matplotlib is not installed.
    """
    from elfatt_sd.evaluation.report.charts import INK, drawing

    with drawing():
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        panels = list(_panels(look, image))
        rows = -(-len(panels) // _COLUMNS)
        columns = -(-len(panels) // rows)
        figure = Figure(figsize=(columns * _PANEL, rows * (_PANEL + 0.55) + 0.75), layout="constrained")
        extent, query = (0, look.grid.columns, look.grid.rows, 0), divmod(look.query, look.grid.columns)
        for number, (title, caption, pixels, marked) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            if image is not None:  # below, in light grey
                grey = np.asarray(image.convert("L"), dtype=np.float64) / 255 * (1 - _WASH) + _WASH
                axes.imshow(grey, cmap="gray", vmin=0, vmax=1, extent=extent, interpolation="bilinear")
            axes.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[], aspect="equal")
            axes.grid(False)
            axes.spines[:].set_visible(False)
            axes.imshow(pixels, extent=extent, interpolation="nearest" if pixels.shape[-1] == 4 else None)
            for colour, wide in (("white", 3.4), ("black", 1.5)) if marked else ():
                corner = query[1] - 0.5, query[0] - 0.5
                axes.add_patch(Rectangle(corner, 2, 2, fill=False, edgecolor=colour, linewidth=wide))
            axes.set_title(title, fontsize=9, fontweight="bold")
            axes.set_xlabel(textwrap.fill(caption, 44), fontsize=7.5)
        frame = f", frame 1 of {look.grid.frames}" if look.grid.frames > 1 else ""
        lines = (
            f"{look.method}, timestep {look.step + 1} of {look.steps}: {look.what}",
            f"layer {look.layer}, {look.grid.rows} x {look.grid.columns} tokens{frame}",
        )
        words = "\n".join(textwrap.fill(line, 118) for line in lines)
        figure.suptitle(words, fontsize=9.5, color=INK, x=0.01, ha="left")
    return figure


def _panels(look: Look, image: Image.Image | None) -> Iterator[tuple[str, str, NDArray[Any], bool]]:
    """Yield title, caption, pixels, and whether the query is marked in them."""
    from matplotlib import colormaps
    from matplotlib.colors import hsv_to_rgb

    def on_grid(colours: NDArray[Any]) -> NDArray[Any]:
        first: NDArray[Any] = colours.reshape(*look.grid, -1)[0]  # frame
        return first

    def in_groups(labels: Labels, shown: NDArray[np.bool_]) -> NDArray[Any]:
        shade = np.stack([labels * _GOLDEN % 1.0, 0.55 + 0.35 * (labels % 2), 0.95 - 0.25 * (labels % 3) / 2], -1)
        return on_grid(np.concatenate([hsv_to_rgb(shade), _COVER * shown[:, None]], -1))

    def weighted(weights: Weights, seen: NDArray[np.bool_], text: float) -> tuple[str, NDArray[Any]]:
        darkest = max(_most(weights[seen]), 3 * float(weights[seen].mean())) if seen.any() else 1.0
        colours = colormaps["YlGnBu"](0.12 + 0.88 * np.clip(weights / darkest, 0, 1) ** 0.6)
        colours[:, 3] = seen
        from_text = f"; {text:.0%} is from the text" if text else ""
        return f"; darkest: {darkest:.2%} or more{from_text}", on_grid(colours)

    if image is not None:
        yield "image", "the finished image; the query is the small square", np.asarray(image.convert("RGB")), True
    named = [("merged tokens", each) for each in (look.merged,) if each] + [("agents", each) for each in look.agents]
    for name, grouping in named:
        shared = grouping.sizes > 1
        kept = look.grid.tokens - int(shared.sum()) + len(np.unique(grouping.labels[shared]))
        left = f", {kept} of {look.grid.tokens} are left" if grouping is look.merged else f": {grouping.count} agents"
        alone = "" if shared.all() else "; tokens without a colour stay as they are"
        yield name, f"tokens of one colour {grouping.what}{left}{alone}", in_groups(grouping.labels, shared), False
    everywhere = np.ones(look.grid.tokens, dtype=bool)
    names = [f", {heads.name}" if len(look.heads) > 1 else "" for heads in look.heads]
    for heads, name in zip(look.heads, names, strict=True):
        if heads.same_keys is not None:
            caption = f"queries of one colour see the same keys: {len(np.unique(heads.same_keys))} different sets"
            yield f"shared keys{name}", caption, in_groups(heads.same_keys, everywhere), False
    if look.heads:
        sizes = [len(heads.numbers) for heads in look.heads]
        exact = np.average([heads.exact for heads in look.heads], axis=0, weights=sizes)
        text = float(np.average([heads.exact_text for heads in look.heads], weights=sizes))
        scale, pixels = weighted(exact, everywhere, text)
        yield "exact attention", f"how much the query (the square) takes from each token{scale}", pixels, True
    for heads, name in zip(look.heads, names, strict=True):
        scale, pixels = weighted(heads.weights, heads.seen, heads.text)
        caption = f"what it takes instead: it sees {int(heads.seen.sum())} of {look.grid.tokens} tokens{scale}"
        yield f"the method{name}", caption, pixels, True
    worst = _most(look.error)
    caption = (
        f"what the layer returned minus its exact output for the same input, {look.relative_error:.1%} of its norm; "
        f"palest: no difference; darkest: {worst:.0%} or more of a token's mean norm"
    )
    yield "error", caption, on_grid(colormaps["OrRd"](np.clip(look.error / worst, 0, 1))), False


def _most(values: Weights) -> float:
    return max(float(np.quantile(values, 0.99)), 1e-12)
