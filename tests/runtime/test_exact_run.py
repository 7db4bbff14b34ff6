"""A watched run stays untouched: what its layers give by an approximation is thrown away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_transformers
from support.checks import runner

from elfatt_sd.families import find_denoisers, find_layers, main_denoiser
from elfatt_sd.phases import Phase
from elfatt_sd.runtime.call import LayerCall
from elfatt_sd.runtime.exact_run import ExactRun, image_of

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
