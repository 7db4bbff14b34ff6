"""T-GATE (Liu et al. 2024): cross-attention stops after a step, self-attention is reused before it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.peers.base import Peer

_LOADERS = {
    "StableDiffusionPipeline": "TgateSDLoader",
    "StableDiffusionXLPipeline": "TgateSDXLLoader",
}


@contextmanager
def _on(pipe: Any, gate_fraction: float, **settings: Any) -> Iterator[None]:
    """Let the pipeline's call be the package's, which has a loop of its own."""
    import tgate

    kind = type(pipe)
    if kind.__name__ not in _LOADERS:
        raise ElfattError(f"tgate knows no {kind.__name__}; accepted: {', '.join(_LOADERS)}.")
    getattr(tgate, _LOADERS[kind.__name__])(pipe)

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = kwargs.get("num_inference_steps", 50)
        return self.tgate(*args, gate_step=max(1, round(gate_fraction * steps)), **settings, **kwargs)

    pipe.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    try:
        yield
    finally:
        pipe.__class__ = kind
        del pipe.tgate
        for module in pipe.unet.modules():
            if getattr(module.__dict__.get("forward"), "__module__", None) == "tgate.tgate_utils":
                del module.forward
                module.__dict__.pop("cache", None)


# The package's own: gate_step 10 of 25 steps.
PEER = Peer(
    "tgate",
    "tgate",
    "drops cross-attention and guidance after a step",
    "unet",
    {"gate_fraction": 0.4, "sp_interval": 5, "fi_interval": 1, "warm_up": 2},
    _on,
)
