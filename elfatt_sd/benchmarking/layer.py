"""One self-attention layer of SD 1.5's finest level: the attention itself, and the layer with its projections."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.attention.ordering import Grid
from elfatt_sd.benchmarking.models import fill
from elfatt_sd.benchmarking.names import PEER, layer_phases
from elfatt_sd.benchmarking.record import Record, Results, Session, without_gradients
from elfatt_sd.benchmarking.variants import grid_side
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import standard_normal
from elfatt_sd.errors import need
from elfatt_sd.families import SelfAttention
from elfatt_sd.loading import pick_device, pick_dtype
from elfatt_sd.measure import Call, peak_memory
from elfatt_sd.methods import Blocks, Draws, Softmax
from elfatt_sd.phases import EXACT
from elfatt_sd.runtime.call import attend
from elfatt_sd.runtime.exact_run import StandaloneLayer
from elfatt_sd.runtime.schedule import Position

Move = Callable[[Tensor], Tensor]
CHANNELS, HEADS = 320, 8  # of the finest level of SD 1.5
_PEER = f"{PEER} 0.5"


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
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    sides = {count: grid_side(count) for count in sorted(tokens)}
    Blocks(block_size)  # checks it
    asked = {"dtype": str(precision).removeprefix("torch."), "block_size": block_size}
    asked["max_seconds"] = max_seconds if math.isfinite(max_seconds) else None
    record = Record(session, kind, place, asked, bases=[Softmax.name, _PEER])
    parts = {"attention": _attention_calls, "layer": _layer_calls}
    each = repeats + memory  # calls of a variant
    smallest = min(sides.values())
    variants = sum(len(make(smallest, batch, block_size, place, precision)) for make in parts.values())
    record.announce(len(sides) * variants * each)
    for (count, side), part in itertools.product(sides.items(), parts):
        before = [row for row in record.results["rows"] if row["part"] == part and row["tokens"] < count]
        calls = parts[part](side, batch, block_size, place, precision)
        key = {"tokens": count, "batch": batch, "part": part}
        kept = {name: call for name, call in calls.items() if _expected(before, name, count) <= max_seconds}
        record.announce((len(kept) - len(calls)) * each)
        if left := [name for name in calls if name not in kept]:
            which = f"{count} tokens, {part}: {', '.join(left)}"
            warnings.warn(
                f"elfatt-sd: {which} left out, as a call may take more than max_seconds={max_seconds:g}.", stacklevel=2
            )
        if not kept:
            continue
        calls = without_gradients(kept)
        record.time(key, calls, repeats)
        for name in calls if memory else ():
            record.keep_peak(key, name, batch, functools.partial(peak_memory, calls[name], place))
    return record.results


def _expected(rows: Sequence[dict[str, Any]], name: str, tokens: int) -> float:
    """Expect a call's time from the last size, as if its cost were quadratic."""
    own = [row for row in rows if row["method"] == name]
    return own[-1]["seconds"] * (tokens / own[-1]["tokens"]) ** 2 if own else (math.inf if rows else 0.0)


class _Projected:
    """A layer whose queries, keys and values are there already; see `elfatt_sd.methods.Layer`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._q, self._k, self._v = q, k, v
        self.kernel: dict[str, Any] = {"fp32_logits": False, "backend": "native"}
        self.context = None

    def project(self, tokens: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        count = tokens.shape[1] if keys is None else len(keys)
        return self._q, self._k[:, :count], self._v[:, :count]

    def queries(self, tokens: Tensor) -> Tensor:
        return self._q[:, : tokens.shape[1]]

    def merged(self, ratio: float) -> Tensor:
        return self._q.flatten(2)[:, : max(1, round(self._q.shape[1] * (1 - ratio)))]


def _attention_calls(
    side: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Call]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, batch, side * side, HEADS, CHANNELS // HEADS)
    q, k, v = standard_normal(shape, generator).to(device, dtype)
    grid, draws = Grid.image(side, side), Draws(0, 0, 0, device)
    calls: dict[str, Call] = {}
    for name, phase in {Softmax.name: EXACT, **layer_phases(block_size)}.items():
        if not phase.merge.ratio and (short := name.split(",")[0]) not in calls:
            prepared = phase.attention.prepare(grid, draws)
            calls[short] = functools.partial(attend, phase.attention, _Projected(q, k, v), q.flatten(2), prepared)
    return calls


def _layer_calls(side: int, batch: int, block_size: int, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    generator = torch.Generator().manual_seed(0)
    x = standard_normal((batch, side * side, CHANNELS), generator).to(device, dtype)
    block_input = channels_first(x)
    attention = _attention_module(device, dtype)
    calls: dict[str, Call] = {
        Softmax.name: functools.partial(attention, x),
        _PEER: functools.partial(_with_tomesd, attention, x, block_input, side, 0.5),
    }
    for name, phase in layer_phases(block_size).items():
        patched = StandaloneLayer(SelfAttention("layer", attention, None, 1), PatchConfig(phases=(phase,)))
        calls[name] = functools.partial(_step, patched, x, block_input, side)
    return calls


def channels_first(x: Tensor) -> Tensor:
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
    need("peer 'tomesd'", "tomesd")
    from tomesd.merge import bipartite_soft_matching_random2d

    cells, merged = (side, side, stride, stride), int(metric.shape[1] * ratio)
    matching: tuple[Move, Move] = bipartite_soft_matching_random2d(metric, *cells, merged, no_rand=True)
    return matching
