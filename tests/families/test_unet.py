"""Which layers there are, on which grid they work, and which of them a configuration takes."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from support import tiny_pipelines as tiny
from support.checks import recorded
from torch import nn

import elfatt_sd
from elfatt_sd.config import PatchConfig, Phase
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import SelfAttention, find_denoisers, find_layers, is_denoiser, select_layers, unwrap
from elfatt_sd.methods import Grid


@pytest.fixture(scope="module")
def unet() -> Any:
    return tiny.unet()


def test_layers_of_a_unet_with_their_grids(unet: Any) -> None:
    found = {layer.name: layer.downsample for layer in find_layers(unet)}
    attention = "attentions.{}.transformer_blocks.0.attn1"
    assert found == {
        "down_blocks.0." + attention.format(0): 1,
        "down_blocks.1." + attention.format(0): 2,
        "up_blocks.1." + attention.format(0): 2,
        "up_blocks.1." + attention.format(1): 2,
        "up_blocks.2." + attention.format(0): 1,
        "up_blocks.2." + attention.format(1): 1,
        "mid_block." + attention.format(0): 4,
    }


def test_the_norm_is_the_one_whose_input_is_the_blocks_input(unet: Any) -> None:
    layer = find_layers(unet)[0]
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    assert layer.attention is block.attn1
    assert layer.norm is block.norm1


@pytest.mark.parametrize("linear", [False, True])
def test_which_block_inputs_lie_channels_first(linear: bool) -> None:
    """As a transformer's convolution leaves them to its first block."""
    unet, seen = tiny.unet(use_linear_projection=linear, transformer_layers_per_block=2), {}
    layers = find_layers(unet)
    for layer in layers:
        layer.norm.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda module, inputs, name=layer.name: seen.__setitem__(name, inputs[0].stride()[1] == 1)
        )
    with torch.no_grad():
        unet(torch.zeros(1, 4, 16, 16), 0, torch.zeros(1, 2, tiny.TEXT_WIDTH))
    assert seen == {layer.name: layer.channels_first for layer in layers}
    assert any(seen.values()) is not linear


@pytest.mark.parametrize("size", [(16, 16), (17, 9), (5, 30), (1, 7)])
def test_grids_are_those_of_the_tokens(unet: Any, size: tuple[int, int]) -> None:
    seen = {}
    layers = find_layers(unet)
    handles = [
        layer.attention.register_forward_pre_hook(
            lambda module, inputs, name=layer.name: seen.__setitem__(name, inputs[0].shape[1])
        )
        for layer in layers
    ]
    with torch.no_grad():
        unet(torch.zeros(1, 4, *size), 0, torch.zeros(1, 2, tiny.TEXT_WIDTH))
    for handle in handles:
        handle.remove()
    for layer in layers:
        assert layer.grid(Grid.image(*size)).tokens == seen[layer.name], layer.name


def test_controlnets_are_found_by_name(pipe: Any) -> None:
    class WithNets:
        unet = pipe.unet
        controlnet: Any = None

    one, two = tiny.controlnet(pipe.unet), tiny.controlnet(pipe.unet)
    assert find_denoisers(WithNets()) == {"unet": pipe.unet}
    WithNets.controlnet = one
    assert find_denoisers(WithNets()) == {"unet": pipe.unet, "controlnet": one}
    WithNets.controlnet = [one, one]
    assert find_denoisers(WithNets()) == {"unet": pipe.unet, "controlnet": one}, "one net for two pictures"
    WithNets.controlnet = [one, two]
    assert find_denoisers(WithNets()) == {"unet": pipe.unet, "controlnet.0": one, "controlnet.1": two}


@pytest.mark.parametrize("other", [None, 3, "sd", nn.Linear(2, 2), object()])
def test_what_has_no_unet_is_refused(other: Any) -> None:
    assert not is_denoiser(other)
    with pytest.raises(ElfattError, match=f"{type(other).__name__} (has no UNet|cannot be patched)"):
        find_denoisers(other)


