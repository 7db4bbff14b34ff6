"""What a plan says: the numbers that each grid really gets, and layers that the estimate makes slower."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd import patch
from elfatt_sd.config import LayerPhases, PatchConfig, Phase
from elfatt_sd.families import find_layers, main_denoiser
from elfatt_sd.families.shapes import Blueprint, sketch
from elfatt_sd.methods import Grid
from elfatt_sd.phases import EXACT
from elfatt_sd.plans import describe, multiply_adds

SLOWER = "estimated slower than exact attention; autotune=True leaves it alone"


def test_layers_and_stretches_are_told_apart(pipe: Any) -> None:
    """64 agents among 64 tokens are two products of the size of the exact one. They are patched all the same."""
    config = PatchConfig("x", (Phase(0.5, "agent", agents=4096), Phase(1.0, "block", block_size=16)))
    plan = elfatt_sd.plan(pipe, config, height=16, width=16)
    patched = [layer for layer in plan.layers if layer.patched]
    assert [layer.tokens for layer in patched] == [64] * 3
    for layer in patched:
        assert layer.multiply_adds_by_phase[0] > layer.multiply_adds > layer.multiply_adds_by_phase[1]
        assert layer.reason == f"64 agents: {SLOWER}, then sequence blocks of 16"
    assert SLOWER in str(plan)
    assert SLOWER not in str(elfatt_sd.plan(pipe, config, height=128, width=128, agents=64))
    first, second = (layer.name for layer in find_layers(pipe.unet)[:2])
    blocks, sampled = Phase(0.5, "block", block_size=16, block_order="windows"), Phase(1.0, "sampled", keys=8)
    own = LayerPhases(first, (blocks,)), LayerPhases(second, (sampled,))
    plan = elfatt_sd.plan(pipe, PatchConfig("own", per_layer=own))
    assert [(phase.start, phase.until) for phase in plan.phases] == [(0.0, 0.5), (0.5, 1.0)]
    assert ["windows" in phase.what for phase in plan.phases] == [True, False]
    assert "sampled keys" in plan.phases[1].what
    by_name = {layer.name: layer for layer in plan.layers}
    assert by_name[first].multiply_adds_by_phase[1] == by_name[first].multiply_adds
    assert by_name[second].multiply_adds_by_phase[0] == by_name[second].multiply_adds_by_phase[1]


@pytest.mark.parametrize(
    ("phase", "sides", "what"),
    [
        (Phase(1.0, "sampled", block_size=128), [16], "128 sampled keys (2 groups)"),
        (Phase(1.0, "sampled", block_size=128), [8], "64 sampled keys (128 asked, 1 group)"),
        (Phase(1.0, "block", block_size=128), [8, 33], "sequence blocks of 64 to 121 (128 asked)"),
        (Phase(1.0, "block", block_size=227), [64], "sequence blocks of 227"),  # or 228
        (Phase(1.0, ratio=0.9), [8], "75% merged (90% asked, at most 75% with stride 2), softmax attention"),
        (Phase(1.0, ratio=0.5), [1], "0% merged (50% asked, at most 0% with stride 2), softmax attention"),
        (Phase(1.0, "agent", agents=4096), [8], "64 agents (4096 asked)"),
        (Phase(1.0, "agent", agent_source="merged"), [8], "agents merged at 75% (95% asked)"),
        (EXACT, [8], "exact attention"),
    ],
)
def test_the_numbers_that_a_grid_gets(phase: Phase, sides: list[int], what: str) -> None:
    """They are said, and what was asked for beside them where a grid cannot give it."""
    assert describe(phase, [Grid.image(side, side) for side in sides]) == what


def test_calls_share_what_a_matching_costs() -> None:
    """The plans of `goldens` hold all other costs."""
    grid, channels = Grid.image(8, 8), 8
    similarities, merged = 16 * 48 * channels, 4 * 32 * channels**2 + 2 * 32**2 * channels
    for uses in (1, 4, 12):
        assert multiply_adds(Phase(1.0, ratio=0.5), grid, channels, uses) == similarities // uses + merged


def test_the_whole_call_bounds_the_speed_up_by_arithmetic(pipe: Any) -> None:
    """Exact phases count in the limit, and so does a ControlNet; what cannot be called is said."""
    plan = elfatt_sd.plan(pipe, "tome")
    call = plan.call
    assert call.before is not None and call.after is not None and call.limit is not None
    assert call.before - call.after == plan.multiply_adds_before - plan.multiply_adds_after
    assert call.speed == call.before / call.after
    assert call.limit == call.before / (call.before - sum(each.multiply_adds for each in plan.layers if each.patched))
    assert f"By this count it is {call.speed:.2f} times as fast, {call.limit:.2f} if" in str(plan)
    untouched = elfatt_sd.plan(pipe, "sd").call
    half = elfatt_sd.plan(pipe, PatchConfig("x", (Phase(0.5, ratio=0.5),))).call
    assert untouched.speed == untouched.limit == 1 and half.limit is not None
    assert 1 - 1 / half.limit == pytest.approx((1 - 1 / call.limit) / 2)
    both = plan.counting({"unet": pipe.unet, "controlnet": tiny.controlnet(pipe.unet)}).call
    assert (both.before or 0) > call.before and "whole call (UNet and controlnet)" in str(both)
    unknown = plan.counting({"unet": pipe.unet, "controlnet": torch.nn.Linear(2, 2)})
    assert (unknown.call.before, unknown.call.speed) == (None, None) and "not counted (controlnet)" in str(unknown.call)
    json.dumps(unknown.to_dict())


def test_bad_sizes_are_one_line(pipe: Any) -> None:
    """Of the latent, for a bare UNet."""
    no_clips, no_height = "frames=3 .*; a .* makes no clips", "height=.* is not accepted; give a positive multiple of 2"
    bad: list[tuple[Any, Any, str]] = [(pipe, {"height": each}, no_height) for each in (-8, 0, 33, "64", 64.0)]
    few = [(pipe, {"steps": each}, "steps=.* is not accepted") for each in (0, "ten")]
    for target, size, says in [*bad, (pipe, {"frames": 3}, no_clips), (pipe.unet, {"frames": 3}, no_clips), *few]:
        with pytest.raises(elfatt_sd.ElfattError, match=says):
            elfatt_sd.plan(target, "tome", **size)
    assert elfatt_sd.plan(pipe.unet, "tome", frames=1).grid.frames == 1


def test_a_patch_that_is_expected_to_slow_down_says_so(pipe: Any, recwarn: pytest.WarningsRecorder) -> None:
    """At small sizes. What hardly pays is said too."""
    warnings.simplefilter("always")
    elfatt_sd.apply_patch(pipe, "elfatt")
    elfatt_sd.apply_patch(pipe, "elfatt-quality", autotune=True)
    plans = [elfatt_sd.plan(pipe, "elfatt-quality", height=side, width=side) for side in (32, 256)]
    assert not recwarn
    for enter in (elfatt_sd.apply_patch, lambda *given: elfatt_sd.patched(*given).__enter__()):
        with pytest.warns(UserWarning, match=r"elfatt-quality is expected to be slower than untouched: 1\.\d\d times"):
            enter(pipe, "elfatt-quality")
    assert ["slower than untouched" in str(plan) for plan in plans] == [bool(plan.slower) for plan in plans]
    assert [bool(plan.slower) for plan in plans] == [True, False]
    flux = [elfatt_sd.plan(sketch("flux"), "elfatt-fast", height=side, width=side) for side in (1024, 2048)]
    little = ["which hardly pays" in str(each) for each in (elfatt_sd.plan(sketch("sdxl"), "elfatt-quality"), *flux)]
    assert little == [True, True, False]


FASTER = "elfatt-fast, {} times as fast by multiply-adds (latent {})"


@pytest.mark.parametrize(
    ("shape", "given", "device", "method", "said"),
    [
        ("flux", {"height": 2048, "width": 2048}, "cpu", "elfatt-fast", FASTER.format("1.50", "128x128")),
        ("flux", {}, "cpu", "sd", f"untouched; {FASTER.format('1.10', '64x64')} is below 1.12"),
        ("sd15", {"steps": 4}, "cpu", "elfatt-fast", FASTER.format("1.14", "64x64, 4 steps")),
        ("sd15", {"steps": 1}, "cpu", "sd", f"untouched; {FASTER.format('1.00', '64x64, 1 step')} is below 1.12"),
        ("sd15", {}, "cuda", "sd", f"untouched; {FASTER.format('1.15', '64x64')} is below 1.3"),
        ("sd15", {"height": 768, "width": 768}, "cuda", "elfatt-fast", FASTER.format("1.31", "96x96")),
    ],
)
def test_auto_is_what_pays(shape: str, given: Any, device: str, method: str, said: str) -> None:
    """By family, size, number of steps and device."""
    model = sketch(shape)
    vars(main_denoiser(model))["_hf_hook"] = SimpleNamespace(execution_device=device)  # of offloaded weights
    plan = elfatt_sd.plan(model, **given)
    assert (plan.config, plan.auto) == (elfatt_sd.plan(sketch(shape), method).config, f"auto: {said}")
    assert str(plan).startswith(plan.auto) and plan.to_dict()["auto"] == plan.auto


def test_auto_patches_in_one_line_or_not_at_all(pipe: Any, capsys: Any, monkeypatch: Any) -> None:
    elfatt_sd.apply_patch(pipe, "elfatt")
    monkeypatch.setattr(Blueprint, "multiply_adds", lambda *_: None)
    elfatt_sd.apply_patch(pipe)
    assert not elfatt_sd.is_patched(pipe)
    monkeypatch.undo()
    monkeypatch.setattr(patch, "PAYS", 0)
    with elfatt_sd.patched(pipe, "auto", block_size=16, levels=1) as planned:
        config = PatchConfig.preset("elfatt-fast", block_size=16, levels=1)
        assert pipe.unet.elfatt_patch.config == planned.config == config
    first, second = capsys.readouterr().err.splitlines()
    assert first == "auto: untouched, as the multiply-adds of a call cannot be counted; name a method"
    assert second.startswith("auto: elfatt-fast, ") and second.endswith("(latent 16x16, 50 steps)")
