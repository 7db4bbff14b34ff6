"""HyperTile (Tfernd 2023): self-attention inside tiles of random size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elfatt_sd.peers.base import Peer


@contextmanager
def _on(pipe: Any, **settings: Any) -> Iterator[None]:
    from hyper_tile import split_attention

    with split_attention(pipe.unet, **settings):
        yield


_SETTINGS = {"aspect_ratio": 1.0, "tile_size": 256, "swap_size": 2}
PEER = Peer("hypertile", "hyper-tile", "attends inside tiles", "unet", _SETTINGS, _on)
