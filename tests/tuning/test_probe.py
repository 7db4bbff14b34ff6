"""Probing leaves a run untouched, on every family, and its figures are those of the approximations themselves."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import checks, tiny_transformers
from support import tiny_pipelines as tiny
from torch.nn import functional

from elfatt_sd import methods
from elfatt_sd.config import LayerPhases, PatchConfig
from elfatt_sd.families import find_layers, main_denoiser
from elfatt_sd.methods import Attention
from elfatt_sd.patch import patched
from elfatt_sd.tuning import probe as probing
from elfatt_sd.tuning.probe import REUSED, Guidance, Probe, Stretch, flat, stretches_of
from elfatt_sd.tuning.runs import Runs, Sample, Settings

WITHOUT, GIVEN = torch.arange(6.0).reshape(1, 2, 3), torch.ones(1, 2, 3)
BOTH = torch.cat([WITHOUT, GIVEN])


@pytest.mark.parametrize("family", ["sd3", "z_image", "wan", "cogvideox"])
def test_a_probed_run_is_untouched(family: str) -> None:
    pipe, run = getattr(tiny_transformers, family)()
    untouched = run()
    with Probe(pipe, stretches_of(3, 1), effects=100) as probe:
        assert torch.equal(run(), untouched)
    assert torch.equal(run(), untouched), "nothing is left behind"
    assert set(probe.figures) <= {layer.name for layer in find_layers(main_denoiser(pipe))}
    assert probe.figures
    for own in probe.figures.values():
        assert own.effects[0]
        assert own.error(0, 0) > 0
        assert own.error(0, REUSED, 1) > 0


@pytest.fixture(params=[None, "bfloat16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What is found to be faster."""
    if request.param is not None:
        monkeypatch.setattr(Probe, "_faster_dtype", lambda *_: request.param)
    return request.param  # type: ignore[no-any-return]


def is_rounded(call: Any) -> bool:
    return isinstance(call, functools.partial) and call.func.__name__ == "approximate"


