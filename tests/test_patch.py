"""Installing and removing a patch: exactness, determinism, randomness, and models that come and go."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig
from support import tiny_pipelines as tiny
from support.checks import ACTIVE, counting, elfatt_processors, like, picture_of, processors

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families.shapes import fingerprint
from elfatt_sd.runtime import call as state_module


def config_of(pipe: Any) -> PatchConfig | None:
    """The configuration that a pipeline, or a UNet, is patched with."""
    patch = vars(getattr(pipe, "unet", pipe)).get("elfatt_patch")
    assert elfatt_sd.is_patched(pipe) is (patch is not None)
    return None if patch is None else patch.config


def test_a_patch_replaces_another_unless_it_fails(pipe: Any) -> None:
    """A context goes back to the outer patch, also after an exception."""
    before = processors(pipe)
    assert elfatt_sd.apply_patch(pipe, "tome", ratio=0.5) is pipe
    with pytest.raises(ElfattError):
        elfatt_sd.apply_patch(pipe, "elfatt", ratio=2)
    assert config_of(pipe) == PatchConfig.preset("tome")
    with pytest.raises(RuntimeError, match="stop"), elfatt_sd.patched(pipe, "agent") as plan:
        assert sum(layer.patched for layer in plan.layers) == 3
        with elfatt_sd.patched(pipe, "elfatt"):
            both = picture_of(pipe)
            assert elfatt_sd.is_patched(pipe.unet) and len(pipe.unet._forward_pre_hooks) == 1
        assert config_of(pipe) == PatchConfig.preset("agent")
        raise RuntimeError("stop")
    assert config_of(pipe) == PatchConfig.preset("tome")
    elfatt_sd.apply_patch(pipe, "sd")  # the untouched pipeline
    assert all(processors(pipe)[name] is old for name, old in before.items()) and config_of(pipe) is None
    assert elfatt_sd.remove_patch(pipe) is pipe, "once more does no harm"
    elfatt_sd.apply_patch(pipe, "elfatt")
    assert torch.equal(picture_of(pipe), both)


def test_a_context_leaves_what_shares_its_unet_as_it_was(pipe: Any) -> None:
    """A pipeline with a ControlNet, built around the UNet of a patched one."""
    elfatt_sd.apply_patch(pipe, "elfatt")
    before, net = picture_of(pipe, 5), tiny.controlnet(pipe.unet)
    other = like(diffusers.StableDiffusionControlNetPipeline, pipe, controlnet=net)
    other.scheduler = copy.deepcopy(pipe.scheduler)
    with elfatt_sd.patched(other, "tome"):
        assert elfatt_processors(net)
    assert not elfatt_processors(net)
    assert pipe.unet.elfatt_patch.schedule._find_scheduler() is pipe.scheduler
    assert torch.equal(picture_of(pipe, 5), before)


def test_results_depend_on_nothing_that_ran_before_and_move_no_global_state(pipe: Any) -> None:
    for config in (PatchConfig.preset("elfatt", block_order="spread"), PatchConfig.preset("tome", reuse_steps=3)):
        elfatt_sd.apply_patch(pipe, config)
        state = torch.get_rng_state()
        fresh = picture_of(pipe)
        assert torch.equal(torch.get_rng_state(), state)
        picture_of(pipe, steps=5, prompt="other", height=48, width=32)
        picture_of(pipe, steps=2, generator=torch.Generator().manual_seed(9))
        assert torch.equal(picture_of(pipe), fresh)


def test_draws_differ_by_step_and_layer_and_are_shared_by_the_batch(pipe: Any) -> None:
    """Blocks and samples are drawn in every step or once."""

    def states(config: PatchConfig, **options: Any) -> list[Any]:
        found: list[Any] = []
        with elfatt_sd.patched(pipe, config):
            handle = pipe.unet.register_forward_hook(
                lambda *_: found.extend(pipe.unet.elfatt_patch.latest.states.values()), prepend=True
            )
            picture_of(pipe, **options)
            handle.remove()
        return found

    for batch in (2, 3):  # prompts; odd batches and no guidance keep their random destinations
        options = {"prompt": ["a"] * batch, "guidance_scale": 1.0 if batch == 3 else 3.0}
        merged = states(PatchConfig.preset("tome"), **options)
        drawn = {(each.call.step, each.index): each.split.places[each.split.sources :] for each in merged}
        assert len({tuple(choice.tolist()) for choice in drawn.values()}) == len(drawn) > 3
        assert all(choice.ndim == 1 and choice.unique().numel() > 1 for choice in drawn.values())
    for redraw, (attention, part) in itertools.product([True, False], [("sampled", "keys"), ("block", "order")]):
        phase = Phase(1.0, attention, block_size=16, block_order="spread", redraw=redraw)  # type: ignore[arg-type]
        of_first = (each for each in states(PatchConfig("drawn", (phase,))) if each.index == 0)
        first, *others = [getattr(each.prepared, part) for each in of_first]
        assert [torch.equal(first, other) for other in (others[0], others[-1])] == [not redraw] * 2


@pytest.mark.parametrize("method", ACTIVE)
def test_pictures_of_a_batch_do_not_influence_each_other(pipe: Any, method: Any) -> None:
    elfatt_sd.apply_patch(pipe, method)
    latents = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    together = picture_of(pipe, prompt=["a", "b", "c"], latents=latents.clone())
    alone = picture_of(pipe, prompt="b", latents=latents[1:2].clone())
    torch.testing.assert_close(together[1:2], alone, atol=1e-4, rtol=0)


def test_reused_matchings_are_computed_once(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counting(monkeypatch, state_module, "find_candidates")
    pipe.scheduler = tiny.ddim()
    cases: list[tuple[Any, dict[str, Any], int]] = [
        ("tome", {}, 3 * 4),
        ("tome", {"reuse_layers": True}, 4),
        ("tome", {"reuse_steps": 2}, 3 * 2),
        ("tome", {"reuse_layers": True, "reuse_steps": 4}, 1),
        ("agent", {"active_fraction": 1}, 3 * 4),  # merged at one ratio for tokens, and at another one for agents
    ]
    for method, settings, expected in cases:
        counted.clear()
        with elfatt_sd.patched(pipe, method, **settings):
            picture_of(pipe, steps=4)
        assert len(counted) == expected, settings


def test_what_cannot_be_patched() -> None:
    functions: list[Any] = [elfatt_sd.apply_patch, elfatt_sd.remove_patch, elfatt_sd.plan, elfatt_sd.is_patched]
    functions += [functools.partial(elfatt_sd.tune, closeness=30), lambda target: elfatt_sd.patched(target).__enter__()]
    targets: dict[str, Any] = {"NoneType has no UNet": None, "Linear cannot be patched": torch.nn.Linear(2, 2)}
    for kind in (diffusers.StableDiffusionPipeline, diffusers.UNet2DConditionModel):
        targets[f"{kind.__name__} is a class; give an instance"] = kind
    for (says, target), function in itertools.product(targets.items(), functions):
        with pytest.raises(ElfattError, match=says):
            function(target)


def test_no_layer_that_could_be_patched(folder: Path) -> None:
    pipe = tiny.sdxl(folder)
    with pytest.raises(ElfattError, match=r"max_downsample=1; this UNet has some at 2, 4\. Give"):
        elfatt_sd.apply_patch(pipe, "tome", max_downsample=1)
    assert not elfatt_processors(pipe.unet)
    without = {"down_block_types": ("DownBlock2D",) * 3, "up_block_types": ("UpBlock2D",) * 3, "mid_block_type": None}
    with pytest.raises(ElfattError, match="the UNet has no self-attention layer over the image; there is nothing"):
        elfatt_sd.apply_patch(tiny.unet(**without), "tome")


def test_what_has_no_effect_is_warned_of_once(pipe: Any) -> None:
    """At the caller's line; not for the untouched pipeline, as a loop over methods patches it."""
    for method, settings in (("tome", {"agents": 7}), (PatchConfig.preset("tome", agents=7), {})):
        with pytest.warns(UserWarning) as warned:
            elfatt_sd.apply_patch(pipe, method, **settings)
        assert [str(each.message) for each in warned] == ["elfatt-sd: method 'tome' has no setting agents."]
        assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="no setting agents") as warned, elfatt_sd.patched(pipe, "tome", agents=7):
        pass
    assert len(warned) == 1
    elfatt_sd.apply_patch(pipe, "sd", block_size=64)
    for given in ({"method": "tome"}, {"method": "elfatt", "active_fraction": 0.0}):
        with pytest.warns(UserWarning, match=f"with ratio=0.*, method '{given['method']}' approximates nothing"):
            elfatt_sd.apply_patch(pipe, ratio=0, **given)
        assert not elfatt_sd.is_patched(pipe)
    with pytest.warns(UserWarning, match="elfatt-sd: method 'custom' approximates nothing: the pipeline stays"):
        elfatt_sd.apply_patch(pipe, PatchConfig())  # as of an empty file
    elfatt_sd.apply_patch(pipe, "tome", stride=64)
    with pytest.warns(UserWarning, match="no token of 16x16 can be merged by tome, whose attention is exact there"):
        picture_of(pipe, steps=2)


