"""Draw which tokens one query attends to, by order and attention: `python benchmarks/what_a_query_sees.py [FILE]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from elfatt_sd.attention.ordering import (
    Grid,
    block_permutation,
    compact_path,
    lattice_order,
    partition,
    stratified_samples,
)

SIDE, SIZE, QUERY = 32, 32, 12 * 32 + 13
GRID = Grid.image(SIDE, SIDE)
CPU = torch.device("cpu")
EMPTY, OTHERS, SEEN, ASKING = range(4)
COLOURS = ("#eceff1", "#b3d4ee", "#1f77b4", "#d62728")


def own_block(order: str) -> Tensor:
    """Return the tokens `[SIZE]` in the query's block."""
    noise = torch.rand(SIDE * SIDE, generator=torch.Generator().manual_seed(0))
    permutation = block_permutation(order, GRID, SIZE, noise=noise)
    permutation = torch.arange(SIDE * SIDE) if permutation is None else permutation
    blocks, base, larger = partition(SIDE * SIDE, SIZE)
    parts = permutation.split([base + 1] * larger + [base] * (blocks - larger))
    return next(part for part in parts if QUERY in part)


def own_cell() -> Tensor:
    """Return the tokens of the compact cell, each of which is in another block."""
    cells = compact_path(GRID, SIDE * SIDE // SIZE, CPU).view(SIZE, -1)
    return next(cell for cell in cells if QUERY in cell)


def samples(groups: int) -> tuple[Tensor, Tensor]:
    """Return the keys of the query's group, and of the other groups."""
    noise = torch.rand(SIZE, generator=torch.Generator().manual_seed(0))
    keys = stratified_samples(GRID, SIZE, groups, noise).view(SIZE, groups)
    lattices = lattice_order(GRID, groups, CPU)
    place = QUERY if lattices is None else int(lattices[1][QUERY])
    own = place % groups
    return keys[:, own], torch.cat([keys[:, :own], keys[:, own + 1 :]], dim=1).flatten()


def draw(path: Path) -> None:
    """Write the image."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    nobody = torch.empty(0, dtype=torch.int64)
    panels = {"exact attention": (torch.arange(SIDE * SIDE), nobody)}
    panels |= {f"block, {order}": (own_block(order), nobody) for order in ("raster", "windows", "curve", "strided")}
    panels["block, spread"] = (own_block("spread"), nobody)
    panels["cell_spread"] = (torch.cat([own_cell(), own_block("spread")]), nobody)
    panels["sampled, 2 groups"] = samples(2)
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    for axes, (name, (seen, others)) in zip(figure.subplots(2, 4).flatten(), panels.items(), strict=True):
        picture = torch.full((SIDE * SIDE,), EMPTY)
        for tokens, value in ((others, OTHERS), (seen, SEEN), (torch.tensor([QUERY]), ASKING)):
            picture[tokens] = value
        colours = ListedColormap(COLOURS)
        axes.pcolormesh(
            picture.view(SIDE, SIDE), cmap=colours, vmin=0, vmax=len(COLOURS) - 1, edgecolor="w", linewidth=0.3
        )
        axes.set(title=name, aspect="equal", xticks=[], yticks=[])
        axes.invert_yaxis()
        for side in axes.spines.values():
            side.set_visible(False)
    text = f"{SIDE} x {SIDE} tokens. Red: a query. Blue: what it attends to, {SIZE} tokens of a block or a sample."
    figure.supxlabel(f"{text}\nLight blue: what the other group of queries sees.", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "file", nargs="?", type=Path, default=Path("docs/images/what_a_query_sees.png"), help="default: %(default)s"
    )
    draw(parser.parse_args().file)
