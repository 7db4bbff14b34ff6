"""Kernel distances and their intervals on data whose answer is known."""

from __future__ import annotations

import pytest
import torch
from draws import normal
from torchmetrics.image.kid import poly_mmd

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import statistics as kernel
from elfatt_sd.evaluation.statistics import kernel_distance


def test_kernel_distance_against_torchmetrics_and_the_definition() -> None:
    one, two = normal(30, 6, 21), 0.2 + normal(25, 6, 22)
    kernel = (one @ two.T / 6 + 1) ** 3
    own, other = ((side @ side.T / 6 + 1) ** 3 for side in (one, two))
    within = [(matrix.sum() - matrix.trace()) / (len(matrix) * (len(matrix) - 1)) for matrix in (own, other)]
    found = kernel_distance(one, two, range(30))
    assert found.value == pytest.approx((within[0] + within[1] - 2 * kernel.mean()).item(), rel=1e-12)
    assert kernel_distance(one[:25], two, range(25)).value == pytest.approx(poly_mmd(one[:25], two).item(), rel=1e-9)


def test_kernel_distance_is_unbiased_and_its_interval_covers() -> None:
    reference = normal(400, 5, 23)
    found = [kernel_distance(normal(60, 5, 100 + seed), reference, range(60)) for seed in range(150)]
    values = torch.tensor([estimate.value for estimate in found])
    assert abs(values.mean()) < 4 * values.std() / 150**0.5 + 0.01  # the reference's own noise remains
    covered = sum(low <= values.mean() <= high for low, high in (each.interval() for each in found))  # type: ignore[misc]
    assert covered >= 128


def test_many_images_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is the mean of those of the blocks; every image moves it as far as it moves its own block."""
    images, reference = normal(300, 5, 24), 0.5 + normal(280, 5, 25)
    whole = kernel_distance(images, reference, range(300))
    monkeypatch.setattr(kernel, "KERNEL_SAMPLE", 100)
    parts = [kernel_distance(images[start::3], reference, range(100)) for start in range(3)]
    found = kernel_distance(images, reference, range(300))
    assert found.value == pytest.approx(sum(part.value for part in parts) / 3)
    assert found.value == pytest.approx(whole.value, rel=0.05)
    error = whole.standard_error()
    assert error is not None
    assert found.standard_error() == pytest.approx(error, rel=0.1)


def test_pieces_of_the_kernel_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images, reference = normal(70, 5, 26), normal(50, 5, 27)
    whole = kernel_distance(images, reference, range(70))
    monkeypatch.setattr(kernel, "ROWS", 16)
    pieces = kernel_distance(images, reference, range(70))
    assert pieces.value == pytest.approx(whole.value, rel=1e-12)
    torch.testing.assert_close(pieces.moves, whole.moves, rtol=1e-10, atol=1e-14)


def test_one_image_has_no_kernel_distance() -> None:
    with pytest.raises(ElfattError, match="at least 2"):
        kernel_distance(normal(1, 5, 28), normal(20, 5, 29), [0])