def test_settings_say_once_where_they_were_not_tuned(pipe: Any) -> None:
    """In the first step of a run, in one line; not of another dtype."""
    scheduler, other = type(pipe.scheduler).__name__, tiny.unet()
    origin = {"model": "small", "size": "32x32", "input": "16x16", "steps": 4, "guidance": 3.0, "scheduler": scheduler}
    origin["weights"] = fingerprint(pipe.unet)
    config = PatchConfig("tuned", (Phase(1.0, "sampled", keys=16),), origin=origin)
    words = f"small at 32x32, 4 steps, {scheduler}"
    assert f"tuned for {words}: None\n" in str(elfatt_sd.plan(pipe, config))
    elsewhere = str(elfatt_sd.plan(pipe, config, height=64, width=32, steps=3))
    assert f"tuned for {words}: None; here: 32x64, 3 steps\n" in elsewhere
    assert fingerprint(other) == fingerprint(copy.deepcopy(pipe.unet).to(torch.float8_e4m3fn)) == fingerprint(pipe.unet)
    other.conv_in.weight.data.neg_()
    assert fingerprint(other) != fingerprint(pipe.unet) and not fingerprint(other.to("meta"))
    runs: list[tuple[dict[str, Any], str]] = [({}, ""), ({"steps": 3}, "3 steps")]
    runs.append(({"height": 64, "width": 32}, "32x64"))
    for given, here in [*runs, ({"guidance_scale": 5.0, "steps": 2}, "2 steps, guidance 5.0")]:
        elfatt_sd.apply_patch(pipe, config)
        for says in (here, ""):  # the second time nothing: warnings are errors here
            said = pytest.warns(UserWarning, match=f"these settings were tuned for {words}; here: {here}. What")
            with said if says else contextlib.nullcontext():
                picture_of(pipe, **{"steps": 4, **given})
    begun = like(diffusers.StableDiffusionImg2ImgPipeline, elfatt_sd.remove_patch(pipe))
    elfatt_sd.apply_patch(begun, dataclasses.replace(config, origin={**origin, "first": 1}))
    with pytest.warns(UserWarning, match="here: an image from step 3 on. What"):
        picture_of(begun, steps=4, image=torch.rand(1, 3, 32, 32), strength=0.5)
    for name, here in {"weights": "another model, or other weights", "scheduler": f"scheduler {scheduler}"}.items():
        elfatt_sd.apply_patch(pipe, dataclasses.replace(config, origin={**origin, name: "else"}))
        with pytest.warns(UserWarning, match=f"here: {here}, 2 steps. What"):
            picture_of(pipe, steps=2)
        with pytest.warns(UserWarning, match="here: guidance 5.0. What"):  # each thing once
            picture_of(pipe, steps=2, guidance_scale=5.0)
    with pytest.warns(UserWarning, match="here: 3 steps. What"):
        picture_of(copy.deepcopy(elfatt_sd.apply_patch(pipe, config)), steps=3)
    lora, unets = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), [tiny.unet() for _ in range(2)]
    for name, unet in zip("ab", unets, strict=True):
        torch.manual_seed(0)
        unet.add_adapter(lora, adapter_name=name)
    assert fingerprint(unets[0]) == fingerprint(unets[1]) != fingerprint(tiny.unet())
    unets[1].set_adapters(["b"], [0.5])
    assert fingerprint(unets[0]) != fingerprint(unets[1])
    elfatt_sd.apply_patch(elfatt_sd.remove_patch(pipe).unet, config)
    picture_of(pipe, steps=4, guidance_scale=5.0)  # of five calls, and guidance is not seen from there


