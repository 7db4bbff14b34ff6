"""Layers with phases of their own: choosing, running, planning, saving, and how wrong ones are refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from support import checks, tiny_transformers

import elfatt_sd
from elfatt_sd.config import EXACT, LayerPhases, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_layers, main_denoiser
from elfatt_sd.runtime.call import LayerCall

CALLS = 5  # of the UNet for the four steps of PNDM
SAMPLED = Phase(1.0, "sampled", keys=8)
BLOCKS = Phase(0.5, "block", block_size=16, block_order="windows")
EXACT_THEN_BLOCKS = (Phase(0.5), Phase(1.0, "block", block_size=16, block_order="windows"))
REUSE = Phase(1.0, "reuse", residual_steps=2)


def own(pattern: str, *phases: Phase) -> PatchConfig:
    return PatchConfig("own", per_layer=(LayerPhases(pattern, phases),))


def names(pipe: Any) -> list[str]:
    return [layer.name for layer in find_layers(main_denoiser(pipe))]


@pytest.fixture
def phases_of_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int, str]]:
    """How often each layer began a step with which attention."""
    seen: Counter[tuple[str, int, str]] = Counter()
    begin = LayerCall.begin

    def counted(state: LayerCall, phase: Phase, step: int, *others: Any) -> bool:
        seen[state.layer.name, step, phase.attention.name] += 1
        return begin(state, phase, step, *others)

    monkeypatch.setattr(LayerCall, "begin", counted)
    return seen


def test_each_layer_has_its_own_phases(pipe: Any, phases_of_calls: Counter[tuple[str, int, str]]) -> None:
    first, second, *others = names(pipe)
    config = PatchConfig("own", per_layer=(LayerPhases(first, (SAMPLED,)), LayerPhases(second, EXACT_THEN_BLOCKS)))
    with elfatt_sd.patched(pipe, config):
        checks.runner(pipe)()
    attentions = {name: [kind for layer, _, kind in phases_of_calls if layer == name] for name in names(pipe)}
    assert attentions[first] == ["sampled"] * CALLS
    assert attentions[second] == ["softmax"] * 3 + ["block"] * 2
    assert all(not attentions[name] for name in others)


def test_the_same_phases_by_layer_are_the_same_latents(pipe: Any) -> None:
    """By the level, by a pattern that names all layers of it, and by one pattern for each."""
    run = checks.runner(pipe)
    for phases in ((SAMPLED,), (BLOCKS, SAMPLED), (Phase(1.0, "sampled", keys=8, residual_steps=2),)):
        whole = PatchConfig("whole", phases)
        with elfatt_sd.patched(pipe, whole) as plan:
            expected = run()
        chosen = [layer.name for layer in plan.layers if layer.patched]
        each = PatchConfig("own", per_layer=tuple(LayerPhases(name, phases) for name in chosen))
        with elfatt_sd.patched(pipe, each):
            assert torch.equal(run(), expected)
        assert [layer.reason for layer in elfatt_sd.plan(pipe, each).layers if layer.patched] == [
            layer.reason for layer in plan.layers if layer.patched
        ]


def test_the_first_pattern_counts_and_an_exact_one_leaves_layers_alone(pipe: Any) -> None:
    name = names(pipe)[0]
    config = PatchConfig("own", (SAMPLED,), levels=9, per_layer=(LayerPhases(name), LayerPhases("*", (BLOCKS,))))
    assert config.for_layer(name).phases == ()
    assert config.for_layer("another").phases == (BLOCKS,)
    plan = elfatt_sd.plan(pipe, config)
    assert {layer.name for layer in plan.layers if not layer.patched} == {name}


def test_a_plan_tells_stretches_and_layers_apart(pipe: Any) -> None:
    first, second = names(pipe)[:2]
    config = PatchConfig("own", per_layer=(LayerPhases(first, (BLOCKS,)), LayerPhases(second, (SAMPLED,))))
    plan = elfatt_sd.plan(pipe, config)
    assert [(phase.start, phase.until) for phase in plan.phases] == [(0.0, 0.5), (0.5, 1.0)]
    assert "windows" in plan.phases[0].what
    assert "windows" not in plan.phases[1].what
    assert "sampled keys" in plan.phases[1].what
    by_name = {layer.name: layer for layer in plan.layers}
    assert by_name[first].multiply_adds_by_phase[1] == by_name[first].multiply_adds
    assert by_name[second].multiply_adds_by_phase[0] == by_name[second].multiply_adds_by_phase[1]
    json.dumps(plan.to_dict())


def test_the_output_of_an_earlier_step_is_used_again(pipe: Any) -> None:
    """In every second step the layer is not called for attention at all."""
    name = names(pipe)[0]
    module: Any = dict(main_denoiser(pipe).named_modules())[name]
    projected: Counter[str] = Counter()
    handle = module.to_q.register_forward_hook(lambda *_: projected.update(["q"]))
    run = checks.runner(pipe)
    untouched = run()
    calls = projected.total()
    with elfatt_sd.patched(pipe, own(name, REUSE)):
        projected.clear()
        reused = run()
    handle.remove()
    assert (calls, projected.total()) == (CALLS, 3)
    assert not torch.equal(reused, untouched)
    assert torch.equal(run(), untouched)


def test_reuse_on_a_transformer() -> None:
    pipe, run = tiny_transformers.sd3()
    untouched = run()
    with elfatt_sd.patched(pipe, own("*", REUSE)):
        assert not torch.equal(run(), untouched)
    assert torch.equal(run(), untouched)


def test_a_pattern_that_names_no_layer_is_refused(pipe: Any) -> None:
    with pytest.raises(ElfattError, match=r"no self-attention layer matches layers='nowhere\.\*'; this UNet has "):
        elfatt_sd.apply_patch(pipe, own("nowhere.*", SAMPLED))
    elfatt_sd.apply_patch(pipe, own("*", EXACT))
    assert not elfatt_sd.is_patched(pipe), "exact phases alone change nothing"
