"""The labelled picture and PSNR."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elfatt_sd.drawing.pictures import PAPER, fault_of, psnr, side_by_side


def noise(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def find(part: Image.Image, whole: Image.Image) -> tuple[int, int]:
    """Where a picture stands in another one, unchanged, as (left, top)."""
    small, large = np.asarray(part), np.asarray(whole)
    for top in range(large.shape[0] - small.shape[0] + 1):
        for left in range(large.shape[1] - small.shape[1] + 1):
            if np.array_equal(large[top : top + small.shape[0], left : left + small.shape[1]], small):
                return left, top
    raise AssertionError("not found")


def test_pictures_stand_side_by_side_unchanged_and_in_order() -> None:
    first, second = noise(0), noise(1)
    sheet = side_by_side([first, second], [("sd", "1 s"), ("elfatt", "0.5 s")])
    (left, top), (right, same_top) = find(first, sheet), find(second, sheet)
    assert top == same_top
    assert right >= left + first.width


def test_every_caption_and_the_title_leave_ink() -> None:
    pictures = [Image.new("RGB", (200, 100), PAPER)] * 2
    empty = side_by_side(pictures, [("", ""), ("", "")])
    assert fault_of(np.asarray(empty, dtype=float)).startswith("is of one colour")
    captioned = np.asarray(side_by_side(pictures, [("sd", ""), ("", "2.0 s")])).min(axis=2) < 200
    assert captioned[100:, :208].any() and captioned[100:, 224:].any()
    assert not captioned[:100].any()
    titled = side_by_side(pictures, [("", ""), ("", "")], title="a prompt")
    assert titled.height > empty.height
    assert (np.asarray(titled)[:40] < 200).any()


def test_long_texts_stay_inside_their_column() -> None:
    pictures = [Image.new("RGB", (120, 60), PAPER)] * 2
    sheet = np.asarray(side_by_side(pictures, [("w" * 200, "i" * 500), ("", "")], title="word " * 60)).min(axis=2)
    column_two = sheet[-30:, 16 + 120 + 4 :]
    assert (column_two == 255).all()
    assert (sheet[:, -10:] == 255).all()


def test_a_long_title_takes_two_lines() -> None:
    pictures = [Image.new("RGB", (120, 60), PAPER)] * 2
    two, many = (side_by_side(pictures, [("", ""), ("", "")], title="word " * words) for words in (9, 500))
    assert two.height == many.height


def test_pictures_stand_in_rows() -> None:
    pictures = [noise(seed) for seed in range(3)]
    sheet = side_by_side(pictures, [("a", "b")] * 3, columns=2)
    (left, top), (right, beside), (under, below) = (find(picture, sheet) for picture in pictures)
    assert (top, left) == (beside, under)
    assert right > left and below > top + 48


def test_captions_must_match() -> None:
    with pytest.raises(ValueError, match="2 images and 1 captions"):
        side_by_side([noise(0), noise(1)], [("a", "b")])


def test_psnr_of_a_known_error() -> None:
    grey, lighter = Image.new("RGB", (8, 8), (100, 100, 100)), Image.new("RGB", (8, 8), (110, 110, 110))
    assert psnr(grey, lighter) == pytest.approx(20 * math.log10(255 / 10))
    assert psnr(grey, grey) == math.inf
    with pytest.raises(ValueError, match="equal sizes"):
        psnr(grey, Image.new("RGB", (8, 9)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda pixels: pixels * 0, "is black: an overflow"),
        (lambda pixels: pixels * 0 + 0.4, "is black"),
        (lambda pixels: pixels * 0 + [7, 8, 9], "is of one colour"),
        (lambda pixels: np.where(pixels == pixels.max(), math.nan, pixels), "is not finite"),
        (lambda pixels: np.where(pixels == pixels.max(), math.inf, pixels), "is not finite"),
        (lambda pixels: pixels, ""),
    ],
)
def test_what_is_no_image_is_said(change: Any, says: str) -> None:
    pixels = np.random.default_rng(0).uniform(0, 255, (2, 4, 4, 3))
    found = fault_of(change(pixels))
    assert found.startswith(says) and bool(found) == bool(says)


def test_the_safety_checker_is_named() -> None:
    assert fault_of(np.zeros((1, 4, 4, 3)), flagged=True) == "is black: the safety checker"
