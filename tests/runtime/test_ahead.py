"""Draws that are made ahead are those of every step, in buffers that stay the same; forced here on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import generator

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.config import METHODS
from elfatt_sd.methods import Blocks, Draws, Prepared
from elfatt_sd.runtime import call as calls
from elfatt_sd.runtime import memory as ahead
from elfatt_sd.runtime.memory import RunDraws

STEPS = 6
CONFIGS = {
    **{method: PatchConfig.preset(method, levels=2) for method in METHODS if method not in ("sd", "elfatt-quality")},
    "tome, fixed": PatchConfig.preset("tome", use_rand=False),
    "tome, reused": PatchConfig.preset("tome", reuse_steps=4),
    "tome, corrected": PatchConfig.preset("tome", residual_steps=3),
    "sampled, corrected": PatchConfig("own", (Phase(1.0, "sampled", keys=16, residual_steps=3),)),
    "sampled, one draw": PatchConfig("own", (Phase(1.0, "sampled", keys=16, groups=3, redraw=False),)),
    "two phases": PatchConfig("own", (Phase(0.5, "sampled", keys=16, lattice=False), Phase(1.0, ratio=0.3))),
    "spread": PatchConfig("own", (Phase(1.0, "block", block_size=24, block_order="spread", second_order="curve"),)),
    "spread, one draw": PatchConfig("own", (Phase(1.0, "block", block_size=24, block_order="spread", redraw=False),)),
    "cells": PatchConfig("own", (Phase(1.0, "cell_spread", block_size=16, cell=8),)),
}


def outputs(config: PatchConfig, first: int = 0) -> tuple[Any, list[torch.Tensor]]:
    """Call a UNet in every step, twice in each: for one picture and for a smaller one."""
    unet, scheduler = elfatt_sd.apply_patch(tiny.unet(), config), tiny.ddim()
    scheduler.set_timesteps(STEPS)
    sample, text = torch.randn(2, 4, 16, 16, generator=generator()), torch.randn(2, 3, tiny.TEXT_WIDTH)
    made = []
    with torch.no_grad():
        for timestep in scheduler.timesteps[first:]:
            for rows in (16, 8):
                made.append(unet(sample[:, :, :rows], timestep, torch.zeros_like(text)).sample)
    return unet, made


def force(monkeypatch: pytest.MonkeyPatch, most_bytes: int = 1 << 20) -> list[int]:
    """Let the CPU draw ahead as a GPU does, and count the steps of each time that it draws."""
    times: list[int] = []
    make = RunDraws._make

    def count(self: RunDraws, first: int) -> None:
        make(self, first)
        times.append(len(self._steps))

    monkeypatch.setattr(calls, "AT_ONCE", ())
    monkeypatch.setattr(ahead, "MOST_BYTES", most_bytes)
    monkeypatch.setattr(RunDraws, "_make", count)
    return times


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch, name: str, first: int) -> None:
    _, wanted = outputs(CONFIGS[name], first)
    times = force(monkeypatch)
    _, made = outputs(CONFIGS[name], first)
    assert all(torch.equal(own, other) for own, other in zip(made, wanted, strict=True))
    assert (name == "tome, fixed") is not any(steps > 1 for steps in times)


def test_few_steps_at_once_where_they_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted = outputs(CONFIGS["tome"])
    times = force(monkeypatch, most_bytes=20000)  # two steps of three layers of 256 tokens, four of 128
    _, made = outputs(CONFIGS["tome"])
    assert all(torch.equal(own, other) for own, other in zip(made, wanted, strict=True))
    assert 1 < max(times) < STEPS
    assert sum(times) == 2 * STEPS


def test_a_step_is_one_copy_into_buffers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and CUDA graphs find the same tensors in every step, at places that are aligned."""
    force(monkeypatch)
    unet, scheduler = elfatt_sd.apply_patch(tiny.unet(), "elfatt-fast", block_size=16), tiny.ddim()
    scheduler.set_timesteps(STEPS)
    layers = [module.elfatt_state for module in unet.modules() if hasattr(module, "elfatt_state")]
    seen, values = set(), set()
    with torch.no_grad():
        for timestep in scheduler.timesteps[2:]:
            unet(torch.zeros(1, 4, 16, 16), timestep, torch.zeros(1, 3, tiny.TEXT_WIDTH))
            keys = [layer.denoiser.latest.states[layer.index].prepared.keys for layer in layers]
            seen.add(tuple((id(each), each.data_ptr()) for each in keys))
            values.add(tuple(tuple(each.tolist()) for each in keys))
    assert len(seen) == 1
    assert len(values) == STEPS - 2
    first = keys[0].untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == first and each.data_ptr() % 16 == 0 for each in keys)


def test_with_gradients_every_step_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass reads what a step drew, maybe after other steps."""
    times = force(monkeypatch)
    unet = elfatt_sd.apply_patch(tiny.unet(), "tome")
    scheduler = tiny.ddim()
    scheduler.set_timesteps(2)
    sample = torch.zeros(1, 4, 16, 16, requires_grad=True)
    made = [unet(sample, timestep, torch.zeros(1, 3, tiny.TEXT_WIDTH)).sample.sum() for timestep in scheduler.timesteps]
    torch.stack(made).sum().backward()  # type: ignore[no-untyped-call]
    assert sample.grad is not None
    assert not times


@dataclass(frozen=True)
class Own(Blocks):
    """An attention of somebody else's, which may look at the numbers."""

    name = "own blocks"

    def prepare(self, grid: Any, draws: Draws) -> Prepared:
        assert draws.ahead is None
        order = draws.upload(draws.uniform("own", grid.tokens)).argsort()
        return Prepared(order, order.argsort())


def test_an_attention_of_ones_own_prepares_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PatchConfig("own", (Phase(1.0, Own(block_size=16)),))
    _, wanted = outputs(config)
    force(monkeypatch)
    _, made = outputs(config)
    assert all(torch.equal(own, other) for own, other in zip(made, wanted, strict=True))


def test_a_model_that_moves_within_a_run_draws_on_its_new_device(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch)
    unet, scheduler = elfatt_sd.apply_patch(tiny.unet(), "tome"), tiny.ddim()
    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        for timestep, device in zip(scheduler.timesteps, ("cpu", "cpu", "meta"), strict=False):
            unet.to(device)
            given = (
                torch.zeros(1, 4, 16, 16, device=device),
                timestep,
                torch.zeros(1, 3, tiny.TEXT_WIDTH, device=device),
            )
            assert unet(*given).sample.device.type == device
