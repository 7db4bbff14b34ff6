"""What probing measures in layers, on every family, and what is predicted from it; the run stays untouched."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import checks, tiny_transformers
from support import tiny_pipelines as tiny
from syrupy.assertion import SnapshotAssertion
from torch.nn import functional

from elfatt_sd import methods
from elfatt_sd.config import LayerPhases, PatchConfig
from elfatt_sd.families import find_layers, main_denoiser
from elfatt_sd.methods import Attention
from elfatt_sd.patch import patched
from elfatt_sd.phases import DENSE, Phase
from elfatt_sd.tuning import probe as probing
from elfatt_sd.tuning.model import Model
from elfatt_sd.tuning.probe import (
    REUSED,
    Candidate,
    Guidance,
    LayerFigures,
    Probe,
    Stretch,
    bases,
    candidates,
    stretches_of,
)
from elfatt_sd.tuning.runs import Deviation, Runs, Sample, Settings

WITHOUT, GIVEN = torch.arange(6.0).reshape(1, 2, 3), torch.ones(1, 2, 3)
BOTH = torch.cat([WITHOUT, GIVEN])
BASES = [Phase(1.0, "sampled", keys=keys) for keys in (32, 128)]
STRETCHES = [Stretch(0, 3), Stretch(4, 7)]


def probed(pipe: Any, run: Any = None, steps: int = 5) -> dict[str, LayerFigures]:
    """Return what is measured in a run, which stays as it was."""
    run = run or checks.runner(pipe)
    untouched = run()
    with Probe(pipe, stretches_of(steps, 1), effects=100) as probe:
        torch.testing.assert_close(run(), untouched, rtol=0, atol=0)
    assert torch.equal(run(), untouched), "nothing is left behind"
    return probe.figures


@pytest.mark.parametrize("family", ["sd3", "z_image", "wan", "cogvideox"])
def test_a_probed_run_is_untouched(family: str) -> None:
    pipe, run = getattr(tiny_transformers, family)()
    figures = probed(pipe, run, 3)
    assert figures and {*figures} <= {layer.name for layer in find_layers(main_denoiser(pipe))}
    for own in figures.values():
        assert own.effects[0] and own.error(0, 0) > 0 and own.error(0, REUSED, 1) > 0


def test_a_compiled_model_is_probed_as_it_is(pipe: Any) -> None:
    run = checks.runner(pipe)
    untouched = run()
    pipe.unet.compile(backend="eager")
    try:
        with Probe(pipe, stretches_of(5, 1)) as probe:
            torch.testing.assert_close(run(), untouched)
    finally:
        pipe.unet._compiled_call_impl = None
    assert probe.figures


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
    for own in probed(pipe).values():
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
    for own in probed(pipe).values():
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
    assert {own.bases[0].attention_dtype for own in probed(pipe).values()} == {"bfloat16"}
    pipe = tiny.sd15(folder).to(dtype=torch.bfloat16)  # a model in half precision stays in it
    assert {phase.attention_dtype for own in probed(pipe).values() for phase in own.bases} == {None}


@pytest.mark.usefixtures("dtype")
def test_an_error_is_that_of_the_layer_itself(pipe: Any) -> None:
    """A single layer that is approximated in the first step alone has the error that was measured there."""
    run = checks.runner(pipe)
    name = find_layers(pipe.unet)[0].name
    outputs: list[torch.Tensor] = []
    handle = pipe.unet.get_submodule(name).register_forward_hook(lambda *args: outputs.append(args[2]))
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
    runs, sample = Runs(pipe, Settings(8, 3.0, 32, 32)), Sample("a cat", 0)
    name = find_layers(pipe.unet)[0].name
    outputs: list[torch.Tensor] = []
    untouched: list[Any] = []  # what the denoiser gives, in all of its calls
    handle = pipe.unet.get_submodule(name).register_forward_hook(lambda *args: outputs.append(args[2]))
    recorder = pipe.unet.register_forward_hook(lambda *args: untouched.append(args[2]))
    runs.draw(sample)
    recorder.remove()
    exact, steps = [*outputs], len(outputs)
    with Probe(pipe, [Stretch(0, steps - 1)], scale=3.0) as probe:
        runs.draw(sample)
    own, rows = probe.figures[name], Guidance(3.0, 2).rows
    assert own.copies == 2
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
            error = rows(outputs[since] - exact[since]).size / rows(exact[since]).size
            rounding = 0.0 if (dense := own.dense(phase)) is None else own.error(0, dense)
            left = rounding + (own.error(0, number, since, guided=guided) if since or guided else 0.0)
            assert error == pytest.approx(left, rel=0.02, abs=1e-9 if dense is None else 1e-5)
    handle.remove()


def test_stretches_cover_the_run() -> None:
    """They begin where a difference is measured, which is then measured at multiples."""

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
        assert all(each.first % 4 == 0 for each in stretches[: max(1, count - 1)])
        assert count == 1 or len(stretches[-1]) == 1
    assert stretches_of(26, 5)[1].probed == [0, 1, 3, 7]
    groups = {(0, 7, 4): [4, 4], (24, 25, 4): [2], (5, 9, 4): [3, 2], (4, 11, 8): [4, 4], (2, 4, 1): [1, 1, 1]}
    assert {key: Stretch(*key[:2]).groups(key[2]) for key in groups} == groups


def test_what_is_kept_is_bounded(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a difference's values tells nearly what all of them tell."""

    def shared(kept: int) -> dict[Any, float]:
        monkeypatch.setattr(probing, "KEPT", kept)
        with Probe(pipe, stretches_of(5, 1)) as probe:
            run()
            assert all(own.joined.numel() <= 2 * kept for own in probe._kept.values())
        found = {(name, *key): values[0] for name, own in probe.figures.items() for key, values in own.shared.items()}
        return {key: value for key, value in found.items() if value > 1e-6}

    run = checks.runner(pipe, height=48, width=48)
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
    joined, given = guidance.rows(BOTH)
    assert torch.equal(joined, (WITHOUT + 3.0 * (GIVEN - WITHOUT)).flatten())
    assert given is not None and torch.equal(given, GIVEN.flatten())
    shared = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    changed = guidance.rows(BOTH + shared) - guidance.rows(BOTH)
    torch.testing.assert_close(changed.joined, shared.flatten())  # what both rows have in common counts once
    output = SimpleNamespace(sample=(BOTH, None, BOTH[:, :1].half()))
    assert guidance.rows(output).joined.shape == (6 + 3,)
    for other in (Guidance(), Guidance(3.0, 1), Guidance(None, 2), Guidance(3.0, 3)):  # all rows stay as they are
        assert torch.equal(other.rows(BOTH).joined, BOTH.flatten()) and other.rows(BOTH).given is None


