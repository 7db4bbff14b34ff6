"""Transformers in their pipelines for other tasks, with ControlNets and reference images, through their own calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from support import checks, tiny_transformers
from support.checks import recorded
from support.transformer_rows import LARGE, ROWS, SIZE, TEXT, image, qwen, qwen_controlnet, sd3_controlnet

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import family_of, find_denoisers, find_layers
from elfatt_sd.methods import Grid


@pytest.fixture(autouse=True)
def sizes_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images to be edited keep their size."""
    own = {"edit_plus": (48, 32), "layered": (64, 96)}
    for name in ("edit", "edit_plus", "edit_inpaint", "layered"):
        try:
            module = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}")
        except ImportError:  # younger than the oldest diffusers
            continue
        size = own.get(name, (64, 96, None))
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, size=size: size)


def made(name: str, folder: Path) -> tuple[Any, checks.Run]:
    row = ROWS[name]
    if not hasattr(diffusers, row.kind):
        pytest.skip(f"this version of diffusers has no {row.kind}")
    return row.make(folder)


@pytest.mark.parametrize("name", ROWS)
def test_pipelines(folder: Path, name: str) -> None:
    """All keys are the original, each method acts and is taken back, and phases follow the true step."""
    row = ROWS[name]
    pipe, run = made(name, folder)
    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    config = PatchConfig("first", (Phase(0.75 if row.begins else 0.5, "cell_spread", block_size=4),))
    with elfatt_sd.patched(pipe, config):
        for _ in range(2):
            with recorded() as seen:
                run(num_inference_steps=8 if row.begins else 4)
            assert sorted(seen.values()) == sorted(row.calls)
    if row.plan is not None:
        tokens = 96 if row.plan is SIZE else 24
        checks.check_plan(pipe, tokens, len(row.calls), counted=row.counted, **row.plan)


def flux_encoder() -> Any:
    """Of XLabs: it is given pixels, 16 to a token on each side."""
    return tiny_transformers.controlnet(conditioning_embedding_channels=4, patch_size=2)


def sd3_without_text() -> Any:
    """Of 3.5 large: it is given tokens of the transformer's embedding, and sees no text."""
    return sd3_controlnet(joint_attention_dim=None, use_pos_embed=False)


BARE: dict[str, tuple[Callable[[], Any], str, str, tuple[int, ...]]] = {
    "Flux": (flux_encoder, "FluxControlNetModel", "controlnet_cond", (2, 3, 96, 64)),
    "Qwen-Image": (
        lambda: qwen_controlnet(extra_condition_channels=4),
        "QwenImageControlNetModel",
        "controlnet_cond",
        (2, 24, 20),
    ),
    "Stable Diffusion 3.5": (sd3_without_text, "SD3ControlNetModel", "hidden_states", (2, 24, 16)),
}


@pytest.mark.parametrize("name", BARE)
def test_controlnets_without_a_pipeline(name: str) -> None:
    make, kind, argument, shape = BARE[name]
    if not hasattr(diffusers, kind):
        pytest.skip(f"this version of diffusers has no {kind}")
    net = make()
    given = family_of(net).arguments(net, Grid.image(6, 4), 2, torch.rand)
    assert given[argument].shape == shape
    assert all(layer.text == 0 for layer in find_layers(net)) == (name == "Stable Diffusion 3.5")

    def run() -> torch.Tensor:
        with torch.no_grad():
            samples = net(**given, return_dict=False)
        samples = [each for sample in samples for each in (sample if isinstance(sample, list | tuple) else [sample])]
        return torch.cat([each for each in samples if each is not None])

    checks.check_all_keys(net, run)
    checks.check_methods(net, run)


def given_in(pipe: Any, run: checks.Run) -> list[Any]:
    """What the transformer's calls of a run were given."""
    found, family = [], family_of(pipe.transformer)
    with pipe.transformer.register_forward_pre_hook(
        lambda module, args, given: found.append(family.call(module, args, given)), with_kwargs=True
    ):
        run()
    return found


REFERENCES = {  # tokens of text before the image's, its grid, and tokens in all
    "FluxKontextPipeline": (16, Grid.image(8, 12), 96 + 96),
    "Flux.2, references": (12, Grid.image(8, 12), 96 + 16 * 16 + 16 * 20),
    "Qwen-Image, edit": (TEXT, Grid.image(6, 4), 24 + 24),
    "Qwen-Image, edit of two": (TEXT, Grid.image(6, 4), 24 + 2 * 6),
    "Qwen-Image, edit a part": (TEXT, Grid.image(6, 4), 24 + 24),
    "LTX, first and last frame": (64, Grid(3, 8, 8), 4 * 64),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_no_part_of_the_grid(folder: Path, name: str) -> None:
    before, grid, tokens = REFERENCES[name]
    for given in given_in(*made(name, folder)):
        assert (given.before, given.grid, given.sample.shape[1]) == (before, grid, tokens)


@pytest.mark.skipif(not hasattr(diffusers, "QwenImageLayeredPipeline"), reason="this diffusers has no layered one")
def test_layers_of_an_image(folder: Path) -> None:
    """All layers to be made are frames of one grid; the image that is taken apart is seen exactly."""
    latents: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        latents.append(given["latents"])
        return {}

    config = {"use_layer3d_rope": True, "use_additional_t_cond": True}
    pipe, plain = qwen("QwenImageLayeredPipeline", {}, config)(folder)
    options = {name: value for name, value in plain.given.items() if name not in LARGE}  # type: ignore[attr-defined]
    own = {"prompt": "a", "image": image(96, 64), "layers": 2, "callback_on_step_end": keep}
    draw = tiny_transformers.runner(pipe, **options, **own)

    def run(**options: Any) -> torch.Tensor:
        draw(output_type="pt", **options)  # it cannot return latents
        return latents[-1]

    checks.check_all_keys(pipe, run)
    checks.check_methods(pipe, run)
    checks.check_steps(pipe, run, layers=2, calls=2, counts=(4,))
    checks.check_plan(pipe, 72, 2, **LARGE, frames=3)
    given = given_in(pipe, run)[0]
    assert (given.grid, given.sample.shape[1]) == (Grid(3, 6, 4), (3 + 1) * 24)


@pytest.mark.parametrize("name", ["Qwen-Image, ControlNet", "SD 3, ControlNet {}", "Z-Image, ControlNet None"])
def test_a_controlnet_is_found_beside_its_transformer(folder: Path, name: str) -> None:
    assert list(find_denoisers(made(name, folder)[0])) == ["transformer", "controlnet"]
