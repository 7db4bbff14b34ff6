"""What is special to one family: its timesteps, texts, masks, position ids, guidance, merging, second transformer."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from support import checks, tiny_transformers
from support.checks import generator, recorded
from support.transformer_rows import ROWS, image, sd3, sd3_controlnet

import elfatt_sd
from elfatt_sd import METHODS, ElfattError, PatchConfig, Phase
from elfatt_sd.attention.merging import Matching
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Attention, Grid

TEXT, WIDTH, embeds = tiny_transformers.TEXT, tiny_transformers.WIDTH, tiny_transformers.embeds
VIDEO = {"height": 96, "width": 64, "frames": 9}


def config(attention: Any, **settings: Any) -> PatchConfig:
    return PatchConfig("own", (Phase(1.0, attention, **settings),))


FEW = config("cell_spread", cell=4, block_size=4)
MERGED = config("agent", agent_source="merged")
HALF_MERGED = config("softmax", ratio=0.5)


def needs(name: str) -> Any:
    return pytest.mark.skipif(not hasattr(diffusers, name), reason=f"this version of diffusers has no {name}")


def check(pipe: Any, run: checks.Run) -> None:
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)


def calling(model: Any, given: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """What calls a bare model."""

    @torch.no_grad()
    def run() -> torch.Tensor:
        made = model(**given, return_dict=False)[0]
        return made if isinstance(made, torch.Tensor) else torch.cat([each.flatten() for each in made])

    return run


def test_layers() -> None:
    """Refiners of noise and text stay exact; a second attention over the image has no text."""
    layers = find_layers(tiny_transformers.made("Stable Diffusion 3")[0].transformer)
    names = ("transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn")
    assert [(layer.name, layer.text) for layer in layers] == [*zip(names, (333, 0, 333), strict=True)]
    layers = find_layers(tiny_transformers.made("Z-Image")[0].transformer)
    assert [layer.name for layer in layers] == ["layers.0.attention", "layers.1.attention"]


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
    pipe, _ = tiny_transformers.made(name)
    with pytest.raises(ElfattError, match=says):
        elfatt_sd.apply_patch(pipe, method, **settings)
    assert not elfatt_sd.is_patched(pipe)


def shuffled(given: dict[str, Any]) -> dict[str, Any]:
    return {"img_ids": given["img_ids"][torch.randperm(24, generator=generator())]}


def regional(dtype: torch.dtype) -> Any:
    """The masks of regional prompts."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        tokens = given["encoder_hidden_states"].shape[1] + 24
        mask = (torch.rand(1, 1, tokens, tokens, generator=generator()) > 0.3).to(dtype)
        return {"joint_attention_kwargs": {"attention_mask": mask}}

    return change


def several(lengths: tuple[int, int]) -> dict[str, Any]:
    """Two rows: a text for an image that is given, and one for an image to be made."""
    rows = [[torch.rand(4, 1, 8, 6), torch.rand(4, 1, 12, 8)] for _ in lengths]
    texts = [[torch.rand(5, WIDTH), torch.rand(length, WIDTH)] for length in lengths]
    noise = {"image_noise_mask": [[0, 1]] * 2, "siglip_feats": [None] * 2}
    return {"x": rows, "t": torch.tensor([0.3, 0.3]), "cap_feats": texts, **noise}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("Flux.1", shuffled, "not a grid"),
        ("Flux.1", regional(torch.bool), "a mask that is not of keys alone"),
        ("Flux.1", regional(torch.float32), "a mask that is not of keys alone"),
        ("Z-Image", lambda given: {"x": [torch.rand(4, 1, 12, 8), torch.rand(4, 1, 8, 8)]}, "not a grid"),
        ("Z-Image", lambda given: several((7, 40)), "not a grid"),
    ],
)
def test_calls_that_stay_exact_with_a_warning(name: str, change: Any, says: str) -> None:
    model = tiny_transformers.made(name)[0].transformer
    given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
    run = calling(model, {**given, **change(given)})
    untouched = run()
    elfatt_sd.apply_patch(model, FEW)
    with pytest.warns(UserWarning, match=says):
        assert torch.equal(run(), untouched)


