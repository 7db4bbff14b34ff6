"""Runs kernels in Triton's interpreter, which is chosen before Triton is imported: `TRITON_INTERPRET=1
PYTHONPATH=.:tests python FILE`.

Prints the greatest difference to the pure functions for each case, as JSON.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from support import checks, tiny_pipelines, tiny_transformers
from torch import Tensor

from elfatt_sd.attention import joint, merging
from elfatt_sd.attention import triton as kernels
from elfatt_sd.attention.joint import Keys
from elfatt_sd.attention.merging import Split, split_grid
from elfatt_sd.attention.ordering import Grid, lattice_order
from elfatt_sd.attention.softmax import sampled_attention
from elfatt_sd.config import PatchConfig
from elfatt_sd.patch import patched
from elfatt_sd.phases import Phase


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sampled(grid: Grid, keys: int, groups: int, size: int, context: Keys | None) -> tuple[Tensor, Tensor]:
    """Queries in place beside those that were put in the order of their groups."""
    q, (k, v) = normal(2, grid.tokens, 2, size), normal(2, 2, keys * groups, 2, size, seed=1)
    order = lattice_order(grid, groups, torch.device("cpu"))
    ordered = q if order is None else q[:, order[0]]
    weight = grid.tokens / keys
    if context is None:
        wanted = sampled_attention(ordered, k, v, groups)
    else:
        wanted = joint.sampled_joint_attention(ordered, k, v, groups, stands_for=weight, context=context)
    wanted = wanted if order is None else wanted[:, order[1]]
    given: dict[str, Any] = {"order": None if order is None else order[0], "stands_for": weight, "context": context}
    return wanted, kernels.sampled(q, k, v, groups, **given)


def text(size: int, mask: Tensor | None = None, stands_for: float = 1.0) -> Keys:
    return Keys(*normal(2, 2, 11, 2, size, seed=2), mask, stands_for)


def cells(
    tokens: int, number: int, groups: int, size: int, weighted: bool, context: Keys | None
) -> tuple[Tensor, Tensor]:
    q, k, v = normal(3, 2, tokens, 2, size)
    wanted = joint.cell_joint_attention(q, k, v, number, groups, weighted=weighted, context=context)
    return wanted, kernels.cells(q, k, v, number, groups, weighted=weighted, context=context)


def matched(batch: int, grid: tuple[int, int], stride: int, channels: int, first: bool) -> tuple[Tensor, Tensor]:
    """Similarities, and the similarities at the places that were found: ties may be settled otherwise."""
    metric = normal(batch, grid[0] * grid[1], channels)
    metric = metric.mT.contiguous().mT if first else metric
    metric[:, 3] = 0
    split = Split.of(split_grid(*grid, stride), (grid[0] // stride) * (grid[1] // stride))
    sources, destinations = split.places[: split.sources], split.places[split.sources :]
    similarity, nearest = merging.most_similar(metric, sources.long(), destinations.long())
    own_similarity, own = kernels.most_similar(metric, sources, destinations)
    unit = torch.nn.functional.normalize(metric, dim=2)
    at_own = (unit[:, sources] * unit[:, destinations].gather(1, own[..., None].expand(-1, -1, channels))).sum(2)
    assert (own == nearest).float().mean() > 0.9
    return torch.stack([similarity, similarity]), torch.stack([own_similarity, at_own])


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    made = {}
    mask = torch.arange(11)[None] < torch.tensor([[7], [11]])
    for size, (groups, rows) in itertools.product((40, 64, 160), ((1, 9), (2, 16), (3, 9))):
        made[f"sampled, head {size}, {groups} groups, {rows} rows"] = sampled(Grid(1, rows, 13), 17, groups, size, None)
    for name, own in {
        "text": text(72),
        "mask": text(72, mask),
        "bias": text(72, normal(2, 11)),
        "weight": text(72, None, 3.0),
    }.items():
        made[f"sampled, {name}"] = sampled(Grid(1, 9, 13), 20, 2, 72, own)
    for tokens, weighted in itertools.product((96, 103), (True, False)):
        made[f"cells, {tokens} tokens, {weighted}"] = cells(tokens, 8, 3, 48, weighted, text(48, mask))
    made["cells, without text"] = cells(103, 12, 2, 128, True, None)
    for batch, grid, stride, channels, first in ((2, (12, 14), 2, 40, True), (1, (9, 17), 4, 33, False)):
        made[f"matching, {grid}, {channels} channels"] = matched(batch, grid, stride, channels, first)
    return made


def drawn(pipe: Any, method: str | PatchConfig, **size: int) -> tuple[Tensor, Tensor]:
    """Images of a patched pipeline with PyTorch's attention, and with the kernels."""
    config = PatchConfig.preset(method) if isinstance(method, str) else method
    calls = []
    for name in ("attend", "most_similar"):
        inner = getattr(kernels, name)
        setattr(kernels, name, lambda *args, _inner=inner, **given: (calls.append(0), _inner(*args, **given))[1])
    run = checks.runner(pipe, **size)
    images = []
    for backend in ("auto", "triton"):
        with patched(pipe, config.with_settings(attention_backend=backend)):
            images.append(run())
        assert bool(calls) == (backend == "triton"), (method, backend)
    return images[0], images[1]


def pipelines(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    sd15 = tiny_pipelines.sd15(folder)
    sampled_keys = PatchConfig("sampled", (Phase(1.0, "sampled", keys=8),), levels=2)
    cell_keys = PatchConfig("cell_spread", (Phase(1.0, "cell_spread", cell=8, block_size=16),))
    return {
        "pipeline sampled": drawn(sd15, sampled_keys),
        "pipeline cell_spread": drawn(sd15, cell_keys),
        "pipeline tome": drawn(sd15, PatchConfig.preset("tome")),
        "pipeline flux": drawn(tiny_transformers.flux(folder), sampled_keys, height=64, width=64),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = {**cases(), **pipelines(Path(folder))}
    print(json.dumps({name: (own - other).abs().max().item() for name, (own, other) in made.items()}))
