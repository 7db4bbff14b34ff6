"""`tome` is what tomesd 0.1.3 computes, through a whole UNet with the layout of SD 1.5."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import tomesd
import torch
from support import tiny_pipelines as tiny

import elfatt_sd
from elfatt_sd.methods import Draws

# A UNet of SD 1.5's layout, but narrower and with fewer heads and layers, so that CI has time for it.
NARROW: dict[str, Any] = {
    "block_out_channels": (32, 64, 64, 64),
    "layers_per_block": 1,
    "sample_size": 64,
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "attention_head_dim": 2,
}
SD15: dict[str, Any] = {
    **NARROW,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "attention_head_dim": 8,
}
GRIDS = [(32, 32), (48, 32), (33, 25)]
LARGE = [(64, 64), (96, 64), (65, 49)]  # where a merge that a near-tie flips is a small part of the output
RATIOS = [0.1, 0.25, 0.5, 0.75]
PAIRS = [(size, ratio, (2, 4)[(i + j) % 2]) for i, size in enumerate(GRIDS) for j, ratio in enumerate(RATIOS)]


@pytest.fixture(scope="module")
def unet() -> Any:
    """In float64, where two similarities never nearly tie: no merge may differ."""
    return tiny.unet(**NARROW).double()


@pytest.fixture(scope="module")
def float32_unet() -> Any:
    """In float32; on the finest level it attends in the last block only, so that a flipped merge stays local."""
    late = {"down_block_types": ("DownBlock2D", *NARROW["down_block_types"][1:]), "block_out_channels": (64,) * 4}
    return tiny.unet(**{**NARROW, **late})


def run(unet: Any, size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(2, 4, *size, generator=generator).to(unet.dtype)
    text = torch.randn(2, 7, tiny.TEXT_WIDTH, generator=generator).to(unet.dtype)
    with torch.no_grad():
        return unet(sample, 501, text).sample


def peer(unet: Any, size: tuple[int, int], **settings: Any) -> torch.Tensor:
    tomesd.apply_patch(unet, **settings)
    try:
        return run(unet, size)
    finally:
        tomesd.remove_patch(unet)


def ours(unet: Any, size: tuple[int, int], **settings: Any) -> torch.Tensor:
    with elfatt_sd.patched(unet, "tome", **settings):
        return run(unet, size)


def check(own: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5; where a float32 near-tie flips a single merge, 99 % of the output within 1e-4."""
    difference = (own - expected).abs()
    if own.dtype == torch.float64 or difference.max() <= 1e-5:
        assert difference.max() <= 1e-5
        return
    within = (difference < 1e-4).double().mean().item()
    assert within >= 0.99, f"largest difference {difference.max():.1e}, {within:.2%} within 1e-4"


@pytest.mark.parametrize(("size", "ratio", "stride"), PAIRS)
def test_fixed_destinations(unet: Any, size: tuple[int, int], ratio: float, stride: int) -> None:
    expected = peer(unet, size, ratio=ratio, sx=stride, sy=stride, use_rand=False)
    check(ours(unet, size, ratio=ratio, stride=stride, use_rand=False), expected)


@pytest.mark.parametrize(("size", "ratio", "stride"), [(LARGE[0], 0.5, 2), (LARGE[1], 0.25, 4), (LARGE[2], 0.75, 2)])
def test_fixed_destinations_in_float32(float32_unet: Any, size: tuple[int, int], ratio: float, stride: int) -> None:
    expected = peer(float32_unet, size, ratio=ratio, sx=stride, sy=stride, use_rand=False)
    check(ours(float32_unet, size, ratio=ratio, stride=stride, use_rand=False), expected)


@pytest.mark.parametrize(
    ("name", "layers", "size", "stride"),
    [
        *(("unet", 3, size, stride) for size, stride in zip(GRIDS, (2, 4, 2), strict=True)),
        ("float32_unet", 2, LARGE[2], 4),
    ],
)
def test_the_same_random_destinations(
    request: pytest.FixtureRequest,
    name: str,
    layers: int,
    size: tuple[int, int],
    stride: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unet = request.getfixturevalue(name)
    drawn: list[torch.Tensor] = []
    randint: Callable[..., torch.Tensor] = torch.randint

    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        drawn.append(randint(*args, **kwargs))
        return drawn[-1]

    with monkeypatch.context() as context:
        context.setattr(torch, "randint", recording)
        expected = peer(unet, size, ratio=0.5, sx=stride, sy=stride)
    assert len(drawn) == layers  # of the finest level, in the order of the calls

    def given(self: Draws, what: str, count: int) -> torch.Tensor:
        return (drawn.pop(0).flatten() + 0.5) / stride**2

    monkeypatch.setattr(Draws, "uniform", given)
    check(ours(unet, size, ratio=0.5, stride=stride), expected)


@pytest.mark.skipif("ELFATT_SD_FULL_WIDTH" not in os.environ, reason="slow: run it with ELFATT_SD_FULL_WIDTH=1")
@pytest.mark.parametrize("size", LARGE, ids=str)
def test_the_full_width_of_sd15_in_float32(size: tuple[int, int]) -> None:
    """860 million random weights; all five layers of the finest level."""
    unet = tiny.unet(**SD15)
    expected = peer(unet, size, ratio=0.5, use_rand=False)
    check(ours(unet, size, ratio=0.5, use_rand=False), expected)


def test_merging_does_something(unet: Any) -> None:
    assert (peer(unet, GRIDS[0], ratio=0.1, use_rand=False) - run(unet, GRIDS[0])).abs().max() > 1e-4


def test_deeper_levels_as_tomesd_counts_them(unet: Any) -> None:
    expected = peer(unet, (32, 32), ratio=0.5, max_downsample=4, use_rand=False)
    check(ours(unet, (32, 32), ratio=0.5, max_downsample=4, use_rand=False), expected)
