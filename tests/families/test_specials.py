"""What is special to one family: its texts, masks, position ids, guidance, merging, second transformer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import diffusers
import pytest
import torch
from PIL import Image
from support import checks, tiny_transformers
from support.checks import generator, recorded
from support.tiny_transformers import TEXT, calling, embeds, made, several

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.attention.merging import Matching
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Grid

VIDEO = {"height": 96, "width": 64, "frames": 9}


def config(attention: Any, **settings: Any) -> PatchConfig:
    return PatchConfig("own", (Phase(1.0, attention, **settings),))


FEW = config("cell_spread", cell=4, block_size=4)
MERGED = config("agent", agent_source="merged")


@pytest.mark.parametrize(
    ("name", "method", "settings", "says"),
    [
        ("Flux.1", "tome", {}, r"'tome' merges tokens.* rotary positions"),
        ("Flux.1", MERGED, {}, "merges tokens"),
        ("Flux.1", "elfatt", {"attention_backend": "flash"}, "attention_backend='flash' is not accepted for Flux"),
        ("Stable Diffusion 3", MERGED, {}, "agent_source='merged' is not accepted for SD3Transformer2DModel"),
    ],
)
def test_what_does_not_go_with_rotary_positions_or_text(name: str, method: Any, settings: Any, says: str) -> None:
    pipe, _ = made(name)
    with pytest.raises(ElfattError, match=says):
        elfatt_sd.apply_patch(pipe, method, **settings)
    assert not elfatt_sd.is_patched(pipe)


def regional(given: dict[str, Any], *sides: int) -> dict[str, Any]:
    """The masks of regional prompts."""
    tokens = given["encoder_hidden_states"].shape[1] + 24
    return {"joint_attention_kwargs": {"attention_mask": torch.rand(*sides, tokens, tokens) > 0.3}}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("Flux.1", lambda given: {"img_ids": given["img_ids"][torch.randperm(24)]}, "not a grid"),
        ("Flux.1", regional, "a mask that is not of keys alone"),
        ("Flux.1", lambda given: regional(given, 1, 1), "a mask that is not of keys alone"),
        ("Z-Image", lambda given: {"x": [torch.rand(4, 1, 12, 8), torch.rand(4, 1, 8, 8)]}, "not a grid"),
        ("Z-Image", lambda given: several(40), "not a grid"),
    ],
)
def test_calls_that_stay_exact_with_a_warning(name: str, change: Any, says: str) -> None:
    model = made(name)[0].transformer
    given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
    run = calling(model, {**given, **change(given)})
    untouched = run()
    elfatt_sd.apply_patch(model, FEW)
    with pytest.warns(UserWarning, match=says):
        assert torch.equal(run(), untouched)


@pytest.mark.parametrize(
    ("name", "mask", "dtype"),
    [
        ("Chroma", "prompt_attention_mask", torch.bool),
        ("Chroma", "prompt_attention_mask", torch.float32),
        ("Qwen-Image", "prompt_embeds_mask", torch.long),
    ],
)
def test_what_is_in_padded_text_does_not_matter(name: str, mask: str, dtype: torch.dtype) -> None:
    """A mask of true and false leaves keys out; that of Chroma's pipeline itself is added to the logits."""
    pipe, run = made(name)

    def text(filler: float) -> dict[str, torch.Tensor]:
        embeddings = torch.rand(1, 6, run.given["prompt_embeds"].shape[2], generator=generator())  # type: ignore[attr-defined]
        embeddings[:, 3:] = filler
        own = {"prompt_embeds": embeddings, mask: torch.tensor([[1, 1, 1, 0, 0, 0]]).to(dtype)}
        return own | {f"negative_{name}": tensor for name, tensor in own.items()}

    checks.check_all_keys(pipe, lambda: run(**text(0.5)))
    for phase in checks.FEW_KEYS.values() if not dtype.is_floating_point else ():
        with elfatt_sd.patched(pipe, PatchConfig("few", (phase,))):
            torch.testing.assert_close(run(**text(0.5)), run(**text(-7.0)))


