"""Matching, merge and unmerge, compared with tomesd's: `python -m benchmarks.merging --out benchmarks/results`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import common
from elfatt_sd.attention.merging import Split, find_candidates, match_candidates, rows_at_once, split_grid
from elfatt_sd.benchmarking import CHANNELS, tomesd_matching
from elfatt_sd.benchmarking.report import Results, Session
from elfatt_sd.benchmarking.variants import grid_side
from elfatt_sd.devices import standard_normal
from elfatt_sd.loading import pick_device, pick_dtype
from elfatt_sd.measure import Call
from elfatt_sd.phases import Phase


def merging(
    *,
    tokens: Sequence[int] = (4096, 16384),
    ratio: float = 0.5,
    stride: int = 2,
    channels: int = CHANNELS,
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    session: Session | None = None,
) -> Results:
    """Time matching, merge and unmerge, and tomesd's with the same destinations.

    Args:
        tokens: of the (square) grid.
        ratio: fraction of the tokens merged away.
        stride: side of a cell.
        channels: of the tokens.
        batch: of the tokens.
        repeats: rounds that count.
        device: as for `load_pipeline`.
        dtypes: precisions to time.
        session: where the results go.

    Returns:
        Machine, settings, raw rounds and rows.
    """
    place = pick_device(device)
    sides = {count: grid_side(count) for count in tokens}
    Phase(ratio=ratio, stride=stride)  # checks them
    asked = {"ratio": ratio, "stride": stride, "channels": channels}
    record = (session or Session()).begin("merging", place, asked, bases=["tomesd"])
    for dtype, (count, side) in itertools.product(dtypes, sides.items()):
        generator = torch.Generator().manual_seed(0)
        x = standard_normal((batch, count, channels), generator).to(place, pick_dtype(dtype, place))
        metric = x.mT.contiguous().mT  # channels first
        calls: dict[str, Call] = {
            "tomesd": functools.partial(_peer, x, metric, side, ratio, stride),
            "ours": functools.partial(_ours, x, metric, side, ratio, stride),
            "floor: similarities": functools.partial(_similarities, x, stride),
        }
        calls = {name: torch.inference_mode()(call) for name, call in calls.items()}
        record.time({"tokens": count, "batch": batch, "dtype": dtype}, calls, repeats)
    return record.results


def _peer(x: Tensor, metric: Tensor, side: int, ratio: float, stride: int) -> None:
    merge, unmerge = tomesd_matching(metric, side, ratio, stride)
    unmerge(merge(x))


def _ours(x: Tensor, metric: Tensor, side: int, ratio: float, stride: int) -> None:
    split = Split.of(split_grid(side, side, stride, device=metric.device), (side // stride) ** 2)
    matching = match_candidates(find_candidates(metric, split), ratio)
    if matching is not None:
        matching.unmerge(matching.merge(x))


def _similarities(x: Tensor, stride: int) -> None:
    """Multiply as many sources as there are with as many destinations, in our pieces: what both compute."""
    destinations = x.shape[1] // stride**2
    keys = x[:, :destinations].transpose(1, 2)
    for some in torch.split(x[:, destinations:], rows_at_once(len(x), destinations, x.device), dim=1):
        some @ keys


if __name__ == "__main__":
    parser = common.options(__doc__, "tokens", "batch", "repeats", "device")
    parser.add_argument("--ratio", type=float, default=0.5, help="fraction of the tokens that are merged")
    parser.add_argument("--dtype", action="append", help="several times; float32 and bfloat16 if not given")
    chosen = parser.parse_args()
    given = {name: getattr(chosen, name) for name in ("ratio", "batch", "repeats", "device")}
    dtypes = chosen.dtype or ("float32", "bfloat16")
    common.run(chosen, merging, tokens=chosen.tokens or (4096, 16384), dtypes=dtypes, **given)
