"""Errors against exact attention: the inputs are the pipeline's own, the figures those of a dense formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines as tiny
import torch
from torch import Tensor

import elfatt_sd
from elfatt_sd.config import ElfattError, PatchConfig, Phase
from elfatt_sd.evaluation.errors import Recording, method_errors, record_inputs
from elfatt_sd.families import find_layers

PROMPTS = ["a cat", "a dog"]
BLOCKS = PatchConfig("blocks", (Phase(1.0, "block", block_size=16),))
SPREAD = PatchConfig("spread", (Phase(1.0, "block", block_size=16, block_order="spread"),))
OPTIONS: dict[str, Any] = {"height": 32, "width": 32, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


@pytest.fixture(scope="module")
def recording(pipe: Any) -> Recording:
    return record_inputs(pipe, [BLOCKS], PROMPTS, 4, [1, 3], 0, **OPTIONS)


def dense(attention: Any, tokens: Tensor, block: int) -> Tensor:
    """Attention inside blocks by the formula, in float64, one head and one block after the other."""
    weights = {name: value.double() for name, value in attention.state_dict().items()}
    x = tokens.double()
    q, k, v = (x @ weights[f"to_{name}.weight"].t() for name in "qkv")
    mixed = torch.zeros_like(q)
    size = q.shape[2] // attention.heads
    for head in range(attention.heads):
        for start in range(0, x.shape[1], block):
            at = (slice(None), slice(start, start + block), slice(head * size, (head + 1) * size))
            logits = q[at] @ k[at].transpose(1, 2) * size**-0.5
            mixed[at] = logits.softmax(dim=2) @ v[at]
    return mixed @ weights["to_out.0.weight"].t() + weights["to_out.0.bias"]


def test_errors_are_those_of_the_formula(recording: Recording) -> None:
    rows = method_errors(recording, "blocks", BLOCKS)
    assert len(rows) == len(recording.inputs) == 6  # two steps, three layers on the finest grid
    for row, inputs in zip(rows, recording.inputs, strict=True):
        exact = dense(inputs.layer.attention, inputs.hidden_states, 256)
        blocks = dense(inputs.layer.attention, inputs.hidden_states, 16)
        each = (blocks - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        assert len(each) == 4  # two prompts, each with guidance
        assert (row["layer"], row["step"]) == (inputs.layer.name, inputs.position.step)
        assert row["error"] == pytest.approx(float(each.mean()), rel=1e-3)
        assert row["least"] == pytest.approx(float(each.min()), rel=1e-3)
        assert row["greatest"] == pytest.approx(float(each.max()), rel=1e-3)
        assert row["error"] > 1e-3


def test_the_inputs_are_those_of_the_run(pipe: Any, recording: Recording) -> None:
    """What hooks of our own see in the second call is what was recorded there."""
    [layer] = [layer for layer in find_layers(pipe.unet) if layer.name == recording.inputs[0].layer.name]
    assert layer.norm is not None
    seen: list[tuple[Tensor, Tensor]] = []
    blocks: list[Tensor] = []
    handles = [
        layer.norm.register_forward_pre_hook(lambda module, args: blocks.append(args[0])),
        layer.attention.register_forward_pre_hook(lambda module, args: seen.append((args[0], blocks[-1]))),
    ]
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    pipe(PROMPTS, num_inference_steps=4, generator=generators, output_type="latent", **OPTIONS)
    for handle in handles:
        handle.remove()
    first = recording.inputs[0]
    assert first.position[:2] == (1, 4)
    assert torch.equal(first.hidden_states, seen[1][0])
    assert first.block_input is not None
    assert torch.equal(first.block_input, seen[1][1])


def test_the_pipeline_is_as_before(pipe: Any) -> None:
    def picture() -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return pipe("a", num_inference_steps=2, generator=generator, output_type="pt", **OPTIONS).images

    before, hooks = picture(), sum(len(module._forward_pre_hooks) for module in pipe.unet.modules())
    record_inputs(pipe, [SPREAD], PROMPTS, 3, [0], 0, **OPTIONS)
    with pytest.raises(ElfattError, match=r"record_at=9 is not accepted; the run has the UNet calls 0 to 2\."):
        record_inputs(pipe, [SPREAD], PROMPTS, 3, [0, 9], 0, **OPTIONS)
    assert torch.equal(picture(), before)
    assert sum(len(module._forward_pre_hooks) for module in pipe.unet.modules()) == hooks


def test_exact_attention_has_no_error(recording: Recording) -> None:
    late = PatchConfig("late", (Phase(0.5), Phase(1.0, "block", block_size=16)))
    rows = method_errors(recording, "late", late)
    assert [row["error"] for row in rows if row["step"] == 1] == [0.0] * 3
    assert all(row["error"] > 0 for row in rows if row["step"] == 3)


def test_one_block_is_exact_in_any_order(recording: Recording) -> None:
    whole = PatchConfig("whole", (Phase(1.0, "block", block_size=256, block_order="spread"),))
    assert all(row["error"] < 1e-5 for row in method_errors(recording, "whole", whole))


def test_random_orders_are_drawn_several_times(recording: Recording) -> None:
    """The mean over four draws is that of four seeds."""
    four = method_errors(recording, "spread", SPREAD, draws=4)
    single = [method_errors(recording, "x", SPREAD.with_settings(seed=seed), draws=1) for seed in range(4)]
    for index, row in enumerate(four):
        each = [rows[index]["error"] for rows in single]
        assert len({*each}) == 4
        assert row["error"] == pytest.approx(sum(each) / 4)


def test_fixed_orders_are_applied_once(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    from elfatt_sd.evaluation import errors

    applied: list[str] = []
    monkeypatch.setattr(
        errors, "_relative_errors", lambda inputs, config: (applied.append(config.method), torch.ones(1))[1]
    )
    for config in (BLOCKS, SPREAD, PatchConfig.preset("tome"), PatchConfig.preset("tome", use_rand=False)):
        method_errors(recording, config.method, config, draws=4)
    assert [applied.count(name) for name in ("blocks", "spread", "tome")] == [6, 24, 24 + 6]


def test_merging_goes_by_the_block_input(recording: Recording) -> None:
    """ToMe's metric is the block's input: without it the error is another one."""
    import dataclasses

    tome = PatchConfig("tome", (Phase(1.0, "softmax", ratio=0.5),), use_rand=False)
    blind = Recording(tuple(dataclasses.replace(each, block_input=None) for each in recording.inputs), recording.levels)
    with_input, without = (method_errors(each, "tome", tome) for each in (recording, blind))
    assert [row["error"] for row in with_input] != [row["error"] for row in without]


def test_each_method_is_compared_in_its_own_layers(pipe: Any) -> None:
    deeper = PatchConfig("deeper", BLOCKS.phases, levels=2)
    recording = record_inputs(pipe, [BLOCKS, deeper], PROMPTS, 3, [1], 0, **OPTIONS)
    one, two = ([row["layer"] for row in method_errors(recording, "", config)] for config in (BLOCKS, deeper))
    assert len(one) == 3
    assert set(one) < set(two)
    elfatt_sd.remove_patch(pipe)  # nothing was patched


def test_methods_that_carry_something_over_steps_are_refused(recording: Recording) -> None:
    config = PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=4),))
    with pytest.raises(ElfattError, match=r"residual_steps=4 is not accepted here; errors are those of single steps\."):
        method_errors(recording, "corrected", config)
