"""One self-attention layer of SD 1.5's finest level: the attention itself, and the layer with its projections."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.attention import agent_attention, block_attention, elfatt_attention, pool_agents, softmax_attention
from elfatt_sd.benchmarking.lineup import grid_side
from elfatt_sd.benchmarking.models import fill
from elfatt_sd.benchmarking.record import Record, Session
from elfatt_sd.benchmarking.rows import Results
from elfatt_sd.benchmarking.timing import without_gradients
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families import SelfAttention
from elfatt_sd.joint import cell_joint_attention
from elfatt_sd.measuring.clock import Call
from elfatt_sd.measuring.memory import peak_memory
from elfatt_sd.methods import Blocks, Sampled
from elfatt_sd.optional import need
from elfatt_sd.pipelines import pick_device, pick_dtype
from elfatt_sd.sampled import sampled_attention
from elfatt_sd.schedule import Position
from elfatt_sd.standalone import StandaloneLayer
from elfatt_sd.tiling import BLOCK_ORDERS, cell_blocks, sample_counts

Move = Callable[[Tensor], Tensor]
CHANNELS, HEADS = 320, 8  # of the finest level of SD 1.5
_AGENTS = 64


def layer(
    *,
    tokens: Sequence[int] = (4096, 16384),
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtype: str = "auto",
    block_size: int = 128,
    max_seconds: float = math.inf,
    memory: bool = True,
    kind: str = "layer",
    session: Session | None = None,
) -> Results:
    """Time one self-attention layer of SD 1.5's finest level: the attention itself, and the layer with projections.

    What a method draws at random for each step is part of its layer's time.

    Args:
        tokens: of the (square) grid.
        batch: of the layer.
        repeats: rounds that count.
        device: as for `load_pipeline`.
        dtype: likewise.
        block_size: tokens in a block.
        max_seconds: leave a variant out at a size where its growth so far lets expect a call longer than this.
        memory: also measure the peak memory.
        kind: `layer`, or `growth` to fit the exponent of the growth with the tokens too.
        session: where the results go.

    Returns:
        Machine, settings, raw rounds, and rows for each size and variant: `part` is `attention` or `layer`.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    sides = {count: grid_side(count) for count in sorted(tokens)}
    Blocks(block_size)  # checks it
    asked = {"dtype": str(precision).removeprefix("torch."), "block_size": block_size}
    asked["max_seconds"] = max_seconds if math.isfinite(max_seconds) else None
    record = Record(session, kind, place, asked, bases=["softmax", "tomesd 0.5"])
    parts = {"attention": _attention_calls, "layer": _layer_calls}
    each = repeats + memory  # calls of a variant
    smallest = min(sides.values())
    variants = sum(len(make(smallest, batch, block_size, place, precision)) for make in parts.values())
    record.announce(len(sides) * variants * each)
    for (count, side), part in itertools.product(sides.items(), parts):
        before = [row for row in record.results["rows"] if row["part"] == part and row["tokens"] < count]
        calls = parts[part](side, batch, block_size, place, precision)
        key = {"tokens": count, "batch": batch, "part": part}
        begun = record.begun(key)  # by an earlier sitting, whose choice stands
        kept = {
            name: call
            for name, call in calls.items()
            if (name in begun if begun else _expected(before, name, count) <= max_seconds)
        }
        record.announce((len(kept) - len(calls)) * each)
        if not kept:
            continue
        calls = without_gradients(kept)
        record.time(key, calls, repeats)
        lost = record.group(key)["lost"]
        for name in [name for name in calls if memory and name not in lost]:
            record.keep_peak(key, name, batch, functools.partial(peak_memory, calls[name], place))
    return record.results


def growth(*, tokens: Sequence[int] = (4096, 9216, 16384, 36864, 65536), **options: Any) -> Results:
    """Time a layer over sizes and fit the exponent of its growth with the tokens.

    Args:
        tokens: sizes of square grids.
        **options: of `layer`.

    Returns:
        As `layer`, and `exponents` by part and variant.
    """
    return layer(tokens=tokens, kind="growth", **options)


def _expected(rows: Sequence[dict[str, Any]], name: str, tokens: int) -> float:
    """Expect a call's time from the last size, as if its cost were quadratic."""
    own = [row for row in rows if row["method"] == name]
    return own[-1]["seconds"] * (tokens / own[-1]["tokens"]) ** 2 if own else (math.inf if rows else 0.0)


