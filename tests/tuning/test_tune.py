"""Tuning small random pipelines from end to end; time is counted work, so that it is the same on every machine."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image
from support import checks, commands, tiny_transformers
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd import errors as optional
from elfatt_sd import measure as clock
from elfatt_sd import methods, peers, tuning
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError, ElfattFailure
from elfatt_sd.families import find_layers
from elfatt_sd.phases import Phase
from elfatt_sd.tuning import Predictor, Search, tune
from elfatt_sd.tuning.probe import LayerFigures, Probe
from elfatt_sd.tuning.runs import Drawn, DrawSettings, Runs, Sample, Store

LARGER = 100  # tokens, than those of the grids that an attention is tried on when it is registered
LATE = PatchConfig("late", (Phase(0.5), Phase(1.0, "sampled", keys=16)))
SAMPLE = Sample("a red star", 3)


@pytest.fixture
def small(folder: Path) -> Any:
    """A pipeline with two layers."""
    return tiny.sd15(folder, **tiny.ONE_LEVEL)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that images were drawn with."""
    return checks.counting(monkeypatch, Runs, "_shot", lambda *given: given[2])


def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is sent to a hub that stands in for the real one."""
    sent: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None) -> None:
            sent["token"] = token

        def create_repo(self, repo_id: str, **given: Any) -> str:
            sent["repo"] = repo_id, given
            return f"https://hub/{repo_id}"

        def upload_folder(self, repo_id: str, folder_path: str) -> None:
            sent.update(repo_id=repo_id, files=commands.files(Path(folder_path)))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return sent


def test_what_is_found_is_close_and_fast_as_said(
    small: Any, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are a configuration like any other; a page shows curve, map and images, and needs nothing else."""
    run = checks.runner(small)
    untouched = run()
    tuned = tune(small, closeness=30, **asked)
    assert torch.equal(run(), untouched), "the pipeline is as it was"
    point = tuned.proof.point
    assert point.mean >= 30 and point.times > tuning.WORTH
    assert len(tuned.proof.samples) == len(point.closeness) == 8
    assert point.mean > tuned.proof.bound >= 30 > tuned.proof.lowest - 30
    assert tuned.floor == math.inf
    tuned.save(tmp_path / "tuned.json")
    assert PatchConfig.load(tmp_path / "tuned.json") == tuned.config
    found = PatchConfig.load(tmp_path / "tuned.json").origin
    expected = {"size": "32x32", "input": "16x16", "steps": 4, "asked": "PSNR 30.0 dB at least", "images": 8}
    expected |= {"first": 1, "negative_prompt": "", "scheduler": type(small.scheduler).__name__}
    assert {**found, **expected} == found
    assert found["promised"].startswith(tuned.proof.words())
    tuned.apply(small)
    said = "these settings were tuned for .* at 32x32, .*; here: 16x16. What"
    with pytest.warns(UserWarning, match=said):
        assert not torch.equal(run(), untouched)
    assert json.loads(json.dumps(tuned.to_dict(), allow_nan=False))["config"]["per_layer"]
    text = str(tuned)
    promised = r"PSNR \d\d\.\d dB promised \(90% confidence, 8 images\): mean \d\d\.\d, lowest \d\d\.\d"
    assert re.match(rf"tuned: {promised}; measured \d\.\d\d times as fast", text)
    assert "asked for: PSNR 30.0 dB at least" in text and "at most 32% of all are farther" in text
    page = tuned.report(tmp_path / "page")
    text = page.read_text(encoding="utf-8")
    assert text.count('class="slider"') == text.count('alt="difference') == 8 and "--strength" in text
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "curve.png", "elfatt_sd.json"}
    assert PatchConfig.load(page.with_name("elfatt_sd.json")) == tuned.config
    offered = re.search(r'href="data:application/json;base64,(.*?)" download="elfatt_sd.json"', text)[1]
    assert base64.b64decode(offered) == page.with_name("elfatt_sd.json").read_bytes()
    assert re.search(rf"<h1.*: {re.escape(tuned.proof.promised)} promised \(90 %\), measured \d\.\d\d times", text)
    assert "http:" not in text and "https:" not in text, "nothing from outside"
    named = dataclasses.replace(tuned, record={**tuned.record, "model": "my model"}).report(tmp_path / "named")
    assert "--model &#39;my model&#39;</span>" in named.read_text(encoding="utf-8")
    sent = shared(monkeypatch)
    assert tuned.push_to_hub("me/small", token="t", private=True) == "https://hub/me/small"
    assert sent.pop("files") == ["README.md", "curve.png", "elfatt_sd.json", "pair.png"]
    assert sent == {"token": "t", "repo": ("me/small", {"private": True, "exist_ok": True}), "repo_id": "me/small"}
    tuned.save_pretrained(tmp_path / "small")
    assert PatchConfig.load(tmp_path / "small") == tuned.config
    front, card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8").split("---\n")[1:3]
    assert "library_name: elfatt-sd" in front and "base_model" not in front, "its model is not on the hub"
    assert 'elfatt_sd.apply_patch(pipe, "small")' in card and "| ★ tuned | " in card and found["promised"] in card


