"""Tuning small random pipelines from end to end; time is counted work, so that it is the same on every machine."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd import errors as optional
from elfatt_sd import measure as clock
from elfatt_sd import peers
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.families import find_layers
from elfatt_sd.phases import Phase
from elfatt_sd.tuning import PRESETS, probe, search, tune
from elfatt_sd.tuning import search as proving
from elfatt_sd.tuning.runs import Deviation, Runs, Sample, Settings


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every image that is drawn, whether the pipeline was patched."""
    found: list[bool] = []
    shot = Runs._shot

    def counted(runs: Runs, sample: Any, config: PatchConfig | None = None, *others: Any) -> Any:
        found.append(config is not None)
        return shot(runs, sample, config, *others)

    monkeypatch.setattr(Runs, "_shot", counted)
    return found


def test_what_is_found_is_close_and_fast_as_said(pipe: Any, asked: dict[str, Any]) -> None:
    run = checks.runner(pipe)
    untouched = run()
    tuned = tune(pipe, closeness=30, **asked)
    assert torch.equal(run(), untouched), "the pipeline is as it was"
    assert tuned.proof is not None
    assert tuned.proof.point.mean >= 30
    assert tuned.proof.point.times > search.WORTH
    assert len(tuned.proof.samples) == len(tuned.proof.point.closeness) == 3
    assert tuned.floor == math.inf
    tuned.apply(pipe)
    assert elfatt_sd.is_patched(pipe)
    assert not torch.equal(run(), untouched)
    elfatt_sd.remove_patch(pipe)
    assert torch.equal(run(), untouched)