# What is predicted.


def figures(seconds: float = 1.0, error: float = 1.0) -> LayerFigures:
    own = LayerFigures(list(BASES), fresh={0, 1}, seconds=[seconds], calls=6)
    for number, (ratio, squared) in enumerate(((0.2, 0.04), (0.5, 0.01))):
        own.ratios[number] = [ratio]
        for stretch in (0, 1):
            own.plain[stretch, number] = [squared * error]
            own.shared[stretch, number, 1] = [squared * error / 10]
            own.shared[stretch, number, 3] = [squared * error / 5]
    for stretch in (0, 1):
        own.shared[stretch, REUSED, 1] = [0.02]
        own.shared[stretch, REUSED, 3] = [0.06]
    own.effects[0] = [2.0]
    return own


@pytest.fixture
def model() -> Model:
    made = Model({"a": figures(), "b": figures(0.5, 4.0)}, STRETCHES)
    made.calibrate(0, 0, Deviation(100.0, 100.0), made.reference(0))
    made.calibrate(1, 0, Deviation(10.0, 10.0), made.reference(1))
    made.fit()
    return made


def test_errors_that_are_not_drawn_anew_add_up() -> None:
    """The squared norm of a sum of vectors, of which lengths and distances are known."""
    path = np.cumsum(np.random.default_rng(0).normal(size=(4, 50)), axis=0)  # a step's error, and how it wanders off
    own = LayerFigures(list(BASES[:1]), seconds=[1.0], ratios=defaultdict(list, {0: [0.2]}))
    own.plain[0, 0] = [float((path**2).sum(1).mean())]
    for since in (1, 2, 3):
        own.shared[0, 0, since] = [float(((path[since:] - path[:-since]) ** 2).sum(1).mean())]
    model, candidate = Model({"a": own}, stretches_of(4, 1)), Candidate(BASES[0], 0)
    own.shared[0, 0, 2] = []  # it is interpolated
    assert model.error("a", 0, candidate) == pytest.approx(float((path.sum(0) ** 2).sum()) / 4, rel=0.1)
    own.fresh.add(0)
    assert model.error("a", 0, candidate) == own.plain[0, 0][0]


