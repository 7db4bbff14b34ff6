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
from elfatt_sd.phases import Phase
from elfatt_sd.tuning import probe, search, tune
from elfatt_sd.tuning.search import Search


@pytest.fixture
def tuned(pipe: Any, least: dict[str, Any], results: dict[str, Any]) -> Any:
    """What is found for 30 dB."""
    if "tuned" not in results:
        results["tuned"] = tune(pipe, closeness=30, **least)
    return results["tuned"]


@pytest.fixture
def fastest(pipe: Any, least: dict[str, Any], results: dict[str, Any]) -> Any:
    """The proof of the fastest settings."""
    if "fastest" not in results:
        results["fastest"] = tune(pipe, closeness=1, **least).proof
    return results["fastest"]


def test_what_is_found_is_close_and_fast_as_said(pipe: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    """The settings are a configuration like any other; a page shows curve, map and images, and needs nothing else."""
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
    tuned.save(tmp_path / "tuned.json")
    assert PatchConfig.load(tmp_path / "tuned.json") == tuned.config
    assert json.loads(json.dumps(tuned.to_dict(), allow_nan=False))["config"]["per_layer"]
    text = str(tuned)
    assert re.match(r"tuned: \d\.\d\d times as fast, PSNR", text)
    assert "asked for: PSNR 30.0 dB at least" in text and "worst PSNR" in text
    page = tuned.report(tmp_path / "page")
    text = page.read_text(encoding="utf-8")
    assert text.count("<figure>") == 6
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "curve.png", "choices.png", "images.png"}
    assert "http:" not in text and "https:" not in text, "nothing from outside"


