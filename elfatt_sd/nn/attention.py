"""ELFATT as a module: projections, the windows of a grid, prefix tokens and LePE around `elfatt_sd.attention`.

Shapes: B batch, N image tokens, R rows, C columns, H heads, D head size. q, k and v are `[B, N, H, D]`, row by row.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elfatt_sd import errors as checks
from elfatt_sd.attention.softmax import agent_attention, efficient_attention, equal_parts, halves, softmax_attention
from elfatt_sd.errors import ElfattError

GLOBAL_HEADS = ("effatt", "agent", "focused")


class ElfattAttention(nn.Module):
    """Self-attention of which one half of the heads is global and linear, the other exact inside windows.

    Equations lepe1 and lepe2 of the paper, normalised: `E_g + L(V)` in the global half with
    `E = softmax(Q) softmax(K^T) V` (EFFATT), and `softmax(Q K^T / sqrt(d)) V + L(V)` within each window in the local
    half, where L is a 3x3 depthwise convolution that sees zeros beyond the edge of the image or window. Where the
    fraction of the heads is no whole number, the channels of every head are split (lepe1). The paper leaves open the
    shape of a block (here windows, as square as the grid allows) and the scale of the global half (none here).

    Arguments, parameters and state dict are those of timm's `Attention`, and `lepe.*`. Any grid is accepted: windows
    whose sides do not divide it differ by a row or column. Prefix tokens (class, registers) attend exactly; all windows
    see their keys.

    Args:
        dim: channels of a token.
        num_heads: of attention; they divide `dim`.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        block_size: tokens in a window; None makes the whole grid one window, which is exact attention.
        global_fraction: of the heads; 1 is EFFATT, 0 attention inside windows alone.
        global_heads: `effatt`; `agent`, through averages of the queries (ELFATT-SD); or `focused`, as FLatten's.
        agents: number of averages, a square number, of `agent`.
        lepe: whether to add L(V).
        prefix_tokens: number of tokens before those of the image.
        grid: rows and columns of the image's tokens; None is a square.
        qk_norm: whether to normalise queries and keys.
        scale_norm: whether to normalise what is attended to.
        proj_bias: whether the last projection has a bias.
        attn_drop: 0; no matrix of attention is there to drop from.
        proj_drop: dropout after the last projection.
        norm_layer: of `qk_norm` and `scale_norm`; None is `LayerNorm`.
        device: of the parameters.
        dtype: of the parameters.
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
        grid: tuple[int, int] | None = None,
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
        if num_heads < 1 or dim % num_heads:
            raise ElfattError(f"num_heads={num_heads} is not accepted; give a number that divides dim={dim}.")
        if block_size is not None:
            checks.whole("block_size", block_size, 1)
        checks.real("global_fraction", global_fraction, 0, 1)
        checks.choice("global_heads", global_heads, GLOBAL_HEADS)
        checks.whole("prefix_tokens", prefix_tokens, 0)
        if math.isqrt(agents) ** 2 != agents or agents < 1:
            raise ElfattError(f"agents={agents} is not accepted; give a square number.")
        if attn_drop:
            raise ElfattError(f"attn_drop={attn_drop} is not accepted; give 0, as there is no matrix to drop from.")
        size = dim // num_heads
        self.split_dim, self.split_sizes = halves(num_heads, size, global_fraction)
        if self.split_dim == 3 and not 0.5 <= size * global_fraction <= size - 0.5:
            raise ElfattError(
                f"global_fraction={global_fraction} gives no head and no channel to one half of {num_heads} heads of "
                f"{size}; give a fraction nearer to 0.5, or 0 or 1."
            )
        self.num_heads, self.block_size, self.global_heads, self.agents = num_heads, block_size, global_heads, agents
        self.prefix_tokens, self.grid = prefix_tokens, grid
        own: Any = {"device": device, "dtype": dtype}
        norm = norm_layer or nn.LayerNorm
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **own)
        self.q_norm = norm(size, **own) if qk_norm else nn.Identity()
        self.k_norm = norm(size, **own) if qk_norm else nn.Identity()
        self.norm = norm(dim, **own) if scale_norm else nn.Identity()
        self.lepe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **own) if lepe else None
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **own)
        self.proj_drop = nn.Dropout(proj_drop)

    @classmethod
    def sized(cls, **settings: Any) -> type[Self]:
        """Return a subclass with other defaults, for timm's `attn_layer`, which takes classes only.

        Args:
            **settings: arguments of the class.
        """
        return type(cls.__name__, (cls,), {"__init__": functools.partialmethod(cls.__init__, **settings)})

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        """Attend among the tokens `[B, prefix + N, dim]`, or `[B, R, C, dim]` of a grid without prefix tokens.

        Args:
            x: the tokens, prefix tokens first.
            attn_mask: None; masks are refused, as the global half cannot apply one.
            is_causal: False, likewise.
            rope: None, likewise.
        """
        if attn_mask is not None or is_causal or rope is not None:
            given = "attn_mask" if attn_mask is not None else "is_causal" if is_causal else "rope"
            raise ElfattError(f"{given} is not accepted by ElfattAttention; leave it out, or use exact attention.")
        image, before = self._grid_of(x), self.prefix_tokens
        q, k, v = self.qkv(x.flatten(1, -2)).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        parts = zip(*(torch.split(each, self.split_sizes, self.split_dim) for each in (q, k, v)), strict=True)
        done = [
            attend(*part, image, weights)
            for attend, part, weights in zip((self._globally, self._locally), parts, self._lepe_weights(), strict=True)
            if part[0].numel()
        ]
        mixed = torch.cat(done, self.split_dim) if len(done) > 1 else done[0]
        if before:
            mixed = torch.cat([softmax_attention(q[:, :before], k, v), mixed], 1)
        return self.proj_drop(self.proj(self.norm(mixed.flatten(2)))).view(x.shape)

    def _grid_of(self, x: Tensor) -> tuple[int, int]:
        if x.ndim == 4 and not self.prefix_tokens:
            return x.shape[1], x.shape[2]
        tokens = x.shape[1] - self.prefix_tokens
        rows, columns = self.grid or (math.isqrt(max(tokens, 0)),) * 2
        if x.ndim != 3 or rows * columns != tokens:
            raise ElfattError(
                f"{' x '.join(map(str, x.shape[1:-1]))} tokens with prefix_tokens={self.prefix_tokens} are not "
                f"{rows} x {columns}; give grid=(rows, columns) and prefix_tokens, or tokens [batch, rows, columns, dim]."
            )
        return rows, columns

    def _lepe_weights(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return weights and biases of L of the two halves."""
        if self.lepe is None:
            return [None, None]
        assert self.lepe.bias is not None
        both = (each.unflatten(0, (self.num_heads, -1)) for each in (self.lepe.weight, self.lepe.bias))
        return [*zip(*(torch.split(each, self.split_sizes, self.split_dim - 2) for each in both), strict=True)]

    def _globally(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], lepe: Any) -> Tensor:
        image = slice(self.prefix_tokens, None)
        q = q[:, image]
        if self.global_heads == "focused":
            out = focused_attention(q, k, v)
        elif self.global_heads == "agent":
            pooled = F.adaptive_avg_pool2d(as_image(q, grid), math.isqrt(self.agents))
            out = agent_attention(q, k, v, as_tokens(pooled, q.shape[2]))
        else:
            out = efficient_attention(q, k, v)
        return out if lepe is None else out + convolved(v[:, image], grid, *lepe)

    def _locally(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], lepe: Any) -> Tensor:
        """Attend inside windows; those of one shape, of which there are four at most, are one call."""
        first = [each[:, None, : self.prefix_tokens] for each in (k, v)]
        q, k, v = (each[:, self.prefix_tokens :].unflatten(1, grid) for each in (q, k, v))
        down, across = self._windows(*grid)
        done = []
        for rows, height in equal_parts(grid[0], down):
            band = []
            for columns, width in equal_parts(grid[1], across):
                own, keys, values = (cut(each[:, rows, columns], height, width) for each in (q, k, v))
                count = own.shape[1]
                seen = [keys, values]
                if self.prefix_tokens:
                    seen = [
                        torch.cat([p.expand(-1, count, -1, -1, -1), s], 2) for p, s in zip(first, seen, strict=True)
                    ]
                out = softmax_attention(own.flatten(0, 1), *(each.flatten(0, 1) for each in seen))
                if lepe is not None:
                    out = out + convolved(values.flatten(0, 1), (height, width), *lepe)
                band.append(joined(out.unflatten(0, (-1, count)), q[:, rows, columns].shape[1:3], height, width))
            done.append(torch.cat(band, 2) if len(band) > 1 else band[0])
        return (torch.cat(done, 1) if len(done) > 1 else done[0]).flatten(1, 2)

    def _windows(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many windows lie below and beside each other: squares, wider ones where the grid is flat."""
        if self.block_size is None:
            return 1, 1
        short = max(1, round(min(rows, columns) / math.sqrt(self.block_size)))
        long = min(max(1, round(rows * columns / self.block_size / short)), max(rows, columns))
        return (short, long) if rows <= columns else (long, short)


def focused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FLatten's linear attention: features are `relu(x)^3` with the length of `relu(x)`.

    FLatten learns a scale of q and k, too, and its 5x5 convolution of the values is LePE here.
    """
    dtype, precision = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (each.to(precision) for each in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        q, k = (F.relu(each) + 1e-6 for each in (q, k))
        q, k = (F.normalize(each**3, dim=3) * torch.linalg.vector_norm(each, dim=3, keepdim=True) for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = q @ (k.transpose(2, 3) @ v) / (q @ k.sum(2).unsqueeze(3) + 1e-6)
    return mixed.transpose(1, 2).to(dtype)


def as_image(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Turn `[B, N, H, D]` into `[B, H D, R, C]`."""
    return x.flatten(2).unflatten(1, grid).permute(0, 3, 1, 2)


def as_tokens(x: Tensor, heads: int) -> Tensor:
    """Turn `[B, H D, R, C]` into `[B, N, H, D]`."""
    return x.flatten(2).transpose(1, 2).unflatten(2, (heads, -1))


def convolved(v: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve values `[B, N, H, D]` of a grid with `[H, D, 1, 3, 3]`, each channel by itself."""
    weight = weight.flatten(0, 1)
    return as_tokens(F.conv2d(as_image(v, grid), weight, bias.flatten(), padding=1, groups=len(weight)), v.shape[2])


def cut(x: Tensor, height: int, width: int) -> Tensor:
    """Cut `[B, R, C, H, D]` in windows `[B, windows, height width, H, D]`."""
    x = x.unflatten(2, (-1, width)).unflatten(1, (-1, height))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def joined(x: Tensor, grid: tuple[int, ...], height: int, width: int) -> Tensor:
    """Undo `cut`."""
    rows, columns = grid
    x = x.unflatten(2, (height, width)).unflatten(1, (rows // height, columns // width))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
