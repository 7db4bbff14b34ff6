"""What `elfatt-sd generate --explain` writes next to its images."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from elfatt_sd.drawing.studio import Result, Studio
from elfatt_sd.evaluation.report.charts import INK, drawing, to_png
from elfatt_sd.files import write_file
from elfatt_sd.visualize.looks import Asked, Look, watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS, PANEL = 5, 2.7  # panels in a row at most, and inches of one
_WASH = 0.55  # how much lighter the image is below what is drawn over it
_COVER = 0.78  # opacity of groups, which are drawn over the image
_GOLDEN = 0.6180339887  # of the hue circle: colours of groups with near numbers are far apart
Painter = Callable[[Any], None]
Panel = tuple[str, str, Painter]  # title, caption, and what draws it


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
    with drawing():
        from matplotlib.figure import Figure

        panels = list(_panels(look, image))
        rows = -(-len(panels) // COLUMNS)
        columns = -(-len(panels) // rows)
        figure = Figure(figsize=(columns * PANEL, rows * (PANEL + 0.55) + 0.75), layout="constrained")
        for number, (title, caption, paint) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            _underlay(axes, look, image)
            paint(axes)
            axes.set_title(title, fontsize=9, fontweight="bold")
            axes.set_xlabel(textwrap.fill(caption, 44), fontsize=7.5)
        figure.suptitle(_title(look), fontsize=9.5, color=INK, x=0.01, ha="left")
    return figure


def _title(look: Look) -> str:
    frame = f", frame 1 of {look.grid.frames}" if look.grid.frames > 1 else ""
    lines = (
        f"{look.method}, timestep {look.step + 1} of {look.steps}: {look.what}",
        f"layer {look.layer}, {look.grid.rows} x {look.grid.columns} tokens{frame}",
    )
    return "\n".join(textwrap.fill(line, 118) for line in lines)


def _panels(look: Look, image: Image.Image | None) -> Iterator[Panel]:
    if image is not None:
        yield "image", "the finished image; the query is the small square", lambda axes: _paint_image(axes, look, image)
    named = [("merged tokens", each) for each in (look.merged,) if each] + [("agents", each) for each in look.agents]
    for name, grouping in named:
        shared = grouping.sizes > 1
        kept = look.grid.tokens - int(shared.sum()) + len(np.unique(grouping.labels[shared]))
        left = f", {kept} of {look.grid.tokens} are left" if grouping is look.merged else f": {grouping.count} agents"
        caption = f"tokens of one colour {grouping.what}{left}"
        if not shared.all():
            caption += "; tokens without a colour stay as they are"
        yield name, caption, functools.partial(_paint_labels, look=look, labels=grouping.labels, shown=shared)
    several = len(look.heads) > 1
    everywhere = np.ones(look.grid.tokens, dtype=bool)
    for heads in look.heads:
        labels = heads.same_keys
        if labels is not None:
            caption = f"queries of one colour see the same keys: {len(np.unique(labels))} different sets"
            name = f"shared keys, {heads.name}" if several else "shared keys"
            yield name, caption, functools.partial(_paint_labels, look=look, labels=labels, shown=everywhere)
    if look.heads:
        sizes = [len(heads.numbers) for heads in look.heads]
        exact = np.average([heads.exact for heads in look.heads], axis=0, weights=sizes)
        text = float(np.average([heads.exact_text for heads in look.heads], weights=sizes))
        caption = f"how much the query (the square) takes from each token{_scale(exact, everywhere, text)}"
        yield "exact attention", caption, functools.partial(_paint_weights, look=look, weights=exact, seen=everywhere)
    for heads in look.heads:
        name = f"the method, {heads.name}" if several else "the method"
        caption = f"what it takes instead: it sees {int(heads.seen.sum())} of {look.grid.tokens} tokens"
        caption += _scale(heads.weights, heads.seen, heads.text)
        yield name, caption, functools.partial(_paint_weights, look=look, weights=heads.weights, seen=heads.seen)
    caption = (
        f"what the layer returned minus its exact output for the same input, {look.relative_error:.1%} of its norm; "
        f"palest: no difference; darkest: {_most(look.error):.0%} or more of a token's mean norm"
    )
    yield "error", caption, lambda axes: _paint_error(axes, look)


def _scale(weights: NDArray[np.float64], seen: NDArray[np.bool_], text: float) -> str:
    return f"; darkest: {_darkest(weights, seen):.2%} or more" + (f"; {text:.0%} is from the text" if text else "")


def _underlay(axes: Any, look: Look, image: Image.Image | None) -> None:
    """Draw the image in light grey, and leave out ticks and frames."""
    extent = (0, look.grid.columns, look.grid.rows, 0)
    if image is not None:
        grey = np.asarray(image.convert("L"), dtype=np.float64) / 255
        axes.imshow(grey * (1 - _WASH) + _WASH, cmap="gray", vmin=0, vmax=1, extent=extent, interpolation="bilinear")
    axes.set(xlim=(0, look.grid.columns), ylim=(look.grid.rows, 0), xticks=[], yticks=[], aspect="equal")
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _show(axes: Any, look: Look, colours: NDArray[np.float64]) -> None:
    first = colours.reshape(*look.grid, -1)[0]  # frame
    axes.imshow(first, extent=(0, look.grid.columns, look.grid.rows, 0), interpolation="nearest")


def _paint_labels(axes: Any, look: Look, labels: NDArray[np.int64], shown: NDArray[np.bool_]) -> None:
    from matplotlib.colors import hsv_to_rgb

    hue = labels * _GOLDEN % 1.0
    shade = np.stack([hue, 0.55 + 0.35 * (labels % 2), 0.95 - 0.25 * (labels % 3) / 2], -1)
    _show(axes, look, np.concatenate([hsv_to_rgb(shade), _COVER * shown[:, None]], -1))


def _paint_weights(axes: Any, look: Look, weights: NDArray[np.float64], seen: NDArray[np.bool_]) -> None:
    """Draw the weights of keys that are seen."""
    from matplotlib import colormaps

    strength = np.clip(weights / _darkest(weights, seen), 0, 1) ** 0.6
    colours = colormaps["YlGnBu"](0.12 + 0.88 * strength)
    colours[:, 3] = seen
    _show(axes, look, colours)
    _mark_query(axes, look)


def _paint_image(axes: Any, look: Look, image: Image.Image) -> None:
    axes.imshow(np.asarray(image.convert("RGB")), extent=(0, look.grid.columns, look.grid.rows, 0))
    _mark_query(axes, look)


def _mark_query(axes: Any, look: Look) -> None:
    from matplotlib.patches import Rectangle

    row, column = divmod(look.query, look.grid.columns)
    for colour, width in (("white", 3.4), ("black", 1.5)):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 2, 2, fill=False, edgecolor=colour, linewidth=width))


def _paint_error(axes: Any, look: Look) -> None:
    from matplotlib import colormaps

    _show(axes, look, colormaps["OrRd"](np.clip(look.error / _most(look.error), 0, 1)))


def _darkest(weights: NDArray[np.float64], seen: NDArray[np.bool_]) -> float:
    return max(_most(weights[seen]), 3 * float(weights[seen].mean())) if seen.any() else 1.0


def _most(values: NDArray[np.float64]) -> float:
    return max(float(np.quantile(values, 0.99)), 1e-12)


def explain(studio: Studio, results: Sequence[Result], asked: Asked) -> Iterator[Path]:
    """Draw every image of a studio once more, watched, and write what was seen next to it.

    The times and the memory of the images are not those of the watched run, which takes more.
    """
    for result, (prompt, seed) in zip(results, studio.shots(), strict=True):
        with studio.patched(), watch(studio.pipe, asked.layer, asked.step, asked.at) as looks:
            image = studio.draw(prompt, seed).frames[0]
        layers = list(dict.fromkeys(look.layer for look in looks))
        for look in looks:
            number = f"-layer-{layers.index(look.layer) + 1}" if len(layers) > 1 else ""
            path = result.path.with_name(f"{result.path.stem}-explained{number}-step-{look.step + 1}.png")
            write_file(path, to_png(draw(look, image)))
            yield path