@needs("ChromaPipeline")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masked_text_of_chroma(dtype: torch.dtype) -> None:
    """A mask of true and false leaves keys out; that of the pipeline itself is added to the logits."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]]).to(dtype)
    pipe, run = tiny_transformers.chroma_run()

    def text(filler: float) -> dict[str, torch.Tensor]:
        embeddings = torch.rand(1, 6, tiny_transformers.TEXT_WIDTH, generator=generator())
        embeddings[:, 3:] = filler
        own = {"prompt_embeds": embeddings, "prompt_attention_mask": mask}
        return own | {f"negative_{name}": tensor for name, tensor in own.items()}

    checks.check_all_keys(pipe, lambda: run(**text(0.5)))
    for phase in checks.FEW_KEYS.values() if dtype == torch.bool else ():
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


def ids_of(rows: int, columns: int) -> torch.Tensor:
    ids = torch.zeros(rows * columns, 3)
    ids[:, 1], ids[:, 2] = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    return ids


def call(net: Any, ids: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    given = {"hidden_states": torch.randn(1, 24, 16, generator=generator()), "txt_ids": torch.zeros(7, 3)}
    given |= {"encoder_hidden_states": torch.randn(1, 7, net.config.joint_attention_dim, generator=generator())}
    given |= {"pooled_projections": torch.zeros(1, net.config.pooled_projection_dim)}
    output: torch.Tensor = net(**given, img_ids=ids, timestep=timestep.expand(1), return_dict=False)[0]
    return output


@pytest.mark.parametrize("inference", [False, True])
def test_ids_that_are_written_in_place_are_read_again(inference: bool) -> None:
    net, shapes = tiny_transformers.flux_transformer(), ((6, 4), (4, 6), (8, 3))
    for kind, write in [(kind, write) for kind in (torch.Tensor, OnDevice) for write in ("copy", "data", "numpy")][:5]:
        with torch.inference_mode(inference), torch.no_grad(), elfatt_sd.patched(net, FEW):
            steps = torch.linspace(1, 0.25, 4)
            fresh = [call(net, ids_of(*shape), step) for shape, step in zip(shapes, steps, strict=False)]
            ids = ids_of(*shapes[0]).as_subclass(kind)
            for shape, step, expected in zip(shapes, steps, fresh, strict=False):
                if write == "copy":
                    ids.copy_(ids_of(*shape))
                elif write == "data":
                    ids.data = ids_of(*shape)
                else:
                    ids.numpy()[:] = ids_of(*shape).numpy()
                assert torch.equal(call(net, ids, step), expected), (kind, write)


def test_ids_on_a_device_are_read_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph writes is not counted: between two runs, they may be others."""
    net, ids = tiny_transformers.flux_transformer(), ids_of(6, 4).as_subclass(OnDevice)
    monkeypatch.setattr(OnDevice, "read", [])
    with torch.no_grad(), elfatt_sd.patched(net, FEW):
        for run in range(1, 3):
            for step in torch.linspace(1, 0.25, 4):
                call(net, ids, step)
            assert len(OnDevice.read) == run


