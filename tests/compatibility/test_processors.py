"""What else sets attention processors: attention slicing, fused projections, the user; before and after patching."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0
from support import tiny_pipelines as tiny
from support.checks import FIRST, TWO_PHASES, check_patch, like, processors, recorded, runner

import elfatt_sd
from elfatt_sd.benchmarking.variants import patched_layers
from elfatt_sd.config import PatchConfig
from elfatt_sd.errors import ElfattError


@pytest.fixture
def pipe(folder: Path) -> Any:
    return tiny.sd15(folder, scheduler=tiny.ddim())


def test_fused_projections_before_patching(pipe: Any) -> None:
    run = runner(pipe)
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    apart = run()
    elfatt_sd.remove_patch(pipe)
    pipe.fuse_qkv_projections(vae=False)
    together = check_patch(pipe, run, layers={"unet": 3})
    assert torch.allclose(together, apart, atol=1e-3)
    assert {type(found) for found in processors(pipe).values()} == {FusedAttnProcessor2_0}


def test_projections_that_were_fused_for_a_while(pipe: Any) -> None:
    """diffusers leaves the fused weights, and their flag, behind: what a LoRA then changes is not in them."""
    pipe.fuse_qkv_projections(vae=False)
    pipe.unfuse_qkv_projections(vae=False)
    elfatt_sd.apply_patch(pipe, PatchConfig("always", (dataclasses.replace(FIRST, until=1.0),)))
    run = runner(pipe)
    before = run()
    for state in patched_layers(pipe.unet):
        state.layer.attention.to_v.weight.data *= 3  # type: ignore[union-attr, operator]
    assert not torch.allclose(run(), before, atol=1e-3)


def slicing(pipe: Any) -> None:
    pipe.enable_attention_slicing(1)


def fusing(pipe: Any) -> None:
    pipe.fuse_qkv_projections(vae=False)


def setting(pipe: Any) -> None:
    pipe.unet.set_attn_processor(AttnProcessor2_0())


def setting_one(pipe: Any) -> None:
    changed = {name: found for name, found in pipe.unet.attn_processors.items()}
    changed["down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor"] = AttnProcessor2_0()
    pipe.unet.set_attn_processor(changed)


def another(pipe: Any) -> None:
    pipe.unet.set_attn_processor(AttnProcessor())


@pytest.mark.parametrize(("replace", "kind"), [(slicing, "SlicedAttnProcessor"), (another, "AttnProcessor")])
def test_another_plain_processor_before_patching(pipe: Any, replace: Any, kind: str) -> None:
    replace(pipe)
    check_patch(pipe, runner(pipe), layers={"unet": 3})
    assert {type(found).__name__ for found in processors(pipe).values()} == {kind}


@pytest.mark.parametrize("replace", [slicing, fusing, setting, setting_one])
def test_what_replaces_plain_attention_by_its_like_leaves_the_patch(pipe: Any, replace: Any) -> None:
    run = runner(pipe)
    elfatt_sd.apply_patch(pipe, TWO_PHASES)
    patched = run()
    replace(pipe)
    others = pipe.unet.attn_processors
    with recorded() as calls:
        assert torch.allclose(run(), patched, atol=1e-3)
    assert len({layer for layer, _ in calls}) == 3
    elfatt_sd.remove_patch(pipe)
    assert all(processors(pipe)[f"unet.{name}"[: -len(".processor")]] is found for name, found in others.items())


def test_a_pipeline_without_a_unet() -> None:
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1, sample_size=8, norm_num_groups=4
    )
    pipe = diffusers.DiTPipeline(transformer, tiny.vae(), tiny.ddim())
    for use in (elfatt_sd.apply_patch, elfatt_sd.remove_patch, elfatt_sd.plan):
        with pytest.raises(ElfattError, match=r"DiTTransformer2DModel cannot be patched.*PixArtTransformer2DModel"):
            use(pipe)
    with pytest.raises(ElfattError, match="has no UNet"):
        elfatt_sd.apply_patch("runwayml/stable-diffusion-v1-5")


class WithWeights(torch.nn.Module):
    """As Custom Diffusion's: a module whose weights are the layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, attn: Any, hidden_states: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        mixed: torch.Tensor = AttnProcessor2_0()(attn, hidden_states, *given, **named)
        return mixed * self.scale


def test_the_weights_of_a_processor_that_is_taken_over_stay_the_models(pipe: Any) -> None:
    unet = pipe.unet
    for name, processor in unet.attn_processors.items():
        module = unet.get_submodule(name.removesuffix(".processor"))
        module.set_processor(WithWeights() if "attn1" in name else processor)
    before, processors_before = unet.state_dict(), dict(unet.attn_processors)
    elfatt_sd.apply_patch(pipe, TWO_PHASES, take_over=["WithWeights"])
    assert unet.state_dict().keys() == before.keys()
    unet.to(torch.bfloat16)
    assert {parameter.dtype for parameter in unet.parameters()} == {torch.bfloat16}
    unet.float()
    run = runner(pipe)
    with recorded() as calls:
        run()
    assert calls
    unet.set_attn_processor(dict(unet.attn_processors))
    elfatt_sd.remove_patch(pipe)
    assert all(found is processors_before[name] for name, found in unet.attn_processors.items())
    assert list(unet.state_dict()) == list(before)


def test_processors_that_the_pipeline_sets_in_every_call_are_left_there(folder: Path) -> None:
    """Perturbed-attention guidance; the advice can be followed."""
    base = tiny.sd15(folder, scheduler=tiny.ddim())
    pipe = like(diffusers.StableDiffusionPAGPipeline, base, pag_applied_layers=["down"])
    elfatt_sd.apply_patch(pipe, "elfatt", active_fraction=1)
    says = r"\(PAGCFGIdentitySelfAttnProcessor2_0\), the first is down.*; it is left there.*sets it in every call"
    with recorded() as calls, pytest.warns(UserWarning, match=says):
        pipe("a", num_inference_steps=3, output_type="latent", guidance_scale=3.0)
    assert calls  # of the other layers
    elfatt_sd.remove_patch(pipe)
    assert {type(found) for found in processors(pipe).values()} == {AttnProcessor2_0}


@pytest.mark.parametrize("take_over", [(), ("AttendExciteAttnProcessor",)])
def test_processors_that_keep_maps_for_the_pipeline_are_not_taken_over(folder: Path, take_over: Any) -> None:
    base = tiny.sd15(folder, scheduler=tiny.ddim())
    pipe = like(diffusers.StableDiffusionAttendAndExcitePipeline, base)
    elfatt_sd.apply_patch(pipe, "elfatt", take_over=take_over)
    given = {"token_indices": [1], "max_iter_to_alter": 2, "num_inference_steps": 3, "output_type": "latent"}
    if take_over:
        with pytest.raises(ElfattError, match="AttendExciteAttnProcessor' is not accepted; it keeps the attention"):
            pipe("a b", height=32, width=32, **given)
    else:
        with warnings.catch_warnings(record=True) as warned:  # PyTorch warns of what the pipeline does
            warnings.simplefilter("always")
            pipe("a b", height=32, width=32, **given)
        assert any("AttendExciteAttnProcessor), the first" in str(each.message) for each in warned)
