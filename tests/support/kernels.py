"""A machine with GPUs that computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from elfatt_sd.families import family_of, joint, unwrap
from elfatt_sd.methods import Grid
from elfatt_sd.runtime.schedule import Position, Schedule, _Found

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
STEPS = 4
_TIMESTEPS = torch.arange(STEPS)


class Machine:
    """The fake machine: `step` of them all is the one that every call is in, as values on a device cannot be read."""

    step, grid = 0, Grid(0, 0, 0)

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def move(self, module: nn.Module, dtype: torch.dtype, device: torch.device = GPU) -> Any:
        """Give a module fake weights on a device, in place."""
        with self.mode:
            for part in module.modules():
                for kept in (part._parameters, part._buffers):
                    for name, tensor in kept.items():
                        if tensor is not None:
                            own = dtype if tensor.is_floating_point() else tensor.dtype
                            moved: Any = torch.empty(tensor.shape, dtype=own, device=device)
                            kept[name] = nn.Parameter(moved, False) if kept is part._parameters else moved
        return module

    def call(
        self, module: nn.Module, dtype: torch.dtype, *, rows: int = 2, side: int = 16, device: torch.device = GPU
    ) -> torch.Tensor:
        """Call a denoiser with inputs on a device, and return its output."""
        with self.mode, torch.no_grad():
            family = family_of(module)
            latent = Grid(family.latent(module).frames, side, side)
            inner = unwrap(module)

            def fill(*shape: int) -> torch.Tensor:
                return torch.zeros(*shape, dtype=dtype, device=device)

            self.grid = family.grid(inner, latent)
            given = family.arguments(inner, self.grid, rows, fill)
            output = module(**{**given, "return_dict": False})
        while not isinstance(output, torch.Tensor):
            output = output[0]
        return output


def _forget() -> None:
    """Empty the caches of the package: what is kept on a fake device holds no values."""
    for name, module in list(sys.modules.items()):
        if name.startswith("elfatt_sd"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == name:
                    value.cache_clear()


@contextmanager
def fake_machine() -> Iterator[Machine]:
    """Let the block run on a fake machine."""
    machine = Machine()

    def locate(schedule: Any, timestep: Any, unit: int | None = None) -> Position:
        found = _Found(Position(machine.step, STEPS), _TIMESTEPS)
        schedule._follow(found)
        return found.position

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "locate", locate)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**35, 2**36))
        patch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
        patch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(joint, "_read_grid", lambda *_: machine.grid)
        _forget()
        yield machine
    _forget()
