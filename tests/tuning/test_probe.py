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
from families.test_matrix import made
from support import checks, tiny_transformers
from support import tiny_pipelines as tiny
from syrupy.assertion import SnapshotAssertion
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import elfatt_sd
from elfatt_sd import measure, methods
from elfatt_sd.config import LayerPhases, PatchConfig
from elfatt_sd.families import family_of, find_layers, main_denoiser
from elfatt_sd.methods import Attention
from elfatt_sd.phases import DENSE, Phase, StepReuse
from elfatt_sd.tuning import EARLIER, Search
from elfatt_sd.tuning import probe as probing
from elfatt_sd.tuning.model import Predictor, _joined
from elfatt_sd.tuning.probe import REUSED, SINCE, Candidate, LayerFigures, Probe, Stretch, rows_of, stretches_of
from elfatt_sd.tuning.runs import DrawSettings, Runs, Sample

BASES = [Phase(1.0, "sampled", keys=keys) for keys in (32, 128)]
STRETCHES = [Stretch(0, 3), Stretch(4, 7)]
PRECISE_FIRST = ("float16", "bfloat16")


def probed(pipe: Any, run: Any = None, steps: int = 5) -> dict[str, LayerFigures]:
    """Return what is measured in a run, which stays as it was."""
    run = run or checks.runner(pipe)
    untouched = run()
    with Probe(pipe, stretches_of(steps, 1), effects=100) as probe:
        torch.testing.assert_close(run(), untouched, rtol=0, atol=0)
    assert torch.equal(run(), untouched), "nothing is left behind"
    return probe.figures


@pytest.mark.parametrize("family", ["Z-Image", "Wan", "CogVideoX"])
def test_a_probed_run_is_untouched(family: str) -> None:
    pipe, run = tiny_transformers.made(family)
    figures = probed(pipe, run, 3)
    assert figures and {*figures} <= {layer.name for layer in find_layers(main_denoiser(pipe))}
    for own in figures.values():
        assert own.effects[0] and own.error(0, 0) > 0 and own.error(0, REUSED, 1) > 0


