"""The rows of the tables, and the models that they are trained and timed in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elfatt_sd.nn import ElfattAttention, Pyramid, pyramid
from elfatt_sd.nn.backbone import ATTENTIONS, Block, Patches

BASE = "elfatt"  # the row that the others are compared with
ROWS: dict[str, dict[str, Any]] = {name: {"attention": name} for name in ATTENTIONS}
ROWS |= {f"{name} without LePE": {"attention": name, "lepe": False} for name in ("elfatt", "effatt")}
ROWS["agent"]["agents"] = 16
PLAIN = {"depths": (3,), "dims": (64,), "heads": (4,), "block_size": 16, "every": (1,), "overlap": False}
LEVELS = {"depths": (1, 2, 4, 1), "dims": (24, 48, 96, 192), "heads": (2, 4, 8, 16), "block_size": (36, 36, 36, 9)}


class Labeller(nn.Module):
    """A backbone that knows positions, and gives each token of its finest level a class, and the image another.

    Tokens are normalised one by one: a norm over the image would tell local attention of what it cannot see.
    """

    def __init__(self, row: str, shape: dict[str, Any], side: int, classes: int, patterns: int) -> None:
        super().__init__()
        self.body = Pyramid(**shape, **ROWS[row], classes=0)
        first: Any = self.body.levels[0]
        first.insert(1, Positions(side, shape["dims"][0]))
        self.heads = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes)) for dim in shape["dims"])
        self.whole = nn.Linear(shape["dims"][-1], patterns) if patterns else None

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits `[n, classes, t]` and `[n, patterns]`."""
        levels = self.body.features(images)
        parts = [head(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for head, x in zip(self.heads, levels, strict=True)]
        size = parts[0].shape[2:]
        tokens = torch.stack([nn.functional.interpolate(part, size) for part in parts]).sum(0)
        whole = None if self.whole is None else self.whole(self.body.norm(levels[-1].permute(0, 2, 3, 1)).mean((1, 2)))
        return tokens.flatten(2), whole


class Positions(nn.Module):
    """Adds a learnt vector to each token of a square grid."""

    def __init__(self, side: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(side, side, dim) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def timed_model(name: str, row: str) -> nn.Module:
    """Return an untrained `vit` (ViT-Ti with patches of 16 pixels), `sequence` (as for Long Range Arena) or pyramid."""
    if name == "sequence":
        settings = {"block_size": 64, **ATTENTIONS[row]}
        return nn.Sequential(*(Block(ElfattAttention(64, 2, qkv_bias=True, **settings), 64) for _ in range(2)))
    if name == "vit":
        model = Pyramid((12,), (192,), (3,), 64, every=(1,), attention=row, overlap=False)
        first: Any = model.levels[0]
        first[0] = Patches(3, 192, 16, overlap=False)
        return model
    return pyramid(name, row)


def timed_input(name: str, size: int) -> Tensor:
    """Return one random image with sides of so many pixels, or for `sequence` 4 sequences of so many tokens."""
    return torch.randn(4, 1, size, 64) if name == "sequence" else torch.randn(1, 3, size, size)
