"""Names of what is timed, as tables and results show them, and what they stand for."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from elfatt_sd.attention.ordering import BLOCK_ORDERS, BlockOrder
from elfatt_sd.config import Method, PatchConfig
from elfatt_sd.methods import AttentionName, Softmax, attentions, is_own
from elfatt_sd.peers import PEERS
from elfatt_sd.phases import Phase

UNPATCHED, PEER, FLOOR, EXACT_THROUGH = "untouched", "tomesd", "floor", "exact, "
COMPILED, AUTOTUNED, KEPT = ", compiled", ", autotuned", ", freed memory kept"  # at the end of a name
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


def plain_name(name: str) -> str:
    return name.removesuffix(COMPILED).removesuffix(AUTOTUNED).removesuffix(KEPT)


def is_reference(name: str) -> bool:
    plain = plain_name(name)
    return plain == UNPATCHED or is_peer(plain) or plain.startswith((FLOOR, EXACT_THROUGH))


def is_peer(name: str) -> bool:
    return name.partition(":")[0] in PEERS


def differs_by_step(name: str) -> bool:
    return is_peer(name) and name.partition(":")[0] != PEER


_LEGEND = {  # by the names that it explains
    UNPATCHED: "`untouched` is the model with PyTorch's fused attention",
    Softmax.name: f"`{Softmax.name}` is PyTorch's fused attention",
    f"{PEER}.*": "`tomesd` is the package",
    **{f"{name}(:.*)?": f"`{name}` is that of {PEERS[name].package or 'diffusers'}" for name in PEERS if name != PEER},
    FLOOR: "`floor` leaves out the self-attention layers of the finest level",
    f"{EXACT_THROUGH}.*": "`exact, BACKEND` attends exactly in every self-attention layer, through that backend",
    "floor of .*": "`floor of N levels` leaves out those of the N finest levels",
    "floor: .*": "`floor: similarities` is the product that finds the most similar tokens, and nothing else",
    r"[\w-]+:.*=.*": "`METHOD:SETTING=VALUE` is a method with a setting changed; `ratio=0` merges nothing",
    f".*{COMPILED}": "`compiled` rows ran through `torch.compile`",
    f".*{AUTOTUNED}": "`autotuned` rows patch the layers that the method makes faster, as measured before",
    f".*{KEPT}": "`freed memory kept` rows ran in processes that called `elfatt_sd.keep_freed_memory`",
    **EXPLAINED,
}


def legend(names: Collection[str]) -> str:
    said = [text for pattern, text in _LEGEND.items() if any(re.fullmatch(pattern, name) for name in names)]
    return "; ".join(said) + "." if said else ""