def test_a_compiled_model_is_probed_as_it_is(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = checks.runner(pipe, num_inference_steps=2)
    untouched = run()
    monkeypatch.setattr(pipe.unet, "_compiled_call_impl", torch.compile(pipe.unet._call_impl, backend="eager"))
    with Probe(pipe, stretches_of(2, 1)) as probe:
        torch.testing.assert_close(run(), untouched)
    assert probe.figures


def is_rounded(call: Any) -> bool:
    return isinstance(call, functools.partial) and call.func.__name__ == "approximate"


@pytest.mark.parametrize(
    ("times", "faster"),
    [
        ({"float16": 1.1, "bfloat16": 0.6}, "bfloat16"),
        ({"float16": 0.52, "bfloat16": 0.5}, "float16"),  # the more precise of two that are as fast
        ({"float16": 0.8, "bfloat16": 0.5}, "bfloat16"),
        ({}, None),  # the device knows neither
    ],
)
def test_approximations_have_the_dtype_that_is_faster(
    pipe: Any, times: dict[str, float], faster: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes(call: Any, device: torch.device, repeated: int = 1) -> float:
        call()
        return times[call.args[2].attention_dtype] if is_rounded(call) else 1.0

    monkeypatch.setattr(probing, "_MORE_PRECISE_FIRST", PRECISE_FIRST)
    monkeypatch.setattr(probing, "timed", takes)
    attend = functional.scaled_dot_product_attention

    def known(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if q.dtype != torch.float32 and str(q.dtype).removeprefix("torch.") not in times:
            raise RuntimeError("not implemented for 'Half'")
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", known)
    for own in probed(pipe, checks.runner(pipe, num_inference_steps=2), 2).values():
        assert {phase.attention_dtype for phase in own.bases} == {faster}
        assert not own.lost


@dataclasses.dataclass(frozen=True)
class Picky(Attention):
    """Somebody's attention that knows float32 alone, and gives no numbers with one of its settings."""

    name = "picky"
    factor: float = 1.0

    @classmethod
    def choices(cls, tokens: int) -> list[Picky]:
        return [cls(), cls(math.inf)]

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        q, _, v = layer.project(tokens)
        if q.dtype != torch.float32:
            raise TypeError("float32 alone")
        return v * self.factor

    def cost(self, size: Any) -> float:
        return float(size.tokens)


def test_what_fails_in_a_dtype_is_measured_in_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's own attention, and values of a layer that are too large for float16; half precision stays."""
    monkeypatch.setattr(probing, "_MORE_PRECISE_FIRST", PRECISE_FIRST)
    monkeypatch.setattr(probing, "timed", lambda call, *_: 0.5 if is_rounded(call) else 1.0)
    half = probed(tiny.sd15(folder).to(dtype=torch.bfloat16))
    assert {phase.attention_dtype for own in half.values() for phase in own.bases} == {None}
    monkeypatch.setattr(methods, "_known", {**methods.attentions(), "picky": Picky})
    pipe = tiny.sd15(folder)
    with torch.no_grad():
        for layer in find_layers(pipe.unet):
            layer.attention.to_v.weight *= 1e6
            layer.attention.to_out[0].weight *= 1e-6
    for own in probed(pipe, checks.runner(pipe, num_inference_steps=2), 2).values():
        assert own.bases[0].attention_dtype == "bfloat16"
        picky = {
            (phase.attention.factor, phase.attention_dtype): number
            for number, phase in enumerate(own.bases)
            if isinstance(phase.attention, Picky)
        }
        fine = picky.pop((1.0, None))
        assert own.lost == {*picky.values()} and len(picky) == 3
        assert math.isfinite(own.error(0, fine))


@pytest.mark.parametrize(("guided", "dtype"), [(False, "bfloat16"), (True, None)])
def test_errors_are_the_layers_own(pipe: Any, guided: bool, dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's errors, alone and by step since a difference was measured, are those of a run with them."""
    monkeypatch.setattr(Probe, "_faster_dtype", lambda *_: dtype)
    runs, sample = Runs(pipe, DrawSettings(8, 3.0, 32, 32)), Sample("a cat", 0)
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
    own, rows = probe.figures[name], functools.partial(rows_of, scale=3.0, copies=2)
    assert own.copies == 2

    def error(since: int, phase: Phase) -> float:
        if since == 0:  # the layer's outputs where the denoiser's are the untouched ones
            outputs.clear()
            known = iter(untouched)
            player = pipe.unet.register_forward_hook(lambda *_, known=known: next(known))
            runs.draw(sample, PatchConfig("one", per_layer=(LayerPhases(name, (phase,)),)))
            player.remove()
        return rows(outputs[since] - exact[since]).size / rows(exact[since]).size

    for number, phase in [*enumerate(own.bases)][::4]:
        assert error(0, phase) == pytest.approx(own.errors[0, number, 0, False][0], rel=2e-3)
        if phase.dense:
            continue
        shared = dataclasses.replace(phase, residual_steps=steps, residual_guidance=guided)
        rounding = 0.0 if (dense := own.dense(phase)) is None else own.error(0, dense)
        for since in SINCE:
            left = rounding + (own.error(0, number, since, guided=guided) if since or guided else 0.0)
            assert error(since, shared) == pytest.approx(left, rel=0.02, abs=1e-9 if dense is None else 1e-5)
    handle.remove()


def test_stretches_cover_the_run() -> None:
    """They begin where a difference is measured, which is then measured at multiples."""
    known = {
        (26, 5): [(0, 3), (4, 11), (12, 15), (16, 24), (25, 25)],
        (12, 3): [(0, 3), (4, 10), (11, 11)],
        (3, 1): [(0, 2)],
        (9, 2): [(0, 7), (8, 8)],
        (26, 3, 13): [(13, 15), (16, 24), (25, 25)],  # with an image
        (3, 1, 2): [(2, 2)],
    }
    assert {key: [(each.first, each.last) for each in stretches_of(*key)] for key in known} == known
    for steps in range(1, 60):
        stretches = stretches_of(steps, max(1, min(5, steps // 4)))
        assert [step for each in stretches for step in range(each.first, each.last + 1)] == list(range(steps))
    assert stretches_of(26, 5)[1].probed == [0, 1, 3, 7]
    groups = {(0, 7, 4): [4, 4], (24, 25, 4): [2], (5, 9, 4): [3, 2], (4, 11, 8): [4, 4], (2, 4, 1): [1, 1, 1]}
    assert {key: Stretch(*key[:2]).groups(key[2]) for key in groups} == groups


def test_what_is_kept_is_bounded(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a difference's values tells nearly what all of them tell."""

    def shared(kept: int) -> dict[Any, float]:
        monkeypatch.setattr(probing, "KEPT", kept)
        with Probe(pipe, stretches_of(2, 1)) as probe:
            run()
            assert all(own.joined.numel() <= 2 * kept for own in probe._kept.values())
        found = {(name, *key): each[0] for name, own in probe.figures.items() for key, each in own.errors.items()}
        return {key: value for key, value in found.items() if key[3] and value > 1e-6}

    run = checks.runner(pipe, height=48, width=48, num_inference_steps=2)
    whole, sample = shared(2**20), shared(2**10)
    assert len(whole) > 10
    assert sum(abs(math.log(sample[key] / value)) for key, value in whole.items()) / len(whole) < 0.15
    assert sample != whole


def test_calls_of_a_step_keep_differences_of_their_own() -> None:
    """Wan is called with the prompt and without: what a step keeps for a later one is of the same call."""
    pipe, run = tiny_transformers.wan()
    kept = {}
    for guidance in (1.0, 5.0):
        with Probe(pipe, stretches_of(2, 1)) as probe:
            run(num_inference_steps=2, guidance_scale=guidance)
            kept[guidance] = set(probe._kept)
    assert {call for _, (_, call, _), _ in kept[5.0]} == {0, 1}
    assert len(kept[5.0]) == 2 * len(kept[1.0])


def test_rows_are_joined_as_guidance_does() -> None:
    without, prompted = torch.arange(6.0).reshape(1, 2, 3), torch.ones(1, 2, 3)
    both = torch.cat([without, prompted])
    joined, given = rows_of(both, 3.0, 2)
    assert torch.equal(joined, (without + 3.0 * (prompted - without)).flatten())
    assert given is not None and torch.equal(given, prompted.flatten())
    shared = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    changed = rows_of(both + shared, 3.0, 2) - rows_of(both, 3.0, 2)
    torch.testing.assert_close(changed.joined, shared.flatten())  # what both rows have in common counts once
    assert rows_of(SimpleNamespace(sample=(both, None, both[:, :1].half())), 3.0, 2).joined.shape == (6 + 3,)
    for scale, copies in ((None, 1), (3.0, 1), (None, 2), (3.0, 3)):  # all rows stay as they are
        joined, given = rows_of(both, scale, copies)
        assert torch.equal(joined, both.flatten()) and given is None


# What is predicted.


def figures(seconds: float = 1.0, error: float = 1.0, effect: float = 2.0) -> LayerFigures:
    own = LayerFigures(list(BASES), fresh={0, 1}, seconds=[seconds], calls=6)
    own.ratios |= {0: [0.2], 1: [0.5]}
    for stretch, (number, squared) in itertools.product((0, 1), ((0, 0.04), (1, 0.01))):
        for since, part in ((0, 1.0), (1, 0.1), (3, 0.2)):
            own.errors[stretch, number, since, False] = [squared * error * part]
        own.errors |= {(stretch, REUSED, 1, False): [0.02], (stretch, REUSED, 3, False): [0.06]}
    own.effects[0] = [effect]
    return own


def learnt(*images: tuple[float, float]) -> Predictor:
    """Return a model that learnt from images, of each what its two calibrating runs gave."""
    made = Predictor({"a": figures(), "b": figures(0.5, 4.0)}, STRETCHES)
    for (number, image), stretch in itertools.product(enumerate(images), (0, 1)):
        made.calibrate(stretch, number, image[stretch], made.reference(stretch))
    made.fit()
    return made


def measured(errors: dict[tuple[int, bool], float], copies: int = 1) -> LayerFigures:
    """Return a layer in which one approximation has these errors, which are not drawn anew."""
    own = LayerFigures(list(BASES[:1]), seconds=[1.0], copies=copies, ratios=defaultdict(list, {0: [0.2]}))
    own.errors |= {(0, 0, *key): [value] for key, value in errors.items()}
    return own


def test_errors_that_are_not_drawn_anew_add_up() -> None:
    """The squared norm of a sum of vectors, of which lengths and distances are known; some are interpolated."""
    path = np.cumsum(np.random.default_rng(0).normal(size=(4, 50)), axis=0)  # a step's error, and how it wanders off
    apart = {(since, False): float(((path[since:] - path[:-since]) ** 2).sum(1).mean()) for since in (1, 3)}
    own = measured({(0, False): float((path**2).sum(1).mean()), **apart})
    model, candidate = Predictor({"a": own}, stretches_of(4, 1)), Candidate(BASES[0], 0)
    assert model.error("a", 0, candidate) == pytest.approx(float((path.sum(0) ** 2).sum()) / 4, rel=0.1)
    own.fresh.add(0)
    assert model.error("a", 0, candidate) == own.errors[0, 0, 0, False][0]


def test_a_difference_of_the_rows_with_the_prompt_leaves_an_error_in_all_steps() -> None:
    """The squared norm of the sum over two groups of steps, of which each measures in its first one."""
    wander = np.random.default_rng(0).normal(size=(2, 8, 4000)) * 0.3
    given, apart = np.cumsum(wander, axis=1) + np.random.default_rng(1).normal(size=(2, 1, 4000))
    both = given - 2.0 * apart  # (1 - g) without + g with, for without = with + apart and g = 3
    errors = {(since, True): float(((both[since:] - given[: 8 - since]) ** 2).sum(1).mean()) for since in SINCE}
    errors |= {(since, False): float(((both[since:] - both[:-since]) ** 2).sum(1).mean()) for since in SINCE[1:]}
    own = measured(errors, copies=2)
    phase = Phase(1.0, "sampled", keys=32, residual_steps=4, residual_guidance=True)
    model, candidate = Predictor({"a": own}, stretches_of(8, 1)), Candidate(phase, 0)
    left = both - np.repeat(given[::4], 4, axis=0)
    assert model.error("a", 0, candidate) == pytest.approx(float((left.sum(0) ** 2).sum()) / 8, rel=0.1)
    assert model.seconds("a", 0, candidate) == pytest.approx(0.2 + 0.25 / 2), "one step of four computes half of it"
    own.fresh.add(0)
    assert model.error("a", 0, candidate) < float((left.sum(0) ** 2).sum()) / 8 * 0.7, "groups have nothing in common"


@pytest.mark.parametrize("scatter", [1.0, 10.0])
def test_how_much_the_scatter_of_errors_counts_is_learnt(scatter: float) -> None:
    """Errors that are drawn anew in each step scatter; differences that steps share leave errors in common."""
    model = learnt()
    images = (50.0, 500.0)  # of which the second one is farther away in all stretches

    def shared(stretch: int, steps: int) -> tuple[dict[str, Candidate], float]:
        """Return the reference of a stretch with a difference that steps share, and what it does to an image."""
        known = model.reference(stretch).items()
        phases = {
            name: Candidate(dataclasses.replace(each.phase, residual_steps=steps), each.base) for name, each in known
        }
        parts = [model._parts(name, stretch, each) for name, each in phases.items()]
        return phases, sum(total + scatter * own for total, own in parts)

    for (image, scale), stretch, steps in itertools.product(enumerate(images), (0, 1), (1, 4)):
        phases, mse = shared(stretch, steps)
        for _ in range(100):  # than which nothing that is expected counts more
            model.calibrate(stretch, image, scale * mse, phases)
    model.fit()
    assert model.scatter == pytest.approx(scatter, rel=0.3)
    for stretch in (0, 1):
        phases, mse = shared(stretch, 4)
        found = sum(model.mse(name, stretch, each) for name, each in phases.items())
        assert found == pytest.approx(math.sqrt(50.0 * 500.0) * mse, rel=0.3)


def test_the_curve_has_the_best_choices() -> None:
    """Whatever else a layer did in a stretch of one of them, it would not be closer and faster at once."""
    model = learnt((100.0, 10.0))
    curve = model.curve()
    assert (curve[0].psnr, curve[0].saved) == (math.inf, 0)
    assert all(after.saved > one.saved and after.psnr < one.psnr for one, after in itertools.pairwise(curve))
    assert curve[-1].saved == pytest.approx((1 - 0.2) * 8 + (0.5 - 0.1) * 8)
    for choice in curve:
        for (layer, stretch), option in choice.options.items():
            for other in model.options(layer, stretch):
                assert other.saved <= option.saved or other.mse >= option.mse
    slow = Predictor({"a": figures(), "b": figures(0.001)}, STRETCHES)  # a layer that takes no time stays exact
    assert all(layer == "a" for layer, _ in slow.curve()[-1].options)
    assert not model.config(model.parts(curve[0])).active
    config = model.config(model.parts(curve[-1]))
    assert {own.layers for own in config.per_layer} == {"a", "b"}
    for layer in ("a", "b"):
        assert config.for_layer(layer).phases == (Phase(1.0, "sampled", keys=32),), "equal stretches are one"
    alone = model.config([{}, model.reference(1)], name="probe")
    assert [phase.exact for phase in alone.for_layer("a").phases] == [True, False]
    assert alone.stretches == (0.5, 1.0)
    assert [set(part) for part in model.parts(curve[-1])] == [{"a", "b"}, {"a", "b"}]
    assert model.parts(curve[0]) == [{}, {}], "exact layers are left out"


def test_the_curve_has_choices_that_no_price_of_an_error_finds() -> None:
    """`b` lies above the line from `a` to `e`; `c` is slower and farther than `b`, and `d` hardly closer than `e`."""
    options = [(0.0, 0.0, "a"), (1.0, 10.0, "b"), (0.5, 11.0, "c"), (3.0, 12.0, "d"), (4.0, 12.01, "e")]
    assert [picked for *_, picked in _joined([(0.0, 0.0, ("x",))], options)] == [("x", "a"), ("x", "b"), ("x", "e")]


def test_a_stretch_takes_over_where_that_is_the_best_of_its_ways() -> None:
    """Layers save nothing in steps that take over; images differ by a factor that all ways share."""
    model, slow, quick = learnt((100.0, 10.0)), StepReuse(order=0, first=0, last=0), StepReuse(first=0, last=0)
    attention = {choice.saved: choice.mse for choice in model.curve()}
    model.reused = {(1, slow): {0: (3.0, 9e9)}, (1, quick): {0: (3.0, 2.0), 1: (5.0, 8.0)}}
    plain, *ways = model.reuse_options(1)
    assert plain.reuse is None and [each.reuse for each in ways] == [slow, quick]
    assert ways[1].computed == 0.5
    assert (ways[1].saved, ways[1].mse) == (4.0, pytest.approx(4.0))
    assert ways[0].mse == pytest.approx(2 * 9e9)  # as its image is the closer one
    curve = model.curve()
    assert (curve[0].psnr, curve[0].saved) == (math.inf, 0)
    taken = [choice for choice in curve if choice.reuse[1].reuse is not None]
    assert taken and all(choice.reuse[1].reuse == quick for choice in taken), "the other is farther, and no faster"
    for choice in taken:
        parts = [option.saved * choice.reuse[number].computed for (_, number), option in choice.options.items()]
        assert choice.saved == pytest.approx(sum(parts) + 4.0)
        assert choice.mse < min([mse for saved, mse in attention.items() if saved >= choice.saved], default=math.inf)
    assert model.chosen(taken[-1]).reuse == (dataclasses.replace(quick, first=len(STRETCHES[0])),)
    both = model.config([{}, {}], {0: quick, 1: dataclasses.replace(quick, last=1)})
    assert both.reuse == (dataclasses.replace(quick, last=1),), "equal stretches are one"


@pytest.mark.parametrize("name", ["Stable Diffusion 1.5", "Wan"])  # which is called twice a step
def test_what_reuse_saves_is_the_work_that_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts work, of which an untouched run has as much more."""
    (pipe, run), begun, counted = made(name), list[int](), FlopCounterMode(display=False)
    [cut, *_] = family_of(main_denoiser(pipe)).cuts(main_denoiser(pipe))
    config = PatchConfig("late", reuse=(StepReuse(cut=cut, first=5, last=1),))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=counted.get_total_flops))

    def work(begin: int, _: Any, config: Any) -> float:
        begun.append(begin)
        with counted, elfatt_sd.patched(pipe, config):
            run(num_inference_steps=12)
        return counted.get_total_flops()

    runs = SimpleNamespace(pipe=pipe, device=torch.device("cpu"), deviation=work)
    saved, drawn = Search._draw_reused(SimpleNamespace(runs=runs, calls=12, begin=0), None, config)
    assert saved == work(0, None, "sd") - drawn > 0
    assert begun[0] == 5 - EARLIER, "whole steps leave what is taken over"


def test_what_a_candidate_costs_and_adds(snapshot: SnapshotAssertion) -> None:
    """Seconds and errors by layer; a step of a group measures, perhaps half of the rows, in a narrower dtype."""
    wide, narrow = figures(), figures()
    dtype = {"attention_dtype": "bfloat16"}
    narrow.bases = [*(dataclasses.replace(phase, **dtype) for phase in BASES), DENSE["bfloat16"]]
    narrow.ratios[2], narrow.errors[0, 2, 0, False] = [0.6], [1e-4]
    narrow.fresh.add(2)
    wide.copies = 2
    for number, since in itertools.product((0, 1), (0, 1, 3)):
        wide.errors[0, number, since, True] = [0.008 / (1 + number) * (1 + since)]
    model, said = Predictor({"wide": wide, "narrow": narrow}, STRETCHES), []
    for name, own in (("wide", wide), ("narrow", narrow)):
        for each in probing.candidates(own.bases, 4, guided=own.copies > 1):
            phase = each.phase
            words = [phase.attention.name, getattr(phase.attention, "keys", ""), phase.residual_steps]
            figure = f"{model.seconds(name, 0, each):.4g} s, {model.error(name, 0, each):.4g}"
            said.append(f"{name} {each.base}: {words} {'guided' * phase.residual_guidance}: {figure}")
    assert said == snapshot
    told = learnt((1000.0, 1.0), (2000.0, 2.0))  # of whose stretches the first one counts more, whatever the image
    assert told.scale[0] == pytest.approx(1000 * told.scale[1])
    uneven = learnt((1000.0, 1.0), (1.0, 1000.0))
    assert uneven.scale[0] == pytest.approx(uneven.scale[1])
    assert {each.phase.residual_steps for each in probing.candidates(BASES, 8, share=False)} == {1}, "it needs memory"
