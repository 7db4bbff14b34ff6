"""Token merging by its authors' package (Bolya and Hoffman 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elfatt_sd.peers.base import Peer


@contextmanager
def _on(pipe: Any, stride: int, **options: Any) -> Iterator[None]:
    import tomesd

    tomesd.apply_patch(pipe, sx=stride, sy=stride, **options)
    try:
        yield
    finally:
        tomesd.remove_patch(pipe)


PEER = Peer(
    "tomesd",
    "tomesd",
    "merges tokens before attention",
    "unet",
    {"ratio": 0.5, "stride": 2, "max_downsample": 1, "use_rand": True},
    _on,
)
