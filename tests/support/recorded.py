"""A stand-in for CUDA graphs that records operations on a CPU and does them again, without any Python in between."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")  # for the device: a capture forbids it


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self.done.append((func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.done[-1][3]


class Recorded:
    """A graph whose replay writes into the memory that the capture wrote into."""

    made: list[Recorded] = []  # noqa: RUF012

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.pool = object() if pool is None else pool
        self.replays = 0
        self.made.append(self)

    def capture(self, function: Any) -> Any:
        with Recorder() as recorder:
            output = function()
        self.done = recorder.done
        return output

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, before in self.done:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)
