"""A watched run stays untouched, and a layer on its own does what it does inside a patched pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import runner

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.families import find_denoisers, find_layers, main_denoiser
from elfatt_sd.runtime.call import LayerCall
from elfatt_sd.runtime.exact_run import ExactRun, StandaloneLayer, image_of
from elfatt_sd.runtime.schedule import Position

SAMPLED = Phase(1.0, "sampled", keys=4)


@pytest.fixture
def made(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, Callable[[], torch.Tensor]]:
    if request.param != "flux":
        pipe, run = getattr(tiny_transformers, request.param)()
        return pipe, run
    pipe = tiny_transformers.flux(folder)
    return pipe, runner(pipe, output_type="latent", max_sequence_length=16, height=64, width=64)


@pytest.mark.parametrize("made", ["flux", "sd3"], indirect=True)
def test_the_exact_output_goes_on(made: tuple[Any, Callable[[], torch.Tensor]]) -> None:
    pipe, run = made
    untouched, layers, differences = run(), set[str](), list[float]()

    def after(state: LayerCall, again: Callable[[], Any], output: Any) -> None:
        exact = image_of(output, state)
        approximated = image_of(watched.approximate(state, again, SAMPLED, state.call.step), state)
        assert exact.shape == approximated.shape and exact.shape[1] == state.grid.tokens
        assert torch.equal(image_of(again(), state), exact), "the layer is exact again"
        layers.add(state.layer.name)
        differences.append(float((exact - approximated).norm()))

    with ExactRun(pipe, find_denoisers(pipe), after) as watched:
        assert torch.equal(run(), untouched)
        assert watched.steps > 1
    assert torch.equal(run(), untouched), "nothing is left behind"
    assert layers == {layer.name for layer in find_layers(main_denoiser(pipe))}
    assert min(differences) > 0


@pytest.mark.parametrize("made", ["flux"], indirect=True)
def test_a_run_that_fails_is_put_back(made: tuple[Any, Callable[[], torch.Tensor]]) -> None:
    pipe, run = made
    untouched = run()

    def fail(*_: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError), ExactRun(pipe, find_denoisers(pipe), fail):
        run()
    assert torch.equal(run(), untouched)


PHASES = [
    Phase(1.0, "block", block_size=16, block_order="spread"),
    Phase(1.0, "elfatt", ratio=0.5, block_size=16, agents=8),
    Phase(1.0, "agent", ratio=0.4, stride=4, agent_source="merged"),
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.attention.name)
def test_it_does_what_the_patched_layer_does(pipe: Any, phase: Phase) -> None:
    """The same draws, the same metric, the same numbers, in the third of four steps."""
    pipe.scheduler = tiny.ddim()
    layer = find_layers(pipe.unet)[0]
    config = PatchConfig("x", (phase,), levels=2, seed=3)
    alone = StandaloneLayer(layer, config)
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