# Models that come into a pipeline, and go, after it was patched.

NEW = "came into it after apply_patch, and has no patch; call apply_patch again"


def test_a_controlnet_that_comes_later_is_named_when_it_draws(pipe: Any) -> None:
    one, two, given = tiny.controlnet(pipe.unet), tiny.controlnet(pipe.unet), {"image": torch.rand(1, 3, 32, 32)}
    guided = like(diffusers.StableDiffusionControlNetPipeline, pipe, controlnet=one)
    elfatt_sd.apply_patch(guided, "tome")
    picture_of(guided, **given)
    guided.controlnet = two
    with pytest.warns(UserWarning, match=f"the controlnet of this StableDiffusionControlNetPipeline {NEW}"):
        picture_of(guided, **given)
    picture_of(guided, **given)  # said once
    elfatt_sd.remove_patch(guided)
    assert not elfatt_processors(one) and not elfatt_processors(two)


@pytest.fixture
def exchanged(pipe: Any) -> Iterator[Any]:
    """The pipeline, which has its own UNet again after the test."""
    first = pipe.unet
    yield pipe
    pipe.unet = first


@pytest.mark.parametrize("twin_of", [None, copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_what_a_pipeline_no_longer_holds_is_put_back(exchanged: Any, twin_of: Any) -> None:
    """Of a copy too, which draws with its own scheduler; the pipeline that it is of stays patched."""
    untouched, alone = picture_of(exchanged), len(pickle.dumps(exchanged.unet))
    elfatt_sd.apply_patch(exchanged, "elfatt")
    assert len(pickle.dumps(exchanged.unet)) < alone + len(pickle.dumps(exchanged.vae)), "no other part in its UNet"
    patched = picture_of(exchanged)
    pipe = exchanged if twin_of is None else twin_of(exchanged)
    assert pipe.unet.elfatt_patch.schedule._find_scheduler() is pipe.scheduler
    assert torch.equal(picture_of(pipe), patched)
    first, pipe.unet = pipe.unet, tiny.unet()
    with pytest.warns(UserWarning, match=f"the unet of this StableDiffusionPipeline {NEW}"):
        assert not elfatt_sd.is_patched(pipe)
    assert not elfatt_sd.is_patched(pipe)  # said once: warnings are errors here
    elfatt_sd.apply_patch(pipe, "tome")  # as asked for: without a word
    assert not elfatt_sd.is_patched(first) and config_of(pipe.unet) == PatchConfig.preset("tome")
    elfatt_sd.remove_patch(pipe)
    assert twin_of is None or elfatt_sd.is_patched(exchanged)
    elfatt_sd.remove_patch(exchanged)
    assert not (elfatt_sd.is_patched(pipe) or elfatt_processors(first))
    pipe.unet = first
    assert torch.equal(picture_of(pipe), untouched)


def test_a_pipeline_without_its_unet_is_put_back(exchanged: Any) -> None:
    """But not what another pipeline has patched since."""
    first, sharing = exchanged.unet, like(diffusers.StableDiffusionImg2ImgPipeline, exchanged)
    for gone in (None, torch.nn.Linear(1, 1)):
        exchanged.unet = first
        with elfatt_sd.patched(exchanged, "tome"):
            exchanged.unet = gone
            with elfatt_sd.patched(sharing, "elfatt"):
                pass
            assert config_of(first) == PatchConfig.preset("tome")
        assert not elfatt_sd.is_patched(first)
    elfatt_sd.apply_patch(sharing, "elfatt")
    with pytest.raises(ElfattError):
        elfatt_sd.remove_patch(exchanged)
    assert config_of(first) == PatchConfig.preset("elfatt")
    elfatt_sd.remove_patch(sharing)