@pytest.mark.usefixtures("own_cache")
def test_tuning_goes_on(small: Any, asked: dict[str, Any], drawn: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is not measured again, also for another budget; a dtype that is faster stays chosen."""
    monkeypatch.setattr(Probe, "_faster_dtype", lambda *_: "bfloat16")
    two = asked | {"steps": 8}  # stretches
    with checks.stopped_at(Runs, "deviation", lambda _, step, *__: step > 0):
        tune(small, closeness=30, **two)
    assert not elfatt_sd.is_patched(small)
    measured = checks.counting(monkeypatch, Runs, "deviation", lambda *given: given[1])
    monkeypatch.setattr(Probe, "__enter__", None)  # layers are known
    drawn.clear()
    tuned = tune(small, closeness=40, **two)
    assert tuned.proof is not None and tuned.proof.point.mean >= 40
    assert measured and measured[0] > 0, "the first stretch is known"
    assert {phase.attention_dtype for phase in tuned.config.all_phases if not phase.exact} == {"bfloat16"}
    assert "attention in bfloat16" in str(tuned)
    drawn.clear(), measured.clear()
    kept: list[int] = []
    with checks.stopped_at(Search, "settle", lambda search: kept.append(len(search.held_out_untouched)) or True):
        tune(small, closeness=45, **two)
    assert len(drawn) <= 3 and not measured and kept == [8], "the first image again, twice, and a step for the pace"


def test_a_speed_is_kept_to(pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be had is told with figures; what is only predicted to be too slow is tried."""
    two = asked | {"steps": 2}
    assert tune(pipe, speed=1.05, **two).proof.point.times >= 1.05
    near = r"cannot be promised on held-out images; the nearest choice is promised (\d\.\d+) times .* mean (\d+\.\d)"
    with pytest.raises(ElfattFailure, match=near) as told:
        tune(pipe, speed=50, **two)
    fastest, mean = map(float, re.search(near, str(told.value)).groups())
    with pytest.raises(ElfattFailure, match=near):
        tune(pipe, closeness=mean + 3, speed=fastest - 0.02, **two)
    assert not elfatt_sd.is_patched(pipe)
    curve = Predictor.curve
    halved = lambda *given: [dataclasses.replace(each, saved=each.saved / 2) for each in curve(*given)]  # noqa: E731
    monkeypatch.setattr(Predictor, "curve", halved)
    assert tune(pipe, speed=fastest - 0.1, **two).proof.point.times >= fastest - 0.1


def test_a_slower_machine_changes_no_speed(small: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Untouched images of the search are drawn long before what they are compared with."""
    before, following = tune(small, closeness=30, **asked), Search.measure_layers
    slower = lambda search: (monkeypatch.setattr(clock.Stopwatch, "each", 2e-9), following(search))[1]  # noqa: E731
    monkeypatch.setattr(Search, "measure_layers", slower)
    later = tune(small, closeness=30, **asked)
    assert [point.times for point in later.points] == pytest.approx([point.times for point in before.points])


def test_what_betters_choices_wins(
    pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The patch that was there is proved like a choice, and put back; one that is farther than asked is not taken."""
    monkeypatch.setattr(Search, "settle", lambda self: self.curve[0])  # no choice keeps to the budget
    config = PatchConfig("few", (Phase(1.0, "sampled", keys=4),), levels=3)
    elfatt_sd.apply_patch(pipe, config)
    run = checks.runner(pipe)
    before = run()
    tuned = tune(pipe, closeness=1, **asked)
    assert torch.equal(run(), before)
    assert tuned.config == config
    assert len(tuned.proof.point.closeness) == len(tuned.proof.samples) > 1
    assert str(tuned).startswith("as it was: ")
    assert "all have the settings of few (sampled)" in str(tuned)
    assert tuned.report(tmp_path / "page").is_file()
    assert tune(pipe, closeness=100, **asked).proof is None


def likeness(first: Any, second: Any) -> float:
    return -abs(sum(first.resize((1, 1)).getpixel((0, 0))) - sum(second.resize((1, 1)).getpixel((0, 0))))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"closeness": -30, "metric": likeness}, "likeness"),
        ({"closeness": 0.9, "metric": "ssim"}, "SSIM"),
        ({"closeness": 30, "memory": 1000}, "PSNR"),
        ({"closeness": 30, "memory": 0.001}, None),
        ({"closeness": 99}, None),
    ],
    ids=["own metric", "SSIM", "memory", "too little memory", "too close"],
)
def test_budgets(small: Any, asked: Any, given: Any, name: str | None, tmp_path: Any, monkeypatch: Any) -> None:
    """Where nothing keeps to the budget, the pipeline is left alone; memory rules out what steps share."""
    for place in (tuning, tuning.runs):  # of a GPU, for which the process stands
        monkeypatch.setattr(place, "memory_counters", lambda device: device)
    tuned = tune(small, **given, **asked)
    if name is not None:
        assert tuned.measure.name == name
        assert tuned.proof.point.mean >= given["closeness"]
        assert "memory" not in given or all(phase.residual_steps == 1 for phase in tuned.config.all_phases)
        return
    assert tuned.proof is None and str(tuned).startswith("untouched: no choice that is as close as asked")
    assert "the nearest that can be promised" in str(tuned) and tuned.to_dict()["nearest"]["promised"] < 99
    assert not elfatt_sd.is_patched(tuned.apply(small)) and tuned.report(tmp_path / "page").is_file()
    with pytest.raises(ElfattError, match="images of other seeds are the same"):
        tune(small, **given, **asked, inputs={"latents": torch.ones(1, 4, 16, 16)})


