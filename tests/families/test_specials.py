"""What is special to one family: its timesteps, texts, masks, position ids, guidance, second transformer."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import generator, recorded
from support.transformer_rows import ROWS, image, sd3

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Attention, Grid

FEW = PatchConfig("few", (Phase(1.0, "cell_spread", cell=4, block_size=4),))
VIDEO = {"height": 96, "width": 64, "frames": 9}
MERGED = PatchConfig("own", (Phase(1.0, "agent", agent_source="merged"),))


def needs(name: str) -> Any:
    return pytest.mark.skipif(not hasattr(diffusers, name), reason=f"this version of diffusers has no {name}")


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


def shuffled(given: dict[str, Any]) -> None:
    given["img_ids"] = given["img_ids"][torch.randperm(24, generator=generator())]


def masked(dtype: torch.dtype) -> Any:
    """As the masks of regional prompts."""

    def change(given: dict[str, Any]) -> None:
        tokens = given["encoder_hidden_states"].shape[1] + 24
        mask = (torch.rand(1, 1, tokens, tokens, generator=generator()) > 0.3).to(dtype)
        given["joint_attention_kwargs"] = {"attention_mask": mask}

    return change


def other_sizes(given: dict[str, Any]) -> None:
    given["x"] = [torch.rand(4, 1, 12, 8), torch.rand(4, 1, 8, 8)]


def other_lengths(given: dict[str, Any]) -> None:
    given.update(several((7, 40)))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("Flux.1", shuffled, "not a grid"),
        ("Flux.1", masked(torch.bool), "a mask that is not of keys alone"),
        ("Flux.1", masked(torch.float32), "a mask that is not of keys alone"),
        ("Z-Image", other_sizes, "not a grid"),
        ("Z-Image", other_lengths, "not a grid"),
    ],
)
def test_calls_that_stay_exact_with_a_warning(name: str, change: Any, says: str) -> None:
    model = tiny_transformers.made(name)[0].transformer
    given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
    change(given)
    with torch.no_grad():
        untouched = model(**given, return_dict=False)[0]
        elfatt_sd.apply_patch(model, FEW)
        with pytest.warns(UserWarning, match=says):
            found = model(**given, return_dict=False)[0]
    assert all(torch.equal(one, other) for one, other in zip(found, untouched, strict=True))


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


KINDS = [
    (torch.Tensor, "copy"),
    (torch.Tensor, "data"),
    (torch.Tensor, "numpy"),
    (OnDevice, "copy"),
    (OnDevice, "data"),
]


@pytest.mark.parametrize(("kind", "write"), KINDS)
@pytest.mark.parametrize("inference", [False, True])
def test_ids_that_are_written_in_place_are_read_again(kind: Any, inference: bool, write: str) -> None:
    net, shapes = tiny_transformers.flux_transformer(), ((6, 4), (4, 6), (8, 3))
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
            assert torch.equal(call(net, ids, step), expected)


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
    parts = tiny_transformers.flux2().components
    pipe = diffusers.Flux2KleinKVPipeline(**parts)
    with pytest.raises(ElfattError, match="Flux2KVAttnProcessor keeps keys and values of reference images"):
        elfatt_sd.apply_patch(pipe)
    assert not elfatt_sd.is_patched(pipe)


@needs("Flux2KleinKVPipeline")
def test_cached_keys_after_the_patch_are_refused() -> None:
    """In every call, until the patch is taken out: then the pipeline draws what it draws without one."""
    picture = image(64, 64)
    text = torch.rand(1, 12, 8, generator=generator())

    def draw(transformer: Any) -> torch.Tensor:
        pipe = diffusers.Flux2KleinKVPipeline(**{**parts, "transformer": transformer})
        pipe.set_progress_bar_config(disable=True)
        return tiny_transformers.runner(pipe, prompt_embeds=text, height=32, width=48, image=picture)()

    parts = tiny_transformers.flux2().components
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
    short = torch.ones(2, tiny_transformers.TEXT, dtype=torch.long)
    short[0, 4:] = 0
    given = {"prompt_embeds": tiny_transformers.embeds().repeat(2, 1, 1), "prompt_embeds_mask": short}
    given |= {
        "negative_prompt_embeds": tiny_transformers.embeds(1).repeat(2, 1, 1),
        "negative_prompt_embeds_mask": short.flip(0),
    }
    pipe, run = tiny_transformers.qwen_image(**given)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    padding = tiny_transformers.embeds().repeat(2, 1, 1)
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

    def made(**options: Any) -> torch.Tensor:
        return run(**given, **options)

    checks.check_steps(pipe, made, layers=2, calls=1 + guided, counts=(4, 28))


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
    shared = PatchConfig("shared", (Phase(1.0, "sampled", keys=8, residual_steps=2),))
    first = {}
    for name, config in {
        "exact": PatchConfig("sd"),
        "shared": shared,
        "guided": shared.with_settings(residual_guidance=True),
    }.items():
        found.clear()
        with elfatt_sd.patched(pipe, config):
            assert torch.isfinite(run(num_inference_steps=4)).all()
        first[name] = found[0]
    for row in (0, 1):
        torch.testing.assert_close(first["shared"][row], first["exact"][row], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first["guided"][1], first["exact"][1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(first["guided"][0], first["exact"][0], atol=1e-4)


@needs("ZImagePipeline")
def test_texts_of_different_lengths() -> None:
    """Rows that are longer than others are masked in these."""
    texts = {"prompt_embeds": [tiny_transformers.embeds()[0], tiny_transformers.embeds(2, 40)[0]]}
    texts["negative_prompt_embeds"] = [tiny_transformers.embeds(1, 70)[0], tiny_transformers.embeds(1)[0]]
    pipe, run = tiny_transformers.z_image(**texts)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    alone = {name: [text[1]] for name, text in texts.items()}
    latents = torch.randn(2, 4, 12, 8, generator=generator())
    phase = Phase(1.0, "cell_spread", block_size=8)
    with elfatt_sd.patched(pipe, PatchConfig("few", (phase,))):
        both, one = run(latents=latents), run(**alone, latents=latents[1:])
    torch.testing.assert_close(both[1:], one, atol=1e-4, rtol=1e-3)


@needs("ZImagePipeline")
@pytest.mark.parametrize("residual_steps", [1, 3])
def test_guidance_that_ends_early(residual_steps: int) -> None:
    """Later calls have one row in place of two: what the others kept is not for them."""
    pipe, run = tiny_transformers.z_image(cfg_truncation=0.4)
    untouched = run(num_inference_steps=8)
    rows: list[int] = []
    handle = pipe.transformer.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    phase = Phase(1.0, "cell_spread", block_size=checks.MANY, residual_steps=residual_steps)
    with elfatt_sd.patched(pipe, PatchConfig("all", (phase,))):
        found = run(num_inference_steps=8)
    handle.remove()
    assert sorted(set(rows)) == [1, 2]
    torch.testing.assert_close(found, untouched, atol=1e-5, rtol=1e-4)
    checks.check_steps(pipe, run, layers=2, counts=(4, 28))


def several(lengths: tuple[int, int]) -> dict[str, Any]:
    """Two rows: a text for an image that is given, and one for an image to be made."""
    rows = [[torch.rand(4, 1, 8, 6), torch.rand(4, 1, 12, 8)] for _ in lengths]
    texts = [
        [torch.rand(5, tiny_transformers.WIDTH), torch.rand(length, tiny_transformers.WIDTH)] for length in lengths
    ]
    noise = {"image_noise_mask": [[0, 1]] * 2, "siglip_feats": [None] * 2}
    return {"x": rows, "t": torch.tensor([0.3, 0.3]), "cap_feats": texts, **noise}


@needs("ZImageOmniPipeline")
@pytest.mark.parametrize("encoded", [False, True])
def test_rows_of_several_images(encoded: bool) -> None:
    """Omni: the image to be made is approximated, the ones before it are exact keys."""
    model = tiny_transformers.z_image(config={"siglip_feat_dim": 6})[0].transformer
    given = several((7, 20))
    if encoded:
        given["siglip_feats"] = [[torch.rand(3, 2, 6), None]] * 2

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.stack(list(model(**given, return_dict=False)[0]))

    checks.check_all_keys(model, run)
    checks.check_methods(model, run)
    call = family_of(model).call(model, (), given)
    assert (call.grid, call.before) == (Grid.image(6, 4), 32 + 32 + 32)


@needs("WanPipeline")
def test_wan_goes_on_in_a_second_transformer() -> None:
    pipe, run = tiny_transformers.wan(second=True)
    assert list(find_denoisers(pipe)) == ["transformer", "transformer_2"]
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4, 28))
    single, both = (elfatt_sd.plan(each, "elfatt-fast", **VIDEO) for each in (tiny_transformers.wan()[0], pipe))
    assert len(both.layers) == 2 * len(single.layers)
    assert both.multiply_adds_before == single.multiply_adds_before, "a step calls one of them"
    assert (both.call.before, both.call.after) == (single.call.before, single.call.after)
    for residual_steps in (2, 3):
        config = PatchConfig("shared", (Phase(1.0, "cell_spread", block_size=8, residual_steps=residual_steps),))
        with elfatt_sd.patched(pipe, config), recorded() as calls:
            assert torch.isfinite(run(num_inference_steps=8)).all()
        assert calls


@needs("WanPipeline")
def test_wan_with_its_second_transformer_alone() -> None:
    both, run = tiny_transformers.wan(second=True)
    pipe = tiny_transformers.pipeline("WanPipeline", None, both.transformer_2, boundary_ratio=1.01)
    assert list(find_denoisers(pipe)) == ["transformer_2"]
    run = tiny_transformers.runner(pipe, **run.given)  # type: ignore[attr-defined]
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4,))
    assert {layer.denoiser for layer in elfatt_sd.plan(pipe, "elfatt-fast", **VIDEO).layers} == {"transformer_2"}


@needs("WanPipeline")
def test_a_second_transformer_that_is_not_known_is_refused() -> None:
    pipe, _ = tiny_transformers.wan(second=True)
    pipe.transformer_2 = torch.nn.Linear(1, 1)
    before = dict(pipe.transformer.attn_processors)
    with pytest.raises(elfatt_sd.ElfattError, match="Linear cannot be patched"):
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
    model = tiny_transformers.hunyuan_video_15()[0].transformer
    family = family_of(model)
    generator = torch.Generator().manual_seed(0)
    given = family.arguments(model, Grid(3, 6, 4), 1, lambda *size: torch.rand(size, generator=generator))
    given["encoder_attention_mask"][:, 9:] = 0
    given["encoder_attention_mask_2"][:, 5:] = 0

    def run() -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = model(**given, return_dict=False)[0]
        return made

    checks.check_all_keys(model, run)
    checks.check_methods(model, run)


@dataclass(frozen=True)
class Values(Attention):
    """An attention that does not know of tokens besides those of the video."""

    name: ClassVar[str] = "values"

    def attend(self, layer: Any, tokens: torch.Tensor, prepared: Any) -> torch.Tensor:
        return layer.project(tokens)[2]

    def cost(self, size: Any) -> float:
        return size.projections(size.tokens, size.tokens)


@needs("LTXConditionPipeline")
def test_an_attention_that_sees_no_tokens_of_given_frames(folder: Path) -> None:
    """It leaves the layers exact, and says so."""
    pipe, run = ROWS["LTX, first and last frame"].make(folder)
    untouched = run()
    elfatt_sd.apply_patch(pipe, Values())
    with recorded() as calls, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(run(), untouched)
    assert not calls
    assert any("tokens besides those of 3x8x8, and 'values' sees none" in str(each.message) for each in told)
    elfatt_sd.remove_patch(pipe)


@needs("LTXConditionPipeline")
def test_coordinates_that_are_none_of_a_grid(folder: Path) -> None:
    """The layers stay exact, with a warning."""
    pipe, run = ROWS["LTX, first frame"].make(folder)
    untouched = run()

    def moved(module: Any, args: Any, given: dict[str, Any]) -> Any:
        given["video_coords"] = given["video_coords"].roll(1, 2)
        return args, given

    handle = pipe.transformer.register_forward_pre_hook(moved, with_kwargs=True)
    turned = run()
    with elfatt_sd.patched(pipe, "elfatt"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(run(), turned)
    assert any("not a grid of rows and columns" in str(each.message) for each in told)
    handle.remove()
    assert torch.equal(run(), untouched)