@pytest.mark.usefixtures("own_cache")
def test_a_dtype_that_is_faster_is_chosen(pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a process that finds the figures in the cache; the settings keep it."""
    monkeypatch.setattr(probe.Probe, "_faster_dtype", lambda *_: "bfloat16")
    found = [tune(pipe, closeness=40, **asked) for _ in range(2)]
    assert found[0].config == found[1].config
    assert found[0].proof is not None
    assert found[0].proof.point.mean >= 40
    assert {phase.attention_dtype for phase in found[0].config.all_phases if not phase.exact} == {"bfloat16"}
    assert "attention in bfloat16" in str(found[0])
    assert PatchConfig.from_dict(json.loads(json.dumps(found[0].config.to_dict()))) == found[0].config


def test_closer_is_slower(pipe: Any, asked: dict[str, Any]) -> None:
    found = [tune(pipe, closeness=closeness, **asked) for closeness in (50, 60)]
    fast, close = (each.proof.point for each in found if each.proof is not None)
    assert fast.times > close.times
    assert fast.mean < close.mean


def test_a_speed_is_kept_to(pipe: Any, asked: dict[str, Any]) -> None:
    tuned = tune(pipe, speed=1.05, **asked)
    assert tuned.proof is not None
    assert tuned.proof.point.times >= 1.05
    with pytest.raises(ElfattFailure, match=r"speed=50 is not reached: the fastest choice is \d\.\d+ times as fast"):
        tune(pipe, speed=50, **asked)
    assert not elfatt_sd.is_patched(pipe)


def test_budgets_that_contradict_each_other_are_told_with_figures(pipe: Any, asked: dict[str, Any]) -> None:
    fastest = tune(pipe, closeness=1, **asked).proof
    assert fastest is not None
    with pytest.raises(ElfattFailure, match=r"not reached on held-out images; the nearest choice is \d\.\d\d times"):
        tune(pipe, closeness=fastest.point.mean + 25, speed=fastest.point.times - 0.01, **asked)
    assert not elfatt_sd.is_patched(pipe)


def test_a_speed_beyond_the_prediction_is_tried(
    pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers can gain less on their own than in the whole run; nothing is refused by prediction alone."""
    curve = search.Model.curve

    def halved(model: search.Model, calls: Any) -> list[Any]:
        return [dataclasses.replace(choice, saved=choice.saved / 2) for choice in curve(model, calls)]

    fastest = tune(pipe, closeness=1, **asked).proof
    assert fastest is not None
    monkeypatch.setattr(search.Model, "curve", halved)
    tuned = tune(pipe, speed=fastest.point.times - 0.1, **asked)
    assert tuned.proof is not None
    assert tuned.proof.point.times >= fastest.point.times - 0.1


@pytest.mark.parametrize("before", ["measure_layers", "settle"])
def test_a_machine_that_becomes_slower_changes_no_speed(
    pipe: Any, asked: dict[str, Any], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untouched images of the search are drawn long before what they are compared with."""
    known = tune(pipe, closeness=30, **asked)
    following = getattr(search.Search, before)

    def slower(self: search.Search) -> Any:
        monkeypatch.setattr(clock.Stopwatch, "each", 2e-9)
        return following(self)

    monkeypatch.setattr(search.Search, before, slower)
    tuned = tune(pipe, closeness=30, **asked)
    assert tuned.points
    assert [point.times for point in tuned.points] == pytest.approx([point.times for point in known.points])


@pytest.mark.usefixtures("own_cache")
def test_what_was_measured_is_not_measured_again(pipe: Any, asked: dict[str, Any], drawn: list[bool]) -> None:
    tune(pipe, closeness=30, **asked)
    first, _ = len(drawn), drawn.clear()
    tune(pipe, closeness=35, **asked)
    assert len(drawn) <= first - 3, "neither the untouched images of the search nor the stretches"


@pytest.mark.usefixtures("own_cache")
def test_a_stopped_tuning_goes_on(pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = search.Search._alone
    done: list[tuple[int, int, PatchConfig]] = []
    measured: list[tuple[int, int, PatchConfig]] = []

    def stopped(self: search.Search, number: int, image: int, config: PatchConfig) -> Deviation:
        if number == 1:
            raise KeyboardInterrupt
        done.append((number, image, config))
        return alone(self, number, image, config)

    with monkeypatch.context() as patched:
        patched.setattr(search.Search, "_alone", stopped)
        with pytest.raises(KeyboardInterrupt):
            tune(pipe, closeness=30, **asked)
    assert not elfatt_sd.is_patched(pipe)

    def counted(self: search.Search, number: int, image: int, config: PatchConfig) -> Deviation:
        measured.append((number, image, config))
        return alone(self, number, image, config)

    monkeypatch.setattr(search.Search, "_alone", counted)
    assert tune(pipe, closeness=30, **asked).proof is not None
    assert len(done) == 1
    assert not any(each in done for each in measured), "what was done before is known"
    assert measured[0][:2] == (1, 0)


def test_a_patch_that_is_there_is_run_and_put_back(pipe: Any, asked: dict[str, Any]) -> None:
    config = PatchConfig.preset("tome", ratio=0.3)
    elfatt_sd.apply_patch(pipe, config)
    run = checks.runner(pipe)
    before = run()
    tuned = tune(pipe, closeness=30, **asked)
    assert torch.equal(run(), before)
    assert [point.config for point in tuned.points if point.name == "as it was"] == [config]


def test_what_betters_every_choice_is_the_result(
    pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A preset, or the patch that was there, is proved like a choice; one that is farther than asked is not taken."""
    monkeypatch.setattr(search.Search, "settle", lambda self: self.curve[0])  # no choice keeps to the budget
    config = PatchConfig("few", (Phase(1.0, "sampled", keys=4),), levels=3)
    elfatt_sd.apply_patch(pipe, config)
    tuned = tune(pipe, closeness=1, **asked)
    assert tuned.proof is not None
    assert tuned.config == config
    assert len(tuned.proof.point.closeness) == len(tuned.proof.samples) > 1
    assert str(tuned).startswith("as it was: ")
    assert "all have the settings of few (sampled)" in str(tuned)
    assert tuned.report(tmp_path / "page").is_file()
    assert tune(pipe, closeness=100, **asked).proof is None


def test_the_settings_are_a_configuration_like_any_other(pipe: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    tuned = tune(pipe, closeness=30, **asked)
    tuned.save(tmp_path / "tuned.json")
    assert PatchConfig.load(tmp_path / "tuned.json") == tuned.config
    said = json.loads(json.dumps(tuned.to_dict(), allow_nan=False))
    assert said["config"]["per_layer"]
    text = str(tuned)
    assert re.match(r"tuned: \d\.\d\d times as fast, PSNR", text)
    assert "asked for: PSNR 30.0 dB at least" in text
    assert "worst PSNR" in text


@pytest.mark.parametrize(("images", "compared"), [(6, 2), (4, 1)])
def test_presets_are_timed_twice_at_least(pipe: Any, asked: dict[str, Any], images: int, compared: int) -> None:
    tuned = tune(pipe, closeness=99, **asked | {"presets": True, "images": images})
    first = {point.name: point for point in reversed(tuned.points)}  # a proof of one comes later
    assert {len(first[name].closeness) for name in PRESETS} == {compared}
    assert {len(first[name].speed) for name in PRESETS} == {2}


@pytest.mark.usefixtures("own_cache")
def test_a_busy_machine_is_said_to_be(pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    draw, drawn = Runs.draw, []

    def slower(runs: Runs, sample: Any, config: PatchConfig | None = None) -> Any:
        made = draw(runs, sample, config)
        if config is None or config.method != "elfatt":
            return made
        drawn.append(made)
        return dataclasses.replace(made, seconds=len(drawn) * 2.0)

    monkeypatch.setattr(Runs, "draw", slower)
    tuned = tune(pipe, closeness=99, **asked | {"presets": True})
    said = str(tuned).splitlines()
    assert any(line.split()[:2] == ["elfatt", "busy"] for line in said)
    assert sum("the machine was busy: equal runs took 2.00 to 4.00 s" in line for line in said) == 1
    assert not any(line.split()[:2] == ["elfatt-fast", "busy"] for line in said)


def test_steps_that_are_not_computed_do_not_count_as_done(pipe: Any, asked: dict[str, Any]) -> None:
    runs = Runs(pipe, Settings(8, height=48, width=48))
    runs.draw_recorded(Sample("a cat", 0))
    before = runs.steps_done
    runs.pace()
    assert (before, runs.steps_done) == (len(pipe.scheduler.timesteps), before + 1)


def test_a_page_shows_curve_map_and_images(pipe: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    page = tune(pipe, closeness=30, **asked | {"presets": True}).report(tmp_path / "page")
    text = page.read_text(encoding="utf-8")
    assert text.count("<figure>") == 6
    assert "elfatt-quality" in text
    assert {path.name for path in page.parent.iterdir()} == {
        "index.html",
        "curve.png",
        "choices.png",
        "images.png",
    }
    assert "http:" not in text and "https:" not in text, "nothing from outside"


def test_where_nothing_is_faster_the_pipeline_is_left_alone(
    pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No choice is worth it when an image takes the same time whatever is chosen."""
    monkeypatch.setattr(proving, "WORTH", 1000.0)
    tuned = tune(pipe, closeness=30, **asked)
    assert tuned.proof is None
    assert not tuned.config.active
    assert str(tuned).startswith("untouched: ")
    assert not elfatt_sd.is_patched(tuned.apply(pipe))
    assert tuned.report(tmp_path / "page").is_file()


def test_a_measure_of_ones_own(pipe: Any, asked: dict[str, Any]) -> None:
    def likeness(first: Any, second: Any) -> float:
        return -abs(sum(first.resize((1, 1)).getpixel((0, 0))) - sum(second.resize((1, 1)).getpixel((0, 0))))

    tuned = tune(pipe, closeness=-30, metric=likeness, **asked)
    assert tuned.measure.name == "likeness"
    assert tuned.proof is None or tuned.proof.point.mean >= -30


def test_ssim(pipe: Any, asked: dict[str, Any]) -> None:
    tuned = tune(pipe, closeness=0.9, metric="ssim", **asked)
    assert tuned.proof is None or tuned.proof.point.mean >= 0.9


def test_memory_rules_out_what_steps_share(pipe: Any, asked: dict[str, Any]) -> None:
    tuned = tune(pipe, closeness=30, memory=1000, **asked)
    assert all(phase.residual_steps == 1 for phase in tuned.config.all_phases)
    assert tune(pipe, closeness=30, memory=0.001, **asked).proof is None


@pytest.mark.parametrize("make", [tiny_transformers.flux, tiny_transformers.pixart])
def test_transformers(make: Any, folder: Path, asked: dict[str, Any]) -> None:
    pipe = make(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.register_to_config(shift_factor=0.1)  # Flux asks for it
    tuned = tune(pipe, closeness=35, **asked)
    assert not elfatt_sd.is_patched(pipe)
    assert tuned.proof is not None
    assert tuned.proof.point.mean >= 35
    assert {own.layers for own in tuned.config.per_layer} <= {layer.name for layer in find_layers(pipe.transformer)}


def test_a_modular_pipeline(folder: Path, asked: dict[str, Any]) -> None:
    """It names what its call takes in its blocks; and where that is not told, it is said in one line."""
    modular = pytest.importorskip("diffusers.modular_pipelines")  # younger than the oldest diffusers
    parts = {name: part for name, part in tiny.sdxl(folder).components.items() if part is not None}
    pipe = modular.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in parts.items() if name in pipe._component_specs})
    pipe.set_progress_bar_config(disable=True)
    tuned = tune(pipe, closeness=30, **{**asked, "height": 32, "width": 32})
    assert tuned.proof is None or tuned.proof.point.mean >= 30
    assert not elfatt_sd.is_patched(pipe)
    with pytest.raises(ElfattError, match="UNet2DConditionModel cannot be tuned; give a pipeline"):
        tune(pipe.unet, closeness=30, **asked)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"closeness": None}, "there is no budget"),
        ({"prompts": ["a cat"]}, "give two or more"),
        ({"prompts": ["a cat", "a cat"]}, "give two or more"),
        ({"prompts": "a cat"}, "give two or more"),
        ({"prompts": ["a cat", " "]}, "give two or more"),
        ({"images": 1}, "images=1 is not accepted"),
        ({"speed": 0.5}, "speed=0.5 is not accepted"),
        ({"metric": "fid"}, "metric='fid' is not known"),
        ({"metric": "lpips"}, "needs weights"),
        ({"prompts": ["a cat", None]}, "give two or more"),
        ({"height": 63}, "height"),
        ({"height": "64"}, "height='64' is not accepted"),
        ({"steps": 0}, "steps=0 is not accepted"),
        ({"steps": 1001}, "steps=1001 is not accepted; give a whole number from 1 to 1000"),
        ({"guidance": float("nan")}, "guidance=nan is not accepted"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not accepted"),
        ({"frames": 0}, "frames=0 is not accepted"),
    ],
)
def test_bad_input_is_one_line(pipe: Any, asked: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises((ElfattError, ValueError), match=says) as caught:
        tune(pipe, **{"closeness": 30, **asked, **changes})
    assert "\n" not in str(caught.value)
    assert not elfatt_sd.is_patched(pipe)


def test_frames_of_an_image_have_no_effect(pipe: Any, asked: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="frames=9 has no effect on a StableDiffusionPipeline, which makes no clips"):
        tune(pipe, closeness=30, frames=9, **asked)


@pytest.mark.parametrize(("name", "settings"), [("deepcache", {"cache_interval": 2}), ("taylorseer", {})])
def test_it_tunes_together_with_another_accelerator(
    name: str, settings: dict[str, Any], asked: dict[str, Any], request: pytest.FixtureRequest, folder: Path
) -> None:
    """What is untouched then has the accelerator; layers that it skips are measured in the steps in which they run."""
    if any(optional.PACKAGES[each].missing for each in peers.packages_of([name])):
        pytest.skip("it is not installed")
    if name == "taylorseer" and not hasattr(diffusers, "TaylorSeerCacheConfig"):
        pytest.skip("this diffusers has no such cache")
    cached = name == "deepcache"
    pipe = request.getfixturevalue("pipe") if cached else tiny_transformers.flux(folder, vae=tiny_transformers.vae())
    size = {} if cached else {"height": 128, "width": 128}
    with peers.running(pipe, name, settings):
        run = checks.runner(pipe, num_inference_steps=4, **size)
        alone = run()
        tuned = tune(pipe, closeness=25, **{**asked, **size})
        assert torch.equal(run(), alone), "the accelerator is still on"
        assert tuned.proof is not None
        assert tuned.proof.point.times > 1
        tuned.apply(pipe)
        assert not torch.equal(run(), alone)
        elfatt_sd.remove_patch(pipe)


def test_a_model_that_does_not_repeat_itself_is_said_to(pipe: Any, asked: dict[str, Any]) -> None:
    """As with kernels that are not deterministic: how close two untouched images come is measured and stated."""
    noise = torch.Generator().manual_seed(0)

    def disturb(_: Any, __: Any, output: Any) -> Any:
        sample = output[0]
        return (sample + 0.02 * torch.randn(sample.shape, generator=noise),)

    handle = pipe.unet.register_forward_hook(disturb)
    try:
        tuned = tune(pipe, closeness=20, **{**asked, "seed": 77})
    finally:
        handle.remove()
    assert 20 < tuned.floor < 80
    assert f"two untouched images of one seed have PSNR {tuned.floor:.1f} dB" in str(tuned)
    assert tuned.to_dict()["noise_floor"] == tuned.floor