def test_a_difference_of_the_rows_with_the_prompt_leaves_an_error_in_all_steps() -> None:
    """The squared norm of the sum over two groups of steps, of which each measures in its first one."""
    wander = np.random.default_rng(0).normal(size=(2, 8, 4000)) * 0.3
    given, apart = np.cumsum(wander, axis=1) + np.random.default_rng(1).normal(size=(2, 1, 4000))
    both = given - 2.0 * apart  # (1 - g) without + g with, for without = with + apart and g = 3
    own = LayerFigures(list(BASES[:1]), seconds=[1.0], copies=2, ratios=defaultdict(list, {0: [0.2]}))
    for since in (0, 1, 3, 7):
        own.guided[0, 0, since] = [float(((both[since:] - given[: 8 - since]) ** 2).sum(1).mean())]
        if since:
            own.shared[0, 0, since] = [float(((both[since:] - both[:-since]) ** 2).sum(1).mean())]
    phase = Phase(1.0, "sampled", keys=32, residual_steps=4, residual_guidance=True)
    model, candidate = Model({"a": own}, stretches_of(8, 1)), Candidate(phase, 0)
    left = both - np.repeat(given[::4], 4, axis=0)
    assert model.error("a", 0, candidate) == pytest.approx(float((left.sum(0) ** 2).sum()) / 8, rel=0.1)
    assert model.seconds("a", 0, candidate) == pytest.approx(0.2 + 0.25 / 2), "one step of four computes half of it"
    own.fresh.add(0)
    assert model.error("a", 0, candidate) < float((left.sum(0) ** 2).sum()) / 8 * 0.7, "groups have nothing in common"


def calibrated(*images: tuple[float, float]) -> Model:
    """Return a model that learnt from images, of each what its two calibrating runs gave."""
    made = Model({"a": figures(), "b": figures(0.5, 4.0)}, STRETCHES)
    for number, image in enumerate(images):
        for stretch, mse in enumerate(image):
            made.calibrate(stretch, number, Deviation(mse, mse), made.reference(stretch))
    made.fit()
    return made


def test_stretches_are_told_apart_by_the_mean_over_images() -> None:
    agreed, disagreed = calibrated((1000.0, 1.0), (2000.0, 2.0)).scale, calibrated((1000.0, 1.0), (1.0, 1000.0)).scale
    assert agreed[0] == pytest.approx(1000 * agreed[1])
    assert disagreed[0] == pytest.approx(disagreed[1])
    assert calibrated((4.0, 1.0), (1.0, 4.0)).scale[0] == pytest.approx(2 * calibrated((1.0, 1.0)).scale[0])


def test_predictions_are_of_images_of_8_bits() -> None:
    """Of pixels whose errors are 0.01 throughout, one of a hundred becomes another value."""
    model = calibrated()
    for stretch in (0, 1):
        model.calibrate(stretch, 0, Deviation(1e-4, 1e-2), model.reference(stretch))
    model.fit()
    for choice in model.curve({"a": 1.0, "b": 1.0})[1:]:
        exactly = 10 * math.log10(255**2 / choice.mse)
        assert choice.psnr < exactly
        if choice.mse < 1e-3:
            assert choice.psnr == pytest.approx(10 * math.log10(255**2 / math.sqrt(choice.mse)), abs=1.5)


def shared(model: Model, stretch: int, steps: int) -> dict[str, Candidate]:
    """Return the reference of a stretch with a difference that steps share."""
    phases = model.reference(stretch).items()
    return {name: Candidate(dataclasses.replace(each.phase, residual_steps=steps), each.base) for name, each in phases}


@pytest.mark.parametrize("scatter", [1.0, 10.0])
def test_how_much_the_scatter_of_errors_counts_is_learnt(scatter: float) -> None:
    """Errors that are drawn anew in each step scatter; differences that steps share leave errors in common."""
    model = Model({"a": figures(), "b": figures(0.5, 4.0)}, STRETCHES)
    images = (50.0, 500.0)  # of which the second one is farther away in all stretches
    for (image, scale), stretch, steps in itertools.product(enumerate(images), (0, 1), (1, 4)):
        phases = shared(model, stretch, steps)
        parts = [model._parts(name, stretch, each) for name, each in phases.items()]
        mse = sum(scale * (total + scatter * own) for total, own in parts)
        for _ in range(100):  # than which nothing that is expected counts more
            model.calibrate(stretch, image, Deviation(mse, mse), phases)
    model.fit()
    assert model.scatter == pytest.approx(scatter, rel=0.3)
    for stretch in (0, 1):
        found = sum(model.mse(name, stretch, each) for name, each in shared(model, stretch, 4).items())
        parts = [model._parts(name, stretch, each) for name, each in shared(model, stretch, 4).items()]
        expected = math.sqrt(50.0 * 500.0) * sum(total + scatter * own for total, own in parts)
        assert found == pytest.approx(expected, rel=0.3)


