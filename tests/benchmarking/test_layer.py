"""Benchmarks of a single layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import QUICK, check_saved

import elfatt_sd.benchmarking.layer as layer_bench
from elfatt_sd.attention.ordering import BLOCK_ORDERS
from elfatt_sd.benchmarking.layer import layer
from elfatt_sd.benchmarking.names import layer_phases
from elfatt_sd.errors import ElfattError
from elfatt_sd.methods import attentions
from elfatt_sd.runtime import call as state_module


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 32 channels."""
    monkeypatch.setattr(layer_bench, "CHANNELS", 32)
    monkeypatch.setattr(layer_bench, "HEADS", 4)


COMPUTING = {name for name, kind in attentions().items() if not kind.empty}


def test_an_attention_is_timed_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def spied(attention: Any, *arguments: Any) -> Any:
        called.append(attention.name)
        return state_module.attend(attention, *arguments)

    monkeypatch.setattr(layer_bench, "attend", spied)
    calls = layer_bench._attention_calls(16, 2, 32, torch.device("cpu"), torch.float32)
    assert {name.removesuffix("s") for name in calls} == COMPUTING
    for name, call in calls.items():
        called.clear()
        assert call().shape == (2, 256, 4, 8)
        assert called == [name.removesuffix("s")]


def test_the_memory_of_a_layer_is_measured_on_request(tmp_path: Path) -> None:
    results = layer(tokens=[256], block_size=16, **QUICK)
    check_saved(results, tmp_path)
    rows = results["rows"]
    assert all(row["peak_bytes"] >= 2 * 256 * 32 * 4 for row in rows), "the result at least"
    rows = layer(tokens=[256], block_size=16, memory=False, **QUICK)["rows"]
    assert {row["peak_bytes"] for row in rows} == {None}


def test_every_order_and_attention_is_timed() -> None:
    phases = layer_phases(128).values()
    assert {phase.attention.name for phase in phases} == COMPUTING
    assert {phase.block_order for phase in phases if phase.attention.name == "block"} == {*BLOCK_ORDERS} - {"sequence"}


def test_a_layer_draws_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of an order is that of a denoising step: permutations are drawn within what is timed."""
    drawn: list[str] = []
    original = state_module.LayerCall.begin
    monkeypatch.setattr(
        state_module.LayerCall, "begin", lambda self, *args: (drawn.append("x"), original(self, *args))[1]
    )
    layer(tokens=[64], block_size=16, repeats=2, memory=False, device="cpu")
    assert len(drawn) == 3 * len(layer_phases(16))  # a warm-up and two rounds


@pytest.mark.filterwarnings("ignore:elfatt-sd. 256 tokens, layer")
def test_layers_that_would_take_too_long_are_left_out() -> None:
    with pytest.warns(UserWarning, match=r"256 tokens, attention: softmax, .* left out.* than max_seconds=1e-09"):
        results = layer(tokens=[64, 256], block_size=16, max_seconds=1e-9, **QUICK)
    assert {row["tokens"] for row in results["rows"]} == {64}


def test_layer_needs_square_grids() -> None:
    with pytest.raises(ElfattError, match="tokens=1000"):
        layer(tokens=[1000], **QUICK)
