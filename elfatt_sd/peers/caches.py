"""Diffusers' own caches for transformers: blocks, attention, or predicted features of earlier steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.peers.base import Peer, tidy


@contextmanager
def _on(pipe: Any, config: str, **settings: Any) -> Iterator[None]:
    import diffusers

    kind = getattr(diffusers, config, None)
    if kind is None or not hasattr(pipe.transformer, "enable_cache"):
        raise ElfattError(f"this diffusers ({diffusers.__version__}) has no {config} for {type(pipe).__name__}.")
    if "current_timestep_callback" in kind.__dataclass_fields__:
        settings["current_timestep_callback"] = lambda: pipe.current_timestep
    try:
        pipe.transformer.enable_cache(kind(**settings))
    except (ValueError, AttributeError) as error:
        raise ElfattError(f"{config} does not go with {type(pipe).__name__}: {error}") from error
    try:
        yield
    finally:
        pipe.transformer.disable_cache()
        tidy(pipe.transformer)


def _cache(name: str, config: str, what: str, **settings: Any) -> Peer:
    return Peer(name, "", what, "transformer", settings, functools.partial(_on, config=config), joins=True)


PEERS = (
    _cache(
        "first_block_cache",
        "FirstBlockCacheConfig",
        "skips steps in which the first block changes little",
        threshold=0.05,
    ),
    _cache(
        "pyramid_attention_broadcast",
        "PyramidAttentionBroadcastConfig",
        "reuses the output of attention between steps",
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 800),
    ),
    _cache(
        "taylorseer",
        "TaylorSeerCacheConfig",
        "predicts features from earlier steps",
        cache_interval=3,
        disable_cache_before_step=3,
        max_order=1,
    ),
)