@needs("Flux2KleinKVPipeline")
def test_cached_keys_are_refused() -> None:
    """Also in every call after the patch, until it is taken out: then the pipeline draws what it draws without one."""
    picture, text = image(64, 64), torch.rand(1, 12, 8, generator=generator())
    parts = tiny_transformers.flux2().components

    def draw(transformer: Any) -> torch.Tensor:
        pipe = diffusers.Flux2KleinKVPipeline(**{**parts, "transformer": transformer})
        pipe.set_progress_bar_config(disable=True)
        return tiny_transformers.runner(pipe, prompt_embeds=text, height=32, width=48, image=picture)()

    pipe = diffusers.Flux2KleinKVPipeline(**tiny_transformers.flux2().components)
    with pytest.raises(ElfattError, match="Flux2KVAttnProcessor keeps keys and values of reference images"):
        elfatt_sd.apply_patch(pipe)
    assert not elfatt_sd.is_patched(pipe)
    expected = draw(copy.deepcopy(parts["transformer"]))
    first = elfatt_sd.apply_patch(diffusers.Flux2KleinPipeline(**parts), "elfatt")
    for _ in range(2):
        with pytest.raises(ElfattError, match=r"kv_cache_mode='extract' keeps keys and values.*remove_patch\(pipe\)"):
            draw(parts["transformer"])
    elfatt_sd.remove_patch(first)
    assert torch.equal(draw(parts["transformer"]), expected)


@needs("QwenImagePipeline")
def test_padded_text() -> None:
    """Texts of different lengths: the keys of padding are masked."""
    short = torch.ones(2, TEXT, dtype=torch.long)
    short[0, 4:] = 0
    given = {"prompt_embeds": embeds().repeat(2, 1, 1), "prompt_embeds_mask": short}
    given |= {"negative_prompt_embeds": embeds(1).repeat(2, 1, 1), "negative_prompt_embeds_mask": short.flip(0)}
    pipe, run = tiny_transformers.qwen_image(**given)
    check(pipe, run)
    padding = embeds().repeat(2, 1, 1)
    padding[0, 4:] = 3.0
    with elfatt_sd.patched(pipe, FEW):
        assert torch.equal(run(), run(prompt_embeds=padding))


@needs("QwenImagePipeline")
@pytest.mark.parametrize("guided", [False, True])
def test_half_precision(guided: bool) -> None:
    """Rounded timesteps are found on the schedule."""
    pipe, run = tiny_transformers.qwen_image(**({} if guided else {"true_cfg_scale": 1.0}))
    pipe.to(torch.bfloat16)
    given = {name: value.bfloat16() for name, value in run.given.items() if name.endswith("embeds")}  # type: ignore[attr-defined]
    checks.check_steps(pipe, lambda **options: run(**given, **options), layers=2, calls=1 + guided, counts=(4, 28))


@pytest.mark.parametrize("residual_steps", [1, 3])
def test_skip_layer_guidance(residual_steps: int) -> None:
    """A second call of some steps leaves a block out, the last one as well: that is no missed layer."""
    pipe, run = tiny_transformers.sd3()
    skips = {"num_inference_steps": 6, "skip_guidance_layers": [0], "skip_layer_guidance_start": 0.2}
    untouched = run(**skips, skip_layer_guidance_stop=1.0)
    assert not torch.equal(untouched, run(num_inference_steps=6))
    whole = config("cell_spread", block_size=TEXT * 100, residual_steps=residual_steps)
    with elfatt_sd.patched(pipe, whole), recorded() as calls:
        found = run(**skips, skip_layer_guidance_stop=1.0)
    torch.testing.assert_close(found, untouched, atol=1e-5, rtol=1e-4)
    assert residual_steps > 1 or sorted(calls.values()) == [6, 6, 6 + 4]
    with elfatt_sd.patched(pipe, checks.HALF), recorded() as calls:
        run(**skips, skip_layer_guidance_stop=0.5)
    assert sorted(calls.values()) == [3, 3, 3 + 1]


def test_perturbed_attention_guidance(folder: Path) -> None:
    """Its layers have processors of their own while the pipeline runs: they stay exact, and are named."""
    pipe, run = sd3("StableDiffusion3PAGPipeline", {}, pag_applied_layers=["blocks.1"])(folder)
    untouched = run(pag_scale=2.0)
    elfatt_sd.apply_patch(pipe, FEW)
    with recorded() as calls, pytest.warns(UserWarning, match=r"1 patched layers now have another .* \(PAG"):
        found = run(pag_scale=2.0)
    assert len(calls) == 2
    assert not torch.equal(found, untouched)
    elfatt_sd.remove_patch(pipe)
    assert torch.equal(run(pag_scale=2.0), untouched)


