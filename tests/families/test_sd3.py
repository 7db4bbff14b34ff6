"""Stable Diffusion 3 and 3.5: what is theirs alone, through their pipelines' own `__call__`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_pipelines, tiny_transformers
from support.checks import picture, recorded

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.attention.merging import Matching
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Grid

FEW = PatchConfig("few", (Phase(1.0, "cell_spread", block_size=4),))
HALF_MERGED = Phase(1.0, "softmax", ratio=0.5)
SIZE: dict[str, int] = {"height": 24, "width": 16}  # with a VAE that halves the sides
_NET: dict[str, Any] = {"sample_size": 32, "patch_size": 2, "in_channels": 4, "num_layers": 1, "attention_head_dim": 8}
_NET |= {"num_attention_heads": 2, "pooled_projection_dim": 8, "caption_projection_dim": 16, "pos_embed_max_size": 16}


def controlnet(**changes: Any) -> Any:
    """A ControlNet of one block."""
    return tiny_transformers.transformer(
        "SD3ControlNetModel", **{**_NET, "joint_attention_dim": tiny_transformers.WIDTH, **changes}
    )


def other_pipeline(name: str, channels: int = 4, **parts: Any) -> tuple[Any, checks.Run]:
    """Another pipeline with the same transformer, and a VAE."""
    plain, run = tiny_transformers.sd3(in_channels=channels, out_channels=channels)
    vae = diffusers.AutoencoderKL.from_config({**tiny_transformers.vae().config, "latent_channels": channels}).eval()
    vae.register_to_config(shift_factor=0.1)
    pipe = tiny_transformers.pipeline(name, plain.transformer, vae=vae, **parts)
    return pipe, tiny_transformers.runner(pipe, **{**run.given, **SIZE})  # type: ignore[attr-defined]


def test_layers() -> None:
    layers = find_layers(tiny_transformers.sd3()[0].transformer)
    names = ("transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn")
    assert [layer.name for layer in layers] == [*names]
    assert [layer.text for layer in layers] == [333, 0, 333]


def test_steps() -> None:
    """Guidance in one batch, and none."""
    pipe, run = tiny_transformers.sd3()
    checks.check_steps(pipe, run, layers=3, counts=(9,))
    rows: list[int] = []
    pipe.transformer.register_forward_hook(lambda *given: rows.append(len(given[-1][0])))
    checks.check_steps(pipe, lambda **options: run(**options, guidance_scale=1.0), layers=3, counts=(4,))
    assert set(rows) == {1}


@pytest.mark.parametrize(("attention", "order"), [("softmax", "sequence"), ("elfatt", "windows"), ("block", "windows")])
def test_merging(attention: Any, order: Any) -> None:
    """Its positions are absolute: image tokens are merged before each layer, text is not."""
    pipe, run = tiny_transformers.sd3()
    untouched = run()
    phase = Phase(1.0, attention, ratio=0.5, block_size=4, agents=4, block_order=order)
    with elfatt_sd.patched(pipe, PatchConfig("merging", (phase,))), recorded() as calls:
        found = run()
    assert calls
    assert torch.isfinite(found).all()
    assert not torch.equal(found, untouched)
    assert torch.equal(run(), untouched)


def test_preset_that_merges() -> None:
    pipe, run = tiny_transformers.sd3()
    untouched = run()
    with elfatt_sd.patched(pipe, "tome"):
        assert not torch.equal(run(), untouched)


@pytest.mark.parametrize(("attention", "ratio"), [("softmax", 0.25), ("softmax", 0.75), ("agent", 0.5)])
def test_merged_tokens_weigh_beside_text_what_they_did(attention: Any, ratio: float) -> None:
    """Tokens that are all alike are merged into their like: nothing changes, for image and text."""
    model = tiny_transformers.sd3()[0].transformer
    model.pos_embed.pos_embed.zero_()
    given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
    given["hidden_states"] = torch.ones_like(given["hidden_states"])
    with torch.no_grad():
        untouched = model(**given).sample
        elfatt_sd.apply_patch(model, PatchConfig("merged", (Phase(1.0, attention, ratio=ratio, agents=4),)))
        with recorded() as calls:
            found = model(**given).sample
    assert calls
    torch.testing.assert_close(found, untouched, atol=1e-5, rtol=1e-4)


def test_text_sees_a_merged_token_as_often_as_those_that_it_stands_for() -> None:
    """Cells of four tokens that are alike; half of the tokens are merged into their like, in groups of one to four."""
    model = tiny_transformers.sd3(num_layers=2)[0].transformer
    model.pos_embed.pos_embed.zero_()
    given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
    given["hidden_states"] = torch.rand(2, 4, 3, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    seen: list[torch.Tensor] = []
    model.transformer_blocks[0].attn.register_forward_hook(lambda *given: seen.append(given[-1][1]))
    sizes: list[int] = []
    with torch.no_grad():
        model(**given)
        elfatt_sd.apply_patch(model, PatchConfig("merged", (HALF_MERGED,)))
        with pytest.MonkeyPatch.context() as patch:
            read = Matching.sizes.fget  # type: ignore[attr-defined]
            patch.setattr(
                Matching, "sizes", property(lambda one: sizes.extend(read(one)[0].int().tolist()) or read(one))
            )
            model(**given)
    assert len(set(sizes)) > 1
    torch.testing.assert_close(seen[1], seen[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["softmax", "elfatt"])
def test_what_merging_takes_is_measured_and_added(attention: Any) -> None:
    """The first of the steps that share a difference is exact; over the run, the error is smaller."""
    pipe, run = tiny_transformers.sd3()
    phase = Phase(1.0, attention, ratio=0.5, block_size=4, agents=4)
    shared = dataclasses.replace(phase, residual_steps=3)
    exact, found = {}, {}
    for steps in (3, 6):
        exact[steps] = run(num_inference_steps=steps)
        for one in (phase, shared):
            with elfatt_sd.patched(pipe, PatchConfig("one", (one,))):
                found[steps, one] = run(num_inference_steps=steps)
        errors = [(found[steps, one] - exact[steps]).norm() for one in (phase, shared)]
        assert errors[1] < errors[0]
    first: list[torch.Tensor] = []
    handle = pipe.transformer.register_forward_hook(lambda *given: first.append(given[-1][0]))
    run()
    with elfatt_sd.patched(pipe, PatchConfig("shared", (shared,))):
        run()
    handle.remove()
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[1], first[4])


def test_merging_compiles() -> None:
    """And what it takes is measured in compiled code."""
    pipe, run = tiny_transformers.sd3()
    phase = Phase(1.0, "elfatt", ratio=0.5, block_size=4, agents=4, block_order="windows", residual_steps=2)
    elfatt_sd.apply_patch(pipe, PatchConfig("merging", (phase,)))
    eager = run()
    torch._dynamo.reset()
    pipe.transformer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(run(), eager, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_agents_of_merged_tokens_are_refused() -> None:
    pipe, _ = tiny_transformers.sd3()
    with pytest.raises(ElfattError, match="agent_source='merged' is not accepted for SD3Transformer2DModel"):
        elfatt_sd.apply_patch(pipe, PatchConfig("own", (Phase(1.0, "agent", agent_source="merged"),)))
    assert not elfatt_sd.is_patched(pipe)


@pytest.mark.parametrize("residual_steps", [1, 3])
def test_skip_layer_guidance(residual_steps: int) -> None:
    """A second call of some steps leaves a block out, the last one as well: that is no missed layer."""
    pipe, run = tiny_transformers.sd3()
    skips = {"num_inference_steps": 6, "skip_guidance_layers": [0], "skip_layer_guidance_start": 0.2}
    untouched = run(**skips, skip_layer_guidance_stop=1.0)
    assert not torch.equal(untouched, run(num_inference_steps=6))
    phase = Phase(1.0, "cell_spread", block_size=tiny_transformers.TEXT * 100, residual_steps=residual_steps)
    with elfatt_sd.patched(pipe, PatchConfig("all", (phase,))), recorded() as calls:
        found = run(**skips, skip_layer_guidance_stop=1.0)
    torch.testing.assert_close(found, untouched, atol=1e-5, rtol=1e-4)
    per_layer = sorted(calls.values())
    assert per_layer == ([6, 6, 6 + 4] if residual_steps == 1 else per_layer)
    with elfatt_sd.patched(pipe, checks.HALF), recorded() as calls:
        run(**skips, skip_layer_guidance_stop=0.5)
    assert sorted(calls.values()) == [3, 3, 3 + 1]


@pytest.mark.parametrize("name", ["Img2Img", "Inpaint"])
def test_image_to_image(tmp_path: Path, name: str) -> None:
    tokenizer = tiny_pipelines.tokenizer(tmp_path)  # whose length older versions ask for
    pipe, run = other_pipeline(f"StableDiffusion3{name}Pipeline", channels=16, tokenizer=tokenizer)
    given = {"image": picture(**SIZE), "strength": 0.5}
    if name == "Inpaint":
        given["mask_image"] = (torch.arange(16) < 6).float().expand(1, 1, 24, 16)

    def made(**options: Any) -> torch.Tensor:
        return run(**{**given, "num_inference_steps": 8, **options})

    checks.check_image_to_image(pipe, made)


@pytest.mark.parametrize("changes", [{}, {"dual_attention_layers": (0,)}, {"extra_conditioning_channels": 0}])
def test_controlnets(changes: dict[str, Any]) -> None:
    net = controlnet(**changes)
    pipe, run = other_pipeline("StableDiffusion3ControlNetPipeline", controlnet=net)
    layers = 3 + 1 + ("dual_attention_layers" in changes)
    assert list(find_denoisers(pipe)) == ["transformer", "controlnet"]

    def made(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)  # the pipeline samples the control image's latent from it
        return run(**{"control_image": picture(**SIZE), **options})

    checks.check_all_keys(pipe, made)
    with elfatt_sd.patched(pipe, PatchConfig("merged", (HALF_MERGED,))), recorded() as calls:
        assert torch.isfinite(made()).all()
    assert len(calls) == layers
    checks.check_methods(pipe, made)
    checks.check_steps(pipe, made, layers, counts=(4,))
    checks.check_plan(pipe, 24, layers, **SIZE)


def test_several_controlnets() -> None:
    several = diffusers.SD3MultiControlNetModel([controlnet(), controlnet()])
    pipe, run = other_pipeline("StableDiffusion3ControlNetPipeline", controlnet=several)

    def made(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        images = {"control_image": [picture(**SIZE)] * 2, "controlnet_conditioning_scale": [1.0, 0.5]}
        return run(**{**images, **options})

    checks.check_all_keys(pipe, made)
    checks.check_steps(pipe, made, layers=5, counts=(4,))


def test_a_controlnet_without_text() -> None:
    """Of 3.5 large: it is given tokens of the transformer's embedding, and sees no text."""
    net = controlnet(joint_attention_dim=None, use_pos_embed=False)
    given = family_of(net).arguments(net, Grid.image(6, 4), 2, torch.rand)
    assert given["hidden_states"].shape == (2, 24, 16)
    assert [layer.text for layer in find_layers(net)] == [0]

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(net(**given, return_dict=False)[0])

    checks.check_all_keys(net, run)
    checks.check_methods(net, run)


def test_fused_projections() -> None:
    """Of 3 and 3.5 large; diffusers itself cannot call a second attention with those."""
    pipe, run = tiny_transformers.sd3(dual_attention_layers=())
    pipe.transformer.fuse_qkv_projections()
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)


def test_perturbed_attention_guidance() -> None:
    """Its layers have processors of their own while the pipeline runs: they stay exact, and are named."""
    pipe, run = other_pipeline("StableDiffusion3PAGPipeline", pag_applied_layers=["blocks.1"])
    untouched = run(pag_scale=2.0)
    elfatt_sd.apply_patch(pipe, FEW)
    with recorded() as calls, pytest.warns(UserWarning, match=r"1 patched layers now have another .* \(PAG"):
        found = run(pag_scale=2.0)
    assert len(calls) == 2
    assert not torch.equal(found, untouched)
    elfatt_sd.remove_patch(pipe)
    assert torch.equal(run(pag_scale=2.0), untouched)
