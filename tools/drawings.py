"""The drawings of the page on the method: `python -m tools.drawings [FOLDER]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elfatt_sd.config import PRESETS
from elfatt_sd.evaluation.report.charts import BASE, INK, METHODS, PAPER, RULE, drawing, to_png
from elfatt_sd.files import write_file
from elfatt_sd.phases import Phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAYER = ("tokens", "merge or\nreorder", "queries,\nkeys, values", "approximate\nattention", "put back", "output")
_OURS = (1, 3, 4)  # what a patch adds; the rest is the model's own


def draw_phases() -> Figure:
    """Draw what each named method does in which part of the run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.7), layout="constrained")
    axes = figure.add_subplot()
    shown = {name: config for name, config in PRESETS.items() if config.phases}
    for place, config in enumerate(shown.values()):
        start = 0.0
        for phase in config.phases:
            colour = RULE if phase.exact else METHODS[_kind(phase)]
            ink = INK if phase.exact else PAPER
            axes.barh(place, phase.until - start, left=start, color=colour, edgecolor=PAPER, height=0.75)
            axes.text((start + phase.until) / 2, place, words(phase), ha="center", va="center", color=ink, fontsize=7)
            start = phase.until
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"])
    axes.set_xlabel("part of the run, from noise to image")
    axes.grid(visible=False)
    return figure


def words(phase: Phase) -> str:
    """Say in a few words what a phase does."""
    if phase.exact:
        return "exact"
    name = {"softmax": "", "agent": "agents", "elfatt": "agents, blocks", "sampled": "sampled keys"}.get(
        phase.attention.name, phase.attention.name
    )
    parts = [name] * bool(name) + ["merged"] * bool(phase.merge.ratio)
    parts += [f"1 step of {phase.residual_steps} exact"] * (phase.residual_steps > 1)
    return (",\n" if phase.until <= 0.5 else ", ").join(parts)


def draw_layer() -> Figure:
    """Draw a patched layer from its tokens to its output."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 1.5), layout="constrained")
    axes = figure.add_subplot()
    for place, said in enumerate(_LAYER):
        colour = METHODS[0] if place in _OURS else BASE
        style = {"boxstyle": "round,pad=0.45", "facecolor": PAPER, "edgecolor": colour, "linewidth": 1.4}
        axes.text(place, 0, said, ha="center", va="center", fontsize=8, bbox=style)
        if place:
            axes.annotate(
                "", (place - 0.4, 0), (place - 0.6, 0), arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1}
            )
    axes.text(2.5, -0.8, "blue: what a patch adds; grey: the model's own", ha="center", fontsize=7, color=BASE)
    axes.set_xlim(-0.5, len(_LAYER) - 0.5)
    axes.set_ylim(-1, 0.7)
    axes.axis("off")
    return figure


def _kind(phase: Phase) -> int:
    return {"softmax": 1, "agent": 2, "elfatt": 0, "sampled": 3}.get(phase.attention.name, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the drawings into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tools.drawings", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/images"), help="where they go")
    folder = parser.parse_args(arguments).folder
    with drawing():
        for name, draw in {"phases": draw_phases, "layer": draw_layer}.items():
            write_file(folder / f"{name}.png", to_png(draw()))


if __name__ == "__main__":
    main()
