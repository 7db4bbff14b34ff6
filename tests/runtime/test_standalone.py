"""A layer on its own does what it does inside a patched pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families import find_layers
from elfatt_sd.runtime.schedule import Position
from elfatt_sd.runtime.standalone import StandaloneLayer

PHASES = [
    Phase(1.0, "block", block_size=16, block_order="spread"),
    Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8),
    Phase(1.0, "agent", ratio=0.4, stride=4, agent_source="merged"),
]


@pytest.fixture
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.attention.name)
def test_it_does_what_the_patched_layer_does(pipe: Any, phase: Phase) -> None:
    """The same draws, the same metric, the same numbers, in the third of four steps."""
    index = 2
    layer = find_layers(pipe.unet)[index]
    config = PatchConfig("x", (phase,), levels=2, seed=3)
    alone = StandaloneLayer(layer, config, index)
    elfatt_sd.apply_patch(pipe, config)
    seen: list[Any] = []
    assert layer.norm is not None
    handles = [
        layer.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        layer.attention.register_forward_hook(lambda module, args, output: seen.append((args[0], output))),
    ]
    pipe("a", num_inference_steps=4, generator=torch.Generator().manual_seed(1), output_type="latent")
    for handle in handles:
        handle.remove()
    block_input, (hidden_states, expected) = seen[4], seen[5]
    with torch.no_grad():
        alone.begin(Position(2, 4), (2, 4, 16, 16), block_input)
        assert torch.equal(alone(hidden_states), expected)


def test_the_original_stays_as_it_is_and_shares_its_weights(pipe: Any) -> None:
    layer = find_layers(pipe.unet)[0]
    before = layer.attention.processor
    alone = StandaloneLayer(layer, PatchConfig("x", (PHASES[0],)))
    alone.begin(Position(0, 1), (1, 4, 16, 16))
    tokens = torch.randn(1, 256, 16)
    first = alone(tokens)
    assert layer.attention.processor is before
    with torch.no_grad():
        layer.attention.to_v.weight.mul_(2)
    assert not torch.equal(alone(tokens), first)
