"""What benchmarks name besides the presets: attentions alone, variations, the phases of layers and of orders."""

from __future__ import annotations

from typing import Any

from elfatt_sd.config import PatchConfig
from elfatt_sd.methods import AttentionName, attentions, is_own
from elfatt_sd.phases import Phase
from elfatt_sd.presets import Method
from elfatt_sd.tiling import BLOCK_ORDERS, BlockOrder

MERGING: Method = "tome"  # the preset that does what the package tomesd does
AGENTS = 64
# Attentions that no preset has as they are, after exact early steps.
ALONE: dict[str, PatchConfig] = {
    name: PatchConfig(name, (Phase(0.2), phase))
    for name, phase in {
        "spread": Phase(1.0, "block", block_order="spread"),
        "cell_spread": Phase(1.0, "cell_spread", block_order="spread"),
        "sampled": Phase(1.0, "sampled"),
    }.items()
}
VARIATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tome", {"reuse_layers": True}),
    ("tome", {"reuse_steps": 2}),
    ("elfatt", {"ratio": 0}),
    ("elfatt-fast", {"levels": 1}),
    ("elfatt-fast", {"residual_steps": 8}),
    ("spread", {"block_size": 128, "levels": 1}),
    ("spread", {"block_size": 512, "levels": 2}),
)
EXPLAINED = {  # what a table says of the names of `layer_phases`
    "block, .*": "`block, ORDER` attends inside blocks of that order",
    "cell_spread": "`cell_spread` attends to the own cell and to a spread sample",
    "sampled": "`sampled` attends to sampled keys",
    "agents": f"`agents` attends through {AGENTS} pooled queries, "
    "and `elfatt` halves the heads between them and blocks",
    ".* on tome .*": "`on tome 0.5` merges half of the tokens before",
}
ORDERS = [order for order in BLOCK_ORDERS if order != "sequence"]  # without merging, that is `raster`


def layer_phases(block_size: int) -> dict[str, Phase]:
    """Return what a layer is timed with: every block order, every attention, with and without merging.

    A part of a name after a comma is an order. Attentions that others registered are there by their own names.
    """
    phases = {f"block, {order}": blocks("block", block_size, order) for order in ORDERS}
    phases["cell_spread"] = blocks("cell_spread", block_size, "spread")
    phases["sampled"] = Phase(1.0, "sampled", block_size=block_size)
    phases["agents"] = Phase(1.0, "agent", agents=AGENTS)
    for merging, ratio in {"": 0.0, " on tome 0.5": 0.5}.items():
        halves = Phase(1.0, "elfatt", ratio=ratio, block_size=block_size, agents=AGENTS)
        phases[f"elfatt{merging}"] = halves
        phases[f"elfatt{merging}, spread"] = halves.with_settings({"block_order": "spread"})
    phases["tome 0.5"] = Phase(1.0, "softmax", ratio=0.5)
    return phases | {name: Phase(1.0, kind()) for name, kind in attentions().items() if not is_own(kind)}


def blocks(attention: AttentionName, size: int, order: BlockOrder) -> Phase:
    return Phase(1.0, attention, block_size=size, block_order=order)
