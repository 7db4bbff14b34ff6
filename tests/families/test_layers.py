"""Which models are known, which layers they have and on which grid, what a call costs, and sizes that can be drawn."""

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
from support.checks import recorded
from torch import nn
from torch.nn import functional

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import FAMILIES, SelfAttention, find_denoisers, find_layers, is_denoiser, select_layers, unwrap
from elfatt_sd.families.base import PlainProjections
from elfatt_sd.families.shapes import SHAPES, TRANSFORMERS, Blueprint, Dimensions, call_arguments, sketch
from elfatt_sd.methods import Grid


@pytest.fixture(scope="module")
def unet() -> Any:
    return tiny.unet()


@torch.no_grad()
def given_to(module: Any, modules: dict[str, nn.Module], *sides: int, channels: int = 4, **more: Any) -> dict[str, Any]:
    """What modules are given first in a call of a UNet."""
    seen: dict[str, Any] = {}
    handles = [
        each.register_forward_pre_hook(lambda _, given, name=name: seen.__setitem__(name, given[0]))
        for name, each in modules.items()
    ]
    module(torch.zeros(1, channels, *sides), 1.0, **more)
    for handle in handles:
        handle.remove()
    return seen


def test_layers_of_a_unet_with_their_grids(unet: Any) -> None:
    layers = find_layers(unet)
    names = {"down_blocks.0": [1], "down_blocks.1": [2], "up_blocks.1": [2, 2], "up_blocks.2": [1, 1], "mid_block": [4]}
    assert {layer.name: layer.downsample for layer in layers} == {
        f"{block}.attentions.{index}.transformer_blocks.0.attn1": factor
        for block, factors in names.items()
        for index, factor in enumerate(factors)
    }
    block, text = unet.down_blocks[0].attentions[0].transformer_blocks[0], torch.zeros(1, 2, tiny.TEXT_WIDTH)
    assert (layers[0].attention, layers[0].norm) == (block.attn1, block.norm1)
    for size in ((16, 16), (17, 9), (5, 30), (1, 7)):
        seen = given_to(unet, {layer.name: layer.attention for layer in layers}, *size, encoder_hidden_states=text)
        assert {layer.name: layer.grid(Grid.image(*size)).tokens for layer in layers} == {
            name: tokens.shape[1] for name, tokens in seen.items()
        }


@pytest.mark.parametrize("linear", [False, True])
def test_which_block_inputs_lie_channels_first(linear: bool) -> None:
    """As a transformer's convolution leaves them to its first block."""
    unet, text = (
        tiny.unet(use_linear_projection=linear, transformer_layers_per_block=2),
        torch.zeros(1, 2, tiny.TEXT_WIDTH),
    )
    layers = find_layers(unet)
    norms: Any = {layer.name: layer.norm for layer in layers}
    seen = given_to(unet, norms, 16, 16, encoder_hidden_states=text)
    first = {name: tokens.stride()[1] == 1 for name, tokens in seen.items()}
    assert first == {layer.name: layer.channels_first for layer in layers}
    assert any(first.values()) is not linear


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # of diffusers 0.32.1's filters
@pytest.mark.parametrize(
    ("down", "up", "more"),
    [
        ("AttnSkipDownBlock2D", "AttnSkipUpBlock2D", {"time_embedding_type": "fourier"}),
        ("AttnDownBlock2D", "AttnUpBlock2D", {"downsample_padding": 0}),
        ("AttnDownBlock2D", "AttnUpBlock2D", {}),
        ("AttnDownBlock2D", "AttnUpBlock2D", {"downsample_type": "resnet", "upsample_type": "resnet"}),
    ],
    ids=["NCSN++", "one-sided padding", "convolution", "resnet"],
)
def test_grids_of_other_unets_are_those_that_arrive(down: str, up: str, more: Any) -> None:
    torch.manual_seed(0)
    plain = ("SkipDownBlock2D", "SkipUpBlock2D") if "Skip" in down else ("DownBlock2D", "UpBlock2D")
    unet = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        attention_head_dim=8,
        down_block_types=(plain[0], down, plain[0]),
        up_block_types=(plain[1], up, plain[1]),
        **more,
    ).eval()
    layers, tried = find_layers(unet), 0
    for size in ((32, 32), (25, 27), (33, 17)):
        try:
            seen = given_to(unet, {layer.name: layer.attention for layer in layers}, *size, channels=3)
        except RuntimeError:  # these blocks do not take sides that are not whole multiples
            continue
        tried += 1
        found = {name: tuple(tokens.shape[-2:]) for name, tokens in seen.items()}
        assert {layer.name: layer.grid(Grid.image(*size))[1:] for layer in layers} == found
    assert tried


