"""Probing leaves a run untouched, on every family, and its figures are those of the approximations themselves."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import checks
import pytest
import tiny_joint
import torch

from elfatt_sd.config import LayerPhases, PatchConfig
from elfatt_sd.families import find_layers, main_denoiser
from elfatt_sd.patch import patched
from elfatt_sd.tuning import probe as probing
from elfatt_sd.tuning.guided import Guidance
from elfatt_sd.tuning.probe import REUSED, Probe, Stretch, stretches_of
from elfatt_sd.tuning.runs import Runs, Sample, Settings


@pytest.mark.parametrize("family", ["sd3", "qwen_image", "z_image", "wan", "ltx_video", "hunyuan_video", "cogvideox"])
def test_a_probed_run_is_untouched(family: str) -> None:
    pipe, run = getattr(tiny_joint, family)()
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


@pytest.mark.parametrize("guided", [False, True])
def test_what_a_shared_difference_leaves_is_measured(pipe: Any, guided: bool) -> None:
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
        shared = dataclasses.replace(phase, residual_steps=steps, residual_guidance=guided)
        outputs.clear()
        known = iter(untouched)
        player = pipe.unet.register_forward_hook(lambda *_, known=known: next(known))
        runs.draw(sample, PatchConfig("one", per_layer=(LayerPhases(name, (shared,)),)))
        player.remove()
        for since in (0, 1, 3, 7):
            error = joined(outputs[since] - exact[since]).square().sum() / joined(exact[since]).square().sum()
            if since or guided:
                assert own.error(0, number, since, guided=guided) == pytest.approx(float(error), rel=0.02, abs=1e-9)
            else:
                assert error < 1e-9, "a step that measures is exact"
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
    pipe, run = tiny_joint.wan()
    kept = {}
    for guidance in (1.0, 5.0):
        with Probe(pipe, stretches_of(4, 1)) as probe:
            run(num_inference_steps=4, guidance_scale=guidance)
            kept[guidance] = set(probe._kept)
    assert {call for _, (call, _), _ in kept[5.0]} == {0, 1}
    assert len(kept[5.0]) == 2 * len(kept[1.0])
