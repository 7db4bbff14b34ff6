"""Which classes are known, what a call costs without weights, and sizes that a model can draw."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import diffusers.models.transformers
import pytest
import torch
from diffusers.models.attention_processor import Attention
from support import tiny_pipelines as tiny
from torch import nn

import elfatt_sd
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import FAMILIES
from elfatt_sd.families.shapes import TRANSFORMERS, Blueprint, call_arguments, sketch
from elfatt_sd.families.sizes import SHAPES, TRANSFORMER_NAMES, UNET_NAMES, Dimensions
from elfatt_sd.methods import Grid


def by_hand(module: Any, arguments: dict[str, Any]) -> int:
    """Count what linear layers, convolutions and attention do in a call that is run."""
    counts: list[int] = []

    def linear(layer: nn.Linear, _: Any, out: torch.Tensor) -> None:
        counts.append(out.numel() * layer.in_features)

    def convolution(layer: nn.Conv2d, _: Any, out: torch.Tensor) -> None:
        counts.append(out.numel() * layer.weight[0].numel())

    def attention(layer: Attention, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        tokens = args[0].flatten(2).shape[2] if args[0].ndim == 4 else args[0].shape[1]
        text = kwargs.get("encoder_hidden_states")
        counts.append(2 * len(args[0]) * tokens * (tokens if text is None else text.shape[1]) * layer.inner_dim)

    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(linear)
        elif isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(convolution)
        elif isinstance(layer, Attention):
            layer.register_forward_hook(attention, with_kwargs=True)
    with torch.no_grad():
        module(**arguments)
    return sum(counts)


def unet2d() -> Any:
    blocks: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return diffusers.UNet2DModel(  # type: ignore[attr-defined]
        sample_size=16, block_out_channels=(16, 32), norm_num_groups=4, attention_head_dim=8, **blocks
    ).eval()


MODULES = {
    "sd15": lambda _: tiny.unet(),
    "inpainting": lambda _: tiny.unet(in_channels=9),
    "upscaler": lambda _: tiny.unet(in_channels=7, num_class_embeds=10),
    "projected classes": lambda _: tiny.unet(class_embed_type="projection", projection_class_embeddings_input_dim=24),
    "sdxl": lambda folder: tiny.sdxl_parts(folder)["unet"],
    "refiner": lambda folder: tiny.sdxl_parts(folder, refiner=True)["unet"],
    "controlnet": lambda _: tiny.controlnet(tiny.unet()),
    "unconditional": lambda _: unet2d(),
}


@pytest.mark.parametrize("name", list(MODULES))
def test_a_call_is_counted(name: str, folder: Path) -> None:
    module = MODULES[name](folder)
    arguments = call_arguments(module, Grid.image(16, 24), 1, torch.zeros)
    assert Blueprint.of(module).multiply_adds(Grid.image(16, 24)) == by_hand(module, arguments)


def test_a_patch_an_adapter_and_a_wrapper_change_nothing() -> None:
    """What is counted is the untouched module; nothing is taken from the weights."""
    plain = tiny.unet()
    count = Blueprint.of(plain).multiply_adds(Grid.image(16, 16))
    assert Blueprint.of(nn.DataParallel(tiny.unet())).multiply_adds(Grid.image(16, 16)) == count
    plain.set_attention_slice(1)
    assert Blueprint.of(plain).multiply_adds(Grid.image(16, 16)) == count
    assert Blueprint.of(plain.to("meta")).multiply_adds(Grid.image(16, 16)) == count


def test_what_cannot_be_called_is_not_counted() -> None:
    assert Blueprint.of(nn.Linear(2, 2)).multiply_adds(Grid.image(8, 8)) is None
    text = tiny.unet(encoder_hid_dim=24, encoder_hid_dim_type="image_proj", addition_embed_type="image")
    assert Blueprint.of(text).multiply_adds(Grid.image(8, 8)) is None


def test_sketches_of_unets_hold_no_weights() -> None:
    """Their names are known without PyTorch."""
    assert (tuple(SHAPES), tuple(TRANSFORMERS)) == (UNET_NAMES, TRANSFORMER_NAMES)
    for name in SHAPES:
        drawn = sketch(name).unet
        assert drawn is not None and {parameter.device.type for parameter in drawn.parameters()} == {"meta"}


# Tokens, and billions of parameters, as published.
SIZES = {"sd3.5-medium": (4096, 2.2), "flux": (4096, 11.9), "qwen-image": (6889, 20.4), "wan-1.3b": (32760, 1.4)}
SIZES |= {"wan-14b": (32760, 14.3), "hunyuan-video": (118800, 12.8), "pixart": (4096, 0.61), "chroma": (4096, 8.9)}
SIZES |= {"flux.2": (4096, 32.2), "z-image": (4096, 6.15), "ltx-video": (7392, 1.92), "cogvideox-5b": (17550, 5.57)}
SIZES |= {"hunyuan-video-1.5": (111600, 8.3)}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_sketches_of_transformers_are_the_published_models(name: str) -> None:
    if not hasattr(diffusers, TRANSFORMERS[name].kind):
        with pytest.raises(ElfattError, match=f"has no {TRANSFORMERS[name].kind}; pip install"):
            sketch(name)
        return
    drawn = sketch(name)
    assert drawn.transformer is not None
    parameters = list(drawn.transformer.parameters())
    assert {parameter.device.type for parameter in parameters} == {"meta"}
    tokens, billions = SIZES[name]
    assert sum(parameter.numel() for parameter in parameters) / 1e9 == pytest.approx(billions, rel=0.03)
    plan = elfatt_sd.plan(drawn, "elfatt-fast")
    assert {layer.tokens for layer in plan.layers if layer.patched} == {tokens}


WAN_VAE = {"base_dim": 96, "dim_mult": [1, 2, 4, 4], "z_dim": 16}


VAE16 = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 16}


SD15 = Dimensions.of(
    {"sample_size": 64, "block_out_channels": [320, 640, 1280, 1280]}, {"block_out_channels": [128, 256, 512, 512]}
)


def test_what_a_configuration_says() -> None:
    assert Dimensions((512, 512), 8, least=64, multiple=8) == SD15
    assert Dimensions.of({"sample_size": (4, 8), "block_out_channels": [8]}, None).own == (32, 64)
    assert SD15.size(None, 768) == (512, 768)
    config = {"num_attention_heads": 48, "attention_head_dim": 64, "patch_size": 2, "in_channels": 16}
    assert Dimensions.of({**config, "sample_height": 60, "sample_width": 90}, VAE16).own == (480, 720)
    with pytest.raises(LookupError, match="sample_size"):
        Dimensions.of(config, VAE16)


def test_small_sides() -> None:
    """What the levels cannot halve is refused; small images are pointed out."""
    SD15.check(64, None)
    with pytest.raises(ElfattError, match="width=56 is not accepted; this model needs at least 64, and is"):
        SD15.check(512, 56)
    assert "made for images of 512x512; expect poor ones at 64x512" in SD15.small(64, None)
    assert SD15.small(256, 1024) == SD15.small(None, None) == ""


@pytest.mark.parametrize(
    ("config", "vae", "multiple", "factor"),
    [
        ({"patch_size": 2, "in_channels": 4, "sample_size": 128}, {**VAE16, "latent_channels": 4}, 16, 8),  # PixArt
        ({"patch_size": 2, "in_channels": 16, "sample_size": 128}, VAE16, 16, 8),  # Stable Diffusion 3
        ({"patch_size": 1, "in_channels": 64}, VAE16, 16, 8),  # Flux: the pipeline cuts the patches
        ({"patch_size": 2, "in_channels": 64}, WAN_VAE, 16, 8),  # Qwen
        ({"patch_size": [1, 2, 2], "in_channels": 16}, WAN_VAE, 16, 8),
        (
            {"patch_size": 1, "in_channels": 32},
            {"decoder_block_out_channels": [128] * 6, "latent_channels": 32},
            32,
            32,
        ),
    ],
)
def test_sizes_of_transformers(config: dict[str, Any], vae: dict[str, Any], multiple: int, factor: int) -> None:
    found = Dimensions.of({"num_attention_heads": 24, "attention_head_dim": 128, **config}, vae, own=(1024, 1024))
    assert (found.factor, found.multiple, found.least) == (factor, multiple, multiple)
    with pytest.raises(ElfattError, match=f"width=1032 is not accepted; this model needs a multiple of {multiple}"):
        found.check(1024, 1032)


CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(diffusers.models.transformers, inspect.isclass)
    if issubclass(kind, nn.Module)
}


FLAT = ("Chroma", "Flux", "Flux2", "PixArt", "QwenImage", "SD3", "ZImage")


DEEP = ("CogVideoX", "HunyuanVideo", "HunyuanVideo15", "LTXVideo", "Wan")


KNOWN = {f"{name}Transformer2DModel" for name in FLAT} | {f"{name}Transformer3DModel" for name in DEEP}


@pytest.mark.parametrize("name", CLASSES)
def test_every_transformer_of_diffusers_is_patched_or_refused(name: str) -> None:
    module: Any = CLASSES[name].__new__(CLASSES[name])  # without any parts
    nn.Module.__init__(module)
    families = [family for family in FAMILIES if family.matches(module)]
    assert len(families) == (name in KNOWN)
    if not families:
        with pytest.raises(ElfattError, match=f"^not supported: {name} cannot be patched.*, or FluxTransformer2DModel"):
            elfatt_sd.apply_patch(SimpleNamespace(transformer=module, components={}))