class Cropping(nn.Module):
    """A downsampler that drops the last row and column of odd sides."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        rows, columns = (side // 2 * 2 for side in x.shape[-2:])
        return self.inner(x[..., :rows, :columns], *args)  # type: ignore[no-any-return]


def test_a_grid_that_is_not_what_it_was_thought_to_be_is_named() -> None:
    """Of a UNet whose downsampling is not known to round as it does."""
    unet = tiny.unet()
    unet.down_blocks[0].downsamplers[0] = Cropping(unet.down_blocks[0].downsamplers[0])
    elfatt_sd.apply_patch(unet, PatchConfig("all", (Phase(1.0, "sampled", block_size=16),), levels=2))
    said = "3 of 6 patched layers stay exact, .*: it was given 49 tokens in place of 8x8"
    with torch.no_grad(), recorded() as calls, pytest.warns(UserWarning, match=said):
        unet(torch.randn(1, 4, 15, 15), 500, torch.randn(1, 5, tiny.TEXT_WIDTH))
    assert sum(calls.values()) == 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1]),
        ({"levels": 2}, [1, 1, 2]),
        ({"levels": 9}, [1, 1, 2, 4, 8]),
        ({"max_downsample": 1, "levels": 3}, [1, 1]),
        ({"max_downsample": 4}, [1, 1, 2, 4]),
    ],
)
def test_selection(unet: Any, settings: dict[str, Any], expected: list[int]) -> None:
    """Levels count from the finest that has self-attention."""
    attention = find_layers(unet)[0].attention

    def selected(*factors: int, **settings: Any) -> list[int]:
        layers = [SelfAttention(str(place), attention, None, factor) for place, factor in enumerate(factors)]
        chosen = select_layers(layers, PatchConfig("any", **settings), sorted(set(factors)))
        return [layer.downsample for layer in chosen]

    assert selected(1, 1, 2, 4, 8, **settings) == expected
    assert (selected(2, 4), selected(2, 4, max_downsample=1), selected()) == ([2], [], [])


@pytest.mark.parametrize("bias", [False, True])
def test_sampled_keys_are_projected_alone_by_a_fused_weight(bias: bool) -> None:
    torch.manual_seed(0)
    layer: Any = tiny.unet().down_blocks[0].attentions[0].transformer_blocks[0].attn1
    for projection in (layer.to_q, layer.to_k, layer.to_v) if bias else ():
        projection.bias = torch.nn.Parameter(torch.randn(projection.out_features))
    layer.use_bias = bias
    tokens, keys = torch.randn(2, 64, 16), torch.tensor([3, 9, 40])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        wanted = PlainProjections(layer, tokens).project(tokens, keys)
        layer.fuse_projections()
        rows, linear = list[int](), functional.linear
        patch.setattr(functional, "linear", lambda x, *given: rows.append(x.shape[1]) or linear(x, *given))
        torch.testing.assert_close(PlainProjections(layer, tokens, fused=True).project(tokens, keys), wanted)
    assert rows == [64, 3]


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


CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(diffusers.models.transformers, inspect.isclass)
    if issubclass(kind, nn.Module)
}
KNOWN = {f"{name}Transformer2DModel" for name in ("Chroma", "Flux", "Flux2", "PixArt", "QwenImage", "SD3", "ZImage")}
KNOWN |= {f"{name}Transformer3DModel" for name in ("CogVideoX", "HunyuanVideo", "HunyuanVideo15", "LTXVideo", "Wan")}


def test_every_transformer_of_diffusers_is_patched_or_refused() -> None:
    for name, kind in CLASSES.items():
        module: Any = kind.__new__(kind)  # without any parts
        nn.Module.__init__(module)
        assert sum(family.matches(module) for family in FAMILIES) == (name in KNOWN), name
        if name not in KNOWN:
            says = f"^not supported: {name} cannot be patched.*, or FluxTransformer2DModel"
            with pytest.raises(ElfattError, match=says):
                elfatt_sd.apply_patch(SimpleNamespace(transformer=module, components={}))


def by_hand(module: Any, arguments: dict[str, Any]) -> int:
    """Count what linear layers, convolutions and attention do in a call that is run."""
    counts: list[int] = []

    def count(layer: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        if isinstance(layer, Attention):
            tokens = args[0].flatten(2).shape[2] if args[0].ndim == 4 else args[0].shape[1]
            text = kwargs.get("encoder_hidden_states")
            counts.append(2 * len(args[0]) * tokens * (tokens if text is None else text.shape[1]) * layer.inner_dim)
        else:  # a weight is [outputs, inputs], and the kernel's sides
            counts.append(out.numel() * layer.weight[0].numel())

    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | Attention):
            layer.register_forward_hook(count, with_kwargs=True)
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


@pytest.mark.parametrize("name", MODULES)
def test_a_call_is_counted(name: str, folder: Path) -> None:
    module = MODULES[name](folder)
    arguments = call_arguments(module, Grid.image(16, 24), 1, torch.zeros)
    assert Blueprint.of(module).multiply_adds(Grid.image(16, 24)) == by_hand(module, arguments)


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


# Tokens, and billions of parameters, as published.
SIZES = {"sd3.5-medium": (4096, 2.2), "flux": (4096, 11.9), "qwen-image": (6889, 20.4), "wan-1.3b": (32760, 1.4)}
SIZES |= {"wan-14b": (32760, 14.3), "hunyuan-video": (118800, 12.8), "pixart": (4096, 0.61), "chroma": (4096, 8.9)}
SIZES |= {"flux.2": (4096, 32.2), "z-image": (4096, 6.15), "ltx-video": (7392, 1.92), "cogvideox-5b": (17550, 5.57)}
SIZES |= {"hunyuan-video-1.5": (111600, 8.3), "sd15": (4096, 0.86), "sdxl": (16384, 2.57)}


@pytest.mark.parametrize("name", [*SHAPES, *TRANSFORMERS])
def test_sketches_are_the_published_models_without_weights(name: str) -> None:
    if name in TRANSFORMERS and not hasattr(diffusers, TRANSFORMERS[name].kind):
        with pytest.raises(ElfattError, match=f"has no {TRANSFORMERS[name].kind}; pip install"):
            sketch(name)
        return
    drawn = sketch(name)
    module = drawn.transformer or drawn.unet
    assert module is not None
    parameters = list(module.parameters())
    assert {parameter.device.type for parameter in parameters} == {"meta"}
    tokens, billions = SIZES[name]
    assert sum(parameter.numel() for parameter in parameters) / 1e9 == pytest.approx(billions, rel=0.03)
    if drawn.transformer is not None:
        plan = elfatt_sd.plan(drawn, "elfatt-fast")
        assert {layer.tokens for layer in plan.layers if layer.patched} == {tokens}


WAN_VAE = {"base_dim": 96, "dim_mult": [1, 2, 4, 4], "z_dim": 16}
VAE16 = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 16}


def test_sizes_of_a_unet() -> None:
    """What the levels cannot halve is refused; small images are pointed out."""
    sd15 = Dimensions.of(SHAPES["sd15"], {"block_out_channels": [128, 256, 512, 512]})
    assert sd15 == Dimensions((512, 512), 8, least=64, multiple=8)
    assert Dimensions.of({"sample_size": (4, 8), "block_out_channels": [8]}, None).own == (32, 64)
    assert sd15.size(None, 768) == (512, 768)
    sd15.check(64, None)
    with pytest.raises(ElfattError, match="width=56 is not accepted; this model needs at least 64, and is"):
        sd15.check(512, 56)
    assert "made for images of 512x512; expect poor ones at 64x512" in sd15.small(64, None)
    assert sd15.small(256, 1024) == sd15.small(None, None) == ""


@pytest.mark.parametrize(
    ("config", "vae", "multiple", "factor"),
    [
        ({"patch_size": 2, "in_channels": 4, "sample_size": 128}, {**VAE16, "latent_channels": 4}, 16, 8),  # PixArt
        ({"patch_size": 2, "in_channels": 16, "sample_size": 128}, VAE16, 16, 8),  # Stable Diffusion 3
        ({"patch_size": 1, "in_channels": 64}, VAE16, 16, 8),  # Flux: the pipeline cuts the patches
        ({"patch_size": 2, "in_channels": 64}, WAN_VAE, 16, 8),  # Qwen
        ({"patch_size": [1, 2, 2], "in_channels": 16}, WAN_VAE, 16, 8),
        ({"patch_size": 1, "in_channels": 8}, {"decoder_block_out_channels": [128] * 6, "latent_channels": 8}, 32, 32),
    ],
)
def test_sizes_of_transformers(config: dict[str, Any], vae: dict[str, Any], multiple: int, factor: int) -> None:
    found = Dimensions.of(config, vae, own=(1024, 1024))
    assert (found.factor, found.multiple, found.least) == (factor, multiple, multiple)
    with pytest.raises(ElfattError, match=f"width=1032 is not accepted; this model needs a multiple of {multiple}"):
        found.check(1024, 1032)
    assert Dimensions.of({**config, "sample_height": 60, "sample_width": 90}, VAE16).own == (480, 720)
    if "sample_size" not in config:
        with pytest.raises(LookupError, match="sample_size"):
            Dimensions.of(config, VAE16)