class OnDevice(torch.Tensor):
    """Position ids that seem to be on a device: how often they are read is counted."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = torch.device("cuda")  # type: ignore[assignment]
    read: ClassVar[list[int]] = []

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        OnDevice.read += [1] * (args[0] == "cpu")
        return super().to(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
def test_ids_are_read_once_a_run_and_again_where_they_are_written_in_place(kind: Any) -> None:
    """What a CUDA graph writes is not counted: between two runs, they may be others."""
    net, steps = tiny_transformers.flux_transformer(), torch.linspace(1, 0.25, 4)
    given = family_of(net).arguments(net, Grid.image(6, 4), 1, torch.rand)
    OnDevice.read.clear()

    def call(ids: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = net(**{**given, "img_ids": ids, "timestep": step.expand(1)}, return_dict=False)[0]
        return made

    def ids_of(rows: int, columns: int) -> torch.Tensor:
        ids = torch.zeros(rows * columns, 3)
        ids[:, 1], ids[:, 2] = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
        return ids

    with elfatt_sd.patched(net, FEW):
        ids = ids_of(6, 4).as_subclass(kind)
        for run in range(1, 3):
            for step in steps:
                call(ids, step)
            assert len(OnDevice.read) == run * (kind is OnDevice)
        shapes = [*zip(((6, 4), (4, 6), (8, 3)), steps, strict=False)]
        fresh = [call(ids_of(*shape), step) for shape, step in shapes]
        for (shape, step), expected in zip(shapes, fresh, strict=True):
            ids.copy_(ids_of(*shape))
            assert torch.equal(call(ids, step), expected)


@pytest.mark.skipif(not hasattr(diffusers, "Flux2KleinKVPipeline"), reason="this diffusers keeps no keys")
def test_cached_keys_are_refused() -> None:
    """In every call after the patch, until it is taken out."""
    parts = made("Flux.2")[0].components
    given = {"image": Image.effect_noise((64, 64), 60).convert("RGB"), "height": 32, "width": 48}
    given["prompt_embeds"] = torch.rand(1, 12, 8, generator=generator())

    def draw() -> torch.Tensor:
        return tiny_transformers.runner(tiny_transformers.pipeline("Flux2KleinKVPipeline", **parts), **given)()

    first = elfatt_sd.apply_patch(diffusers.Flux2KleinPipeline(**parts), "elfatt")
    for _ in range(2):
        with pytest.raises(ElfattError, match=r"kv_cache_mode='extract' keeps keys and values.*remove_patch\(pipe\)"):
            draw()
    elfatt_sd.remove_patch(first)
    assert torch.isfinite(draw()).all()
    with pytest.warns(UserWarning, match="2 layers are left alone, .*Flux2KVAttnProcessor, is not known"):
        elfatt_sd.apply_patch(tiny_transformers.pipeline("Flux2KleinKVPipeline", **parts), "elfatt")


@pytest.mark.parametrize("residual_steps", [1, 3])
def test_skip_layer_guidance(residual_steps: int) -> None:
    """A second call of some steps leaves a block out, the last one as well: that is no missed layer."""
    pipe, run = tiny_transformers.sd3()
    skips = {"num_inference_steps": 6, "skip_guidance_layers": [0], "skip_layer_guidance_start": 0.2}
    untouched = run(**skips, skip_layer_guidance_stop=1.0)
    whole = config("cell_spread", block_size=TEXT * 100, residual_steps=residual_steps)
    with elfatt_sd.patched(pipe, whole), recorded() as calls:
        torch.testing.assert_close(run(**skips, skip_layer_guidance_stop=1.0), untouched, atol=1e-5, rtol=1e-4)
    assert residual_steps > 1 or sorted(calls.values()) == [6, 6, 6 + 4]


def test_rows_with_texts_of_different_lengths_are_those_that_they_are_alone() -> None:
    texts = {"prompt_embeds": [embeds()[0], embeds(2, 40)[0]]}
    texts["negative_prompt_embeds"] = [embeds(1, 70)[0], embeds(1)[0]]
    pipe, run = made("Z-Image", **texts)
    alone = {name: [text[1]] for name, text in texts.items()}
    latents = torch.randn(2, 4, 12, 8, generator=generator())
    with elfatt_sd.patched(pipe, config("cell_spread", block_size=8)):
        both, one = run(latents=latents), run(**alone, latents=latents[1:])
    torch.testing.assert_close(both[1:], one, atol=1e-4, rtol=1e-3)


def test_wan_goes_on_in_a_second_transformer() -> None:
    """Also with that one alone; one that is not known is refused."""
    pipe, run = made("Wan", second=True)
    assert list(find_denoisers(pipe)) == ["transformer", "transformer_2"]
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4, 12))
    single, both = (elfatt_sd.plan(each, "elfatt-fast", **VIDEO) for each in (made("Wan")[0], pipe))
    assert len(both.layers) == 2 * len(single.layers)
    assert both.multiply_adds_before == single.multiply_adds_before, "a step calls one of them"
    assert (both.call.before, both.call.after) == (single.call.before, single.call.after)
    alone = tiny_transformers.pipeline("WanPipeline", None, pipe.transformer_2, boundary_ratio=1.01)
    assert list(find_denoisers(alone)) == ["transformer_2"]
    run = tiny_transformers.runner(alone, **run.given)  # type: ignore[attr-defined]
    checks.check_steps(alone, run, layers=2, calls=2, counts=(4,))
    assert {layer.denoiser for layer in elfatt_sd.plan(alone, "elfatt-fast", **VIDEO).layers} == {"transformer_2"}
    pipe.transformer_2, before = torch.nn.Linear(1, 1), dict(pipe.transformer.attn_processors)
    with pytest.raises(ElfattError, match="Linear cannot be patched"):
        elfatt_sd.apply_patch(pipe)
    assert pipe.transformer.attn_processors == before


# Merging, in families where positions are added to the image tokens: Stable Diffusion 3, PixArt.


def test_merging_by_similarity_reads_the_blocks_input() -> None:
    pipe, run = made("PixArt")
    elfatt_sd.apply_patch(pipe, "tome")
    seen: list[bool] = []
    layer: Any = find_layers(pipe.transformer)[0].attention.elfatt_state
    layer.layer.attention.to_q.register_forward_pre_hook(
        lambda *_: seen.append(layer.state.candidates is not None or layer.state.block_input is not None)
    )
    run()
    assert seen and all(seen)


@pytest.mark.parametrize(
    ("attention", "ratio", "side"), [("softmax", 0.5, 4), ("softmax", 0.25, 24), ("agent", 0.5, 24)]
)
def test_text_sees_a_merged_token_as_often_as_those_that_it_stands_for(
    attention: Any, ratio: float, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without positions, tokens in cells of four are alike, or all are: merging changes nothing for the text."""
    model, seen, sizes = tiny_transformers.sd3(num_layers=2)[0].transformer, list[torch.Tensor](), set[int]()
    model.pos_embed.pos_embed.zero_()
    given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
    shape = (2, 4, -(-12 // side), -(-8 // side))  # half of the cells' tokens merge, in groups of one to four
    given["hidden_states"] = torch.rand(shape).repeat_interleave(side, 2).repeat_interleave(side, 3)[..., :12, :8]
    run = calling(model, given)
    model.transformer_blocks[0].attn.register_forward_hook(lambda *given: seen.append(given[-1][1]))
    untouched = run()
    elfatt_sd.apply_patch(model, config(attention, ratio=ratio, agents=4))
    read = Matching.sizes.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Matching, "sizes", property(lambda one: sizes.update(read(one)[0].int().tolist()) or read(one)))
    found = run()
    assert len(sizes) > 1 or attention == "agent"
    torch.testing.assert_close(seen[1], seen[0], atol=1e-5, rtol=1e-4)
    if side > 4:
        torch.testing.assert_close(found, untouched, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("attention", "order"), [("softmax", "sequence"), ("elfatt", "windows"), ("block", "windows")])
def test_merging_and_what_it_takes(attention: Any, order: Any) -> None:
    """Image tokens are merged before each layer, text is not. What that takes is measured in a first, exact step."""
    pipe, run = tiny_transformers.sd3()
    alone = config(attention, ratio=0.5, block_size=4, agents=4, block_order=order)
    shared = PatchConfig("shared", (dataclasses.replace(alone.phases[0], residual_steps=3),))
    first: list[torch.Tensor] = []
    pipe.transformer.register_forward_hook(lambda *given: first.append(given[-1][0]))
    for steps in (3, 6):
        exact, errors = run(num_inference_steps=steps), []
        for each in (alone, shared):
            with recorded() as calls, elfatt_sd.patched(pipe, each):
                found = run(num_inference_steps=steps)
            assert calls and torch.isfinite(found).all() and not torch.equal(found, exact)
            errors.append((found - exact).norm())
        assert errors[1] < errors[0] or attention == "block"
    assert torch.equal(first[6], first[0]) and not torch.equal(first[7], first[1]), "of three steps: shared, and exact"
