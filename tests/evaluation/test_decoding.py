"""Decoding images of every mode; what is no single image of 8 bits is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elfatt_sd.evaluation.sources import decode, is_image


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def first_pixel(content: bytes) -> Any:
    return decode(content).getpixel((0, 0))


@pytest.mark.parametrize(
    ("samples", "dtype", "format"),
    [
        (0.5, np.float32, "TIFF"),
        (40_000, np.uint16, "TIFF"),
        (40_000, np.uint16, "PPM"),
        (40_000, np.uint16, "PNG"),
        (7, np.int32, "TIFF"),
    ],
)
def test_samples_of_more_than_8_bits_are_refused(samples: float, dtype: Any, format: str) -> None:
    with pytest.raises(OSError, match=r"samples of more than 8 bits \(mode .*\); accepted: 8 bits"):
        decode(saved(Image.fromarray(np.full((4, 4), samples, dtype=dtype)), format))


def test_drawings_are_not_handed_to_another_program() -> None:
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    assert not is_image(io.BytesIO(drawing))
    with pytest.raises(OSError, match=r"a drawing \(EPS\), which has no pixels of its own"):
        decode(drawing)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_and_pages_are_refused(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    assert first_pixel(saved(frames[0], format, lossless=True))[1:] == (0, 0)
    with pytest.raises(OSError, match="2 frames or pages; accepted: one image a file"):
        decode(saved(frames[0], format, save_all=True, append_images=frames[1:]))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_images_without_transparency_are_read_as_pytorch_fid_and_clean_fid_do(mode: str) -> None:
    """Both take Pillow's conversion to RGB, which drops what is transparent; here that is laid over white."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    content = saved(Image.fromarray(pixels).convert(mode), "TIFF")
    assert decode(content).tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes()
    clear = saved(Image.new("RGBA", (1, 1), (200, 0, 0, 0)), "PNG")
    assert first_pixel(clear) == (255, 255, 255)


def _jpeg(size: int, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("thumbnail", [b"", _jpeg(16)])
def test_a_jpeg_that_goes_on_as_zeros_is_refused(progressive: bool, thumbnail: bytes) -> None:
    """As a broken download leaves it; the end of a thumbnail is not that of the image."""
    exif = {"exif": b"Exif\0\0" + thumbnail} if thumbnail else {}
    whole = _jpeg(64, progressive=progressive, **exif)
    half = len(whole) * 2 // 3
    assert decode(whole + b"more").size == (64, 64)
    with pytest.raises(OSError, match="truncated"):
        decode(whole[:half] + bytes(len(whole) - half))