@needs("ZImagePipeline")
def test_guidance_shares_a_difference() -> None:
    """The rows with the prompt come first here; the others measure the difference, and keep it for both."""
    pipe, run = tiny_transformers.z_image()
    found: list[tuple[torch.Tensor, ...]] = []
    pipe.transformer.register_forward_hook(lambda module, given, output: found.append(output[0]))
    shared, first = config("sampled", keys=8, residual_steps=2), []
    for each in (PatchConfig("sd"), shared, shared.with_settings(residual_guidance=True)):
        found.clear()
        with elfatt_sd.patched(pipe, each):
            assert torch.isfinite(run(num_inference_steps=4)).all()
        first.append(found[0])
    exact, other, guided = first
    for row, own in ((0, other), (1, other), (1, guided)):
        torch.testing.assert_close(own[row], exact[row], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(guided[0], exact[0], atol=1e-4)


@needs("ZImagePipeline")
def test_texts_of_different_lengths() -> None:
    """Rows that are longer than others are masked in these."""
    texts = {"prompt_embeds": [embeds()[0], embeds(2, 40)[0]]}
    texts["negative_prompt_embeds"] = [embeds(1, 70)[0], embeds(1)[0]]
    pipe, run = tiny_transformers.z_image(**texts)
    check(pipe, run)
    alone = {name: [text[1]] for name, text in texts.items()}
    latents = torch.randn(2, 4, 12, 8, generator=generator())
    with elfatt_sd.patched(pipe, config("cell_spread", block_size=8)):
        both, one = run(latents=latents), run(**alone, latents=latents[1:])
    torch.testing.assert_close(both[1:], one, atol=1e-4, rtol=1e-3)


@needs("ZImagePipeline")
@pytest.mark.parametrize("residual_steps", [1, 3])
def test_guidance_that_ends_early(residual_steps: int) -> None:
    """Later calls have one row in place of two: what the others kept is not for them."""
    pipe, run = tiny_transformers.z_image(cfg_truncation=0.4)
    untouched = run(num_inference_steps=8)
    rows: set[int] = set()
    handle = pipe.transformer.register_forward_pre_hook(lambda module, args: rows.add(len(args[0])))
    with elfatt_sd.patched(pipe, config("cell_spread", block_size=checks.MANY, residual_steps=residual_steps)):
        found = run(num_inference_steps=8)
    handle.remove()
    assert rows == {1, 2}
    torch.testing.assert_close(found, untouched, atol=1e-5, rtol=1e-4)
    checks.check_steps(pipe, run, layers=2, counts=(4, 28))


@needs("ZImageOmniPipeline")
@pytest.mark.parametrize("encoded", [False, True])
def test_rows_of_several_images(encoded: bool) -> None:
    """Omni: the image to be made is approximated, the ones before it are exact keys."""
    model = tiny_transformers.z_image(config={"siglip_feat_dim": 6})[0].transformer
    given = several((7, 20))
    if encoded:
        given["siglip_feats"] = [[torch.rand(3, 2, 6), None]] * 2
    check(model, calling(model, given))
    found = family_of(model).call(model, (), given)
    assert (found.grid, found.before) == (Grid.image(6, 4), 32 + 32 + 32)


@needs("WanPipeline")
def test_wan_goes_on_in_a_second_transformer() -> None:
    """Also with that one alone; one that is not known is refused."""
    pipe, run = tiny_transformers.wan(second=True)
    assert list(find_denoisers(pipe)) == ["transformer", "transformer_2"]
    check(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4, 28))
    single, both = (elfatt_sd.plan(each, "elfatt-fast", **VIDEO) for each in (tiny_transformers.wan()[0], pipe))
    assert len(both.layers) == 2 * len(single.layers)
    assert both.multiply_adds_before == single.multiply_adds_before, "a step calls one of them"
    assert (both.call.before, both.call.after) == (single.call.before, single.call.after)
    for residual_steps in (2, 3):
        shared = config("cell_spread", block_size=8, residual_steps=residual_steps)
        with elfatt_sd.patched(pipe, shared), recorded() as calls:
            assert torch.isfinite(run(num_inference_steps=8)).all()
        assert calls
    alone = tiny_transformers.pipeline("WanPipeline", None, pipe.transformer_2, boundary_ratio=1.01)
    assert list(find_denoisers(alone)) == ["transformer_2"]
    run = tiny_transformers.runner(alone, **run.given)  # type: ignore[attr-defined]
    checks.check_methods(alone, run)
    checks.check_steps(alone, run, layers=2, calls=2, counts=(4,))
    assert {layer.denoiser for layer in elfatt_sd.plan(alone, "elfatt-fast", **VIDEO).layers} == {"transformer_2"}
    pipe.transformer_2, before = torch.nn.Linear(1, 1), dict(pipe.transformer.attn_processors)
    with pytest.raises(ElfattError, match="Linear cannot be patched"):
        elfatt_sd.apply_patch(pipe)
    assert pipe.transformer.attn_processors == before


