"""Errors against exact attention: the inputs are the pipeline's own, the figures those of a dense formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_pipelines as tiny
from support import tiny_transformers
from support.checks import runner
from torch import Tensor

import elfatt_sd
from benchmarks.errors import measure_errors
from elfatt_sd.config import LayerPhases, PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import find_layers, main_denoiser
from elfatt_sd.runtime.exact_run import ExactRun

PROMPTS = ["a cat", "a dog"]
BLOCKS = PatchConfig("blocks", (Phase(1.0, "block", block_size=16),))
SPREAD = PatchConfig("spread", (Phase(1.0, "block", block_size=16, block_order="spread"),))
OPTIONS: dict[str, Any] = {"height": 32, "width": 32, "guidance_scale": 3.0}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


def draw(pipe: Any, steps: int = 4) -> Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    options = {"num_inference_steps": steps, "generator": generators, "output_type": "latent", **OPTIONS}
    made: Tensor = pipe(PROMPTS, **options).images
    return made


def errors(
    pipe: Any, *configs: PatchConfig, at: tuple[int, ...] = (1, 3), run: Callable[[], Any] | None = None, draws: int = 4
) -> Rows:
    """The rows of all methods, whose steps are told in their order."""
    steps: list[int] = []
    rows: Rows = []

    def keep(step: int, found: Rows) -> None:
        assert {row["step"] for row in found} == {step}
        steps.append(step)
        rows.extend(found)

    named = {config.method: config for config in configs}
    wanted = lambda method, step: step in at  # noqa: E731
    measure_errors(pipe, named, run or (lambda: draw(pipe)), keep, wanted=wanted, draws=draws)
    assert steps == sorted(set(steps))
    return rows


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


def test_errors_are_those_of_the_formula(pipe: Any) -> None:
    """On what hooks of our own see in the second and fourth call of an untouched run."""
    inputs: dict[str, list[Tensor]] = {}
    layers = {layer.name: layer.attention for layer in find_layers(pipe.unet)}
    handles = [
        layer.register_forward_pre_hook(lambda module, args, name=name: inputs.setdefault(name, []).append(args[0]))
        for name, layer in layers.items()
    ]
    draw(pipe)
    for handle in handles:
        handle.remove()
    rows = errors(pipe, BLOCKS)
    assert len(rows) == 6  # two steps, three layers on the finest grid
    for row in rows:
        attention, given = layers[row["layer"]], inputs[row["layer"]][row["step"]]
        exact, blocks = dense(attention, given, 256), dense(attention, given, 16)
        each = (blocks - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        assert len(each) == 4  # two prompts, each with guidance
        assert row["error"] == pytest.approx(float(each.mean()), rel=1e-3)
        assert row["least"] == pytest.approx(float(each.min()), rel=1e-3)
        assert row["greatest"] == pytest.approx(float(each.max()), rel=1e-3)
        assert row["error"] > 1e-3


@pytest.mark.parametrize("family", ["unet", "flux"])
def test_errors_are_those_of_a_patch(family: str, folder: Path) -> None:
    """A patch of the first layer alone gives what was measured in the first step; of joint layers, the image counts."""
    flux = family == "flux"
    pipe = tiny_transformers.flux(folder) if flux else tiny.sd15(folder, scheduler=tiny.ddim())
    phase = Phase(1.0, "sampled", keys=16) if flux else Phase(1.0, "softmax", ratio=0.5)
    text, options = (16, {"max_sequence_length": 16, "height": 64, "width": 64}) if flux else (0, {})
    run = runner(pipe, output_type="latent", **options)
    seen: list[Tensor] = []
    first, *_, last = find_layers(main_denoiser(pipe))
    layer = last if flux else first  # that of a single block gives text and image in one sequence
    handle = layer.attention.register_forward_hook(lambda *args: seen.append(args[2]))
    run()
    exact, method = seen[0], PatchConfig("one", per_layer=(LayerPhases(layer.name, (phase,)),))
    with elfatt_sd.patched(pipe, method):
        run()
    approximated = seen[len(seen) // 2]
    handle.remove()
    [row] = errors(pipe, method, at=(0,), run=run, draws=1)
    each = (approximated - exact)[:, text:].flatten(1).norm(dim=1) / exact[:, text:].flatten(1).norm(dim=1)
    assert row["layer"] == layer.name
    assert row["error"] == pytest.approx(float(each.mean()), rel=1e-3)
    assert row["error"] > 1e-3


def test_the_pipeline_is_as_before(pipe: Any) -> None:
    before, hooks = draw(pipe), sum(len(module._forward_pre_hooks) for module in pipe.unet.modules())
    measured: list[Tensor] = []
    errors(pipe, SPREAD, run=lambda: measured.append(draw(pipe)))

    def stop() -> None:
        draw(pipe, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        errors(pipe, SPREAD, run=stop)
    assert torch.equal(measured[0], before)
    assert torch.equal(draw(pipe), before)
    assert sum(len(module._forward_pre_hooks) for module in pipe.unet.modules()) == hooks
    assert not elfatt_sd.is_patched(pipe)


def test_exact_attention_has_no_error(pipe: Any) -> None:
    late = PatchConfig("late", (Phase(0.5), Phase(1.0, "block", block_size=16)))
    rows = errors(pipe, late)
    assert [row["error"] for row in rows if row["step"] == 1] == [0.0] * 3
    assert all(row["error"] > 0 for row in rows if row["step"] == 3)


def test_one_block_is_exact_in_any_order(pipe: Any) -> None:
    whole = PatchConfig("whole", (Phase(1.0, "block", block_size=256, block_order="spread"),))
    assert all(row["error"] < 1e-5 for row in errors(pipe, whole))


def test_random_orders_are_drawn_several_times(pipe: Any) -> None:
    """The mean over four draws is that of four seeds."""
    four = errors(pipe, SPREAD, at=(1,))
    single = [errors(pipe, SPREAD.with_settings(seed=seed), at=(1,), draws=1) for seed in range(4)]
    for index, row in enumerate(four):
        each = [rows[index]["error"] for rows in single]
        assert len({*each}) == 4
        assert row["error"] == pytest.approx(sum(each) / 4)


def test_fixed_orders_are_applied_once(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    original = ExactRun.approximate

    def counted(run: ExactRun, state: Any, again: Any, phase: Phase, step: int, config: PatchConfig) -> Any:
        applied.append(config.method)
        return original(run, state, again, phase, step, config)

    monkeypatch.setattr(ExactRun, "approximate", counted)
    random, fixed = (PatchConfig.preset("tome", use_rand=each).renamed(f"tome {each}") for each in (True, False))
    errors(pipe, BLOCKS, SPREAD, random, fixed)
    assert [applied.count(name) for name in ("blocks", "spread", "tome True", "tome False")] == [6, 24, 24, 6]


def test_each_method_is_compared_in_its_own_layers(pipe: Any) -> None:
    deeper = PatchConfig("deeper", BLOCKS.phases, levels=2)
    rows = errors(pipe, BLOCKS, deeper, at=(1,))
    one, two = ({row["layer"] for row in rows if row["method"] == name} for name in ("blocks", "deeper"))
    assert len(one) == 3
    assert one < two


def test_methods_that_carry_something_over_steps_are_refused(pipe: Any) -> None:
    config = PatchConfig("corrected", (Phase(1.0, "sampled", block_size=16, residual_steps=4),))
    with pytest.raises(ElfattError, match=r"residual_steps=4 is not accepted here; errors are those of single steps\."):
        errors(pipe, config)