def _attention_calls(
    side: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Call]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, batch, side * side, HEADS, CHANNELS // HEADS)
    q, k, v = torch.randn(shape, generator=generator).to(device, dtype)
    blocks = cell_blocks(side * side, block_size)
    seen, groups = sample_counts(side * side, block_size, Sampled().groups)
    keys, values = (x[:, : seen * groups] for x in (k, v))
    return {
        "softmax": lambda: softmax_attention(q, k, v),
        "agents": lambda: agent_attention(q, k, v, pool_agents(q, _AGENTS)),
        "block": lambda: block_attention(q, k, v, block_size),
        "cell_spread": lambda: cell_joint_attention(q, k, v, q.shape[1] // blocks, blocks),
        "sampled": lambda: sampled_attention(q, keys, values, groups),
        "elfatt": lambda: elfatt_attention(q, k, v, agents=_AGENTS, block_size=block_size),
    }


def _layer_calls(side: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, side * side, CHANNELS, generator=generator).to(device, dtype)
    block_input = channels_first(x)
    attention = _attention_module(device, dtype)
    calls: dict[str, Call] = {
        "softmax": functools.partial(attention, x),
        "tomesd 0.5": functools.partial(_with_tomesd, attention, x, block_input, side, 0.5),
    }
    for name, phase in layer_phases(block_size).items():
        patched = StandaloneLayer(SelfAttention("layer", attention, None, 1), PatchConfig(phases=(phase,)))
        calls[name] = functools.partial(_step, patched, x, block_input, side)
    return calls


def layer_phases(block_size: int) -> dict[str, Phase]:
    """Return what a layer is timed with: every block order, every attention, with and without merging."""
    orders = [order for order in BLOCK_ORDERS if order != "sequence"]  # without merging, that is `raster`
    phases = {f"block, {order}": Phase(1.0, "block", block_size=block_size, block_order=order) for order in orders}
    return phases | {
        "cell_spread": Phase(1.0, "cell_spread", block_size=block_size, block_order="spread"),
        "sampled": Phase(1.0, "sampled", block_size=block_size),
        "agents": Phase(1.0, "agent", agents=_AGENTS),
        "elfatt": Phase(1.0, "elfatt", block_size=block_size, agents=_AGENTS),
        "elfatt, spread": Phase(1.0, "elfatt", block_size=block_size, agents=_AGENTS, block_order="spread"),
        "elfatt on tome 0.5": Phase(1.0, "elfatt", ratio=0.5, block_size=block_size, agents=_AGENTS),
        "elfatt on tome 0.5, spread": Phase(
            1.0, "elfatt", ratio=0.5, block_size=block_size, agents=_AGENTS, block_order="spread"
        ),
        "tome 0.5": Phase(1.0, "softmax", ratio=0.5),
    }


def channels_first(x: Tensor) -> Tensor:
    """Return tokens `[batch, tokens, channels]` that lie channels first, as the input of SD 1.5's blocks does."""
    return x.mT.contiguous().mT


def _step(patched: StandaloneLayer, x: Tensor, block_input: Tensor, side: int) -> Tensor:
    """Do what a layer costs in a denoising step: draw, then attend."""
    patched.begin(Position(0, 1), (x.shape[0], 4, side, side), block_input)
    return patched(x)


def _attention_module(device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers.models.attention_processor import Attention

    with torch.device("meta"):
        attention = Attention(CHANNELS, heads=HEADS, dim_head=CHANNELS // HEADS)
    return fill(attention, device, dtype).eval()


def _with_tomesd(attention: Any, x: Tensor, block_input: Tensor, side: int, ratio: float) -> Tensor:
    merge, unmerge = tomesd_matching(block_input, side, ratio, 2)
    return unmerge(attention(merge(x)))


def tomesd_matching(metric: Tensor, side: int, ratio: float, stride: int) -> tuple[Move, Move]:
    """Return tomesd's merge and unmerge for tokens `[batch, side * side, channels]`, with fixed destinations."""
    need("peer 'tomesd'", "tomesd")
    from tomesd.merge import bipartite_soft_matching_random2d

    cells, merged = (side, side, stride, stride), int(metric.shape[1] * ratio)
    matching: tuple[Move, Move] = bipartite_soft_matching_random2d(metric, *cells, merged, no_rand=True)
    return matching
