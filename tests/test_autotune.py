"""Layers that a method does not make faster are left alone."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import runner

import elfatt_sd
from elfatt_sd import autotune
from elfatt_sd.autotune import Decision, Decisions
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.layers import find_layers
from elfatt_sd.processor import Denoiser, LayerState


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "autotune.json"


def test_a_shape_too_small_to_pay_is_left_alone(pipe: Any, own_cache: Path) -> None:
    """Merging 64 tokens of 16 channels and attending in 16 blocks costs more than attending to all of them."""
    config = PatchConfig("small", (Phase(1.0, "elfatt", ratio=0.5, block_size=2, block_order="spread"),))
    untouched = runner(pipe, height=16, width=16)()
    elfatt_sd.apply_patch(pipe, config, autotune=True)
    assert torch.equal(runner(pipe, height=16, width=16)(), untouched)
    known = json.loads(own_cache.read_text())
    assert len(known) == 1  # the three layers have one shape
    assert next(iter(known.values()))["ratio"] > 1
    assert "2x8x8x16, 2 heads, torch.float32" in next(iter(known))
    plan = elfatt_sd.plan(pipe, config, height=16, width=16, autotune=True)
    assert not any(layer.patched for layer in plan.layers)
    assert "left alone: " in plan.layers[0].reason
    assert "of the untouched layer's time, measured here" in plan.layers[0].reason
    assert plan.multiply_adds_after == plan.multiply_adds_before


def test_a_shape_that_pays_is_patched(pipe: Any) -> None:
    """4096 tokens in blocks of 64 are 64 times less attention."""
    config = PatchConfig("large", (Phase(1.0, "block", block_size=64),))
    plan = elfatt_sd.plan(pipe, config, height=128, width=128, autotune=True)
    assert [layer.patched for layer in plan.layers].count(True) == 3
    assert plan.multiply_adds_after < plan.multiply_adds_before


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """Every measurement says that the approximation pays, and is counted."""
    made: list[Decision] = []

    def pretend(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        untouched()
        approximated()
        made.append(Decision(0.5, 0.4, 0.6))
        return made[-1]

    monkeypatch.setattr(autotune, "measure", pretend)
    return made


def test_each_phase_and_shape_is_measured_once(pipe: Any, measured: list[Decision]) -> None:
    elfatt_sd.apply_patch(pipe, "elfatt")
    expected = runner(pipe)()
    elfatt_sd.apply_patch(pipe, "elfatt", autotune=True)
    assert torch.equal(runner(pipe)(), expected)  # measuring leaves no trace in the result
    assert len(measured) == 2
    runner(pipe)()
    elfatt_sd.apply_patch(pipe, "elfatt", autotune=True)  # from the file
    runner(pipe)()
    assert len(measured) == 2
    runner(pipe, guidance_scale=1.0)()  # another batch
    assert len(measured) == 4


def test_what_is_drawn_in_every_step_is_measured(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measured call draws its own blocks; those of the real step stay."""
    config = PatchConfig("spread", (Phase(1.0, "block", block_size=16, block_order="spread"),))
    [layer] = [layer for layer in find_layers(pipe.unet) if layer.downsample == 1][:1]
    state = LayerState(layer, 0, layer.attention.processor, Denoiser(config))
    sample = torch.zeros(2, 4, 16, 16)
    state.begin(config.phases[0], 7, sample)
    before = state.permutation
    drawn: list[int] = []

    def count(untouched: Any, approximated: Any, device: torch.device) -> Decision:
        untouched()
        with pytest.MonkeyPatch.context() as patch:
            draw = LayerState._uniform
            patch.setattr(LayerState, "_uniform", lambda self, *args: (drawn.append(0), draw(self, *args))[1])
            approximated()
            approximated()
        return Decision(0.5, 0.4, 0.6)

    monkeypatch.setattr(autotune, "measure", count)
    assert autotune.Tuner(pipe.unet).decide(state, config.phases[0], sample).pays
    assert len(drawn) == 2
    assert state.permutation is before


@pytest.mark.parametrize(
    ("ratios", "rounds"),
    [([0.5] * 7, 3), ([2.0] * 7, 3), ([1.1] * 7, 7), ([0.5, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5], 7), ([0.5, 2.0] * 4, 7)],
)
def test_a_clear_case_is_decided_sooner(ratios: list[float], rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rounds after two that warm up; three where all of them agree by a quarter."""
    taken = iter([1.0, 9.0] * 2 + [seconds for ratio in ratios for seconds in (1.0, ratio)])
    calls: list[int] = []

    def seconds(function: Any, device: torch.device) -> float:
        calls.append(0)
        return next(taken)

    monkeypatch.setattr(autotune, "_seconds", seconds)
    decision = autotune.measure(None, None, torch.device("cpu"))
    assert len(calls) == 2 * (2 + rounds)
    assert decision == Decision(statistics.median(ratios[:rounds]), min(ratios[:rounds]), max(ratios[:rounds]))


def test_nested_contexts_keep_it(pipe: Any, measured: list[Decision]) -> None:
    with elfatt_sd.patched(pipe, "tome", autotune=True):
        with elfatt_sd.patched(pipe, "elfatt"):
            pass
        runner(pipe)()
    assert len(measured) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"a": {"b": 1}}', "\x00"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "autotune.json"
    path.write_text(content)
    decisions = Decisions(path)
    assert decisions.get("a") is None
    decisions.put("a", Decision(0.5, 0.4, 0.6))
    assert Decisions(path).get("a") == Decision(0.5, 0.4, 0.6)


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    decisions = Decisions(tmp_path / "file" / "autotune.json")
    decisions.put("a", Decision(0.5, 0.4, 0.6))
    assert decisions.get("a") == Decision(0.5, 0.4, 0.6)
