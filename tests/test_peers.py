"""Accelerators of other packages: they change the image while they are on, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers

import elfatt_sd
from elfatt_sd import errors as optional
from elfatt_sd import peers
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError
from elfatt_sd.phases import Phase

SETTINGS: dict[str, dict[str, Any]] = {
    "tomesd": {"ratio": 0.5},
    "deepcache": {"cache_interval": 2},
    "tgate": {"gate_fraction": 0.5},
    "first_block_cache": {"threshold": 10.0},
    "pyramid_attention_broadcast": {"spatial_attention_timestep_skip_range": (0, 1000)},
    "taylorseer": {"cache_interval": 2, "disable_cache_before_step": 1},
}
UNETS = ("tomesd", "deepcache", "tgate")


@pytest.fixture(scope="module")
def flux(folder: Path) -> Any:
    return tiny_transformers.flux(folder)


def forwards(pipe: Any) -> set[str]:
    """Names of modules of the denoiser whose forward was replaced."""
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return {name for name, module in denoiser.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_changes_the_image_and_leaves_nothing(name: str, request: pytest.FixtureRequest) -> None:
    """Some are joined by a patch."""
    if missing := [each for each in peers.packages_of([name]) if optional.PACKAGES[each].missing]:
        pytest.skip(f"{missing[0]} is not installed")
    if name not in UNETS and not hasattr(diffusers, "FirstBlockCacheConfig"):
        pytest.skip("this diffusers has no such caches")
    pipe: Any = request.getfixturevalue("pipe" if name in UNETS else "flux")
    run = checks.runner(pipe, num_inference_steps=4, **({} if name in UNETS else {"height": 64, "width": 64}))
    kind, before, untouched = type(pipe), forwards(pipe), run()
    with peers.running(pipe, name, SETTINGS[name]):
        torch.manual_seed(0)
        alone = run()
        assert not torch.equal(alone, untouched)
        if peers.PEERS[name].joins:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of layers that stay exact because their steps are skipped
                elfatt_sd.apply_patch(pipe, PatchConfig("sampled", (Phase(1.0, "sampled", keys=4),)))
                assert not torch.equal(run(), alone)
            elfatt_sd.remove_patch(pipe)
            assert torch.equal(run(), alone)
    assert type(pipe) is kind and forwards(pipe) == before and torch.equal(run(), untouched)
    with pytest.raises(KeyboardInterrupt), peers.running(pipe, name, SETTINGS[name]):
        raise KeyboardInterrupt
    assert torch.equal(run(), untouched)


@pytest.mark.skipif(bool(optional.PACKAGES["tgate"].missing), reason="tgate is not installed")
def test_a_gate_is_placed_by_the_steps_of_the_call(pipe: Any) -> None:
    gates = []
    with peers.running(pipe, "tgate", {}):
        pipe.tgate = lambda *_, gate_step, **__: gates.append(gate_step)
        pipe("a cat", num_inference_steps=25)
        pipe("a cat")
        pipe("a cat", num_inference_steps=1)
    assert gates == [10, 20, 1]


def test_what_is_refused(pipe: Any, flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = checks.like(diffusers.StableDiffusionImg2ImgPipeline, pipe)
    gone = dataclasses.replace(optional.PACKAGES["DeepCache"], module="no_such_module")
    monkeypatch.setitem(optional.PACKAGES, "DeepCache", gone)
    refused: list[tuple[Any, str, dict[str, Any], str]] = [
        (pipe, "deepcache", {"cache_interval": "2"}, "setting cache_interval='2' of deepcache is not accepted; its d"),
        (pipe, "deepcache", {"interval": 2}, "setting 'interval' of deepcache is not known; accepted: cache_int"),
        (pipe, "deepcache", {}, r"needs DeepCache.*\[peers\]"),
        (pipe, "taylorseer", {}, "taylorseer speeds up pipelines with a transformer; Stable.* has a unet"),
    ]
    if not optional.PACKAGES["tgate"].missing:
        refused += [(flux, "tgate", {}, "FluxPipeline has a transformer")]
        refused += [(other, "tgate", {}, "tgate knows no StableDiffusionImg2ImgPipeline")]
    for given, name, settings, message in refused:
        with pytest.raises(ElfattError, match=message), peers.running(given, name, settings):
            pass
