"""SSIM held against torchmetrics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from elfatt_sd.evaluation.score import structural_similarity


def pictures(seed: int, *shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 255).round().double()


@pytest.mark.parametrize("shape", [(3, 3, 24, 40), (1, 3, 6, 7), (2, 1, 33, 16)], ids=str)
@pytest.mark.parametrize("noise", [1.0, 30.0, 255.0])
def test_values_are_those_of_torchmetrics(shape: tuple[int, ...], noise: float) -> None:
    first = pictures(0, *shape)
    first[..., : shape[-1] // 2] = 200  # flat in one half
    second = (first + noise / 255 * pictures(1, *shape)).clamp(max=255).round()
    expected = structural_similarity_index_measure(first, second, data_range=255.0, reduction="none")
    ours = structural_similarity(first, second, data_range=255.0)
    assert ours.shape == shape[:1]
    torch.testing.assert_close(ours, torch.as_tensor(expected).reshape(-1), rtol=0, atol=1e-10)


def test_unlike_pictures_are_less_alike_than_like_ones() -> None:
    first, other = pictures(0, 1, 3, 32, 32), pictures(1, 1, 3, 32, 32)
    near = structural_similarity(first, (first + 3).clamp(max=255), 255.0)
    assert structural_similarity(first, other, 255.0) < 0.1 < 0.9 < near < 1


def test_equal_flat_pictures_are_alike() -> None:
    for level in (0.0, 17.0, 255.0):
        flat = torch.full((1, 3, 16, 16), level, dtype=torch.float64)
        torch.testing.assert_close(structural_similarity(flat, flat, 255.0), torch.ones(1, dtype=torch.float64))
