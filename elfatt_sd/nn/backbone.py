"""The paper's backbones: four levels of transformer blocks between convolutions, with a choice of attention.

Read from the paper's counts of operations, which agree within 0.5 % (tests/nn), but for c1 = 0.75 in tabab4 (0.7 %):
the MLP widens four times, LePE is in all rows, level 3 alternates exact attention and the named one, level 4 is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from elfatt_sd.errors import ElfattError, choice
from elfatt_sd.nn.attention import ElfattAttention

# What a name is to `ElfattAttention`.
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"global_fraction": 0.0, "block_size": None},
    "elfatt": {},
    "effatt": {"global_fraction": 1.0},
    "local": {"global_fraction": 0.0},
    "agent": {"global_fraction": 1.0, "global_heads": "agent"},
    "focused": {"global_fraction": 1.0, "global_heads": "focused"},
}

# Depth of each level, channels, heads, and tokens in a window at 224 pixels.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "cswin-t": ((2, 4, 18, 1), (64, 128, 256, 512), (2, 4, 8, 16), (49, 49, 196, 49)),
    "cswin-b": ((3, 6, 29, 2), (96, 192, 384, 768), (4, 8, 16, 32), (196, 196, 196, 49)),
    "swin-t": ((2, 2, 6, 2), (96, 192, 384, 768), (3, 6, 12, 24), (196, 196, 196, 49)),
    "swin-b": ((2, 2, 18, 2), (128, 256, 512, 1024), (4, 8, 16, 32), (196, 196, 196, 49)),
}


def pyramid(name: str, attention: str = "elfatt", classes: int = 1000, **settings: Any) -> Pyramid:
    """Build a backbone of the paper, with random weights.

    Args:
        name: `cswin-t`, `cswin-b`, `swin-t` or `swin-b`.
        attention: `softmax`, `elfatt`, `effatt`, `local`, `agent` or `focused`.
        classes: of the images; 0 leaves the last layer out.
        **settings: further arguments of `Pyramid`, as `block_size=(576, 576, 576, 144)` for images of 384 pixels.
    """
    choice("name", name, SHAPES)
    *shape, windows = SHAPES[name]
    return Pyramid(*shape, **{"block_size": windows, **settings}, attention=attention, classes=classes)


class Pyramid(nn.Module):
    """A vision transformer whose levels halve the grid: images `[B, channels, height, width]` to logits.

    Images have any sides. A single level is a plain transformer with patches of 4 pixels.

    Args:
        depths: number of blocks of each level.
        dims: channels of each level.
        heads: of attention, of each level.
        block_size: tokens in a window, for all levels or for each.
        attention: `softmax`, `elfatt`, `effatt`, `local`, `agent` or `focused`.
        every: of each level, which block has that attention and is not exact: 1 all, 2 every second, 0 none.
        classes: of the images; 0 leaves the last layer out.
        in_channels: of the images.
        overlap: whether the patches overlap, as CSWin's, or not, as Swin's.
        **attention_settings: of `ElfattAttention`, in all blocks, such as `lepe` and `global_fraction`.
    """

    def __init__(
        self,
        depths: Sequence[int],
        dims: Sequence[int],
        heads: Sequence[int],
        block_size: int | Sequence[int] = 49,
        *,
        attention: str = "elfatt",
        every: Sequence[int] = (1, 1, 2, 0),
        classes: int = 1000,
        in_channels: int = 3,
        overlap: bool = True,
        **attention_settings: Any,
    ) -> None:
        super().__init__()
        choice("attention", attention, ATTENTIONS)
        for name in ATTENTIONS[attention].keys() & attention_settings.keys():
            raise ElfattError(f"{name} is not accepted with attention={attention!r}, which sets it.")
        sizes = [*block_size] if isinstance(block_size, Sequence) else [block_size] * len(depths)
        levels = zip(depths, (in_channels, *dims[:-1]), dims, heads, sizes, every[: len(depths)], strict=True)
        self.levels = nn.ModuleList()
        for depth, channels, dim, count, size, step in levels:
            blocks: list[nn.Module] = [Patches(channels, dim, 2 if self.levels else 4, overlap=overlap)]
            for index in range(depth):
                own = ATTENTIONS[attention if step and index % step == step - 1 else "softmax"]
                settings = {"qkv_bias": True, "block_size": size, **attention_settings, **own}
                blocks.append(Block(ElfattAttention(dim, count, **settings), dim))
            self.levels.append(nn.Sequential(*blocks))
        self.norm = nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], classes) if classes else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def features(self, images: Tensor) -> list[Tensor]:
        """Return what each level makes of images, `[B, dim, rows, columns]`, as segmentation and detection need."""
        x, found = images.permute(0, 2, 3, 1), []
        for level in self.levels:
            x = level(x)
            found.append(x.permute(0, 3, 1, 2))
        return found

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[B, classes]`."""
        logits: Tensor = self.head(self.norm(self.features(images)[-1].permute(0, 2, 3, 1)).mean((1, 2)))
        return logits


class Block(nn.Module):
    def __init__(self, attention: nn.Module, dim: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Make tokens of patches of an image `[B, R, C, channels]`: `[B, R / side, C / side, dim]`."""

    def __init__(self, channels: int, dim: int, side: int, *, overlap: bool) -> None:
        super().__init__()
        kernel = 2 * side - 1 if overlap else side
        self.project = nn.Conv2d(channels, dim, kernel, side, (kernel - side + 1) // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.project(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return normed