@pytest.mark.usefixtures("own_cache")
def test_a_dtype_that_is_faster_is_chosen(pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a process that finds the figures in the cache; the settings keep it."""
    monkeypatch.setattr(probe.Probe, "_faster_dtype", lambda *_: "bfloat16")
    smaller = asked | {"images": 3, "height": 32, "width": 32}
    found = [tune(pipe, closeness=40, **smaller) for _ in range(2)]
    assert found[0].config == found[1].config
    assert found[0].proof is not None
    assert found[0].proof.point.mean >= 40
    assert {phase.attention_dtype for phase in found[0].config.all_phases if not phase.exact} == {"bfloat16"}
    assert "attention in bfloat16" in str(found[0])
    assert PatchConfig.from_dict(json.loads(json.dumps(found[0].config.to_dict()))) == found[0].config


def test_a_speed_is_kept_to(pipe: Any, least: dict[str, Any]) -> None:
    tuned = tune(pipe, speed=1.05, **least)
    assert tuned.proof is not None
    assert tuned.proof.point.times >= 1.05
    with pytest.raises(ElfattFailure, match=r"speed=50 is not reached: the fastest choice is \d\.\d+ times as fast"):
        tune(pipe, speed=50, **least)
    assert not elfatt_sd.is_patched(pipe)


def test_budgets_that_contradict_each_other_are_told_with_figures(pipe: Any, asked: dict[str, Any]) -> None:
    fastest = tune(pipe, closeness=1, **asked).proof
    assert fastest is not None
    with pytest.raises(ElfattFailure, match=r"not reached on held-out images; the nearest choice is \d\.\d\d times"):
        tune(pipe, closeness=fastest.point.mean + 25, speed=fastest.point.times - 0.01, **asked)
    assert not elfatt_sd.is_patched(pipe)


def test_a_speed_beyond_the_prediction_is_tried(
    pipe: Any, least: dict[str, Any], fastest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers can gain less on their own than in the whole run; nothing is refused by prediction alone."""
    curve = search.Model.curve

    def halved(model: search.Model, calls: Any) -> list[Any]:
        return [dataclasses.replace(choice, saved=choice.saved / 2) for choice in curve(model, calls)]

    monkeypatch.setattr(search.Model, "curve", halved)
    tuned = tune(pipe, speed=fastest.point.times - 0.1, **least)
    assert tuned.proof is not None
    assert tuned.proof.point.times >= fastest.point.times - 0.1


def test_a_machine_that_becomes_slower_changes_no_speed(
    pipe: Any, least: dict[str, Any], tuned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untouched images of the search are drawn long before what they are compared with."""
    following = Search.measure_layers

    def slower(self: Search) -> Any:
        monkeypatch.setattr(clock.Stopwatch, "each", 2e-9)
        return following(self)

    monkeypatch.setattr(Search, "measure_layers", slower)
    later = tune(pipe, closeness=30, **least)
    assert later.points
    assert [point.times for point in later.points] == pytest.approx([point.times for point in tuned.points])


@pytest.mark.usefixtures("own_cache")
def test_a_stopped_tuning_goes_on(
    pipe: Any, asked: dict[str, Any], drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was measured is not measured again by the next one, with another budget."""
    alone = Search._alone
    done: list[tuple[int, int, PatchConfig]] = []
    measured: list[tuple[int, int, PatchConfig]] = []

    def stopped(self: Search, number: int, image: int, config: PatchConfig) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        done.append((number, image, config))
        return alone(self, number, image, config)

    with monkeypatch.context() as patched:
        patched.setattr(Search, "_alone", stopped)
        with pytest.raises(KeyboardInterrupt):
            tune(pipe, closeness=30, **asked)
    assert not elfatt_sd.is_patched(pipe)

    def counted(self: Search, number: int, image: int, config: PatchConfig) -> Any:
        measured.append((number, image, config))
        return alone(self, number, image, config)

    monkeypatch.setattr(Search, "_alone", counted)
    assert tune(pipe, closeness=30, **asked).proof is not None
    assert len(done) == 1
    assert not any(each in done for each in measured), "what was done before is known"
    assert measured[0][:2] == (1, 0)
    first, _, _ = len(drawn), drawn.clear(), measured.clear()
    tune(pipe, closeness=35, **asked)
    assert len(drawn) < first and (0, 0) not in [each[:2] for each in measured], "neither images nor stretches"


def test_what_betters_every_choice_is_the_result(
    pipe: Any, least: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The patch that was there is proved like a choice, and put back; one that is farther than asked is not taken."""
    monkeypatch.setattr(Search, "settle", lambda self: self.curve[0])  # no choice keeps to the budget
    config = PatchConfig("few", (Phase(1.0, "sampled", keys=4),), levels=3)
    elfatt_sd.apply_patch(pipe, config)
    run = checks.runner(pipe)
    before = run()
    tuned = tune(pipe, closeness=1, **least)
    assert torch.equal(run(), before)
    assert tuned.proof is not None
    assert tuned.config == config
    assert len(tuned.proof.point.closeness) == len(tuned.proof.samples) > 1
    assert str(tuned).startswith("as it was: ")
    assert "all have the settings of few (sampled)" in str(tuned)
    assert tuned.report(tmp_path / "page").is_file()
    assert tune(pipe, closeness=100, **least).proof is None


@pytest.mark.parametrize(("given", "worth"), [({"closeness": 30}, 1000.0), ({"closeness": 1, "metric": "ssim"}, 1.03)])
def test_where_nothing_pays_the_pipeline_is_left_alone(
    pipe: Any,
    least: dict[str, Any],
    given: dict[str, Any],
    worth: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """No choice is worth it, or none is as close as asked."""
    monkeypatch.setattr(search, "WORTH", worth)
    tuned = tune(pipe, **least, **given)
    assert tuned.proof is None
    assert not tuned.config.active
    assert str(tuned).startswith("untouched: no choice that is as close as asked")
    assert not elfatt_sd.is_patched(tuned.apply(pipe))
    assert tuned.report(tmp_path / "page").is_file()


def likeness(first: Any, second: Any) -> float:
    return -abs(sum(first.resize((1, 1)).getpixel((0, 0))) - sum(second.resize((1, 1)).getpixel((0, 0))))


@pytest.mark.parametrize(("metric", "name", "closeness"), [(likeness, "likeness", -30), ("ssim", "SSIM", 0.9)])
def test_other_measures(pipe: Any, least: dict[str, Any], metric: Any, name: str, closeness: float) -> None:
    tuned = tune(pipe, closeness=closeness, metric=metric, **least)
    assert tuned.measure.name == name
    assert tuned.proof is None or tuned.proof.point.mean >= closeness


def test_memory_rules_out_what_steps_share(pipe: Any, least: dict[str, Any]) -> None:
    tuned = tune(pipe, closeness=30, memory=1000, **least)
    assert all(phase.residual_steps == 1 for phase in tuned.config.all_phases)
    assert tune(pipe, closeness=30, memory=0.001, **least).proof is None


def test_a_modular_pipeline(folder: Path, least: dict[str, Any]) -> None:
    """It names what its call takes in its blocks; and where that is not told, it is said in one line."""
    modular = pytest.importorskip("diffusers.modular_pipelines")  # younger than the oldest diffusers
    parts = {name: part for name, part in tiny.sdxl(folder).components.items() if part is not None}
    pipe = modular.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in parts.items() if name in pipe._component_specs})
    pipe.set_progress_bar_config(disable=True)
    tuned = tune(pipe, closeness=30, **least)
    assert tuned.proof is None or tuned.proof.point.mean >= 30
    assert not elfatt_sd.is_patched(pipe)
    with pytest.raises(ElfattError, match="UNet2DConditionModel cannot be tuned; give a pipeline"):
        tune(pipe.unet, closeness=30, **least)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"closeness": None}, "there is no budget"),
        ({"prompts": "a cat"}, "give two or more"),
        ({"prompts": ["a cat", " "]}, "give two or more"),
        ({"images": 1}, "images=1 is not accepted"),
        ({"speed": 0.5}, "speed=0.5 is not accepted"),
        ({"metric": "fid"}, "metric='fid' is not known"),
        ({"metric": "lpips"}, "needs weights"),
        ({"prompts": ["a cat", None]}, "give two or more"),
        ({"height": "64"}, "height='64' is not accepted"),
        ({"steps": 0}, "steps=0 is not accepted"),
        ({"steps": 1001}, "steps=1001 is not accepted; give a whole number from 1 to 1000"),
        ({"guidance": float("nan")}, "guidance=nan is not accepted"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not accepted"),
        ({"frames": 0}, "frames=0 is not accepted"),
        ({"closeness": 1.01, "metric": "ssim"}, "closeness=1.01 is not accepted; metric='ssim' gives 1 at most"),
        ({"closeness": -0.1, "metric": "lpips"}, "closeness=-0.1 is not accepted; metric='lpips' gives 0 at least"),
        ({"closeness": -5, "metric": "ssim"}, "closeness=-5 is not accepted; metric='ssim' gives -1 at least"),
        ({"closeness": -1}, "metric='psnr' gives 0 at least .in dB; 8-bit images that are not identical end near"),
        ({"closeness": 500}, "closeness=500 is not accepted; metric='psnr' gives 100 at most"),
    ],
)
def test_bad_input_is_one_line(pipe: Any, least: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises((ElfattError, ValueError), match=says) as caught:
        tune(pipe, **{"closeness": 30, **least, **changes})
    assert "\n" not in str(caught.value)
    assert not elfatt_sd.is_patched(pipe)


def test_what_has_no_effect_or_is_cut_off_is_said(pipe: Any, least: dict[str, Any]) -> None:
    prompts = ["a " * 90 + "c", "a " * 90 + "d"]
    makes_none = "frames=9 has no effect on a StableDiffusionPipeline, which makes no clips"
    cut = "2 of 2 prompts are cut off: the text encoder takes 75 tokens"
    with pytest.warns(UserWarning, match=makes_none), pytest.warns(UserWarning, match=cut):
        tune(pipe, closeness=20, frames=9, **least | {"prompts": prompts})


@pytest.mark.parametrize(("name", "settings"), [("deepcache", {"cache_interval": 2}), ("taylorseer", {})])
def test_it_tunes_together_with_another_accelerator(
    name: str, settings: dict[str, Any], least: dict[str, Any], request: pytest.FixtureRequest, folder: Path
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
        tuned = tune(pipe, closeness=25, **{**least, **size})
        assert torch.equal(run(), alone), "the accelerator is still on"
        assert tuned.proof is not None
        assert tuned.proof.point.times > 1
        tuned.apply(pipe)
        assert not torch.equal(run(), alone)
        elfatt_sd.remove_patch(pipe)


def test_a_model_that_does_not_repeat_itself_is_said_to(pipe: Any, least: dict[str, Any]) -> None:
    """As with kernels that are not deterministic: how close two untouched images come is measured and stated."""
    noise = torch.Generator().manual_seed(0)

    def disturb(_: Any, __: Any, output: Any) -> Any:
        sample = output[0]
        return (sample + 0.02 * torch.randn(sample.shape, generator=noise),)

    handle = pipe.unet.register_forward_hook(disturb)
    try:
        tuned = tune(pipe, closeness=20, **{**least, "seed": 77})
    finally:
        handle.remove()
    assert 20 < tuned.floor < 80
    assert f"two untouched images of one seed have PSNR {tuned.floor:.1f} dB" in str(tuned)
    assert tuned.to_dict()["noise_floor"] == tuned.floor
