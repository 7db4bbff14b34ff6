"""Families whose image tokens can be merged, as their positions are added to them: Stable Diffusion 3, PixArt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import checks, tiny_transformers
from support.checks import recorded

import elfatt_sd
from elfatt_sd import METHODS, PatchConfig, Phase
from elfatt_sd.attention.merging import Matching
from elfatt_sd.families import family_of, find_layers
from elfatt_sd.methods import Grid

HALF_MERGED = Phase(1.0, "softmax", ratio=0.5)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_pixart_and_is_taken_back(method: Any) -> None:
    pipe, run = tiny_transformers.pixart_run()
    before, untouched = dict(pipe.transformer.attn_processors), run()
    with recorded() as calls, elfatt_sd.patched(pipe, method, active_fraction=0.5):
        found = run()
    assert bool(calls) == (method != "sd")
    assert torch.equal(found, untouched) == (method == "sd")
    assert torch.isfinite(found).all()
    assert dict(pipe.transformer.attn_processors) == before
    assert torch.equal(run(), untouched)


def test_merging_by_similarity_reads_the_blocks_input() -> None:
    pipe, run = tiny_transformers.pixart_run()
    elfatt_sd.apply_patch(pipe, "tome")
    seen: list[bool] = []
    layer: Any = find_layers(pipe.transformer)[0].attention.elfatt_state
    layer.layer.attention.to_q.register_forward_pre_hook(
        lambda *_: seen.append(layer.state.candidates is not None or layer.state.block_input is not None)
    )
    run()
    assert seen and all(seen)


def test_a_processor_that_is_not_known_is_left_alone() -> None:
    class Other(AttnProcessor2_0):
        pass

    pipe, _ = tiny_transformers.pixart_run()
    pipe.transformer.transformer_blocks[0].attn1.set_processor(Other())
    with pytest.warns(UserWarning, match="1 layers are left alone") as warned:
        elfatt_sd.apply_patch(pipe, "tome")
    assert warned[0].filename == __file__  # Python shows a text once for each line of the user's


def test_pixart_is_timed_in_benches(tmp_path: Path) -> None:
    """Beside its floor, and without tomesd, which patches UNets alone."""
    from elfatt_sd.benchmarking import pipeline, unet

    tiny_transformers.pixart(tmp_path).save_pretrained(tmp_path / "pixart")
    options: dict[str, Any] = {"methods": ["tome", "elfatt-fast"], "repeats": 1, "device": "cpu"}
    for rows in (
        unet(str(tmp_path / "pixart"), sizes=[32], memory=[], **options)["rows"],
        pipeline(str(tmp_path / "pixart"), sizes=[32], steps=2, memory=False, **options)["rows"],
    ):
        assert {"untouched", "tome", "elfatt-fast"} <= {row["method"] for row in rows}
        assert all(row["seconds"] > 0 for row in rows)
        assert "tomesd" not in {row["method"] for row in rows}


@pytest.mark.parametrize(("attention", "order"), [("softmax", "sequence"), ("elfatt", "windows"), ("block", "windows")])
def test_merging(attention: Any, order: Any) -> None:
    """Its positions are absolute: image tokens are merged before each layer, text is not."""
    pipe, run = tiny_transformers.sd3()
    untouched = run()
    phase = Phase(1.0, attention, ratio=0.5, block_size=4, agents=4, block_order=order)
    with recorded() as calls, elfatt_sd.patched(pipe, PatchConfig("merging", (phase,))):
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


@pytest.mark.usefixtures("fresh_compiler")
def test_merging_compiles() -> None:
    """And what it takes is measured in compiled code."""
    pipe, run = tiny_transformers.sd3()
    phase = Phase(1.0, "elfatt", ratio=0.5, block_size=4, agents=4, block_order="windows", residual_steps=2)
    elfatt_sd.apply_patch(pipe, PatchConfig("merging", (phase,)))
    eager = run()
    pipe.transformer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(run(), eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"dual_attention_layers": (0,)}])
def test_merging_in_a_controlnet(changes: dict[str, Any]) -> None:
    config = {"sample_size": 32, "patch_size": 2, "in_channels": 4, "num_layers": 1, "attention_head_dim": 8}
    config |= {"num_attention_heads": 2, "pooled_projection_dim": 8, "caption_projection_dim": 16, **changes}
    config |= {"pos_embed_max_size": 16, "joint_attention_dim": tiny_transformers.WIDTH}
    net = tiny_transformers.transformer("SD3ControlNetModel", **config)
    elfatt_sd.apply_patch(net, PatchConfig("merged", (HALF_MERGED,)))
    given = family_of(net).arguments(net, Grid.image(6, 4), 2, torch.rand)
    with recorded() as calls, torch.no_grad():
        assert all(torch.isfinite(sample).all() for sample in net(**given, return_dict=False)[0])
    assert len(calls) == 1 + len(changes)


def test_fused_projections() -> None:
    """Of 3 and 3.5 large; diffusers itself cannot call a second attention with those."""
    pipe, run = tiny_transformers.sd3(dual_attention_layers=())
    pipe.transformer.fuse_qkv_projections()
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
