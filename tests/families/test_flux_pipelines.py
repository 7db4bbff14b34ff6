"""Flux.1's pipelines for other tasks, each through its own `__call__`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import picture, recorded

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Grid

SIZE: dict[str, Any] = {"height": 32, "width": 48}
runner = functools.partial(
    tiny_transformers.runner, prompt="a b", num_inference_steps=4, max_sequence_length=16, **SIZE
)
IMAGE = {"image": picture(**SIZE)}
CONTROL = {"control_image": picture(**SIZE, channels=3)}
MASK = {"mask_image": (torch.arange(48) < 20).float().expand(1, 1, 32, 48)}
EDIT = {"_auto_resize": False, "max_area": 32 * 48}
CHANNELS, FILL = {"in_channels": 32, "out_channels": 16}, {"in_channels": 48, "out_channels": 16}
PIPELINES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "FluxImg2ImgPipeline": ({}, {**IMAGE, "strength": 0.5}),
    "FluxInpaintPipeline": ({}, {**IMAGE, **MASK, "strength": 0.5}),
    "FluxFillPipeline": (FILL, {**IMAGE, **MASK}),
    "FluxControlPipeline": (CHANNELS, CONTROL),
    "FluxControlImg2ImgPipeline": (CHANNELS, {**CONTROL, **IMAGE, "strength": 0.5}),
    "FluxControlInpaintPipeline": (CHANNELS, {**CONTROL, **IMAGE, **MASK, "strength": 0.5}),
    "FluxKontextPipeline": ({}, {**IMAGE, **EDIT}),
    "FluxKontextInpaintPipeline": ({}, {**IMAGE, **MASK, **EDIT}),
    "FluxControlNetPipeline": ({}, CONTROL),
    "FluxControlNetImg2ImgPipeline": ({}, {**CONTROL, **IMAGE, "strength": 0.5}),
    "FluxControlNetInpaintPipeline": ({}, {**CONTROL, **IMAGE, **MASK, "strength": 0.5}),
}


def make(folder: Path, name: str, transformer: dict[str, Any], **parts: Any) -> Any:
    if "ControlNet" in name:
        parts = {"controlnet": tiny_transformers.controlnet(), **parts}
    return tiny_transformers.flux(
        folder,
        getattr(diffusers, name),
        transformer=tiny_transformers.flux_transformer(**transformer),
        vae=tiny_transformers.vae(),
        **parts,
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(tmp_path: Path, name: str) -> None:
    if not hasattr(diffusers, name):
        pytest.skip("this diffusers does not have it")
    transformer, given = PIPELINES[name]
    pipe = make(tmp_path, name, transformer)
    run = runner(pipe, **given)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_plan(pipe, 96, 2 * len(find_denoisers(pipe)), **SIZE)
    steps = range(2, 4) if "strength" in given else range(4)  # of 4, the last ones
    with elfatt_sd.patched(pipe, PatchConfig("half", (Phase(0.75, "cell_spread", block_size=8),))):
        for _ in range(2):
            with recorded() as seen:
                run()
            assert sum(seen.values()) == sum(step < 3 for step in steps) * 2 * len(find_denoisers(pipe))


def test_guidance_distilled(tmp_path: Path) -> None:
    pipe = make(tmp_path, "FluxPipeline", {"guidance_embeds": True})
    checks.check_all_keys(pipe, runner(pipe, guidance_scale=2.0))
    checks.check_steps(pipe, runner(pipe), layers=2, counts=(4,))
    checks.check_plan(pipe, 96, 2, **SIZE)


@pytest.mark.skipif(not hasattr(diffusers, "FluxKontextPipeline"), reason="this diffusers has no Kontext")
def test_references_are_exact_keys(tmp_path: Path) -> None:
    pipe = make(tmp_path, "FluxKontextPipeline", {})
    elfatt_sd.apply_patch(pipe, PatchConfig("few", (Phase(1.0, "sampled", keys=8),)))
    runner(pipe, image=picture(64, 32), **EDIT)()
    call = pipe.transformer.elfatt_patch.latest
    assert call.given.grid == Grid.image(8, 12)
    reference = call.given.sample.shape[1] - 96
    assert reference == 16 * 8
    keys = [state.prepared for state in call.states.values()]
    assert all(prepared is not None for prepared in keys)


def test_a_controlnet_with_a_token_for_its_mode(tmp_path: Path) -> None:
    pipe = make(tmp_path, "FluxControlNetPipeline", {}, controlnet=tiny_transformers.controlnet(num_mode=2))
    run = runner(pipe, **CONTROL, control_mode=1)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_plan(pipe, 96, 4, **SIZE)


def test_a_controlnet_with_an_encoder() -> None:
    """Of XLabs: it is given pixels, 16 to a token on each side."""
    net = tiny_transformers.controlnet(conditioning_embedding_channels=4, patch_size=2)
    torch.manual_seed(0)
    arguments = family_of(net).arguments(net, Grid.image(8, 12), 2, torch.rand)
    assert arguments["controlnet_cond"].shape == (2, 3, 128, 192)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([sample for samples in net(**arguments, return_dict=False) for sample in samples])

    checks.check_all_keys(net, run)
    checks.check_methods(net, run)


def test_several_controlnets(tmp_path: Path) -> None:
    nets = [tiny_transformers.controlnet(), tiny_transformers.controlnet()]
    several = diffusers.FluxMultiControlNetModel(nets)
    pipe = make(tmp_path, "FluxControlNetPipeline", {}, controlnet=several)
    image = CONTROL["control_image"]
    run = runner(pipe, control_image=[image, image], controlnet_conditioning_scale=[1.0, 0.5], control_mode=[0, 0])
    checks.check_all_keys(pipe, run)
    checks.check_steps(pipe, run, layers=6, counts=(4,))


def test_controlnet_alone(tmp_path: Path) -> None:
    net = tiny_transformers.controlnet()
    elfatt_sd.apply_patch(net, "elfatt")
    assert len(find_layers(net)) == 2
    assert elfatt_sd.is_patched(net)
