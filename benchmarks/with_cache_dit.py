"""`elfatt-sd` with cache-dit among the peers (`pip install cache-dit`, from diffusers 0.36 on).

python -m benchmarks.with_cache_dit eval run benchmarks/reuse_toy_dit.toml --out runs/reuse_toy_dit
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cache_dit

from elfatt_sd.cli import main
from elfatt_sd.peers import PEERS, Peer

SETTINGS = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "residual_diff_threshold": 0.1, "max_warmup_steps": 3}


@contextmanager
def on(pipe: Any, taylor_order: int, **settings: Any) -> Iterator[None]:
    """DBCache: the blocks between the first and the last ones are skipped where the first ones change little."""
    logging.getLogger("CACHE_DIT").setLevel(logging.ERROR)
    taylor = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=taylor_order) if taylor_order else None
    before = {module: vars(module).get("forward") for module in pipe.transformer.modules()}
    parts = dict(pipe.transformer._modules)
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**settings), calibrator_config=taylor)
    try:
        yield
    finally:
        cache_dit.disable_cache(pipe)
        vars(pipe.transformer).pop("_is_patched", None)
        vars(pipe.transformer)["_modules"] = parts  # their order, which diffusers' caches go by
        for module, forward in before.items():  # some of which it leaves in place
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


PEERS["cache_dit"] = Peer("cache_dit", "", {**SETTINGS, "taylor_order": 0}, on, "transformer")

if __name__ == "__main__":
    main()