@needs("WanPipeline")
def test_wan_with_a_timestep_for_each_token() -> None:
    """TI2V-5B: tokens of a given first frame have timestep 0."""
    pipe, run = tiny_transformers.wan()
    pipe.register_to_config(expand_timesteps=True)
    checks.check_all_keys(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4,))


@needs("HunyuanVideo15Pipeline")
def test_hunyuan_video_15_with_padded_text() -> None:
    """A call of the model alone: text of two encoders and of an image; its padding is moved to one end."""
    model, chance = tiny_transformers.hunyuan_video_15()[0].transformer, torch.Generator().manual_seed(0)
    given = family_of(model).arguments(model, Grid(3, 6, 4), 1, lambda *size: torch.rand(size, generator=chance))
    given["encoder_attention_mask"][:, 9:] = 0
    given["encoder_attention_mask_2"][:, 5:] = 0
    check(model, calling(model, given))


@dataclass(frozen=True)
class Values(Attention):
    """An attention that does not know of tokens besides those of the video."""

    name: ClassVar[str] = "values"

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        return layer.project(tokens)[2]

    def cost(self, size: Any) -> float:
        return size.projections(size.tokens, size.tokens)


def moved(module: Any, args: Any, given: dict[str, Any]) -> Any:
    given["video_coords"] = given["video_coords"].roll(1, 2)
    return args, given


@needs("LTXConditionPipeline")
@pytest.mark.parametrize(
    ("row", "method", "change", "says"),
    [
        ("first and last frame", Values(), None, "tokens besides those of 3x8x8, and 'values' sees none"),
        ("first frame", "elfatt", moved, "not a grid of rows and columns"),
    ],
)
def test_given_frames_that_keep_layers_exact(folder: Path, row: str, method: Any, change: Any, says: str) -> None:
    """An attention that sees no tokens but the video's, or coordinates that are none of a grid: with a warning."""
    pipe, run = ROWS[f"LTX, {row}"].make(folder)
    if change is not None:
        pipe.transformer.register_forward_pre_hook(change, with_kwargs=True)
    untouched = run()
    with elfatt_sd.patched(pipe, method), recorded() as calls, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(run(), untouched)
    assert not calls
    assert any(says in str(each.message) for each in told)


# Merging, in families where positions are added to the image tokens: Stable Diffusion 3, PixArt.


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
    pipe, _ = tiny_transformers.pixart_run()
    pipe.transformer.transformer_blocks[0].attn1.set_processor(type("Other", (AttnProcessor2_0,), {})())
    with pytest.warns(UserWarning, match="1 layers are left alone") as warned:
        elfatt_sd.apply_patch(pipe, "tome")
    assert warned[0].filename == __file__  # Python shows a text once for each line of the user's


