"""Which models are known, which layers they have and on which grid, what a call costs, and sizes that can be drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import diffusers.models.transformers
import pytest
import torch
from support import tiny_pipelines as tiny
from torch import nn

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import FAMILIES, find_denoisers, find_layers, is_denoiser, unwrap
from elfatt_sd.families.shapes import SHAPES, Blueprint, Dimensions, Shape, empty_model
from elfatt_sd.methods import Grid


@pytest.fixture(scope="module")
def unet() -> Any:
    return tiny.unet()


def other_unet(kind: str, **more: Any) -> Any:
    for way in ("Down", "Up"):
        blocks = (f"{kind.removeprefix('Attn')}{way}Block2D", f"{kind}{way}Block2D")
        more[f"{way.lower()}_block_types"] = (*blocks, blocks[0])
    sizes = {"sample_size": 32, "block_out_channels": (32, 64, 64), "layers_per_block": 1, "attention_head_dim": 8}
    return diffusers.UNet2DModel(**sizes, **more).eval()  # type: ignore[attr-defined]


UNETS: dict[str, Callable[[], Any]] = {
    "latents": tiny.unet,
    "NCSN++": lambda: other_unet("AttnSkip", time_embedding_type="fourier"),
    "one-sided padding": lambda: other_unet("Attn", downsample_padding=0),
    "convolution": lambda: other_unet("Attn"),
    "resnet": lambda: other_unet("Attn", downsample_type="resnet", upsample_type="resnet"),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # of diffusers 0.32.1's filters
@pytest.mark.parametrize("name", UNETS)
def test_grids_of_unets_are_those_that_arrive(name: str) -> None:
    unet, tried = UNETS[name](), 0
    layers, text = find_layers(unet), (torch.zeros(1, 2, tiny.TEXT_WIDTH),) * (name == "latents")
    assert layers and all(layer.norm is not None for layer in layers if text)
    for size in ((32, 32), (25, 27), (33, 17), (5, 30), (1, 7)):
        seen: dict[Any, tuple[int, ...]] = {}
        keep = lambda module, given, seen=seen: seen.__setitem__(module, given[0].shape)  # noqa: E731
        handles = [layer.attention.register_forward_pre_hook(keep) for layer in layers]
        try:
            unet(torch.zeros(1, unet.config.in_channels, *size), 1.0, *text)
        except RuntimeError:  # some blocks do not take sides that are not whole multiples
            continue
        finally:
            _ = [handle.remove() for handle in handles]
        tried += 1
        for layer in layers:  # [batch, tokens, channels], or [batch, channels, rows, columns]
            grid, shape = layer.grid(Grid.image(*size)), seen[layer.attention]
            assert shape[1] == grid.tokens if text else tuple(shape[2:]) == grid[1:], (layer.name, size)
    assert tried


def test_selection(folder: Path) -> None:
    """Levels count from the finest that has self-attention."""
    cases: list[tuple[dict[str, Any], set[int]]] = [({}, {1}), ({"levels": 2}, {1, 2}), ({"levels": 9}, {1, 2, 4})]
    cases += [({"max_downsample": 1, "levels": 3}, {1}), ({"max_downsample": 4}, {1, 2, 4})]
    coarse = tiny.sdxl(folder).unet
    for unet, settings, chosen in (*((tiny.unet(), *case) for case in cases), (coarse, {}, {2})):
        patched = {layer.name for layer in elfatt_sd.plan(unet, "tome", **settings).layers if layer.patched}
        assert patched == {layer.name for layer in find_layers(unet) if layer.downsample in chosen}


def test_what_is_a_denoiser(pipe: Any, unet: Any) -> None:
    """In wrappers too, and ControlNets beside it by their names; of anything else, it is said what is missing."""
    compiled = torch.compile(unet, backend="eager")
    assert unwrap(compiled) is unwrap(unet) is unet
    assert is_denoiser(compiled) and find_layers(compiled) == find_layers(unet)
    for other in (pipe.vae, pipe.vae.encoder.mid_block, pipe.text_encoder, None, 3, "sd", nn.Linear(2, 2), object()):
        assert not is_denoiser(other)
        with pytest.raises(ElfattError, match=f"{type(other).__name__} (has no UNet|cannot be patched)"):
            find_denoisers(other)
    one, two = tiny.controlnet(pipe.unet), tiny.controlnet(pipe.unet)
    for given, found in (
        *((None, {}), (one, {"controlnet": one})),
        ([one, one], {"controlnet": one}),  # one net for two pictures
        ([one, two], {"controlnet.0": one, "controlnet.1": two}),
    ):
        assert find_denoisers(SimpleNamespace(unet=pipe.unet, controlnet=given)) == {"unet": pipe.unet, **found}


KNOWN = {f"{name}Transformer2DModel" for name in ("Chroma", "Flux", "Flux2", "PixArt", "QwenImage", "SD3", "ZImage")}
KNOWN |= {f"{name}Transformer3DModel" for name in ("CogVideoX", "HunyuanVideo", "HunyuanVideo15", "LTXVideo", "Wan")}


def test_every_transformer_of_diffusers_is_patched_or_refused() -> None:
    for name, kind in inspect.getmembers(diffusers.models.transformers, inspect.isclass):
        if not issubclass(kind, nn.Module):
            continue
        module: Any = kind.__new__(kind)  # without any parts
        nn.Module.__init__(module)
        assert sum(family.matches(module) for family in FAMILIES) == (name in KNOWN), name
        if name not in KNOWN:
            says = f"^not supported: {name} cannot be patched.*, or FluxTransformer2DModel"
            with pytest.raises(ElfattError, match=says):
                elfatt_sd.apply_patch(SimpleNamespace(transformer=module, components={}))


SIZE = {"sample_size": 16, "block_out_channels": (16, 32), "norm_num_groups": 4, "attention_head_dim": 8}
PROJECTED = {"projection_class_embeddings_input_dim": 24}
BLOCKS = {f"{way.lower()}_block_types": (f"{way}Block2D", f"Attn{way}Block2D") for way in ("Down", "Up")}
# Multiply-adds were counted once by hand, of what linear layers, convolutions and attention were given.
MODULES: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "sd15": (56619520, lambda _: tiny.unet()),
    "inpainting": (56896000, lambda _: tiny.unet(in_channels=9)),
    "upscaler": (56785408, lambda _: tiny.unet(in_channels=7, num_class_embeds=10)),
    "projected classes": (56625152, lambda _: tiny.unet(class_embed_type="projection", **PROJECTED)),
    "sdxl": (40668160, lambda folder: tiny.sdxl_parts(folder)["unet"]),
    "refiner": (38932992, lambda folder: tiny.sdxl_parts(folder, refiner=True)["unet"]),
    "controlnet": (19124736, lambda _: tiny.controlnet(tiny.unet())),
    "unconditional": (50221056, lambda _: diffusers.UNet2DModel(**SIZE, **BLOCKS).eval()),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_call_is_counted(name: str, folder: Path) -> None:
    count, make = MODULES[name]
    assert Blueprint.of(make(folder)).multiply_adds(Grid.image(16, 24)) == count


def test_what_is_counted_is_the_untouched_module() -> None:
    """Whatever is around or in it, without its weights; what cannot be called is not counted."""
    plain, grid = tiny.unet(), Grid.image(16, 16)
    count = Blueprint.of(plain).multiply_adds(grid)
    sliced = tiny.unet()
    sliced.set_attention_slice(1)
    for other in (nn.DataParallel(tiny.unet()), sliced, plain.to("meta")):
        assert Blueprint.of(other).multiply_adds(grid) == count
    text = tiny.unet(encoder_hid_dim=24, encoder_hid_dim_type="image_proj", addition_embed_type="image")
    assert Blueprint.of(nn.Linear(2, 2)).multiply_adds(grid) is Blueprint.of(text).multiply_adds(grid) is None


def test_sizes() -> None:
    """What the levels cannot halve is refused; small images are pointed out."""
    sd15 = Dimensions.of(empty_model(SHAPES["sd15"], few=True), 8)
    assert sd15 == Dimensions((512, 512), 8, least=64, multiple=8)
    assert Dimensions.of(tiny.unet(sample_size=(4, 8)), 8).own == (32, 64)
    assert sd15.size(None, 768) == (512, 768)
    sd15.check(64, None)
    with pytest.raises(ElfattError, match="width=56 is not accepted; this model needs at least 64, and is"):
        sd15.check(512, 56)
    assert "made for images of 512x512; expect poor ones at 512x64" in sd15.small(64, None)
    assert sd15.small(256, 1024) == sd15.small(None, None) == ""
    if hasattr(diffusers, SHAPES["wan-1.3b"].kind):
        clips = Dimensions.of(empty_model(SHAPES["wan-1.3b"], few=True), 8)
        assert clips == Dimensions((480, 832), 8, least=16, multiple=16)
        with pytest.raises(ElfattError, match="width=1032 is not accepted; this model needs a multiple of 16"):
            clips.check(1024, 1032)
    for shape in (shape for shape in SHAPES.values() if hasattr(diffusers, shape.kind)):
        dimensions = Dimensions.of(empty_model(shape, few=True), shape.scale)
        dimensions.check(256, 256)
        with pytest.raises(ElfattError, match="width=4 is not accepted; this model needs at least"):
            dimensions.check(256, 4)
    with pytest.raises(ElfattError, match="has no NewestTransformer; pip install -U diffusers"):
        empty_model(Shape("NewestTransformer", {}, {}))