@pytest.mark.parametrize(
    ("times", "faster"),
    [
        ({"float16": 1.1, "bfloat16": 0.6}, "bfloat16"),
        ({"float16": 0.52, "bfloat16": 0.5}, "float16"),
        ({"float16": 0.8, "bfloat16": 0.5}, "bfloat16"),
        ({}, None),
    ],
)
def test_approximations_have_the_dtype_that_is_faster(
    pipe: Any, times: dict[str, float], faster: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more precise of two that are as fast; what a device does not know, is left out."""

    def takes(call: Any, device: torch.device, repeated: int = 1) -> float:
        call()
        return times[call.args[2].attention_dtype] if is_rounded(call) else 1.0

    monkeypatch.setattr(probing, "_MORE_PRECISE_FIRST", ("float16", "bfloat16"))
    monkeypatch.setattr(probing, "timed", takes)
    attend = functional.scaled_dot_product_attention

    def known(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if q.dtype != torch.float32 and str(q.dtype).removeprefix("torch.") not in times:
            raise RuntimeError("not implemented for 'Half'")
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", known)
    run = checks.runner(pipe)
    untouched = run()
    with Probe(pipe, stretches_of(5, 1)) as probe:
        assert torch.equal(run(), untouched)
    for own in probe.figures.values():
        assert {phase.attention_dtype for phase in own.bases} == {faster}
        assert not own.lost


@dataclasses.dataclass(frozen=True)
class Picky(Attention):
    """Somebody's attention that knows float32 alone."""

    name = "picky"

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        q, _, v = layer.project(tokens)
        if q.dtype != torch.float32:
            raise TypeError("float32 alone")
        return v

    def cost(self, size: Any) -> float:
        return float(size.tokens)


def test_an_attention_that_knows_float32_alone_is_measured_in_it(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_known", {**methods.attentions(), "picky": Picky})
    monkeypatch.setattr(Probe, "_faster_dtype", lambda *_: "bfloat16")
    with Probe(pipe, stretches_of(5, 1)) as probe:
        checks.runner(pipe)()
    for own in probe.figures.values():
        numbers = {
            phase.attention_dtype: number for number, phase in enumerate(own.bases) if phase.attention == Picky()
        }
        assert set(numbers) == {None, "bfloat16"}
        assert own.lost == {numbers["bfloat16"]}
        assert math.isfinite(own.error(0, numbers[None]))


def test_what_is_not_finite_in_a_dtype_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a layer that are too large for float16."""
    pipe = tiny.sd15(folder)
    monkeypatch.setattr(probing, "_MORE_PRECISE_FIRST", ("float16", "bfloat16"))
    monkeypatch.setattr(probing, "timed", lambda call, *_: 0.5 if is_rounded(call) else 1.0)
    with torch.no_grad():
        for layer in find_layers(pipe.unet):
            layer.attention.to_v.weight *= 1e6
            layer.attention.to_out[0].weight *= 1e-6
    with Probe(pipe, stretches_of(5, 1)) as probe:
        checks.runner(pipe)()
    assert {own.bases[0].attention_dtype for own in probe.figures.values()} == {"bfloat16"}
    pipe = tiny.sd15(folder).to(dtype=torch.bfloat16)  # a model in half precision stays in it
    with Probe(pipe, stretches_of(5, 1)) as probe:
        checks.runner(pipe)()
    assert {phase.attention_dtype for own in probe.figures.values() for phase in own.bases} == {None}


@pytest.mark.usefixtures("dtype")
def test_an_error_is_that_of_the_layer_itself(pipe: Any) -> None:
    """A single layer that is approximated in the first step alone has the error that was measured there."""
    run = checks.runner(pipe)
    name = find_layers(pipe.unet)[0].name
    module = dict(pipe.unet.named_modules())[name]
    outputs: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda *args: outputs.append(args[2]))
    run()
    exact = outputs[0]
    with Probe(pipe, stretches_of(5, 1)) as probe:
        run()
    own = probe.figures[name]
    for number, phase in enumerate(own.bases):
        outputs.clear()
        with patched(pipe, PatchConfig("one", per_layer=(LayerPhases(name, (phase,)),))):
            run()
        error = float((outputs[0] - exact).square().sum() / exact.square().sum())
        assert own.plain[0, number][0] == pytest.approx(error, rel=1e-3)
    handle.remove()


@pytest.mark.parametrize(("guided", "dtype"), [(False, "bfloat16"), (True, None)], indirect=["dtype"])
def test_what_a_shared_difference_leaves_is_measured(pipe: Any, guided: bool, dtype: str | None) -> None:
    """The first layer's errors, by step since its difference was measured, are those of a run that shares it."""
    runs, sample = Runs(pipe, Settings(8, 3.0, 48, 48)), Sample("a cat", 0)
    name = find_layers(pipe.unet)[0].name
    outputs: list[torch.Tensor] = []
    untouched: list[Any] = []  # what the denoiser gives, in all of its calls
    recorder = pipe.unet.register_forward_hook(lambda *args: untouched.append(args[2]))
    handle = dict(pipe.unet.named_modules())[name].register_forward_hook(lambda *args: outputs.append(args[2]))
    runs.draw(sample)
    exact = list(outputs)
    handle.remove()
    recorder.remove()
    steps = len(exact)
    with Probe(pipe, [Stretch(0, steps - 1)], scale=3.0) as probe:
        runs.draw_as_is(sample)
    own, joined = probe.figures[name], Guidance(3.0, 2).joined
    assert own.copies == 2
    handle = dict(pipe.unet.named_modules())[name].register_forward_hook(lambda *args: outputs.append(args[2]))
    for number, phase in enumerate(own.bases):
        if phase.dense:
            continue
        shared = dataclasses.replace(phase, residual_steps=steps, residual_guidance=guided)
        outputs.clear()
        known = iter(untouched)
        player = pipe.unet.register_forward_hook(lambda *_, known=known: next(known))
        runs.draw(sample, PatchConfig("one", per_layer=(LayerPhases(name, (shared,)),)))
        player.remove()
        for since in (0, 1, 3, 7):
            error = joined(outputs[since] - exact[since]).square().sum() / joined(exact[since]).square().sum()
            rounding = 0.0 if (dense := own.dense(phase)) is None else own.error(0, dense)
            left = rounding + (own.error(0, number, since, guided=guided) if since or guided else 0.0)
            assert float(error) == pytest.approx(left, rel=0.02, abs=1e-9 if dense is None else 1e-5)
    handle.remove()


def test_compiled_models_are_probed_as_they_are(pipe: Any, folder: Path) -> None:
    run = checks.runner(pipe)
    untouched = run()
    pipe.unet.compile(backend="eager")
    try:
        with Probe(pipe, stretches_of(5, 1)) as probe:
            torch.testing.assert_close(run(), untouched)
    finally:
        pipe.unet._compiled_call_impl = None
    assert probe.figures


def test_stretches_cover_the_run() -> None:
    def ends(steps: int, count: int) -> list[tuple[int, int]]:
        return [(each.first, each.last) for each in stretches_of(steps, count)]

    assert ends(26, 5) == [(0, 3), (4, 11), (12, 15), (16, 24), (25, 25)]
    assert ends(12, 3) == [(0, 3), (4, 10), (11, 11)]
    assert ends(3, 1) == [(0, 2)]
    assert ends(9, 2) == [(0, 7), (8, 8)]
    for steps in range(1, 60):
        count = max(1, min(5, steps // 4))
        stretches = stretches_of(steps, count)
        assert [step for each in stretches for step in range(each.first, each.last + 1)] == list(range(steps))
        assert all(each.first % 4 == 0 for each in stretches[: max(1, count - 1)]), "where a difference is measured"
        assert count == 1 or len(stretches[-1]) == 1
    assert stretches_of(26, 5)[1].probed == [0, 1, 3, 7]


def test_what_is_kept_is_bounded(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a difference's values tells nearly what all of them tell."""

    def shared(kept: int) -> dict[Any, float]:
        monkeypatch.setattr(probing, "KEPT", kept)
        with Probe(pipe, stretches_of(5, 1)) as probe:
            run()
            assert all(own.joined.numel() <= 2 * kept for own in probe._kept.values())
        found = {(name, *key): values[0] for name, own in probe.figures.items() for key, values in own.shared.items()}
        return {key: value for key, value in found.items() if value > 1e-6}

    run = checks.runner(pipe, height=64, width=64)
    whole, sample = shared(2**20), shared(2**10)
    assert len(whole) > 10
    assert sum(abs(math.log(sample[key] / value)) for key, value in whole.items()) / len(whole) < 0.15
    assert sample != whole


def test_calls_of_a_step_keep_differences_of_their_own() -> None:
    """Wan is called with the prompt and without: what a step keeps for a later one is of the same call."""
    pipe, run = tiny_transformers.wan()
    kept = {}
    for guidance in (1.0, 5.0):
        with Probe(pipe, stretches_of(4, 1)) as probe:
            run(num_inference_steps=4, guidance_scale=guidance)
            kept[guidance] = set(probe._kept)
    assert {call for _, (call, _), _ in kept[5.0]} == {0, 1}
    assert len(kept[5.0]) == 2 * len(kept[1.0])


def test_rows_are_joined_as_guidance_does() -> None:
    guidance = Guidance(3.0, 2)
    assert torch.equal(guidance.joined(BOTH), (WITHOUT + 3.0 * (GIVEN - WITHOUT)).flatten())
    assert torch.equal(guidance.given(BOTH), GIVEN.flatten())
    shared = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    changed = guidance.joined(BOTH + shared) - guidance.joined(BOTH)
    torch.testing.assert_close(changed, shared.flatten())  # what both rows have in common counts once
    output = SimpleNamespace(sample=(BOTH, None, BOTH[:, :1].half()))
    assert guidance.joined(output).shape == (6 + 3,) and flat(output).shape == (12 + 6,)
    for other in (Guidance(), Guidance(3.0, 1), Guidance(None, 2), Guidance(3.0, 3)):  # all rows stay as they are
        assert not other.joins
        assert torch.equal(other.joined(BOTH), flat(BOTH)) and torch.equal(other.given(BOTH), flat(BOTH))
