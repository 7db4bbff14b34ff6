"""Z-Image: its pipelines through their own `__call__`; rows of several images."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import generator, picture, recorded

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Grid

pytestmark = pytest.mark.skipif(
    not hasattr(diffusers, "ZImageInpaintPipeline"), reason="this diffusers has no Z-Image for inpainting"
)
FEW = PatchConfig("few", (Phase(1.0, "cell_spread", block_size=4),))
SIZE: dict[str, int] = {"height": 24, "width": 16}  # with a VAE that halves the sides
STRENGTH: dict[str, Any] = {"image": picture(**SIZE), "strength": 0.5, "num_inference_steps": 8}
MASK = {"mask_image": (torch.arange(16) < 6).float().expand(1, 1, 24, 16)}


def other_pipeline(name: str, **parts: Any) -> tuple[Any, checks.Run]:
    """Another pipeline with the same transformer, and a VAE."""
    plain, run = tiny_transformers.z_image()
    pipe = tiny_transformers.pipeline(name, plain.transformer, vae=tiny_transformers.vae(), **parts)
    return pipe, tiny_transformers.runner(pipe, **{**run.given, **SIZE})  # type: ignore[attr-defined]


def test_layers() -> None:
    """Refiners of noise and text stay exact."""
    assert [layer.name for layer in find_layers(tiny_transformers.z_image()[0].transformer)] == [
        "layers.0.attention",
        "layers.1.attention",
    ]


@pytest.mark.parametrize("size", [(96, 64), (128, 64), (144, 80)])
def test_without_guidance(size: tuple[int, int]) -> None:
    """As the turbo model runs; the image has 24, 32 or 45 tokens, and is padded to 32 or 64."""
    pipe, run = tiny_transformers.z_image(guidance_scale=0.0, height=size[0], width=size[1])
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, counts=(4, 9))


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


def test_several_images_of_a_text() -> None:
    pipe, run = tiny_transformers.z_image(num_images_per_prompt=2)
    checks.check_all_keys(pipe, run)
    checks.check_steps(pipe, run, layers=2, counts=(4,))


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


@pytest.mark.parametrize(
    ("name", "given"), [("ZImageImg2ImgPipeline", STRENGTH), ("ZImageInpaintPipeline", {**STRENGTH, **MASK})]
)
def test_image_to_image(name: str, given: dict[str, Any]) -> None:
    pipe, run = other_pipeline(name)

    def made(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return run(**{**given, **options})

    checks.check_image_to_image(pipe, made)


@pytest.mark.parametrize("kind", [None, "control_layers", "control_noise_refiner"])
def test_controlnets(kind: Any) -> None:
    """Its layers over image and text; those that refine the image with the same layers call them twice."""
    config = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 4}
    config |= {"dim": 32, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    net = tiny_transformers.transformer("ZImageControlNetModel", **config, add_control_noise_refiner=kind)
    pipe, run = other_pipeline("ZImageControlNetPipeline", controlnet=net)
    assert list(find_denoisers(pipe)) == ["transformer", "controlnet"]
    assert [layer.name for layer in find_layers(net)] == ["control_layers.0.attention", "control_layers.1.attention"]

    def made(**options: Any) -> torch.Tensor:
        return run(**{"control_image": picture(**SIZE), **options})

    checks.check_all_keys(pipe, made)
    checks.check_methods(pipe, made)
    each = 2 if kind == "control_layers" else 1
    with elfatt_sd.patched(pipe, checks.HALF), recorded() as calls:
        made(num_inference_steps=4)
    assert sorted(calls.values()) == sorted([2, 2, 2 * each, 2 * each])
    checks.check_plan(pipe, 24, 4, counted=False, **SIZE)  # the ControlNet reads which tokens are padding


def several(model: Any, lengths: tuple[int, int]) -> dict[str, Any]:
    """Two rows: a text for an image that is given, and one for an image to be made."""
    rows = [[torch.rand(4, 1, 8, 6), torch.rand(4, 1, 12, 8)] for _ in lengths]
    texts = [
        [torch.rand(5, tiny_transformers.WIDTH), torch.rand(length, tiny_transformers.WIDTH)] for length in lengths
    ]
    noise = {"image_noise_mask": [[0, 1]] * 2, "siglip_feats": [None] * 2}
    return {"x": rows, "t": torch.tensor([0.3, 0.3]), "cap_feats": texts, **noise, "return_dict": False}


@pytest.mark.parametrize("encoded", [False, True])
def test_rows_of_several_images(encoded: bool) -> None:
    """Omni: the image to be made is approximated, the ones before it are exact keys."""
    model = tiny_transformers.z_image(config={"siglip_feat_dim": 6})[0].transformer
    given = several(model, (7, 20))
    if encoded:
        given["siglip_feats"] = [[torch.rand(3, 2, 6), None]] * 2

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.stack(list(model(**given)[0]))

    checks.check_all_keys(model, run)
    checks.check_methods(model, run)
    call = family_of(model).call(model, (), given)
    assert (call.grid, call.before) == (Grid.image(6, 4), 32 + 32 + 32)


@pytest.mark.parametrize("what", ["rows of other lengths", "images of other sizes"])
def test_rows_without_a_common_grid_are_exact(what: str) -> None:
    model = tiny_transformers.z_image()[0].transformer
    given = several(model, (7, 40))
    if what == "images of other sizes":
        given = family_of(model).arguments(model, Grid.image(6, 4), 2, torch.rand)
        given = {**given, "x": [torch.rand(4, 1, 12, 8), torch.rand(4, 1, 8, 8)], "return_dict": False}
    with torch.no_grad():
        untouched = model(**given)[0]
        elfatt_sd.apply_patch(model, FEW)
        with pytest.warns(UserWarning, match="not a grid"):
            found = model(**given)[0]
    assert all(torch.equal(one, other) for one, other in zip(found, untouched, strict=True))
