"""The prediction: errors add up in squares, times are shares of exact ones, and the curve has the best choices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from support import tiny_pipelines as tiny

from elfatt_sd.phases import DENSE, Phase
from elfatt_sd.tuning.model import Model
from elfatt_sd.tuning.probe import EXACTLY, REUSED, Candidate, LayerFigures, Stretch, bases, candidates, stretches_of
from elfatt_sd.tuning.runs import Deviation

BASES = [Phase(1.0, "sampled", keys=keys) for keys in (32, 128)]
STRETCHES = [Stretch(0, 3), Stretch(4, 7)]


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


def test_time_and_error_of_a_candidate(model: Model) -> None:
    alone, shared = Candidate(BASES[0], 0), Candidate(Phase(1.0, "sampled", keys=32, residual_steps=4), 0)
    reused = Candidate(Phase(1.0, "reuse", residual_steps=2), REUSED)
    assert model.seconds("a", 0, EXACTLY) == 1.0
    assert model.seconds("a", 0, alone) == 0.2
    assert model.seconds("a", 0, shared) == pytest.approx(0.2 + 0.25), "one step of four computes both"
    assert model.seconds("a", 0, reused) == 0.5
    assert model.error("a", 0, alone) == 0.04
    assert model.error("a", 0, reused) == pytest.approx(0.01)
    alone_too, in_common = 0.004 + 0.006 + 0.008, 0.006 + 0.01 + 0.006  # of two steps: a + b - c, with c between them
    assert model.error("a", 0, shared) == pytest.approx((alone_too + in_common) / 4)


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


def test_a_difference_is_measured_where_a_stretch_begins_and_at_multiples() -> None:
    assert Stretch(0, 7).groups(4) == [4, 4]
    assert Stretch(24, 25).groups(4) == [2]
    assert Stretch(5, 9).groups(4) == [3, 2], "a stretch that begins elsewhere measures more often"
    assert Stretch(4, 11).groups(8) == [4, 4]
    assert Stretch(2, 4).groups(1) == [1, 1, 1]


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


def test_the_curve_falls_from_untouched_to_the_fastest(model: Model) -> None:
    curve = model.curve({"a": 1.0, "b": 1.0})
    assert curve[0].psnr == math.inf
    assert curve[0].saved == 0
    for closer, faster in itertools.pairwise(curve):
        assert faster.saved > closer.saved
        assert faster.psnr < closer.psnr
    assert curve[-1].saved == pytest.approx((1 - 0.2) * 8 + (0.5 - 0.1) * 8)
    slow = Model({"a": figures(), "b": figures(0.001)}, STRETCHES)  # a layer that takes no time stays exact
    assert all(layer == "a" for layer, _ in slow.curve({"a": 1.0, "b": 1.0})[-1].options)


def test_no_single_change_betters_a_choice(model: Model) -> None:
    """Whatever else one layer did in one stretch, the choice would not be closer and faster at once."""
    for choice in model.curve({"a": 1.0, "b": 1.0}):
        for (layer, stretch), option in choice.options.items():
            for other in model.options(layer, stretch, 1.0):
                assert other.saved <= option.saved or other.mse >= option.mse


def test_a_choice_is_a_configuration(model: Model) -> None:
    curve = model.curve({"a": 1.0, "b": 1.0})
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


def test_sharing_needs_steps_and_memory() -> None:
    assert {each.phase.residual_steps for each in candidates(BASES, 2)} == {1, 2}
    assert {each.phase.residual_steps for each in candidates(BASES, 8, share=False)} == {1}
    assert not any(each.phase.residual_guidance for each in candidates(BASES, 8))
    guided = [each.phase for each in candidates(BASES, 8, guided=True) if each.phase.residual_guidance]
    every = {(steps, keys) for steps in (2, 4, 8) for keys in (32, 128)}
    assert {(phase.residual_steps, phase.keys) for phase in guided} == every
    assert candidates(BASES, 1)[0] is EXACTLY


def test_exact_attention_in_a_narrower_dtype_costs_less_and_rounds(model: Model) -> None:
    """It is what a step computes that measures a difference, whose rounding all steps of the group have."""
    rounded = [DENSE["bfloat16"], *(dataclasses.replace(phase, attention_dtype="bfloat16") for phase in BASES)]
    known = figures()
    own = LayerFigures(rounded, fresh={0, 1, 2}, seconds=[1.0], calls=6, effects=known.effects)
    own.ratios[0], own.plain[0, 0], own.plain[1, 0] = [0.6], [1e-4], [1e-4]
    for number, ratio in ((1, 0.2), (2, 0.5)):
        own.ratios[number] = [ratio]
        for stretch in (0, 1):
            own.plain[stretch, number] = known.plain[stretch, number - 1]
            for since in (1, 3):
                own.shared[stretch, number, since] = known.shared[stretch, number - 1, since]
    narrow, alone = Model({"a": own}, STRETCHES), Candidate(rounded[0], 0)
    assert (own.dense(DENSE["bfloat16"]), figures().dense(DENSE["bfloat16"])) == (0, None)
    assert narrow.seconds("a", 0, alone) == 0.6
    assert narrow.error("a", 0, alone) == 1e-4, "rounding of two steps is independent"
    shared = Candidate(dataclasses.replace(rounded[1], residual_steps=4), 1)
    assert narrow.seconds("a", 0, shared) == pytest.approx(0.2 + 0.25 * 0.6)
    wide = model.error("a", 0, Candidate(dataclasses.replace(BASES[0], residual_steps=4), 0))
    assert narrow.error("a", 0, shared) == pytest.approx(wide + (4 + 12) * 1e-4 / 4), "the same in all four steps"


def test_all_approximations_of_a_layer_have_one_dtype() -> None:
    denoisers = {"unet": tiny.unet()}
    rounded = bases(1024, denoisers, "bfloat16")
    assert rounded[0] == DENSE["bfloat16"]
    assert [phase.with_settings({"attention_dtype": None}) for phase in rounded[1:]] == bases(1024, denoisers)
    found = candidates(rounded, 8, guided=True)
    assert {each.phase.attention_dtype for each in found[1:]} == {"bfloat16"}, "also where a whole output is shared"
    assert [each.phase.residual_steps for each in found if each.base == 0] == [1], "there is no difference to share"
    assert len({each.phase for each in found}) == len(found)