def test_a_layers_effect_is_damped_to_its_square_root() -> None:
    strong = figures()
    strong.effects[0] = [32.0]
    model = Model({"a": figures(), "b": strong}, STRETCHES)
    candidate = Candidate(BASES[0], 0)
    assert model.mse("b", 0, candidate) == pytest.approx(4 * model.mse("a", 0, candidate))
    assert model.mse("a", 0, candidate) * model.mse("b", 0, candidate) == pytest.approx(
        (2.0 * 32.0) * (model.mse("a", 0, candidate) / model._effect("a", 0)) ** 2
    )


def test_the_curve_has_the_best_choices(model: Model) -> None:
    """Whatever else a layer did in a stretch of one of them, it would not be closer and faster at once."""
    calls = {"a": 1.0, "b": 1.0}
    curve = model.curve(calls)
    assert (curve[0].psnr, curve[0].saved) == (math.inf, 0)
    assert all(after.saved > one.saved and after.psnr < one.psnr for one, after in itertools.pairwise(curve))
    assert curve[-1].saved == pytest.approx((1 - 0.2) * 8 + (0.5 - 0.1) * 8)
    for choice in curve:
        for (layer, stretch), option in choice.options.items():
            for other in model.options(layer, stretch, 1.0):
                assert other.saved <= option.saved or other.mse >= option.mse
    slow = Model({"a": figures(), "b": figures(0.001)}, STRETCHES)  # a layer that takes no time stays exact
    assert all(layer == "a" for layer, _ in slow.curve(calls)[-1].options)
    assert not model.config(curve[0]).active
    config = model.config(curve[-1])
    assert {own.layers for own in config.per_layer} == {"a", "b"}
    for layer in ("a", "b"):
        assert config.for_layer(layer).phases == (Phase(1.0, "sampled", keys=32),), "equal stretches are one"
    alone = model.alone(1, model.reference(1))
    assert [phase.exact for phase in alone.for_layer("a").phases] == [True, False]
    assert alone.stretches == (0.5, 1.0)
    assert [set(part) for part in model.parts(curve[-1])] == [{"a", "b"}, {"a", "b"}]
    assert model.parts(curve[0]) == [{}, {}], "exact layers are left out"


def test_what_a_candidate_costs_and_adds(snapshot: SnapshotAssertion) -> None:
    """Seconds and errors by layer; a step of a group measures, perhaps half of the rows, perhaps in a narrower dtype.

    Of which the rounding stays in all steps of the group.
    """
    wide, narrow = figures(), figures()
    dtype = {"attention_dtype": "bfloat16"}
    narrow.bases = [*(dataclasses.replace(phase, **dtype) for phase in BASES), DENSE["bfloat16"]]
    narrow.ratios[2], narrow.plain[0, 2] = [0.6], [1e-4]
    narrow.fresh.add(2)
    wide.copies = 2
    for number, since in itertools.product((0, 1), (0, 1, 3)):
        wide.guided[0, number, since] = [0.008 / (1 + number) * (1 + since)]
    model, said = Model({"wide": wide, "narrow": narrow}, STRETCHES), []
    for name, own in (("wide", wide), ("narrow", narrow)):
        for each in candidates(own.bases, 4, guided=own.copies > 1):
            phase = each.phase
            words = [phase.attention.name, getattr(phase.attention, "keys", ""), phase.residual_steps]
            figure = f"{model.seconds(name, 0, each):.4g} s, {model.error(name, 0, each):.4g}"
            said.append(f"{name} {each.base}: {words} {'guided' * phase.residual_guidance}: {figure}")
    assert said == snapshot
    assert {each.phase.residual_steps for each in candidates(BASES, 8, share=False)} == {1}, "which needs memory"


def test_all_approximations_of_a_layer_have_one_dtype() -> None:
    denoisers = {"unet": tiny.unet()}
    rounded = bases(1024, denoisers, "bfloat16")
    assert rounded[0] == DENSE["bfloat16"]
    assert [phase.with_settings({"attention_dtype": None}) for phase in rounded[1:]] == bases(1024, denoisers)
    found = candidates(rounded, 8, guided=True)
    assert {each.phase.attention_dtype for each in found[1:]} == {"bfloat16"}, "also where a whole output is shared"
    assert [each.phase.residual_steps for each in found if each.base == 0] == [1], "there is no difference to share"
    assert len({each.phase for each in found}) == len(found)
