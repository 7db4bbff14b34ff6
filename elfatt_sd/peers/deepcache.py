"""DeepCache (Ma et al. 2024): most steps run the outer blocks alone, on deep features of an earlier step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elfatt_sd.peers.base import Peer, tidy


@contextmanager
def _on(pipe: Any, **settings: Any) -> Iterator[None]:
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(**settings)
    helper.enable()
    try:
        yield
    finally:
        helper.disable()
        tidy(pipe.unet)


PEER = Peer(
    "deepcache",
    "DeepCache",
    "reuses deep features between steps",
    "unet",
    {"cache_interval": 3, "cache_branch_id": 0},
    _on,
    joins=True,
)
