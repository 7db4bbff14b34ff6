"""What a plan says: the numbers that each grid really gets, and layers that the estimate makes slower."""

from __future__ import annotations

from typing import Any

import pytest

import elfatt_sd
from elfatt_sd.config import EXACT, METHODS, PatchConfig, Phase
from elfatt_sd.planning import describe, fit, multiply_adds

SLOWER = "estimated slower than exact attention; autotune=True leaves it alone"


def test_a_layer_that_the_estimate_makes_slower_says_so(pipe: Any) -> None:
    """64 agents among 64 tokens are two products of the size of the exact one. It is patched all the same."""
    config = PatchConfig("x", (Phase(0.5, "agent", agents=4096), Phase(1.0, "block", block_size=16)))
    plan = elfatt_sd.plan(pipe, config, height=16, width=16)
    patched = [layer for layer in plan.layers if layer.patched]
    assert len(patched) == 3
    for layer in patched:
        assert layer.tokens == 64
        assert layer.multiply_adds_by_phase[0] > layer.multiply_adds > layer.multiply_adds_by_phase[1]
        assert layer.reason == f"64 agents: {SLOWER}, then sequence blocks of 16"
    assert SLOWER in str(plan)
    assert SLOWER not in str(elfatt_sd.plan(pipe, config, height=128, width=128, agents=64))


@pytest.mark.parametrize(
    ("phase", "grid", "what"),
    [
        (Phase(1.0, "cell_spread", block_order="spread"), (65, 65), "own cell and spread blocks of 169"),
        (Phase(1.0, "cell_spread", block_order="spread"), (64, 64), "own cell and spread blocks of 128"),
        (Phase(1.0, "sampled", block_size=128), (16, 16), "128 sampled keys (2 groups)"),
        (Phase(1.0, "sampled", block_size=128), (8, 8), "64 sampled keys (1 group)"),
        (Phase(1.0, "sampled", block_size=128), (64, 64), "128 sampled keys (2 groups)"),
        (Phase(1.0, "sampled", groups=8, lattice=False), (64, 64), "128 sampled keys (8 groups in columns)"),
        (Phase(1.0, "block", block_size=128), (33, 33), "sequence blocks of 121"),
        (Phase(1.0, "block", block_size=227), (32, 64), "sequence blocks of 227"),  # the paper's: 227 or 228
        (Phase(1.0, "block", block_size=128), (8, 8), "sequence blocks of 64"),
        (
            Phase(1.0, "elfatt", ratio=0.5, agents=64),
            (8, 8),
            "50% merged (stride 2), 32 agents and sequence blocks of 32",
        ),
        (Phase(1.0, ratio=0.9), (8, 8), "75% merged (stride 2), softmax attention"),
        (Phase(1.0, "agent", agent_source="merged"), (8, 8), "agents merged at 75%"),
        (Phase(1.0, ratio=0.5), (1, 1), "exact attention"),
    ],
)
def test_the_numbers_that_a_grid_gets(phase: Phase, grid: tuple[int, int], what: str) -> None:
    assert describe(fit(phase, *grid)) == what


def test_a_plan_shows_what_each_level_gets(pipe: Any) -> None:
    plan = elfatt_sd.plan(pipe, PatchConfig("x", (Phase(1.0, "sampled", block_size=128),), levels=2))
    assert {(layer.tokens, layer.reason) for layer in plan.layers if layer.patched} == {
        (256, "128 sampled keys (2 groups)"),
        (64, "64 sampled keys (1 group)"),
    }
    assert [phase.what for phase in plan.phases] == ["64 to 128 sampled keys (128 asked, 1 to 2 groups)"]


def test_each_phase_of_a_layer_is_described(pipe: Any) -> None:
    reason = elfatt_sd.plan(pipe, "elfatt").layers[0].reason
    assert reason == (
        "50% merged (stride 2), 64 agents and sequence blocks of 128, then 50% merged (stride 2), softmax attention"
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (3, 5), (33, 33), (64, 64)])
def test_every_method_fits_every_grid(method: str, grid: tuple[int, int]) -> None:
    for phase in PatchConfig.preset(method).phases:
        fitted = fit(phase, *grid)
        assert describe(fit(fitted, *grid)) == describe(fitted)
        assert multiply_adds(phase, *grid, channels=8) > 0


@pytest.mark.parametrize(
    ("settings", "uses"),
    [({}, 1), ({"reuse_steps": 4}, 4), ({"reuse_layers": True}, 3), ({"reuse_layers": True, "reuse_steps": 4}, 12)],
)
def test_a_shared_matching_costs_each_layer_its_part(pipe: Any, settings: dict[str, Any], uses: int) -> None:
    [layer, *_] = elfatt_sd.plan(pipe, "tome", **settings).layers
    similarities = 64 * 192 * 16
    rest = 4 * 128 * 16**2 + 2 * 128**2 * 16
    assert layer.multiply_adds_by_phase == (similarities // uses + rest,)


def test_steps_share_what_exact_attention_costs() -> None:
    approximated = Phase(1.0, "sampled", block_size=16, groups=2)
    corrected = Phase(1.0, "sampled", block_size=16, groups=2, residual_steps=4)
    plain, exact = multiply_adds(approximated, 8, 8, 8), multiply_adds(EXACT, 8, 8, 8)
    assert multiply_adds(corrected, 8, 8, 8) == plain + exact // 4
    assert multiply_adds(Phase(residual_steps=4), 8, 8, 8) == exact
    assert describe(corrected) == "16 sampled keys (2 groups), exact in 1 of 4 steps and corrected in between"


def test_agents_that_are_merged_cost_their_matching() -> None:
    """Also where no token is merged before attention."""
    agents = Phase(1.0, "agent", agent_source="merged", agent_ratio=0.5)
    similarities, tokens = 16 * 48 * 8, 64
    work = similarities + 4 * tokens * 8**2 + 32 * 8**2 + 2 * tokens * 2 * 32 * 8
    assert multiply_adds(agents, 8, 8, 8) == work
    assert multiply_adds(EXACT, 8, 8, 8) == 4 * tokens * 8**2 + 2 * tokens**2 * 8