def test_a_modular_pipeline(folder: Path, asked: dict[str, Any]) -> None:
    """It names what its call takes in its blocks; and where that is not told, it is said in one line."""
    modular = pytest.importorskip("diffusers.modular_pipelines")  # younger than the oldest diffusers
    small: dict[str, Any] = {**tiny.ONE_LEVEL, "addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    small |= {"projection_class_embeddings_input_dim": 80, "cross_attention_dim": 64}
    parts = {name: part for name, part in tiny.sdxl(folder).components.items() if part is not None}
    parts["unet"] = tiny.unet(**small)
    pipe = modular.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in parts.items() if name in pipe._component_specs})
    pipe.set_progress_bar_config(disable=True)
    tuned = tune(pipe, closeness=30, **asked)
    assert tuned.proof is None or tuned.proof.point.mean >= 30
    assert not elfatt_sd.is_patched(pipe)
    with pytest.raises(ElfattError, match="UNet2DConditionModel cannot be tuned; give a pipeline"):
        tune(pipe.unet, closeness=30, **asked)
    with pytest.raises(ElfattError, match="input='nope' is not known; accepted: "):
        tune(pipe, closeness=30, inputs={"nope": 1}, **asked)


def test_no_effect_is_said(small: Any, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of an image, words that are cut off; and once, that nothing can be kept for the next run."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "file" / "cache"))
    prompts = ["a " * 90 + "c", "a " * 90 + "d"]
    with pytest.warns(UserWarning) as told:
        assert tune(small, closeness=20, frames=9, **asked | {"prompts": prompts}).proof is not None
    said = [str(each.message) for each in told]
    assert len(said) == 3
    assert "frames=9 has no effect on a StableDiffusionPipeline, which makes no clips" in said[0]
    assert "2 of 2 prompts are cut off: the text encoder takes 75 tokens" in said[1]
    assert "what tuning measures is not kept for the next run" in said[2]


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
        assert tuned.proof.point.times > 1
        tuned.apply(pipe)
        assert not torch.equal(run(), alone)
        elfatt_sd.remove_patch(pipe)


def test_a_model_that_does_not_repeat_itself_is_said_to(small: Any, asked: dict[str, Any]) -> None:
    """As with kernels that are not deterministic: how close two untouched images come is measured and stated."""
    noise = torch.Generator().manual_seed(0)
    disturb = lambda _, __, output: (output[0] + 0.02 * torch.randn(output[0].shape, generator=noise),)  # noqa: E731
    handle = small.unet.register_forward_hook(disturb)
    try:
        tuned = tune(small, closeness=20, **{**asked, "seed": 77})
    finally:
        handle.remove()
    assert 20 < tuned.floor < 80
    assert f"two untouched images of one seed have PSNR {tuned.floor:.1f} dB" in str(tuned)
    assert tuned.to_dict()["noise_floor"] == tuned.floor


@pytest.mark.usefixtures("own_cache")
def test_where_it_is_stopped_the_pipeline_is_as_it_was(small: Any, asked: dict[str, Any]) -> None:
    elfatt_sd.apply_patch(small, "tome", ratio=0.3)
    run = checks.runner(small)
    before = run()
    for home, name in ((Probe, "see_call"), (Runs, "draw_from"), (Search, "prove_config")):
        with checks.stopped_at(home, name):
            tune(small, closeness=20, **asked)
        assert torch.equal(run(), before), name
    elfatt_sd.remove_patch(small)
    assert "forward" not in vars(small.unet)
    assert not small.unet._forward_hooks and not small.unet._forward_pre_hooks


@dataclasses.dataclass(frozen=True)
class Greedy(methods.CellSpread):
    """An approximation that has memory for two calls in the layers of a model."""

    name: ClassVar[str] = "greedy"
    calls: ClassVar[int] = 0

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        type(self).calls += tokens.shape[1] > LARGER
        if tokens.shape[1] > LARGER and self.calls > 2:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes.")
        return super().attend(layer, tokens, prepared)


@pytest.mark.usefixtures("own_cache")
def test_what_has_no_memory_is_left_out(small: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_known", dict(methods._known))
    elfatt_sd.register(Greedy)
    tuned = tune(small, closeness=20, **asked)
    assert Greedy.calls > 2
    finest = {layer.name for layer in find_layers(small.unet) if layer.downsample == 1}
    own = [each for each in tuned.config.per_layer if each.layers in finest]
    assert own and "greedy" not in {phase.attention.name for each in own for phase in each.phases}


def raises(first: Any, second: Any) -> float:
    raise LookupError("no such\nimage")


@pytest.mark.parametrize(
    ("changes", "says", "images"),
    [
        ({"prompts": "a cat"}, "give two or more", 0),
        ({"prompts": ["a cat", None]}, "give two or more", 0),
        ({"height": "64"}, "height='64' is not accepted", 0),
        ({"confidence": 0.5}, "confidence=0.5 is not accepted", 0),
        ({"images": 10**9}, "from 8 to 1000", 0),
        ({"inputs": {"prompt": "a cat"}}, "input='prompt' is not known", 0),
        ({"inputs": ["prompt"]}, "give a dict", 0),
        ({"metric": "lpips"}, "needs weights", 0),
        ({"metric": raises}, r"metric 'raises' cannot compare two images \(LookupError: no such image\)", 0),
        ({"metric": lambda first, second: math.nan}, "gives nan for two images", 0),
        ({"metric": lambda first, second: math.inf}, "gives inf for two images", 0),
        ({}, "the image of '.*', seed 0, is of one colour", 1),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_what_cannot_be_tuned_is_told_at_once(
    folder: Path, asked: dict[str, Any], drawn: list[Any], changes: dict[str, Any], says: str, images: int
) -> None:
    """What the command line takes, too, is tried with it."""
    pipe = tiny.sd15(folder)
    if images:
        commands.break_decoder(pipe, 0.0)
    with pytest.raises(ElfattError, match=says) as told:
        tune(pipe, **{"closeness": 30, **asked, **changes})
    assert "\n" not in str(told.value) and not elfatt_sd.is_patched(pipe)
    assert len(drawn) == images


@pytest.mark.usefixtures("own_cache")
def test_what_is_kept_of_another_model_is_forgotten(folder: Path, asked: dict[str, Any], drawn: list[Any]) -> None:
    """Inputs and the weights around the denoiser are not in the name of the folder, and change every image."""
    pipe = tiny.sd15(folder)

    def images(**given: Any) -> int:
        drawn.clear()
        with checks.stopped_at(Search, "measure_layers"):
            tune(pipe, closeness=20, **asked, **given)
        return len(drawn)

    first = images()
    assert images() < first
    assert images(inputs={"guidance_rescale": 0.7}) >= first
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.mul_(0.5)
    assert images() >= first


def test_presets_are_run_for_the_curve(pipe: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is timed twice at least; one that has no memory is left out, and where the machine was busy that is said."""
    draw, drawn = Runs.draw, []

    def slower(runs: Runs, sample: Any, config: PatchConfig | None = None) -> Drawn:
        made = draw(runs, sample, config)
        if config is None or config.method != "elfatt":
            return made
        drawn.append(made)
        return dataclasses.replace(made, seconds=len(drawn) * 2.0)

    monkeypatch.setattr(Runs, "draw", slower)

    def fail(*_: Any) -> None:
        if elfatt_sd.is_patched(pipe) and pipe.unet.elfatt_patch.config.method == "elfatt-quality":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    left_out = "elfatt-quality is left out of the curve: memory ran out while an image was drawn; .*share nothing.$"
    with pipe.vae.decoder.register_forward_pre_hook(fail), pytest.warns(UserWarning, match=left_out):
        tuned = tune(pipe, closeness=99, **asked | {"presets": True})
    first = {point.name: point for point in reversed(tuned.points)}  # a proof of one comes later
    assert "elfatt-quality" not in first
    for name in ("elfatt", "elfatt-fast"):
        assert (len(first[name].closeness), len(first[name].speed)) == (2, 2)
    said = str(tuned).splitlines()
    assert [line.split()[0] for line in said if line.split()[1:2] == ["busy"]] == ["elfatt"]
    assert sum("the machine was busy: equal runs took 2.00 to 4.00 s" in line for line in said) == 1


@pytest.fixture
def runs(pipe: Any) -> Runs:
    return Runs(pipe, DrawSettings(6, height=32, width=32))


@pytest.fixture
def calls(pipe: Any) -> Iterator[list[None]]:
    """One for each call of the denoiser that is computed."""
    found: list[None] = []
    handle = pipe.unet.conv_in.register_forward_pre_hook(lambda *_: found.append(None))
    yield found
    handle.remove()


def test_what_is_known_is_not_computed_and_nothing_changes(runs: Runs, calls: list[None]) -> None:
    plain, late = runs.draw(SAMPLE), runs.draw(SAMPLE, LATE)
    every = len(calls) // 2
    for step, computed in ((3, 2 * every - 3), (3, every - 3), (0, every)):  # it is recorded first
        calls.clear()
        assert runs.draw_from(step, SAMPLE, LATE).frames == late.frames
        assert len(calls) == computed
    assert runs.draw_recorded(SAMPLE).same(plain)
    before = runs._steps_done
    runs.pace()
    assert runs._steps_done == before + 1, "steps that are not computed do not count as done"
    assert runs.draw(SAMPLE).same(plain), "the forward is put back"
    pixels, other = (np.asarray(each.frames[0], dtype=float) for each in (plain, late))
    far, rounded = runs.deviation(3, SAMPLE, LATE), ((pixels - other) ** 2).mean()
    assert 0 < far != rounded and abs(far - rounded) < 0.5, "of pixels before they are rounded"
    assert runs.deviation(3, SAMPLE, PatchConfig("sd")) == 0


def test_with_an_image_a_run_begins_late(pipe: Any, calls: list[None]) -> None:
    inputs = {"image": Image.radial_gradient("L").convert("RGB").resize((32, 32)), "strength": 0.5}
    runs = Runs(checks.like(diffusers.StableDiffusionImg2ImgPipeline, pipe), DrawSettings(6, inputs=inputs))
    recorded, every = runs.draw_recorded(SAMPLE), len(calls)
    calls.clear()
    assert runs.draw_from(5, SAMPLE, None).frames == recorded.frames
    assert (every, len(calls)) == (4, 2), "of the 7 calls that PNDM makes of 6 steps"


def test_a_denoiser_that_was_compiled_in_place_is_left_alone(pipe: Any, runs: Runs, calls: list[None]) -> None:
    pipe.unet._compiled_call_impl = pipe.unet._call_impl  # as `compile` does, without the time that it takes
    try:
        late = runs.draw(SAMPLE, LATE)
        calls.clear()
        for _ in range(2):
            assert runs.draw_from(3, SAMPLE, LATE).frames == late.frames
        assert len(calls) == 3 * 7, "recording was tried once; all steps are computed"
        assert "forward" not in vars(pipe.unet)
    finally:
        pipe.unet._compiled_call_impl = None


def test_what_is_damaged_is_measured_again(own_cache: Path) -> None:
    image = Drawn((Image.new("RGB", (8, 8), "red"),), 1.5)
    figures = {"layer": LayerFigures([Phase(1.0, "sampled")], seconds=[0.5], calls=3, errors={(0, 1, 0, True): [0.5]})}
    for content in (b"", b"null", b'{"a": 1}', b'{"a": {"bases": [{}]}}', b'{"frames": ["AA"]}', b"\xff\xfe"):
        store = Store({"a": str(content)})
        assert store.drawn(SAMPLE, lambda: image).same(image)
        [kept] = store.folder.glob("image-*.json")
        for path in (kept, store.folder / "layers.json"):
            path.write_bytes(content)
        for _ in range(2):  # it is measured, then read
            assert store.known("layers", lambda: {"layer": figures["layer"].to_dict()}, LayerFigures.read) == figures
            assert store.drawn(SAMPLE, lambda: image).same(image)
        assert store.drawn(SAMPLE, lambda: Drawn((), 7.0)).same(image), "it was kept"


def test_the_folder_is_the_same_in_every_process(pipe: Any) -> None:
    """Diffusers notes which settings of a scheduler are defaults, in an order that changes with Python's hash seed."""
    runs = Runs(pipe, DrawSettings(4))
    record = tuning._record(runs)
    kind, config = type(pipe.scheduler), pipe.scheduler.config
    pipe.scheduler = kind.from_config(config)
    pipe.scheduler.register_to_config(_use_default_values=["another", *pipe.scheduler.config["_use_default_values"]])
    assert tuning._record(runs) == record
    pipe.scheduler = kind.from_config(config, beta_start=2 * config["beta_start"])
    assert tuning._record(runs) != record
