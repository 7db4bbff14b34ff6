"""DeepCache (Ma et al. 2024): most steps run the outer blocks alone, on deep features of an earlier step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elfatt_sd.peers.base import Peer


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
        for module in pipe.unet.modules():
            _unshadow(module)


def _unshadow(module: Any) -> None:
    """Take out a method that the package has put back as an attribute of the object."""
    own: Any = module.__dict__.get("forward")
    if getattr(own, "__self__", None) is module and own.__func__ is type(module).forward:
        del module.forward


PEER = Peer(
    "deepcache",
    "DeepCache",
    "reuses deep features between steps",
    "unet",
    {"cache_interval": 3, "cache_branch_id": 0},
    _on,
    joins=True,
)
