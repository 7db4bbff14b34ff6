"""ELFATT as a module: projections, the windows of a grid, prefix tokens and LePE around `elfatt_sd.attention`.

Shapes: B batch, N tokens, R rows, C columns, H heads, D head size. q, k and v are `[B, N, H, D]`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elfatt_sd import errors as checks
from elfatt_sd.attention.softmax import agent_attention, efficient_attention, equal_parts, halves, softmax_attention
from elfatt_sd.errors import ElfattError

Sides = tuple[int, int]  # rows and columns
UNKNOWN: Sides = (0, 0)  # a grid that the module is told of later, or never
Attend = Callable[[Tensor, Tensor, Tensor, Sides], Tensor]


class ElfattAttention(nn.Module):
    """Self-attention of which one half is global and linear, the other exact inside windows.

    Equations lepe2 of the paper and, where the fraction of the heads is not a whole number, lepe1, normalised. A head
    of the global half is `softmax(Q) softmax(K^T) V + L(V)` (EFFATT: over channels of Q, over tokens of K). A head of
    the local half is `softmax(Q K^T / sqrt(D)) V + L(V)` within each window. L is a 3x3 depthwise convolution that
    sees zeros beyond the image or window. The paper does not say what shape a block has (here a window as square as
    the grid allows), nor how logits are scaled; the authors' README has no scale in the global half.

    Parameters and state dict are those of timm's `Attention`, and `lepe.*`. Where windows do not divide the grid, they
    differ by a row or column. Prefix tokens (class, registers) attend exactly, and all windows see their keys.

    Args:
        dim: channels of a token.
        num_heads: number of heads, which divides `dim`.
        qkv_bias: whether queries, keys and values have a bias.
        block_size: tokens in a window; None makes the grid one window, which is exact attention.
        global_fraction: of the heads, or of the channels of each head; 1 is EFFATT, 0 attention inside windows.
        global_heads: `effatt`; `agent`, through averages of queries, as ELFATT-SD; or `focused`, as FLatten.
        agents: number of averages of `agent`, rounded down to a square number.
        lepe: whether to add L(V).
        prefix_tokens: number of tokens before those of the image.
        grid: rows and columns of the image's tokens; None is a square.
        qk_norm: as in timm, and all that follow; `attn_drop` has to be 0, as there is no matrix to drop from.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        *,
        block_size: int | None = 49,
        global_fraction: float = 0.5,
        global_heads: str = "effatt",
        agents: int = 49,
        lepe: bool = True,
        prefix_tokens: int = 0,
        grid: Sides | None = None,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"dim": dim, "num_heads": num_heads, "agents": agents}.items():
            checks.whole(name, value, 1)
        if dim % num_heads:
            raise ElfattError(f"num_heads={num_heads} is not accepted; give a number that divides dim={dim}.")
        checks.whole("block_size", 1 if block_size is None else block_size, 1)
        checks.whole("prefix_tokens", prefix_tokens, 0)
        checks.real("global_fraction", global_fraction, 0, 1)
        checks.choice("global_heads", global_heads, ("effatt", "agent", "focused"))
        checks.real("attn_drop", attn_drop, 0, 0)
        sides = [side for side in grid if type(side) is int and side >= 0] if isinstance(grid, Sequence) else []
        if grid is not None and (len(sides) != 2 or sides != [*grid]):
            raise ElfattError(f"grid={grid!r} is not accepted; give two whole numbers, rows and columns.")
        size = dim // num_heads
        self.split_dim, self.split_sizes = halves(num_heads, size, global_fraction)
        if self.split_dim == 3 and not 0.5 <= size * global_fraction <= size - 0.5:
            raise ElfattError(
                f"global_fraction={global_fraction} leaves one half no head and no channel of {num_heads} heads "
                f"of {size}; give one nearer to 0.5, or 0 or 1."
            )
        self.num_heads, self.block_size, self.global_heads, self.agents = num_heads, block_size, global_heads, agents
        self.prefix_tokens, self.grid = prefix_tokens, None if grid is None else (grid[0], grid[1])
        own: Any = {"device": device, "dtype": dtype}
        norm = norm_layer or nn.LayerNorm
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **own)
        self.q_norm, self.k_norm = (norm(size, **own) if qk_norm else nn.Identity() for _ in "qk")
        self.norm = norm(dim, **own) if scale_norm else nn.Identity()
        self.lepe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **own) if lepe else None
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **own)
        self.proj_drop = nn.Dropout(proj_drop)

    @classmethod
    def sized(cls, **settings: Any) -> type[Self]:
        """Return a subclass with other defaults, for timm's `attn_layer`, which takes classes only."""
        return type(cls.__name__, (cls,), {"__init__": functools.partialmethod(cls.__init__, **settings)})

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        """Attend among tokens `[B, prefix + N, dim]`, or those of a grid `[B, R, C, dim]` without prefix tokens.

        What needs a matrix of attention is refused: masks, causal attention and rotary embeddings.
        """
        if attn_mask is not None or is_causal or rope is not None:
            raise ElfattError("attn_mask, is_causal and rope are not accepted; use exact attention for them.")
        sides, first = self._sides(x), self.prefix_tokens
        q, k, v = self.qkv(x.flatten(1, -2)).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        lepe: Any = () if self.lepe is None else (self.lepe.weight, self.lepe.bias)
        done = []
        for half, attend in enumerate((self._global, lambda q, k, v, _: softmax_attention(q, k, v))):
            if self.split_sizes[half]:
                qkv = [torch.split(each, self.split_sizes, self.split_dim)[half] for each in (q, k, v)]
                own = [each.unflatten(0, q.shape[2:]) for each in lepe]
                own = [torch.split(each, self.split_sizes, self.split_dim - 2)[half] for each in own]
                done.append(in_windows(qkv, attend, sides, self._windows(*sides) if half else (1, 1), first, own))
        mixed = torch.cat(done, self.split_dim) if len(done) > 1 else done[0]
        if first:
            mixed = torch.cat([softmax_attention(q[:, :first], k, v), mixed], 1)
        out: Tensor = self.proj_drop(self.proj(self.norm(mixed.flatten(2))))
        return out.view(x.shape)

    def _sides(self, x: Tensor) -> Sides:
        if x.ndim == 4 and not self.prefix_tokens and self.grid in (None, UNKNOWN, tuple(x.shape[1:3])):
            return operator.index(x.shape[1]), operator.index(x.shape[2])
        tokens = operator.index(x.shape[1]) - self.prefix_tokens  # compiled code is for one grid
        sides = self.grid or (round(max(tokens, 0) ** 0.5),) * 2
        if x.ndim != 3 or not 0 < tokens == sides[0] * sides[1]:
            raise ElfattError(
                f"{' x '.join(map(str, x.shape[1:-1]))} tokens with prefix_tokens={self.prefix_tokens} do not fill "
                f"{sides[0]} x {sides[1]}; give grid=(rows, columns) and prefix_tokens."
            )
        return sides

    def _windows(self, rows: int, columns: int) -> Sides:
        """Return how many windows are in a column and in a row: squares, longer ones where the grid is narrow."""
        if self.block_size is None:
            return 1, 1
        short, long = min(rows, columns), max(rows, columns)
        across = max(1, round(short / math.sqrt(self.block_size)))
        along = min(max(1, round(rows * columns / self.block_size / across)), long)
        return (across, along) if rows <= columns else (along, across)

    def _global(self, q: Tensor, k: Tensor, v: Tensor, sides: Sides) -> Tensor:
        if self.global_heads == "effatt":
            return efficient_attention(q, k, v)
        if self.global_heads == "focused":
            return focused_attention(q, k, v)
        image = q.reshape(len(q), *sides, -1).permute(0, 3, 1, 2)
        agents = (side := math.isqrt(self.agents)) ** 2
        rows = min(sides[0], max(side, agents // sides[1]))
        pooled = F.adaptive_avg_pool2d(image, (rows, min(sides[1], agents // rows))).flatten(2).transpose(1, 2)
        return agent_attention(q, k, v, pooled.reshape(len(q), -1, *q.shape[2:]))


def in_windows(
    qkv: Sequence[Tensor], attend: Attend, sides: Sides, windows: Sides, first: int = 0, lepe: Sequence[Tensor] = ()
) -> Tensor:
    """Attend inside the windows of a grid, whose keys follow those of the `first` tokens, and convolve values there.

    Windows of one shape, of which there are four at most, are one call. `lepe` is weight and bias by head and channel.
    """
    heads, size = qkv[0].shape[2:]
    images = [each[:, first:].reshape(-1, *sides, heads, size) for each in qkv]
    bands = []
    for rows, height in equal_parts(sides[0], windows[0]):
        band = []
        for columns, width in equal_parts(sides[1], windows[1]):
            cut = [each[:, rows, columns] for each in images]
            down, across = cut[0].shape[1] // height, cut[0].shape[2] // width
            shape = (-1, down, height, across, width, heads, size)
            q, *own = (each.reshape(shape).transpose(2, 3).reshape(-1, height * width, heads, size) for each in cut)
            k, v = own
            if first:
                before = (each[:, None, :first].expand(-1, down * across, -1, -1, -1).flatten(0, 1) for each in qkv[1:])
                k, v = (torch.cat(pair, 1) for pair in zip(before, own, strict=True))
            out = attend(q, k, v, (height, width))
            if lepe:
                values = own[1].reshape(-1, height, width, heads * size).permute(0, 3, 1, 2)
                local = F.conv2d(values, lepe[0].flatten(0, 1), lepe[1].flatten(), padding=1, groups=heads * size)
                out = out + local.permute(0, 2, 3, 1).reshape(out.shape)
            out = out.reshape(-1, down, across, height, width, heads, size).transpose(2, 3)
            band.append(out.reshape(cut[0].shape))
        bands.append(torch.cat(band, 2) if len(band) > 1 else band[0])
    return (torch.cat(bands, 1) if len(bands) > 1 else bands[0]).flatten(1, 2)


def focused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FLatten's linear attention, of features `relu(x)^3` as long as `relu(x)`; without its learnt scale of q and k."""
    dtype = q.dtype
    q, k, v = (each.transpose(1, 2).to(torch.promote_types(dtype, torch.float32)) for each in (q, k, v))
    with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
        q, k = (F.relu(each) + 1e-6 for each in (q, k))
        q, k = (F.normalize(each**3, dim=3) * torch.linalg.vector_norm(each, dim=3, keepdim=True) for each in (q, k))
        mixed = q @ (k.transpose(2, 3) @ v) / (q @ k.sum(2).unsqueeze(3))
    return mixed.transpose(1, 2).to(dtype)
