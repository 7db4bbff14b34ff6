"""What each family tells of a call: the unit of its timestep, the frames that are rows, and the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines, tiny_transformers

import elfatt_sd
from elfatt_sd import ElfattError, PatchConfig, Phase
from elfatt_sd.families import FAMILIES, Given, family_of
from elfatt_sd.families.timesteps import FRACTION, RISING
from elfatt_sd.methods import Grid
from elfatt_sd.runtime.denoiser import Patch

ROWS = 3
CONTROL: dict[str, Any] = {"joint_attention_dim": tiny_transformers.WIDTH, "num_layers": 1, "attention_head_dim": 16}
CONTROL |= {"num_attention_heads": 2}


def z_image_controlnet() -> Any:
    """One that has got its transformer's embeddings."""
    config = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 4}
    net = tiny_transformers.transformer(
        "ZImageControlNetModel", **config, dim=32, n_refiner_layers=1, n_heads=2, n_kv_heads=2
    )
    return diffusers.ZImageControlNetModel.from_transformer(net, tiny_transformers.z_image()[0].transformer)


def sd3_controlnet() -> Any:
    config = {"sample_size": 32, "patch_size": 2, "in_channels": 4, "caption_projection_dim": 32}
    config |= {"pooled_projection_dim": 8, "pos_embed_max_size": 16, "extra_conditioning_channels": 0}
    return tiny_transformers.transformer("SD3ControlNetModel", **{**CONTROL, **config})


def qwen_controlnet() -> Any:
    config = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 6, 6)}
    return tiny_transformers.transformer("QwenImageControlNetModel", **{**CONTROL, **config})


MODELS: dict[str, tuple[Callable[[], Any], int | None, int]] = {  # a model, its unit, and tokens of text before its own
    "UNet": (tiny_pipelines.unet, None, 0),
    "PixArt": (tiny_transformers.pixart_transformer, None, 0),
    "StableDiffusion3": (lambda: tiny_transformers.sd3()[0].transformer, None, 0),
    "SD3ControlNet": (sd3_controlnet, None, 0),
    "Flux": (tiny_transformers.flux_transformer, FRACTION, 512),
    "FluxControlNet": (tiny_transformers.controlnet, FRACTION, 512),
    "Chroma": (tiny_transformers.chroma_transformer, FRACTION, 512),
    "Flux2": (lambda: tiny_transformers.flux2().transformer, FRACTION, 512),
    "QwenImage": (lambda: tiny_transformers.qwen_image()[0].transformer, FRACTION, 256),
    "QwenImageControlNet": (qwen_controlnet, FRACTION, 256),
    "ZImage": (lambda: tiny_transformers.z_image()[0].transformer, RISING, 0),
    "ZImageControlNet": (z_image_controlnet, RISING, 0),
    "Wan": (lambda: tiny_transformers.wan()[0].transformer, None, 0),
    "LTXVideo": (lambda: tiny_transformers.ltx_video()[0].transformer, None, 0),
    "HunyuanVideo": (lambda: tiny_transformers.hunyuan_video()[0].transformer, None, 0),
    "HunyuanVideo15": (lambda: tiny_transformers.hunyuan_video_15()[0].transformer, None, 0),
    "CogVideoX": (lambda: tiny_transformers.cogvideox()[0].transformer, None, 7),
}


def test_every_family_is_here() -> None:
    assert list(MODELS) == [type(family).__name__ for family in FAMILIES]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    make, *told = MODELS[request.param]
    try:
        return make(), told
    except (AttributeError, ImportError):
        pytest.skip(f"this version of diffusers has no model of {request.param}")


def arguments(model: Any, rows: int = ROWS) -> tuple[Grid, dict[str, Any]]:
    family = family_of(model)
    grid = family.grid(model, Grid(3, 12, 8) if family.latent(model).frames > 1 else Grid.image(12, 8))
    return grid, family.arguments(model, grid, rows, torch.rand)


def test_unit_frames_and_rows(model: Any) -> None:
    module, (unit, before) = model
    grid, named = arguments(module)
    found = family_of(module).call(module, (), named)
    assert (found.unit, found.before, found.frames, found.rows, found.grid) == (unit, before, 1, ROWS, grid)
    assert not (found.partial or found.compiled or found.differentiated)


def test_frames_of_a_clip_are_rows() -> None:
    moved = diffusers.UNetMotionModel.from_unet2d(tiny_pipelines.unet(), tiny_pipelines.motion_adapter())
    found = family_of(moved).call(moved, (torch.rand(2, 4, 5, 8, 6), 999), {})
    assert (found.unit, found.frames, found.rows, found.grid) == (None, 5, 10, Grid.image(8, 6))


def test_what_is_told_goes_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Given(torch.rand(1, 4), 0, Grid.image(2, 2), 7, FRACTION)


@torch.no_grad()
def test_differences_are_counted_and_bare_models_approximated(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `residual_limit` that nothing fits in is refused, and a call alone is in the phase of its step."""
    module, _ = model
    _, named = arguments(module, 1)
    later = Phase(1.0, "cell_spread", cell=4, block_size=4, residual_steps=2)
    elfatt_sd.apply_patch(module, PatchConfig("limited", (later,), residual_limit=1e-9))
    with pytest.raises(ElfattError, match="more than the"):
        module(**named)
    elfatt_sd.apply_patch(module, PatchConfig("late", (Phase(0.7), Phase(0.73, "cell_spread", cell=4, block_size=4))))
    phases: list[str] = []
    begin = Patch.begin

    def record(self: Patch, *given: Any) -> None:
        begin(self, *given)
        assert self.latest is not None
        phases.append(next(iter(self.latest.phases.values())).attention.name)

    monkeypatch.setattr(Patch, "begin", record)
    module(**named)
    assert phases == ["cell_spread"], "step 720 of 1000"