def test_a_vae_and_a_text_encoder_are_no_denoisers(pipe: Any) -> None:
    assert is_denoiser(pipe.unet)
    assert not is_denoiser(pipe.vae)
    assert not is_denoiser(pipe.vae.encoder.mid_block)
    assert not is_denoiser(pipe.text_encoder)


def test_unwrap(unet: Any) -> None:
    compiled = torch.compile(unet, backend="eager")
    assert unwrap(compiled) is unet
    assert unwrap(unet) is unet
    assert is_denoiser(compiled)
    assert find_layers(compiled) == find_layers(unet)


FACTORS = [1, 1, 2, 4, 8]
SELECTED = [
    ({}, [1, 1]),
    ({"levels": 2}, [1, 1, 2]),
    ({"levels": 9}, [1, 1, 2, 4, 8]),
    ({"max_downsample": 1, "levels": 3}, [1, 1]),
    ({"max_downsample": 4}, [1, 1, 2, 4]),
]


@pytest.mark.parametrize(("settings", "expected"), SELECTED)
def test_selection(unet: Any, settings: dict[str, Any], expected: list[int]) -> None:
    attention = find_layers(unet)[0].attention
    layers = [SelfAttention(str(place), attention, None, factor) for place, factor in enumerate(FACTORS)]
    chosen = select_layers(layers, PatchConfig("any", **settings), sorted(set(FACTORS)))
    assert [layer.downsample for layer in chosen] == expected


def test_levels_count_from_the_finest_that_has_self_attention(unet: Any) -> None:
    attention = find_layers(unet)[0].attention
    layers = [SelfAttention("a", attention, None, 2), SelfAttention("b", attention, None, 4)]
    assert [layer.name for layer in select_layers(layers, PatchConfig("any"), [2, 4])] == ["a"]
    assert select_layers(layers, PatchConfig("any", max_downsample=1), [2, 4]) == []
    assert select_layers([], PatchConfig("any"), []) == []


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # of diffusers 0.32.1's filters
@pytest.mark.parametrize("size", [(32, 32), (25, 27), (33, 17)])
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
def test_grids_of_other_unets_are_those_that_arrive(down: str, up: str, more: Any, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    skips = "Skip" in down
    plain = ("SkipDownBlock2D", "SkipUpBlock2D") if skips else ("DownBlock2D", "UpBlock2D")
    unet = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        attention_head_dim=8,
        down_block_types=(plain[0], down, plain[0]),
        up_block_types=(plain[1], up, plain[1]),
        **more,
    ).eval()
    layers, seen = find_layers(unet), {}
    for layer in layers:
        layer.attention.register_forward_pre_hook(
            lambda _, given, name=layer.name: seen.__setitem__(name, tuple(given[0].shape[-2:]))
        )
    try:
        with torch.no_grad():
            unet(torch.randn(1, 3, *size), 1.0)
    except RuntimeError:
        pytest.skip("these blocks do not take sides that are not whole multiples")
    assert {layer.name: layer.grid(Grid.image(*size))[1:] for layer in layers} == seen


def test_a_grid_that_is_not_what_it_was_thought_to_be_is_named() -> None:
    """Of a UNet whose downsampling is not known to round as it does."""
    unet = tiny.unet()
    unet.down_blocks[0].downsamplers[0] = Cropping(unet.down_blocks[0].downsamplers[0])
    elfatt_sd.apply_patch(unet, PatchConfig("all", (Phase(1.0, "sampled", block_size=16),), levels=2))
    said = "3 of 6 patched layers stay exact, .*: it was given 49 tokens in place of 8x8"
    with torch.no_grad(), recorded() as calls, pytest.warns(UserWarning, match=said):
        unet(torch.randn(1, 4, 15, 15), 500, torch.randn(1, 5, tiny.TEXT_WIDTH))
    assert sum(calls.values()) == 3


class Cropping(nn.Module):
    """A downsampler that drops the last row and column of odd sides."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        rows, columns = (side // 2 * 2 for side in x.shape[-2:])
        return self.inner(x[..., :rows, :columns], *args)  # type: ignore[no-any-return]
