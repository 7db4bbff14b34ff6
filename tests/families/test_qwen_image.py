"""Qwen-Image: its pipelines through their own `__call__`, with and without reference images."""

from __future__ import annotations

import sys
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import picture, recorded

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import family_of, find_denoisers
from elfatt_sd.methods import Grid

pytestmark = pytest.mark.skipif(
    not hasattr(diffusers, "QwenImageLayeredPipeline"), reason="this diffusers has no layered Qwen-Image"
)
FEW = PatchConfig("few", (Phase(1.0, "cell_spread", block_size=4),))
SIZE: dict[str, int] = {"height": 96, "width": 64}
STRENGTH: dict[str, Any] = {"image": picture(**SIZE), "strength": 0.5, "num_inference_steps": 8}
MASK = {"mask_image": (torch.arange(64) < 20).float().expand(1, 1, 96, 64)}


def vae() -> Any:
    """A VAE with factor 8 on each side."""
    torch.manual_seed(1)
    moments = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return diffusers.AutoencoderKLQwenImage(**sizes, **moments).eval()


def image(height: int, width: int) -> Any:
    from PIL import Image

    return Image.effect_noise((width, height), 60).convert("RGB")


def make(monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any], **parts: Any) -> tuple[Any, checks.Run]:
    """A pipeline whose images to be edited keep their size; with the options of the one without images."""
    plain, run = tiny_transformers.qwen_image(**config)
    text_encoder = tiny_transformers.pixart_text_encoder()
    parts = {"vae": vae(), "text_encoder": text_encoder, "transformer": plain.transformer, **parts}
    pipe = tiny_transformers.pipeline(name, **parts)
    module = sys.modules[type(pipe).__module__]
    if hasattr(module, "calculate_dimensions"):
        sizes = {"QwenImageEditPlusPipeline": (48, 32), "QwenImageLayeredPipeline": (64, 96)}
        size = sizes.get(name, (64, 96, None))
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: size)
    return pipe, tiny_transformers.runner(pipe, **run.given)  # type: ignore[attr-defined]


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


def test_without_guidance() -> None:
    pipe, run = tiny_transformers.qwen_image(
        true_cfg_scale=1.0, negative_prompt_embeds=None, negative_prompt_embeds_mask=None
    )
    checks.check_all_keys(pipe, run)
    checks.check_steps(pipe, run, layers=2, counts=(4,))


@pytest.mark.parametrize("guided", [False, True])
def test_half_precision(guided: bool) -> None:
    """Rounded timesteps are found on the schedule."""
    pipe, run = tiny_transformers.qwen_image(**({} if guided else {"true_cfg_scale": 1.0}))
    pipe.to(torch.bfloat16)
    given = {name: value.bfloat16() for name, value in run.given.items() if name.endswith("embeds")}  # type: ignore[attr-defined]

    def made(**options: Any) -> torch.Tensor:
        return run(**given, **options)

    checks.check_steps(pipe, made, layers=2, calls=1 + guided, counts=(4, 28))


@pytest.mark.parametrize(
    ("name", "given"),
    [("QwenImageImg2ImgPipeline", STRENGTH), ("QwenImageInpaintPipeline", {**STRENGTH, **MASK})],
)
def test_image_to_image(monkeypatch: pytest.MonkeyPatch, name: str, given: dict[str, Any]) -> None:
    pipe, run = make(monkeypatch, name, {})

    def made(**options: Any) -> torch.Tensor:
        return run(**{**given, **options})

    checks.check_image_to_image(pipe, made, calls=2)


@pytest.mark.parametrize(
    ("name", "config", "given", "references"),
    [
        ("QwenImageEditPipeline", {}, {"image": image(96, 64)}, 24),
        ("QwenImageEditPipeline", {"zero_cond_t": True}, {"image": image(96, 64)}, 24),
        ("QwenImageEditPlusPipeline", {}, {"image": [image(32, 48), image(32, 48)]}, 2 * 6),
        (
            "QwenImageEditInpaintPipeline",
            {},
            {"image": image(96, 64), "mask_image": image(96, 64), "strength": 0.5, "num_inference_steps": 6},
            24,
        ),
    ],
)
def test_references_are_exact_keys(
    monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any], given: dict[str, Any], references: int
) -> None:
    pipe, run = make(monkeypatch, name, {"config": config})

    def made(**options: Any) -> torch.Tensor:
        return run(**{**given, **options})

    checks.check_all_keys(pipe, made)
    checks.check_methods(pipe, made)
    if "strength" not in given:
        checks.check_steps(pipe, made, layers=2, calls=2, counts=(4,))
    elfatt_sd.apply_patch(pipe, FEW)
    made()
    call = pipe.transformer.elfatt_patch.latest
    assert call.given.grid == Grid.image(6, 4)
    assert (call.given.before, call.given.sample.shape[1]) == (tiny_transformers.TEXT, 24 + references)


def test_layers_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers to be made are frames of one grid; the image that is taken apart is seen exactly."""
    config = {"use_layer3d_rope": True, "use_additional_t_cond": True}
    pipe, plain = make(monkeypatch, "QwenImageLayeredPipeline", {"config": config})
    options = {name: value for name, value in plain.given.items() if name not in SIZE}  # type: ignore[attr-defined]
    latents: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        latents.append(given["latents"])
        return {}

    draw = tiny_transformers.runner(
        pipe, **options, prompt="a", image=image(96, 64), layers=2, callback_on_step_end=keep
    )

    def run(**options: Any) -> torch.Tensor:
        draw(output_type="pt", **options)  # it cannot return latents
        return latents[-1]

    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4,))
    checks.check_plan(pipe, 72, 2, **SIZE, frames=3)
    elfatt_sd.apply_patch(pipe, FEW)
    run()
    call = pipe.transformer.elfatt_patch.latest
    assert call.given.grid == Grid(3, 6, 4)
    assert call.given.sample.shape[1] == (3 + 1) * 24


def controlnet(**changes: Any) -> Any:
    config = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16}
    config |= {"num_attention_heads": 2, "joint_attention_dim": tiny_transformers.WIDTH, "axes_dims_rope": (4, 6, 6)}
    return tiny_transformers.transformer("QwenImageControlNetModel", **{**config, **changes})


@pytest.mark.parametrize("several", [False, True])
def test_controlnets(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    net, control = controlnet(), picture(**SIZE)
    net = diffusers.QwenImageMultiControlNetModel([net]) if several else net
    pipe, run = make(monkeypatch, "QwenImageControlNetPipeline", {}, controlnet=net)
    assert list(find_denoisers(pipe)) == ["transformer", "controlnet"]

    def made(**options: Any) -> torch.Tensor:
        scale = {"controlnet_conditioning_scale": [1.0, 0.5]} if several else {}
        return run(**{"control_image": [control, control] if several else control, **scale, **options})

    checks.check_all_keys(pipe, made)
    checks.check_methods(pipe, made)
    with elfatt_sd.patched(pipe, checks.HALF), recorded() as calls:
        made(num_inference_steps=4)
    assert sorted(calls.values()) == [2 * (1 + several), 4, 4]  # one call of the ControlNet for each of its images
    checks.check_plan(pipe, 24, 3, **SIZE)


def test_a_controlnet_for_inpainting() -> None:
    net = controlnet(extra_condition_channels=4)
    given = family_of(net).arguments(net, Grid.image(6, 4), 2, torch.rand)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(net(**given, return_dict=False))

    checks.check_all_keys(net, run)
    checks.check_methods(net, run)