def test_pixart_is_timed_in_benches(tmp_path: Path) -> None:
    """Beside its floor, and without tomesd, which patches UNets alone."""
    from elfatt_sd.benchmarking import pipeline, unet

    model = str(tmp_path / "pixart")
    tiny_transformers.pixart(tmp_path).save_pretrained(model)
    options: dict[str, Any] = {"methods": ["tome", "elfatt-fast"], "sizes": [32], "repeats": 1, "device": "cpu"}
    for rows in (unet(model, memory=[], **options)["rows"], pipeline(model, steps=2, memory=False, **options)["rows"]):
        methods = {row["method"] for row in rows}
        assert {"untouched", "tome", "elfatt-fast"} <= methods and "tomesd" not in methods
        assert all(row["seconds"] > 0 for row in rows)


def alike(cells: int = 0) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A Stable Diffusion 3 without positions, and its call with tokens that are all alike, or in cells of four."""
    model = tiny_transformers.sd3(num_layers=2)[0].transformer
    model.pos_embed.pos_embed.zero_()
    given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
    if cells:
        given["hidden_states"] = torch.rand(2, 4, 3, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    else:
        given["hidden_states"] = torch.ones_like(given["hidden_states"])
    return model, calling(model, given)


@pytest.mark.parametrize(("attention", "ratio"), [("softmax", 0.25), ("softmax", 0.75), ("agent", 0.5)])
def test_merged_tokens_weigh_beside_text_what_they_did(attention: Any, ratio: float) -> None:
    """Tokens that are all alike are merged into their like: nothing changes, for image and text."""
    model, run = alike()
    untouched = run()
    elfatt_sd.apply_patch(model, config(attention, ratio=ratio, agents=4))
    with recorded() as calls:
        torch.testing.assert_close(run(), untouched, atol=1e-5, rtol=1e-4)
    assert calls


def test_text_sees_a_merged_token_as_often_as_those_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of four tokens that are alike; half of the tokens are merged into their like, in groups of one to four."""
    model, run = alike(cells=4)
    seen: list[torch.Tensor] = []
    model.transformer_blocks[0].attn.register_forward_hook(lambda *given: seen.append(given[-1][1]))
    run()
    elfatt_sd.apply_patch(model, HALF_MERGED)
    read, sizes = Matching.sizes.fget, set[int]()  # type: ignore[attr-defined]
    monkeypatch.setattr(Matching, "sizes", property(lambda one: sizes.update(read(one)[0].int().tolist()) or read(one)))
    run()
    assert len(sizes) > 1
    torch.testing.assert_close(seen[1], seen[0], atol=1e-5, rtol=1e-4)


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
    assert torch.equal(run(num_inference_steps=6), exact)
    assert torch.equal(first[6], first[0]) and not torch.equal(first[7], first[1]), "of three steps: shared, and exact"


@pytest.mark.usefixtures("fresh_compiler")
def test_merging_compiles() -> None:
    """And what it takes is measured in compiled code."""
    pipe, run = tiny_transformers.sd3()
    phase = {"ratio": 0.5, "block_size": 4, "agents": 4, "block_order": "windows", "residual_steps": 2}
    elfatt_sd.apply_patch(pipe, config("elfatt", **phase))
    eager = run()
    pipe.transformer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(run(), eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"dual_attention_layers": (0,)}])
def test_merging_in_a_controlnet(changes: dict[str, Any]) -> None:
    net = sd3_controlnet(**changes)
    elfatt_sd.apply_patch(net, HALF_MERGED)
    with recorded() as calls:
        assert calling(net, family_of(net).arguments(net, Grid.image(6, 4), 2, torch.rand))().isfinite().all()
    assert len(calls) == 1 + len(changes)


def test_fused_projections() -> None:
    """Of 3 and 3.5 large; diffusers itself cannot call a second attention with those."""
    pipe, run = tiny_transformers.sd3(dual_attention_layers=())
    pipe.transformer.fuse_qkv_projections()
    check(pipe, run)
