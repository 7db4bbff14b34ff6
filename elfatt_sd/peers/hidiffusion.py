"""HiDiffusion (Zhang et al. 2024): outer blocks at half the resolution, and attention in windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.peers.base import Peer


@contextmanager
def _on(pipe: Any, **settings: Any) -> Iterator[None]:
    try:
        from hidiffusion import apply_hidiffusion, remove_hidiffusion
    except ImportError as error:
        raise ElfattError(f"hidiffusion does not go with this diffusers: {error}; try an older one.") from error
    before = pipe.unet.num_upsamplers  # which the package raises, and does not put back
    try:
        apply_hidiffusion(pipe, **settings)
    except Exception as error:
        pipe.unet.num_upsamplers = before
        raise ElfattError(f"hidiffusion does not know this model: {error}") from error
    try:
        yield
    finally:
        remove_hidiffusion(pipe)
        pipe.unet.num_upsamplers = before


PEER = Peer(
    "hidiffusion",
    "hidiffusion",
    "halves the resolution of outer blocks",
    "unet",
    {"apply_raunet": True, "apply_window_attn": True},
    _on,
)
